# SPDX-License-Identifier: Apache-2.0
"""Trees are as large as the batch, the measured times and the observed acceptance recommend."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from replay import plan_drafter
from running import Plain, TreeEngine, assert_same, greedy, tokens
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_weaver.engine import compat, stats
from vllm_weaver.engine.config import tree_sizes, with_all_widths
from vllm_weaver.engine.scheduler import decode_size
from vllm_weaver.engine.sizes import (
    LEAST_EVERY,
    LEAST_PASSES,
    LEAST_STEPS,
    MARGIN,
    MEMORY,
    MOST_EVERY,
    MOST_PASSES,
    MOST_STEPS,
    PROBE_COST,
    PROBE_COST_OF_PLAIN,
    PROBE_SECONDS,
    SEEN_SECONDS,
    TRIED_STEPS,
    Acceptance,
    Probes,
    SeenSteps,
    StepTimes,
    best_nodes,
    best_unseen,
)
from vllm_weaver.engine.speculator import WeaverSpeculator
from vllm_weaver.engine.stats import stats_file, times_file
from vllm_weaver.engine.worker import TreeWorkerMixin


@pytest.mark.parametrize("budget", [1, 5, 12, 63, 100, 255])
@pytest.mark.parametrize("rows", [2, 40, 256, 1024])
@pytest.mark.parametrize("most", [1, 4, 33, 256])
def test_every_batch_has_one_size_and_stays_within_its_rows(
    budget: int, rows: int, most: int
) -> None:
    sizes = tree_sizes(budget, most, rows)
    assert [first for first, _, _ in sizes] == [1, *(last + 1 for _, last, _ in sizes[:-1])]
    assert sizes[0][2] == budget and sizes[-1][1] == most
    nodes = [k for _, _, k in sizes]
    assert nodes == sorted(set(nodes), reverse=True)
    for first, last, k in sizes:
        assert last * (k + 1) <= rows or k == 0 or first == last == 1


@pytest.mark.parametrize("budget", [1, 12, 63, 255])
@pytest.mark.parametrize("rows", [2, 40, 256])
@pytest.mark.parametrize("most", [1, 2, 4, 33, 64, 256])
def test_every_width_is_captured_and_no_batch_grows(budget: int, rows: int, most: int) -> None:
    sizes = tree_sizes(budget, most, rows)
    captured = with_all_widths(sizes)
    assert [first for first, _, _ in captured] == [1, *(last + 1 for _, last, _ in captured[:-1])]
    assert captured[-1][1] == most
    rule = {n: k for first, last, k in sizes for n in range(first, last + 1)}
    largest = {n: k for first, last, k in captured for n in range(first, last + 1)}
    assert all(largest[last] == k for _, last, k in sizes)
    assert max(n * (k + 1) for n, k in largest.items()) == max(n * (k + 1) for n, k in rule.items())
    widths = set(largest.values())
    assert widths >= set(rule.values()) and (0 in widths or most == len(sizes))
    if most >= 33 and rows == 256:
        halves = {budget, *(2**p - 1 for p in range(budget.bit_length()))}
        # Trees of 128 rows have no batch size of their own: one request has 255 nodes, two 63.
        assert widths == halves - {127}


def test_no_tree_is_woven_larger_than_its_batch_verifies() -> None:
    sizes = tree_sizes(63, 64, 256)
    assert sizes == [(1, 2, 63), (3, 4, 31), (5, 16, 15), (17, 32, 7), (33, 64, 3)]
    widths = {nodes + 1: last for _, last, nodes in sizes}
    drafts = SimpleNamespace(options=SimpleNamespace(adapt=False), widths=widths, budget=63)
    woven = {n: WeaverSpeculator.useful_nodes(cast(Any, drafts), n) for n in range(1, 65)}
    # A graph of n requests serves every batch of more than n / 2.
    for n, nodes in woven.items():
        for batch in range(n // 2 + 1, n + 1):
            assert nodes >= next(k for first, last, k in sizes if first <= batch <= last)
    assert [woven[n] for n in (1, 2, 3, 4, 7, 8, 16, 32, 64)] == [63, 63, 63, 31, 31, 15, 15, 7, 3]
    # A scheduler that chooses has more choices, but none without memory for its rows.
    drafts.options.adapt = True
    free = {n: WeaverSpeculator.useful_nodes(cast(Any, drafts), n) for n in woven}
    assert [free[n] for n in (1, 4, 7, 8, 15, 16, 32, 64)] == [63, 63, 63, 31, 31, 15, 7, 3]
    drafts.widths = {64: 4, 8: 64}
    assert [WeaverSpeculator.useful_nodes(cast(Any, drafts), n) for n in (8, 15, 16)] == [63, 63, 7]


def test_graphs_after_a_memory_profile_look_for_candidates_of_their_trees_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are captured by a method of their own, which is not told that the profile has ended."""
    seen = []
    monkeypatch.setattr(
        DFlashSpeculator, "propose", lambda self, *arguments, **named: seen.append(self._profiles)
    )
    speculator = object.__new__(WeaverSpeculator)
    speculator.device, speculator.budget = torch.device("cpu"), 3
    speculator.proposer = None
    batch = SimpleNamespace(num_reqs=2)
    for profile in (True, False):
        given: list[Any] = [batch, {}, {}, *[None] * 8]
        tokens = speculator.propose(*given, dummy_run=True, is_profile=profile)
        assert tokens.shape == (2, 3) and not speculator._profiles
    assert seen == [True, False]


