# SPDX-License-Identifier: Apache-2.0
"""Tree attention and its merge against float64 attention along every node's explicit path.

The same cases hold the reference and the Triton kernel to the oracle. The kernel runs on a GPU if
there is one, else in Triton's interpreter; an environment variable chooses the interpreter before
anything is imported, so one test runs this file again in a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch
from attention_cases import (
    NAN,
    assert_matches_oracle,
    attend_along_paths,
    bushy,
    chain,
    comb,
    make_case,
    star,
)
from interpreter import DEVICE, INTERPRETED, needs_kernel, runs_elsewhere

from vllm_weaver.ops import merge_attention

TRITON = pytest.param("triton", marks=needs_kernel)


@pytest.mark.parametrize("rows", [1, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("shape", [chain, star, comb, bushy])
def test_every_node_attends_to_its_path(shape, rows) -> None:
    case = make_case([shape(rows)], [21], heads=2, dtype=torch.float64)
    assert_matches_oracle(case, "reference", 1e-13)


@pytest.mark.parametrize("rows", [1, 17, 63, 64, 65, 130])
@needs_kernel
def test_kernel_every_node_attends_to_its_path(rows) -> None:
    assert_matches_oracle(make_case([bushy(rows, rows)], [21], heads=1), "triton")


@pytest.mark.parametrize("shape", [chain, star, comb])
@needs_kernel
def test_kernel_on_adversarial_trees(shape) -> None:
    assert_matches_oracle(make_case([shape(34)], [5]), "triton")


@pytest.mark.parametrize("backend", ["reference", TRITON])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (6, 1)])
def test_query_heads_share_their_key_value_head(heads, kv_heads, backend) -> None:
    case = make_case([bushy(9)], [19], heads=heads, kv_heads=kv_heads)
    assert_matches_oracle(case, backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
@pytest.mark.parametrize("block_size", [4, 5, 16, 64, 192])
def test_context_of_any_length_is_read_whole(block_size, backend) -> None:
    """Lengths 0 and 1, a block boundary and its neighbours, 200: in one batch."""
    contexts = [0, 1, block_size - 1, block_size, block_size + 1, 200]
    if INTERPRETED:
        contexts = contexts[::2] if block_size % 2 else contexts[1::2]
    trees = [bushy(3 + r, r) for r in range(len(contexts))]
    assert_matches_oracle(make_case(trees, contexts, block_size=block_size), backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_views_of_a_joint_cache_are_read_in_place(backend) -> None:
    case = make_case([bushy(6), star(4)], [23, 9], kv_heads=2, heads=4, joint_layout=True)
    assert not case.k_cache.is_contiguous()
    assert_matches_oracle(case, backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_queries_may_be_slices_of_a_joint_projection(backend) -> None:
    case = make_case([comb(7)], [6], heads=2, kv_heads=2)
    expected = case.run(backend)
    joint = torch.cat([case.q, case.k_new, case.v_new], dim=2)
    case.q, case.k_new, case.v_new = joint[:, :, :2], joint[:, :, 2:4], joint[:, :, 4:]
    assert torch.equal(case.run(backend), expected)


@pytest.mark.parametrize("backend", ["reference", TRITON])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_dims_and_dtypes(head_dim, dtype, backend) -> None:
    assert_matches_oracle(make_case([bushy(5)], [70], head_dim=head_dim, dtype=dtype), backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_huge_scores_do_not_overflow(backend) -> None:
    """Scores of 1e4 and more, whose exponential is infinite unless the maximum is taken off."""
    case = make_case([bushy(20)], [40], magnitude=120.0)
    scores = torch.einsum("tad,tbd->tab", case.q[0].double(), case.k_new[0].double()) * case.scale
    assert scores.abs().max() > 1e4
    # float32 rounds scores of this size by 1e-3, which shifts near-ties between keys.
    assert_matches_oracle(case, backend, tolerance=1e-2)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_rows_past_num_nodes_are_zero_and_change_nothing(backend) -> None:
    """A tree padded with NaN rows gives its own result; a request without nodes gives zeros."""
    tree = bushy(11)
    alone = make_case([tree], [18])
    padded = make_case([tree, []], [18, 7], rows=21)
    for name in ("q", "k_new", "v_new"):
        getattr(padded, name)[0, :11] = getattr(alone, name)[0]
    for p in range(2):
        for name in ("k_cache", "v_cache"):
            cache = getattr(alone, name)[int(alone.block_table[0, p])]
            getattr(padded, name)[int(padded.block_table[0, p])] = cache
    out = padded.run(backend)
    torch.testing.assert_close(out[0, :11], alone.run(backend)[0], rtol=1e-6, atol=1e-6)
    assert (out[0, 11:] == 0).all() and (out[1] == 0).all()


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_spine_only_tree_equals_causal_attention(backend) -> None:
    case = make_case([chain(12)], [20], heads=4, kv_heads=2)
    rows = [(int(case.block_table[0, p // 16]), p % 16) for p in range(20)]
    k, v = (
        torch.cat([torch.stack([cache[a] for a in rows]), new[0]]).transpose(0, 1)[None]
        for cache, new in ((case.k_cache, case.k_new), (case.v_cache, case.v_new))
    )
    causal = torch.ones(12, 32, dtype=torch.bool).tril(diagonal=20)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(1, 2), k, v, attn_mask=causal, scale=case.scale, enable_gqa=True
    )
    torch.testing.assert_close(case.run(backend), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_a_prefix_of_the_rows_is_a_valid_tree(backend) -> None:
    case = make_case([bushy(20)], [9])
    whole = case.run(backend)
    case.num_nodes[:] = 8
    short = case.run(backend)
    torch.testing.assert_close(short[:, :8], whole[:, :8], rtol=1e-6, atol=1e-6)
    assert (short[:, 8:] == 0).all()


def test_context_chunks_do_not_change_the_result() -> None:
    from vllm_weaver.ops.attention.reference import tree_attention_reference

    case = make_case([bushy(5), star(3)], [37, 8], block_size=4, dtype=torch.float64)
    expected = attend_along_paths(case)
    for chunk in (1, 7, 16, 37, 100):
        out = tree_attention_reference(
            case.q,
            case.k_new,
            case.v_new,
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.context_lens,
            case.ancestors,
            case.num_nodes,
            scale=case.scale,
            context_chunk=chunk,
        )
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@needs_kernel
def test_split_keys_do_not_change_the_result(splits) -> None:
    """Short and empty contexts, and pieces that hold no ancestor of a row."""
    from vllm_weaver.ops.attention.triton import tree_attention_triton

    case = make_case([star(70), bushy(3), []], [130, 0, 64], heads=1)
    out = tree_attention_triton(
        case.q.to(DEVICE),
        case.k_new.to(DEVICE),
        case.v_new.to(DEVICE),
        case.k_cache.to(DEVICE),
        case.v_cache.to(DEVICE),
        case.block_table.to(DEVICE),
        case.context_lens.to(DEVICE),
        case.ancestors.to(DEVICE),
        case.num_nodes.to(DEVICE),
        scale=case.scale,
        splits=splits,
        min_split_keys=1,
    ).cpu()
    torch.testing.assert_close(out.double(), attend_along_paths(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_n", [16, 32, 64])
@needs_kernel
def test_kernel_tilings_agree_on_growing_scores(block_n) -> None:
    """Whole and straddling tiles of a page, and maxima that grow by much and by little."""
    from vllm_weaver.ops.attention.tiling import Tiling
    from vllm_weaver.ops.attention.triton import tree_attention_triton

    case = make_case([bushy(40)], [230], heads=2, block_size=80, magnitude=2.0)
    case.k_cache.mul_(torch.linspace(0.1, 3.0, len(case.k_cache))[:, None, None, None])
    out = tree_attention_triton(
        *case.inputs(DEVICE), scale=case.scale, splits=1, tiling=Tiling(32, block_n, 4, 2)
    )
    torch.testing.assert_close(out.cpu().double(), attend_along_paths(case), rtol=1e-5, atol=1e-5)


def test_merge_equals_one_softmax_over_both_sets() -> None:
    scores = torch.randn(3, 5, 24, dtype=torch.float64) * 8
    values = torch.randn(24, 6, dtype=torch.float64)
    parts = [
        (scores[..., part].softmax(-1) @ values[part], scores[..., part].logsumexp(-1))
        for part in (slice(0, 9), slice(9, 24))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")])
def test_merge_ignores_what_stands_beside_an_empty_set(empty) -> None:
    out_a, lse_a = torch.randn(2, 4), torch.randn(2)
    nothing, none = torch.full((2, 4), NAN), torch.full((2,), empty)
    for pair in (((out_a, lse_a), (nothing, none)), ((nothing, none), (out_a, lse_a))):
        out, lse = merge_attention(*pair[0], *pair[1])
        assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
    out, lse = merge_attention(nothing, none, nothing, none)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_unknown_backend_names_the_available_ones() -> None:
    case = make_case([chain(2)], [3])
    with pytest.raises(ValueError, match="'cuda'; available: reference, triton"):
        case.run("cuda")


@pytest.mark.parametrize(
    "field, change, message",
    [
        (
            "k_new",
            lambda x: x[:, :, :, :16],
            r"k_new has shape \[1, 3, 1, 16\], expected \[1, 3, 1, 32\]",
        ),
        ("v_cache", lambda x: x[:, :8], "v_cache has shape"),
        ("ancestors", lambda x: x[:, :, [0, 0]], r"ancestors has shape \[1, 3, 2\]"),
        ("ancestors", lambda x: x.int(), "ancestors is torch.int32"),
        ("num_nodes", lambda x: x.float(), "num_nodes is torch.float32, expected int32"),
        ("context_lens", lambda x: x.repeat(2), "context_lens has shape"),
        ("k_cache", lambda x: x.bfloat16(), "k_cache is torch.bfloat16, q is torch.float32"),
        ("q", lambda x: x[0], "expected 4 dimensions"),
    ],
)
def test_bad_input_is_refused_by_name(field, change, message) -> None:
    case = make_case([chain(3)], [3])
    setattr(case, field, change(getattr(case, field)))
    with pytest.raises(ValueError, match=message):
        case.run("reference")


def test_context_beyond_the_block_table_is_refused() -> None:
    case = make_case([chain(3)], [3])
    case.context_lens[0] = 49
    with pytest.raises(ValueError, match="holds 49, but the block table reaches only 48 tokens"):
        case.run("reference")


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_an_empty_batch_is_fine(backend) -> None:
    case = make_case([chain(3)], [3])
    for name in ("q", "k_new", "v_new", "block_table", "context_lens", "ancestors", "num_nodes"):
        setattr(case, name, getattr(case, name)[:0])
    assert case.run(backend).shape == (0, 3, 2, 32)


def test_head_counts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads, not a multiple of the cache's 2"):
        make_case([chain(3)], [3], heads=3, kv_heads=2).run("reference")


@needs_kernel
def test_kernel_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match=r"head dims .* got 48: use backend=\"reference\""):
        make_case([chain(3)], [3], head_dim=48).run("triton")
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        make_case([chain(3)], [3], dtype=torch.float64).run("triton")


@runs_elsewhere
def test_kernel_without_gpu_or_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run on cpu tensors"):
        make_case([chain(3)], [3]).run("triton")


@runs_elsewhere
def test_kernel_holds_in_the_interpreter() -> None:
    """Every test of this file that needs the kernel, in a process that interprets it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton or kernel or split", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
