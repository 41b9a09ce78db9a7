"""The rules of a snapshot: each step stands alone, is small, and differs from the one before by its topic."""

import ast
import itertools
import shutil
import sys

import pytest

import launch
import parallel_workers as workers
from steps import STEPS, changes, folders, sources

SAME_IN_ALL = ["model.py", "data.py", "config.py"]
MAX_LINE, MAX_FILE, MAX_CHANGED_IN_TRAIN = 110, 200, 50
# Changed lines against the step before: (the design's aim, what is allowed today). What step 7 puts around
# the trainer, files of their own, counts apart.
BUDGETS = {"step02": (200, 210), "step03": (200, 205), "step04": (200, 215), "step05": (30, 30),
           "step06": (200, 205), "step07": (200, 160)}
AROUND_THE_TRAINER = {"checkpoint.py", "create_config.py", "export_hf.py", "huggingface.py", "plan.py",
                      "submit_slurm_jobs.py"}
MAX_AROUND = 600


def pytest_generate_tests(metafunc):
    present = folders(metafunc.config.getoption("--steps"))
    if "folder" in metafunc.fixturenames:
        metafunc.parametrize("folder", present.values(), ids=present)
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize("pair", list(itertools.pairwise(present.values())),
                             ids=["-".join(pair) for pair in itertools.pairwise(present)])


def test_the_model_knows_nothing_of_how_it_is_spread(pair):
    for name in SAME_IN_ALL:
        first, second = ((folder / name).read_bytes() for folder in pair)
        assert first == second, f"{name} differs between {pair[0].name} and {pair[1].name}"


def test_a_step_changes_few_lines(pair):
    changed = changes(*pair)
    around = {name: changed.pop(name) for name in AROUND_THE_TRAINER & changed.keys()}
    assert sum(around.values()) <= MAX_AROUND, around
    aim, limit = BUDGETS[pair[1].name[:6]]
    print(f"{pair[1].name}: {sum(changed.values())} changed lines (aim {aim}), {changed}")
    assert sum(changed.values()) <= limit, changed
    assert changed.get("train.py", 0) <= MAX_CHANGED_IN_TRAIN, changed


def test_lines_and_files_are_short(folder):
    for name, text in sources(folder).items():
        lines = text.splitlines()
        assert len(lines) <= MAX_FILE, f"{name} has {len(lines)} lines"
        long = [number for number, line in enumerate(lines, start=1) if len(line) > MAX_LINE]
        assert not long, f"{name}: lines {long} are over {MAX_LINE} characters"


def imported(tree):
    """Returns the names that the module's imports bind, and the modules that it imports when it is loaded."""
    names, at_start = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    for node in tree.body:
        if isinstance(node, ast.Import):
            at_start |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            at_start.add(node.module.split(".")[0])
    return names, at_start


def test_nothing_is_imported_in_vain_or_from_elsewhere(folder):
    texts = sources(folder)
    own = {name.removesuffix(".py") for name in texts}
    for name, text in texts.items():
        tree = ast.parse(text)
        names, at_start = imported(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not set(names) - used, f"{name}: unused"
        foreign = at_start - own - {"torch"} - sys.stdlib_module_names
        assert not foreign, f"{name}: torch is all that a step needs to start"
        for step in STEPS:
            assert step not in text.replace(folder.name, ""), f"{name} speaks of another step"


def test_nothing_is_left_over(folder):
    """Every function, class, method, property and argument of the command line is used somewhere."""
    texts = sources(folder)
    trees = [ast.parse(text) for text in texts.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    implicit = {"forward", "backward", "error", "main"}  # torch, argparse and users call these
    assert not {name for name in defined - used - implicit if not name.startswith("__")}
    flags = {flag for flag in flags_of(texts["arguments.py"]) if flag != "use_cpu"}
    assert flags and not {flag for flag in flags if flag not in used}


def flags_of(text):
    """The attribute of args that each flag fills in: its first name."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "add"]
    return [call.args[0].value.removeprefix("--") for call in calls if isinstance(call.args[0], ast.Constant)]


def test_starting_imports_torch_alone(folder):
    """To the end of the first training step."""
    argv = ["--steps", "1", "--num_hidden_layers", "1", "--seq_len", "16", "--use_cpu"]
    (loaded,) = launch.fork(workers.modules_at_start, folder, argv).check().results
    assert "torch" in loaded and "train" in loaded
    assert not loaded & {"transformers", "datasets", "huggingface_hub", "pandas", "pyarrow", "matplotlib"}


def test_a_copy_elsewhere_runs(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    nproc = 1 if folder.name.startswith("step01") else 2
    argv = ["--steps", 1, "--num_hidden_layers", 2, "--seq_len", 16, "--hidden_size", 16]
    run = launch.train(copy, *argv, nproc=nproc, timeout=120).check()
    assert len(run.metrics) == 1
