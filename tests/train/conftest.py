# SPDX-License-Identifier: Apache-2.0
"""The package's nano models, and a little data with their hidden states, made once per session.

Rows are windows of the demo's source files: text that the models understand, so that figures mean
something, without the time that generation takes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import LENGTH, PROMPT, PROMPTS, ROWS, TARGET, MakeRecipe, changed, recipe_table

from vllm_weaver.train.recipe import Recipe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory; tests that change files use `data`, a copy."""
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    import datasets
    import transformers

    from vllm_weaver.train import extract

    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    rows: list[list[int]] = []
    for file in sorted(PROMPTS.glob("*.py")):
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        rows += [tokens[i : i + LENGTH] for i in range(0, len(tokens) - LENGTH, LENGTH)]
    rows = rows[:ROWS]
    assert len(rows) == ROWS
    directory = tmp_path_factory.mktemp("data")
    states = directory / "hidden_states"
    states.mkdir()
    layer_ids = [2, 4, 6, 7, 8]
    record = {"target": TARGET, "layer_ids": layer_ids}
    (states / "extraction.json").write_text(json.dumps(record))
    model = extract._model(transformers, TARGET, torch.device("cpu"))
    hidden = extract._hidden_states(model, torch.tensor(rows), layer_ids)
    for number, row in enumerate(rows):
        extract._write(states / f"hs_{number}.safetensors", torch.tensor(row), hidden[number])
    masks = [[0] * PROMPT + [1] * (LENGTH - PROMPT)] * ROWS
    table = datasets.Dataset.from_dict(
        {"input_ids": rows, "loss_mask": masks, "seq_len": [LENGTH] * ROWS}
    )
    table.set_format(type="torch")
    table.save_to_disk(str(directory))
    return directory


@pytest.fixture
def data(made_data: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "data"
    shutil.copytree(made_data, copied)
    return copied


@pytest.fixture
def make_recipe(made_data: Path, tmp_path: Path) -> MakeRecipe:
    """A small recipe; keywords `section__setting` change it."""

    def make(output: str = "run", **changes: Any) -> Recipe:
        return changed(recipe_table(made_data, tmp_path / output), **changes)

    return make
