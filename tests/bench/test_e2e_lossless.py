# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.e2e.lossless`: its parts, its judgement, and a small run on a CPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.e2e.arms import Models, parse_arms
from benchmarks.e2e.client import EngineError
from benchmarks.e2e.compare import Doubt
from benchmarks.e2e.doubts import NEUTRAL, _Filters, noise_of, shift_needed, shifts_in_float32
from benchmarks.e2e.lossless import Lossless, Settings, _doubts, content, markdown
from benchmarks.e2e.memory import CacheShape
from benchmarks.e2e.parts import PARTS, TOGETHER, Part, PartError, Request, Sizes, next_turns
from benchmarks.e2e.serving import StepLog, add_steps

ROOT = Path(__file__).parents[2]
SIZES = Sizes(budget=63, tokens=64, batch=32, context=2048, block=144, chunk=256, seeds=12)


def cut(count: int, length: int) -> list[list[int]]:
    """Prompts of a running number."""
    cut.next += count * length  # type: ignore[attr-defined]
    first = cut.next - count * length  # type: ignore[attr-defined]
    return [list(range(first + i * length, first + (i + 1) * length)) for i in range(count)]


cut.next = 10  # type: ignore[attr-defined]


def test_parts_ask_for_what_they_are_for() -> None:
    found = {name: build(SIZES, cut) for name, build in PARTS.items()}
    assert sorted(len(r.prompt) for r in found["lengths"].requests) == list(range(1, 129))
    assert len({len(batch) for batch in found["lengths"].batches}) > 4
    assert [len(batch) for batch in found["batches"].batches] == list(TOGETHER)
    assert all(r.after == 0 for r in found["batches"].requests)
    assert len({r.tokens for r in found["batches"].batches[-1]}) > 4
    cold, again, shared = found["prefix"].batches
    assert [r.prompt for r in again[::-1]] == [r.prompt for r in cold]
    starts = {tuple(r.prompt[: 3 * 144]) for r in cold}
    assert all(r.hit and tuple(r.prompt[: 3 * 144]) in starts for r in shared)
    assert {len(r.prompt) - 3 * 144 for r in shared} >= {1, 9}
    for batch in found["mixed"].batches:
        late = [r for r in batch if r.after]
        assert late and all(len(r.prompt) >= 3 * 256 for r in late)
        assert any(not r.after and r.tokens >= 128 for r in batch)
    options = [r.sampling for r in found["seeded"].requests]
    for key in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        assert sum(key in x for x in options) >= 12
    assert any(x["temperature"] == 0 for x in options)
    # Enough for 20,000 tokens, though every tenth is lost behind a tie.
    tokens = sum(r.tokens for part in found.values() for r in part.requests)
    assert tokens > 22_000
    assert all(
        len(r.prompt) + r.tokens <= SIZES.context + SIZES.tokens
        for part in found.values()
        for r in part.requests
    )


def test_a_next_turn_goes_on_from_an_answer_that_filled_a_block() -> None:
    first = PARTS["turns"](SIZES, cut)
    answers = [[7] * r.tokens for r in first.requests]
    part = next_turns(SIZES, cut, first, answers)
    assert part.follows == first.name
    for request, before, answer in zip(part.requests, first.requests, answers, strict=True):
        assert request.prompt[: len(before.prompt) + len(answer)] == [*before.prompt, *answer]
        # Two blocks end inside the answer, and enough before it: one may be dropped.
        assert 3 * 144 < len(before.prompt) < 4 * 144
        assert len(before.prompt) + len(answer) >= 5 * 144


def test_a_context_without_room_is_named() -> None:
    small = Sizes(budget=3, tokens=4, batch=3, context=100, block=128, chunk=64, seeds=1)
    for name in ("prefix", "turns", "mixed"):
        with pytest.raises(PartError, match="--context 100"):
            PARTS[name](small, cut)


def test_regrouped_requests_are_the_same_in_other_batches() -> None:
    part = PARTS["batches"](SIZES, cut)
    other = part.regrouped(11)
    assert [r.prompt for batch in other for r in batch][::-1] == [r.prompt for r in part.requests]
    assert {len(batch) for batch in other[:-1]} == {11}


