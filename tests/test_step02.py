"""Step 2: what replicas exchange and when, that they stay equal, and how runs end."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import launch
import parallel_workers as workers

STEP = "step02_data_parallel"
SMALL = ["--num_hidden_layers", 2, "--hidden_size", 32, "--num_attention_heads", 4,
         "--num_key_value_heads", 2, "--intermediate_size", 48, "--seq_len", 16, "--bucket_cap_mb", 0.05]
NUM_PARAMETERS = 2 * 256 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32


@pytest.fixture(scope="module")
def folder(steps):
    return steps / STEP


def watch(folder, *argv, nproc):
    argv = [*map(str, [*SMALL, *argv]), "--use_cpu"]
    return launch.fork(workers.watch, folder, argv, nproc=nproc).check().results


@pytest.mark.parametrize("nproc, argv", [
    (2, ["--mbs", 1, "--global_batch_size", 6]),
    (3, ["--mbs", 2, "--global_batch_size", 6]),
    (4, ["--mbs", 1, "--global_batch_size", 8, "--dtype", "bfloat16"]),
])
def test_replicas_stay_equal_to_the_bit(folder, nproc, argv):
    ranks = watch(folder, "--steps", 4, *argv, nproc=nproc)
    hashes = [[step.hash for step in rank] for rank in ranks]
    assert hashes == [hashes[0]] * nproc
    assert len(set(hashes[0])) == 4, "weights change in every step"


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 4), ("float64", 8)])
@pytest.mark.parametrize("grad_acc_steps", [1, 3])
def test_communication_of_a_training_step(folder, dtype, itemsize, grad_acc_steps):
    """The docstring's formula, whatever the number of micro-batches: all gradients once, in float32 or wider,
    on the last one. Besides, the loss and the memory of the metrics."""
    argv = ["--steps", 3, "--dtype", dtype, "--mbs", 1, "--grad_acc_steps", grad_acc_steps]
    ranks = watch(folder, *argv, nproc=2)
    wide = "float64" if dtype == "float64" else "float32"
    for step in [step for rank in ranks for step in rank]:
        assert step.gradients == [(f"torch.{wide}", True)] * len(step.gradients), "all are views of buckets"
        counted = Counter(event for event in step.events if isinstance(event, str))
        assert counted == dict.fromkeys(("forward", "backward", "end of backward"), grad_acc_steps)
        last = len(step.events) - step.events[::-1].index("backward")
        end = step.events.index("end of backward", last)
        before, during, after = step.events[:last], step.events[last:end], step.events[end + 1:]
        assert {kind for kind, *_ in during} == {"all_reduce"} and len(during) > 2, "several buckets"
        assert {kind for _, kind, _ in during} == {wide}
        assert sum(size for *_, size in during) == itemsize * NUM_PARAMETERS
        cap = max(0.05 * 2**20, itemsize * 256 * 32)  # a weight that is larger has a bucket to itself
        assert all(size <= cap for *_, size in during)
        assert [event for event in before if not isinstance(event, str)] in ([], [("all_reduce", "int64", 8)])
        assert after == [("all_reduce", wide, itemsize)], "the loss"


def test_a_single_process_communicates_nothing(folder):
    for step in watch(folder, "--steps", 2, nproc=1)[0]:
        assert not workers.collectives(step)
        assert {view for _, view in step.gradients} == {True}


def test_all_reduces_overlap_with_backward(folder, tmp_path):
    """In a trace, the first one runs while backward has yet to end, and none before the last backward."""
    options = ["--num_hidden_layers", 4, "--mbs", 1, "--grad_acc_steps", 3, "--steps", 4]
    launch.train(folder, *SMALL, *options, "--profile_dir", tmp_path, nproc=2).check()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]
    for file in tmp_path.iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        names = ("forward 0", "backward 2", "all-reduce bucket 0", "all-reduce bucket 1", "gloo:all_reduce")
        spans = {name: sorted((event["ts"], event["ts"] + event["dur"]) for event in events
                              if event.get("cat") == "user_annotation" and event["name"] == name)
                 for name in names}
        assert [len(spans[name]) for name in names[:-1]] == [3] * 4, "training steps 2 to 4"
        for (start, _), (last, end) in zip(spans["forward 0"], spans["backward 2"]):
            reduces = [ts for ts, _ in spans["gloo:all_reduce"] if start < ts < end]
            assert reduces and min(reduces) > last


def test_a_profile_of_a_short_run_is_written_too(folder, tmp_path):
    launch.train(folder, *SMALL, "--steps", 2, "--profile_dir", tmp_path, nproc=2).check()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]


def test_the_time_limit_holds_for_every_group(folder):
    """Rank 2 is silent: the others, which wait in different groups, give up after the 2 seconds of --timeout,
    not after gloo's 30 minutes."""
    run = launch.fork(workers.call_axes, folder, {"dp": 3}, 2, ["dp", "world", None], nproc=3)
    for error, seconds in run.results[:2]:
        assert error != "none" and 1 < seconds < 4, (error, seconds)


