"""What the companion notebooks share: run a step, read its metrics and traces, show what it changes, check.

`import lesson` also makes the modules in tests/ importable: the planted mistakes (mistakes.py), the shared
test (same_run.py) and its diagnosis (diagnose.py). What draws is in figures.py.
"""

import ast
import difflib
import inspect
import json
import math
import shutil
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from IPython.display import Markdown, display

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import launch  # noqa: E402  (after the path is set)
import same_run  # noqa: E402
from diagnose import diagnose  # noqa: E402
from mistakes import MISTAKES, plant  # noqa: E402
from observe import main as observed  # noqa: E402


# Running a step

@dataclass
class Run(launch.Run):
    """A run that ended well. If it was observed: a Trace and a dict of bytes held for each rank."""

    traces: list = field(default_factory=list)
    holds: list = field(default_factory=list)


def torchrun(*argv, nproc, timeout):
    """Runs a Python program in nproc processes. Returns a launch.Run, whichever way it ended."""
    return launch.command(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", nproc,
                          "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *argv, timeout=timeout)


def run(program, *argv, nproc=1, observe=False, warm=False, timeout=120):
    """Runs a program of this repository, such as "step02_data_parallel/train.py", on the CPU.

    Prints the command that it runs. observe: with observe.py around the program, for traces and for what each
    rank holds. warm: also observed, but in processes forked from one that has loaded torch, as in the tests;
    for many processes. Returns a Run; raises AssertionError with all output if it doesn't end well.
    """
    argv = [*map(str, argv), "--use_cpu"]
    print(f"$ torchrun --nproc_per_node {nproc} {program} {' '.join(argv)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [ROOT / program, *argv, "--metrics_file", folder / "metrics.jsonl"]
        if observe or warm:
            command = [folder, *command, "--profile_dir", folder]
        if warm:
            ended = launch.fork(observed, *map(str, command), nproc=nproc, timeout=timeout).check()
        else:
            observer = [ROOT / "notebooks/observe.py"] if observe else []
            ended = torchrun(*observer, *command, nproc=nproc, timeout=timeout).check()
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ranks = range(nproc) if observe or warm else []
        return Run(ended.statuses, ended.output, metrics,
                   traces=[Trace(folder / f"rank{rank}.json") for rank in ranks],
                   holds=[json.loads((folder / f"holds{rank}.json").read_text()) for rank in ranks])


def run_source(source, nproc, timeout=60):
    """Runs the source of a small program in nproc processes. Returns a launch.Run, whichever way it ended.

    A function of a notebook can't be sent to other processes, a file can.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(source)
        return torchrun(program, nproc=nproc, timeout=timeout)


def break_it(name, steps=10, hidden=False):
    """Plants a mistake of tests/mistakes.py, shows the edit unless hidden, and runs the shared test on it.

    Returns (run of the broken step, run of the single process, diagnosis).
    """
    mistake = MISTAKES[name]
    if not hidden:
        edit = difflib.ndiff(mistake.old.splitlines(), mistake.new.splitlines())
        show_code("diff", f"`{mistake.file}`, broken on purpose", [line for line in edit if line[0] != "?"])
    layout = replace(mistake.layout, steps=steps)
    with tempfile.TemporaryDirectory() as scratch:
        broken = same_run.run_layout(plant(mistake, scratch), layout)
    return broken, same_run.reference(layout), shared_test(broken, layout)


def transplant(function, file, name, layout):
    """Puts a function in the place of the one of this name in a copy of the layout's step.

    name: "afab", or "Bucket.__init__" for a method; what is decorated stays so. The function sees what that
    file imports and defines. Returns what the shared test says. Raises NotImplementedError if the function
    does.
    """
    source = textwrap.dedent(inspect.getsource(function))
    if "raise NotImplementedError" in source:
        raise NotImplementedError
    step = same_run.step_folder(ROOT, layout.step)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, step.name)
        shutil.copytree(step, copy, ignore=shutil.ignore_patterns("__pycache__"))
        lines = (copy / file).read_text().splitlines()
        node = ast.parse("\n".join(lines))
        for part in name.split("."):
            (node,) = [child for child in node.body if getattr(child, "name", "") == part]
        lines[node.lineno - 1:node.end_lineno] = textwrap.indent(source, " " * node.col_offset).splitlines()
        (copy / file).write_text("\n".join(lines) + "\n")
        return shared_test(same_run.run_layout(copy, layout), layout)


def shared_test(run, layout):
    """What the shared test says of a run in this layout: None if it is the single process's run."""
    return diagnose(run, same_run.reference(layout), layout.axes, layout.num_micro_batches,
                    same_run.TOLERANCES[layout.dtype])


# Reading a trace

BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2}


@dataclass(frozen=True)
class Span:
    """Something that took time. Its kind is the first word of its name, forward of "forward 3"."""

    name: str
    start: float  # in seconds, by a clock that all processes of a machine share
    seconds: float
    shape: tuple = ()  # of the tensor, if this is a communication
    dtype: str = ""

    @property
    def end(self):
        return self.start + self.seconds

    @property
    def kind(self):
        return self.name.split()[0]


class Trace:
    """One rank's trace of training steps 2 to 4.

    Its spans are those that the trainer labels (forward 0, backward 0, ...), the optimizer's, and the
    communications (all_reduce, all_gather, send, recv).
    """

    def __init__(self, path):
        self.text = Path(path).read_text()

    @cached_property
    def events(self):
        """(spans, allocations), both by time. To take a trace to pieces lasts a second: only if asked for."""
        spans, allocated = [], []
        for event in json.loads(self.text)["traceEvents"]:
            if event.get("cat") == "user_annotation":
                name, args = event["name"].removeprefix("gloo:"), event["args"]
                name = "optimizer" if name.startswith("Optimizer.step") else name
                tensor = (tuple(args["Input Dims"][0]), args["Input type"][0]) if "Input Dims" in args else ()
                spans.append(Span(name, event["ts"] / 1e6, event["dur"] / 1e6, *tensor))
            elif event.get("name") == "[memory]":
                allocated.append((event["ts"] / 1e6, event["args"]["Total Allocated"]))
        return sorted(spans, key=lambda span: span.start), sorted(allocated)

    def training_step(self, step):
        """The span of a whole training step, counted from 1."""
        (span,) = [span for span in self.events[0] if span.name == f"ProfilerStep#{step - 1}"]
        return span

    def spans(self, *kinds, step=3):
        """The spans of these kinds that start in a training step, in the order of their start."""
        window = self.training_step(step)
        return [span for span in self.events[0]
                if span.kind in kinds and window.start <= span.start < window.end]

    def communication(self, step=3, during=()):
        """Returns dicts: what this rank exchanges in a training step, with equal operations counted.

        during: kinds of work, such as forward and backward, by which to tell apart what starts in them.
        """
        work, rows = self.spans(*during, step=step), {}
        for span in self.spans("all_reduce", "all_gather", "broadcast", "send", "recv", step=step):
            phase = next((part.kind for part in work if part.start <= span.start < part.end), "neither")
            key = {"operation": span.kind, **({"during": phase} if during else {}),
                   "shape": str(list(span.shape)), "type": span.dtype}
            size = BYTES[span.dtype] * math.prod(span.shape)
            counts = {"times": 0, "bytes each": size, "bytes in all": 0}
            row = rows.setdefault(tuple(key.values()), {**key, **counts})
            row["times"] += 1
            row["bytes in all"] += size
        return list(rows.values())

    def memory(self, step=3):
        """Returns (seconds, bytes): what is allocated during a training step, over what was at its start."""
        window = self.training_step(step)
        inside = [(time, size) for time, size in self.events[1] if window.start <= time < window.end]
        return [time - window.start for time, _ in inside], [size - inside[0][1] for _, size in inside]


# Schedules of a pipeline

def timetable(schedule, num_stages, num_micro_batches, forward=1, backward=2):
    """Returns each stage's spans as they would be if sending took no time.

    schedule: a function like those in pipeline_parallel.SCHEDULES. forward, backward: how long these last.
    Raises ValueError if the stages wait for one another in a circle.
    """
    orders = [schedule(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    lanes, end, progress = [[] for _ in orders], {}, True
    while progress:
        progress = False
        for stage, (order, lane) in enumerate(zip(orders, lanes)):
            while len(lane) < len(order):
                action, i = order[len(lane)]
                source = stage + (-1 if action == "forward" else 1)
                if 0 <= source < num_stages and (action, i, source) not in end:
                    break
                start = max(end.get((action, i, source), 0), lane[-1].end if lane else 0)
                lane.append(Span(f"{action} {i}", start, forward if action == "forward" else backward))
                end[action, i, stage] = lane[-1].end
                progress = True
    if any(len(lane) < len(order) for order, lane in zip(orders, lanes)):
        raise ValueError("the stages wait for one another in a circle")
    return lanes


def idle_share(lanes):
    """The part of the time, over all lanes, in which no span runs, from the first start to the last end."""
    spans = [span for lane in lanes for span in lane]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.seconds for span in spans) / (seconds * len(lanes))


def most_in_flight(order):
    """The most micro-batches of which forward has begun and backward hasn't ended, over one stage's order."""
    alive = most = 0
    for action, _ in order:
        alive += 1 if action == "forward" else -1
        most = max(most, alive)
    return most


# Showing what a step changes

class Changes:
    """What a step changes, shown piece by piece. finish() raises if a changed line was never shown.

        changes = Changes("step01_single_gpu", "step02_data_parallel")
        changes.hunk("train.py", "import torch.distributed")  # the hunk of a changed file with this line
        changes.piece("mesh.py", "Axis.all_reduce")  # a definition in a new file
        changes.finish()

    old is None for the first step: all its files are new.
    """

    def __init__(self, old, new):
        self.old, self.new = read_folder(old) if old else {}, read_folder(new)
        self.hunks = {file: hunks(self.old.get(file, []), self.new.get(file, []))
                      for file in self.old | self.new}
        self.unseen = {(file, *line) for file, parts in self.hunks.items() for hunk in parts
                       for line in hunk.changed if line[2].strip()}

    def summary(self):
        """Shows which files change, and by how many lines that aren't blank."""
        signs = {}
        for file, sign, *_ in sorted(self.unseen):
            signs.setdefault(file, []).append(sign)
        show_table([{"file": f"`{file}`" + ("" if file in self.old else " (new)"),
                     "lines added": counted.count("+"), "lines removed": counted.count("-")}
                    for file, counted in signs.items()])

    def hunk(self, file, text, within=""):
        """Shows the one hunk of a changed file that has this text in a changed line.

        within: the function or Class.method in which it begins, where the text alone isn't enough.
        """
        found = [(hunk, enclosing(self.new[file], hunk.first)) for hunk in self.hunks[file]
                 if any(text in line for _, _, line in hunk.changed)]
        found = [(hunk, place) for hunk, place in found if within in ("", place)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} hunks of {file} {within} have a changed line with {text!r}")
        ((hunk, place),) = found
        show_code("diff", f"`{file}`, line {hunk.first}" + (f", in `{place}`" if place else ""), hunk.lines)
        self.unseen -= {(file, *line) for line in hunk.changed}

    def piece(self, file, name=""):
        """Shows a part of a new file: a function, class, Class.method or constant.

        Without a name: what stands before the first of them, or all of a file that isn't Python.
        """
        lines, is_python = self.new[file], file.endswith(".py")
        if file in self.old:
            raise ValueError(f"{file} is not new: show its hunks")
        parts = pieces(lines) if is_python else {"": (1, len(lines))}
        if name not in parts:
            raise ValueError(f"{file} has no {name!r}, only {', '.join(parts)}")
        first, last = parts[name]
        while not lines[first - 1].strip():
            first += 1
        show_code("python" if is_python else "", f"`{file}`, lines {first} to {last}", lines[first - 1:last])
        self.unseen -= {(file, "+", n, lines[n - 1]) for n in range(first, last + 1)}

    def finish(self, *left_out):
        """Raises AssertionError if a changed line was never shown. left_out: files left to the reader."""
        for file in left_out:
            assert any(name == file for name, *_ in self.unseen), f"nothing of {file} is left out"
        rest = [f"{file}:{n}: {sign}{line}" for file, sign, n, line in sorted(self.unseen)
                if file not in left_out]
        assert not rest, "never shown:\n" + "\n".join(rest)
        print("shown: every changed line" + (f" outside {', '.join(left_out)}" if left_out else ""))


@dataclass
class Hunk:
    first: int  # the changed lines' place in the new file
    lines: list  # as they are shown, with "+", "-" or " " in front
    changed: list  # (sign, line number, line)


def hunks(old, new):
    """The hunks of a file's difference, with two lines around each."""
    result = []
    for opcodes in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        hunk = Hunk(next(start for tag, _, _, start, _ in opcodes if tag != "equal") + 1, [], [])
        for tag, old_start, old_end, new_start, new_end in opcodes:
            if tag == "equal":
                hunk.lines += [f" {line}" for line in new[new_start:new_end]]
            else:
                hunk.changed += [("-", n + 1, old[n]) for n in range(old_start, old_end)]
                hunk.changed += [("+", n + 1, new[n]) for n in range(new_start, new_end)]
                hunk.lines += [f"-{line}" for line in old[old_start:old_end]]
                hunk.lines += [f"+{line}" for line in new[new_start:new_end]]
        result.append(hunk)
    return result


def read_folder(name):
    """Returns {file: lines} of a step's folder."""
    paths = [path for path in sorted((ROOT / name).rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(ROOT / name).as_posix(): path.read_text(encoding="utf-8").splitlines()
            for path in paths}


def pieces(lines):
    """Returns {name: (first line, last line)} of a Python file. A comment belongs to what follows it."""
    parts, end = {}, 0
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        else:
            head = "" if not any(parts) else lines[node.lineno - 1]  # docstring and imports are one part
            name = getattr(node, "name", head)
        first = end + 1 if name else 1
        end = node.end_lineno
        parts[name] = first, end
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(method, ast.FunctionDef):  # the first method brings the lines above it along
                parts[f"{name}.{method.name}"] = first, method.end_lineno
                first = method.end_lineno + 1
    return parts


def enclosing(lines, number):
    """The function or Class.method in which a line stands, "" if in none or if the file isn't Python."""
    try:
        names = [name for name, (first, last) in pieces(lines).items() if first <= number <= last]
    except SyntaxError:
        return ""
    return names[-1] if names else ""


def show_code(language, title, lines):
    display(Markdown(f"{title}\n\n```{language}\n" + "\n".join(lines) + "\n```"))


def show_table(rows):
    """Shows a list of dicts with the same keys as a table, numbers to the right."""
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()]
             for row in rows]
    rule = ["--:" if isinstance(value, (int, float)) else "---" for value in rows[0].values()]
    display(Markdown("\n".join(f"| {' | '.join(row)} |" for row in [list(rows[0]), rule, *cells])))


# Exercises

def check(answer, checker):
    """Says whether an exercise is solved: calls checker(answer), which asserts what has to hold.

    Returns True or False, or None as long as the answer raises NotImplementedError.
    """
    try:
        checker(answer)
    except NotImplementedError:
        print("not solved yet")
        return None
    except Exception as error:  # an unfinished answer may raise anything
        print(f"not right yet: {type(error).__name__} {error}")
        return False
    print("right")
    return True
