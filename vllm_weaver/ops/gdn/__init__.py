# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on tokens, trees and packed sequences: dispatchers and checks (spec section 5).

`reference` is the definition. The module knows nothing of vLLM, of the convolution before the
layer's core, or of the gated norm after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.gdn import reference
from vllm_weaver.ops.gdn.reference import GdnPending, GdnStash, ancestor_words

if TYPE_CHECKING:
    from vllm_weaver.ops.gdn.raw import GdnRawStash
    from vllm_weaver.ops.gdn.triton import GdnTritonStash

    AnyStash = GdnStash | GdnTritonStash | GdnRawStash

__all__ = [
    "GdnPending",
    "GdnStash",
    "ancestor_words",
    "gdn_commit",
    "gdn_commit_layers",
    "gdn_decode",
    "gdn_gate",
    "gdn_prefill",
    "gdn_tree_verify",
]

DECODE: Backends[Callable[..., Tensor]] = Backends("gdn_decode", reference.decode)
VERIFY: Backends[Callable[..., tuple[Tensor, AnyStash]]] = Backends(
    "gdn_tree_verify", reference.tree_verify
)
COMMIT: Backends[Callable[..., None]] = Backends("gdn_commit", reference.commit)
PREFILL = Backends("gdn_prefill", reference.prefill)

