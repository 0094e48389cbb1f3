# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm-weaver train` in processes of its own, one or several, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from vllm_weaver.train.recipe import Recipe

ROOT = Path(__file__).parents[2]
_CALL = "import torch; torch.set_num_threads(1); from vllm_weaver.cli import main; main()"


def write_toml(recipe: Recipe, file: Path) -> Path:
    lines = []
    for name, value in recipe.to_dict().items():
        if isinstance(value, dict):
            lines.append(f"[{name}]")
            pairs = ((k, v) for k, v in value.items() if v is not None)
            lines += [f"{k} = {json.dumps(v)}" for k, v in pairs]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    file.write_text("\n".join(lines) + "\n")
    return file


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def in_processes(
    code: str, folder: Path, *arguments: str, count: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run a script in `count` processes under `torchrun`, or in one."""
    script = folder / f"script{count}.py"
    script.write_text(code)
    command: list[str] = [sys.executable]
    if count > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, str(script), *arguments], env=environment(), capture_output=True, text=True
    )


def train_in_a_process(
    recipe: Recipe, folder: Path, *options: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`vllm-weaver train` on a recipe, after some Python code in the same process."""
    file = write_toml(recipe, folder / f"{Path(recipe.output).name}.toml")
    return in_processes(f"{before}\n{_CALL}\n", folder, "train", str(file), *options)


def weights(recipe: Recipe) -> dict[str, Tensor]:
    return load_file(Path(recipe.output) / "adapter" / "model.safetensors")


def metrics(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
