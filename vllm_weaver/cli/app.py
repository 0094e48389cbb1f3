# SPDX-License-Identifier: Apache-2.0
"""Commands of ``vllm-weaver``: options, exit codes, one line for what went wrong.

Imports Typer alone; each command imports what it needs when it runs. Those for making adapters are
in `training`.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vllm_weaver.cli import training

app = typer.Typer(
    name="vllm-weaver",
    help="Lossless tree speculative decoding for Gated DeltaNet language models, in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

training.register(app)


def _fail(message: str) -> NoReturn:
    """End the command with one line on standard error."""
    print(f"vllm-weaver: {message}", file=sys.stderr)
    raise typer.Exit(1)


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 4,
    tokens: Annotated[int, typer.Option(help="Most tokens to generate per prompt.")] = 64,
    budget: Annotated[int, typer.Option(help="Tree nodes without the root, 1 to 255.")] = 63,
    arms: Annotated[
        str, typer.Option(help="What to run, separated by commas.")
    ] = "ar,chain,ddtree,weaver",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    shared_noise: Annotated[
        bool, typer.Option(help="Above temperature 0: build trees with the sampler's noise.")
    ] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the results here too.")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Other models: a folder with target, drafter, adapter."),
    ] = None,
    sources: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Other prompts: a folder of .py files.")
    ] = None,
) -> None:
    """Generate the same text with AR, DFlash chain, DDTree and Weaver, and compare."""
    from vllm_weaver.demo.command import run_command
    from vllm_weaver.demo.run import DemoError, DemoOptions

    given: dict[str, Any] = {"models": models, "sources": sources}
    options = DemoOptions(
        prompts=prompts,
        tokens=tokens,
        budget=budget,
        arms=tuple(name.strip() for name in arms.split(",") if name.strip()),
        temperature=temperature,
        seed=seed,
        shared_noise=shared_noise,
        **{name: path.absolute() for name, path in given.items() if path is not None},
    )
    try:
        lossless = run_command(options, json_path)
    except DemoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("vllm-weaver: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    if not lossless:
        _fail("tokens differ from plain decoding's: see the notes under the table")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Adapter: folder, file, or org/repository:file.")],
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Target model that it shall serve.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="DFlash drafter that it shall refine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what an adapter is, and whether it fits a target and a drafter."""
    from vllm_weaver.cli.inspect import InspectError, inspect_adapter

    try:
        facts = inspect_adapter(path, target, drafter)
    except InspectError as error:
        _fail(str(error))
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and name == "parameters" else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")


@app.command(name="cpu-env")
def cpu_env() -> None:
    """Print what a shell must export to run on a machine without a GPU.

    Use: eval "$(vllm-weaver cpu-env)"
    """
    from vllm_weaver import cpu
    from vllm_weaver.demo.machine import gpus

    found = gpus()
    if found:
        _fail(f"this machine has a GPU ({found[0]}): vLLM needs no such settings here")
    for name, value in cpu.environment().items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions of this package and of those that it stands on."""
    from vllm_weaver.demo.machine import versions

    found = versions()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for name, number in found.items():
        print(f"{name} {number}")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check whether vLLM can serve trees here, and say what to do if not."""
    from vllm_weaver.cli.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.found}")
            if not check.ok:
                print(f"      -> {check.advice}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
