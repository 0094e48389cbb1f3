# SPDX-License-Identifier: Apache-2.0
"""What a whole-step graph freezes may not matter: replayed steps give plain decoding's tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_reads import HostReads
from replay import capture_drafter, capture_target
from running import Plain, TreeEngine, assert_same, greedy, sampled, tokens
from test_lossless import joining
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_weaver.engine.gdn_layer import TreeGatedDeltaNet

TreesOf = Callable[..., Any]


def test_replayed_steps_give_plain_decodings_tokens(
    plain: Plain, trees: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that grow and shrink, padded to graphs of 1, 2 and 4 requests."""
    graphs = capture_target(trees, monkeypatch, (1, 2, 4))
    assert {(d.num_reqs, d.num_tokens) for d in graphs} == {(1, 13), (2, 26), (4, 52)}
    joining(trees, plain)
    replays = {d.num_reqs: graph.replays for d, graph in graphs.items()}
    assert all(replays.values()), replays


def test_padding_requests_touch_nothing(
    plain: Plain, trees: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph of 4 requests for batches of 1 to 3, whose slots had other owners before."""
    graphs = capture_target(trees, monkeypatch, (4,))
    for count in (3, 1, 2):
        prompts = [tokens(5 + i, 30 + count) for i in range(count)]
        want = plain.outputs(prompts, greedy(16))
        trees.oracle.follow(want)
        assert_same(trees.generate(prompts, greedy(16)), want, plain)
    assert sum(graph.replays for graph in graphs.values()) > 6


def marginals_of(
    trees: TreeEngine, prompts: list[list[int]], count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[torch.Tensor]]:
    """What an engine writes, and the log-probabilities that every draft of it begins from."""
    proposer, seen = trees.runner.speculator.proposer, []
    own = proposer.propose

    def propose(states: torch.Tensor, found: Any, *rest: Any) -> Any:
        seen.append(found.log_probs.clone())
        return own(states, found, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose", propose)
        return trees.generate(prompts, greedy(count)), seen


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_drafters_graphs_have_all_of_the_accepted_context(
    count: int, plain: Plain, trees_of: TreesOf, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay stores as many rows as the paths of its batches have; prompts have more."""
    trees = trees_of(target, weaver={"proposal": "ddtree"}, rows_per_step=14)
    prompts = [tokens(5 + 4 * i, 30) for i in range(count)]
    want = plain.outputs(prompts, greedy(12))
    trees.oracle.follow(want)
    outputs, eager = marginals_of(trees, prompts, 12, monkeypatch)
    assert_same(outputs, want, plain)
    graphs = capture_drafter(trees, monkeypatch, (1, 2, 4))
    drafter = trees.runner.speculator
    assert drafter._num_graph_context_tokens(4) == 16 < 4 * (drafter.depth + 1)
    trees.oracle.follow(want)
    outputs, replayed = marginals_of(trees, prompts, 12, monkeypatch)
    assert_same(outputs, want, plain)
    assert sum(graph.replays for graph in graphs.values()) == len(replayed) == len(eager) > 2
    for ours, expected in zip(replayed, eager, strict=True):
        # Behind them stand the requests that pad a graph, below them depths that no tree reaches.
        rows, depths = len(expected), drafter.useful_nodes(len(expected))
        ours, expected = ours[:rows, :depths], expected[:, :depths]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)
    # Without the context the drafts would be others.
    monkeypatch.setattr(drafter, "_prepare_graph_forward", lambda *_: None)
    trees.oracle.follow(want)
    _, without = marginals_of(trees, prompts, 12, monkeypatch)
    assert (without[-1][:1] - eager[-1][:1]).abs().max() > 0.1


def test_larger_batches_have_smaller_trees_or_none(
    plain: Plain, trees_of: TreesOf, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone a request gets 12 nodes, two get one each, more are decoded plainly."""
    trees = trees_of(target, rows_per_step=5)
    schedule = trees.runner.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    assert schedule == [(1, 1, 12), (2, 2, 1), (3, 4, 0)]
    prompts = [tokens(n, 50) for n in (9, 3, 1, 20)]
    lengths = (6, 12, 18, 24)
    params = [greedy(n) for n in lengths]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want, plain)
    stats = trees.stats()
    assert 2 < stats["tree_nodes"] / stats["target_passes"] <= 12
    graphs = capture_target(trees, monkeypatch, (1, 2))
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want, plain)
    replayed = {d.uniform_token_count for d, graph in graphs.items() if graph.replays}
    assert {2, 13} <= replayed, replayed


@pytest.fixture(scope="module")
def kernels(tiny_models: dict[str, Path]) -> Any:
    """A hybrid engine whose GDN layers run the GPU's kernels, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeGatedDeltaNet, "runs_kernels", lambda *_: True)
        return TreeEngine(tiny_models, "hybrid", budget=3)


def test_the_gpus_layer_path_gives_plain_decodings_tokens(
    plain_of: Callable[..., Plain], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserved memory, raw stash and commits of all layers in one launch; eager, then replayed."""
    plain, trees = plain_of("hybrid"), kernels
    prompts = [tokens(6 + i, 40) for i in range(2)]
    params = [greedy(6), sampled(5, seed=3)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want, plain)
    graphs = capture_target(trees, monkeypatch, (2,))
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want, plain)
    assert sum(graph.replays for graph in graphs.values()) > 1
    assert trees.stats()["mean_accepted_length"] > 1.2


#: Code that only a CPU runs, where nothing is waited for.
CPU_ONLY = re.compile(r"attention_cpu|ops/\w+/reference|cpu_kernels")
#: What a module does on a CPU alone.
CPU_WRITE = "ops/slots.py", "index_put_ of a number"


def waits(reads: HostReads) -> list[tuple[str, int, str]]:
    """Where a GPU would be waited for."""
    found = [x for x in sorted(reads.found) if not CPU_ONLY.search(x[0])]
    return [x for x in found if (x[0], x[2]) != CPU_WRITE]


def test_a_step_never_waits_for_the_device(
    trees_of: TreesOf, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting, weaving, verifying, accepting and committing read nothing back."""
    trees = trees_of(target)
    monkeypatch.setattr(trees.runner.rejection_sampler, "level_by_level", False)
    monkeypatch.setattr("vllm_weaver.tree.weaver_tree.may_look", lambda _: False)
    params = [greedy(14), sampled(14, seed=1, top_k=20), greedy(14, logprobs=2)]
    with HostReads() as reads:
        trees.generate([tokens(5 + i, 60) for i in range(3)], params)
    assert waits(reads) == []
    # Steps of plain decoding beside a drafter, as adaptive sizes have them: no trees, no draft.
    monkeypatch.setattr(trees.scheduler, "dynamic_sd_lookup", [0] * 5)
    assert trees.stats()["target_passes"] > 0
    built: list[int] = []
    own = DraftModelSpeculator._build_attn_metadata
    monkeypatch.setattr(
        *(DraftModelSpeculator, "_build_attn_metadata"),
        lambda self, *args, **kwargs: built.append(1) or own(self, *args, **kwargs),
    )
    with HostReads() as reads:
        trees.generate([tokens(5 + i, 62) for i in range(3)], [greedy(6)] * 3)
    assert trees.stats()["target_passes"] == 0 and not built
    assert waits(reads) == []
    # The detector sees what it should: on a CPU the sampler walks node by node.
    monkeypatch.undo()
    with HostReads() as reads:
        trees.generate([tokens(5, 61)], greedy(4))
    assert any(file == "engine/sampler.py" for file, _, _ in reads.found)
