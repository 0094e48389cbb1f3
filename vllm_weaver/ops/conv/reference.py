# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution on trees and sequences, in plain PyTorch: the definition.

Spec section 5, "Conv on a tree". Every form gathers its windows through one int table of row
numbers. The module knows nothing of what the channels hold, of vLLM, or of what filled the slots.

Legend: R requests; T rows of a tree, root included; C channels; W convolution width; H = W - 1
hops; M packed tokens; N rows of any kind; L columns of an accepted path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_weaver.ops.slots import RowBlanker, read_slots, write_slots

BLOCK_ELEMENTS = 1 << 18
"""Elements convolved at a time: keeps the temporaries of a long prompt in a core's cache."""


@dataclass(frozen=True)
class ConvStash:
    """What a commit needs of a verified tree: its raw rows. Opaque to callers but for `select`."""

    x: Tensor
    backend: str = "reference"

    def select(self, requests: Tensor | slice) -> ConvStash:
        """Keep some of the requests, in the order given."""
        return replace(self, x=self.x[requests])


def conv_table(parents_RT: Tensor, num_nodes_R: Tensor, width: int) -> Tensor:
    """Where the window of every node lies: a table for all layers of a step (spec section 5).

    =========  =============  =====  ======  =======================================================
    name       shape          dtype  in/out  meaning
    =========  =============  =====  ======  =======================================================
    parents    [R, T]         int32  in      parent of each node, -1 at the root; past `num_nodes`
                                             anything
    num_nodes  [R]            int32  in      live nodes, root included
    table      [R, T, W - 1]  int32  out     entry h: the row h + 1 hops before the node. j >= 0 is
                                             node j; -1, -2, ... are the committed rows, most recent
                                             first. All -1 past `num_nodes`
    =========  =============  =====  ======  =======================================================
    """
    T = parents_RT.shape[1]
    node_T = torch.arange(T, device=parents_RT.device)
    live_RT = node_T < num_nodes_R[:, None]
    parent_RT = torch.where(live_RT, parents_RT, -1).long()
    row_RT = node_T.expand_as(parent_RT)
    hops = []
    for _ in range(width - 1):
        above = parent_RT.gather(1, row_RT.clamp(min=0))
        row_RT = torch.where(row_RT >= 0, above.clamp(min=-1), row_RT - 1)
        hops.append(torch.where(live_RT, row_RT, -1))
    if not hops:
        return parent_RT.new_empty((*parent_RT.shape, 0), dtype=torch.int32)
    return torch.stack(hops, dim=-1).int()


def tree_conv(
    x_RTC: Tensor,
    conv_state: Tensor,
    state_indices_R: Tensor,
    weight_CW: Tensor,
    num_nodes_R: Tensor,
    table_RTH: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, ConvStash]:
    """Reference of `causal_conv1d_tree`, the table given."""
    R, T, C = x_RTC.shape
    W = weight_CW.shape[1]
    dtype = torch.promote_types(x_RTC.dtype, conv_state.dtype)
    history = read_slots(conv_state, state_indices_R).to(dtype)
    # Node j is row W - 1 + j of its request, and the committed rows come before it, oldest first;
    # so the table's numbers, W - 1 added, are row numbers.
    rows = torch.cat([history, x_RTC.to(dtype)], dim=1)
    base = torch.arange(R, device=x_RTC.device)[:, None, None] * rows.shape[1] + (W - 1)
    y_NC = _convolve(
        rows.view(-1, C),
        x_RTC.reshape(-1, C),
        (table_RTH + base).view(R * T, W - 1),
        weight_CW,
        bias_C,
        activation,
    )
    node_T = torch.arange(T, device=x_RTC.device)
    live_RT = (node_T < num_nodes_R[:, None]) & (state_indices_R >= 0)[:, None]
    return RowBlanker(live_RT)(y_NC.view(R, T, C)), ConvStash(rows[:, W - 1 :])


