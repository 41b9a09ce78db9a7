"""How fast each step is beside what PyTorch and transformers have for the same dimension.

    python tests/benchmarks/compare.py                       all pairs, a few minutes on two cores
    python tests/benchmarks/compare.py --only dp tp          some of them
    python tests/benchmarks/compare.py --rounds 40 --json figures.json

In each pair the real trainer and its rival live in the same processes, and take turns: one training step of
the trainer, one of the rival, on the same sequences, with the same optimizer. The ratio is taken round by
round, so that a machine that is busy for a while slows both down. The first rounds are left out. A pair whose
losses differ isn't compared: it raises. Each process has one thread.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch  # noqa: E402  (after the path is set)
import same_run  # noqa: E402

SHAPE = ["--hidden_size", 256, "--num_hidden_layers", 8, "--num_attention_heads", 8,
         "--num_key_value_heads", 4, "--intermediate_size", 688, "--vocab_size", 1024, "--seq_len", 256,
         "--mbs", 2]
WARM_UP, MOST = 3, 1e-3  # rounds; the relative difference of losses that rounding may cause


# The rivals. Each is called with a Context, once all groups are there, and returns a function that makes one
# training step on [(inputs, targets), ...] and returns the loss of this process's share, or of all.

@dataclass
class Context:
    args: object
    config: object
    step: object  # the step's modules
    model: torch.nn.Module  # this repository's Llama, whole, with the run's weights

    def transformers_model(self):
        """The same in transformers."""
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(**{name: getattr(self.config, name) for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta")}, use_cache=False)
        model = LlamaForCausalLM(config)
        model.load_state_dict(self.model.state_dict())
        return model

    def optimizer(self, model):
        return self.step.train.create_optimizer(model, self.args)


def mean_loss(logits, targets, num_tokens):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_tokens


def update(model, optimizer, lr, max_norm=None):
    if max_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def transformers_loop(context):
    model = context.transformers_model()
    optimizer = context.optimizer(model)

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for inputs, targets in micro_batches:
            loss = mean_loss(model(inputs).logits, targets, num_tokens)
            loss.backward()
            total += loss.detach()
        update(model, optimizer, lr, context.args.max_grad_norm)
        return total
    return train_step


def distributed_data_parallel(context):
    model = torch.nn.parallel.DistributedDataParallel(context.model, gradient_as_bucket_view=True)
    optimizer = context.optimizer(context.model)
    size = dist.get_world_size()

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for i, (inputs, targets) in enumerate(micro_batches):
            with nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
                loss = mean_loss(model(inputs), targets, num_tokens)
                (size * loss).backward()  # it takes the mean over processes
            total += loss.detach()
        update(model, optimizer, lr, context.args.max_grad_norm)
        dist.all_reduce(total)
        return total
    return train_step


def dtensor(context):
    """Tensor parallelism with a loss over the cut vocabulary, as in PyTorch's tutorial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = context.transformers_model()
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(context.config.num_hidden_layers):
        layer = f"model.layers.{i}"
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer, max_norm = context.optimizer(model), context.args.max_grad_norm

    def clip():  # torch's own functions take no mixture of DTensors and tensors
        cut = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
        whole = [p.grad for p in model.parameters() if not isinstance(p.grad, DTensor)]
        squares = sum(grad.square().sum() for grad in cut)
        dist.all_reduce(squares)
        norm = (squares + sum(grad.square().sum() for grad in whole)).sqrt()
        torch._foreach_mul_([*cut, *whole], min(1.0, max_norm / (norm.item() + 1e-6)))

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for inputs, targets in micro_batches:
            with loss_parallel():
                logits = model(inputs).logits
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_tokens
                loss.backward()
            total += loss.detach().full_tensor()
        clip()
        update(model, optimizer, lr)
        return total
    return train_step


def pipelining(schedule_name):
    def rival(context):
        from torch.distributed import pipelining
        rank, size = dist.get_rank(), dist.get_world_size()
        model = context.model
        context.step.pipeline_parallel.pipeline_parallel(model, SimpleNamespace(rank=rank, size=size))
        stage = pipelining.PipelineStage(model, rank, size, torch.device("cpu"))
        optimizer, max_norm = context.optimizer(model), context.args.max_grad_norm
        tokens = context.args.global_batch_size * context.args.seq_len
        schedule = getattr(pipelining, schedule_name)(
            stage, context.args.grad_acc_steps, scale_grads=False,
            loss_fn=lambda logits, targets: mean_loss(logits, targets, tokens))

        def train_step(micro_batches, num_tokens, lr):
            inputs, targets = (torch.cat(tensors) for tensors in zip(*micro_batches))
            losses = []
            schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == size - 1 else None,
                          losses=losses)
            total = sum((loss.detach() for loss in losses), torch.zeros(()))
            dist.all_reduce(total)
            squares = sum(parameter.grad.square().sum() for parameter in model.parameters())
            dist.all_reduce(squares)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, squares.sqrt())
            update(model, optimizer, lr)
            return total
        return train_step
    return rival


