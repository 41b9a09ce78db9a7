"""From and to Hugging Face transformers, whose names of weights are the model's own.

Weights lie in safetensors files, which can be read slice by slice: no process reads more than its own share.
"""

import os
from dataclasses import asdict
from pathlib import Path

import torch

from model import Llama
from tensor_parallel import shard_dim


def find_folder(name):
    """Returns the folder of a model: name itself, or where the hub's files are. Raises OSError."""
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
    except (OSError, ValueError) as error:
        raise OSError(f"--load_hf {name} is no folder here and can't be had from the hub; without network "
                      f"use a folder that save_pretrained wrote ({type(error).__name__})")


def open_weights(folder):
    """Returns {weight's name: the open file that it is in}. Large models are spread over several files."""
    from safetensors import safe_open
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .safetensors file")
    files = [safe_open(path, framework="pt") for path in paths]
    return {name: file for file in files for name in file.keys()}


def check_hf_weights(config, folder):
    """Raises ValueError unless the folder's weights are those of this model."""
    files = open_weights(folder)
    check_shapes(config, folder, {name: file.get_slice(name).get_shape() for name, file in files.items()})


def check_shapes(config, folder, shapes):
    """Raises ValueError unless shapes, {name: shape}, has what the model needs."""
    with torch.device("meta"):
        needed = {name: parameter.shape for name, parameter in Llama(config).named_parameters()}
    for name, shape in needed.items():
        if name not in shapes:
            raise ValueError(f"{folder} has no {name}, which the model needs")
        if tuple(shapes[name]) != tuple(shape):
            raise ValueError(f"{folder} has {name} of shape {tuple(shapes[name])}, the model {tuple(shape)}: "
                             f"they are different models")


def hf_weights(model, folder, tp):
    """Yields (name, this process's shard), read from the folder, for the weights that the model has."""
    files = open_weights(folder)
    for name, parameter in model.named_parameters():
        weight, dim = files[name].get_slice(name), shard_dim(name)
        size = parameter.size(dim or 0) // tp.size
        mine = slice(tp.rank * size, (tp.rank + 1) * size)
        yield name, weight[:] if dim is None else weight[mine] if dim == 0 else weight[:, mine]


def hf_config(config):
    """A LlamaConfig as the dict that transformers keeps in config.json."""
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **asdict(config)}
    if config.rope_scaling:
        values["rope_scaling"] = {"rope_type": "llama3", **config.rope_scaling}
    return values
