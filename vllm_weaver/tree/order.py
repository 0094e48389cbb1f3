# SPDX-License-Identifier: Apache-2.0
"""Integer keys that turn `topk` into a stable selection.

`torch.topk` promises nothing about ties, so two devices, or two ranks of one model, may pick
different nodes of equal score. Every selection of the tree builders therefore runs on distinct
integer keys. The module does not know what is being selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INDEX_BITS = 32
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000

NO_KEY = _INFINITY << _INDEX_BITS
"""Keys of real scores are below this one, keys of -inf are not."""


def stable_keys(scores: Tensor, first_index: int = 0) -> Tensor:
    """int64 keys of float32 scores of at most 0: the smaller key is the better candidate.

    That is the higher score or, at equal score, the lower index. The keys of one row are
    distinct; indices run along the last dimension from `first_index` on, so that keys of parts
    put side by side compare as a whole. Both zeros are equal. Scores must not be NaN.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype}: convert them to float32 first")
    # Without its sign, the bit pattern of a float orders as an integer.
    magnitude = (scores.contiguous().view(torch.int32) & _MAGNITUDE).long()
    last = first_index + scores.shape[-1]
    index = torch.arange(first_index, last, device=scores.device)
    return magnitude * 2**_INDEX_BITS + index


def best(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest keys along the last dimension, in rising order, and their indices."""
    values, indices = keys.topk(count, dim=-1, largest=False, sorted=True)
    return values, indices
