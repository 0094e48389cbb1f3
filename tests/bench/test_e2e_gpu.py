# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark on a GPU: eight layers of the 27B's shapes, in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_large_shapes_decode_as_ar_does_but_for_ties(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.e2e", "--layers", "8", "--arms", "weaver,stock"]
    command += ["--widths", "15", "--batch", "1,4", "--context", "256", "--tokens", "128"]
    command += ["--profile", "ar,weaver-63", "--start-seconds", "60", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    logs = "\n".join(file.read_text()[-3000:] for file in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = json.loads((tmp_path / "e2e.json").read_text())
    measured = {record["arm"] for record in found["cells"]}
    assert measured == {"ar", "weaver-63", "stock-15"}, found["skipped"]
    for record in found["cells"]:
        assert record["requests_per_step"] == record["batch"]
        # The shapes are the large model's, what they accept is the small one's.
        if record["temperature"] == 0 and record["arm"] == "weaver-63":
            assert record["accepted_length"]["token_weighted"] > 3
    for arm in ("ar", "weaver-63"):
        trace = found["traces"][arm]
        assert trace["source"] == "GPU kernels"
        assert trace["categories"]["GEMM"] > 0 and trace["categories"]["GDN"] > 0
        # Drafting, weaving, verification, acceptance and commit never wait for the host.
        assert trace["blocking_syncs_per_step"] == 0
