# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution of Gated DeltaNet layers, on trees and sequences: dispatchers.

It runs over the raw rows (before activation) of the q | k | v channels; `reference` defines it. The
module knows nothing of vLLM and of what the channels mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_weaver.ops.conv import reference
from vllm_weaver.ops.conv.reference import ConvStash, conv_table
from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse

__all__ = [
    "ConvStash",
    "causal_conv1d_prefill",
    "causal_conv1d_tree",
    "conv_commit",
    "conv_commit_layers",
    "conv_table",
]

TREE: Backends[Callable[..., tuple[Tensor, ConvStash]]] = Backends(
    "causal_conv1d_tree", reference.tree_conv
)
COMMIT = Backends("conv_commit", reference.commit_conv)
PREFILL = Backends("causal_conv1d_prefill", reference.prefill_conv)

_TRITON = "vllm_weaver.ops.conv.triton"
TREE.register("triton", f"{_TRITON}:tree_conv", default_on=("cuda",))
COMMIT.register("triton", f"{_TRITON}:commit_conv", default_on=("cuda",))

ACTIVATIONS = ("silu", None)


def causal_conv1d_tree(
    x: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    weight: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    *,
    activation: str | None = "silu",
    bias: Tensor | None = None,
    table: Tensor | None = None,
    out: Tensor | None = None,
    stash: ConvStash | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ConvStash]:
    """Convolve every node of a tree with its own path (spec section 5).

    The window of node i is i itself and its W - 1 nearest ancestors; a hop past the root continues
    into the request's committed rows, most recent first. `conv_state` is read only: `conv_commit`
    advances it.

    =============  =================  =====  ======  ===============================================
    name           shape              dtype  in/out  meaning
    =============  =================  =====  ======  ===============================================
    x              [R, T, C]          float  in      raw rows of the nodes; past `num_nodes`
                                                     anything, NaN included
    conv_state     [slots, W - 1, C]  float  in      committed raw rows, oldest first; any strides
    state_indices  [R]                int32  in      slot of each request; below 0: inert, gives
                                                     zeros
    weight         [C, W]             float  in      taps, oldest first
    parents        [R, T]             int32  in      parent of each node, before it; -1 at the root;
                                                     past `num_nodes` anything
    num_nodes      [R]                int32  in      live nodes, root included; 0: inert
    bias           [C]                float  in      added before the activation; None: none
    table          [R, T, W - 1]      int32  in      `conv_table(parents, num_nodes, W)`, shared by
                                                     the layers of a step; None: made here
    y (`out`)      [R, T, C]          x's    out     activated rows; zeros past `num_nodes`. Not x
                                                     itself. None: made here
    stash          opaque                    out     for `conv_commit`; a copy of the live nodes'
                                                     raw rows. If one of an earlier call with the
                                                     same shapes is given, it is overwritten (the
                                                     reference makes a new one anyway)
    =============  =================  =====  ======  ===============================================

    With `out`, `stash` and `table` given, the "triton" backend, for GPUs, allocates
    nothing. Sums are float32 (float64 for float64 rows), and a row's bits do not depend on the rows
    beside it. A `conv_state` narrower than `x` rounds the history at each commit: keep both in one
    dtype.

    Raises:
        ValueError: unknown backend or activation, or shapes, dtypes or devices that do not fit
            together.
    """
    op = TREE.op
    if x.dim() != 3 or weight.dim() != 2 or conv_state.dim() != 3:
        refuse(
            op,
            "x, conv_state and weight need 3, 3 and 2 dimensions, "
            f"got {list(x.shape)}, {list(conv_state.shape)}, {list(weight.shape)}",
        )
    R, T, C = x.shape
    W = weight.shape[1]
    shapes = {
        "weight": (weight, (C, W)),
        "conv_state": (conv_state, (conv_state.shape[0], W - 1, C)),
        "state_indices": (state_indices, (R,)),
        "parents": (parents, (R, T)),
        "num_nodes": (num_nodes, (R,)),
    }
    indices = {"state_indices": state_indices, "parents": parents, "num_nodes": num_nodes}
    if bias is not None:
        shapes["bias"] = (bias, (C,))
    if out is not None:
        shapes["out"] = (out, tuple(x.shape))
    if table is not None:
        shapes["table"] = (table, (R, T, W - 1))
        indices["table"] = table
    expect_shapes(op, x.device, shapes)
    expect_indices(op, indices)
    _expect_activation(op, activation)
    run = TREE.pick(backend, x.device)
    if table is None:
        table = conv_table(parents, num_nodes, W)
    tensors = x, conv_state, state_indices, weight, num_nodes, table, bias
    if run is reference.tree_conv:
        y, stash = run(*tensors, activation)
        return (y if out is None else out.copy_(y)), stash
    return run(*tensors, activation, out=out, stash=stash)


