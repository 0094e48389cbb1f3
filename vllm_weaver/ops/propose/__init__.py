# SPDX-License-Identifier: Apache-2.0
"""Around a proposal: what the requests' trees start from, chains for some, and where trees go.

The module knows nothing of vLLM and of how trees are made. `reference` defines the ops; `triton`
does each in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.propose.reference import (
    PathRows,
    choose_chain_reference,
    load_roots_reference,
    store_trees_reference,
)
from vllm_weaver.ops.step.reference import StoredTrees

__all__ = ["MAX_SOURCES", "PathRows", "choose_chain", "load_roots", "store_trees"]

MAX_SOURCES = 8
"""Values of a slot that one `load_roots` takes."""

_TRITON = "vllm_weaver.ops.propose.triton"
_ROOTS: Backends[Callable[..., None]] = Backends("load_roots", load_roots_reference)
_ROOTS.register("triton", f"{_TRITON}:load_roots_triton", default_on=("cuda",))
_CHAIN: Backends[Callable[..., None]] = Backends("choose_chain", choose_chain_reference)
_CHAIN.register("triton", f"{_TRITON}:choose_chain_triton", default_on=("cuda",))
_STORE: Backends[Callable[..., None]] = Backends("store_trees", store_trees_reference)
_STORE.register("triton", f"{_TRITON}:store_trees_triton", default_on=("cuda",))


def load_roots(
    hidden: Tensor,
    row_ends: Tensor,
    num_rejected: Tensor,
    slots: Tensor,
    sources: Sequence[Tensor],
    out_states: Tensor,
    targets: Sequence[Tensor],
    paths: PathRows | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Copy what each request's next tree starts from to buffers whose addresses stay.

    ============  ============  =======  ======  ===================================================
    name          shape         dtype    in/out  meaning
    ============  ============  =======  ======  ===================================================
    hidden        [N, d]        float    in      rows of the batch, contiguous along d
    row_ends      [R]           int32    in      row after each request's last (int64 is fine)
    num_rejected  [R]           int32    in      rows before it that do not count, so that the last
                                                 one that does is row_ends - num_rejected - 1
    slots         [R]           int32    in      slot of each request (int64 is fine)
    sources       [S] each      any      in      up to eight values of every slot
    out_states    [>= R, d]     as       out     the last row that counts of each request
                                hidden
    targets       [>= R] each   as its   out     each value of the batch's requests; int32 and int64
                                source           go into each other
    paths                                in/out  None, or `PathRows`: `hidden` has L rows a request
                                                 in path order, of the T that `num_rejected` counts;
                                                 `row_ends` is not read, and the positions and
                                                 rejected rows of what is kept are made too
    ============  ============  =======  ======  ===================================================

    Targets past R keep what they hold. Backends: "reference" (any device, no host synchronisation)
    and "triton" (one launch). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, too many sources, or shapes, dtypes or devices that do not fit
            together.
    """
    op, R = "load_roots", len(slots)
    device = hidden.device
    if hidden.dim() != 2 or hidden.stride(1) != 1:
        refuse(op, f"hidden has shape {list(hidden.shape)} and strides {list(hidden.stride())}")
    if len(sources) != len(targets) or not 1 <= len(sources) <= MAX_SOURCES:
        refuse(op, f"{len(sources)} sources and {len(targets)} targets, expected 1 to 8 pairs")
    d = hidden.shape[1]
    shapes = {
        "num_rejected": (num_rejected, (R,)),
        "slots": (slots, (R,)),
        "out_states": (out_states[:R], (R, d)),
    }
    if paths is None:
        shapes["row_ends"] = (row_ends, (R,))
    else:
        shapes["positions"] = (paths.positions[: R * paths.rows], (R * paths.rows,))
        shapes["out_positions"] = (paths.out_positions, (R * paths.width,))
        shapes["out_rejected"] = (paths.out_rejected, (R,))
        if not 1 <= paths.width <= paths.rows:
            refuse(op, f"{paths.width} of {paths.rows} rows are kept, expected 1 to all of them")
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        shapes[f"targets[{index}]"] = (target[:R], (R,))
        # Host memory that the device reads may name its device otherwise.
        if source.dim() != 1 or source.device.type != device.type:
            refuse(op, f"sources[{index}] has shape {list(source.shape)} on {source.device}")
        kinds = {source.dtype, target.dtype}
        if len(kinds) > 1 and not kinds <= {torch.int32, torch.int64}:
            refuse(op, f"targets[{index}] is {target.dtype}, its source {source.dtype}")
    if out_states.dtype != hidden.dtype:
        refuse(op, f"out_states is {out_states.dtype}, hidden {hidden.dtype}")
    expect_shapes(op, device, shapes)
    expect_indices(op, {"row_ends": row_ends, "num_rejected": num_rejected, "slots": slots})
    run = _ROOTS.pick(backend, device)
    if R:
        run(hidden, row_ends, num_rejected, slots, sources, out_states, targets, paths)


