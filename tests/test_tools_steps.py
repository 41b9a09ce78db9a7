"""tools/steps.py and tools/carry.py: the table of steps, and a change carried through small made-up steps."""

import re
import subprocess
import sys

import pytest

import carry
import launch
import steps as tool


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)


def run(tool, *argv):
    return launch.command(sys.executable, launch.ROOT / "tools" / tool, *argv)


# The table

def test_changed_lines():
    assert tool.changed_lines("a\nb\nc\n", "a\nB\nc\nd\n") == 3
    assert tool.changed_lines("", "a\nb\n") == tool.changed_lines("a\nb\n", "") == 2
    assert tool.changed_lines("-- a\n++ b\n", "-- a\n++ b\n") == 0
    assert tool.changed_lines("", "-- a\n++ b\n") == 2, "lines that look like a diff's own"


def test_rows(tmp_path):
    write(tmp_path, {"step01_a/x.py": "1\n2\n", "step01_a/y.py": "1\n", "step01_a/notes.txt": "no Python",
                     "step02_b/x.py": "1\n3\n", "step02_b/y.py": "1\n", "step02_b/z.py": "1\n2\n3\n",
                     "step04_d/x.py": "1\n3\n"})
    assert list(tool.rows(tmp_path)) == [
        ("step01", "step01_a", 2, 3, {}), ("step02", "step02_b", 3, 6, {"x.py": 2, "z.py": 3}),
        ("step04", "step04_d", 1, 2, {"y.py": 1, "z.py": 3})]
    lines = tool.table(tmp_path).splitlines()
    assert lines[2].split() == ["step02_b", "3", "6", "5"] and lines[3].split() == ["2", "x.py"]
    assert tool.markdown(tmp_path).splitlines()[3] == (
        f"| 2 | [step02_b](step02_b) | {tool.STEPS['step02']} | [02](notebooks/02_b.ipynb) "
        f"| {tool.VIDEOS['step02']} | 3 | 6 | 5: x 2, z 3 |")


def test_the_table_has_every_step():
    output = run("steps.py").check().output
    assert [line.split()[0] for line in output.splitlines() if line.startswith("step0")] == \
        sorted(path.name for path in launch.ROOT.glob("step0*"))
    assert run("steps.py", "--markdown").check().output == tool.markdown()


def test_the_readme_is_current():
    text = (launch.ROOT / "README.md").read_text(encoding="utf-8")
    current = tool.update(text)
    if current is None:
        pytest.skip("the README has no <!-- steps -->")
    assert text == current, "run python tools/steps.py --update README.md"


def test_update(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- steps -->\nold\n<!-- /steps -->\nbelow\n")
    run("steps.py", "--update", readme).check()
    assert readme.read_text() == f"above\n<!-- steps -->\n{tool.markdown()}<!-- /steps -->\nbelow\n"
    readme.write_text("nothing to replace\n")
    failed = run("steps.py", "--update", readme)
    assert failed.statuses == [2] and re.fullmatch("steps.py: error: .*\n", failed.output)


# Carrying a change

BODY = "".join(f"line {n}\n" for n in range(20))


@pytest.fixture
def repository(tmp_path):
    """Steps 1 and 2 have the same file, step 3 another end, steps 4 and 5 another beginning, step 6 none."""
    def git(*argv):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *argv], cwd=tmp_path, check=True,
                       capture_output=True)
    write(tmp_path, {"step01_a/x.py": BODY, "step02_b/x.py": BODY,
                     "step03_c/x.py": BODY.replace("line 18", "another end"),
                     "step04_d/x.py": BODY.replace("line 1\n", "another beginning\n"),
                     "step05_e/x.py": BODY.replace("line 1\n", "another beginning\n"),
                     "step06_f/y.py": ""})
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "steps")
    return tmp_path


def read(root):
    return {path.parent.name: path.read_text() for path in root.glob("step0*/x.py")}


