"""Mistakes that people make with each kind of parallelism, as small edits to a copy of a step.

Each says which layout shows it and what the shared test's diagnosis has to be. test_mistakes.py plants them
one at a time; exercises and notebooks may do so too:

    folder = plant(MISTAKES["step02-no-all-reduce"], scratch)   # a broken copy of step 2
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import launch
from diagnose import ENDED, FACTOR, FIRST_LOSS, PART, UPDATE, WEIGHTS
from same_run import Layout, step_folder


@dataclass(frozen=True)
class Mistake:
    name: str
    file: str
    old: str  # occurs in the file exactly once
    new: str
    kind: str  # of the diagnosis
    mentions: str = ""  # words that the diagnosis has to contain
    layout: Layout = None  # where it shows, if not where all of this step's do
    also: tuple = ()  # kinds that it may show as, too: a bucket changes while another thread reduces it


def plant(mistake, scratch):
    """Copies the mistake's step into this folder and makes the mistake there. Returns the copy."""
    step = step_folder(launch.ROOT, mistake.layout.step)
    copy = Path(scratch, step.name)
    shutil.copytree(step, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / mistake.file).read_text()
    count = text.count(mistake.old)
    assert count == 1, f"{mistake.name}: the old text is {count} times in {mistake.file}, not once"
    (copy / mistake.file).write_text(text.replace(mistake.old, mistake.new))
    return copy


STEP01 = Layout("step01"), [
    Mistake(
        "the loss is divided by the number of micro-batches again", "train.py",
        "model.cross_entropy(model(inputs), targets) / num_tokens\n",
        "model.cross_entropy(model(inputs), targets) / num_tokens / len(micro_batches)\n",
        FIRST_LOSS, "number of micro-batches"),
    Mistake(  # what a well-known framework's pipeline step does
        "only the printed loss is divided by the number of micro-batches", "train.py",
        "            loss.backward()\n",
        "            (loss * len(micro_batches)).backward()\n",
        FACTOR, "number of micro-batches"),
    Mistake(
        "only the last micro-batch counts", "train.py",
        "            loss.backward()\n",
        "            model.zero_grad()\n"
        "            loss.backward()\n",
        PART),
    Mistake(
        "gradients of the training step before are kept", "train.py",
        "        optimizer.zero_grad()\n",
        "",
        UPDATE, "training step 2"),
    Mistake(
        "no clipping", "train.py",
        "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)\n",
        "",
        UPDATE),
    Mistake(
        "weight decay on norms too", "train.py",
        '{"params": vectors, "weight_decay": 0.0}',
        '{"params": vectors, "weight_decay": args.weight_decay}',
        UPDATE),
    Mistake(
        "the last update is left out", "train.py",
        "        optimizer.step()\n",
        "        if step < args.total_train_steps:\n"
        "            optimizer.step()\n",
        WEIGHTS),
    Mistake(
        "targets are not shifted", "data.py",
        "return rows[:, :-1], rows[:, 1:]",
        "return rows[:, :-1], rows[:, :-1]",
        FIRST_LOSS),
]

