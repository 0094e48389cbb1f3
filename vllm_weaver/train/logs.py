# SPDX-License-Identifier: Apache-2.0
"""What a run tells: a bar or lines in the terminal, a line of JSON per report, TensorBoard.

Knows numbers and their names; not where they come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_weaver.train.errors import TrainError, require

METRICS_NAME = "metrics.jsonl"


class Log:
    """Reports of one run. All methods do nothing in processes that do not write."""

    def __init__(self, output: Path, steps: int, first_step: int, *, writes: bool) -> None:
        self.console = Console(stderr=True, quiet=not writes)
        self._writes = writes
        self._file = output / METRICS_NAME
        self._board: Any = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (writes and self.console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step)
        if not writes:
            return
        output.mkdir(parents=True, exist_ok=True)
        self._forget_after(first_step)
        try:
            board = require("torch.utils.tensorboard", "writing TensorBoard scalars")
        except TrainError as error:
            self.say(f"{error}; scalars go to {self._file} alone")
        else:
            self._board = board.SummaryWriter(str(output / "tensorboard"), purge_step=first_step)

    def __enter__(self) -> Log:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._board is not None:
            self._board.close()

    def say(self, text: str) -> None:
        """A line of text."""
        self.console.print(text, highlight=False, markup=False)

    def advance(self, step: int) -> None:
        """So many steps are done."""
        self._bar.update(self._task, completed=step)

    def report(self, step: int, kind: str, values: Mapping[str, float | list[float]]) -> None:
        """Numbers of a step; lists are per depth and go to the file alone."""
        if not self._writes:
            return
        record = {"step": step, "kind": kind, **values}
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        plain = {k: v for k, v in values.items() if not isinstance(v, list)}
        if self._board is not None:
            for name, value in plain.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
        if self._bar.disable or kind != "train":
            shown = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in plain.items())
            self.say(f"step {step}, {kind}: {shown}")
        else:
            self._bar.update(
                self._task,
                description=f"loss {plain['loss']:.4f}, accepts {plain['expected_length']:.2f}, "
                f"{plain['documents_per_second']:.1f} rows/s",
            )

    def _forget_after(self, step: int) -> None:
        """Drop lines of steps that will be run again."""
        if not self._file.exists():
            return
        kept = []
        for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step and step > 0:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill cut short
        self._file.write_text("".join(kept), encoding="utf-8")
