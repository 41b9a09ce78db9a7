"""The figures of the companion notebooks, all in one manner.

Colour alone never carries a meaning: each colour has a hatch, a marker or a line style of its own. The
colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

import io
import itertools

import matplotlib.pyplot as plt
import PIL.Image
from IPython.display import Image, Markdown, display
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

plt.rcParams.update({
    "figure.constrained_layout.use": True, "figure.dpi": 110, "font.size": 9, "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.5, "legend.frameon": False,
})

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
LOOKS = {  # colour and hatch of what looks the same in all notebooks
    "forward": (SKY, ""), "backward": (ORANGE, "////"), "all_reduce": (GREEN, "...."),
    "all_gather": (PURPLE, "xxxx"), "send": (BLUE, "||||"), "recv": (RED, "----"),
    "optimizer": (YELLOW, "++++"),
    "weights": (SKY, ""), "gradients": (ORANGE, "////"), "optimizer state": (YELLOW, "...."),
    "activations": (GREEN, "xxxx"),
}
OTHER_LOOKS = [(PURPLE, "\\\\\\\\"), (RED, "----"), (BLUE, "||||"), ("0.85", "oo")]
LINES = list(zip((BLUE, RED, GREEN, PURPLE, ORANGE, BLACK, SKY),
                 ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3))), "osv^DPX"))


def looks(names):
    """Returns {name: how matplotlib fills it}."""
    others = itertools.cycle(OTHER_LOOKS)
    filled = {name: LOOKS.get(name) or next(others) for name in names}
    return {name: {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
            for name, (colour, hatch) in filled.items()}


def show(figure, caption):
    """Shows a figure with a caption that says what to see; screen readers get it too."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full)
    plt.close(figure)
    PIL.Image.open(full).convert("RGB").quantize(64).save(small, "png", optimize=True)  # a third of the bytes
    display(Image(small.getvalue(), alt=caption.replace("*", "").replace("`", "")))
    display(Markdown(f"*{caption}*"))


def draw_curves(runs):
    """Loss and gradient norm of several runs, and their relative difference to the first one.

    runs: {label: Run}. A difference of 0 is drawn at 1e-17.
    """
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3))
    reference = next(iter(runs.values()))
    for (label, run), (colour, line, marker) in zip(runs.items(), itertools.cycle(LINES)):
        steps = run.series("step")
        wide = {"linewidth": 5, "color": "0.75"} if run is reference else {"color": colour, "markersize": 4}
        style = {"linestyle": line, "marker": "" if run is reference else marker, "markerfacecolor": "white",
                 "markevery": max(1, len(steps) // 10), **wide}
        for key, ax in zip(("loss", "grad_norm"), axes):
            ax.plot(steps, run.series(key), label=label, **style)
            if run is not reference:
                pairs = zip(run.series(key), reference.series(key))
                style_of_key = {**style, "linestyle": "-" if key == "loss" else ":",
                                "markerfacecolor": "white" if key == "loss" else colour}
                axes[2].semilogy(steps, [max(abs(value / right - 1), 1e-17) for value, right in pairs],
                                 label=f"{label}: {key.replace('_', ' ')}", **style_of_key)
    for ax, title, unit in zip(axes, ("loss", "gradient norm", "relative difference to " + next(iter(runs))),
                               ("nats per token", "", "")):
        ax.set(title=title, xlabel="training step", ylabel=unit)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.legend(fontsize=7)
    axes[2].set_ylim(3e-18, 1e2)
    return figure


def draw_timeline(lanes, title="", unit="ms"):
    """Who does what when. Time starts with the first span.

    lanes: {label: spans}, from top to bottom. A number at the end of a span's name is written into it. unit:
    ms, or what one second stands for if the spans are made up.
    """
    figure, ax = plt.subplots(figsize=(9.5, 0.9 + 0.42 * len(lanes)))
    spans = [span for lane in lanes.values() for span in lane]
    start, scale = min(span.start for span in spans), 1e3 if unit == "ms" else 1
    width = max(span.end for span in spans) - start
    styles = looks(dict.fromkeys(span.kind for span in spans))
    for y, lane in enumerate(lanes.values()):
        for span in lane:
            left, number = (span.start - start) * scale, span.name.split()[-1]
            ax.broken_barh([(left, span.seconds * scale)], (y - 0.4, 0.8), **styles[span.kind])
            if number.isdigit() and span.seconds > 0.012 * len(number) * width:
                ax.text(left + span.seconds * scale / 2, y, number, ha="center", va="center", fontsize=7.5,
                        bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "linewidth": 0})
    ax.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel=f"time ({unit})", title=title,
           xlim=(0, width * scale))
    ax.invert_yaxis()
    ax.legend(handles=[Patch(label=kind.replace("_", "-"), **style) for kind, style in styles.items()],
              loc="upper left", bbox_to_anchor=(1, 1), handleheight=1.6)
    return figure


