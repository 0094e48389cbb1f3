# SPDX-License-Identifier: Apache-2.0
"""Runs one arm of the demo: an engine in this process, a batch of prompts, what came out.

Arms differ in how the next tokens are proposed and in nothing else. Knows vLLM's public classes
and the plugin's options; does not know how results are shown.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARMS = {
    "ar": "AR",
    "chain": "DFlash chain",
    "ddtree": "DDTree",
    "weaver": "Weaver",
}

_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Setting:
    """What all arms share.

    Attributes:
        models: directory with ``target``, ``drafter`` and ``adapter``.
        budget: tree nodes without the root.
        tokens: most tokens to generate per prompt.
        temperature: 0 is greedy.
        seed: of each request's sampling, with its number added.
        shared_noise: build trees with the sampler's noise, where the temperature is above 0.
        device: ``cpu`` (float32) or ``cuda`` (bfloat16).
    """

    models: Path
    budget: int
    tokens: int
    temperature: float = 0.0
    seed: int = 0
    shared_noise: bool = True
    device: str = "cpu"

    @property
    def dtype(self) -> str:
        """Precision of weights and activations."""
        return "float32" if self.device == "cpu" else "bfloat16"


@dataclass
class ArmResult:
    """What one arm gave.

    Attributes:
        arm: its key in :data:`ARMS`.
        token_ids: generated tokens of each prompt.
        texts: their texts.
        target_passes: passes of the target over one request after its prompt's.
        pass_tokens: tokens that these passes emitted; the last pass of a request may emit some
            past the limit, which count here and are cut from its text.
        seconds: from the first request's arrival to the last token.
        start_seconds: engine start.
        trees: verified trees with their accepted paths, as ``weaver_last_trees`` gives them.
    """

    arm: str
    token_ids: list[list[int]]
    texts: list[str]
    target_passes: int
    pass_tokens: int
    seconds: float
    start_seconds: float
    trees: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(map(len, self.token_ids))

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass, bonus included."""
        return self.pass_tokens / self.target_passes if self.target_passes else 0.0


def run_arm(
    arm: str,
    setting: Setting,
    prompts: list[list[int]],
    progress: Callable[[int], None] = lambda tokens: None,
) -> ArmResult:
    """Start the arm's engine, decode the prompts as one batch, and stop it again.

    Args:
        arm: a key of :data:`ARMS`.
        setting: shared by all arms.
        prompts: token ids.
        progress: told the number of tokens so far after each step, and 0 once the engine is up.
    """
    start = time.monotonic()
    llm = _engine(arm, setting, prompts, setting.tokens)
    started = time.monotonic()
    progress(0)
    try:
        outputs, trees = _decode(llm, arm, setting, prompts, progress)
        seconds = time.monotonic() - started
        token_ids = [list(output.token_ids) for output in outputs]
        if arm == "ar":
            # The prompt's own pass emits the first token, every further pass one more.
            passes = emitted = sum(len(ids) - 1 for ids in token_ids)
        else:
            stats = llm.collective_rpc("weaver_stats")[0]
            passes, emitted = stats["target_passes"], stats["emitted_tokens"]
    finally:
        del llm
        gc.collect()
    return ArmResult(
        arm=arm,
        token_ids=token_ids,
        texts=[output.text for output in outputs],
        target_passes=passes,
        pass_tokens=emitted,
        seconds=seconds,
        start_seconds=started - start,
        trees=trees,
    )


def best_gap(setting: Setting, prompt: list[int], token: int) -> float:
    """How far ``token`` is, in log-probability, from plain decoding's best after ``prompt``.

    Of a token that is not among the ten best, the distance of the tenth, which is less.
    """
    from vllm import SamplingParams

    llm = _engine("ar", setting, [prompt], 1)
    try:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, logprobs=10)
        output = llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)[0]
        scores = {t: entry.logprob for t, entry in output.outputs[0].logprobs[0].items()}
    finally:
        del llm
        gc.collect()
    return max(scores.values()) - scores.get(token, min(scores.values()))


def _engine(arm: str, setting: Setting, prompts: list[list[int]], tokens: int) -> Any:
    from vllm import LLM

    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    options: dict[str, Any] = {
        "model": str(setting.models / "target"),
        "dtype": setting.dtype,
        "mamba_ssm_cache_dtype": "float32",
        # Room for a whole tree after the last token, so that no tree is cut.
        "max_model_len": longest + tokens + 2 * setting.budget + 2,
        "max_num_seqs": len(prompts),
        # vLLM reserves the budget twice for each request that speculates.
        "max_num_batched_tokens": max(total, len(prompts) * (2 * setting.budget + 1), 512),
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": setting.seed,
    }
    core: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if arm != "ar":
        weaver: dict[str, Any] = {"proposal": arm, "shared_noise": setting.shared_noise}
        if arm == "weaver":
            weaver["adapter"] = str(setting.models / "adapter")
        options["additional_config"] = {"weaver": weaver}
        options["speculative_config"] = {
            "method": "dflash",
            "model": str(setting.models / "drafter"),
            "num_speculative_tokens": setting.budget,
        }
    elif setting.device == "cpu":
        from vllm_weaver.demo.plain_core import plain_core

        core = plain_core()
    with core:
        # vLLM collects garbage a dozen times as it starts an engine; what was there before, a
        # million objects of its modules, need not be looked at. It unfreezes when it stops.
        gc.freeze()
        return LLM(**options)


def _decode(
    llm: Any,
    arm: str,
    setting: Setting,
    prompts: list[list[int]],
    progress: Callable[[int], None],
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Completions in the order of the prompts, and the trees of the steps."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, token_ids in enumerate(prompts):
        parameters = SamplingParams(
            max_tokens=setting.tokens,
            temperature=setting.temperature,
            seed=setting.seed + number,
        )
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, parameters)
    outputs: dict[str, Any] = {}
    trees: list[dict[str, Any]] = []
    while engine.has_unfinished_requests():
        for result in engine.step():
            outputs[result.request_id] = result.outputs[0]
        if arm != "ar":
            trees.extend(llm.collective_rpc("weaver_last_trees")[0])
        progress(sum(len(output.token_ids) for output in outputs.values()))
    return [outputs[str(number)] for number in range(len(prompts))], trees
