# SPDX-License-Identifier: Apache-2.0
"""KV compaction against a copy of each row by hand, one at a time, from a snapshot of the caches.

The Triton kernel is held to the same cases on a GPU, or in Triton's interpreter in a process of its
own.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from interpreter import CUDA, needs_kernel, runs_elsewhere
from torch import Tensor

from vllm_weaver.ops import compact_kv
from vllm_weaver.ops.compact import CacheTable

both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernel)])


def make_caches(
    dtype: torch.dtype, *, blocks: int = 9, block_size: int = 4, layers: int = 2
) -> list[Tensor]:
    """Keys and values of each layer: views of one [blocks, HKV, block_size, 2 * D_h] tensor."""
    views = []
    for layer in range(layers):
        g = torch.Generator().manual_seed(layer)
        joint = torch.randn(blocks, 2, block_size, 16, generator=g).to(dtype).permute(0, 2, 1, 3)
        views += [joint[..., :8], joint[..., 8:]]
    return views


def snapshot(caches: list[Tensor]) -> list[Tensor]:
    return [c.contiguous().view(torch.uint8).clone() for c in caches]


def move_by_hand(before: list[Tensor], slots: Tensor, path: Tensor, length: Tensor) -> list[Tensor]:
    after = [c.clone() for c in before]
    block_size = before[0].shape[1]
    for r in range(len(length)):
        for i in range(min(int(length[r]), path.shape[1], slots.shape[1])):
            node = int(path[r, i])
            source, target = int(slots[r, node]), int(slots[r, i])
            if node < 0 or source < 0 or target < 0:
                continue
            for old, new in zip(before, after, strict=True):
                row = old[source // block_size, source % block_size]
                new[target // block_size, target % block_size] = row
    return after


def assert_moves(
    caches: list[Tensor],
    slots: list[list[int]],
    path: list[list[int]],
    length: list[int],
    backend: str,
    dtype: torch.dtype = torch.int32,
) -> list[Tensor]:
    index = [torch.tensor(x, dtype=dtype) for x in (slots, path, length)]
    before = snapshot(caches)
    expected = move_by_hand(before, *index)
    if CUDA and backend == "triton":
        # The views keep their strides on the way: the whole storage moves.
        caches[:] = [
            torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device="cuda").copy_(c)
            for c in caches
        ]
        index = [x.cuda() for x in index]
    compact_kv(caches, *index, backend=backend)
    after = snapshot([c.cpu() for c in caches])
    for got, want in zip(after, expected, strict=True):
        assert torch.equal(got, want)
    return after


@both
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_rows_arrive_unharmed(seed, backend) -> None:
    """Random paths, random slots, two requests: what is read may be another move's destination."""
    rng = random.Random(seed)
    order = list(range(36))
    rng.shuffle(order)
    slots = [order[:18], order[18:]]
    path, length = [], []
    for _ in range(2):
        n = rng.randint(1, 16)
        path.append([0, *sorted(rng.sample(range(1, 18), n - 1)), *[-1] * (16 - n)])
        length.append(n)
    assert_moves(make_caches(torch.float32), slots, path, length, backend)


@both
def test_path_shifted_by_one_reads_every_source_before_it_is_overwritten(backend) -> None:
    slots = list(range(10, 30))
    path = [0, *range(2, 18)]
    assert_moves(make_caches(torch.bfloat16), [slots], [path], [len(path)], backend)


@both
def test_path_longer_than_one_step_of_the_kernel(backend) -> None:
    caches = make_caches(torch.bfloat16, blocks=20)
    path = [0, *range(3, 70)]
    assert_moves(caches, [list(range(5, 80))], [path], [len(path)], backend)


@both
@pytest.mark.parametrize("length", [[0, 0], [1, 1], [0, 1]])
def test_lengths_zero_and_one_touch_nothing(length, backend) -> None:
    caches = make_caches(torch.float32)
    before = snapshot(caches)
    after = assert_moves(caches, [[3, 4, 5], [6, 7, 8]], [[0, 2, -1], [0, 2, -1]], length, backend)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


@both
def test_padding_and_missing_slots_are_left_out(backend) -> None:
    """Padded paths, a request without slots, a negative source, a negative destination."""
    slots = [[0, 1, 2, 3], [-1, -1, -1, -1], [8, -1, 10, 11], [12, 13, 14, -1]]
    path = [[0, 2, -1, -1], [0, 2, 3, -1], [0, 2, 3, -1], [0, 2, 3, -1]]
    assert_moves(make_caches(torch.float32), slots, path, [2, 3, 3, 3], backend)
    assert_moves(make_caches(torch.float32), slots, path, [4, 4, 4, 4], backend)


@both
def test_slots_may_be_64_bit(backend) -> None:
    assert_moves(make_caches(torch.float16), [[9, 2, 5]], [[0, 2]], [2], backend, torch.int64)


