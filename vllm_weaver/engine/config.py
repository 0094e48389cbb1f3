# SPDX-License-Identifier: Apache-2.0
"""The ``weaver`` section of vLLM's ``additional_config``, and what it may be combined with.

Knows the option names and their ranges. Does not know how vLLM is built: it reads public
configuration fields only, and touches no device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ATTENTION_KERNELS = ("auto", "triton", "fa3")
GDN_KERNELS = ("auto", "triton", "cuda")
PROPOSALS = ("weaver", "ddtree", "chain")
MIN_BUDGET, MAX_BUDGET = 1, 255

#: Target architectures that are tested, and the kind of model state that each needs.
SUPPORTED_ARCHITECTURES = {
    "Qwen3ForCausalLM": "dense",
    "Qwen3NextForCausalLM": "hybrid",
    "Qwen3_5ForCausalLM": "hybrid",
    "Qwen3_5ForConditionalGeneration": "hybrid",
}


class WeaverConfigError(Exception):
    """A configuration that the plugin refuses: one line with option, value and remedy.

    Not a ``ValueError``: vLLM's configuration classes would wrap that in a report of their own.
    """


@dataclass(frozen=True)
class WeaverOptions:
    """Options of ``additional_config["weaver"]``.

    Attributes:
        adapter: Weaver adapter: a directory, a ``.safetensors`` or ``.pth`` file, or
            ``org/repository:file`` on the Hugging Face hub. Needed by ``proposal="weaver"``.
        proposal: ``weaver`` (adapter-guided tree), ``ddtree`` (tree from the marginals alone) or
            ``chain`` (the drafter's own chain). Default: ``weaver`` with an adapter, else
            ``ddtree``.
        budget: tree nodes without the root, 1 to 255. It is vLLM's ``num_speculative_tokens``;
            if given here too, the two must agree.
        children: children that an expanded node offers to the frontier.
        expansion_width: nodes expanded per round; default ``ceil(budget / 16)``.
        candidate_pool: candidates per depth; default the adapter's own, or 256 without one.
        rows_per_step: most rows of trees that one pass verifies. A batch whose trees of
            ``budget`` nodes would have more gets smaller ones (see :func:`tree_sizes`), unless
            ``num_speculative_tokens_per_batch_size`` says how large they are.
        adapt: choose the size of trees by batch size from step times measured at start-up and from
            observed acceptance, among the sizes of ``rows_per_step``'s rule.
        shared_noise: rank candidates of sampled requests with the very noise that the sampler will
            use, which makes more of a tree accepted and changes no token; ``auto`` is on.
        adapter_tables: on a GPU, fold the adapter's outer projections into tables of the vocabulary
            at start-up (``WeaverAdapter.precompute``): 2 V r numbers of memory on every rank for
            less to read in every step, and with tensor parallelism for kernels without messages.
        gdn_kernel: verification of GDN layers on a GPU: ``triton``, ``cuda`` (compiled beforehand,
            for Hopper), or ``auto``, which takes ``cuda`` where it is compiled, fits and is faster.
        attention_kernel: how a GPU attends to trees: ``triton`` (our kernel), ``fa3`` (vLLM's
            FlashAttention 3 for the context and our kernel for the tree, on Hopper) or ``auto``,
            which is ``triton``: ``fa3`` is faster from some 16k tokens on, but has not been run end
            to end.
        check_ranks: compare the trees of all tensor-parallel ranks after every proposal and stop
            on a difference (a debugging aid: one small collective per step).
    """

    adapter: str | None = None
    proposal: str = ""
    budget: int | None = None
    children: int = 8
    expansion_width: int | None = None
    candidate_pool: int | None = None
    rows_per_step: int = 256
    adapt: bool = False
    shared_noise: bool | str = "auto"
    adapter_tables: bool = True
    gdn_kernel: str = "auto"
    attention_kernel: str = "auto"
    check_ranks: bool = False

    @classmethod
    def parse(cls, section: Any) -> WeaverOptions:
        """Read and check the section alone.

        Raises:
            WeaverConfigError: unknown key, wrong type or value out of range.
        """
        if not isinstance(section, dict):
            raise WeaverConfigError(
                f"additional_config['weaver'] is {section!r}; pass a dictionary, "
                "for instance {'adapter': 'PATH'}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for key in section:
            if key not in known:
                raise WeaverConfigError(
                    f"weaver: unknown option {key!r}; known options are {', '.join(sorted(known))}"
                )
        values = dict(section)
        values["proposal"] = values.get("proposal") or (
            "weaver" if values.get("adapter") else "ddtree"
        )
        options = cls(**values)
        options._check_values()
        return options

    @property
    def shares_noise(self) -> bool:
        """Whether trees are built with the sampler's noise."""
        return self.shared_noise is not False

    def _check_values(self) -> None:
        choices = {
            "proposal": PROPOSALS,
            "gdn_kernel": GDN_KERNELS,
            "attention_kernel": ATTENTION_KERNELS,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise WeaverConfigError(
                    f"weaver: {name} is {getattr(self, name)!r}; choose one of {', '.join(known)}"
                )
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise WeaverConfigError(f"weaver: adapter is {self.adapter!r}; pass a path")
        if self.proposal == "weaver" and not self.adapter:
            raise WeaverConfigError(
                "weaver: proposal 'weaver' needs an adapter; set weaver.adapter, "
                "or choose proposal 'ddtree'"
            )
        for name in ("adapt", "adapter_tables", "check_ranks"):
            if not isinstance(getattr(self, name), bool):
                raise WeaverConfigError(
                    f"weaver: {name} is {getattr(self, name)!r}; pass true or false"
                )
        if not isinstance(self.shared_noise, bool) and self.shared_noise != "auto":
            raise WeaverConfigError(
                f"weaver: shared_noise is {self.shared_noise!r}; pass true, false or 'auto'"
            )
        ranges = {
            "budget": (MIN_BUDGET, MAX_BUDGET),
            "children": (1, 512),
            "expansion_width": (1, MAX_BUDGET),
            "candidate_pool": (1, 4096),
            "rows_per_step": (2, 65536),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None and name not in ("children", "rows_per_step"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise WeaverConfigError(
                    f"weaver: {name} is {value!r}; pass a whole number from {low} to {high}"
                )


#: Rows that a pass verifies in hardly more time than one.
CHEAP_ROWS = 128
#: A tree of so many rows and more is worth them only while they are cheap.
LARGE_TREE = 32


def tree_sizes(budget: int, max_requests: int, rows_per_step: int) -> list[tuple[int, int, int]]:
    """Nodes of a tree by the size of the batch, so that no batch has too many rows.

    Rows cost next to nothing while a pass is bound by reading the weights, and time in proportion
    beyond: at Qwen3.6-27B's shapes on an H200 the products take 12.7 ms for one row, 13.7 for 64
    and 17.3 for 256. The first nodes of a tree are worth that, the last ones are not: from
    ``LARGE_TREE`` rows on, trees share ``CHEAP_ROWS`` of the rows.
    Widths halve, so that few CUDA graphs serve all batches, down to plain decoding.

    Args:
        budget: nodes of a tree without its root, in a batch that has room for them.
        max_requests: largest batch.
        rows_per_step: most rows of a batch, roots included.

    Returns:
        ``(first, last, nodes)`` of each range of batch sizes, as vLLM's
        ``num_speculative_tokens_per_batch_size`` has it.
    """
    sizes: list[tuple[int, int, int]] = []
    first, rows = 1, budget + 1
    while first <= max_requests:
        most = rows_per_step if rows < LARGE_TREE else min(rows_per_step, CHEAP_ROWS)
        last = most // rows if rows > 1 else max_requests
        if first == 1:
            last = max(last, 1)
        if last >= first:
            sizes.append((first, min(last, max_requests), rows - 1))
            first = last + 1
        rows = 2 ** ((rows - 1).bit_length() - 1) if rows > 1 else 1
    return sizes


def with_all_widths(sizes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """``sizes`` of :func:`tree_sizes`, with a place for every width that halving reaches.

    vLLM captures graphs of the widths that its schedule names, and no others. So that a scheduler
    can choose any of them, plain decoding first of all, batch sizes that are not the largest of
    their width stand for the missing ones, as far as there are such. The rows of the largest batch
    stay as they are. The result is no schedule to run by.
    """
    budget = sizes[0][2]
    by_batch = [k for first, last, k in sizes for _ in range(first, last + 1)]
    halves = [budget, *(2**power - 1 for power in reversed(range(budget.bit_length())))]
    missing = sorted(set(halves) - set(by_batch))
    ends = {last for _, last, _ in sizes}
    free = [requests for requests in range(1, len(by_batch)) if requests not in ends]
    # Plain decoding first, then the widest; wide ones stand at small batches.
    chosen = [*missing[:1], *reversed(missing[1:])][: len(free)]
    rows = max(last * (k + 1) for _, last, k in sizes)
    for requests, k in zip(free, sorted(chosen, reverse=True), strict=False):
        if requests * (k + 1) <= rows:
            by_batch[requests - 1] = k
    runs = [list(run) for _, run in itertools.groupby(enumerate(by_batch, 1), lambda x: x[1])]
    return [(run[0][0], run[-1][0], run[0][1]) for run in runs]


def requested(vllm_config: Any) -> bool:
    """Whether this vLLM configuration asks for the plugin."""
    extra = vllm_config.additional_config
    return isinstance(extra, dict) and "weaver" in extra


def options_of(vllm_config: Any) -> WeaverOptions:
    """Parsed options of a configuration for which :func:`requested` holds."""
    return WeaverOptions.parse(vllm_config.additional_config["weaver"])


def draft_depth(vllm_config: Any) -> int:
    """Depth D of the drafter: the block size of its checkpoint less the anchor token.

    It comes from the checkpoint and never from the budget: a deeper block than the drafter was
    trained for costs quality without an error.

    Raises:
        WeaverConfigError: the checkpoint names no block size.
    """
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    block = getattr(hf_config, "block_size", None)
    if not isinstance(block, int) or block < 2:
        raise WeaverConfigError(
            f"weaver: the drafter's config.json has block_size {block!r}; "
            "use a DFlash checkpoint whose block_size is at least 2"
        )
    return block - 1


def check_combination(vllm_config: Any, options: WeaverOptions) -> None:
    """Refuse whatever the plugin cannot serve exactly.

    Raises:
        WeaverConfigError: for the first refusal, with option, value and remedy.
    """
    for problem in _problems(vllm_config, options):
        raise WeaverConfigError(f"weaver: {problem}")


def _problems(config: Any, options: WeaverOptions) -> Iterator[str]:
    model = config.model_config
    if model.architecture not in SUPPORTED_ARCHITECTURES:
        yield (
            f"target architecture {model.architecture} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Remove additional_config['weaver'] to run "
            "without trees"
        )
    spec = config.speculative_config
    method = getattr(spec, "method", None)
    if method != "dflash":
        yield (
            f"speculative_config method is {method!r}; trees grow from a DFlash drafter: "
            "pass method 'dflash' and its model"
        )
        return
    yield from _drafter_problems(config, options)
    yield from _parallel_problems(config)
    yield from _feature_problems(config)


def _drafter_problems(config: Any, options: WeaverOptions) -> Iterator[str]:
    spec = config.speculative_config
    hf_config = spec.draft_model_config.hf_config
    architectures = spec.draft_model_config.architectures or []
    if "DFlashDraftModel" not in architectures:
        yield (
            f"drafter architecture is {', '.join(architectures) or 'unknown'}; "
            "use a DFlashDraftModel checkpoint"
        )
    budget = spec.num_speculative_tokens
    if not isinstance(budget, int) or not MIN_BUDGET <= budget <= MAX_BUDGET:
        yield (
            f"num_speculative_tokens is {budget!r}; the tree budget is a whole number from "
            f"{MIN_BUDGET} to {MAX_BUDGET} (63 is a good choice)"
        )
    if options.budget is not None and options.budget != budget:
        yield (
            f"budget is {options.budget} but num_speculative_tokens is {budget}; "
            "set both to the same number, or leave weaver.budget out"
        )
    dflash = getattr(hf_config, "dflash_config", None) or {}
    if dflash.get("mask_token_id") is None and getattr(hf_config, "mask_token_id", None) is None:
        yield (
            "the drafter's config.json names no dflash_config.mask_token_id; "
            "use a drafter that was trained with a mask token"
        )
    yield from _draft_row_problems(config, budget, draft_depth(config) + 1)
    target_width = config.model_config.get_hidden_size()
    draft_width = spec.draft_model_config.get_hidden_size()
    if draft_width != target_width:
        yield (
            f"the drafter's hidden size is {draft_width}, the target's {target_width}; "
            "use the drafter that was trained for this target"
        )
    if getattr(spec, "draft_sample_method", "greedy") != "greedy":
        yield (
            f"draft_sample_method is {spec.draft_sample_method!r}; trees need no draft "
            "probabilities: leave it at 'greedy'"
        )
    if getattr(spec, "rejection_sample_method", "standard") != "standard":
        yield (
            f"rejection_sample_method is {spec.rejection_sample_method!r}; a tree is accepted "
            "by sampling the target at every node: leave it at the default"
        )
    for flag in ("enable_adaptive_verification", "use_local_argmax_reduction"):
        if getattr(spec, flag, False):
            yield f"speculative_config.{flag} is on; it assumes a chain: switch it off"


def _draft_row_problems(config: Any, budget: int, rows: int) -> Iterator[str]:
    """The drafter's rows of a batch must fit its buffers, of ``max_num_batched_tokens``.

    vLLM's scheduler keeps B slots a request for them besides the request's own tokens, which is
    less than the drafter's rows where trees are smaller than its block.
    """
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    requests = min(scheduler.max_num_seqs, tokens // (budget + 1))
    if requests * rows > tokens:
        yield (
            f"max_num_batched_tokens is {tokens}; the drafter has {rows} rows for each of "
            f"{requests} requests: raise it to {scheduler.max_num_seqs * rows}, or lower "
            "max_num_seqs"
        )


def _parallel_problems(config: Any) -> Iterator[str]:
    parallel = config.parallel_config
    sizes = {
        "pipeline_parallel_size": "tensor_parallel_size",
        "prefill_context_parallel_size": "tensor_parallel_size",
        "decode_context_parallel_size": "tensor_parallel_size",
        "data_parallel_size": "several servers behind a router",
    }
    for name, instead in sizes.items():
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}; set it to 1 and use {instead}"
    if getattr(parallel, "enable_dbo", False):
        yield "enable_dbo is on; a tree is not split into microbatches: switch it off"
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        yield (
            "enable_batch_sharded_sampling is on; every rank walks the whole tree: switch it off"
        )


def _feature_problems(config: Any) -> Iterator[str]:
    model, cache = config.model_config, config.cache_config
    if config.lora_config is not None:
        yield "LoRA is on; it is not tested with trees: merge the adapter into the target"
    if config.kv_transfer_config is not None:
        yield (
            "a KV connector is configured; it could read a state before its commit: remove "
            "kv_transfer_config"
        )
    if getattr(config, "watermark_config", None) is not None:
        yield "watermarking is on; it assumes a linear prefix: remove watermark_config"
    if getattr(model, "return_sampling_mask", False):
        yield "return_sampling_mask is on; it is not tested with trees: switch it off"
    if getattr(model, "enable_trace_replay", False):
        yield "enable_trace_replay is on; it overwrites samples: switch it off"
    if getattr(model, "enable_prompt_embeds", False):
        yield "enable_prompt_embeds is on; it is not tested with trees: switch it off"
    if getattr(model.hf_text_config, "sliding_window", None) and getattr(
        model.hf_text_config, "use_sliding_window", True
    ):
        yield (
            f"the target has sliding_window {model.hf_text_config.sliding_window}; windowed "
            "layers have no tree mask: use a target without them"
        )
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        yield (f"kv_cache_dtype is {cache.cache_dtype!r}; it is not tested with trees: use 'auto'")
    state_dtype = cache.mamba_ssm_cache_dtype
    if SUPPORTED_ARCHITECTURES.get(model.architecture) == "hybrid" and (
        state_dtype not in ("auto", "float32")
        or (state_dtype == "auto" and str(model.dtype) != "torch.float32")
    ):
        yield (
            f"mamba_ssm_cache_dtype is {state_dtype!r}; a path is committed exactly in a float32 "
            "state: pass --mamba-ssm-cache-dtype float32"
        )
    conv_dtype = cache.mamba_cache_dtype
    if conv_dtype != "auto" and f"torch.{conv_dtype}" != str(model.dtype):
        yield (
            f"mamba_cache_dtype is {conv_dtype!r}; a tree's rows are not rounded before they are "
            "committed: leave it at 'auto'"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        yield "kv_sharing_fast_prefill is on; it skips rows of the tree: switch it off"
    if not config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1, which cannot serve trees; unset "
            'VLLM_USE_V2_MODEL_RUNNER, and on a CPU start with `eval "$(vllm-weaver cpu-env)"`'
        )
