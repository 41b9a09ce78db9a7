"""What test_tasks.py runs in processes of their own, around the functions that students write.

A worker is called with the step's folder and a seed, which gives its inputs. It returns what the functions
made of them, and compares nothing: test_tasks.py does, out of reach of the program that it judges.
"""

import json
import os
import random
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import launch

TIMEOUT = 10  # seconds that a communication may take


def draw(seed, *shapes):
    """Returns a random float64 tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def draw_tokens(seed, *shape, vocab):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def part(tensor, dim, rank, size):
    return tensor.chunk(size, dim)[rank].clone()


def leaf(tensor):
    return tensor.clone().requires_grad_()


def rank_and_size():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# Step 2

BUCKET_SHAPES = (3, 4), (5,), (2, 3)


def bucket(folder, seed):
    parameters = [nn.Parameter(weight) for weight in draw(seed, *BUCKET_SHAPES)]
    slopes = [draw(seed + 1 + n, *BUCKET_SHAPES) for n in range(2)]
    buffer = launch.load(folder).data_parallel.Bucket(parameters).buffer
    results = [buffer.clone()]
    for once in slopes:
        sum((parameter * slope).sum() for parameter, slope in zip(parameters, once)).backward()
    results.append(buffer.clone())
    buffer.fill_(3.0)
    return results, [parameter.grad.clone() for parameter in parameters]


def all_reduce(folder, seed):
    """Three processes, of which the first and the last are the axis."""
    rank, _ = rank_and_size()
    summed, largest, alone = draw(seed + rank, (4,), (4,), (4,))
    axis_type = launch.load(folder).mesh.Axis
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group([0, 2], timeout=timedelta(seconds=TIMEOUT))
    results = [axis_type(0, 1).all_reduce(alone)]
    if rank != 1:
        axis = axis_type(rank // 2, 2, group)
        results.append(axis.all_reduce(summed))
        results.append(summed)
        axis.start_all_reduce(largest, dist.ReduceOp.MAX).wait()
        results.append(largest)
    return results


TOY_BATCHES = 2, 3  # training steps, micro-batches of each process
BUCKET_CAP = 300  # bytes


def toy_model(seed):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    shapes = [parameter.shape for parameter in model.parameters()]
    for parameter, weight in zip(model.parameters(), draw(seed, *shapes)):
        parameter.data.copy_(weight)
    return model


def toy_batches(seed, rank):
    """(training step, micro-batch, batch, features)"""
    return draw(seed + 1 + rank, (*TOY_BATCHES, 4, 5))[0]


def gradient_buckets(folder, seed):
    rank, size = rank_and_size()
    model, batches = toy_model(seed), toy_batches(seed, rank)
    step = launch.load(folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    axis = step.mesh.Axis(rank, size, dist.group.WORLD)
    buckets = step.data_parallel.GradientBuckets(model, axis, TOY_BATCHES[1], BUCKET_CAP / 2**20)
    grads = []
    for micro_batches in batches:
        buckets.zero_grad()
        for micro_batch in micro_batches:
            model(micro_batch).square().sum().backward()
        buckets.wait()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    return grads, [bucket.buffer.nbytes for bucket in buckets.buckets]


# Step 3

WEIGHTS = {  # shape, and the dim along which it is cut
    "model.embed_tokens.weight": ((12, 6), 0), "model.layers.0.self_attn.q_proj.weight": ((6, 6), 0),
    "model.layers.0.self_attn.o_proj.weight": ((6, 6), 1), "model.layers.7.mlp.up_proj.weight": ((9, 6), 0),
    "model.layers.7.mlp.down_proj.weight": ((6, 9), 1), "model.norm.weight": ((6,), None),
    "lm_head.weight": ((12, 6), 0),
}
SHARDS = 3


def weights(seed):
    return dict(zip(WEIGHTS, draw(seed, *(shape for shape, _ in WEIGHTS.values()))))


def shards(folder, seed):
    parallel = launch.load(folder).tensor_parallel
    axes = [SimpleNamespace(rank=rank, size=SHARDS) for rank in range(SHARDS)]
    tokens = draw_tokens(seed, 2, 8, vocab=12)
    return ([dict(parallel.shard(weights(seed).items(), axis)) for axis in axes],
            [list(parallel.local_tokens(tokens, 4, axis)) for axis in axes])


LINEAR_SHAPES = {"x": (2, 5, 8), "first": (6, 8), "second": (12, 8), "grad first": (2, 5, 6),
                 "grad second": (2, 5, 12), "row x": (2, 5, 6), "row": (8, 6), "grad row": (2, 5, 8)}


def linear_inputs(seed):
    return dict(zip(LINEAR_SHAPES, draw(seed, *LINEAR_SHAPES.values())))


def linears(folder, seed):
    """A column-parallel pair of layers, then a row-parallel one. Returns {name: tensor}."""
    rank, size = rank_and_size()
    given = linear_inputs(seed)
    step = launch.load(folder)
    tp = step.mesh.create_mesh({"dp": 1, "tp": size}, "cpu", TIMEOUT).tp
    x = leaf(given["x"])
    first, second = (leaf(part(given[name], 0, rank, size)) for name in ("first", "second"))
    outputs = step.tensor_parallel.ColumnParallel.apply(tp, torch.float64, x, first, second)
    grads = [part(given[f"grad {name}"], -1, rank, size) for name in ("first", "second")]
    torch.autograd.backward(outputs, grads)
    row_x, row = leaf(part(given["row x"], -1, rank, size)), nn.Parameter(part(given["row"], 1, rank, size))
    output = step.tensor_parallel.RowParallelLinear(SimpleNamespace(weight=row), tp)(row_x)
    output.backward(given["grad row"])
    return {"column output": [output.detach() for output in outputs], "column x": x.grad,
            "column weights": [first.grad, second.grad], "row output": output.detach(), "row x": row_x.grad,
            "row weight": row.grad}


VOCAB = 12


def vocabulary_inputs(seed):
    """embedding, its output's gradient, logits, tokens and targets"""
    return (*draw(seed, (VOCAB, 6), (2, 5, 6), (2, 5, VOCAB)),
            draw_tokens(seed, 2, 5, vocab=VOCAB), draw_tokens(seed + 1, 2, 5, vocab=VOCAB))


