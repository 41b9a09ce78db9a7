"""The notebooks and what they share: lesson.py, figures.py, observe.py.

Executing a notebook takes a minute. The test that does so runs with --notebooks:

    python -m pytest tests/test_notebooks.py --notebooks
"""

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

import launch

NOTEBOOKS = launch.ROOT / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

import figures  # noqa: E402  (after the path is set)
import lesson  # noqa: E402
from solutions import SOLUTIONS  # noqa: E402

PATHS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
TIME_LIMIT = 300  # seconds for a notebook; two quiet cores take a minute


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, 4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, prefix):
    """Returns {number: source} of the cells with the tag prefix-number."""
    return {int(tag.split("-")[1]): cell.source for cell in code_cells(notebook)
            for tag in cell.metadata.get("tags", []) if tag.startswith(f"{prefix}-")}


# The module

@pytest.fixture
def changes(tmp_path, monkeypatch, capsys):
    """Two small steps: one changed file, one that stays, one new one."""
    monkeypatch.setattr(lesson, "ROOT", tmp_path)
    monkeypatch.setattr(lesson, "display", lambda markdown: print(markdown.data))
    for step in ("a", "b"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "same.py").write_text("x = 1\n")
    body = [f"line_{n} = {n}" for n in range(20)]
    (tmp_path / "a" / "changed.py").write_text("\n".join(body))
    body = ["line_0 = None", *body[1:10], "def f():", "    y = 2", *body[10:]]
    (tmp_path / "b" / "changed.py").write_text("\n".join(body))
    (tmp_path / "b" / "new.py").write_text(
        '"""New."""\nimport os\n\n# why\nA = 1\n\n\nclass C:\n    b = 2\n\n    def m(self):\n        pass\n'
        '\n\ndef g():\n    """Doc."""\n')
    return lesson.Changes("a", "b")


def test_a_hunk_is_shown_by_a_line_in_it(changes, capsys):
    changes.hunk("changed.py", "y = 2")
    shown = capsys.readouterr().out
    assert "`changed.py`, line 11" in shown and "+    y = 2" in shown and " line_9 = 9" in shown
    assert "line_0" not in shown


@pytest.mark.parametrize("text", ["no such line", "line_9"])  # line_9 is there, but hasn't changed
def test_a_hunk_that_is_not_there_raises(changes, text):
    with pytest.raises(ValueError, match="0 hunks"):
        changes.hunk("changed.py", text)


def test_an_ambiguous_hunk_raises(changes):
    with pytest.raises(ValueError, match="2 hunks"):
        changes.hunk("changed.py", "e")


def test_pieces_of_a_new_file(changes, capsys):
    assert list(lesson.pieces(changes.new["new.py"])) == ["", "A", "C", "C.m", "g"]
    changes.piece("new.py", "A")
    assert "# why\nA = 1\n```" in capsys.readouterr().out
    changes.piece("new.py", "C.m")
    assert "class C:\n    b = 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no 'h'"):
        changes.piece("new.py", "h")
    with pytest.raises(ValueError, match="not new"):
        changes.piece("changed.py", "f")


def show_all_but_one(changes):
    changes.hunk("changed.py", "line_0")
    changes.hunk("changed.py", "y = 2")
    for name in ("", "A", "C"):
        changes.piece("new.py", name)


def test_the_end_asks_for_what_was_not_shown(changes, capsys):
    show_all_but_one(changes)
    with pytest.raises(AssertionError, match="never shown:\nnew.py:15: .def g"):
        changes.finish()
    with pytest.raises(AssertionError, match="nothing of same.py is left out"):
        changes.finish("same.py")
    changes.finish("new.py")
    assert "outside new.py" in capsys.readouterr().out
    changes.piece("new.py", "g")
    changes.finish()


def test_the_first_step_is_all_new(changes):
    assert {file for file, *_ in lesson.Changes(None, "b").unseen} == {"same.py", "changed.py", "new.py"}


@pytest.mark.parametrize("answer, verdict, word", [
    (lambda: 3, True, "right"), (lambda: 4, False, "not right yet"), (lambda: 1 / 0, False, "ZeroDivision")])
def test_check(answer, verdict, word, capsys):
    def is_three(answer):
        assert answer() == 3

    assert lesson.check(answer, is_three) is verdict
    assert word in capsys.readouterr().out


def test_check_of_an_empty_answer(capsys):
    def empty():
        raise NotImplementedError

    assert lesson.check(empty, lambda answer: answer()) is None
    assert capsys.readouterr().out == "not solved yet\n"


