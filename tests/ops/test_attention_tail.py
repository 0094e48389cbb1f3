# SPDX-License-Identifier: Apache-2.0
"""Tree attention in two parts: a prefix kernel that is handed in, then the tree's rows.

A plain PyTorch function stands in for FlashAttention, with its signature and its habits: it fills
the output of an empty context with NaN beside an infinite log-sum-exp, and never looks at a slot
past the context.
"""

import math

import pytest
import torch
from attention_cases import Case, assert_matches_oracle, bushy, chain, make_case, star
from interpreter import DEVICE, assert_passes_interpreted, needs_kernel, runs_elsewhere
from torch import Tensor

from vllm_weaver.ops.attention.flash import ARGUMENTS, FlashPrefix
from vllm_weaver.ops.attention.tail import attend_tail, enable_fa3
from vllm_weaver.ops.attention.tiling import LEAN_TAIL, QUICK_TAIL, TailForm


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    return_softmax_lse: bool,
    fa_version: int,
    num_splits: int,
    empty_lse: float = math.inf,
) -> tuple[Tensor, Tensor]:
    assert not causal and return_softmax_lse and fa_version == 3 and num_splits == 0
    assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_k >= int(seqused_k.max())
    tokens, heads, _ = q.shape
    out = torch.full_like(q, math.nan)
    lse = torch.full((heads, tokens), empty_lse, device=q.device)
    starts = cu_seqlens_q.tolist()
    for r, length in enumerate(seqused_k.tolist()):
        rows = slice(starts[r], starts[r + 1])
        assert rows.stop - rows.start == max_seqlen_q
        if length:
            position = torch.arange(length, device=q.device)
            at = block_table[r, position // k.shape[1]].long(), position % k.shape[1]
            group = heads // k.shape[2]
            keys, values = (x[at].float().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("thd,nhd->htn", q[rows].float(), keys) * softmax_scale
            out[rows] = torch.einsum("htn,nhd->thd", scores.softmax(-1), values).to(q.dtype)
            lse[:, rows] = scores.logsumexp(-1)
    return out, lse


@pytest.fixture(autouse=True)
def enabled():
    enable_fa3(FlashPrefix(flash_attention))
    yield
    enable_fa3(None)


@needs_kernel
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130])
def test_every_node_attends_to_its_path(rows) -> None:
    assert_matches_oracle(make_case([bushy(rows, rows)], [21], heads=2), "fa3")


@needs_kernel
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 1), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_empty_contexts_and_dead_rows(dtype, heads, kv_heads) -> None:
    case = make_case(
        [bushy(9), star(4), [], chain(6)],
        [40, 0, 7, 1],
        rows=11,
        heads=heads,
        kv_heads=kv_heads,
        joint_layout=True,
        dtype=dtype,
    )
    # The prefix part is rounded to bfloat16 once more than the other backends' outputs.
    assert_matches_oracle(case, "fa3", 2**-6 if dtype == torch.bfloat16 else None)


@needs_kernel
@pytest.mark.parametrize("head_dim", [64, 256])
def test_head_dims(head_dim) -> None:
    assert_matches_oracle(make_case([bushy(7)], [33], head_dim=head_dim), "fa3")


@needs_kernel
@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_an_empty_context_may_be_marked_by_either_infinity(empty_lse) -> None:
    def function(*args, **kwargs):
        return flash_attention(*args, **kwargs, empty_lse=empty_lse)

    enable_fa3(FlashPrefix(function))
    assert_matches_oracle(make_case([bushy(7), chain(3)], [0, 0]), "fa3")


@needs_kernel
def test_huge_scores_do_not_overflow() -> None:
    case = make_case([bushy(20)], [40], magnitude=120.0)
    assert_matches_oracle(case, "fa3", tolerance=1e-2)


@needs_kernel
@pytest.mark.parametrize(
    "form", [QUICK_TAIL, LEAN_TAIL, TailForm(16, 16, 4), TailForm(32, 64, 8), TailForm(64, 32, 8)]
)
def test_forms_of_the_launch_agree(form) -> None:
    case = make_case([bushy(70)], [9], heads=2)
    q, k_new, v_new, k_cache, v_cache, table, lens, ancestors, nodes = case.inputs(DEVICE)
    prefix = FlashPrefix(flash_attention)(
        q.flatten(0, 1), k_cache, v_cache, table, lens, rows=70, scale=case.scale
    )
    out = attend_tail(q, k_new, v_new, *prefix, ancestors, nodes, scale=case.scale, form=form)
    torch.testing.assert_close(out.cpu(), case.run("fa3"), rtol=1e-5, atol=1e-6)


@needs_kernel
def test_an_empty_batch_is_fine() -> None:
    case = make_case([chain(3)], [3])
    for name in ("q", "k_new", "v_new", "block_table", "context_lens", "ancestors", "num_nodes"):
        setattr(case, name, getattr(case, name)[:0])
    assert case.run("fa3").shape == (0, 3, 2, 32)


def test_without_a_prefix_kernel_the_backend_is_refused() -> None:
    enable_fa3(None)
    with pytest.raises(ValueError, match=r"needs enable_fa3"):
        make_case([chain(3)], [3]).run("fa3")


def test_a_float8_cache_is_refused() -> None:
    case: Case = make_case([chain(3)], [3])
    case.k_cache, case.v_cache = (x.to(torch.float8_e4m3fn) for x in (case.k_cache, case.v_cache))
    case.k_scale = case.v_scale = torch.ones(1)
    with pytest.raises(ValueError, match="takes no float8 cache"):
        case.run("fa3")


def test_the_stand_in_has_the_arguments_that_are_used() -> None:
    names = flash_attention.__code__.co_varnames
    assert set(ARGUMENTS) <= set(names)


@runs_elsewhere
def test_kernel_holds_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)
