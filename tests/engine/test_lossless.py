# SPDX-License-Identifier: Apache-2.0
"""In float32, tree decoding emits plain decoding's tokens, whatever the trees and the batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import (
    BUDGET,
    Arrival,
    Plain,
    TreeEngine,
    assert_same,
    assert_same_logprobs,
    async_scheduling,
    greedy,
    sampled,
    tokens,
)
from vllm.sampling_params import StructuredOutputsParams

TreesOf = Callable[..., Any]

SAMPLERS = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02, "temperature": 1.2},
}


def joining(trees: Any, plain: Plain) -> None:
    """Six requests that join one after another, and one that is aborted; all but it compared."""
    prompts = [tokens(n, 1) for n in (9, 33, 1, 17, 1, 5)]
    lengths = (24, 9, 16, 20, 12, 24)
    want = plain.outputs(prompts, [greedy(n) for n in lengths])
    trees.oracle.follow(want)
    arrivals = [
        Arrival(step, prompt, greedy(length))
        for step, prompt, length in zip((0, 0, 2, 3, 5, 6), prompts, lengths, strict=True)
    ]
    arrivals.append(Arrival(1, tokens(12, 2), greedy(64), leave=4))
    assert_same(trees.run(arrivals), want, plain)
    stats = trees.stats()
    assert stats["mean_accepted_length"] > 2 and sum(stats["length_histogram"][6:]) > 0


def test_greedy_batch_with_requests_joining_and_leaving(plain: Plain, trees: Any) -> None:
    joining(trees, plain)


@pytest.fixture
def sampling_every_node(trees_of: TreesOf, target: str) -> Iterator[Any]:
    """An engine that samples as on a GPU: every node of a tree, and not its path alone."""
    trees = trees_of(target, budget=5)
    sampler = trees.runner.rejection_sampler
    assert sampler.level_by_level
    sampler.level_by_level = False
    yield trees
    sampler.level_by_level = True


def test_sampling_every_node_gives_the_same_tokens(plain: Plain, sampling_every_node: Any) -> None:
    trees = sampling_every_node
    prompts = [tokens(6 + i, 3) for i in range(4)]
    params = [sampled(12, seed=i, **options) for i, options in enumerate(SAMPLERS.values())]
    params[0] = greedy(12)
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want)
    assert trees.stats()["mean_accepted_length"] > 1.5


def test_asynchronous_scheduling_gives_the_same_tokens(
    plain: Plain, tiny_models: dict[str, Path], target: str
) -> None:
    with async_scheduling():
        trees = TreeEngine(tiny_models, target)
    assert trees.core.async_scheduling and trees.core.batch_queue is not None
    joining(trees, plain)
    params = [sampled(12, seed=i) for i in range(2)]
    prompts = [tokens(6 + i, 3) for i in range(2)]
    assert_same(trees.generate(prompts, params), plain.outputs(prompts, params))
    # With a grammar the drafts come back to the host between two steps.
    grammar = StructuredOutputsParams(regex="(if|for) [a-d]{2,9};")
    params = [greedy(16, structured_outputs=grammar, ignore_eos=False), greedy(16)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want)


def test_seeded_sampling_gives_plain_samplings_tokens(
    plain: Plain, trees_of: TreesOf, target: str
) -> None:
    trees = trees_of(target, budget=5)
    prompts = [tokens(6 + i, 3) for i in range(4)]
    params = [sampled(12, seed=i, **options) for i, options in enumerate(SAMPLERS.values())]
    want = plain.outputs(prompts, params)
    assert len({tuple(x.tokens) for x in want}) == 4
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want)
    assert trees.stats()["mean_accepted_length"] > 1.5


def test_prompts_of_every_length_around_the_budget(
    plain: Plain, trees_of: TreesOf, target: str
) -> None:
    budget = 5
    trees = trees_of(target, budget=budget)
    prompts = [tokens(n, 4) for n in range(1, 2 * budget + 3)]
    want = plain.outputs(prompts, greedy(10))
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, greedy(10)), want, plain)
    # The same beside a request that is already decoding, so that one-token tails are padded.
    other = tokens(20, 4)
    trees.oracle.follow([*want, *plain.outputs([other], greedy(40))])
    some = (0, budget - 1, budget, budget + 1)
    arrivals = [Arrival(0, other, greedy(40))]
    arrivals += [Arrival(2, prompts[i], greedy(10)) for i in some[:3]]
    assert_same(trees.run(arrivals)[1:], [want[i] for i in some[:3]], plain)


def test_prompt_of_exactly_one_trees_rows(plain: Plain, trees: Any) -> None:
    prompts = [tokens(BUDGET + 1, seed) for seed in (5, 6)]
    want = plain.outputs(prompts, greedy(16))
    trees.oracle.follow(want)
    assert_same(
        trees.run([Arrival(0, prompts[0], greedy(16)), Arrival(3, prompts[1], greedy(16))]),
        want,
        plain,
    )


def test_chunked_prefill_beside_decoding_requests(
    plain: Plain, trees_of: TreesOf, target: str
) -> None:
    trees = trees_of(target, budget=5, max_num_batched_tokens=32)
    prompts = [tokens(7, 7), tokens(90, 7), tokens(41, 8)]
    params = [greedy(30), greedy(10), greedy(8)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    arrivals = [Arrival(step, p, x) for step, p, x in zip((0, 1, 2), prompts, params, strict=True)]
    assert_same(trees.run(arrivals), want, plain)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_trees_cut_by_the_token_budget(
    plain: Plain, tiny_models: dict[str, Path], target: str, room: int
) -> None:
    """A request gets ``room`` nodes of its tree while two others run, and all of it afterwards."""
    # Besides its own rows a request with a tree reserves as many for the drafter as nodes.
    limit = 2 * (2 * BUDGET + 1) + BUDGET + 1 + room
    trees = TreeEngine(tiny_models, target, max_num_batched_tokens=limit)
    prompts = [tokens(5 + i, 16) for i in range(3)]
    params = [greedy(12), greedy(20), greedy(28)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    scheduled = []
    schedule = trees.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = schedule(*args, **kwargs)
        scheduled.extend(result.num_scheduled_tokens.values())
        return result

    trees.scheduler.schedule = watched
    assert_same(trees.generate(prompts, params), want, plain)
    assert 1 + room in scheduled and 1 + BUDGET in scheduled


@pytest.mark.parametrize("shape", ["random", "root"])
def test_generation_to_exactly_max_model_len(plain: Plain, trees: Any, shape: str) -> None:
    """Beside a request that goes on decoding, so that batches mix cut and whole trees."""
    limit = 256
    prompts = [tokens(limit - 20, 9), tokens(limit - 17, 9), tokens(8, 9)]
    params = [greedy(64), greedy(64), greedy(24)]
    want = plain.outputs(prompts, params)
    assert [len(x.tokens) for x in want] == [20, 17, 24]
    trees.oracle.follow(want, shape)
    assert_same(trees.generate(prompts, params), want, plain)


def test_preempted_requests_resume_where_they_were(
    plain: Plain, trees_of: TreesOf, target: str
) -> None:
    # Room for two requests of three blocks, of which the second grows into a fourth.
    blocks = {"dense": 8, "hybrid": 6}[target]
    trees = trees_of(target, block_size=32, num_gpu_blocks_override=blocks, max_model_len=128)
    preemptions = []
    original = trees.scheduler._preempt_request
    trees.scheduler._preempt_request = lambda *args, **kwargs: (
        preemptions.append(args[0].request_id),
        original(*args, **kwargs),
    )[1]
    prompts = [tokens(70 + i, 10) for i in range(3)]
    want = plain.outputs(prompts, greedy(24))
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, greedy(24)), want, plain)
    assert preemptions


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_those_of_the_accepted_path(
    plain_of: Callable[..., Plain], trees_of: TreesOf, target: str, mode: str
) -> None:
    plain = plain_of(target, logprobs_mode=mode)
    trees = trees_of(target, budget=5, logprobs_mode=mode)
    prompts = [tokens(5 + i, 11) for i in range(4)]
    params = [
        greedy(10, logprobs=3, prompt_logprobs=2),
        greedy(12),
        sampled(10, seed=3, logprobs=2, top_k=30),
        greedy(9, logprobs=0),
    ]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    got = trees.generate(prompts, params)
    assert_same(got, want)
    assert trees.stats()["mean_accepted_length"] > 1.5
    for index in (0, 2, 3):
        assert_same_logprobs(got[index].logprobs, want[index].logprobs)
    assert got[1].logprobs is None
    assert_same_logprobs(got[0].prompt_logprobs, want[0].prompt_logprobs)


def test_generation_stops_in_the_middle_of_a_path(plain: Plain, trees: Any) -> None:
    prompts = [tokens(10 + i, 12) for i in range(4)]
    free = plain.outputs(prompts, greedy(24))
    # Tokens and texts that plain decoding meets half-way.
    stops: list[dict[str, Any]] = [
        {"stop_token_ids": [free[0].tokens[9]]},
        {"stop": [_words(free[1].text)]},
        {"stop": [_words(free[2].text)], "include_stop_str_in_output": True},
        {"min_tokens": 3, "stop_token_ids": [free[3].tokens[11]]},
    ]
    params = [greedy(24, **stop) for stop in stops]
    want = plain.outputs(prompts, params)
    assert all(x.finish_reason == "stop" and len(x.tokens) < 24 for x in want)
    # Trees that go on past the stop, so that it lies inside an accepted path.
    trees.oracle.follow(free)
    assert_same(trees.generate(prompts, params), want)


def _words(text: str) -> str:
    """Three plain characters from behind the first third of a text."""
    match = re.search("[a-z]{3}", text[len(text) // 3 :])
    assert match is not None
    return match.group()


def test_several_samples_of_one_prompt(plain: Plain, trees_of: TreesOf, target: str) -> None:
    trees = trees_of(target, budget=5)
    prompt = tokens(9, 13)
    params = sampled(8, seed=5, n=2)
    want, got = plain.engine.samples(prompt, params), trees.samples(prompt, params)
    assert got == want and want[0] != want[1]


@pytest.mark.parametrize("proposal", ["weaver", "ddtree", "chain", "weaver-v1"])
def test_every_proposal_is_verified_exactly(
    plain: Plain, tiny_models: dict[str, Path], trees_of: TreesOf, target: str, proposal: str
) -> None:
    if proposal == "weaver":
        trees = trees_of(target)
    else:
        version = proposal == "weaver-v1"
        weaver = (
            {"adapter": str(tiny_models[f"{target}-weaver16-v1"])}
            if version
            else {"proposal": proposal, "candidate_pool": 16}
        )
        trees = TreeEngine(
            tiny_models, target, weaver=weaver, block=16 if version else 8, budget=BUDGET
        )
    prompts = [tokens(n, 14) for n in (4, 25)]
    params = [greedy(10), sampled(10, seed=4)]
    want = plain.outputs(prompts, params)
    assert_same(trees.generate(prompts, params), want, plain)
    stats = trees.stats()
    depth = trees.runner.speculator.depth
    nodes = min(depth, BUDGET) if proposal == "chain" else BUDGET
    assert stats["tree_nodes"] >= 0.7 * nodes * stats["target_passes"]


def test_budget_63_with_a_drafter_of_depth_15(plain: Plain, tiny_models, target: str) -> None:
    trees = TreeEngine(tiny_models, target, budget=63, block=16, max_num_batched_tokens=512)
    prompts = [tokens(n, 15) for n in (6, 64)]
    want = plain.outputs(prompts, greedy(24))
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, greedy(24)), want, plain)
    assert trees.stats()["mean_accepted_length"] > 4
    trees.oracle.reset()
    assert_same(trees.generate(prompts[:1], greedy(4)), plain.outputs(prompts[:1], greedy(4)))
