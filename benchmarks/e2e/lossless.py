# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.e2e.lossless`: are the engine's tokens plain vLLM's?

Engines of plain vLLM and of the plugin, each in a process of its own, decode the same requests
under the conditions of serving (`parts.py`). Where a text leaves plain vLLM's, plain vLLM says how
near the other token was. It also decodes every request a second time, in other batches: what it
does to itself is the base rate beside.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from .arms import Arm, ArmError, Models, describe, engine_options, parse_arms
from .arms import Sizes as EngineSizes
from .client import EngineError, EngineProcess
from .compare import Doubt, Doubts, compare
from .doubts import NEUTRAL, coarser, greedy_doubt, shift_needed, shifts_in_float32
from .exact import ExactTarget
from .measure import write_json
from .memory import LEAST_CACHE, CacheShape, Room, drafter_bytes, weight_bytes
from .parts import PARTS, TOGETHER, Part, PartError, Request, Sizes, next_turns
from .prompts import PromptError, Stream, held_out_texts, load_tokenizer, texts_of
from .serving import add_steps
from .setup import (
    PACKAGED,
    Adapter,
    CompileCache,
    Drafter,
    EngineArguments,
    Prompts,
    Target,
    choose_models,
    compile_caches,
    device_bytes,
    engine_arguments,
    enough,
    read_model_config,
)
from .statistics import first_difference

#: The arm that everything is compared with, and its second pass.
PLAIN, AGAIN = "ar", "ar again"
_ARMS = "weaver"
_LEAST_TOKENS = 20_000
#: Best scores that plain vLLM is asked for: of a greedy request, of one with filters, and of one
#: with top-p alone, whose limit is a share of the mass of all tokens. The first many are kept of a
#: difference beyond a tie.
_BEST, _FILTERED, _MASS = 64, 1024, 16_384
#: Requests in a batch of plain vLLM's second pass.
_REGROUPED = 11
_FILTERS = ("top_k", "top_p", "min_p")
#: Cache beyond what the running requests take, for prefixes that stay.
_CACHE_FACTOR = 3

#: Plain vLLM's [token, logit] pairs, by request of a part and place of its text.
Scores = Mapping[tuple[int, int], list[Any]]


class OutOfTimeError(Exception):
    """The run's minutes are over."""


@dataclass(frozen=True)
class Settings:
    """What a run is asked for.

    Attributes:
        arms: plain vLLM first.
        batched_tokens: vLLM's `max_num_batched_tokens`; None for the least that takes whole trees.
        tie: largest distance that counts as a tie, or one step of the logits' dtype if that is
            more; None for the dtype's.
        least_tokens: that must have been compared, for each arm.
        graphs: whether whole-step CUDA graphs must have run.
        vocab_size: of the target.
        room: most bytes that one engine's caches may take; None where there is no limit to mind.
    """

    arms: list[Arm]
    models: Models
    parts: list[str]
    device: str
    tokens: int
    batch: int
    context: int
    chunk: int
    seeds: int
    batched_tokens: int | None
    tie: float | None
    least_tokens: int
    minutes: float
    graphs: bool
    environment: dict[str, str]
    extra: dict[str, dict[str, Any]]
    logs: Path
    vocab_size: int
    room: int | None = None

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def budget(self) -> int:
        """Nodes of the largest tree."""
        return max(arm.rows for arm in self.arms)

    def scores_of(self, sampling: Mapping[str, Any]) -> int:
        """Best scores that show what filters did: few, or of nearly all of the tokens' mass."""
        by_mass = sampling.get("top_p", 1.0) < 1 and not sampling.get("top_k", 0)
        return min(self.vocab_size, _MASS if by_mass else _FILTERED)

    def options(self, arm: Arm, cache: CacheShape) -> dict[str, Any]:
        """Arguments of `vllm.LLM`: the benchmark's, with caching and chunks, the same for all."""
        batched = self.batched_tokens or max(512, self.batch * (2 * self.budget + 1))
        shared: dict[str, Any] = {
            "enable_prefix_caching": True,
            "max_num_batched_tokens": batched,
            "long_prefill_token_threshold": self.chunk,
            "cudagraph_metrics": True,
            # Of a difference both engines are asked for their logits.
            "max_logprobs": min(self.vocab_size, _MASS),
            "logprobs_mode": "raw_logits",
        }
        need = _CACHE_FACTOR * cache.cache_bytes(
            arm.kind, arm.rows, self.batch, self.context + self.tokens
        )
        if self.room is not None:
            # What does not fit waits: batches get smaller, tokens stay the same.
            need = max(min(need, self.room), LEAST_CACHE)
        return engine_options(
            arm,
            self.models,
            EngineSizes(self.batch, self.context, 2 * self.tokens),
            device=self.device,
            kv_bytes=need,
            # Caches have the size given; the share only has to be free at the start.
            memory_share=0.8 / len(self.arms),
            seed=0,
            triton_prefill=importlib.util.find_spec("flashinfer") is None,
            extra=shared | self.extra.get(arm.name, {}) | self.extra.get("all", {}),
        )


