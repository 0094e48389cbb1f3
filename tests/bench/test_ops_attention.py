# SPDX-License-Identifier: Apache-2.0
"""Other libraries' arms of the attention benchmark, with stand-ins where the libraries are not.

A stand-in is the documented meaning of the library's call in plain PyTorch, so the tests hold what
an arm passes: masks, pages, lengths, layouts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops import attention, attention_arms
from benchmarks.ops.attention_arms import Foreign
from benchmarks.ops.machine import Checks
from benchmarks.ops.pack_others import trim
from vllm_weaver.ops.attention.tiling import choose_tiling

# Rounding to bfloat16 of what the stand-ins return.
LIMIT = 4e-3


@pytest.fixture
def case_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., attention.Case]:
    """Cases on the CPU with their rows stored: two copies of the cache."""
    monkeypatch.setattr(attention, "DEVICE", "cpu")

    def make(R: int = 2, context: int = 131, one_tree: bool = False) -> attention.Case:
        case = attention.Case(attention.TOY, R, context, copies=2, seed=R)
        case.store()
        return attention.with_one_tree(case) if one_tree else case

    return make


def errors(run: attention_arms.Prepared, case: attention.Case) -> list[float]:
    return [
        attention.rms_error(run(case, copy), case.expected(copy)) for copy in range(case.copies)
    ]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Float32 attention, [rows, heads, K] each; key/value heads serve groups of query heads."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thk,chk->htc", q.float(), k) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htc,chk->thk", weights, v).to(q.dtype)


class PagedWrapper:
    """FlashInfer's paged prefill as its documentation has it."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        self.rows, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page, self.mask, self.scale = page_size, custom_mask, sm_scale
        self.types = (q_data_type, kv_data_type)

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert self.types == (q.dtype, cache[0].dtype)
        assert self.sizes == (q.shape[1], cache[0].shape[2], q.shape[2])
        assert cache[0].shape[1] == self.page
        read = 0
        for r, last in enumerate(self.last):
            rows = slice(self.rows[r], self.rows[r + 1])
            pages = self.indices[self.pages[r] : self.pages[r + 1]]
            length = (len(pages) - 1) * self.page + last
            k, v = (x[pages].flatten(0, 1)[:length] for x in cache)
            bits = (rows.stop - rows.start) * length
            mask = self.mask[read : read + bits].view(-1, length)
            out[rows] = masked_attention(q[rows], k, v, mask, self.scale)
            read += bits
        assert read == self.mask.numel()
        return out


def tree_attention(
    q: Tensor,
    spec_k: Tensor,
    spec_v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    spec_attn_bias: Tensor,
    prefix_attn_bias: SimpleNamespace,
    prefix_op: Any = None,
) -> Tensor:
    """xformers' tree attention as its documentation has it, groups and heads apart."""
    B, T = q.shape[:2]
    assert prefix_attn_bias.q_seqlen == [T] * B
    assert prefix_op is not None and q.shape[2:] == spec_k.shape[2:] == cache_k.shape[2:]
    out = torch.empty_like(q)
    for b in range(B):
        length = prefix_attn_bias.kv_seqlen[b]
        assert prefix_attn_bias.kv_padding == cache_k.shape[1] >= length
        k, v = (
            torch.cat([old[b, :length], new[b]]).flatten(1, 2)
            for old, new in ((cache_k, spec_k), (cache_v, spec_v))
        )
        tree = spec_attn_bias == 0
        mask = torch.cat([tree.new_ones(T, length), tree], dim=1)
        rows = masked_attention(q[b].flatten(1, 2), k, v, mask, q.shape[-1] ** -0.5)
        out[b] = rows.view_as(out[b])
    return out


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts both libraries' modules in place; returns the forms that xformers is asked for."""
    forms: list[dict[str, Any]] = []

    class FwOp:
        @classmethod
        def get_operator(cls, splits: int | None, **form: int) -> type:
            forms.append({"splits": splits, **form})
            return cls

    class BlockDiagonalPaddedKeysMask:
        @classmethod
        def from_seqlens(cls, **given: Any) -> SimpleNamespace:
            return SimpleNamespace(**given)

    contents: dict[str, dict[str, Any]] = {
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": PagedWrapper},
        "xformers.ops.tree_attention": {"tree_attention": tree_attention},
        "xformers.ops.fmha.attn_bias": {"BlockDiagonalPaddedKeysMask": BlockDiagonalPaddedKeysMask},
        "xformers.ops.fmha.triton_splitk": {"FwOp": FwOp},
        # Whether the extension is there, which its own check of inputs asks on a GPU.
        "xformers.ops.fmha.common": {"_built_with_cuda": False},
    }
    for name, names in contents.items():
        for end in range(name.count(".") + 1):
            parent = name.rsplit(".", end)[0]
            if end and parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return forms