def test_shift_of_a_greedy_and_of_a_plainly_sampled_token() -> None:
    logits = {1: 5.0, 2: 4.5, 3: 1.0}
    greedy = {"temperature": 0.0}
    assert shift_needed(logits, [9], [], greedy, 2) == pytest.approx(0.5)
    assert shift_needed(logits, [9], [], greedy, 1) == 0
    assert shift_needed(logits, [9], [], greedy, 8) is None
    noise = noise_of(4, 2, [1, 2, 3])
    scores = {token: logits[token] / 0.5 + noise[token] for token in logits}
    sampling = {"temperature": 0.5, "seed": 4}
    for token in logits:
        needed = max(scores.values()) - scores[token]
        got = shift_needed(logits, [9, 9], [9], sampling, token)
        assert got == pytest.approx(needed, abs=1e-5)


def test_penalties_are_those_of_vllm() -> None:
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    logits = {0: 2.0, 1: 3.0, 2: -1.0, 3: 2.5}
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    row = torch.tensor([[logits[token] for token in range(4)]])
    column = [torch.tensor([options[k]]) for k in
              ("presence_penalty", "frequency_penalty", "repetition_penalty")]  # fmt: skip
    want = apply_all_penalties(row, torch.tensor([[2, 3]]), *column, [[1, 1, 2]])[0]
    best = float(want.max())
    for token in range(4):
        got = shift_needed(logits, [2, 3], [1, 1, 2], {"temperature": 0.0, **options}, token)
        assert got == pytest.approx(best - float(want[token]), abs=1e-5)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.8, "min_p": 0.02},
}


@pytest.mark.parametrize("name", FILTERS)
def test_no_shift_is_needed_for_what_vllm_draws_and_some_for_anything_else(name: str) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(0)
    options = FILTERS[name]
    for seed in range(20):
        row = 2 * torch.randn(1, 40, generator=generator)
        logits = dict(enumerate(row[0].tolist()))
        kept = row / 0.9
        if "min_p" in options:
            below = kept < kept.max() + math.log(options["min_p"])
            kept = kept.masked_fill(below, -math.inf)
        top_k = torch.tensor([options["top_k"]]) if "top_k" in options else None
        top_p = torch.tensor([options["top_p"]]) if "top_p" in options else None
        kept = apply_top_k_top_p_pytorch(kept.clone(), top_k, top_p)[0]
        noise = noise_of(seed, 3, list(logits))
        drawn = max(logits, key=lambda token: float(kept[token]) + noise[token])
        sampling = {"temperature": 0.9, "seed": seed, **options}
        shifts = {token: shift_needed(logits, [1, 2], [3, 4], sampling, token) for token in logits}
        assert shifts[drawn] == 0
        assert min(x for token, x in shifts.items() if token != drawn) > 0
        # An excluded token must come back first, however large its noise.
        out = [token for token in logits if kept[token] == -math.inf]
        assert bool(out) == (name != "none")
        worst = min(logits, key=lambda token: logits[token])
        assert shifts[worst] > 1


def test_a_token_at_a_filters_edge_is_a_tie() -> None:
    # The third token misses the two best by 0.01, and its noise would let it win.
    logits = {1: 3.0, 2: 1.01, 3: 1.0}
    seed = next(
        s for s in range(5000)
        if (n := noise_of(s, 0, [1, 2, 3]))[3] + 1.0 > max(n[1] + 3.0, n[2] + 1.01) + 1
    )  # fmt: skip
    sampling = {"temperature": 1.0, "seed": seed, "top_k": 2}
    assert shift_needed(logits, [9], [], sampling, 3) == pytest.approx(0.01)
    # By mass: the best token has 0.7 of it but for rounding.
    logits = {1: math.log(0.7001), 2: math.log(0.2999)}
    seed = next(
        s for s in range(5000)
        if (n := noise_of(s, 0, [1, 2]))[2] + logits[2] > n[1] + logits[1] + 1
    )  # fmt: skip
    sampling = {"temperature": 1.0, "seed": seed, "top_p": 0.7}
    needed = shift_needed(logits, [9], [], sampling, 2)
    assert needed == pytest.approx(0.0001 / (0.7 * 0.3), rel=0.01)


