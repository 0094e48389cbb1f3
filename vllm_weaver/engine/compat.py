# SPDX-License-Identifier: Apache-2.0
"""The only module that touches what vLLM keeps private.

Every base class, helper and attribute of vLLM's engine that has no stability promise is imported
or wrapped here, and its signature is listed in :data:`CONTRACTS`. A vLLM upgrade that changes one
of them then stops at start-up with a list (:func:`broken_contracts`) instead of a crash in the
middle of a request.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks as iter_request_chunks,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_weaver.engine.sizes import StepTimes
    from vllm_weaver.ops.attention.flash import FlashPrefix

logger = init_logger(__name__)

__all__ = [
    "ATTRIBUTES",
    "CONTRACTS",
    "CPU_CONTRACTS",
    "FIELDS",
    "TRITON_KERNELS",
    "broken_contracts",
    "choose_backends",
    "flash_attention_prefix",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "init_logger",
    "install_layers",
    "iter_request_chunks",
    "replace_triton_kernels",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "triton_kernel",
    "use_worker",
]

#: Qualified name in vLLM -> names of its parameters, in order, without ``self``.
CONTRACTS: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": ("vllm_config", "device"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run": ("hidden_states",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled": (
        "idx_mapping",
        "sampled_tokens",
        "num_sampled",
        "num_rejected",
        "query_start_loc",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model": ("profile_only",),
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": (),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": (),
    "vllm.v1.worker.gpu.warmup:warmup_kernels": (
        "model_runner",
        "worker_execute_model",
        "worker_sample_tokens",
    ),
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec": (),
    "vllm.v1.worker.worker_base:WorkerBase.get_supported_kv_cache_layouts": (),
    "vllm.platforms.interface:Platform.update_block_size_for_backend": ("vllm_config",),
    "vllm.distributed.kv_transfer.kv_connector.utils:get_current_attn_backends": (
        "vllm_config",
        "layer_names",
    ),
    "vllm.v1.attention.backend:AttentionBackend.supports_block_size": ("block_size",),
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn": (
        "input_batch",
        "cudagraph_mode",
        "block_tables",
        "slot_mappings",
        "attn_groups",
        "kv_cache_config",
        "for_capture",
        "ubatch_idx",
        "model_specific_attn_metadata",
    ),
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_inputs": (
        "input_batch",
        "req_states",
    ),
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.add_request": (
        "req_index",
        "new_req_data",
    ),
    "vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler": ("sampler",),
    "vllm.v1.worker.gpu.model_states.interface:ModelState.initialize_kv_cache": (
        "kv_cache_config",
        "block_tables",
    ),
    "vllm.v1.worker.gpu.model_states.interface:ModelState.postprocess_state": (
        "idx_mapping",
        "num_sampled",
        "num_computed_tokens",
    ),
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn": (
        "input_batch",
        "cudagraph_mode",
        "block_tables",
        "slot_mappings",
        "attn_groups",
        "kv_cache_config",
        "for_capture",
        "ubatch_idx",
        "model_specific_attn_metadata",
    ),
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.postprocess_state": (
        "idx_mapping",
        "num_sampled",
        "num_computed_tokens",
    ),
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState._get_mamba_group_info": (
        "kv_cache_config",
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.sample": (
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "return_logprobs",
    ),
    # The keying of the sampler's noise, which `vllm_weaver.ops.keyed_gumbel` repeats.
    "vllm.v1.worker.gpu.sample.gumbel:murmur3_hash32": ("seed", "pos", "offset", "domain"),
    "vllm.v1.worker.gpu.sample.gumbel:murmur3_uniform32": ("seed", "pos", "offset"),
    "vllm.v1.worker.gpu.sample.gumbel:murmur3_uniform64": ("seed", "pos", "offset"),
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax": (
        "logits",
        "keys",
        "mask",
        "seed",
        "pos",
        "temp",
        "IS_DRAFTING",
        "USE_FP64",
        "APPLY_TEMPERATURE",
    ),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.__init__": (
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
        "sampling_mask_tensors",
    ),
    "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores": (
        "logits",
        "num_logprobs",
        "sampled_token_ids",
        "cu_num_logits",
        "logprob_token_ids_state",
        "expanded_idx_mapping",
        "max_per_req_token_ids",
        "logits_mode",
    ),
    "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected": (
        "num_sampled",
        "seq_lens",
        "cu_num_logits",
        "idx_mapping",
        "prefill_len",
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:get_max_chunk_logits": ("vocab_size",),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:_iter_request_chunks": (
        "cu_num_logits",
        "max_chunk_logits",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__": (
        "vllm_config",
        "device",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._num_graph_context_tokens": (
        "num_reqs",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._generate_draft": (
        "num_reqs",
        "num_tokens_padded",
        "attn_metadata",
        "slot_mappings",
        "num_tokens_across_dp",
        "cudagraph_runtime_mode",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.init_cudagraph_manager": (
        "cudagraph_mode",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.capture": (),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._run_model": (
        "num_tokens",
        "attn_metadata",
        "slot_mappings",
        "num_tokens_across_dp",
        "cudagraph_runtime_mode",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose": (
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
        "last_sampled",
        "next_prefill_tokens",
        "temperature",
        "seeds",
        "dp_sync_state",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "mm_inputs",
        "is_profile",
        "num_speculative_tokens",
    ),
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._normalize_context_k": ("all_k",),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.load_draft_model": (
        "target_model",
        "target_attn_layer_names",
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model": ("target_model",),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator._build_uniform_attn_metadata": (
        "batch_desc",
        "num_reqs",
        "num_query_per_req",
        "seq_lens_cpu_upper_bound",
        "step",
        "causal",
        "dcp_local_seq_lens",
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.compute_draft_logits": (
        "hidden_states",
        "spec_step_idx",
    ),
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build": (
        "common_prefix_len",
        "common_attn_metadata",
        "num_accepted_tokens",
        "num_decode_draft_tokens_cpu",
        "fast_build",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": (
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
        "layer",
        "key",
        "value",
        "kv_cache",
        "slot_mapping",
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build": (
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": (
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
    ".__init__": (
        "config",
        "vllm_config",
        "prefix",
        "gqa_interleaved_layout",
        "reduce_results",
    ),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
    "._forward_core": ("mixed_qkv", "b", "a", "core_attn_out"),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
    ".forward_cpu": ("hidden_states",),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
    "._output_projection": ("core_attn_out", "z"),
    "vllm.triton_utils.dispatcher:register_kernels": ("overrides",),
    "vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec": ("vllm_config",),
    "vllm.model_executor.layers.mamba.mamba_utils:MambaStateShapeCalculator"
    ".gated_delta_net_state_shape": (
        "tp_world_size",
        "num_k_heads",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
        "conv_kernel_size",
        "num_spec",
    ),
}

#: Attributes and dataclass fields read or written directly.
FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        "num_reqs",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "num_tokens",
        "num_tokens_after_padding",
        "num_computed_tokens_np",
        "num_draft_tokens_per_req",
        "query_start_loc",
        "query_start_loc_np",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "input_ids",
        "positions",
        "logits_indices",
        "cu_num_logits",
        "cu_num_logits_np",
    ),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "block_table_tensor",
        "slot_mapping",
        "positions",
        "is_prefilling",
        "seq_lens_cpu_upper_bound",
        "req_idx",
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": (
        "block_size",
        "num_speculative_blocks",
        "page_size_padded",
    ),
    "vllm.config.cache:CacheConfig": (
        "block_size",
        "mamba_block_size",
        "mamba_cache_mode",
        "mamba_page_size_padded",
        "user_specified_block_size",
    ),
}

#: Attributes that a class of vLLM gives its instances, and that are read or written here.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState": (
        "self._align_mode",
        "self._mamba_state_idx_gpu",
    ),
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": ("self.rope_state",),
    "vllm.v1.worker.gpu.model_states.interface:ModelState": (
        "self.max_num_reqs",
        "self.max_num_tokens",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "self.speculator",
        "self.model_state",
        "self.num_speculative_steps",
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator": (
        "self.sample_indices",
        "self.sample_pos",
        "self.model_state",
        "self.query_cudagraph_manager",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": ("self.graphs",),
    "vllm.v1.kv_cache_layout:KVCacheLayout": ("is_block_outermost", "is_block_compact"),
    "vllm.v1.kv_cache_interface:MambaSpec": ("def real_page_size_bytes",),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "self.dynamic_sd_lookup",
        "self.max_num_running_reqs",
        "self.num_spec_tokens",
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler": (
        "self.sampling_states",
        "self.use_flashinfer",
        "self.use_fp64_gumbel",
        "self.use_xpu_sampler",
    ),
    "vllm.v1.worker.gpu.sample.states:SamplingStates": (
        "self.temperature = UvaBackedTensor",
        "self.top_k = UvaBackedTensor",
        "self.top_p = UvaBackedTensor",
        "self.min_p = UvaBackedTensor",
        "self.seeds = UvaBackedTensor",
        "self.vocab_size",
    ),
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": ("self.np", "self.gpu"),
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model": (
        "self._k_norm_weights",
        "self._rms_norm_eps",
    ),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": (
        "self.enable_fused_gdn_spec_decode",
        "self.in_proj_qkvz",
        "self.in_proj_ba",
        "self.conv1d",
        "self.A_log",
        "self.dt_bias",
    ),
}

#: The same, on a CPU only: importing these modules replaces PyTorch's CUDA events and streams.
CPU_CONTRACTS: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": (),
}

#: Triton kernels and launchers of vLLM that a CPU replaces -> names of their parameters.
TRITON_KERNELS: dict[str, tuple[str, ...]] = {
    "vllm.v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton": (
        "logits",
        "k",
        "p",
        "mask_value",
    ),
    "vllm.v1.worker.utils:_zero_kv_blocks_kernel": (
        "seg_addrs_ptr",
        "seg_block_strides_ptr",
        "seg_page_sizes_ptr",
        "block_ids_ptr",
        "BLOCK_SIZE",
    ),
    "vllm.v1.worker.gpu.sample.gumbel:_gumbel_sample_kernel": (
        "local_argmax_ptr",
        "local_argmax_stride",
        "local_max_ptr",
        "local_max_stride",
        "logits_cache_ptr",
        "logits_cache_stride_0",
        "logits_cache_stride_1",
        "logits_cache_col_ptr",
        "logits_cache_source_ptr",
        "logits_cache_source_stride",
        "logits_ptr",
        "logits_stride",
        "expanded_idx_mapping_ptr",
        "seeds_ptr",
        "pos_ptr",
        "temp_ptr",
        "vocab_size",
        "BLOCK_SIZE",
        "IS_DRAFTING",
        "APPLY_TEMPERATURE",
        "USE_FP64",
        "PER_TOKEN_COL",
    ),
    "vllm.v1.worker.gpu.structured_outputs:_apply_grammar_bitmask_kernel": (
        "logits_ptr",
        "logits_stride",
        "logits_indices_ptr",
        "cu_num_logits_ptr",
        "bitmask_ptr",
        "bitmask_stride",
        "vocab_size",
        "MASK_STRIDE",
        "BLOCK_SIZE",
    ),
}


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    return target


def broken_contracts() -> list[str]:
    """Signatures and fields of the installed vLLM that are not those this release expects.

    Returns:
        One line each: the name, what was expected and what was found. Empty if all hold.
    """
    broken = []
    calls = {**CONTRACTS, **TRITON_KERNELS, **(CPU_CONTRACTS if current_platform.is_cpu() else {})}
    for name, expected in calls.items():
        try:
            function = _resolve(name)
        except (ImportError, AttributeError) as error:
            broken.append(f"{name} is missing ({error})")
            continue
        # A Triton kernel, or what has replaced it, carries its own list.
        parameters = getattr(function, "arg_names", None) or inspect.signature(function).parameters
        found = tuple(name for name in parameters if name != "self")
        if found != expected:
            broken.append(f"{name} takes ({', '.join(found)}), not ({', '.join(expected)})")
    for name, expected in FIELDS.items():
        try:
            fields = getattr(_resolve(name), "__dataclass_fields__", {})
        except (ImportError, AttributeError) as error:
            broken.append(f"{name} is missing ({error})")
            continue
        missing = [field for field in expected if field not in fields]
        if missing:
            broken.append(f"{name} has no field {', '.join(missing)}")
    for name, expected in ATTRIBUTES.items():
        try:
            classes = [c for c in _resolve(name).__mro__ if c.__module__.startswith("vllm.")]
            source = "".join(inspect.getsource(c) for c in classes)
        except (ImportError, AttributeError, OSError) as error:
            broken.append(f"{name} is missing ({error})")
            continue
        missing = [attribute for attribute in expected if attribute not in source]
        if missing:
            broken.append(f"{name} has no attribute {', '.join(missing)}")
    return broken


# --------------------------------------------------------------------------- activation


def use_worker(vllm_config: VllmConfig) -> None:
    """Select our worker class; refuse a foreign one.

    Raises:
        WeaverConfigError: another ``worker_cls`` is configured.
    """
    from vllm_weaver.engine.config import WeaverConfigError

    ours = "vllm_weaver.engine." + (
        "cpu_worker.WeaverCPUWorker" if current_platform.is_cpu() else "worker.WeaverWorker"
    )
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in ("auto", ours):
        raise WeaverConfigError(
            f"weaver: worker_cls is {parallel.worker_cls!r}; trees need their own worker: leave "
            "worker_cls at its default"
        )
    parallel.worker_cls = ours


def use_scheduler(vllm_config: VllmConfig) -> None:
    """Select our scheduler; refuse a foreign one.

    Raises:
        WeaverConfigError: another ``scheduler_cls`` is configured.
    """
    from vllm_weaver.engine.config import WeaverConfigError

    ours = "vllm_weaver.engine.scheduler.make_scheduler"
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, ours):
        raise WeaverConfigError(
            f"weaver: scheduler_cls is {scheduler.scheduler_cls!r}; adapt needs its own: leave "
            "scheduler_cls at its default, or set weaver.adapt to false"
        )
    scheduler.scheduler_cls = ours


def measure_steps(runner: Any, repeats: int = 2) -> StepTimes | None:
    """Time the captured graphs, which hold no request; None where there are none.

    Of the target's, every second one: the other batch sizes lie between two of the same width, and
    so do their times, and all of them would take seconds of every start.

    Args:
        runner: after its graphs were captured.
        repeats: replays of a graph that is timed; the fastest counts.
    """
    from vllm_weaver.engine.sizes import StepTimes, every_second

    def fastest(graph: torch.cuda.CUDAGraph) -> float:
        times = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    target, drafter = runner.cudagraph_manager, runner.speculator.query_cudagraph_manager
    if target is None or not target.graphs or drafter is None or not drafter.graphs:
        return None
    widths: dict[int, dict[int, torch.cuda.CUDAGraph]] = {}
    for desc, graph in target.graphs.items():
        widths.setdefault(desc.num_tokens // desc.num_reqs, {})[desc.num_reqs] = graph
    verify = {
        (requests, rows): milliseconds
        for rows, graphs in widths.items()
        for requests, milliseconds in every_second(graphs, fastest).items()
    }
    # Short ones, whose trees get smaller from one batch size to the next.
    return StepTimes(verify, {d.num_reqs: fastest(graph) for d, graph in drafter.graphs.items()})


def install_layers() -> None:
    """Register our layer and attention backend in this process. Idempotent.

    The registries are process-wide, so each class checks the configuration that it is built
    for and behaves as vLLM's own where that one does not ask for trees.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from vllm_weaver.engine.gdn_layer import TreeGatedDeltaNet

    name = "QwenGatedDeltaNetAttention"
    if name not in op_registry_oot:
        PluggableLayer.register_oot(TreeGatedDeltaNet, name=name)
    if current_platform.is_cpu():
        path = "vllm_weaver.engine.attention_cpu.TreeCPUAttentionBackend"
        if AttentionBackendEnum.CPU_ATTN.get_path() != path:
            register_backend(AttentionBackendEnum.CPU_ATTN, path)
            # An earlier engine of this process has cached vLLM's own choice.
            _cached_get_attn_backend.cache_clear()
    else:
        register_backend(
            AttentionBackendEnum.CUSTOM,
            "vllm_weaver.engine.attention_cuda.TreeFlashAttentionBackend",
        )