def test_the_timetable_of_a_schedule():
    """Two stages, two micro-batches, all forward and all backward: 3 of 9 units idle on either stage."""
    def afab(stage, num_stages, num_micro_batches):
        return [(action, i) for action in ("forward", "backward") for i in range(num_micro_batches)]

    lanes = lesson.timetable(afab, 2, 2)
    assert [[(span.name, span.start, span.end) for span in lane] for lane in lanes] == [
        [("forward 0", 0, 1), ("forward 1", 1, 2), ("backward 0", 5, 7), ("backward 1", 7, 9)],
        [("forward 0", 1, 2), ("forward 1", 2, 3), ("backward 0", 3, 5), ("backward 1", 5, 7)]]
    assert lesson.idle_share(lanes) == pytest.approx(1 / 3)
    assert lesson.most_in_flight(afab(0, 2, 2)) == 2
    with pytest.raises(ValueError, match="circle"):
        lesson.timetable(lambda stage, *sizes: afab(stage, *sizes)[::1 if stage else -1], 2, 2)


def event(name, start, duration, **args):
    return {"cat": "user_annotation", "name": name, "ts": start * 1e3, "dur": duration * 1e3, "args": args}


@pytest.fixture
def trace(tmp_path):
    """Training steps 2 and 3, in milliseconds."""
    tensor = {"Input Dims": [[2, 8]], "Input type": ["double"]}
    events = [event("ProfilerStep#1", 0, 100), event("ProfilerStep#2", 100, 100),
              event("forward 0", 10, 20), event("backward 0", 30, 40), event("forward 0", 110, 20),
              event("Optimizer.step#AdamW.step", 180, 10),
              event("gloo:all_reduce", 115, 5, **tensor), event("gloo:all_reduce", 122, 5, **tensor),
              event("gloo:all_reduce", 140, 5, **{"Input Dims": [[]], "Input type": ["long int"]}),
              *({"name": "[memory]", "ts": time * 1e3, "args": {"Total Allocated": size}}
                for time, size in ((90, 1), (101, 5), (150, 25), (199, 6)))]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    return lesson.Trace(tmp_path / "rank0.json")


def test_spans_of_a_training_step(trace):
    assert [span.name for span in trace.spans("forward", "backward", step=2)] == ["forward 0", "backward 0"]
    (forward,) = trace.spans("forward", step=3)
    assert (forward.kind, forward.start, round(forward.end, 6)) == ("forward", 0.11, 0.13)
    assert [span.name for span in trace.spans("optimizer", step=3)] == ["optimizer"]
    assert trace.memory(3)[1] == [0, 20, 1]


def test_communication_is_counted(trace):
    assert trace.communication(2) == []
    whole, number = trace.communication(3)
    assert whole == {"operation": "all_reduce", "shape": "[2, 8]", "type": "double",
                     "times": 2, "bytes each": 128, "bytes in all": 256}
    assert number["shape"] == "[]" and number["bytes in all"] == 8
    assert [row["during"] for row in trace.communication(3, during=["forward"])] == ["forward", "neither"]


@pytest.mark.parametrize("how", ["observe", "warm"])
def test_a_run_and_what_observing_adds(capsys, how):
    """A real run of step 2: its traces have the bytes of all gradients, and each rank holds AdamW's share."""
    run = lesson.run("step02_data_parallel/train.py", "--seq_len", 16, "--steps", 4, nproc=2, **{how: True})
    assert capsys.readouterr().out.startswith("$ torchrun --nproc_per_node 2 step02_data_parallel/train.py ")
    assert run.series("step") == [1, 2, 3, 4] and len(run.traces) == len(run.holds) == 2
    for trace, holds in zip(run.traces, run.holds):
        assert holds["weights"] == holds["gradients"] == 4 * 803_968
        assert 2 * holds["weights"] < holds["optimizer state"] < 2 * holds["weights"] + 500
        gradients = [row["bytes in all"] for row in trace.communication() if row["bytes each"] > 8]
        assert sum(gradients) == holds["gradients"]
        assert max(trace.memory()[1]) > 2**20
        assert [span.name for span in trace.spans("forward", "backward")] == [
            "forward 0", "backward 0", "forward 1", "backward 1"]


def test_a_run_that_fails_says_why():
    with pytest.raises(AssertionError, match="tp 2|--nproc_per_node 2"):
        lesson.run("step02_data_parallel/train.py", "--dp", 2)


@pytest.mark.parametrize("kinds", [
    ["forward", "backward", "all_reduce", "all_gather", "send", "recv", "optimizer"],
    ["weights", "gradients", "optimizer state", "activations"],
    ["weights", "one", "two"]])
def test_no_two_kinds_differ_by_colour_alone(kinds):
    assert len({style["hatch"] for style in figures.looks(kinds).values()}) == len(kinds)
    assert len({str(line) for _, line, _ in figures.LINES}) == len({mark for *_, mark in figures.LINES}) == 7


class Curve:
    def __init__(self, *losses):
        self.losses = losses

    def series(self, name):
        return {"step": [1, 2], "loss": self.losses, "grad_norm": self.losses}[name]


