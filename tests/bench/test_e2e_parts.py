# SPDX-License-Identifier: Apache-2.0
"""Parts of the end-to-end benchmark that need no engine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.e2e.arms import (
    Arm,
    ArmError,
    Models,
    Sizes,
    engine_options,
    parse_arms,
    shared_options,
)
from benchmarks.e2e.cells import Cell, CostModel, order_cells
from benchmarks.e2e.client import EngineError
from benchmarks.e2e.compare import Doubt, compare, compare_again, in_words, spacing, step_at
from benchmarks.e2e.doubts import Asked, OwnTexts, doubt_at, noise_of
from benchmarks.e2e.exact import ExactTarget, _plain_torch
from benchmarks.e2e.measure import WEIGHTS, Bench, Grouping, Results, Run
from benchmarks.e2e.memory import CacheShape, Room, drafter_bytes, weight_bytes
from benchmarks.e2e.plots import plot_cells
from benchmarks.e2e.prompts import (
    PromptError,
    cut_cells,
    cut_prompts,
    load_tokenizer,
    texts_of,
)
from benchmarks.e2e.report import differing, lossless, markdown, summary
from benchmarks.e2e.rounding import rounding
from benchmarks.e2e.statistics import (
    accepted_length,
    first_difference,
    rate_ratio,
    repetition,
    throughput,
)

DEMO = Path(__file__).parents[2] / "vllm_weaver/demo"
MODELS = Models("target", "drafter", "adapter", expanded=True)


def config_27b() -> dict[str, Any]:
    from benchmarks.expand.shapes import QWEN36_27B
    from benchmarks.expand.trio import Trio, read_config

    trio = Trio.below(DEMO / "models", QWEN36_27B)
    return trio.plans()[0].config(read_config(trio.target))


def drafter_27b() -> dict[str, Any]:
    from benchmarks.expand.shapes import QWEN36_27B
    from benchmarks.expand.trio import Trio, read_config

    trio = Trio.below(DEMO / "models", QWEN36_27B)
    return trio.plans()[1].config(read_config(trio.drafter))


def options(arm: Arm, device: str = "cuda") -> dict[str, Any]:
    return engine_options(
        arm, MODELS, Sizes(batch=4, context=100, tokens=50), device=device, kv_bytes=1 << 30,
        memory_share=0.4, seed=0, triton_prefill=True, extra={},
    )  # fmt: skip


def test_arms_come_with_ar_first_and_stock_in_every_width() -> None:
    arms = parse_arms("weaver,stock,chain,ddtree-31", 63, [15, 7], 15)
    assert [arm.name for arm in arms] == [
        "ar", "weaver-63", "stock-15", "stock-7", "chain-15", "ddtree-31"
    ]  # fmt: skip
    one, two = parse_arms("weaver,weaver:children=32", 63, [15], 15)[1:]
    assert two.name == "weaver-63,children=32" != one.name
    assert options(two)["additional_config"]["weaver"]["children"] == 32


@pytest.mark.parametrize("text", ["tree", "stock-x", "weaver:children", "weaver,weaver-63"])
def test_a_wrong_arm_is_refused(text: str) -> None:
    with pytest.raises(ArmError, match="arm"):
        parse_arms(text, 63, [15], 15)


def test_stock_arms_run_without_the_plugin_and_with_graphs_for_their_batch() -> None:
    stock = options(Arm("stock", 15))
    assert "additional_config" not in stock
    assert stock["compilation_config"]["max_cudagraph_capture_size"] >= 4 * 16
    assert "speculative_config" not in options(Arm("ar"))
    weaver = options(Arm("weaver", 63))
    assert weaver["additional_config"] == {"weaver": {"proposal": "weaver", "adapter": "adapter"}}
    assert weaver["load_format"] == "expanded"
    # AR is asked for logits; the others run as they are served.
    assert options(Arm("ar"))["logprobs_mode"] == "raw_logits"
    assert "logprobs_mode" not in stock and "logprobs_mode" not in weaver
    with pytest.raises(ArmError, match="--drafter"):
        engine_options(
            Arm("stock", 7), Models("t", None, None), Sizes(1, 1, 1), device="cpu", kv_bytes=1,
            memory_share=0.4, seed=0, triton_prefill=False, extra={},
        )  # fmt: skip


def test_cells_cover_both_axes_before_the_corners() -> None:
    cells = order_cells([1, 4, 16], [1024, 16384], [0.0, 1.0])
    assert len(set(cells)) == 12
    assert cells[0] == Cell(1, 1024, 0.0)
    assert cells[1] == Cell(4, 1024, 0.0)
    assert {cells[2], cells[3]} == {Cell(16, 1024, 0.0), Cell(1, 16384, 0.0)}
    assert [cell.temperature for cell in cells] == [0.0] * 6 + [1.0] * 6
    assert cells[-1] == Cell(16, 16384, 1.0)
    few = order_cells([1, 4, 16], [1024, 16384], [0.0], most_tokens=16384)
    assert few == [
        c for c in order_cells([1, 4, 16], [1024, 16384], [0.0]) if c.batch * c.context <= 16384
    ]
    cost = CostModel(54 * 10**9, 150, 0.002)
    assert cost.prefill(cells[-1]) > 10 * cost.prefill(cells[0])


def test_a_state_for_each_draft_dominates_the_cache_of_stock_speculation() -> None:
    shape = CacheShape.of(config_27b(), drafter_27b(), 2)
    assert shape.state_bytes * shape.gdn_layers == pytest.approx(151e6, rel=0.01)
    stock = shape.sequence_bytes("stock", 15, 1280)
    ours = shape.sequence_bytes("weaver", 63, 1280)
    assert stock > 16 * shape.state_bytes * shape.gdn_layers
    assert ours < stock / 3
    assert shape.cache_bytes("ar", 0, 4, 1280) < shape.cache_bytes("ar", 0, 16, 1280)
    assert weight_bytes(config_27b(), 2) == pytest.approx(53.8e9, rel=0.01)


def test_two_27b_engines_fit_an_h200_for_small_batches_alone() -> None:
    drafter = drafter_27b()
    assert drafter_bytes(drafter, 2) == pytest.approx(3.46e9, rel=0.01)
    shape = CacheShape.of(config_27b(), drafter, 2)
    room = Room(143771 << 20, weight_bytes(config_27b(), 2), drafter_bytes(drafter, 2))

    def fits(kind: str, rows: int, batch: int, together: bool) -> bool:
        beside = shape.cache_bytes("ar", 0, batch, 1280) if together else None
        return shape.cache_bytes(kind, rows, batch, 1280) <= (room.for_cache(kind, beside) or 0)

    assert fits("weaver", 63, 4, together=True)
    assert not fits("stock", 15, 16, together=True)
    assert fits("stock", 15, 16, together=False)
    assert fits("weaver", 63, 64, together=False)
    assert not fits("stock", 15, 64, together=False)
    assert Room(None, 1, 1).for_cache("stock", None) is None
    assert Room(None, 1, 1).among(["ar"], 0) is None

    def fit(batch: int, *arms: tuple[str, int]) -> bool:
        arms = (("ar", 0), *arms)
        caches = [shape.cache_bytes(*arm, batch, 1280) for arm in arms]
        return (room.among([kind for kind, _ in arms], sum(caches[:-1])) or 0) >= caches[-1]

    # The first four stood on an H200 at once, with less for the last one's cache.
    assert fit(16, ("weaver", 63), ("stock", 7), ("stock", 3))
    assert fit(16, ("weaver", 63), ("stock", 15))
    assert fit(64, ("stock", 3)) and fit(64, ("weaver", 63))
    assert not fit(64, ("weaver", 63), ("stock", 3))


def test_accepted_length_is_weighted_by_tokens_and_by_requests() -> None:
    found = accepted_length([10, 1], [10, 8])
    assert found["token_weighted"] == pytest.approx(18 / 11)
    assert found["per_request"] == pytest.approx(4.5)
    low, high = found["interval_95"]
    assert low <= found["token_weighted"] <= high
    assert accepted_length([0], [0])["token_weighted"] == 0


def test_throughput_and_ratios() -> None:
    found = throughput([0.1, 0.3], [4, 4])
    assert found["tokens_per_second"] == pytest.approx(20)
    assert found["ms_per_step"] == pytest.approx(200)
    # 60 tokens in 4 seconds over 40 in 4, not the mean of 4 and 1.33.
    ratio = rate_ratio([(20, 0.5), (40, 3.5)], [(20, 2.0), (20, 2.0)])
    assert ratio["ratio"] == pytest.approx(1.5) and ratio["rounds"] == 2
    assert ratio["low"] < 1.5 < ratio["high"]
    assert rate_ratio([(4, 1.0), (0, 0.0)], [(2, 1.0), (2, 1.0)])["ratio"] == pytest.approx(2)
    assert rate_ratio([], [])["ratio"] is None


def test_repetition_tells_loops_from_text() -> None:
    assert repetition([list(range(50))]) == 0
    assert repetition([[1, 2, 3] * 30]) > 0.9
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 5], [1, 2]) == 1


def test_differences_are_classified_by_ars_doubt() -> None:
    asked: list[Any] = []

    def doubts(places: list[tuple[int, int, int]]) -> list[Doubt | None]:
        asked.append(places)
        return [Doubt(0.01, 0.01, 4.0), Doubt(3.0, 5.0, 4.0), None][: len(places)]

    got = [[1, 2, 9], [4, 4, 4], [7, 7, 7], [8, 8, 8]]
    want = [[1, 2, 3], [4, 5, 6], [7, 7, 7], [8, 8, 9]]
    found = compare(got, want, dtype="bfloat16", doubts=doubts)
    assert asked == [[(0, 2, 9), (1, 1, 4), (3, 2, 8)]]
    assert [d["kind"] for d in found["differences"]] == ["tie", "beyond a tie", "not classified"]
    assert found["equal_requests"] == 1
    assert in_words(found) == "1 of 4, 1 at a tie, 1 beyond a tie, 1 not classified"
    weaver, stock = {"cell": "b1", "arm": "weaver-63"}, {"cell": "b1", "arm": "stock-7"}
    (line,) = differing([weaver | {"texts": found}], strict=False)
    assert "b1 weaver-63" in line and "1 beyond a tie, 1 not classified" in line
    # An arm that samples other texts cannot be classified; of ours that is a failure.
    sampled = compare(got, want, dtype="bfloat16", doubts=None)
    assert sampled["not_classified"] == 3 and len(asked) == 1
    assert lossless([stock | {"texts": sampled}], strict=False)
    assert not lossless([stock | {"texts": sampled}], strict=True)
    assert not lossless([weaver | {"texts": sampled}], strict=False)
    assert lossless([weaver], strict=True)


def test_every_difference_of_a_large_cell_is_looked_up() -> None:
    found = compare(
        [[1]] * 64, [[2]] * 64, dtype="bfloat16",
        doubts=lambda places: [Doubt(0.0, 0.0, 4.0) for _ in places],
    )  # fmt: skip
    assert found["ties"] == 64 and found["not_classified"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_spacing_is_to_the_next_number_of_the_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    bits = torch.int32 if dtype == "float32" else torch.int16
    least = torch.finfo(kind).tiny
    draws = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(kind).tolist()
    edges = [16.0, 15.9375, 31.875, 1.0, 0.0, least, least / 2]
    for value in [*draws, *edges]:
        size = torch.tensor(abs(value), dtype=kind)
        after = (size.view(bits) + 1).view(kind)
        assert spacing(dtype, value) == spacing(dtype, -value) == float(after) - float(size)


def test_logits_that_were_not_rounded_to_the_dtype_have_no_step() -> None:
    assert step_at("bfloat16", 17.25) == 0.125 and step_at("bfloat16", -9.0625) == 0.0625
    # Of a float32 head, log-probabilities, and a token without a value.
    assert step_at("bfloat16", 17.3) is None and step_at("bfloat16", -0.1) is None
    assert step_at("bfloat16", float("-inf")) is None and step_at("bfloat16", float("nan")) is None
    assert step_at("float32", float(torch.tensor(17.3))) == 2.0**-19


@pytest.mark.parametrize(
    ("doubt", "dtype", "kind", "above"),
    [
        # Greedy: equal up to the limit, or to one step of logits that large.
        (Doubt(0.0625, 0.0625, 20.0), "bfloat16", "tie", 0),
        (Doubt(0.125, 0.125, 16.0), "bfloat16", "tie", 1),
        (Doubt(0.125, 0.125, -31.875), "bfloat16", "tie", 1),
        (Doubt(0.125, 0.125, 15.9375), "bfloat16", "beyond a tie", 0),
        (Doubt(0.25, 0.25, 16.0), "bfloat16", "beyond a tie", 0),
        (Doubt(0.25, 0.25, 32.0), "bfloat16", "tie", 1),
        # Sampled: a step moves the score by a step over T.
        (Doubt(None, 0.1008, 16.0, 1.0), "bfloat16", "tie", 1),
        (Doubt(None, 0.1008, 15.9375, 1.0), "bfloat16", "beyond a tie", 0),
        (Doubt(None, 0.12, 15.9375, 0.5), "bfloat16", "tie", 1),
        (Doubt(None, 0.13, 15.9375, 0.5), "bfloat16", "beyond a tie", 0),
        (Doubt(None, 0.07, 16.0, 2.0), "bfloat16", "tie", 0),
        (Doubt(None, 0.11, 16.0, 2.0), "bfloat16", "beyond a tie", 0),
        # Not bfloat16 numbers: the limit alone.
        (Doubt(0.12, 0.12, 16.01), "bfloat16", "beyond a tie", 0),
        (Doubt(None, float("nan"), 16.0, 1.0), "bfloat16", "beyond a tie", 0),
        # A step of float32 is far below the limit.
        (Doubt(1e-4, 1e-4, 20.0), "float32", "tie", 0),
        (Doubt(2e-4, 2e-4, 20.0), "float32", "beyond a tie", 0),
    ],
)
def test_a_tie_is_up_to_the_limit_or_one_rounding_step(
    doubt: Doubt, dtype: str, kind: str, above: int
) -> None:
    found = compare([[1]], [[2]], dtype=dtype, doubts=lambda _: [doubt])
    (difference,) = found["differences"]
    assert difference["kind"] == kind and found["ties_of_one_step"] == above
    assert difference["logit"] == doubt.logit
    assert difference["step"] == step_at(dtype, doubt.logit)
    words = in_words(found)
    assert ("1 at a tie (1 of one step)" in words) is bool(above)
    # A smaller limit turns ties within it to ties of a step, never more.
    strict = compare([[1]], [[2]], dtype=dtype, doubts=lambda _: [doubt], tie=0.0)
    assert strict["tie_limit"] == 0 and strict["ties"] <= found["ties"]
    # Results from before there were steps can be shown, too.
    del found["ties_of_one_step"]
    assert "of one step" not in in_words(found)


@pytest.mark.parametrize(
    ("exact", "kind"),
    [(0.17, "tie"), (-0.3, "tie"), (0.171, "beyond a tie"), (None, "beyond a tie")],
)
def test_what_float32_has_equal_is_a_tie(exact: float | None, kind: str) -> None:
    asked = []

    def distance(request: int, place: int, token: int) -> float:
        asked.append((request, place, token))
        assert exact is not None
        return exact

    doubts = [Doubt(0.25, 0.25, 9.0), Doubt(0.0, 0.0, 9.0)]
    # What rounds are logits, and what is compared where AR samples is logits over T.
    for temperature in (0.5, 2.0) if exact is not None else ():
        (other,) = compare(
            *([[1]], [[2]]), dtype="bfloat16", exact=distance,
            doubts=lambda _, t=temperature: [Doubt(None, 0.25, 0.5, t)],
        )["differences"]  # fmt: skip
        assert other["kind"] == ("tie" if exact <= 0.17 / temperature else "beyond a tie")
    asked.clear()
    found = compare(
        [[1, 3], [4]],
        [[1, 2], [5]],
        dtype="bfloat16",
        doubts=lambda _: list(doubts),
        exact=None if exact is None else distance,
    )
    assert [d["kind"] for d in found["differences"]] == [kind, "tie"]
    # Only what AR's distance leaves open is asked.
    assert asked == ([] if exact is None else [(0, 1, 3)])
    assert [d["exact"] for d in found["differences"]] == [exact, None]
    assert found["ties_in_float32"] == (kind == "tie")
    assert ("in float32" in in_words(found)) is (kind == "tie")
    if exact is not None and exact > 0:
        # A limit of one's own is that of both.
        strict = compare(
            *([[1]], [[2]]), dtype="bfloat16", doubts=lambda _: doubts[:1], tie=0.1, exact=distance
        )
        assert strict["beyond_a_tie"] == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_exact_distances_are_those_of_the_small_target(temperature: float) -> None:
    from benchmarks.testbed import export
    from benchmarks.testbed.config import SIZES

    directory = DEMO / "models/target"
    target = export.load_target(directory, SIZES["nano"].target, "cpu")
    prompt, own, other = list(range(20, 50)), [[300, 301, 302]], 17
    with torch.no_grad():
        hidden, _, _ = target(torch.tensor([[*prompt, 300, 301]]), ())
        logits = target.logits(hidden)[0, -1]
    asked = Asked([[prompt]], temperature=temperature, seed=3)
    expected = logits[302] - logits[other]
    if temperature:
        noise = noise_of(3, len(prompt) + 1, [302, other])
        expected = expected / temperature + noise[302] - noise[other]
    found = asked.exactly(own, ExactTarget(directory))(0, 2, other)
    assert found == pytest.approx(float(expected), abs=1e-3)


def test_rounding_is_measured_by_the_gap(tmp_path: Path) -> None:
    rounding(out=tmp_path / "r.json", target=DEMO / "models/target", places=100, length=64)
    found = json.loads((tmp_path / "r.json").read_text())
    moved = found["moved_where_gap_below_1"]
    # A step of bfloat16 below 1 is 0.004, of logits of 20 0.125.
    assert found["places"] >= 100 and 1e-3 < moved["standard_deviation"] < 0.3
    assert moved["absolute"]["0.5"] <= moved["absolute"]["0.999"]
    assert all(0 <= row["other_ahead"] <= 1 for row in found["by_gap"])
    for drawn in found["drawn"].values():
        assert drawn["draws"] == 4 * found["places"] and drawn["differ"] < drawn["draws"] / 20
        assert all(0 <= shift < 0.5 for shift in drawn["largest_shifts"])
    assert set(found["drawn"]) == {"T = 1", "top-p"} and found["drawn"]["T = 1"]["differ"] > 0


def test_the_small_target_takes_no_kernels_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers calls fla's wherever it is installed, and they refuse tensors of a CPU."""
    (tmp_path / "fla.py").write_text("ops = 1")
    (tmp_path / "plain_module.py").write_text("try:\n import fla\nexcept ImportError:\n fla = 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    with pytest.raises(RuntimeError), _plain_torch():
        plain = importlib.import_module("plain_module")
        # As older versions look for a package.
        assert plain.fla == 0 and importlib.util.find_spec("fla") is None
        raise RuntimeError("no memory")
    assert sys.modules["plain_module"] is plain
    fla = importlib.import_module("fla")
    with _plain_torch(), pytest.raises(ImportError):
        importlib.import_module("fla")
    assert sys.modules["fla"] is fla and fla.ops == 1 and "causal_conv1d" not in sys.modules


def test_a_run_goes_on_where_the_small_target_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, bench = run_with_fakes(monkeypatch, tmp_path, Grouping.ALL)
    asked, skipped = Asked([[[1, 2]]], 0.0, 0), len(results.skipped)
    bench.exact = ExactTarget(tmp_path / "missing")
    exact = bench._exactly(asked, [[5, 6]])
    assert exact is not None
    for _ in range(2):
        found = compare(
            [[5, 7]],
            [[5, 6]],
            dtype="bfloat16",
            doubts=lambda _: [Doubt(0.25, 0.25, 9.0)],
            exact=exact,
        )
        assert found["beyond_a_tie"] == 1 and found["differences"][0]["exact"] is None
    # It is said once, and not tried again.
    assert "small target" in results.skipped[-1]["reason"] and len(results.skipped) == skipped + 1
    assert bench._exactly(asked, [[5, 6]]) is None


def test_a_doubt_is_read_at_its_place_of_the_same_text() -> None:
    scores = [[[5, 17.0], [6, -19.0]], [[7, 4.5], [8, 4.25]]]
    assert doubt_at([5, 7], scores, [5, 7], 1, 8) == Doubt(0.25, 0.25, 4.5)
    # Not among the best: at least as far as the last of them.
    assert doubt_at([5, 7], scores, [5, 7], 0, 99) == Doubt(36.0, 36.0, -19.0)
    assert doubt_at([5, 7], scores, [4, 7], 1, 8) is None


def test_a_sampled_difference_is_a_distance_of_what_vllm_maximises() -> None:
    from vllm_weaver.ops import keyed_gumbel

    # Two groups of one request; the second's text differs at place 1, the first's nowhere.
    asked = Asked([[[1, 2, 3]], [[4, 5, 6, 7]]], temperature=0.5, seed=9)
    own, other = [[8, 8, 8], [5, 7, 9]], [[8, 8, 8], [5, 6, 6]]
    questions = asked.questions([own, other], own)
    assert list(questions) == [1] and questions[1]["tokens"] == 2
    assert questions[1]["ask"] == [[6]] and questions[1]["seed"] == 9
    asked.answers[1] = {"texts": [[5, 7]], "scores": [[[[5, -1.0]], [[7, -2.0], [6, -1.5]]]]}
    noise = keyed_gumbel(torch.tensor([9]), torch.tensor([[4]]), torch.tensor([[[7, 6]]])).flatten()
    (found,) = asked.of(own)([(1, 1, 6)])
    assert found is not None and found.gap is None
    assert found.distance == pytest.approx(float(-1.0 + noise[0] - noise[1]), abs=1e-6)
    assert found.logit == -2.0 and found.temperature == 0.5
    # Group 0 was not asked.
    assert asked.of(own)([(0, 1, 6)]) == [None]
    greedy = Asked(asked.groups, temperature=0.0, seed=9)
    assert "ask" not in greedy.questions([other], own)[1]


def test_ars_texts_are_known_again_by_what_they_depend_on() -> None:
    texts = OwnTexts()
    one, two, three = [1, 1], [2, 2], [3, 3]
    # Two batches of one, then a batch of three.
    small = Asked([[one], [two]], temperature=0.0, seed=5)
    assert texts.add("b1-t0", small, [[7], [8]]) == {}
    large = Asked([[three, one, two]], temperature=0.0, seed=5)
    assert texts.add("b3-t0", large, [[9], [7], [6]]) == {1: ("b1-t0", [7]), 2: ("b1-t0", [8])}
    # The same cell beside another arm says nothing new.
    assert texts.add("b3-t0", large, [[9], [7], [6]]) == {}
    # Sampled, the seed counts: that of a batch's first request is another one's in a larger batch.
    assert texts.add("b1-t1", Asked([[one], [two]], temperature=1.0, seed=5), [[1], [2]]) == {}
    sampled = Asked([[two, one]], temperature=1.0, seed=5)
    assert texts.add("b2-t1", sampled, [[3], [4]]) == {0: ("b1-t1", [2])}


def test_ar_is_compared_with_itself_in_other_cells() -> None:
    own = [[1, 2], [1, 2], [1, 2], [1, 2]]
    before = {3: ("b1", [1, 4]), 1: ("b1", [1, 2]), 2: ("b4", [5, 2])}

    def doubts(places: list[tuple[int, int, int]]) -> list[Doubt | None]:
        assert places == [(2, 0, 5), (3, 1, 4)]
        return [None, Doubt(0.125, 0.125, 17.0)]

    found = compare_again(before, own, dtype="bfloat16", doubts=doubts)
    assert found["cells"] == ["b1", "b4"]
    assert found["requests"] == 3 and found["equal_requests"] == 1
    assert found["ties"] == found["ties_of_one_step"] == found["not_classified"] == 1
    assert [d["request"] for d in found["differences"]] == [2, 3]
    assert found["largest_distance"] == 0.125


def test_cells_share_their_first_prompts_if_asked_to() -> None:
    tokenizer = load_tokenizer(str(DEMO / "models/target"))
    texts = list(texts_of(DEMO / "prompts"))
    groups = {(1, 50): 4, (4, 50): 1, (8, 50): 1, (2, 30): 1}
    own = cut_cells(tokenizer, texts, groups, share=False)
    every = {key: [ids for batch in batches for ids in batch] for key, batches in own.items()}
    assert {key: [len(batch) for batch in batches] for key, batches in own.items()} == {
        (1, 50): [1] * 4, (4, 50): [4], (8, 50): [8], (2, 30): [2]
    }  # fmt: skip
    assert every[1, 50] == every[4, 50] == cut_prompts(tokenizer, iter(texts), 4, 50)
    assert every[8, 50][:4] != every[4, 50]
    shared = cut_cells(tokenizer, texts, groups, share=True)
    assert shared[8, 50] == own[8, 50] and shared[2, 30] == own[2, 30]
    assert shared[4, 50] == [shared[8, 50][0][:4]]
    assert [batch[0] for batch in shared[1, 50]] == shared[4, 50][0]


def test_prompts_have_their_length_and_do_not_end_a_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(DEMO / "models/target"))
    prompts = cut_prompts(tokenizer, texts_of(DEMO / "prompts"), 3, 100)
    assert [len(ids) for ids in prompts] == [100] * 3
    assert len({tuple(ids) for ids in prompts}) == 3
    assert not any(tokenizer.decode([ids[-1]]).endswith("\n") for ids in prompts)
    with pytest.raises(PromptError):
        cut_prompts(tokenizer, iter([]), 1, 10)
    with pytest.raises(PromptError):
        list(texts_of(tmp_path))