def commit_conv(
    stash: ConvStash,
    path_RL: Tensor,
    length_R: Tensor,
    conv_state: Tensor,
    state_indices_R: Tensor,
    source_indices_R: Tensor,
) -> None:
    """Reference of `conv_commit`."""
    C, T, H = stash.x.shape[2], stash.x.shape[1], conv_state.shape[1]
    rows = torch.cat([read_slots(conv_state, source_indices_R).to(stash.x.dtype), stash.x], dim=1)
    # Position of each kept row on the path; below 0 it is a row of the old state.
    position_RH = length_R.long()[:, None] + torch.arange(-H, 0, device=rows.device)
    node_RH = path_RL.long().gather(1, position_RH.clamp(0, path_RL.shape[1] - 1))
    row_RH = H + torch.where(position_RH >= 0, node_RH.clamp(0, T - 1), position_RH)
    kept = rows.gather(1, row_RH[..., None].expand(-1, -1, C))
    live_R = (state_indices_R >= 0) & (source_indices_R >= 0) & (length_R > 0)
    write_slots(conv_state, state_indices_R, kept, live_R)


def prefill_conv(
    x_MC: Tensor,
    conv_state: Tensor,
    state_indices_R: Tensor,
    weight_CW: Tensor,
    query_start_loc: Tensor,
    has_initial_state_R: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Reference of `causal_conv1d_prefill`."""
    M, C = x_MC.shape
    R, W = len(state_indices_R), weight_CW.shape[1]
    H = W - 1
    device = x_MC.device
    start_R, end_R = query_start_loc[:-1].long(), query_start_loc[1:].long()
    dtype = torch.promote_types(x_MC.dtype, conv_state.dtype)
    history = read_slots(conv_state, state_indices_R).to(dtype)
    history = torch.where(has_initial_state_R[:, None, None], history, 0)
    rows = torch.cat([history.view(R * H, C), x_MC.to(dtype)])

    def row_number(request: Tensor, position: Tensor) -> Tensor:
        """Row of `rows` at a position of a request's sequence; below 0 it lies in the history."""
        return torch.where(
            position >= 0, R * H + start_R[request] + position, (request + 1) * H + position
        )

    token_M = torch.arange(M, device=device)
    request_M = torch.searchsorted(end_R, token_M, right=True)
    live_M = request_M < R
    request_M = request_M.clamp(max=R - 1)
    live_M &= state_indices_R[request_M] >= 0
    # Tokens past the last sequence are no request's: any row serves, since their output is dropped.
    position_M = torch.where(live_M, token_M - start_R[request_M], 0)
    hop_H = torch.arange(1, W, device=device)
    table_MH = row_number(request_M[:, None], position_M[:, None] - hop_H)
    y_MC = _convolve(rows, x_MC, table_MH, weight_CW, bias_C, activation)

    length_R = end_R - start_R
    request_R = torch.arange(R, device=device)
    last_RH = length_R[:, None] + torch.arange(-H, 0, device=device)
    kept = rows[row_number(request_R[:, None], last_RH)]
    write_slots(conv_state, state_indices_R, kept, (state_indices_R >= 0) & (length_R > 0))
    return RowBlanker(live_M[None])(y_MC[None])[0]


def _convolve(
    rows: Tensor,
    x_NC: Tensor,
    table_NH: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Weighted sum of each row's window: the row itself, then hop by hop; then bias and activation.

    The order is fixed and each product and sum is rounded by itself, so that a row's result does
    not depend on how many rows are computed with it. For the same reason SiLU is spelt out: the
    fused one rounds the last few elements of a thread's share differently from the others.
    """
    work = torch.float64 if rows.dtype == torch.float64 else torch.float32
    weight_WC = weight_CW.to(work).t().contiguous()
    W, C = weight_WC.shape
    y_NC = torch.empty_like(x_NC, memory_format=torch.contiguous_format)
    block = max(1, BLOCK_ELEMENTS // C)
    for first in range(0, len(x_NC), block):
        part = slice(first, first + block)
        total = x_NC[part].to(work) * weight_WC[W - 1]
        for hop in range(W - 1):
            window = rows.index_select(0, table_NH[part, hop])
            total += window.to(work).mul_(weight_WC[W - 2 - hop])
        if bias_C is not None:
            total += bias_C.to(work)
        if activation == "silu":
            total /= torch.neg(total).exp_().add_(1)
        y_NC[part] = total
    return y_NC
