"""What people and programs get to see of a run: a table, a file of metrics, a profile."""

import json
import resource
import sys
import time

import torch
from torch.distributed import ReduceOp

# FLOP/s in bfloat16 without sparsity, from NVIDIA's data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class Metrics:
    """Prints a row and writes a line of JSON for every training step, from the one after start."""

    def __init__(self, args, config, num_parameters, world, start):
        self.device, self.tokens_per_step = args.device, args.global_batch_size * args.seq_len
        self.world, self.start_step, self.tokens = world, start, 0
        # 6 N + 12 L H Q T, forward and backward (Chowdhery et al., arXiv 2204.02311, appendix B)
        attention_flops = 12 * config.num_hidden_layers * config.hidden_size * args.seq_len
        self.flops_per_token = 6 * num_parameters + attention_flops
        self.start = self.last = time.perf_counter()
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else ""
        self.peak_flops = next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)
        if world.rank > 0:
            return
        self.file = open_rows(args.metrics_file, start) if args.metrics_file else None
        self.loggers = create_loggers(args, start)
        print(f"{args.model_name}: {num_parameters:,} parameters, {args.dtype} on {gpu or 'the CPU'}")
        print(f"a training step: {args.global_batch_size} sequences of {args.seq_len} tokens = "
              f"{self.tokens_per_step:,}, in {args.grad_acc_steps} micro-batches of {args.micro_batch_size}")
        if self.peak_flops:
            print(f"MFU assumes a peak of {self.peak_flops / 1e12:.0f} TFLOP/s")

    def record(self, step, loss, grad_norm, lr):
        """step counts from 1; loss and grad_norm are tensors of one element."""
        self.loss, grad_norm = loss.item(), grad_norm.item()  # waits for the GPU
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        tokens_per_second = self.tokens_per_step / seconds
        tokens_per_process = tokens_per_second / self.world.size
        mfu = tokens_per_process * self.flops_per_token / self.peak_flops if self.peak_flops else None
        memory = torch.tensor(peak_memory(self.device), device=self.device)
        memory = self.world.all_reduce(memory, ReduceOp.MAX).item()
        self.tokens = step * self.tokens_per_step
        if self.world.rank > 0:
            return
        row = {"step": step, "loss": f"{self.loss:.4f}", "grad norm": f"{grad_norm:.4f}", "lr": f"{lr:.2e}",
               "tokens/s": f"{tokens_per_second:,.0f}", "/process": f"{tokens_per_process:,.0f}",
               "memory": f"{memory / 2**20:,.0f} MiB"}
        if mfu:
            row["MFU"] = f"{mfu:.1%}"
        if step == self.start_step + 1:
            print("  ".join(f"{title:>9}" for title in row))
        print("  ".join(f"{value:>9}" for value in row.values()), flush=True)
        numbers = {
            "step": step, "loss": self.loss, "grad_norm": grad_norm, "lr": lr, "tokens": self.tokens,
            "tokens_per_second": tokens_per_second, "step_seconds": seconds, "mfu": mfu,
            "peak_memory_bytes": memory}
        if self.file:
            print(json.dumps(numbers), file=self.file, flush=True)
        for log in self.loggers:
            log(numbers)

    def close(self):
        if self.world.rank > 0:
            return
        seconds = time.perf_counter() - self.start
        if self.tokens:  # else there was nothing left to train
            print(f"final loss {self.loss:.4f} after {self.tokens:,} tokens in {seconds:.1f} s, "
                  f"{(self.tokens - self.start_step * self.tokens_per_step) / seconds:,.0f} tokens/s")
        if self.file:
            self.file.close()


def open_rows(path, last_step):
    """Opens a file of metrics to write on behind last_step's row; later rows and a cut one are dropped."""
    with open(path) as file:
        rows = [line for line in file if last_step and line.endswith("\n")
                and json.loads(line)["step"] <= last_step]
    file = open(path, "w")
    file.writelines(rows)
    return file


def create_loggers(args, start):
    """Returns functions that take the numbers of a training step somewhere else."""
    loggers = []
    if args.use_wandb:
        import wandb
        loggers.append(wandb.init(project="parallel-llama", config=vars(args)).log)
    if args.tensorboard_dir:
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(args.tensorboard_dir, purge_step=start + 1)
        loggers.append(lambda numbers: [board.add_scalar(name, numbers[name], numbers["step"])
                                        for name in numbers if numbers[name] is not None])
    return loggers


def peak_memory(device):
    """Bytes: the most that was allocated on the GPU, or the process's largest resident size."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def create_profiler(folder, rank):
    """Starts a profiler of training steps 2 to 4 that writes a trace for each rank into the folder."""
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(f"{folder}/rank{rank}.json"))
    profiler.start()
    return profiler
