# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, requests through them, and the comparison of their outputs.

An engine start costs seconds and an interpreted step a good part of one, so tests share engines
(see ``conftest.py``) and plain decoding's outputs are kept for the session: they are a function of
model, prompt and sampling parameters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plain_gdn
import torch
from msgspec.structs import asdict
from oracle import OracleProposer
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

VOCAB_SIZE = 512
BUDGET = 12
#: Gap of the two best log-probabilities below which either token may be the greedy one.
FLOAT32_TIE = 1e-4

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 24 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}

_ids = itertools.count()


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy decoding that only the length ends, unless ``options`` say otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, **options)


def sampled(max_tokens: int, seed: int, **options: Any) -> SamplingParams:
    """Seeded sampling at temperature 0.8, unless ``options`` say otherwise."""
    options = {"temperature": 0.8, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **options)


@dataclass
class Output:
    """What one request gave."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float] | None] | None
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int

    @classmethod
    def of(cls, result: Any) -> Output:
        """From vLLM's ``RequestOutput``."""
        done = result.outputs[0]
        return cls(
            prompt=list(result.prompt_token_ids),
            tokens=list(done.token_ids),
            logprobs=None if done.logprobs is None else [_plain(x) for x in done.logprobs],
            prompt_logprobs=(
                None
                if result.prompt_logprobs is None
                else [None if x is None else _plain(x) for x in result.prompt_logprobs]
            ),
            text=done.text,
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
            cached_tokens=result.num_cached_tokens or 0,
        )


def _plain(logprobs: dict[int, Any]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in logprobs.items()}


@dataclass
class Arrival:
    """A request that joins before step ``step``, and is aborted before ``leave`` if set."""

    step: int
    prompt: list[int]
    params: SamplingParams
    leave: int | None = None


class Engine:
    """One LLM in this process.

    Args:
        target: directory of the target.
        weaver: the plugin's options; None for a plain engine.
        drafter: directory of the DFlash drafter, with ``weaver``.
        budget: tree budget, with ``weaver``.
        speculation: further entries of ``speculative_config``.
        options: further arguments of ``LLM``.
    """

    def __init__(
        self,
        target: Path,
        *,
        weaver: dict[str, Any] | None = None,
        drafter: Path | None = None,
        budget: int | None = None,
        speculation: dict[str, Any] | None = None,
        **options: Any,
    ):
        plain_gdn.install()
        arguments = {**COMMON, **options}
        if weaver is not None:
            arguments["speculative_config"] = {
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": budget,
                **(speculation or {}),
            }
            arguments["additional_config"] = {"weaver": weaver}
        self.llm = LLM(str(target), **arguments)
        self.broken = False
        # At its end an engine takes down the process groups, which all engines here share.
        self.llm.llm_engine.engine_core._finalizer.detach()

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """The model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def recurrent_states(self, column: int = 0) -> dict[str, list[torch.Tensor]]:
        """Conv and recurrent state of the only running request, by layer, as copies.

        Args:
            column: of the request's block table.
        """
        runner = self.runner
        (index,) = runner.req_states.req_id_to_index.values()
        layers = runner.vllm_config.compilation_config.static_forward_context
        states = {}
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if any(isinstance(x, MambaSpec) for x in iter_layer_specs(group.kv_cache_spec)):
                slot = runner.block_tables.block_tables[number].gpu[index, column]
                for name in group.layer_names:
                    states[name] = [cache[slot].clone() for cache in layers[name].kv_cache]
        return states

    def stats(self) -> dict[str, Any]:
        """Counters of tree decoding since the last call."""
        return self.llm.collective_rpc("weaver_stats", kwargs={"reset": True})[0]

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Output]:
        """Outputs of a batch that arrives at once."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self.run([Arrival(0, p, x) for p, x in zip(prompts, each, strict=True)])

    def run(self, arrivals: Sequence[Arrival]) -> list[Output]:
        """Outputs of requests that join and leave as told, in the order of ``arrivals``.

        A request that was aborted has none.
        """
        assert not self.broken, "an earlier step of this engine failed"
        self.broken = True
        outputs = self._run(arrivals)
        self.broken = False
        return outputs

    def _run(self, arrivals: Sequence[Arrival]) -> list[Output]:
        engine = self.llm.llm_engine
        names = [f"r{next(_ids)}" for _ in arrivals]
        outputs: dict[str, Output] = {}
        waiting, leaving, step = set(range(len(arrivals))), {}, 0
        while waiting or engine.has_unfinished_requests():
            for index in sorted(waiting):
                if arrivals[index].step <= step or not engine.has_unfinished_requests():
                    waiting.discard(index)
                    self._add(names[index], arrivals[index])
                    if arrivals[index].leave is not None:
                        leaving[names[index]] = arrivals[index].leave
            gone = [name for name, when in leaving.items() if when <= step]
            engine.abort_request(gone)
            for name in gone:
                del leaving[name]
                outputs.pop(name, None)
            for result in engine.step():
                outputs[result.request_id] = Output.of(result)
            step += 1
        return [outputs[name] for name in names if name in outputs]

    def samples(self, prompt: list[int], params: SamplingParams) -> list[list[int]]:
        """Tokens of each of the ``n`` samples of one request."""
        result = self.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        return [list(sample.token_ids) for sample in result.outputs]

    def _add(self, name: str, arrival: Arrival) -> None:
        """Add a request.

        With speculation vLLM's front end refuses ``min_p`` and ``logit_bias``, which its sampler
        serves all the same; they are put into the request behind it.
        """
        engine, params = self.llm.llm_engine, arrival.params
        prompt: Any = {"prompt_token_ids": arrival.prompt}
        if params.min_p or params.logit_bias:
            behind = params.clone()
            behind.min_p, behind.logit_bias = 0.0, None
            tasks = engine.get_supported_tasks()
            prompt = engine.input_processor.process_inputs(name, prompt, behind, tasks)
            prompt.sampling_params.min_p = params.min_p
            prompt.sampling_params.logit_bias = params.logit_bias
        engine.add_request(name, prompt, params)


