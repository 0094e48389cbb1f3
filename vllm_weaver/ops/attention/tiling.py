# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of tree attention: tiles, warps, pipeline stages, and pieces of the keys.

Plain arithmetic on sizes that the host knows; nothing here imports Triton or reads a tensor.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

MIN_SPLIT_KEYS = 256
"""A split walks at least this many keys: shorter ones would not pay for the second kernel."""
MIN_SPLIT_KEYS_HOPPER = 128
"""The same on Hopper: 1.17 times as fast at 1k keys there, and as fast from 4k on."""
MAX_SPLITS = 64
GOOD_FILL = 0.95
"""A launch may fill its waves this much worse than the best one if it has fewer splits."""


class Tiling(NamedTuple):
    """Launch shape of the first kernel.

    Attributes:
        block_m: packed query rows of a program, a power of two from 16.
        block_n: keys of a tile, 16, 32, 64 or 128.
        num_warps: warps of a program.
        num_stages: stages of the pipelined loads of keys and values.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Shared memory that queries and key/value tiles take, nearly all of a program's."""
        tiles = self.block_m + 2 * self.num_stages * self.block_n
        return tiles * head_dim * element_bytes

    def per_multiprocessor(self, head_dim: int, element_bytes: int) -> int:
        """Programs that fit one multiprocessor of 227 KB and 64k registers side by side."""
        by_shared = 227 * 1024 // self.shared_bytes(head_dim, element_bytes)
        # Accumulators and scores in float32, half as much again for everything else.
        registers = self.block_m * (head_dim + 2 * self.block_n) * 3 // 2
        return max(1, min(by_shared, 65536 // registers, 64 // self.num_warps))


def choose_tiling(rows: int, head_dim: int, dtype: torch.dtype, capability: int = 90) -> Tiling:
    """Launch shape for `rows` = T * G packed query rows; the main loop spills no registers.

    Two warpgroups of 64 rows each share every tile of keys on Hopper and later: at head dim 256
    a call of 384 rows is bound by its products, and tiles of 64 rows would read keys from the L2
    cache twice as often.

    Args:
        rows: packed query rows of one key/value head.
        head_dim: a supported head dim.
        dtype: of the queries.
        capability: compute capability times ten.
    """
    wanted = max(16, 1 << (rows - 1).bit_length())
    if dtype == torch.float32:
        block_m = min(wanted, 32)
        return Tiling(block_m, 16, num_warps=4 if block_m == 16 else 8, num_stages=2)
    if capability >= 90 and wanted >= 128:
        if head_dim == 256:
            # Two tiles under way; a tile of 64 keys would leave room for one.
            return Tiling(128, 32, num_warps=8, num_stages=3)
        return Tiling(128, 64, num_warps=4 if head_dim == 32 else 8, num_stages=3)
    block_m = min(wanted, 64)
    if head_dim <= 64:
        return Tiling(block_m, 64, num_warps=4, num_stages=2)
    if head_dim == 128:
        return Tiling(block_m, 32, num_warps=4, num_stages=3)
    if capability >= 90:
        # Over 384 rows, tiles of 64 took half the time with four warps and three stages. Of 32
        # rows two programs fit a multiprocessor, with eight warps one.
        return Tiling(block_m, 32, num_warps=4, num_stages=3)
    if block_m <= 32:
        return Tiling(block_m, 32, num_warps=4, num_stages=2)
    return Tiling(block_m, 32, num_warps=8, num_stages=2)


class TailForm(NamedTuple):
    """Launch shape of the tree's part beside a prefix kernel.

    Attributes:
        block_m: packed query rows of a program, a power of two from 16.
        block_n: rows of the tree that it reads at a time, 16, 32, 64 or 128.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    num_warps: int


QUICK_TAIL = TailForm(16, 64, 8)
"""Many small programs: the soonest done while all run side by side (5.3 us at batch 1)."""
LEAN_TAIL = TailForm(32, 32, 4)
"""Half as many, each with less to do per row: half the time at batch 16 (34 us in place of 61)."""


def choose_tail(rows: int, groups: int, processors: int) -> TailForm:
    """Form of the tail by its number of programs; timed at 96 and at 1,536 on 132 processors.

    Two programs of `QUICK_TAIL` a multiprocessor is an estimate: at the rate of the larger launch
    it takes as long there as `LEAN_TAIL` takes at least.

    Args:
        rows: T * G packed query rows of one key/value head.
        groups: requests times key/value heads.
        processors: multiprocessors of the device; 0 if it is no GPU.
    """
    programs = math.ceil(rows / QUICK_TAIL.block_m) * groups
    return LEAN_TAIL if 0 < 2 * processors < programs else QUICK_TAIL


def least_split_keys(capability: int) -> int:
    """Keys below which a split is not cut further, by compute capability times ten."""
    return MIN_SPLIT_KEYS_HOPPER if capability // 10 == 9 else MIN_SPLIT_KEYS


def choose_splits(programs: int, capacity: int, slots: int, least: int = MIN_SPLIT_KEYS) -> int:
    """Pieces of the keys, from launch-time facts: lengths stay on the device.

    Waves of programs should be full: the fewest pieces whose last wave leaves little idle.

    Args:
        programs: programs of an unsplit launch.
        capacity: keys that the block table and the tree can hold together.
        slots: programs that run side by side on the device; 0 if it is no GPU.
        least: keys that a piece has at least.
    """
    most = max(1, min(math.ceil(capacity / least), MAX_SPLITS))
    if slots == 0 or programs >= 4 * slots:
        return 1
    most = min(most, max(1, 4 * slots // programs) if programs > slots else slots // programs)

    def fill(splits: int) -> float:
        waves = programs * splits / slots
        return waves / math.ceil(waves)

    best = max(fill(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if fill(s) >= GOOD_FILL * best)


@cache
def capability_of(device: torch.device) -> int:
    """Compute capability of a GPU times ten; 0 for other devices."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