class AllGather(torch.autograd.Function):
    """(batch, heads, seq / size, head_dim) of each process -> (batch, heads, seq, head_dim)"""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def all_gathered_keys(context):
    """Context parallelism with contiguous parts and all-gathered keys and values (Llama 3, section 3.3.2)."""
    model, rank, size = context.model, dist.get_rank(), dist.get_world_size()
    length = context.args.seq_len // size
    positions = torch.arange(context.args.seq_len)
    mine = positions[rank * length:(rank + 1) * length]
    mask = mine[:, None] >= positions[None]
    model.positions = lambda length, device=None: mine

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, AllGather.apply(k), AllGather.apply(v), attn_mask=mask,
                                              enable_gqa=True)

    for layer in model.model.layers.values():
        layer.self_attn.attend = attend
    optimizer = context.optimizer(model)

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for inputs, targets in micro_batches:
            loss = mean_loss(model(inputs[:, mine]), targets[:, mine], num_tokens)
            loss.backward()
            total += loss.detach()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        for parameter, grad in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            parameter.grad.copy_(grad.view_as(parameter))
        update(model, optimizer, lr, context.args.max_grad_norm)
        dist.all_reduce(total)
        return total
    return train_step


@dataclass(frozen=True)
class Pair:
    step: str
    nproc: int
    flags: str
    rival: object
    what: str


PAIRS = {
    "single": Pair("step01", 1, "", transformers_loop, "a loop over transformers' LlamaForCausalLM"),
    "dp": Pair("step02", 2, "", distributed_data_parallel, "DistributedDataParallel"),
    "tp": Pair("step03", 2, "--tp 2", dtensor, "DTensor with loss_parallel"),
    "afab": Pair("step04", 2, "--pp 2", pipelining("ScheduleGPipe"), "torch.distributed.pipelining, GPipe"),
    "1f1b": Pair("step05", 2, "--pp 2", pipelining("Schedule1F1B"), "torch.distributed.pipelining, 1F1B"),
    "cp": Pair("step06", 2, "--cp 2", all_gathered_keys, "all-gathered keys and values"),
}


# The comparison

def take_turns(folder, argv, name):
    """Runs train.py, with a training step of the rival behind each of its own.

    Returns a list of (the trainer's seconds, the rival's seconds, the trainer's loss, the rival's loss).
    """
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    import train
    step = SimpleNamespace(**{path.stem: __import__(path.stem) for path in Path(folder).glob("*.py")
                              if path.stem not in ("create_config", "submit_slurm_jobs", "export_hf")})
    args, config = step.arguments.parse_args(argv)
    encode, _ = step.data.load_tokenizer(args.tokenizer_name)
    sequences = step.data.Sequences(step.data.load_tokens(args.dataset_name, encode), args.seq_len, args.seed)
    replicas = getattr(args, "dp_size", 1)
    rounds, state, record = [], SimpleNamespace(start=None, rival=None), train.Metrics.record

    def barrier():
        if dist.is_initialized():
            dist.barrier()

    def record_and_let_the_rival(self, number, loss, grad_norm, lr):
        loss = loss.item()
        ours = time.perf_counter() - state.start if state.start else 0.0
        record(self, number, torch.tensor(loss), grad_norm, lr)
        if not state.rival:
            with torch.device("meta"):
                model = step.model.Llama(config)
            step.model.load_weights(model, step.model.initial_weights(model, args.seed), "cpu", torch.float32)
            state.rival = PAIRS[name].rival(Context(args, config, step, model))
        barrier()
        start = time.perf_counter()
        rank = dist.get_rank() if replicas > 1 else 0
        first = (number - 1) * args.global_batch_size + rank * args.global_batch_size // replicas
        micro_batches = [sequences.batch(first + i * args.micro_batch_size, args.micro_batch_size, "cpu")
                         for i in range(args.grad_acc_steps)]
        theirs = float(state.rival(micro_batches, args.global_batch_size * args.seq_len, lr))
        rounds.append((ours, time.perf_counter() - start, loss, theirs))
        barrier()
        state.start = time.perf_counter()

    train.Metrics.record = record_and_let_the_rival
    train.main(argv)
    return rounds


def compare(name, rounds):
    """Returns a dict of what was measured for this pair. Raises AssertionError if the losses differ."""
    pair = PAIRS[name]
    folder = same_run.step_folder(launch.ROOT, pair.step)
    grad_acc = 8 if pair.flags or pair.nproc == 1 else 4  # the same 8 micro-batches of 2 in all layouts
    steps = rounds + WARM_UP
    argv = [*SHAPE, "--steps", steps, "--grad_acc_steps", grad_acc, *pair.flags.split(), "--use_cpu"]
    argv = list(map(str, argv))
    run = launch.fork(take_turns, folder, argv, name, nproc=pair.nproc, timeout=60 + 20 * rounds).check()
    for n, (_, _, ours, theirs) in enumerate(run.results[0], start=1):
        assert abs(theirs / ours - 1) < MOST, f"{name}, training step {n}: losses {ours} and {theirs}"
    measured = run.results[0][WARM_UP:]
    ours, theirs = ([row[i] for row in measured] for i in (0, 1))
    ratios = sorted(b / a for a, b in zip(ours, theirs))
    return {"pair": name, "step": pair.step, "rival": pair.what, "processes": pair.nproc,
            "ms": 1e3 * statistics.median(ours), "rival_ms": 1e3 * statistics.median(theirs),
            "ratio": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)[::2],
            "rounds": len(measured)}


def main(argv=None):
    parser = argparse.ArgumentParser("compare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS), help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="training steps of each that count")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    print("ratio: how many times as fast as the rival the step is, with the quartiles over all rounds")
    for name in args.only:
        row = compare(name, args.rounds)
        rows.append(row)
        low, high = row["quartiles"]
        print(f"{row['step']} {name:7} {row['ms']:7.0f} ms  {row['ratio']:.2f} ({low:.2f} to {high:.2f})  "
              f"{row['rival']}: {row['rival_ms']:.0f} ms", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
