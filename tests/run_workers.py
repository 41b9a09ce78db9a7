"""What test_step07.py runs in worker processes: runs that die, disks that fill, what a run really uses."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.profiler import ProfilerActivity, profile

# Where in a save a process can die: (object, its method that is about to be called).
MOMENTS = {
    "before the data": (FileSystemWriter, "write_data"),
    "before the metadata": (FileSystemWriter, "finish"),
    "before the folder gets its name": (Path, "rename"),
    "before an old one is removed": (shutil, "rmtree"),
}


def die_in_save(folder, argv, victim, moment, call):
    """Runs train.py; the rank victim is killed when it comes to this moment for the call-th time."""
    owner, name = MOMENTS[moment]
    original, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)
    run_main(folder, argv)


def full_disk(folder, argv, victim, call):
    """Runs train.py; from the call-th save on, the rank victim can't write files of more than 1,000 bytes."""
    import resource
    original, calls = FileSystemWriter.write_data, []

    def write_data(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and os.environ["RANK"] == str(victim):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return original(*args, **kwargs)

    FileSystemWriter.write_data = write_data
    run_main(folder, argv)


def run(folder, argv):
    sys.path.insert(0, str(folder))
    import train
    return train.main(list(map(str, argv)))


def run_main(folder, argv):
    """Runs train.py for what it prints and writes."""
    run(folder, argv)


def peak_bytes(folder, argv):
    """Runs train.py. Returns the most that the CPU's allocator had given out at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(folder, argv)
    profiler.export_chrome_trace(f"trace{os.environ['RANK']}.json")
    path = Path(f"trace{os.environ['RANK']}.json")
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def usage(folder, argv):
    """Runs train.py. Returns (number of parameters, {(axis, what): [calls, bytes]} but scalars, place)."""
    sys.path.insert(0, str(folder))
    import mesh
    import train
    meshes, counts = [], {}

    def count(method, what):
        original = getattr(mesh.Axis, method)

        def counting(axis, tensor, *args):
            made = meshes[0]
            names = [name for name in ("dp_cp", "pp", "pp_back", "cp", "tp") if getattr(made, name) is axis]
            if tensor.numel() > 1 and axis.size > 1:
                name = names[0].replace("dp_cp", "dp x cp").replace("pp_back", "pp")
                entry = counts.setdefault((name, what), [0, 0])
                entry[0], entry[1] = entry[0] + 1, entry[1] + tensor.nbytes
            return original(axis, tensor, *args)
        setattr(mesh.Axis, method, counting)

    def create_mesh(*args, original=train.create_mesh):
        meshes.append(original(*args))
        return meshes[0]

    for method, what in (("start_all_reduce", "all-reduce"), ("all_gather", "all-gather"),
                         ("start_send", "send"), ("start_receive", "receive"), ("start_rotate", "send")):
        count(method, what)
    train.create_mesh = create_mesh
    model = run(folder, argv)
    mine = {name: getattr(meshes[0], name).rank for name in ("dp", "pp", "cp", "tp")}
    return sum(parameter.numel() for parameter in model.parameters()), counts, mine


def read_shards(folder, argv):
    """Runs train.py with --load_hf. Returns how many numbers this process read, and how many it has."""
    sys.path.insert(0, str(folder))
    import huggingface
    read = []

    class Slice:
        def __init__(self, whole):
            self.whole = whole

        def __getitem__(self, place):
            part = self.whole[place]
            read.append(part.numel())
            return part

        def __getattr__(self, name):
            return getattr(self.whole, name)

    class File:
        def __init__(self, file):
            self.file = file

        def get_slice(self, name):
            return Slice(self.file.get_slice(name))

    original = huggingface.open_weights
    huggingface.open_weights = lambda path: {name: File(file) for name, file in original(path).items()}
    model = run(folder, argv)
    return sum(read), sum(parameter.numel() for parameter in model.parameters())
