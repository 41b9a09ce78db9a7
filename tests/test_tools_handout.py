"""tools/handout.py: what is blanked, that handouts fail and solutions pass, task by task, and check.py."""

import ast
import difflib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import test_same_run
import test_tasks

import check
import handout
import launch
import same_run
from steps import changes, folders

TASKS = {step: entry["tasks"] for step, entry in handout.load_tasks().items() if step in folders()}
# The tasks of step 5 are demands on one function: bodies that meet the first one, and the first two.
HALF_DONE = {
    ("step05", 1): "return afab(stage, num_stages, num_micro_batches)",
    ("step05", 2): "return afab(stage, 1, num_micro_batches)  # one micro-batch at a time",
}


# Blanking

def test_blank_keeps_all_but_the_body():
    text = '''\
"""A module."""

import math  # used below


def area(radius):
    """Of a circle."""
    # a comment that gives it away
    square = radius**2

    return math.pi * square  # the end
# between


class Box(dict):
    size = 3  # kept

    @staticmethod
    def both(first,
             second=(1, 2)):

        def inner():
            return first
        return inner(), second

    def area(self):
        return self.size
'''
    blanked = handout.blank(text, ["area", "Box.both"])
    assert blanked == text.replace('''\
    # a comment that gives it away
    square = radius**2

    return math.pi * square  # the end
''', "    raise NotImplementedError\n").replace('''\
        def inner():
            return first
        return inner(), second
''', "        raise NotImplementedError\n")
    with pytest.raises(ValueError, match="no function Box.volume"):
        handout.blank(text, ["Box.volume"])


@pytest.mark.parametrize("step", TASKS)
def test_blanked_steps_differ_in_bodies_alone(step):
    for file, names in handout.blanked_functions(TASKS[step]).items():
        text = (folders()[step] / file).read_text()
        blanked = handout.blank(text, names)
        old, new = text.splitlines(), blanked.splitlines()
        differences = [codes for codes in difflib.SequenceMatcher(None, old, new, False).get_opcodes()
                       if codes[0] != "equal"]
        assert len(differences) == len(names) == blanked.count("raise NotImplementedError")
        for _, _, _, start, end in differences:
            assert [line.strip() for line in new[start:end]] == ["raise NotImplementedError"]
        for name in names:
            before, after = (handout.find(ast.parse(source), name) for source in (text, blanked))
            assert ast.get_docstring(before) == ast.get_docstring(after)
            assert ast.dump(before.args) == ast.dump(after.args)
            assert len(before.decorator_list) == len(after.decorator_list)


# The tasks

LAYOUTS = {f"test_same_run[{layout}]": layout for layout in same_run.LAYOUTS}


def run_test(name, steps, seed=0):
    """Calls the test with this name. No pytest starts anew, so that all can use one warm server."""
    file, name = name.split("::")
    if file == "tests/test_same_run.py":
        test_same_run.test_same_run(steps, seed, LAYOUTS[name])
    else:
        test = getattr(test_tasks, name)
        with tempfile.TemporaryDirectory() as scratch:
            fixtures = {"student": test_tasks.Student(steps, seed), "tmp_path": Path(scratch),
                        "whole": launch.load(folders()["step01"])}
            test(*(fixtures[name] for name in inspect.signature(test).parameters))


def passes(task, steps):
    try:
        for name in task["tests"]:
            run_test(name, steps)
    except (AssertionError, pytest.fail.Exception):
        return False
    return True


@pytest.mark.parametrize("step", TASKS)
def test_each_step_has_three_tasks_or_more_from_easy_to_hard(step):
    tasks = TASKS[step]
    assert len(tasks) >= 3
    for task in tasks:
        assert task["points"] > 0 and task["hint"] and task["functions"] and task["tests"]
    whole_program = ["test_same_run[" in "".join(task["tests"]) for task in tasks]
    assert whole_program == [False] * (len(tasks) - 1) + [True]


