# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of tree attention: they fit the device and fill it."""

import pytest
import torch

from vllm_weaver.ops.attention.tiling import (
    GOOD_FILL,
    LEAN_TAIL,
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    QUICK_TAIL,
    choose_splits,
    choose_tail,
    choose_tiling,
    least_split_keys,
)

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


def test_hopper_cuts_short_contexts_smaller() -> None:
    assert least_split_keys(90) == 128
    assert {least_split_keys(x) for x in (0, 80, 89, 100, 120)} == {MIN_SPLIT_KEYS}
    splits = choose_splits(12, 1100, HOPPER, least_split_keys(90))
    assert choose_splits(12, 1100, HOPPER) < splits <= 1100 // 128 + 1


def test_the_tail_takes_the_timed_form_at_both_ends() -> None:
    """64 rows of 24 heads over 4: 96 programs of 16 rows at batch 1, 1,536 at batch 16."""
    assert choose_tail(384, 4, HOPPER) == QUICK_TAIL
    assert choose_tail(384, 4 * 16, HOPPER) == LEAN_TAIL
    assert choose_tail(384, 4 * 16, 0) == QUICK_TAIL


@pytest.mark.parametrize("programs", [1, 12, 48, 100, 131, 132, 133, 192, 300, 527, 528, 5000])
def test_waves_are_full_or_few(programs) -> None:
    splits = choose_splits(programs, 10**6, HOPPER)
    assert 1 <= splits <= MAX_SPLITS
    waves = programs * splits / HOPPER
    most = int(GOOD_FILL * min(max(1, HOPPER // programs), MAX_SPLITS))
    assert waves / -(-waves // 1) >= 0.75 or splits >= most


def test_other_devices_do_not_split() -> None:
    assert choose_splits(12, 10**6, 0) == 1