def test_carry_merges(repository):
    before = read(repository)
    file = repository / "step01_a/x.py"
    file.write_text(BODY.replace("line 10", "a fix"))
    done = [("step02_b", "same"), ("step03_c", "merged"), ("step04_d", "merged"), ("step05_e", "same"),
            ("step06_f", "no such file")]
    assert list(carry.carry(file, dry_run=True)) == done
    assert read(repository) == {**before, "step01_a": file.read_text()}, "a dry run changes nothing"
    assert list(carry.carry(file)) == done
    assert read(repository) == {step: text.replace("line 10", "a fix") for step, text in before.items()}
    assert [what for _, what in carry.carry(file)] == ["has it"] * 4 + ["no such file"]


def test_carry_begins_in_any_step_and_takes_a_base(repository):
    before = read(repository)
    file = repository / "step03_c/x.py"
    file.write_text(before["step03_c"].replace("line 10", "a fix"))
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", "fix"],
                   cwd=repository, check=True)
    with pytest.raises(ValueError, match="as in HEAD: nothing to carry"):
        list(carry.carry(file))
    assert list(carry.carry(file, "HEAD~1"))[:2] == [("step04_d", "merged"), ("step05_e", "same")]
    after = read(repository)
    assert after["step01_a"] == after["step02_b"] == BODY
    assert after["step04_d"] == after["step05_e"] == before["step04_d"].replace("line 10", "a fix")


def test_carry_leaves_a_conflict_and_says_so(repository):
    file = repository / "step01_a/x.py"
    file.write_text(BODY.replace("line 1\n", "a fix\n"))
    before = read(repository)
    conflict = run("carry.py", file)
    assert conflict.statuses == [1]
    assert [line.split(maxsplit=1) for line in conflict.output.splitlines()] == [
        [f"step0{n}_{'abcdef'[n - 1]}", carry.WORDS[what]] for n, what in enumerate(
            ["same", "merged", "conflict", "conflict", "no such file"], start=2)]
    after = read(repository)
    assert after["step02_b"] == file.read_text()
    assert after["step03_c"] == before["step03_c"].replace("line 1\n", "a fix\n")
    assert after["step04_d"] == after["step05_e"], "identical files stay identical"
    assert after["step04_d"].startswith(
        "line 0\n<<<<<<< step04_d\nanother beginning\n=======\na fix\n>>>>>>> step01_a after\nline 2\n")


def test_carry_leaves_others_work_alone_unless_it_merges(repository):
    write(repository, {"step02_b/x.py": BODY.replace("line 10", "work"),
                       "step03_c/x.py": BODY.replace("line 5", "work")})
    before = read(repository)
    file = repository / "step01_a/x.py"
    file.write_text(BODY.replace("line 10", "a fix"))
    assert list(carry.carry(file))[:2] == [("step02_b", "left alone"), ("step03_c", "merged")]
    after = read(repository)
    assert after["step02_b"] == before["step02_b"]
    assert after["step03_c"] == before["step03_c"].replace("line 10", "a fix")


@pytest.mark.parametrize("path, message", [
    ("step01_a/none.py", "is no file of a step"), ("other.py", "is no file of a step"),
    ("step01_a/new.py", "step01_a/new.py isn't in HEAD"), ("step01_a/x.py", "nothing to carry")])
def test_carry_errors_are_one_line(repository, path, message):
    write(repository, {"other.py": "", "step01_a/new.py": ""})
    failed = run("carry.py", repository / path)
    assert failed.statuses == [2] and re.fullmatch("carry.py: error: .*\n", failed.output), failed.output
    assert message in failed.output


# The figure

def test_losses_of_all_steps_lie_on_one_another():
    import losses
    assert set(losses.LAYOUTS) == set(tool.STEPS)
    figure = losses.draw(steps=2)
    curves = [line.get_ydata() for line in figure.axes[0].lines]
    assert len(curves) == len(tool.STEPS)
    assert all(curve == pytest.approx(curves[0], rel=1e-9) for curve in curves)
