"""The diagnosis itself, on made-up numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from diagnose import ENDED, FACTOR, FIRST_LOSS, PART, UPDATE, WEIGHTS, diagnose

LOSSES, NORMS = [5.0, 4.0, 3.0, 2.5], [2.0, 1.5, 3.0, 1.0]
WHOLE = {"a.weight": torch.arange(1.0, 13.0).view(4, 3), "norm.weight": torch.ones(3)}


def made_up(losses=LOSSES, norms=NORMS, results=(WHOLE,), statuses=(0,), output=""):
    metrics = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms)]
    return SimpleNamespace(statuses=statuses, output=output, metrics=metrics, results=results)


def shards(**changes):
    """What two tensor-parallel ranks hold at the end."""
    first, second = ({**WHOLE, "a.weight": part} for part in WHOLE["a.weight"].chunk(2))
    return [first, {**second, **{name.replace("_", "."): weight for name, weight in changes.items()}}]


def kind_of(run, axes={"tp": 2}, num_micro_batches=3, tolerance=1e-10):
    diagnosis = diagnose(run, made_up(), axes, num_micro_batches, tolerance)
    return diagnosis and (diagnosis.kind, diagnosis.details)


def test_the_same_run():
    assert kind_of(made_up()) is None
    assert kind_of(made_up(results=shards())) is None
    assert kind_of(made_up(results=[])) is None, "a real run returns no weights"
    assert kind_of(made_up([loss * (1 + 1e-12) for loss in LOSSES])) is None
    assert kind_of(made_up([math.nextafter(loss, 9) for loss in LOSSES]), tolerance=0)[0] == FIRST_LOSS


@pytest.mark.parametrize("run, mentions", [
    (made_up(statuses=[0, 1], output="x\nValueError: oh"), "ValueError: oh"),
    (made_up(statuses=[-9, -9], losses=LOSSES[:2]), "2 of 4"),
    (made_up(losses=LOSSES[:3]), "3 of 4"),
    (made_up(losses=[]), "0 of 4"),
])
def test_a_run_that_does_not_end(run, mentions):
    kind, details = kind_of(run)
    assert kind == ENDED and mentions in details


def test_first_loss():
    for losses in ([5.1, 4.0, 3.0, 2.5], [math.nan, 4.0, 3.0, 2.5], [math.inf] * 4):
        kind, details = kind_of(made_up(losses))
        assert kind == FIRST_LOSS and "training step 1" in details and "The first norm is right" in details
    kind, details = kind_of(made_up([2.51, 2.0, 1.5, 1.2], [1.0] * 4))
    assert kind == FIRST_LOSS and "tp" in details and "The first norm is right" not in details


@pytest.mark.parametrize("factor, mentions", [
    (2, "2: tp"), (1 / 3, "1 / 3: number of micro-batches"), (6, "tp x number of micro-batches"),
    (math.sqrt(2), "the square root of tp"), (4, "tp squared"), (1.7, "nothing in this layout"),
])
def test_factor(factor, mentions):
    wobble = (1.0, 1 + 1e-4, 1 - 1e-4, 1.3)
    kind, details = kind_of(made_up(norms=[norm * factor * w for norm, w in zip(NORMS, wobble)]))
    assert kind == FACTOR and mentions in details


@pytest.mark.parametrize("factors", [
    (1.4, 1.3, 1.5, 1.0), (1.0001, 1.0002, 1.0003, 1.0), (math.nan,) * 4, (math.inf,) * 4, (0.0,) * 4])
def test_part(factors):
    kind, details = kind_of(made_up(norms=[norm * factor for norm, factor in zip(NORMS, factors)]))
    assert kind == PART and f"{factors[0]:.6g}, {factors[1]:.6g}" in details


def test_update():
    for run in (made_up(losses=[5.0, 4.0, 3.0001, 2.5]), made_up(norms=[2.0, 1.5, 3.0001, 1.0])):
        kind, details = kind_of(run)
        assert kind == UPDATE and "training step 3" in details


@pytest.mark.parametrize("results, mentions", [
    (shards(norm_weight=torch.tensor([1.0, 1.0, 1.1])), "rank 1: norm.weight is off"),
    (shards(a_weight=WHOLE["a.weight"][:2]), "rank 1: a.weight is off"),
    (shards(a_weight=WHOLE["a.weight"] * math.nan), "rank 1: a.weight is off"),
    (shards(a_weight=torch.ones(1, 3)), "no part of"),
    (shards(b_weight=torch.ones(3)), "no weight of the single process"),
    ([shards()[0], {"norm.weight": torch.ones(3)}], "nobody has all of a.weight"),
    ([shards()[0], None], "nobody has all of a.weight"),
    ([{}, {}], "nobody has all"),
])
def test_weights(results, mentions):
    kind, details = kind_of(made_up(results=results))
    assert kind == WEIGHTS and mentions in details, details


def test_weights_of_every_replica_and_stage():
    stages = [{"a.weight": WHOLE["a.weight"]}, {"norm.weight": WHOLE["norm.weight"]}]
    axes = {"dp": 2, "pp": 2}
    assert kind_of(made_up(results=stages * 2), axes) is None
    assert "dp rank 1" in kind_of(made_up(results=[*stages, stages[0], stages[0]]), axes)[1]
