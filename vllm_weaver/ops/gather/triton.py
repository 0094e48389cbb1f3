# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment, misc"
"""Path rows to the front of several tensors in one Triton launch.

The tensors of a step are new ones each time, so their addresses travel as arguments: a table in the
GPU's memory would have to be copied there whenever the allocator gives other ones. Rows move as
integers as wide as alignment allows, in 16-byte vectors.

The module knows nothing of vLLM. Its definition is `reference.gather_rows_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import expect_kernel_device

SOURCES = 8
"""Tensors that one launch reaches."""
CHUNK_BYTES = 512
"""Bytes of a row per program."""
STEP = 16
"""Rows of a path read together before they are written: a path of depth 15 in one step."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def pick(index, a0, a1, a2, a3, a4, a5, a6, a7):
    """The address of a tensor by its number."""
    address = tl.where(index == 1, a1, a0)
    address = tl.where(index == 2, a2, address)
    address = tl.where(index == 3, a3, address)
    address = tl.where(index == 4, a4, address)
    address = tl.where(index == 5, a5, address)
    address = tl.where(index == 6, a6, address)
    address = tl.where(index == 7, a7, address)
    return address


@triton.jit(do_not_specialize=["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"])
def gather_rows_kernel(
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    starts_ptr,
    path_ptr,
    length_ptr,
    starts_stride,
    path_stride_r,
    path_stride_l,
    L,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid (chunks of a row of WIDTH elements, R, tensors)."""
    element = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    r = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), L)
    if length <= 1:
        return
    address = pick(index, a0, a1, a2, a3, a4, a5, a6, a7)
    base = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(ELEMENT)), ALIGN)
    start = tl.load(starts_ptr + r * starts_stride).to(tl.int64)

    # Paths ascend and path[i] >= i, so a later step never reads what an earlier one wrote.
    for first in range(0, length, STEP):
        step = first + tl.arange(0, STEP)
        node = tl.load(
            path_ptr + r * path_stride_r + step * path_stride_l, mask=step < length, other=-1
        ).to(tl.int32)
        mask = (node > step)[:, None] & (element < WIDTH)[None, :]
        source = base + (start + node)[:, None] * STRIDE + element[None, :]
        target = base + (start + step)[:, None] * STRIDE + element[None, :]
        rows = tl.load(source, mask=mask)
        # Another thread may read the row that this one overwrites: all reads come first.
        tl.debug_barrier()
        tl.store(target, rows, mask=mask)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "R", "L"])
def gather_paths_kernel(
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    starts_ptr,
    path_ptr,
    length_ptr,
    out_ptr,
    starts_stride,
    path_stride_r,
    path_stride_l,
    R,
    L,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid (chunks of a row of WIDTH elements, R, tensors)."""
    element = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    r = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2)
    length = tl.load(length_ptr + r).to(tl.int32)
    address = pick(index, a0, a1, a2, a3, a4, a5, a6, a7)
    base = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(ELEMENT)), ALIGN)
    start = tl.load(starts_ptr + r * starts_stride).to(tl.int64)
    for first in range(0, L, STEP):
        step = first + tl.arange(0, STEP)
        node = tl.load(
            path_ptr + r * path_stride_r + step * path_stride_l,
            mask=step < tl.minimum(length, L),
            other=0,
        ).to(tl.int32)
        mask = (step < L)[:, None] & (element < WIDTH)[None, :]
        source = base + (start + node)[:, None] * STRIDE + element[None, :]
        target = out_ptr + ((index.to(tl.int64) * R + r) * L + step)[:, None] * WIDTH
        tl.store(target + element[None, :], tl.load(source, mask=mask), mask=mask)


INTERPRETED = not isinstance(gather_rows_kernel, triton.runtime.JITFunction)


def gather_rows_triton(
    sources: Sequence[Tensor], starts: Tensor, path: Tensor, length: Tensor
) -> None:
    """Launch the kernel for each layout; tensors as in `vllm_weaver.ops.gather_rows`.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    expect_kernel_device("gather_rows", path.device, INTERPRETED)
    length = length.contiguous()
    # Bytes of a row, bytes from row to row, bytes at which both and the address are aligned.
    layouts: dict[tuple[int, int, int], list[int]] = {}
    for source in sources:
        width, stride = source.shape[1] * source.itemsize, source.stride(0) * source.itemsize
        address = source.data_ptr()
        layout = width, stride, math.gcd(16, width, stride, address)
        layouts.setdefault(layout, []).append(address)
    for (width, stride, alignment), addresses in layouts.items():
        # Eight-byte elements, two to a vector, are the widest that Triton has.
        element = min(alignment, 8)
        chunk = CHUNK_BYTES // element
        for first in range(0, len(addresses), SOURCES):
            part = addresses[first : first + SOURCES]
            grid = (triton.cdiv(width // element, chunk), len(path), len(part))
            gather_rows_kernel[grid](
                *(part + part[:1] * (SOURCES - len(part))),
                starts,
                path,
                length,
                starts.stride(0),
                *path.stride(),
                path.shape[1],
                WIDTH=width // element,
                STRIDE=stride // element,
                STEP=STEP,
                CHUNK=chunk,
                ELEMENT=_ELEMENTS[element],
                ALIGN=alignment,
            )


def gather_paths_triton(
    sources: Sequence[Tensor], starts: Tensor, path: Tensor, length: Tensor
) -> Tensor:
    """Launch the kernel; tensors as in `vllm_weaver.ops.gather_paths`.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    expect_kernel_device("gather_paths", path.device, INTERPRETED)
    first, (R, L) = sources[0], path.shape
    out = first.new_empty((len(sources), R * L, first.shape[1]))
    width, stride = first.shape[1] * first.itemsize, first.stride(0) * first.itemsize
    addresses = [source.data_ptr() for source in sources]
    if out.numel() == 0:
        return out
    alignment = math.gcd(16, width, stride, *addresses)
    element = min(alignment, 8)
    chunk = CHUNK_BYTES // element
    bits = out.view(_BITS[element])
    for low in range(0, len(addresses), SOURCES):
        part = addresses[low : low + SOURCES]
        gather_paths_kernel[(triton.cdiv(width // element, chunk), R, len(part))](
            *(part + part[:1] * (SOURCES - len(part))),
            starts,
            path,
            length.contiguous(),
            bits[low:],
            starts.stride(0),
            *path.stride(),
            R,
            L,
            WIDTH=width // element,
            STRIDE=stride // element,
            STEP=STEP,
            CHUNK=chunk,
            ELEMENT=_ELEMENTS[element],
            ALIGN=alignment,
        )
    return out
