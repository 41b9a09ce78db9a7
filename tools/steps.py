"""The steps: their files and lines, and how many lines each changes of the one before.

    python tools/steps.py                        a table
    python tools/steps.py --markdown             the same for the README
    python tools/steps.py --update README.md     puts it there, between <!-- steps --> and <!-- /steps -->
"""

import argparse
import difflib
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = {  # what each step adds
    "step01": "Llama, data, optimizer and training loop on one device",
    "step02": "replicas that share a batch: gradients all-reduced in buckets during backward",
    "step03": "every matrix cut across processes: two all-reduces a layer each way",
    "step04": "layers cut into stages: all micro-batches forward, then all backward",
    "step05": "one forward, one backward: the same pipeline with less memory",
    "step06": "sequences cut across processes: ring attention",
    "step07": "all four together, with checkpoints and the tools around a real run",
}
VIDEOS = {  # parts of the picotron series; the pipeline, context and 4D have none
    "step01": "[part 1](https://www.youtube.com/watch?v=u2VSwDDpaBM)",
    "step02": "[part 3](https://www.youtube.com/watch?v=k8EpWveM_t4)",
    "step03": "[part 2](https://www.youtube.com/watch?v=qUMPaSWi5HI)",
}
MARKERS = "<!-- steps -->\n", "<!-- /steps -->\n"


def folders(root=ROOT):
    """Returns {"step01": its folder, ...} of the steps that are there."""
    found = {step: sorted(Path(root).glob(f"{step}_*/")) for step in STEPS}
    return {step: paths[0] for step, paths in found.items() if paths}


def sources(folder):
    """Returns {path: text} of the folder's Python files."""
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*.py"))}


def changed_lines(old, new):
    """How many lines a diff takes away and adds. A line that is changed counts as both."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in itertools.islice(lines, 2, None))


def changes(before, after):
    """Returns {file: changed lines} between two folders, of the files that differ."""
    old, new = sources(before), sources(after)
    changed = {name: changed_lines(old.get(name, ""), new.get(name, "")) for name in sorted({*old, *new})}
    return {name: count for name, count in changed.items() if count}


def rows(root=ROOT):
    """Yields (step, folder, number of files, number of lines, {file: changed lines}) of each step."""
    before = None
    for step, folder in folders(root).items():
        texts = sources(folder)
        lines = sum(len(text.splitlines()) for text in texts.values())
        yield step, folder.name, len(texts), lines, changes(before, folder) if before else {}
        before = folder


def table(root=ROOT):
    lines = [f"{'step':22}  files  lines  changed"]
    for _, folder, files, length, changed in rows(root):
        lines.append(f"{folder:22}  {files:5}  {length:5,}  {sum(changed.values()) or '':7}")
        lines += [f"{'':30}  {count:14}  {name}" for name, count in changed.items()]
    return "\n".join(lines) + "\n"


def markdown(root=ROOT):
    titles = "", "folder", "what it adds", "notebook", "video", "files", "lines", "changed lines"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for step, folder, files, length, changed in rows(root):
        details = ", ".join(f"{name.removesuffix('.py')} {count}" for name, count in changed.items())
        total = f"{sum(changed.values())}: {details}" if changed else ""
        notebook = f"[{folder[4:6]}](notebooks/{folder[4:]}.ipynb)"
        cells = (int(step[4:]), f"[{folder}]({folder})", STEPS[step], notebook, VIDEOS.get(step, ""), files,
                 f"{length:,}", total)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def update(text, root=ROOT):
    """Returns the text with a new table between the markers, or None if it has no such place."""
    start, end = MARKERS
    pattern = re.compile(f"(?<={start}).*?(?={end})", re.DOTALL)
    return pattern.sub(lambda _: markdown(root), text, count=1) if pattern.search(text) else None


def main(argv=None):
    parser = argparse.ArgumentParser("steps.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--update", type=Path, metavar="FILE", help="replace the table in this file")
    args = parser.parse_args(argv)
    if not args.update:
        print(markdown() if args.markdown else table(), end="")
        return
    text = update(args.update.read_text(encoding="utf-8")) if args.update.is_file() else None
    if text is None:
        markers = " and ".join(marker.strip() for marker in MARKERS)
        parser.exit(2, f"steps.py: error: no file {args.update} with the lines {markers}\n")
    args.update.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
