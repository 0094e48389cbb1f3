# SPDX-License-Identifier: Apache-2.0
"""Commands for making adapters: extract, train, diagnose, evaluate, convert, card.

Options and one line for what went wrong; the work is in `vllm_weaver.train`, imported when a
command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Target = Annotated[str, typer.Option(metavar="MODEL", help="Target: a folder, or org/repository.")]
Drafter = Annotated[str, typer.Option(metavar="MODEL", help="Its DFlash drafter.")]
Data = Annotated[Path, typer.Option(metavar="DIR", help="Prepared data with hidden states.")]
States = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Hidden-state files; default: hidden_states in --data."),
]
Rows = Annotated[int, typer.Option(help="Rows to measure on, from the end of the data.")]
Positions = Annotated[int, typer.Option(help="Most positions per row.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result here too.")
]
Plots = Annotated[
    Path | None,
    typer.Option(metavar="STEM", help="Write STEM-depth and STEM-budget as .png and .svg."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (extract, train, diagnose, evaluate, convert, card):
        app.command()(command)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn what may go wrong into one line and exit status 1."""
    from vllm_weaver.adapter import AdapterError
    from vllm_weaver.train.errors import TrainError

    try:
        yield
    except (TrainError, AdapterError) as error:
        print(f"vllm-weaver: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def extract(
    target: Target,
    drafter: Drafter,
    prompts: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Folder of texts, or .jsonl with text or input_ids."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Data directory to write.")],
    rows: Annotated[int, typer.Option(help="Prompts at most; 0: one for each text.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(help="Length of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate after it.")] = 192,
    continuations: Annotated[int, typer.Option(help="Rows per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Rows generated at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Let a small target write text and store its hidden states, without a server."""
    with _one_line():
        from vllm_weaver.train.extract import ExtractOptions
        from vllm_weaver.train.extract import extract as run

        options = ExtractOptions(
            target=target,
            drafter=drafter,
            output=out,
            prompts=prompts,
            rows=rows,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            continuations=continuations,
            temperature=temperature,
            batch=batch,
            seed=seed,
        )
        written = run(options, _say)
        _say(
            f"{written['rows']} rows, {written['tokens']:,} tokens, layers "
            f"{written['layer_ids']}, {written['bytes'] / 2**20:.0f} MiB in {written['path']}"
        )


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="TOML file, see recipes/.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, memory and time per step; save nothing.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where a step's time goes; save nothing.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --profile: write a Chrome trace.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write what --dry-run or --profile found."),
    ] = None,
) -> None:
    """Train an adapter.

    On several GPUs: torchrun --nproc-per-node N --no-python vllm-weaver train RECIPE
    """
    with _one_line():
        from vllm_weaver.train.errors import TrainError
        from vllm_weaver.train.recipe import Recipe

        if (trace is not None and not profile) or (json_file and not (profile or dry_run)):
            raise TrainError(
                "--trace belongs to --profile, --json to --profile or --dry-run: add that option"
            )
        settings = Recipe.load(recipe)
        if dry_run or profile:
            _try_out(settings, profile, trace, json_file)
            return
        from vllm_weaver.train.trainer import train as run

        try:
            adapter = run(settings, resume=resume)
        except KeyboardInterrupt:
            _say("stopped; go on with --resume")
            raise typer.Exit(130) from None
        _say(f"adapter: {adapter}")


def diagnose(
    target: Target,
    drafter: Drafter,
    data: Data,
    adapter: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Adapter to set beside the bounds.")
    ] = None,
    hidden_states: States = None,
    rows: Rows = 64,
    positions: Positions = 64,
    skip_bad: SkipBad = False,
    json_file: JsonFile = None,
    plots: Plots = None,
) -> None:
    """Say, before training, how much an adapter can win on this target, drafter and data."""
    with _one_line():
        from vllm_weaver.train.measure import diagnose as run

        measuring = _measuring(
            target, drafter, data, adapter, hidden_states, rows, positions, skip_bad
        )
        _show(run(measuring), json_file, plots)


def evaluate(
    target: Target,
    drafter: Drafter,
    data: Data,
    adapter: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Without it: chain and DDTree alone.")
    ] = None,
    hidden_states: States = None,
    rows: Rows = 64,
    positions: Positions = 128,
    budgets: Annotated[str, typer.Option(help="Tree nodes, separated by commas.")] = "15,31,63,127",
    children: Annotated[int, typer.Option(help="Candidates of an expanded node.")] = 8,
    temperature: Annotated[
        float,
        typer.Option(help="At which the target wrote the rows; above 0: also with shared noise."),
    ] = 0.0,
    skip_bad: SkipBad = False,
    json_file: JsonFile = None,
    plots: Plots = None,
    write_card: Annotated[
        bool, typer.Option("--card", help="Write the figures into the adapter's model card.")
    ] = False,
) -> None:
    """Measure tokens per target pass of chain, DDTree and Weaver on held-out rows."""
    with _one_line():
        from vllm_weaver.train.errors import TrainError
        from vllm_weaver.train.measure import evaluate as run

        try:
            sizes = sorted({int(part) for part in budgets.split(",")})
        except ValueError as error:
            raise TrainError(f"--budgets is {budgets!r}: pass whole numbers, like 15,63") from error
        if write_card and adapter is None:
            raise TrainError("--card needs --adapter: pass the adapter's directory")
        measuring = _measuring(
            target, drafter, data, adapter, hidden_states, rows, positions, skip_bad
        )
        measuring.children = children
        measuring.temperature = temperature
        result = run(measuring, sizes)
        _show(result, json_file, plots)
        if write_card and adapter is not None:
            from vllm_weaver.train.card import write_card as write

            _say(f"model card: {write(adapter, result)}")