STEP02 = Layout("step02", dp=2, mbs=2), [
    Mistake(
        "no all-reduce", "data_parallel.py",
        "                self.reducing.append(self.axis.start_all_reduce(bucket.buffer))\n",
        "                pass\n",
        PART),
    Mistake(
        "gradients are divided by dp again", "data_parallel.py",
        "            reducing.wait()\n",
        "            reducing.wait()\n"
        "        for bucket in self.buckets:\n"
        "            bucket.buffer /= self.axis.size\n",
        FACTOR, "dp"),
    Mistake(
        "nobody divides by dp", "train.py",
        "    num_tokens = args.global_batch_size * args.seq_len\n",
        "    num_tokens = args.global_batch_size * args.seq_len // dp.size\n",
        FIRST_LOSS, "dp"),
    Mistake(
        "reduced after the first micro-batch only", "data_parallel.py",
        "bucket.missing = len(bucket.parameters) * self.num_micro_batches\n",
        "bucket.missing = len(bucket.parameters)\n",
        PART, also=(UPDATE,)),
    Mistake(
        "reduced one micro-batch early", "data_parallel.py",
        "bucket.missing = len(bucket.parameters) * self.num_micro_batches\n",
        "bucket.missing = len(bucket.parameters) * (self.num_micro_batches - 1)\n",
        PART, also=(UPDATE,)),
    Mistake(
        "reduced after every micro-batch", "data_parallel.py",
        "        if bucket.missing == 0:\n",
        "        if bucket.missing % len(bucket.parameters) == 0:\n",
        PART, also=(UPDATE,)),
    Mistake(
        "only the first bucket is reduced", "data_parallel.py",
        "        if bucket.missing == 0:\n",
        "        if bucket.missing == 0 and not self.reducing:\n",
        PART),
    Mistake(
        "weights are reduced instead of gradients", "data_parallel.py",
        "                self.reducing.append(self.axis.start_all_reduce(bucket.buffer))\n",
        "                for parameter in bucket.parameters:\n"
        "                    self.reducing.append(self.axis.start_all_reduce(parameter.detach()))\n",
        PART),
    Mistake(
        "every process trains on the same rows", "train.py",
        " + dp.rank * args.global_batch_size // dp.size\n",
        "\n",
        FIRST_LOSS),
    Mistake(
        "weights are seeded by rank", "train.py",
        "initial_weights(model, args.seed)",
        "initial_weights(model, args.seed + dp.rank)",
        FIRST_LOSS),
    Mistake(
        "the loss is one process's", "train.py",
        "dp.all_reduce(forward_backward(model, micro_batches, num_tokens, autocast))",
        "forward_backward(model, micro_batches, num_tokens, autocast)",
        FIRST_LOSS, "only the loss that is printed is wrong"),
    Mistake(
        "the learning rate depends on the rank", "train.py",
        "lr = learning_rate(step, args)",
        "lr = learning_rate(step, args) * (1 + dp.rank)",
        UPDATE),
    Mistake(
        "one process leaves out an all-reduce", "data_parallel.py",
        "        if bucket.missing == 0:\n",
        "        if bucket.missing == 0 and not (self.axis.rank == 1 and bucket is self.buckets[-1]):\n",
        ENDED, "training step", layout=Layout("step02", dp=2, mbs=2, flags="--timeout 3")),
]

STEP03 = Layout("step03", tp=2), [
    Mistake(
        "shards are clones", "tensor_parallel.py",
        "weight.chunk(tp.size, dim)[tp.rank].clone()",
        "weight.chunk(tp.size, dim)[0].clone()",
        FIRST_LOSS),
    Mistake(
        "no all-reduce forward (g)", "tensor_parallel.py",
        "        return tp.all_reduce(x)\n",
        "        return x\n",
        FIRST_LOSS),
    Mistake(
        "no all-reduce backward (f)", "tensor_parallel.py",
        "        summing = ctx.tp.start_all_reduce(grad_x)\n",
        "        summing = ctx.tp.start_all_reduce(grad_x.clone())  # of a copy that nobody uses\n",
        PART),
    Mistake(
        "no all-reduce behind the head's backward", "tensor_parallel.py",
        "    model.project = partial(column_parallel, tp)\n",
        "",
        PART),
    Mistake(
        "g sums backward too", "tensor_parallel.py",
        "        ctx.mark_dirty(x)\n"
        "        return tp.all_reduce(x)\n"
        "\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        return None, grad\n",
        "        ctx.mark_dirty(x)\n"
        "        ctx.tp = tp\n"
        "        return tp.all_reduce(x)\n"
        "\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        return None, ctx.tp.all_reduce(grad.clone(memory_format=torch.contiguous_format))\n",
        PART),
    Mistake(
        "weights that all have whole are counted tp times in the norm", "train.py",
        "\n               if shard_dim(name) is not None or tp.rank == 0]\n",
        "]\n",
        PART),
    Mistake(
        "a tied weight is counted twice in the norm", "train.py",
        "model.named_parameters()\n",
        "model.named_parameters(remove_duplicate=False)\n",
        PART, layout=Layout("step03", tp=2, tied=True)),
    Mistake(
        "the norm is that of one process's shards", "train.py",
        "grad_norm = tp.all_reduce(norms.square().sum()).sqrt()",
        "grad_norm = norms.square().sum().sqrt()",
        PART),
    Mistake(
        "the vocabulary's shards begin one token late", "tensor_parallel.py",
        "    rows = tokens - tp.rank * size\n",
        "    rows = tokens - tp.rank * (size + 1)\n",
        FIRST_LOSS, layout=Layout("step03", tp=3)),
    Mistake(
        "the loss is of the own logits' log-sum-exp", "tensor_parallel.py",
        "parts[:, 0].logsumexp(0)",
        "parts[tp.rank, 0]",
        FIRST_LOSS),
    Mistake(
        "every process subtracts 1 at the target", "tensor_parallel.py",
        "-mine[:, None].to(grad_logits.dtype)",
        "-torch.ones_like(mine[:, None], dtype=grad_logits.dtype)",
        PART),
    Mistake(
        "processes that share matrices train on different rows", "train.py",
        "dp.rank * args.global_batch_size // dp.size",
        "world.rank * args.global_batch_size // world.size",
        FIRST_LOSS, layout=Layout("step03", tp=3)),  # with tp 2 the text's tokens are all in the first shard
    Mistake(
        "replicas are taken for shards", "train.py",
        'create_mesh({"dp": args.dp_size, "tp": args.tp_size}, ',
        'create_mesh({"tp": args.tp_size, "dp": args.dp_size}, ',
        WEIGHTS, layout=Layout("step03", dp=2, tp=2, mbs=2)),
    Mistake(
        "a matrix is cut along the wrong dim", "tensor_parallel.py",
        '"o_proj": 1,',
        '"o_proj": 0,',
        ENDED, "shapes"),
]

