"""tests/benchmarks: every rival still runs and computes the same, all is measured, and the README says it."""

import io
import json
import sys

import pytest

import launch

sys.path.append(str(launch.ROOT / "tests/benchmarks"))

import compare  # noqa: E402  (after the path is set)
import costs  # noqa: E402
import report  # noqa: E402

TINY = ["--hidden_size", 32, "--num_hidden_layers", 2, "--num_attention_heads", 4, "--num_key_value_heads", 2,
        "--intermediate_size", 48, "--seq_len", 32, "--mbs", 1, "--learning_rate", 0.0001]
FIGURES = launch.ROOT / "tests/benchmarks/figures.json"


@pytest.mark.parametrize("name", compare.PAIRS)
def test_a_pair(monkeypatch, name):
    monkeypatch.setattr(compare, "SHAPE", TINY)
    row = compare.compare(name, rounds=3)
    assert row["rounds"] == 3 and all(ms > 0 for who, ms in row["ms"].items())
    keys = ["over_rival"]
    if row["processes"] > 1:
        keys += ["over_single", "apart_over_single", "allowed_over_single"]
        assert set(row["ms"]) == {"step", "rival", "single", "apart", "messages"}
    for key in keys:
        median, low, high = row[key]
        assert 0 < low <= median <= high


@pytest.mark.parametrize("name, nth", [("single", 0), ("tp", 1)], ids=["loss", "gradient norm"])
def test_what_differs_is_not_compared(monkeypatch, name, nth):
    """A rival that leaves something out is caught by its loss or its gradient norm."""
    monkeypatch.setattr(compare, "SHAPE", TINY)
    monkeypatch.setattr(compare, "take_turns", [other_loss, other_norm][nth])
    with pytest.raises(AssertionError, match=f"{name}, step 2: "):
        compare.compare(name, rounds=3)


def other_loss(*args):
    return [{"step": (1.0, (5.0, 1.0)), "rival": (1.0, (5.0 + 0.1 * (i == 1), 1.0))} for i in range(6)]


def other_norm(*args):
    return [{"step": (1.0, (5.0, 1.0)), "rival": (1.0, (5.0, 1.0 - 0.1 * (i == 1)))} for i in range(6)]


def test_memory():
    """Each schedule is held against its own formula."""
    rows = costs.memory({name: compare.PAIRS[name] for name in ("single", "afab", "1f1b")}, TINY)
    assert [len(ranks) for ranks in rows.values()] == [1, 2, 2]
    for ranks in rows.values():
        for planned, measured in ranks:
            assert planned == pytest.approx(measured, rel=0.1)


def test_start_up_of_a_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(costs.LEAST)
    assert 0 < costs.first_row(program, [], 2) < 60
    program.write_text("raise SystemExit(3)")
    with pytest.raises(AssertionError, match="ended with 1"):
        costs.first_row(program, [], 1)


def test_the_readme_has_the_figures():
    figures = json.loads(FIGURES.read_text())
    assert report.tables(figures) in (launch.ROOT / "README.md").read_text(encoding="utf-8")
    report.draw(figures).savefig(io.BytesIO())