def test_passes_that_warm_up_capture_no_graph_of_the_weave_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's graphs hold the weave: one of its own per warm-up pass costs start-up time alone."""
    without: list[bool] = [False]
    seen = []

    class Weaver:
        @contextlib.contextmanager
        def without_graphs(self) -> Iterator[None]:
            without.append(True)
            yield
            without.pop()

    def note(*arguments: Any, **named: Any) -> None:
        seen.append(without[-1])

    monkeypatch.setattr(DFlashSpeculator, "propose", note)
    monkeypatch.setattr(DFlashSpeculator, "capture", note)
    speculator = object.__new__(WeaverSpeculator)
    speculator.device, speculator.budget = torch.device("cpu"), 3
    speculator.proposer = cast(Any, SimpleNamespace(weaver=Weaver()))
    given: list[Any] = [SimpleNamespace(num_reqs=2), {}, {}, *[None] * 8]
    speculator.propose(*given, dummy_run=True)
    speculator.capture()
    assert seen == [True, True] and not without[-1]


EIGHTHS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]


@pytest.mark.parametrize(
    ("seqs", "tokens", "sizes", "expected"),
    [
        (64, 8192, None, EIGHTHS),
        (256, 8192, None, EIGHTHS),
        (4, 8192, None, [1, 2, 3, 4]),
        (1, 8192, None, [1]),
        (64, 512, None, EIGHTHS[:16]),
        # A user's own sizes: no more graphs than those make.
        (64, 8192, [1, 2, 4, 8], [1, 2]),
        (64, 8192, [], []),
        # Wide trees alone: as many as vLLM plans, of whose graphs the target may have none.
        (2, 8192, [1, 2, 4, 8, 16, 32], [1, 2]),
        # Sizes of which vLLM by itself makes graphs beyond those that are wanted.
        (256, 8192, [16, 256, 1024, 2048], [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_the_drafter_has_graphs_for_the_batches_that_the_target_has(
    seqs: int, tokens: int, sizes: list[int] | None, expected: list[int]
) -> None:
    sizes = compat.capture_sizes(512, tokens) if sizes is None else sizes
    schedule = tree_sizes(63, seqs, 256)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=None)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=63,
            num_speculative_tokens_per_batch_size=schedule if len(schedule) > 1 else None,
        ),
    )
    assert compat.draft_graph_requests(config, 16, 64) == expected
    if expected:
        own = compat.with_draft_graphs(config, expected, 16).compilation_config
        assert own.cudagraph_capture_sizes == [16 * n for n in expected]
        assert own.max_cudagraph_capture_size == 16 * expected[-1]
        assert config.compilation_config.cudagraph_capture_sizes is sizes
    # So that a batch has more than half of its graph's requests, as `useful_nodes` has it.
    assert all(b <= 2 * a + 1 for a, b in itertools.pairwise(expected))


def test_a_drafters_graph_stores_the_paths_of_its_batches() -> None:
    """vLLM's own holds a row for every depth: 1,024 at 64 requests, whose paths have four."""
    sizes = tree_sizes(63, 64, 256)
    speculator = object.__new__(WeaverSpeculator)
    speculator.options = cast(Any, SimpleNamespace(adapt=False))
    speculator.widths = {nodes + 1: last for _, last, nodes in sizes}
    speculator.depth = speculator.num_speculative_steps = 15
    speculator.budget, speculator.max_num_tokens = 63, 8192
    rows = {n: speculator._num_graph_context_tokens(n) for n in EIGHTHS}
    for batch in range(1, 65):
        graph = next(n for n in EIGHTHS if n >= batch)
        nodes = next(k for first, last, k in sizes if first <= batch <= last)
        assert batch * min(16, nodes + 1) <= rows[graph] <= 16 * graph
    assert [rows[n] for n in (1, 2, 8, 16, 32, 64)] == [16, 32, 128, 256, 256, 256]
    speculator.max_num_tokens = 100
    assert speculator._num_graph_context_tokens(64) == 100


def test_the_drafters_graphs_are_planned_by_requests(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own plan would end where the target's tokens do: at one request of 8 rows."""
    engine = TreeEngine(tiny_models, "dense", weaver={"proposal": "ddtree", "rows_per_step": 14})
    speculator = engine.runner.speculator
    whole, rows = speculator.vllm_config, speculator.num_query_per_req
    compilation = speculator.full_config.compilation_config
    manager = plan_drafter(engine, monkeypatch, [1, 2, 4, 8])
    planned = manager._capture_descs[CUDAGraphMode.FULL]
    # Widths of 13, 4 and 2 rows: 4 requests of two rows are 8 tokens.
    assert [(desc.num_reqs, desc.num_tokens) for desc in planned] == [
        (n, n * rows) for n in (4, 2, 1)
    ]
    assert speculator.vllm_config is whole and compilation.max_cudagraph_capture_size == 8
    # The builders of the drafter's attention are told the same bound.
    assert speculator.attn_vllm_config.compilation_config.max_cudagraph_capture_size == 4 * rows


@pytest.mark.parametrize(
    ("step_rows", "seqs", "warmed"), [(256, 64, 4), (256, 3, 3), (64, 1, 1), (40, 64, 2)]
)
def test_warm_up_decodes_no_more_rows_than_a_step(step_rows: int, seqs: int, warmed: int) -> None:
    """vLLM warms up as many requests as its runner's configuration allows, with all drafts each."""
    seen = []

    class Stock:
        model_runner: Any

        def compile_or_warm_up_model(self) -> str:
            runner = self.model_runner
            seen.append(runner.scheduler_config.max_num_seqs)
            if broken:
                raise RuntimeError("no memory")
            return "times"

    class Worker(TreeWorkerMixin, Stock):
        def __init__(self) -> None:
            self.model_runner = SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=8192),
                model_state=SimpleNamespace(max_step_rows=step_rows),
                decode_query_len=64,
            )

    for broken in (False, True):
        worker = Worker()
        whole = worker.model_runner.scheduler_config
        with pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
            assert worker.compile_or_warm_up_model() == "times"
        assert worker.model_runner.scheduler_config is whole and whole.max_num_seqs == seqs
    assert seen == [warmed, warmed]
    source = inspect.getsource(warmup)
    assert "model_runner.scheduler_config.max_num_seqs" in source


