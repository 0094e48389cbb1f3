# SPDX-License-Identifier: Apache-2.0
"""Directories of an expanded target, drafter and adapter.

Two forms. *Light*: configuration, tokenizer, the small weights and `expansion.json`; the large
tensors are made on the device when vLLM loads the directory with `load_format="expanded"`
(`loader.py`). *Whole*: safetensors shards that every program reads, written one tensor at a time.
The adapter, 0.1 GB at the 27B's shapes, is always whole. Knows nothing of vLLM.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_weaver import adapter as adapters

from .adapter import expand_adapter
from .drafter import DrafterPlan, drafter_tensors
from .filler import Filler
from .shapes import DrafterShape, Large, ShapeError, TargetShape
from .target import TargetPlan, target_tensors

RECIPE = "expansion.json"
_SHARD_BYTES = 2 << 30
_SMALL = "small.safetensors"


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory.

    Raises:
        ShapeError: there is none.
    """
    file = directory / "config.json"
    if not file.exists():
        raise ShapeError(f"{directory} has no config.json: give a directory with a model")
    return json.loads(file.read_text())


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a small model."""
    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


@dataclass(frozen=True)
class Trio:
    """A small target with its drafter and adapter, and the shape to expand them to."""

    target: Path
    drafter: Path
    adapter: Path | None
    large: Large
    seed: int = 0

    @classmethod
    def below(cls, models: Path, large: Large, seed: int = 0) -> Trio:
        """From a directory with `target`, `drafter` and, if there is one, `adapter`."""
        adapter = models / "adapter"
        return cls(
            models / "target",
            models / "drafter",
            adapter if adapter.exists() else None,
            large,
            seed,
        )

    def plans(self) -> tuple[TargetPlan, DrafterPlan]:
        """Plans of target and drafter.

        Raises:
            ShapeError: something does not fit.
        """
        target = TargetPlan(TargetShape.of(read_config(self.target)), self.large)
        return target, DrafterPlan(DrafterShape.of(read_config(self.drafter)), target)

    def write(self, out: Path, dtype: torch.dtype, *, whole: bool, device: str = "cpu") -> None:
        """Write `out/target`, `out/drafter` and `out/adapter`."""
        target, drafter = self.plans()
        fill = Filler(torch.device(device), dtype, self.seed)
        text = str(dtype).removeprefix("torch.")
        for name, small, plan in (
            ("target", self.target, target),
            ("drafter", self.drafter, drafter),
        ):
            directory = out / name
            directory.mkdir(parents=True, exist_ok=True)
            for file in small.iterdir():
                if file.suffix in (".json", ".jinja", ".txt") and file.name != "config.json":
                    shutil.copy(file, directory / file.name)
            config = plan.config(read_config(small)) | {"dtype": text}
            config.pop("torch_dtype", None)
            (directory / "config.json").write_text(json.dumps(config, indent=1))
            weights = read_weights(small)
            if whole:
                _write_shards(directory, _tensors(name, plan, weights, fill))
                continue
            save_file(weights, directory / _SMALL, metadata={"format": "pt"})
            recipe = {
                "kind": name,
                "seed": self.seed,
                "large": self.large.to_dict(),
                "target_config": read_config(self.target),
                "drafter_config": read_config(self.drafter),
            }
            (directory / RECIPE).write_text(json.dumps(recipe, indent=1))
        if self.adapter is not None:
            small_adapter = adapters.load(self.adapter)
            adapters.save(expand_adapter(small_adapter, target, fill, self.large), out / "adapter")


def expanded_tensors(directory: Path, fill: Filler) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a light directory, made on `fill`'s device."""
    recipe = json.loads((directory / RECIPE).read_text())
    large = Large.from_dict(recipe["large"])
    fill = Filler(fill.device, fill.dtype, recipe["seed"])
    plan: Any = TargetPlan(TargetShape.of(recipe["target_config"]), large)
    if recipe["kind"] == "drafter":
        plan = DrafterPlan(DrafterShape.of(recipe["drafter_config"]), plan)
    return _tensors(recipe["kind"], plan, load_file(directory / _SMALL), fill)


def _tensors(
    kind: str, plan: Any, weights: Mapping[str, Tensor], fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    return (target_tensors if kind == "target" else drafter_tensors)(plan, weights, fill)


def _write_shards(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Shards of at most 2 GiB and one tensor more, with their index."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        if held:
            file = directory / f"model-{len(shards) + 1:05d}.safetensors"
            save_file(held, file, metadata={"format": "pt"})
            shards.append(list(held))
            held, size = {}, 0

    for name, tensor in tensors:
        held[name] = tensor.contiguous().cpu()
        size += tensor.numel() * tensor.element_size()
        total += tensor.numel() * tensor.element_size()
        if size >= _SHARD_BYTES:
            flush()
    flush()
    if len(shards) == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
        return
    index = {
        name: f"model-{number:05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    )


def stored_names(directory: Path) -> set[str]:
    """Names of the tensors of a whole directory."""
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names
