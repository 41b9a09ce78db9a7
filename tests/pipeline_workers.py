"""What test_step04.py runs in place of, or around, the stages: counters, stand-ins, accidents.

In a module without pytest, so that forked processes start in a moment.
"""

import os
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

import launch


class Deadlock(Exception):
    pass


class Rendezvous:
    """A network between threads at its least obliging: a send is complete when the receiver has posted the
    matching receive, not before. Notices when all threads wait for one another."""

    def __init__(self, size):
        self.condition, self.alive, self.waiting, self.queues = threading.Condition(), size, [], {}

    def axis(self, group, rank, size):
        return SimpleNamespace(
            rank=rank, size=size,
            start_send=lambda tensor, target: self.post((group, rank, target), "send", tensor),
            start_receive=lambda tensor, source: self.post((group, source, rank), "receive", tensor))

    def post(self, link, side, tensor):
        work = SimpleNamespace(tensor=tensor, done=False, wait=lambda: self.wait(work))
        with self.condition:
            partners = self.queues.setdefault((link, {"send": "receive", "receive": "send"}[side]), [])
            if partners:
                partner = partners.pop(0)
                sent, received = (work, partner) if side == "send" else (partner, work)
                received.tensor.copy_(sent.tensor)
                sent.done = received.done = True
                self.condition.notify_all()
            else:
                self.queues.setdefault((link, side), []).append(work)
        return work

    def wait(self, work):
        with self.condition:
            self.waiting.append(work)
            try:
                while not work.done:
                    if len(self.waiting) == self.alive and not any(work.done for work in self.waiting):
                        raise Deadlock
                    self.condition.wait(20)
            finally:
                self.waiting.remove(work)

    def leave(self):
        with self.condition:
            self.alive -= 1
            self.condition.notify_all()


