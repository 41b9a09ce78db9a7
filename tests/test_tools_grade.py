"""tools/grade.py: points for what was done, none for what pretends to be, and the files that it writes."""

import json
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import test_tasks

import grade
import guard
import handout
import launch
from mistakes import MISTAKES, plant
from steps import folders, sources
from test_tools_handout import HALF_DONE

FOLDER = "step02_data_parallel"
SOLUTION = launch.ROOT / FOLDER / "data_parallel.py"

# Bodies of Bucket.__init__, the first task of step 2, that don't do it. What the grader has to say of each:
CHEATS = {
    "prints results": ('print("1 passed"); print("score: 2 / 2")', "has no attribute 'buffer'"),
    "exits": ("import sys; sys.exit(0)", r"exit statuses \[0\] and without a result"),
    "exits at once": ("import os; os._exit(0)", r"exit statuses \[0\] and without a result"),
    "imports the solution": (f"""
import importlib.util
spec = importlib.util.spec_from_file_location("solution", {str(SOLUTION)!r})
solution = importlib.util.module_from_spec(spec)
spec.loader.exec_module(solution)
solution.Bucket.__init__(self, parameters)
""", "PermissionError: not in a graded program: open .*/data_parallel.py"),
    "runs the solution elsewhere": (f"""
import subprocess
source = subprocess.run(["cat", {str(SOLUTION)!r}], capture_output=True, text=True).stdout
solution = {{}}
exec(source, solution)
solution["Bucket"].__init__(self, parameters)
""", "PermissionError: not in a graded program: subprocess.Popen"),
    "edits tests": ("""
import sys
tests = sys.modules["launch"].ROOT / "tests" / "test_tasks.py"
tests.write_text("def test_step02_bucket(): pass")
""", "PermissionError: not in a graded program: open .*/test_tasks.py"),
    "writes the report": ("""
open("report.xml", "w").write('<testsuite><testcase name="test_step02_bucket"/></testsuite>')
""", "PermissionError: not in a graded program: open .*/report.xml"),
    "changes torch and pytest": ("""
import sys
torch.Tensor.norm = lambda self, *args, **kwargs: torch.zeros(())
sys.modules["pytest"] = None
self.buffer = torch.zeros(23, dtype=torch.float64)
for parameter in parameters:
    parameter.grad = torch.zeros_like(parameter)
""", "after two backward passes: wrong"),
    "knows the results by heart": ("""
import os, sys, task_workers
slopes = [task_workers.draw(1 + n, *task_workers.BUCKET_SHAPES) for n in range(2)]
summed = torch.cat([(a + b).flatten() for a, b in zip(*slopes)])
full = [torch.full(shape, 3.0) for shape in task_workers.BUCKET_SHAPES]
folder = sys._getframe(2).f_locals["folder"]
torch.save(([torch.zeros_like(summed), summed], full), f"{folder}/result0")
os._exit(0)
""", "after two backward passes: wrong"),
    "hands over a program as result": ("""
import os, sys
class Program:
    def __reduce__(self):
        return exec, ("import os; os._exit(0)",)
torch.save(Program(), sys._getframe(2).f_locals["folder"] + "/result0")
os._exit(0)
""", "Weights only load failed"),
    "hangs": ("""
while True:
    pass
""", "killed after 15 s"),
}
# Those that would be worth points if nobody guarded against them, with the seed that was handed out.
WORTH_IT = ["imports the solution", "runs the solution elsewhere", "knows the results by heart"]


def indented(body):
    return body.strip().replace("\n", "\n        ")


def homework(out, body):
    """The handout of step 2 with this body of Bucket.__init__."""
    handout.write("step02", out)
    module = out / FOLDER / "data_parallel.py"
    start, end = module.read_text().split("raise NotImplementedError", 1)
    module.write_text(start + indented(body) + end)
    return out


