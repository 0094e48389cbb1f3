# SPDX-License-Identifier: Apache-2.0
"""Several processes: the same training as one, replicated or in shards, from the same files.

Two processes are started once and run all recipes, since starting them costs more than the steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import changed, recipe_table
from nano_runs import in_processes, metrics, weights, write_toml
from torch import Tensor

from vllm_weaver.train.processes import Processes
from vllm_weaver.train.recipe import Recipe
from vllm_weaver.train.state import Checkpoints
from vllm_weaver.train.trainer import Trainer, train

# v1 has a table of 15 positions, which two processes cannot halve. Two units per process and step:
# gradients are added up in the process as well as between them.
SETTINGS = {
    "adapter__variant": "v1",
    "train__steps": 3,
    "train__units": 4,
    "train__documents": 1,
    "train__blocks": 2,
    "train__save_every": 1,
    "train__keep": 9,
    # Three rows to measure on: one process has two, the other one.
    "train__measure_every": 3,
    "train__measure_documents": 3,
    "data__held_out": 0.25,
}
_RUN = """
import sys, torch
torch.set_num_threads(1)
from vllm_weaver.train.processes import Processes
from vllm_weaver.train.recipe import Recipe
from vllm_weaver.train.trainer import Trainer
processes = Processes.join()
for file in sys.argv[1:]:
    trainer = Trainer(Recipe.load(file), processes)
    trainer.resume()
    trainer.run()
processes.leave()
"""


@pytest.fixture(scope="module")
def runs(made_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """`alone`, in one process; `ddp` and `fsdp2` in two; `crossed`: steps 1 alone, 2 in shards,
    3 alone again."""
    folder = tmp_path_factory.mktemp("runs")
    recipes = {
        name: changed(recipe_table(made_data, folder / name), **SETTINGS, train__parallel=kind)
        for name, kind in (("alone", "ddp"), ("ddp", "ddp"), ("fsdp2", "fsdp2"))
    }
    recipes["crossed"] = changed(
        recipe_table(made_data, folder / "crossed"), **SETTINGS, train__parallel="fsdp2"
    )
    train(recipes["alone"])
    first = Checkpoints(recipes["alone"].output, 9).file(1)
    crossed = Checkpoints(recipes["crossed"].output, 9)
    crossed.directory.mkdir(parents=True)
    shutil.copy(first, crossed.file(1))
    files = [write_toml(recipes[name], folder / f"{name}.toml") for name in list(recipes)[1:]]
    result = in_processes(_RUN, folder, *map(str, files), count=2)
    assert result.returncode == 0, result.stderr[-3000:]
    crossed.file(3).unlink()
    train(recipes["crossed"], resume=True)
    return recipes


def _assert_same_training(one: Recipe, other: Recipe) -> None:
    """Up to the order of sums, which the bfloat16 of Muon's iteration makes larger: to 3 % of what
    a matrix moved where processors multiply bfloat16, to 1 % elsewhere."""
    start = dict(Trainer(one, Processes(0, 1, torch.device("cpu"))).adapter.state_dict())
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        moved = (tensor - start[name]).norm()
        assert moved > 0, name
        assert (tensor - theirs[name]).norm() < 0.06 * moved, name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_does(kind: str, runs: dict[str, Recipe]) -> None:
    _assert_same_training(runs["alone"], runs[kind])
    for mine, theirs in zip(metrics(runs["alone"]), metrics(runs[kind]), strict=True):
        # Both optimisers divide by the gradient's size: only its norm tells a sum from a mean.
        names = {"loss", "gradient_norm", "expected_length", "mass_outside_pool"} & mine.keys()
        for name in names:
            assert theirs[name] == pytest.approx(mine[name], rel=2e-3), name
    assert [m["kind"] for m in metrics(runs[kind])] == ["train", "train", "train", "held_out"]


def test_a_run_goes_on_in_shards_and_back_in_one_process(runs: dict[str, Recipe]) -> None:
    _assert_same_training(runs["alone"], runs["crossed"])
    assert metrics(runs["crossed"])[-1]["step"] == 3


def test_checkpoints_of_shards_hold_whole_tensors(runs: dict[str, Recipe]) -> None:
    def forms(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: forms(part) for key, part in value.items()}
        return (type(value), tuple(value.shape)) if isinstance(value, Tensor) else None

    one, other = (Checkpoints(runs[n].output, 9).load() for n in ("alone", "fsdp2"))
    assert one is not None and other is not None
    for part in ("adapter", "optimizers"):
        assert forms(one[part]) == forms(other[part])