def test_a_token_at_the_edge_of_a_mass_may_change_places_with_its_neighbours_too() -> None:
    """The third token is 0.05 behind the second; with that one behind it, it would be in."""
    shares = {1: 0.89, 2: 0.03 * math.exp(0.05), 3: 0.03}
    shares[4] = shares[5] = (1 - sum(shares.values())) / 2
    logits = {token: math.log(share) for token, share in shares.items()}
    seed = next(
        s for s in range(5000)
        if (n := noise_of(s, 0, [1, 2, 3, 4, 5]))[3] + logits[3]
        > max(n[token] + logits[token] for token in (1, 2, 4, 5)) + 1
    )  # fmt: skip
    sampling = {"temperature": 1.0, "seed": seed, "top_p": 0.9}
    assert shift_needed(logits, [9], [], sampling, 3) == pytest.approx(0.05)
    # The second is drawn from above the limit and is out where the third comes before it.
    filters = _Filters(logits, {**NEUTRAL, "top_p": 0.9})
    assert filters.joins(2) == 0 and filters.leaves(2) == pytest.approx(0.05)
    # By mass alone it would be far: from 0.9215 to 0.9.
    assert filters.leaves(3) == filters.joins(1) == 0
    assert filters.joins(4) == pytest.approx(math.log(shares[2] / shares[4]))
    # The best one leaves when all others together have the limit.
    odds = [share / (1 - share) for share in (0.9, 0.11)]
    assert filters.leaves(1) == pytest.approx(math.log(odds[0] / odds[1]))


def _places(scores: dict[int, float], options: dict[str, Any], token: int, first: bool) -> bool:
    """Whether vLLM's filters let a token pass; it comes `first` or last of equals."""
    best = max(scores.values())
    rank = {t: (-round(v, 9), (t != token) == first) for t, v in scores.items()}
    order = sorted(scores, key=lambda t: rank[t])
    if options["min_p"]:
        edge = best + math.log(options["min_p"])
        order = [t for t in order if scores[t] > edge + (-1e-9 if t != token or first else 1e-9)]
    if options["top_k"]:
        order = order[: options["top_k"]]
    if token not in order:
        return False
    weights = [math.exp(scores[t] - best) for t in order]
    before = sum(weights[: order.index(token)]) / sum(weights)
    return before < options["top_p"] + (1e-9 if first else -1e-9)


def _least_shift(
    scores: dict[int, float], options: dict[str, Any], token: int, passes: bool
) -> float:
    """By trying: each score moves up, down, or to the token's edge; bisected."""

    def reached(shift: float) -> bool:
        own = scores[token] + (shift / 2 if passes else -shift / 2)
        edges = [own, own - math.log(options["min_p"] or 1.0)]
        others = [t for t in scores if t != token]
        moves = [
            [v - shift / 2, v + shift / 2, *(x for x in edges if abs(x - v) <= shift / 2)]
            for v in (scores[t] for t in others)
        ]
        return any(
            _places({**dict(zip(others, moved, strict=True)), token: own}, options, token, passes)
            == passes
            for moved in itertools.product(*moves)
        )

    low, high = 0.0, 8.0
    if not reached(high):
        return math.inf
    if reached(0.0):
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@pytest.mark.parametrize(
    "names", [["top_p"], ["top_k"], ["min_p"], ["top_k", "top_p"]], ids=" and ".join
)
def test_shifts_of_filters_are_the_least_ones(names: list[str]) -> None:
    generator = random.Random(0)
    for _ in range(12):
        scores = {token: generator.gauss(0, 0.5) for token in range(5)}
        scores[0] = scores[generator.randrange(5)]
        values: dict[str, list[Any]] = {
            "top_p": [0.3, 0.7, 0.9],
            "top_k": [1, 2, 3, 4],
            "min_p": [0.2, 0.5, 0.9],
        }
        options = {**NEUTRAL, **{name: generator.choice(values[name]) for name in names}}
        filters = _Filters(scores, options)
        for token in scores:
            for passes, found in ((True, filters.joins(token)), (False, filters.leaves(token))):
                least = _least_shift(scores, options, token, passes)
                assert (found if found < 8 else math.inf) == pytest.approx(least, abs=1e-4)


