# SPDX-License-Identifier: Apache-2.0
"""The command: `python -m benchmarks.e2e`."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .arms import ArmError, parse_arms
from .cells import CostModel, order_cells
from .client import EngineError
from .measure import Bench, Grouping, Results, Run, write_json
from .memory import CacheShape, Room, drafter_bytes, weight_bytes
from .prompts import PromptError, cut_cells, held_out_texts, load_tokenizer, texts_of
from .report import content, differing, markdown
from .setup import (
    PACKAGED,
    Adapter,
    CompileCache,
    Drafter,
    EngineArguments,
    Prompts,
    Target,
    choose_models,
    compile_caches,
    device_bytes,
    engine_arguments,
    enough,
    read_model_config,
)

ARMS = "weaver,stock,chain,ddtree"
SHAPE = "27b"


def numbers(text: str, option: str, kind: type = int) -> list[Any]:
    """`1,4,16` as a list."""
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: pass numbers with commas between") from None


def bench(
    out: Annotated[Path, typer.Option(help="directory for JSON, table, pictures and logs")] = Path(
        "e2e-results"
    ),
    arms: Annotated[
        str, typer.Option(help="kinds, or kind-rows, or kind-rows:option=value")
    ] = ARMS,
    budget: Annotated[int, typer.Option(help="tree nodes of weaver and ddtree")] = 63,
    widths: Annotated[str, typer.Option(help="drafts of stock vLLM's chain")] = "15,7,11",
    chain_width: Annotated[int, typer.Option(help="drafts of our chain")] = 15,
    batch: Annotated[str, typer.Option(help="requests at once, the most important first")] = "1,4",
    context: Annotated[str, typer.Option(help="prompt tokens")] = "1024,16384",
    temperature: Annotated[str, typer.Option(help="0 is greedy")] = "0,1",
    most_tokens: Annotated[
        int | None, typer.Option(help="leave out points with more prompt tokens in all")
    ] = None,
    tokens: Annotated[int, typer.Option(help="most tokens of a request")] = 256,
    requests: Annotated[
        int, typer.Option(help="least requests of a point: small batches run one after another")
    ] = 4,
    rounds: Annotated[int, typer.Option(help="turns of each engine over a batch")] = 4,
    discard: Annotated[int, typer.Option(help="steps not counted at the start of a turn")] = 3,
    minutes: Annotated[float, typer.Option(help="time for everything")] = 9.0,
    grouping: Annotated[
        Grouping, typer.Option(help="engines that take turns: all, AR and one other, or none")
    ] = Grouping.ALL,
    after: Annotated[
        int | None, typer.Option(help="measure only once this process has ended")
    ] = None,
    small: Annotated[Path, typer.Option(help="trained small trio to expand")] = PACKAGED / "models",
    shape: Annotated[str, typer.Option(help="expand to it; 'none' runs --small as it is")] = SHAPE,
    layers: Annotated[int | None, typer.Option(help="other number of target layers")] = None,
    target: Target = None,
    drafter: Drafter = None,
    adapter: Adapter = None,
    prompts: Prompts = None,
    share_prompts: Annotated[
        bool,
        typer.Option(help="batches of a context begin with the same prompts: AR beside itself"),
    ] = False,
    engine: EngineArguments = None,
    profile: Annotated[
        str, typer.Option(help="arms whose step is traced, in the first cell; as --arms has them")
    ] = "",
    start_seconds: Annotated[float, typer.Option(help="expected start of an engine")] = 150.0,
    cache: CompileCache = None,
    complete: Annotated[bool, typer.Option(help="decode every request to its end")] = False,
    keep_outputs: Annotated[bool, typer.Option(help="tokens of all requests in the JSON")] = False,
    seed: Annotated[int, typer.Option(help="of sampling")] = 0,
    smoke: Annotated[
        bool, typer.Option(help="nano models, tiny cells, every check: seconds on a CPU")
    ] = False,
) -> None:
    """AR, stock vLLM's DFlash chain, our chain, DDTree and Weaver, end to end in one run."""
    import torch

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if smoke:
        # What was asked for stays: only defaults become small.
        arms = "weaver,chain" if arms == ARMS else arms
        shape = "none" if shape == SHAPE else shape
        budget, batch, context, tokens, rounds, discard = 24, "2", "40", 16, 2, 0
        requests = 2
        complete, minutes, start_seconds = True, 60.0, 0.0
        prompts = prompts or PACKAGED / "prompts"
        profile = profile or "weaver-24"
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        chosen = parse_arms(arms, budget, numbers(widths, "--widths"), chain_width)
        traced = [arm.name for arm in parse_arms(profile, budget, [], chain_width)]
        if "ar" not in profile.split(","):
            traced.remove("ar")
    except ArmError as error:
        raise typer.BadParameter(str(error)) from error
    models = choose_models(target, drafter, adapter, small, shape, layers)
    cells = order_cells(
        numbers(batch, "--batch"),
        numbers(context, "--context"),
        numbers(temperature, "--temperature", float),
        most_tokens,
    )
    if not cells:
        raise typer.BadParameter(f"--most-tokens {most_tokens} leaves no point")
    config = read_model_config(models.target)
    assert config is not None
    drafter_config = read_model_config(models.drafter)
    itemsize = 4 if device == "cpu" else 2
    side_by_side = os.environ.get("VLLM_KV_CACHE_LAYOUT") in ("BLNHC", "BLHNC")
    run = Run(
        arms=chosen,
        cells=cells,
        models=models,
        cache=CacheShape.of(config, drafter_config, itemsize, side_by_side=side_by_side),
        room=Room(
            device_bytes() if device == "cuda" else None,
            weight_bytes(config, itemsize),
            drafter_bytes(drafter_config, itemsize),
        ),
        cost=CostModel(
            weight_bytes(config, itemsize), start_seconds, 1.0 if device == "cpu" else 0.002
        ),
        device=device,
        tokens=tokens,
        rounds=rounds,
        discard=discard,
        minutes=minutes,
        grouping=grouping,
        after=after,
        warm=device != "cpu",
        complete=complete,
        seed=seed,
        triton_prefill=importlib.util.find_spec("flashinfer") is None,
        environment=compile_caches(cache),
        extra=engine_arguments(engine or []),
        logs=logs,
        profile=tuple(traced),
    )
    tokenizer = load_tokenizer(models.target)
    lengths = {(cell.batch, cell.context) for cell in cells}
    try:
        source = held_out_texts() if prompts is None else texts_of(prompts)
        numbers_of = {(b, c): -(-requests // b) for b, c in lengths}
        texts = enough(source, max(n * b * c + 8 * c for (b, c), n in numbers_of.items()))
        cut = cut_cells(tokenizer, texts, numbers_of, share=share_prompts)
    except PromptError as error:
        raise typer.BadParameter(str(error)) from error

    def say(text: str) -> None:
        typer.echo(f"[{time.monotonic() - began:6.1f} s] {text}")

    def save(results: Results) -> None:
        data = content(run, results, time.monotonic() - began, keep_outputs)
        write_json(out / "e2e.json", data)

    measured = Bench(run, cut, say, save)
    # Preparation counts towards the time too.
    measured.began = began
    try:
        results = measured.measure()
    except EngineError as error:
        save(measured.results)
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    data = content(run, results, time.monotonic() - began, keep_outputs)
    write_json(out / "e2e.json", data)
    _write_pictures(data, results, run, out)
    text = markdown(data)
    (out / "e2e.md").write_text(text)
    typer.echo(text)
    # In float32 on a CPU even sampled texts are equal, token for token.
    wrong = differing(results.cells, strict=device == "cpu")
    if wrong:
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(3)


def _write_pictures(data: dict[str, Any], results: Results, run: Run, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("matplotlib is not installed: no pictures", err=True)
        return
    from .plots import plot_cells, plot_step
    from .timeline import one_step, read_trace, table

    plot_cells(data, out / "e2e.png")
    traced = {}
    parts = []
    for name, summary in results.traces.items():
        traced[name] = one_step(read_trace(Path(summary["file"])), summary["steps"])
        parts.append(f"## {name}\n\n{table(summary)}")
    if traced:
        plot_step(traced, out / "step.png")
        (out / "step.md").write_text("\n".join(parts))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(bench)