def choose_chain(
    tokens: Tensor,
    roots: Tensor,
    chain_only: Tensor,
    tree: Sequence[Tensor] | None,
    out: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """Put the chains of some requests, and the trees of the others, into buffers.

    ==========  ===========  =======  ======  ======================================================
    name        shape        dtype    in/out  meaning
    ==========  ===========  =======  ======  ======================================================
    tokens      [R, D]       int32    in      draft tokens of the chains, shallowest first (int64 is
                                              fine); of other requests anything
    roots       [R]          int32    in      tokens of the roots (int64 is fine)
    chain_only  [R]          bool     in      requests that get their chain
    tree                              in      tokens, parents, depths, num_nodes, ancestors of the
                                              other requests' trees, as `out`; None: all get chains
    out         [R, T] x 3,  int32    out     the same of every request, contiguous. A chain has
                [R],                          D + 1 nodes, no more than T; rows past it have token
                [R, T, W]    int64            0, parent -1, depth 0 and no ancestor bits
    ==========  ===========  =======  ======  ======================================================

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch, a program
    per request). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = "choose_chain"
    if tokens.dim() != 2 or out[4].dim() != 3 or tokens.shape[1] >= out[4].shape[1]:
        refuse(op, f"chains are {list(tokens.shape)}, ancestors of the trees {list(out[4].shape)}")
    R, device = len(tokens), tokens.device
    expect_shapes(op, device, {"roots": (roots, (R,)), "chain_only": (chain_only, (R,))})
    expect_indices(op, {"tokens": tokens, "roots": roots})
    T, W = out[4].shape[1:]
    _expect_tree(op, "out", out, R, T, W, device)
    if tree is not None:
        _expect_tree(op, "tree", tree, R, T, W, device)
    if chain_only.dtype != torch.bool:
        refuse(op, f"chain_only is {chain_only.dtype}, expected bool")
    run = _CHAIN.pick(backend, device)
    if R:
        run(tokens, roots, chain_only, tree, out)


def store_trees(
    tree: Sequence[Tensor],
    slots: Tensor,
    stored: StoredTrees,
    out_tokens: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Keep the shapes of a batch's trees by slot, and give out their tokens.

    ==========  =============  =====  ======  ======================================================
    name        shape          dtype  in/out  meaning
    ==========  =============  =====  ======  ======================================================
    tree        as `out` of           in      tokens, parents, depths, num_nodes, ancestors of R
                above                         requests
    slots       [R]            int32  in      slot of each request, no two alike (int64 is fine)
    stored                            in/out  `StoredTrees` of as many rows
    out_tokens  [R, T - 1]     int64  out     tokens below the roots
    ==========  =============  =====  ======  ======================================================

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch, a program
    per request). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op, R = "store_trees", len(slots)
    device = slots.device
    T, W = tree[4].shape[1:]
    S = len(stored.num_nodes)
    _expect_tree(op, "tree", tree, R, T, W, device)
    expect_shapes(
        op,
        device,
        {
            "slots": (slots, (R,)),
            "stored.parents": (stored.parents, (S, T)),
            "stored.depths": (stored.depths, (S, T)),
            "stored.num_nodes": (stored.num_nodes, (S,)),
            "stored.ancestors": (stored.ancestors, (S, T, W)),
            "out_tokens": (out_tokens, (R, T - 1)),
        },
    )
    expect_indices(op, {"slots": slots})
    run = _STORE.pick(backend, device)
    if R:
        run(tree, slots, stored, out_tokens)


def _expect_tree(
    op: str, name: str, tree: Sequence[Tensor], R: int, T: int, W: int, device: torch.device
) -> None:
    names = ("tokens", "parents", "depths", "num_nodes", "ancestors")
    shapes = ((R, T), (R, T), (R, T), (R,), (R, T, W))
    found = {
        f"{name}.{x}": part for x, part in zip(names, zip(tree, shapes, strict=True), strict=True)
    }
    expect_shapes(op, device, found)
