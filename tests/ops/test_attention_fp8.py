# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a float8 cache: against float64 attention of what the cache stands for."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    Case,
    assert_matches_oracle,
    attend_along_paths,
    bushy,
    chain,
    make_case,
    star,
)
from interpreter import INTERPRETED, needs_kernel, runs_elsewhere

from vllm_weaver.ops.attention.reference import CACHE_FLOAT8, round_to_cache

TRITON = pytest.param("triton", marks=needs_kernel)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7}


def quantised(case: Case, k_scale: float = 0.02, v_scale: float = 0.5) -> tuple[Case, Case]:
    """The case with a float8 cache, and the case that it stands for, in float64.

    In the second one every key and value, the tree's rows included, is a stored number times its
    scale, so that the oracle needs to know nothing of float8.
    """
    k, v = torch.tensor([k_scale]), torch.tensor([v_scale])
    stored = {
        name: round_to_cache(getattr(case, name), scale)
        for name, scale in (("k_cache", k), ("v_cache", v), ("k_new", k), ("v_new", v))
    }
    exact = {
        name: x.double() * (k if name.startswith("k") else v).double() for name, x in stored.items()
    }
    caches = {name: stored[name] for name in ("k_cache", "v_cache")}
    return (
        replace(case, **caches, k_scale=k, v_scale=v),
        replace(case, q=case.q.double(), **exact),
    )


def assert_matches_exact(case: Case, exact: Case, backend: str) -> None:
    out, expected = case.run(backend), attend_along_paths(exact)
    assert out.dtype == case.q.dtype
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[case.q.dtype], f"relative error {error:.2e}"


def test_the_oracles_case_is_the_one_without_float8() -> None:
    """Cases of q's type go on as they did: what `quantised` gives for them is exact."""
    _, exact = quantised(make_case([bushy(5)], [20]))
    assert_matches_oracle(exact, "reference", 1e-13)


@pytest.mark.parametrize("backend", ["reference", TRITON])
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_cache(dtype, block_size, backend) -> None:
    if INTERPRETED and block_size == 48 and dtype == torch.bfloat16:
        pytest.skip("the other combinations cover it")
    case = make_case(
        [bushy(9), star(3), []],
        [131, 0, 5],
        heads=4,
        kv_heads=2,
        block_size=block_size,
        dtype=dtype,
    )
    assert_matches_exact(*quantised(case), backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_joint_layout_with_a_float8_cache(backend) -> None:
    case, exact = quantised(make_case([chain(6)], [50], joint_layout=True))
    joint = torch.cat([case.k_cache, case.v_cache], dim=-1).transpose(1, 2).contiguous()
    views = joint.transpose(1, 2)
    case = replace(case, k_cache=views[..., :32], v_cache=views[..., 32:])
    assert not case.k_cache.is_contiguous()
    assert_matches_exact(case, exact, backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
@pytest.mark.parametrize("k_scale", [1e-3, 1.0, 40.0])
def test_tree_rows_are_rounded_as_the_cache_stores_them(k_scale, backend) -> None:
    """Saturated, ordinary and nearly vanishing keys; unrounded rows would be far off."""
    case = make_case([bushy(12)], [3], magnitude=2.0)
    assert_matches_exact(*quantised(case, k_scale, k_scale), backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_a_path_of_the_tree_sees_what_plain_decoding_sees(backend) -> None:
    """A chain of 4 rows over 10 tokens, against single rows that find the earlier ones stored."""
    whole, _ = quantised(make_case([chain(4)], [10]))
    out = whole.run(backend)
    k_cache, v_cache = (x.view(torch.uint8).clone() for x in (whole.k_cache, whole.v_cache))
    for row in range(4):
        alone = replace(
            whole,
            trees=[[-1]],
            q=whole.q[:, row : row + 1],
            k_new=whole.k_new[:, row : row + 1],
            v_new=whole.v_new[:, row : row + 1],
            k_cache=k_cache.view(CACHE_FLOAT8),
            v_cache=v_cache.view(CACHE_FLOAT8),
            ancestors=torch.ones(1, 1, 1, dtype=torch.int64),
            context_lens=torch.tensor([10 + row], dtype=torch.int32),
            num_nodes=torch.ones(1, dtype=torch.int32),
        )
        torch.testing.assert_close(alone.run(backend)[:, 0], out[:, row], rtol=1e-5, atol=1e-5)
        block = int(whole.block_table[0, (10 + row) // 16])
        for cache, rows, scale in (
            (k_cache, whole.k_new, whole.k_scale),
            (v_cache, whole.v_new, whole.v_scale),
        ):
            stored = round_to_cache(rows[0, row], scale)
            cache[block, (10 + row) % 16] = stored.view(torch.uint8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k_scale": None}, "k_scale goes with a float8 cache and only with one"),
        ({"v_scale": torch.ones(2)}, r"v_scale is \[2\] torch.float32, expected one float32"),
        ({"v_scale": torch.ones(1).double()}, "expected one float32"),
        ({"v_cache": torch.zeros(1)}, "v_cache has shape"),
    ],
)
def test_bad_scales_are_refused(change, message) -> None:
    case, _ = quantised(make_case([chain(3)], [3]))
    with pytest.raises(ValueError, match=message):
        replace(case, **change).run("reference")


def test_scales_without_a_float8_cache_are_refused() -> None:
    case = make_case([chain(3)], [3])
    with pytest.raises(ValueError, match="k_scale goes with a float8 cache"):
        replace(case, k_scale=torch.ones(1), v_scale=torch.ones(1)).run("reference")


def test_other_float8_types_are_refused() -> None:
    case = make_case([chain(3)], [3])
    caches = {name: getattr(case, name).to(torch.float8_e5m2) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"k_cache is torch\.float8_e5m2"):
        replace(case, **caches, k_scale=torch.ones(1), v_scale=torch.ones(1)).run("reference")


@needs_kernel
def test_rounding_in_the_kernel_is_the_references_bit_for_bit() -> None:
    """Through attention to a single key with one row: the output is that row's stored value."""
    case, _ = quantised(make_case([chain(1)], [0], head_dim=256, magnitude=3.0), 0.1, 0.0123)
    expected = round_to_cache(case.v_new, case.v_scale).float() * case.v_scale
    torch.testing.assert_close(case.run("triton"), expected.expand_as(case.q), rtol=1e-6, atol=0)


@runs_elsewhere
def test_kernel_holds_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton or kernel", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
