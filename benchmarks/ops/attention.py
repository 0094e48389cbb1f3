# SPDX-License-Identifier: Apache-2.0
"""Times of tree attention on a GPU beside FlashAttention 3 and others, each after its check.

    python -m benchmarks.ops.attention [--quick] [--arms ours,fa3,...] [--tune] [--fp8] [--out FILE]
    python -m benchmarks.ops.attention --interpret

Shapes of Qwen3.6-27B (24 query heads of 256, 4 key/value heads, bfloat16, pages of 784 tokens with
keys and values side by side, as vLLM has them), trees of 64 rows (`--rows`) and depth up to 15. A
time is the median over replays of a CUDA graph, which goes through copies of the cache that the L2
cache does not hold together. In one run, per batch and context:

- fa3 causal: FlashAttention 3 alone with the same queries at that length, no tree: the yardstick;
- triton: the portable kernel;
- fa3 + tail: FlashAttention 3 on the prefix, then our launch for the tree and the merge;
- both "scheduled": with FlashAttention's schedule made beforehand, as vLLM does once a step;
- sdpa: PyTorch's attention with a dense mask over keys gathered beforehand (the gather not timed);
- xformers, flashinfer: their tree or mask form, where installed.

Checks: float32 attention of the reference, with NaN in every slot past a context and in blocks of
nobody. An arm that fails its check is not timed, and the run ends with status 1. Other libraries'
arms (sdpa, xformers, flashinfer) come last, at the cases of `--quick`: each is checked at the very
case that it is timed at, and one that is missing, fails or is wrong is a line under `not_timed`
and changes nothing else. `--arms` names groups of arms. `--tune` times tilings and splits of the
Triton kernel and forms of the tail, with `--rows 4 --cases 64:1024` those for large batches, whose
trees are small. `--interpret` runs the checks of our kernels at toy sizes on a CPU.
"""

from __future__ import annotations

import argparse
import copy as copies
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.attention_arms import LIBRARIES, Foreign, others
from benchmarks.ops.gdn import time_calls
from benchmarks.ops.machine import Checks, machine, start_again_interpreted
from vllm_weaver.ops import ancestor_words
from vllm_weaver.ops.attention.flash import FlashPrefix
from vllm_weaver.ops.attention.reference import (
    CACHE_FLOAT8,
    round_to_cache,
    tree_attention_reference,
)
from vllm_weaver.ops.attention.tail import attend_tail, tree_attention_in_parts
from vllm_weaver.ops.attention.tiling import (
    LEAN_TAIL,
    QUICK_TAIL,
    TailForm,
    Tiling,
    capability_of,
    choose_splits,
    choose_tiling,
    least_split_keys,
    multiprocessors,
)
from vllm_weaver.ops.attention.triton import tree_attention_triton

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
AIM = 1.15
"""Times of FlashAttention 3's causal call, batch 1, 4k and 64k context."""
AIM_CASES = ((1, 4096), (1, 65536))
ARMS = ("ours", "fa3", *LIBRARIES)
"""Groups of arms: both of our backends, FlashAttention 3's causal call, other libraries."""
L2_BYTES = 128 << 20
"""Copies of a cache hold at least this much together."""
RMS_LIMIT = 8e-3 if INTERPRET else 4e-3
"""Rounding output and softmax weights to bfloat16 costs 2e-3, a rounded prefix part as much again;
the interpreter cuts off where it should round."""
DEPTH = 15


@dataclass(frozen=True)
class Shapes:
    """Sizes of a layer and of its trees."""

    rows: int = 64
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    page: int = 784

    @property
    def packed(self) -> int:
        """Query rows of a key/value head."""
        return self.rows * self.heads // self.kv_heads


FULL = Shapes()
TOY = Shapes(rows=20, heads=4, kv_heads=2, head_dim=32, page=48)


