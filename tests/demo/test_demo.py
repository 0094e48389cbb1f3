# SPDX-License-Identifier: Apache-2.0
"""The demo on random models: every arm gives plain decoding's tokens, and the report says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from vllm_weaver.cli.app import app
from vllm_weaver.demo.arms import ARMS, Setting, best_gap, run_arm
from vllm_weaver.demo.sources import load_prompts

pytestmark = pytest.mark.usefixtures("unchanged_environment")

TOKENS = 8


def demo(models: Path, sources: Path, *options: object) -> Result:
    arguments = ["demo", "--models", models, "--sources", sources, "--tokens", TOKENS, *options]
    return CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.fixture(scope="module")
def run(
    demo_models: Path, demo_sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, dict[str, Any]]:
    """Output and JSON of one run of all arms."""
    file = tmp_path_factory.mktemp("demo") / "out.json"
    result = demo(demo_models, demo_sources, "--prompts", 1, "--budget", 20, "--json", file)
    assert result.exit_code == 0, result.output + result.stderr
    return result, json.loads(file.read_text())


def test_every_arm_equals_plain_decoding(run: tuple[Result, dict[str, Any]]) -> None:
    _, found = run
    assert [arm["arm"] for arm in found["arms"]] == list(ARMS)
    plain = found["arms"][0]
    assert 0 < plain["tokens"] <= TOKENS
    for arm in found["arms"][1:]:
        assert arm["equal_to_ar"] is True
        assert arm["token_ids"] == plain["token_ids"]
        assert arm["differences"] == []


def test_passes_and_tokens_add_up(run: tuple[Result, dict[str, Any]]) -> None:
    _, found = run
    plain = found["arms"][0]
    assert plain["target_passes"] == plain["pass_tokens"] == plain["tokens"] - 1
    for arm in found["arms"][1:]:
        # The last pass may emit past the limit, by at most a whole path.
        assert arm["tokens"] - 1 <= arm["pass_tokens"] <= arm["tokens"] - 1 + 15
        assert 1 <= arm["mean_accepted_length"] <= 16
        assert arm["target_passes"] <= plain["target_passes"]


def test_the_results_say_what_they_were_measured_with(run: tuple[Result, dict[str, Any]]) -> None:
    _, found = run
    assert {"vllm-weaver", "torch"} <= found["versions"].keys()
    assert found["hardware"]["cores"] >= 1
    assert found["setting"]["dtype"] in ("float32", "bfloat16")
    assert found["setting"]["budget"] == 20


def test_the_report_shows_text_tree_and_table(run: tuple[Result, dict[str, Any]]) -> None:
    output = run[0].output
    assert "class Node:" in output
    assert "●" in output
    lines = output.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    table = lines[header + 1 : header + 1 + len(ARMS)]
    assert [row.split("  ")[0] for row in table] == list(ARMS.values())
    assert [row.split()[-1] for row in table] == ["-", "yes", "yes", "yes"]
    assert all(f" {TOKENS} " in row for row in table)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plain core is for machines without GPU")
def test_plain_core_gives_the_greedy_text_of_transformers(
    demo_models: Path, demo_sources: Path
) -> None:
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(demo_models / "target")
    prompts = [p.token_ids for p in load_prompts(2, tokenizer, demo_sources)]
    assert len({len(prompt) for prompt in prompts}) == 2
    result = run_arm("ar", Setting(demo_models, budget=4, tokens=24), prompts)
    model = Qwen3_5ForCausalLM.from_pretrained(demo_models / "target", dtype=torch.float32)
    for prompt, tokens in zip(prompts, result.token_ids, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert out[0, len(prompt) :].tolist() == tokens


def test_seeded_sampling_equals_plain_decoding_too(demo_models: Path, demo_sources: Path) -> None:
    options = ("--prompts", 2, "--budget", 9, "--temperature", 0.8, "--arms", "ar,weaver")
    result = demo(demo_models, demo_sources, *options)
    assert result.exit_code == 0, result.output + result.stderr
    assert "temperature 0.8" in result.output


def test_gap_is_zero_for_the_best_token_only(
    run: tuple[Result, dict[str, Any]], demo_models: Path, demo_sources: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_models / "target")
    (prompt,) = load_prompts(1, tokenizer, demo_sources)
    best = run[1]["arms"][0]["token_ids"][0][0]
    setting = Setting(demo_models, budget=4, tokens=1)
    assert best_gap(setting, prompt.token_ids, best) == 0
    assert best_gap(setting, prompt.token_ids, (best + 1) % 512) > 0


def test_an_engine_that_fails_is_one_line_and_a_log(
    demo_models: Path, demo_sources: Path, tmp_path: Path
) -> None:
    for name in ("target", "drafter", "adapter"):
        shutil.copytree(demo_models / name, tmp_path / name)
    weights = tmp_path / "adapter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    result = demo(tmp_path, demo_sources, "--prompts", 1, "--arms", "weaver")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "model.safetensors" in line
    log = Path(line.rpartition("details: ")[2].rstrip(")"))
    assert "Traceback" in log.read_text()
    log.unlink()
