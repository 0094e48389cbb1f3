# SPDX-License-Identifier: Apache-2.0
"""The draft tree as a batch of tensors: who is whose parent, how deep, and who sees whom.

Every other part (verification, attention mask, acceptance, commit) reads a tree in this form. The
module does not know where the nodes come from, which model proposed them or what a token means.

Shape legend: R requests; T rows of a tree, root included; D draft depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BUDGET = 255
"""Largest number of nodes below the root."""

WORD_BITS = 64
"""Ancestor bits held by one int64 word."""

_INTEGER_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_budget(budget: int) -> int:
    """Return `budget`, or raise ValueError when it is not an integer in 1..255."""
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ValueError(f"budget must be an int, got {budget!r}: pass the number of tree nodes")
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(
            f"budget {budget} is outside 1..{MAX_BUDGET}: "
            "it counts the tree's nodes without the root, choose one in that range"
        )
    return budget


def num_words(num_rows: int) -> int:
    """int64 words that hold one bit for each of `num_rows` rows."""
    return -(-num_rows // WORD_BITS)


def row_bits(num_rows: int, device: torch.device) -> Tensor:
    """[T, ceil(T / 64)] int64: row i has bit i % 64 of word i // 64 set and no other."""
    rows = torch.arange(num_rows, device=device)
    words = torch.arange(num_words(num_rows), device=device)
    bit = torch.bitwise_left_shift(torch.ones_like(rows), rows % WORD_BITS)
    return torch.where(words == (rows // WORD_BITS)[:, None], bit[:, None], 0)


@dataclass(slots=True, eq=False)
class DraftTree:
    """R draft trees of up to T rows each. Source: spec section 3 and the head of the spec.

    Row 0 is the root (the last sampled token). Parents come before children, so every prefix of
    the rows is a valid subtree. Rows from `num_nodes` on are no part of the tree: the builders
    fill them with tokens 0, parents -1, depths 0, ancestors 0, and readers must ignore them
    whatever they hold. A request with `num_nodes` 0 has no tree at all and is inert.

    | name      | shape               | dtype | meaning                                         |
    |-----------|---------------------|-------|-------------------------------------------------|
    | tokens    | [R, T]              | int32 | token of the row                                |
    | parents   | [R, T]              | int32 | row of the parent, -1 for the root              |
    | depths    | [R, T]              | int32 | edges from the root                             |
    | num_nodes | [R]                 | int32 | rows in use, root included                      |
    | ancestors | [R, T, ceil(T/64)]  | int64 | bit j % 64 of word j // 64 is set when j is an  |
    |           |                     |       | ancestor of the row or the row itself           |

    Index tensors of another integer dtype are converted. Raises ValueError when shapes, dtypes or
    devices disagree; `validate` checks the contents as well.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    ancestors: Tensor

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "depths", "num_nodes"):
            setattr(self, name, _as_int32(name, getattr(self, name)))
        if self.tokens.dim() != 2 or self.tokens.shape[1] < 1:
            raise ValueError(
                f"tokens has shape {tuple(self.tokens.shape)}: expected [requests, rows] "
                "with at least the root's row"
            )
        num_requests, num_rows = self.tokens.shape
        expected = {
            "parents": (num_requests, num_rows),
            "depths": (num_requests, num_rows),
            "num_nodes": (num_requests,),
            "ancestors": (num_requests, num_rows, num_words(num_rows)),
        }
        for name, shape in expected.items():
            value: Tensor = getattr(self, name)
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, but tokens of shape "
                    f"{(num_requests, num_rows)} needs {shape}"
                )
            if value.device != self.tokens.device:
                raise ValueError(
                    f"{name} is on {value.device}, tokens on {self.tokens.device}: "
                    "put all tensors of a tree on one device"
                )
        if self.ancestors.dtype != torch.int64:
            raise ValueError(
                f"ancestors is {self.ancestors.dtype}: pass int64 words (DraftTree.from_parents "
                "derives them)"
            )

    @classmethod
    def from_parents(cls, tokens_RT: Tensor, parents_RT: Tensor, num_nodes_R: Tensor) -> DraftTree:
        """Derive depths and ancestor bits from parents; rows past `num_nodes_R` are cleared.

        | name        | shape  | dtype   | meaning                                             |
        |-------------|--------|---------|-----------------------------------------------------|
        | tokens_RT   | [R, T] | integer | token of each row                                   |
        | parents_RT  | [R, T] | integer | parent row, before the child; below 0 for the root  |
        | num_nodes_R | [R]    | integer | rows in use; later rows may hold anything           |

        Pointer doubling: after step s a row knows its ancestors up to 2^s edges away, so
        ceil(log2 T) steps reach the root of any tree.
        """
        parents_RT = _as_int32("parents", parents_RT)
        num_nodes_R = _as_int32("num_nodes", num_nodes_R)
        if parents_RT.dim() != 2 or tokens_RT.shape != parents_RT.shape:
            raise ValueError(
                f"tokens has shape {tuple(tokens_RT.shape)} and parents "
                f"{tuple(parents_RT.shape)}: both must be [requests, rows]"
            )
        num_requests, num_rows = parents_RT.shape
        if tuple(num_nodes_R.shape) != (num_requests,):
            raise ValueError(
                f"num_nodes has shape {tuple(num_nodes_R.shape)}, "
                f"but {num_requests} requests need {(num_requests,)}"
            )
        device = parents_RT.device
        live_RT = torch.arange(num_rows, device=device) < num_nodes_R[:, None]
        parents_RT = torch.where(live_RT, parents_RT, -1)

        # One row beyond the tree stands for "above the root": no bits, no depth, its own parent.
        jump = torch.where(parents_RT < 0, num_rows, parents_RT).long()
        jump = torch.nn.functional.pad(jump, (0, 1), value=num_rows)
        depths = torch.nn.functional.pad((parents_RT >= 0).int(), (0, 1))
        bits = torch.where(live_RT[:, :, None], row_bits(num_rows, device), 0)
        bits = torch.nn.functional.pad(bits, (0, 0, 0, 1))
        for _ in range((num_rows - 1).bit_length()):
            bits = bits | bits.gather(1, jump[:, :, None].expand_as(bits))
            depths = depths + depths.gather(1, jump)
            jump = jump.gather(1, jump)
        return cls(
            tokens=torch.where(live_RT, tokens_RT, 0),
            parents=parents_RT,
            depths=depths[:, :num_rows].contiguous(),
            num_nodes=num_nodes_R,
            ancestors=bits[:, :num_rows].contiguous(),
        )

    @classmethod
    def chain(
        cls, root_tokens_R: Tensor, tokens_RD: Tensor, *, num_rows: int | None = None
    ) -> DraftTree:
        """The tree without branches: row i's parent is row i - 1. D may be 0 (a bare root).

        | name          | shape  | dtype   | meaning                                            |
        |---------------|--------|---------|----------------------------------------------------|
        | root_tokens_R | [R]    | integer | last sampled token of each request                 |
        | tokens_RD     | [R, D] | integer | draft tokens, shallowest first                     |
        | num_rows      |        | int     | T, to share a batch with wider trees; D + 1 if None |

        Raises ValueError when the shapes disagree or `num_rows` is below D + 1.
        """
        root_tokens_R = _as_int32("root_tokens", root_tokens_R)
        tokens_RD = _as_int32("tokens", tokens_RD)
        if tokens_RD.dim() != 2 or tuple(root_tokens_R.shape) != tuple(tokens_RD.shape[:1]):
            raise ValueError(
                f"root_tokens has shape {tuple(root_tokens_R.shape)} and tokens "
                f"{tuple(tokens_RD.shape)}: expected [requests] and [requests, depth]"
            )
        depth = tokens_RD.shape[1]
        num_rows = depth + 1 if num_rows is None else num_rows
        if num_rows < depth + 1:
            raise ValueError(
                f"num_rows {num_rows} cannot hold a chain of {depth} tokens and its root: "
                f"pass at least {depth + 1}"
            )
        tokens = torch.cat([root_tokens_R[:, None], tokens_RD], dim=1)
        tokens = torch.nn.functional.pad(tokens, (0, num_rows - depth - 1))
        parents = torch.arange(-1, num_rows - 1, dtype=torch.int32, device=tokens.device)
        return cls.from_parents(
            tokens, parents.expand_as(tokens), torch.full_like(root_tokens_R, depth + 1)
        )

    @classmethod
    def root_only(cls, root_tokens_R: Tensor, num_rows: int) -> DraftTree:
        """Trees of one node, the root, in `num_rows` rows: what the builders start from."""
        empty_R0 = root_tokens_R.new_empty((root_tokens_R.shape[0], 0))
        return cls.chain(root_tokens_R, empty_R0, num_rows=num_rows)

    @property
    def num_requests(self) -> int:
        """R."""
        return self.tokens.shape[0]

    @property
    def num_rows(self) -> int:
        """T, root included."""
        return self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tree's tensors are."""
        return self.tokens.device

    def to(self, device: torch.device | str) -> DraftTree:
        """The same trees on another device."""
        return DraftTree(
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            depths=self.depths.to(device),
            num_nodes=self.num_nodes.to(device),
            ancestors=self.ancestors.to(device),
        )

    def live_rows(self) -> Tensor:
        """[R, T] bool: rows that are part of the tree."""
        return torch.arange(self.num_rows, device=self.device) < self.num_nodes[:, None]

    def prefix(self, num_nodes: Tensor | int) -> DraftTree:
        """Keep the first `num_nodes` rows of each tree and clear the rest; T stays as it is.

        `num_nodes` is an int or an integer tensor [R] and counts the root. A request that has
        fewer rows keeps what it has; a count below 1 leaves an inert request.
        """
        kept_R = torch.as_tensor(num_nodes, device=self.device)
        if kept_R.dim() > 1 or (kept_R.dim() == 1 and kept_R.shape != self.num_nodes.shape):
            raise ValueError(
                f"num_nodes has shape {tuple(kept_R.shape)}: "
                f"pass an int or a tensor of shape {(self.num_requests,)}"
            )
        kept_R = torch.minimum(self.num_nodes, _as_int32("num_nodes", kept_R)).clamp(min=0)
        live_RT = torch.arange(self.num_rows, device=self.device) < kept_R[:, None]
        return DraftTree(
            tokens=torch.where(live_RT, self.tokens, 0),
            parents=torch.where(live_RT, self.parents, -1),
            depths=torch.where(live_RT, self.depths, 0),
            num_nodes=kept_R,
            ancestors=torch.where(live_RT[:, :, None], self.ancestors, 0),
        )

    def padded(self, num_rows: int) -> DraftTree:
        """The same trees in T = `num_rows` rows, no fewer than they have."""
        more = num_rows - self.num_rows
        if more == 0:
            return self
        pad = torch.nn.functional.pad
        words = num_words(num_rows) - self.ancestors.shape[2]
        return DraftTree(
            tokens=pad(self.tokens, (0, more)),
            parents=pad(self.parents, (0, more), value=-1),
            depths=pad(self.depths, (0, more)),
            num_nodes=self.num_nodes,
            ancestors=pad(self.ancestors, (0, words, 0, more)),
        )

    def ancestor_mask(self) -> Tensor:
        """[R, T, T] bool: entry (i, j) is set when j is i or an ancestor of i.

        Rows and columns past `num_nodes` are all false.
        """
        rows = torch.arange(self.num_rows, device=self.device)
        words_RTT = self.ancestors.index_select(2, rows // WORD_BITS)
        bits_RTT = torch.bitwise_right_shift(words_RTT, rows % WORD_BITS) & 1
        live_RT = self.live_rows()
        return bits_RTT.bool() & live_RT[:, :, None] & live_RT[:, None, :]

    def ancestor_table(self, max_depth: int) -> Tensor:
        """[R, T, max_depth + 1] int32: entry k is the row's ancestor at depth k, root first.

        The row itself stands at its own depth and -1 fills the entries below it. Depths beyond
        `max_depth` are left out. Rows past `num_nodes` hold -1 alone.
        """
        mask_RTT = self.ancestor_mask()
        rows_T = torch.arange(self.num_rows, dtype=torch.int32, device=self.device)
        # Column max_depth + 1 takes what must not show: non-ancestors and too deep ones.
        slot_RTT = torch.where(mask_RTT, self.depths[:, None, :], max_depth + 1)
        slot_RTT = slot_RTT.clamp(min=0, max=max_depth + 1).long()
        table = torch.full(
            (self.num_requests, self.num_rows, max_depth + 2),
            -1,
            dtype=torch.int32,
            device=self.device,
        )
        table.scatter_(2, slot_RTT, rows_T.expand_as(slot_RTT))
        return table[:, :, : max_depth + 1].contiguous()

    def validate(self) -> None:
        """Raise ValueError when a tree breaks an invariant. Waits for the device: debug only.

        Checked on live rows: counts in range, the root first and alone, parents before children,
        depths and ancestor bits in agreement with the parents.
        """
        tree = self.to("cpu")
        num_nodes = tree.num_nodes
        if bool(((num_nodes < 0) | (num_nodes > tree.num_rows)).any()):
            raise ValueError(
                f"num_nodes {num_nodes.tolist()} is outside 0..{tree.num_rows}, the tree's rows"
            )
        live_RT = tree.live_rows()
        rows_T = torch.arange(tree.num_rows)
        is_root = rows_T == 0
        if bool((live_RT & is_root & (tree.parents != -1)).any()):
            raise ValueError("row 0 must be the root: set its parent to -1")
        bad = live_RT & ~is_root & ((tree.parents < 0) | (tree.parents >= rows_T))
        if bool(bad.any()):
            request, row = bad.nonzero()[0].tolist()
            raise ValueError(
                f"request {request}: row {row} has parent {int(tree.parents[request, row])}, "
                "but a parent must be an earlier row"
            )
        derived = DraftTree.from_parents(tree.tokens, tree.parents, num_nodes)
        for name in ("depths", "ancestors"):
            differs = getattr(derived, name) != getattr(tree, name)
            differs = differs.any(dim=2) if differs.dim() == 3 else differs
            bad = live_RT & differs
            if bool(bad.any()):
                request, row = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"request {request}: {name} of row {row} is "
                    f"{getattr(tree, name)[request, row].tolist()}, its parents say "
                    f"{getattr(derived, name)[request, row].tolist()}"
                )


def _as_int32(name: str, value: Tensor) -> Tensor:
    if value.dtype not in _INTEGER_DTYPES:
        raise ValueError(f"{name} is {value.dtype}: pass an integer tensor")
    return value.to(torch.int32)
