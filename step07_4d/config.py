"""The shape of a model: presets, config.json files and hub names."""

import json
import os
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model. The fields are those of a Hugging Face config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than attention heads: grouped-query attention (arXiv 2305.13245)
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e4
    tie_word_embeddings: bool = False  # the head uses the embedding's weight
    rope_scaling: dict | None = None  # Llama 3.1's stretching of RoPE to longer texts
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and not (isinstance(value, (int, field.type)) and value > 0):
                raise ValueError(f"{field.name} must be {field.type.__name__} and above 0, not {value!r}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        more = -self.hidden_size % (2 * heads)  # RoPE turns the two halves of a head
        if more:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of 2 x num_attention_heads "
                             f"{heads} = {2 * heads}: use --hidden_size {self.hidden_size + more}")
        if heads % kv_heads:
            fewer = max(n for n in range(1, kv_heads) if heads % n == 0)
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads "
                             f"{kv_heads}: use --num_key_value_heads {fewer}")

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
LLAMA_3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}
PRESETS = {  # hidden, layers, heads, kv heads, intermediate, vocabulary, RoPE theta, tied
    "tiny": LlamaConfig(128, 4, 8, 4, 352, 256),
    "smollm-135m": LlamaConfig(576, 30, 9, 3, 1536, 49152, 1e4, True),
    "smollm-360m": LlamaConfig(960, 32, 15, 5, 2560, 49152, 1e4, True),
    "smollm-1.7b": LlamaConfig(2048, 24, 32, 32, 8192, 49152, 1e4, True),
    "tinyllama-1.1b": LlamaConfig(2048, 22, 32, 4, 5632, 32000),
    "llama-2-7b": LlamaConfig(4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": LlamaConfig(4096, 32, 32, 8, 14336, 128256, 5e5),
    "llama-3.1-405b": LlamaConfig(16384, 126, 128, 8, 53248, 128256, 5e5, False, LLAMA_3_SCALING),
}
HUB_NAMES = {  # of presets, which need no network
    "HuggingFaceTB/SmolLM-135M": "smollm-135m", "HuggingFaceTB/SmolLM-360M": "smollm-360m",
    "HuggingFaceTB/SmolLM-1.7B": "smollm-1.7b", "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b", "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
}


def load_config(model_name, **overrides):
    """Returns the LlamaConfig of a preset, a folder with config.json or a hub name.

    Overrides that aren't None replace fields. Raises ValueError or OSError, whose message is for the user.
    """
    preset = HUB_NAMES.get(model_name, model_name.lower())
    if preset in PRESETS:
        config = PRESETS[preset]
    elif os.path.isdir(model_name):
        config = read_config(os.path.join(model_name, "config.json"))
    elif model_name.count("/") == 1 and model_name[0] not in "./~":
        from huggingface_hub import hf_hub_download
        try:
            config = read_config(hf_hub_download(model_name, "config.json"))
        except OSError as error:
            raise OSError(f"{model_name} is no folder here and can't be had from the hub; without network "
                          f"use a preset or a folder with config.json ({type(error).__name__})")
    else:
        raise ValueError(f"no model {model_name}: give a folder with config.json, a hub name (owner/name) "
                         f"or one of {', '.join(PRESETS)}")
    return replace(config, **{name: value for name, value in overrides.items() if value is not None})


def read_config(path):
    """Reads a config.json. What model.py doesn't do is refused by the field's name, never ignored."""
    with open(path, encoding="utf-8") as file:
        try:
            raw = {name: value for name, value in dict(json.load(file)).items() if value is not None}
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no JSON object: {error}")
    # transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling (null for plain RoPE).
    rope = {"rope_theta": raw.get("rope_theta", 1e4), **(raw.get("rope_scaling") or {}),
            **(raw.get("rope_parameters") or {})}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    for name in [*REQUIRED, *(LLAMA_3_SCALING if rope["rope_type"] == "llama3" else ())]:
        if name not in {**raw, **rope}:
            raise ValueError(f"{path}: {name} is missing")
    llama_3 = {name: rope[name] for name in LLAMA_3_SCALING} if rope["rope_type"] == "llama3" else None
    values = {"num_key_value_heads": raw["num_attention_heads"], "rms_norm_eps": 1e-6,  # as in transformers
              **raw, "rope_theta": rope["rope_theta"], "rope_scaling": llama_3}
    known = {field.name for field in fields(LlamaConfig)}
    config = LlamaConfig(**{name: value for name, value in values.items() if name in known})
    for name, supported in {
        "model_type": ["llama"],
        "architectures": [None, ["LlamaForCausalLM"]],
        "hidden_act": [None, "silu"],
        "head_dim": [None, config.head_dim],
        "rope_type": ["default", "llama3"],
        "partial_rotary_factor": [None, 1.0],
        "attention_dropout": [None, 0.0],
        "attention_bias": [None, False],
        "mlp_bias": [None, False],
        "sliding_window": [None],
        "quantization_config": [None],
    }.items():
        value = {**raw, **rope}.get(name)
        if value not in supported:
            raise ValueError(f"{path}: {name} {json.dumps(value)} is not supported, "
                             f"only {' or '.join(json.dumps(choice) for choice in supported)}")
    return config
