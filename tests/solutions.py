"""Solutions of the notebooks' exercises, and wrong answers that the checks must not accept.

{notebook: {exercise: {True: a solution, False: a wrong answer}}}. The last exercise of each is open-ended.
"""

SOLUTIONS = {
    "00_processes_and_collectives": {
        1: {True: """
def predict(operation, before):
    sums = [sum(numbers) for numbers in zip(*before)]
    return {"broadcast": [before[0]] * len(before),
            "all-gather": [[number for numbers in before for number in numbers]] * len(before),
            "all-reduce": [sums] * len(before),
            "reduce-scatter": [[number] for number in sums]}[operation]
""", False: """
def predict(operation, before):
    sums = [sum(numbers) for numbers in zip(*before)]
    return {"broadcast": [before[0]] * len(before),
            "all-gather": [[number for numbers in before for number in numbers]] * len(before),
            "all-reduce": [sums] * len(before),
            "reduce-scatter": [sums] * len(before)}[operation]
"""},
        2: {True: """
def groups(sizes, axis):
    names = list(sizes)
    stride = 1
    for name in names[names.index(axis) + 1:]:
        stride *= sizes[name]
    world = 1
    for size in sizes.values():
        world *= size
    return [[first + i * stride for i in range(sizes[axis])]
            for first in range(world) if first // stride % sizes[axis] == 0]
""", False: """
def groups(sizes, axis):
    world = 1
    for size in sizes.values():
        world *= size
    return [list(range(first, first + sizes[axis])) for first in range(0, world, sizes[axis])]
"""},
        3: {True: """
def my_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    passing = tensor.clone()
    for _ in range(size - 1):
        coming = torch.empty_like(tensor)
        works = dist.isend(passing, (rank + 1) % size), dist.irecv(coming, (rank - 1) % size)
        for work in works:
            work.wait()
        tensor += coming
        passing = coming
""", False: """
def my_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(size - 1):
        coming = torch.empty_like(tensor)
        works = dist.isend(tensor, (rank + 1) % size), dist.irecv(coming, (rank - 1) % size)
        for work in works:
            work.wait()
        tensor += coming
"""},
        4: {True: '''
def repaired():
    return """
loss, memory = torch.tensor(rank + 1.0), torch.tensor(100 + 10 * rank)
dist.all_reduce(loss)
loss /= size
dist.all_reduce(memory, dist.ReduceOp.MAX)
if rank == 0:
    print(f"mean loss {loss.item()}, memory {memory.item()}")
"""
''', False: """
def repaired():
    return HANGING.replace("dist.all_reduce(loss / size)", "dist.all_reduce(loss)")
"""},
        5: {True: """
def doubling_all_reduce(tensor):
    rank, size, distance = dist.get_rank(), dist.get_world_size(), 1
    while distance < size:
        other, coming = rank ^ distance, torch.empty_like(tensor)
        works = dist.isend(tensor, other), dist.irecv(coming, other)
        for work in works:
            work.wait()
        tensor += coming
        distance *= 2
""", False: """
def doubling_all_reduce(tensor):
    rank, size, distance = dist.get_rank(), dist.get_world_size(), 1
    other, coming = rank ^ distance, torch.empty_like(tensor)
    works = dist.isend(tensor, other), dist.irecv(coming, other)
    for work in works:
        work.wait()
    tensor += coming
"""},
    },
    "01_single_gpu": {
        1: {True: """
def training_days(config, num_tokens, seq_len, num_devices, peak_flops, mfu):
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_len
    flops = num_tokens * (6 * num_parameters(config) + attention)
    return flops / (num_devices * peak_flops * mfu) / 86_400
""", False: """
def training_days(config, num_tokens, seq_len, num_devices, peak_flops, mfu):
    return 6 * num_parameters(config) * num_tokens / (num_devices * peak_flops * mfu) / 86_400
"""},
        2: {True: """
def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))
    return torch.cat([turned.real, turned.imag], dim=-1)
""", False: """
def rotate(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.complex(first, second) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))
    return torch.stack([turned.real, turned.imag], dim=-1).flatten(-2)
"""},
        3: {True: """
def forward_backward(model, micro_batches, num_tokens, autocast):
    total = 0.0
    for inputs, targets in micro_batches:
        with autocast:
            loss = model.cross_entropy(model(inputs), targets) / num_tokens
        loss.backward()
        total += loss.detach()
    return total
""", False: """
def forward_backward(model, micro_batches, num_tokens, autocast):
    total = 0.0
    for inputs, targets in micro_batches:
        with autocast:
            loss = model.cross_entropy(model(inputs), targets) / targets.numel()
        loss.backward()
        total += loss.detach() / len(micro_batches)
    return total
"""},
        4: {True: """
def culprit():
    return "step01-no-clipping"
""", False: """
def culprit():
    return "step01-weight-decay-on-norms-too"
"""},
    },
    "02_data_parallel": {
        1: {True: """
def bytes_sent(num_parameters, dp):
    return 2 * (dp - 1) * 4 * num_parameters // dp
""", False: """
def bytes_sent(num_parameters, dp):
    return 2 * 4 * num_parameters // dp
"""},
        2: {True: """
def deal(sizes, capacity):
    buckets = []
    for place in reversed(range(len(sizes))):
        if not buckets or sum(sizes[i] for i in buckets[-1]) + sizes[place] > capacity:
            buckets.append([])
        buckets[-1].append(place)
    return buckets
""", False: """
def deal(sizes, capacity):
    buckets = []
    for place in reversed(range(len(sizes))):
        if not buckets or sum(sizes[i] for i in buckets[-1]) >= capacity:
            buckets.append([])
        buckets[-1].append(place)
    return buckets
"""},
        3: {True: """
def count(self, bucket, parameter):
    bucket.missing -= 1
    if bucket.missing == 0:
        self.reducing.append(self.axis.start_all_reduce(bucket.buffer))
""", False: """
def count(self, bucket, parameter):
    bucket.missing -= 1
    if bucket.missing % len(bucket.parameters) == 0:
        self.reducing.append(self.axis.start_all_reduce(bucket.buffer))
"""},
        4: {True: """
def culprit():
    return "step02-only-the-first-bucket-is-reduced"
""", False: """
def culprit():
    return "step02-no-all-reduce"
"""},
    },
    "03_tensor_parallel": {
        1: {True: """
def bytes_sent(config, tokens, tp):
    numbers = 2 * (2 * config.num_hidden_layers + 1) * tokens * config.hidden_size
    return 2 * (tp - 1) * 4 * numbers // tp
""", False: """
def bytes_sent(config, tokens, tp):
    numbers = 4 * config.num_hidden_layers * tokens * config.hidden_size
    return 2 * (tp - 1) * 4 * numbers // tp
"""},
        2: {True: """
def parameters_held(config, tp):
    hidden, layers = config.hidden_size, config.num_hidden_layers
    kv_size = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * config.intermediate_size
    vocab = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return (layers * layer + vocab) // tp + (2 * layers + 1) * hidden
""", False: """
def parameters_held(config, tp):
    hidden, layers = config.hidden_size, config.num_hidden_layers
    kv_size = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * config.intermediate_size
    return (layers * (layer + 2 * hidden) + 2 * config.vocab_size * hidden + hidden) // tp
"""},
        3: {True: """
def backward(ctx, *grads):
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights)).to(ctx.input_dtype)
    ctx.tp.all_reduce(grad_x)
    return None, None, grad_x, *(grad.flatten(0, 1).T @ x.flatten(0, 1) for grad in grads)
""", False: """
def backward(ctx, *grads):
    x, *weights = ctx.saved_tensors
    grad_x = sum(grad @ weight for grad, weight in zip(grads, weights)).to(ctx.input_dtype)
    return None, None, grad_x, *(grad.flatten(0, 1).T @ x.flatten(0, 1) for grad in grads)
"""},
        4: {True: """
def culprit():
    return "step03-the-norm-is-that-of-one-process's-shards"
""", False: """
def culprit():
    return "step03-weights-that-all-have-whole-are-counted-tp-times-in-the-norm"
"""},
    },
    "04_pipeline_afab": {
        1: {True: """
def micro_batches_needed(num_stages, share):
    least = (num_stages - 1) * (1 - share) / share
    return max(1, int(-(-least // 1)))
""", False: """
def micro_batches_needed(num_stages, share):
    return max(1, int((num_stages - 1) / share))
"""},
        2: {True: """
def training_step_time(forward_times, num_micro_batches):
    return 3 * (sum(forward_times) + (num_micro_batches - 1) * max(forward_times))
""", False: """
def training_step_time(forward_times, num_micro_batches):
    return 3 * (num_micro_batches + len(forward_times) - 1) * max(forward_times)
"""},
        3: {True: """
def sum_tied_gradient(model, pp, pp_back):
    last = pp.size - 1
    if model.config.tie_word_embeddings and last > 0 and pp.rank in (0, last):
        grad = model.model.embed_tokens.weight.grad
        theirs = torch.empty_like(grad)
        if pp.rank == 0:
            works = pp.start_send(grad, last), pp_back.start_receive(theirs, last)
        else:
            works = pp_back.start_send(grad, 0), pp.start_receive(theirs, 0)
        for work in works:
            work.wait()
        grad += theirs
""", False: """
def sum_tied_gradient(model, pp, pp_back):
    last = pp.size - 1
    if model.config.tie_word_embeddings and last > 0 and pp.rank in (0, last):
        grad = model.model.embed_tokens.weight.grad
        if pp.rank == last:
            pp_back.start_send(grad, 0).wait()
        else:
            theirs = torch.empty_like(grad)
            pp_back.start_receive(theirs, last).wait()
            grad += theirs
"""},
        4: {True: """
def culprit():
    return "step04-every-stage-clips-by-its-own-norm"
""", False: """
def culprit():
    return "step04-gradients-go-to-the-wrong-micro-batch"
"""},
    },
    "05_pipeline_1f1b": {
        1: {True: """
def activation_bytes(engine, stage, num_stages, num_micro_batches, num_layers, bytes_per_layer):
    limit = num_micro_batches if engine == "afab" else num_stages - stage
    return min(limit, num_micro_batches) * num_layers // num_stages * bytes_per_layer
""", False: """
def activation_bytes(engine, stage, num_stages, num_micro_batches, num_layers, bytes_per_layer):
    limit = num_micro_batches if engine == "afab" else num_stages
    return min(limit, num_micro_batches) * num_layers // num_stages * bytes_per_layer
"""},
        2: {True: """
def one_forward_one_backward(stage, num_stages, num_micro_batches):
    order, begun = [], 0
    for i in range(num_micro_batches):
        while begun < min(num_micro_batches, i + num_stages - stage):
            order.append(("forward", begun))
            begun += 1
        order.append(("backward", i))
    return order
""", False: """
def one_forward_one_backward(stage, num_stages, num_micro_batches):
    order, begun = [], 0
    for i in range(num_micro_batches):
        while begun < min(num_micro_batches, i + num_stages):
            order.append(("forward", begun))
            begun += 1
        order.append(("backward", i))
    return order
"""},
        3: {True: """
def joined_transfers(stage, num_stages, num_micro_batches):
    groups = []
    for (transfer,) in transfers(one_f_one_b, stage, num_stages, num_micro_batches):
        last = groups[-1][-1] if groups else ("", "", None)
        if last[0] == "send" and transfer[0] == "receive" and last[2] == transfer[2]:
            groups[-1].append(transfer)
        else:
            groups.append([transfer])
    return groups
""", False: """
def joined_transfers(stage, num_stages, num_micro_batches):
    return transfers(one_f_one_b, stage, num_stages, num_micro_batches)
"""},
        4: {True: """
def zero_bubble(stage, num_stages, num_micro_batches):
    order, late = [], 0
    for action, i in one_f_one_b(stage, num_stages, num_micro_batches):
        if action == "forward":
            order.append((action, i))
        else:
            order.append(("input-grad", i))
            if i >= stage:  # as late as the number in flight allows
                order.append(("weight-grad", late))
                late += 1
    return order + [("weight-grad", i) for i in range(late, num_micro_batches)]
""", False: """
def zero_bubble(stage, num_stages, num_micro_batches):
    return halves_together(stage, num_stages, num_micro_batches)
"""},
    },
    "06_context_parallel": {
        1: {True: """
def bytes_sent(config, sequences, seq_len, cp):
    piece = 2 * sequences * config.num_key_value_heads * seq_len // cp * config.head_dim
    return 4 * config.num_hidden_layers * (3 * cp - 2) * piece if cp > 1 else 0
""", False: """
def bytes_sent(config, sequences, seq_len, cp):
    piece = 2 * sequences * config.num_key_value_heads * seq_len // cp * config.head_dim
    return 4 * config.num_hidden_layers * 3 * (cp - 1) * piece
"""},
        2: {True: """
def positions_needed(config, flops, bandwidth):
    keys_per_head = 2 * config.num_key_value_heads / config.num_attention_heads
    return int(-(-keys_per_head * flops // bandwidth))
""", False: """
def positions_needed(config, flops, bandwidth):
    return int(-(-config.num_key_value_heads * flops // (config.num_attention_heads * bandwidth)))
"""},
        3: {True: """
def striped_positions(cp, length, device):
    return torch.arange(length, device=device) * cp.size + cp.rank


def striped_visible(rank, owner, length):
    if owner <= rank:
        return slice(0, length), slice(0, length), True
    return slice(1, length), slice(0, length - 1), True
""", False: """
def striped_positions(cp, length, device):
    return torch.arange(length, device=device) * cp.size + cp.rank


def striped_visible(rank, owner, length):
    return slice(0, length), slice(0, length), True
"""},
        4: {True: """
def culprit():
    return "step06-gradients-of-others'-keys-and-values-are-dropped"
""", False: """
def culprit():
    return "step06-gradients-are-not-summed-over-cp"
"""},
    },
    "07_4d": {
        1: {True: """
def place(rank, sizes):
    where = {}
    for name, size in reversed(sizes.items()):
        where[name], rank = rank % size, rank // size
    return {name: where[name] for name in sizes}
""", False: """
def place(rank, sizes):
    where = {}
    for name, size in sizes.items():
        where[name], rank = rank % size, rank // size
    return where
"""},
        2: {True: """
def same_weights(rank, sizes):
    dp, pp, cp, tp = sizes.values()
    mine = rank // (cp * tp) % pp, rank % tp
    return [other for other in range(dp * pp * cp * tp) if (other // (cp * tp) % pp, other % tp) == mine]
""", False: """
def same_weights(rank, sizes):
    dp, pp, cp, tp = sizes.values()
    return list(range(rank % (pp * cp * tp), dp * pp * cp * tp, pp * cp * tp))
"""},
        3: {True: """
def layout():
    return "--dp 2 --pp 2 --cp 2 --tp 8 --grad_acc_steps 3"
""", False: """
def layout():
    return "--dp 4 --pp 4 --cp 1 --tp 4 --grad_acc_steps 4"
"""},
        4: {True: """
def hf_weights(model, folder, tp):
    files = open_weights(folder)
    for name, parameter in model.named_parameters():
        where = [slice(None)] * parameter.dim()
        if shard_dim(name) is not None:
            size = parameter.size(shard_dim(name)) // tp.size
            where[shard_dim(name)] = slice(tp.rank * size, (tp.rank + 1) * size)
        yield name, files[name].get_slice(name)[tuple(where)]
""", False: """
def hf_weights(model, folder, tp):
    files = open_weights(folder)
    for name, parameter in model.named_parameters():
        weight = files[name].get_slice(name)[:]
        yield name, weight if shard_dim(name) is None else weight.chunk(tp.size, shard_dim(name))[tp.rank]
"""},
    },
}
