# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on tokens, trees and packed sequences: dispatchers and checks (spec section 5).

`reference` is the definition. The module knows nothing of vLLM, of the convolution before the
layer's core, or of the gated norm after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.gdn import reference
from vllm_weaver.ops.gdn.reference import GdnStash, ancestor_words

__all__ = [
    "GdnStash",
    "ancestor_words",
    "gdn_commit",
    "gdn_decode",
    "gdn_gate",
    "gdn_prefill",
    "gdn_tree_verify",
]

DECODE = Backends("gdn_decode", reference.decode)
VERIFY = Backends("gdn_tree_verify", reference.tree_verify)
COMMIT = Backends("gdn_commit", reference.commit)
PREFILL = Backends("gdn_prefill", reference.prefill)


def gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gates: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) (spec section 5).

    =======  =========  =======  ======  ===========================================================
    name     shape      dtype    in/out  meaning
    =======  =========  =======  ======  ===========================================================
    a, b     [..., HV]  float    in      projections of the layer's input
    A_log    [HV]       float    in      log of the decay rate
    dt_bias  [HV]       float    in      added to a
    g        [..., HV]  float32  out     log decay, <= 0
    beta     [..., HV]  float32  out     write strength in (0, 1), never rounded to a narrower dtype
    =======  =========  =======  ======  ===========================================================

    Elementwise; a token's gates do not depend on the tokens computed beside it.

    Raises:
        ValueError: shapes or devices that do not fit together.
    """
    HV = a.shape[-1]
    expect_shapes(
        "gdn_gate",
        a.device,
        {"b": (b, tuple(a.shape)), "A_log": (A_log, (HV,)), "dt_bias": (dt_bias, (HV,))},
    )
    return reference.gate(a, b, A_log, dt_bias)


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str | None = None,
) -> Tensor:
    """One token per request: the recurrence itself, in place (spec section 5).

    S <- e^g S; u = beta (v - S k); S <- S + u k^T; o = S q.

    =============  ===================  =======  ======  ===========================================
    name           shape                dtype    in/out  meaning
    =============  ===================  =======  ======  ===========================================
    q, k           [R, HK, K]           float    in      queries and keys, not yet normalised
    v              [R, HV, V_h]         float    in      values; of key head h * HK // HV
    g, beta        [R, HV]              float32  in      of `gdn_gate`
    state          [slots, HV, V_h, K]  float32  in/out  recurrent states; any strides
    state_indices  [R]                  int32    in      slot of each request; below 0: inert, gives
                                                         zeros and touches nothing. No two alike
    scale          scalar                        in      multiplies q; None: K ** -0.5
    qk_l2norm      flag                          in      q, k are x * rsqrt(sum x^2 + 1e-6)
    out            [R, HV, V_h]         v's      out     o; zeros where inert
    =============  ===================  =======  ======  ===========================================

    Arithmetic is float32 (float64 for a float64 state). On a CPU the reference gives a request the
    same bits whatever else is in the batch, and `gdn_commit` replays these very operations.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = DECODE.op
    if q.dim() != 3 or v.dim() != 3:
        refuse(op, f"q and v need 3 dimensions, got {list(q.shape)} and {list(v.shape)}")
    _expect(op, q, k, v, g, beta, state)
    expect_shapes(op, q.device, {"state_indices": (state_indices, (len(q),))})
    expect_indices(op, {"state_indices": state_indices})
    run = DECODE.pick(backend, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, g, beta, state, state_indices, scale, qk_l2norm)


