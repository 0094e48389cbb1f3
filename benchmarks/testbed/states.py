# SPDX-License-Identifier: Apache-2.0
"""Rows of text and what the frozen target computes over them, once, for all later training steps.

Target and text do not change while drafter and adapter are trained, so its layer outputs are kept:
2.5 kB per token at the nano size, on the GPU where they fit there, else in main memory. Knows
nothing of drafters, adapters or losses.

Shapes: B rows, T positions, N tokens of all rows side by side, n layers read, d width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor

from .target import RUNTIME, Target

_TOKENS_AT_ONCE = 65536
# Share of the free GPU memory that the states may take.
_MOST_OF_FREE = 0.7


@dataclasses.dataclass
class Rows:
    """`ids` [B, T] int; drafts of row b are trained from position `start[b]` on."""

    ids: Tensor
    start: Tensor


def part_rows(rows: int, most: int) -> int:
    """How many of `rows` rows to take at once, `most` at the most: as many each time if that is
    more than half of `most`, so that what is compiled for one shape serves all parts."""
    most = max(1, min(most, rows))
    even = next(n for n in range(most, 0, -1) if rows % n == 0)
    return even if 2 * even > most else most


def pass_rows(rows: int, length: int) -> int:
    """Of `rows` rows of `length` tokens, how many the target reads at once."""
    return part_rows(rows, _TOKENS_AT_ONCE // length)


@contextlib.contextmanager
def compiled(value: bool) -> Iterator[None]:
    """Within this context, pieces run compiled or not. Not: many shapes, no gradients."""
    before, RUNTIME.compiled = RUNTIME.compiled, value
    try:
        yield
    finally:
        RUNTIME.compiled = before


class TextStates:
    """Groups of rows, flat: `ids` [N], the outputs of the layers `layers` side by side
    (`auxiliary` [N, n * d]) and of the last layer, before the final norm (`last` [N, d]).
    The target's passes over rows of the groups `compiled` run compiled."""

    def __init__(
        self,
        target: Target,
        groups: Sequence[Rows],
        layers: tuple[int, ...],
        block: int,
        dtype: torch.dtype,
        compiled: Container[int] = (),
    ) -> None:
        self._compiled = compiled
        self._at_once = [pass_rows(*group.ids.shape) for group in groups]
        self.groups, self.block, self.layers = list(groups), block, layers
        self.device = groups[0].ids.device
        sizes = [group.ids.numel() for group in groups]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        width = target.shape.width
        place = self.device
        if place.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            needed = sum(sizes) * width * (len(layers) + 1) * dtype.itemsize
            place = place if needed < _MOST_OF_FREE * free else torch.device("cpu")
        self.place = place
        self.ids = torch.cat([group.ids.flatten() for group in groups]).int()
        self.auxiliary = torch.empty(sum(sizes), len(layers) * width, dtype=dtype, device=place)
        self.last = torch.empty(sum(sizes), width, dtype=dtype, device=place)
        with torch.no_grad():
            for i, group in enumerate(groups):
                self._read(target, i, 0, group.ids)

    def _read(self, target: Target, group: int, first: int, ids: Tensor) -> None:
        """The target's outputs over `ids`, which stand from row `first` of a group on."""
        begin = self.offsets[group] + first * ids.shape[1]
        with compiled(group in self._compiled):
            for part in ids.split(self._at_once[group]):
                _, auxiliary, last = target(part.long(), self.layers)
                assert auxiliary is not None
                where = slice(begin, begin + part.numel())
                self.auxiliary[where] = auxiliary.flatten(0, 1).to(self.auxiliary)
                self.last[where] = last.flatten(0, 1).to(self.last)
                begin += part.numel()

    def rows(self, group: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Of some rows of a group: ids [B, T], start [B], auxiliary [B, T, n * d], and the place
        of the first token in the flat order."""
        chosen = self.groups[group]
        ids, start = chosen.ids[first : first + count], chosen.start[first : first + count]
        begin = self.offsets[group] + first * ids.shape[1]
        auxiliary = self.auxiliary[begin : begin + ids.numel()].to(self.device)
        return ids.long(), start, auxiliary.view(*ids.shape, -1), begin

    @torch.no_grad()
    def refill(self, target: Target, group: int, first: int, rows: Rows) -> None:
        """Put other rows in the place of some of a group, with the target's outputs over them."""
        chosen, count = self.groups[group], len(rows.ids)
        chosen.ids[first : first + count] = rows.ids
        chosen.start[first : first + count] = rows.start
        begin = self.offsets[group] + first * rows.ids.shape[1]
        self.ids[begin : begin + rows.ids.numel()] = rows.ids.flatten()
        self._read(target, group, first, rows.ids)

    def pack(self, picks: Sequence[Tensor]) -> dict[str, Tensor]:
        """The rows `picks[g]` of each group g side by side as one packed sequence, in the form that
        `speculators` wants it."""
        places, positions, documents, trained = [], [], [], []
        count = 0
        for offset, group, pick in zip(self.offsets, self.groups, picks, strict=True):
            length = group.ids.shape[1]
            position = torch.arange(length, device=self.device).expand(len(pick), length)
            places.append((offset + pick[:, None] * length + position).flatten())
            positions.append(position.flatten())
            # A block must not run into the next row: no anchors, no loss, in a row's last block.
            inside = (position >= group.start[pick][:, None]) & (position < length - self.block)
            trained.append(inside.flatten())
            documents.append(torch.arange(len(pick), device=self.device).repeat_interleave(length))
            documents[-1] += count
            count += len(pick)
        place = torch.cat(places)
        stored = place.to(self.place)
        dtype = self.last.dtype
        return {
            "hidden_states": self.auxiliary[stored].to(self.device)[None],
            "input_ids": self.ids[place].long()[None],
            "loss_mask": torch.cat(trained).to(dtype)[None],
            "verifier_last_hidden_states": self.last[stored].to(self.device)[None],
            "document_ids": torch.cat(documents)[None],
            "position_ids": torch.cat(positions)[None],
        }

    def draw(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """`rows[g]` random rows of each group g, packed."""
        counts = zip(self.groups, rows, strict=True)
        return self.pack([torch.randint(len(g.ids), (n,), device=self.device) for g, n in counts])
