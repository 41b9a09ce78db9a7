"""The promise "the layout never changes the run" as a table of layouts, and what runs and compares them.

A later step joins with lines in LAYOUTS.
"""

import json
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import launch

# Odd sizes, but for what tp 2, 3 and 4 and 2 x cp have to divide: heads, intermediate size, vocabulary and
# sequence. Layers over stages are uneven for pp 2, 3 and 4.
SHAPE = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 24, "num_key_value_heads": 12,
         "intermediate_size": 60, "vocab_size": 276}
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, MAX_GRAD_NORM = 12, 3, 0.5
OPTIONS = ["--seq_len", 24, "--global_batch_size", GLOBAL_BATCH_SIZE, "--warmup_steps", 2,
           "--learning_rate", 0.005, "--max_grad_norm", MAX_GRAD_NORM]
# Relative, of losses and norms; of weights ten times that. Training amplifies rounding, by how much depends
# on the seed: in float32, 1e-7 to 1.4e-5 was measured over nine seeds.
TOLERANCES = {"float64": 1e-11, "float32": 1e-3}


@dataclass(frozen=True)
class Layout:
    """A way to run a step. The default is the single process's: 4 micro-batches of 3 sequences."""

    step: str  # "step03": the first letters of its folder
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    mbs: int = MICRO_BATCH_SIZE
    flags: str = ""
    dtype: str = "float64"
    tied: bool = False  # head and embedding share a weight
    steps: int = 10  # training steps
    seed: int = 0  # of weights and data
    real: bool = False  # by torchrun, in place of warm processes
    before: str = ""  # "pp2 tp2": the first half ran in this layout, and a checkpoint takes it on to this one

    @property
    def axes(self):
        return {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}

    @property
    def nproc(self):
        return math.prod(self.axes.values())

    @property
    def num_micro_batches(self):
        return GLOBAL_BATCH_SIZE // (self.mbs * self.dp)

    @property
    def tolerance(self):
        """A single process that computes the same in the same order arrives at the same bits."""
        return 0 if self.nproc == 1 and self.mbs == MICRO_BATCH_SIZE else TOLERANCES[self.dtype]

    def __str__(self):
        sizes = "".join(f"{name}{size}" for name, size in self.axes.items() if size > 1)
        parts = [self.step, sizes or "single", f"mbs{self.mbs}" if self.nproc == 1 and self.tolerance else "",
                 self.flags.split()[-1] if self.flags else "", self.dtype if self.dtype != "float64" else "",
                 "tied" if self.tied else "", "torchrun" if self.real else "",
                 f"after-{self.before.replace(' ', '')}" if self.before else ""]
        return "-".join(part for part in parts if part)


LAYOUTS = [
    Layout("step01", mbs=12),
    Layout("step01", mbs=1),

    Layout("step02"),
    Layout("step02", dp=2, mbs=2),
    Layout("step02", dp=3, mbs=1),
    Layout("step02", dp=4),
    Layout("step02", dp=2, tied=True),
    Layout("step02", dp=2, mbs=2, dtype="float32"),
    Layout("step02", dp=2, mbs=2, real=True),

    Layout("step03"),
    Layout("step03", tp=2),  # its first shard of the vocabulary has all tokens of the text: what goes wrong
    Layout("step03", tp=3),  # with these shards shows with tp 3 and 4
    Layout("step03", tp=4),
    Layout("step03", dp=2, mbs=2),
    Layout("step03", dp=2, tp=2, mbs=2),
    Layout("step03", tp=2, tied=True),
    Layout("step03", dp=2, tp=2, mbs=2, dtype="float32"),
    Layout("step03", tp=2, real=True),

    Layout("step04"),
    Layout("step04", pp=2),
    Layout("step04", pp=3),
    Layout("step04", pp=4),
    Layout("step04", dp=2, pp=2, mbs=2),
    Layout("step04", pp=2, tp=2),
    Layout("step04", dp=2, pp=2, tp=2, mbs=1),
    Layout("step04", pp=2, tied=True),
    Layout("step04", pp=2, tp=2, dtype="float32"),
    Layout("step04", pp=2, real=True),

    Layout("step05"),
    Layout("step05", pp=3),
    *(Layout("step05", flags=f"--pp_engine {engine}", **layout) for engine in ("afab", "1f1b") for layout in (
        dict(pp=2),
        dict(pp=3),
        dict(pp=4),
        dict(dp=2, pp=2, mbs=2),
        dict(pp=2, tp=2),
        dict(dp=2, pp=2, tp=2, mbs=1),
        dict(pp=2, tied=True))),
    Layout("step05", pp=2, tp=2, dtype="float32"),
    Layout("step05", pp=2, real=True),

    Layout("step06"),
    Layout("step06", cp=2),
    Layout("step06", cp=3),
    Layout("step06", cp=4),
    Layout("step06", dp=2, cp=2, mbs=2),
    Layout("step06", pp=2, cp=2),
    Layout("step06", cp=2, tp=2),
    Layout("step06", pp=2, cp=2, tied=True),
    Layout("step06", cp=2, tp=2, dtype="float32"),
    Layout("step06", cp=2, real=True),

    *(Layout("step07", dp, pp, cp, tp, mbs=2 if dp > 1 else 3)
      for dp, pp, cp, tp in product((1, 2), repeat=4)),
    Layout("step07", dp=2, pp=2, cp=2, tp=2, mbs=2, tied=True, steps=5),
    Layout("step07", dp=2, pp=2, cp=2, tp=2, mbs=2, dtype="float32", steps=5),
    Layout("step07", dp=3, pp=3, mbs=1),
    Layout("step07", dp=2, pp=2, tp=2, mbs=1, flags="--pp_engine afab"),
    Layout("step07", dp=2, tp=2, mbs=2, real=True),
    *(Layout("step07", before=before, steps=6, **layout) for before, layout in (
        ("pp1", dict()),
        ("pp2 tp2", dict(dp=4)),
        ("cp2", dict(tp=2)),
        ("dp2 cp2", dict(pp=4)),
        ("tp4", dict(pp=2, cp=2, tied=True)),
        ("pp3", dict(dp=2, tp=2, mbs=2, tied=True)),
        ("dp2 pp2 tp2", dict(tp=3)),
        ("dp3", dict(dp=2, pp=2, cp=2, tp=2, mbs=2)))),
]


