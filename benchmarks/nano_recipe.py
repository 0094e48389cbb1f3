# SPDX-License-Identifier: Apache-2.0
"""Runs the walk of docs/training.md on a CPU, exactly as it is written there, and times it.

    python -m benchmarks.nano_recipe DIR --json benchmarks/results/train-nano.json --threads 2

DIR is a scratch directory. Commands that are done are not run again, so that a run that was stopped
goes on. The file gets each command's wall and CPU time and peak memory, and tokens per pass of
chain, DDTree, the trained adapter and the packaged one on the same held-out rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_MODELS = ROOT / "vllm_weaver" / "demo" / "models"


def commands() -> list[list[str]]:
    """The commands of the walk, without the program's name."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    block = re.search(r"test_train_docs\.py.*?```bash\n(.*?)```", text, re.S)
    assert block is not None, "docs/training.md has lost its walk"
    library = sysconfig.get_paths()["stdlib"]
    found = [shlex.split(line)[1:] for line in block.group(1).splitlines()]
    walk = [[library if word == "PROMPTS" else word for word in words] for words in found]
    (evaluate,) = (words for words in walk if words[0] == "evaluate")
    shipped = list(evaluate)
    shipped[shipped.index("--adapter") + 1] = "vllm_weaver/demo/models/adapter"
    shipped[shipped.index("--json") + 1] = "results/packaged.json"
    # The card belongs to the trained adapter alone, and so do the plots.
    del shipped[shipped.index("--plots") : shipped.index("--plots") + 2]
    shipped.remove("--card")
    return [*walk, shipped]


def run(words: list[str], directory: Path, threads: int) -> dict[str, Any]:
    """Run one command; its times in seconds, its peak memory in bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    code = "from vllm_weaver.cli import main; main()"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=directory, env=environment, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        raise SystemExit(f"{shlex.join(words)}: exit status {result.returncode}")
    return {
        "command": shlex.join(["vllm-weaver", *words]),
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_gib_so_far": round(after.ru_maxrss / 2**20, 2),
    }


def figures(directory: Path) -> dict[str, Any]:
    """Arms and ratios of both adapters, as `evaluate` wrote them."""
    found = {}
    for name, file in (("trained", "nano.json"), ("packaged", "packaged.json")):
        result = json.loads((directory / "results" / file).read_text(encoding="utf-8"))
        found[name] = {k: result[k] for k in ("documents", "positions", "arms", "ratios")}
        found["versions"] = result["versions"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    directory: Path = given.directory
    (directory / "vllm_weaver" / "demo").mkdir(parents=True, exist_ok=True)
    models = directory / "vllm_weaver" / "demo" / "models"
    if not models.exists():
        models.symlink_to(_MODELS)
    shutil.copytree(ROOT / "recipes", directory / "recipes", dirs_exist_ok=True)
    state = directory / "done.json"
    done: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
    walk = commands()
    for words in walk[len(done) :]:
        done.append(run(words, directory, given.threads))
        state.write_text(json.dumps(done, indent=1))
        print(done[-1], flush=True)
    record = {
        "command": " ".join(["python -m benchmarks.nano_recipe", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": given.threads,
        "commands": done,
        # The last measures the packaged adapter and is no part of the walk.
        "wall_s": round(sum(step["wall_s"] for step in done[:-1]), 1),
        "cpu_s": round(sum(step["cpu_s"] for step in done[:-1]), 1),
        **figures(directory),
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['wall_s'] / 60:.1f} minutes, {record['cpu_s'] / 60:.1f} of CPU; {given.json}")


if __name__ == "__main__":
    main()
