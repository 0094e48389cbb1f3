# SPDX-License-Identifier: Apache-2.0
"""Conversions lose nothing, commands say in one line what is wrong, small data can be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import ADAPTER, DRAFTER, PROMPTS, TARGET
from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_weaver.adapter import AdapterError, WeaverAdapter, WeaverConfig, load
from vllm_weaver.cli.app import app
from vllm_weaver.train.convert import adapter_in, convert
from vllm_weaver.train.errors import TrainError


def _same(one: WeaverAdapter, other: WeaverAdapter) -> None:
    assert one.config == other.config
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def _run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_package_imports_no_vllm_and_none_of_the_extra() -> None:
    code = (
        "import sys, pkgutil, importlib, vllm_weaver.train as t\n"
        "for module in pkgutil.iter_modules(t.__path__, 'vllm_weaver.train.'):\n"
        "    importlib.import_module(module.name)\n"
        "bad = {'vllm', 'speculators', 'datasets', 'matplotlib', 'tensorboard', 'transformers'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr[-500:]


def test_ours_to_published_and_back_is_the_identity(tmp_path: Path) -> None:
    published = convert(ADAPTER, tmp_path / "weaver.pth", "pth")
    back = convert(published, tmp_path / "back", "weaver")
    _same(load(back), load(ADAPTER))
    stored = load_file(back / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    content = torch.load(published, weights_only=True)
    assert content["metadata"]["speculator_kind"] == "dflash_tfm_weaver"
    assert (back / "README.md").is_file()


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_published_files_have_the_published_keys_alone(variant: Any, tmp_path: Path) -> None:
    from vllm_weaver.adapter import save

    config = WeaverConfig(
        d_model=32,
        d_embed=32,
        d_rank=16,
        num_heads=2,
        mlp_dim=16,
        depth=3,
        candidate_pool_size=8,
        variant=variant,
        vocab_size=64,
    )
    save(WeaverAdapter(config), tmp_path / "ours")
    file = convert(tmp_path / "ours", tmp_path / "a.pth", "pth")
    keys = {"d_model", "d_embed", "d_rank", "num_layers", "num_heads", "mlp_dim", "K"}
    keys |= {"candidate_pool_size", "encoder_mode", "score_head"}
    keys |= {"rope_base", "activation"} if variant == "v2" else set()
    assert set(torch.load(file, weights_only=True)["config"]) == keys
    _same(load(convert(file, tmp_path / "b", "weaver")), load(tmp_path / "ours"))


def test_speculators_directory_holds_both_and_gives_the_adapter_back(tmp_path: Path) -> None:
    both = convert(ADAPTER, tmp_path / "both", "speculators", drafter=DRAFTER, target=TARGET)
    _same(load(adapter_in(both)), load(ADAPTER))
    mine, theirs = load_file(both / "model.safetensors"), load_file(f"{DRAFTER}/model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) and mine[n].dtype == theirs[n].dtype for n in mine)
    again = convert(both, tmp_path / "again", "weaver")
    _same(load(again), load(ADAPTER))
    status, output = _run("inspect", both, "--target", TARGET, "--drafter", both)
    assert status == 0 and "fits drafter" in output
    assert f"{sum(p.numel() for p in load(ADAPTER).parameters()):,}" in output


def test_speculators_directory_is_one_to_speculators(tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    from speculators import SpeculatorModel

    both = convert(ADAPTER, tmp_path / "both", "speculators", drafter=DRAFTER, target=TARGET)
    model = SpeculatorModel.from_pretrained(str(both))
    assert type(model).__name__ == "DFlashDraftModel"
    assert model.target_layer_ids == [2, 4, 6, 7]
    assert model.config.sliding_window_non_causal


@pytest.mark.slow
def test_vllm_takes_a_speculators_directory_by_its_path_alone(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.engine.arg_utils import EngineArgs

    both = convert(
        ADAPTER, tmp_path / "nano-dflash", "speculators", drafter=DRAFTER, target=TARGET, budget=31
    )
    arguments = EngineArgs(model=TARGET, dtype="float32", speculative_config={"model": str(both)})
    speculative = arguments.create_engine_config().speculative_config
    assert speculative.method == "dflash"
    assert speculative.num_speculative_tokens == 31
    config = speculative.draft_model_config.hf_config
    assert config.architectures == ["DFlashDraftModel"]
    assert config.block_size == 16
    assert config.dflash_config["target_layer_ids"] == [1, 3, 5, 6]
    assert config.dflash_config["mask_token_id"] == 1
    assert config.dflash_config["causal"] is False


def test_conversions_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="pass --drafter"):
        convert(ADAPTER, tmp_path / "x", "speculators")
    with pytest.raises(TrainError, match="exists already"):
        convert(ADAPTER, tmp_path, "weaver")
    with pytest.raises(TrainError, match="use a DFlash drafter"):
        convert(ADAPTER, tmp_path / "x", "speculators", drafter=TARGET)
    with pytest.raises(AdapterError):
        convert(DRAFTER, tmp_path / "x", "pth")
    other = tmp_path / "drafter"
    other.mkdir()
    config = json.loads(Path(DRAFTER, "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "block_size": 8}))
    with pytest.raises(AdapterError, match="drafts 7 tokens but the adapter reads 15"):
        convert(ADAPTER, tmp_path / "x", "speculators", drafter=str(other))
    assert not (tmp_path / "x").exists()


def test_commands_fail_with_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (("train", tmp_path / "none.toml"), "No such file"),
        (("convert", tmp_path / "none", tmp_path / "x"), "no such file"),
        (("convert", ADAPTER, tmp_path / "x", "--to", "gguf"), "form is 'gguf'"),
        (("convert", ADAPTER, tmp_path / "x", "--dtype", "int8"), "--dtype is 'int8'"),
        (("card", ADAPTER, "--results", ADAPTER + "/config.json"), "not a result of"),
        (
            (
                "evaluate",
                "--target",
                TARGET,
                "--drafter",
                DRAFTER,
                "--data",
                tmp_path,
                "--budgets",
                "a",
            ),
            "--budgets is 'a'",
        ),
    ):
        status, output = _run(*arguments)
        assert status == 1 and said in output, output
        assert len(output.strip().splitlines()) == 1


def test_extract_makes_data_that_can_be_diagnosed(tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    models = ("--target", TARGET, "--drafter", DRAFTER)
    data = tmp_path / "data"
    status, output = _run(
        *("extract", *models, "--prompts", PROMPTS, "--out", data, "--rows", 3),
        *("--prompt-tokens", 12, "--tokens", 20, "--continuations", 2),
    )
    assert status == 0 and "6 rows, 192 tokens" in output, output
    status, output = _run("extract", *models, "--prompts", PROMPTS, "--out", data)
    assert status == 1 and "is not empty" in output
    status, output = _run("diagnose", *models, "--data", data, "--positions", 3)
    assert status == 0 and "3 prompts, 2 continuations each" in " ".join(output.split()), output
