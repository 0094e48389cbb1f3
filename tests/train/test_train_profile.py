# SPDX-License-Identifier: Apache-2.0
"""The profile of a step: times that add up, in the right groups, and nothing written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nano_data import MakeRecipe
from rich.console import Console
from torch.autograd import DeviceType
from typer.testing import CliRunner

from vllm_weaver.cli.app import app
from vllm_weaver.train.errors import TrainError
from vllm_weaver.train.processes import Processes
from vllm_weaver.train.profile import GEMMS, group_of, profile, shares
from vllm_weaver.train.report import show_profile
from vllm_weaver.train.trainer import Trainer

CPU = Processes(0, 1, torch.device("cpu"))


def test_profile_accounts_for_a_step_and_writes_only_the_trace(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe(train__steps=6, train__units=1, train__documents=1)
    trace = tmp_path / "trace.json"
    found = profile(Trainer(recipe, CPU), trace)
    groups = found["groups"]
    assert sum(g["of_busy"] for g in groups.values()) == pytest.approx(1, abs=0.01)
    # One thread: operators cannot be busy for longer than the steps took.
    assert 0.3 < sum(g["of_wall"] for g in groups.values()) <= 1.01
    assert {GEMMS, "top-k and sorting", "softmax and losses"} <= groups.keys()
    assert groups[GEMMS]["of_busy"] > 0.1
    assert {"Muon", "AdamW"} <= found["optimisers"].keys()
    assert trace.stat().st_size > 1000 and not Path(recipe.output).exists()
    console = Console(record=True, width=120)
    show_profile(found, console)
    assert GEMMS in console.export_text()


def test_run_that_is_too_short_is_refused(make_recipe: MakeRecipe) -> None:
    with pytest.raises(TrainError, match="has 5 steps, profiling takes 6"):
        profile(Trainer(make_recipe(train__steps=5), CPU))


def test_on_a_gpu_operators_have_their_kernels_time_once() -> None:
    def event(key: str, on: DeviceType, device_us: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            device_type=on,
            self_device_time_total=device_us,
            self_cpu_time_total=7.0,
            device_time_total=device_us,
            cpu_time_total=7.0,
        )

    events = [
        event("aten::mm", DeviceType.CPU, 3e5),
        event("sm90_xmma_gemm_bf16", DeviceType.CUDA, 3e5),
        event("aten::topk", DeviceType.CPU, 1e5),
        event("aten::linear", DeviceType.CPU, 0.0),
    ]
    found = shares(events, seconds=1.0, cuda=True)
    assert found["busy_seconds"] == pytest.approx(0.4)
    assert found["groups"][GEMMS] == {"seconds": 0.3, "of_busy": 0.75, "of_wall": 0.3}
    assert list(found["operators"]) == ["aten::mm", "aten::topk"]


@pytest.mark.parametrize(
    ("operator", "group"),
    [
        ("aten::addmm", GEMMS),
        ("triton_tem_fused_mm_3", GEMMS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_log_softmax", "softmax and losses"),
        ("c10d::allgather_", "between processes"),
        ("aten::gather", "gather, scatter, index"),
        ("aten::mul", "elementwise and the rest"),
    ],
)
def test_operators_are_grouped(operator: str, group: str) -> None:
    assert group_of(operator) == group


def test_options_of_trying_out_do_not_stand_alone(tmp_path: Path) -> None:
    for option in ("--trace", "--json"):
        result = CliRunner().invoke(app, ["train", "recipe.toml", option, str(tmp_path / "x")])
        assert result.exit_code == 1 and "--json to --profile or --dry-run" in result.output
