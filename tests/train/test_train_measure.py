# SPDX-License-Identifier: Apache-2.0
"""Figures against their definitions, counted by hand; reports that a person can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import ADAPTER, PROMPT, MakeRecipe
from rich.console import Console
from safetensors.torch import load_file, save_file

from vllm_weaver.adapter import load
from vllm_weaver.train.blocks import make_blocks
from vllm_weaver.train.card import model_card
from vllm_weaver.train.data import Document
from vllm_weaver.train.errors import DataError, TrainError
from vllm_weaver.train.measure import (
    Measuring,
    best_marginal,
    diagnose,
    evaluate,
    text_anchors,
)
from vllm_weaver.train.report import plot, show, verdict
from vllm_weaver.train.trainer import load_frozen

CPU = torch.device("cpu")


@pytest.fixture
def measuring(make_recipe: MakeRecipe) -> Measuring:
    target, drafter, data = load_frozen(make_recipe(), CPU)
    return Measuring(target, drafter, data, load(ADAPTER), range(4), positions=24)


def _marginals(measuring: Measuring, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Text after each position [A, D], the drafter's and the target's distributions [A, D, V]."""
    document = measuring.data[row]
    assert isinstance(document, Document)
    anchors = torch.arange(PROMPT, PROMPT + 24)
    blocks = make_blocks(measuring.target, measuring.drafter, [(document, anchors)], 15)
    assert blocks is not None
    head = measuring.target.head_Vd
    q = (blocks.h_draft_RDd @ head.T).softmax(-1)
    return blocks.tokens_RN[:, 1:], q, (blocks.states_RDd @ head.T).softmax(-1)


def test_chain_and_depths_equal_a_count_by_hand(measuring: Measuring) -> None:
    result = evaluate(measuring, (15,))
    passes = tokens = 0
    overlap, inside = [], []
    for row in range(4):
        text, q, p = _marginals(measuring, row)
        guesses = q.argmax(-1)
        position = 0
        while position < len(text):
            passes += 1
            accepted = 0
            while accepted < 15 and guesses[position, accepted] == text[position, accepted]:
                accepted += 1
            position += accepted + 1
        tokens += len(text)
        overlap.append(torch.minimum(p, q).sum(-1))
        pool = q.topk(256).indices
        inside.append((pool == text[..., None]).any(-1))
    assert result["positions"] == tokens == 96
    assert result["arms"]["chain"]["tokens_per_pass"] == pytest.approx(tokens / passes, abs=1e-4)
    depths = result["per_depth"]
    expected = torch.cat(overlap).mean(0).tolist()
    assert depths["drafter"] == pytest.approx(expected, abs=1e-3)
    recall = torch.cat(inside).float().mean(0).tolist()
    assert depths["text_in_pool"] == pytest.approx(recall, abs=1e-3)


def test_larger_trees_and_the_adapter_do_not_lose(measuring: Measuring) -> None:
    arms = {
        name: arm["tokens_per_pass"] for name, arm in evaluate(measuring, (15, 63))["arms"].items()
    }
    assert set(arms) == {
        "chain",
        "weaver chain",
        *(f"{kind} B={budget}" for kind in ("ddtree", "weaver") for budget in (15, 63)),
    }
    assert 1 <= arms["chain"] <= arms["ddtree B=63"]
    assert arms["weaver B=15"] <= arms["weaver B=63"]
    assert arms["weaver B=63"] > arms["chain"]


def test_without_an_adapter_chain_and_ddtree_are_measured(measuring: Measuring) -> None:
    measuring.adapter = None
    result = evaluate(measuring, (7,))
    assert list(result["arms"]) == ["chain", "ddtree B=7"] and not result["ratios"]


def test_pools_bound_the_adapter_and_grow(measuring: Measuring) -> None:
    depths = diagnose(measuring)["per_depth"]
    for k in range(15):
        sizes = [depths[f"pool_{size}"][k] for size in (64, 128, 256, 512, 1024)]
        assert sizes == sorted(sizes)
        assert depths["pool"][k] == sizes[2]
        assert depths["adapter"][k] <= depths["pool"][k]


def test_ceiling_comes_from_rows_that_share_a_prompt(make_recipe: MakeRecipe, data: Path) -> None:
    """Row 1 becomes a second continuation of row 0's prompt."""
    import datasets

    table = datasets.load_from_disk(str(data))
    columns: dict[str, Any] = {n: list(table.with_format(None)[n]) for n in table.column_names}
    first = columns["input_ids"][0][:PROMPT]
    columns["input_ids"][1] = first + list(columns["input_ids"][1][PROMPT:])
    copy = data.with_name("two")
    datasets.Dataset.from_dict(columns).save_to_disk(str(copy))
    (copy / "hidden_states").mkdir()
    for row in range(4):
        states = load_file(data / "hidden_states" / f"hs_{row}.safetensors")
        if row == 1:
            states["token_ids"] = torch.tensor(columns["input_ids"][1])
        save_file(states, copy / "hidden_states" / f"hs_{row}.safetensors")
    target, drafter, opened = load_frozen(make_recipe(data__path=str(copy)), CPU)
    result = diagnose(Measuring(target, drafter, opened, None, range(4), positions=8))
    ceiling = result["marginal_ceiling"]
    assert (ceiling["prompts"], ceiling["continuations"]) == (1, 2)
    for k in (0, 3, 14):
        rows = [opened[row].last_Ld[PROMPT - 1 + k].float() for row in range(2)]  # type: ignore[union-attr]
        p = (target.final_norm(torch.stack(rows)) @ target.head_Vd.T).softmax(-1)
        assert ceiling["to"][k] == pytest.approx(best_marginal(p), abs=1e-3)
        assert ceiling["from"][k] <= ceiling["to"][k] + 1e-4
    assert any("2 continuations" in line for line in verdict(result))


def test_rows_without_enough_text_are_refused(measuring: Measuring) -> None:
    measuring.data.recipe.__dict__["max_length"] = 12
    with pytest.raises(DataError, match="none of the 4 rows has an answer"):
        evaluate(measuring)
    with pytest.raises(TrainError, match="budget 256"):
        evaluate(measuring, (256,))


def test_anchors_end_where_the_first_answer_ends() -> None:
    trained = torch.zeros(60, dtype=torch.bool)
    trained[10:20] = trained[30:60] = True
    assert text_anchors(trained, 15, 100).tolist() == list(range(10, 20))
    assert text_anchors(trained, 15, 4).tolist() == [10, 11, 12, 13]
    assert text_anchors(trained[:20], 15, 4).tolist() == []


def test_results_are_shown_plotted_and_put_on_the_card(
    measuring: Measuring, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
    result = evaluate(measuring, (7, 15))
    json.dumps(result)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(result, console)
    text = console.export_text()
    assert "weaver B=15" in text and "95 % interval" in text
    files = plot(result, tmp_path / "figures" / "nano")
    assert {f.name for f in files} == {
        f"nano-{kind}.{ending}" for kind in ("depth", "budget") for ending in ("png", "svg")
    }
    assert all(file.stat().st_size > 3000 for file in files)
    card = model_card(ADAPTER, result)
    assert "| weaver B=15 | " in card and "96 positions" in card
