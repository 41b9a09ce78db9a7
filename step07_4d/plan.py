"""What a layout costs, found out without processes and without memory.

--dry_run builds the model of one process of a stage with fake tensors, which have shapes but no numbers, and
has it run the forward and backward passes of one training step by the real code. It notes which tensors are
alive and what goes through each axis of the mesh.
"""

import weakref
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from context_parallel import context_parallel
from data_parallel import GradientBuckets
from mesh import Axis, draw_mesh
from model import Llama, load_weights
from pipeline_parallel import SCHEDULES, pipeline_parallel, run_schedule, split_layers, sum_tied_gradient
from tensor_parallel import shard, tensor_parallel


class SilentAxis(Axis):
    """An axis on which nobody answers. It counts what is handed over: {(axis, what): [calls, bytes]}."""

    def __init__(self, name, rank, size, counts):
        super().__init__(rank, size)
        self.name, self.counts = name, counts

    def note(self, what, tensor):
        count = self.counts.setdefault((self.name, what), [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + tensor.nbytes
        return SimpleNamespace(wait=lambda: None)

    def start_all_reduce(self, tensor, op=None):
        return self.note("all-reduce", tensor)

    def start_send(self, tensor, target):
        return self.note("send", tensor)

    def start_receive(self, tensor, source):
        return self.note("receive", tensor)

    def start_rotate(self, tensor):
        self.note("send", tensor)
        return torch.empty_like(tensor), lambda: None

    def all_gather(self, tensor):
        self.note("all-gather", tensor)
        return tensor.new_empty(self.size, *tensor.shape)


class Memory(TorchDispatchMode):
    """Adds up the bytes of all tensors that are alive while it is entered."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.storages = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):  # which several tensors may be views of
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)

    def remove(self, address, size):
        self.storages.remove(address)
        self.alive -= size


def plan_stage(args, config, stage):
    """Returns what a process of this stage has: parameters, bytes of weights, ..., and counts by axis."""
    counts = {}
    mesh = SimpleNamespace(**{name: SilentAxis(label, rank, size, counts) for name, label, rank, size in (
        ("dp_cp", "dp x cp", 0, args.dp_size * args.cp_size), ("pp", "pp", stage, args.pp_size),
        ("pp_back", "pp", stage, args.pp_size), ("cp", "cp", 0, args.cp_size),
        ("tp", "tp", 0, args.tp_size))})
    with torch.device("meta"):
        model = Llama(config)
    tensor_parallel(model, mesh.tp)
    pipeline_parallel(model, mesh.pp)
    context_parallel(model, mesh.cp)
    load_weights(model, shard(model.named_parameters(), mesh.tp), "meta",
                 torch.float64 if args.dtype == "float64" else torch.float32)
    with FakeTensorMode(), Memory() as memory:
        # What load_weights does can't be done to fake tensors.
        weights = {weight: nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype))
                   for weight in model.parameters()}
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, weights[weight])
        plan = SimpleNamespace(counts=counts, parameters=sum(weight.numel() for weight in weights),
                               weights=memory.alive)
        gradients = GradientBuckets(model, mesh.dp_cp, args.grad_acc_steps, args.bucket_cap_mb)
        plan.gradients, plan.optimizer = memory.alive - plan.weights, 2 * plan.weights  # AdamW's two moments
        tokens = torch.zeros(args.micro_batch_size, args.seq_len // args.cp_size, dtype=torch.int64)
        before = memory.peak = memory.alive
        gradients.zero_grad()
        run_schedule(
            SCHEDULES[args.pp_engine](stage, args.pp_size, args.grad_acc_steps), model,
            [(tokens, tokens)] * args.grad_acc_steps, 1,
            torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"), mesh.pp, mesh.pp_back)
        plan.activations = memory.peak - before
        gradients.wait()
        sum_tied_gradient(model, mesh.pp, mesh.pp_back)
    plan.total = plan.weights + plan.gradients + plan.optimizer + plan.activations
    return plan


def dry_run(args, config):
    """Prints, for the first and the last stage of the pipeline, what each of its processes has and sends."""
    sizes = {"dp": args.dp_size, "pp": args.pp_size, "cp": args.cp_size, "tp": args.tp_size}
    stages = sorted({0, args.pp_size - 1})
    plans = [plan_stage(args, config, stage) for stage in stages]
    layers = [split_layers(config.num_hidden_layers, args.pp_size)[stage] for stage in stages]
    rows = {"stage of the pipeline": stages, "layers": [f"{mine[0]} ... {mine[-1]}" for mine in layers],
            "parameters": [f"{plan.parameters:,}" for plan in plans]}
    for name in ("weights", "gradients", "optimizer", "activations", "total"):
        rows[name] = [f"{getattr(plan, name) / 2**20:,.1f} MiB" for plan in plans]
    for axis, what in sorted({key for plan in plans for key in plan.counts}):
        counts = [plan.counts.get((axis, what), (0, 0)) for plan in plans]
        rows[f"{axis}: {what}"] = [f"{calls:,} x, {size / 2**20:,.1f} MiB" for calls, size in counts]
    print(draw_mesh(sizes))
    print(f"a training step: {args.grad_acc_steps} micro-batches of {args.micro_batch_size} sequences of "
          f"{args.seq_len} tokens for each of {args.dp_size} replicas")
    for name, cells in rows.items():
        print(name.ljust(24) + "".join(f"{cell:>28}" for cell in cells))
    idle = args.pp_size - 1
    print(f"idle share of the pipeline: {idle / (args.grad_acc_steps + idle):.1%}")
    return plans
