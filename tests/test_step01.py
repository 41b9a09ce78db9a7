"""Step 1 as a user meets it: runs, their metrics, and what bad input gets."""

import contextlib
import io
import json
import math
import re
import shutil
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import launch

KEYS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "mfu",
        "peak_memory_bytes"]
TIMINGS = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
SMALL = ["--num_hidden_layers", 2, "--seq_len", 32]


@pytest.fixture(scope="module")
def real(step01, tmp_path_factory):
    """Runs of the real commands, two at a time: futures by name, and the folder that they run in."""
    folder = tmp_path_factory.mktemp("real")
    copy = shutil.copytree(step01, folder / "copy")
    python = partial(launch.command, sys.executable, step01 / "train.py", cwd=folder, timeout=180)
    torchrun = partial(launch.torchrun, cwd=folder, timeout=180)
    with ThreadPoolExecutor(2) as pool:
        yield SimpleNamespace(
            folder=folder,
            learns=pool.submit(python, "--use_cpu", "--steps", 20, "--metrics_file", "metrics.jsonl"),
            alone=pool.submit(torchrun, copy, "--use_cpu", "--steps", 2, *SMALL),
            two_processes=pool.submit(torchrun, step01, "--use_cpu", nproc=2),
            bad_value=pool.submit(python, "--mbs", 3),
            bad_flag=pool.submit(python, "--pp", 2))


def test_plain_python_learns(real):
    """The default command, but for its length: by then the loss has to have fallen by 1."""
    run = real.learns.result().check()
    losses = [json.loads(line)["loss"] for line in (real.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    lines = run.output.splitlines()
    assert "803,968 parameters" in lines[0]
    assert "8 sequences of 256 tokens = 2,048, in 4 micro-batches of 2" in lines[1]
    assert [line.split()[0] for line in lines[3:-1]] == [str(step) for step in range(1, 21)]
    assert lines[-1].startswith(f"final loss {losses[-1]:.4f} after 40,960 tokens")


def test_torchrun_runs_a_folder_that_stands_alone(real):
    assert "final loss" in real.alone.result().check().output


def test_torchrun_with_two_processes_is_refused(real):
    run = real.two_processes.result()
    assert run.statuses != [0]
    assert re.search("^train.py: error: .*1 process.* 2", run.output, re.MULTILINE), run.output


def test_same_command_same_numbers(step01):
    runs = [launch.train(step01, "--steps", 4, *SMALL).check() for _ in range(2)]
    first, second = ([{key: row[key] for key in KEYS if key not in TIMINGS} for row in run.metrics]
                     for run in runs)
    assert first == second and len(first) == 4
    weights, others = (run.results[0] for run in runs)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_seed_changes_weights_and_data(step01):
    losses = [launch.train(step01, "--steps", 1, "--seed", seed, *SMALL).check().series("loss")
              for seed in (0, 1)]
    assert losses[0] != losses[1]


def test_metrics_file(step01):
    run = launch.train(step01, "--steps", 3, *SMALL).check()
    for step, row in enumerate(run.metrics, start=1):
        assert list(row) == KEYS
        assert (row["step"], row["tokens"], row["mfu"]) == (step, step * 8 * 32, None)
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(8 * 32)
        assert row["peak_memory_bytes"] > 2**20
        assert all(row[key] != round(row[key], 6) for key in ("loss", "grad_norm"))  # in full precision
    assert run.series("step") == [1, 2, 3]


def test_the_cut_of_a_batch_changes_nothing(step01):
    cuts = (["--mbs", 8], ["--mbs", 4, "--grad_acc_steps", 2], ["--mbs", 1, "--global_batch_size", 8])
    whole, *others = [launch.train(step01, "--dtype", "float64", "--steps", 4, *SMALL, *cut).check()
                      for cut in cuts]
    for other in others:
        for key in ("loss", "grad_norm"):
            assert other.series(key) == pytest.approx(whole.series(key), rel=1e-12, abs=0)
        for name, weight in whole.results[0].items():
            assert weight.dtype == torch.float64
            assert (other.results[0][name] - weight).norm() <= 1e-12 * weight.norm()


def test_bfloat16_stays_near_float32(step01):
    exact, rough = (launch.train(step01, "--dtype", dtype, "--steps", 5, *SMALL).check()
                    for dtype in ("float32", "bfloat16"))
    assert rough.series("loss") != exact.series("loss")
    assert rough.series("loss") == pytest.approx(exact.series("loss"), rel=1e-2)
    assert rough.series("grad_norm") == pytest.approx(exact.series("grad_norm"), rel=5e-2)
    assert {weight.dtype for weight in rough.results[0].values()} == {torch.float32}


@pytest.mark.parametrize("total, warmup, expected", [
    (6, 2, [0.5, 1, 0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.55 - 0.45 * math.sqrt(0.5), 0.1]),
    (2, 0, [0.55, 0.1]),
    (3, 6, [1 / 6, 2 / 6, 3 / 6]),
])
def test_learning_rate(step01, total, warmup, expected):
    run = launch.train(step01, "--steps", total, "--warmup_steps", warmup, "--learning_rate", 0.01,
                       *SMALL).check()
    assert run.series("lr") == pytest.approx([0.01 * share for share in expected])


def test_clipping(modules):
    def clip(max_norm):
        linear = torch.nn.Linear(2, 1)  # its gradients as one vector: (3, 0, 4), of norm 5
        linear.weight.grad, linear.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
        norm = modules.train.clip_gradients(linear, max_norm).item()
        return norm, [*linear.weight.grad.flatten().tolist(), *linear.bias.grad.tolist()]

    assert clip(1.0) == (5.0, pytest.approx([0.6, 0.0, 0.8], rel=1e-5))
    assert clip(6.0) == clip(math.inf) == (5.0, [3.0, 0.0, 4.0])


def test_weight_decay_is_on_matrices_only(step01):
    """With gradients clipped to nothing, decay is all that changes a weight."""
    options = ["--steps", 2, "--warmup_steps", 0, "--learning_rate", 0.1, "--max_grad_norm", 1e-30, *SMALL]
    still, decayed = (launch.train(step01, *options, "--weight_decay", decay).check().results[0]
                      for decay in (0, 0.5))
    shrunk = (1 - 0.055 * 0.5) * (1 - 0.01 * 0.5)  # learning rates 0.055 and 0.01
    for name, weight in still.items():
        if weight.dim() == 2:
            assert 0.019 < weight.std() < 0.021  # as it was drawn
            torch.testing.assert_close(decayed[name], weight * shrunk)
        else:
            assert torch.equal(weight, torch.ones_like(weight)) and torch.equal(decayed[name], weight)


@pytest.mark.parametrize("total, profiled", [(6, 3), (2, 1)])
def test_profile(step01, tmp_path, total, profiled):
    launch.train(step01, "--steps", total, "--profile_dir", tmp_path / "new" / "profile", *SMALL).check()
    (trace,) = (tmp_path / "new" / "profile").iterdir()
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]
             if event.get("cat") == "user_annotation"]
    assert [spans.count(name) for name in ("forward 0", "forward 3", "backward 2")] == [profiled] * 3