def test_a_token_outside_top_k_must_enter_the_mass_too() -> None:
    """Near the last of the best 40, which are three times as many as have the mass."""
    scores = {token: -0.25 * token for token in range(60)}
    filters = _Filters(scores, {**NEUTRAL, "top_k": 40, "top_p": 0.95})
    assert filters.joins(40) > filters.joins(39) > 1.5
    # Logits of tokens that are forbidden.
    filters = _Filters({0: 1.0, 1: -math.inf}, {**NEUTRAL, "top_k": 1, "top_p": 0.95})
    assert filters.joins(1) == math.inf


class FakeScheduler:
    """Two requests: one prompt of 5 in two pieces beside one that decodes."""

    def __init__(self) -> None:
        self.requests = {
            "long": SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=5),
            "old": SimpleNamespace(num_computed_tokens=7, num_prompt_tokens=4),
        }

    def schedule(self, rows: dict[str, int], drafts: dict[str, list[int]]) -> Any:
        for name, count in rows.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=rows, scheduled_spec_decode_tokens=drafts, preempted_req_ids=None
        )

    def update_from_output(self, scheduled: Any, output: Any) -> str:
        return "updated"


def test_steps_are_told_apart() -> None:
    scheduler = FakeScheduler()
    log = StepLog(scheduler)
    steps = [({"long": 3, "old": 4}, {"old": [1, 2, 3]}), ({"long": 2, "old": 1}, {})]
    steps.append(({"long": 1, "old": 1}, {}))
    stats = SimpleNamespace(runtime_mode="CUDAGraphMode.FULL", num_paddings=2)
    for rows, drafts in steps:
        scheduled = scheduler.schedule(rows, drafts)
        output = SimpleNamespace(cudagraph_stats=stats)
        assert scheduler.update_from_output(scheduled, output) == "updated"
    found = log.take()
    assert found["steps"] == 3 and found["mixed"] == 2
    assert found["chunks"] == found["mixed_chunks"] == found["mixed_trees"] == 1
    assert found["decoding"] == {"2": 1}
    assert found["graphs"] == found["padded_graphs"] == {"FULL": 3}
    total = add_steps([found, found])
    assert total["steps"] == 6 and total["graphs"] == {"FULL": 6}
    log.reset()
    assert log.take()["steps"] == 0


