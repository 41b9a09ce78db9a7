"""Turns a checkpoint, written in any layout, into a folder that transformers opens.

    python export_hf.py runs/step-00000100 exported --prompt "Once upon a time"

--prompt has the exported model write on. A model of bytes gets a tokenizer of bytes.
"""

import json
import os
import warnings

import torch

from arguments import Help, Parser, input_errors
from config import load_config
from huggingface import hf_config
from model import Llama


def read_weights(checkpoint, config, dtype):
    """Returns {name: whole weight}."""
    import torch.distributed.checkpoint as dcp
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with torch.device("meta"):
        model = Llama(config)
    weights = {name: torch.empty(parameter.shape) for name, parameter in model.named_parameters()}
    dcp.load(weights, checkpoint_id=checkpoint)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def create_tokenizer(name):
    """The tokenizer of that name. Token i of "bytes" is byte i, and 0 ends a text, as in data.py."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    if name != "bytes":
        return AutoTokenizer.from_pretrained(name)
    characters = bytes_to_unicode()  # each byte as a character that can be seen
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=characters[0])


def main(argv=None):
    parser = Parser("export_hf.py", allow_abbrev=False, formatter_class=Help)
    parser.add_argument("checkpoint", help="a folder step-... in --save_dir")
    parser.add_argument("out", help="the folder to be made")
    parser.add_argument("--tokenizer_name", default="bytes", help="the one that the model was trained with")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--prompt", help="show how the exported model goes on from this text")
    with input_errors(parser.prog):
        args = parser.parse_args(argv)
        config = load_config(args.checkpoint)
        weights = read_weights(args.checkpoint, config, getattr(torch, args.dtype))
        tokenizer = create_tokenizer(args.tokenizer_name)
        os.makedirs(args.out)
        tokenizer.save_pretrained(args.out)
        from huggingface_hub import save_torch_state_dict
        save_torch_state_dict(weights, args.out)  # several files if it is large
        with open(f"{args.out}/config.json", "w", encoding="utf-8") as file:
            values = {**hf_config(config), "dtype": args.dtype, "eos_token_id": tokenizer.eos_token_id}
            json.dump(values, file, indent=2)
    print(f"{args.out}: {sum(weight.numel() for weight in weights.values()):,} parameters in {args.dtype}")
    if args.prompt:
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(args.out)
        inputs = tokenizer(args.prompt, return_tensors="pt")
        torch.manual_seed(0)
        print(tokenizer.decode(model.generate(**inputs, do_sample=True, max_new_tokens=200)[0]))


if __name__ == "__main__":
    main()
