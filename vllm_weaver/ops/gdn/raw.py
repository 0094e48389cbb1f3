# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet verification from the raw rows before the convolution, on a GPU.

The convolution in Triton and the verification in Triton or CUDA, two launches, with the least
stash: the raw rows, which the convolution's commit needs anyway, and the gates. The exact commit
makes k and v again from them.

A delayed commit has no use for the raw rows: the convolution's state is committed before this
step's convolution reads it, which takes away the history of the earlier step's rows. What it reads
are the activated rows, which each layer then keeps from one step to the next, in two buffers that
alternate.

The module knows nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_weaver.ops.conv.reference import ConvStash
from vllm_weaver.ops.conv.triton import tree_conv
from vllm_weaver.ops.dispatch import refuse
from vllm_weaver.ops.gdn import cuda
from vllm_weaver.ops.gdn.reference import GdnPending
from vllm_weaver.ops.gdn.triton import GdnTritonStash, Tiling, launch_verify
from vllm_weaver.ops.gdn.triton_pending import refuse_shared


@dataclass(frozen=True)
class GdnRawStash:
    """What a commit needs of a tree verified from raw rows: those, the conv's inputs and the gates.

    `conv_state` is read by the commit, which must come before that of the convolution. Opaque to
    callers but for `select`.
    """

    conv: ConvStash
    conv_state: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None
    activation: str | None
    g_RTH: Tensor
    beta_RTH: Tensor
    key_heads: int
    qk_l2norm: bool
    backend: str = "triton"

    def rows_stash(self, rows: Tensor, K: int) -> GdnTritonStash:
        """The stash of rows of the same tree: views of `rows` [R, T, C], the activated ones.

        K: key dim.
        """
        HV, C = self.g_RTH.shape[2], rows.shape[2]
        keys = self.key_heads * K
        _, k, v = rows.split([keys, keys, C - 2 * keys], -1)
        return GdnTritonStash(
            k.unflatten(-1, (self.key_heads, K)),
            v.unflatten(-1, (HV, -1)),
            self.g_RTH,
            self.beta_RTH,
            self.qk_l2norm,
        )

    def select(self, requests: Tensor | slice) -> GdnRawStash:
        """Keep some of the requests, in the order given."""
        return replace(
            self,
            conv=self.conv.select(requests),
            g_RTH=self.g_RTH[requests],
            beta_RTH=self.beta_RTH[requests],
        )


def tree_verify_raw(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    table: Tensor,
    key_heads: int,
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    scale: float | None = None,
    qk_l2norm: bool = True,
    max_depth: int | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    stash: GdnRawStash | None = None,
    pending: GdnPending | None = None,
    backend: str = "triton",
    tiling: Tiling | None = None,
) -> tuple[Tensor, GdnRawStash]:
    """`causal_conv1d_tree`, `gdn_gate` and `gdn_tree_verify` of one layer (spec section 5).

    =============  ====================  =======  ======  ==========================================
    name           shape                 dtype    in/out  meaning
    =============  ====================  =======  ======  ==========================================
    x              [R, T, C]             float    in      raw rows: q | k | v channels
    conv_state     [slots, W - 1, C]     float    in      committed raw rows, oldest first
    weight, bias   [C, W], [C]           float    in      taps, oldest first; bias None: none
    a, b           [R, T, HV]            float    in      raw gates
    A_log,         [HV]                  float    in      of the gates
    dt_bias
    state          [slots, HV, V_h, K]   float    in      recurrent states
    state_indices  [R]                   int32    in      slot of each request; below 0: inert
    num_nodes      [R]                   int32    in      live nodes, root included
    ancestors      [R, T, ceil(T / 64)]  int64    in      of `ancestor_words`
    table          [R, T, W - 1]         int32    in      of `conv_table`
    key_heads      number                         in      HK
    rows           [R, T, C]             x's      out     activated rows: scratch that layers may
                                                          share. None: made here
    out            [R, T, HV, V_h]       x's      out     o; zeros past `num_nodes`
    stash          opaque                         out     for `gdn_commit`, which must come before
                                                          `conv_commit` of `stash.conv`. If one of
                                                          an earlier call is given, its buffers are
                                                          overwritten
    pending        opaque                         in      path of an earlier step to commit into
                                                          `state` before, as in `gdn_tree_verify`;
                                                          its stash is of `rows_stash`, of other
                                                          `rows` than these. `conv_commit` of that
                                                          step comes before; "triton" alone
    =============  ====================  =======  ======  ==========================================

    Args:
        backend: of the verification, "triton" or "cuda" (`csrc/README.md` says how to build it),
            or "auto", whichever is faster at this size; "triton" commits the stash of both.
        tiling: of "triton"; None chooses.

    Raises:
        ValueError: unknown backend, or head dim, number of rows, dtype, stride or device that the
            kernels do not take.
    """
    if backend not in ("triton", "cuda", "auto"):
        refuse("gdn_tree_verify", f"raw rows have backends triton, cuda and auto, not {backend!r}")
    R, T, _ = x.shape
    HV, V, K = state.shape[1:]
    if backend == "auto":
        backend = "cuda" if pending is None and cuda.is_faster(R, T, HV) else "triton"
    if pending is not None:
        if backend == "cuda":
            refuse("gdn_tree_verify", cuda.NO_PENDING)
        # The convolution writes rows before the verification's launch could be refused.
        refuse_shared("gdn_tree_verify", pending, () if rows is None else (rows,))
    conv = None if stash is None else stash.conv
    y, conv = tree_conv(
        *(x, conv_state, state_indices, weight, num_nodes, table, bias, activation),
        out=rows,
        stash=conv,
    )
    if stash is None:
        gates = torch.empty((2, R, T, HV), dtype=torch.float32, device=x.device)
        stash = GdnRawStash(
            *(conv, conv_state, weight, bias, activation),
            *(gates[0], gates[1], key_heads, qk_l2norm),
        )
    q, k, v = y.split([key_heads * K, key_heads * K, HV * V], dim=-1)
    verify = (
        cuda.launch_verify
        if backend == "cuda"
        else partial(launch_verify, max_depth=max_depth, tiling=tiling, pending=pending)
    )
    out = verify(
        (q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V)), a, b),
        state,
        state_indices,
        num_nodes,
        ancestors,
        K**-0.5 if scale is None else scale,
        qk_l2norm,
        stash_rows=None,
        stash_gates=(stash.g_RTH, stash.beta_RTH),
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
    )
    return out, replace(
        stash,
        conv=conv,
        conv_state=conv_state,
        weight_CW=weight,
        bias_C=bias,
        activation=activation,
        key_heads=key_heads,
        qk_l2norm=qk_l2norm,
    )
