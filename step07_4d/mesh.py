"""Who is where: the processes as a mesh, and the groups of processes that talk to one another."""

import math
import os
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist


class Axis:
    """One axis of the mesh as one process sees it: the processes that differ from it along this axis alone.

    rank: this process's place on the axis, 0 ... size - 1. Tensors must be contiguous: gloo sums others
    wrongly and doesn't say so.
    """

    def __init__(self, rank, size, group=None):
        self.rank, self.size, self.group = rank, size, group

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        """Replaces the tensor by its sum over the axis, in place, and returns it."""
        if self.size > 1:
            self.start_all_reduce(tensor, op).wait()
        return tensor

    def start_all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        """The same in the background: the tensor must not be touched before wait() on what this returns."""
        assert tensor.is_contiguous()
        return dist.all_reduce(tensor, op, group=self.group, async_op=True)

    def start_send(self, tensor, target):
        """Sends to the axis's rank target in the background. Keep the tensor as it is until wait()."""
        assert tensor.is_contiguous()
        return dist.isend(tensor, group=self.group, group_dst=target)

    def start_receive(self, tensor, source):
        """Receives from the axis's rank source in the background. The tensor is there after wait()."""
        return dist.irecv(tensor, group=self.group, group_src=source)

    def start_rotate(self, tensor):
        """Sends to the next process of the ring and receives from the one before, in the background.

        Returns (received, wait). Until wait() received isn't there and the sent tensor must stay as it is.
        """
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv([  # as a pair: two processes that send to each other can't get stuck
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size)])
        return received, lambda: [work.wait() for work in works]

    def all_gather(self, tensor):
        """Returns the tensors of all processes of the axis, stacked: (size, *tensor.shape)."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)


def draw_mesh(sizes):
    """Returns a picture of sizes {"dp": 2, "pp": 2, "cp": 2, "tp": 2}: in each field, the ranks along tp."""
    dp, pp, cp, tp = sizes.values()
    shown = {name: [i for i in range(size) if i < 3 or i == size - 1] for name, size in sizes.items()}
    lines = ["mesh of ranks".ljust(16) + "".join(f"pp {stage}".rjust(16) for stage in shown["pp"])]
    for replica in shown["dp"]:
        for part in shown["cp"]:
            line = f"dp {replica:<5} cp {part}".ljust(16)
            for stage in shown["pp"]:
                first = ((replica * pp + stage) * cp + part) * tp
                line += (f"{first} ... {first + tp - 1}" if tp > 1 else str(first)).rjust(16)
            lines.append(line)
    return "\n".join(lines)


def create_axis(ranks, dim, timeout):
    """Groups the processes that differ along this dim of ranks alone. Returns the Axis of this process."""
    lines = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)  # the world's isn't inherited
    return Axis(dist.get_rank(group), ranks.size(dim), group)


def create_mesh(sizes, device, timeout):
    """Starts the process groups.

    sizes: {"dp": 2, ...}, from the slowest axis to the fastest, on which neighbours are neighbours in rank.
    timeout: seconds that a communication may take. Returns a namespace: an Axis for each name, and the world.
    """
    if math.prod(sizes.values()) == 1:
        return SimpleNamespace(**{name: Axis(0, 1) for name in (*sizes, "pp_back", "dp_cp", "world")})
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=timeout)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    axes = {name: create_axis(ranks, dim, timeout) for dim, name in enumerate(sizes)}
    axes["pp_back"] = create_axis(ranks, list(sizes).index("pp"), timeout)  # a second group along pp
    together = ranks.transpose(1, 2).flatten(0, 1)  # (dp, pp, cp, tp) -> (dp x cp, pp, tp)
    axes["dp_cp"] = create_axis(together, 0, timeout)
    return SimpleNamespace(**axes, world=Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
