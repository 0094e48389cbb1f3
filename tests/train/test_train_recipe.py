# SPDX-License-Identifier: Apache-2.0
"""Recipes: the shipped ones are valid, and whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_weaver.train.errors import RecipeError
from vllm_weaver.train.recipe import Recipe
from vllm_weaver.train.state import check_same_run

RECIPES = Path(__file__).parents[2] / "recipes"
LEAST: dict[str, Any] = {
    "output": "out",
    "target": {"path": "t"},
    "drafter": {"path": "d"},
    "data": {"path": "x"},
}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_survive_a_round_trip(file: Path) -> None:
    recipe = Recipe.load(file)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_27b_recipe_has_the_papers_settings() -> None:
    recipe = Recipe.load(RECIPES / "qwen3.6-27b.toml")
    config = recipe.adapter_config(5120, 248320, 16, "t", "d")
    assert (config.d_rank, config.num_heads, config.head_dim) == (2048, 16, 128)
    assert (config.candidate_pool_size, config.depth, config.mlp_dim) == (512, 15, 2048)
    train = recipe.train
    assert (train.muon_lr, train.adam_lr, train.epochs) == (2e-4, 2e-4, 1.0)
    assert train.loss in ("lk_mix", "lk_log")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trian": {}}, "unknown setting trian"),
        ({"train": {"lr": 1.0}}, "unknown setting train.lr"),
        ({"train": {"loss": "mse"}}, "train.loss is 'mse'"),
        ({"train": {"units": 0}}, "train.units is 0"),
        ({"train": {"units": 2.5}}, "train.units is 2.5: it must be a whole number"),
        ({"train": {"compile": 1}}, "train.compile is 1: it must be true or false"),
        ({"train": {"adam_betas": [0.9]}}, "train.adam_betas"),
        ({"train": {"warmup": 0.6, "decay": 0.6}}, "train.warmup"),
        ({"data": {}}, "data.path is missing"),
        ({"data": "x"}, "data is 'x': it must be a table"),
        ({"output": ""}, "output is empty"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace("[", r"\[")):
        Recipe.from_dict({**LEAST, **change})


def test_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("output = \n")
    with pytest.raises(RecipeError, match=r"r\.toml: not TOML"):
        Recipe.load(file)


def test_pool_above_the_vocabulary_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"adapter\.pool is 512"):
        Recipe.from_dict(LEAST).adapter_config(64, 256, 16, "t", "d")


def test_resumed_run_may_change_how_it_is_watched_but_not_what_it_computes() -> None:
    before = Recipe.from_dict(LEAST).to_dict()
    watched = Recipe.from_dict({**LEAST, "train": {"log_every": 1, "save_every": 7}}).to_dict()
    check_same_run(before, watched)
    other = Recipe.from_dict({**LEAST, "train": {"seed": 1}}).to_dict()
    with pytest.raises(RecipeError, match=r"train\.seed is 1 but the run to resume had 0"):
        check_same_run(before, other)