def conv_commit(
    stash: ConvStash,
    path: Tensor,
    length: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    *,
    source_indices: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Advance the committed rows along the accepted path (spec section 5, "Commit").

    They become the last W - 1 of (old committed rows ++ raw rows of the nodes `path[:length]`).

    ==============  =================  =====  ======  ==============================================
    name            shape              dtype  in/out  meaning
    ==============  =================  =====  ======  ==============================================
    stash           opaque                    in      of `causal_conv1d_tree`
    path            [R, L]             int32  in      node indices from the root on; past `length`
                                                      anything
    length          [R]                int32  in      nodes to apply, <= L; 0: the request is not
                                                      touched
    conv_state      [slots, W - 1, C]  float  in/out  committed raw rows, oldest first; any strides
    state_indices   [R]                int32  in      slot written; below 0: inert. No two alike
    source_indices  [R]                int32  in      slot read; None: the slot written. It is left
                                                      as it was unless some request writes it; below
                                                      0: inert
    ==============  =================  =====  ======  ==============================================

    The reference reads all slots before it writes any; with another backend, no request may read a
    slot that another one writes. `backend` None takes the one that made the stash.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = COMMIT.op
    source = state_indices if source_indices is None else source_indices
    if path.dim() != 2 or path.shape[1] == 0 or conv_state.dim() != 3:
        refuse(
            op,
            "path must be [R, L] with L > 0 and conv_state [slots, W - 1, C], "
            f"got {list(path.shape)} and {list(conv_state.shape)}",
        )
    R = len(path)
    expect_shapes(
        op,
        conv_state.device,
        {
            "path": (path, (R, path.shape[1])),
            "length": (length, (R,)),
            "state_indices": (state_indices, (R,)),
            "source_indices": (source, (R,)),
        },
    )
    expect_indices(
        op,
        {
            "path": path,
            "length": length,
            "state_indices": state_indices,
            "source_indices": source,
        },
    )
    run = COMMIT.pick(backend or stash.backend, conv_state.device)
    run(stash, path, length, conv_state, state_indices, source)


def conv_commit_layers(
    stashes: Sequence[ConvStash],
    path: Tensor,
    length: Tensor,
    conv_states: Sequence[Tensor],
    state_indices: Tensor,
    *,
    source_indices: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Advance the committed rows of several layers; on a GPU in one launch.

    `conv_commit` of every layer: `stashes` and `conv_states` hold one of each per layer, alike in
    dtype, shape and strides; the other arguments are the same for all.

    The "triton" backend finds the tensors through a table of addresses, copied to the device when
    a set of tensors is seen for the first time: before a graph is captured, run once with them.

    Raises:
        ValueError: as `conv_commit`, or layers that are not alike.
    """
    op = COMMIT.op
    if not stashes or len(stashes) != len(conv_states):
        refuse(op, f"got {len(stashes)} stashes and {len(conv_states)} states: one of each a layer")
    source = state_indices if source_indices is None else source_indices
    run = COMMIT.pick(backend or stashes[0].backend, conv_states[0].device)
    if run is not reference.commit_conv:
        from vllm_weaver.ops.conv.triton import commit_conv_layers

        commit_conv_layers(stashes, path, length, conv_states, state_indices, source)
        return
    for stash, state in zip(stashes, conv_states, strict=True):
        conv_commit(stash, path, length, state, state_indices, source_indices=source)


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    has_initial_state: Tensor,
    *,
    activation: str | None = "silu",
    bias: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Convolve packed sequences of any lengths and advance their committed rows.

    Prompts, chunks of prompts and single tokens, in any mix.

    =================  =================  =====  ======  ===========================================
    name               shape              dtype  in/out  meaning
    =================  =================  =====  ======  ===========================================
    x                  [M, C]             float  in      raw rows, one sequence after another; past
                                                         the last one anything
    conv_state         [slots, W - 1, C]  float  in/out  committed raw rows, oldest first; any
                                                         strides
    state_indices      [R]                int32  in      slot of each sequence; below 0: inert. No
                                                         two alike
    weight             [C, W]             float  in      taps, oldest first
    query_start_loc    [R + 1]            int32  in      sequence r is the rows from
                                                         `query_start_loc[r]` up to
                                                         `query_start_loc[r + 1]`; empty: not
                                                         touched
    has_initial_state  [R]                bool   in      False: the history is zeros and the slot's
                                                         rows are ignored
    bias               [C]                float  in      added before the activation; None: none
    y                  [M, C]             x's    out     activated rows; zeros where inert or past
                                                         the last sequence
    =================  =================  =====  ======  ===========================================

    A row's bits are those of `causal_conv1d_tree` for the same window.

    Raises:
        ValueError: unknown backend or activation, or shapes, dtypes or devices that do not fit
            together.
    """
    op = PREFILL.op
    if x.dim() != 2 or weight.dim() != 2 or conv_state.dim() != 3:
        refuse(
            op,
            "x, conv_state and weight need 2, 3 and 2 dimensions, "
            f"got {list(x.shape)}, {list(conv_state.shape)}, {list(weight.shape)}",
        )
    C, W = weight.shape
    R = len(state_indices)
    shapes = {
        "x": (x, (len(x), C)),
        "conv_state": (conv_state, (conv_state.shape[0], W - 1, C)),
        "query_start_loc": (query_start_loc, (R + 1,)),
        "has_initial_state": (has_initial_state, (R,)),
    }
    if bias is not None:
        shapes["bias"] = (bias, (C,))
    expect_shapes(op, x.device, shapes)
    expect_indices(op, {"state_indices": state_indices, "query_start_loc": query_start_loc})
    if has_initial_state.dtype != torch.bool:
        refuse(op, f"has_initial_state is {has_initial_state.dtype}, expected bool")
    _expect_activation(op, activation)
    run = PREFILL.pick(backend, x.device)
    return run(
        x,
        conv_state,
        state_indices,
        weight,
        query_start_loc,
        has_initial_state,
        bias,
        activation,
    )


def _expect_activation(op: str, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        refuse(op, f"activation {activation!r} is not known; use 'silu' or None")
