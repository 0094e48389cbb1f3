# SPDX-License-Identifier: Apache-2.0
"""Requests that join while others run, inside an engine's process, and a record of its steps.

`engine.py` imports it; vLLM must be ready to be imported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: Options of sampling that vLLM's front end refuses beside speculation and its sampler serves.
_BEHIND = ("min_p",)


def parameters(tokens: int, **options: Any) -> Any:
    """vLLM's `SamplingParams` of a request that only its length ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {"output_kind": RequestOutputKind.DELTA, **options}
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **options)


def add_request(engine: Any, name: str, prompt: list[int], params: Any) -> None:
    """Add a request, with what the front end refuses put into it behind the front end."""
    given: Any = {"prompt_token_ids": prompt}
    refused = {key: getattr(params, key) for key in _BEHIND if getattr(params, key)}
    if refused:
        plain = params.clone()
        for key in refused:
            setattr(plain, key, 0.0)
        tasks = engine.get_supported_tasks()
        given = engine.input_processor.process_inputs(name, given, plain, tasks)
        for key, value in refused.items():
            setattr(given.sampling_params, key, value)
    engine.add_request(name, given, params)


def serve(
    engine: Any, requests: Sequence[Mapping[str, Any]], tag: str, log: StepLog
) -> dict[str, Any]:
    """Run requests to their ends.

    Args:
        engine: vLLM's `LLMEngine` with its core in this process.
        requests: each with `prompt`, `tokens` and `sampling` (of `SamplingParams`); `after`: it
            joins once the others have emitted so many tokens, or have ended; `places` of its text
            whose scores are wanted, with `show`, options of `SamplingParams` that say which.
        tag: prefix of the requests' names.
        log: of the engine's steps; emptied.

    Returns:
        `outputs`, `cached` (prompt tokens found in the prefix cache) and `scores` (`[token,
        value]`, by place) by request, and `steps`, see :class:`StepLog`.
    """
    log.reset()
    names = [f"{tag}-{number}" for number in range(len(requests))]
    outputs: dict[str, list[int]] = {name: [] for name in names}
    cached = dict.fromkeys(names, 0)
    scores: dict[str, dict[str, list[tuple[int, float]]]] = {name: {} for name in names}
    wanted = {
        name: request.get("places", ()) for name, request in zip(names, requests, strict=True)
    }
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].get("after", 0))
    while waiting or engine.has_unfinished_requests():
        emitted = sum(map(len, outputs.values()))
        while waiting and (
            requests[waiting[0]].get("after", 0) <= emitted or not engine.has_unfinished_requests()
        ):
            number = waiting.pop(0)
            request = requests[number]
            show = request.get("show", {})
            params = parameters(request["tokens"], **request["sampling"], **show)
            add_request(engine, names[number], list(request["prompt"]), params)
        for result in engine.step():
            name, part = result.request_id, result.outputs[0]
            first = len(outputs[name])
            outputs[name] += part.token_ids
            if result.num_cached_tokens:
                cached[name] = result.num_cached_tokens
            for place in wanted[name]:
                if part.logprobs and first <= place < len(outputs[name]):
                    found = part.logprobs[place - first]
                    # Columns that another request asked for are there too, without a value.
                    scores[name][str(place)] = [
                        (token, entry.logprob)
                        for token, entry in found.items()
                        if entry.logprob > -math.inf
                    ]
    return {
        "outputs": [outputs[name][: r["tokens"]] for name, r in zip(names, requests, strict=True)],
        "cached": [cached[name] for name in names],
        "scores": [scores[name] for name in names],
        "steps": log.take(),
    }


class StepLog:
    """What the steps of an engine were: who shared them, and which graphs they ran in.

    Args:
        scheduler: vLLM's, in this process; its methods are wrapped. Graphs are known if the
            engine has `cudagraph_metrics`.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*arguments: Any, **keywords: Any) -> Any:
            result = schedule(*arguments, **keywords)
            self._scheduled(result)
            return result

        def watched_update(scheduled: Any, output: Any) -> Any:
            stats = getattr(output, "cudagraph_stats", None)
            if stats is not None and scheduled.num_scheduled_tokens:
                self._ran(stats)
            return update(scheduled, output)

        scheduler.schedule = watched_schedule
        scheduler.update_from_output = watched_update
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._counts: Counter[str] = Counter()
        self._graphs: Counter[str] = Counter()
        self._batches: Counter[int] = Counter()
        self._padded: Counter[str] = Counter()

    def take(self) -> dict[str, Any]:
        """Counts since the last reset.

        Returns:
            `steps`; `mixed`: with prompt rows beside decoding requests; `chunks`: pieces of
            prompts that did not end them; `mixed_chunks`: steps with such a piece beside decoding
            requests; `mixed_trees`: with prompt rows beside drafted tokens; `preempted`: requests;
            `decoding`: steps without prompts by number of requests; `graphs` and `padded_graphs`:
            steps by mode of their CUDA graph, and those whose graph was larger than the batch.
        """
        keys = ("steps", "mixed", "chunks", "mixed_chunks", "mixed_trees", "preempted")
        return {
            **{key: self._counts[key] for key in keys},
            "decoding": {str(key): count for key, count in sorted(self._batches.items())},
            "graphs": dict(self._graphs),
            "padded_graphs": dict(self._padded),
        }

    def _scheduled(self, result: Any) -> None:
        self._counts["preempted"] += len(result.preempted_req_ids or ())
        if not result.num_scheduled_tokens:
            return
        prompts = decoding = chunks = trees = 0
        for name, rows in result.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            # It counts the rows of this step already.
            if request.num_computed_tokens - rows >= request.num_prompt_tokens:
                decoding += 1
                trees += bool(result.scheduled_spec_decode_tokens.get(name))
                continue
            prompts += 1
            chunks += request.num_computed_tokens < request.num_prompt_tokens
        self._counts["steps"] += 1
        self._counts["chunks"] += chunks
        if not prompts:
            self._batches[decoding] += 1
        elif decoding:
            self._counts["mixed"] += 1
            self._counts["mixed_chunks"] += bool(chunks)
            self._counts["mixed_trees"] += bool(trees)

    def _ran(self, stats: Any) -> None:
        mode = str(stats.runtime_mode).rpartition(".")[2]
        self._graphs[mode] += 1
        self._padded[mode] += stats.num_paddings > 0


def add_steps(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum of several :meth:`StepLog.take`."""
    total: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping):
                total[key] = dict(Counter(total.get(key, {})) + Counter(value))
            else:
                total[key] = total.get(key, 0) + value
    return total