@dataclass
class Decoded:
    """What one engine did with a part.

    Attributes:
        outputs, cached: by request.
        steps: of all batches, see `StepLog.take`.
        plugin: the worker's counters.
        seconds: that it took.
    """

    outputs: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Lossless:
    """One run. `results` is JSON at any moment.

    Args:
        settings: see there.
        cut: cuts prompts, see `parts.py`.
        cache: shape of the caches.
        say: told what happens.
        save: given the results after each part.
        began: `time.monotonic()` from which the minutes count.
    """

    def __init__(
        self,
        settings: Settings,
        cut: Callable[[int, int], list[list[int]]],
        cache: CacheShape,
        say: Callable[[str], None],
        save: Callable[[dict[str, Any]], None],
        began: float,
    ):
        self.settings = settings
        self.cut = cut
        self.cache = cache
        self.say = say
        self.save = save
        self.began = began
        self.processes: dict[str, EngineProcess] = {}
        self.results: dict[str, Any] = {"engines": {}, "parts": [], "failures": [], "skipped": []}
        function = None if settings.dtype == "float32" else settings.models.function
        self.exact = None if function is None else ExactTarget(Path(function))

    @property
    def left(self) -> float:
        """Seconds until the run has to end."""
        return self.settings.minutes * 60 - (time.monotonic() - self.began)

    def run(self) -> dict[str, Any]:
        """Start the engines, run the parts, and judge; stops by itself when time is over."""
        waiting = list(self.settings.parts)
        try:
            self._start()
            while waiting:
                self._stage(waiting[0])
                waiting.pop(0)
                self.save(self.results)
        except OutOfTimeError:
            self._fail(f"no time left: {self.settings.minutes:g} minutes are over")
        except EngineError as error:
            self._fail(str(error))
        for name in waiting:
            self._fail(f"{name}: not run to its end")
        self._totals([arm for arm in self.settings.arms if arm.name != PLAIN])
        # What was found is safe before engines take their time to end.
        self.save(self.results)
        for process in self.processes.values():
            process.stop(timeout=3)
        return self.results

    def _fail(self, text: str) -> None:
        self.results["failures"].append(text)
        self.say(f"FAILED: {text}")

    def _start(self) -> None:
        settings = self.settings
        for arm in settings.arms:
            log = settings.logs / f"{arm.name.replace(',', '_').replace('=', '_')}.log"
            self.processes[arm.name] = EngineProcess(arm.name, log, settings.environment)
        for arm in settings.arms:
            options = settings.options(arm, self.cache)
            self.results["engines"][arm.name] = {**describe(arm), "options": options}
            plain = settings.device == "cpu" and arm.kind == "ar"
            self.processes[arm.name].send("start", options=options, plain_cpu=plain)
        for arm in settings.arms:
            record = self.results["engines"][arm.name]
            try:
                record |= self.processes[arm.name].receive("start", self._limit())
            except EngineError as error:
                record["failed"] = str(error)
                if arm.name == PLAIN:
                    raise
                self._drop(arm, str(error))
                continue
            self.say(
                f"{arm.name}: up in {record['start_seconds']:.1f} s, graphs "
                f"{record['graphs']['cudagraph_mode']}"
            )
        self.save(self.results)

    def _drop(self, arm: Arm, reason: str) -> None:
        self._fail(reason)
        self.results["engines"][arm.name]["failed"] = reason
        self.processes[arm.name].stop(timeout=0)

    @property
    def _up(self) -> list[Arm]:
        engines = self.results["engines"]
        return [arm for arm in self.settings.arms if "failed" not in engines[arm.name]]

    def _limit(self) -> float:
        if self.left <= 0:
            raise OutOfTimeError
        return self.left

    def _sizes(self) -> Sizes:
        settings = self.settings
        records = self.results["engines"].values()
        return Sizes(
            budget=settings.budget,
            tokens=settings.tokens,
            batch=settings.batch,
            context=settings.context,
            block=max(r["memory"]["cache_block_tokens"] for r in records if "memory" in r),
            chunk=settings.chunk,
            seeds=settings.seeds,
        )

    def _stage(self, name: str) -> None:
        """One part, or two of which the second goes on from the first."""
        sizes = self._sizes()
        try:
            parts = [PARTS[name](sizes, self.cut)]
        except PartError as error:
            self._fail(str(error))
            return
        decoded = [self._decode_all(parts[0])]
        if name == "turns":
            parts.append(next_turns(sizes, self.cut, parts[0], decoded[0][PLAIN].outputs))
            decoded.append(self._decode_all(parts[1]))
        for part, found in zip(parts, decoded, strict=True):
            # Of its own caches, which would be in the way of a part that goes on from them.
            found[AGAIN] = self._decode(PLAIN, part, part.regrouped(_REGROUPED), fresh=True)
            found[AGAIN].outputs.reverse()
        for part, found, scores in zip(parts, decoded, self._ask(parts, decoded), strict=True):
            self._judge(part, found, scores)

    def _decode_all(self, part: Part) -> dict[str, Decoded]:
        """The part on all engines, side by side."""
        fresh = part.follows is None
        arms = self._up
        with ThreadPoolExecutor(len(arms)) as pool:
            waiting = {
                arm.name: pool.submit(self._decode, arm.name, part, part.batches, fresh)
                for arm in arms
            }
        found = {}
        for arm in arms:
            try:
                found[arm.name] = waiting[arm.name].result()
            except EngineError as error:
                if arm.name == PLAIN or self.left <= 0:
                    raise
                self._drop(arm, f"{part.name}: {error}")
        return found

    def _decode(self, name: str, part: Part, batches: Sequence[Any], fresh: bool) -> Decoded:
        process, start = self.processes[name], time.monotonic()
        ours = any(arm.ours and arm.name == name for arm in self.settings.arms)
        if ours:
            process.call("stats", self._limit())
        found = Decoded()
        steps = []
        for number, batch in enumerate(batches):
            # Parts whose batches know nothing of each other begin without a cache, too.
            answer = self._serve(name, batch, {}, fresh and (number == 0 or not part.ordered))
            found.outputs += answer["outputs"]
            found.cached += answer["cached"]
            steps.append(answer["steps"])
        found.steps = add_steps(steps)
        if ours:
            found.plugin = process.call("stats", self._limit())
        found.seconds = time.monotonic() - start
        return found

    def _ask(
        self, parts: Sequence[Part], decoded: Sequence[Mapping[str, Decoded]]
    ) -> Sequence[Scores]:
        """Plain vLLM's scores where texts leave its own: it decodes those batches once more.

        In the batches in which it wrote its texts, so that it rounds as it did then. Where it
        writes something else all the same, it is asked for one token after its own text.
        """
        questions = [_questions(found) for found in decoded]
        known: list[dict[tuple[int, int], list[Any]]] = [{} for _ in parts]
        left = sum(any(asked) for asked in questions)
        fresh = True
        for part, found, asked, scores in zip(parts, decoded, questions, known, strict=True):
            first = 0
            for batch in part.batches:
                end = first + len(batch)
                # Of parts in order, all batches before the last question.
                if any(asked[first:end]) or (part.ordered and left and any(asked[end:])):
                    answers = self._scores(
                        batch,
                        asked[first:end],
                        found[PLAIN].outputs[first:end],
                        fresh or not part.ordered,
                    )
                    fresh = False
                    scores |= {(first + i, place): x for (i, place), x in answers.items()}
                first = end
        return known

    def _scores(
        self,
        batch: Sequence[Request],
        asked: Sequence[Mapping[int, set[int]]],
        own: Sequence[list[int]],
        fresh: bool,
    ) -> dict[tuple[int, int], list[Any]]:
        """Plain vLLM's scores by request of a batch and place of its text `own`."""
        shown = {
            i: {"places": sorted(places), "show": self._show(batch[i], places)}
            for i, places in enumerate(asked)
            if places
        }
        answer = self._serve(PLAIN, batch, shown, fresh)
        found: dict[tuple[int, int], list[Any]] = {}
        missing = []
        for i, places in enumerate(asked):
            for place in places:
                if answer["outputs"][i][:place] == own[i][:place]:
                    found[i, place] = answer["scores"][i][str(place)]
                else:
                    missing.append((i, place))
        if missing:
            after = [
                (
                    [*batch[i].prompt, *own[i][:place]],
                    self._show(batch[i], {place: asked[i][place]}),
                )
                for i, place in missing
            ]
            found |= zip(missing, self._scores_after(after), strict=True)
        return found

    def _serve(
        self, name: str, batch: Sequence[Request], shown: Mapping[int, Any], fresh: bool
    ) -> dict[str, Any]:
        """What an engine answers to a batch, with the `places` that some requests show."""
        requests = [request.to_dict() | shown.get(i, {}) for i, request in enumerate(batch)]
        return self.processes[name].call("serve", self._limit(), requests=requests, fresh=fresh)

    def _scores_after(
        self, after: Sequence[tuple[list[int], dict[str, Any]]]
    ) -> list[list[tuple[int, float]]]:
        """Plain vLLM's scores after each of some tokens, with options that say of which."""
        requests = [
            {
                "prompt": tokens,
                "tokens": 1,
                "sampling": {"temperature": 0.0, "skip_reading_prefix_cache": True},
                "places": [0],
                "show": show,
            }
            for tokens, show in after
        ]
        answer = self.processes[PLAIN].call("serve", self._limit(), requests=requests)
        return [scores["0"] for scores in answer["scores"]]

    def _show(self, request: Request, places: Mapping[int, set[int]]) -> dict[str, Any]:
        """Options of `SamplingParams` for the scores that a request's doubts need."""
        sampling = request.sampling
        if sampling["temperature"] == 0:
            return {"logprobs": _BEST}
        if any(sampling.get(key, NEUTRAL[key]) != NEUTRAL[key] for key in _FILTERS):
            return {"logprobs": self.settings.scores_of(sampling)}
        return {"logprob_token_ids": sorted(set().union(*places.values()))}

    def _judge(self, part: Part, found: Mapping[str, Decoded], scores: Scores) -> None:
        """Compare the texts of a part, look whether it did what it is for, and record both."""
        requests = part.requests
        own = found[PLAIN].outputs
        record: dict[str, Any] = {
            "part": part.name,
            "title": part.title,
            "requests": len(requests),
            "batches": [len(batch) for batch in part.batches],
            "arms": {},
        }
        for name, decoded in found.items():
            entry: dict[str, Any] = {"seconds": decoded.seconds, "steps": decoded.steps}
            if name != AGAIN:
                entry["cache"] = _cache(requests, decoded.cached)
                for reason in self._missed(part, decoded):
                    self._fail(f"{part.name}: {name}: {reason}")
            if decoded.plugin:
                entry["plugin"] = decoded.plugin
                for reason in _idle(part, decoded.plugin):
                    self._fail(f"{part.name}: {name}: {reason}")
            if name != PLAIN:
                entry["texts"] = texts = self._compare(name, part, decoded.outputs, own, scores)
            if name not in (PLAIN, AGAIN):
                if texts["beyond_a_tie"]:
                    self._fail(f"{part.name}: {name}: {texts['beyond_a_tie']} beyond a tie")
                if texts["not_classified"]:
                    self._fail(f"{part.name}: {name}: {texts['not_classified']} not classified")
            record["arms"][name] = entry
        self.results["parts"].append(record)
        for name, entry in record["arms"].items():
            if "texts" in entry:
                self.say(f"{part.name}: {name}: {_line(entry['texts'])}")

    def _compare(
        self,
        name: str,
        part: Part,
        got: Sequence[list[int]],
        own: Sequence[list[int]],
        scores: Scores,
    ) -> dict[str, Any]:
        """As :func:`compare`; what is no tie by plain vLLM with what it takes to replay it.

        Beyond a tie, the small target in float32 says how far both tokens are from being taken
        (`float32`, with that function alone). Two that are near lie between two engines' roundings.
        """
        shifts: dict[tuple[int, int, int], list[float | None] | None] = {}

        def exact(number: int, place: int, token: int) -> float | None:
            before = own[number][:place]
            found = self._in_float32(part.requests[number], before, [own[number][place], token])
            shifts[number, place, token] = found
            known = [shift for shift in found or () if shift is not None]
            return max(known) if len(known) == 2 else None

        settings = self.settings
        doubts = _doubts(part, own, scores)
        texts = compare(
            got, own, dtype=settings.dtype, doubts=doubts, tie=settings.tie, exact=exact
        )
        for difference in texts["differences"]:
            number, place = difference["request"], difference["place"]
            request, token = part.requests[number], got[number][place]
            difference["label"] = request.label
            if difference["kind"] != "tie" or difference["exact"] is not None:
                both = own[number][place], token
                known = dict(scores.get((number, place), ()))
                theirs = self._asked_again(name, part, number, place, got[number])
                difference["replay"] = {
                    "prompt": request.prompt,
                    "before": own[number][:place],
                    "plain": own[number][place],
                    "ours": token,
                    "sampling": dict(request.sampling),
                    "logits": [known.get(x) for x in both],
                    "best": self._best(request, own[number][:place], scores.get((number, place))),
                    "our_logits": [dict(theirs).get(x) for x in both],
                    "our_best": _ordered(theirs),
                }
                if difference["kind"] == "not classified":
                    exact(number, place, token)
            shift = shifts.get((number, place, token))
            if shift is not None:
                difference["float32"] = dict(zip(("plain", "ours"), shift, strict=True))
        return texts

    def _in_float32(
        self, request: Request, before: Sequence[int], tokens: Sequence[int]
    ) -> list[float | None] | None:
        """Shifts that the small target needs to take each token; None if it cannot be asked."""
        if self.exact is None or self.left <= 0:
            return None
        try:
            return shifts_in_float32(self.exact, request.prompt, before, request.sampling, tokens)
        except Exception as error:  # whatever Transformers raises, what was decoded is judged
            reason = f"differences are not put to the small target in float32: {error!r}"
            self.say(reason)
            self.results["skipped"].append(reason)
            self.exact = None
            return None

    def _best(
        self, request: Request, before: Sequence[int], known: list[Any] | None
    ) -> list[list[Any]]:
        """Plain vLLM's best logits at a place, [token, logit], the best one first.

        Of its own batch as far as they are `known`; else, as of requests sampled without filters,
        of a pass after its text alone.
        """
        scores = known or []
        if len(scores) < _BEST:
            with contextlib.suppress(EngineError, OutOfTimeError):
                tokens = [*request.prompt, *before]
                (scores,) = self._scores_after([(tokens, {"logprobs": _BEST})])
        return _ordered(scores)

    def _asked_again(
        self, name: str, part: Part, number: int, place: int, text: Sequence[int]
    ) -> list[Any]:
        """Scores of another engine at a place of its text, in the batch that it wrote it in.

        Empty if it is not there any more, or writes another text this time.
        """
        if name == AGAIN or self.left <= 0:
            return []
        batch, i = [(batch, i) for batch in part.batches for i in range(len(batch))][number]
        show = {"logprobs": self.settings.scores_of(batch[i].sampling)}
        with contextlib.suppress(EngineError, OutOfTimeError):
            answer = self._serve(name, batch, {i: {"places": [place], "show": show}}, True)
            if answer["outputs"][i][: place + 1] == text[: place + 1]:
                return list(answer["scores"][i].get(str(place), []))
        return []

    def _missed(self, part: Part, decoded: Decoded) -> list[str]:
        """What a part is for and did not happen in an engine."""
        steps, requests = decoded.steps, part.requests
        missed = [f"no step of kind {key}" for key in part.happened if not steps[key]]
        wrong = sum(len(x) != r.tokens for x, r in zip(decoded.outputs, requests, strict=True))
        if wrong:
            missed.append(f"{wrong} answers have not the length asked for")
        cold = sum(r.hit and not n for r, n in zip(requests, decoded.cached, strict=True))
        if cold:
            missed.append(f"{cold} prompts were not found in the prefix cache")
        if part.name == "batches" and str(max(map(len, part.batches))) not in steps["decoding"]:
            missed.append("the largest batch never decoded at once")
        if self.settings.graphs:
            modes = {**steps["graphs"], "padded": steps["padded_graphs"].get("FULL", 0)}
            missed += [f"no step in a graph: {key}" for key in part.graphs if not modes.get(key)]
        return missed

    def _totals(self, others: Sequence[Arm]) -> None:
        """Counts over all parts, by arm; at least so many tokens must have been compared."""
        totals: dict[str, Any] = {}
        for name in [*(arm.name for arm in others), AGAIN]:
            texts = [
                part["arms"][name]["texts"]
                for part in self.results["parts"]
                if name in part["arms"]
            ]
            keys = (
                "requests", "equal_requests", "ties", "ties_of_one_step", "ties_in_float32",
                "beyond_a_tie", "not_classified",
            )  # fmt: skip
            total: dict[str, Any] = {key: sum(text[key] for text in texts) for key in keys}
            total["tokens_compared"] = sum(x["tokens_before_first_difference"] for x in texts)
            distances = [
                difference["distance"]
                for text in texts
                for difference in text["differences"]
                if difference["distance"] is not None
            ]
            total["largest_distance"] = max(distances, default=None)
            totals[name] = total
            if name != AGAIN and total["tokens_compared"] < self.settings.least_tokens:
                self._fail(
                    f"{name}: {total['tokens_compared']} tokens compared, "
                    f"{self.settings.least_tokens} wanted"
                )
        self.results["totals"] = totals


