# SPDX-License-Identifier: Apache-2.0
"""One model over several processes, replicated (DDP) or in shards (FSDP2), and whole in files.

Knows modules, optimiser states and tensors; not what is trained. Files never hold shards: what a
run wrote can be read by a run of another kind and another number of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vllm_weaver.train.processes import Processes
from vllm_weaver.train.recipe import Parallel


def share(model: nn.Module, kind: Parallel, processes: Processes) -> None:
    """Cut the parameters of `model` into shards, one per process, if `kind` is "fsdp2".

    Comes before the optimisers, since it puts other parameters in place of the given ones, and
    expects the same values in all processes. The adapter is one group: its blocks are not called
    as modules, so that only its own forward pass can gather them.
    """
    if kind == "fsdp2" and processes.world > 1:
        mesh = init_device_mesh(processes.device.type, (processes.world,))
        # Shards come back after each pass, also after one without gradients, so that the
        # parameters seen between passes are always the shards.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)


def wrap(model: nn.Module, kind: Parallel, processes: Processes) -> nn.Module:
    """The module to call: one that averages the gradients over all processes, if there are some."""
    if kind == "ddp" and processes.world > 1:
        return nn.parallel.DistributedDataParallel(model)
    return model


@contextlib.contextmanager
def accumulating(model: nn.Module, bare: nn.Module, more: bool) -> Iterator[None]:
    """Around a backward pass: with `more` to come in this step, gradients stay in the process.

    `model` is what `wrap` returned, `bare` what `share` was given.
    """
    if isinstance(bare, FSDPModule):
        bare.set_requires_gradient_sync(not more)
    if more and isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def whole(value: Any) -> Any:
    """Nested dictionaries and lists with every shard replaced by the whole tensor, on the CPU.

    All processes have to call it, with values of the same form.
    """
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(part) for part in value)
    return value


def like(full: Tensor, owner: Tensor) -> Tensor:
    """A whole tensor in the form in which `owner` is held: this process's shard of it, or itself.

    A tensor of another shape than the owner's (a counter of steps) is left alone.
    """
    if not isinstance(owner, DTensor) or full.shape != owner.shape:
        return full
    placed = full.to(owner.device)
    # Every process has the whole tensor: nothing is sent.
    return distribute_tensor(placed, owner.device_mesh, owner.placements, src_data_rank=None)


def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a model that may be held in shards."""
    own = model.state_dict()
    model.load_state_dict({n: like(t, own[n]) if n in own else t for n, t in state.items()})


def norm_of(parameters: list[nn.Parameter], limit: float) -> float:
    """Clip the gradients of all processes' shards to a norm of `limit`; returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
