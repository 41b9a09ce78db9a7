"""Writes an assignment: a step with holes, the step before it, tests, a sheet, and check.py to run them.

    python tools/handout.py step03 --out homework3
    python tools/handout.py step03 --out homework3 --kind bug      the whole step, with a mistake to be found

tasks.toml says which functions are blanked. A mistake is one of those in tests/mistakes.py, by chance or by
--seed; git diff --no-index shows a teacher which. tools/grade.py grades what comes back.
"""

import argparse
import ast
import json
import random
import shutil
import sys
import tomllib
from pathlib import Path

from steps import ROOT, folders

TESTS = ["conftest.py", "diagnose.py", "guard.py", "launch.py", "same_run.py", "task_workers.py",
         "test_same_run.py", "test_tasks.py", "warm.py"]
BUG_POINTS, MAX_CHANGED = 10, 10  # a mistake is found if so many lines or fewer differ from the right program
TASK_SECONDS, BUG_SECONDS = 180, 900  # time limits: of a task's tests, and of all layouts of a step


def load_tasks():
    """Returns {step: its entry in tasks.toml}, where each task also has what check.py needs."""
    with open(Path(__file__).with_name("tasks.toml"), "rb") as file:
        steps = tomllib.load(file)
    for step, entry in steps.items():
        for task in entry["tasks"]:
            names = task.get("tests", [])
            layouts = [f"test_same_run[{step}-{layout}]" for layout in task.get("layouts", [])]
            task["tests"] = [f"tests/test_tasks.py::{name}" for name in names]
            task["tests"] += [f"tests/test_same_run.py::{name}" for name in layouts]
            task["num_tests"], task["seconds"] = len(task["tests"]), TASK_SECONDS
    return steps


def bug_task(step):
    return {"name": "The mistake", "points": BUG_POINTS, "num_tests": 1, "seconds": BUG_SECONDS,
            "tests": ["tests/test_same_run.py", "-k", f"{step} and not torchrun"]}


def find(tree, name):
    """The function "name" or the method "Class.name" of a module."""
    for part in name.split("."):
        tree = next((node for node in tree.body if getattr(node, "name", None) == part), None)
        if tree is None:
            raise ValueError(f"no function {name}")
    return tree


def blank(text, names):
    """Replaces the bodies of functions, behind their docstrings, by raise NotImplementedError."""
    lines = text.splitlines(keepends=True)
    functions = [find(ast.parse(text), name) for name in names]
    # From the end, so that the line numbers of those to come stay right.
    for function in sorted(functions, key=lambda function: function.lineno, reverse=True):
        body = function.body
        start = body[1].lineno if ast.get_docstring(function) and len(body) > 1 else body[0].lineno
        indent = " " * body[0].col_offset
        # A comment above the first statement goes, too: it speaks of the solution.
        while lines[start - 2].strip().startswith("#"):
            start -= 1
        lines[start - 1:function.end_lineno] = [f"{indent}raise NotImplementedError\n"]
    return "".join(lines)


def blanked_functions(tasks):
    """Returns {file: [function, ...]} of the tasks, each once."""
    files = {}
    for name in dict.fromkeys(name for task in tasks for name in task["functions"]):
        file, function = name.split("::")
        files.setdefault(file, []).append(function)
    return files


def copy_step(folder, out):
    return shutil.copytree(folder, out / folder.name, ignore=shutil.ignore_patterns("__pycache__"))


def step_before(step):
    names = list(folders())
    return names[names.index(step) - 1]


def write_tasks(step, out):
    """Writes the step with holes. Returns (tasks, sheet)."""
    entry = load_tasks()[step]
    copy = copy_step(folders()[step], out)
    for file, names in blanked_functions(entry["tasks"]).items():
        (copy / file).write_text(blank((copy / file).read_text(encoding="utf-8"), names), encoding="utf-8")
    return entry["tasks"], tasks_sheet(entry, copy, folders()[step_before(step)].name)


def write_bug(step, out, seed):
    """Writes the step with a mistake. Returns (tasks, sheet)."""
    sys.path.insert(0, str(ROOT / "tests"))
    from diagnose import ENDED
    from mistakes import MISTAKES, plant
    mistakes = [mistake for mistake in MISTAKES.values()
                if mistake.layout.step == step and mistake.kind != ENDED]
    plant(random.Random(seed).choice(mistakes), out)
    return [bug_task(step)], BUG_SHEET.format(folder=folders()[step].name, step=step, limit=MAX_CHANGED,
                                              points=BUG_POINTS, start=START)


