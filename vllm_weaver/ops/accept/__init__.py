# SPDX-License-Identifier: Apache-2.0
"""Acceptance over plain tensors: the path that the samples follow, and what the step needs of it.

The module knows nothing of vLLM and of how the tokens were sampled. `vllm_weaver.tree.accept` is
the public rule over a `DraftTree`; `reference` defines both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_weaver.ops.accept.reference import (
    AcceptedPaths,
    PathCounts,
    accept_paths_reference,
    count_paths_reference,
)
from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse

__all__ = ["AcceptedPaths", "PathCounts", "accept_paths", "count_paths"]

OP = "accept_paths"

_BACKENDS: Backends[Callable[..., AcceptedPaths]] = Backends(OP, accept_paths_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.accept.triton:accept_paths_triton", default_on=("cuda",)
)
_COUNTS: Backends[Callable[..., None]] = Backends("count_paths", count_paths_reference)
_COUNTS.register("triton", "vllm_weaver.ops.accept.triton:count_paths_triton", default_on=("cuda",))


def accept_paths(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    max_depth: int,
    *,
    out: AcceptedPaths | None = None,
    backend: str | None = None,
) -> AcceptedPaths:
    """Walk every tree from its root while a child carries the token sampled at its parent.

    =========  =================  =====  ======  ===================================================
    name       shape              dtype  in/out  meaning
    =========  =================  =====  ======  ===================================================
    tokens     [R, T]             int32  in      token of each row; past `num_nodes` anything, here
                                                 and in the next four
    parents    [R, T]             int32  in      row of the parent, before it; -1 for the root
    depths     [R, T]             int32  in      edges from the root
    num_nodes  [R]                int32  in      live rows, root included; 0: no tree
    ancestors  [R, T, ceil(T/64)] int64  in      bit j % 64 of word j // 64: j is an ancestor of the
                                                 row or the row itself
    sampled    [R, T]             int32  in      token sampled from the target at each row, or int64
    max_depth                     int    in      D: a path has at most D + 1 rows
    path       [R, D + 1]         int32  out     rows from the root on, then -1
    length     [R]                int32  out     rows on the path; the tokens that the step emits
    emitted    [R, D + 1]         as     out     sampled[path[i]] for i < length, the last of which
                                  sampled        is the bonus token; then -1
    order      [R, T]             int64  out     flat rows r * T + t of a batch where every request
                                                 has T of them, with each path in front: place i
                                                 takes row path[i] for i < length. The places after
                                                 it keep their own row, and mean nothing
    =========  =================  =====  ======  ===================================================

    A row is on the path exactly when it and all its ancestors are what their parents' samples point
    to, which is one test of the ancestor bits (spec section 4). Of several children with that token
    the first row is followed.

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch, a program
    of one warp per request). `out` takes contiguous tensors of an earlier call with the same
    shapes, whose addresses then stay; None makes new ones. None takes "triton" on a GPU, else
    "reference".

    Raises:
        ValueError: unknown backend, negative `max_depth`, or shapes, dtypes or devices that do not
            fit together.
    """
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        refuse(OP, f"tokens has shape {list(tokens.shape)}, expected [requests, rows]")
    if max_depth < 0:
        refuse(OP, f"max_depth is {max_depth}: pass 0 or more")
    R, T = tokens.shape
    expect_shapes(
        OP,
        tokens.device,
        {
            "parents": (parents, (R, T)),
            "depths": (depths, (R, T)),
            "num_nodes": (num_nodes, (R,)),
            "ancestors": (ancestors, (R, T, -(-T // 64))),
            "sampled": (sampled, (R, T)),
        },
    )
    expect_indices(
        OP,
        {
            "tokens": tokens,
            "parents": parents,
            "depths": depths,
            "num_nodes": num_nodes,
            "sampled": sampled,
        },
    )
    if ancestors.dtype != torch.int64:
        refuse(OP, f"ancestors is {ancestors.dtype}, expected int64 words")
    if out is not None:
        width = (R, max_depth + 1)
        shapes = {"path": width, "length": (R,), "emitted": width, "order": (R, T)}
        expect_shapes(
            OP,
            tokens.device,
            {f"out.{name}": (getattr(out, name), shape) for name, shape in shapes.items()},
        )
        _expect_out_dtypes(out, sampled.dtype)
    run = _BACKENDS.pick(backend, tokens.device)
    return run(tokens, parents, depths, num_nodes, ancestors, sampled, max_depth, out)


def _expect_out_dtypes(out: AcceptedPaths, sampled: torch.dtype) -> None:
    expected = (torch.int32, torch.int32, sampled, torch.int64)
    for name, tensor, dtype in zip(out._fields, out, expected, strict=True):
        if tensor.dtype != dtype:
            refuse(OP, f"out.{name} is {tensor.dtype}, expected {dtype}")
        if not tensor.is_contiguous():
            refuse(OP, f"out.{name} is not contiguous: pass what an earlier call returned")


def count_paths(
    path: Tensor,
    length: Tensor,
    num_nodes: Tensor,
    counts: PathCounts,
    *,
    backend: str | None = None,
) -> None:
    """Add a step's paths to running totals.

    =========  ==========  =====  ======  ==========================================================
    name       shape       dtype  in/out  meaning
    =========  ==========  =====  ======  ==========================================================
    path       [R, D + 1]  int32  in      rows of each path, in 0 .. T - 1, or -1
    length     [R]         int32  in      rows on the path, 0 .. D + 1 (int64 is fine)
    num_nodes  [R]         int32  in      rows of the tree, 0 .. T
    counts                 int64  in/out  `PathCounts`: at least D + 2, T and T + 1 totals
    =========  ==========  =====  ======  ==========================================================

    Rows 0 and below count for nothing in `counts.rows`. Backends: "reference" (any device, no host
    synchronisation) and "triton" (one launch, a program per request). None takes "triton" on a GPU,
    else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = "count_paths"
    if path.dim() != 2 or len(counts.lengths) <= path.shape[1]:
        refuse(op, f"path has shape {list(path.shape)}, there are {len(counts.lengths)} lengths")
    R = len(path)
    expect_shapes(op, path.device, {"length": (length, (R,)), "num_nodes": (num_nodes, (R,))})
    expect_indices(op, {"path": path, "length": length, "num_nodes": num_nodes})
    for name, totals in counts._asdict().items():
        if totals.dtype != torch.int64 or totals.device != path.device:
            refuse(op, f"{name} is {totals.dtype} on {totals.device}, expected int64 beside path")
    run = _COUNTS.pick(backend, path.device)
    if path.numel():
        run(path, length, num_nodes, counts)