class FakeEngine:
    """An engine process that decodes at a fixed speed; every token is its place."""

    #: Whether AR's last token in a batch of two is another one than alone.
    wavering = False
    #: Engines that do not start, and those that fail in the second cell.
    broken: tuple[str, ...] = ()
    breaking: tuple[str, ...] = ()

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.per_pass = 4 if name.startswith("weaver") else 2 if name != "ar" else 1
        self.count = self.emitted = 0
        self.stopped = False

    def send(self, command: str, **arguments: Any) -> None:
        self.pending = (command, arguments)

    def receive(self, command: str, timeout: float) -> dict[str, Any]:
        assert self.pending[0] == command
        return getattr(self, command)(**self.pending[1])

    def call(self, command: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        return getattr(self, command)(**arguments)

    def hold(self, options: dict[str, Any], sockets: str) -> dict[str, Any]:
        assert options["load_format"] == "expanded" and "speculative_config" not in options
        return {"seconds": 1.0}

    def start(self, options: dict[str, Any], plain_cpu: bool) -> dict[str, Any]:
        if self.name in self.broken:
            raise EngineError(f"{self.name}: no", self.name)
        self.options = options
        states = {"ar": 1, "stock-7": 8}.get(self.name, 2)
        memory = {
            "state_bytes_per_sequence": states * 100,
            "cache_bytes_per_sequence": {"1024": states * 200},
            "weight_bytes": 1,
            "cache_bytes": 1,
        }
        return {"start_seconds": 1.0, "memory": memory, "graphs": {"cudagraph_mode": "FULL"}}

    def begin(self, prompts: list[list[int]], tokens: int, **_: Any) -> dict[str, Any]:
        if len(prompts) > 1 and self.name in self.breaking:
            raise EngineError(f"{self.name}: out of memory", self.name)
        self.requests, self.tokens, self.steps = len(prompts), tokens, 0
        return {"prefill_seconds": 0.1}

    def advance(self, share: float, discard: int) -> dict[str, Any]:
        wanted = int(share * self.tokens / self.per_pass)
        new, self.steps = wanted - self.steps, wanted
        tokens = new * self.requests * self.per_pass
        return {"steps": new, "seconds": new * 0.01, "tokens": tokens, "closed": False}

    def finish(self, complete: bool) -> dict[str, Any]:
        each = self.steps * self.per_pass
        return {
            "prefill_seconds": 0.1,
            "at_once": self.requests < 2 or not self.name.startswith("stock"),
            "step_seconds": [0.01] * self.steps,
            "step_tokens": [self.requests * self.per_pass] * self.steps,
            "step_requests": [self.requests] * self.steps,
            "request_passes": [self.steps] * self.requests,
            "request_tokens": [each] * self.requests,
            "outputs": self.texts(self.requests, each),
        }

    def texts(self, requests: int, tokens: int) -> list[list[int]]:
        found = [list(range(tokens)) for _ in range(requests)]
        if self.wavering and requests == 2:
            for text in found:
                text[-1] = 0
        return found

    def warm(self, **_: Any) -> dict[str, Any]:
        return {"seconds": 1.0}

    def doubts(self, prompts: list[list[int]], tokens: int, **_: Any) -> dict[str, Any]:
        scores = [[[place, 16.0], [0, 16.125]] for place in range(tokens)]
        texts = self.texts(len(prompts), tokens)
        return {"texts": texts, "scores": [scores for _ in prompts]}

    def profile(self, steps: int, trace: str) -> dict[str, Any]:
        events = [
            {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 10 * i, "dur": 5, "tid": 1}
            for i in range(steps)
        ]
        Path(trace).write_text(json.dumps({"traceEvents": events}))
        return {"steps": steps, "tokens": steps, "ranges": ["benchmark.drafter"]}

    def stats(self) -> dict[str, Any]:
        return {"target_passes": 1}

    def memory(self) -> dict[str, Any]:
        return {}

    def stop(self, timeout: float = 0) -> None:
        self.stopped = True


def run_with_fakes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    grouping: Grouping,
    minutes: float = 60.0,
    temperature: float = 0.0,
) -> tuple[Results, Bench]:
    monkeypatch.setattr("benchmarks.e2e.measure.EngineProcess", FakeEngine)
    run = Run(
        arms=parse_arms("weaver,stock,ddtree", 63, [15, 7], 15),
        cells=order_cells([1, 2], [16], [temperature]),
        models=MODELS,
        cache=CacheShape.of(config_27b(), drafter_27b(), 2),
        room=Room(150 * 10**9, 54 * 10**9, 35 * 10**8),
        cost=CostModel(54 * 10**9, 150.0, 0.002),
        device="cuda",
        tokens=64,
        rounds=4,
        discard=0,
        minutes=minutes,
        grouping=grouping,
        warm=True,
        complete=False,
        seed=0,
        triton_prefill=True,
        environment={},
        extra={},
        logs=tmp_path,
        profile=("ar", "weaver-63"),
    )
    # Two batches of one request, one of two.
    prompts = {(b, 16): [[[1] * 16] * b] * (2 // b) for b in (1, 2)}
    bench = Bench(run, prompts, lambda text: None, lambda results: None)
    return bench.measure(), bench


@pytest.mark.parametrize("grouping", Grouping)
def test_ratios_go_by_way_of_the_ar_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouping: Grouping
) -> None:
    results, bench = run_with_fakes(monkeypatch, tmp_path, grouping)
    assert all(process.stopped for process in bench.processes.values())
    records = {(r["cell"], r["arm"]): r for r in results.cells}
    weaver = records["b1-c16-t0", "weaver-63"]
    assert weaver["over_ar"]["ratio"] == pytest.approx(4)
    assert weaver["best_stock"] in ("stock-15", "stock-7")
    assert weaver["over"][weaver["best_stock"]] == pytest.approx(2)
    assert weaver["over"]["ddtree-63"] == pytest.approx(2)
    others = {
        Grouping.ALL: ["ar", "stock-15", "stock-7", "ddtree-63"],
        Grouping.PAIRS: ["ar"],
        Grouping.ALONE: [],
    }
    assert weaver["with"] == others[grouping]
    alone = grouping is Grouping.ALONE
    assert ("interleaved" in weaver["over_ar"]["formed"]) is not alone
    assert (WEIGHTS in bench.processes) is (grouping is Grouping.ALL)
    assert weaver["texts"]["equal_requests"] == 2
    # Whose requests did not run at once has no figure, and is named.
    assert ("b2-c16-t0", "stock-15") not in records
    assert {skip["arm"] for skip in results.skipped} == {"stock-15", "stock-7"}
    assert set(results.traces) == {"ar", "weaver-63"}
    assert results.traces["ar"]["categories"]["GEMM"] == pytest.approx(0.005)
    assert results.traces["ar"]["cell"] == "b1-c16-t0"
    engines = summary(results)["engines"]
    assert engines["weaver-63"]["state_bytes_per_sequence_beyond_ar"] == 100
    assert engines["weaver-63"]["cache_bytes_per_sequence_beyond_ar"] == {"1024": 200}


@pytest.mark.parametrize("grouping", Grouping)
def test_ar_is_measured_against_itself_across_cells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouping: Grouping
) -> None:
    monkeypatch.setattr(FakeEngine, "wavering", True)
    results, _ = run_with_fakes(monkeypatch, tmp_path, grouping)
    plain = [r for r in results.cells if r["arm"] == "ar"]
    found = {r["cell"]: r["ar_again"] for r in plain if "ar_again" in r}
    # Once, in the later cell, whatever stands beside.
    assert list(found) == ["b2-c16-t0"] and sum("ar_again" in r for r in plain) == 1
    again = found["b2-c16-t0"]
    assert again["cells"] == ["b1-c16-t0"] and again["requests"] == 2
    assert again["equal_requests"] == 0 and again["ties_of_one_step"] == again["ties"] == 2
    assert again["largest_distance"] == 0.125
    assert {d["step"] for d in again["differences"]} == {0.125}
    # Arms that waver as AR does are equal to it; that AR differs from itself fails nothing.
    assert lossless(results.cells, strict=True)
    text = markdown({"cells": results.cells, "skipped": []})
    assert "itself of b1-c16-t0: 0 of 2, 2 at a tie (2 of one step)" in text


