"""Pre-trains a Llama with data parallelism.

    torchrun --nproc_per_node 2 step02_data_parallel/train.py

trains a small model on an embedded text within a minute on two CPU cores; --help lists what can be changed.
"""

import math

import torch
import torch.distributed as dist
from torch.profiler import record_function

from arguments import input_errors, parse_args
from data import Sequences, load_tokenizer, load_tokens
from data_parallel import GradientBuckets
from mesh import create_mesh
from metrics import Metrics, create_profiler
from model import Llama, initial_weights, load_weights


def learning_rate(step, args):
    """Linear warm-up, then a cosine down to a tenth. step counts from 1."""
    if step <= args.warmup_steps:
        return args.learning_rate * step / args.warmup_steps
    progress = (step - args.warmup_steps) / (args.total_train_steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def forward_backward(model, micro_batches, num_tokens, autocast):
    """Adds up the gradients of all micro-batches in the parameters' .grad and returns the loss.

    The loss is the mean over the num_tokens tokens of the whole training step. This is the one place that
    divides: losses and gradients of any cut of the batch only have to be summed.
    """
    total = 0.0
    for i, (inputs, targets) in enumerate(micro_batches):
        with record_function(f"forward {i}"), autocast:
            loss = model.cross_entropy(model(inputs), targets) / num_tokens
        with record_function(f"backward {i}"):
            loss.backward()
        total += loss.detach()
    return total


def clip_gradients(model, max_norm):
    """Scales the gradients so that the norm of all of them as one vector is at most max_norm.

    Returns the norm that they had.
    """
    norms = torch.stack([torch.linalg.vector_norm(parameter.grad) for parameter in model.parameters()])
    grad_norm = norms.square().sum().sqrt()
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
        encode, vocab_size = load_tokenizer(args.tokenizer_name)
        if vocab_size > config.vocab_size:
            raise ValueError(f"the tokenizer has {vocab_size} tokens, the model only {config.vocab_size}: "
                             f"use --vocab_size {vocab_size}")
        sequences = Sequences(load_tokens(args.dataset_name, encode), args.seq_len, args.seed)

    mesh = create_mesh({"dp": args.dp_size}, args.device, args.timeout)
    dp, world = mesh.dp, mesh.world

    with torch.device("meta"):  # shapes without memory; the weights come one by one
        model = Llama(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    load_weights(model, initial_weights(model, args.seed), args.device, weight_dtype)
    gradients = GradientBuckets(model, dp, args.grad_acc_steps, args.bucket_cap_mb)
    optimizer = create_optimizer(model, args)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")

    metrics = Metrics(args, config, num_parameters, world)
    profiler = create_profiler(args.profile_dir, world.rank) if args.profile_dir else None
    num_tokens = args.global_batch_size * args.seq_len
    for step in range(1, args.total_train_steps + 1):
        first = (step - 1) * args.global_batch_size + dp.rank * args.global_batch_size // dp.size
        micro_batches = [
            sequences.batch(first + i * args.micro_batch_size, args.micro_batch_size, args.device)
            for i in range(args.grad_acc_steps)
        ]
        gradients.zero_grad()
        loss = dp.all_reduce(forward_backward(model, micro_batches, num_tokens, autocast))
        gradients.wait()
        grad_norm = clip_gradients(model, args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr = learning_rate(step, args)
        optimizer.step()
        metrics.record(step, loss, grad_norm, lr)
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
