# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: alone, or as many as `torchrun` started.

Knows ranks, devices and one flag that all processes agree on; not what they compute.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Processes:
    """This process among its peers.

    Attributes:
        rank, world: number of this process, and of all.
        device: what it computes on.
        control: a CPU process group for flags, so that agreeing does not wait for the GPU; None
            if alone.
    """

    rank: int
    world: int
    device: torch.device
    control: Any = None

    @classmethod
    def join(cls, device: str | None = None) -> Processes:
        """Join the group that `torchrun` describes in the environment, if it does."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device is None:
            device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(0, 1, where)
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        return cls(dist.get_rank(), world, where, dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def highest(self, value: int) -> int:
        """The highest of all processes' values."""
        if self.control is None:
            return value
        flag = torch.tensor(value)
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.control)
        return int(flag)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' tensors (on the CPU)."""
        values = values.cpu()
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values

    def leave(self) -> None:
        """Take the group down."""
        if self.control is not None:
            dist.destroy_process_group()
            self.control = None


def host_memory() -> int:
    """Resident memory of this process in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