class FakeEngine:
    """Answers with token 1, but for one place of one engine; logits put 1 and 2 `gap` apart."""

    best = 5.0
    gap = 0.0
    cold = False
    late = False

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def send(self, command: str, **arguments: Any) -> None:
        self.options = arguments.get("options", {})

    def receive(self, command: str, timeout: float) -> dict[str, Any]:
        return {
            "start_seconds": 1.0,
            "memory": {"cache_block_tokens": 16},
            "graphs": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        }

    def call(self, command: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        if command == "stats":
            return {"target_passes": 9, "mean_accepted_length": 2.0, "chain_fallbacks": 1}
        if self.late:
            raise EngineError(f"{self.name}: serve took more than 1 s", self.name)
        requests = arguments["requests"]
        outputs = [[1] * r["tokens"] for r in requests]
        if self.name != "ar":
            outputs[0][-1] = 2
        sizes = {str(len(requests)): 3}
        return {
            "outputs": outputs,
            "cached": [0 if self.cold else 16 for _ in requests],
            "scores": [
                {str(p): [(1, self.best), (2, self.best - self.gap)] for p in r.get("places", ())}
                for r in requests
            ],
            "steps": {
                "steps": 9, "mixed": 2, "chunks": 3, "mixed_chunks": 1, "mixed_trees": 1,
                "preempted": 0, "decoding": sizes, "graphs": {"FULL": 5},
                "padded_graphs": {"FULL": 2},
            },
        }  # fmt: skip

    def stop(self, timeout: float = 0) -> None:
        self.name += " stopped"


def judged(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    parts: list[str],
    vocab_size: int = 4096,
    function: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    for key, value in changes.items():
        monkeypatch.setattr(FakeEngine, key, value)
    monkeypatch.setattr("benchmarks.e2e.lossless.EngineProcess", FakeEngine)
    settings = Settings(
        arms=parse_arms("weaver", 7, [], 15), models=Models("t", "d", "a", function=function),
        parts=parts,
        device="cuda", tokens=8, batch=8, context=256, chunk=32, seeds=2, batched_tokens=None,
        tie=None, least_tokens=50, minutes=5.0, graphs=True, environment={}, extra={},
        logs=tmp_path, vocab_size=vocab_size,
    )  # fmt: skip
    config = json.loads((ROOT / "vllm_weaver/demo/models/target/config.json").read_text())
    shape = CacheShape.of(config, None, 2)
    run = Lossless(settings, cut, shape, lambda _: None, lambda _: None, time.monotonic())
    data = content(settings, run.run(), 1.0)
    options = data["engines"]["weaver-7"]["options"]
    assert options["enable_prefix_caching"] and options["max_num_batched_tokens"] == 512
    assert all(x["options"]["logprobs_mode"] == "raw_logits" for x in data["engines"].values())
    return json.loads(json.dumps(data))


def test_a_tie_passes_and_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = ["batches", "prefix", "turns", "mixed"]
    data = judged(monkeypatch, tmp_path, parts, gap=0.05)
    assert data["passed"], data["failures"]
    names = [part["part"] for part in data["parts"]]
    assert names == ["batches", "prefix", "turns", "next turns", "mixed"]
    ours, plain = data["totals"]["weaver-7"], data["totals"]["ar again"]
    batches = sum(len(part["batches"]) for part in data["parts"])
    # The first request of every batch differs in its last token.
    assert ours["ties"] == batches and ours["beyond_a_tie"] == 0
    assert ours["largest_distance"] == pytest.approx(0.05)
    assert plain["ties"] == 0 and plain["tokens_compared"] == ours["tokens_compared"] + batches
    assert data["parts"][1]["arms"]["weaver-7"]["cache"]["hits"] > 0
    table = markdown(data)
    assert "| batches | weaver-7 |" in table and "| **all** | ar again |" in table
    assert ours["ties_of_one_step"] == 0


def test_one_step_of_the_logits_is_a_tie_where_they_are_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = judged(monkeypatch, tmp_path, ["batches"], best=17.0, gap=0.125)
    assert data["passed"], data["failures"]
    texts = data["parts"][0]["arms"]["weaver-7"]["texts"]
    assert texts["ties"] == texts["ties_of_one_step"] == 6 and texts["tie_limit"] == 0.1
    assert {(d["logit"], d["step"]) for d in texts["differences"]} == {(17.0, 0.125)}
    assert data["totals"]["weaver-7"]["ties_of_one_step"] == 6
    assert "| 6 (6, 0) | 0.1250 |" in markdown(data)


@pytest.mark.parametrize(("vocab_size", "most"), [(4096, 4096), (248_320, 16_384), (300, 300)])
def test_top_p_is_judged_by_the_mass_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vocab_size: int, most: int
) -> None:
    """Its 1,024 best tokens alone are not all of a flat distribution's mass: the limit moves."""
    asked: dict[str, int] = {}
    serve = FakeEngine.call

    def call(self: FakeEngine, name: str, timeout: float, **given: Any) -> Any:
        for request in given.get("requests", ()):
            if "show" in request:
                filters = [k for k in ("top_p", "top_k", "min_p") if k in request["sampling"]]
                asked[" ".join(filters)] = request["show"].get("logprobs", 0)
        return serve(self, name, timeout, **given)

    ways = [{}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.1}]
    requests = [
        Request([1, 2], 4, {"temperature": 1.0, "seed": 1, **way}, label=str(way)) for way in ways
    ]
    batches = [[request] for request in requests]
    part = Part("seeded", "", batches)
    monkeypatch.setitem(PARTS, "seeded", lambda *_: part)
    monkeypatch.setattr(FakeEngine, "call", call)
    data = judged(monkeypatch, tmp_path, ["seeded"], vocab_size, gap=0.05)
    assert data["engines"]["ar"]["options"]["max_logprobs"] == most
    some = min(1024, most)
    assert asked == {"": 0, "top_p": most, "top_p top_k": some, "min_p": some}


