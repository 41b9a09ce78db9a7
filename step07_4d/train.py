"""Pre-trains a Llama with data, tensor, pipeline and context parallelism.

    torchrun --nproc_per_node 16 step07_4d/train.py --dp 2 --pp 2 --cp 2 --tp 2

trains a small model on an embedded text within a minute on two CPU cores; --help lists what can be changed.
"""

import math

import torch
import torch.distributed as dist

from arguments import input_errors, parse_args
from checkpoint import Checkpoints, newest_checkpoint, starting_weights
from context_parallel import context_parallel
from data import Sequences, load_tokenizer, load_tokens
from data_parallel import GradientBuckets
from mesh import create_mesh, draw_mesh
from metrics import Metrics, create_profiler
from model import Llama, load_weights
from pipeline_parallel import SCHEDULES, pipeline_parallel, run_schedule, split_layers, sum_tied_gradient
from plan import dry_run
from tensor_parallel import shard_dim, tensor_parallel


def learning_rate(step, args):
    """Linear warm-up, then a cosine down to a tenth. step counts from 1."""
    if step <= args.warmup_steps:
        return args.learning_rate * step / args.warmup_steps
    progress = (step - args.warmup_steps) / (args.total_train_steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def clip_gradients(model, max_norm, tp, pp):
    """Scales the gradients so that the norm of all of them as one vector is at most max_norm.

    Returns the norm that they had. A shard is counted where it is, a weight that all have whole by the first;
    the embedding, of which the last stage has a copy if the head is tied, by the first stage.
    """
    counted = [parameter.grad for name, parameter in model.named_parameters()
               if (shard_dim(name) is not None or tp.rank == 0)
               and ("embed_tokens" not in name or pp.rank == 0)]
    norms = torch.stack([torch.linalg.vector_norm(grad) for grad in counted])
    grad_norm = pp.all_reduce(tp.all_reduce(norms.square().sum())).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
    return grad_norm


def create_optimizer(model, args):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95), fused=args.device == "cuda")


def main(argv=None):
    with input_errors():
        args, config = parse_args(argv)
        if args.dry_run:
            return dry_run(args, config)
        start = newest_checkpoint(args, config) if args.save_dir else 0
        encode, vocab_size = load_tokenizer(args.tokenizer_name)
        if vocab_size > config.vocab_size:
            raise ValueError(f"the tokenizer has {vocab_size} tokens, the model only {config.vocab_size}: "
                             f"use --vocab_size {vocab_size}")
        sequences = Sequences(load_tokens(args.dataset_name, encode), args.seq_len, args.seed)

    sizes = {"dp": args.dp_size, "pp": args.pp_size, "cp": args.cp_size, "tp": args.tp_size}
    mesh = create_mesh(sizes, args.device, args.timeout)
    dp, pp, cp, tp, world = mesh.dp, mesh.pp, mesh.cp, mesh.tp, mesh.world
    # One start for all: on a network's disk some may not see yet what others do.
    start = int(world.all_reduce(torch.tensor(start, device=args.device), dist.ReduceOp.MIN))

    with torch.device("meta"):  # shapes without memory; the weights come one by one
        model = Llama(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    tensor_parallel(model, tp)
    pipeline_parallel(model, pp)
    context_parallel(model, cp)
    schedule = SCHEDULES[args.pp_engine](pp.rank, pp.size, args.grad_acc_steps)
    load_weights(model, starting_weights(model, args, start, tp), args.device, weight_dtype)
    gradients = GradientBuckets(model, mesh.dp_cp, args.grad_acc_steps, args.bucket_cap_mb)
    optimizer = create_optimizer(model, args)
    checkpoints = Checkpoints(args, config, mesh)
    if start:
        checkpoints.load(start, model, optimizer)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")

    metrics = Metrics(args, config, num_parameters, world, start)
    profiler = create_profiler(args.profile_dir, world.rank) if args.profile_dir else None
    if world.rank == 0:
        print(draw_mesh(sizes))
    if args.resume and world.rank == 0:
        print(f"goes on after training step {start}")
    if pp.size > 1 and world.rank == 0:
        print("layers of each stage:", split_layers(config.num_hidden_layers, pp.size))
    num_tokens = args.global_batch_size * args.seq_len
    for step in range(start + 1, args.total_train_steps + 1):
        first = (step - 1) * args.global_batch_size + dp.rank * args.global_batch_size // dp.size
        micro_batches = [
            sequences.batch(first + i * args.micro_batch_size, args.micro_batch_size, args.device)
            for i in range(args.grad_acc_steps)
        ]
        positions = model.positions(args.seq_len // cp.size, device=args.device)
        micro_batches = [(inputs[:, positions], targets[:, positions]) for inputs, targets in micro_batches]
        gradients.zero_grad()
        loss = run_schedule(schedule, model, micro_batches, num_tokens, autocast, pp, mesh.pp_back)
        loss = pp.all_reduce(mesh.dp_cp.all_reduce(loss))
        gradients.wait()
        sum_tied_gradient(model, pp, mesh.pp_back)
        grad_norm = clip_gradients(model, args.max_grad_norm, tp, pp)
        for group in optimizer.param_groups:
            group["lr"] = lr = learning_rate(step, args)
        optimizer.step()
        metrics.record(step, loss, grad_norm, lr)
        if args.save_dir and (step % args.save_every == 0 or step == args.total_train_steps):
            with input_errors():
                checkpoints.save(step, model, optimizer)
        if profiler:
            profiler.step()
    if profiler:
        profiler.stop()  # writes the trace of a run that ends before step 4
    metrics.close()
    gradients.close()
    if world.size > 1:
        dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
