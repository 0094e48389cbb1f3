# SPDX-License-Identifier: Apache-2.0
"""What the training tests share: the package's nano models, and recipes for a little data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm_weaver.demo
from vllm_weaver.train.recipe import Recipe

MODELS = Path(vllm_weaver.demo.__file__).parent / "models"
PROMPTS = Path(vllm_weaver.demo.__file__).parent / "prompts"
TARGET, DRAFTER, ADAPTER = (str(MODELS / name) for name in ("target", "drafter", "adapter"))
ROWS, LENGTH, PROMPT = 12, 56, 8

MakeRecipe = Callable[..., Recipe]


def recipe_table(data: Path, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "target": {"path": TARGET},
        "drafter": {"path": DRAFTER},
        "data": {"path": str(data), "workers": 0, "held_out": 0.2},
        "adapter": {"rank": 32, "heads": 2, "mlp": 32, "pool": 64},
        "train": {
            "steps": 4,
            "epochs": 10,
            "documents": 2,
            "blocks": 3,
            "units": 2,
            "precision": "float32",
            "muon_lr": 0.01,
            "adam_lr": 0.003,
            "log_every": 1,
            "save_every": 2,
        },
    }


def changed(recipe_of: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe; keywords `section__setting` change the table."""
    table = copy.deepcopy(recipe_of)
    for name, value in changes.items():
        section, _, setting = name.partition("__")
        table[section][setting] = value
    return Recipe.from_dict(table)


def with_data(recipe: Recipe, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **changes))
