"""Context parallelism: each sequence is spread over the processes; keys and values travel round a ring.

Communication, in every layer and micro-batch: forward, each process sends keys and values, a tensor of
(2, batch, kv_heads, seq / cp, head_dim), cp - 1 times to the next process; backward, the same again, and cp
times their gradients. Each piece travels while the piece before is worked on. Only attention looks at other
positions: all else is as it was, but that the gradients of weights are sums over dp and cp together.

In zigzag order a sequence is cut into 2 cp chunks, and process r has chunk r, which sees little, and chunk
2 cp - 1 - r, which sees much: at every step of the ring all have equally much to do. Liu et al., Ring
Attention, arXiv 2310.01889, section 3; the zigzag: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from functools import partial

import torch

ops = torch.ops.aten


def zigzag_positions(cp, length, device):
    """Takes the place of model.positions: where in the sequence this process's length positions are."""
    early, late = torch.arange(length, device=device).chunk(2)
    chunk = length // 2
    return torch.cat([early + cp.rank * chunk, late + (2 * cp.size - 2 - cp.rank) * chunk])


def visible(rank, owner, length):
    """Which queries of rank see which keys of owner, and whether causally: (queries, keys, causal)."""
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if owner == rank:
        return everything, everything, True
    return (everything, early, False) if owner < rank else (late, everything, False)


def ring(cp, kv):
    """Yields (owner, keys and values) of every process, the own first, while the next ones travel."""
    for step in range(cp.size):
        if step < cp.size - 1:
            coming, wait = cp.start_rotate(kv)
        yield (cp.rank - step) % cp.size, kv
        if step < cp.size - 1:
            wait()
            kv = coming


class RingAttention(torch.autograd.Function):
    """Exact causal attention of this process's queries to the keys and values of all."""

    @staticmethod
    def forward(ctx, cp, q, k, v):
        kv, wide = torch.stack([k, v]), torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for owner, (k, v) in ring(cp, kv):
            queries, keys, causal = visible(cp.rank, owner, q.size(2))
            piece, piece_lse = piece_forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal)
            # Softmax over two sets of scores: those of each, weighted by its part of the sum of exponentials.
            before = lse[:, :, queries]
            total = before.logaddexp(piece_lse)
            out[:, :, queries] *= (before - total).exp()[..., None]
            out[:, :, queries] += piece * (piece_lse - total).exp()[..., None]
            lse[:, :, queries] = total
        ctx.cp = cp
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        cp, (q, kv, out, lse) = ctx.cp, ctx.saved_tensors
        grad_q, grad_kv = torch.zeros_like(q, dtype=lse.dtype), None
        for owner, (k, v) in ring(cp, kv):
            queries, keys, causal = visible(cp.rank, owner, q.size(2))
            q_piece, *kv_piece = piece_backward(
                grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                out[:, :, queries], lse[:, :, queries], causal)
            grad_q[:, :, queries] += q_piece
            if grad_kv is None:
                grad_kv = torch.stack(kv_piece).to(lse.dtype)
            else:  # the sum of those who had these keys and values before has arrived in the meantime
                wait()
                grad_kv = coming
                grad_kv[:, :, :, keys] += torch.stack(kv_piece)
            coming, wait = cp.start_rotate(grad_kv)
        wait()
        grad_k, grad_v = coming.to(q.dtype)  # at the last step it comes home
        return None, grad_q.to(q.dtype), grad_k, grad_v


def ring_attention(cp, q, k, v):
    """Takes the place of attend. q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv_heads, ...)."""
    return RingAttention.apply(cp, q, k, v)


def context_parallel(model, cp):
    """Makes the model work on this process's positions of every sequence."""
    if cp.size == 1:
        return
    model.positions = partial(zigzag_positions, cp)
    for layer in model.model.layers.values():
        layer.self_attn.attend = partial(ring_attention, cp)


# The fused kernels of scaled_dot_product_attention, called directly since they return the log-sum-exp, too.


def has_flash(q):
    return q.dtype in (torch.float16, torch.bfloat16) and q.size(-1) % 8 == 0


def piece_forward(q, k, v, causal):
    """Attention of q to k, v alone. Returns the output and the log-sum-exp of each query's scores."""
    if q.device.type == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if has_flash(q):
        return ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return plain_forward(q, k, v, causal)


def piece_backward(grad, q, k, v, out, lse, causal):
    """The gradients of q, k and v, where out and lse are those of attention to all keys."""
    if q.device.type == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, causal)
    if has_flash(q):
        no_dropout = torch.empty(0, dtype=torch.int64, device=q.device)
        return ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, causal,
            no_dropout, no_dropout)
    return plain_backward(grad, q, k, v, out, lse, causal)


def plain_scores(q, k, causal):
    """(batch, kv_heads, heads / kv_heads, queries, keys)"""
    scores = q.unflatten(1, (k.size(1), -1)) @ k[:, :, None].mT * q.size(-1) ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


def plain_forward(q, k, v, causal):
    """What the kernels do, where there is none: CUDA in float32 or float64."""
    scores = plain_scores(q, k, causal)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def plain_backward(grad, q, k, v, out, lse, causal):
    q_, grad, out, lse = (x.unflatten(1, (k.size(1), -1)) for x in (q, grad, out, lse))
    weights = (plain_scores(q, k, causal) - lse[..., None]).exp()
    grad_scores = weights * (grad @ v[:, :, None].mT - (grad * out).sum(-1, keepdim=True))
    grad_scores *= q.size(-1) ** -0.5
    grad_q = (grad_scores @ k[:, :, None]).flatten(1, 2)
    return grad_q, (grad_scores.mT @ q_).sum(2), (weights.mT @ grad).sum(2)
