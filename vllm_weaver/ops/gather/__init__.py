# SPDX-License-Identifier: Apache-2.0
"""Rows of an accepted path to the front of their tree's rows, in plain [rows, width] tensors.

What compaction is to the KV cache, this is to the target's hidden states, which the drafter takes
in path order. The module knows nothing of vLLM and of what the rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.gather.reference import gather_paths_reference, gather_rows_reference

__all__ = ["gather_paths", "gather_rows"]

OP = "gather_rows"

_BACKENDS: Backends[Callable[..., None]] = Backends(OP, gather_rows_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.gather.triton:gather_rows_triton", default_on=("cuda",)
)
_PATHS: Backends[Callable[..., Tensor]] = Backends("gather_paths", gather_paths_reference)
_PATHS.register("triton", "vllm_weaver.ops.gather.triton:gather_paths_triton", default_on=("cuda",))


def gather_rows(
    sources: Sequence[Tensor],
    starts: Tensor,
    path: Tensor,
    length: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Move row starts[r] + path[r, i] to row starts[r] + i, for i < length[r], in every tensor.

    =======  ==================  =====  ======  ====================================================
    name     shape               dtype  in/out  meaning
    =======  ==================  =====  ======  ====================================================
    sources  list of [N, d_i]    any    in/out  rows of a batch, such as the last hidden states and
                                                the auxiliary ones; contiguous along d_i. They do
                                                not overlap; one that is given twice is moved once
    starts   [R]                 int32  in      the root's row of each request (int64 is fine)
    path     [R, D + 1]          int32  in      accepted nodes from the root on, ascending, so that
                                                path[i] >= i; then -1
    length   [R]                 int32  in      nodes on the path, root included; 0 and 1 move
                                                nothing, and their `starts` may hold anything
    =======  ==================  =====  ======  ====================================================

    In place: all other rows stay as they are, those that a path has left included. A row that is
    both moved away and overwritten is read first. Bits are copied as they are.

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch for up to
    eight tensors of one width, stride and element size; addresses are arguments of the launch, so
    nothing is copied to the device for a tensor that was not seen before). None takes "triton" on
    a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    if path.dim() != 2:
        refuse(OP, f"path has shape {list(path.shape)}, expected [requests, depth + 1]")
    R = len(path)
    expect_shapes(OP, path.device, {"starts": (starts, (R,)), "length": (length, (R,))})
    expect_indices(OP, {"starts": starts, "path": path, "length": length})
    distinct: dict[tuple[int, int], Tensor] = {}
    for index, source in enumerate(sources):
        if source.dim() != 2 or source.stride(1) != 1:
            refuse(
                OP,
                f"sources[{index}] has shape {list(source.shape)} and strides "
                f"{list(source.stride())}, expected rows of contiguous elements",
            )
        if source.device != path.device:
            refuse(OP, f"sources[{index}] is on {source.device}, expected {path.device}")
        if source.numel():
            distinct.setdefault((source.data_ptr(), source.shape[1]), source)
    run = _BACKENDS.pick(backend, path.device)
    if distinct and path.numel():
        run(list(distinct.values()), starts, path, length)


def gather_paths(
    sources: Sequence[Tensor],
    starts: Tensor,
    path: Tensor,
    length: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Copy the rows of each path out: L rows a request, whatever its tree has.

    =======  ================  =====  ======  ======================================================
    name     shape             dtype  in/out  meaning
    =======  ================  =====  ======  ======================================================
    sources  list of [N, d]    any    in      rows of a batch, alike in dtype, width and strides;
                                              contiguous along d
    starts   [R]               int32  in      the root's row of each request (int64 is fine)
    path     [R, L]            int32  in      nodes from the root on; past `length` anything
    length   [R]               int32  in      nodes on the path, root included
    returns  [len(sources),    as     out     row r * L + i is row starts[r] + path[r, i] for i <
             R * L, d]         in             length[r], and the root's, starts[r], after it
    =======  ================  =====  ======  ======================================================

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch for up to
    eight tensors). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, no sources, sources that are not alike, or shapes, dtypes or
            devices that do not fit together.
    """
    op = "gather_paths"
    if path.dim() != 2 or not sources:
        refuse(op, f"path has shape {list(path.shape)}, with {len(sources)} sources")
    R, first = len(path), sources[0]
    expect_shapes(op, path.device, {"starts": (starts, (R,)), "length": (length, (R,))})
    expect_indices(op, {"starts": starts, "path": path, "length": length})
    for index, source in enumerate(sources):
        alike = source.dtype == first.dtype and source.device == path.device
        if not alike or source.dim() != 2 or source.stride() != (first.stride(0), 1):
            refuse(op, f"sources[{index}] is not [rows, width] or not like sources[0] and path")
        if source.shape != first.shape:
            refuse(op, f"sources[{index}] has shape {list(source.shape)}, not {list(first.shape)}")
    return _PATHS.pick(backend, path.device)(list(sources), starts, path, length)
