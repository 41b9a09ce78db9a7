"""Runs a step's train.py: in processes forked from one warm server (fast), or with torchrun (as users do).

Every run has a time limit, at which all of its processes are killed.
"""

import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
GUARDED = False  # grading (conftest.py's --guard): forked processes are kept in by guard.py


def start_server():
    """Starts the server that has loaded warm.py."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # it ignores sys.path before Python 3.13
    SERVER.set_forkserver_preload(["warm"])
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@dataclass
class Run:
    """What is left of a run: exit statuses, all output, a metrics dict a step, what ranks returned."""

    statuses: list
    output: str
    metrics: list = field(default_factory=list)
    results: list = field(default_factory=list)

    def check(self):
        assert not any(self.statuses), f"exit statuses {self.statuses}\n{self.output}"
        return self

    def series(self, name):
        return [row[name] for row in self.metrics]


def fork(target, *args, nproc=1, timeout=60):
    """Calls target(*args) in nproc processes, as torchrun would: RANK, WORLD_SIZE, ... are set. Returns a Run
    whose results are what the calls returned, by rank."""
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        processes = [SERVER.Process(target=_forked, args=(rank, nproc, folder, GUARDED, target, args),
                                    daemon=True)
                     for rank in range(nproc)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):  # one failed: torchrun, too, ends the others
                deadline = min(deadline, time.monotonic() + 2)
            time.sleep(0.005)
        for process in processes:
            process.kill()
            process.join()
        output = "".join(Path(folder, f"output{rank}").read_text() for rank in range(nproc)
                         if Path(folder, f"output{rank}").exists())
        results = [torch.load(path, weights_only=GUARDED) if path.exists() else None
                   for path in (Path(folder, f"result{rank}") for rank in range(nproc))]
        return Run([process.exitcode for process in processes], output, results=results)


def _forked(rank, nproc, folder, guarded, target, args):
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), HF_HUB_OFFLINE="1")
    torch.distributed.init_process_group = partial(  # a file instead of a port, which another could take
        torch.distributed.init_process_group, init_method=f"file://{folder}/rendezvous",
        rank=rank, world_size=nproc)
    if guarded:
        import guard
        guard.install(ROOT)
    torch.save(target(*args), f"{folder}/result{rank}")


def call_main(folder, argv):
    """Runs folder/train.py's main. Returns the weights that this process holds at the end."""
    sys.path.insert(0, str(folder))
    import train
    model = train.main(argv)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def load(folder):
    """Imports the modules of a step into this process and forgets their names, which other steps have too."""
    names = [path.stem for path in Path(folder).glob("*.py")]
    sys.path.insert(0, str(folder))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)


def train(folder, *argv, nproc=1, timeout=60):
    """Runs folder/train.py in warm processes. Returns a Run with metrics and each rank's final weights."""
    with tempfile.TemporaryDirectory() as scratch:
        metrics_file = Path(scratch, "metrics.jsonl")
        argv = [*map(str, argv), "--use_cpu", "--metrics_file", str(metrics_file)]
        run = fork(call_main, folder, argv, nproc=nproc, timeout=timeout)
        if metrics_file.exists():
            run.metrics = [json.loads(line) for line in metrics_file.read_text().splitlines()]
        return run


def command(*argv, timeout=60, cwd=ROOT, env=None):
    """Runs a command in a session of its own; at the time limit all of it is killed. Returns a Run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    process = subprocess.Popen(list(map(str, argv)), cwd=cwd, env=environment, text=True,
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nkilled after {timeout} s"
    return Run([process.returncode], output)


def torchrun(folder, *argv, nproc=1, timeout=60, **options):
    """Runs folder/train.py as a user would, on a free port."""
    return command(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", nproc,
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                   Path(folder, "train.py"), *argv, timeout=timeout, **options)
