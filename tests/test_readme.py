"""The README: its commands run, in its order, and it lists the steps that exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import launch

README = (launch.ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall("^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
         for line in block.replace("\\\n", " ").splitlines()]
# Not run here: what installs or tests everything, what needs network, and the plain default (test_step01.py).
LEFT_OUT = ("make ", "source ", "python -m pytest", "--tokenizer_name", "tools/")
COMMANDS = [line for line in LINES if not any(text in line for text in LEFT_OUT) and " --" in line]


def test_commands_are_found():
    assert len(COMMANDS) >= 6


def run_in(folder, step, argv):
    os.chdir(folder)
    sys.path.insert(0, str(step))
    import train
    train.main(argv)


@pytest.fixture(scope="module")
def checkout(steps, tmp_path_factory):
    """A folder to run commands in, with what the README makes for them."""
    folder = tmp_path_factory.mktemp("checkout")
    for step in steps.glob("step0*"):
        shutil.copytree(step, folder / step.name)
    (make_text,) = [line for line in LINES if line.startswith("python -c ")]
    make_text = make_text.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(make_text, shell=True, cwd=folder, timeout=60, check=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command(checkout, command):
    words = shlex.split(command)
    (script,) = [i for i, word in enumerate(words) if word.endswith(".py")]
    if not words[script].endswith("train.py"):
        launch.command(sys.executable, *words[script:], cwd=checkout, timeout=120).check()
        return
    nproc = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
    step = checkout / os.path.dirname(words[script])
    argv = [*words[script + 1:], "--use_cpu"]
    if "--save_dir" not in argv:
        argv += ["--steps", "2"]  # the last --steps counts
    launch.fork(run_in, checkout, step, argv, nproc=nproc, timeout=120).check()


def test_links_lead_somewhere():
    """All relative ones; and every notebook has one."""
    links = set(re.findall(r"\]\((?!https:)([^)#]+)\)", README))
    assert not [link for link in links if not (launch.ROOT / link).exists()]
    notebooks = {f"notebooks/{path.name}" for path in (launch.ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert notebooks == {link for link in links if link.endswith(".ipynb")}


def test_steps_that_exist_are_linked():
    assert set(re.findall(r"\]\((step\w+)\)", README)) == {path.name for path in launch.ROOT.glob("step0*")}
