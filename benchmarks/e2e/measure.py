# SPDX-License-Identifier: Apache-2.0
"""Runs the arms: who is on the device when, how arms take turns, what a cell's result is.

*All*: every arm's engine stands on the device at once, over one copy of the target's weights, and
decodes in turns, a round each. *Pairs*: AR's engine and one arm's do so, each with weights of its
own. Either way a ratio to AR comes from interleaved rounds. *Alone*: one engine at a time, for
working points whose caches leave no room for more; the ratio then compares stretches of one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from .arms import Arm, Models, Sizes, describe, engine_options, shared_options
from .cells import Cell, CostModel
from .client import EngineError, EngineProcess
from .compare import Exact, compare, compare_again, in_words
from .doubts import Asked, OwnTexts, Texts
from .exact import ExactTarget
from .memory import LEAST_CACHE, CacheShape, Room
from .statistics import accepted_length, rate_ratio, throughput

# What an engine over shared weights must find free at its start: nothing that it relies on.
_OWN_BYTES = 3 << 30
#: Name of the process that holds the weights for all engines.
WEIGHTS = "weights"


class Grouping(StrEnum):
    """Which engines stand on the device at once: see the module."""

    ALL = "all"
    PAIRS = "pairs"
    ALONE = "alone"


@dataclass(frozen=True)
class Run:
    """What a run is asked for.

    Attributes:
        arms: AR first.
        cells: the most important first.
        tokens: most tokens of a request.
        rounds: turns that each engine takes in a cell.
        discard: steps at the start of a turn that are not counted.
        minutes: time for everything.
        grouping: see the module.
        after: a process that has to end before anything is measured.
        warm: decode a little before anything is timed.
        complete: decode every request to its end, for the comparison of texts.
        profile: arms whose step is traced, in the first cell.
    """

    arms: list[Arm]
    cells: list[Cell]
    models: Models
    cache: CacheShape
    room: Room
    cost: CostModel
    device: str
    tokens: int
    rounds: int
    discard: int
    minutes: float
    grouping: Grouping
    warm: bool
    complete: bool
    seed: int
    triton_prefill: bool
    environment: dict[str, str]
    extra: dict[str, dict[str, Any]]
    logs: Path
    profile: tuple[str, ...] = ()
    after: int | None = None

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return "float32" if self.device == "cpu" else "bfloat16"


@dataclass
class Results:
    """What has been measured so far; JSON at any moment."""

    engines: dict[str, Any] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    traces: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One run."""

    def __init__(
        self,
        run: Run,
        prompts: dict[tuple[int, int], list[list[list[int]]]],
        say: Callable[[str], None],
        save: Callable[[Results], None],
    ):
        self.run = run
        self.prompts = prompts
        self.say = say
        self.save = save
        self.results = Results()
        self.began = time.monotonic()
        self.processes: dict[str, EngineProcess] = {}
        self.alone_ar: dict[str, dict[str, Any]] = {}
        self.own_texts = OwnTexts()
        function = run.models.function
        self.exact = None if function is None else ExactTarget(Path(function))
        self.sockets: str | None = None

    @property
    def left(self) -> float:
        """Seconds until the run should end."""
        return self.run.minutes * 60 - (time.monotonic() - self.began)

    def measure(self) -> Results:
        """Run everything that fits."""
        reference, *others = self.run.arms
        try:
            for arm in self.run.arms:
                self._spawn(arm.name)
            if self.run.grouping is Grouping.ALL:
                self._all(reference)
            elif self.run.grouping is Grouping.PAIRS and others:
                self._pairs(reference, others)
            else:
                for arm in self.run.arms:
                    self._alone(arm)
        finally:
            for process in self.processes.values():
                process.stop()
        self._ratios()
        return self.results

    def _spawn(self, name: str) -> None:
        # All at once and before they are needed, so that imports run side by side.
        log = self.run.logs / f"{name.replace(',', '_').replace('=', '_')}.log"
        self.processes[name] = EngineProcess(name, log, self.run.environment)

    def _all(self, reference: Arm) -> None:
        with contextlib.ExitStack() as stack:
            if self.run.device != "cpu":
                sockets = tempfile.TemporaryDirectory(prefix="weights-")
                self.sockets = stack.enter_context(sockets)
                # Engines wait for the weights by themselves.
                self._spawn(WEIGHTS)
                options = self._options(reference, LEAST_CACHE)
                self.processes[WEIGHTS].send("hold", options=options, sockets=self.sockets)
            for arm in self.run.arms:
                self._send_start(arm)
            if self.sockets is not None:
                held = self.processes[WEIGHTS].receive("hold", max(60.0, self.left))
                self.say(f"weights: held after {held['seconds']:.1f} s")
            up = [arm for arm in self.run.arms if self._receive_start(arm)]
            if reference not in up:
                raise EngineError(f"{reference.name} did not start: nothing to compare with")
            self._wait()
            for cell in self.run.cells:
                up = [arm for arm in up if self._alive(arm)]
                self._cell(cell, up)

    def _wait(self) -> None:
        """Wait for the process that uses the device meanwhile."""
        while self.run.after is not None and self.left > 0:
            try:
                os.kill(self.run.after, 0)
            except ProcessLookupError:
                return
            time.sleep(0.2)

    def _alive(self, arm: Arm) -> bool:
        return "failed" not in self.results.engines[arm.name]

    def _pairs(self, reference: Arm, others: list[Arm]) -> None:
        waiting = [reference, others[0]]
        for arm in waiting:
            self._send_start(arm)
        for number, arm in enumerate(others):
            started = [self._receive_start(each) for each in waiting]
            if reference in waiting and not started[0]:
                raise EngineError(f"{reference.name} did not start: nothing to compare with")
            if started[-1]:
                for cell in self.run.cells:
                    self._cell(cell, [reference, arm])
            self.processes[arm.name].stop()
            if number + 1 == len(others):
                break
            waiting = [others[number + 1]]
            if self.left < self._least():
                self._skip_arms(others[number + 1 :])
                break
            self._send_start(waiting[0])

    def _alone(self, arm: Arm) -> None:
        if self.results.engines and self.left < self._least():
            self._skip_arms([arm])
            return
        self._send_start(arm)
        if self._receive_start(arm):
            for cell in self.run.cells:
                self._cell(cell, [arm])
        self.processes[arm.name].stop()

    def _least(self) -> float:
        """Seconds that an arm needs to start and to measure one cell."""
        engines = 1 if self.run.grouping is Grouping.ALONE else 2
        return self.run.cost.start + self.run.cost.cell(self.run.cells[0], self.run.tokens, engines)

    def _skip_arms(self, arms: list[Arm]) -> None:
        for arm in arms:
            reason = f"no time for its start: {self.left:.0f} s left"
            self.results.skipped.append({"arm": arm.name, "cell": "all", "reason": reason})

    def _options(self, arm: Arm, kv_bytes: int) -> dict[str, Any]:
        run = self.run
        return engine_options(
            arm,
            run.models,
            Sizes(
                batch=max(cell.batch for cell in run.cells),
                context=max(cell.context for cell in run.cells),
                tokens=run.tokens,
            ),
            device=run.device,
            kv_bytes=kv_bytes,
            # Caches have the size given; the share only has to be free at the start.
            memory_share=0.5 if run.grouping is Grouping.ALONE else 0.4,
            seed=run.seed,
            triton_prefill=run.triton_prefill,
            extra=run.extra.get(arm.name, {}) | run.extra.get("all", {}),
        )

    def _cache_room(self, arm: Arm) -> int | None:
        """Most bytes that the caches of an arm may take."""
        run = self.run
        if run.grouping is not Grouping.ALL:
            alone = run.grouping is Grouping.ALONE
            beside = None if alone else self._cache_bytes(run.arms[0])
            return run.room.for_cache(arm.kind, beside)
        others = [other for other in run.arms if other is not arm]
        # Arms that come first get what they want, the last ones what is left.
        before = run.arms[: run.arms.index(arm)]
        return run.room.among(
            [other.kind for other in run.arms],
            taken=sum(
                self._cache_bytes(other) if other in before else LEAST_CACHE for other in others
            ),
        )

    def _send_start(self, arm: Arm) -> None:
        run = self.run
        wanted = need = self._cache_bytes(arm)
        room = self._cache_room(arm)
        if room is not None:
            # What does not fit shows: requests wait, and the cell is not counted.
            need = max(min(need, room), LEAST_CACHE)
        options = self._options(arm, need)
        if self.sockets is not None:
            # The share of memory that vLLM wants for itself counts the weights held elsewhere.
            assert run.room.device is not None
            share = (run.room.target + _OWN_BYTES) / run.room.device
            options = shared_options(options, self.sockets, share)
        self.say(f"{arm.name}: starting, cache {need / 2**30:.2f} GiB")
        self.results.engines[arm.name] = {
            **describe(arm),
            "options": options,
            "cache_wanted_bytes": wanted,
        }
        plain = run.device == "cpu" and arm.kind == "ar"
        self.processes[arm.name].send("start", options=options, plain_cpu=plain)

    def _cache_bytes(self, arm: Arm) -> int:
        run = self.run
        return max(
            run.cache.cache_bytes(arm.kind, arm.rows, cell.batch, cell.context + run.tokens)
            for cell in run.cells
        )

    def _receive_start(self, arm: Arm) -> bool:
        record = self.results.engines[arm.name]
        try:
            record |= self.processes[arm.name].receive("start", max(60.0, self.left))
        except EngineError as error:
            record["failed"] = str(error)
            self.say(str(error))
            self.results.skipped.append({"arm": arm.name, "cell": "all", "reason": str(error)})
            self.processes[arm.name].stop()
            return False
        record["warm_seconds"] = {}
        self.say(f"{arm.name}: up in {record['start_seconds']:.1f} s")
        self.save(self.results)
        return True

    def _warm(self, arm: Arm, temperature: float) -> None:
        """Before an arm's first cell at a temperature: nothing is compiled while timed."""
        seconds = self.results.engines[arm.name]["warm_seconds"]
        if not self.run.warm or f"t{temperature:g}" in seconds:
            return
        seconds[f"t{temperature:g}"] = self.processes[arm.name].call(
            "warm",
            max(60.0, self.left),
            batches=sorted({cell.batch for cell in self.run.cells}),
            temperature=temperature,
            vocab=256,
        )["seconds"]

    def _cell(self, cell: Cell, arms: list[Arm]) -> None:
        groups = len(self.prompts[cell.batch, cell.context])
        expected = groups * self.run.cost.cell(cell, self.run.tokens, len(arms))
        if self.left < expected and self.results.cells:
            reason = f"needs about {expected:.0f} s, {self.left:.0f} s left"
            for name in [arm.name for arm in arms[1:] or arms]:
                self.results.skipped.append({"arm": name, "cell": cell.name, "reason": reason})
            return
        try:
            self._measure_cell(cell, arms)
        except EngineError as error:
            self.say(str(error))
            # The last of a pair is the one that is new.
            failed = error.engine if len(arms) > 2 else arms[-1].name
            reason = {"arm": failed, "cell": cell.name, "reason": str(error)}
            self.results.skipped.append(reason)
            if len(arms) > 2 and failed != arms[0].name:
                self.results.engines[failed]["failed"] = str(error)
                self.processes[failed].stop()
                self._cell(cell, [arm for arm in arms if arm.name != failed])
                return
        self.save(self.results)

    def _measure_cell(self, cell: Cell, arms: list[Arm]) -> None:
        run = self.run
        groups = self.prompts[cell.batch, cell.context]
        limit = max(60.0, self.left)
        for arm in arms:
            self._warm(arm, cell.temperature)
            if arm.ours:
                self.processes[arm.name].call("stats", limit)
        finished = gather([self._group(cell, arms, prompts, limit) for prompts in groups])
        for arm in arms:
            process = self.processes[arm.name]
            finished[arm.name]["plugin"] = process.call("stats", limit) if arm.ours else {}
            finished[arm.name]["memory"] = process.call("memory", limit)
        reference = finished.get("ar") or self.alone_ar.get(cell.name)
        asked = Asked(groups, cell.temperature, run.seed)
        before: dict[int, tuple[str, Sequence[int]]] = {}
        if "ar" in finished and finished["ar"]["at_once"]:
            before = self.own_texts.add(cell.name, asked, finished["ar"]["outputs"])
        asked = self._ask(cell, arms, finished, reference, asked, before, limit)
        for arm in arms:
            got = finished[arm.name]
            record = {
                **cell.to_dict(),
                "arm": arm.name,
                "with": [other.name for other in arms if other is not arm],
                **self._figures(got),
            }
            if not got["at_once"]:
                reason = (
                    "a request ended before all had begun: the cache is too small for the batch, "
                    "or --tokens for its prompts"
                )
                self.results.skipped.append({"arm": arm.name, "cell": cell.name, "reason": reason})
                continue
            if arm.kind != "ar" and reference is not None:
                record["texts"] = compare(
                    got["outputs"],
                    reference["outputs"],
                    dtype=run.dtype,
                    doubts=asked.of(reference["outputs"]) if self._comparable(arm, cell) else None,
                    exact=self._exactly(asked, reference["outputs"]),
                )
                if run.grouping is not Grouping.ALONE:
                    record["over_ar"] = rate_ratio(got["rounds"], finished["ar"]["rounds"]) | {
                        "formed": "interleaved rounds of the engines"
                    }
            if arm.kind == "ar" and before:
                record["ar_again"] = compare_again(
                    before,
                    got["outputs"],
                    dtype=run.dtype,
                    doubts=asked.of(got["outputs"]),
                    exact=self._exactly(asked, got["outputs"]),
                )
            self.results.cells.append(record)
            self.say(_line(record))
        if cell is run.cells[0]:
            for arm in arms:
                if arm.name in run.profile and arm.name not in self.results.traces:
                    self._profile(arm, cell, limit)

    def _exactly(self, asked: Asked, own: Texts) -> Exact | None:
        """Distances without rounding, where the engines round and the function is known."""
        if self.exact is None or self.run.dtype == "float32":
            return None
        ask = asked.exactly(own, self.exact)

        def distance(request: int, place: int, token: int) -> float | None:
            if self.exact is None or self.left <= 0:
                return None
            try:
                return ask(request, place, token)
            except Exception as error:  # whatever Transformers raises, what is measured is kept
                reason = f"differences are not put to the small target in float32: {error!r}"
                self.say(reason)
                self.results.skipped.append({"arm": "all", "cell": "all", "reason": reason})
                self.exact = None
                return None

        return distance

    def _group(
        self, cell: Cell, arms: list[Arm], prompts: list[list[int]], limit: float
    ) -> dict[str, dict[str, Any]]:
        """Let the arms take turns over one batch of prompts; what each has done, by name."""
        run = self.run
        for arm in arms:
            self.processes[arm.name].call(
                "begin",
                limit,
                prompts=prompts,
                tokens=run.tokens,
                temperature=cell.temperature,
                seed=run.seed,
            )
        rounds: dict[str, list[tuple[int, float]]] = {arm.name: [] for arm in arms}
        for turn in range(run.rounds):
            # The order alternates, so that neither engine always follows the other.
            for arm in arms if turn % 2 == 0 else arms[::-1]:
                got = self.processes[arm.name].call(
                    "advance", limit, share=(turn + 1) / run.rounds, discard=run.discard
                )
                rounds[arm.name].append((got["tokens"], got["seconds"]))
        return {
            arm.name: self.processes[arm.name].call("finish", limit, complete=run.complete)
            | {"rounds": rounds[arm.name]}
            for arm in arms
        }

    def _comparable(self, arm: Arm, cell: Cell) -> bool:
        """Whether differences from AR's texts can be classified.

        vLLM's own speculation samples with noise of its own.
        """
        return cell.temperature == 0 or (arm.ours and self.run.grouping is not Grouping.ALONE)

    def _ask(
        self,
        cell: Cell,
        arms: list[Arm],
        finished: dict[str, dict[str, Any]],
        reference: dict[str, Any] | None,
        asked: Asked,
        before: Mapping[int, tuple[str, Sequence[int]]],
        limit: float,
    ) -> Asked:
        """AR's doubts where texts differ from its own: it writes those groups once more.

        The texts are the arms' and, by request, AR's own of cells `before`. Puts the answers into
        `asked`, or returns those of an AR that is gone.
        """
        run = self.run
        if reference is None:
            return asked
        alone = run.grouping is Grouping.ALONE
        if alone and arms[-1].kind != "ar":
            return reference["asked"]
        own = reference["outputs"]
        texts = [
            finished[arm.name]["outputs"]
            for arm in arms
            if arm.kind != "ar" and self._comparable(arm, cell)
        ]
        texts.append([before[i][1] if i in before else text for i, text in enumerate(own)])
        questions = asked.questions(texts, own)
        if alone and cell.temperature == 0:
            # Its engine is gone when the others' texts are there.
            questions = {
                number: {"prompts": prompts, "tokens": run.tokens}
                for number, prompts in enumerate(asked.groups)
            }
            self.alone_ar[cell.name] = finished["ar"] | {"asked": asked}
        for number, question in questions.items():
            asked.answers[number] = self.processes["ar"].call("doubts", limit, **question)
        return asked

    def _figures(self, got: dict[str, Any]) -> dict[str, Any]:
        requests = got["step_requests"]
        return {
            **throughput(got["step_seconds"], got["step_tokens"]),
            "steps": len(got["step_seconds"]),
            "requests_per_step": sum(requests) / len(requests) if requests else 0.0,
            "accepted_length": accepted_length(got["request_passes"], got["request_tokens"]),
            "prefill_seconds": got["prefill_seconds"],
            "round_tokens_per_second": [
                tokens / seconds if seconds else 0.0 for tokens, seconds in got["rounds"]
            ],
            "plugin": got["plugin"],
            "memory": got["memory"],
            "outputs": got["outputs"],
        }

    def _profile(self, arm: Arm, cell: Cell, limit: float) -> None:
        from .timeline import read_trace, summarise

        process = self.processes[arm.name]
        prompts = self.prompts[cell.batch, cell.context][0]
        process.call(
            "begin", limit, prompts=prompts, tokens=self.run.tokens,
            temperature=cell.temperature, seed=self.run.seed,
        )  # fmt: skip
        process.call("advance", limit, share=0.1, discard=0)
        file = self.run.logs / f"{arm.name}.trace.json"
        got = process.call("profile", limit, steps=8, trace=str(file.resolve()))
        process.call("finish", limit, complete=False)
        if got["steps"]:
            events = read_trace(file)
            self.results.traces[arm.name] = {
                **summarise(events, got["steps"]),
                "file": str(file),
                "cell": cell.name,
                "ranges": got["ranges"],
            }

    def _ratios(self) -> None:
        """Ratios between arms of a cell, each by way of the AR that it was measured with."""
        by_cell: dict[str, dict[str, dict[str, Any]]] = {}
        for record in self.results.cells:
            by_cell.setdefault(record["cell"], {}).setdefault(record["arm"], record)
        for found in by_cell.values():
            speed = {}
            for name, record in found.items():
                if "over_ar" not in record and name != "ar" and "ar" in found:
                    base = found["ar"]["tokens_per_second"]
                    ratio = record["tokens_per_second"] / base if base else None
                    record["over_ar"] = {
                        "ratio": ratio,
                        "low": None,
                        "high": None,
                        "formed": "one engine after another, in one run",
                    }
                speed[name] = record.get("over_ar", {}).get("ratio") or (name == "ar")
            stock = {name: x for name, x in speed.items() if name.startswith("stock") and x}
            best = max(stock, key=lambda name: stock[name], default=None)
            trees = {name: x for name, x in speed.items() if name.startswith("ddtree") and x}
            tree = max(trees, key=lambda name: trees[name], default=None)
            for name, record in found.items():
                if name == "ar" or not speed[name]:
                    continue
                record["over"] = {
                    other: speed[name] / speed[other]
                    for other in (best, tree)
                    if other is not None and other != name
                }
                if best is not None:
                    record["best_stock"] = best


def gather(groups: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What arms did over one group of prompts after another, as if it had been one."""
    found: dict[str, dict[str, Any]] = {}
    for name in groups[0]:
        parts = [group[name] for group in groups]
        found[name] = {
            key: [item for part in parts for item in part[key]]
            for key, value in parts[0].items()
            if isinstance(value, list)
        }
        found[name]["prefill_seconds"] = sum(part["prefill_seconds"] for part in parts)
        found[name]["at_once"] = all(part["at_once"] for part in parts)
    return found


def _line(record: dict[str, Any]) -> str:
    length = record["accepted_length"]["token_weighted"]
    text = (
        f"{record['cell']:>16} {record['arm']:<12} {record['tokens_per_second']:8.1f} tok/s "
        f"{record['ms_per_step']:8.2f} ms/step {length:5.2f} tok/pass"
    )
    ratio = record.get("over_ar", {}).get("ratio")
    if ratio:
        text += f"  {ratio:5.2f}x AR"
    texts = record.get("texts")
    if texts:
        text += f"  equal {in_words(texts, '{} BEYOND A TIE')}"
    again = record.get("ar_again")
    if again:
        text += f"  equal to itself of {', '.join(again['cells'])}: {in_words(again)}"
    return text


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one move."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