def vocabulary(folder, seed):
    rank, size = rank_and_size()
    weight, grad, logits, tokens, targets = vocabulary_inputs(seed)
    step = launch.load(folder)
    tp = step.mesh.create_mesh({"dp": 1, "tp": size}, "cpu", TIMEOUT).tp
    mine = nn.Parameter(part(weight, 0, rank, size))
    output = step.tensor_parallel.VocabParallelEmbedding(SimpleNamespace(weight=mine), tp)(tokens)
    output.backward(grad)
    my_logits = leaf(part(logits, -1, rank, size))
    loss = step.tensor_parallel.vocab_parallel_cross_entropy(tp, my_logits, targets)
    (loss / 7).backward()
    return {"embedding": output.detach(), "embedding weight": mine.grad, "loss": loss.detach(),
            "logits": my_logits.grad}


# Steps 4 and 5

SIZES = [(stages, count) for stages in range(1, 7) for count in range(1, 10)]
TINY = {"num_hidden_layers": 5, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}


def splits(folder, seed):
    module = launch.load(folder).pipeline_parallel
    return [[list(part) for part in module.split_layers(stages + count, stages)] for stages, count in SIZES]


def orders(folder, seed, engine):
    """The schedule of each stage, for all SIZES: [action, micro-batch], ..."""
    schedule = launch.load(folder).pipeline_parallel.SCHEDULES[engine]
    return [[[list(action) for action in schedule(stage, stages, count)] for stage in range(stages)]
            for stages, count in SIZES]


def create_model(step, seed, axis=None):
    """The model of a stage, or the whole one."""
    with torch.device("meta"):
        model = step.model.Llama(step.config.load_config("tiny", **TINY))
    if axis:
        step.pipeline_parallel.pipeline_parallel(model, axis)
    step.model.load_weights(model, step.model.initial_weights(model, seed), "cpu", torch.float64)
    return model


def stages(folder, seed):
    """Sends tokens through stages that are made one after the other. Returns (names of each, logits)."""
    x = draw_tokens(seed, 2, 7, vocab=TINY["vocab_size"])
    step, names = launch.load(folder), []
    for rank in range(3):
        model = create_model(step, seed, SimpleNamespace(rank=rank, size=3))
        names.append([name for name, _ in model.named_parameters()])
        x = model(x)
    return names, x.detach()