class Case:
    """R requests at one context length: queries, fresh rows, a paged cache in several copies.

    A copy has blocks of its own. All slots past a context, and block 0, hold NaN until `store`
    writes the fresh rows where the engine has them before attention runs.
    """

    def __init__(
        self,
        shapes: Shapes,
        R: int,
        context: int,
        *,
        copies: int | None = None,
        chain: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        seed: int = 0,
    ) -> None:
        gen = torch.Generator(DEVICE).manual_seed(seed)
        T, J, K, page = shapes.rows, shapes.kv_heads, shapes.head_dim, shapes.page
        self.shapes, self.R, self.context = shapes, R, context
        self.scale = K**-0.5

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, device=DEVICE, dtype=torch.float32).to(dtype)

        self.q = rand(R, T, shapes.heads, K)
        # Large enough for the tree's rows to matter beside a long context.
        self.k_new, self.v_new = rand(R, T, J, K) * 4, rand(R, T, J, K)
        self.new_pages = -(-(context + T) // page)
        kv_bytes = R * context * J * 2 * K * (1 if fp8 else 2)
        self.copies = copies or max(1, min(32, math.ceil(L2_BYTES / max(kv_bytes, 1))))
        blocks = self.copies * R * self.new_pages + 1
        # As vLLM has it: heads before slots, keys and values of a head side by side.
        joint = torch.empty(blocks, J, page, 2 * K, device=DEVICE, dtype=dtype)
        for start in range(0, blocks, 256):
            part = joint[start : start + 256]
            part.copy_(torch.randn(part.shape, generator=gen, device=DEVICE, dtype=dtype))
        joint[0] = math.nan
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        # One page more than needed, of nobody.
        table = torch.zeros(self.copies, R, self.new_pages + 1, dtype=torch.int32)
        table[:, :, :-1] = order.view(self.copies, R, self.new_pages).int()
        self.tables = table.to(DEVICE)
        slots = torch.arange(self.new_pages * page, device=DEVICE)
        past = slots[context:]
        ids = self.tables[:, :, past // page].long()
        joint.transpose(1, 2)[ids, (past % page).expand_as(ids)] = math.nan
        self.k_scale = self.v_scale = None
        if fp8:
            self.k_scale = torch.full((1,), 0.02, device=DEVICE)
            self.v_scale = torch.full((1,), 0.01, device=DEVICE)
            wide, joint = joint, torch.empty(joint.shape, device=DEVICE, dtype=CACHE_FLOAT8)
            joint[..., :K] = round_to_cache(wide[..., :K], self.k_scale)
            joint[..., K:] = round_to_cache(wide[..., K:], self.v_scale)
            del wide
        self.k_cache, self.v_cache = joint.transpose(1, 2).split(K, -1)
        self.context_lens = torch.full((R,), context, dtype=torch.int32, device=DEVICE)
        self.seq_lens = self.context_lens + T
        parents = torch.full((R, T), -1, dtype=torch.int32)
        rng = random.Random(seed)
        for r in range(R):
            depth = [0]
            for node in range(1, T):
                parent = (
                    node - 1 if chain else rng.choice([j for j in range(node) if depth[j] < DEPTH])
                )
                parents[r, node] = parent
                depth.append(depth[parent] + 1)
        nodes = torch.full((R,), T, dtype=torch.int32)
        self.ancestors = ancestor_words(parents, nodes).to(DEVICE)
        self.num_nodes = nodes.to(DEVICE)

    def store(self) -> None:
        """Write the fresh rows into the slots after the context, in every copy."""
        page = self.shapes.page
        slots = self.context + torch.arange(self.shapes.rows, device=DEVICE)
        for table in self.tables:
            ids = table[:, slots // page].long()
            self.k_cache[ids, (slots % page).expand_as(ids)] = self.k_new
            self.v_cache[ids, (slots % page).expand_as(ids)] = self.v_new

    def inputs(self, copy: int = 0) -> tuple[Tensor, ...]:
        """The op's tensors, with the cache's `copy`."""
        return (
            *(self.q, self.k_new, self.v_new, self.k_cache, self.v_cache, self.tables[copy]),
            *(self.context_lens, self.ancestors, self.num_nodes),
        )

    def scales(self) -> dict[str, Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def expected(self, copy: int = 0) -> Tensor:
        """Attention in float32 from a copy of the cache; each holds other numbers."""
        q, k_new, v_new, k_cache, v_cache, table, *rest = self.inputs(copy)
        if self.k_scale is not None:
            out = tree_attention_reference(*self.inputs(copy), scale=self.scale, **self.scales())
            return out.float()
        # Only the pages of that copy are widened.
        used = torch.cat([table.flatten(), torch.zeros_like(table[0, :1])])
        ids, places = used.long().unique(return_inverse=True)
        rest = [places[:-1].view_as(table).int(), *rest]
        k_wide, v_wide = (cache[ids].float() for cache in (k_cache, v_cache))
        wide = (q.float(), k_new.float(), v_new.float(), k_wide, v_wide)
        return tree_attention_reference(*wide, *rest, scale=self.scale)

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products over the context and a causal tree."""
        keys = self.context + self.shapes.rows
        return 4.0 * self.R * self.shapes.rows * self.shapes.heads * self.shapes.head_dim * keys

    @property
    def bytes(self) -> float:
        """Keys and values, each read once."""
        row = self.shapes.kv_heads * 2 * self.shapes.head_dim * self.k_cache.element_size()
        return float(self.R * (self.context + self.shapes.rows) * row)


Arm = Callable[[Case, int], Tensor]


def ours(case: Case, copy: int = 0, **options: Any) -> Tensor:
    return tree_attention_triton(*case.inputs(copy), scale=case.scale, **case.scales(), **options)


def in_parts(prefix: FlashPrefix, case: Case, copy: int = 0) -> Tensor:
    return tree_attention_in_parts(prefix, *case.inputs(copy), scale=case.scale)


def causal(prefix: FlashPrefix, case: Case, copy: int = 0, **options: Any) -> Tensor:
    """FlashAttention 3 as vLLM calls it for a chain; the fresh rows lie in the cache."""
    T, H, K = case.q.shape[1:]
    return prefix.function(
        case.q.view(-1, H, K),
        case.k_cache,
        case.v_cache,
        max_seqlen_q=T,
        cu_seqlens_q=prefix.starts_of(case.R, T, case.q.device),
        max_seqlen_k=case.tables.shape[2] * case.shapes.page,
        seqused_k=case.seq_lens,
        softmax_scale=case.scale,
        causal=True,
        block_table=case.tables[copy],
        fa_version=3,
        **options,
    ).view_as(case.q)


def scheduled_arms(prefix: FlashPrefix, case: Case) -> dict[str, Arm]:
    """Both arms with FlashAttention's schedule made once, as vLLM makes it once a step."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    def schedule(lengths: Tensor, causal: bool) -> Tensor:
        return get_scheduler_metadata(
            batch_size=case.R,
            max_seqlen_q=case.shapes.rows,
            max_seqlen_k=case.tables.shape[2] * case.shapes.page,
            num_heads_q=case.shapes.heads,
            num_heads_kv=case.shapes.kv_heads,
            headdim=case.shapes.head_dim,
            cache_seqlens=lengths,
            qkv_dtype=case.q.dtype,
            cu_seqlens_q=prefix.starts_of(case.R, case.shapes.rows, case.q.device),
            page_size=case.shapes.page,
            causal=causal,
        )

    planned = FlashPrefix(prefix.function, scheduler_metadata=schedule(case.context_lens, False))
    for_chain = schedule(case.seq_lens, True)
    return {
        "fa3 causal, scheduled": partial(causal, prefix, scheduler_metadata=for_chain),
        "fa3 + tail, scheduled": partial(in_parts, planned),
    }


def time_scheduled(bench: Bench, checks: Checks, prefix: FlashPrefix, case: Case) -> None:
    """Time `scheduled_arms`, each after a comparison with the same arm without a schedule."""
    try:
        for name, arm in scheduled_arms(prefix, case).items():
            plain = causal(prefix, case) if "causal" in name else in_parts(prefix, case)
            error = max(rms_error(arm(case, 0), plain.float()) for _ in range(3))
            if error < RMS_LIMIT:
                bench.time(case, name, arm)
            else:
                checks.results[f"{name}, R={case.R} context {case.context}"] = error
                print(f"{name}: wrong by {error:.2e}, not timed", flush=True)
    except Exception as problem:
        print(f"fa3, scheduled: {problem!r}"[:300], flush=True)


def flash_function() -> Callable[..., Any] | str:
    """vLLM's FlashAttention, or why there is none."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, FA3_UNAVAILABLE_REASON
    except Exception as error:
        return f"not installed ({error!r})"[:200]
    return flash_attn_varlen_func if FA3_AVAILABLE else f"not installed ({FA3_UNAVAILABLE_REASON})"


def rms_error(out: Tensor, expected: Tensor) -> float:
    """Root mean square of the error over that of the expected values; infinite if not finite."""
    out = out.float()
    if not bool(out.isfinite().all()):
        return math.inf
    return float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def check(checks: Checks, name: str, arm: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        error = rms_error(arm(), expected)
    except Exception as problem:
        return checks.note(name, repr(problem)[:300], False)
    return checks.note(name, round(error, 6), error < RMS_LIMIT)


def tilings_to_try(shapes: Shapes) -> list[Tiling]:
    """The default, and others near it."""
    few = [
        *((32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 4), (32, 64, 4, 2), (32, 64, 8, 2)),
        *((32, 128, 8, 1), (32, 32, 8, 3), (16, 32, 4, 3), (16, 64, 4, 2), (16, 64, 8, 2)),
    ]
    many = [
        *((128, 32, 8, 3), (128, 32, 8, 4), (128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 1)),
        *((128, 16, 8, 4), (64, 64, 8, 2), (64, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 8, 3), (64, 32, 8, 2)),
    ]
    default = choose_tiling(shapes.packed, shapes.head_dim, torch.bfloat16, 90)
    wanted = few if shapes.packed <= 32 else many
    return list(dict.fromkeys([default, *(Tiling(*x) for x in wanted)]))


TUNED = ((1, 1024), (1, 4096), (1, 65536), (16, 4096), (16, 16384))
"""Batches and contexts that `--tune` goes through."""
TAIL_FORMS = (
    *(QUICK_TAIL, LEAN_TAIL, TailForm(16, 32, 4), TailForm(16, 64, 4), TailForm(16, 32, 8)),
    *(TailForm(32, 64, 8), TailForm(64, 64, 8)),
)
"""Forms of the tail's launch; those that are chosen first."""


def compile_part(task: tuple[Any, ...]) -> str:
    """Compile what one arm needs, in a process of its own; the problem, if there is one."""
    kind, form, fp8, shapes = task
    try:
        case = Case(shapes, 1, 900, copies=1, fp8=fp8)
        if kind == "tail":
            prefix = case.q.flatten(0, 1)
            lse = case.q.new_zeros(shapes.heads, shapes.rows, dtype=torch.float32)
            parts = (case.q, case.k_new, case.v_new, prefix, lse, case.ancestors, case.num_nodes)
            attend_tail(*parts, scale=case.scale, form=form)
        else:
            for splits in (1, 2, 3, 5, 9):
                ours(case, tiling=form, splits=splits, min_split_keys=1)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {error!r}"[:300]
    return ""


class Bench:
    """Collects times; each is printed as it comes."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.yardstick: dict[tuple[int, int], float] = {}

    def time(self, case: Case, name: str, arm: Arm, *, fp8: bool = False) -> float:
        calls = [partial(arm, case, copy % case.copies) for copy in range(max(4, case.copies))]
        us = time_calls(calls)
        where = (case.R, case.context)
        if name == "fa3 causal":
            self.yardstick[where] = us
        base = self.yardstick.get(where)
        result = {
            **{"batch": case.R, "context": case.context, "variant": name, "fp8": fp8},
            "us": round(us, 2),
            "tflops": round(case.flops / us * 1e-6, 1),
            "gb_per_s": round(case.bytes / us * 1e-3),
            "of_fa3_causal": None if base is None else round(us / base, 3),
        }
        if where in AIM_CASES and base is not None and name.startswith(("triton", "fa3 +")):
            result["within_aim"] = us <= AIM * base
        self.results.append(result)
        print(
            f"R={case.R:2d} context {case.context:6d} {name:44s} {us:9.2f} us "
            f"{result['tflops']:7.1f} TFLOP/s {result['gb_per_s']:6d} GB/s"
            + ("" if base is None else f"  {us / base:.2f} of fa3 causal"),
            flush=True,
        )
        return us


def chosen_arms(names: str) -> list[str]:
    """Groups of arms from a list with commas, in the order of `ARMS`. ValueError if one is none."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise ValueError(f"{', '.join(unknown) or 'nothing'}: arms are {', '.join(ARMS)}")
    return [name for name in ARMS if name in wanted]


def arms_of(
    prefix: FlashPrefix | None, chosen: Collection[str] = ARMS
) -> dict[str, tuple[Arm, bool]]:
    """Arms by name; whether an arm takes trees, or chains stored in the cache alone."""
    arms: dict[str, tuple[Arm, bool]] = {}
    if prefix is not None and "fa3" in chosen:
        arms["fa3 causal"] = (partial(causal, prefix), False)
    if prefix is not None and "ours" in chosen:
        arms["fa3 + tail"] = (partial(in_parts, prefix), True)
    if "ours" in chosen:
        arms["triton"] = (ours, True)
    return arms


def run_checks(
    checks: Checks, arms: dict[str, tuple[Arm, bool]], quick: bool, shapes: Shapes
) -> set[str]:
    """Names of the arms that hold on every case."""
    good = set(arms)
    contexts = (0, 47, 131) if INTERPRET else ((0, 4096) if quick else (0, 1, 783, 4096, 16500))
    for context in contexts:
        for R in (1,) if INTERPRET or context > 8192 else (1, 3):
            for chain in (False, True):
                case = Case(shapes, R, context, copies=2, chain=chain, seed=context + R)
                label = f"R={R} context {context} {'chain' if chain else 'tree'}"
                expected = case.expected()
                for name, (arm, trees) in arms.items():
                    if trees and not check(
                        checks, f"{name}, {label}", partial(arm, case, 0), expected
                    ):
                        good.discard(name)
                case.store()
                for name, (arm, trees) in arms.items():
                    if (
                        not trees
                        and chain
                        and not check(checks, f"{name}, {label}", partial(arm, case, 0), expected)
                    ):
                        good.discard(name)
    return good


def check_fp8(checks: Checks, shapes: Shapes) -> bool:
    good = True
    for context in (0, 131) if INTERPRET else (0, 783, 4096):
        case = Case(shapes, 1 if INTERPRET else 2, context, copies=1, fp8=True, seed=context)
        name = f"triton float8, context {context}"
        good &= check(checks, name, partial(ours, case), case.expected())
    return good


QUICK_CASES = [(1, 4096), (1, 65536), (16, 4096)]
"""Batches and contexts of `--quick`, and of other libraries' arms always."""


def cases_of(quick: bool, given: str = "") -> list[tuple[int, int]]:
    """Batches and contexts, `given` as 64:1024,16:4096 or ours. ValueError: it is no such list."""
    if given:
        pairs = (pair.split(":") for pair in given.split(","))
        return [(int(batch), int(context)) for batch, context in pairs]
    if quick:
        return QUICK_CASES
    return [
        *((1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 262144)),
        *((16, 1024), (16, 4096), (16, 16384), (16, 65536)),
    ]


def with_one_tree(case: Case) -> Case:
    """The same case with the first request's tree for every request."""
    case = copies.copy(case)
    case.ancestors = case.ancestors[:1].expand_as(case.ancestors).contiguous()
    return case


def time_others(
    bench: Bench,
    checks: Checks,
    case: Case,
    found: Mapping[str, Foreign | str],
    not_timed: dict[str, str],
) -> None:
    """Check other libraries' arms on a case whose rows are stored, and time those that hold.

    Errors go to `checks.results`. What keeps an arm from being timed goes to `not_timed`; it is no
    failed check, since it says nothing of our kernels. Lines in place of arms are passed over.
    """
    seen_by: dict[bool, tuple[Case, dict[int, Tensor]]] = {}
    for name, arm in found.items():
        if isinstance(arm, str):
            continue
        one_tree = arm.one_tree and case.R > 1
        title = f"{name}, one tree for all" if one_tree else name
        label = f"{title}, R={case.R} context {case.context}"
        try:
            if one_tree not in seen_by:
                seen = with_one_tree(case) if one_tree else case
                # What is made per copy of the cache is checked at both ends.
                ends = {copy: seen.expected(copy) for copy in (0, seen.copies - 1)}
                seen_by[one_tree] = (seen, ends)
            seen, expected = seen_by[one_tree]
            run = arm.prepare(seen)
            error = max(rms_error(run(seen, copy), out) for copy, out in expected.items())
            checks.results[label] = round(error, 6)
            if error < RMS_LIMIT:
                bench.time(seen, title, run)
            else:
                not_timed[label] = f"wrong by {error:.2e}"
        except Exception as problem:
            not_timed[label] = f"failed: {problem!r}"[:500]
        if label in not_timed:
            print(f"{label}: {not_timed[label]}", flush=True)


def tune(bench: Bench, checks: Checks, case: Case, prefix: FlashPrefix | None, fp8: bool) -> None:
    """Tilings and splits of one case, each checked against the default's result."""
    expected = ours(case).float()
    capacity = case.tables.shape[2] * case.shapes.page + case.shapes.rows
    sms = multiprocessors(case.q.device)
    for tiling in tilings_to_try(case.shapes)[: 6 if fp8 else None]:
        programs = -(-case.shapes.packed // tiling.block_m) * case.shapes.kv_heads * case.R
        slots = sms * tiling.per_multiprocessor(case.shapes.head_dim, case.k_cache.element_size())
        finest = least_split_keys(capability_of(case.q.device))
        chosen = choose_splits(programs, capacity, slots, finest)
        for splits in dict.fromkeys((chosen, max(1, sms // programs), max(1, 2 * sms // programs))):
            short = case.context <= 4096 and splits == chosen > 1
            for least in (256, 128) if short else (finest,):
                arm = partial(ours, tiling=tiling, splits=splits, min_split_keys=least)
                name = f"triton {tuple(tiling)} splits {splits} of {least}"
                label = f"{name}, R={case.R} context {case.context} fp8={fp8}"
                try:
                    error = rms_error(arm(case), expected)
                except Exception as problem:
                    print(f"{label}: {problem!r}"[:200], flush=True)
                    continue
                if error >= RMS_LIMIT:
                    checks.results[label] = error
                    print(f"{label}: wrong by {error:.2e}, not timed", flush=True)
                    continue
                bench.time(case, name, arm, fp8=fp8)
    if prefix is None or fp8:
        return
    parts = prefix(
        case.q.flatten(0, 1),
        *(case.k_cache, case.v_cache, case.tables[0], case.context_lens),
        rows=case.shapes.rows,
        scale=case.scale,
    )

    def tail(case: Case, copy: int, form: TailForm) -> Tensor:
        inputs = (case.q, case.k_new, case.v_new, *parts, case.ancestors, case.num_nodes)
        return attend_tail(*inputs, scale=case.scale, form=form)

    for form in TAIL_FORMS:
        if rms_error(tail(case, 0, form), expected) < RMS_LIMIT:
            bench.time(case, f"tail alone {tuple(form)}", partial(tail, form=form))
    for splits in (1, 4, 8, 11, 16, 22):
        split = FlashPrefix(prefix.function, num_splits=splits)
        bench.time(case, f"fa3 + tail, fa3 in {splits} splits", partial(in_parts, split))


def interpret() -> None:
    """The checks of our kernels at toy sizes."""
    checks = Checks()
    run_checks(checks, {"triton": (ours, True)}, True, TOY)
    check_fp8(checks, TOY)
    raise SystemExit(bool(checks.failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three cases, fewer checks")
    parser.add_argument("--tune", action="store_true", help="time tilings, splits and tails, too")
    parser.add_argument("--rows", type=int, default=FULL.rows, help="of a tree (%(default)s)")
    parser.add_argument(
        "--cases",
        default="",
        help="batches and contexts, as 64:1024,16:1024; --tune tunes them all",
    )
    parser.add_argument("--fp8", action="store_true", help="check and time float8 caches, too")
    parser.add_argument(
        "--arms",
        default=",".join(ARMS),
        help="groups to time (%(default)s); of fa3's times those of ours are a multiple",
    )
    parser.add_argument("--interpret", action="store_true", help="checks alone, on a CPU")
    parser.add_argument("--compile-workers", type=int, default=12)
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, and end")
    parser.add_argument("--out", default="benchmarks/results/ops-attention.json")
    args = parser.parse_args()
    try:
        chosen = chosen_arms(args.arms)
    except ValueError as problem:
        parser.error(f"--arms: {problem}")
    try:
        cases = cases_of(args.quick, args.cases)
    except ValueError:
        parser.error(f"--cases {args.cases}: pass BATCH:CONTEXT with commas between")
    shapes = replace(FULL, rows=args.rows)
    if args.interpret:
        start_again_interpreted("benchmarks.ops.attention")
    if INTERPRET:
        interpret()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ops.attention needs a GPU, or --interpret for its checks")
    started = time.perf_counter()
    with_ours = "ours" in chosen
    tasks: list[tuple[Any, ...]] = []
    if with_ours:
        tasks = [("tail", form, False, shapes) for form in TAIL_FORMS[: None if args.tune else 2]]
        for fp8 in (False, True) if args.fp8 else (False,):
            forms = tilings_to_try(shapes)[: (6 if fp8 else None) if args.tune else 1]
            tasks = [("triton", form, fp8, shapes) for form in forms] + tasks
        workers = min(args.compile_workers, len(tasks))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for line in filter(None, pool.map(compile_part, tasks, chunksize=1)):
                print(line, flush=True)
    print(f"{len(tasks)} parts compiled after {time.perf_counter() - started:.0f} s", flush=True)
    if args.compile_only:
        return

    function: Callable[..., Any] | str = "not asked for"
    if with_ours or "fa3" in chosen:
        function = flash_function()
    prefix = None if isinstance(function, str) else FlashPrefix(function)
    arms = arms_of(prefix, chosen)
    found: dict[str, Foreign | str] = {}
    missing: dict[str, str] = {}
    if isinstance(function, str):
        missing["fa3"] = function
        print(f"fa3: {function}", flush=True)

    checks, bench = Checks(), Bench()
    good = run_checks(checks, arms, args.quick, shapes) if arms else set()
    fp8_good = check_fp8(checks, shapes) if args.fp8 and with_ours else False
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)

    def save() -> None:
        report = {
            **machine(),
            "shapes": vars(shapes) | {"dtype": "torch.bfloat16"},
            "aim_of_fa3_causal": AIM,
            "arms": chosen,
            "not_timed": missing,
            "leaves_out": {
                name: arm.leaves_out for name, arm in found.items() if isinstance(arm, Foreign)
            },
            "seconds": round(time.perf_counter() - started),
            "checks": checks.results,
            "failed": checks.failed,
            "results": bench.results,
        }
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")

    tuned = TUNED if not args.cases else cases
    for R, context in cases if arms else ():
        case = Case(shapes, R, context)
        case.store()
        for name, (arm, _) in arms.items():
            if name in good:
                bench.time(case, name, arm)
        if prefix is not None and {"fa3 causal", "fa3 + tail"} <= good:
            time_scheduled(bench, checks, prefix, case)
        if args.tune and "triton" in good and (R, context) in tuned:
            tune(bench, checks, case, prefix if "fa3 + tail" in good else None, False)
        del case
        torch.cuda.empty_cache()
        if fp8_good and (args.cases or (R, context) in ((1, 4096), (1, 65536), (16, 16384))):
            case = Case(shapes, R, context, fp8=True)
            bench.time(case, "triton float8", ours, fp8=True)
            if args.tune:
                tune(bench, checks, case, None, True)
            del case
            torch.cuda.empty_cache()
        save()
    # Last, imports too: what breaks the process or the device's context takes nothing with it.
    found.update(others(chosen))
    missing.update((name, arm) for name, arm in found.items() if isinstance(arm, str))
    for name, line in missing.items():
        print(f"{name}: {line}", flush=True)
    for R, context in QUICK_CASES if found else ():
        try:
            case = Case(shapes, R, context)
            case.store()
            time_others(bench, checks, case, found, missing)
            del case
            torch.cuda.empty_cache()
        except Exception as problem:
            missing[f"others, R={R} context {context}"] = f"failed: {problem!r}"[:500]
            print(f"others, R={R} context {context}: {problem!r}"[:500], flush=True)
        save()
    print_best(bench.results)
    print(f"written to {args.out} after {time.perf_counter() - started:.0f} s", flush=True)
    if checks.failed:
        raise SystemExit(f"checks failed: {', '.join(checks.failed)}")


def print_best(results: list[dict[str, Any]]) -> None:
    """Per case the five fastest, and the arms that are always timed."""
    print("\n| batch | context | fp8 | variant | us | of fa3 causal | TFLOP/s | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    always = ("fa3 causal", "fa3 + tail", "triton", "triton float8")
    always += ("fa3 causal, scheduled", "fa3 + tail, scheduled")
    foreign = tuple(name for _, arms in LIBRARIES.values() for name in arms)
    for where in dict.fromkeys((x["batch"], x["context"], x["fp8"]) for x in results):
        rows = [x for x in results if (x["batch"], x["context"], x["fp8"]) == where]
        rows = [x for x in rows if not x["variant"].startswith("tail alone")]
        rows.sort(key=lambda x: x["us"])
        for place, x in enumerate(rows):
            if place < 5 or x["variant"] in always or x["variant"].startswith(foreign):
                print(
                    f"| {x['batch']} | {x['context']} | {x['fp8']} | {x['variant']} | {x['us']} "
                    f"| {x['of_fa3_causal']} | {x['tflops']} | {x['gb_per_s']} |"
                )


if __name__ == "__main__":
    main()
