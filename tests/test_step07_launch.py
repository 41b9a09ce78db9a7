"""Step 7 as a job: configurations, Slurm, several nodes, processes that are killed, loggers."""

import json
import os
import random
import shutil
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import parallel_workers
import pytest
import run_workers as workers
from test_step07 import FOLDER, KEYS, SMALL, error_of, numbers

import launch

TOKEN = "hf_secret"
CPU_1B = ("--out_dir tmp --exp_name llama-1B-cpu --dp 2 --tp 2 --pp 2 --pp_engine 1f1b --model_name "
          "HuggingFaceTB/SmolLM-1.7B --num_hidden_layers 5 --grad_acc_steps 2 --mbs 4 --seq_len 128 "
          "--use_cpu").split()
GPU_7B = ("--out_dir tmp --exp_name llama-7B --dp 4 --tp 2 --pp 2 --pp_engine 1f1b --model_name "
          f"meta-llama/Llama-2-7b-hf --grad_acc_steps 32 --mbs 4 --seq_len 1024 --hf_token {TOKEN}").split()


@pytest.fixture(scope="module")
def folder(steps):
    return steps / FOLDER


@pytest.fixture(scope="module")
def step07(folder):
    return launch.load(folder)


@pytest.fixture
def program(step07, tmp_path, monkeypatch, capfd):
    """Calls main() of a program of the step in tmp_path. Returns a Run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "")  # whatever a program sets, it's as before afterwards

    def run(name, *argv, **env):
        capfd.readouterr()
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        try:
            getattr(step07, name).main(list(map(str, argv)))
            status = 0
        except SystemExit as end:
            status = end.code
        for key in env:
            monkeypatch.delenv(key)
        return launch.Run([status], "".join(capfd.readouterr()))
    return run


def words_in(folder):
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


# create_config.py


def test_configurations_as_picotron_has_them(program, step07, tmp_path):
    run = program("create_config", *CPU_1B).check()
    path = tmp_path / "tmp/llama-1B-cpu/config.json"
    assert "torchrun --nproc_per_node 8 train.py --config tmp/llama-1B-cpu/config.json" in run.output
    args, config = step07.arguments.parse_args(["--config", str(path), "--dry_run"])
    assert (args.dp_size, args.tp_size, args.pp_size, args.cp_size) == (2, 2, 2, 1)
    assert (args.grad_acc_steps, args.micro_batch_size, args.global_batch_size) == (2, 4, 16)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (5, 2048, 49152)
    assert (args.seq_len, args.device) == (128, "cpu")

    program("create_config", *GPU_7B).check()
    path = tmp_path / "tmp/llama-7B/config.json"
    args, config = step07.arguments.parse_args(["--config", str(path), "--dry_run"])
    assert (args.dp_size, args.global_batch_size) == (4, 512)
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 32)
    assert TOKEN not in words_in(tmp_path)


def test_a_configuration_is_its_flags(program, step07, tmp_path):
    """Every flag of train.py, with a value that isn't its default, comes back from the file."""
    shape = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 512}
    values = {**shape, "seq_len": 64, "global_batch_size": 64, "total_train_steps": 7, "dtype": "float64",
              "pp_engine": "afab"}
    others = ("help", "load_hf", "use_wandb", "tensorboard_dir", "grad_acc_steps", "device", "model_name")
    argv, names = [], []
    for action in step07.arguments.create_parser()._actions:
        if action.dest in others:
            continue
        names.append(action.dest)
        argv.append(action.option_strings[-1])
        if action.nargs != 0:
            path = f"{tmp_path}/{action.dest}"
            argv.append(str(values.get(action.dest, path if action.type is None else 4)))
    program("create_config", "--exp_name", "all", *argv, "--use_cpu").check()
    direct, config = step07.arguments.parse_args([*argv, "--use_cpu", "--dry_run"])
    path = f"{tmp_path}/tmp/all/config.json"
    found, same_config = step07.arguments.parse_args(["--config", path, "--dry_run"])
    assert vars(found) == {**vars(direct), "config": path}
    assert config == same_config
    for name in names:
        default = step07.arguments.create_parser().get_default(name)
        assert getattr(found, name) != default, f"the test gives {name} its default"