def _ordered(scores: Sequence[Any]) -> list[list[Any]]:
    """The best scores, [token, value], the best one first."""
    ordered = sorted(scores, key=lambda pair: -pair[1])
    return [[token, logit] for token, logit in ordered[:_BEST]]


def _questions(found: Mapping[str, Decoded]) -> list[dict[int, set[int]]]:
    """By request, the places where a text leaves plain vLLM's, with both sides' tokens."""
    own = found[PLAIN].outputs
    asked: list[dict[int, set[int]]] = [{} for _ in own]
    for decoded in found.values():
        for i, (text, mine) in enumerate(zip(decoded.outputs, own, strict=True)):
            place = first_difference(text, mine)
            if place is not None:
                asked[i].setdefault(place, {mine[place]}).add(text[place])
    return asked


def _doubts(part: Part, own: Sequence[list[int]], scores: Scores) -> Doubts:
    """Plain vLLM's doubts at places of its texts `own`, for `compare`."""

    def ask(places: list[tuple[int, int, int]]) -> list[Doubt | None]:
        found: list[Doubt | None] = []
        for number, place, token in places:
            request, known = part.requests[number], scores.get((number, place))
            if known is None:
                found.append(None)
                continue
            if request.sampling["temperature"] == 0:
                found.append(greedy_doubt(known, token))
                continue
            logits = {key: value for key, value in known}
            text = own[number]
            needed = shift_needed(logits, request.prompt, text[:place], request.sampling, token)
            if needed is None:
                found.append(None)
                continue
            both = [logits[x] for x in (token, text[place]) if x in logits]
            found.append(Doubt(None, needed, coarser(*both), request.sampling["temperature"]))
        return found

    return ask


