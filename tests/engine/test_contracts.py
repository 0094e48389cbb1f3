# SPDX-License-Identifier: Apache-2.0
"""vLLM's private parts are those that this release was built for; else start-up lists them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import BUDGET, COMMON
from vllm.engine.arg_utils import EngineArgs

import vllm_weaver.engine
from vllm_weaver.engine import compat
from vllm_weaver.engine.config import WeaverConfigError

SAMPLE = "vllm.v1.worker.gpu.sample.sampler:Sampler.sample"
BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"


def test_no_contract_is_broken() -> None:
    assert compat.broken_contracts() == []


def test_methods_of_the_drafter_that_are_extended_have_a_contract() -> None:
    from vllm_weaver.engine.speculator import WeaverSpeculator

    bases = WeaverSpeculator.__mro__[1:-1]
    for name, value in vars(WeaverSpeculator).items():
        owners = [base for base in bases if name in vars(base)]
        if callable(value) and owners and name not in ("__doc__", "__module__"):
            known = [f"{base.__module__}:{base.__qualname__}.{name}" for base in owners]
            assert any(key in compat.CONTRACTS for key in known), known


def test_changed_signatures_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.CONTRACTS, SAMPLE, ("logits", "temperature"))
    monkeypatch.setitem(compat.CONTRACTS, "vllm.v1.worker.gpu.gone:Gone.go", ())
    monkeypatch.setitem(compat.FIELDS, BATCH, ("num_reqs", "num_trees"))
    broken = compat.broken_contracts()
    assert len(broken) == 3
    assert re.match(f"{SAMPLE} takes .*logits.*, not .logits, temperature.", broken[0])
    assert "vllm.v1.worker.gpu.gone:Gone.go is missing" in broken[1]
    assert broken[2] == f"{BATCH} has no field num_trees"


def test_a_changed_signature_refuses_start_up(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compat.CONTRACTS, SAMPLE, ("logits", "temperature"))
    arguments = EngineArgs(
        model=str(tiny_models["dense"]),
        speculative_config={
            "method": "dflash",
            "model": str(tiny_models["dense-dflash8"]),
            "num_speculative_tokens": BUDGET,
        },
        additional_config={"weaver": {"proposal": "ddtree"}},
        **COMMON,
    )
    with pytest.raises(WeaverConfigError, match=f"weaver: .*internals differ.*{SAMPLE} takes"):
        arguments.create_engine_config()


def test_only_compat_touches_private_names() -> None:
    """No other module reads an attribute of vLLM that starts with an underscore."""
    private = re.compile(r"from vllm[.\w]* import [^\n]*\b_\w+|\bvllm\.[.\w]*\._\w+")
    folder = Path(vllm_weaver.engine.__file__).parent
    for file in folder.glob("*.py"):
        if file.name != "compat.py":
            assert not private.search(file.read_text()), file.name


ON_A_GPU = """
import pkgutil, importlib, sys
from unittest import mock
import torch
import vllm_weaver.engine as engine
from vllm_weaver.engine import compat
events = torch.Event, torch.cuda.Event
with mock.patch.object(compat, "current_platform", mock.Mock(is_cpu=lambda: False)):
    for module in pkgutil.iter_modules(engine.__path__):
        if not module.name.startswith("cpu_"):
            importlib.import_module(f"vllm_weaver.engine.{module.name}")
    assert compat.broken_contracts() == []
assert events == (torch.Event, torch.cuda.Event)
assert "vllm.v1.worker.cpu.model_runner" not in sys.modules
"""


def test_events_of_cuda_stay_what_they_are_in_a_process_with_a_gpu() -> None:
    """vLLM's CPU runner replaces them when it is imported, which breaks compilation there."""
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