def draw_memory(runs, step=3):
    """What is allocated in a training step over what was at its start. runs: {label: Trace}."""
    figure, ax = plt.subplots(figsize=(8, 2.8))
    for (label, trace), (colour, line, marker) in zip(runs.items(), LINES):
        times, sizes = trace.memory(step)
        ax.plot([1e3 * time for time in times], [size / 2**20 for size in sizes], label=label, color=colour,
                linestyle=line, marker=marker, markevery=max(1, len(times) // 8), markersize=4)
    ax.set(xlabel="time (ms)", ylabel="allocated (MiB)")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_stacked(rows, unit, form="{:,.2f}"):
    """Bars of several parts each. rows: {label: {part: number}}; form: how a number is written."""
    figure, ax = plt.subplots(figsize=(9.5, 0.9 + 0.42 * len(rows)))
    styles = looks(dict.fromkeys(part for row in rows.values() for part in row))
    widest = max(sum(row.values()) for row in rows.values())
    for y, row in enumerate(rows.values()):
        left = 0
        for part, value in row.items():
            ax.barh(y, value, left=left, height=0.7, **styles[part])
            if value > 0.06 * widest:
                ax.text(left + value / 2, y, form.format(value), ha="center", va="center", fontsize=7.5,
                        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0})
            left += value
    ax.set(yticks=range(len(rows)), yticklabels=rows, xlabel=unit)
    ax.invert_yaxis()
    ax.legend(handles=[Patch(label=part, **style) for part, style in styles.items()],
              loc="upper left", bbox_to_anchor=(1, 1), handleheight=1.6)
    return figure


def draw_holdings(cuts, ranks):
    """Who holds what. A box stands for all there is of a kind; what the rank holds of it is filled.

    cuts: {kind: (number of rows, number of columns)} into which the kind's boxes are cut.
    ranks: {label: {kind: [(row, column), ...] that the rank holds}}.
    """
    figure, axes = plt.subplots(len(ranks), len(cuts), squeeze=False,
                                figsize=(1.0 + 1.7 * len(cuts), 0.5 + 0.85 * len(ranks)))
    styles = looks(cuts)
    for ax, kind in zip(axes[0], cuts):
        ax.set_title(kind)
    for (label, held), row in zip(ranks.items(), axes):
        for (kind, (height, width)), ax in zip(cuts.items(), row):
            for y, x in itertools.product(range(height), range(width)):
                style = styles[kind] if (y, x) in held[kind] else {"facecolor": "white", "edgecolor": "0.6",
                                                                  "linestyle": ":"}
                ax.add_patch(Rectangle((x / width, y / height), 1 / width, 1 / height, **style))
            ax.set(xlim=(-0.02, 1.02), ylim=(1.04, -0.04), xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        row[0].set_ylabel(label, rotation=0, ha="right", va="center")
    return figure


def draw_mesh(sizes):
    """The ranks as a mesh. sizes: {axis: size}, up to four axes from the slowest to the fastest.

    The last two axes make a block, the last one to the right; the two before place the blocks likewise.
    """
    names, lengths = list(sizes), list(sizes.values())
    names, lengths = ["", "", "", ""][len(names):] + names, [1] * (4 - len(lengths)) + lengths
    figure, axes = plt.subplots(*lengths[:2], squeeze=False,
                                figsize=(0.8 + lengths[1] * (0.6 + 0.62 * lengths[3]),
                                         0.5 + lengths[0] * (0.5 + 0.5 * lengths[2])))
    for i, j, k, n in itertools.product(*map(range, lengths)):
        ax, rank = axes[i][j], ((i * lengths[1] + j) * lengths[2] + k) * lengths[3] + n
        ax.add_patch(Rectangle((n, k), 0.9, 0.85, **looks(["weights"])["weights"]))
        ax.text(n + 0.45, k + 0.42, rank, ha="center", va="center")
        ax.set(xlim=(-0.1, lengths[3]), ylim=(lengths[2], -0.1), xticks=[n + 0.45 for n in range(lengths[3])],
               yticks=[k + 0.42 for k in range(lengths[2])])
        ax.set_xticklabels([f"{names[3]} {n}" for n in range(lengths[3])])
        ax.set_yticklabels([f"{names[2]} {k}" if names[2] else "" for k in range(lengths[2])])
        ax.set_title(", ".join(f"{name} {place}" for name, place in zip(names, (i, j)) if name))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return figure