CHANNEL_SHAPE = 5, 2, 3  # tensors, of (2, 3)


def channel(folder, seed):
    """Tensors to the next stage, then others back. Returns what this stage received."""
    rank, _ = rank_and_size()
    to_next, back = draw(seed, CHANNEL_SHAPE, CHANNEL_SHAPE)
    step = launch.load(folder)
    mesh = step.mesh.create_mesh({"dp": 1, "pp": 2, "tp": 1}, "cpu", TIMEOUT)
    shape, like = CHANNEL_SHAPE[1:], to_next
    activations = step.pipeline_parallel.Channel(mesh.pp, +1, len(to_next), shape, like)
    gradients = step.pipeline_parallel.Channel(mesh.pp_back, -1, len(back), shape, like)
    if rank == 1:
        received = [activations.receive() for _ in to_next]
    for tensor in (to_next, back)[rank]:
        (activations, gradients)[rank].send(tensor.clone())
    if rank == 0:
        received = [gradients.receive() for _ in back]
    activations.wait()
    gradients.wait()
    return torch.stack(received)


def pipeline_batches(seed, count):
    """(micro-batch, inputs or targets, batch, seq)"""
    return draw_tokens(seed, count, 2, 2, 7, vocab=TINY["vocab_size"])


def pipeline(folder, seed, engine, counts):
    """Two stages work off the schedule for each number of micro-batches. Returns [(loss, gradients)]."""
    step = launch.load(folder)
    mesh = step.mesh.create_mesh({"dp": 1, "pp": 2, "tp": 1}, "cpu", TIMEOUT)
    results = []
    for count in counts:
        model = create_model(step, seed, mesh.pp)
        order = step.pipeline_parallel.SCHEDULES[engine](mesh.pp.rank, 2, count)
        loss = step.pipeline_parallel.run_schedule(
            order, model, list(pipeline_batches(seed, count)), 100, torch.autocast("cpu", enabled=False),
            mesh.pp, mesh.pp_back)
        results.append((loss.item(), {name: weight.grad for name, weight in model.named_parameters()}))
    return results


# Step 6

LENGTH = 6  # positions of a process


def zigzag(folder, seed):
    """For cp 1 to 4: each process's positions, and for all pairs of processes (queries, keys, causal)."""
    module, results, every = launch.load(folder).context_parallel, [], list(range(LENGTH))
    for cp in range(1, 5):
        places = [module.zigzag_positions(SimpleNamespace(rank=rank, size=cp), LENGTH, "cpu").tolist()
                  for rank in range(cp)]
        views = [[module.visible(rank, owner, LENGTH) for owner in range(cp)] for rank in range(cp)]
        results.append((places, [
            [(every[queries], every[keys], bool(causal)) for queries, keys, causal in row] for row in views]))
    return results


def ring(folder, seed):
    rank, size = rank_and_size()
    (mine,) = draw(seed + rank, (2, 3))
    step = launch.load(folder)
    cp = step.mesh.create_mesh({"dp": 1, "pp": 1, "cp": size, "tp": 1}, "cpu", TIMEOUT).cp
    return [(owner, tensor.clone()) for owner, tensor in step.context_parallel.ring(cp, mine)]


def attention_inputs(seed, size):
    """q, k, v and the output's gradient, of all positions"""
    return draw(seed, *((2, heads, LENGTH * size, 16) for heads in (4, 2, 2, 4)))


def ring_attention(folder, seed, backward):
    """Returns this process's positions of the output, or those of the gradients of q, k and v."""
    rank, size = rank_and_size()
    *inputs, grad = attention_inputs(seed, size)
    step = launch.load(folder)
    cp = step.mesh.create_mesh({"dp": 1, "pp": 1, "cp": size, "tp": 1}, "cpu", TIMEOUT).cp
    where = step.context_parallel.zigzag_positions(cp, LENGTH, "cpu")
    inputs = [leaf(x[:, :, where]) for x in inputs]
    output = step.context_parallel.ring_attention(cp, *inputs)
    if not backward:
        return [output.detach()]
    return list(torch.autograd.grad(output, inputs, grad[:, :, where]))


