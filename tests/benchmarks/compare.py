"""How fast each step is beside what PyTorch and transformers have for the same, and beside its limit.

    python tests/benchmarks/compare.py                       everything, half an hour on two cores
    python tests/benchmarks/compare.py --only dp tp memory   a part of it
    python tests/benchmarks/compare.py --rounds 25 --json tests/benchmarks/figures.json

In a pair the real trainer, its rival and others live in the same processes and take turns: one training step
each, on the same sequences, with the same optimizer. Ratios are taken round by round, so that a machine that
is busy for a while slows all of them down. The first rounds are left out. Where losses or gradient norms
differ nothing is compared: it raises. Each process has one thread, but for the single process, which has one
for each core.

The turns of a round:

    step      the trainer
    rival     PyTorch's or transformers' implementation
    single    step 1's training step in one process with all threads
    apart     step 1's training step in every process on its share of the sequences, and nobody talks: what
              the processors give at most
    messages  the trainer's collectives alone, one after another, with nothing in between

With a GPU for each process, the trainer and its rival run on these in bfloat16 over NCCL.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import costs  # noqa: E402  (after the path is set)
import launch  # noqa: E402
import rivals  # noqa: E402
import same_run  # noqa: E402

SHAPE = ["--hidden_size", 256, "--num_hidden_layers", 8, "--num_attention_heads", 8,
         "--num_key_value_heads", 4, "--intermediate_size", 688, "--vocab_size", 1024, "--seq_len", 256,
         "--mbs", 2, "--learning_rate", 0.0001]  # low, or training makes rounding grow
WARM_UP, MOST = 3, 1e-3  # rounds; the relative difference of losses that rounding may cause (bfloat16: 10 x)


@dataclass(frozen=True)
class Pair:
    step: str
    nproc: int
    flags: str
    rival: object
    what: str


PAIRS = {
    "single": Pair("step01", 1, "--grad_acc_steps 4", rivals.transformers_loop, "transformers in a loop"),
    "dp": Pair("step02", 2, "--grad_acc_steps 4 --dp 2", rivals.torch_parts, "DistributedDataParallel"),
    "tp": Pair("step03", 2, "--grad_acc_steps 4 --tp 2", rivals.torch_parts, "DTensor with loss_parallel"),
    "afab": Pair("step04", 2, "--grad_acc_steps 4 --pp 2 --pp_engine afab", rivals.torch_parts,
                 "pipelining, GPipe"),
    "1f1b": Pair("step05", 2, "--grad_acc_steps 4 --pp 2", rivals.torch_parts, "pipelining, 1F1B"),
    "cp": Pair("step06", 2, "--grad_acc_steps 4 --cp 2", rivals.all_gathered_keys,
               "all-gathered keys and values"),
    "dp tp": Pair("step07", 4, "--grad_acc_steps 4 --dp 2 --tp 2", rivals.torch_parts,
                  "DistributedDataParallel and DTensor"),
    "dp tp pp": Pair("step07", 8, "--grad_acc_steps 4 --dp 2 --tp 2 --pp 2", rivals.torch_parts,
                     "DTensor, pipelining, one all-reduce"),
}
COSTS = {"memory": lambda: costs.memory(PAIRS, SHAPE), "startup": costs.startup}
# How to wait for what these methods of an Axis return. Sends and receives travel while something is computed.
COLLECTIVES = {"start_all_reduce": lambda work: work.wait(), "start_rotate": lambda pair: pair[1](),
               "all_gather": lambda parts: None}


def log_collectives(mesh, log):
    """From now on every collective is put into log, as a function that does the same once more."""
    for name in COLLECTIVES.keys() & vars(mesh.Axis):
        def logging(axis, tensor, *args, method=getattr(mesh.Axis, name), wait=COLLECTIVES[name]):
            again = torch.empty_like(tensor)
            log.append(lambda: wait(method(axis, again, *args)))
            return method(axis, tensor, *args)
        setattr(mesh.Axis, name, logging)


def take_turns(folder, argv, rival, cores):
    """Runs train.py, with a turn of everybody else behind each training step.

    Returns a list of rounds, {who: (seconds, (loss, gradient norm) or None)}.
    """
    torch.set_num_threads(1)
    first_step = launch.load(same_run.step_folder(launch.ROOT, "step01")).train
    sys.path.insert(0, str(folder))
    import train
    step = SimpleNamespace(**{path.stem: __import__(path.stem) for path in Path(folder).glob("*.py")
                              if path.stem not in ("create_config", "submit_slurm_jobs", "export_hf")})
    args, config = step.arguments.parse_args(argv)
    encode, _ = step.data.load_tokenizer(args.tokenizer_name)
    sequences = step.data.Sequences(step.data.load_tokens(args.dataset_name, encode), args.seq_len, args.seed)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    replicas = getattr(args, "dp_size", 1)
    num_tokens = args.global_batch_size * args.seq_len
    rounds, collectives, others, record = [], [], {}, train.Metrics.record
    if world > 1:
        log_collectives(step.mesh, collectives)

    def batches(number, part, parts):
        """The micro-batches of the given part of this training step's sequences."""
        size = args.global_batch_size // parts
        first = (number - 1) * args.global_batch_size + part * size
        return [sequences.batch(first + i, args.micro_batch_size, args.device)
                for i in range(0, size, args.micro_batch_size)]

    def create_others():
        with torch.device("meta"):
            model = step.model.Llama(config)
        weights = step.model.initial_weights(model, args.seed)
        step.model.load_weights(model, weights, args.device, torch.float32)
        context = rivals.Context(args, config, step, model)
        alone = rivals.Context(args, config, SimpleNamespace(train=first_step), deepcopy(model))
        beside = rivals.Context(args, config, SimpleNamespace(train=first_step), deepcopy(model))
        train_step, alone, beside = rival(context), own_loop(alone), own_loop(beside)

        def single(number, lr):
            if rank > 0:
                return None
            torch.set_num_threads(cores)
            result = alone(batches(number, 0, 1), num_tokens, lr)
            torch.set_num_threads(1)
            return result

        def apart(number, lr):
            beside(batches(number, rank, world), num_tokens, lr)

        def messages(number, lr):
            for again in state.collectives:
                again()

        others["rival"] = lambda number, lr: train_step(
            batches(number, rank * replicas // world, replicas), num_tokens, lr)
        if args.device == "cpu":
            others["single"] = single
        if args.device == "cpu" and world > 1:
            others["apart"] = apart
            others["messages"] = messages

    def own_loop(context):
        optimizer = context.optimizer(context.model)

        def train_step(micro_batches, num_tokens, lr):
            optimizer.zero_grad()
            loss = first_step.forward_backward(context.model, micro_batches, num_tokens, context.autocast)
            grad_norm = first_step.clip_gradients(context.model, args.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            return loss, grad_norm
        return train_step

    def barrier():
        if args.device == "cuda":
            torch.cuda.synchronize()
        if world > 1:
            dist.barrier()

    state = SimpleNamespace(start=time.perf_counter(), collectives=[])

    def record_and_let_others_have_their_turns(self, number, loss, grad_norm, lr):
        result = loss.item(), grad_norm.item()
        record(self, number, loss, grad_norm, lr)
        turns = {"step": (time.perf_counter() - state.start, result)}
        state.collectives = list(collectives)
        if not others:
            create_others()
        for who, turn in others.items():
            barrier()
            start = time.perf_counter()
            result = turn(number, lr)
            result = result and tuple(map(float, result))
            barrier()
            turns[who] = time.perf_counter() - start, result
        rounds.append(turns)
        collectives.clear()
        state.start = time.perf_counter()

    train.Metrics.record = record_and_let_others_have_their_turns
    train.main(argv)
    return rounds


def ratios(rounds, numerator, denominator):
    """Median and quartiles of numerator / denominator, round by round; both are functions of a round."""
    values = [numerator(seconds) / denominator(seconds) for seconds in rounds]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return [median, low, high]


def compare(name, rounds):
    """Returns a dict of what was measured for this pair. Raises AssertionError if results differ."""
    pair, cores = PAIRS[name], os.cpu_count()
    on_gpus = torch.cuda.device_count() >= pair.nproc
    argv = [*SHAPE, "--steps", rounds + WARM_UP, *pair.flags.split(), *([] if on_gpus else ["--use_cpu"])]
    run = launch.fork(take_turns, same_run.step_folder(launch.ROOT, pair.step), list(map(str, argv)),
                      pair.rival, cores, nproc=pair.nproc, timeout=120 + 30 * rounds).check()
    for number, turns in enumerate(run.results[0], start=1):
        results = {who: result for who, (_, result) in turns.items() if result}
        for ours, theirs in zip(results["step"] * len(results), chain(*results.values())):
            assert abs(theirs / ours - 1) < MOST * (10 if on_gpus else 1), f"{name}, step {number}: {results}"
    measured = [{who: seconds for who, (seconds, _) in turns.items()} for turns in run.results[0][WARM_UP:]]
    row = {"pair": name, "step": pair.step, "flags": pair.flags, "rival": pair.what, "processes": pair.nproc,
           "device": "cuda" if on_gpus else "cpu", "rounds": len(measured),
           "ms": {who: 1e3 * statistics.median(turns[who] for turns in measured) for who in measured[0]},
           "over_rival": ratios(measured, lambda t: t["rival"], lambda t: t["step"])}
    if "apart" in measured[0]:
        busy = 1 - idle_share(pair)
        row["over_single"] = ratios(measured, lambda t: t["single"], lambda t: t["step"])
        row["apart_over_single"] = ratios(measured, lambda t: t["single"], lambda t: t["apart"])
        row["allowed_over_single"] = ratios(
            measured, lambda t: t["single"], lambda t: (t["apart"] + t["messages"]) / busy)
    return row


def idle_share(pair):
    """Of a pipeline: (p - 1) / (m + p - 1) (Huang et al., GPipe, arXiv 1811.06965, section 2.3)."""
    words = pair.flags.split()
    stages = int(words[words.index("--pp") + 1]) if "--pp" in words else 1
    micro_batches = int(words[words.index("--grad_acc_steps") + 1])
    return (stages - 1) / (micro_batches + stages - 1)


def main(argv=None):
    parser = argparse.ArgumentParser("compare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PAIRS, *COSTS], default=[*PAIRS, *COSTS],
                        help="default: everything", metavar="PART")
    parser.add_argument("--rounds", type=int, default=15, help="training steps of each that count")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = {"date": str(date.today()), "torch": torch.__version__, "system": platform.system(),
               "machine": platform.machine(), "cores": os.cpu_count(),
               "command": " ".join(["python tests/benchmarks/compare.py", *map(str, argv or sys.argv[1:])])}
    for name in args.only:
        row = compare(name, args.rounds) if name in PAIRS else COSTS[name]()
        figures[name] = row
        print(f"{name}:", json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
