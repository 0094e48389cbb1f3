# SPDX-License-Identifier: Apache-2.0
"""Controls that cannot be wrong: degenerate trees, and states looked at directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from running import BUDGET, Engine, Plain, TreeEngine, assert_same, greedy, tokens

DEPTH = 7
States = dict[str, list[torch.Tensor]]


def test_siblings_change_neither_tokens_nor_acceptance_of_a_spine(plain: Plain, trees: Any) -> None:
    prompts = [tokens(10 + i, 30) for i in range(3)]
    want = plain.outputs(prompts, greedy(24))
    histograms = []
    for shape in ("spine", "bush"):
        trees.oracle.follow(want, shape, depths=(3, 0, 7, 1, 5))
        trees.stats()
        assert_same(trees.generate(prompts, greedy(24)), want, plain)
        histograms.append(trees.stats()["length_histogram"])
    assert histograms[0] == histograms[1]


def test_trees_of_the_root_alone_are_plain_decoding(plain: Plain, trees: Any) -> None:
    prompts = [tokens(10 + i, 31) for i in range(2)]
    want = plain.outputs(prompts, greedy(10))
    trees.oracle.follow(want, "root")
    assert_same(trees.generate(prompts, greedy(10)), want, plain)
    assert trees.stats()["length_histogram"] == [0, 2 * 9, *[0] * DEPTH]


def test_drafter_of_a_reduced_vocabulary_drafts_the_targets_tokens(
    plain_of: Callable[..., Plain], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    models = {
        **tiny_models,
        "dense-dflash8": architectures.reduced_vocabulary(
            tiny_models["dense-dflash8"], tmp_path, every=4
        ),
    }
    trees = TreeEngine(models, "dense")
    seen: list[torch.Tensor] = []
    propose = trees.runner.speculator.propose

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(propose(*args, **kwargs).clone())
        return seen[-1]

    trees.runner.speculator.propose = watched
    prompts = [tokens(9, 35)]
    plain = plain_of("dense")
    assert_same(trees.generate(prompts, greedy(8)), plain.outputs(prompts, greedy(8)), plain)
    drafts = torch.cat(seen)
    assert (drafts % 4 == 0).all() and len(drafts.unique()) > 3


def test_chains_are_those_of_vllms_own_dflash(
    tiny_models: dict[str, Path], trees_of: Callable[..., Any]
) -> None:
    """The drafter runs at its own depth whatever the budget, on the same context."""
    chains = trees_of("dense", weaver={"proposal": "chain"})
    stock = Engine(
        tiny_models["dense"],
        speculative_config={
            "method": "dflash",
            "model": str(tiny_models["dense-dflash8"]),
            "num_speculative_tokens": DEPTH,
        },
    )
    prompts = [tokens(9 + i, 32) for i in range(2)]
    drafts = []
    for engine in (stock, chains):
        seen: list[list[int]] = []
        original = engine.runner.speculator.propose

        def propose(
            *args: Any, original: Any = original, seen: list[list[int]] = seen, **kwargs: Any
        ) -> torch.Tensor:
            result = original(*args, **kwargs)
            seen.extend(result[:, :DEPTH].tolist())
            return result

        engine.runner.speculator.propose = propose
        engine.generate(prompts, greedy(10))
        engine.runner.speculator.propose = original
        drafts.append(seen)
    assert len(drafts[0]) >= 10 and drafts[0] == drafts[1]


@pytest.mark.parametrize("caching, together", [(False, False), (True, False), (True, True)])
def test_committed_states_are_plain_decodings(
    plain_of: Callable[..., Plain],
    tiny_models: dict[str, Path],
    caching: bool,
    together: bool,
    request: pytest.FixtureRequest,
) -> None:
    """After every step and for paths of every length, at block boundaries too."""
    plain = plain_of("hybrid")
    if together:
        request.getfixturevalue("side_by_side")
    options = {"enable_prefix_caching": True, "block_size": 32} if caching else {}
    trees = TreeEngine(tiny_models, "hybrid", **options)
    block = trees.runner.cache_config.mamba_block_size if caching else 10**6
    prompt, count = tokens(block - 9 if caching else 20, 33), 45
    expected = {
        length: plain.engine.recurrent_states() for length in steps(plain.engine, prompt, count)
    }
    want = plain.outputs([prompt], greedy(count))
    trees.oracle.follow(want, "bush", depths=range(DEPTH + 1))
    compared, boundaries, before = 0, 0, 0
    for length in steps(trees, prompt, count):
        if length not in expected:
            continue
        column = (length - 1) // block if caching else 0
        assert_same_states(trees.recurrent_states(column), expected[length])
        compared += 1
        # From the next step on the block left behind may be another's.
        if column > before:
            assert_same_states(trees.recurrent_states(column - 1), expected[column * block])
            boundaries += 1
        before = column
    assert compared >= 8 and (boundaries > 0) == caching
    assert all(trees.stats()["length_histogram"][1:])


def steps(engine: Engine, prompt: list[int], count: int) -> Iterator[int]:
    """Step through one request; yields the number of tokens that its states hold."""
    core, held = engine.llm.llm_engine, engine.runner.req_states
    core.add_request(f"only-{count}", {"prompt_token_ids": prompt}, greedy(count))
    while core.has_unfinished_requests():
        core.step()
        if core.has_unfinished_requests():
            (index,) = held.req_id_to_index.values()
            yield int(held.num_computed_tokens.gpu[index])


def assert_same_states(got: States, want: States) -> None:
    """Equal within 1e-5 of the largest entry."""
    assert got.keys() == want.keys() and got
    for name, parts in got.items():
        for mine, plain in zip(parts, want[name], strict=True):
            difference = float((mine - plain).abs().max() / plain.abs().max())
            assert difference <= 1e-5, (name, difference)


def test_verification_writes_no_state(
    plain_of: Callable[..., Plain], trees_of: Callable[..., Any]
) -> None:
    trees = trees_of("hybrid")
    prompts = [tokens(10 + i, 34) for i in range(2)]
    want = plain_of("hybrid").outputs(prompts, greedy(20))
    trees.oracle.follow(want)
    runner = trees.runner
    layers = [layer for group in runner.model_state._gdn_groups for layer in group]
    execute = runner.execute_model
    verified = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = [[cache.clone() for cache in layer.kv_cache] for layer in layers]
        result = execute(*args, **kwargs)
        step = runner.model_state.step
        if step is not None:
            for layer, caches in zip(layers, before, strict=True):
                slots = runner.model_state._metadata[layer.prefix].state_indices.long()
                assert len(slots) == step.num_requests and bool((slots > 0).all())
                for cache, old in zip(layer.kv_cache, caches, strict=True):
                    assert torch.equal(cache[slots], old[slots])
            verified.append(step.num_tokens)
        return result

    runner.execute_model = watched
    try:
        trees.generate(prompts, greedy(20))
    finally:
        runner.execute_model = execute
    assert 2 * (BUDGET + 1) in verified