def half_done(step, done, scratch):
    """Writes the step with its first tasks done and the functions of the others blank. Returns scratch."""
    copy, tasks = handout.copy_step(folders()[step], scratch), TASKS[step]
    body = HALF_DONE.get((step, done))
    ready = {name for task in tasks[:done] for name in task["functions"] if not body}
    for file, names in handout.blanked_functions(tasks).items():
        names = [name for name in names if f"{file}::{name}" not in ready]
        text = handout.blank((copy / file).read_text(), names)
        (copy / file).write_text(text.replace("raise NotImplementedError", body) if body else text)
    return scratch


@pytest.mark.parametrize("step, done", [(step, done) for step in TASKS for done in range(len(TASKS[step]))])
def test_who_has_done_the_first_tasks_passes_exactly_those(tmp_path, step, done):
    """The whole solution passes in test_tasks.py and test_same_run.py."""
    steps = half_done(step, done, tmp_path)
    assert [passes(task, steps) for task in TASKS[step]] == [n < done for n in range(len(TASKS[step]))]


# Handouts as a whole

def handout_command(*argv, **options):
    return launch.command(sys.executable, launch.ROOT / "tools/handout.py", *argv, **options)


def test_a_handout_works_elsewhere(tmp_path):
    """The sheet, and check.py with its table, for a student who has done the first task."""
    run = handout_command("step05", "--out", tmp_path / "new")
    assert run.check().output == f"{tmp_path / 'new'}: ASSIGNMENT.md says what to do\n"
    folder = shutil.move(tmp_path / "new", tmp_path / "elsewhere")
    sheet = (folder / "ASSIGNMENT.md").read_text()
    for number, task in enumerate(TASKS["step05"], start=1):
        assert f"| {number} | {task['name']} | {task['points']} |" in sheet and task["hint"] in sheet
    assert "pipeline_parallel.py#L50" in sheet
    module = folder / "step05_pipeline_1f1b/pipeline_parallel.py"
    module.write_text(module.read_text().replace("raise NotImplementedError", HALF_DONE["step05", 1]))
    run = launch.command(sys.executable, "elsewhere/check.py", cwd=tmp_path, timeout=120)
    assert run.statuses == [1], run.output
    assert re.findall(r"(\d+) / +(\d+)", run.output) == [("2", "2"), ("0", "3"), ("0", "4"), ("2", "9")]
    assert "stage 1 of 2: 2 micro-batches alive: F0 F1 B0 B1" in run.output


def test_a_handout_with_a_mistake(tmp_path):
    texts = set()
    for seed in range(3):
        out = tmp_path / f"bug{seed}"
        handout.write("step03", out, "bug", seed)
        changed = changes(folders()["step03"], out / folders()["step03"].name)
        assert len(changed) == 1 and sum(changed.values()) <= handout.MAX_CHANGED
        texts |= {(out / folders()["step03"].name / name).read_text() for name in changed}
        assert "(a changed line counts twice)" in (out / "ASSIGNMENT.md").read_text()
        assert not (out / "tests/mistakes.py").exists()
        (task,) = json.loads((out / "assignment.json").read_text())["tasks"]
        assert task["name"] == "The mistake"
    assert len(texts) == 3


@pytest.mark.parametrize("argv, message", [
    (["step01", "--out", "new"], "no tasks for step01: use step02, step03"),
    (["step02", "--out", "."], ". isn't empty"), (["nonesuch", "--out", "new"], "no tasks for nonesuch")])
def test_errors_are_one_line(tmp_path, argv, message):
    (tmp_path / "something").touch()
    run = handout_command(*argv, cwd=tmp_path)
    assert run.statuses == [2] and run.output.startswith("handout.py: error: ") and message in run.output
    assert run.output.count("\n") == 1 and not (tmp_path / "new").exists()


HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def test_a_hanging_program_is_killed_with_all_its_processes(tmp_path):
    """Also those that it started in sessions of their own."""
    start = time.monotonic()
    status, output = check.run_limited([sys.executable, "-c", HANGS], tmp_path, None, seconds=2)
    assert status is None and time.monotonic() - start < 20
    pids = output.split()
    assert len(pids) == 2
    time.sleep(0.2)
    left = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(pids)], capture_output=True, text=True).stdout
    assert all(state.startswith("Z") for state in left.split()), "a zombie is dead"
