"""The command line: flags, and what is wrong with them, in one line each."""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from config import load_config
from huggingface import check_hf_weights, find_folder


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(30)  # the first process speaks for all; when it has ended, torchrun ends the others
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def input_errors(program="train.py"):
    """Turns what is wrong with the user's input into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        Parser(program).error(str(error))


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
    add("--tensorboard_dir", help="write the same numbers to this folder for TensorBoard")
    add("--use_wandb", action="store_true", help="send the same numbers to Weights & Biases")
    add("--profile_dir", help="write a torch.profiler trace of steps 2 to 4 to this folder")
    add("--dp_size", "--dp", type=positive, help="replicas of the model; by default what the world leaves")
    add("--tp_size", "--tp", type=positive, default=1, help="processes that share every layer's matrices")
    add("--pp_size", "--pp", type=positive, default=1, help="stages that share the layers")
    add("--pp_engine", choices=["afab", "1f1b"], default="1f1b", help="schedule of the stages")
    add("--cp_size", "--cp", type=positive, default=1, help="processes that share the positions of sequences")
    add("--bucket_cap_mb", type=number(float, 0), default=25, help="MiB of gradients in one all-reduce")
    add("--timeout", type=positive, default=60, help="seconds after which communication has failed")
    add("--load_hf", help="start from the weights of a folder or hub name of transformers, in its shape")
    add("--save_dir", help="write checkpoints to this folder: at the end, and while training")
    add("--save_every", type=positive, help="training steps from one checkpoint to the next")
    add("--keep_last", type=number(int, 0), default=0, help="newest checkpoints to keep; 0: all")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint, if there is one")
    return parser


def command_line(flags):
    """Turns {"tp_size": 2, "use_wandb": true} into ["--tp_size=2", "--use_wandb"]."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


def read_flags(path):
    with open(path, encoding="utf-8") as file:
        try:
            return dict(json.load(file))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no JSON object: {error}")


def parse_args(argv=None):
    """Returns (args, config) with everything filled in: batch sizes, device and dtype. Raises ValueError."""
    parser = create_parser()
    add = parser.add_argument
    add("--config", help="a file of flags from create_config.py; those of the command line come on top")
    add("--dry_run", action="store_true", help="say what a process would hold and send, and train nothing")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.config:
        args = parser.parse_args([*command_line(read_flags(args.config)), *argv])
    if args.load_hf:
        args.model_name = args.load_hf = find_folder(args.load_hf)
    config = load_config(args.model_name, **{name: getattr(args, name) for name in SHAPE})
    if args.load_hf:
        check_hf_weights(config, args.load_hf)
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    args.dp_size = args.dp_size or max(world_size // (args.pp_size * args.cp_size * args.tp_size), 1)
    needed = args.dp_size * args.pp_size * args.cp_size * args.tp_size
    if world_size != needed and not args.dry_run:
        raise ValueError(f"the layout needs dp {args.dp_size} x pp {args.pp_size} x cp {args.cp_size} "
                         f"x tp {args.tp_size} = {needed} processes, not {world_size}: "
                         f"use --nproc_per_node {needed}")
    if args.seq_len % (2 * args.cp_size):
        raise ValueError(f"--seq_len {args.seq_len} is not a multiple of 2 x cp = {2 * args.cp_size}: use "
                         f"--seq_len {-(-args.seq_len // (2 * args.cp_size)) * 2 * args.cp_size}")
    if args.pp_size > config.num_hidden_layers:
        raise ValueError(f"--pp {args.pp_size} is more stages than the model has layers: "
                         f"use --pp {config.num_hidden_layers} or less")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % args.tp_size:
            raise ValueError(f"--tp {args.tp_size} doesn't divide {name} {getattr(config, name)}: "
                             f"use --tp {math.gcd(args.tp_size, getattr(config, name))} or another --{name}")
    cut_batch(args)
    args.max_grad_norm = args.max_grad_norm or float("inf")
    num_gpus, local_world_size = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and num_gpus < local_world_size and not args.dry_run:
        raise ValueError(f"--device cuda: {num_gpus} GPUs for {local_world_size} processes; use --device cpu")
    args.device = "cuda" if args.device != "cpu" and num_gpus >= local_world_size else "cpu"
    has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported()
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    if args.dry_run:
        return args, config
    if args.metrics_file:
        open(args.metrics_file, "a").close()  # fails here if it can't be written, not in mid-run
    if args.profile_dir:
        os.makedirs(args.profile_dir, exist_ok=True)
    if args.save_dir:
        os.makedirs(args.save_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.save_dir).close()
    elif args.save_every or args.resume:
        raise ValueError("--save_every and --resume need --save_dir, the folder of the checkpoints")
    args.save_every = args.save_every or args.total_train_steps
    for flag, package in (("use_wandb", "wandb"), ("tensorboard_dir", "tensorboard")):
        if getattr(args, flag) and not find_spec(package):
            raise ValueError(f"--{flag} needs the package {package}: pip install {package}")
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