def choose_backends(vllm_config: VllmConfig) -> None:
    """Point a configuration for a GPU at our attention backend. Nothing to choose on a CPU.

    Raises:
        WeaverConfigError: another attention backend is configured.
    """
    if current_platform.is_cpu():
        return
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_weaver.engine.config import WeaverConfigError

    attention = vllm_config.attention_config
    if attention.backend not in (None, AttentionBackendEnum.CUSTOM):
        raise WeaverConfigError(
            f"weaver: attention backend is {attention.backend.name}; trees need their own, built "
            "on FlashAttention: leave --attention-backend at its default"
        )
    attention.backend = AttentionBackendEnum.CUSTOM
    spec = vllm_config.speculative_config
    if spec is not None and spec.attention_backend is None:
        spec.attention_backend = AttentionBackendEnum.FLASH_ATTN
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.FULL:
        # Prompts beside trees are not captured whole; batches of trees alone are.
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        logger.info("vllm-weaver: CUDA graphs are whole for trees, piecewise for mixed batches")
    if (
        compilation.cudagraph_capture_sizes is None
        and compilation.max_cudagraph_capture_size is None
        and compilation.cudagraph_mode != CUDAGraphMode.NONE
        and not vllm_config.model_config.enforce_eager
    ):
        compilation.cudagraph_capture_sizes = capture_sizes(
            max(_DEFAULT_CAPTURE_TOKENS, max_step_rows(vllm_config)),
            vllm_config.scheduler_config.max_num_batched_tokens,
        )


