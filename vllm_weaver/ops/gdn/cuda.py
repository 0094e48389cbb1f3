# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on trees in CUDA C++: verification of one layer in one launch (spec section 5).

The kernel is `csrc/gdn_tree_verify.cuh`, whose head says how it works. Its outputs and its stash
are those of the Triton backend, which commits the stash. CPU tensors run through the emulator of
`csrc/emulator`, if that is built. The module knows nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_weaver.ops.cuda import NotBuilt, load_library
from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.gdn.reference import GdnPending
from vllm_weaver.ops.gdn.triton import GdnTritonStash, empty_stash, rows_aligned

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.bfloat16)
GATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAPABILITY = (9, 0)
MAX_ROWS = 256
OP = "gdn_tree_verify"
NEEDS_FULL = (
    "the CUDA kernels are built for bfloat16 rows, float32 states and heads of 128 alone: "
    "python -m vllm_weaver.ops.cuda.build full"
)
NO_PENDING = 'the cuda backend commits no pending path: gdn_commit first, or use "triton"'


class Form(NamedTuple):
    """A compiled form: a pass takes 16 * `tiles` rows, a block 16 * `pairs` columns of V.

    A block has two warps per pair. Longer trees than a pass need 4 tiles and 4 pairs.
    """

    tiles: int
    pairs: int


FORMS = (
    *(Form(tiles, pairs) for tiles in (1, 2, 4, 8) for pairs in (2, 4)),
    *(Form(2, 8), Form(4, 8)),
)
"""Forms for K = V = 128; those of 8 pairs are for it alone."""


def choose_form(T: int) -> Form:
    """The form for trees of T rows."""
    if T > 128:
        return Form(4, 4)
    return Form(next(tiles for tiles in (1, 2, 4, 8) if 16 * tiles >= T), 4)


def is_faster(requests: int, rows: int, value_heads: int) -> bool:
    """Whether the Triton kernel takes longer on an H200, by measured times (docs/kernels.md).

    Of trees that fit one tile reading the states is nearly all there is to do, and Triton's
    smaller programs keep more of it under way once there is enough for all multiprocessors.
    """
    return rows > 16 or requests * value_heads < 16 * 48


def tree_verify(
    q_RTHK: Tensor,
    k_RTHK: Tensor,
    v_RTHV: Tensor,
    g_RTH: Tensor,
    beta_RTH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    max_depth: int | None = None,
    out: Tensor | None = None,
    stash: GdnTritonStash | None = None,
    pending: GdnPending | None = None,
    form: Form | None = None,
) -> tuple[Tensor, GdnTritonStash]:
    """Launch the kernel; tensors as in `vllm_weaver.ops.gdn.gdn_tree_verify`.

    Args:
        max_depth: of no use here, since the solve goes by rows.
        pending: must be None.
        form: compiled form; None chooses.

    Raises:
        ValueError: head dim, number of rows, dtype, stride or device that the kernel does not take,
            or the kernel is not built.
    """
    if pending is not None:
        refuse(OP, NO_PENDING)
    R, T, HK, K = k_RTHK.shape
    HV, V = v_RTHV.shape[2:]
    if stash is None:
        stash = empty_stash(R, T, HK, HV, K, V, k_RTHK.dtype, v_RTHV.device)
    out = launch_verify(
        (q_RTHK, k_RTHK, v_RTHV, g_RTH, beta_RTH),
        state,
        state_indices_R,
        num_nodes_R,
        ancestors_RTW,
        scale,
        qk_l2norm,
        stash_rows=(stash.k_RTHK, stash.v_RTHV),
        stash_gates=(stash.g_RTH, stash.beta_RTH),
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
        form=form,
    )
    return out, replace(stash, qk_l2norm=qk_l2norm)


