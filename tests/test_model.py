"""The model against transformers, its presets, config.json files and initial weights."""

import json
from dataclasses import replace

import pytest
import torch

SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=64)
# The original length is this short so that the 50 positions below see all three of the scaling's regions.
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head for each head": {"num_key_value_heads": 6},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "llama3 rope": {"rope_parameters": {**LLAMA_3, "rope_theta": 5e5}},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
}


def build(modules, config, seed=0):
    with torch.device("meta"):
        model = modules.model.Llama(config)
    modules.model.load_weights(model, modules.model.initial_weights(model, seed), "cpu", torch.float32)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_as_transformers(modules, tmp_path, variant):
    import transformers
    their_config = transformers.LlamaConfig(**{**SHAPE, **VARIANTS[variant]}, attn_implementation="sdpa")
    theirs = transformers.LlamaForCausalLM(their_config).train()
    theirs.save_pretrained(tmp_path)
    # Weights larger than a training run begins with, so that attention is far from uniform.
    ours = build(modules, replace(modules.config.load_config(str(tmp_path)), initializer_range=0.3))
    chance = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        if parameter.dim() == 1:  # all ones would hide a norm weight that isn't used
            parameter.data.normal_(1.0, 0.3, generator=chance)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    tokens = torch.randint(97, (3, 51), generator=chance)
    logits = ours(tokens[:, :-1])
    loss = ours.cross_entropy(logits, tokens[:, 1:]) / 150
    loss.backward()
    their_logits = theirs(tokens[:, :-1]).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), tokens[:, 1:].flatten())
    their_loss.backward()

    assert logits.std() > 0.5
    assert_near(logits, their_logits)
    assert_near(loss, their_loss)
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert their_gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_near(parameter.grad, their_gradients[name])


def assert_near(ours, theirs):
    """Within 1e-5 of the largest element: single elements may be near zero."""
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("preset, published", {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
}.items())
def test_presets_have_the_published_number_of_parameters(modules, preset, published):
    with torch.device("meta"):
        model = modules.model.Llama(modules.config.load_config(preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def write_config(folder, **fields):
    values = {"model_type": "llama", **SHAPE, **fields}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("field, value", [
    ("model_type", "mistral"),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("hidden_act", "gelu"),
    ("head_dim", 16),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("attention_dropout", 0.1),
    ("sliding_window", 4096),
    ("partial_rotary_factor", 0.5),
    ("quantization_config", {"bits": 4}),
    ("rope_type", "yarn"),
    ("hidden_size", None),
    ("hidden_size", "48"),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_attention_heads", 5),
    ("num_key_value_heads", 4),
    ("low_freq_factor", None),
])
def test_config_that_is_not_supported_is_refused_by_name(modules, tmp_path, field, value):
    fields = {field: value}
    if field in ("rope_type", "low_freq_factor"):
        fields = {"rope_scaling": {**LLAMA_3, **fields}}
    if value is None and field in LLAMA_3:
        del fields["rope_scaling"][field]
    with pytest.raises(ValueError, match=field):
        modules.config.load_config(write_config(tmp_path, **fields))


@pytest.mark.parametrize("text", ["{", "", "[]", "3"])
def test_broken_config_is_refused(modules, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        modules.config.load_config(str(tmp_path))


def test_transformers_4_config_is_read(modules, tmp_path):
    config = modules.config.load_config(write_config(
        tmp_path, architectures=["LlamaForCausalLM"], hidden_act="silu", rope_theta=5e5, rope_scaling=LLAMA_3,
        attention_bias=False, pretraining_tp=1, tie_word_embeddings=True))
    assert (config.rope_theta, config.tie_word_embeddings, config.rms_norm_eps) == (5e5, True, 1e-6)
    assert config.rope_scaling == {name: value for name, value in LLAMA_3.items() if name != "rope_type"}
    plain = modules.config.load_config(write_config(
        tmp_path, rope_theta=5e5, rope_scaling=None, num_key_value_heads=None))
    assert (plain.rope_theta, plain.rope_scaling, plain.num_key_value_heads) == (5e5, None, 6)


@pytest.mark.parametrize("fields", [{}, *VARIANTS.values(), {"initializer_range": 0.1}], ids=str)
def test_transformers_5_config_is_read(modules, tmp_path, fields):
    import transformers
    written = transformers.LlamaConfig(**{**SHAPE, **fields})
    written.save_pretrained(tmp_path)
    config = modules.config.load_config(str(tmp_path))
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps",
                 "initializer_range"):
        assert getattr(config, name) == getattr(written, name), name
    assert config.rope_theta == written.rope_parameters["rope_theta"]
    assert bool(config.rope_scaling) == (written.rope_parameters["rope_type"] == "llama3")


def test_initial_weights_depend_on_nothing_but_seed_and_name(modules):
    config = modules.config.load_config("tiny")
    names = list(modules.model.Llama(config).state_dict())
    weights = dict(modules.model.initial_weights(modules.model.Llama(config), 0))
    larger = modules.model.Llama(replace(config, num_hidden_layers=6, intermediate_size=96))
    torch.manual_seed(1)
    others = dict(modules.model.initial_weights(larger, 0))
    same_shape = [name for name in names if "mlp" not in name]
    assert all(torch.equal(weights[name], others[name]) for name in same_shape)

    matrices = [name for name in names if weights[name].dim() == 2]
    other_seed = dict(modules.model.initial_weights(modules.model.Llama(config), 1))
    assert not any(torch.equal(weights[name], other_seed[name]) for name in matrices)
    starts = {tuple(weights[name].flatten()[:4].tolist()) for name in matrices}
    assert len(starts) == len(matrices)  # no two weights begin as twins
    for name in matrices:
        assert 0.019 < weights[name].std() < 0.021


def test_tied_weight_stays_tied(modules):
    model = build(modules, replace(modules.config.load_config("tiny"), tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