def grade_command(folder, *argv, out):
    tool = launch.ROOT / "tools/grade.py"
    run = launch.command(sys.executable, tool, folder, "--out", out, *argv, timeout=400)
    return SimpleNamespace(status=run.statuses[0], output=run.output, out=out)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All gradings, two at a time: futures by name."""
    scratch, jobs = tmp_path_factory.mktemp("grade"), {}
    with ThreadPoolExecutor(2) as pool:
        def start(name, *argv):
            jobs[name] = pool.submit(grade_command, scratch / name, *argv, out=scratch / f"{name}, results")

        handout.write("step05", scratch / "half done")
        module = scratch / "half done" / "step05_pipeline_1f1b" / "pipeline_parallel.py"
        module.write_text(module.read_text().replace("raise NotImplementedError", HALF_DONE["step05", 1]))
        start("half done", "--seed", 7)
        for name, (body, _) in CHEATS.items():
            homework(scratch / name, body)
            start(name, "--task", 1, "--seconds", 15 if name == "hangs" else 180)
        bug = "--step", "step02", "--kind", "bug"
        plant(MISTAKES["step02-no-all-reduce"], scratch / "not found")
        start("not found", *bug)
        shutil.copytree(folders()["step02"], scratch / "found" / FOLDER)
        start("found", *bug)
        yield jobs


def test_half_done(graded):
    """Table, Gradescope's results.json, JUnit's results.xml."""
    run = graded["half done"].result()
    assert run.status == 0 and "step05, tasks, seed 7" in run.output
    assert re.findall(r"(\d+) / +(\d+)", run.output) == [("2", "2"), ("0", "3"), ("0", "4"), ("2", "9")]
    results = json.loads((run.out / "results.json").read_text())
    tests, suite = results["tests"], ElementTree.parse(run.out / "results.xml").getroot()
    assert results["score"] == 2
    assert [(test["score"], test["max_score"], test["status"]) for test in tests] == [
        (2, 2, "passed"), (0, 3, "failed"), (0, 4, "failed")]
    assert all(test["name"] and test["visibility"] == "visible" for test in tests)
    assert "2 micro-batches alive: F0 F1 B0 B1" in tests[1]["output"]
    assert suite.get("tests") == "3" and suite.get("failures") == "2"
    assert [len(case.findall("failure")) for case in suite] == [0, 1, 1]


@pytest.mark.parametrize("name", CHEATS)
def test_no_points_for(graded, name):
    run = graded[name].result()
    assert run.status == 0, run.output
    (test,) = json.loads((run.out / "results.json").read_text())["tests"]
    assert test["score"] == 0 and test["status"] == "failed"
    assert re.search(CHEATS[name][1], test["output"].splitlines()[0]), test["output"]


@pytest.mark.parametrize("name", WORTH_IT)
def test_what_is_refused_would_have_worked(tmp_path, name):
    """Without the guard, or with the seed that was handed out. So the grader's 0 is for the cheating."""
    folder = homework(tmp_path / "homework", CHEATS[name][0])
    test_tasks.test_step02_bucket(test_tasks.Student(folder, 0))


def test_a_mistake_that_was_found(graded):
    run = graded["found"].result()
    assert "10 / 10" in run.output, run.output
    run = graded["not found"].result()
    assert "0 / 10" in run.output and "right first loss, first norm off" in run.output, run.output


def test_a_mistake_is_not_found_by_writing_all_anew(tmp_path):
    (tmp_path / FOLDER).mkdir()
    for name, text in sources(folders()["step02"]).items():
        (tmp_path / FOLDER / name).write_text(text.replace("bucket", "bin"))
    ((_, result),) = grade.grade(tmp_path, "step02", "bug", seed=0)
    assert not result.passed and "lines differ from the right program" in result.diagnosis


def remove_trees(own, other):
    """Returns what the guard says to removing folders below its temporary folder and elsewhere."""
    tempfile.tempdir = str(own)
    guard.install(launch.ROOT)
    said = []
    for folder in (own, other):
        try:
            shutil.rmtree(folder / "tree")
            said.append("")
        except PermissionError as error:
            said.append(str(error))
    return said


def test_the_guard_sees_through_descriptors_of_folders(tmp_path):
    """shutil.rmtree names a file relative to its folder."""
    for name in ("own", "other"):
        (tmp_path / name / "tree/inside").mkdir(parents=True)
        (tmp_path / name / "tree/inside/file").touch()
    ((own, other),) = launch.fork(remove_trees, tmp_path / "own", tmp_path / "other").check().results
    assert own == "" and not (tmp_path / "own/tree").exists()
    assert other.startswith("not in a graded program") and (tmp_path / "other/tree/inside/file").exists()


def test_only_files_of_the_tasks_are_taken(tmp_path):
    """And no links, which may lead to the solution."""
    folder = homework(tmp_path / "homework", "pass")
    step = folder / FOLDER
    (step / "train.py").write_text("raise SystemExit")
    (step / "random.py").write_text("raise SystemExit")
    (folder / "tests/test_tasks.py").write_text("")
    (step / "mesh.py").unlink()
    (step / "mesh.py").symlink_to(launch.ROOT / FOLDER / "mesh.py")
    _, target = grade.assemble(folder, "step02", "tasks", tmp_path / "scratch")
    assert (target / "data_parallel.py").read_bytes() == (step / "data_parallel.py").read_bytes()
    assert (target / "train.py").read_bytes() == (launch.ROOT / FOLDER / "train.py").read_bytes()
    assert not (target / "random.py").exists()
    assert "raise NotImplementedError" in (target / "mesh.py").read_text()
    for name in handout.TESTS:
        assert (tmp_path / "scratch/tests" / name).read_bytes() == (launch.ROOT / "tests" / name).read_bytes()
    assert not [path for path in (tmp_path / "scratch").rglob("*.py")
                if path.parent.name != FOLDER and "class Bucket:" in path.read_text()], "the solution"


@pytest.mark.parametrize("argv, message", [
    ([], "no assignment.json of a handout"), (["--step", "step99"], "no tasks for step99")])
def test_errors_are_one_line(tmp_path, argv, message):
    run = grade_command(tmp_path, *argv, out=tmp_path / "results")
    assert run.status == 2 and message in run.output
    assert run.output.splitlines()[-1].startswith("grade.py: error: "), run.output