def prepare(step, out):
    """Writes what surrounds the step. Raises ValueError if that has no tasks or the folder isn't empty."""
    known = [name for name in load_tasks() if name in folders()]
    if step not in known:
        raise ValueError(f"no tasks for {step}: use {', '.join(known)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} isn't empty")
    out.mkdir(parents=True, exist_ok=True)
    for name in sorted({"step01", step_before(step)}):  # step 1 is what all runs are compared with
        copy_step(folders()[name], out)
    (out / "tests").mkdir()
    for name in TESTS:
        shutil.copy(ROOT / "tests" / name, out / "tests")
    shutil.copy(ROOT / "pyproject.toml", out)
    shutil.copy(ROOT / "tools" / "check.py", out)


def write(step, out, kind="tasks", seed=None):
    """Writes the assignment into the folder out, which must be new or empty. Raises ValueError."""
    out = Path(out)
    prepare(step, out)
    tasks, sheet = write_tasks(step, out) if kind == "tasks" else write_bug(step, out, seed)
    (out / "ASSIGNMENT.md").write_text(sheet, encoding="utf-8")
    keys = "name", "points", "tests", "num_tests", "seconds"
    assignment = {"step": step, "kind": kind, "tasks": [{key: task[key] for key in keys} for task in tasks]}
    (out / "assignment.json").write_text(json.dumps(assignment, indent=2) + "\n")


START = """
## Start

You need Python 3.11 or newer with torch and pytest; `python -m pip install -e .` installs what pyproject.toml
lists.

    python check.py
"""

TASKS_SHEET = """# {title}

{text}
{start}
runs the tests of all tasks and prints a table. `python check.py 2` runs those of the second task and prints
all that they say. The tasks build on one another: do them in this order.

| | task | points |
|---|---|---|
{table}

Write the functions that raise `NotImplementedError`. Their docstrings say what they have to do; what those
leave open stands here. The step before is there to compare with:

    git diff --no-index {before} {folder}

Your {files} will be graded, with other seeds and
with the teacher's copy of all other files. A program that reads other files, starts other programs or ends
early gets no points for it.
"""

TASK_SHEET = """
## {number}. {name}: {points} points

{functions}
{contract}
<details><summary>Hint</summary>

{hint}

</details>

    python check.py {number}
"""

BUG_SHEET = """# A mistake in {folder}

This step has one mistake, of a kind that people make. Find it and repair it: {points} points.
{start}
runs the shared test: every layout against step 1, which is right. Where a run differs, it says in what, and
which kind of mistake that points at. `python check.py 1` prints all of it.

The points are yours if the shared test passes, with other seeds too, and your {folder}
differs from the right program in {limit} lines or fewer (a changed line counts twice): change what is wrong
and nothing else.
"""


def tasks_sheet(entry, copy, before):
    """The assignment in Markdown."""
    tasks, files = entry["tasks"], blanked_functions(entry["tasks"])
    trees = {file: ast.parse((copy / file).read_text(encoding="utf-8")) for file in files}
    rows = [*((number, task["name"], task["points"]) for number, task in enumerate(tasks, start=1)),
            ("", "all", sum(task["points"] for task in tasks))]
    sheet = TASKS_SHEET.format(
        title=entry["title"], text=entry["text"].strip(), start=START, before=before, folder=copy.name,
        table="\n".join("| {} | {} | {} |".format(*row) for row in rows),
        files=" and ".join(f"`{file}`" for file in files))
    for number, task in enumerate(tasks, start=1):
        places = [name.split("::") for name in task["functions"]]
        functions = [f"- `{name}` in [{file}]({copy.name}/{file}#L{find(trees[file], name).lineno})\n"
                     for file, name in places]
        contract = task.get("contract", "").strip()
        sheet += TASK_SHEET.format(
            number=number, name=task["name"], points=task["points"], functions="".join(functions),
            contract=contract and f"{contract}\n", hint=task["hint"].strip())
    return sheet


def main(argv=None):
    parser = argparse.ArgumentParser("handout.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", help="step02, step03, ...")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new or an empty folder")
    parser.add_argument("--kind", choices=["tasks", "bug"], default="tasks", help="default: tasks")
    parser.add_argument("--seed", type=int, help="which mistake; by default chance decides")
    args = parser.parse_args(argv)
    try:
        write(args.step, args.out, args.kind, args.seed)
    except (ValueError, OSError) as error:
        parser.exit(2, f"handout.py: error: {error}\n")
    print(f"{args.out}: ASSIGNMENT.md says what to do")


if __name__ == "__main__":
    main()