STEP04 = Layout("step04", pp=2), [
    Mistake(  # what a well-known framework does
        "only the printed loss is divided by the number of micro-batches", "pipeline_parallel.py",
        "grad = None if last else gradients.receive()",
        "grad = like.new_tensor(len(micro_batches)) if last else gradients.receive()",
        FACTOR, "number of micro-batches"),
    Mistake(
        "each micro-batch's loss is a mean of its own", "pipeline_parallel.py",
        "model.cross_entropy(output, micro_batches[i][1]) / num_tokens",
        "model.cross_entropy(output, micro_batches[i][1]) / micro_batches[i][1].numel()",
        FIRST_LOSS, "number of micro-batches"),
    Mistake(
        "only the last micro-batch's loss is printed", "pipeline_parallel.py",
        "                total += output.detach()\n",
        "                total = output.detach()\n",
        FIRST_LOSS, "only the loss that is printed is wrong"),
    Mistake(
        "the loss stays on the last stage", "train.py",
        "pp.all_reduce(dp.all_reduce(loss))",
        "dp.all_reduce(loss)",
        FIRST_LOSS, "only the loss that is printed is wrong"),
    Mistake(
        "gradients go to the wrong micro-batch", "pipeline_parallel.py",
        '[("backward", i) for i in order]',
        '[("backward", i) for i in (order if stage else reversed(order))]',
        PART),
    Mistake(
        "stages are twins", "pipeline_parallel.py",
        "{str(i): model.model.layers[str(i)] for i in mine}",
        "{str(n): model.model.layers[str(i)] for n, i in enumerate(mine)}",
        FIRST_LOSS),
    Mistake(
        "remainder layers are dropped", "pipeline_parallel.py",
        "size * stage + min(stage, num_longer)",
        "size * stage",
        FIRST_LOSS),
    Mistake(
        "every stage clips by its own norm", "train.py",
        "pp.all_reduce(tp.all_reduce(norms.square().sum())).sqrt()",
        "tp.all_reduce(norms.square().sum()).sqrt()",
        PART),
    Mistake(
        "the gradients of a tied weight are not added up", "train.py",
        "        sum_tied_gradient(model, pp, mesh.pp_back)\n",
        "",
        PART, layout=Layout("step04", pp=2, tied=True)),
    Mistake(
        "only the first stage adds up the gradients of a tied weight", "pipeline_parallel.py",
        "        grad += theirs\n",
        "        if pp.rank == 0:\n"
        "            grad += theirs\n",
        UPDATE, layout=Layout("step04", pp=2, tied=True)),
    Mistake(
        "both stages count a tied weight in the norm", "train.py",
        '\n               and ("embed_tokens" not in name or pp.rank == 0)]\n',
        "]\n",
        PART, layout=Layout("step04", pp=2, tied=True)),
    Mistake(
        "reduced before the last backward", "data_parallel.py",
        "        if bucket.missing == 0:\n",
        "        if bucket.missing == len(bucket.parameters):\n"
        "            self.axis.all_reduce(bucket.buffer)\n"  # at once, so that the same comes out each time
        "        if False:\n",
        PART, layout=Layout("step04", dp=2, pp=2, mbs=2)),
]

STEP05 = Layout("step05", pp=3), [
    Mistake(
        "the cool-down is left out", "pipeline_parallel.py",
        "    return order + cool_down\n",
        "    return order\n",
        ENDED, layout=Layout("step05", pp=3, flags="--timeout 3")),
    Mistake(
        "the cool-down goes the other way", "pipeline_parallel.py",
        "    return order + cool_down\n",
        "    return order + cool_down[::-1]\n",
        PART),
    Mistake(
        "stages wait for one another in a circle", "pipeline_parallel.py",
        "warm_up = min(num_stages - stage - 1, num_micro_batches)",
        "warm_up = min(stage, num_micro_batches)",
        ENDED, layout=Layout("step05", pp=3, flags="--timeout 3")),
]

