"""The command line: flags, and what is wrong with them, in one line each."""

import argparse
import os
import time
from contextlib import contextmanager

import torch

from config import load_config


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(30)  # the first process speaks for all; when it has ended, torchrun ends the others
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def input_errors():
    """Turns what is wrong with the user's input into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        Parser("train.py").error(str(error))


def number(kind, least):
    """A type for argparse: a number of this kind, at least this large; NaN isn't."""
    def parse(text):
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {text}")
        return value
    parse.__name__ = kind.__name__  # for argparse's own message: "invalid int value"
    return parse


positive = number(int, 1)


SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "vocab_size")


def create_parser():
    """The command line of train.py."""
    parser = Parser("train.py", allow_abbrev=False, formatter_class=Help)
    add = parser.add_argument
    add("--model_name", default="tiny", help="a preset, a folder with config.json or a hub name")
    for name in SHAPE:
        add(f"--{name}", type=positive, help="in place of the model's own")
    add("--dataset_name", default="stories", help="stories, a .txt, .jsonl or .parquet file or a hub name")
    add("--tokenizer_name", default="bytes", help="bytes, a folder or a hub name")
    add("--seq_len", type=positive, default=256, help="tokens in a sequence")
    add("--micro_batch_size", "--mbs", type=positive, default=2, help="sequences in one forward pass")
    add("--global_batch_size", type=positive, help="sequences in a training step; 8 if nothing else is said")
    add("--grad_acc_steps", "--gradient_accumulation_steps", type=positive,
        help="micro-batches in a training step, in place of --global_batch_size")
    add("--total_train_steps", "--steps", type=positive, default=100, help="training steps")
    add("--learning_rate", type=number(float, 0), default=3e-3, help="at its highest")
    add("--warmup_steps", type=number(int, 0), default=10, help="training steps until it is highest")
    add("--max_grad_norm", type=number(float, 0), default=1.0, help="clip gradients to this norm; 0: never")
    add("--weight_decay", type=number(float, 0), default=0.1, help="on matrices only")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--dtype", choices=["float32", "bfloat16", "float64"],
        help="bfloat16 is autocast over float32 weights, and the default on a GPU that has it")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    add("--use_cpu", dest="device", action="store_const", const="cpu", help="the same as --device cpu")
    add("--metrics_file", help="write one JSON object a training step to this file")
    add("--profile_dir", help="write a torch.profiler trace of steps 2 to 4 to this folder")
    add("--dp_size", "--dp", type=positive, help="replicas of the model; by default what the world leaves")
    add("--bucket_cap_mb", type=number(float, 0), default=25, help="MiB of gradients in one all-reduce")
    add("--timeout", type=positive, default=60, help="seconds after which communication has failed")
    return parser


def parse_args(argv=None):
    """Returns (args, config) with everything filled in: batch sizes, device and dtype. Raises ValueError."""
    args = create_parser().parse_args(argv)
    config = load_config(args.model_name, **{name: getattr(args, name) for name in SHAPE})
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    args.dp_size = args.dp_size or world_size
    if world_size != args.dp_size:
        raise ValueError(f"the layout needs dp {args.dp_size} = {args.dp_size} processes, not {world_size}: "
                         f"use --nproc_per_node {args.dp_size}")
    cut_batch(args)
    args.max_grad_norm = args.max_grad_norm or float("inf")
    num_gpus, local_world_size = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and num_gpus < local_world_size:
        raise ValueError(f"--device cuda: {num_gpus} GPUs for {local_world_size} processes; use --device cpu")
    args.device = "cuda" if args.device != "cpu" and num_gpus >= local_world_size else "cpu"
    has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported()
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    if args.metrics_file:
        open(args.metrics_file, "a").close()  # fails here if it can't be written, not in mid-run
    if args.profile_dir:
        os.makedirs(args.profile_dir, exist_ok=True)
    return args, config


def cut_batch(args):
    """Fills in global_batch_size = grad_acc_steps x micro_batch_size x dp_size."""
    size, total = args.micro_batch_size * args.dp_size, args.global_batch_size or 8
    if args.grad_acc_steps:
        total = size * args.grad_acc_steps
        if args.global_batch_size not in (None, total):
            raise ValueError(f"--global_batch_size {args.global_batch_size} is not {total} = "
                             f"grad_acc_steps x micro_batch_size x dp_size: leave one of them out")
    if total % size:
        raise ValueError(f"--global_batch_size {total} is not a multiple of {size} = micro_batch_size x "
                         f"dp_size: use --global_batch_size {-(-total // size) * size}")
    args.global_batch_size, args.grad_acc_steps = total, total // size