def gdn_tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    ancestors: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, GdnStash]:
    """Outputs of every node, as if its path had been decoded; the state stays (spec section 5).

    With c_i the sum of g over the path to node i, and j < i for "j is a strict ancestor of i":

        X_ij = [j < i] beta_i e^(c_i - c_j) k_i . k_j        R_i = beta_i (v_i - e^c_i S k_i)
        (I + X) U = R
        o_i = e^c_i S q_i + sum over j <= i of e^(c_i - c_j) (q_i . k_j) u_j

    =============  ====================  =======  ======  ==========================================
    name           shape                 dtype    in/out  meaning
    =============  ====================  =======  ======  ==========================================
    q, k           [R, T, HK, K]         float    in      queries and keys, not yet normalised
    v              [R, T, HV, V_h]       float    in      values; of key head h * HK // HV
    g, beta        [R, T, HV]            float32  in      of `gdn_gate`
    state          [slots, HV, V_h, K]   float32  in      recurrent states; any strides; read only
    state_indices  [R]                   int32    in      slot of each request; below 0: inert,
                                                          gives zeros
    parents        [R, T]                int32    in      parent of each node, before it; -1 at the
                                                          root; past `num_nodes` anything
    num_nodes      [R]                   int32    in      live nodes, root included; 0: inert
    scale          scalar                         in      multiplies q; None: K ** -0.5
    qk_l2norm      flag                           in      q, k are x * rsqrt(sum x^2 + 1e-6)
    ancestors      [R, T, ceil(T / 64)]  int64    in      bit j % 64 of word j // 64: j is the row
                                                          or an ancestor of it. Shared by the layers
                                                          of a step; None: made from `parents`
    out            [R, T, HV, V_h]       v's      out     o; zeros past `num_nodes`
    stash          opaque                         out     for `gdn_commit`; aliases none of the
                                                          inputs
    =============  ====================  =======  ======  ==========================================

    Past `num_nodes` every per-node input may hold anything, NaN included. Any T and any depth.
    Arithmetic is float32 (float64 for a float64 state); decays are differenced in float64.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = VERIFY.op
    if q.dim() != 4 or v.dim() != 4:
        refuse(op, f"q and v need 4 dimensions, got {list(q.shape)} and {list(v.shape)}")
    R, T = q.shape[:2]
    _expect(op, q, k, v, g, beta, state)
    shapes = {
        "state_indices": (state_indices, (R,)),
        "parents": (parents, (R, T)),
        "num_nodes": (num_nodes, (R,)),
    }
    if ancestors is not None:
        shapes["ancestors"] = (ancestors, (R, T, (T + 63) // 64))
        if ancestors.dtype != torch.int64:
            refuse(op, f"ancestors is {ancestors.dtype}, expected int64 words of 64 bits")
    expect_shapes(op, q.device, shapes)
    expect_indices(op, {"state_indices": state_indices, "parents": parents, "num_nodes": num_nodes})
    run = VERIFY.pick(backend, q.device)
    if ancestors is None:
        ancestors = ancestor_words(parents, num_nodes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, g, beta, state, state_indices, num_nodes, ancestors, scale, qk_l2norm)


def gdn_commit(
    stash: GdnStash,
    path: Tensor,
    length: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    exact: bool = True,
    source_indices: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Advance the states along the accepted path, nodes `path[:length]` (spec section 5).

    ==============  ===================  =======  ======  ==========================================
    name            shape                dtype    in/out  meaning
    ==============  ===================  =======  ======  ==========================================
    stash           opaque                        in      of `gdn_tree_verify`
    path            [R, L]               int32    in      node indices from the root on; past
                                                          `length` anything
    length          [R]                  int32    in      nodes to apply, <= L; 0: the request is
                                                          not touched
    state           [slots, HV, V_h, K]  float32  in/out  recurrent states; any strides
    state_indices   [R]                  int32    in      slot written; below 0: inert. No two alike
    source_indices  [R]                  int32    in      slot read; None: the slot written. It is
                                                          left as it was unless some request writes
                                                          it; below 0: inert
    exact           flag                          in      True: replay, bit-identical to
                                                          `gdn_decode` once per node of the path.
                                                          False: one product of rank `length`
    ==============  ===================  =======  ======  ==========================================

    All slots are read before any is written. For the state at a cache block's boundary, commit the
    first nodes of the path into another slot before the whole path is committed in place. `backend`
    None takes the one that made the stash.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together; on a
            CPU also a length above L.
    """
    op = COMMIT.op
    source = state_indices if source_indices is None else source_indices
    if path.dim() != 2 or path.shape[1] == 0:
        refuse(op, f"path must be [R, L] with L > 0, got {list(path.shape)}")
    _expect_state(op, state)
    R = len(path)
    expect_shapes(
        op,
        state.device,
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
    run = COMMIT.pick(backend or stash.backend, state.device)
    run(stash, path, length, state, state_indices, source, exact)


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Packed sequences of any lengths; advances their states in place (spec section 5).

    Prompts, chunks of prompts and single tokens, in any mix.

    =================  ===================  =======  ======  =======================================
    name               shape                dtype    in/out  meaning
    =================  ===================  =======  ======  =======================================
    q, k               [M, HK, K]           float    in      queries and keys, not yet normalised
    v                  [M, HV, V_h]         float    in      values; of key head h * HK // HV
    g, beta            [M, HV]              float32  in      of `gdn_gate`
    state              [slots, HV, V_h, K]  float32  in/out  recurrent states; any strides
    state_indices      [R]                  int32    in      slot of each sequence; below 0: inert.
                                                             No two alike
    query_start_loc    [R + 1]              int32    in      sequence r is the rows from
                                                             `query_start_loc[r]` up to
                                                             `query_start_loc[r + 1]`; empty: not
                                                             touched
    has_initial_state  [R]                  bool     in      False: starts from zeros and ignores
                                                             the slot's state
    scale              scalar                        in      multiplies q; None: K ** -0.5
    qk_l2norm          flag                          in      q, k are x * rsqrt(sum x^2 + 1e-6)
    out                [M, HV, V_h]         v's      out     zeros where inert or past the last
                                                             sequence
    =================  ===================  =======  ======  =======================================

    A sequence of one token goes through the arithmetic of `gdn_decode`, bit for bit; longer ones
    are solved in chunks of 64 rows. The reference reads the lengths on the host, so on a GPU it
    waits for the device.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    op = PREFILL.op
    if q.dim() != 3 or v.dim() != 3:
        refuse(op, f"q and v need 3 dimensions, got {list(q.shape)} and {list(v.shape)}")
    _expect(op, q, k, v, g, beta, state)
    R = len(state_indices)
    expect_shapes(
        op,
        q.device,
        {
            "state_indices": (state_indices, (R,)),
            "query_start_loc": (query_start_loc, (R + 1,)),
            "has_initial_state": (has_initial_state, (R,)),
        },
    )
    expect_indices(op, {"state_indices": state_indices, "query_start_loc": query_start_loc})
    if has_initial_state.dtype != torch.bool:
        refuse(op, f"has_initial_state is {has_initial_state.dtype}, expected bool")
    run = PREFILL.pick(backend, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        query_start_loc,
        has_initial_state,
        scale,
        qk_l2norm,
    )


def _expect(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> None:
    """Check the tensors that every form of the op takes; leading dimensions are whatever q has."""
    _expect_state(op, state)
    *rows, HK, K = q.shape
    HV, V = v.shape[-2:]
    if HK == 0 or HV % HK:
        refuse(op, f"v has {HV} heads, not a multiple of the {HK} key heads of q")
    expect_shapes(
        op,
        q.device,
        {
            "k": (k, (*rows, HK, K)),
            "v": (v, (*rows, HV, V)),
            "g": (g, (*rows, HV)),
            "beta": (beta, (*rows, HV)),
            "state": (state, (state.shape[0], HV, V, K)),
        },
    )


def _expect_state(op: str, state: Tensor) -> None:
    if state.dim() != 4:
        refuse(op, f"state must be [slots, HV, V_h, K], got {list(state.shape)}")
    if state.dtype not in (torch.float32, torch.float64):
        refuse(
            op,
            f"state is {state.dtype}, expected float32: a narrower state drifts with every commit",
        )