def test_the_command_line_comes_on_top(step07, tmp_path):
    (tmp_path / "config.json").write_text('{"learning_rate": 0.5, "seq_len": 64, "resume": true}')
    argv = ["--config", str(tmp_path / "config.json"), "--learning_rate", "0.25", "--dry_run"]
    args, _ = step07.arguments.parse_args(argv)
    assert (args.learning_rate, args.seq_len, args.resume) == (0.25, 64, True)


def test_nothing_is_overwritten_and_nothing_deleted(program, tmp_path):
    program("create_config", "--exp_name", "a", "--mbs", 1).check()
    folder = tmp_path / "tmp/a"
    (folder / "notes.txt").write_text("mine")
    before = (folder / "config.json").read_bytes()
    run = program("create_config", "--exp_name", "a", "--mbs", 4)
    assert run.statuses == [2] and "--force" in error_of(run, "create_config.py")
    assert (folder / "config.json").read_bytes() == before
    program("create_config", "--exp_name", "a", "--mbs", 4, "--force").check()
    assert json.loads((folder / "config.json").read_text())["micro_batch_size"] == 4
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]


@pytest.mark.parametrize("argv, named", [
    (["--tp", 3], "--tp 3 doesn't divide"),
    (["--model_name", "nobody/nothing"], "nobody/nothing"),
    (["--grad_acc_steps", 2, "--global_batch_size", 7], "--global_batch_size 7"),
])
def test_what_train_would_refuse_is_refused_at_once(program, tmp_path, argv, named):
    run = program("create_config", "--exp_name", "a", *argv)
    assert run.statuses == [2] and named in error_of(run, "create_config.py")
    assert not (tmp_path / "tmp").exists()


@pytest.mark.parametrize("text, named", [
    ("[", "config.json"), ('{"lr": 1}', "--lr=1"), ('{"seq_len": "x"}', "seq_len"),
])
def test_a_broken_configuration(program, tmp_path, text, named):
    (tmp_path / "config.json").write_text(text)
    run = program("train", "--config", "config.json")
    assert run.statuses == [2] and named in error_of(run), run.output


# submit_slurm_jobs.py, with a stand-in for Slurm

SBATCH = """#!{python}
import os, re, signal, subprocess, sys
script = sys.argv[-1]
text, here = open(script).read(), os.path.dirname(os.path.abspath(__file__))
job = len(open(here + "/jobs").readlines()) + 1 if os.path.exists(here + "/jobs") else 1
print(script, "token" if os.environ.get("HF_TOKEN") else "no token", file=open(here + "/jobs", "a"))
if os.environ.get("QUEUE") == "down":
    sys.exit("sbatch: error: Unable to contact slurm controller")
print(f"{{job}};cluster")
if os.environ.get("QUEUE") == "full":
    sys.exit()
nodes = re.search("--nodes=(\\\\d+)", text)[1]
log = re.search("--output=(.*)", text)[1].replace("%j", str(job))
log = open(log, "a")
subprocess.Popen(["bash", script], stdout=log, stderr=log, start_new_session=True, env={{
    **os.environ, "SLURM_JOB_ID": str(job), "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "localhost"}})
"""
# srun starts the command once on every node, here all on this machine.
SRUN = """#!/bin/bash
for word; do case "$word" in */config.json) cat "$(dirname "$word")/status.txt" ;; esac; done
case "$NODES_DO" in
    fail) echo "a node fails" ; exit 1 ;;
    oom) echo "torch.OutOfMemoryError: CUDA out of memory." ; exit 1 ;;
    hang) kill -USR1 $PPID ; exec sleep 100 ;;
esac
for node in $(seq "$SLURM_NNODES"); do "$@" & done
wait
"""