def test_curves():
    figure = figures.draw_curves({"one": Curve(2.0, 1.0), "other": Curve(2.0, 1.1)})
    loss, norm, difference = figure.axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 1.0], [2.0, 1.1]]
    assert [text.get_text() for text in norm.get_legend().get_texts()] == ["one", "other"]
    assert list(difference.lines[0].get_ydata()) == pytest.approx([1e-17, 0.1])
    assert all(ax.get_xlabel() == "training step" for ax in figure.axes)


def test_timelines_and_bars():
    spans = [lesson.Span("forward 0", 5, 1), lesson.Span("backward 0", 6, 2)]
    (ax,) = figures.draw_timeline({"stage 0": spans, "stage 1": spans[:1]}, unit="forward passes").axes
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    assert [(bar.x0, bar.x1) for bar in bars] == [(0, 1), (1, 3), (0, 1)]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["forward", "backward"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1"]
    (ax,) = figures.draw_stacked({"rank 0": {"weights": 1, "gradients": 3}}, "MiB").axes
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 1), (1, 3)]


def test_holdings_and_meshes():
    figure = figures.draw_holdings({"weights": (2, 1)}, {"rank 0": {"weights": [(1, 0)]}})
    missing, held = figure.axes[0].patches
    assert missing.get_facecolor() == (1, 1, 1, 1) and held.get_facecolor() != (1, 1, 1, 1)
    figure = figures.draw_mesh({"pp": 2, "tp": 3})
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "3", "4", "5"]


# What every committed notebook has to be

def test_notebooks_are_named_after_the_steps():
    steps = {path.name.removeprefix("step") for path in launch.ROOT.glob("step0*/")}
    for path in PATHS:
        assert path.stem in steps | {"00_processes_and_collectives"}, path.name


def test_it_is_committed_with_the_outputs_of_one_execution(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert [cell for cell in cells if cell.outputs and "lesson.run(" in cell.source], "no run of the trainer"


def test_its_file_has_nothing_of_the_machine(notebook, path):
    """So that executing it again changes no more than numbers and figures."""
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    text = "\n".join(str(value) for cell in code_cells(notebook) for output in cell.outputs
                     for value in [output.get("text", ""), *output.get("data", {}).values()])
    text = re.sub(r"[A-Za-z0-9+/=\n]{200,}", "", text)  # images
    found = re.findall(r"(?:/home|/root|/tmp|/usr|/Users|/var|/work|/opt|[A-Z]:\\|site-packages)\S*", text)
    assert not found and str(launch.ROOT) not in text, found


def test_figures_have_captions(notebook):
    """Each image is described in words, for those who can't see it, and the words stand below it too."""
    for cell in code_cells(notebook):
        for output, following in zip(cell.outputs, [*cell.outputs[1:], None]):
            if "image/png" in output.get("data", {}):
                assert output.metadata["image/png"]["alt"]
                assert following.data["text/markdown"].startswith("*")


def test_it_shows_every_changed_line_of_its_step(notebook, path, capsys):
    """Runs the cells that show the difference, against the folders as they are: finish() raises otherwise."""
    cells = [cell.source for cell in code_cells(notebook) if cell.source.startswith("changes")]
    if path.stem.startswith("00_"):
        assert not cells
        return
    exec("\n".join(cells), {"lesson": lesson})
    assert "shown: every changed line" in capsys.readouterr().out


def test_exercises_can_be_solved_and_failed(notebook, path, monkeypatch):
    """An empty answer, the solution and a wrong answer, each given to the notebook's own check."""
    from IPython.core.interactiveshell import InteractiveShell
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(figures, "display", lambda *args: None)
    monkeypatch.setattr(lesson, "display", lambda *args: None)
    exercises, checks = tagged(notebook, "exercise"), tagged(notebook, "check")
    assert list(exercises) == list(checks) == list(range(1, len(checks) + 1)) and 3 <= len(checks) <= 5
    needed = [cell.source for cell in code_cells(notebook)
              if {"setup", "needed"} & set(cell.metadata.get("tags", []))]
    shell = InteractiveShell.instance()
    for source in needed:
        shell.run_cell(source).raise_error()
    for number, solution in SOLUTIONS[path.stem].items():
        for verdict, answer in {None: exercises[number], **solution}.items():
            shell.run_cell(answer).raise_error()
            result = shell.run_cell(checks[number].rstrip().removesuffix(";"))
            result.raise_error()
            assert result.result is verdict, f"exercise {number}\n{answer}"
    assert set(SOLUTIONS[path.stem]) >= set(list(checks)[:-1]), "only the open-ended one may lack a solution"


def test_it_executes_from_top_to_bottom(path, notebook, request):
    if not request.config.getoption("--notebooks"):
        pytest.skip("takes a minute: --notebooks runs it")
    from nbclient import NotebookClient
    NotebookClient(notebook, timeout=TIME_LIMIT, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    printed = ["".join(output.text for output in cell.outputs if output.output_type == "stream")
               for cell in code_cells(notebook)]
    assert len([text for text in printed if text == "not solved yet\n"]) == len(tagged(notebook, "check"))
