"""Puts the figures that compare.py measured into the README, as tables and as a plot.

    python tests/benchmarks/report.py tests/benchmarks/figures.json README.md notebooks/benchmark.png
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "notebooks"))

PAIRS = "single", "dp", "tp", "afab", "1f1b", "cp", "dp tp", "dp tp pp"


def span(values):
    return "{:.2f} ({:.2f} to {:.2f})".format(*values) if values else ""


def layout(row):
    words = row["flags"].replace("--", "").split()[2:]  # behind --grad_acc_steps
    return " ".join(words) or "one process"


def tables(figures):
    """Returns the README's part as markdown."""
    lines = ["| step | layout | rival | times as fast as the rival | times as fast as one process | "
             "expected | peak memory, MiB (formula) |", "|---|---|---|---|---|---|---|"]
    for name in PAIRS:
        row, memory = figures[name], figures["memory"][name]
        planned, measured = max(memory, key=lambda pair: pair[1])
        allowed = f"{row['allowed_over_single'][0]:.2f}" if "allowed_over_single" in row else ""
        lines.append(f"| {int(row['step'][4:])} | {layout(row)} | {row['rival']} | "
                     f"{span(row['over_rival'])} | {span(row.get('over_single'))} | {allowed} | "
                     f"{measured / 2**20:.1f} ({planned / 2**20:.1f}) |")
    lines += ["", "| processes | seconds from `torchrun` to the end of the first training step | "
              "torch and process groups alone | ratio |", "|---|---|---|---|"]
    lines += [f"| {nproc} | {row['step']:.1f} | {row['least']:.1f} | {row['ratio']:.2f} |"
              for nproc, row in figures["startup"].items()]
    lines += ["", f"Measured on {figures['date']} by `{figures['command']}` on {figures['cores']} shared "
              f"{figures['machine']} cores under {figures['system']}, torch {figures['torch']}, "
              f"{figures['single']['device']}; medians and quartiles of {figures['single']['rounds']} rounds."]
    return "\n".join(lines)


def draw(figures):
    """Returns a figure: left, beside the rivals; right, beside one process with all threads."""
    from figures import BLUE, GREEN, ORANGE, plt
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.2), sharey=True)
    rows = [figures[name] for name in PAIRS]
    labels = [f"step {int(row['step'][4:])}: {name}" for name, row in zip(PAIRS, rows)]
    for ax, key in zip(axes, ("over_rival", "over_single")):
        for place, row in enumerate(rows):
            if key in row:
                median, low, high = row[key]
                ax.plot([low, high], [place, place], color=BLUE, linewidth=2)
                ax.plot(median, place, "o", color=BLUE, label="measured, with quartiles")
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set_xlim(left=0)
        ax.grid(axis="x", color="0.9")
    for key, marker, colour, label in (
            ("apart_over_single", "s", GREEN, "processes that never talk"),
            ("allowed_over_single", "D", ORANGE, "with the layout's messages or idle share")):
        for place, row in enumerate(rows):
            if key in row:
                axes[1].plot(row[key][0], place, marker, color=colour, fillstyle="none", label=label)
    axes[0].set(title="times as fast as PyTorch's or transformers' own", yticks=range(len(rows)),
                yticklabels=labels)
    axes[0].invert_yaxis()
    axes[1].set(title="times as fast as one process with all cores")
    handles, names = axes[1].get_legend_handles_labels()
    unique = dict(zip(names, handles))
    figure.legend(unique.values(), unique, loc="outside lower center", ncols=3)
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser("report.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("readme", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args(argv)
    figures = json.loads(args.figures.read_text())
    part = f"<!-- benchmark -->\n{tables(figures)}\n<!-- /benchmark -->"
    text = args.readme.read_text(encoding="utf-8")
    text = re.sub("<!-- benchmark -->.*<!-- /benchmark -->", lambda _: part, text, flags=re.DOTALL)
    args.readme.write_text(text, encoding="utf-8")
    draw(figures).savefig(args.image, dpi=130)


if __name__ == "__main__":
    main()
