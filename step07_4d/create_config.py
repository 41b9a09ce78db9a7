"""Writes OUT_DIR/EXP_NAME/config.json, an experiment's configuration: train.py's flags by their names.

    python create_config.py --out_dir tmp --exp_name llama-1B --dp 2 --tp 2 --pp 2 --mbs 4 --seq_len 128 \\
        --model_name HuggingFaceTB/SmolLM-1.7B --num_hidden_layers 5 --grad_acc_steps 2 --use_cpu
    torchrun --nproc_per_node 8 train.py --config tmp/llama-1B/config.json

Takes all flags of train.py. What train.py would refuse is refused here.
"""

import json
import os

from arguments import command_line, create_parser, input_errors, parse_args

OWN_FLAGS = ("out_dir", "exp_name", "force", "hf_token")


def main(argv=None):
    parser = create_parser()
    parser.prog = "create_config.py"
    parser.add_argument("--out_dir", default="tmp", help="the folder of experiments")
    parser.add_argument("--exp_name", required=True, help="the experiment's folder in it")
    parser.add_argument("--force", action="store_true", help="replace a config.json that is there")
    parser.add_argument("--hf_token", help="for a model on the hub; never written to a file")
    flags = vars(parser.parse_args(argv))
    own = {name: flags.pop(name) for name in OWN_FLAGS}
    flags = {name: value for name, value in flags.items() if value is not None and value is not False}
    if own["hf_token"]:
        os.environ["HF_TOKEN"] = own["hf_token"]
    with input_errors(parser.prog):
        args, config = parse_args([*command_line(flags), "--dry_run"])
        folder = os.path.join(own["out_dir"], own["exp_name"])
        path = os.path.join(folder, "config.json")
        if os.path.exists(path) and not own["force"]:
            raise ValueError(f"{path} is there already: use --force to replace it or another --exp_name")
        os.makedirs(folder, exist_ok=True)
        with open(path + ".partial", "w", encoding="utf-8") as file:
            json.dump({**flags, "dp_size": args.dp_size}, file, indent=2)
        os.replace(path + ".partial", path)
    nproc = args.dp_size * args.pp_size * args.cp_size * args.tp_size
    print(f"{path}: {args.model_name}, {config.num_hidden_layers} layers; "
          f"dp {args.dp_size} x pp {args.pp_size} x cp {args.cp_size} x tp {args.tp_size} "
          f"= {nproc} processes; a training step has "
          f"{args.global_batch_size} sequences of {args.seq_len} tokens")
    print(f"torchrun --nproc_per_node {nproc} train.py --config {path}")


if __name__ == "__main__":
    main()