def convert(
    source: Annotated[Path, typer.Argument(help="Adapter in any form.")],
    destination: Annotated[Path, typer.Argument(help="File (pth) or directory to write.")],
    to: Annotated[str, typer.Option(help="pth, weaver or speculators.")] = "weaver",
    drafter: Annotated[
        str | None, typer.Option(metavar="MODEL", help="DFlash drafter; for speculators.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Target; default: what is recorded.")
    ] = None,
    budget: Annotated[
        int, typer.Option(help="Tree nodes that a speculators directory asks vLLM for.")
    ] = 63,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")
    ] = None,
) -> None:
    """Convert an adapter: published .pth, our directory, or a speculators directory."""
    with _one_line():
        import torch

        from vllm_weaver.train.convert import convert as run
        from vllm_weaver.train.errors import TrainError

        types = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
        if dtype is not None and dtype not in types:
            raise TrainError(f"--dtype is {dtype!r}: choose one of {', '.join(types)}")
        chosen = None if dtype is None else types[dtype]
        written = run(
            source, destination, to, drafter=drafter, target=target, budget=budget, dtype=chosen
        )
        _say(f"wrote {written}")
        if to == "speculators":
            speculative = {"model": str(written)}
            # vLLM 0.32 tells the method from the name.
            if "dflash" not in str(written).lower():
                speculative["method"] = "dflash"
            _say(
                f"serve it with --speculative-config '{json.dumps(speculative)}' "
                f"--additional-config '{json.dumps({'weaver': {'adapter': f'{written}/weaver'}})}'"
            )


def card(
    adapter: Annotated[Path, typer.Argument(help="Adapter: its directory.")],
    results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file that evaluate wrote.")
    ] = None,
) -> None:
    """Write an adapter's model card (README.md): what it is, from what data, how good."""
    with _one_line():
        from vllm_weaver.train.card import write_card as write
        from vllm_weaver.train.errors import TrainError, first_line

        figures = None
        if results is not None:
            try:
                figures = json.loads(results.read_text(encoding="utf-8"))
                if figures["kind"] != "evaluation":
                    raise ValueError(f"its kind is {figures['kind']!r}")
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise TrainError(
                    f"{results}: not a result of `vllm-weaver evaluate` ({first_line(error)})"
                ) from error
        _say(f"model card: {write(adapter, figures)}")


def _try_out(settings: Any, profiles: bool, trace: Path | None, json_file: Path | None) -> None:
    """Run a few steps that are thrown away, and print what they cost."""
    from rich.console import Console

    from vllm_weaver.train.plan import dry_run
    from vllm_weaver.train.processes import Processes
    from vllm_weaver.train.profile import profile
    from vllm_weaver.train.report import show_profile, write_json
    from vllm_weaver.train.trainer import Trainer

    processes = Processes.join()
    try:
        trainer = Trainer(settings, processes)
        facts = profile(trainer, trace) if profiles else dry_run(trainer)
        if not processes.first:
            return
        if profiles:
            show_profile(facts, Console())
        else:
            width = max(map(len, facts))
            for name, value in facts.items():
                print(f"{name:<{width}}  {value}")
        if json_file is not None:
            write_json(facts, json_file)
    finally:
        processes.leave()


def _measuring(
    target: str,
    drafter: str,
    data: Path,
    adapter: Path | None,
    hidden_states: Path | None,
    rows: int,
    positions: int,
    skip_bad: bool,
) -> Any:
    import torch

    from vllm_weaver.adapter import load
    from vllm_weaver.train.convert import adapter_in
    from vllm_weaver.train.errors import TrainError
    from vllm_weaver.train.measure import Measuring
    from vllm_weaver.train.recipe import DataRecipe, ModelRecipe, Recipe
    from vllm_weaver.train.trainer import load_frozen

    for name, value in (("rows", rows), ("positions", positions)):
        if value < 1:
            raise TrainError(f"--{name} is {value}: pass 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = Recipe(
        output="-",
        target=ModelRecipe(path=target),
        drafter=ModelRecipe(path=drafter),
        data=DataRecipe(
            path=str(data),
            hidden_states=str(hidden_states or ""),
            on_bad="skip" if skip_bad else "raise",
            on_missing="skip" if skip_bad else "raise",
        ),
    )
    loaded, drafts, rows_of = load_frozen(recipe, device)
    made = None
    if adapter is not None:
        made = load(
            adapter_in(adapter),
            target_width=loaded.width,
            vocab_size=loaded.vocab,
            depth=drafts.facts.depth,
            dtype=loaded.head_Vd.dtype,
            device=device,
        )
    count = len(rows_of)
    return Measuring(
        target=loaded,
        drafter=drafts,
        data=rows_of,
        adapter=made,
        rows=range(max(0, count - rows), count),
        positions=positions,
        say=_say,
    )


def _show(result: dict[str, Any], json_file: Path | None, plots: Path | None) -> None:
    from rich.console import Console

    from vllm_weaver.train.report import plot, show, write_json

    show(result, Console())
    if json_file is not None:
        write_json(result, json_file)
    if plots is not None:
        for file in plot(result, plots):
            _say(f"wrote {file}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