# Step 7

KEEP_LAST = 0, 1, 3, 9
SETTINGS = {"global_batch_size": 8, "seq_len": 16, "seed": 5}


def saved_steps(seed):
    return sorted(random.Random(seed).sample(range(1, 10**6), 4))


def arguments(scratch, **settings):
    settings = {"keep_last": 0, "resume": False, "load_hf": None, **SETTINGS, **settings}
    return SimpleNamespace(save_dir=str(scratch), timeout=TIMEOUT, **settings)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def alone(step):
    """The mesh of a single process."""
    return step.mesh.create_mesh({"dp": 1, "pp": 1, "cp": 1, "tp": 1}, "cpu", TIMEOUT)


def complete(folder, seed, scratch):
    """What counts as a checkpoint, and what is left, for each KEEP_LAST: [((step, name), ...), names]."""
    step, results = launch.load(folder), []
    for keep_last in KEEP_LAST:
        place = Path(scratch, str(keep_last))
        for name in [*(f"step-{number:08}" for number in saved_steps(seed)), "step-99999999.partial", "mine"]:
            (place / name / "inside").mkdir(parents=True)
        found = step.checkpoint.complete_checkpoints(str(place))
        checkpoints = step.checkpoint.Checkpoints(arguments(place, keep_last=keep_last), None, alone(step))
        checkpoints.remove_old()
        results.append(([(number, path.name) for number, path in found.items()], names(place)))
    return results


class File:
    """Stands for an open safetensors file, and counts the numbers that are read."""

    def __init__(self, weights):
        self.weights, self.count = weights, 0

    def get_slice(self, name):
        return Slice(self, self.weights[name])

    def get_tensor(self, name):
        return self.get_slice(name)[:]


class Slice:
    def __init__(self, file, weight):
        self.file, self.weight = file, weight

    def get_shape(self):
        return list(self.weight.shape)

    def __getitem__(self, place):
        self.file.count += self.weight[place].numel()
        return self.weight[place]


def whole_weights(step, seed, **shape):
    """{name: float64 tensor} of a whole model."""
    with torch.device("meta"):
        model = step.model.Llama(step.config.load_config("tiny", **{**TINY, **shape}))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return dict(zip(shapes, draw(seed, *shapes.values())))


def slices(folder, seed):
    """Two shards of the last of two stages: ({name: weight}, numbers read). And what is said of shapes."""
    step, results = launch.load(folder), []
    config = step.config.load_config("tiny", **TINY)
    for rank in range(2):
        file = File(whole_weights(step, seed))
        step.huggingface.open_weights = lambda folder, file=file: dict.fromkeys(file.weights, file)
        with torch.device("meta"):
            model = step.model.Llama(config)
        step.pipeline_parallel.pipeline_parallel(model, SimpleNamespace(rank=1, size=2))
        stream = step.huggingface.hf_weights(model, "folder", SimpleNamespace(rank=rank, size=2))
        results.append(({name: weight.clone() for name, weight in stream}, file.count))
    shapes = {name: list(weight.shape) for name, weight in whole_weights(step, seed).items()}
    wrong = {**shapes, "model.layers.2.mlp.up_proj.weight": [24, 17]}
    missing = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    return results, [message(step.huggingface.check_shapes, config, "folder", which)
                     for which in (shapes, wrong, missing)]


def message(function, *args):
    """What the function returns, or the ValueError or OSError that it raises, as text."""
    try:
        return function(*args)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def cut(step, name, tensor, tp):
    dim = step.tensor_parallel.shard_dim(name)
    return tensor.clone() if dim is None else part(tensor, dim, tp.rank, tp.size)


def create_trainee(step, seed, tp):
    """A model's shards and their optimizer."""
    with torch.device("meta"):
        model = step.model.Llama(step.config.load_config("tiny", **TINY))
    weights = ((name, cut(step, name, weight, tp)) for name, weight in whole_weights(step, seed).items())
    step.model.load_weights(model, weights, "cpu", torch.float64)
    return model, step.train.create_optimizer(model, SimpleNamespace(weight_decay=0.1, device="cpu"))


