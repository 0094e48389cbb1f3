# SPDX-License-Identifier: Apache-2.0
"""Trees of the running requests, and the part of one batch that verifies them.

:class:`RequestTrees` keeps one tree per request slot between proposal and verification.
:class:`RowLayout` maps between a batch's flat entries and rows [requests, T].
:class:`TreeStep` is one step's view: which leading requests of the batch carry a tree, and, after
sampling, which path was accepted. :class:`StepBuffers` holds the trees of a batch whose requests
all have as many rows, at addresses that a captured CUDA graph can go on reading. None knows of
layers, caches or sampling parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_weaver.ops import StepTensors, StoredTrees, conv_table, prepare_step, store_trees
from vllm_weaver.tree import DraftTree


def tree_tensors(tree: DraftTree) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, depths, num_nodes and ancestors, as the ops take them."""
    return tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors


class RequestTrees:
    """One tree of up to ``budget`` nodes for each request slot, in address-stable buffers.

    A slot without a proposal holds the root alone, so a stale or placeholder draft is never
    accepted.
    """

    def __init__(self, max_requests: int, budget: int, device: torch.device):
        rows, words = budget + 1, (budget + 1 + 63) // 64
        self.budget = budget
        self.parents = torch.full((max_requests, rows), -1, dtype=torch.int32, device=device)
        self.depths = torch.zeros((max_requests, rows), dtype=torch.int32, device=device)
        self.ancestors = torch.zeros((max_requests, rows, words), dtype=torch.int64, device=device)
        self.num_nodes = torch.ones(max_requests, dtype=torch.int32, device=device)
        self.ancestors[:, 0, 0] = 1

    def reset(self, slot: int) -> None:
        """Forget the tree of a slot that a request has just entered."""
        self.num_nodes[slot].fill_(1)

    def forget(self, slots_R: torch.Tensor) -> None:
        """The same of the slots ``slots_R``, integers, without waiting for the device.

        An assignment by index would copy its value from the host, and wait.
        """
        self.num_nodes.index_fill_(0, slots_R.long(), 1)

    def stored(self) -> StoredTrees:
        """The buffers, as the ops take them."""
        return StoredTrees(self.parents, self.depths, self.num_nodes, self.ancestors)

    def store(self, slots_R: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Keep the proposed trees of the requests in ``slots_R`` (int64).

        Returns:
            Tokens of the trees in node order, roots excluded, int64 [R, budget].
        """
        tokens = torch.empty(len(slots_R), self.budget, dtype=torch.int64, device=slots_R.device)
        store_trees(tree_tensors(tree), slots_R, self.stored(), tokens)
        return tokens

    def load(
        self, slots_R: torch.Tensor, tokens_RT: torch.Tensor, limits_R: torch.Tensor
    ) -> DraftTree:
        """Trees as they were scheduled: the first ``limits_R`` nodes, with the verified tokens.

        Args:
            slots_R: request slots, int64 [R].
            tokens_RT: tokens of the rows, [R, T] with T at most ``budget + 1``.
            limits_R: rows that the scheduler kept, root included, int32 [R].
        """
        rows = tokens_RT.shape[1]
        words = (rows + 63) // 64
        return DraftTree(
            tokens=tokens_RT.to(torch.int32),
            parents=self.parents[slots_R, :rows],
            depths=self.depths[slots_R, :rows],
            num_nodes=torch.minimum(self.num_nodes[slots_R], limits_R),
            ancestors=self.ancestors[slots_R, :rows, :words],
        )


class RowLayout:
    """Where the rows of the leading requests of a batch lie among its flat entries.

    Attributes:
        num_requests: n.
        num_entries: flat entries that belong to them; they come first in the batch.
        num_rows: T, rows of the request that has most.
        counts: rows of each request, int32 [n].
        index: flat entry of each row, int64 [n, T]; rows that do not exist repeat row 0.
        row_of_entry: flat row (request * T + row) of each entry, int64 [num_entries].
        exists: whether a row exists, bool [n, T].
        uniform: all requests have T rows, so that rows and entries coincide.
    """

    def __init__(self, counts: np.ndarray, device: torch.device):
        counts = counts.astype(np.int32)
        rows = int(counts.max())
        starts = np.concatenate(([0], np.cumsum(counts)))
        row = np.arange(rows)
        exists = row[None, :] < counts[:, None]
        index = np.where(exists, starts[:-1, None] + row[None, :], starts[:-1, None])
        self.num_requests = len(counts)
        self.num_entries = int(starts[-1])
        self.num_rows = rows
        self.uniform = bool((counts == rows).all())
        self.counts = upload(counts, device)
        self.index = upload(index.astype(np.int64), device)
        self.row_of_entry = upload(np.flatnonzero(exists), device)
        self.exists = upload(exists, device)

    @classmethod
    def of(cls, counts: np.ndarray, device: torch.device) -> RowLayout:
        """The layout of requests with ``counts`` rows; that of equal counts is made only once."""
        if (counts == counts[0]).all():
            return _uniform_layout(len(counts), int(counts[0]), device)
        return cls(counts, device)

    def pack(self, entries: torch.Tensor) -> torch.Tensor:
        """Rows [n, T, ...] of a flat tensor; rows that do not exist hold anything."""
        if self.uniform:
            return entries[: self.num_entries].unflatten(0, (self.num_requests, self.num_rows))
        return entries[self.index]

    def flatten(self, rows: torch.Tensor) -> torch.Tensor:
        """Flat entries [num_entries, ...] of rows [n, T, ...]."""
        flat = rows.flatten(0, 1)
        return flat if self.uniform else flat[self.row_of_entry]

    def path_first(self, path: torch.Tensor, length: torch.Tensor, total: int) -> torch.Tensor:
        """Order of ``total`` flat entries in which each path leads its request's rows.

        Args:
            path: accepted rows [n, D + 1], root first, padded with -1; row ids ascend.
            length: rows on each path [n], at least 1.
            total: entries of the batch, at least ``num_entries``.

        Returns:
            int64 [total]: entry i is the one to put at place i. Places past a path keep their
            own entry and are not meaningful.
        """
        order = torch.arange(total, device=self.index.device)
        width = min(path.shape[1], self.num_rows)
        on_path = torch.arange(width, device=path.device) < length[:, None]
        source = self.index.gather(1, path[:, :width].long().clamp(min=0))
        # Where the path has ended, write the root to the root's place once more.
        root = self.index[:, :1]
        place = torch.where(on_path, self.index[:, :width], root)
        order[place.flatten()] = torch.where(on_path, source, root).flatten()
        return order


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def _uniform_layout(num_requests: int, num_rows: int, device: torch.device) -> RowLayout:
    return RowLayout(np.full(num_requests, num_rows), device)


def depth_offset(tree: DraftTree, layout: RowLayout) -> torch.Tensor:
    """Depth less row number of each flat entry, int64 [num_entries].

    Added to an entry's linear position it gives the position of its node; 0 past ``num_nodes``.
    """
    row = torch.arange(layout.num_rows, device=tree.depths.device)
    offset = tree.depths.long() - row
    return layout.flatten(torch.where(tree.live_rows(), offset, torch.zeros_like(offset)))


@dataclass
class TreeStep:
    """The leading requests of a batch, each with one tree to verify.

    Attributes:
        layout: their rows among the batch's tokens.
        slots: request slots, int64 [n].
        tree: their trees, [n, T].
        context_lens: tokens of each request before its tree, int32 [n].
        offsets: depth less row number of each row, 0 past its nodes, int32 [n, T]; None where
            nothing has made them yet.
        positions: of each node by its depth, int64 [num_tokens]; None where nothing has made them
            yet.
        path, length: accepted nodes [n, D + 1] and their number [n]; set after sampling.
    """

    layout: RowLayout
    slots: torch.Tensor
    tree: DraftTree
    context_lens: torch.Tensor
    offsets: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    path: torch.Tensor | None = None
    length: torch.Tensor | None = None
    _conv_tables: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def create(
        cls,
        trees: RequestTrees,
        slots: torch.Tensor,
        row_counts: np.ndarray,
        input_ids: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> TreeStep:
        """Lay out the trees of the first ``len(row_counts)`` requests of a batch.

        Args:
            trees: the stored trees.
            slots: request slots, int64 [>= n].
            row_counts: scheduled rows of each tree, root included, host array [n].
            input_ids: tokens of the batch.
            seq_lens: tokens of each request with its rows, int32 [>= n].
        """
        layout = RowLayout.of(row_counts, input_ids.device)
        slots = slots[: layout.num_requests]
        return cls(
            layout=layout,
            slots=slots,
            tree=trees.load(slots, layout.pack(input_ids), layout.counts),
            context_lens=seq_lens[: layout.num_requests].to(torch.int32) - layout.counts,
        )

    @property
    def num_requests(self) -> int:
        """Requests of the batch that carry a tree."""
        return self.layout.num_requests

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch that are rows of trees."""
        return self.layout.num_entries

    def depth_offset(self) -> torch.Tensor:
        """:func:`depth_offset` of this step's trees, [num_entries]."""
        if self.offsets is not None:
            return self.offsets.flatten()
        return depth_offset(self.tree, self.layout)

    def conv_table(self, width: int) -> torch.Tensor:
        """Window table [n, T, width - 1] of a causal convolution, made once for all layers."""
        if width not in self._conv_tables:
            self._conv_tables[width] = conv_table(self.tree.parents, self.tree.num_nodes, width)
        return self._conv_tables[width]

    def with_path(self, path: torch.Tensor, length: torch.Tensor) -> TreeStep:
        """This step with its accepted path; ``path`` [>= n, D + 1], ``length`` [>= n]."""
        n = self.num_requests
        return dataclasses.replace(self, path=path[:n], length=length[:n])

    def describe(self) -> list[dict[str, Any]]:
        """Trees and accepted paths as plain lists, one per request; waits for the device."""
        if self.path is None or self.length is None:
            return []
        tree = self.tree
        columns = (tree.tokens, tree.parents, tree.depths, tree.num_nodes, self.path, self.length)
        return [
            {
                "tokens": tokens[:nodes],
                "parents": parents[:nodes],
                "depths": depths[:nodes],
                "path": path[:length],
            }
            for tokens, parents, depths, nodes, path, length in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


class StepBuffers:
    """Trees of a batch whose requests all have T rows, at addresses that stay.

    A captured graph of R requests reads the first R * T places of every buffer, whichever batch
    has been put there; requests beyond the batch have no nodes, so that nothing is computed for
    them and nothing written.

    Args:
        max_requests: most requests of a batch.
        entries: most rows of a batch, over all its requests.
        max_rows: most rows T of a request, root included.
        conv_width: taps of the target's causal convolution; 0 if it has none.
        device: where the buffers live.
    """

    def __init__(
        self,
        max_requests: int,
        entries: int,
        max_rows: int,
        conv_width: int,
        device: torch.device,
    ):
        words = (max_rows + 63) // 64
        self._max_requests, self._entries = max_requests, entries
        self._conv_width = conv_width

        def flat(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._tokens, self._parents, self._depths = flat(entries), flat(entries), flat(entries)
        self._ancestors = flat(entries * words, torch.int64)
        self._num_nodes, self._context_lens = flat(max_requests), flat(max_requests)
        self._offsets = flat(entries)
        # A graph reads no slots: a step has those of its batch.
        self._no_slots = flat(max_requests, torch.int64)
        self._conv_table = flat(entries * max(conv_width - 1, 0))
        self._views: dict[tuple[int, int], TreeStep] = {}

    def fits(self, num_requests: int, num_rows: int) -> bool:
        """Whether there is room for so many requests of so many rows."""
        return num_requests <= self._max_requests and num_requests * num_rows <= self._entries

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, torch.Tensor))

    def _tensors(self, num_requests: int, num_rows: int) -> StepTensors:
        """The buffers' first places as a batch of that shape."""
        entries, words = num_requests * num_rows, (num_rows + 63) // 64

        def rows(flat: torch.Tensor, last: int | None = None) -> torch.Tensor:
            part = flat[: entries * (1 if last is None else last)]
            return part.view(num_requests, num_rows, *([] if last is None else [last]))

        return StepTensors(
            tokens=rows(self._tokens),
            parents=rows(self._parents),
            depths=rows(self._depths),
            num_nodes=self._num_nodes[:num_requests],
            ancestors=rows(self._ancestors, words),
            context_lens=self._context_lens[:num_requests],
            offsets=rows(self._offsets),
            conv_table=rows(self._conv_table, max(self._conv_width - 1, 0)),
        )

    def view(self, num_requests: int, num_rows: int) -> TreeStep:
        """The trees of the first ``num_requests`` requests of ``num_rows`` rows, as they stand."""
        key = num_requests, num_rows
        if key not in self._views:
            x = self._tensors(num_requests, num_rows)
            step = TreeStep(
                layout=_uniform_layout(num_requests, num_rows, self._tokens.device),
                slots=self._no_slots[:num_requests],
                tree=DraftTree(x.tokens, x.parents, x.depths, x.num_nodes, x.ancestors),
                context_lens=x.context_lens,
                offsets=x.offsets,
            )
            if self._conv_width > 1:
                step._conv_tables[self._conv_width] = x.conv_table
            self._views[key] = step
        return self._views[key]

    def fill(
        self,
        trees: RequestTrees,
        slots: torch.Tensor,
        num_rows: int,
        query_start_loc: torch.Tensor,
        input_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        padded: int,
    ) -> TreeStep:
        """Put a batch into the buffers; requests of the graph beyond it have no nodes.

        Args:
            trees: the stored trees.
            slots: request slots, int64 [n]; none for a graph that is about to be captured.
            num_rows: T, scheduled rows of each request, root included.
            query_start_loc: first entry of each request in the batch, int32 [>= n + 1].
            input_ids: tokens of the batch, [>= n * T].
            seq_lens: tokens of each request with its rows, int32 [>= n].
            padded: requests of the graph, at least n.

        Returns:
            The step of all ``padded`` requests; that of the batch's is :meth:`of`.
        """
        starts = query_start_loc[: len(slots) + 1]
        out = self._tensors(padded, num_rows)
        prepare_step(trees.stored(), slots, starts, seq_lens, input_ids, None, out)
        return self.view(padded, num_rows)

    def of(self, slots: torch.Tensor, num_rows: int) -> TreeStep:
        """The step of the requests in these slots, int64 [n], which were put there first."""
        return dataclasses.replace(self.view(len(slots), num_rows), slots=slots)
