# SPDX-License-Identifier: Apache-2.0
"""Keyed Gumbel noise against a published MurmurHash3 written for bytes, and its distribution.

That it is vLLM's noise is tested in `tests/engine/test_shared_noise.py`. The Triton kernel is held
to the reference on a GPU, or in Triton's interpreter in a process of its own.
"""

import math
import os
import struct
import subprocess
import sys

import pytest
import torch
from interpreter import DEVICE, needs_kernel, runs_elsewhere

from vllm_weaver.ops import keyed_gumbel
from vllm_weaver.ops.noise.reference import murmur3
from vllm_weaver.tree import Sampling, SharedNoise, drawn_log_probs

SEEDS = (0, 1, -1, 42, -(2**63), 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64)
POSITIONS = (0, 1, 511, 2**31 - 1, 2**31, 2**40 + 3)
IDS = (0, 1, 255, 4095, 248_319, 2**31 - 1)


def murmur3_x86_32(data: bytes, seed: int) -> int:
    """Austin Appleby's MurmurHash3_x86_32 of whole blocks, one at a time."""
    h = seed
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32
        h ^= k * 0x1B873593 % 2**32
        h = (h << 13 | h >> 19) % 2**32
        h = (h * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def pools(depth: int, pool: int, requests: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(depth)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    positions = torch.randint(0, 10_000, (requests, 1), generator=generator) + torch.arange(depth)
    ids = torch.randint(0, 250_000, (requests, depth, pool), generator=generator)
    return seeds.to(DEVICE), positions.to(DEVICE), ids.to(DEVICE)


def test_the_hash_is_murmur3_of_seed_position_and_token() -> None:
    for seed in SEEDS:
        for position in POSITIONS:
            for domain in (0, 0x9E3779B9):
                expected = [
                    murmur3_x86_32(struct.pack("<qII", seed, position % 2**32, token), domain)
                    for token in IDS
                ]
                keys = torch.tensor(seed), torch.tensor(position), torch.tensor(IDS)
                assert murmur3(*(key.broadcast_to(len(IDS)) for key in keys), domain).tolist() == (
                    expected
                )


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_is_the_double_logarithm_of_the_bits(use_fp64: bool) -> None:
    seeds, positions, ids = (x.cpu() for x in pools(5, 400))
    noise = keyed_gumbel(seeds, positions, ids, use_fp64=use_fp64, backend="reference")
    assert noise.dtype == torch.float32
    for r in range(2):
        for d in range(5):
            for p in (0, 7, 399):
                key = struct.pack("<qII", int(seeds[r]), int(positions[r, d]), int(ids[r, d, p]))
                low = murmur3_x86_32(key, 0)
                if use_fp64:
                    high = murmur3_x86_32(key, 0x9E3779B9)
                    expected = -math.log(-math.log(((high << 32 | low) // 2**11 + 0.5) / 2**53))
                else:
                    expected = -math.log(-math.log1p(-(low + 0.5) / 2**32))
                assert float(noise[r, d, p]) == pytest.approx(expected, abs=4e-6)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_follows_the_gumbel_law(use_fp64: bool) -> None:
    seeds = torch.arange(40)
    positions = torch.arange(10).expand(40, 10)
    ids = torch.arange(500).expand(40, 10, 500)
    noise = keyed_gumbel(seeds, positions, ids, use_fp64=use_fp64, backend="reference")
    sorted_noise = noise.double().flatten().sort().values
    law = torch.exp(-torch.exp(-sorted_noise))
    steps = (torch.arange(len(law)) + 0.5) / len(law)
    # Kolmogorov's distance at 200,000 draws: 1.63 / sqrt(n) is passed once in a hundred.
    assert float((law - steps).abs().max()) < 1.63 / len(law) ** 0.5
    columns = noise.flatten(0, 1).T
    assert float(torch.corrcoef(columns[:50]).fill_diagonal_(0).abs().max()) < 0.25


def test_noise_belongs_to_seed_position_and_token() -> None:
    seeds, positions, ids = pools(3, 8)
    noise = keyed_gumbel(seeds, positions, ids)
    assert torch.equal(keyed_gumbel(seeds[1:], positions[1:], ids[1:]), noise[1:])
    flipped = keyed_gumbel(seeds, positions.flip(1), ids.flip(1)).flip(1)
    assert torch.equal(flipped, noise)
    assert not (keyed_gumbel(seeds + 2**32, positions, ids) == noise).any()
    assert not (keyed_gumbel(seeds, positions + 1, ids) == noise).any()


def test_a_shift_moves_the_positions() -> None:
    seeds, positions, ids = pools(3, 8)
    moved = keyed_gumbel(seeds, positions, ids, shift=-1)
    assert torch.equal(moved, keyed_gumbel(seeds, positions - 1, ids))


@needs_kernel
def test_triton_kernel_shifts_the_positions() -> None:
    seeds, positions, ids = pools(3, 8)
    moved = keyed_gumbel(seeds, positions, ids, shift=-1, backend="triton")
    assert torch.equal(moved, keyed_gumbel(seeds, positions - 1, ids, backend="triton"))


@needs_kernel
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (2, 512)])
def test_triton_kernel_equals_the_reference(use_fp64: bool, shape: tuple[int, int]) -> None:
    seeds, positions, ids = pools(*shape)
    for dtype in (torch.int64, torch.int32):
        # Strided views: a pool cut out of a wider buffer.
        wide = torch.zeros(*ids.shape[:2], ids.shape[2] + 3, dtype=dtype, device=DEVICE)
        wide[..., 3:] = ids
        given = (seeds, positions.T.contiguous().T, wide[..., 3:])
        expected = keyed_gumbel(*given, use_fp64=use_fp64, backend="reference")
        found = keyed_gumbel(*given, use_fp64=use_fp64, backend="triton")
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-6)


def samplings(pool: int) -> Sampling:
    """Eight requests: greedy, tempered, and with every filter."""
    on = {"device": DEVICE}
    return Sampling(
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.0, 1.5, 1.0, 1.0], **on),
        torch.tensor([pool, 9999, 9999, 5, 9999, 9999, 20, 1], dtype=torch.int32, **on),
        torch.tensor([1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 0.9, 1.0], **on),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.01, 0.0], **on),
        filtered=True,
    )