def launch_verify(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    state_indices_R: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    stash_rows: tuple[Tensor, Tensor] | None,
    stash_gates: tuple[Tensor, Tensor],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor | None,
    form: Form | None = None,
) -> Tensor:
    """Launch the kernel into the stash buffers given: k and v (or neither), and the gates.

    Raises:
        ValueError: head dim, number of rows, dtype, stride or device that the kernel does not take,
            or the kernel is not built.
    """
    q, k, v, g, beta = rows
    R, T, _, K = k.shape
    HV, V = v.shape[2:]
    check_supported(q, k, v, g, beta, state, qk_l2norm)
    if T > MAX_ROWS:
        refuse(OP, f"the cuda backend takes at most {MAX_ROWS} rows, got {T}")
    try:
        library = load_library(emulated=v.device.type == "cpu")
    except NotBuilt as error:
        refuse(OP, str(error))
    if library.kind == "quick" and not quick_serves(K, V, v.dtype, state.dtype):
        refuse(OP, NEEDS_FULL)
    if out is None:
        out = torch.empty((R, T, HV, V), dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    q, k, v = rows_aligned(q), rows_aligned(k), rows_aligned(v)
    if g.stride() != beta.stride() or g.stride(-1) != 1:
        g, beta = g.contiguous(), beta.contiguous()
    if ancestors_RTW.stride(-1) != 1:
        ancestors_RTW = ancestors_RTW.contiguous()
    form = choose_form(T) if form is None else form
    library.ops.gdn_tree_verify(
        *(q, k, v, g, beta),
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        state,
        state_indices_R.to(torch.int32).contiguous(),
        num_nodes_R.to(torch.int32).contiguous(),
        ancestors_RTW.view(torch.int32),
        out,
        *(stash_rows or (out, out)),
        *stash_gates,
        scale,
        A_log is not None,
        stash_rows is not None,
        *form,
    )
    return out


def why_not(K: int, V: int, rows: torch.dtype, state: torch.dtype) -> str | None:
    """Why the kernel cannot serve a model on this machine's GPU, in one line; None if it can.

    Args:
        K, V: head dims.
        rows: dtype of q, k and v.
        state: dtype of the recurrent states.
    """
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        return f"it takes head dims {HEAD_DIMS}, got K = {K} and V_h = {V}"
    if rows not in DTYPES or state not in STATE_DTYPES:
        return f"it takes 16-bit rows and float32 or bfloat16 states, got {rows} and {state}"
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        return f"it is compiled for compute capability 9.0, not {capability[0]}.{capability[1]}"
    try:
        kind = load_library().kind
    except NotBuilt as error:
        return str(error)
    if kind == "quick" and not quick_serves(K, V, rows, state):
        return NEEDS_FULL
    return None


def quick_serves(K: int, V: int, rows: torch.dtype, state: torch.dtype) -> bool:
    """Whether a library of kind "quick" has the kernel for these head dims and dtypes."""
    return K == V == 128 and rows == torch.bfloat16 and state == torch.float32


def check_supported(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, qk_l2norm: bool
) -> None:
    """Refuse what the kernel does not take."""
    line = None
    K, V = k.shape[-1], v.shape[-1]
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        line = f"takes head dims {HEAD_DIMS}, got K = {K} and V_h = {V}"
    elif v.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        line = f"takes q, k and v in float16 or in bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
    elif not qk_l2norm:
        line = "needs qk_l2norm: its products are too coarse for rows of any length"
    elif state.dtype not in STATE_DTYPES:
        line = f"takes states in float32 or bfloat16, got {state.dtype}"
    elif g.dtype not in GATE_DTYPES or g.dtype != beta.dtype:
        line = f"takes g and beta in float32 or a narrower dtype, got {g.dtype} and {beta.dtype}"
    elif state.stride()[1:] != (V * K, K, 1):
        line = f"needs states that are dense within a slot, strides are {state.stride()}"
    if line is not None:
        refuse(OP, f'the cuda backend {line}: use backend="triton" or "reference"')