@pytest.fixture(scope="module")
def real(folder, tmp_path_factory):
    """The real command several times, two at a time."""
    scratch = tmp_path_factory.mktemp("real")
    with ThreadPoolExecutor(2) as pool:
        def torchrun(*argv, nproc=2):
            return pool.submit(launch.torchrun, folder, *SMALL, *argv, "--use_cpu", nproc=nproc, timeout=120)
        yield {
            "killed": pool.submit(workers.kill_one_rank, folder, SMALL, 2, scratch),
            "refused": torchrun("--dp", 3),
            "runs": [torchrun("--steps", 2) for _ in range(3)],
        }


def test_every_run_ends_well(real):
    """Gradient hooks that outlive the groups made one exit in eight an abort."""
    for run in real["runs"]:
        assert run.result().check().output.count("final loss") == 1, "one process prints"


def test_a_killed_rank_ends_the_job(real):
    status, output, seconds, left = real["killed"].result()
    assert status != 0 and seconds < 60 and not left
    assert "Signal 9 (SIGKILL)" in output


def test_an_error_is_one_line_from_one_process(real):
    run = real["refused"].result()
    assert run.statuses == [1], "torchrun's own"
    (line,) = workers.error_lines(run.output)
    assert "dp 3 = 3 processes, not 2: use --nproc_per_node 3" in line
    assert "exitcode  : 2" in run.output, run.output


@pytest.mark.parametrize("world_size, argv, named", [
    (3, "--dp 2", ["dp 2", "not 3", "--nproc_per_node 2"]),
    (1, "--dp_size 2", ["dp 2", "not 1", "--nproc_per_node 2"]),
    (2, "--dp 0", ["dp", "1 or more", "0"]),
    (3, "--global_batch_size 8 --mbs 2", ["8", "6 = micro_batch_size x dp_size", "--global_batch_size 12"]),
    (3, "", ["8", "6", "--global_batch_size 12"]),
    (2, "--mbs 2 --grad_acc_steps 3 --global_batch_size 6", ["6", "12", "dp_size"]),
    (2, "--timeout 0", ["timeout", "1 or more"]),
    (2, "--bucket_cap_mb -1", ["bucket_cap_mb", "0 or more", "-1"]),
    (2, "--tp 2", ["--tp 2"]),
    (2, "--seq_len 9000000", ["the text has", "9000000"]),
    (2, "--metrics_file /nonesuch/metrics.jsonl", ["/nonesuch/metrics.jsonl"]),
    (2, "--profile_dir /dev/null", ["/dev/null"]),
])
def test_errors_come_before_any_group(folder, monkeypatch, capfd, world_size, argv, named):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as end:
        launch.load(folder).train.main(argv.split())
    out, err = capfd.readouterr()
    (line,) = workers.error_lines(err)
    assert end.value.code == 2 and not out and err == line + "\n"
    assert all(text in line for text in named), line


def test_another_process_speaks_if_the_first_has_no_error(folder, monkeypatch, capfd):
    """All have the same one nearly always: then the first speaks, and torchrun ends the others, who wait."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    step = launch.load(folder)
    naps = []
    monkeypatch.setattr(step.arguments.time, "sleep",
                        lambda seconds: naps.append((seconds, capfd.readouterr())))
    with pytest.raises(SystemExit) as end:
        step.train.main(["--dp", "2"])
    assert naps == [(30, ("", ""))]
    assert end.value.code == 2 and len(workers.error_lines(capfd.readouterr().err)) == 1
