"""What the server of warm processes loads once, so that the processes forked from it start in a moment."""

import torch
import torch.distributed
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.device_mesh  # noqa: F401
import torch.distributed.tensor  # noqa: F401

torch.set_num_threads(1)
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # its first use imports 800 modules