@pytest.mark.parametrize(("most", "sizes"), [(2, None), (4, [(1, 2, 63), (3, 4, 31)])])
def test_the_rule_holds_for_engines_of_few_requests_too(most: int, sizes: Any) -> None:
    spec = SimpleNamespace(num_speculative_tokens=63, num_speculative_tokens_per_batch_size=None)
    scheduler = SimpleNamespace(max_num_seqs=most)
    config: Any = SimpleNamespace(speculative_config=spec, scheduler_config=scheduler)
    compat.choose_tree_sizes(config, 256)
    assert spec.num_speculative_tokens_per_batch_size == sizes


class Described(NamedTuple):
    """What vLLM knows of a graph."""

    num_reqs: int
    num_tokens: int


def test_graphs_between_two_that_were_timed_take_what_lies_between() -> None:
    replayed: list[int] = []

    class Event:
        """The clock of a device on which only replays take time: 10 ms and one for each row."""

        now = 0.0

        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = Event.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def __init__(self, rows: int):
            self.rows = rows

        def replay(self) -> None:
            # The first one is slower.
            Event.now += 10.0 + self.rows + 100.0 * (self.rows not in replayed)
            replayed.append(self.rows)

    def manager(*sizes: tuple[int, int]) -> SimpleNamespace:
        graphs = {Described(n, n * rows): Graph(n * rows) for n, rows in sizes}
        return SimpleNamespace(graphs=graphs)

    runner: Any = SimpleNamespace(
        cudagraph_manager=manager(*((n, 1) for n in (1, 2, 3, 4, 6, 8)), (1, 64), (2, 64)),
        speculator=SimpleNamespace(query_cudagraph_manager=manager((4, 16), (5, 16), (8, 16))),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        times = compat.measure_steps(runner)
        assert times is not None
        runner.cudagraph_manager = None
        assert compat.measure_steps(runner) is None
    assert times.verify == {(n, 1): 10.0 + n for n in (1, 2, 3, 4, 6, 8)} | {
        (1, 64): 74.0,
        (2, 64): 138.0,
    }
    assert times.draft == pytest.approx({4: 74.0, 5: 90.0, 8: 138.0})
    # The first, every second, and the last of a width, three times each; and all of the drafter's.
    assert sorted(set(replayed)) == [1, 3, 6, 8, 64, 80, 128] and replayed.count(3) == 3


def test_times_are_those_of_the_graph_that_holds_the_batch(tmp_path: Path) -> None:
    times = StepTimes({(1, 8): 1.0, (4, 8): 2.0, (4, 1): 1.5}, {2: 0.25, 4: 0.5})
    assert times.step_ms(1, 7) == 1.25 and times.step_ms(2, 7) == 2.25
    assert times.step_ms(3, 7) == 2.5 and times.step_ms(3, 0) == 1.5
    assert times.step_ms(5, 7) is None and times.step_ms(1, 3) is None
    # A drafter without a graph as large takes longer in proportion.
    small = StepTimes({(8, 8): 2.0}, {2: 0.25, 4: 0.5})
    assert small.step_ms(6, 7) == 2.75 and StepTimes({(8, 8): 2.0}, {}).step_ms(6, 7) is None
    times.save(tmp_path / "t.json")
    assert StepTimes.load(tmp_path / "t.json") == times
    (tmp_path / "t.json").write_text('{"verify": [[1, 2]]}')
    assert StepTimes.load(tmp_path / "t.json") is None
    assert StepTimes.load(tmp_path / "gone.json") is None


def test_the_largest_tree_wins_where_rows_are_free_and_none_where_nothing_is_accepted() -> None:
    free = StepTimes({(4, k + 1): 10.0 for k in (0, 3, 15)}, {4: 1.0})
    dear = StepTimes({(4, k + 1): 10.0 + 4 * k for k in (0, 3, 15)}, {4: 1.0})
    unknown = Acceptance(15)
    assert best_nodes(4, [0, 3, 15], free, unknown, 1.02) == 15
    assert best_nodes(4, [0, 3, 15], dear, unknown, 1.02) in (0, 3)
    assert best_nodes(5, [0, 3, 15], free, unknown, 1.02) is None
    hopeless = Acceptance(15)
    hopeless.add([1e4] * 15, [0.0] * 15)
    assert best_nodes(4, [0, 3, 15], free, hopeless, 1.02) == 0
    assert hopeless.emitted(15) == pytest.approx(1.0, abs=0.02)
    # What has changed counts for more than what was.
    for _ in range(30):
        hopeless.add([1e3] * 15, [600.0] + [100.0] * 14)
    assert hopeless.probability(1) == pytest.approx(0.6, abs=0.02)
    assert best_nodes(4, [0, 3, 15], free, hopeless, 1.02) == 15


def test_steps_that_lie_long_ago_are_forgotten() -> None:
    """Contexts were longer then: what is still seen says how long other sizes take now."""
    times = StepTimes({(4, k + 1): 10.0 + k for k in (0, 3, 7)}, {4: 2.0})
    seen = SeenSteps()
    for step in range(LEAST_STEPS):
        for nodes, milliseconds, now in ((3, 60.0, 0.0), (7, 38.0, SEEN_SECONDS)):
            seen.add(4, nodes, milliseconds, now + step)
    assert times.step_ms(4, 3, seen) == 60.0
    seen.forget(SEEN_SECONDS + LEAST_STEPS - 1)
    assert times.step_ms(4, 3, seen) == 60.0
    seen.forget(SEEN_SECONDS + LEAST_STEPS)
    # Graphs of 15 and 19 ms, and the second ran for 38.
    assert times.step_ms(4, 3, seen) == 30.0 and times.step_ms(4, 7, seen) == 38.0
    assert set(seen.times) == {(4, 7)}


def test_small_trees_say_how_larger_ones_would_do() -> None:
    """Measured: 16 requests at the 27B's cost, greedy and at T = 1, whose trees had 7 nodes."""
    times = StepTimes({(16, 1): 16.8, (16, 8): 20.5, (16, 16): 24.7}, {16: 3.0})
    choices = [0, 7, 15]
    easy, hard = Acceptance(15), Acceptance(15)
    easy.add([612.0] * 7 + [0.0] * 8, [520, 443, 373, 306, 290, 246, 220] + [0.0] * 8)
    hard.add([1045.0] * 7 + [0.0] * 8, [599, 372, 237, 198, 164, 124, 95] + [0.0] * 8)
    assert easy.emitted(7) == pytest.approx(4.9, abs=0.1)
    # Of trees of 15 nodes on the same prompts: 6.1 and 3.1 tokens.
    assert 5.7 < easy.emitted(15) < 6.5 and 2.9 < hard.emitted(15) < 3.3
    assert best_nodes(16, choices, times, easy, 1.02) == 15
    assert best_nodes(16, choices, times, hard, 1.02) == 7
    # What a larger tree did when it was tried counts for more than what the smaller one promises.
    easy.add([0.0] * 7 + [200.0] * 8, [0.0] * 7 + [10.0] * 8)
    assert best_nodes(16, choices, times, easy, 1.02) == 7
    # Nothing is accepted more often than always.
    sure = Acceptance(15)
    sure.add([1e4] * 3 + [0.0] * 12, [1e4] * 3 + [0.0] * 12)
    assert sure.emitted(15) <= 16.0


def test_steps_as_they_ran_count_for_more_than_their_graphs() -> None:
    """Graphs that hold no request leave out states, sampling and commits, of trees most."""
    times = StepTimes({(n, k + 1): 10.0 + k for n in (4, 8) for k in (0, 3, 15)}, {8: 2.0})
    seen = SeenSteps()
    assert times.step_ms(3, 3, seen) == 15.0
    for _ in range(LEAST_STEPS - 1):
        seen.add(4, 3, 30.0)
    assert times.step_ms(3, 3, seen) == 15.0
    # Pauses between requests are steps too, and move nothing.
    seen.add(4, 3, 5000.0)
    assert times.step_ms(3, 3, seen) == times.step_ms(4, 3, seen) == 30.0
    # Another size is stretched as these are, plain decoding, too; another batch is not.
    assert times.step_ms(4, 15, seen) == 2 * 27.0
    assert times.step_ms(4, 0, seen) == 20.0 and times.step_ms(5, 3, seen) == 15.0
    # The newest count, and plain decoding by its own.
    for _ in range(MOST_STEPS):
        seen.add(4, 3, 20.0)
    assert times.step_ms(4, 3, seen) == 20.0
    offers = Acceptance(15)
    offers.add([1e4] * 15, [8e3] + [0.0] * 14)
    assert best_nodes(4, [0, 3, 15], times, offers, MARGIN) == 3
    assert best_nodes(4, [0, 3, 15], times, offers, MARGIN, seen) == 3
    # 1.8 tokens in 20 ms: plain decoding may take 10 ms, and then it would be the better one.
    known = [0, 3, 15], times, offers, seen
    assert best_unseen(4, 3, *known) == 0
    # Nothing says what the chosen ones take: the choice itself is a try.
    assert best_unseen(4, 15, *known) is best_unseen(9, 3, *known) is None
    # Trees are taken for half as much slower than their graph as those that were seen.
    # Sizes of 15 then take 31.5 ms, and 36 by what is known.
    for later, best in ((800.0, None), (1200.0, 15)):
        halfway = Acceptance(15)
        halfway.add([1e4] * 15, [8e3, 1e3, 1e3] + [later] * 12)
        assert halfway.emitted(3) / 20 > halfway.emitted(15) / 36
        assert best_unseen(4, 3, [3, 15], times, halfway, seen) == best
    for plain, best in ((16.0, 3), (10.5, 0)):
        for _ in range(MOST_STEPS):
            seen.add(4, 0, plain)
        assert best_nodes(4, [0, 3, 15], times, offers, MARGIN, seen) == best
        # What plain decoding takes beside its graph says nothing of trees, of which some were seen.
        assert times.step_ms(4, 15, seen) == pytest.approx(27.0 * 20 / 15)
    assert best_unseen(4, 3, *known) is None
    assert times.step_ms(9, 3, seen) is None
    # Trees that would win by less than their margin at best are not tried.
    for _ in range(MOST_STEPS):
        seen.add(8, 0, 20.0)
    for rate, best in ((1.01, None), (1.03, 3)):
        level = StepTimes({(8, 1): 20.0, (8, 4): 20.0 * offers.emitted(3) / rate}, {8: 1e-6})
        assert best_unseen(8, 0, [0, 3], level, offers, seen) == best


def test_unseen_sizes_are_tried_soon_and_more_and_more_seldom() -> None:
    times = StepTimes({(4, 1): 10.0, (4, 4): 13.0}, {4: 2.0})
    offers, seen, probes = Acceptance(3), SeenSteps(), Probes()
    offers.add([1e4] * 3, [8e3, 0.0, 0.0])
    batch = 4, 3, 3, [0, 3], times, offers, seen
    # The chosen trees come first: they say how long trees really take.
    assert probes.next(0.0, *batch) is None
    for _ in range(LEAST_STEPS):
        seen.add(4, 3, 20.0)
    tried = [0.5 * k for k in range(400) if probes.next(0.5 * k, *batch) == (0, float("inf"))]
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert tried[0] == 0.0 and gaps[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(gaps[5:]) == {MOST_EVERY}
    # Slow steps have as many, and are tried as seldom as that costs.
    slow = StepTimes({(4, 1): 200.0, (4, 4): 260.0}, {4: 40.0})
    waiting, patient = SeenSteps(), Probes()
    for _ in range(LEAST_STEPS):
        waiting.add(4, 3, 500.0)
    args = 4, 3, 3, [0, 3], slow, offers, waiting
    tried = [0.5 * k for k in range(2000) if patient.next(0.5 * k, *args)]
    lasted = 1e-3 * TRIED_STEPS * slow.steps_ms(4, waiting)[0]
    first = [at for at in tried if at < lasted]
    assert lasted > 4 and first == [0.5 * k for k in range(math.ceil(2 * lasted))]
    assert len(tried) * 0.5 < 0.05 * 1000
    # Another graph's are another matter.
    assert probes.next(200.0, *batch) is None
    larger = StepTimes({**times.verify, (8, 1): 10.0, (8, 4): 13.0}, {8: 2.0})
    for _ in range(LEAST_STEPS):
        seen.add(8, 3, 20.0)
    assert probes.next(200.0, 8, 3, 3, [0, 3], larger, offers, seen) == (0, float("inf"))
    for _ in range(LEAST_STEPS):
        seen.add(4, 0, 16.0)
    assert not any(probes.next(300.0 + k, *batch) for k in range(40))


@pytest.mark.parametrize(("accepted", "every"), [(0.0, 25.0), (0.98, LEAST_EVERY)])
def test_probes_of_the_largest_trees_cost_a_small_share_of_the_tokens(
    accepted: float, every: float
) -> None:
    """And a text that has become easy is found out the sooner the better they were."""
    times = StepTimes({(4, 1): 20.0, (4, 4): 38.0}, {4: 2.0})
    offers, probes = Acceptance(3), Probes()
    offers.add([1e6] * 3, [1e6 * accepted, 0.0, 0.0])
    batch = 4, 0, 3, [0, 3], times, offers
    probed = [0.5 * k for k in range(800) if probes.next(0.5 * k, *batch) == (3, PROBE_SECONDS)]
    gaps = {after - before for before, after in itertools.pairwise(probed)}
    assert probed[0] == 0.0 and gaps == {every}
    lost = 1 - offers.emitted(3) / times.step_ms(4, 3) * 20.0  # type: ignore[operator]
    assert lost * PROBE_SECONDS / every <= PROBE_COST_OF_PLAIN * 1.001
    # Smaller trees say how larger ones would do.
    verify = {(4, 1): 100.0, (4, 2): 30.0, (4, 4): 38.0}
    trees = 4, 1, 3, [0, 1, 3], StepTimes(verify, {4: 2.0}), Acceptance(3)
    trees[-1].add([1e6] * 3, [5e5, 0.0, 0.0])
    assert probes.next(1e3, *trees) == (3, PROBE_SECONDS)
    later = (k for k in range(1, 10**5) if probes.next(1e3 + k, *trees))
    assert next(later) >= PROBE_SECONDS * (1 - 32 / 40) / PROBE_COST
    # There is nothing to learn where the largest are the chosen ones.
    assert probes.next(1e3, 4, 3, 3, [0, 3], times, offers) is None


def test_plain_decoding_is_left_again_where_the_rules_trees_cannot_be_tried() -> None:
    """The rule has none in such a batch, or trees without a graph: the nearest ones are tried."""
    offers = Acceptance(15)
    offers.add([1e6] * 15, [0.0] * 15)
    times = StepTimes({(200, 1): 20.0, (200, 2): 24.0, (200, 4): 30.0}, {200: 2.0})
    for chosen, largest, tried in ((0, 0, 1), (0, 1, 1), (0, 3, 3), (0, 15, 3), (1, 1, 3)):
        found = Probes().next(0.0, 200, chosen, largest, [0, 1, 3, 15], times, offers)
        assert found == (tried, PROBE_SECONDS)
    # Choices alone are tried: there is no memory for the others.
    assert Probes().next(0.0, 200, 0, 3, [0, 1], times, offers) == (1, PROBE_SECONDS)
    assert Probes().next(0.0, 200, 0, 3, [0], times, offers) is None


@pytest.mark.parametrize(
    ("scheduled", "drafts", "new", "size"),
    [
        ({"a": 4, "b": 4}, {"a": [1, 2, 3], "b": [-1] * 3}, [], (2, 3)),
        ({"a": 1, "b": 1}, {}, [], (2, 0)),
        ({"a": 4, "b": 1}, {"a": [1, 2, 3]}, [], None),
        ({"a": 4, "b": 2}, {"a": [1, 2, 3], "b": [1]}, [], None),
        ({"a": 4, "b": 4}, {"a": [1, 2, 3], "b": [1, 2, 3]}, ["b"], None),
        ({"a": 64}, {}, [], None),
        ({}, {}, [], None),
    ],
)
def test_steps_with_prompts_or_of_several_sizes_are_not_timed(
    scheduled: dict[str, int], drafts: dict[str, list[int]], new: list[str], size: Any
) -> None:
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=new
    )
    assert decode_size(output) == size


def test_an_engines_steps_are_timed_while_they_are_alike(
    plain_of: Callable[..., Plain], tiny_models: dict[str, Path]
) -> None:
    weaver = {"proposal": "ddtree", "adapt": True, "rows_per_step": 14}
    trees = TreeEngine(tiny_models, "dense", weaver=weaver)
    scheduler = trees.scheduler
    prompts = [tokens(4 + i, 71) for i in range(2)]
    want = plain_of("dense").outputs(prompts, greedy(24))
    assert_same(trees.generate(prompts, greedy(24)), want, plain_of("dense"))
    # Nothing was known of graphs, so there was nothing to count by.
    assert not scheduler._steps.times
    scheduler._times = StepTimes({(4, k + 1): 1.0 for k in (0, 1, 3, 12)}, {4: 1.0})
    began, active = time.monotonic(), scheduler._active
    # A refresh would change the size on the way.
    scheduler._refreshed = began + 1e6
    assert_same(trees.generate(prompts, greedy(24)), want, plain_of("dense"))
    spent = 1e3 * (time.monotonic() - began)
    seen = scheduler._steps.times
    steps = [ms for times in seen.values() for ms in times]
    assert set(seen) == {(4, 3)}
    assert 2 <= len(steps) <= 24 and min(steps) > 0 and sum(steps) <= spent
    # Probes are paid from the time of steps.
    assert sum(steps) <= 1e3 * (scheduler._active - active) <= spent


def test_what_is_not_offered_is_not_forgotten() -> None:
    """Trees that nobody accepts stay out, however long nothing is seen of them."""
    known = Acceptance(3)
    known.add([400.0] * 3, [0.0] * 3)
    for _ in range(100):
        known.add([0.0] * 3, [0.0] * 3)
    assert known.emitted(3) < 1.15
    known.add([400.0, 0.0, 0.0], [300.0, 0.0, 0.0])
    assert known.probability(1) > 0.4 and known.offered[1:] == [400.0, 400.0]


def test_what_is_offered_again_is_as_old_as_it_is() -> None:
    """Text has become an easy one: a probe must outweigh what was known half a minute ago."""
    times = StepTimes({(64, 1): 22.2, (64, 4): 36.0}, {64: 3.6})
    hard = [35.0, 4.0, 0.0]
    known, fresh = Acceptance(3), Acceptance(3)
    for one in (known, fresh):
        one.add([500.0] * 3, hard)
    assert best_nodes(64, [0, 3], times, known, MARGIN) == 0
    for _ in range(63):
        known.add([0.0] * 3, [0.0] * 3)
    for one in (known, fresh):
        one.add([100.0] * 3, [87.0, 75.0, 67.0])
    assert best_nodes(64, [0, 3], times, known, MARGIN) == 3
    # The same a moment ago says more about now.
    assert best_nodes(64, [0, 3], times, fresh, MARGIN) == 0
    # Of a few passes the old ones, those that stay, still say most.
    known, few = Acceptance(3), [13.0] * 3
    known.add([3000.0] * 3, [2400.0, 1800.0, 1500.0])
    for _ in range(63):
        known.add([0.0] * 3, [0.0] * 3)
    known.add(few, [0.0] * 3)
    assert known.offered == [LEAST_PASSES + 13.0] * 3 and known.probability(1) > 0.5


def test_a_large_batch_learns_at_once_that_its_text_has_changed() -> None:
    """Half a second of 64 requests is 800 passes: thousands from before must not outvote them."""
    times = StepTimes({(64, 1): 22.2, (64, 4): 36.0}, {64: 3.6})
    known = Acceptance(3)
    for _ in range(60):
        known.add([800.0] * 3, [480.0, 320.0, 240.0])
    assert best_nodes(64, [0, 3], times, known, MARGIN) == 3
    for _ in range(2):
        known.add([800.0] * 3, [250.0, 100.0, 50.0])
    assert known.offered == [MEMORY * MOST_PASSES + 800.0] * 3
    assert best_nodes(64, [0, 3], times, known, MARGIN) == 0


def test_probes_are_short(tiny_models: dict[str, Path]) -> None:
    weaver = {"proposal": "ddtree", "adapt": True, "rows_per_step": 14}
    scheduler = TreeEngine(tiny_models, "dense", weaver=weaver).scheduler
    verify = {(4, k + 1): 10.0 + 3.0 * k for k in (1, 3, 12)}
    scheduler._times = StepTimes({**verify, (1, 13): 46.0}, {4: 1.0})
    scheduler._decoding = 2
    scheduler._refreshed = time.monotonic()
    scheduler.refresh_sizes()
    # As all batches of that graph.
    assert scheduler.dynamic_sd_lookup[1:] == [3, 3, 3, 1]
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup[1:] == [3, 3, 3, 1]
    scheduler._refreshed = time.monotonic() - PROBE_SECONDS
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup[1:] == [1, 1, 1, 1]
    # Plain decoding, whose graph says that it may be better, until the next refresh.
    scheduler._times = StepTimes({**verify, (4, 1): 12.0}, {4: 1.0})
    for _ in range(LEAST_STEPS):
        scheduler._steps.add(4, 1, 30.0, time.monotonic())
    scheduler.refresh_sizes()
    assert scheduler.dynamic_sd_lookup[1:] == [0, 0, 0, 0]
    scheduler._refreshed = time.monotonic() - PROBE_SECONDS
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup[1:] == [0, 0, 0, 0]
    scheduler._active += 0.5
    scheduler.refresh_sizes()
    assert scheduler.dynamic_sd_lookup[1:] == [1, 1, 1, 1]
    # A pause between requests earns no probe.
    active, scheduler._called = scheduler._active, time.monotonic() - 100
    scheduler.schedule()
    assert scheduler._active == active
    # The rule's trees have more rows than there is memory for: the next smaller ones, and of
    # four requests, which have no larger ones than the chosen, none.
    scheduler._fixed = [12] * 5
    scheduler._times = StepTimes({**verify, (4, 1): 1e3}, {4: 1.0})
    for decoding, expected in ((2, [3, 3, 3, 1]), (4, [1, 1, 1, 1])):
        scheduler._probes, scheduler._decoding = Probes(), decoding
        scheduler.refresh_sizes()
        assert scheduler.dynamic_sd_lookup[1:] == expected


def test_the_last_trees_of_a_probe_are_published_in_the_plain_steps_after_it(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = TreeEngine(tiny_models, "dense", weaver={"proposal": "ddtree", "rows_per_step": 14})
    file = stats_file(trees.runner.vllm_config.instance_id)
    prompts = [tokens(4 + i, 71) for i in range(2)]
    # No time for it while the probe lasts.
    monkeypatch.setattr(stats, "PUBLISH_SECONDS", float("inf"))
    trees.generate(prompts, greedy(6))
    assert not file.exists()
    monkeypatch.setattr(stats, "PUBLISH_SECONDS", 0.0)
    trees.scheduler.dynamic_sd_lookup = [0] * 5
    trees.generate(prompts, greedy(6))
    published = json.loads(file.read_text())["target_passes"]
    assert published == trees.stats()["target_passes"] > 0


def test_the_scheduler_follows_what_was_measured(
    plain_of: Callable[..., Plain], tiny_models: dict[str, Path]
) -> None:
    """Times that favour small trees, then none; the tokens are plain decoding's throughout."""
    weaver = {"proposal": "ddtree", "adapt": True, "rows_per_step": 14}
    trees = TreeEngine(tiny_models, "dense", weaver=weaver)
    scheduler = trees.scheduler
    assert scheduler.dynamic_sd_lookup[1:] == [12, 3, 3, 1]
    scheduler.refresh_sizes()
    assert scheduler.dynamic_sd_lookup[1:] == [12, 3, 3, 1]  # nothing was measured
    prompts = [tokens(4 + i, 70) for i in range(2)]
    want = plain_of("dense").outputs(prompts, greedy(12))
    instance = trees.runner.vllm_config.instance_id
    # Plain decoding is a choice, too, where the rule has none of it.
    assert scheduler._choices == [0, 1, 3, 12]
    for costly, expected in ((3.0, [1, 1, 1, 1]), (0.0, [12, 3, 3, 1])):
        verify = {(4, k + 1): 10.0 + costly * k for k in (1, 3, 12)}
        times = StepTimes({**verify, (1, 13): 10.0 + 12 * costly}, {4: 1.0})
        times.save(times_file(instance))
        scheduler._times = None
        scheduler.refresh_sizes()
        assert scheduler.dynamic_sd_lookup[1:] == expected
        assert_same(trees.generate(prompts, greedy(12)), want, plain_of("dense"))
    stats: Any = trees.stats()
    assert stats["offered_by_node"][1] >= stats["offered_by_node"][3] > 0
    assert sum(stats["offered_by_node"][1:]) == stats["tree_nodes"]
    times_file(instance).unlink()
