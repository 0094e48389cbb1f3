# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of tree attention: they fit the device and fill it."""

import pytest
import torch

from vllm_weaver.ops.attention.tiling import GOOD_FILL, MAX_SPLITS, choose_splits, choose_tiling

HOPPER = 132


@pytest.mark.parametrize("capability, limit", [(80, 163 * 1024), (90, 227 * 1024)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 65, 384, 1536])
def test_tiles_fit_shared_memory(rows, head_dim, dtype, capability, limit) -> None:
    tiling = choose_tiling(rows, head_dim, dtype, capability)
    assert tiling.shared_bytes(head_dim, dtype.itemsize) <= limit
    assert tiling.block_m >= 16 and tiling.block_m & (tiling.block_m - 1) == 0


def test_one_request_fills_a_hopper_gpu_in_one_wave() -> None:
    """64 rows of 24 heads over 4: 3 row blocks of 4 key/value heads, 11 splits."""
    tiling = choose_tiling(384, 256, torch.bfloat16, 90)
    assert tiling.per_multiprocessor(256, 2) == 1
    programs = 384 // tiling.block_m * 4
    assert programs * choose_splits(programs, 70_000, HOPPER) == HOPPER


def test_short_contexts_are_not_cut_small() -> None:
    assert choose_splits(12, 300, HOPPER) <= 2
    assert choose_splits(12, 10, HOPPER) == 1


@pytest.mark.parametrize("programs", [1, 12, 48, 100, 131, 132, 133, 192, 300, 527, 528, 5000])
def test_waves_are_full_or_few(programs) -> None:
    splits = choose_splits(programs, 10**6, HOPPER)
    assert 1 <= splits <= MAX_SPLITS
    waves = programs * splits / HOPPER
    most = int(GOOD_FILL * min(max(1, HOPPER // programs), MAX_SPLITS))
    assert waves / -(-waves // 1) >= 0.75 or splits >= most


def test_other_devices_do_not_split() -> None:
    assert choose_splits(12, 10**6, 0) == 1
