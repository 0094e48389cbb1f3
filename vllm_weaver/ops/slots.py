# SPDX-License-Identifier: Apache-2.0
"""Slot pools by index, and dead rows of a batch: what makes inert requests and padding harmless.

The module knows nothing of what a slot or a row holds. Pools may be strided views; writes go to the
pool itself. On a CPU it may look at values; on a GPU it never makes the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read_slots(pool: Tensor, indices_R: Tensor) -> Tensor:
    """Copy `pool[indices]`, contiguous; a negative index reads slot 0, for the caller to ignore."""
    return pool.index_select(0, indices_R.clamp(min=0)).contiguous()


def write_slots(pool: Tensor, indices_R: Tensor, rows: Tensor, live_R: Tensor) -> None:
    """Write `pool[indices[r]] = rows[r]` for the live requests and for no other, in place.

    Live requests must not share a slot.
    """
    rows = rows.to(pool.dtype)
    index = indices_R.long()
    if pool.device.type != "cpu":
        _write_unseen(pool, index, rows, live_R)
        return
    if not bool(live_R.all()):
        rows, index = rows[live_R], index[live_R]
    pool.index_copy_(0, index, rows)


def _write_unseen(pool: Tensor, index_R: Tensor, rows: Tensor, live_R: Tensor) -> None:
    """`write_slots` where the host must not look at values.

    A dead row repeats the write of the first live one: same slot, same values, so their order does
    not matter. With none live, slot 0 is given its own.
    """
    first = live_R.int().argmax()
    some = live_R.any()
    source = torch.where(live_R, torch.arange(len(index_R), device=index_R.device), first)
    target = torch.where(some, index_R[source], 0)
    some = some.view(1, *[1] * (pool.dim() - 1))
    kept = pool.index_select(0, target)
    pool.index_copy_(0, target, torch.where(some, rows.index_select(0, source), kept))


def repeat_first(moves: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sources and targets of copies `x[target] = x[source]`, of which `moves` (bool) are meant.

    A boolean selection would make the host wait. Each other entry repeats the first one that is
    meant, which writes the same bits twice; where none is, all copy row 0 onto itself.
    """
    # An index of one dimension, since one without any is read by the host.
    first = moves.to(torch.uint8).argmax(0, keepdim=True)
    some = moves.any()
    source = torch.where(moves, source, torch.where(some, source[first], 0))
    target = torch.where(moves, target, torch.where(some, target[first], 0))
    return source, target


class RowBlanker:
    """Overwrites the dead rows of [R, T, ...] tensors with zeros, whatever they hold.

    Not by a product, since NaN times 0 is NaN. The tensor given must be the caller's own: it may be
    changed in place. Use what is returned.
    """

    def __init__(self, live_RT: Tensor) -> None:
        self._live_RT = live_RT
        # Writing the few dead rows, where looking them up is free, is faster than selecting.
        self._dead: tuple[Tensor, ...] | None = None
        if live_RT.device.type == "cpu":
            self._dead = torch.nonzero(~live_RT, as_tuple=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` with zeros in its dead rows."""
        if self._dead is None:
            return torch.where(self._live_RT.view(*self._live_RT.shape, *[1] * (x.dim() - 2)), x, 0)
        if len(self._dead[0]):
            x[self._dead] = 0
        return x
