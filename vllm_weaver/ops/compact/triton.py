# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""KV compaction over all caches in one Triton launch.

The kernel finds each cache through a table of base addresses, so that one launch serves every
layer's keys and values. It moves elements as integers of their size: the bits arrive unchanged.

The module knows nothing of vLLM. Its definition is `reference.compact_kv_reference`.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.compact.table import CacheGroup, CacheTable
from vllm_weaver.ops.dispatch import refuse

CHUNK_BYTES = 512
"""Bytes of a row per program: 16 rows of them are four 16-byte vectors for each of its threads."""
STEP = 16
"""Rows of a path gathered together before they are written: a path of depth 15 in one step."""

_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["slots_stride_r", "L"])
def compact_kernel(
    address_ptr,
    slots_ptr,
    path_ptr,
    length_ptr,
    slots_stride_r,
    slots_stride_t,
    path_stride_r,
    path_stride_l,
    stride_block,
    stride_slot,
    stride_h,
    stride_k,
    L,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid (chunks of a row of ROW = HKV * K elements, R, caches). No path is longer than `L`."""
    element = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    r = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    if length <= 1:
        return
    address = tl.load(address_ptr + tl.program_id(2))
    cache = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), ALIGN)
    offset = (element // K).to(tl.int64) * stride_h + (element % K) * stride_k

    # Paths ascend and path[i] >= i, so a later step never reads what an earlier one wrote.
    for start in range(0, length, STEP):
        step = start + tl.arange(0, STEP)
        node = tl.load(
            path_ptr + r * path_stride_r + step * path_stride_l, mask=step < length, other=-1
        )
        slots = slots_ptr + r * slots_stride_r
        source = tl.load(slots + node * slots_stride_t, mask=node >= 0, other=-1).to(tl.int64)
        target = tl.load(slots + step * slots_stride_t, mask=step < length, other=-1).to(tl.int64)
        moves = (source >= 0) & (target >= 0) & (source != target)
        mask = moves[:, None] & (element < ROW)[None, :]
        source_row = source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * stride_slot
        target_row = target // BLOCK_SIZE * stride_block + target % BLOCK_SIZE * stride_slot
        rows = tl.load(cache + source_row[:, None] + offset[None, :], mask=mask)
        # Another thread may read the slot that this one overwrites: all reads come first.
        tl.debug_barrier()
        tl.store(cache + target_row[:, None] + offset[None, :], rows, mask=mask)
        tl.debug_barrier()


INTERPRETED = not isinstance(compact_kernel, triton.runtime.JITFunction)


def compact_kv_triton(table: CacheTable, slots: Tensor, path: Tensor, length: Tensor) -> None:
    """Launch the kernel once per layout; tensors as in `vllm_weaver.ops.compact.compact_kv`.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    if slots.device.type != "cuda" and not INTERPRETED:
        refuse(
            "compact_kv",
            f"the triton backend cannot run on {slots.device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    if slots.shape[0] == 0 or path.shape[1] == 0 or slots.shape[1] == 0:
        return
    length = length.contiguous()
    for group in table.groups:
        launch(group, slots, path, length)


def launch(group: CacheGroup, slots: Tensor, path: Tensor, length: Tensor) -> None:
    """One launch: every cache of a layout, every request, every part of a row."""
    block_size, heads, K = group.shape
    chunk = CHUNK_BYTES // group.itemsize
    compact_kernel[(triton.cdiv(heads * K, chunk), len(slots), len(group.addresses))](
        group.addresses,
        slots,
        path,
        length,
        *slots.stride(),
        *path.stride(),
        *group.strides,
        min(path.shape[1], slots.shape[1]),
        BLOCK_SIZE=block_size,
        K=K,
        ROW=heads * K,
        STEP=STEP,
        CHUNK=chunk,
        ELEMENT=_ELEMENTS[group.itemsize],
        ALIGN=group.alignment,
    )
