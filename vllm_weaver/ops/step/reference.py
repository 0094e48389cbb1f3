# SPDX-License-Identifier: Apache-2.0
"""Laying out a step's trees in plain PyTorch: the definition.

Shape legend: S request slots; R requests that the buffers hold; n of them live; T rows of a tree,
root included; W words of ancestor bits; H hops of a convolution window; N entries of the batch; A
axes of a position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_weaver.ops.conv.reference import conv_table

_WORD_BITS = 64


class StoredTrees(NamedTuple):
    """Trees by request slot: parents and depths [S, rows], num_nodes [S], all int32; ancestors
    [S, rows, ceil(rows / 64)], int64 words. Past `num_nodes` they hold anything.
    """

    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    ancestors: Tensor


class StepTensors(NamedTuple):
    """What `vllm_weaver.ops.prepare_step` fills; its docstring says what each tensor is for.

    All are int32 and contiguous but for `ancestors`, int64.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    ancestors: Tensor
    context_lens: Tensor
    offsets: Tensor
    conv_table: Tensor

    @classmethod
    def empty(cls, requests: int, rows: int, width: int, device: torch.device | str) -> StepTensors:
        """Buffers for R requests of T rows and a convolution of a width, uninitialised."""

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(requests, *shape, dtype=dtype, device=device)

        return cls(
            tokens=make(rows),
            parents=make(rows),
            depths=make(rows),
            num_nodes=make(),
            ancestors=make(rows, -(-rows // _WORD_BITS), dtype=torch.int64),
            context_lens=make(),
            offsets=make(rows),
            conv_table=make(rows, width - 1),
        )

    def first(self, requests: int) -> StepTensors:
        """The leading requests' part of each buffer, at the same addresses."""
        return StepTensors(*(buffer[:requests] for buffer in self))


def prepare_step_reference(
    stored: StoredTrees,
    slots_n: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    input_ids_N: Tensor,
    positions: Tensor | None,
    out: StepTensors,
) -> None:
    """The definition of `vllm_weaver.ops.prepare_step`, which has the tensor table."""
    n, T = len(slots_n), out.tokens.shape[1]
    device = input_ids_N.device
    slot_n = slots_n.long()
    starts_n, counts_n = query_start_loc[:-1].long(), query_start_loc.diff()
    nodes_n = torch.minimum(stored.num_nodes[slot_n], counts_n).clamp(max=T)
    row_T = torch.arange(T, device=device)
    live_nT = row_T < nodes_n[:, None]
    # Rows that are not there read the batch's first entry.
    entry_nT = torch.where(live_nT, starts_n[:, None] + row_T, 0)

    depths_nT = torch.where(live_nT, stored.depths[slot_n, :T], 0)
    parents_nT = torch.where(live_nT, stored.parents[slot_n, :T], -1)
    offsets_nT = torch.where(live_nT, depths_nT - row_T, 0)
    bit_T = torch.bitwise_left_shift(torch.ones_like(row_T), row_T % _WORD_BITS)
    word_W = torch.arange(out.ancestors.shape[2], device=device)
    own_TW = torch.where(word_W == (row_T // _WORD_BITS)[:, None], bit_T[:, None], 0)
    stored_nTW = stored.ancestors[slot_n, :T, : len(word_W)]

    dead = StepTensors(*[slot_n.new_zeros(())] * len(out))
    dead = dead._replace(parents=dead.parents - 1, conv_table=dead.parents - 1, ancestors=own_TW)
    for buffer, value in zip(out, dead, strict=True):
        buffer[n:] = value
    head = out.first(n)
    head.tokens.copy_(torch.where(live_nT, input_ids_N[entry_nT], 0))
    head.parents.copy_(parents_nT)
    head.depths.copy_(depths_nT)
    head.num_nodes.copy_(nodes_n)
    head.ancestors.copy_(torch.where(live_nT[:, :, None], stored_nTW, own_TW))
    head.context_lens.copy_(seq_lens_R[:n] - counts_n)
    head.offsets.copy_(offsets_nT)
    head.conv_table.copy_(conv_table(parents_nT, nodes_n, out.conv_table.shape[2] + 1))
    if positions is not None:
        # Dead rows add nothing to the batch's first entry.
        added = offsets_nT.long().flatten().expand(*positions.shape[:-1], -1)
        positions.index_add_(-1, entry_nT.flatten(), added)


def state_slots_reference(
    block_table: Tensor, seq_lens_R: Tensor, num_nodes_R: Tensor, block_size: int, out_R: Tensor
) -> None:
    """The definition of `vllm_weaver.ops.state_slots`, which has the tensor table."""
    blocks_R = block_table[:, 0]
    if block_size:
        column_R = ((seq_lens_R - 1) // block_size).clamp(min=0).long()
        blocks_R = block_table.gather(1, column_R[:, None])[:, 0]
    out_R.copy_(torch.where((blocks_R > 0) & (num_nodes_R > 0), blocks_R, -1))