def step_folder(steps, step):
    """The folder of "step03" among the steps, or None."""
    return next(iter(sorted(Path(steps).glob(f"{step}_*/"))), None)


@cache
def tied_model():
    """A folder with the config.json of the model with a tied weight. It lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    config = {"model_type": "llama", **SHAPE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    Path(folder.name, "config.json").write_text(json.dumps(config))
    return folder


def arguments(layout):
    """The command line of a layout."""
    argv = [*OPTIONS, "--steps", layout.steps, "--seed", layout.seed, "--dtype", layout.dtype,
            "--mbs", layout.mbs, *layout.flags.split()]
    if layout.tied:
        argv += ["--model_name", tied_model().name]
    else:
        argv += [word for name, size in SHAPE.items() for word in (f"--{name}", size)]
    for name, size in layout.axes.items():
        if size > 1 and name != "dp":  # dp is what the world leaves
            argv += [f"--{name}", size]
    if layout.nproc > 1:
        argv += ["--bucket_cap_mb", 0.25]  # several buckets
    return argv


def run_layout(folder, layout, timeout=120):
    """Runs the step in this folder. Returns a launch.Run, whichever way it ended."""
    if layout.before:
        return run_both_halves(folder, layout, timeout)
    if not layout.real:
        return launch.train(folder, *arguments(layout), nproc=layout.nproc, timeout=timeout)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "metrics.jsonl")
        run = launch.torchrun(folder, *arguments(layout), "--use_cpu", "--metrics_file", file,
                              nproc=layout.nproc, timeout=timeout)
        run.metrics = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return run


def run_both_halves(folder, layout, timeout):
    """Runs the layout before with a checkpoint halfway, and goes on from there in this one."""
    axes = {part[:2]: int(part[2:]) for part in layout.before.split()}
    half = layout.steps // 2
    with tempfile.TemporaryDirectory() as scratch:
        flags = f"{layout.flags} --save_dir {scratch} --save_every {half}"
        single = dict(dp=1, pp=1, cp=1, tp=1, mbs=1 if "dp" in axes else MICRO_BATCH_SIZE)
        first = run_layout(folder, replace(layout, **{**single, **axes}, before="", flags=flags), timeout)
        for checkpoint in sorted(Path(scratch).glob("step-*"))[1:]:
            shutil.rmtree(checkpoint)
        if any(first.statuses):
            return first
        second = run_layout(folder, replace(layout, before="", flags=f"{flags} --resume"), timeout)
        second.metrics = first.metrics[:half] + second.metrics
        return second


def reference(layout):
    """What a layout's run has to equal: the run of this repository's step 1."""
    return single_process(layout.dtype, layout.tied, layout.steps, layout.seed)


@cache
def single_process(dtype, tied, steps, seed):
    layout = Layout("step01", dtype=dtype, tied=tied, steps=steps, seed=seed)
    run = run_layout(step_folder(launch.ROOT, "step01"), layout).check()
    clipped = [norm > MAX_GRAD_NORM for norm in run.series("grad_norm")]
    assert len(clipped) == steps and sum(clipped) > steps / 2, "most training steps have to clip"
    return run
