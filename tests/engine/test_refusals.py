# SPDX-License-Identifier: Apache-2.0
"""What the plugin cannot serve stops at start-up, in the front end, with one line that helps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import architectures
import pytest
import torch
import vllm
from running import BUDGET, COMMON
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from vllm_weaver.adapter import WeaverAdapter, WeaverConfig, save
from vllm_weaver.engine.config import SUPPORTED_ARCHITECTURES, WeaverConfigError
from vllm_weaver.engine.gdn_layer import choose_kernel
from vllm_weaver.ops.gdn import cuda

Models = dict[str, Path]


class Case:
    """Arguments of a dense engine that would start, for tests to spoil."""

    def __init__(self, models: Models, tmp_path: Path):
        self.models, self.tmp_path = models, tmp_path
        self.target = models["dense"]
        self.weaver: Any = {"adapter": str(models["dense-weaver8"])}
        self.speculation: dict[str, Any] | None = {
            "method": "dflash",
            "model": str(models["dense-dflash8"]),
            "num_speculative_tokens": BUDGET,
        }
        self.options: dict[str, Any] = {}

    def arguments(self) -> dict[str, Any]:
        return {
            **COMMON,
            "model": str(self.target),
            "speculative_config": self.speculation,
            "additional_config": {"weaver": self.weaver},
            **self.options,
        }

    def drafter(self, **values: Any) -> None:
        """Draft with a copy whose ``config.json`` is changed."""
        copy = architectures.copy_of(self.models["dense-dflash8"], self.tmp_path)
        assert self.speculation is not None
        self.speculation["model"] = str(architectures.set_config(copy, **values))

    def new_target(self, **values: Any) -> None:
        """Serve a copy whose ``config.json`` is changed."""
        copy = architectures.copy_of(self.models["dense"], self.tmp_path)
        self.target = architectures.set_config(copy, **values)

    def adapter(self, **values: Any) -> None:
        """Use a fresh adapter of another configuration."""
        config = {
            "d_model": 128,
            "d_embed": 128,
            "d_rank": 128,
            "num_heads": 4,
            "mlp_dim": 128,
            "depth": 7,
            "candidate_pool_size": 64,
            "variant": "v2",
            "vocab_size": 512,
            **values,
        }
        save(WeaverAdapter(WeaverConfig(**config)), self.tmp_path / "adapter")
        self.weaver["adapter"] = str(self.tmp_path / "adapter")

    def damage(self) -> None:
        """Cut the adapter's file short."""
        copy = self.tmp_path / "damaged"
        shutil.copytree(self.models["dense-weaver8"], copy)
        file = next(copy.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:1000])
        self.weaver["adapter"] = str(copy)


