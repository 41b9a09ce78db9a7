"""Draws the losses and gradient norms of all steps on top of one another, each in a layout of its own.

    python tools/losses.py notebooks/losses.png

Seven runs on the CPU, a minute or two on two cores.
"""

import argparse
import math
import sys
from pathlib import Path

from steps import ROOT, folders

sys.path += [str(ROOT / "tests"), str(ROOT / "notebooks")]

LAYOUTS = {"step01": {}, "step02": {"dp": 2}, "step03": {"tp": 2}, "step04": {"pp": 2}, "step05": {"pp": 4},
           "step06": {"cp": 2}, "step07": {"dp": 2, "pp": 2, "cp": 2, "tp": 2}}
OPTIONS = "--dtype", "float64", "--seq_len", 64, "--mbs", 2, "--learning_rate", 0.001


def draw(steps=30):
    """Returns the figure."""
    import launch
    from figures import draw_curves
    runs = {}
    for step, sizes in LAYOUTS.items():
        layout = [word for name, size in sizes.items() for word in (f"--{name}", size)]
        label = " ".join([f"step {step[-1]}", *(f"{name} {size}" for name, size in sizes.items())])
        runs[label] = launch.train(folders()[step], *OPTIONS, "--steps", steps, *layout,
                                   nproc=math.prod(sizes.values()), timeout=300).check()
    figure = draw_curves(runs)
    for ax in figure.axes:  # one legend for all
        ax.get_legend().remove()
    figure.set_figwidth(11)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser("losses.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the image to be written")
    args = parser.parse_args(argv)
    draw().savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