#: vLLM's own bound for graphs on Hopper, in tokens.
_DEFAULT_CAPTURE_TOKENS = 512


def flash_attention_prefix(version: int | None) -> FlashPrefix:
    """vLLM's FlashAttention 3 as the kernel of the context in tree attention.

    Args:
        version: of FlashAttention, as vLLM chose it for the layer.

    Raises:
        WeaverConfigError: vLLM uses another version on this GPU, or its function has changed.
    """
    from vllm.v1.attention.backends import fa_utils

    from vllm_weaver.engine.config import WeaverConfigError
    from vllm_weaver.ops.attention.flash import ARGUMENTS, FlashPrefix

    if version != 3:
        raise WeaverConfigError(
            f"weaver: attention_kernel is 'fa3', but vLLM runs FlashAttention {version} here; it "
            "needs a Hopper GPU: set it to 'triton'"
        )
    function = fa_utils.flash_attn_varlen_func
    missing = [x for x in ARGUMENTS if x not in inspect.signature(function).parameters]
    if missing:
        raise WeaverConfigError(
            f"weaver: vLLM's flash_attn_varlen_func takes no {', '.join(missing)}: set "
            "attention_kernel to 'triton'"
        )
    return FlashPrefix(function, version=version)


def choose_tree_sizes(vllm_config: VllmConfig, rows_per_step: int, adapt: bool = False) -> None:
    """Let large batches have smaller trees, unless the user has said how large.

    With ``adapt`` the schedule only says which widths are captured.
    """
    from vllm_weaver.engine.config import tree_sizes, with_all_widths

    spec = vllm_config.speculative_config
    most = vllm_config.scheduler_config.max_num_seqs
    assert spec is not None
    if spec.num_speculative_tokens_per_batch_size is not None:
        return
    sizes = tree_sizes(spec.num_speculative_tokens, most, rows_per_step)
    if len(sizes) == 1 and not adapt:
        return
    spec.num_speculative_tokens_per_batch_size = with_all_widths(sizes) if adapt else sizes
    logger.info(
        "vllm-weaver: nodes of a tree by batch size: %s",
        ", ".join(f"{first} to {last}: {nodes}" for first, last, nodes in sizes),
    )


