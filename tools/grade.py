"""Grades a folder that tools/handout.py wrote and a student filled.

    python tools/grade.py homework3

prints a table and writes results.json (Gradescope's format) and results.xml (JUnit). Of the folder it takes
those files in which the tasks have functions, no others. They run with this repository's tests, in a scratch
folder, with seeds that nobody knew before, in processes that may open no other files and start no programs
(tests/guard.py), each task with a time limit.
"""

import argparse
import json
import os
import secrets
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import handout
from check import Result, print_result, print_sum, run_task
from steps import changes, folders

PASSED_ON = ["PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME", "SYSTEMROOT"]


def read_assignment(folder):
    """Returns (step, kind) that the folder says it has. Raises ValueError."""
    try:
        assignment = json.loads((folder / "assignment.json").read_text())
        return str(assignment["step"]), assignment["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} has no assignment.json of a handout: use --step and --kind")


def assemble(submission, step, kind, scratch):
    """Writes the assignment anew, with the student's files in it. Returns (tasks, the student's step)."""
    handout.prepare(step, scratch)
    target = scratch / folders()[step].name
    if kind == "tasks":
        tasks, _ = handout.write_tasks(step, scratch)
        names = handout.blanked_functions(tasks)
    else:  # the whole step is the student's: a file that they deleted is missing
        tasks = [handout.bug_task(step)]
        names = [path.name for path in folders()[step].glob("*.py")]
        target.mkdir()
    for path in (submission / target.name / name for name in names):
        if path.is_file() and not any(parent.is_symlink() for parent in (path, path.parent)):
            shutil.copyfile(path, target / path.name)
    return tasks, target


def grade(submission, step, kind, seed, seconds=None, only=None):
    """Yields (number, Result) of each task, or of the one with this number."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder, "scratch")
        tasks, target = assemble(Path(submission), step, kind, scratch)
        (scratch / "tmp").mkdir()
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {"TMPDIR": str(scratch / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        changed = sum(changes(folders()[step], target).values())
        for number, task in enumerate(tasks, start=1):
            if only not in (None, number):
                continue
            if kind == "bug" and changed > handout.MAX_CHANGED:
                what = f"{changed} lines differ from the right program, more than {handout.MAX_CHANGED}"
                yield number, Result(task["name"], task["points"], False, what, what, 0.0)
            else:
                options = ["--guard", "--run_seed", str(seed)]
                yield number, run_task(task, scratch, seconds, options, environment)


def write_results(results, title, out):
    """Writes results.json, as Gradescope wants it, and results.xml, as CI systems do."""
    tests, suite = [], ElementTree.Element("testsuite", name=title, tests=str(len(results)))
    suite.set("failures", str(sum(not result.passed for result in results)))
    for result in results:
        output = f"{result.diagnosis}\n\n{result.output[-20000:]}"
        status = "passed" if result.passed else "failed"
        tests.append({"name": result.name, "score": result.score, "max_score": result.points,
                      "status": status, "output": "" if result.passed else output, "visibility": "visible"})
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=result.name,
                                      time=f"{result.seconds:.1f}")
        if not result.passed:
            failure = ElementTree.SubElement(case, "failure", message=printable(result.diagnosis))
            failure.text = printable(output)
    total = {"score": sum(result.score for result in results), "output": title, "tests": tests}
    (out / "results.json").write_text(json.dumps(total, indent=2) + "\n")
    ElementTree.ElementTree(suite).write(out / "results.xml", encoding="utf-8", xml_declaration=True)


def printable(text):
    """XML has no control characters."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def main(argv=None):
    parser = argparse.ArgumentParser("grade.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what a student hands in")
    parser.add_argument("--step", help="by default what the folder's assignment.json says")
    parser.add_argument("--kind", choices=["tasks", "bug"], help="with --step; default: tasks")
    parser.add_argument("--task", type=int, metavar="N", help="grade this task only")
    parser.add_argument("--seed", type=int, help="of weights, data and inputs; by default chance decides")
    parser.add_argument("--seconds", type=float, help="a task's time limit, in place of its own")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="for results; default: here")
    args = parser.parse_args(argv)
    seed, results = secrets.randbelow(10**6) if args.seed is None else args.seed, []
    try:
        step, kind = (args.step, args.kind or "tasks") if args.step else read_assignment(args.folder)
        args.out.mkdir(parents=True, exist_ok=True)
        title = f"{step}, {kind}, seed {seed}"
        print(f"{args.folder}: {title}")
        for number, result in grade(args.folder, step, kind, seed, args.seconds, args.task):
            print_result(number, result)
            results.append(result)
        write_results(results, title, args.out)
    except (ValueError, OSError) as error:
        parser.exit(2, f"grade.py: error: {error}\n")
    print_sum(results)


if __name__ == "__main__":
    main()
