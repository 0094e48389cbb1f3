# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: alone, or as many as `torchrun` started.

Knows ranks, devices and one flag that all processes agree on; not what they compute.
"""

from __future__ import annotations

import contextlib
import multiprocessing
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
    """Memory of this process and of its reading processes now, in bytes.

    What they share counts once; files that are mapped count as far as they were read. 0 where the
    system does not say.
    """
    own = _field("self", "smaps_rollup", "Pss")
    if not own:
        # Some sandboxes know only what is resident.
        return _field("self", "status", "VmRSS")
    readers = multiprocessing.active_children()
    return own + sum(_field(process.pid, "smaps_rollup", "Pss") for process in readers)


def host_peak() -> int:
    """The most that this process alone has had resident, in bytes; 0 where it is not said."""
    return _field("self", "status", "VmHWM")


def _field(process: int | str | None, file: str, name: str) -> int:
    """A line `name:  N kB` of one of the kernel's files on a process, in bytes; 0 without one."""
    path = f"/proc/{process}/{file}"
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