@pytest.mark.parametrize("grouping", [Grouping.ALL, Grouping.ALONE])
def test_ar_is_measured_against_itself_where_it_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouping: Grouping
) -> None:
    monkeypatch.setattr(FakeEngine, "wavering", True)
    results, _ = run_with_fakes(monkeypatch, tmp_path, grouping, temperature=1.0)
    (again,) = [r["ar_again"] for r in results.cells if "ar_again" in r]
    # Of one prompt, the first of a batch alone has the seed of a batch of one.
    assert again["requests"] == 1 and again["not_classified"] == 0
    (difference,) = again["differences"]
    noise = noise_of(0, 16 + 63 - 1, [0, 63])
    want = 16.125 - 16.0 + noise[0] - noise[63]
    assert difference["distance"] == pytest.approx(want) and difference["logit"] == 16.125


def test_engines_over_one_copy_of_the_weights_go_on_without_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeEngine, "broken", ("stock-15",))
    monkeypatch.setattr(FakeEngine, "breaking", ("ddtree-63",))
    results, bench = run_with_fakes(monkeypatch, tmp_path, Grouping.ALL)
    found = {(r["cell"], r["arm"]) for r in results.cells}
    assert ("b1-c16-t0", "ddtree-63") in found and ("b2-c16-t0", "weaver-63") in found
    assert not any(arm == "stock-15" for _, arm in found)
    skipped = {f"{s['cell']} {s['arm']}" for s in results.skipped}
    assert {"b2-c16-t0 ddtree-63", "all stock-15"} <= skipped
    assert bench.processes["stock-15"].stopped
    options = bench.processes["weaver-63"].options  # type: ignore[attr-defined]
    assert options["load_format"] == "ipc_cache"
    assert options["speculative_config"]["draft_load_config"] == {"load_format": "expanded"}
    # Of the device, with the weights that it does not hold itself.
    assert 54 / 150 < options["gpu_memory_utilization"] < 60 / 150


