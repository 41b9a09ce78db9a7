"""Checkpoints: a run can be stopped at any moment and go on later, in the same layout or in any other.

Every process writes what it holds, all at the same time, with torch.distributed.checkpoint; of replicas, each
writes a part. Tensors are stored under their global names, and a shard says of which tensor it is which part,
so that a run in another layout reads just the slices that it needs.

A checkpoint is the folder step-00000010. It is written as step-00000010.partial and renamed when all of it is
on the disk: whenever a run is killed, a folder without .partial is complete.
"""

import json
import shutil
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from huggingface import check_shapes, hf_config, hf_weights
from model import initial_weights
from tensor_parallel import shard, shard_dim

# Which sequences a training step sees depends on these: a run that goes on has to keep them.
DATA_FLAGS = ("global_batch_size", "seq_len", "seed")


def complete_checkpoints(save_dir):
    """Returns {training step: folder}, in order."""
    folders = sorted(Path(save_dir).glob("step-" + "[0-9]" * 8))
    return {int(folder.name.removeprefix("step-")): folder for folder in folders}


def newest_checkpoint(args, config):
    """Returns the training step that --resume goes on from, 0 if there is none. Raises ValueError."""
    step, folder = max(complete_checkpoints(args.save_dir).items(), default=(0, None))
    if step and not args.resume:
        raise ValueError(f"--save_dir {args.save_dir} has checkpoints up to training step {step}: "
                         f"add --resume or use another folder")
    if step:
        from torch.distributed.checkpoint import FileSystemReader  # takes a second: only when needed
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        check_shapes(config, folder, {name: entry.size for name, entry in entries.items()})
        before = json.loads((folder / "run.json").read_text())
        for name in DATA_FLAGS:
            if before[name] != getattr(args, name):
                raise ValueError(f"{folder} was trained with {name} {before[name]}, not "
                                 f"{getattr(args, name)}: use --{name} {before[name]}")
    return step


def starting_weights(model, args, step, tp):
    """Returns the stream of (name, this process's shard) that a run has until it loads a checkpoint."""
    if step:  # only the shapes count
        return shard(((name, torch.empty(weight.shape)) for name, weight in model.named_parameters()), tp)
    if args.load_hf:
        return hf_weights(model, args.load_hf, tp)
    return shard(initial_weights(model, args.seed), tp)


def training_state(model, optimizer, tp):
    """All that a run has learned: {global name: tensor}. A shard knows of which tensor it is which part.

    AdamW's moments and step counter are named after their weight: "exp_avg.model.norm.weight". The tensors
    are the live ones: whoever writes into them restores the run.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    state = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        if not moments:  # AdamW makes them in its first step
            like = parameter.detach()
            step = torch.zeros((), device=like.device if optimizer.defaults["fused"] else "cpu")
            moments.update(step=step, exp_avg=torch.zeros_like(like), exp_avg_sq=torch.zeros_like(like))
        state[name] = parameter.detach()
        state |= {f"{key}.{name}": tensor for key, tensor in moments.items()}
    if tp.size > 1:
        mesh = DeviceMesh.from_group(tp.group, next(model.parameters()).device.type)
        for name, tensor in state.items():
            if shard_dim(name) is not None and tensor.dim() > 0:
                state[name] = DTensor.from_local(tensor, mesh, [Shard(shard_dim(name))])
    return state


class Checkpoints:
    """The checkpoints of a run, in args.save_dir."""

    def __init__(self, args, config, mesh):
        self.args, self.config, self.world, self.tp, self.group = args, config, mesh.world, mesh.tp, None
        if self.world.size > 1:  # a disk may take longer than communication
            timeout = timedelta(seconds=10 * args.timeout)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")

    def load(self, step, model, optimizer):
        """Reads the checkpoint of this training step into weights, moments and step counters."""
        import torch.distributed.checkpoint as dcp
        folder = complete_checkpoints(self.args.save_dir)[step]
        dcp.load(training_state(model, optimizer, self.tp), checkpoint_id=folder, process_group=self.group)

    def save(self, step, model, optimizer):
        """Writes a checkpoint, then removes what keep_last says. Raises OSError."""
        import torch.distributed.checkpoint as dcp
        folder = Path(self.args.save_dir, f"step-{step:08}")
        partial = folder.with_suffix(".partial")
        try:
            dcp.save(training_state(model, optimizer, self.tp), checkpoint_id=partial,
                     process_group=self.group)
        except dcp.api.CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            last = max(complete_checkpoints(self.args.save_dir), default="none")
            free = shutil.disk_usage(self.args.save_dir).free
            raise OSError(f"the checkpoint of training step {step} can't be written to {partial}, where "
                          f"{free:,} bytes are free: {reason}; the last complete one: {last}")
        if self.world.rank == 0:
            run = {"step": step, **{name: getattr(self.args, name) for name in DATA_FLAGS}}
            (partial / "run.json").write_text(json.dumps(run, indent=2))
            (partial / "config.json").write_text(json.dumps(hf_config(self.config), indent=2))
            partial.rename(folder)
            self.remove_old()

    def remove_old(self):
        kept = list(complete_checkpoints(self.args.save_dir).values())[-self.args.keep_last:]  # -0: all
        for folder in set(Path(self.args.save_dir).glob("step-*")) - set(kept):
            trash = folder.with_suffix(".partial")  # no longer complete, even if this is interrupted
            shutil.rmtree(folder.rename(trash))
