# SPDX-License-Identifier: Apache-2.0
"""Large tensors around small ones: random where it changes nothing, zero where it must be.

Values depend on seed and tensor name alone, not on the order of tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# Every list of channels of the small model starts at 0, so a whole width is a count.
Places = Tensor | int


@dataclass(frozen=True)
class Filler:
    """Makes tensors on `device` in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    def normal(self, name: str, *shape: int, std: float) -> Tensor:
        """Independent normal values."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(std=std, generator=self._generator(name))

    def uniform(self, name: str, *shape: int, low: float, high: float) -> Tensor:
        """Independent uniform values."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.uniform_(low, high, generator=self._generator(name))

    def full(self, *shape: int, value: float = 0.0) -> Tensor:
        """One value."""
        return torch.full(shape, value, dtype=self.dtype, device=self.device)

    def put(
        self,
        out: Tensor,
        small: Tensor,
        rows: Places,
        columns: Places | None = None,
        small_rows: Tensor | None = None,
        small_columns: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Write `scale * small` at `rows` x `columns` of `out`; returns `out`.

        An index of the small tensor, where given, names the source of each row or column.
        """
        small = small.to(self.device)
        if small_rows is not None:
            small = small[small_rows.to(self.device)]
        if small_columns is not None:
            small = small[:, small_columns.to(self.device)]
        # One rounding, from float32.
        values = (small.float() * scale).to(self.dtype)
        where_rows = self._index(rows)
        if columns is None:
            out[where_rows] = values
        else:
            out[where_rows[:, None], self._index(columns)] = values
        return out

    def _index(self, places: Places) -> Tensor:
        if isinstance(places, int):
            return torch.arange(places, device=self.device)
        return places.to(self.device)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device=self.device)
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        return generator
