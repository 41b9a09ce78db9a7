"""Runs a step's train.py and notes what a plain run doesn't write down.

    torchrun --nproc_per_node 2 notebooks/observe.py FOLDER step02_data_parallel/train.py --profile_dir FOLDER

The trainer is the step's own, unchanged. Its traces get two things more: the shapes of the tensors that go
into an operation, from which follow the bytes of every collective, and each allocation of memory. And each
rank leaves a file in FOLDER, holds0.json, holds1.json, ...: the bytes of weights, gradients and optimizer
state that it has at the end of the run.
"""

import json
import os
import sys
from functools import partial

import torch


def num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def main(folder, program, *argv):
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    torch.profiler.profile = partial(torch.profiler.profile, record_shapes=True, profile_memory=True)
    import train
    optimizers, create_optimizer = [], train.create_optimizer

    def create_and_keep(*args):
        optimizers.append(create_optimizer(*args))
        return optimizers[0]

    train.create_optimizer = create_and_keep
    parameters = list(train.main(argv).parameters())
    holds = {
        "weights": num_bytes(parameters),
        "gradients": num_bytes(parameter.grad for parameter in parameters),
        "optimizer state": num_bytes(value for state in optimizers[0].state.values()
                                     for value in state.values()),
    }
    with open(os.path.join(folder, f"holds{os.environ.get('RANK', 0)}.json"), "w") as file:
        json.dump(holds, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