@both
def test_path_wider_than_the_tree_is_cut(backend) -> None:
    assert_moves(make_caches(torch.float32), [[1, 2, 3]], [[0, 2, -1, -1, -1, -1]], [2], backend)


@both
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_bits_of_any_type_arrive_unchanged(dtype, backend) -> None:
    caches = make_caches(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        caches[0][2, 1] = float("nan")
    assert_moves(caches, [[8, 9, 10, 4]], [[0, 1, 3]], [3], backend)


@both
def test_caches_of_different_layout_move_together(backend) -> None:
    caches = [
        *make_caches(torch.float32),
        torch.randn(5, 4, 3, 4),
        torch.randn(7, 4, 1, 6).bfloat16(),
    ]
    assert_moves(caches, [[9, 2, 5]], [[0, 2]], [2], backend)


@both
def test_nothing_to_do_is_fine(backend) -> None:
    device = "cuda" if CUDA and backend == "triton" else "cpu"
    empty = torch.zeros(0, 3, dtype=torch.int32, device=device)
    caches = [cache.to(device) for cache in make_caches(torch.float32)]
    compact_kv(caches, empty, empty, empty[:, 0], backend=backend)
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    compact_kv([], one, one, one[:, 0], backend=backend)


@both
def test_a_table_made_once_moves_like_the_list(backend) -> None:
    device = "cuda" if CUDA and backend == "triton" else "cpu"
    caches = [c.to(device) for c in [*make_caches(torch.bfloat16), *make_caches(torch.float32)]]
    table = CacheTable(caches)
    layouts = {(c.shape, c.stride(), c.itemsize) for c in caches}
    assert [len(group.addresses) for group in table.groups] == [4] * len(layouts)
    index = [torch.tensor(x, device=device) for x in ([[9, 2, 5, 30]], [[0, 2, 3]], [3])]
    for _ in range(2):
        expected = move_by_hand(snapshot([c.cpu() for c in caches]), *index)
        compact_kv(table, *index, backend=backend)
        for got, want in zip(snapshot([c.cpu() for c in caches]), expected, strict=True):
            assert torch.equal(got, want)


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    caches = [c.to("meta") for c in make_caches(torch.bfloat16)]
    slots, path, length = (
        torch.empty(s, dtype=torch.int32, device="meta") for s in ((2, 9), (2, 4), (2,))
    )
    compact_kv(caches, slots, path, length)


def test_bad_input_is_refused_by_name() -> None:
    caches = make_caches(torch.float32)
    slots, path, length = (torch.zeros(s, dtype=torch.int32) for s in ((2, 3), (2, 4), (2,)))
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference, triton"):
        compact_kv(caches, slots, path, length, backend="cuda")
    with pytest.raises(ValueError, match=r"length has shape \[3\], expected \[2\]"):
        compact_kv(caches, slots, path, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"path is torch\.float32, expected int32"):
        compact_kv(caches, slots, path.float(), length)
    with pytest.raises(ValueError, match=r"caches\[1\] has block size 8, caches\[0\] has 4"):
        compact_kv([caches[0], torch.zeros(2, 8, 1, 4)], slots, path, length)
    with pytest.raises(ValueError, match=r"caches\[0\] has shape \[2, 3\]"):
        compact_kv([torch.zeros(2, 3)], slots, path, length)


def test_paths_in_trees_of_every_width_are_moved_by_one_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first batch of each width has to wait for a compiler."""
    pytest.importorskip("triton")
    from vllm_weaver.ops.compact import triton as compact_triton

    kernel, launches = compact_triton.compact_kernel, []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: launches.append((arguments, constants))

    monkeypatch.setattr(compact_triton, "compact_kernel", Recorder())
    (group,) = CacheTable(make_caches(torch.bfloat16, block_size=16)[::2]).groups
    path, length = torch.zeros(3, 16, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    for rows in (2, 4, 8, 13, 16, 64):
        slots = torch.zeros(3, rows, dtype=torch.int64)
        compact_triton.launch(group, slots, path, length)
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    differing = set()
    for arguments, constants in launches[1:]:
        assert constants == launches[0][1]
        numbers = zip(kernel.arg_names, arguments, launches[0][0], strict=False)
        differing |= {name for name, x, first in numbers if isinstance(x, int) and x != first}
    assert differing == set(options["do_not_specialize"]) == {"slots_stride_r", "L"}


@runs_elsewhere
def test_kernel_without_gpu_or_interpreter_is_refused() -> None:
    one = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot run on cpu tensors"):
        compact_kv(make_caches(torch.float32), one, one, one[:, 0], backend="triton")


@runs_elsewhere
def test_kernel_holds_in_the_interpreter() -> None:
    """Every test of this file that needs the kernel, in a process that interprets it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