def test_caches_of_all_engines_fit_beside_one_copy_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, bench = run_with_fakes(monkeypatch, tmp_path, Grouping.ALL)
    given = {
        name: record["options"]["kv_cache_memory_bytes"] for name, record in results.engines.items()
    }
    room = bench.run.room
    assert sum(given.values()) + room.target + 4 * room.drafter < room.device
    assert given["stock-15"] == results.engines["stock-15"]["cache_wanted_bytes"]
    # Engines that work alone are given all that they ask for.
    plain = {"model": "m", "load_format": "auto"}
    assert "speculative_config" not in shared_options(plain, "sockets", 0.4)


def test_what_does_not_fit_into_the_time_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, _ = run_with_fakes(monkeypatch, tmp_path, Grouping.PAIRS, minutes=1.0)
    assert {skip["arm"] for skip in results.skipped} >= {"stock-15", "stock-7", "ddtree-63"}
    assert all("left" in skip["reason"] for skip in results.skipped)


def test_results_become_a_table_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, _ = run_with_fakes(monkeypatch, tmp_path, Grouping.PAIRS)
    data = {
        "title": "test",
        "cells": results.cells,
        "engines": results.engines,
        "skipped": [{"arm": "a", "cell": "c", "reason": "r"}],
    }
    text = markdown(json.loads(json.dumps(data)))
    assert "| b1-c16-t0 | weaver-63 |" in text and "Not run: a, c: r." in text
    plot_cells(data, tmp_path / "cells.png")
    assert (tmp_path / "cells.png").read_bytes()[:4] == b"\x89PNG"