@needs_kernel
@pytest.mark.parametrize("pool", [70, 256])
def test_triton_kernel_equals_the_definition_of_the_best(pool: int) -> None:
    from vllm_weaver.ops.noise.drawn import drawn_best

    generator = torch.Generator().manual_seed(pool)
    sampling, requests, depth = samplings(pool), 8, 5
    log_q = (3 * torch.randn(requests, depth, pool, generator=generator)).log_softmax(-1)
    # Best first, as pools are; one that is the best is padding, others have no probability.
    log_q = log_q.sort(-1, descending=True)[0] - 0.05
    log_q[:, 1, 5:], log_q[:, 3, -1] = -torch.inf, torch.nan
    ids = torch.randint(0, 250_000, log_q.shape, generator=generator)
    ids[:, 2, 0] = -1
    noise = torch.randn(log_q.shape, generator=generator)
    log_q[2, 4], log_q[6, 4] = -torch.inf, torch.nan
    log_q, ids, noise = (x.to(DEVICE) for x in (log_q, ids, noise))
    # All candidates alike, of which the first counts.
    log_q[0, 3] = -3.0
    wanted = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool, device=DEVICE)
    parameters = sampling.parameters()
    given = (log_q, ids, noise, wanted, *parameters)
    found = drawn_best(*given, weight=0.75, penalty=1.0)
    expected = SharedNoise(noise, sampling).marginals(log_q, ids, 0.75, count=1)[1][..., 0]
    assert torch.equal(found[wanted], expected[wanted].int())
    # Nothing is written for a request that is not wanted.
    assert found.dtype == torch.int32 and found.shape == (requests, depth)


@needs_kernel
@pytest.mark.parametrize("pool", [70, 256])
def test_triton_kernel_equals_the_definition_of_scores(pool: int) -> None:
    from vllm_weaver.ops.noise.drawn import drawn_scores

    generator = torch.Generator().manual_seed(pool)
    sampling = samplings(pool)
    requests, depth, nodes = 8, 3, 24
    log_q = (3 * torch.randn(nodes, pool, generator=generator)).log_softmax(-1)
    log_q[:, 3], log_q[:, 4] = -torch.inf, torch.nan
    log_q[5] = -torch.inf
    noise = torch.randn(requests, depth, pool, generator=generator)
    request = torch.arange(nodes, dtype=torch.int32) % requests
    depths = torch.arange(nodes, dtype=torch.int32) // requests
    log_q, noise, request, depths = (x.to(DEVICE) for x in (log_q, noise, request, depths))
    parameters = sampling.parameters()
    found = drawn_scores(log_q, noise, request, depths, *parameters, weight=0.8, penalty=1.0)
    at = sampling.at(request.long())
    expected = drawn_log_probs(log_q, noise[request.long(), depths.long()], at, 0.8)
    greedy = request == 0
    assert torch.equal(found[greedy].nan_to_num(7.0), log_q[greedy].nan_to_num(7.0))
    # A pool without candidates has no scores, and no meaning.
    real = (log_q > -torch.inf) & ~greedy[:, None]
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    missing = ~(log_q > -torch.inf) & ~greedy[:, None]
    assert not bool((found[missing] > -torch.inf).any())


@runs_elsewhere
def test_triton_kernel_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton_kernel_equals", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_bad_input_is_named() -> None:
    seeds, positions, ids = pools(3, 8)
    for given, message in (
        ((seeds, positions, ids[0]), "needs 3 dimensions"),
        ((seeds[:1], positions, ids), "seeds has shape"),
        ((seeds, positions[:, :2], ids), "positions has shape"),
        ((seeds, positions, ids.float()), "ids is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            keyed_gumbel(*given)
    with pytest.raises(ValueError, match="unknown backend"):
        keyed_gumbel(seeds, positions, ids, backend="cuda")