def test_arms_are_chosen_by_name_and_an_unknown_one_is_refused() -> None:
    assert attention.chosen_arms(",".join(attention.ARMS)) == list(attention.ARMS)
    assert attention.chosen_arms("xformers, ours") == ["ours", "xformers"]
    for names, line in (("ours,flash", "flash: arms are ours"), (",", "nothing: arms are ours")):
        with pytest.raises(ValueError, match=line):
            attention.chosen_arms(names)
    prefix: Any = object()
    assert list(attention.arms_of(prefix)) == ["fa3 causal", "fa3 + tail", "triton"]
    assert list(attention.arms_of(prefix, ["fa3"])) == ["fa3 causal"]
    assert list(attention.arms_of(None, ["ours", "fa3"])) == ["triton"]
    assert attention.arms_of(prefix, ["xformers"]) == {}


def test_a_missing_and_a_broken_library_each_give_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [x for x in sys.modules if x.split(".")[0] in ("xformers", "flashinfer")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flashinfer.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries = dict(attention_arms.LIBRARIES)
    arms = {"gone": Foreign(attention_arms.prepare_sdpa, "")}
    libraries["xformers"] = ("no_such_library_here.ops", arms)
    monkeypatch.setattr(attention_arms, "LIBRARIES", libraries)
    found = attention_arms.others(["sdpa", "flashinfer", "xformers"])
    assert isinstance(found["sdpa, dense mask"], Foreign)
    assert str(found["gone"]).startswith("not installed")
    assert str(found["flashinfer, custom mask"]).startswith("does not import")
    assert "a_package_that_it_needs" in str(found["flashinfer, custom mask"])
    assert list(attention_arms.others(["sdpa"])) == ["sdpa, dense mask"]


def test_dense_mask_arm_equals_the_reference_on_each_copy(case_of: Any) -> None:
    case = case_of()
    assert max(errors(attention_arms.prepare_sdpa(case), case)) < LIMIT


def test_flashinfer_arm_passes_pages_and_masks(case_of: Any, stand_ins: Any) -> None:
    # 28 tokens and 20 rows end a page of 48; 131 and 20 do not.
    for context in (28, 131):
        case = case_of(context=context)
        assert max(errors(attention_arms.prepare_flashinfer(case), case)) < LIMIT


def test_xformers_arm_passes_one_tree_and_grouped_heads(case_of: Any, stand_ins: Any) -> None:
    case = case_of(one_tree=True)
    assert max(errors(attention_arms.prepare_xformers(case), case)) < LIMIT
    assert sys.modules["xformers.ops.fmha.common"]._built_with_cuda
    assert stand_ins == []
    assert max(errors(attention_arms.prepare_xformers(case, (64, 32, 4, 2)), case)) < LIMIT
    assert stand_ins == [
        {"splits": None, "block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    ]
    with pytest.raises(ValueError, match="different trees"):
        attention_arms.prepare_xformers(case_of())


def test_a_foreign_arm_that_fails_is_reported_and_the_rest_is_timed(
    case_of: Any, stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: Any) -> attention_arms.Prepared:
        run = attention_arms.prepare_sdpa(case)
        # Right on the first copy alone.
        return lambda case, copy: run(case, 0)

    def broken(case: Any) -> attention_arms.Prepared:
        raise RuntimeError("nvcc is not here")

    monkeypatch.setattr(attention, "time_calls", lambda calls: float(len([x() for x in calls])))
    found = {
        "broken": Foreign(broken, ""),
        "wrong": Foreign(wrong, ""),
        "absent": "not installed",
        "xformers": Foreign(attention_arms.prepare_xformers, "", one_tree=True),
        "flashinfer": Foreign(attention_arms.prepare_flashinfer, ""),
    }
    bench, checks, not_timed = attention.Bench(), Checks(), {"absent": "not installed"}
    attention.time_others(bench, checks, case_of(), found, not_timed)
    timed = [x["variant"] for x in bench.results]
    assert timed == ["xformers, one tree for all", "flashinfer"]
    assert "nvcc is not here" in not_timed["broken, R=2 context 131"]
    assert not_timed["wrong, R=2 context 131"].startswith("wrong by")
    assert len(not_timed) == 3 and not checks.failed
    assert checks.results["flashinfer, R=2 context 131"] < LIMIT


def test_a_run_without_a_library_ends_well_and_says_so(
    stand_ins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name, value in {
        "DEVICE": "cpu",
        "INTERPRET": False,
        "FULL": attention.TOY,
        "QUICK_CASES": [(1, 131), (2, 60)],
        "time_calls": lambda calls: float(len([x() for x in calls])),
        "machine": dict,
    }.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "out.json"
    argv = ["attention", "--quick", "--arms", "sdpa,flashinfer,xformers", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    attention.main()
    report = json.loads(out.read_text())
    assert report["arms"] == ["sdpa", "flashinfer", "xformers"] and not report["failed"]
    assert report["not_timed"]["flashinfer, custom mask"].startswith("not installed")
    timed = {(x["batch"], x["variant"]) for x in report["results"]}
    assert {(1, "sdpa, dense mask"), (2, "sdpa, dense mask")} < timed
    assert (1, "xformers tree_attention") in timed
    assert (2, "xformers tree_attention, one tree for all") in timed
    assert set(report["leaves_out"]) == {
        name for name in attention_arms.others(["sdpa", "xformers"])
    }
    # Small trees of a large batch.
    more = ["--arms", "sdpa", "--rows", "4", "--cases", "3:40,1:131", "--out", str(out)]
    monkeypatch.setattr(attention, "QUICK_CASES", [(3, 40)])
    monkeypatch.setattr(sys, "argv", ["attention", *more])
    attention.main()
    report = json.loads(out.read_text())
    assert report["shapes"]["rows"] == 4 and not report["failed"]
    assert [x["batch"] for x in report["results"]] == [3]
    for wrong in (["--arms", "nobody"], ["--cases", "64"], ["--cases", "64:x"]):
        monkeypatch.setattr(sys, "argv", ["attention", *wrong])
        with pytest.raises(SystemExit, match="2"):
            attention.main()


def test_tilings_fit_the_rows_of_a_tree() -> None:
    assert attention.cases_of(False, "64:1024,16:4096") == [(64, 1024), (16, 4096)]
    for rows in (4, 16, 64):
        shapes = attention.Shapes(rows=rows)
        tried = attention.tilings_to_try(shapes)
        assert len(set(tried)) == len(tried) > 8
        assert tried[0] == choose_tiling(rows * 6, 256, torch.bfloat16, 90)
        assert all(x.shared_bytes(256, 2) <= 227 * 1024 for x in tried)


def test_the_archive_keeps_what_the_arms_use(tmp_path: Path) -> None:
    kept = {
        "xformers/_cpp_lib.py",
        "xformers/ops/tree_attention.py",
        "flashinfer/prefill.py",
        "flashinfer/data/include/flashinfer/page.cuh",
        "flashinfer/data/csrc/batch_prefill.cu",
        "flashinfer/data/cccl/cub/cub/cub.cuh",
        "tvm_ffi/include/tvm/ffi/any.h",
    }
    dropped = {
        "xformers/_C.so",
        "flashinfer/data/csrc/gdn/kernel.cu",
        "flashinfer/data/cutlass/include/cute/tensor.hpp",
        "flashinfer/data/cccl/python/cuda.py",
        "flashinfer/data/build_utils.py",
    }
    for name in kept | dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    trim(tmp_path)
    files = {str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*") if x.is_file()}
    assert files == kept