def train_on_each(folder, argvs):
    """Runs in a warm process: several trainings, so that the libraries are imported once."""
    sys.path.insert(0, str(folder))
    import train
    for argv in argvs:
        train.main(argv)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_learns_real_prose(step01, prose, bpe, tmp_path, tokenizer):
    options = "--use_cpu --steps 15 --warmup_steps 2 --seq_len 64 --num_hidden_layers 2".split()
    if tokenizer == "bpe":
        options += ["--tokenizer_name", str(bpe), "--vocab_size", "512"]
    files = sorted(prose.iterdir())
    assert [file.suffix for file in files] == [".jsonl", ".parquet", ".txt"]
    launch.fork(train_on_each, step01, [
        [*options, "--dataset_name", str(file), "--metrics_file", str(tmp_path / file.name)] for file in files
    ]).check()
    for file in files:
        losses = [json.loads(line)["loss"] for line in (tmp_path / file.name).read_text().splitlines()]
        assert len(losses) == 15
        assert sum(losses[-3:]) / 3 < losses[0] - 0.5, file


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of bad files."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in {
        "empty.txt": b"",
        "short.txt": b"hello",
        "latin1.txt": b"caf\xe9",
        "no_text.jsonl": b'{"body": "x"}',
        "numbers.jsonl": b'{"text": 3}',
        "broken.jsonl": b'{"text": "x"',
        "empty.jsonl": b"",
        "broken.parquet": b"nonsense",
        "broken_json/config.json": b"{",
        "mistral/config.json": b'{"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 2, '
                               b'"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 256}',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# Arguments, and what the error has to name. BAD is the folder above.