_TRITON = "vllm_weaver.ops.gdn.triton"
DECODE.register("triton", f"{_TRITON}_replay:decode", default_on=("cuda",))
VERIFY.register("triton", f"{_TRITON}:tree_verify", default_on=("cuda",))
COMMIT.register("triton", f"{_TRITON}_replay:commit", default_on=("cuda",))
VERIFY.register("cuda", "vllm_weaver.ops.gdn.cuda:tree_verify")


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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
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
    run = DECODE.pick(backend, q.device)
    plain = run is reference.decode
    _expect(op, q, k, v, g, beta, state, narrow_state=not plain)
    expect_shapes(op, q.device, {"state_indices": (state_indices, (len(q),))})
    expect_indices(op, {"state_indices": state_indices})
    options = _expect_gates(op, A_log, dt_bias, v)
    if plain and options:
        g, beta = gdn_gate(g, beta, **options)
        options = {}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, g, beta, state, state_indices, scale, qk_l2norm, **options)


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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    max_depth: int | None = None,
    out: Tensor | None = None,
    stash: AnyStash | None = None,
    pending: GdnPending | None = None,
    backend: str | None = None,
) -> tuple[Tensor, AnyStash]:
    """Outputs of every node, as if its path had been decoded; the state stays (spec section 5).

    With `pending`, the path of an earlier step is committed first, and the tree is verified against
    the state after it ("Delayed commit").

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
                                                          unless `pending` is given
    state_indices  [R]                   int32    in      slot of each request; below 0: inert,
                                                          gives zeros. With `pending` no two alike
    parents        [R, T]                int32    in      parent of each node, before it; -1 at the
                                                          root; past `num_nodes` anything
    num_nodes      [R]                   int32    in      live nodes, root included; 0: inert
    scale          scalar                         in      multiplies q; None: K ** -0.5
    qk_l2norm      flag                           in      q, k are x * rsqrt(sum x^2 + 1e-6)
    ancestors      [R, T, ceil(T / 64)]  int64    in      bit j % 64 of word j // 64: j is the row
                                                          or an ancestor of it. Shared by the layers
                                                          of a step; None: made from `parents`
    A_log,         [HV]                  float    in      if given, `g` and `beta` are a and b, of
    dt_bias                                               any float dtype, and the gates of
                                                          `gdn_gate` are made here
    max_depth      number                         in      no node lies deeper below the root; None:
                                                          unknown. A lower bound than the truth
                                                          gives wrong outputs
    out            [R, T, HV, V_h]       v's      out     o; zeros past `num_nodes`. None: made here
    stash          opaque                         out     for `gdn_commit`; aliases none of the
                                                          inputs. If one of an earlier call with the
                                                          same shapes is given, it is overwritten
                                                          (the reference makes a new one anyway)
    pending        opaque                         in      path to commit before, a `GdnPending`;
                                                          its stash shares no memory with `stash`:
                                                          two alternate. None: the state is that of
                                                          the roots already
    =============  ====================  =======  ======  ==========================================

    Past `num_nodes` every per-node input may hold anything, NaN included. The reference takes any T
    and any depth. Its arithmetic is float32 (float64 for a float64 state), and decays are
    differenced in float64. The "triton" backend, for GPUs, takes T up to 256, also a
    bfloat16 state; with narrow inputs it multiplies in halves, and adds about 4e-4 of the output's
    size to the rounding of a bfloat16 output. With `out`, `stash` and `ancestors` given, it
    allocates nothing. The "cuda" backend (`csrc/README.md` says how to build it) is the same for
    q, k and v in a 16-bit dtype and `qk_l2norm`, and has no use for `max_depth`; "triton" commits
    its stash.

    With `pending`, states and outputs are those of `gdn_commit` with `exact=True`, into the slots
    of `state_indices`, followed by this op, bit for bit as to the states; a length of 0 leaves the
    state as it is, and a request that is not inert has its path committed even where `num_nodes` is
    0. The "triton" backend does it in the same launch: one read and one write of the state instead
    of two and one. On an H200 that saves time at batch 16 for short paths alone (1 node: 19 % of
    the commit's time with 16 rows, 9 % with 64; 4 nodes: 1 % with 16 rows). `gdn_commit_layers`
    and then a verification are faster with 64 rows from 4 nodes on, and at batch 1 always. Whatever
    else reads the state before this op must commit first, with `gdn_commit`. The "cuda" backend
    does not take it.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together; a
            `pending` whose stash is of another backend, or shares memory with `stash`.
    """
    op = VERIFY.op
    if q.dim() != 4 or v.dim() != 4:
        refuse(op, f"q and v need 4 dimensions, got {list(q.shape)} and {list(v.shape)}")
    R, T = q.shape[:2]
    run = VERIFY.pick(backend, q.device)
    plain = run is reference.tree_verify
    _expect(op, q, k, v, g, beta, state, narrow_state=not plain)
    shapes = {
        "state_indices": (state_indices, (R,)),
        "parents": (parents, (R, T)),
        "num_nodes": (num_nodes, (R,)),
    }
    if out is not None:
        shapes["out"] = (out, tuple(v.shape))
    if ancestors is not None:
        shapes["ancestors"] = (ancestors, (R, T, (T + 63) // 64))
        if ancestors.dtype != torch.int64:
            refuse(op, f"ancestors is {ancestors.dtype}, expected int64 words of 64 bits")
    expect_shapes(op, q.device, shapes)
    expect_indices(op, {"state_indices": state_indices, "parents": parents, "num_nodes": num_nodes})
    options: dict[str, Any] = dict(_expect_gates(op, A_log, dt_bias, v))
    if pending is not None:
        _expect_pending(op, pending, R, q.device)
    if ancestors is None:
        ancestors = ancestor_words(parents, num_nodes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shared = state, state_indices, num_nodes, ancestors, scale, qk_l2norm
    if plain:
        if options:
            g, beta = gdn_gate(g, beta, **options)
        if pending is not None:
            earlier = pending.aligned()
            gdn_commit(
                *(earlier.stash, earlier.path, earlier.length, state, state_indices),
                backend="reference",
            )
        made, stash = run(q, k, v, g, beta, *shared)
        return (made if out is None else out.copy_(made)), stash
    if pending is not None:
        options["pending"] = pending
    return run(q, k, v, g, beta, *shared, max_depth=max_depth, out=out, stash=stash, **options)


def gdn_commit(
    stash: AnyStash,
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

    The reference reads all slots before it writes any; with another backend, no request may read a
    slot that another one writes. For the state at a cache block's boundary, commit the first nodes
    of the path into another slot before the whole path is committed in place. The backend is that
    which made the stash.

    Raises:
        ValueError: a backend other than the stash's, or shapes, dtypes or devices that do not fit
            together; with the reference also a length above L.
    """
    op = COMMIT.op
    source = state_indices if source_indices is None else source_indices
    if path.dim() != 2 or path.shape[1] == 0:
        refuse(op, f"path must be [R, L] with L > 0, got {list(path.shape)}")
    run = _pick_commit(stash, state, backend)
    _expect_state(op, state, narrow=run is not reference.commit)
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
    run(stash, path, length, state, state_indices, source, exact)


def gdn_commit_layers(
    stashes: Sequence[AnyStash],
    path: Tensor,
    length: Tensor,
    states: Sequence[Tensor],
    state_indices: Tensor,
    *,
    source_indices: Tensor | None = None,
    boundary_indices: Tensor | None = None,
    boundary_length: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Advance the states of several layers along the accepted path (spec section 5, "Commit").

    `gdn_commit` of every layer with `exact=True`, bit for bit. On a GPU it is one launch.

    ================  ============================  =====  ======  =================================
    name              shape                         dtype  in/out  meaning
    ================  ============================  =====  ======  =================================
    stashes           one a layer                          in      of `gdn_tree_verify`; alike
    path              [R, L]                        int32  in      nodes from the root on; past
                                                                   `length` anything
    length            [R]                           int32  in      nodes to apply, <= L; 0: none
    states            a layer [slots, HV, V_h, K]   float  in/out  alike in dtype and strides
    state_indices     [R]                           int32  in      slot written; below 0: none. No
                                                                   two alike
    source_indices    [R]                           int32  in      slot read; None: the slot
                                                                   written; below 0: inert. Written
                                                                   by no other request
    boundary_indices  [R]                           int32  in      slot of the state after
                                                                   `boundary_length` nodes, as at a
                                                                   cache block's boundary; below 0:
                                                                   none. None: for no request
    boundary_length   [R]                           int32  in      <= L; 0: none
    ================  ============================  =====  ======  =================================

    The "triton" backend finds the tensors through a table of addresses, copied to the device when
    a set of tensors is seen for the first time: before a graph is captured, run once with them.

    Raises:
        ValueError: a backend other than the stashes', or shapes, dtypes, strides or devices that do
            not fit together.
    """
    op = COMMIT.op
    if not stashes or len(stashes) != len(states):
        refuse(op, f"got {len(stashes)} stashes and {len(states)} states: one of each per layer")
    if (boundary_indices is None) != (boundary_length is None):
        refuse(op, "boundary_indices and boundary_length come together")
    run = _pick_commit(stashes[0], states[0], backend)
    if run is not reference.commit:
        from vllm_weaver.ops.gdn import triton_replay

        triton_replay.commit_layers(
            cast("Sequence[GdnTritonStash | GdnRawStash]", stashes),
            path,
            length,
            states,
            state_indices,
            state_indices if source_indices is None else source_indices,
            boundary_indices,
            boundary_length,
        )
        return
    source = state_indices if source_indices is None else source_indices
    for stash, state in zip(stashes, states, strict=True):
        # The boundary first: the final slot may be the one that is read.
        if boundary_indices is not None and boundary_length is not None:
            gdn_commit(stash, path, boundary_length, state, boundary_indices, source_indices=source)
        gdn_commit(stash, path, length, state, state_indices, source_indices=source)


def _pick_commit(stash: AnyStash, state: Tensor, backend: str | None) -> Callable[..., None]:
    if backend not in (None, stash.backend) and backend in COMMIT.names:
        refuse(COMMIT.op, f"the stash is of backend {stash.backend!r}, not {backend!r}")
    return COMMIT.pick(backend or stash.backend, state.device)


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
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    narrow_state: bool = False,
) -> None:
    """Check the tensors that every form of the op takes; leading dimensions are whatever q has."""
    _expect_state(op, state, narrow_state)
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


def _expect_state(op: str, state: Tensor, narrow: bool = False) -> None:
    if state.dim() != 4:
        refuse(op, f"state must be [slots, HV, V_h, K], got {list(state.shape)}")
    if not narrow and state.dtype not in (torch.float32, torch.float64):
        refuse(
            op,
            f"state is {state.dtype}, expected float32: a narrower state drifts with every commit",
        )


def _expect_gates(
    op: str, A_log: Tensor | None, dt_bias: Tensor | None, v: Tensor
) -> dict[str, Tensor]:
    """The parameters of raw gates, if given, as keywords."""
    if A_log is None and dt_bias is None:
        return {}
    if A_log is None or dt_bias is None:
        refuse(op, "A_log and dt_bias come together")
    HV = v.shape[-2]
    expect_shapes(op, v.device, {"A_log": (A_log, (HV,)), "dt_bias": (dt_bias, (HV,))})
    return {"A_log": A_log, "dt_bias": dt_bias}


def _expect_pending(op: str, pending: GdnPending, R: int, device: torch.device) -> None:
    """Check the path that a verification of R requests is to commit."""
    path, length, requests = pending.path, pending.length, pending.requests
    if path.dim() != 2 or 0 in path.shape:
        refuse(op, f"pending.path must be [P, L] with P and L > 0, got {list(path.shape)}")
    P = len(path)
    if requests is None and P != R:
        refuse(op, f"pending is of {P} requests, not {R}: pending.requests tells which they are")
    if len(pending.stash.g_RTH) != P:
        refuse(op, f"pending.stash is of {len(pending.stash.g_RTH)} requests, its path of {P}")
    shapes = {"pending.path": (path, tuple(path.shape)), "pending.length": (length, (P,))}
    indices = {"pending.path": path, "pending.length": length}
    if requests is not None:
        shapes["pending.requests"] = requests, (R,)
        indices["pending.requests"] = requests
    expect_shapes(op, device, shapes)
    expect_indices(op, indices)
