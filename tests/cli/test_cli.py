# SPDX-License-Identifier: Apache-2.0
"""The command: what it imports, prints and refuses, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import vllm_weaver
from vllm_weaver.cli.app import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(x) for x in arguments])


def assert_refused(result: Result, *parts: str) -> None:
    """One line on standard error that says all of ``parts``, and exit code 1."""
    assert result.exit_code == 1, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


def test_importing_the_command_imports_no_heavy_package() -> None:
    code = (
        "import sys, vllm_weaver.cli.app, vllm_weaver.demo;"
        "print([x for x in ('torch', 'vllm', 'triton', 'transformers') if x in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_no_arguments_and_wrong_ones_end_with_code_2() -> None:
    assert run().exit_code == 2
    assert run("no-such-command").exit_code == 2
    assert run("demo", "--budget", "many").exit_code == 2


def test_every_command_explains_itself() -> None:
    for command in ("demo", "inspect", "cpu-env", "version", "doctor"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output
        assert command in run("--help").output


def test_version_names_what_it_stands_on() -> None:
    assert f"vllm-weaver {vllm_weaver.__version__}" in run("version").output.splitlines()
    assert json.loads(run("version", "--json").output)["python"].startswith("3.")


class TestInspect:
    @pytest.fixture
    def adapter(self, tiny_models: dict[str, Path]) -> Path:
        return tiny_models["hybrid-weaver16"]

    def test_says_what_the_adapter_is(self, adapter: Path) -> None:
        facts = json.loads(run("inspect", adapter, "--json").output)
        assert (facts["variant"], facts["depth"], facts["target_width"]) == ("v2", 15, 128)
        shown = run("inspect", adapter)
        assert shown.exit_code == 0
        assert "fits" not in shown.output
        assert "candidate pool size" in shown.output

    def test_says_that_it_fits(self, adapter: Path, tiny_models: dict[str, Path]) -> None:
        pair = ("--target", tiny_models["hybrid"], "--drafter", tiny_models["hybrid-dflash16"])
        result = run("inspect", adapter, *pair)
        assert result.exit_code == 0, result.output
        assert "fits target" in result.output
        assert "fits drafter" in result.output

    def test_refuses_a_shallower_drafter(self, adapter: Path, tiny_models: dict[str, Path]) -> None:
        result = run("inspect", adapter, "--drafter", tiny_models["hybrid-dflash8"])
        assert_refused(result, "15", "7", "block size 16")

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"hidden_size": 256}, ("output_norm.weight", "(128,)", "(256,)")),
            ({"vocab_size": 1000}, ("512", "1000")),
            ({"hidden_size": None}, ("hidden_size", "None")),
        ],
    )
    def test_refuses_another_target(
        self,
        adapter: Path,
        tiny_models: dict[str, Path],
        tmp_path: Path,
        change: dict[str, int | None],
        parts: tuple[str, ...],
    ) -> None:
        config = json.loads((tiny_models["hybrid"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert_refused(run("inspect", adapter, "--target", tmp_path), *parts)

    def test_reads_the_text_part_of_a_multimodal_target(
        self, adapter: Path, tiny_models: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((tiny_models["hybrid"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
        assert run("inspect", adapter, "--target", tmp_path).exit_code == 0

    def test_refuses_a_drafter_of_another_target(
        self, adapter: Path, tiny_models: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((tiny_models["hybrid-dflash16"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 256}))
        options = ("--target", tiny_models["hybrid"], "--drafter", tmp_path)
        assert_refused(run("inspect", adapter, *options), "256", "128")

    def test_refuses_a_drafter_without_mask_token(
        self, adapter: Path, tiny_models: dict[str, Path], tmp_path: Path
    ) -> None:
        config = json.loads((tiny_models["hybrid-dflash16"] / "config.json").read_text())
        del config["dflash_config"]["mask_token_id"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert_refused(run("inspect", adapter, "--drafter", tmp_path), "mask_token_id")

    def test_refuses_a_truncated_file(self, adapter: Path, tmp_path: Path) -> None:
        shutil.copytree(adapter, tmp_path / "adapter")
        weights = tmp_path / "adapter" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert_refused(run("inspect", tmp_path / "adapter"), "model.safetensors")

    def test_refuses_what_is_not_there(self, adapter: Path, tmp_path: Path) -> None:
        assert_refused(run("inspect", tmp_path / "nothing"), "does not exist")
        assert_refused(run("inspect", adapter, "--target", tmp_path), "config.json")
        (tmp_path / "config.json").write_text("{")
        assert_refused(run("inspect", adapter, "--target", tmp_path), "config.json")


class TestCpuEnv:
    def test_its_lines_set_what_a_process_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_weaver.demo.machine.gpus", list)
        result = run("cpu-env")
        assert result.exit_code == 0, result.output
        script = result.output + "\nenv -0"
        clean = {"PATH": "/usr/bin:/bin"}
        shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=clean)
        exported = dict(x.split("=", 1) for x in shell.stdout.split("\0") if "=" in x)
        assert exported["TRITON_INTERPRET"] == "1"
        assert exported["OMP_NUM_THREADS"]
        assert str(Path(vllm_weaver.__file__).parent / "cpu" / "site") in exported["PYTHONPATH"]

    def test_refuses_on_a_machine_with_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_weaver.demo.machine.gpus", lambda: ["NVIDIA H200"])
        result = run("cpu-env")
        assert_refused(result, "NVIDIA H200")
        assert result.stdout == ""
