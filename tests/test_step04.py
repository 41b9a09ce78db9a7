"""Steps 4 and 5: schedules without processes, then live stages, then real runs and their ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import launch
import pipeline_workers as workers

STEP04, STEP05 = "step04_pipeline_afab", "step05_pipeline_1f1b"
FOLDERS = [STEP04, STEP05]
ENGINES = [(STEP04, "afab"), (STEP05, "afab"), (STEP05, "1f1b")]
NEW_ENGINES = [(STEP04, "afab"), (STEP05, "1f1b")]  # each in the step that adds it, where runs are dear
SMALL = ["--num_hidden_layers", 5, "--hidden_size", 32, "--num_attention_heads", 4, "--intermediate_size", 48,
         "--seq_len", 16, "--dtype", "float64"]


@pytest.fixture(scope="module")
def pipelines(steps):
    """The module pipeline_parallel of each folder."""
    return {folder: launch.load(steps / folder).pipeline_parallel for folder in FOLDERS}


def check_same_run(run, single, tolerance=1e-10):
    for key in ("loss", "grad_norm"):
        assert run.series(key) == pytest.approx(single.series(key), rel=tolerance, abs=0)
    assert len(run.metrics) == len(single.metrics) > 0


# Schedules and splits: pure functions

def order(text):
    """F0 B0 -> [("forward", 0), ("backward", 0)]"""
    return [({"F": "forward", "B": "backward"}[word[0]], int(word[1:])) for word in text.split()]


@pytest.mark.parametrize("engine, orders", [
    ("afab", ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3),
    ("1f1b", ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
])
def test_orders_written_out_by_hand(pipelines, engine, orders):
    for module in pipelines.values():
        if engine in module.SCHEDULES:
            assert [module.SCHEDULES[engine](stage, 3, 4) for stage in range(3)] == list(map(order, orders))


def test_engines(pipelines):
    assert [(folder, engine) for folder in FOLDERS for engine in pipelines[folder].SCHEDULES] == ENGINES


@pytest.mark.parametrize("folder, engine", ENGINES)
def test_schedules(pipelines, folder, engine):
    for p in range(1, 7):
        for m in range(1, 10):
            for stage in range(p):
                actions = pipelines[folder].SCHEDULES[engine](stage, p, m)
                for kind in ("forward", "backward"):
                    assert [i for action, i in actions if action == kind] == list(range(m))
                assert all(actions.index(("forward", i)) < actions.index(("backward", i)) for i in range(m))
                alive = [sum({"forward": 1, "backward": -1}[action] for action, _ in actions[:n])
                         for n in range(2 * m + 1)]
                assert max(alive) == (min(p - stage, m) if engine == "1f1b" or p == 1 else m)


@pytest.mark.parametrize("folder, engine", ENGINES)
def test_no_schedule_can_deadlock(pipelines, folder, engine):
    """The executor itself, on a network that delivers only to a receiver that waits."""
    module = pipelines[folder]
    for p in range(1, 9):
        for m in range(1, 13):
            gradients = workers.run_in_threads(module.run_schedule, module.SCHEDULES[engine], p, m)
            assert gradients == [sum((i + 1) * 10**i for i in range(m))] * p, (p, m)


def test_a_bad_schedule_deadlocks_or_mixes_up(pipelines):
    def impatient(stage, p, m):  # the first stage wants a gradient before the last has all that it waits for
        return order("F0 B0 F1 B1") if stage == 0 else order("F0 F1 B0 B1")

    def swapped(stage, p, m):
        return order("F0 F1 B0 B1") if stage == 0 else order("F1 F0 B0 B1")

    for module in pipelines.values():
        assert workers.run_in_threads(module.run_schedule, impatient, 2, 2) == ["deadlock"] * 2
        assert workers.run_in_threads(module.run_schedule, swapped, 2, 2) != [21, 21]


@pytest.mark.parametrize("folder", FOLDERS)
def test_split_layers(pipelines, folder):
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            split = pipelines[folder].split_layers(layers, stages)
            assert [layer for part in split for layer in part] == list(range(layers)), (layers, stages)
            sizes = [len(part) for part in split]
            assert len(sizes) == stages and max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True), "longer ones first: the last stage has the head, too"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_is_made_of_its_own_layers(steps, monkeypatch, folder, tied):
    step = launch.load(steps / folder)
    config = step.config.LlamaConfig(32, 7, 4, 2, 48, 256, tie_word_embeddings=tied)
    whole = workers.create_model(step, config, SimpleNamespace(rank=0, size=1), torch.float32).state_dict()
    drawn, normal = [], torch.Tensor.normal_

    def watched_normal(tensor, *args, **kwargs):
        if not tensor.is_meta:
            drawn.append(tensor.numel())
        return normal(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", watched_normal)
    for stages in (2, 3, 4, 7):
        seen = []
        for stage in range(stages):
            drawn.clear()
            axis = SimpleNamespace(rank=stage, size=stages)
            parameters = dict(workers.create_model(step, config, axis, torch.float32).named_parameters())
            matrices = [weight.numel() for weight in parameters.values() if weight.dim() == 2]
            assert sorted(drawn) == sorted(matrices)
            assert all(torch.equal(weight, whole[name]) for name, weight in parameters.items())
            assert any(".layers." in name for name in parameters)
            seen += [name for name in parameters if not (tied and stage > 0 and "embed_tokens" in name)]
        assert sorted(seen) == sorted(name for name in whole if not (tied and name == "lm_head.weight"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stage_never_holds_the_others(steps, folder):
    run = launch.fork(workers.memory_of_stage, steps / folder, 3, 8).check()
    whole, part, grown = run.results[0]
    assert part < whole / 7
    assert grown < whole / 3, "bytes"


# Live stages

@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_live_stages(steps, folder, p):
    """Gradients, messages and memory of every stage, for few and many micro-batches of an odd shape."""
    cases = [(engine, m) for name, engine in ENGINES if name == folder for m in (1, 2, 3, 5, 8)]
    run = launch.fork(workers.run_stages, steps / folder, (3, 7), cases, nproc=p).check()
    for stage, rows in enumerate(run.results):
        assert [(row.engine, row.num_micro_batches) for row in rows] == cases
        for row in rows:
            m = row.num_micro_batches
            assert row.error < 1e-13, row
            assert (row.loss != 0) == (stage == p - 1)
            assert row.live == (min(p - stage, m) if row.engine == "1f1b" else m), row
            assert row.live_at_end == 0
            # Of outputs whose backward is to come, none but the one that is being sent.
            assert row.outputs <= 1, row
            size = 3 * 7 * 16 * 8  # (batch, seq, hidden) in float64
            forward, backward = stage < p - 1, stage > 0
            expected = {("isend", size, stage + 1): m * forward, ("isend", size, stage - 1): m * backward,
                        ("irecv", size, stage - 1): m * backward, ("irecv", size, stage + 1): m * forward}
            assert {call: row.calls.count(call) for call in expected} == expected
            assert len(row.calls) == sum(expected.values()), row.calls


@pytest.mark.parametrize("folder, engine", NEW_ENGINES)
def test_gradients_are_summed_over_dp_once(steps, folder, engine):
    argv = ["--steps", 3, "--mbs", 1, "--global_batch_size", 6, *SMALL]
    single = launch.train(steps / folder, *argv).check()
    layout = ["--dp", 2, "--pp", 2, "--pp_engine", engine, "--bucket_cap_mb", 0.05]
    run = launch.train(steps / folder, *argv, *layout, nproc=4).check()
    check_same_run(run, single)
    for loss in run.series("loss"):
        assert f"{loss:.4f}" in run.output
    names = [set(weights) for weights in run.results]
    assert names[0] == names[2] and names[1] == names[3] and not names[0] & names[1]
    assert names[0] | names[1] == set(single.results[0])
    for weights in run.results:
        for name, weight in weights.items():
            assert (weight - single.results[0][name]).norm() <= 1e-10 * weight.norm(), name

    argv = [*map(str, [*argv, *layout]), "--use_cpu"]
    for seen in launch.fork(workers.train_and_watch, steps / folder, argv, nproc=4).check().results:
        assert len(seen.events) == 3
        for events in seen.events:
            assert events.count("backward") == 3
            last = max(n for n, event in enumerate(events) if event == "backward")
            buckets = [event for event in events if event != "backward" and event[1] > 1]
            assert not any(bucket in events[:last] for bucket in buckets)
            assert len(buckets) == len(set(buckets)) > 1
            assert sum(numel for _, numel in buckets) == sum(seen.sizes)


@pytest.fixture(scope="module")
def tied_model(steps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 256, "tie_word_embeddings": True,
        "rope_theta": 10000.0}))
    return ["--model_name", folder, "--seq_len", 16, "--dtype", "float64"]


@pytest.mark.parametrize("folder, engine", NEW_ENGINES)
def test_tied_embedding(steps, tied_model, folder, engine):
    argv = ["--steps", 4, "--mbs", 2, "--global_batch_size", 6, *tied_model]
    single = launch.train(steps / folder, *argv).check()
    for layout, nproc in ((["--pp", 3], 3), (["--pp", 2, "--tp", 2], 4)):
        run = launch.train(steps / folder, *argv, *layout, "--pp_engine", engine, nproc=nproc).check()
        check_same_run(run, single)
    argv = [*map(str, argv), "--pp", "3", "--pp_engine", engine, "--use_cpu"]
    first, middle, last = launch.fork(workers.train_and_watch, steps / folder, argv, nproc=3).check().results
    for stage in (first, last):
        assert [len(weights) for weights in stage.weights] == [1] * 4
    assert not any(middle.weights)
    for (mine,), (theirs,) in zip(first.weights, last.weights):
        assert torch.equal(mine, theirs)
    assert not any(torch.equal(before, after) for (before,), (after,) in pairwise(first.weights))


@pytest.mark.parametrize("folder, engine", NEW_ENGINES)
def test_bfloat16_stays_near_the_single_process(steps, folder, engine):
    argv = [*SMALL, "--steps", 4, "--dtype", "bfloat16"]
    single = launch.train(steps / folder, *argv).check()
    run = launch.train(steps / folder, *argv, "--pp", 2, "--pp_engine", engine, nproc=2).check()
    check_same_run(run, single, tolerance=1e-3)
    exact = launch.train(steps / folder, *SMALL, "--steps", 4).check()
    assert abs(exact.series("loss")[0] / single.series("loss")[0] - 1) > 1e-7, "autocast is on"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("shape", [["--seq_len", 1, "--mbs", 1, "--grad_acc_steps", 3],
                                   ["--seq_len", 2, "--mbs", 5, "--grad_acc_steps", 1],
                                   ["--seq_len", 13, "--mbs", 3, "--grad_acc_steps", 2]])
def test_odd_shapes(steps, folder, shape):
    argv = [*SMALL, "--steps", 2, *shape]
    single = launch.train(steps / folder, *argv).check()
    check_same_run(launch.train(steps / folder, *argv, "--pp", 2, nproc=2).check(), single)


@pytest.mark.parametrize("folder, engine", NEW_ENGINES)
def test_traces_show_the_schedule(steps, tmp_path, folder, engine):
    argv = [*SMALL, "--steps", 4, "--mbs", 1, "--grad_acc_steps", 4, "--pp", 3, "--pp_engine", engine]
    launch.train(steps / folder, *argv, "--profile_dir", tmp_path, nproc=3).check()
    orders = {"afab": ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3,
              "1f1b": ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]}
    for rank, expected in enumerate(orders[engine]):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        spans = [event for event in events if event.get("cat") == "user_annotation"
                 and re.fullmatch(r"(forward|backward) \d+", event["name"])]
        names = [span["name"] for span in sorted(spans, key=lambda span: span["ts"])]
        assert names == [f"{action} {i}" for action, i in order(expected)] * 3


# Errors and ends

@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("world_size, argv, numbers", [
    (8, "--pp 8", ["8", "use --pp 4 or less"]),
    (5, "--pp 5 --dp 1", ["5", "use --pp 4 or less"]),
    (4, "--pp 3", ["dp 1 x pp 3 x tp 1 = 3", "4", "use --nproc_per_node 3"]),
    (4, "--pp 2 --tp 3", ["dp 1 x pp 2 x tp 3 = 6", "4", "use --nproc_per_node 6"]),
    (6, "--dp 2 --pp 2", ["dp 2 x pp 2 x tp 1 = 4", "6", "use --nproc_per_node 4"]),
    (2, "--pp 0", ["pp", "0"]),
    (2, "--pp 2 --pp_engine gpipe", ["gpipe", "afab"]),
])
def test_errors(steps, monkeypatch, capfd, folder, world_size, argv, numbers):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_RANK", "0")
    train = launch.load(steps / folder).train
    with pytest.raises(SystemExit) as exit:
        train.main(argv.split())
    out, err = capfd.readouterr()
    assert exit.value.code == 2 and not out
    assert re.fullmatch("train.py: error: .*\n", err), err
    assert all(number in err for number in numbers), err


@pytest.mark.parametrize("folder", FOLDERS)
def test_step04_has_one_engine_and_step05_two(steps, monkeypatch, folder):
    args, _ = launch.load(steps / folder).arguments.parse_args([])
    assert args.pp_engine == {STEP04: "afab", STEP05: "1f1b"}[folder]


@pytest.mark.parametrize("folder, engine", NEW_ENGINES)
@pytest.mark.parametrize("accident, limit", [("dies", 3), ("hangs", 8)])
def test_the_others_notice_an_accident(steps, folder, engine, accident, limit):
    """A stage that hangs is given up after --timeout, one that dies at once."""
    argv = [*map(str, SMALL), "--pp", "3", "--pp_engine", engine, "--use_cpu", "--timeout", "4"]
    run = launch.fork(workers.train_until_accident, steps / folder, argv, accident, nproc=3, timeout=40)
    assert run.statuses[0] == run.statuses[2] == 0, run.output
    for error, seconds in (run.results[0], run.results[2]):
        assert error != "no error" and seconds < limit


@pytest.mark.parametrize("folder", FOLDERS)
def test_torchrun(steps, tmp_path, folder):
    argv = [*SMALL, "--steps", 3]
    single = launch.train(steps / "step01_single_gpu", *argv).check()
    run = launch.torchrun(steps / folder, *argv, "--pp", 2, "--tp", 2, "--use_cpu",
                          "--metrics_file", tmp_path / "metrics.jsonl", nproc=4).check()
    run.metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    check_same_run(run, single)
    assert "layers of each stage: [range(0, 3), range(3, 5)]" in run.output
    assert run.output.count("final loss") == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_killed_stage_ends_the_job(steps, tmp_path, folder):
    metrics = tmp_path / "metrics.jsonl"
    with open(tmp_path / "output", "w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "localhost:0", steps / folder / "train.py", "--use_cpu", "--pp", "3",
             "--steps", "100000", "--metrics_file", metrics, *map(str, SMALL)],
            stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        pairs = [map(int, line.split()) for line in table.splitlines()]
        ranks = sorted(pid for pid, parent in pairs if parent == job.pid)
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        assert job.wait(timeout=60) != 0
        assert "Signal 9 (SIGKILL)" in (tmp_path / "output").read_text()
        for rank in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank, 0)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
