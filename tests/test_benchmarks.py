"""tests/benchmarks/compare.py: every rival still runs, computes the same losses, and is measured."""

import sys

import pytest

import launch

sys.path.append(str(launch.ROOT / "tests/benchmarks"))

import compare  # noqa: E402  (after the path is set)

TINY = ["--hidden_size", 32, "--num_hidden_layers", 2, "--num_attention_heads", 4, "--num_key_value_heads", 2,
        "--intermediate_size", 48, "--seq_len", 32, "--mbs", 1]


@pytest.mark.parametrize("name", compare.PAIRS)
def test_a_pair(monkeypatch, name):
    monkeypatch.setattr(compare, "SHAPE", TINY)
    row = compare.compare(name, rounds=3)
    assert row["rounds"] == 3 and row["ms"] > 0 and row["rival_ms"] > 0
    assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


def test_losses_that_differ_are_not_compared(monkeypatch):
    monkeypatch.setattr(compare, "SHAPE", TINY)
    monkeypatch.setattr(compare, "MOST", -1.0)
    with pytest.raises(AssertionError, match="training step 1: losses"):
        compare.compare("single", rounds=3)
