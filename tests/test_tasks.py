"""The tests of the tasks that students get (tools/tasks.toml), but for the shared test. Each step's go from
easy to hard, and need only functions of their own task and of the ones before it.

    pytest tests/test_tasks.py -k step03 --steps DIR --run_seed 7

What students write runs in other processes, which return what it computed. All comparing is done here.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import task_workers as workers
import torch
import torch.nn.functional as F

import launch
from same_run import step_folder


@dataclass
class Student:
    """Calls workers with the folder of a step that is tested."""

    steps: Path
    seed: int

    def __call__(self, step, worker, *args, nproc=1):
        """Returns what each process returned."""
        folder = step_folder(self.steps, step)
        if not folder:
            pytest.skip(f"no {step} in {self.steps}")
        run = launch.fork(worker, folder, self.seed, *args, nproc=nproc, timeout=30)
        if any(run.statuses) or any(result is None for result in run.results):
            pytest.fail(f"{worker.__name__} ended with exit statuses {run.statuses} and without a result\n"
                        f"{run.output}", pytrace=False)
        return run.results


@pytest.fixture
def student(steps, run_seed):
    return Student(steps, run_seed)


@pytest.fixture(scope="module")
def whole():
    """The modules of this repository's step 1: the model that isn't spread."""
    return launch.load(step_folder(launch.ROOT, "step01"))


def check(what, found, expected, tolerance=1e-11):
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        pytest.fail(f"{what}: {shape}, not a tensor of {tuple(expected.shape)}", pytrace=False)
    error = (found.double() - expected.double()).norm() / (expected.double().norm() or 1.0)
    if not error <= tolerance:
        pytest.fail(f"{what}: wrong, relative error {error:.1e}", pytrace=False)


def twin_gradients(loss, *inputs):
    """Gradients of a function of these tensors, computed in this process."""
    inputs = [workers.leaf(x) for x in inputs]
    return torch.autograd.grad(loss(*inputs), inputs)


# Step 2

def test_step02_bucket(student):
    (((start, summed), grads),) = student("step02", workers.bucket)
    slopes = [workers.draw(student.seed + 1 + n, *workers.BUCKET_SHAPES) for n in range(2)]
    expected = torch.cat([(a + b).flatten() for a, b in zip(*slopes)])
    check("the buffer before any backward pass", start, torch.zeros_like(expected))
    check("the buffer after two backward passes", summed, expected)
    for shape, grad in zip(workers.BUCKET_SHAPES, grads):
        check("a gradient after the buffer was filled with 3", grad, torch.full(shape, 3.0))


def test_step02_all_reduce(student):
    results = student("step02", workers.all_reduce, nproc=3)
    given = [workers.draw(student.seed + rank, (4,), (4,), (4,)) for rank in range(3)]
    for rank, (alone, *_) in enumerate(results):
        check("all_reduce on an axis of size 1", alone, given[rank][2])
    for _, returned, summed, largest in (results[0], results[2]):
        check("what all_reduce returns", returned, given[0][0] + given[2][0])
        check("what all_reduce leaves in the tensor", summed, given[0][0] + given[2][0])
        check("start_all_reduce with MAX", largest, torch.maximum(given[0][1], given[2][1]))


def test_step02_gradient_buckets(student):
    results = student("step02", workers.gradient_buckets, nproc=2)
    twin = workers.toy_model(student.seed)
    batches = torch.cat([workers.toy_batches(student.seed, rank) for rank in range(2)], dim=1)
    for step, micro_batches in enumerate(batches):
        twin.zero_grad()
        twin(micro_batches).square().sum().backward()
        for rank, (grads, _) in enumerate(results):
            for (name, parameter), grad in zip(twin.named_parameters(), grads[step], strict=True):
                check(f"process {rank}, training step {step + 1}, gradient of {name}", grad, parameter.grad)
    largest = max(parameter.nbytes for parameter in twin.parameters())
    for _, sizes in results:
        assert sum(sizes) == sum(parameter.nbytes for parameter in twin.parameters())
        assert len(sizes) > 1 and max(sizes) <= max(workers.BUCKET_CAP, largest), f"sizes of buckets: {sizes}"


# Step 3

def test_step03_shards(student):
    ((shards, local),) = student("step03", workers.shards)
    for name, weight in workers.weights(student.seed).items():
        dim, parts = workers.WEIGHTS[name][1], [shard[name] for shard in shards]
        for rank, found in enumerate(parts):
            expected = weight if dim is None else workers.part(weight, dim, rank, workers.SHARDS)
            check(f"process {rank}, {name}", found, expected, tolerance=0)
            assert found.untyped_storage().nbytes() == expected.nbytes, f"the shard of {name} keeps all of it"
    tokens = workers.draw_tokens(student.seed, 2, 8, vocab=12)
    for rank, (rows, mine) in enumerate(local):
        expected = tokens // 4 == rank
        check(f"process {rank}, which tokens are its own", mine, expected)
        check(f"process {rank}, rows", rows, (tokens - 4 * rank) * expected)


def test_step03_linears(student):
    results = student("step03", workers.linears, nproc=2)
    given = workers.linear_inputs(student.seed)

    def column(x, *weights):
        return sum((F.linear(x, weight) * given[f"grad {name}"]).sum()
                   for name, weight in zip(("first", "second"), weights))

    def row(x, weight):
        return (F.linear(x, weight) * given["grad row"]).sum()

    grad_x, *grad_weights = twin_gradients(column, given["x"], given["first"], given["second"])
    grad_row_x, grad_row = twin_gradients(row, given["row x"], given["row"])
    for rank, found in enumerate(results):
        def mine(tensor, dim):
            return workers.part(tensor, dim, rank, 2)

        for i, name in enumerate(("first", "second")):
            output = F.linear(given["x"], given[name])
            check(f"column-parallel output {i}", found["column output"][i], mine(output, -1))
            check(f"gradient of column-parallel weight {i}", found["column weights"][i],
                  mine(grad_weights[i], 0))
        check("gradient of the column-parallel layers' input", found["column x"], grad_x)
        check("row-parallel output", found["row output"], F.linear(given["row x"], given["row"]))
        check("gradient of the row-parallel input", found["row x"], mine(grad_row_x, -1))
        check("gradient of the row-parallel weight", found["row weight"], mine(grad_row, 1))


def test_step03_vocabulary(student):
    results = student("step03", workers.vocabulary, nproc=2)
    weight, grad, logits, tokens, targets = workers.vocabulary_inputs(student.seed)

    def embed(weight):
        return (F.embedding(tokens, weight) * grad).sum()

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    for rank, found in enumerate(results):
        check("output of the embedding", found["embedding"], F.embedding(tokens, weight))
        check("gradient of the embedding's rows", found["embedding weight"],
              workers.part(twin_gradients(embed, weight)[0], 0, rank, 2))
        check("loss", found["loss"], loss(logits))
        check("gradient of the logits", found["logits"],
              workers.part(twin_gradients(loss, logits)[0] / 7, -1, rank, 2))


# Steps 4 and 5

def written(order):
    """F0 B0"""
    return " ".join(f"{action[0].upper()}{i}" for action, i in order)


def check_order(order, count, where):
    """Every micro-batch once forward and once backward, in order, forward before its own backward."""
    for action in ("forward", "backward"):
        assert [i for kind, i in order if kind == action] == list(range(count)), f"{where}: {written(order)}"
    for i in range(count):
        assert order.index(["forward", i]) < order.index(["backward", i]), f"{where}: {written(order)}"


def most_alive(order):
    """The largest number of micro-batches that are between forward and backward."""
    alive = [sum({"forward": 1, "backward": -1}[action] for action, _ in order[:n])
             for n in range(len(order) + 1)]
    return max(alive)


def duration(orders):
    """The time that the stages need if every action takes 1 and waits for what its neighbour sends."""
    finished, free, todo = {}, [0] * len(orders), [list(order) for order in orders]
    while any(todo):
        before = len(finished)
        for stage, actions in enumerate(todo):
            while actions:
                action, i = actions[0]
                neighbour = stage - 1 if action == "forward" else stage + 1
                has_to_wait = 0 <= neighbour < len(orders)
                if has_to_wait and (action, i, neighbour) not in finished:
                    break
                start = max(free[stage], finished[action, i, neighbour] if has_to_wait else 0)
                finished[action, i, stage] = free[stage] = start + 1
                actions.pop(0)
        assert len(finished) > before, f"the stages wait for one another: {todo}"
    return max(free)


def each_order(student, step, engine):
    """Yields (stages, micro-batches, the orders of all stages)."""
    (results,) = student(step, workers.orders, engine)
    assert len(results) == len(workers.SIZES)
    for (stages, count), orders in zip(workers.SIZES, results):
        assert len(orders) == stages
        for stage, order in enumerate(orders):
            check_order(order, count, f"stage {stage} of {stages}, {count} micro-batches")
        yield stages, count, orders


def check_pipeline(student, whole, step, engine, counts=(1, 2, 5)):
    """Two stages against the whole model: loss and gradients."""
    results = student(step, workers.pipeline, engine, counts, nproc=2)
    for n, count in enumerate(counts):
        model = workers.create_model(whole, student.seed)
        loss = sum(whole.model.cross_entropy(model(inputs), targets) / 100
                   for inputs, targets in workers.pipeline_batches(student.seed, count))
        loss.backward()
        (first_loss, first), (last_loss, last) = (result[n] for result in results)
        assert first_loss == 0 and last_loss == pytest.approx(loss.item(), rel=1e-11)
        expected = dict(model.named_parameters())
        assert sorted([*first, *last]) == sorted(expected), "every weight has its stage"
        for name, grad in {**first, **last}.items():
            check(f"{count} micro-batches, gradient of {name}", grad, expected[name].grad)


def test_step04_split(student):
    (results,) = student("step04", workers.splits)
    assert len(results) == len(workers.SIZES)
    for (stages, count), split in zip(workers.SIZES, results):
        layers, sizes = list(range(stages + count)), [len(part) for part in split]
        assert list(chain(*split)) == layers and len(split) == stages, f"{len(layers)} layers: {split}"
        even = sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert even, f"{len(layers)} layers: {split}"


def test_step04_order(student):
    for stages, count, orders in each_order(student, "step04", "afab"):
        if stages == 1:
            alive = most_alive(orders[0])
            assert alive == 1, f"a single stage with {alive} micro-batches alive: {written(orders[0])}"
        else:
            expected = [[action, i] for action in ("forward", "backward") for i in range(count)]
            assert orders == [expected] * stages


def test_step04_stages(student, whole):
    ((names, logits),) = student("step04", workers.stages)
    model = workers.create_model(whole, student.seed)
    assert sorted(chain(*names)) == sorted(name for name, _ in model.named_parameters())
    x = workers.draw_tokens(student.seed, 2, 7, vocab=workers.TINY["vocab_size"])
    check("logits behind the last stage", logits, model(x).detach())


def test_step04_channel(student):
    first, last = student("step04", workers.channel, nproc=2)
    to_next, back = workers.draw(student.seed, workers.CHANNEL_SHAPE, workers.CHANNEL_SHAPE)
    check("what the last stage received, in order", last, to_next)
    check("what the first stage received, in order", first, back)


def test_step04_pipeline(student, whole):
    check_pipeline(student, whole, "step04", "afab")


def test_step05_order(student):
    for _ in each_order(student, "step05", "1f1b"):
        pass


def each_thrifty_order(student):
    """The same for 1F1B, if no stage holds more than it has to."""
    for stages, count, orders in each_order(student, "step05", "1f1b"):
        for stage, order in enumerate(orders):
            alive = most_alive(order)
            where = f"stage {stage} of {stages}: {alive} micro-batches alive: {written(order)}"
            assert alive <= stages - stage, where
        yield stages, count, orders


def test_step05_two_stages(student, whole):
    for _ in each_thrifty_order(student):
        pass
    check_pipeline(student, whole, "step05", "1f1b")


def test_step05_is_as_fast_as_afab(student):
    for stages, count, orders in each_thrifty_order(student):
        time, best = duration(orders), 2 * (count + stages - 1)
        assert time == best, f"{stages} stages, {count} micro-batches: {time} units of time, not {best}"


# Step 6

def test_step06_zigzag(student):
    (results,) = student("step06", workers.zigzag)
    for cp, (places, views) in enumerate(results, start=1):
        assert sorted(chain(*places)) == list(range(cp * workers.LENGTH)), f"positions for cp {cp}: {places}"
        chunk = workers.LENGTH // 2
        for rank in range(cp):
            assert places[rank][0] == rank * chunk and places[rank][-1] == (2 * cp - rank) * chunk - 1, places
            for owner in range(cp):
                queries, keys, causal = views[rank][owner]
                pairs = {(q, k) for n, q in enumerate(queries) for m, k in enumerate(keys)
                         if not causal or m <= n}
                allowed = {(q, k) for q, position in enumerate(places[rank])
                           for k, earlier in enumerate(places[owner]) if earlier <= position}
                assert pairs == allowed, f"cp {cp}: queries of {rank} see the wrong keys of {owner}"


def test_step06_ring(student):
    for rank, seen in enumerate(student("step06", workers.ring, nproc=3)):
        assert [owner for owner, _ in seen] == [(rank - step) % 3 for step in range(3)]
        for owner, tensor in seen:
            (expected,) = workers.draw(student.seed + owner, (2, 3))
            check(f"process {rank}, the tensor of {owner}", tensor, expected)


def check_attention(student, backward):
    size = 2
    results = student("step06", workers.ring_attention, backward, nproc=size)
    *inputs, grad = workers.attention_inputs(student.seed, size)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    names, expected = ["output"], [attend(*inputs)]
    if backward:
        names = [f"gradient of {name}" for name in "qkv"]
        expected = twin_gradients(lambda *inputs: (attend(*inputs) * grad).sum(), *inputs)
    chunks = torch.arange(size * workers.LENGTH).chunk(2 * size)
    for rank, found in enumerate(results):
        where = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        for name, mine, whole in zip(names, found, expected, strict=True):
            check(f"process {rank}, {name}", mine, whole[:, :, where])


def test_step06_attention(student):
    check_attention(student, backward=False)


def test_step06_attention_backward(student):
    check_attention(student, backward=True)


# Step 7

def test_step07_complete(student, tmp_path):
    (results,) = student("step07", workers.complete, tmp_path)
    steps = workers.saved_steps(student.seed)
    folders = [f"step-{step:08}" for step in steps]
    for keep_last, (found, left) in zip(workers.KEEP_LAST, results):
        assert found == list(zip(steps, folders)), "complete_checkpoints"
        assert left == ["mine", *folders[-keep_last:]], f"what is left with keep_last {keep_last}"


def test_step07_slices(student, whole):
    ((shards, messages),) = student("step07", workers.slices)
    weights = workers.whole_weights(whole, student.seed)
    last_stage = {name: weight for name, weight in weights.items()
                  if "embed" not in name and not any(f"layers.{layer}." in name for layer in range(3))}
    for rank, (found, count) in enumerate(shards):
        assert sorted(found) == sorted(last_stage), "of the last stage"
        for name, weight in last_stage.items():
            dim = 1 if "o_proj" in name or "down_proj" in name else None if "norm" in name else 0
            expected = weight if dim is None else workers.part(weight, dim, rank, 2)
            check(f"process {rank}, {name}", found[name], expected, tolerance=0)
        held = sum(weight.numel() for weight in found.values())
        assert count == held, f"process {rank} read {count} numbers for the {held} that it keeps"
    fits, wrong, missing = messages
    assert fits is None, f"of shapes that fit: {fits}"
    assert wrong.startswith("ValueError") and "model.layers.2.mlp.up_proj.weight" in wrong
    assert missing.startswith("ValueError") and "model.norm.weight" in missing


def trained_twin(whole, seed, *gradient_seeds):
    """The whole model after training steps with these gradients: {name: its tensors}."""
    tp = workers.SimpleNamespace(rank=0, size=1)
    step = workers.SimpleNamespace(**vars(whole), tensor_parallel=workers.SimpleNamespace(
        shard_dim=lambda name: None))
    model, optimizer = workers.create_trainee(step, seed, tp)
    for gradient_seed in gradient_seeds:
        workers.train(step, model, optimizer, gradient_seed, tp)
    return workers.learned(model, optimizer)


def check_learned(results, expected):
    """Each process's shards against the whole tensors. A step counter isn't cut."""
    for rank, found in enumerate(results):
        assert sorted(found) == sorted(expected)
        for name, tensors in expected.items():
            dim = 1 if "o_proj" in name or "down_proj" in name else None if "norm" in name else 0
            for key, tensor in tensors.items():
                mine = tensor if dim is None or key == "step" else workers.part(tensor, dim, rank, 2)
                check(f"process {rank}, {key} of {name}", found[name][key], mine)


def test_step07_state(student, whole, tmp_path):
    results = student("step07", workers.state, tmp_path, nproc=2)
    expected = trained_twin(whole, student.seed, student.seed + 1)
    check_learned(results, expected)
    stored = {name if key == "weight" else f"{key}.{name}": tensor
              for name, tensors in expected.items() for key, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    run = launch.fork(workers.read_whole, tmp_path, shapes, timeout=30)
    if any(run.statuses):
        pytest.fail(f"a single process can't read what two wrote\n{run.output}", pytrace=False)
    for name, tensor in stored.items():
        check(f"{name}, written by two processes and read by one", run.results[0][name], tensor)


def test_step07_save(student, whole, tmp_path):
    results = student("step07", workers.save, tmp_path, nproc=2)
    for there, run, described, error, _ in results:
        assert there == ["step-00000004", "step-00000005"], "with keep_last 2, after three saves"
        assert run == {"step": 4, **workers.SETTINGS}, "run.json"
        assert described["model_type"] == "llama" and described["hidden_size"] == 16, "config.json"
        assert str(error).startswith("OSError") and "nothing is free" in error, f"a save that fails: {error}"
    complete = [path.name for path in tmp_path.glob("step-*") if path.suffix != ".partial"]
    assert sorted(complete) == ["step-00000004", "step-00000005"], "after a save that failed"
    check_learned([result[-1] for result in results],
                  trained_twin(whole, student.seed, student.seed + 3, student.seed + 4))


def test_step07_start(student, whole, tmp_path):
    (((fresh, nothing, newest, unasked, seed, seq_len, larger), streams),) = student(
        "step07", workers.start, tmp_path)
    assert (fresh, nothing, newest) == (0, 0, 11)
    for text, names in ((unasked, "--resume"), (seed, "seed"), (seq_len, "seq_len"), (larger, "layers.5")):
        assert str(text).startswith("ValueError") and names in text, f"{names}: {text}"
    with torch.device("meta"):
        model = whole.model.Llama(whole.config.load_config("tiny", **workers.TINY))
    initial, weights = (dict(whole.model.initial_weights(model, workers.SETTINGS["seed"])),
                        workers.whole_weights(whole, student.seed))
    for what, found, expected in (("a new run", streams[0], initial), ("--load_hf", streams[1], weights)):
        assert sorted(found) == sorted(expected), what
        for name, weight in expected.items():
            check(f"{what}, {name}", found[name], weight)
    shapes = {name: tuple(weight.shape) for name, weight in streams[2].items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in weights.items()}, "before a checkpoint"
