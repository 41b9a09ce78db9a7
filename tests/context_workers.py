"""What test_step06.py runs in forked processes: the ring beside attention that isn't spread."""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def axis(folder):
    """The cp axis over all processes, and the step's modules."""
    sys.path.insert(0, str(folder))
    import context_parallel
    import mesh
    size = int(os.environ["WORLD_SIZE"])
    return mesh.create_mesh({"dp": 1, "pp": 1, "cp": size, "tp": 1}, "cpu", 60).cp, context_parallel


def inputs(seq, heads, kv_heads, dtype, scale, head_dim=16):
    """The same q, k, v and gradient on all ranks; scale multiplies the scores' size."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, seq, head_dim, generator=generator, dtype=torch.float64)
                     for n in (heads, kv_heads, kv_heads, heads))
    return [x.to(dtype) for x in (q * scale, k, v, grad)]


def ring_errors(folder, local_seq, heads, kv_heads, dtype, scale):
    """Returns the largest relative error of output, dq, dk and dv against causal attention in one process."""
    cp, module = axis(folder)
    q, k, v, grad = inputs(local_seq * cp.size, heads, kv_heads, dtype, scale)
    where = module.zigzag_positions(cp, local_seq, device="cpu")

    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected = [expected.detach(), *torch.autograd.grad(expected, whole, grad.double())]

    mine = [x[:, :, where].clone().requires_grad_() for x in (q, k, v)]
    out = module.ring_attention(cp, *mine)
    # The gradient arrives in attention's own layout, heads behind positions, as o_proj's backward leaves it.
    arriving = grad[:, :, where].transpose(1, 2).contiguous().transpose(1, 2)
    found = [out.detach(), *torch.autograd.grad(out, mine, arriving)]
    assert all(f.dtype == dtype and f.isfinite().all() for f in found)
    return [((f - e[:, :, where]).abs().max() / e.abs().max()).item() for f, e in zip(found, expected)]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(getattr(self, "numel", 0), tensor.numel())
        return result


def largest_tensor(folder, local_seq):
    """Elements of the largest tensor that the ring makes, and of the queries."""
    cp, module = axis(folder)
    q, k, v, grad = inputs(local_seq, 2, 2, torch.float32, 1.0)
    q.requires_grad_()
    with Largest() as largest:
        torch.autograd.grad(module.ring_attention(cp, q, k, v), q, grad)
    return largest.numel, q.numel()


def bytes_sent(folder, argv):
    """Runs train.py. Returns the elements of every tensor that was sent round the ring, in order."""
    sent, start = [], dist.batch_isend_irecv

    def counting(operations):
        sent.extend(operation.tensor.numel() for operation in operations if operation.op is dist.isend)
        return start(operations)

    dist.batch_isend_irecv = counting
    sys.path.insert(0, str(folder))
    import train
    train.main(argv)
    return sent
