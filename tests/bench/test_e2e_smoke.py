# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark as a command, on expanded nano models in vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the nano shapes are a test for a CPU")
def test_expanded_models_decode_as_ar_does_in_vllm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.e2e", "--smoke", "--shape", "twice-nano"]
    command += ["--arms", "weaver"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    logs = "\n".join(file.read_text()[-2000:] for file in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = json.loads((tmp_path / "e2e.json").read_text())
    assert found["skipped"] == []
    arms = {record["arm"] for record in found["cells"]}
    assert arms == {"ar", "weaver-24"}
    for record in found["cells"]:
        if record["arm"] == "ar":
            assert record["accepted_length"]["token_weighted"] == 1
            continue
        texts = record["texts"]
        # Float32: greedy and sampled texts are AR's, token for token.
        assert texts["equal_requests"] == texts["requests"] == 2, texts
        assert texts["tokens_compared"] >= 2 * 16
    greedy = {r["arm"]: r for r in found["cells"] if r["temperature"] == 0}
    # The expanded drafter and adapter still know what comes next.
    assert greedy["weaver-24"]["accepted_length"]["token_weighted"] > 3
    assert found["traces"]["weaver-24"]["ms_per_step"] > 0
    for name in ("e2e.png", "step.png", "e2e.md", "step.md"):
        assert (tmp_path / name).stat().st_size > 0
