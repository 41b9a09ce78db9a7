"""What people would pick instead of a step: PyTorch's and transformers' own implementations.

Each is called with a Context once the run's process groups are there, and returns a function that makes one
training step, train_step(micro_batches, num_tokens, lr) with micro_batches [(inputs, targets), ...], and
returns the loss over num_tokens tokens and the norm of the gradients. Both are compared, so that none of them
can leave something out.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass
class Context:
    args: object
    config: object
    step: object  # the modules of the step, by name
    model: torch.nn.Module  # this repository's Llama, whole, with the run's weights

    @property
    def autocast(self):
        return torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.dtype == "bfloat16")

    def optimizer(self, model):
        return self.step.train.create_optimizer(model, self.args)


def mean_loss(logits, targets, num_tokens):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / num_tokens


def local(tensor):
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def update(context, parameters, optimizer, lr, grad_norm=None):
    """Clips, by the norm if it is known already, lets the optimizer make its step and returns the norm."""
    parameters, max_norm = list(parameters), context.args.max_grad_norm
    if grad_norm is None:
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    else:  # PyTorch's functions don't take tensors and DTensors together
        torch._foreach_mul_([local(parameter.grad) for parameter in parameters],
                            (max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def plain_loop(context, model, logits=lambda output: output):
    """The loop that everybody writes, on one device."""
    optimizer = context.optimizer(model)

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for inputs, targets in micro_batches:
            with context.autocast:
                loss = mean_loss(logits(model(inputs)), targets, num_tokens)
            loss.backward()
            total += loss.detach()
        return total, update(context, model.parameters(), optimizer, lr)
    return train_step


def transformers_loop(context):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(**{name: getattr(context.config, name) for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size", "rms_norm_eps", "rope_theta")}, use_cache=False)
    model = LlamaForCausalLM(config)
    model.load_state_dict(context.model.state_dict())
    return plain_loop(context, model.to(context.args.device), lambda output: output.logits)


def tensor_parallel(model, mesh):
    """As in PyTorch's tutorial, but that one all-reduce of gradients serves all the matrices of an input."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module)
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    first_whole = PrepareModuleInput(input_layouts=(Replicate(), None, None),
                                     desired_input_layouts=(Replicate(), None, None))
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in model.model.layers:
        layer = f"model.layers.{i}"
        plan |= {f"{layer}.self_attn": first_whole, f"{layer}.mlp": whole}
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    for name in [name for name in plan if isinstance(model.get_submodule(name), torch.nn.Identity)]:
        del plan[name]  # what other stages of a pipeline have
    parallelize_module(model, mesh, plan)


def torch_parts(context):
    """DistributedDataParallel, DTensor with loss_parallel, torch.distributed.pipelining: what it needs."""
    from torch.distributed import pipelining
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    args, model = context.args, context.model
    dp, tp, pp = (getattr(args, f"{name}_size", 1) for name in ("dp", "tp", "pp"))
    mesh = dist.init_device_mesh(args.device, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    if pp > 1:
        context.step.pipeline_parallel.pipeline_parallel(model, context.step.mesh.Axis(stage, pp))
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    cut = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    replicas = model
    if dp > 1 and pp == 1:  # it doesn't compose with pipelining's schedules
        replicas = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, **({"device_mesh": mesh["dp"]} if tp > 1 else {}))
    parameters = dict(model.named_parameters())  # a module that has both hides some after its first forward
    optimizer = context.optimizer(model)
    parallel_loss = loss_parallel if tp > 1 else nullcontext
    if pp > 1:
        pipeline = pipelining.PipelineStage(model, stage, pp, torch.device(args.device),
                                            group=mesh["pp"].get_group())
        engine = {"afab": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[args.pp_engine]
        tokens = args.global_batch_size * args.seq_len
        schedule = engine(pipeline, args.grad_acc_steps, scale_grads=False,
                          loss_fn=lambda logits, targets: mean_loss(logits, targets, tokens))

    def whole(loss):
        return loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()

    def forward_backward(micro_batches, num_tokens):
        total = torch.zeros((), device=args.device)
        for i, (inputs, targets) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if replicas is model or last else replicas.no_sync():
                with context.autocast:
                    loss = mean_loss(replicas(inputs), targets, num_tokens)
                (loss if replicas is model else dp * loss).backward()  # DDP takes the mean over processes
            total += whole(loss)
        return total

    def run_schedule(micro_batches):
        inputs, targets = (torch.cat(tensors) for tensors in zip(*micro_batches))
        losses = []
        with context.autocast:
            schedule.step(*([inputs] if stage == 0 else []), target=targets if stage == pp - 1 else None,
                          losses=losses)
        total = sum(map(whole, losses), torch.zeros((), device=args.device))
        dist.all_reduce(total, group=mesh["pp"].get_group())
        return total

    def norm_of_shards():
        squares = {True: torch.zeros((), device=args.device), False: torch.zeros((), device=args.device)}
        for name, parameter in parameters.items():
            grad = parameter.grad
            if isinstance(grad, DTensor):  # the embedding's is whole
                grad = grad.redistribute(placements=parameter.placements).to_local()
            squares[name in cut] += grad.square().sum()
        dist.all_reduce(squares[True], group=mesh["tp"].get_group())
        total = squares[True] + squares[False]
        dist.all_reduce(total, group=mesh["pp"].get_group())
        return total.sqrt()

    def train_step(micro_batches, num_tokens, lr):
        with parallel_loss():
            total = run_schedule(micro_batches) if pp > 1 else forward_backward(micro_batches, num_tokens)
        if dp > 1:
            dist.all_reduce(total, group=mesh["dp"].get_group())
        if dp > 1 and pp > 1:
            sum_gradients(parameters.values(), mesh["dp"].get_group())
        grad_norm = norm_of_shards() if tp * pp > 1 else None
        return total, update(context, parameters.values(), optimizer, lr, grad_norm)
    return train_step


def sum_gradients(parameters, group=None):
    """Over all processes of the group, as one flat tensor."""
    grads = [local(parameter.grad) for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(total.view_as(grad))


class AllGather(torch.autograd.Function):
    """(batch, heads, seq / size, head_dim) of each process -> (batch, heads, seq, head_dim)"""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def all_gathered_keys(context):
    """Context parallelism with contiguous parts and all-gathered keys and values (Llama 3, section 3.3.2).

    PyTorch's own context_parallel doesn't run on a CPU as shipped, and DistributedDataParallel overwrites
    positions, which differ between processes.
    """
    model, rank, size = context.model, dist.get_rank(), dist.get_world_size()
    length = context.args.seq_len // size
    positions = torch.arange(context.args.seq_len, device=context.args.device)
    mine = positions[rank * length:(rank + 1) * length]
    mask = mine[:, None] >= positions[None]
    model.positions = lambda length, device=None: mine

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, AllGather.apply(k), AllGather.apply(v), attn_mask=mask,
                                              enable_gqa=True)

    for layer in model.model.layers.values():
        layer.self_attn.attend = attend
    optimizer = context.optimizer(model)

    def train_step(micro_batches, num_tokens, lr):
        total = 0.0
        for inputs, targets in micro_batches:
            with context.autocast:
                loss = mean_loss(model(inputs[:, mine]), targets[:, mine], num_tokens)
            loss.backward()
            total += loss.detach()
        sum_gradients(model.parameters())
        dist.all_reduce(total)
        return total, update(context, model.parameters(), optimizer, lr)
    return train_step
