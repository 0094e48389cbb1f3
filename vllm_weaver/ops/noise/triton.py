# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Keyed Gumbel noise of whole candidate pools in one Triton launch.

In PyTorch the hash is some fifty small operations. The module knows nothing of vLLM. Its
definition is `reference.keyed_gumbel_reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse

BLOCK = 256
"""Candidates per program."""


@triton.jit
def _rotate(word, shift: tl.constexpr):
    return (word << shift) | (word >> (32 - shift))


@triton.jit
def _mix(h, word):
    word *= 0xCC9E2D51
    word = _rotate(word, 15)
    word *= 0x1B873593
    h ^= word
    return _rotate(h, 13) * 5 + 0xE6546B64


@triton.jit
def _murmur3(seed, position, ids, domain: tl.constexpr):
    # A constant must meet a uint32 before it mixes, or the arithmetic is not modulo 2^32.
    h = (seed ^ seed).to(tl.uint32)
    h ^= domain
    h = _mix(h, (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ids.to(tl.uint32))
    h ^= 16
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _log1p_neg(u):
    series = 1.0 / 8.0
    series = 1.0 / 7.0 + u * series
    series = 1.0 / 6.0 + u * series
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = 1.0 + u * series
    direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
    return tl.where(u < 0.25, -u * series, direct)


@triton.jit
def keyed_gumbel_kernel(
    seeds_ptr,
    positions_ptr,
    ids_ptr,
    out_ptr,
    seeds_stride_r,
    positions_stride_r,
    positions_stride_d,
    ids_stride_r,
    ids_stride_d,
    ids_stride_p,
    D,
    P,
    SHIFT: tl.constexpr,
    USE_FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R * D, ceil(P / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    r, d = row // D, row % D
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    seed = tl.load(seeds_ptr + r * seeds_stride_r).to(tl.int64)
    position = tl.load(positions_ptr + r * positions_stride_r + d * positions_stride_d)
    position = position.to(tl.int64) + SHIFT
    ids = tl.load(
        ids_ptr + r * ids_stride_r + d * ids_stride_d + p * ids_stride_p, mask=mask, other=0
    )
    low = _murmur3(seed, position, ids, 0)
    if USE_FP64:
        high = _murmur3(seed, position, ids, 0x9E3779B9)
        bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
        u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
        u = tl.where(u == 1.0, u - 1.1102230246251565e-16, u)
        noise = (-tl.log(-tl.log(u))).to(tl.float32)
    else:
        # Both halves convert exactly, and their sum is rounded once.
        high16 = (low >> 16).to(tl.int32)
        low16 = (low & 0xFFFF).to(tl.int32)
        u = (
            high16.to(tl.float32) * 1.52587890625e-05
            + (low16.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        )
        noise = -tl.log(-_log1p_neg(u))
    tl.store(out_ptr + row * P + p, noise, mask=mask)


INTERPRETED = not isinstance(keyed_gumbel_kernel, triton.runtime.JITFunction)


def keyed_gumbel_triton(
    seeds: Tensor, positions: Tensor, ids: Tensor, *, use_fp64: bool, shift: int
) -> Tensor:
    """Launch the kernel once; tensors as in `vllm_weaver.ops.noise.keyed_gumbel`.

    Raises:
        ValueError: a device that Triton cannot run on.
    """
    if ids.device.type != "cuda" and not INTERPRETED:
        refuse(
            "keyed_gumbel",
            f"the triton backend cannot run on {ids.device.type} tensors without "
            'TRITON_INTERPRET=1: use backend="reference"',
        )
    R, D, P = ids.shape
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if out.numel():
        keyed_gumbel_kernel[(R * D, triton.cdiv(P, BLOCK))](
            seeds,
            positions,
            ids,
            out,
            seeds.stride(0),
            *positions.stride(),
            *ids.stride(),
            D,
            P,
            SHIFT=shift,
            USE_FP64=use_fp64,
            BLOCK=BLOCK,
        )
    return out
