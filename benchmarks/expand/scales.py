# SPDX-License-Identifier: Apache-2.0
"""The algebra that keeps a padded model's function: scales, the constant channel, index maps.

Notation: subscripts s and l for the small and the large model. A hidden vector h of d_s channels
becomes (a h, 0, ..., 0, c) of d_l channels. The residual stream is scaled by a power of two a, and
its last channel holds the constant c from the embedding on; nothing writes to that channel again.

*RMSNorm.* The large norm divides by sqrt((a^2 |h|^2 + c^2) / d_l + eps_l). With

    c^2 = a^2 eps_s d_s - eps_l d_l                                                            (1)

this is a sqrt(d_s / d_l) sqrt(|h|^2 / d_s + eps_s): the small norm's divisor times a constant,
epsilon included. The gain takes sqrt(d_s / d_l), so the normalised vector is the small model's.
a is the smallest power of two for which (1) is positive, hence exact in every precision.

*Padded heads.* With K_l > K_s the query's fixed scale K^-1/2 shrinks a Gated DeltaNet output by
sqrt(K_s / K_l), which its gated norm over Vh channels undoes up to epsilon. Exactness wants

    eps_l = eps_s (K_s Vh_s) / (K_l Vh_l)                                                      (2)

and a gain of sqrt(Vh_s / Vh_l). Norms of query and key heads then need rows scaled by
sqrt(eps_l / eps_s * D_l / D_s) before the norm, and the key's gain takes sqrt(D_s / D_l), which is
left over from the norms and the softmax scale D^-1/2 together. Zeros change no L2 norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .shapes import Attention, ShapeError, TargetShape


@dataclass(frozen=True)
class Stream:
    """How a residual stream is carried: scale a, constant c in the last channel, epsilon."""

    small: int
    large: int
    scale: float
    constant: float
    eps: float

    @property
    def gain(self) -> float:
        """Factor of every norm gain over this stream."""
        return math.sqrt(self.small / self.large)


def stream(small: int, large: int, eps_small: float, eps_large: float) -> Stream:
    """Formula (1) for widths `small` < `large`.

    Raises:
        ShapeError: there is no spare channel for the constant.
    """
    if large <= small:
        raise ShapeError(f"width {large} leaves no spare channel beside the small model's {small}")
    scale = 1.0
    while scale**2 * eps_small * small <= eps_large * large:
        scale *= 2
    square = scale**2 * eps_small * small - eps_large * large
    return Stream(small, large, scale, math.sqrt(square), eps_large)


def large_eps(small: TargetShape, key_dim: int, value_dim: int) -> float:
    """Formula (2)."""
    gdn = small.gdn
    return small.eps * (gdn.key_dim * gdn.value_dim) / (key_dim * value_dim)


def spread(small: int, large: int, small_parts: int, large_parts: int) -> list[tuple[int, int]]:
    """Where grouped heads go: pairs (large head, small head), sorted.

    `small_parts` key heads share `small` query heads evenly, likewise for the large model. A group
    that is too large for one key head is split over several, which then hold copies of its key.

    Raises:
        ShapeError: too few key heads.
    """
    per_small, per_large = small // small_parts, large // large_parts
    copies = -(-per_small // per_large)
    if small_parts * copies > large_parts:
        raise ShapeError(
            f"{small} heads over {small_parts} groups do not fit into {large} over {large_parts}"
        )
    pairs = []
    for group in range(small_parts):
        for i in range(per_small):
            key = group * copies + i // per_large
            pairs.append((key * per_large + i % per_large, group * per_small + i))
    return pairs


def key_heads(small: int, large: int, small_parts: int, large_parts: int) -> list[tuple[int, int]]:
    """Pairs (large key head, small key head) that go with `spread`."""
    copies = -(-(small // small_parts) // (large // large_parts))
    return [(group * copies + j, group) for group in range(small_parts) for j in range(copies)]


def rotary_map(small: Attention, large: Attention) -> list[int]:
    """Channel of a large query or key head for each channel of a small one.

    Pair i of r_s / 2 turns with base^(-2 i / r_s); the large head has that frequency at pair
    i r_l / r_s, so r_l must be a multiple of r_s. Channels that do not turn follow in order.

    Raises:
        ShapeError: the frequencies are not among the large head's, or there is no room.
    """
    r_s, r_l = small.rotary, large.rotary
    rest_s, rest_l = small.head_dim - r_s, large.head_dim - r_l
    if r_l % r_s or rest_s > rest_l:
        raise ShapeError(
            f"heads of {small.head_dim} channels, {r_s} of them rotary, do not fit into "
            f"{large.head_dim} with {r_l}: a multiple, and room for the rest, is needed"
        )
    step = r_l // r_s
    half = [i * step for i in range(r_s // 2)]
    return half + [r_l // 2 + i for i in half] + [r_l + i for i in range(rest_s)]


def layer_places(small: tuple[str, ...], large: tuple[str, ...]) -> list[int]:
    """Large layer of each small one: same kind, in order, spread over the depth.

    Raises:
        ShapeError: the large model has too few layers of some kind.
    """
    places: list[int] = []
    low = 0
    for i, kind in enumerate(small):
        # Room that the rest needs, from the back.
        high = len(large)
        for later in reversed(small[i:]):
            high = next((j for j in range(high - 1, -1, -1) if large[j] == later), -1)
            if high < 0:
                break
        wanted = round(i * (len(large) - 1) / max(len(small) - 1, 1))
        free = [j for j in range(low, high + 1) if large[j] == kind]
        if not free:
            raise ShapeError(
                f"{len(large)} layers cannot hold {len(small)} in the small model's order of kinds"
            )
        places.append(min(free, key=lambda j: abs(j - wanted)))
        low = places[-1] + 1
    return places


def rows_of_heads(pairs: list[tuple[int, int]], small_dim: int, large_dim: int,
                  channels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(large rows, small rows) of whole heads laid out one after another.

    `channels` gives the large channel of each of a small head's `small_dim` channels.
    """
    large = [h * large_dim + c for h, _ in pairs for c in channels]
    small = [h * small_dim + i for _, h in pairs for i in range(small_dim)]
    return torch.tensor(large), torch.tensor(small)
