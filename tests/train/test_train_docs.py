# SPDX-License-Identifier: Apache-2.0
"""docs/training.md: its walk on a CPU runs, command by command, with smaller numbers."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from nano_data import MODELS, PROMPTS
from typer.testing import CliRunner

from vllm_weaver.adapter import load
from vllm_weaver.cli.app import app
from vllm_weaver.train.recipe import Recipe

ROOT = Path(__file__).parents[2]
SMALLER = {
    "--batch": "8",
    "--budgets": "7",
    "--continuations": "2",
    "--prompt-tokens": "12",
    "--tokens": "20",
    "--positions": "3",
}
ROWS = {"extract": "5", "diagnose": "10", "evaluate": "2"}


def _commands() -> list[list[str]]:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    match = re.search(r"test_train_docs\.py.*?```bash\n(.*?)```", text, re.S)
    assert match is not None
    return [shlex.split(line) for line in match.group(1).splitlines()]


def _smaller(arguments: list[str]) -> list[str]:
    changed = list(arguments)
    for place, name in enumerate(arguments[:-1]):
        if name in SMALLER:
            changed[place + 1] = SMALLER[name]
        if name == "--rows":
            changed[place + 1] = ROWS[arguments[0]]
    return [str(PROMPTS) if a == "PROMPTS" else a for a in changed]


def test_documented_walk_on_a_cpu_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
    (tmp_path / "vllm_weaver" / "demo").mkdir(parents=True)
    (tmp_path / "vllm_weaver" / "demo" / "models").symlink_to(MODELS)
    table = tomllib.loads((ROOT / "recipes" / "nano.toml").read_text(encoding="utf-8"))
    assert Recipe.from_dict(table)
    (tmp_path / "recipes").mkdir()
    recipe = [f'output = "{table["output"]}"']
    for name in ("target", "drafter", "data"):
        recipe.append(f'{name}.path = "{table[name]["path"]}"')
    recipe += ["data.workers = 0", "data.held_out = 0.2"]
    recipe += ["adapter = {rank = 32, heads = 2, mlp = 32, pool = 64}"]
    recipe += ['train = {documents = 2, units = 1, blocks = 2, precision = "float32"}']
    (tmp_path / "recipes" / "nano.toml").write_text("\n".join(recipe))
    monkeypatch.chdir(tmp_path)
    commands = _commands()
    assert [c[1] for c in commands if c[1] != "convert"] == [
        *("extract", "diagnose", "extract", "train", "train", "evaluate", "inspect")
    ]
    for program, *arguments in commands:
        assert program == "vllm-weaver"
        result = CliRunner().invoke(app, _smaller(arguments))
        assert result.exit_code == 0, f"{arguments}: {result.output[-1500:]}"
    assert load("runs/nano/published.pth").config.d_rank == 32
    assert (tmp_path / "results" / "nano-budget.png").is_file()
    assert "weaver B=7" in (tmp_path / "runs" / "nano" / "adapter" / "README.md").read_text()
