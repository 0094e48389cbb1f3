# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written whole or not at all, newest last, the older ones kept a while.

Knows files and dictionaries of tensors; not what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_weaver.train.errors import RecipeError, SaveError, TrainError, first_line

_FORMAT = 1
# Settings that a resumed run may change, since no parameter depends on them.
_FREE = frozenset(
    (
        "output",
        "data.endpoint",
        "data.on_missing",
        "data.workers",
        "train.compile",
        "train.keep",
        "train.log_every",
        "train.measure_documents",
        "train.measure_every",
        "train.parallel",
        "train.save_every",
    )
)


class Checkpoints:
    """The checkpoints under one output directory."""

    def __init__(self, output: str | Path, keep: int) -> None:
        self.directory = Path(output) / "checkpoints"
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps at which there is a checkpoint, rising."""
        found = self.directory.glob("step-*.pt")
        return sorted(int(p.stem.removeprefix("step-")) for p in found if p.stem[5:].isdigit())

    def file(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.directory / f"step-{step:08d}.pt"

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then delete those beyond the number to keep.

        Raises:
            SaveError: the disk refused; all earlier checkpoints are still there.
        """
        file = self.file(step)
        temporary = file.with_name(f".{file.name}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as opened:
                torch.save({"format": _FORMAT, "step": step, **state}, opened)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(temporary, file)
        # A full disk reaches us as OSError from the file or as RuntimeError from PyTorch's writer.
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            good = self.steps()
            last = (
                f"the last good checkpoint is {self.file(good[-1])}"
                if good
                else "there is none yet"
            )
            raise SaveError(
                f"{file}: could not be written ({first_line(error)}); {last}: free space, then go "
                "on with --resume"
            ) from error
        for old in self.steps()[: -self._keep]:
            self.file(old).unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest readable checkpoint on the CPU; None if there are none at all.

        Raises:
            TrainError: there are some, and none can be read.
        """
        problem = ""
        for step in reversed(self.steps()):
            try:
                state = torch.load(self.file(step), map_location="cpu", weights_only=True)
                if state["format"] == _FORMAT and state["step"] == step:
                    return dict(state)
                problem = "of another version"
            except Exception as error:
                problem = first_line(error)
        if problem:
            raise TrainError(
                f"{self.directory}: no checkpoint is readable ({problem}): delete the directory to "
                "start anew"
            )
        return None


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a recipe that is not the checkpoint's.

    Raises:
        RecipeError: names the first setting that differs.
    """
    old, new = _flat(before), _flat(now)
    for name in sorted(old.keys() | new.keys()):
        if name not in _FREE and old.get(name) != new.get(name):
            raise RecipeError(
                f"{name} is {new.get(name)!r} but the run to resume had {old.get(name)!r}: set it "
                "back, or choose another output"
            )


def _flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{where}{key}.")
        else:
            flat[f"{where}{key}"] = value
    return flat