def _cache(requests: Sequence[Request], cached: Sequence[int]) -> dict[str, int]:
    """Prompts that the prefix cache had to know, those that it knew, and their tokens there."""
    wanted = [n for request, n in zip(requests, cached, strict=True) if request.hit]
    return {"wanted": len(wanted), "hits": sum(n > 0 for n in wanted), "tokens": sum(wanted)}


def _idle(part: Part, plugin: Mapping[str, Any]) -> list[str]:
    """Why a part says nothing about trees."""
    if not plugin["target_passes"]:
        return ["no tree was verified"]
    if not plugin["mean_accepted_length"] > 1:
        return ["no drafted token was accepted"]
    if part.name == "seeded" and not plugin["chain_fallbacks"]:
        return ["no request with penalties ran as chains"]
    return []


def _line(texts: Mapping[str, Any]) -> str:
    line = (
        f"{texts['tokens_before_first_difference']} tokens compared, equal "
        f"{texts['equal_requests']}/{texts['requests']}"
    )
    for key in ("ties", "ties_of_one_step", "ties_in_float32", "beyond_a_tie", "not_classified"):
        if texts[key]:
            line += f", {texts[key]} {key.replace('_', ' ')}"
    return line


def content(settings: Settings, results: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The results as JSON, with what they were made with."""
    from vllm_weaver.demo.machine import provenance

    return {
        **provenance(),
        "title": f"{settings.models.title or settings.models.target}, {settings.device}, "
        f"{settings.dtype}",
        "setting": {
            "models": vars(settings.models),
            "device": settings.device,
            "dtype": settings.dtype,
            "parts": settings.parts,
            "tokens": settings.tokens,
            "batch": settings.batch,
            "context": settings.context,
            "chunk": settings.chunk,
            "tie": settings.tie,
            "least_tokens": settings.least_tokens,
        },
        "seconds": seconds,
        "passed": "totals" in results and not results["failures"],
        **results,
    }


def markdown(data: Mapping[str, Any]) -> str:
    """A table of all parts, and what failed."""
    lines = [
        "| part | arm | requests | tokens compared | equal | ties (of one step, in float32) "
        "| largest distance | beyond a tie | mixed steps | cache hits | FULL graphs (padded) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for part in data["parts"]:
        for name, entry in part["arms"].items():
            if "texts" not in entry:
                continue
            texts, steps = entry["texts"], entry["steps"]
            distances = [d["distance"] for d in texts["differences"] if d["distance"] is not None]
            hits = entry.get("cache", {}).get("hits", "-")
            full = steps["graphs"].get("FULL", 0), steps["padded_graphs"].get("FULL", 0)
            lines.append(
                f"| {part['part']} | {name} | {texts['requests']} "
                f"| {texts['tokens_before_first_difference']} | {texts['equal_requests']} "
                f"| {texts['ties']} ({texts['ties_of_one_step']}, {texts['ties_in_float32']}) "
                f"| {max(distances, default=0.0):.4f} "
                f"| {texts['beyond_a_tie'] + texts['not_classified']} | {steps['mixed']} | {hits} "
                f"| {full[0]} ({full[1]}) |"
            )
    for name, total in data.get("totals", {}).items():
        lines.append(
            f"| **all** | {name} | {total['requests']} | {total['tokens_compared']} "
            f"| {total['equal_requests']} "
            f"| {total['ties']} ({total['ties_of_one_step']}, {total['ties_in_float32']}) "
            f"| {total['largest_distance'] or 0.0:.4f} "
            f"| {total['beyond_a_tie'] + total['not_classified']} | | | |"
        )
    lines += [f"\nFailed: {reason}." for reason in data["failures"]]
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="directory for JSON, table and logs")] = Path(
        "lossless-results"
    ),
    arms: Annotated[
        str, typer.Option(help="compared with plain vLLM; as of `benchmarks.e2e`")
    ] = _ARMS,
    budget: Annotated[int, typer.Option(help="tree nodes of weaver and ddtree")] = 63,
    parts: Annotated[str, typer.Option(help="what to decode")] = ",".join(PARTS),
    tokens: Annotated[int, typer.Option(help="of a usual request")] = 64,
    batch: Annotated[int, typer.Option(help="most requests at once")] = TOGETHER[-1],
    context: Annotated[int, typer.Option(help="most tokens of a prompt")] = 2048,
    chunk: Annotated[
        int, typer.Option(help="most prompt tokens of a request in a step beside others")
    ] = 256,
    batched_tokens: Annotated[
        int | None, typer.Option(help="max_num_batched_tokens; default: room for whole trees")
    ] = None,
    seeds: Annotated[int, typer.Option(help="requests for each way to sample")] = 12,
    tie: Annotated[
        float | None,
        typer.Option(
            help="largest distance of a tie, or one step of the logits' dtype if that is more; "
            "default 0.1, on a CPU 1e-4"
        ),
    ] = None,
    least_tokens: Annotated[
        int, typer.Option(help="that must have been compared, for each arm")
    ] = _LEAST_TOKENS,
    minutes: Annotated[float, typer.Option(help="time for everything")] = 4.7,
    small: Annotated[Path, typer.Option(help="trained small trio")] = PACKAGED / "models",
    shape: Annotated[str, typer.Option(help="expand it to this shape")] = "none",
    layers: Annotated[int | None, typer.Option(help="number of target layers, expanded")] = None,
    target: Target = None,
    drafter: Drafter = None,
    adapter: Adapter = None,
    prompts: Prompts = None,
    engine: EngineArguments = None,
    cache: CompileCache = None,
    smoke: Annotated[bool, typer.Option(help="small trees and few requests, for a CPU")] = False,
) -> None:
    """Decode the same requests with plain vLLM and with trees, and classify every difference."""
    import torch

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if smoke:
        budget, tokens, batch, chunk, seeds = 3, 4, 3, 64, 1
        context, least_tokens, minutes = 1024, min(least_tokens, 100), 60.0
        if parts == ",".join(PARTS):
            # Answers longer than a block take minutes where kernels are interpreted.
            parts = ",".join(name for name in PARTS if name != "turns")
        prompts = prompts or PACKAGED / "prompts"
    if layers is not None and shape == "none":
        raise typer.BadParameter(f"--layers {layers} needs a --shape to expand to")
    chosen = [name for name in parts.split(",") if name]
    for name in chosen:
        if name not in PARTS:
            raise typer.BadParameter(f"--parts {name}: choose from {', '.join(PARTS)}")
    try:
        every = parse_arms(arms, budget, [], 15)
    except ArmError as error:
        raise typer.BadParameter(str(error)) from error
    if len(every) < 2 or not all(arm.ours for arm in every[1:]):
        raise typer.BadParameter(f"--arms {arms}: pass arms of the plugin: weaver, chain, ddtree")
    models = choose_models(target, drafter, adapter, small, shape, layers)
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    extra = engine_arguments(engine or [])
    config, drafts = read_model_config(models.target), read_model_config(models.drafter)
    assert config is not None
    itemsize = 4 if device == "cpu" else 2
    shape_of = CacheShape.of(config, drafts, itemsize, side_by_side=False)
    room = None
    if device == "cuda":
        share = device_bytes() // len(every)
        needed = weight_bytes(config, itemsize), drafter_bytes(drafts, itemsize)
        room = Room(share, *needed).for_cache("weaver", beside=None)
    settings = Settings(
        arms=every,
        models=models,
        parts=chosen,
        device=device,
        tokens=tokens,
        batch=batch,
        context=context,
        chunk=chunk,
        seeds=seeds,
        batched_tokens=batched_tokens,
        tie=tie,
        least_tokens=least_tokens,
        minutes=minutes,
        graphs=device != "cpu" and not any(x.get("enforce_eager") for x in extra.values()),
        environment=compile_caches(cache),
        extra=extra,
        logs=logs,
        vocab_size=config.get("text_config", config)["vocab_size"],
        room=room,
    )
    source = held_out_texts() if prompts is None else texts_of(prompts)
    try:
        stream = Stream(load_tokenizer(models.target), enough(source, 20 * context))
    except PromptError as error:
        raise typer.BadParameter(str(error)) from error

    def say(text: str) -> None:
        typer.echo(f"[{time.monotonic() - began:6.1f} s] {text}")

    def save(results: Mapping[str, Any]) -> None:
        write_json(out / "lossless.json", content(settings, results, time.monotonic() - began))

    results = Lossless(settings, stream.cut, shape_of, say, save, began).run()
    data = content(settings, results, time.monotonic() - began)
    text = markdown(data)
    (out / "lossless.md").write_text(text)
    typer.echo(text)
    if not data["passed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
