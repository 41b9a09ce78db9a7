"""What test_step02.py, test_step03.py and test_snapshots.py run in worker processes, or as jobs.

In a module without pytest, so that forked processes start in a moment.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import launch

# Running main under watch

def watch(folder, argv):
    """Runs main. Returns what this process did in each training step.

    events: in order, "forward", "backward", "end of backward" and (collective, dtype, bytes);
    hash, hashes: of all weights, and of each by its name, after the optimizer's step;
    gradients: of each parameter, its dtype and whether it lies in a bucket's buffer.
    """
    sys.path.insert(0, str(folder))
    import data_parallel
    import train
    steps, models = [], []

    def new_step():
        steps.append(SimpleNamespace(events=[]))

    def record_collective(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            tensor = args[-1] if name == "all_gather" else args[0]
            steps[-1].events.append((name, str(tensor.dtype).removeprefix("torch."), tensor.nbytes))
            return original(*args, **kwargs)
        setattr(dist, name, call)

    def record_backward(*args, original=torch.autograd.backward, **kwargs):
        steps[-1].events.append("backward")
        original(*args, **kwargs)
        steps[-1].events.append("end of backward")

    def record_buckets(self, model, *args, original=data_parallel.GradientBuckets.__init__):
        original(self, model, *args)
        model.register_forward_hook(lambda *_: steps[-1].events.append("forward"))
        models.append((model, self))

    def after_step(*_):
        (model, buckets), = models
        storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in buckets.buckets}
        steps[-1].gradients = [
            (str(parameter.grad.dtype), parameter.grad.untyped_storage().data_ptr() in storages)
            for parameter in model.parameters()]
        steps[-1].hashes = {
            name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
            for name, parameter in model.named_parameters()}
        steps[-1].hash = hashlib.sha256("".join(steps[-1].hashes.values()).encode()).hexdigest()
        new_step()

    new_step()
    for name in ("all_reduce", "all_gather", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast",
                 "all_to_all_single", "send", "recv", "isend", "irecv"):
        record_collective(name)
    torch.autograd.backward = record_backward
    data_parallel.GradientBuckets.__init__ = record_buckets
    register_optimizer_step_post_hook(after_step)
    train.main(argv)
    return steps[:-1]


def collectives(step):
    """Counts the collectives of a training step: {(name, dtype, bytes): times}."""
    return Counter(event for event in step.events if isinstance(event, tuple))


def call_axes(folder, sizes, timeout, calls):
    """Rank r calls an all-reduce on the axis calls[r], or sleeps past the time limit if that is None.
    Returns (error, seconds)."""
    step = launch.load(folder)
    mesh = step.mesh.create_mesh(sizes, "cpu", timeout)
    axis = calls[dist.get_rank()]
    start = time.monotonic()
    if axis is None:
        time.sleep(2 * timeout)
        os._exit(0)  # its peers are gone
    error = "none"
    try:
        getattr(mesh, axis).all_reduce(torch.ones(3))
    except RuntimeError as failure:
        error = str(failure)
    return error, time.monotonic() - start


def kill_one_rank(folder, argv, nproc, scratch, options=()):
    """Starts a torchrun job, endless unless argv has --steps, kills -9 its last rank in mid-run. Returns (the
    job's exit status, its output, seconds it took to end, the ranks that are still there)."""
    metrics, log = Path(scratch, "metrics.jsonl"), Path(scratch, "output")
    with open(log, "w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *map(str, options), "--nproc_per_node",
             str(nproc), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
             Path(folder, "train.py"), "--use_cpu", "--steps", "1000000",
             "--metrics_file", metrics, *map(str, argv)],
            stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        pairs = [map(int, line.split()) for line in table.splitlines()]
        ranks = sorted(pid for pid, parent in pairs if parent == job.pid)
        assert len(ranks) == nproc, table
        os.kill(ranks[-1], signal.SIGKILL)
        start = time.monotonic()
        status = job.wait(timeout=60)
        seconds = time.monotonic() - start
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return status, log.read_text(), seconds, [rank for rank in ranks if alive(rank)]


def modules_at_start(folder, argv):
    """Names of all top-level modules that are loaded once train.py has run."""
    sys.path.insert(0, str(folder))
    import train
    train.main(argv)
    return {name for name in sys.modules if "." not in name}


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def error_lines(output):
    return re.findall("^train.py: error: .*$", output, re.MULTILINE)


# Single parts of tensor parallelism against their unsharded twins

def relative_error(value, expected):
    scale = expected.norm().item()
    return (value - expected).norm().item() / (scale or 1.0)


def compare_parts(folder):
    """Each part of tensor_parallel.py, sharded over all processes, against the same on one, in float64.
    Returns {what: relative error}."""
    step = launch.load(folder)
    size = int(os.environ["WORLD_SIZE"])
    tp = step.mesh.create_mesh({"dp": 1, "tp": size}, "cpu", timeout=30).tp
    generator = torch.Generator().manual_seed(0)  # the same on every process
    errors = {}

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def part(tensor, dim):
        return tensor.chunk(size, dim)[tp.rank].clone()

    def leaf(tensor):
        return tensor.clone().requires_grad_()

    def parameter(weight):  # all that the parts use of a layer
        return SimpleNamespace(weight=torch.nn.Parameter(weight))

    def compare(what, pairs):
        for i, (value, expected) in enumerate(pairs):
            errors[f"{what} {i}"] = relative_error(value.detach(), expected.detach())

    batch, seq, hidden, features = 2, 5, 7, 12
    layouts = {"plain": lambda y: y,
               "transposed": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
               "features first": lambda y: y.movedim(-1, 0).contiguous().movedim(0, -1)}
    parallel = step.tensor_parallel

    for how, change in layouts.items():  # of the gradient that arrives in backward, in memory
        x, weights = draw(batch, seq, hidden), [draw(features, hidden), draw(2 * features, hidden)]
        grads = [draw(batch, seq, features), draw(batch, seq, 2 * features)]
        whole_x, whole_weights = leaf(x), [leaf(weight) for weight in weights]
        whole = [torch.nn.functional.linear(whole_x, weight) for weight in whole_weights]
        torch.autograd.backward(whole, grads)
        my_x, my_weights = leaf(x), [leaf(part(weight, 0)) for weight in weights]
        linears = [SimpleNamespace(weight=weight) for weight in my_weights]
        mine = parallel.column_parallel(tp, my_x, *linears)
        torch.autograd.backward(mine, [change(part(grad, -1)) for grad in grads])
        compare(f"ColumnParallel, {how} gradient", [
            *((a, part(b, -1)) for a, b in zip(mine, whole)), (my_x.grad, whole_x.grad),
            *((a.grad, part(b.grad, 0)) for a, b in zip(my_weights, whole_weights))])

        x, weight, grad = draw(batch, seq, features), draw(hidden, features), draw(batch, seq, hidden)
        whole_x, whole_weight = leaf(x), leaf(weight)
        whole = torch.nn.functional.linear(whole_x, whole_weight)
        whole.backward(grad)
        linear = parallel.RowParallelLinear(parameter(part(weight, 1)), tp)
        my_x = leaf(change(part(x, -1)))
        mine = linear(my_x)
        mine.backward(change(grad))
        compare(f"RowParallelLinear, {how}", [
            (mine, whole), (my_x.grad, part(whole_x.grad, -1)),
            (linear.weight.grad, part(whole_weight.grad, 1))])

    weight, grad = draw(features, hidden), draw(2, features // 2, hidden)
    tokens = torch.arange(features // 2).mul(2).repeat(2, 1)  # of each shard some rows twice, some never
    whole_weight = leaf(weight)
    whole = torch.nn.functional.embedding(tokens, whole_weight)
    whole.backward(grad)
    embedding = parallel.VocabParallelEmbedding(parameter(part(weight, 0)), tp)
    mine = embedding(tokens)
    mine.backward(grad)
    compare("VocabParallelEmbedding", [
        (mine, whole), (embedding.weight.grad, part(whole_weight.grad, 0))])

    for scale in (1, 50, 5000):
        logits = draw(batch, seq, features) * scale
        targets = torch.randint(features, (batch, seq), generator=generator)
        whole_logits, my_logits = leaf(logits), leaf(part(logits, -1))
        whole = step.model.cross_entropy(whole_logits, targets)
        (whole / 3).backward()
        mine = parallel.vocab_parallel_cross_entropy(tp, my_logits, targets)
        (mine / 3).backward()
        compare(f"cross-entropy of logits x {scale}", [
            (mine, whole), (my_logits.grad, part(whole_logits.grad, -1))])
        errors[f"logits x {scale} are left alone"] = relative_error(my_logits.detach(), part(logits, -1))
    dist.destroy_process_group()
    return errors


def initial_shards(folder, argv):
    """The weights that this process starts with: those at the first forward pass of main."""
    sys.path.insert(0, str(folder))
    import model
    import train

    class Started(Exception):
        pass

    def stop(self, x):
        raise Started({name: parameter.detach().clone() for name, parameter in self.named_parameters()})

    model.Llama.forward = stop
    try:
        train.main(argv)
    except Started as started:
        return started.args[0]