def decode_widths(vllm_config: VllmConfig) -> dict[int, int]:
    """Rows of a request in a decoding step, and the most requests that are decoded so wide."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    most = vllm_config.scheduler_config.max_num_seqs
    spec = vllm_config.speculative_config
    assert spec is not None
    if spec.num_speculative_tokens_per_batch_size is None:
        return {spec.num_speculative_tokens + 1: most}
    dense = build_dynamic_sd_schedule_lookup(
        spec.num_speculative_tokens_per_batch_size, most, spec.num_speculative_tokens
    )
    widths: dict[int, int] = {}
    for requests in range(1, most + 1):
        widths[dense[requests] + 1] = requests
    return widths


def max_step_rows(vllm_config: VllmConfig) -> int:
    """Most rows of a decoding batch, over all its requests."""
    return max(rows * requests for rows, requests in decode_widths(vllm_config).items())


def max_graph_rows(vllm_config: VllmConfig) -> int:
    """Most rows of a batch that a whole-step graph may be captured for; 0 without graphs."""
    spec = vllm_config.speculative_config
    assert spec is not None
    most = vllm_config.scheduler_config.max_num_seqs * (spec.num_speculative_tokens + 1)
    return min(vllm_config.compilation_config.max_cudagraph_capture_size or 0, most)


def capture_sizes(most: int, max_tokens: int) -> list[int]:
    """Sizes of CUDA graphs, in tokens: four to an octave.

    vLLM captures each of them rounded up to whole requests of each width, so a grid as fine as its
    own would be captured many times over.

    Args:
        most: largest size wanted.
        max_tokens: most tokens of a step.
    """
    sizes, step = [1, 2, 3, 4, 6], 4
    while sizes[-1] < most:
        sizes += [quarter * step // 2 for quarter in (4, 5, 6, 7)]
        step *= 2
    return sorted({min(size, most, max_tokens) for size in sizes})


def draft_graph_requests(vllm_config: VllmConfig, rows: int, most: int) -> list[int]:
    """Requests of the drafter's whole-step graphs: those that the target's have, up to ``most``.

    vLLM takes the target's sizes in tokens for the drafter, too, whose 16 rows a request would then
    end at 32 requests where the target's trees of four rows go on to 128. What vLLM plans by itself
    stays: wide trees, or a user's large sizes, can have the drafter's graphs go further.

    Args:
        vllm_config: with the trees' budget.
        rows: of a request in the drafter's pass.
        most: requests that graphs are wanted for.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    largest = compilation.max_cudagraph_capture_size or 0
    sizes = [x for x in compilation.cudagraph_capture_sizes or [] if x <= largest]
    widths = [width for width in decode_widths(vllm_config) if width > 1]
    held = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // rows)
    own = {-(-size // rows) for size in sizes}
    found = {-(-size // width) for size in sizes for width in widths}
    wanted = {n for n in own if n * rows <= largest} | {n for n in found if n <= most}
    return sorted(n for n in wanted if n <= held)


def with_draft_graphs(vllm_config: VllmConfig, requests: list[int], rows: int) -> VllmConfig:
    """A shallow copy whose graphs are those of so many requests of ``rows`` rows each."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    sizes = [rows * number for number in requests]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    return config


def with_num_speculative_tokens(vllm_config: VllmConfig, depth: int) -> VllmConfig:
    """A shallow copy for the drafter, whose block holds ``depth`` drafts whatever the budget."""
    config = copy.copy(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    assert config.speculative_config is not None
    config.speculative_config.num_speculative_tokens = depth
    config.speculative_config.num_speculative_tokens_per_batch_size = None
    return config


def norm_context_per_layer(draft_model: Any) -> None:
    """Let a DFlash drafter on a CPU norm each layer's context keys with that layer's weight.

    vLLM 0.32 passes one row of weights per layer to an operator whose CPU build reads the first
    row only, so every layer would get the first layer's norm: drafts stay valid but get worse.
    Acts on this one drafter object.
    """
    inner = draft_model.model

    def normalize_context_k(all_k: torch.Tensor) -> torch.Tensor:
        x = all_k.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + inner._rms_norm_eps)
        return (x * inner._k_norm_weights.float()[:, None, None, :]).to(all_k.dtype)

    inner._normalize_context_k = normalize_context_k


def has_custom_logits_processors(sampler: Any) -> bool:
    """Whether processors beyond vLLM's own run, configured or installed as a plugin."""
    own = "vllm.v1.worker.gpu.sample."
    return any(not type(x).__module__.startswith(own) for x in sampler.logits_processors)


# --------------------------------------------------------------------------- Triton kernels


def triton_kernel(function: str) -> Any:
    """The kernel of :data:`TRITON_KERNELS` with this name, leading underscore left out."""
    return _resolve(_kernel_place(function))


def _kernel_place(function: str) -> str:
    places = [name for name in TRITON_KERNELS if name.partition(":")[2].lstrip("_") == function]
    if len(places) != 1:
        raise KeyError(function)
    return places[0]


def replace_triton_kernels(replacements: Mapping[str, Callable[..., Any]]) -> None:
    """Register replacements with vLLM's own registry for platforms. Idempotent.

    Args:
        replacements: by the kernel's name, leading underscore left out.
    """
    from vllm.triton_utils import dispatcher

    named = {_kernel_place(k).replace(":", "."): v for k, v in replacements.items()}
    missing = {name: new for name, new in named.items() if name not in dispatcher._registry}
    if missing:
        with warnings.catch_warnings():
            # It looks at every attribute of every module, deprecated ones included.
            warnings.simplefilter("ignore")
            dispatcher.register_kernels(missing)


# --------------------------------------------------------------------------- layers


def is_draft_layer(layer: Any) -> bool:
    """Whether an attention layer belongs to the drafter."""
    return bool(getattr(layer, "is_draft_layer", False))


def is_target_attention(layer: Any) -> bool:
    """Whether a layer is an attention layer, with a KV cache, of the target."""
    from vllm.model_executor.layers.attention import Attention

    return isinstance(layer, Attention) and not is_draft_layer(layer)


def forward_metadata() -> dict[str, Any] | None:
    """Attention metadata by layer name of the running forward pass; None while warming up."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata if isinstance(metadata, dict) else None


@contextmanager
def layer_metadata(name: str, metadata: Any) -> Iterator[None]:
    """Let vLLM's own kernels of layer ``name`` see ``metadata`` for the duration."""
    table = forward_metadata()
    assert table is not None
    outer = table[name]
    table[name] = metadata
    try:
        yield
    finally:
        table[name] = outer


def conv_weight(layer: Any) -> torch.Tensor:
    """Depthwise convolution weight [C, W] of a GDN layer, unpacked."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    if weight is None:
        weight = layer.conv1d.weight
    return weight.reshape(weight.shape[0], -1)


def conv_state(layer: Any) -> torch.Tensor:
    """Convolution state [slots, W - 1, C] of a GDN layer, oldest first, as a view."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    state = layer.kv_cache[0]
    return state.transpose(-1, -2) if is_conv_state_dim_first() else state


def recurrent_state(layer: Any, native_cpu: bool) -> torch.Tensor:
    """Recurrent state [slots, HV, V_h, K] of a GDN layer, as a view.

    vLLM's native CPU kernels keep [slots, HV, K, V_h] in the same memory.
    """
    state = layer.kv_cache[1]
    if not native_cpu:
        return state
    slots, heads, value_dim, key_dim = state.shape
    return state.view(slots, heads, key_dim, value_dim).transpose(-1, -2)


def native_cpu_gdn(layer: Any, dtype: torch.dtype) -> bool:
    """Whether vLLM's own CPU kernels can run the linear rows of this GDN layer."""
    return (
        current_platform.is_cpu()
        and dtype == torch.bfloat16
        and layer.head_k_dim in (64, 128)
        and layer.head_v_dim in (64, 128)
    )


def native_cpu_gdn_core(
    layer: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """vLLM's own CPU kernels for the linear rows of a GDN layer."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import _encode_layer_name

    torch.ops.vllm.cpu_gdn_attention_core(
        mixed_qkv.contiguous(),
        b.contiguous(),
        a.contiguous(),
        out,
        _encode_layer_name(layer.prefix),
    )


# --------------------------------------------------------------------------- vocabulary shards


class Vocabulary:
    """Input embedding and output head of the target, whole or sharded over ranks.

    Both calls return the same bits on every rank: each row lives on exactly one rank, and the
    others add zeros.
    """

    def __init__(self, target_model: Any):
        language_model = (
            target_model.get_language_model()
            if hasattr(target_model, "get_language_model")
            else target_model
        )
        inner = getattr(language_model, "model", language_model)
        self.embedding: Any = inner.embed_tokens
        head = getattr(language_model, "lm_head", None)
        self.head: Any = head if head is not None else self.embedding
        self.sharded = get_tensor_model_parallel_world_size() > 1
        if getattr(self.head, "weight", None) is None or self.head.weight.ndim != 2:
            from vllm_weaver.engine.config import WeaverConfigError

            raise WeaverConfigError(
                "weaver: the target's lm_head is quantised; the adapter reads its rows: keep "
                "lm_head unquantised, or choose proposal 'ddtree'"
            )

    def tables(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows of embedding and head that this rank holds, where they are plain tables.

        Returns:
            Two of [V, d]; of a vocabulary split over ranks [V', d] each, V' a rank's share of the
            padded vocabulary. None if they are something else, or have rows beyond the target's
            vocabulary that stand in no order of ids.
        """
        found = []
        for layer in (self.embedding, self.head):
            table = getattr(layer, "weight", None)
            if table is None or table.ndim != 2 or not table.is_floating_point():
                return None
            if self.sharded and layer.num_embeddings != layer.org_vocab_size:
                return None
            found.append(table.detach().contiguous())
        embed, head = found
        return embed, head

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in the vocabulary's order, [V, r], of each rank's [V', r].

        All ranks must call it; each gets the same bits.
        """
        if not self.sharded:
            return rows
        # Every rank's share has its padding behind, and only the last ones have any.
        return tensor_model_parallel_all_gather(rows, dim=0)[: self.embedding.org_vocab_size]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [..., d] of token ids."""
        return self.embedding(ids)

    def logits(self, ids_NP: torch.Tensor, query_Nd: torch.Tensor) -> torch.Tensor:
        """Dot products [N, P], float32, of head rows ``ids_NP`` with ``query_Nd``."""
        weight = self.head.weight
        if not self.sharded:
            rows = weight[ids_NP.long().clamp(min=0)]
            return torch.einsum("npd,nd->np", rows, query_Nd.to(weight.dtype)).float()
        shard = self.head.shard_indices
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        mine = (ids_NP >= start) & (ids_NP < end)
        rows = weight[(ids_NP.long() - start).clamp(min=0, max=max(end - start - 1, 0))]
        part = torch.einsum("npd,nd->np", rows, query_Nd.to(weight.dtype)).float()
        return tensor_model_parallel_all_reduce(torch.where(mine, part, torch.zeros_like(part)))


def require_same_on_all_ranks(value: torch.Tensor, what: str) -> None:
    """Stop if ``value`` differs between tensor-parallel ranks.

    Raises:
        RuntimeError: the ranks disagree.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return
    # What CPU processes share their memory with takes no integers; float32 holds 16 bits exactly.
    parts = value.reshape(1, -1).to(torch.int64).view(torch.int16).to(torch.float32)
    gathered = tensor_model_parallel_all_gather(parts, dim=0)
    if not bool((gathered == parts).all()):
        raise RuntimeError(f"weaver: tensor-parallel ranks built different {what}")
