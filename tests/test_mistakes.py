"""The shared test can fail: it catches each planted mistake and names its kind."""

from dataclasses import replace

import pytest

import launch
import same_run
from diagnose import diagnose
from mistakes import MISTAKES, plant


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_shared_test_catches(steps, tmp_path, mistake):
    if steps != launch.ROOT:
        pytest.skip("mistakes are planted into this repository's steps")
    layout = replace(mistake.layout, steps=4)
    run = same_run.run_layout(plant(mistake, tmp_path), layout)
    diagnosis = diagnose(run, same_run.reference(layout), layout.axes, layout.num_micro_batches,
                         same_run.TOLERANCES[layout.dtype])
    assert diagnosis, "not caught"
    print(diagnosis)
    assert diagnosis.kind in (mistake.kind, *mistake.also), diagnosis
    assert mistake.mentions in diagnosis.details, diagnosis


def test_without_the_mistake_the_layout_passes():
    """What is caught is the mistake: the shared test runs the same layouts of the steps as they are."""
    passing = {replace(layout, flags="") for layout in same_run.LAYOUTS} | {same_run.Layout("step01")}
    for mistake in MISTAKES.values():
        assert replace(mistake.layout, flags="") in passing, mistake.name