REFUSED: dict[str, tuple[Callable[[Case], Any], list[str]]] = {
    "unknown key": (
        lambda c: c.weaver.update(adaptor="x"),
        ["unknown option 'adaptor'", "known options are adapt, adapter"],
    ),
    "section of another type": (
        lambda c: setattr(c, "weaver", True),
        ["additional_config['weaver'] is True", "pass a dictionary"],
    ),
    "budget that does not match": (
        lambda c: c.weaver.update(budget=8),
        ["budget is 8", f"num_speculative_tokens is {BUDGET}", "set both to the same"],
    ),
    "budget 0": (
        lambda c: c.weaver.update(budget=0),
        ["budget is 0", "from 1 to 255"],
    ),
    "budget 256": (
        lambda c: c.speculation.update(num_speculative_tokens=256),
        ["num_speculative_tokens is 256", "1 to 255"],
    ),
    "children null": (
        lambda c: c.weaver.update(children=None),
        ["children is None", "whole number"],
    ),
    "rank check of another type": (
        lambda c: c.weaver.update(check_ranks="yes"),
        ["check_ranks is 'yes'", "true or false"],
    ),
    "unknown gdn_kernel": (
        lambda c: c.weaver.update(gdn_kernel="numpy"),
        ["gdn_kernel is 'numpy'", "choose one of auto, triton, cuda"],
    ),
    "unknown attention_kernel": (
        lambda c: c.weaver.update(attention_kernel="fa2"),
        ["attention_kernel is 'fa2'", "choose one of auto, triton, fa3"],
    ),
    "shared_noise one": (
        lambda c: c.weaver.update(shared_noise=1),
        ["shared_noise is 1", "true, false or 'auto'"],
    ),
    "unknown proposal": (
        lambda c: c.weaver.update(proposal="tree"),
        ["proposal is 'tree'", "weaver, ddtree, chain"],
    ),
    "proposal without its adapter": (
        lambda c: setattr(c, "weaver", {"proposal": "weaver"}),
        ["proposal 'weaver' needs an adapter", "set weaver.adapter", "ddtree"],
    ),
    "adapter that is not there": (
        lambda c: c.weaver.update(adapter="/no/such/adapter"),
        ["adapter '/no/such/adapter' does not exist", "pass a file"],
    ),
    "damaged adapter": (Case.damage, ["model.safetensors", "damaged or truncated", "again"]),
    "adapter of another width": (
        lambda c: c.adapter(d_model=64),
        ["64", "128", "target"],
    ),
    "adapter of another vocabulary": (
        lambda c: c.adapter(vocab_size=500),
        ["500", "512", "vocab"],
    ),
    "adapter deeper than the drafter": (
        lambda c: c.weaver.update(adapter=str(c.models["dense-weaver16"])),
        ["15", "7", "depth"],
    ),
    "drafter without mask token": (
        lambda c: c.drafter(dflash_config={"target_layer_ids": [0, 2]}),
        ["mask_token_id", "trained with a mask token"],
    ),
    "drafter without block size": (
        lambda c: c.drafter(block_size=None),
        ["block_size None", "at least 2"],
    ),
    "drafts of small trees that need more rows than a step has": (
        lambda c: (
            c.speculation.update(num_speculative_tokens=2),
            c.options.update(max_num_batched_tokens=31),
        ),
        ["max_num_batched_tokens is 31", "8 rows for each of 4", "raise it to 32"],
    ),
    "no speculation": (
        lambda c: setattr(c, "speculation", None),
        ["method is None", "pass method 'dflash'"],
    ),
    "another method": (
        lambda c: setattr(c, "speculation", {"method": "ngram", "num_speculative_tokens": BUDGET}),
        ["method is 'ngram'", "pass method 'dflash'"],
    ),
    "draft sampling": (
        lambda c: c.speculation.update(draft_sample_method="probabilistic"),
        ["draft_sample_method is 'probabilistic'", "leave it at 'greedy'"],
    ),
    "another rejection method": (
        lambda c: c.speculation.update(rejection_sample_method="block"),
        ["rejection_sample_method is 'block'", "leave it at the default"],
    ),
    "sliding window": (
        lambda c: c.new_target(
            sliding_window=64,
            use_sliding_window=True,
            max_window_layers=0,
            layer_types=["sliding_attention"] * 4,
        ),
        ["sliding_window 64", "use a target without"],
    ),
    "pipeline parallelism": (
        lambda c: c.options.update(pipeline_parallel_size=2),
        ["pipeline_parallel_size is 2", "set it to 1", "tensor_parallel_size"],
    ),
    "data parallelism": (
        lambda c: c.options.update(data_parallel_size=2),
        ["data_parallel_size is 2", "set it to 1"],
    ),
    "LoRA": (
        lambda c: c.options.update(enable_lora=True),
        ["LoRA is on", "merge the adapter"],
    ),
    "KV connector": (
        lambda c: c.options.update(
            kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        ),
        ["KV connector", "remove kv_transfer_config"],
    ),
    "quantised cache": (
        lambda c: c.options.update(kv_cache_dtype="fp8"),
        ["kv_cache_dtype is 'fp8'", "use 'auto'"],
    ),
    "foreign worker": (
        lambda c: c.options.update(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"),
        ["worker_cls is 'vllm.v1.worker.cpu_worker.CPUWorker'", "leave worker_cls at its default"],
    ),
    "foreign scheduler": (
        lambda c: (
            c.weaver.update(adapt=True),
            c.options.update(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
        ),
        ["scheduler_cls is 'vllm.v1.core.sched.scheduler.Scheduler'", "weaver.adapt to false"],
    ),
    "convolution rows of another type": (
        lambda c: c.options.update(mamba_cache_dtype="float16"),
        ["mamba_cache_dtype is 'float16'", "leave it at 'auto'"],
    ),
    "state that is not float32": (
        lambda c: (
            setattr(c, "target", c.models["hybrid"]),
            c.speculation.update(model=str(c.models["hybrid-dflash8"])),
            c.options.update(mamba_ssm_cache_dtype="float16"),
        ),
        ["mamba_ssm_cache_dtype is 'float16'", "--mamba-ssm-cache-dtype float32"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_before_any_process_starts(
    tiny_models: Models, tmp_path: Path, name: str
) -> None:
    spoil, parts = REFUSED[name]
    case = Case(tiny_models, tmp_path)
    spoil(case)
    with pytest.raises(WeaverConfigError) as refusal:
        EngineArgs(**case.arguments()).create_engine_config()
    message = str(refusal.value)
    assert message.startswith("weaver: ") or "additional_config['weaver']" in message
    assert "\n" not in message and len(message) < 400
    for part in parts:
        assert part in message


def test_what_is_not_spoilt_is_accepted(tiny_models: Models, tmp_path: Path) -> None:
    config = EngineArgs(**Case(tiny_models, tmp_path).arguments()).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm_weaver.engine.cpu_worker.WeaverCPUWorker"


def test_another_vllm_version_is_refused(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(WeaverConfigError, match=r"vLLM is 0\.33\.1; .* works with 0\.32\."):
        EngineArgs(**Case(tiny_models, tmp_path).arguments()).create_engine_config()


def test_unsupported_architecture_is_refused(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that vLLM has looked at already: looking at another takes it a quarter of a minute.
    monkeypatch.delitem(SUPPORTED_ARCHITECTURES, "Qwen3ForCausalLM")
    with pytest.raises(WeaverConfigError) as refusal:
        EngineArgs(**Case(tiny_models, tmp_path).arguments()).create_engine_config()
    assert "target architecture Qwen3ForCausalLM is not supported" in str(refusal.value)
    assert "supported are Qwen3NextForCausalLM" in str(refusal.value)


def test_every_generating_architecture_asks_the_plugin() -> None:
    for name in ModelRegistry.get_supported_archs():
        if name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            assert MODELS_CONFIG_MAP[name]._weaver_hook, name


def test_model_runner_v1_is_refused(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    vllm.envs.disable_envs_cache()
    with pytest.raises(WeaverConfigError, match=r"Model Runner V1.*unset VLLM_USE_V2_MODEL_RUNNER"):
        EngineArgs(**Case(tiny_models, tmp_path).arguments()).create_engine_config()


def test_no_drafts_at_all_are_refused_by_vllm_itself(tiny_models: Models, tmp_path: Path) -> None:
    case = Case(tiny_models, tmp_path)
    case.speculation["num_speculative_tokens"] = 0
    with pytest.raises(ValueError, match=r"num_speculative_tokens\n.*greater than 0"):
        EngineArgs(**case.arguments()).create_engine_config()


def test_refusal_reaches_whoever_calls_llm(tiny_models: Models, tmp_path: Path) -> None:
    case = Case(tiny_models, tmp_path)
    case.weaver["budget"] = 8
    with pytest.raises(WeaverConfigError, match="weaver: budget is 8 but num_speculative_tokens"):
        LLM(**case.arguments())


def test_command_line_carries_the_section(tiny_models: Models) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    adapter, drafter = tiny_models["dense-weaver8"], tiny_models["dense-dflash8"]
    arguments = parser.parse_args(
        [
            f"--model={tiny_models['dense']}",
            "--dtype=float32",
            "--enforce-eager",
            "--speculative-config",
            f'{{"method": "dflash", "model": "{drafter}", "num_speculative_tokens": 12}}',
            "--additional-config",
            f'{{"weaver": {{"adapter": "{adapter}", "budget": 12}}}}',
        ]
    )
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm_weaver.engine.cpu_worker.WeaverCPUWorker"
    assert config.additional_config["weaver"]["budget"] == 12


def test_cuda_kernels_are_for_gpus() -> None:
    layer = mock.Mock()
    assert choose_kernel("auto", layer, torch.device("cpu")) == "triton"
    with pytest.raises(WeaverConfigError, match="gdn_kernel is 'cuda', but it needs a GPU, and th"):
        choose_kernel("cuda", layer, torch.device("cpu"))


def test_auto_leaves_the_choice_to_each_batch_where_both_kernels_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, gpu = mock.Mock(), torch.device("cuda")
    layer.get_state_dtype.return_value = torch.bfloat16, torch.float32
    monkeypatch.setattr(cuda, "why_not", lambda *_: None)
    assert [choose_kernel(x, layer, gpu) for x in ("auto", "cuda", "triton")] == [
        "auto",
        "cuda",
        "triton",
    ]
    monkeypatch.setattr(cuda, "why_not", lambda *_: "it is not built")
    assert choose_kernel("auto", layer, gpu) == "triton"