class Toy(torch.nn.Module):
    """The least that run_schedule accepts as a stage: it multiplies by a weight of 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.config = SimpleNamespace(hidden_size=1)

    def forward(self, x):
        return (x if x.dim() == 3 else x[..., None]) * self.weight

    def cross_entropy(self, output, target):
        return (output * target).sum()


def run_in_threads(run_schedule, schedule, num_stages, num_micro_batches):
    """Works off schedule(stage, num_stages, num_micro_batches) on stages that are threads. Returns each one's
    gradient, or "deadlock" for all. Micro-batch i has input i + 1 and target 10^i: mixed up, they show."""
    micro_batches = [(torch.tensor([[i + 1]]), 10**i) for i in range(num_micro_batches)]
    network, results = Rendezvous(num_stages), {}

    def work(stage):
        model = Toy()
        try:
            axes = [network.axis(group, stage, num_stages) for group in ("pp", "pp_back")]
            order = schedule(stage, num_stages, num_micro_batches)
            run_schedule(order, model, micro_batches, 1, nullcontext(), *axes)
            results[stage] = model.weight.grad.item()
        except Deadlock:
            results[stage] = "deadlock"
        finally:
            network.leave()

    threads = [threading.Thread(target=work, args=[stage], daemon=True) for stage in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results.get(stage, "hangs or failed") for stage in range(num_stages)]


class LiveGraphs:
    """Counts the micro-batches of which autograd holds any tensor for backward: now, and the most so far."""

    def __init__(self, model):
        self.saved, self.current, self.most, self.outputs, self.most_outputs = {}, -1, 0, [], 0
        model.register_forward_pre_hook(self.start)
        model.register_forward_hook(self.end)

    def start(self, model, arguments):
        self.current += 1
        self.most_outputs = max(self.most_outputs, sum(not output.expired() for output in self.outputs))

    def end(self, model, arguments, output):
        self.outputs.append(StorageWeakRef(output.untyped_storage()))

    def pack(self, tensor):
        self.saved[self.current] = self.saved.get(self.current, 0) + 1
        self.most = max(self.most, len(self.saved))
        return Saved(self, self.current, tensor.detach())


class Saved:
    def __init__(self, counter, micro_batch, tensor):
        self.saved, self.micro_batch, self.tensor = counter.saved, micro_batch, tensor

    def __del__(self):
        self.saved[self.micro_batch] -= 1
        if not self.saved[self.micro_batch]:
            del self.saved[self.micro_batch]


def record_calls(*names):
    """Returns a list to which each call of these functions of torch.distributed adds (name, bytes, peer)."""
    calls = []
    for name in names:
        def call(tensor, *args, original=getattr(dist, name), name=name, **kwargs):
            calls.append((name, tensor.nbytes, kwargs.get("group_dst", kwargs.get("group_src"))))
            return original(tensor, *args, **kwargs)
        setattr(dist, name, call)
    return calls


def run_stages(folder, shape, cases):
    """On each stage: works off every (engine, num_micro_batches) of cases. Returns what was seen of each."""
    step = launch.load(folder)
    calls = record_calls("isend", "irecv", "all_reduce", "all_gather")
    mesh = step.mesh.create_mesh({"dp": 1, "pp": int(os.environ["WORLD_SIZE"]), "tp": 1}, "cpu", timeout=20)
    config = step.config.load_config("tiny", num_hidden_layers=5, hidden_size=16, intermediate_size=24,
                                     vocab_size=32)
    rows = []
    for engine, num_micro_batches in cases:
        generator = torch.Generator().manual_seed(num_micro_batches)
        tokens = torch.randint(32, (num_micro_batches, 2, *shape), generator=generator)
        grads = {}
        alone = SimpleNamespace(rank=0, size=1)
        for axis, axis_back in ((alone, alone), (mesh.pp, mesh.pp_back)):  # the whole model, then this stage
            model = create_model(step, config, axis)
            live = LiveGraphs(model)
            order = step.pipeline_parallel.SCHEDULES[engine](axis.rank, axis.size, num_micro_batches)
            calls.clear()
            with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda saved: saved.tensor):
                loss = step.pipeline_parallel.run_schedule(
                    order, model, list(tokens), 100, nullcontext(), axis, axis_back)
            whole, grads = grads, {name: parameter.grad for name, parameter in model.named_parameters()}
        errors = [(whole[name] - grad).norm() / whole[name].norm() for name, grad in grads.items()]
        rows.append(SimpleNamespace(
            engine=engine, num_micro_batches=num_micro_batches, loss=loss.item(), calls=list(calls),
            live=live.most, live_at_end=len(live.saved), outputs=live.most_outputs,
            error=max(errors).item()))
    dist.destroy_process_group()
    return rows


def create_model(step, config, axis, dtype=torch.float64):
    with torch.device("meta"):
        model = step.model.Llama(config)
    step.pipeline_parallel.pipeline_parallel(model, axis)
    step.model.load_weights(model, step.model.initial_weights(model, 0), "cpu", dtype)
    return model


def memory_of_stage(folder, stage, num_stages):
    """Returns the bytes of a 32-layer model, of this stage's part, and by how much memory grew at most."""
    from resource import RUSAGE_SELF, getrusage
    step = launch.load(folder)
    config = step.config.load_config("tiny", num_hidden_layers=32, hidden_size=512, intermediate_size=1024)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    model = create_model(step, config, SimpleNamespace(rank=stage, size=num_stages), torch.float32)
    grown = (getrusage(RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    with torch.device("meta"):
        whole = step.model.Llama(config)
    whole, part = (sum(parameter.nbytes for parameter in model.parameters()) for model in (whole, model))
    return whole, part, grown


def train_and_watch(folder, argv):
    """Runs main. Returns each training step's backward passes and all-reduces in order, and the weights of
    embedding and head after it."""
    events, weights = [[]], []
    backward, all_reduce = torch.autograd.backward, dist.all_reduce

    def watched_backward(*args, **kwargs):
        events[-1].append("backward")
        return backward(*args, **kwargs)

    def watched_all_reduce(tensor, *args, **kwargs):
        events[-1].append((tensor.data_ptr(), tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    def after_step(optimizer, args, kwargs):
        events.append([])
        weights.append([parameter.detach().clone() for group in optimizer.param_groups
                        for parameter in group["params"] if parameter.shape[0] == 256])

    torch.autograd.backward, dist.all_reduce = watched_backward, watched_all_reduce
    register_optimizer_step_post_hook(after_step)
    final = launch.call_main(folder, argv)
    return SimpleNamespace(events=events[:-1], weights=weights, sizes=[w.numel() for w in final.values()])


def train_until_accident(folder, argv, accident):
    """Runs main; rank 1 has an accident in the second training step. Returns the others' error and after how
    many seconds it came."""
    sys.path.insert(0, str(folder))
    import model
    import train
    forward, times = model.Llama.forward, []

    def unlucky_forward(self, x):
        times.append(time.monotonic())
        if len(times) == 6 and os.environ["RANK"] == "1":
            os._exit(0) if accident == "dies" else time.sleep(9)  # 0: the test kills nobody
        return forward(self, x)

    model.Llama.forward = unlucky_forward
    try:
        train.main(argv)
    except RuntimeError as error:
        return str(error), time.monotonic() - times[-1]
    return "no error", 0.0