@pytest.fixture
def slurm(tmp_path):
    """A folder for the PATH with sbatch, srun, scontrol and torchrun. Jobs end with the test."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {
        "sbatch": SBATCH.format(python=sys.executable), "srun": SRUN,
        "scontrol": "#!/bin/bash\necho localhost\n",
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }.items():
        (bin / name).write_text(text)
        (bin / name).chmod((bin / name).stat().st_mode | stat.S_IXUSR)
    return bin


@pytest.fixture
def submit(program, slurm, monkeypatch):
    monkeypatch.setenv("PATH", f"{slurm}:{os.environ['PATH']}")
    return partial(program, "submit_slurm_jobs", "--inp_dir", "tmp")


def wait_for(path, state, timeout=90):
    deadline = time.monotonic() + timeout
    while not (path.exists() and path.read_text().startswith(state)):
        assert time.monotonic() < deadline, words_in(path.parent)
        time.sleep(0.05)


TINY_RUN = [*SMALL, "--steps", 4, "--mbs", 1]


def test_jobs_run_on_nodes(program, submit, slurm, tmp_path):
    """Two nodes with a process each; the run is that of one process, its checkpoint is there."""
    program("create_config", "--exp_name", "two", "--pp", 2, *TINY_RUN).check()
    run = submit("--nproc_per_node", 1, "--hf_token", TOKEN, "--qos", "high").check()
    assert "submitted as job 1" in run.output
    folder = tmp_path / "tmp/two"
    wait_for(folder / "status.txt", "done 1")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    alone = launch.train(launch.ROOT / "step01_single_gpu", *TINY_RUN).check()
    assert [row["loss"] for row in rows] == pytest.approx(alone.series("loss"), rel=1e-4)
    assert (folder / "checkpoints/step-00000004").is_dir()
    assert "running 1" in (folder / "log_1.txt").read_text(), "the state during the run"
    assert "#SBATCH --qos=high" in (folder / "job.slurm").read_text()
    assert (slurm / "jobs").read_text().split()[1:] == ["token"] and TOKEN not in words_in(tmp_path)


def test_states_of_jobs(program, submit, slurm, tmp_path):
    status = tmp_path / "tmp/a/status.txt"
    (slurm / "jobs").touch()

    def jobs():
        return len((slurm / "jobs").read_text().splitlines())

    program("create_config", "--exp_name", "a", *TINY_RUN).check()
    run = submit("--dry_run").check()
    assert "#SBATCH --nodes=1" in run.output and jobs() == 0 and not status.exists()
    run = submit(QUEUE="down")
    assert run.statuses == [2] and "Unable to contact" in error_of(run, "submit_slurm_jobs.py")
    assert not status.exists() and jobs() == 1
    submit(QUEUE="full").check()
    assert status.read_text() == "pending\n" and jobs() == 2
    for how, state in [("fail", "failed"), ("oom", "oom"), ("hang", "timeout")]:
        assert f"a: {status.read_text().split()[0]}" in submit().check().output
        number = jobs() + 1
        submit("--only", status.read_text().split()[0], NODES_DO=how).check()
        wait_for(status, f"{state} {number}")
    for other in ("failed", "oom", "done", "running", "pending"):
        submit("--only", other).check()
    assert jobs() == 5
    submit("--only", "timeout").check()
    wait_for(status, "done 6")


def test_only_what_failed_is_submitted_again(program, submit, slurm, tmp_path):
    for name in ("a", "b", "c"):
        program("create_config", "--exp_name", f"sweep/{name}", *TINY_RUN).check()
    for name, state in (("a", "failed 7"), ("b", "done 8")):
        (tmp_path / "tmp/sweep" / name / "status.txt").write_text(state)
    submit("--only", "failed", QUEUE="full").check()
    submit(QUEUE="full").check()
    assert [line.split("/")[-2] for line in (slurm / "jobs").read_text().splitlines()] == ["a", "c"]


def test_no_configuration_and_uneven_nodes(program, submit, tmp_path):
    run = submit()
    assert run.statuses == [2] and "no config.json" in error_of(run, "submit_slurm_jobs.py")
    program("create_config", "--exp_name", "a", "--dp", 3, "--global_batch_size", 6).check()
    run = submit("--nproc_per_node", 2)
    assert run.statuses == [2] and "3 processes" in error_of(run, "submit_slurm_jobs.py")


# Faults of processes


def test_two_launchers(folder, tmp_path):
    """As on two machines: a torchrun for each, which find each other at an address."""
    argv = ["--nnodes", 2, "--nproc_per_node", 2, "--master_addr", "localhost", "--master_port", free_port()]
    options = ["--tp", 2, "--pp", 2, *SMALL, "--steps", 3, "--dtype", "float64", "--use_cpu"]

    def node(rank):
        return launch.command(sys.executable, "-m", "torch.distributed.run", "--node_rank", rank, *argv,
                              folder / "train.py", *options, "--metrics_file", tmp_path / f"{rank}.jsonl")
    with ThreadPoolExecutor(2) as pool:
        for run in pool.map(node, range(2)):
            run.check()
    rows = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    alone = launch.train(folder, *SMALL, "--steps", 3, "--dtype", "float64").check()
    assert [row["loss"] for row in rows] == pytest.approx(alone.series("loss"), rel=1e-11)
    assert (tmp_path / "1.jsonl").read_text() == "", "one process writes the metrics of all"


def free_port():
    import socket
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def rows_of(path):
    return [[json.loads(line)[key] for key in KEYS] for line in path.read_text().splitlines()]


def test_a_killed_rank_is_replaced_by_torchrun(folder, tmp_path, monkeypatch):
    """--max-restarts: all start again from the last checkpoint, and end as if nothing had been."""
    argv = [*SMALL, "--tp", 2, "--steps", 30, "--save_every", 3, "--keep_last", 1, "--resume",
            "--save_dir", tmp_path / "saved"]
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    status, output, _, left = parallel_workers.kill_one_rank(folder, argv, 2, tmp_path, ["--max-restarts", 1])
    assert status == 0 and not left, output
    assert output.count("goes on after training step") == 2, output
    assert int(output.split("goes on after training step")[-1].split()[0]) >= 3
    whole = launch.train(folder, *SMALL, "--tp", 2, "--steps", 30, nproc=2).check()
    assert rows_of(tmp_path / "metrics.jsonl") == numbers(whole)


def test_a_killed_rank_ends_the_job(folder, tmp_path):
    argv = [*SMALL, "--tp", 2, "--save_every", 2, "--keep_last", 1, "--save_dir", tmp_path / "saved"]
    status, output, seconds, left = parallel_workers.kill_one_rank(folder, argv, 2, tmp_path)
    assert status not in (0, None) and seconds < 30 and not left, output
    assert "SIGKILL" in output


def test_killed_at_any_moment(folder, tmp_path):
    """All processes die again and again, wherever they are; the run goes on and ends as it should."""
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "saved"
    argv = [*SMALL, "--pp", 2, "--steps", 60, "--save_dir", saved, "--save_every", 1, "--keep_last", 2,
            "--resume", "--metrics_file", metrics, "--use_cpu"]
    kills, chance = 0, random.Random(time.time_ns())
    for _ in range(30):
        run = launch.fork(workers.run_main, folder, argv, nproc=2, timeout=chance.uniform(1, 3))
        if run.statuses == [0, 0]:
            break
        # One dies a moment before the other, which may have time to notice.
        assert set(run.statuses) <= {-9, 0} or "Connection" in run.output, run.output
        kills += 1
    launch.fork(workers.run_main, folder, argv, nproc=2).check()
    assert kills > 0
    whole = launch.train(folder, *SMALL, "--pp", 2, "--steps", 60, nproc=2).check()
    assert rows_of(metrics) == numbers(whole)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000059", "step-00000060"]


# Loggers


def test_wandb_gets_the_numbers(folder, tmp_path):
    (tmp_path / "wandb.py").write_text(
        "import json, types\n"
        "def init(project, config):\n"
        "    file = open('wandb.jsonl', 'w', buffering=1)\n"
        "    print(json.dumps(config), file=file)\n"
        "    return types.SimpleNamespace(log=lambda numbers: print(json.dumps(numbers), file=file))\n")
    argv = [*SMALL, "--steps", 3, "--use_cpu", "--use_wandb", "--metrics_file", "metrics.jsonl"]
    env = {"PYTHONPATH": str(tmp_path)}
    launch.torchrun(folder, *argv, "--tp", 2, nproc=2, cwd=tmp_path, env=env).check()
    config, *rows = (tmp_path / "wandb.jsonl").read_text().splitlines()
    assert json.loads(config)["tp_size"] == 2
    assert rows == (tmp_path / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("flag, package", [
    (["--use_wandb"], "wandb"), (["--tensorboard_dir", "x"], "tensorboard")])
def test_a_logger_that_is_not_installed(step07, monkeypatch, flag, package):
    monkeypatch.setattr(step07.arguments, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(ValueError, match=f"{flag[0]} needs the package {package}: pip install {package}"):
        step07.arguments.parse_args(flag)


def test_tensorboard_gets_the_numbers(folder, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv = [*SMALL, "--save_dir", tmp_path / "saved", "--save_every", 2,
            "--tensorboard_dir", tmp_path / "board"]
    whole = launch.train(folder, *argv, "--steps", 4).check()
    shutil.rmtree(tmp_path / "saved/step-00000004")
    launch.train(folder, *argv, "--steps", 4, "--resume").check()
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(whole.series("loss"), rel=1e-6)
