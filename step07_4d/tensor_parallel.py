"""Tensor parallelism: every weight matrix is cut into shards, and each process computes with its own.

Communication in every micro-batch, of tensors of (batch, seq, hidden) in float32 or float64:
- forward: one all-reduce (sum) behind each attention, each MLP and the embedding;
- backward: one all-reduce (sum) in front of each attention, each MLP and the head;
- loss: one all-gather of two numbers a token.
That makes 2 layers + 1 all-reduces forward and as many backward. The backward ones run while weight gradients
are computed.

A matrix that is cut along its output features is column-parallel: input whole, output cut. The matrix behind
it is cut along its input features, row-parallel: input cut, and the processes' outputs add up to the whole.
Attention and MLP are such a pair each, and nothing is exchanged in between (Shoeybi et al., Megatron-LM,
arXiv 1909.08053, section 3).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# Which dim of a weight (out_features, in_features) is cut. What isn't named is whole on every process.
SHARD_DIM = {
    "embed_tokens": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1,
    "gate_proj": 0, "up_proj": 0, "down_proj": 1, "lm_head": 0,
}


def shard_dim(name):
    """The dim along which the weight of this name is cut, or None."""
    return SHARD_DIM.get(name.split(".")[-2])


def shard(weights, tp):
    """Turns (name, weight) pairs into (name, this process's shard)."""
    for name, weight in weights:
        dim = shard_dim(name)
        yield name, weight if dim is None else weight.chunk(tp.size, dim)[tp.rank].clone()


class ColumnParallel(torch.autograd.Function):
    """Linear layers of one input, each process with its part of the output features: Megatron's f.

    The input is whole, so backward sums its gradient over the processes, and over the layers before that: one
    all-reduce serves them all.
    """

    @staticmethod
    def forward(ctx, tp, dtype, x, *weights):
        ctx.tp, ctx.input_dtype = tp, x.dtype
        x, *weights = (tensor.to(dtype) for tensor in (x, *weights))
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        grad_x = sum(grad @ weight for grad, weight in zip(grads, weights)).to(ctx.input_dtype)
        summing = ctx.tp.start_all_reduce(grad_x)
        grad_weights = [grad.flatten(0, 1).T @ x.flatten(0, 1) for grad in grads]  # in the meantime
        summing.wait()
        return None, None, grad_x, *grad_weights


def column_parallel(tp, x, *linears):
    """Takes the place of model.project. x: (batch, seq, hidden)."""
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    return ColumnParallel.apply(tp, dtype, x, *(linear.weight for linear in linears))


class Reduce(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward, as a summand's gradient is that of the sum."""

    @staticmethod
    def forward(ctx, tp, x):
        ctx.mark_dirty(x)
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


class RowParallelLinear(nn.Module):
    """Input features cut. Each process's product is a part of the sum that is the output."""

    def __init__(self, linear, tp):
        super().__init__()
        self.weight, self.tp = linear.weight, tp

    def forward(self, x):
        return Reduce.apply(self.tp, F.linear(x, self.weight).to(self.weight.dtype))


class VocabParallelEmbedding(nn.Module):
    """Vocabulary cut. The process that has a token's row adds it to the zeros of all others."""

    def __init__(self, embedding, tp):
        super().__init__()
        self.weight, self.tp = embedding.weight, tp

    def forward(self, tokens):
        rows, mine = local_tokens(tokens, self.weight.size(0), self.tp)
        return Reduce.apply(self.tp, F.embedding(rows, self.weight) * mine[..., None])


def local_tokens(tokens, size, tp):
    """Returns tokens counted from this process's first, 0 for those of others, and which ones are its own."""
    rows = tokens - tp.rank * size
    mine = (rows >= 0) & (rows < size)
    return rows * mine, mine


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits that are cut along the vocabulary. Nobody ever sees them all.

    The loss of a token is logsumexp(all logits) - logit of its target. The processes exchange just these two
    numbers: the log-sum-exp of their part, and the target's logit if it is theirs, else 0.
    """

    @staticmethod
    def forward(ctx, tp, logits, targets):
        rows, mine = local_tokens(targets, logits.size(-1), tp)
        target_logits = logits.gather(-1, rows[:, None])[:, 0] * mine
        parts = tp.all_gather(torch.stack([logits.logsumexp(-1), target_logits]))  # (tp, 2, tokens)
        lse, target_logits = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
        ctx.save_for_backward(logits, lse, rows, mine)
        return (lse - target_logits).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, lse, rows, mine = ctx.saved_tensors
        grad_logits = (logits - lse[:, None]).exp_()  # the softmax, less 1 at the target
        grad_logits.scatter_add_(-1, rows[:, None], -mine[:, None].to(grad_logits.dtype))
        return None, grad_logits.mul_(grad), None


def vocab_parallel_cross_entropy(tp, logits, targets):
    """Takes the place of model.cross_entropy. logits: (batch, seq, vocab / tp); targets: (batch, seq)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return VocabParallelCrossEntropy.apply(tp, logits.flatten(0, 1), targets.flatten())


def tensor_parallel(model, tp):
    """Makes a model that was built whole compute with shards. The weights themselves are cut by shard()."""
    if tp.size == 1:
        return
    for layer in model.model.layers.values():
        layer.self_attn.project = layer.mlp.project = partial(column_parallel, tp)
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, tp)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, tp)
    model.model.embed_tokens = VocabParallelEmbedding(model.model.embed_tokens, tp)
    model.project = partial(column_parallel, tp)
    model.cross_entropy = partial(vocab_parallel_cross_entropy, tp)
