# SPDX-License-Identifier: Apache-2.0
"""Requests whose sampling reads the whole prefix run as chains, beside others that run as trees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Engine, Output, Plain, TreeEngine, assert_same, greedy, sampled, tokens
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def watched_shapes(trees: Any) -> list[tuple[list[int], list[bool]]]:
    """Parents of every verified tree, and whether its request is one that needs a chain."""
    state = trees.runner.model_state
    seen: list[tuple[list[int], list[bool]]] = []
    record = state.stats.record

    def watch(step: Any) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            nodes = int(step.tree.num_nodes[row])
            seen.append((step.tree.parents[row, :nodes].tolist(), bool(state.chain_only[slot])))
        record(step)

    state.stats.record = watch
    return seen


def assert_falls_back(
    plain: Plain, trees: Any, params: list[SamplingParams], chains: int, seed: int
) -> list[Output]:
    """Outputs are plain decoding's; the first ``chains`` requests ran as chains and count."""
    prompts = [tokens(8 + i, seed) for i in range(len(params))]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    seen = watched_shapes(trees)
    assert_same(trees.generate(prompts, params), want)
    del trees.runner.model_state.stats.record
    assert all(parents == list(range(-1, len(parents) - 1)) for parents, chain in seen if chain)
    if chains < len(params):
        branched = [parents for parents, chain in seen if not chain]
        assert any(parents != list(range(-1, len(parents) - 1)) for parents in branched)
    stats = trees.stats()
    assert stats["chain_fallbacks"] == chains and stats["mean_accepted_length"] > 1.3
    return want


def test_penalties_run_as_chains(plain: Plain, trees: Any) -> None:
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    ]
    params = [greedy(16, **penalty) for penalty in penalties]
    params += [sampled(10, seed=1, frequency_penalty=1.2), greedy(16)]
    assert_falls_back(plain, trees, params, chains=3, seed=50)


def test_bad_words_run_as_chains(plain: Plain, trees: Any) -> None:
    free = plain.outputs([tokens(8, 51)], greedy(24))[0]
    words = re.findall("[a-z]{2,}", free.text)
    want = assert_falls_back(
        plain, trees, [greedy(24, bad_words=words), greedy(16)], chains=1, seed=51
    )
    assert words and want[0].tokens != free.tokens


def test_structured_output_runs_as_chains(plain: Plain, trees: Any) -> None:
    schema = {"type": "integer", "minimum": 1000, "maximum": 99999}
    choices = ["return True", "return False", "raise"]
    grammars = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(regex="(if|for) [a-d]{2,9};"),
        StructuredOutputsParams(choice=choices),
    ]
    params = [greedy(24, structured_outputs=grammar, ignore_eos=False) for grammar in grammars]
    want = assert_falls_back(plain, trees, [*params, greedy(12)], chains=3, seed=52)
    assert 1000 <= json.loads(want[0].text) <= 99999
    assert re.fullmatch("(if|for) [a-d]{2,9};", want[1].text)
    assert want[2].text in choices


def test_positional_parameters_run_as_trees(plain: Plain, trees: Any) -> None:
    """min_tokens, logit_bias and allowed tokens depend on the position or on nothing."""
    prompts = [tokens(8 + i, 53) for i in range(4)]
    free = plain.outputs(prompts, greedy(16))
    params = [
        greedy(12, min_tokens=6, stop_token_ids=[free[0].tokens[3]]),
        greedy(12, logit_bias={free[1].tokens[0]: -100.0, free[1].tokens[5]: -100.0}),
        greedy(12, allowed_token_ids=list(range(4, 40))),
        sampled(8, seed=2, logit_bias={7: 3.0, 8: 3.0}),
    ]
    want = assert_falls_back(plain, trees, params, chains=0, seed=53)
    assert all(a.tokens != b.tokens for a, b in zip(want[:3], free, strict=False))


def test_custom_logits_processors_turn_every_request_into_a_chain(
    tiny_models: dict[str, Path], plain_of: Callable[..., Plain]
) -> None:
    options = {"logits_processors": ["processors:ForbidSums"]}
    plain = Plain(Engine(tiny_models["dense"], **options))
    trees = TreeEngine(tiny_models, "dense", **options)
    want = assert_falls_back(plain, trees, [greedy(16), greedy(12)], chains=2, seed=54)
    free = plain_of("dense").outputs([tokens(8, 54)], greedy(16))
    assert want[0].tokens != free[0].tokens


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "top_p": 0.5}, {"min_tokens": 3}])
def test_ordinary_requests_need_no_chain(asked: dict[str, Any]) -> None:
    from vllm_weaver.engine.state import needs_chain

    assert not needs_chain(SamplingParams(**asked)) and not needs_chain(None)