def test_doubts_of_sampled_texts_know_their_logits() -> None:
    sampling = {"temperature": 0.5, "seed": 4}
    part = Part("p", "title", [[Request([9, 9], 3, sampling)]])
    own, scores = [[5, 7, 8]], {(0, 1): [(7, -17.0), (6, 16.5)]}
    found, missing = _doubts(part, own, scores)([(0, 1, 6), (0, 2, 6)])
    assert missing is None and found is not None and found.gap is None
    needed = shift_needed({7: -17.0, 6: 16.5}, [9, 9], [5], sampling, 6)
    assert found == Doubt(None, needed, -17.0, 0.5)  # type: ignore[arg-type]
    # A token that plain vLLM did not show.
    assert _doubts(part, own, scores)([(0, 1, 4)]) == [None]


class FakeTarget:
    """Logits in float32 that have tokens 1 and 2 `lead` apart, and the rest far below."""

    lead = 0.0
    asked: list[list[int]]

    def __init__(self, directory: Path) -> None:
        FakeTarget.asked = []

    def logits(self, before: list[int]) -> list[float]:
        self.asked.append(before)
        return [-9.0, 5.0, 5.0 - self.lead, *[-9.0] * 61]


def test_shifts_in_float32_are_those_of_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeTarget, "lead", 0.5)
    target: Any = FakeTarget(tmp_path)
    logits = dict(enumerate(target.logits([])))
    sampling = {"temperature": 0.8, "seed": 3, "top_p": 0.9}
    want = [shift_needed(logits, [7, 8], [9], sampling, token) for token in (1, 2)]
    assert shifts_in_float32(target, [7, 8], [9], sampling, [1, 2, 64]) == [*want, None]
    assert target.asked[-1] == [7, 8, 9]
    assert shifts_in_float32(target, [7], [], {"temperature": 0.0}, [2, 1]) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("lead", "kind"), [(0.05, "tie"), (-0.05, "tie"), (0.4, "beyond a tie"), (-0.4, "beyond a tie")]
)
def test_two_tokens_near_in_float32_lie_between_two_engines_roundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lead: float, kind: str
) -> None:
    """Else both distances say which engine is off: that of the token that has one."""
    monkeypatch.setattr("benchmarks.e2e.lossless.ExactTarget", FakeTarget)
    monkeypatch.setattr(FakeTarget, "lead", lead)
    data = judged(monkeypatch, tmp_path, ["batches"], gap=0.4, function="small")
    texts = data["parts"][0]["arms"]["weaver-7"]["texts"]
    distances = {"plain": max(0.0, -lead), "ours": max(0.0, lead)}
    for difference in texts["differences"]:
        assert difference["kind"] == kind and difference["distance"] == pytest.approx(0.4)
        assert difference["float32"] == pytest.approx(distances)
        assert difference["exact"] == pytest.approx(0.4 if kind != "tie" else 0.05)
        assert len(difference["replay"]["best"]) > 1
    tied = kind == "tie"
    assert texts["ties_in_float32"] == data["totals"]["weaver-7"]["ties_in_float32"] == 6 * tied
    assert data["passed"] is tied and data["skipped"] == []
    assert f"| {6 * tied} (0, {6 * tied}) | 0.4000 |" in markdown(data)


