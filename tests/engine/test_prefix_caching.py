# SPDX-License-Identifier: Apache-2.0
"""With prefix caching a hybrid's states live in cache blocks, and are right for whoever reads them.

The tokens compared with are plain decoding's without caching: in float32 the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import BUDGET, Arrival, Engine, Plain, TreeEngine, assert_same, greedy, tokens

CACHING = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 256}
DROP = {"disable_eagle_block_drop": True}


@pytest.fixture(scope="module")
def caching(tiny_models: dict[str, Path], target: str) -> TreeEngine:
    return TreeEngine(tiny_models, target, speculation=DROP, **CACHING)


def block_of(engine: Engine) -> int:
    """Tokens in a block of the group that holds the recurrent state, or of attention."""
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return max(group.kv_cache_spec.block_size for group in groups)


def test_states_of_cached_blocks_are_those_of_a_cold_run(
    plain: Plain, caching: TreeEngine, target: str
) -> None:
    """Paths cross block boundaries while decoding; later rounds start from what was cached."""
    block = block_of(caching)
    # The first crosses a boundary while decoding, the second holds two whole blocks.
    first, second = tokens(block - 6, 20), tokens(2 * block + 5, 21)
    prompts = [first, second]
    want = plain.outputs(prompts, greedy(20))
    caching.oracle.follow(want)
    assert_same(caching.generate(prompts, greedy(20)), want, plain)
    warm = caching.generate(prompts, greedy(20))
    assert_same(warm, want, plain)
    assert warm[0].cached_tokens == 0 and warm[1].cached_tokens == 2 * block
    # Prompts that go on where the last answers ended: their blocks were filled by decoding.
    longer = [[*x.prompt, *x.tokens, *tokens(4, 22)] for x in want]
    after = plain.outputs(longer, greedy(12))
    caching.oracle.follow(after)
    assert_same(caching.generate(longer, greedy(12)), after, plain)
    # And the first ones once more, after others used the cache.
    caching.oracle.follow(want)
    assert_same(caching.generate(prompts, greedy(20)), want, plain)


def test_hits_are_those_of_an_engine_without_speculation(
    tiny_models: dict[str, Path], caching: TreeEngine, target: str
) -> None:
    block = block_of(caching)
    prompts = [tokens(n, 23) for n in (block, block + 1, 2 * block + 1)]
    reference = Engine(tiny_models[target], **CACHING)
    hits = []
    for engine in (reference, caching):
        for _ in range(2):
            outputs = [engine.generate([prompt], greedy(2))[0] for prompt in prompts]
        hits.append([x.cached_tokens // block_of(engine) for x in outputs])
    assert hits[0] == hits[1] == [0, 1, 2]


def test_one_token_tail_of_a_cached_prompt_joins_running_trees(
    plain: Plain, caching: TreeEngine
) -> None:
    """vLLM pads it with placeholder drafts; none of them may be accepted or counted."""
    block = block_of(caching)
    prompt, other = tokens(block + 1, 24), tokens(9, 25)
    want = plain.outputs([other, prompt], [greedy(40), greedy(16)])
    caching.oracle.follow(want)
    caching.generate([prompt], greedy(2))
    padded = []
    schedule = caching.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = schedule(*args, **kwargs)
        padded.extend(
            request.req_id
            for request in result.scheduled_new_reqs
            if result.scheduled_spec_decode_tokens.get(request.req_id) == [-1] * BUDGET
        )
        return result

    caching.scheduler.schedule = watched
    try:
        got = caching.run([Arrival(0, other, greedy(40)), Arrival(3, prompt, greedy(16))])
    finally:
        caching.scheduler.schedule = schedule
    assert len(padded) == 1 and got[1].cached_tokens == block
    assert_same(got, want, plain)


def test_prefix_of_a_request_aborted_while_prefilling(
    plain: Plain, trees_of: Callable[..., Any], target: str
) -> None:
    trees = trees_of(target, speculation=DROP, **{**CACHING, "max_num_batched_tokens": 128})
    prompt = tokens(2 * block_of(trees) + 7, 28)
    want = plain.outputs([prompt], greedy(8))
    trees.oracle.follow(want)
    other = Arrival(0, tokens(6, 28), greedy(6))
    assert len(trees.run([other, Arrival(0, prompt, greedy(8), leave=1)])) == 1
    for _ in range(2):
        got = trees.generate([prompt], greedy(8))
        assert_same(got, want, plain)
    assert got[0].cached_tokens > 0


def test_default_settings_drop_the_last_cached_block(
    plain: Plain, trees_of: Callable[..., Any], target: str
) -> None:
    """vLLM recomputes the last block for drafters; cold and warm runs agree all the same."""
    trees = trees_of(target, **CACHING)
    prompt = tokens(2 * block_of(trees) + 3, 26)
    want = plain.outputs([prompt], greedy(10))
    trees.oracle.follow(want)
    for cached in (0, block_of(trees)):
        got = trees.generate([prompt], greedy(10))
        assert got[0].cached_tokens == cached
        assert_same(got, want, plain)


def test_eviction_under_a_full_cache_never_yields_another_sequences_state(
    plain: Plain, trees_of: Callable[..., Any], target: str
) -> None:
    trees = trees_of(target, num_gpu_blocks_override=12, max_model_len=160, **CACHING)
    prompts = [tokens(70 + 9 * i, 27) for i in range(4)]
    want = plain.outputs(prompts, greedy(10))
    trees.oracle.follow(want)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        batch = [want[i] for i in order]
        assert_same(trees.generate([x.prompt for x in batch], greedy(10)), batch, plain)