ERRORS = [
    ("--seq_len 0", "--seq_len", "1 or more", "0"),
    ("--seq_len x", "--seq_len", "x"),
    ("--micro_batch_size -1", "--micro_batch_size", "1 or more", "-1"),
    ("--global_batch_size 0", "--global_batch_size", "1 or more", "0"),
    ("--grad_acc_steps 0", "--grad_acc_steps", "1 or more", "0"),
    ("--total_train_steps 0", "--total_train_steps", "1 or more", "0"),
    ("--num_hidden_layers 0", "--num_hidden_layers", "1 or more", "0"),
    ("--vocab_size nan", "--vocab_size", "nan"),
    ("--learning_rate -1", "--learning_rate", "0 or more", "-1"),
    ("--learning_rate nan", "--learning_rate", "0 or more", "nan"),
    ("--warmup_steps -1", "--warmup_steps", "0 or more", "-1"),
    ("--max_grad_norm -1", "--max_grad_norm", "0 or more", "-1"),
    ("--max_grad_norm nan", "--max_grad_norm", "0 or more", "nan"),
    ("--weight_decay -0.1", "--weight_decay", "0 or more", "-0.1"),
    ("--seed 0.5", "--seed", "0.5"),
    ("--dtype float16", "--dtype", "float16", "bfloat16"),
    ("--device tpu", "--device", "tpu", "cpu"),
    ("--tp 2", "--tp 2"),
    ("--step 2", "--step 2"),  # no abbreviations: a later flag could change what they mean
    ("--global_batch_size 10 --mbs 4", "10", "4", "--global_batch_size 12"),
    ("--mbs 16", "8", "16", "--global_batch_size 16"),
    ("--mbs 2 --grad_acc_steps 3 --global_batch_size 8", "8", "6"),
    ("--num_attention_heads 6", "hidden_size 128", "num_attention_heads 6", "--hidden_size 132"),
    ("--num_key_value_heads 3", "num_attention_heads 8", "num_key_value_heads 3", "--num_key_value_heads 2"),
    ("--hidden_size 24", "hidden_size 24", "num_attention_heads 8", "--hidden_size 32"),
    ("--vocab_size 255", "256", "255", "--vocab_size 256"),
    ("--seq_len 9000000", "588286", "9000000", "--seq_len 588285"),
    ("--model_name nonesuch", "nonesuch", "smollm-135m"),
    ("--model_name owner/nonesuch", "owner/nonesuch", "without network", "preset"),
    ("--model_name BAD", "config.json"),
    ("--model_name BAD/broken_json", "broken_json/config.json"),
    ("--model_name BAD/mistral", "mistral/config.json", "model_type"),
    ("--tokenizer_name owner/nonesuch", "owner/nonesuch", "without network", "bytes"),
    ("--tokenizer_name BAD", "tokenizer"),
    ("--dataset_name owner/nonesuch", "owner/nonesuch", "without network", "stories"),
    ("--dataset_name BAD/nonesuch.txt", "nonesuch.txt"),
    ("--dataset_name BAD/empty.txt", "1 tokens", "256"),
    ("--dataset_name BAD/short.txt", "6 tokens", "256", "--seq_len 5"),
    ("--dataset_name BAD/latin1.txt", "latin1.txt", "decode"),
    ("--dataset_name BAD/no_text.jsonl", "no_text.jsonl", "text", "body"),
    ("--dataset_name BAD/numbers.jsonl", "numbers.jsonl", "text", "int64"),
    ("--dataset_name BAD/broken.jsonl", "broken.jsonl"),
    ("--dataset_name BAD/empty.jsonl", "empty.jsonl"),
    ("--dataset_name BAD/broken.parquet", "broken.parquet"),
    ("--metrics_file BAD/nonesuch/metrics.jsonl", "nonesuch/metrics.jsonl"),
    ("--metrics_file BAD", "directory"),
    ("--profile_dir BAD/empty.txt", "empty.txt"),
]
if not torch.cuda.is_available():
    ERRORS.append(("--device cuda", "cuda", "0 GPUs", "1 process", "--device cpu"))


def exits(folder, argvs):
    """Runs in a warm process: main for each argv. Returns [(status, what it wrote to stderr), ...]."""
    sys.path.insert(0, str(folder))
    import train
    results = []
    for argv in argvs:
        status, output = 0, io.StringIO()
        with contextlib.redirect_stderr(output):
            try:
                train.main(argv)
            except SystemExit as end:
                status = end.code
            except Exception:
                status = 1
                traceback.print_exc()
        results.append((status, output.getvalue()))
    return results


@pytest.fixture(scope="module")
def errors(step01, bad):
    """The exit status and the output of each command of ERRORS; one process imports `datasets` for all."""
    argvs = [["--steps", "1", *argv.replace("BAD", str(bad)).split()] for argv, *_ in ERRORS]
    run = launch.fork(exits, step01, argvs).check()
    return {argv: result for (argv, *_), result in zip(ERRORS, run.results[0], strict=True)}


def check_error(status, output, named):
    assert status == 2, output
    found = [line for line in output.splitlines() if line.startswith("train.py: error: ")]
    assert len(found) == 1 and "Traceback" not in output and "usage" not in output, output
    for text in named:
        assert text in found[0]


@pytest.mark.parametrize("argv, named", [(argv, named) for argv, *named in ERRORS],
                         ids=[argv for argv, *_ in ERRORS])
def test_error(errors, argv, named):
    check_error(*errors[argv], named)


@pytest.mark.parametrize("name, named", [
    ("bad_value", ["8", "3", "--global_batch_size 9"]),
    ("bad_flag", ["--pp 2"]),
])
def test_error_of_the_real_command(real, name, named):
    run = getattr(real, name).result()
    check_error(*run.statuses, run.output, named)


def test_help_names_every_flag(step01):
    run = launch.fork(launch.call_main, step01, ["--help"]).check()
    for flag in ("--model_name", "--dataset_name", "--tokenizer_name", "--seq_len", "--micro_batch_size",
                 "--mbs", "--global_batch_size", "--grad_acc_steps", "--gradient_accumulation_steps",
                 "--total_train_steps", "--steps", "--learning_rate", "--warmup_steps", "--max_grad_norm",
                 "--weight_decay", "--seed", "--dtype", "--device", "--use_cpu", "--metrics_file",
                 "--profile_dir"):
        assert f"{flag} " in run.output, flag
