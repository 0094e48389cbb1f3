# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise keyed by (seed, position, token): the definition, in plain PyTorch.

The scheme is vLLM's own (`vllm/v1/worker/gpu/sample/gumbel.py`, 0.32): MurmurHash3 of 16 bytes
gives the bits, which make a uniform number in (0, 1), which makes the noise. Hashes are equal bit
for bit on every device; noise may differ by a few units in the last place, as logarithms do. A test
compares all of it with vLLM's code, so that a change of its keying does not go unnoticed.

The module knows nothing of vLLM, of requests or of trees.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_DOMAIN64 = 0x9E3779B9
"""Starts the hash of the upper half of a 64-bit draw."""


def murmur3(seeds: Tensor, positions: Tensor, ids: Tensor, domain: int = 0) -> Tensor:
    """32-bit hashes of int64 tensors that broadcast, as int64 in 0 .. 2^32 - 1."""
    h = torch.full_like(seeds, domain)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD, ids & _WORD):
        # int64 products wrap around, which leaves their lower 32 bits right.
        word = (word * 0xCC9E2D51) & _WORD
        word = (_rotate(word, 15) * 0x1B873593) & _WORD
        h = (_rotate(h ^ word, 13) * 5 + 0xE6546B64) & _WORD
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _rotate(word: Tensor, shift: int) -> Tensor:
    return ((word << shift) | (word >> (32 - shift))) & _WORD


def keyed_gumbel_reference(
    seeds: Tensor, positions: Tensor, ids: Tensor, *, use_fp64: bool, shift: int
) -> Tensor:
    """See `vllm_weaver.ops.noise.keyed_gumbel`."""
    seeds, positions = seeds.long()[:, None, None], positions.long()[:, :, None] + shift
    ids = ids.long()
    low = murmur3(seeds, positions, ids)
    if use_fp64:
        high = murmur3(seeds, positions, ids, _DOMAIN64)
        # (high * 2^32 + low) >> 11 without the sign bit in the way.
        bits = (high << 21) | (low >> 11)
        u = (bits.double() + 0.5) * 2.0**-53
        u = torch.where(u == 1.0, u - 2.0**-53, u)
        return -torch.log(-torch.log(u)).float()
    u = (low >> 16).float() * 2.0**-16 + ((low & 0xFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-_log1p_neg(u))


def _log1p_neg(u: Tensor) -> Tensor:
    """log(1 - u) in float32, precise where u is small: there the noise is large."""
    series = torch.full_like(u, 1.0 / 8.0)
    for term in range(7, 0, -1):
        series = 1.0 / term + u * series
    direct = torch.log((1.0 - u).clamp(min=2.0**-24))
    return torch.where(u < 0.25, -u * series, direct)