def test_a_run_goes_on_where_the_small_target_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    data = judged(monkeypatch, tmp_path, ["batches"], gap=0.4, function=missing)
    texts = data["parts"][0]["arms"]["weaver-7"]["texts"]
    assert texts["beyond_a_tie"] == 6 and len(data["skipped"]) == 1
    assert all(d["exact"] is None and "float32" not in d for d in texts["differences"])


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("ours", [2, 3])
def test_what_is_no_tie_can_be_replayed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampling: dict[str, Any], ours: int
) -> None:
    """Token 3 is not among plain vLLM's scores: then nothing is classified."""
    serve = FakeEngine.call

    def call(self: FakeEngine, name: str, timeout: float, **given: Any) -> Any:
        answer = serve(self, name, timeout, **given)
        for request, scores in zip(
            given.get("requests", ()), answer.get("scores", ()), strict=True
        ):
            if self.name == "ar" or request.get("places"):
                logprobs = request.get("show", {}).get("logprobs", 0)
                more = [(100 + i, -20.0 - i) for i in range(min(logprobs, 80))]
                scores |= {place: [*more, *known] for place, known in scores.items()}
            if self.name != "ar":
                answer["outputs"][0][-1] = ours
        return answer

    # A seed whose noise has plain vLLM's token far ahead of ours.
    seed = next(s for s in range(99) if (n := noise_of(s, 4, [1, 2]))[1] > n[2] + 1)
    options = {"temperature": 1.0, "seed": seed, **sampling}
    part = Part("batches", "", [[Request([7, 8], 4, options, label="one")]])
    monkeypatch.setitem(PARTS, "batches", lambda *_: part)
    monkeypatch.setattr(FakeEngine, "call", call)
    monkeypatch.setattr("benchmarks.e2e.lossless.ExactTarget", FakeTarget)
    monkeypatch.setattr(FakeTarget, "lead", 0.4)
    data = judged(monkeypatch, tmp_path, ["batches"], gap=0.4, function="small")
    (difference,) = data["parts"][0]["arms"]["weaver-7"]["texts"]["differences"]
    assert difference["kind"] == ("beyond a tie" if ours == 2 else "not classified")
    assert difference["label"] == "one" and difference["float32"]["plain"] == 0
    assert difference["float32"]["ours"] > 0.4 and FakeTarget.asked[-1] == [7, 8, 1, 1, 1]
    best = difference["replay"].pop("best")
    assert best[:2] == [[1, 5.0], [2, 4.6]] and len(best) == 64
    assert best[2] == [100, -20.0]
    # Of its own engine, too, whose scores are the same ones here.
    assert difference["replay"].pop("our_best") == best
    assert difference["replay"].pop("our_logits") == difference["replay"]["logits"]
    assert difference["replay"] == {
        "prompt": [7, 8],
        "before": [1, 1, 1],
        "plain": 1,
        "ours": ours,
        "sampling": options,
        "logits": [5.0, 4.6 if ours == 2 else None],
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gap": 0.4}, "batches: weaver-7: 6 beyond a tie"),
        ({"best": 17.0, "gap": 0.25}, "batches: weaver-7: 6 beyond a tie"),
        ({"gap": 0.125}, "batches: weaver-7: 6 beyond a tie"),
        ({"cold": True}, "prefix: ar: 12 prompts were not found in the prefix cache"),
        ({"late": True}, "serve took more than"),
    ],
)
def test_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    data = judged(monkeypatch, tmp_path, ["batches", "prefix"], **changes)
    assert not data["passed"]
    assert any(reason in failure for failure in data["failures"]), data["failures"]
    if "late" in changes:
        assert {"batches: not run to its end", "prefix: not run to its end"} <= {*data["failures"]}
        assert "Failed: " in markdown(data)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the small run is a test for a CPU")
def test_small_run_on_a_cpu(tmp_path: Path) -> None:
    """One part, since kernels are interpreted; `--smoke` alone runs all but the longest."""
    command = [sys.executable, "-m", "benchmarks.e2e.lossless", "--smoke", "--out", str(tmp_path)]
    command += ["--parts", "batches", "--least-tokens", "15"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    logs = "\n".join(file.read_text()[-2000:] for file in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = json.loads((tmp_path / "lossless.json").read_text())
    assert found["passed"] and found["failures"] == []
    parts = {part["part"]: part["arms"] for part in found["parts"]}
    assert set(parts) == {"batches"}
    for arms in parts.values():
        texts = arms["weaver-3"]["texts"]
        # Float32: every token is plain vLLM's.
        assert texts["equal_requests"] == texts["requests"]
        assert arms["weaver-3"]["plugin"]["mean_accepted_length"] > 1
    assert parts["batches"]["weaver-3"]["texts"]["requests"] == 6
    assert found["totals"]["weaver-3"]["tokens_compared"] >= 15