STEP06 = Layout("step06", cp=2), [
    Mistake(
        "gradients are not summed over cp", "train.py",
        "GradientBuckets(model, mesh.dp_cp, ",
        "GradientBuckets(model, mesh.dp, ",
        PART),
    Mistake(
        "every process takes its positions for the first ones", "context_parallel.py",
        "    model.positions = partial(zigzag_positions, cp)\n",
        "",
        FIRST_LOSS),
    Mistake(
        "RoPE counts positions in contiguous order", "train.py",
        "        positions = model.positions(args.seq_len // cp.size, device=args.device)\n",
        "        positions = model.positions(args.seq_len // cp.size, device=args.device)\n"
        "        if cp.size > 1:\n"
        "            model.positions = lambda n, device: torch.arange(cp.rank * n, cp.rank * n + n)\n",
        FIRST_LOSS),
    Mistake(
        "queries see the late chunk of earlier processes too", "context_parallel.py",
        "return (everything, early, False) if owner < rank else (late, everything, False)",
        "return (everything, everything, False) if owner < rank else (late, everything, False)",
        FIRST_LOSS),
    Mistake(
        "pieces are added up as if each had all of the softmax", "context_parallel.py",
        "            out[:, :, queries] += piece * (piece_lse - total).exp()[..., None]\n",
        "            out[:, :, queries] += piece\n",
        FIRST_LOSS),
    Mistake(
        "gradients of keys and values stay one process short of home", "context_parallel.py",
        "        grad_k, grad_v = coming.to(q.dtype)",
        "        grad_k, grad_v = grad_kv.to(q.dtype)",
        PART),
    Mistake(
        "gradients of others' keys and values are dropped", "context_parallel.py",
        "                grad_kv[:, :, :, keys] += torch.stack(kv_piece)\n",
        "",
        PART),
    Mistake(
        "backward takes a piece's own log-sum-exp", "context_parallel.py",
        "        ctx.save_for_backward(q, kv, out, lse)\n",
        "        lse[:, :, queries] = piece_lse\n"
        "        ctx.save_for_backward(q, kv, out, lse)\n",
        PART),
    Mistake(
        "the loss is that of one process's positions", "train.py",
        "pp.all_reduce(mesh.dp_cp.all_reduce(loss))",
        "pp.all_reduce(dp.all_reduce(loss))",
        FIRST_LOSS, "only the loss that is printed is wrong"),
]

# The first half of the run in one layout, a checkpoint, the second half in another.
STEP07 = Layout("step07", before="cp2", tp=2, steps=6), [
    Mistake(
        "a checkpoint without the optimizer's moments", "checkpoint.py",
        '        state |= {f"{key}.{name}": tensor for key, tensor in moments.items()}\n',
        "",
        UPDATE),
    Mistake(
        "the optimizer counts its training steps anew", "checkpoint.py",
        "for key, tensor in moments.items()}",
        'for key, tensor in moments.items() if key != "step"}',
        UPDATE),
    Mistake(
        "a checkpoint is read into copies of the weights", "checkpoint.py",
        "        state[name] = parameter.detach()\n",
        "        state[name] = parameter.detach().clone()\n",
        UPDATE),
    Mistake(
        "the data starts anew", "train.py",
        "first = (step - 1) * args.global_batch_size",
        "first = (step - 1 - start) * args.global_batch_size",
        UPDATE),
    Mistake(
        "the learning rate warms up anew", "train.py",
        "lr = learning_rate(step, args)",
        "lr = learning_rate(step - start, args)",
        UPDATE),
    Mistake(
        "every process of tp stores its shard as the whole", "checkpoint.py",
        "    if tp.size > 1:\n",
        "    if tp.size < 0:\n",
        ENDED, layout=Layout("step07", pp=2, cp=2, tied=True, before="tp4", steps=6)),
]

MISTAKES = {}
for layout, mistakes in (STEP01, STEP02, STEP03, STEP04, STEP05, STEP06, STEP07):
    for mistake in mistakes:
        key = f"{layout.step}-{mistake.name.replace(' ', '-')}"
        assert key not in MISTAKES
        MISTAKES[key] = Mistake(**{**vars(mistake), "layout": mistake.layout or layout})