def train(step, model, optimizer, seed, tp):
    """One training step, with gradients that are drawn."""
    grads = whole_weights(step, seed)
    for name, parameter in model.named_parameters():
        parameter.grad = cut(step, name, grads[name], tp)
    optimizer.step()


def learned(model, optimizer):
    """{name: weight, and AdamW's tensors by their keys}"""
    return {name: {"weight": parameter.detach().clone(), **optimizer.state[parameter]}
            for name, parameter in model.named_parameters()}


def state(folder, seed, scratch):
    """Two shards write their training_state. Returns what one that knows nothing has after reading it."""
    import torch.distributed.checkpoint as dcp
    step = launch.load(folder)
    tp = step.mesh.create_mesh({"dp": 1, "pp": 1, "cp": 1, "tp": 2}, "cpu", TIMEOUT).tp
    model, optimizer = create_trainee(step, seed, tp)
    train(step, model, optimizer, seed + 1, tp)
    dcp.save(step.checkpoint.training_state(model, optimizer, tp), checkpoint_id=scratch)
    model, optimizer = create_trainee(step, seed + 2, tp)
    dcp.load(step.checkpoint.training_state(model, optimizer, tp), checkpoint_id=scratch)
    return learned(model, optimizer)


def read_whole(scratch, shapes):
    """Reads tensors of a checkpoint by their names, in a single process."""
    import torch.distributed.checkpoint as dcp
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    dcp.load(tensors, checkpoint_id=scratch)
    return tensors


def save(folder, seed, scratch):
    """Two shards save after training steps 3, 4 and 5; in a fourth save one of them can't write.

    Returns names of what is there, run.json, config.json, the error, and what is learned from checkpoint 4.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    step = launch.load(folder)
    mesh = step.mesh.create_mesh({"dp": 1, "pp": 1, "cp": 1, "tp": 2}, "cpu", TIMEOUT)
    config = step.config.load_config("tiny", **TINY)
    checkpoints = step.checkpoint.Checkpoints(arguments(scratch, keep_last=2), config, mesh)
    model, optimizer = create_trainee(step, seed, mesh.tp)
    for number in (3, 4, 5):
        train(step, model, optimizer, seed + number, mesh.tp)
        checkpoints.save(number, model, optimizer)
    mesh.world.all_reduce(torch.zeros(1))  # all are here before anyone looks
    there = names(scratch)
    run, described = (json.loads(Path(scratch, "step-00000004", f"{name}.json").read_text())
                      for name in ("run", "config"))

    def no_space(*args):
        raise OSError("nothing is free")

    if mesh.tp.rank == 1:
        FileSystemWriter.write_data = no_space
    error = message(checkpoints.save, 6, model, optimizer)
    model, optimizer = create_trainee(step, seed + 1, mesh.tp)
    checkpoints.load(4, model, optimizer)
    return there, run, described, error, learned(model, optimizer)


def start(folder, seed, scratch):
    """Where runs go on with and without a checkpoint, and with which weights they start."""
    step = launch.load(folder)
    mesh, config = alone(step), step.config.load_config("tiny", **TINY)
    find = step.checkpoint.newest_checkpoint
    results = [message(find, arguments(scratch, resume=resume), config) for resume in (False, True)]
    model, optimizer = create_trainee(step, seed, mesh.tp)
    for number in (4, 11):
        step.checkpoint.Checkpoints(arguments(scratch), config, mesh).save(number, model, optimizer)
    for other in ({"resume": True}, {}, {"resume": True, "seed": 6}, {"resume": True, "seq_len": 32}):
        results.append(message(find, arguments(scratch, **other), config))
    larger = step.config.load_config("tiny", **{**TINY, "num_hidden_layers": 6})
    results.append(message(find, arguments(scratch, resume=True), larger))
    file = File(whole_weights(step, seed))
    step.huggingface.open_weights = lambda folder: dict.fromkeys(file.weights, file)
    streams = []
    for settings, number in (({}, 0), ({"load_hf": "folder"}, 0), ({"load_hf": "folder"}, 4)):
        with torch.device("meta"):
            model = step.model.Llama(config)
        args = arguments(scratch, **settings)
        streams.append(dict(step.checkpoint.starting_weights(model, args, number, mesh.tp)))
    return results, streams