class TreeEngine(Engine):
    """An engine that verifies trees, with an oracle that may take the proposer's place."""

    def __init__(
        self,
        models: dict[str, Path],
        target: str,
        *,
        budget: int = BUDGET,
        block: int = 8,
        weaver: dict[str, Any] | None = None,
        rows_per_step: int | None = None,
        **options: Any,
    ):
        weaver = weaver or {"adapter": str(models[f"{target}-weaver{block}"])}
        if rows_per_step is not None:
            weaver = {**weaver, "rows_per_step": rows_per_step}
        super().__init__(
            models[target],
            weaver=weaver,
            drafter=models[f"{target}-dflash{block}"],
            budget=budget,
            **options,
        )
        self.oracle = OracleProposer(self.runner)


@dataclass
class Plain:
    """Plain decoding of one target: an engine, and every output that it gave."""

    engine: Engine
    known: dict[tuple[tuple[int, ...], str], Output] = field(default_factory=dict)

    def outputs(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Output]:
        """Outputs of each prompt; those not yet known are generated in one batch."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        # The representation of sampling parameters leaves some of them out.
        keys = [(tuple(p), repr(asdict(x))) for p, x in zip(prompts, each, strict=True)]
        new = {
            key: (prompt, x)
            for key, prompt, x in zip(keys, prompts, each, strict=True)
            if key not in self.known
        }
        if new:
            results = self.engine.generate(
                [p for p, _ in new.values()], [x for _, x in new.values()]
            )
            self.known.update(zip(new, results, strict=True))
        return [self.known[key] for key in keys]

    def tie_gap(self, prompt: list[int], before: list[int], token: int) -> float:
        """How far ``token`` is, in log-probability, from the best after ``prompt + before``."""
        params = greedy(1, logprobs=5)
        best = self.outputs([[*prompt, *before]], params)[0].logprobs[0]
        return max(best.values()) - best.get(token, -float("inf"))


def assert_same(
    outputs: Iterable[Output],
    expected: Iterable[Output],
    plain: Plain | None = None,
    tie: float = FLOAT32_TIE,
) -> None:
    """Tokens and finish reasons are equal, or first differ at a tie of plain decoding.

    Args:
        outputs: to check.
        expected: plain decoding's, of the same requests.
        plain: where greedy divergences are looked up; without it none is accepted.
        tie: largest gap of the two best log-probabilities that counts as a tie.
    """
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        assert got.prompt == want.prompt
        if got.tokens == want.tokens:
            assert (got.finish_reason, got.stop_reason, got.text) == (
                want.finish_reason,
                want.stop_reason,
                want.text,
            )
            continue
        place = first_difference(got.tokens, want.tokens)
        message = (
            f"request {index} (prompt of {len(want.prompt)}) differs at token {place}: "
            f"{got.tokens[place:][:4]}, plain {want.tokens[place:][:4]}"
        )
        assert plain is not None and place < min(len(got.tokens), len(want.tokens)), message
        gap = plain.tie_gap(want.prompt, want.tokens[:place], got.tokens[place])
        assert gap <= tie, f"{message}; no tie: the gap is {gap:.2e}"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """First place at which two unequal sequences differ."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def assert_same_logprobs(
    got: list[dict[int, float] | None] | None,
    want: list[dict[int, float] | None] | None,
    tolerance: float = 1e-4,
) -> None:
    """Log-probabilities of the same tokens at every place, within ``tolerance``."""
    assert got is not None and want is not None and len(got) == len(want)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if a is None or b is None:
            assert a is b, place
            continue
        shared = a.keys() & b.keys()
        # Two tokens of equal score may change places at the end of the list.
        assert len(shared) >= min(len(a), len(b)) - 1, (place, a, b)
        for token in shared:
            assert abs(a[token] - b[token]) <= tolerance, (place, token, a[token], b[token])


class async_scheduling:
    """Engines started inside schedule as on a GPU; vLLM's CPU platform switches that off."""

    def __enter__(self) -> None:
        self.original = CpuPlatform.__dict__["check_and_update_config"]
        original = self.original.__func__

        def check(cls: type, vllm_config: Any) -> None:
            original(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(check)

    def __exit__(self, *error: object) -> None:
        CpuPlatform.check_and_update_config = self.original
