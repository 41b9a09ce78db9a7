"""What else a layout costs: memory, and the time from the command to the end of the first training step."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launch
import run_workers
import same_run

# The least that several processes have to do before they can train.
LEAST = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print("        1", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def memory(pairs, shape):
    """Returns {pair: [(bytes by formula, bytes measured) of each process]}.

    The formula is that of step 7's --dry_run, which has all earlier steps' code. Measured is the most that
    the CPU's allocator had given out at any time of two training steps.
    """
    plan = launch.load(same_run.step_folder(launch.ROOT, "step07"))
    rows = {}
    for name, pair in pairs.items():
        argv = [*map(str, shape), "--steps", "2", *pair.flags.split(), "--use_cpu"]
        args, config = plan.arguments.parse_args([*argv, "--dry_run"])
        planned = [plan.plan.plan_stage(args, config, stage).total for stage in range(args.pp_size)]
        with tempfile.TemporaryDirectory() as scratch:
            run = launch.fork(measure_peak, scratch, same_run.step_folder(launch.ROOT, pair.step), argv,
                              nproc=pair.nproc, timeout=600).check()
        stages = [rank // (args.cp_size * args.tp_size) % args.pp_size for rank in range(pair.nproc)]
        rows[name] = [(planned[stage], measured) for stage, measured in zip(stages, run.results)]
    return rows


def measure_peak(scratch, folder, argv):
    os.chdir(scratch)
    return run_workers.peak_bytes(folder, argv)


def startup(repeats=3):
    """Returns {processes: {"step": seconds, "least": seconds, "ratio": step / least}}, all under torchrun.

    step: step 7 to the end of its first training step; least: a program that only starts the process group.
    """
    layouts = {1: "", 4: "--dp 2 --tp 2", 16: "--dp 2 --pp 2 --cp 2 --tp 2"}
    program = same_run.step_folder(launch.ROOT, "step07") / "train.py"
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        least = Path(scratch, "least.py")
        least.write_text(LEAST)
        for nproc, flags in layouts.items():
            options = [*flags.split(), "--steps", "1", "--use_cpu"]
            turns = [(first_row(program, options, nproc), first_row(least, [], nproc))
                     for _ in range(repeats)]
            rows[nproc] = {"step": statistics.median(turn[0] for turn in turns),
                           "least": statistics.median(turn[1] for turn in turns),
                           "ratio": statistics.median(turn[0] / turn[1] for turn in turns)}
    return rows


def first_row(program, options, nproc, timeout=300):
    """Seconds from the command to the line that begins with 1, the first training step."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(program), *options]
    start = time.perf_counter()
    process = subprocess.Popen(["timeout", "--kill-after", "1", str(timeout), *argv], stdout=subprocess.PIPE,
                               text=True)
    seconds = [time.perf_counter() - start for line in process.stdout if line.split()[:1] == ["1"]]
    status = process.wait()
    assert seconds and status == 0, f"{' '.join(argv)} ended with {status}"
    return seconds[0]
