"""Llama (Touvron et al., arXiv 2302.13971 and 2307.09288), the model that all steps train.

Parameters have the names that `transformers.LlamaForCausalLM` gives them, so weights go both ways without a
table. Shapes in comments: batch, seq (positions), hidden, heads, kv_heads, head_dim, vocab.
"""

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from config import LLAMA_3_SCALING


def rope_tables(positions, config):
    """Rotary position embedding (Su et al., arXiv 2104.09864, section 3.2.2), the angles.

    positions: (seq,). Returns cos and sin, (seq, head_dim / 2), float32.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents  # radians per position
    if config.rope_scaling:  # Llama 3.1 slows slow rotations further and keeps fast ones
        factor, low, high, original_length = (config.rope_scaling[key] for key in LLAMA_3_SCALING)
        turns = original_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotates each pair (x[i], x[i + head_dim / 2]) by its angle. x: (batch, heads, seq, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal_attention(q, k, v):
    """q: (batch, heads, seq, head_dim); k, v: (batch, kv_heads, seq, head_dim). Returns q's shape."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def project(x, *linears):
    """Applies several linear layers to the same input."""
    return [linear(x) for linear in linears]


def cross_entropy(logits, targets):
    """Sum over all tokens, in float32 or wider. logits: (batch, seq, vocab); targets: (batch, seq)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Attention(nn.Module):
    """Grouped-query attention. Heads are counted off the projections' shapes."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.project, self.attend = project, causal_attention

    def forward(self, x, cos, sin):
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (batch, heads, seq, head_dim)
                   for y in self.project(x, self.q_proj, self.k_proj, self.v_proj))
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (batch, seq, hidden)


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.project = project

    def forward(self, x):
        gate, up = self.project(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model. The functions that it and its layers hold as attributes (project, attend, positions,
    cross_entropy) can be replaced from outside: by a faster kernel, another loss, a way to spread the work.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleDict({str(i): DecoderLayer(config) for i in range(config.num_hidden_layers)}),
            "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.project, self.positions, self.cross_entropy = project, torch.arange, cross_entropy

    def forward(self, x):
        """x: token ids (batch, seq). Returns logits of the next tokens, (batch, seq, vocab)."""
        cos, sin = rope_tables(self.positions(x.size(1), device=x.device), self.config)
        x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        (logits,) = self.project(self.model.norm(x), self.lm_head)
        return logits


def initial_weights(model, seed):
    """Yields (name, weight), one full float32 weight at a time: normal for matrices, ones for norms.

    Each weight has a random generator of its own, seeded by (seed, name): it doesn't depend on which weights
    are drawn, in which order or where.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))
        if parameter.dim() == 1:
            yield name, torch.ones(parameter.shape)
        else:
            std = model.config.initializer_range
            yield name, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)


def load_weights(model, weights, device, dtype):
    """Gives a model that was built on the meta device its weights, from (name, weight) pairs."""
    for name, weight in weights:
        # swap_tensors puts the weight into the parameter object that is there, so a tied weight stays tied.
        torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(weight.to(device, dtype)))
