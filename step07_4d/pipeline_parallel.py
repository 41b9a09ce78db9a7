"""Pipeline parallelism: each process is a stage of consecutive layers, and micro-batches flow through them.

Communication, for each micro-batch and each pair of neighbouring stages: one tensor of (batch, seq, hidden)
to the next stage, and its gradient back, in the weights' dtype, while something else is computed.

The price is idle time. The last stage waits for its first input and the first stage for its last gradient:
(p - 1) / (m + p - 1) of the time with p stages and m micro-batches (Huang et al., GPipe, arXiv 1811.06965,
section 2.3).
"""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from model import project


def split_layers(num_layers, num_stages):
    """Returns the range of layers of each stage, as even as can be, longer ones first."""
    size, num_longer = divmod(num_layers, num_stages)
    bounds = [size * stage + min(stage, num_longer) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in zip(bounds, bounds[1:])]


def pipeline_parallel(model, pp):
    """Leaves of a model that was built whole on the meta device this stage's part, under the same names."""
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    mine = split_layers(model.config.num_hidden_layers, pp.size)[pp.rank]
    model.model.layers = nn.ModuleDict({str(i): model.model.layers[str(i)] for i in mine})
    if not last:
        model.model.norm, model.lm_head, model.project = nn.Identity(), nn.Identity(), project
    if not first and last and model.config.tie_word_embeddings:
        model.model.embed_tokens.forward = lambda x: x  # its weight stays, the head uses it
    elif not first:
        model.model.embed_tokens = nn.Identity()


def afab(stage, num_stages, num_micro_batches):
    """All forward, all backward: GPipe's schedule. In between, all micro-batches' activations are alive.

    A schedule is the order in which one stage works: a list of ("forward" or "backward", micro-batch).
    """
    order = range(num_micro_batches)
    if num_stages == 1:  # nobody to wait for: hold one micro-batch at a time
        return [(action, i) for i in order for action in ("forward", "backward")]
    return [("forward", i) for i in order] + [("backward", i) for i in order]


def one_forward_one_backward(stage, num_stages, num_micro_batches):
    """1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1): backward as soon as a gradient can be there.

    The idle time is AFAB's, but at most num_stages - stage micro-batches are alive: those that are under way
    between here and the last stage.
    """
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    order = [("forward", i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):  # steady
        order += [("forward", warm_up + i), ("backward", i)]
    cool_down = [("backward", i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return order + cool_down


SCHEDULES = {"afab": afab, "1f1b": one_forward_one_backward}


class Channel:
    """Carries tensors of one shape in one direction between stages, in the order of the micro-batches.

    Sending doesn't wait for the receiver, and each receive is posted while the tensor before is worked on, so
    a tensor that is early travels during computation.

    Why stages can't wait for one another in a circle: a send waits only for the delivery of the send before,
    and that is complete once the receiver has begun to work on the tensor two before. In the timetable of a
    schedule this lies in the past, as does all else that an action waits for. Activations and gradients have
    groups of their own: NCCL works off one by one what two processes exchange in a group, so each direction
    would wait for the other.
    """

    def __init__(self, axis, direction, num_tensors, shape, like):
        self.axis, self.source, self.target = axis, axis.rank - direction, axis.rank + direction
        self.to_come = num_tensors if 0 <= self.source < axis.size else 0
        self.shape, self.like, self.sending = shape, like, None
        self.receive_ahead()

    def receive_ahead(self):
        if self.to_come:
            self.to_come -= 1
            buffer = self.like.new_empty(self.shape)
            self.receiving = buffer, self.axis.start_receive(buffer, self.source)

    def receive(self):
        buffer, work = self.receiving
        work.wait()
        self.receive_ahead()
        return buffer

    def send(self, tensor):
        self.wait()
        self.sending = tensor, self.axis.start_send(tensor, self.target)  # kept until it is delivered

    def wait(self):
        if self.sending:
            self.sending[1].wait()
            self.sending = None


def run_schedule(schedule, model, micro_batches, num_tokens, autocast, pp, pp_back):
    """Works off a schedule. Adds up the gradients of all micro-batches in .grad and returns the loss.

    The loss is the mean over the num_tokens tokens of the whole training step. This is the one place that
    divides: losses and gradients of any cut of the batch only have to be summed. Only the last stage has it;
    others return 0.
    """
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    shape, like = (*micro_batches[0][0].shape, model.config.hidden_size), next(model.parameters())
    activations = Channel(pp, +1, len(micro_batches), shape, like)
    gradients = Channel(pp_back, -1, len(micro_batches), shape, like)
    inputs, outputs, total = {}, {}, like.new_zeros(())
    for action, i in schedule:
        if action == "forward":
            inputs[i] = micro_batches[i][0] if first else activations.receive().requires_grad_()
            with record_function(f"forward {i}"), autocast:
                output = model(inputs[i])
                if last:
                    output = model.cross_entropy(output, micro_batches[i][1]) / num_tokens
            # Backward needs the place in the graph that the output has, not the output itself.
            outputs[i] = get_gradient_edge(output)
            if last:
                total += output.detach()
            else:
                activations.send(output.detach())
        else:
            grad = None if last else gradients.receive()
            with record_function(f"backward {i}"):
                torch.autograd.backward(outputs.pop(i), grad)
            if not first:
                gradients.send(inputs[i].grad)
            del inputs[i]
    activations.wait()
    gradients.wait()
    return total


def sum_tied_gradient(model, pp, pp_back):
    """Embedding and head share a weight: the first and the last stage add up their gradients of it."""
    last = pp.size - 1
    if model.config.tie_word_embeddings and last > 0 and pp.rank in (0, last):
        (outward, inward), other = ((pp, pp_back), last) if pp.rank == 0 else ((pp_back, pp), 0)
        grad = model.model.embed_tokens.weight.grad
        theirs = torch.empty_like(grad)
        sending, receiving = outward.start_send(grad, other), inward.start_receive(theirs, other)
        sending.wait()
        receiving.wait()
        grad += theirs
