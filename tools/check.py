"""Runs the tests of this folder's tasks, one after the other, and prints a table.

    python check.py          all tasks
    python check.py 2        the second task, with all that its tests say
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    name: str
    points: int
    passed: bool
    diagnosis: str  # in a line
    output: str  # all that the tests said
    seconds: float

    @property
    def score(self):
        return self.points if self.passed else 0


def descendants(pid):
    """All processes that this one has started and that theirs have, in sessions of their own too."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs, found = [tuple(map(int, line.split())) for line in table.splitlines()], [pid]
    for parent in found:
        found += [child for child, its_parent in pairs if its_parent == parent]
    return found[1:]


def run_limited(command, folder, environment, seconds):
    """Runs a command in a session of its own. At the time limit all its processes are killed.

    Returns (exit status, or None if it was killed; what it printed).
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
            for pid in descendants(process.pid):
                kill(os.kill, pid)
        kill(os.killpg, process.pid)
        process.wait()
        output.seek(0)
        return status, output.read()


def kill(how, pid):
    try:
        how(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_task(task, folder, seconds=None, options=(), environment=None):
    """Runs a task's tests with pytest, in the task's time limit or this one. Returns a Result.

    pytest stops at the first test that fails. The task passed if pytest ended well and reports as many tests
    as the task names, all passed.
    """
    start, seconds = time.monotonic(), seconds or task["seconds"]
    with tempfile.TemporaryDirectory() as private:
        report = Path(private, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--junitxml", report,
                   *options, *task["tests"]]
        status, output = run_limited(command, folder, environment, seconds)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    wrong = [child for case in cases for child in case if child.tag in ("failure", "error", "skipped")]
    passed = status == 0 and len(cases) >= task["num_tests"] and not wrong
    if status is None:
        diagnosis = f"killed after {seconds:.0f} s"
    elif wrong:
        diagnosis = exception(wrong[0].text) or summary(wrong[0].get("message"))
    else:
        diagnosis = "passed" if passed else output.strip().splitlines()[-1]
    return Result(task["name"], task["points"], passed, diagnosis, output, time.monotonic() - start)


def exception(text):
    """Of the exceptions that ended a student's processes, and where they came from, the most telling."""
    found = []
    for traceback in text.split("Traceback (most recent call last):\n")[1:]:
        error = re.search(r"^[\w.]+(:.*)?$", traceback, re.MULTILINE)
        places = re.findall(r'^ *File ".*?([^/"]+)", line (\d+)', traceback, re.MULTILINE)
        if error and places:
            found.append(f"{error[0]} ({places[-1][0]}, line {places[-1][1]})")
    # If one process fails, the others see a connection that is closed: a RuntimeError.
    return min(found, key=lambda error: error.startswith("RuntimeError"), default="")


def summary(message):
    """The first lines of a failed test's message, without pytest's own."""
    lines = message.removeprefix("Failed: ").removeprefix("AssertionError: ").splitlines()
    return "; ".join(line for line in lines[:3] if not line.startswith("assert "))


def print_result(number, result):
    print(f"{number:4}  {result.name:50.50}  {result.score:3} / {result.points:2}  {result.seconds:5.0f} s")
    if not result.passed:
        print(textwrap.indent(textwrap.fill(result.diagnosis, 100), " " * 6), flush=True)


def print_sum(results):
    print(f"      {'all':50}  {sum(result.score for result in results):3} / "
          f"{sum(result.points for result in results):2}")


def main():
    folder = Path(__file__).resolve().parent
    tasks = json.loads((folder / "assignment.json").read_text())["tasks"]
    parser = argparse.ArgumentParser("check.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=int, nargs="?", choices=range(1, len(tasks) + 1), help="its number")
    args = parser.parse_args()
    results = []
    for number, task in enumerate(tasks, start=1):
        if args.task in (None, number):
            results.append(run_task(task, folder))
            if args.task:
                print(results[-1].output)
            print_result(number, results[-1])
    if not args.task:
        print_sum(results)
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
