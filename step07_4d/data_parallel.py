"""Data parallelism: every process holds the whole model and trains on its own share of the sequences.

Communication: one all-reduce (sum) of all gradients in a training step, however many micro-batches it has. In
a ring each process sends and receives 2 (dp - 1) / dp times their bytes, 4 for each parameter in float32.

The simplest version that is right needs no class, only this behind the last backward pass:

    for parameter in model.parameters():
        dp.all_reduce(parameter.grad)

It pays a collective's latency for every small tensor, and it lets the network idle during backward and the
processor afterwards. Buckets that leave as soon as they are full of final gradients mend both (Li et al.,
PyTorch Distributed, arXiv 2006.15704, section 3.2).
"""

from functools import partial

import torch
from torch.profiler import record_function


class Bucket:
    """A flat buffer. The gradients of its parameters are views of it, so one all-reduce sums them all."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.buffer = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
        views = self.buffer.split([parameter.numel() for parameter in parameters])
        for parameter, view in zip(parameters, views):
            parameter.grad = view.view_as(parameter)


class GradientBuckets:
    """Sums all gradients over the axis, each bucket as soon as it has the last micro-batch's gradients."""

    def __init__(self, model, axis, num_micro_batches, bucket_cap_mb):
        self.axis, self.num_micro_batches = axis, num_micro_batches
        groups = [[]]
        for parameter in reversed(list(model.parameters())):  # backward reaches the last layer first
            if groups[-1] and sum(p.nbytes for p in groups[-1]) + parameter.nbytes > bucket_cap_mb * 2**20:
                groups.append([])
            groups[-1].append(parameter)
        self.buckets = [Bucket(parameters) for parameters in groups]
        self.hooks = [parameter.register_post_accumulate_grad_hook(partial(self.count, bucket))
                      for bucket in self.buckets for parameter in bucket.parameters if axis.size > 1]

    def zero_grad(self):
        """Before the first micro-batch. In place, so that gradients stay views of the buffers."""
        self.reducing = []
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.missing = len(bucket.parameters) * self.num_micro_batches

    def count(self, bucket, parameter):
        """Runs whenever backward has added to a parameter's gradient."""
        bucket.missing -= 1
        if bucket.missing == 0:
            with record_function(f"all-reduce bucket {self.buckets.index(bucket)}"):
                self.reducing.append(self.axis.start_all_reduce(bucket.buffer))

    def wait(self):
        """After the last micro-batch: returns when all gradients are summed."""
        for reducing in self.reducing:
            reducing.wait()

    def close(self):
        """Before the process groups end, whose threads a hook would keep alive into the interpreter's end."""
        for hook in self.hooks:
            hook.remove()
