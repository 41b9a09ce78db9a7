"""Step 3: shards and what they exchange, each part against its unsharded twin, and how runs end."""

import json

import pytest
import torch

import launch
import parallel_workers as workers

STEP = "step03_tensor_parallel"
LAYERS, HIDDEN, SEQ, MBS, VOCAB = 3, 48, 10, 2, 288
SMALL = ["--num_hidden_layers", LAYERS, "--hidden_size", HIDDEN, "--num_attention_heads", 12,
         "--num_key_value_heads", 6, "--intermediate_size", 36, "--vocab_size", VOCAB, "--seq_len", SEQ,
         "--mbs", MBS]


@pytest.fixture(scope="module")
def folder(steps):
    return steps / STEP


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A folder with the config.json of the same model with a tied embedding."""
    folder = tmp_path_factory.mktemp("tied")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 12,
        "num_key_value_heads": 6, "intermediate_size": 36, "vocab_size": VOCAB, "tie_word_embeddings": True}))
    return ["--model_name", folder]


def watch(folder, *argv, nproc):
    argv = [*map(str, [*SMALL, *argv]), "--use_cpu"]
    return launch.fork(workers.watch, folder, argv, nproc=nproc).check().results


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_shards_put_together_are_the_single_process_weights(steps, folder, tied, tp, is_tied):
    def start(step, *argv, nproc):
        argv = [*map(str, [*SMALL, *(tied if is_tied else []), "--global_batch_size", 6, *argv]), "--use_cpu"]
        return launch.fork(workers.initial_shards, steps / step, argv, nproc=nproc).check().results

    (whole,), shards = start("step01_single_gpu", nproc=1), start(STEP, "--tp", tp, nproc=tp)
    assert ("lm_head.weight" in whole) != is_tied
    cut = set()
    for name, weight in whole.items():
        parts = [rank.pop(name) for rank in shards]
        if parts[0].shape == weight.shape:
            assert all(torch.equal(part, weight) for part in parts), name
        else:
            (dim,) = (dim for dim in range(2) if parts[0].size(dim) != weight.size(dim))
            assert torch.equal(torch.cat(parts, dim), weight), name
            cut.add(name)
    assert not any(shards), "weights of no single process"
    assert cut == {name for name in whole if "norm" not in name}


@pytest.mark.parametrize("tp, dp, grad_acc_steps, dtype", [
    (2, 1, 1, "float32"), (2, 1, 3, "float64"), (3, 1, 2, "bfloat16"), (2, 2, 2, "float32")])
def test_communication_of_a_training_step(folder, tp, dp, grad_acc_steps, dtype):
    """The docstring's formula: tensors of (batch, seq, hidden), 2 layers + 1 times forward and backward, and
    two numbers a token, in float32 or wider. Besides, the norm, and the memory of the metrics."""
    wide, itemsize = ("float64", 8) if dtype == "float64" else ("float32", 4)
    hidden = ("all_reduce", wide, MBS * SEQ * HIDDEN * itemsize)
    logsumexp = ("all_gather", wide, 2 * MBS * SEQ * itemsize)
    scalar, memory = ("all_reduce", wide, itemsize), ("all_reduce", "int64", 8)
    ranks = watch(folder, "--tp", tp, "--grad_acc_steps", grad_acc_steps, "--steps", 3, "--dtype", dtype,
                  nproc=tp * dp)
    for step in [step for rank in ranks for step in rank]:
        seen = workers.collectives(step)
        gradients = [seen.pop(("all_reduce", kind, size)) for _, kind, size in list(seen)
                     if dp > 1 and size > hidden[2]]
        assert len(gradients) == (1 if dp > 1 else 0), "one bucket, of more than any activation"
        seen.pop(memory, None)  # of the step before
        assert seen == {hidden: 2 * (2 * LAYERS + 1) * grad_acc_steps, logsumexp: grad_acc_steps,
                        scalar: 2 if dp > 1 else 1}, "norm, and with dp the loss"
        start = step.events.index("forward")
        assert step.events[:start].count(hidden) == 2 * LAYERS + 1
        assert step.events[start:step.events.index("end of backward")].count(hidden) == 2 * LAYERS + 1


def test_a_single_process_communicates_nothing(folder):
    for step in watch(folder, "--steps", 2, nproc=1)[0]:
        assert not workers.collectives(step)


def test_what_processes_hold_in_common_stays_equal_to_the_bit(folder):
    """dp 2 x tp 2: replicas in all weights, shards in those that all have whole."""
    ranks = watch(folder, "--tp", 2, "--steps", 4, "--global_batch_size", 8, nproc=4)
    for steps in zip(*ranks):
        first, second, *replicas = [step.hashes for step in steps]
        assert replicas == [first, second]
        same = {name for name in first if first[name] == second[name]}
        assert same == {name for name in first if "norm" in name}
    assert len({step.hash for step in ranks[0]}) == 4


@pytest.mark.parametrize("tp", [2, 3])
def test_parts_equal_their_unsharded_twins(folder, tp):
    """Forward and all gradients, also of gradients that arrive in an odd memory layout."""
    for errors in launch.fork(workers.compare_parts, folder, nproc=tp).check().results:
        assert len(errors) == 3 * 5 + 3 * 3 + 2 + 3 * 3
        wrong = {what: error for what, error in errors.items() if not error < 1e-12}
        assert not wrong


def test_bfloat16_stays_near_the_single_process(folder):
    argv = [*SMALL, "--steps", 6, "--global_batch_size", 8, "--dtype"]
    exact = launch.train(folder, *argv, "float32").check()
    single = launch.train(folder, *argv, "bfloat16").check()
    run = launch.train(folder, *argv, "bfloat16", "--tp", 2, nproc=2).check()
    for key, tolerance in (("loss", 1e-3), ("grad_norm", 2e-2)):
        assert run.series(key) == pytest.approx(single.series(key), rel=tolerance, abs=0)
    assert abs(single.series("loss")[0] / exact.series("loss")[0] - 1) > 1e-7, "autocast is on"
    assert {weight.dtype for rank in run.results for weight in rank.values()} == {torch.float32}


def test_the_time_limit_holds_for_every_group(folder):
    """Rank 3 is silent: each of the others waits for it on another axis, and gives up after 2 seconds."""
    run = launch.fork(workers.call_axes, folder, {"dp": 2, "tp": 2}, 2, ["world", "dp", "tp", None], nproc=4)
    for error, seconds in run.results[:3]:
        assert error != "none" and 1 < seconds < 4, (error, seconds)


@pytest.mark.parametrize("world_size, argv, named", [
    (4, "--tp 3", ["dp 1 x tp 3 = 3", "not 4", "--nproc_per_node 3"]),
    (1, "--tp 2", ["dp 1 x tp 2 = 2", "not 1", "--nproc_per_node 2"]),
    (4, "--tp 2 --dp 3", ["dp 3 x tp 2 = 6", "not 4", "--nproc_per_node 6"]),
    (3, "--tp 3", ["--tp 3", "num_attention_heads 8", "use --tp 1"]),
    (8, "--tp 8", ["--tp 8", "num_key_value_heads 4", "use --tp 4"]),
    (2, "--tp 2 --intermediate_size 351", ["--tp 2", "intermediate_size 351", "use --tp 1"]),
    (2, "--tp 2 --vocab_size 257", ["--tp 2", "vocab_size 257", "use --tp 1"]),
    (4, "--tp_size 4 --vocab_size 258", ["--tp 4", "vocab_size 258", "use --tp 2"]),
    (2, "--tp 0", ["tp", "1 or more", "0"]),
    (4, "--tp 2 --global_batch_size 6", ["6", "4 = micro_batch_size x dp_size", "--global_batch_size 8"]),
    (2, "--pp 2", ["--pp 2"]),
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
