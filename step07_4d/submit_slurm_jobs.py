"""Submits a Slurm job for each experiment: for each config.json in a folder and the folders below it.

    python submit_slurm_jobs.py --inp_dir tmp/llama-7B --qos high
    python submit_slurm_jobs.py --inp_dir tmp --only failed

Beside config.json it keeps job.slurm, the script, and status.txt, which the job keeps up to date: pending,
running, done, failed, oom (out of memory) or timeout. An experiment that has a status is submitted again only
by --only; it goes on from its newest checkpoint.
"""

import os
import shlex
import subprocess
from pathlib import Path

from arguments import Help, Parser, input_errors, positive, read_flags

STATES = ("pending", "running", "done", "failed", "oom", "timeout")
TRAIN = Path(__file__).resolve().with_name("train.py")

# One task a node: torchrun, which starts the processes of its node and, if one fails, all of them again.
SCRIPT = r"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
{resources}
#SBATCH --time={time}
#SBATCH --output={folder}/log_%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue               # preempted, or a node is lost: starts again and goes on
#SBATCH --signal=B:USR1@120     # to this script, 2 minutes before the time is up

folder={folder}
state() {{ echo "$1 $SLURM_JOB_ID" > "$folder/status.txt"; }}
trap 'state timeout; kill "$run"; wait "$run"; exit 124' USR1

state running
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # after a restart, no addresses of processes that are gone
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node {nproc_per_node} --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" \
    {train} --config "$folder/config.json" {flags} &
run=$!
wait "$run"
code=$?
if [ $code -eq 0 ]; then
    state done
elif [ $code -eq 137 ] || grep -qiE "out of memory|outofmemory|oom.kill" "$folder/log_$SLURM_JOB_ID.txt"; then
    state oom
else
    state failed
fi
exit $code
"""


def write_script(folder, args):
    """Returns the text of the job script for the experiment in this folder. Raises ValueError."""
    config = read_flags(folder / "config.json")
    nproc = config["dp_size"] * config["pp_size"] * config["cp_size"] * config["tp_size"]
    nproc_per_node = min(nproc, args.nproc_per_node)
    if nproc % nproc_per_node:
        raise ValueError(f"{folder}: {nproc} processes can't be spread evenly over nodes of "
                         f"{nproc_per_node}: use another --nproc_per_node")
    resources = {"cpus-per-task" if config["device"] == "cpu" else "gpus-per-node": nproc_per_node,
                 "qos": args.qos, "partition": args.partition, "account": args.account}
    flags = ["--resume"]
    for name, default in (("save_dir", "checkpoints"), ("metrics_file", "metrics.jsonl")):
        if name not in config:
            flags.append(f'--{name} "$folder/{default}"')
    return SCRIPT.format(
        name=folder.name, num_nodes=nproc // nproc_per_node, nproc_per_node=nproc_per_node, time=args.time,
        resources="\n".join(f"#SBATCH --{name}={value}" for name, value in resources.items() if value),
        folder=shlex.quote(str(folder)), train=shlex.quote(str(TRAIN)), flags=" ".join(flags))


def main(argv=None):
    parser = Parser("submit_slurm_jobs.py", allow_abbrev=False, formatter_class=Help)
    add = parser.add_argument
    add("--inp_dir", required=True, help="an experiment's folder, or a folder of such folders")
    add("--nproc_per_node", type=positive, default=8, help="processes, each with a GPU, on one node")
    add("--time", default="24:00:00", help="time limit of a job")
    for name in ("qos", "partition", "account"):
        add(f"--{name}", help="passed on to Slurm")
    add("--only", choices=STATES, help="submit again the experiments that have this state")
    add("--hf_token", help="HF_TOKEN in the job's environment; never written to a file")
    add("--dry_run", action="store_true", help="print the scripts and submit nothing")
    args = parser.parse_args(argv)
    environment = {**os.environ, **({"HF_TOKEN": args.hf_token} if args.hf_token else {})}
    with input_errors(parser.prog):
        folders = sorted(path.resolve().parent for path in Path(args.inp_dir).glob("**/config.json")
                         if "checkpoints" not in path.parts)
        if not folders:
            raise FileNotFoundError(f"there is no config.json in {args.inp_dir}: create_config.py writes it")
        for folder in folders:
            status = folder / "status.txt"
            state = status.read_text().split()[0] if status.exists() else None
            if state != args.only:
                print(f"{folder.name}: {state or 'new'}")
                continue
            script = write_script(folder, args)
            if args.dry_run:
                print(script)
                continue
            (folder / "job.slurm").write_text(script)
            status.write_text("pending\n")  # before the job can write that it runs
            job = subprocess.run(["sbatch", "--parsable", folder / "job.slurm"], env=environment,
                                 capture_output=True, text=True)
            if job.returncode:
                status.unlink()
                raise OSError(f"{folder.name}: sbatch failed: {job.stderr}")
            print(f"{folder.name}: submitted as job {job.stdout.split(';')[0].strip()}")


if __name__ == "__main__":
    main()
