"""The shared test: the layout never changes the run.

Every layout of every step (same_run.py has the table) against step 1: loss and gradient norm of each training
step and the weights at the end.

    pytest tests/test_same_run.py -k step03                      one step
    pytest tests/test_same_run.py --steps DIR                    steps in another folder, a student's
    pytest tests/test_same_run.py --run_seed 7                   other weights and data
"""

from dataclasses import replace

import pytest

import same_run
from diagnose import diagnose


def pytest_generate_tests(metafunc):
    """A test for each layout whose step is there."""
    steps = metafunc.config.getoption("--steps")
    layouts = [layout for layout in same_run.LAYOUTS if same_run.step_folder(steps, layout.step)]
    metafunc.parametrize("layout", layouts, ids=str)


def test_same_run(steps, run_seed, layout):
    layout = replace(layout, seed=run_seed)
    reference = same_run.reference(layout)
    run = same_run.run_layout(same_run.step_folder(steps, layout.step), layout)
    diagnosis = diagnose(run, reference, layout.axes, layout.num_micro_batches, layout.tolerance)
    if diagnosis:
        pytest.fail(f"{layout}: {diagnosis}", pytrace=False)
