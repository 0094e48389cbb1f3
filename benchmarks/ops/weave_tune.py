# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the weave's kernels, timed: the search behind `vllm_weaver.adapter.tiling`.

    python -m benchmarks.ops.weave --tune

Layers alone come first, at 4 and 64 rows, each product after its check: once with weights from
memory, once with those of the launch before, which the L2 cache holds; the truth of a weave lies in
between. Then the kernel of scores and growth, and at last whole builds: the tables of the package
and the best of each search. Rows for the tables are printed.
"""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.pool import Pool
from typing import Any

import torch

from benchmarks.ops.weave import (
    DEVICE,
    FULL,
    SMALL,
    Bench,
    Checks,
    Form,
    Shape,
    Step,
    bench_round,
    bench_weave,
    check_full_trees,
    check_linear,
    check_small_trees,
    compile_part,
    layer_shapes,
    layer_weights,
    linear_call,
    prefix_shapes,
)
from vllm_weaver.adapter.tiling import (
    LayerShape,
    ScoreTiling,
    Tiling,
    choose_scores,
    choose_tiling,
)
from vllm_weaver.ops import top_pool

REQUESTS = (1, 16)
BUDGET, WIDTH = 63, 4
_SHARED = 225_000
_SCORES = (
    *((2, 2048, 4), (4, 2048, 4), (4, 1024, 4), (8, 2048, 4), (8, 1024, 4), (16, 512, 4)),
    *((8, 1024, 8), (16, 1024, 8), (8, 2048, 8)),
)


def tilings(rows: int, inputs: int, outputs: int) -> list[Tiling]:
    """The package's own, and others."""
    found = [choose_tiling(rows, inputs, outputs, torch.bfloat16)]
    if rows <= 4:
        whole = 1 << (inputs - 1).bit_length()
        for block_k, splits in ((whole, 1), (whole // 2, 1), (1024, inputs // 1024)):
            for block_o in (2, 4, 8, 16):
                for warps in (2, 4, 8):
                    held = block_o * block_k // (warps * 32)
                    if 64 <= held <= 128:
                        found.append(Tiling(block_o, 4, block_k, splits, warps, 1, False))
        found += [
            Tiling(16, block_n, block_k, splits, warps, stages)
            for block_n in (8, 16)
            for block_k, splits, warps, stages in (
                *((256, 1, 4, 5), (512, 1, 2, 4), (256, 2, 2, 5), (512, 2, 4, 3)),
            )
            if inputs % (block_k * splits) == 0
        ]
    elif rows <= 16:
        found += [
            Tiling(block_o, 16, block_k, splits, warps, stages)
            for block_o, block_k, splits, warps, stages in (
                *((16, 256, 1, 4, 5), (16, 256, 2, 4, 5), (16, 256, 4, 4, 5), (16, 512, 2, 4, 3)),
                *((16, 512, 1, 2, 3), (32, 256, 2, 4, 4), (32, 256, 4, 4, 4), (16, 256, 5, 2, 4)),
            )
            if inputs % (block_k * splits) == 0
        ]
    else:
        for block_o, block_k, splits, warps, stages in (
            *((64, 128, 4, 4, 4), (64, 64, 4, 4, 5), (64, 64, 2, 4, 5), (64, 128, 2, 4, 3)),
            *((64, 128, 1, 4, 5), (64, 64, 1, 4, 6), (32, 128, 1, 4, 4), (32, 128, 2, 4, 3)),
            *((32, 64, 2, 4, 5), (32, 256, 2, 4, 2), (128, 64, 4, 8, 4), (128, 64, 8, 4, 4)),
            *((128, 64, 2, 8, 5), (64, 64, 8, 4, 4), (16, 128, 1, 4, 4), (64, 128, 4, 8, 4)),
            *((64, 128, 5, 4, 4), (64, 64, 5, 4, 5)),
        ):
            # 128 rows are too many for the registers of four warps.
            for block_n in (64, 128) if rows > 64 and warps == 8 else (64,):
                fits = (block_o + block_n) * block_k * 2 * stages < _SHARED
                programs = outputs // block_o * splits * -(-rows // block_n)
                if inputs % (block_k * splits) == 0 and fits and 60 <= programs <= 800:
                    found.append(Tiling(block_o, block_n, block_k, splits, warps, stages))
    return list(dict.fromkeys(found))


def compile_tilings(task: tuple[int, int, int, list[Tiling]]) -> None:
    """Compile a layer's tilings, in a process of its own."""
    rows, inputs, outputs, found = task
    weights = torch.zeros(1, outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    for tiling in found:
        try:
            linear_call(rows, weights, tiling)(0)
            check_linear(rows, weights, tiling)
        except Exception as error:
            print(
                f"{rows} rows, {inputs} -> {outputs} {tuple(tiling)}: {error!r}"[:200], flush=True
            )
    torch.cuda.synchronize()


def compile_scores(task: tuple[int, ScoreTiling]) -> None:
    R, tiling = task
    step = Step(Shape(vocab=8192), R, DEVICE, torch.bfloat16)
    tables = step.adapter.precompute(step.embed, step.lm_head)
    compile_round(step, score_form(step, tiling), tables)


def compile_round(step: Step, form: Form, tables: Any) -> None:
    try:
        step.weave(form.weaver(step, BUDGET, tables))
    except Exception as error:
        print(f"{form.name}: {error!r}"[:200], flush=True)
    torch.cuda.synchronize()


def score_form(step: Step, tiling: ScoreTiling) -> Form:
    key = (FULL.rank, step.R * WIDTH)
    return Form(f"tables, {tuple(tiling)}", True, {"score_tilings": {key: tiling}})


def searched(R: int) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """Rows and layers of R requests: of a round, and of the prefix."""
    rows = R * WIDTH, R * (FULL.depth + 1)
    return list(zip(rows, (layer_shapes(FULL), prefix_shapes(FULL)), strict=True))


def tune_layers(
    checks: Checks, bench: Bench, rows: int, shapes: dict[str, tuple[int, int]]
) -> tuple[dict[LayerShape, Tiling], dict[LayerShape, Tiling]]:
    """The fastest tiling of each layer, with weights from memory and from the cache."""
    cold: dict[LayerShape, Tiling] = {}
    warm: dict[LayerShape, Tiling] = {}
    for name, (inputs, outputs) in shapes.items():
        weights = layer_weights(inputs, outputs)
        best: dict[str, tuple[float, Tiling]] = {}
        floor = inputs * outputs * 2 / 4.3e6
        for tiling in tilings(rows, inputs, outputs):
            label = f"{name} {tuple(tiling)}"
            try:
                right = check_linear(rows, weights, tiling)
            except Exception as error:
                print(f"{label}: {error!r}"[:200], flush=True)
                continue
            if not checks.note(f"product, {rows} rows, {label}", right, right, optional=True):
                continue
            run = linear_call(rows, weights, tiling)
            one = linear_call(rows, weights[:1], tiling)
            for kind, function in (("cold", run), ("warm", one)):
                calls = [partial(function, index) for index in range(24)]
                us = bench.time(f"linear {kind}", f"{label} floor {floor:.1f}", rows, None, calls)
                if us is not None and (kind not in best or us < best[kind][0]):
                    best[kind] = us, tiling
        for kind, table in (("cold", cold), ("warm", warm)):
            if kind in best:
                table[inputs, outputs, rows] = best[kind][1]
        del weights
    return cold, warm


def tune_scores(bench: Bench, step: Step, tables: Any) -> dict[tuple[int, int], ScoreTiling]:
    best: tuple[float, ScoreTiling] | None = None
    own = choose_scores(FULL.rank, step.R, WIDTH, FULL.pool)
    for tiling in dict.fromkeys((own, *(ScoreTiling(*shape) for shape in _SCORES))):
        form = score_form(step, tiling)
        try:
            weaver = form.weaver(step, BUDGET, tables)
            step.weave(weaver)
            us = bench_round(bench, step, weaver, form.name, step.pools)
        except Exception as error:
            print(f"{form.name}: {error!r}"[:200], flush=True)
            continue
        if us is not None and (best is None or us < best[0]):
            best = us, tiling
    return {} if best is None else {(FULL.rank, step.R * WIDTH): best[1]}


def print_tables(name: str, table: dict[Any, Any]) -> None:
    print(f"# {name}")
    for key, tiling in table.items():
        print(f"    {key}: {type(tiling).__name__}{tuple(tiling)},", flush=True)


def tune(checks: Checks, bench: Bench, workers: Pool, overlap: bool) -> dict[str, Any]:
    """Times everything; returns the tables found, as text."""
    started = time.perf_counter()
    own = [Form("tables", True), Form("raw", False)]
    pending = [workers.apply_async(compile_part, (("pool", 1, 0, []),))]
    for R in REQUESTS:
        for rows, shapes in searched(R):
            for inputs, outputs in shapes.values():
                found = tilings(rows, inputs, outputs)
                for part in range(0, len(found), 5):
                    task = (rows, inputs, outputs, found[part : part + 5])
                    pending.append(workers.apply_async(compile_tilings, (task,)))
    for R in REQUESTS:
        for shape in _SCORES:
            pending.append(workers.apply_async(compile_scores, ((R, ScoreTiling(*shape)),)))
        pending += [
            workers.apply_async(compile_part, (("weave", R, BUDGET, [form]),)) for form in own
        ]
    for result in pending:
        result.get()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)

    check_small_trees(checks, DEVICE, SMALL)
    tables_found: dict[int, dict[str, dict[Any, Any]]] = {}
    steps: dict[int, tuple[Step, Any]] = {}
    for R in REQUESTS:
        cold: dict[LayerShape, Tiling] = {}
        warm: dict[LayerShape, Tiling] = {}
        for rows, shapes in searched(R):
            for table, best in zip(
                (cold, warm), tune_layers(checks, bench, rows, shapes), strict=True
            ):
                table |= best
        step = Step(FULL, R, DEVICE, torch.bfloat16)
        tables = step.adapter.precompute(step.embed, step.lm_head)
        steps[R] = step, tables
        scores = tune_scores(bench, step, tables)
        tables_found[R] = {"cold": cold, "warm": warm, "scores": scores}
        print(f"R={R} searched after {time.perf_counter() - started:.0f} s", flush=True)

    def forms_for(R: int) -> list[Form]:
        found = tables_found[R]
        best = {"tilings": found["cold"], "score_tilings": found["scores"]}
        warm = {"tilings": found["warm"], "score_tilings": found["scores"]}
        forms = [
            *own,
            Form("tables, best cold", True, best, True),
            Form("tables, best warm", True, warm, True),
            Form("raw, best cold", False, best, True),
        ]
        if overlap:
            off = {**best, "overlap": False}
            forms.append(Form("tables, best cold, no overlap", True, off, True))
        return forms

    tasks = [("weave", R, BUDGET, [form]) for R in REQUESTS for form in forms_for(R)]
    workers.map(compile_part, tasks, chunksize=1)
    print(f"builds compiled after {time.perf_counter() - started:.0f} s", flush=True)
    for R, (step, tables) in steps.items():
        top_pool(step.logits[0], FULL.pool)
        good = check_full_trees(checks, step, tables, BUDGET, forms_for(R))
        bench_weave(bench, step, tables, BUDGET, good)
    text = {}
    for R, kinds in tables_found.items():
        for name, table in kinds.items():
            print_tables(f"{name}, {R * WIDTH} rows", table)
            text[f"{name}, {R * WIDTH} rows"] = {str(k): tuple(v) for k, v in table.items()}
    return text
