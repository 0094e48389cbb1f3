# SPDX-License-Identifier: Apache-2.0
"""What the demo prints: progress, the text, one tree, the table.

Knows the results and a console; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from vllm_weaver.demo.arms import ARMS, ArmResult

if TYPE_CHECKING:
    from vllm_weaver.demo.run import DemoOptions, Report

_SHOWN_PROMPTS = 2
_PROMPT_LINES = 5
_TEXT_LINES = 14
_TREE_ROWS = 40


class Progress:
    """A moving bar in a terminal, a line per stage elsewhere."""

    def __init__(self, console: Console, options: DemoOptions):
        self.console = console
        self.total = options.prompts * options.tokens
        self.bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=None)
        self.label = ""

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """A stage of unknown length."""
        if self.bar.disable:
            self.console.print(f"{text} …", style="dim")
        self.bar.update(self.task, description=text, total=None)

    def start(self, arm: str) -> None:
        """An arm's engine starts."""
        self.label = ARMS[arm]
        self.say(f"{self.label}: starting the engine")

    def advance(self, tokens: int) -> None:
        """So many tokens have been generated."""
        self.bar.update(
            self.task, description=f"{self.label}: decoding", total=self.total, completed=tokens
        )

    def finish(self, result: ArmResult) -> None:
        """An arm is done."""
        text = f"{ARMS[result.arm]}: {result.tokens} tokens in {result.seconds:.1f} s"
        self.console.print(
            f"[green]✓[/] {text} [dim](engine start {result.start_seconds:.1f} s)[/]"
        )


def show_header(console: Console, options: DemoOptions) -> None:
    """What is going to run."""
    sampling = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    if options.temperature and options.shared_noise:
        sampling += ", shared noise"
    console.print(
        f"[bold]vllm-weaver demo[/]: {options.prompts} prompts from source files that the models "
        f"have not seen, up to {options.tokens} tokens each, {sampling}, trees of "
        f"{options.budget} nodes"
    )


def show_report(console: Console, report: Report, token_text: Callable[[int], str]) -> None:
    """Text, tree and table of a finished run."""
    _show_texts(console, report)
    _show_tree(console, report, token_text)
    console.rule("result", align="left")
    console.print(_table(report))
    console.print(_notes(report), style="dim")


def _show_texts(console: Console, report: Report) -> None:
    shown = report.results[0]
    for prompt, text in list(zip(report.prompts, shown.texts, strict=True))[:_SHOWN_PROMPTS]:
        console.rule(
            f"{prompt.name}: {prompt.origin}" if prompt.origin else prompt.name, align="left"
        )
        before = prompt.text.splitlines(keepends=True)[-_PROMPT_LINES:]
        after = text.splitlines(keepends=True)
        more = "" if len(after) <= _TEXT_LINES else "…\n"
        console.print(
            Text.assemble(
                ("".join(before), "dim"), ("".join(after[:_TEXT_LINES]).rstrip("\n"), "bold"), more
            )
        )


def _show_tree(console: Console, report: Report, token_text: Callable[[int], str]) -> None:
    from vllm_weaver.tree import DraftTree, draw_tree

    drawn = next((r for r in reversed(report.results) if r.trees), None)
    if drawn is None:
        return
    tree = typical(drawn.trees, drawn.mean_accepted_length)
    import torch

    rows = {name: torch.tensor([tree[name]], dtype=torch.int32) for name in ("tokens", "parents")}
    whole = DraftTree.from_parents(
        rows["tokens"], rows["parents"], torch.tensor([len(tree["tokens"])], dtype=torch.int32)
    )
    emitted = len(tree["path"])
    console.rule(f"one of {ARMS[drawn.arm]}'s trees, ● accepted", align="left")
    drawing = draw_tree(
        whole,
        0,
        token_text,
        tree["path"],
        max(_TREE_ROWS, max(tree["path"]) + 1),
        color=console.is_terminal,
    )
    for line in drawing.splitlines():
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
    console.print(
        f"{len(tree['tokens']) - 1} nodes verified in one pass of the target; {emitted - 1} "
        f"accepted, and one token sampled after them: {emitted} tokens",
        style="dim",
    )


def typical(trees: list[dict[str, Any]], mean: float) -> dict[str, Any]:
    """The first tree whose pass emitted as nearly the mean number of tokens as any."""
    return min(trees, key=lambda tree: abs(len(tree["path"]) - mean))


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("arm")
    columns = ("tokens", "target passes", "mean accepted length", "seconds")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("equal to AR")
    for result in report.results:
        verdict = "-" if result.arm == "ar" else report.verdict(result.arm)
        style = "green" if verdict.startswith("yes") else "red" if verdict[:2] == "no:" else ""
        table.add_row(
            ARMS[result.arm],
            str(result.tokens),
            str(result.target_passes),
            f"{result.mean_accepted_length:.2f}",
            f"{result.seconds:.1f}",
            Text(verdict, style=style),
        )
    return table


def _notes(report: Report) -> Group:
    notes = [
        "Mean accepted length: tokens emitted per pass of the target over one request, its bonus "
        "token included. The first token of each request comes from its prompt's pass.",
    ]
    if report.setting.device == "cpu":
        notes.append(
            "Seconds say little here: on a CPU the small kernels around the model are interpreted, "
            "and rows of a tree are not free as they are on a GPU."
        )
        if report.results[0].arm == "ar":
            notes.append(
                "AR is vLLM without speculation, in float32. Its Gated DeltaNet kernels for CPUs "
                "take bfloat16 alone, so there it runs a plain PyTorch core, which shares no "
                "arithmetic with the trees'."
            )
    for arm, comparisons in report.comparisons.items():
        for number, c in enumerate(comparisons):
            if not c.equal:
                gap = "" if c.gap is None else f", where AR's best token leads by {c.gap:.1e}"
                notes.append(
                    f"{ARMS[arm]}, {report.prompts[number].name}: differs from token "
                    f"{c.first_difference} on{gap}."
                )
    return Group(*notes)
