# SPDX-License-Identifier: Apache-2.0
"""Trees that share the sampler's noise: its keys are vLLM's, tokens stay, acceptance rises."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import BUDGET, VOCAB_SIZE, Plain, TreeEngine, assert_same, greedy, sampled, tokens

import vllm_weaver.demo
from vllm_weaver.demo.sources import load_prompts
from vllm_weaver.engine import compat
from vllm_weaver.engine.proposer import Marginals
from vllm_weaver.ops import keyed_gumbel, top_pool
from vllm_weaver.tree import DraftTree, SharedNoise

TreesOf = Callable[..., Any]

PROPOSALS = ("weaver", "ddtree", "chain")
NANO = Path(vllm_weaver.demo.__file__).parent / "models"
#: One batch of four: the noise of each request and its filters meet in one build.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "mixed": [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20},
    ],
    "filters": [
        {"temperature": 0.7},
        {"temperature": 1.2, "min_p": 0.02},
        {"temperature": 1.0, "presence_penalty": 0.4},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
    ],
}


@contextlib.contextmanager
def proposing(trees: Any, proposal: str, shared: bool = True) -> Iterator[None]:
    """The engine with another proposal, with or without shared noise, for the duration."""
    proposer, state = trees.oracle.base, trees.runner.model_state
    before = proposer.options, state.noise
    proposer.options = dataclasses.replace(proposer.options, proposal=proposal)
    if not shared:
        state.noise = None
    try:
        yield
    finally:
        proposer.options, state.noise = before


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_is_that_of_vllms_sampler(use_fp64: bool) -> None:
    """vLLM's kernel on blocks of one token leaves logit + noise of every token in `local_max`."""
    seeds = torch.tensor([0, -7, 2**63 - 1, 12345678901234])
    positions = torch.tensor([0, 5, 2047, 2**31 + 9, 77])
    request = torch.tensor([3, 0, 2, 1, 3])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0])
    vocab = 70
    logits = torch.zeros(len(positions), vocab)
    noise = torch.zeros(len(positions), vocab, dtype=torch.float64 if use_fp64 else torch.float32)
    argmax = torch.zeros(len(positions), vocab, dtype=torch.int64)
    kernel = compat.triton_kernel("gumbel_sample_kernel")
    kernel[(len(positions), vocab)](
        *(argmax, argmax.stride(0), noise, noise.stride(0)),
        *(None, 0, 0, None, None, 0),
        *(logits, logits.stride(0), request, seeds, positions, temperature, vocab),
        BLOCK_SIZE=1,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=False,
        USE_FP64=use_fp64,
        PER_TOKEN_COL=False,
    )
    ids = torch.arange(vocab).expand(len(positions), 1, vocab)
    found = keyed_gumbel(seeds[request], positions[:, None], ids, use_fp64=use_fp64)
    assert noise.std() > 1
    torch.testing.assert_close(found[:, 0], noise.float(), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_where_noise_alone_decides_every_draft_is_accepted(
    trees_of: TreesOf, proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So hot that logits do not count: a wrong seed, position or token would be a miss.

    Two requests have a seed of their own, one the seed that vLLM gives it, and one is greedy.
    """
    trees = trees_of("dense")
    params = [sampled(18, seed=1), sampled(18, seed=2), greedy(18), sampled(18, seed=None)]
    states = trees.runner.model_state.noise.states
    add_request = states.add_request

    def add_hot(slot: int, sampling_params: Any) -> bool:
        needs_processing = add_request(slot, sampling_params)
        if sampling_params.temperature:
            # Beyond what vLLM's front end allows.
            states.temperature.np[slot] = 1e6
        return needs_processing

    monkeypatch.setattr(states, "add_request", add_hot)
    # Every token is a candidate, or the winner may not be in the pool; and the noise is stretched,
    # so that the winners take the whole budget.
    speculator = trees.runner.speculator
    noise_of = trees.runner.model_state.noise.of

    def stretched(*arguments: Any) -> SharedNoise | None:
        noise = noise_of(*arguments)
        return noise and dataclasses.replace(noise, noise_RDP=50 * noise.noise_RDP)

    monkeypatch.setattr(trees.runner.model_state.noise, "of", stretched)
    with proposing(trees, proposal), whole_vocabulary(speculator):
        outputs = trees.generate([tokens(9 + n, 31) for n in range(4)], params)
        stats = trees.stats()
    assert len({tuple(x.tokens) for x in outputs}) == 4
    with proposing(trees, proposal, shared=False), whole_vocabulary(speculator):
        again = trees.generate([tokens(9 + n, 31) for n in range(3)], params[:3])
        plain = trees.stats()
    assert [x.tokens for x in again] == [x.tokens for x in outputs[:3]]
    # 18 tokens, the first from the prompt: three passes of D + 1 = 8, were it not for the limit.
    hits = stats["length_histogram"]
    depth = speculator.depth
    assert hits[depth + 1] >= 6, hits
    assert stats["mean_accepted_length"] > 2 * plain["mean_accepted_length"]


@contextlib.contextmanager
def whole_vocabulary(speculator: Any) -> Iterator[None]:
    """Pools of the whole vocabulary, whatever the adapter's."""
    before = speculator.marginals
    speculator._allocate(VOCAB_SIZE)
    try:
        yield
    finally:
        speculator.marginals = before


@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_seeded_sampling_gives_plain_samplings_tokens(
    plain: Plain, trees: Any, proposal: str, batch: str
) -> None:
    prompts = [tokens(6 + i, 32) for i in range(4)]
    params = [sampled(7, seed=40 + i, **x) for i, x in enumerate(BATCHES[batch])]
    want = plain.outputs(prompts, params)
    assert trees.runner.model_state.noise is not None
    with proposing(trees, proposal):
        assert_same(trees.generate(prompts, params), want)
    stats = trees.stats()
    assert stats["tree_nodes"] >= 0.7 * min(7, BUDGET) * stats["target_passes"]


def test_greedy_requests_of_a_batch_keep_their_trees(
    trees_of: TreesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = trees_of("dense")
    proposer = trees.oracle.base
    original, compared = proposer.propose, []

    def both(
        h_ver: Any, marginals: Any, roots: Any, chain: Any, noise: Any = None, nodes: Any = None
    ) -> DraftTree:
        tree = original(h_ver, marginals, roots, chain, noise)
        # The next call may put its trees in the same buffers.
        tree = DraftTree(*(getattr(tree, x.name).clone() for x in dataclasses.fields(tree)))
        if noise is not None:
            assert isinstance(noise, SharedNoise)
            alone = original(h_ver, marginals, roots, chain, None)
            is_greedy = noise.sampling.temperature_R == 0
            for field in dataclasses.fields(tree):
                a, b = getattr(tree, field.name), getattr(alone, field.name)
                assert torch.equal(a[is_greedy], b[is_greedy])
            same = (tree.tokens == alone.tokens).all(-1)
            compared.append((int(is_greedy.sum()), int((~same & ~is_greedy).sum())))
        return tree

    monkeypatch.setattr(proposer, "propose", both)
    prompts = [tokens(5 + i, 33) for i in range(4)]
    params = [greedy(8), sampled(8, seed=3), greedy(8, presence_penalty=0.5), sampled(8, seed=4)]
    for proposal in PROPOSALS:
        with proposing(trees, proposal):
            trees.generate(prompts, params)
    assert sum(greedy for greedy, _ in compared) > 6
    assert sum(changed for _, changed in compared) > 6
    # With greedy requests alone, nothing is computed for noise.
    compared.clear()
    trees.generate(prompts[:2], greedy(4))
    assert not compared


@pytest.mark.parametrize("nodes", [1, 3])
def test_small_trees_need_no_marginals_below_them(
    trees_of: TreesOf, plain_of: Callable[..., Plain], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of depths that no such tree reaches stay as they were; the trees are the same."""
    trees = trees_of("dense")
    speculator, proposer = trees.runner.speculator, trees.oracle.base
    monkeypatch.setattr(speculator, "useful_nodes", lambda num_reqs: nodes)
    original, heads, compared = proposer.propose, [], []
    head = speculator.compute_draft_logits

    def counted(states: torch.Tensor, *rest: Any) -> torch.Tensor:
        heads.append(len(states))
        return head(states, *rest)

    def both(h_ver: Any, near: Any, roots: Any, chain: Any, noise: Any, useful: int) -> DraftTree:
        assert useful == nodes < speculator.depth
        assert heads.pop() == len(roots) * nodes and not heads
        pools = top_pool(head(near.hidden.flatten(0, 1), 0), near.ids.shape[-1])
        whole = Marginals(near.hidden, *(x.view_as(near.ids) for x in pools))
        assert torch.equal(near.ids[:, :nodes], whole.ids[:, :nodes])
        assert torch.equal(near.log_probs[:, :nodes], whole.log_probs[:, :nodes])
        # What is left of earlier steps must not matter.
        near.ids[:, nodes:], near.logits[:, nodes:], near.log_probs[:, nodes:] = 7, 50.0, 0.0
        if noise is None:
            wanted = original(h_ver, whole, roots, chain, None, None)
        else:
            positions = speculator.sample_pos[: whole.ids[..., 0].numel()]
            own = trees.runner.model_state.noise.of(positions.view_as(whole.ids[..., 0]), whole.ids)
            wanted = original(h_ver, whole, roots, chain, own, None)
        wanted = DraftTree(*(getattr(wanted, x.name).clone() for x in dataclasses.fields(wanted)))
        made = original(h_ver, near, roots, chain, noise, nodes)
        count = made.num_nodes.clamp(max=nodes + 1)
        assert torch.equal(count, wanted.num_nodes.clamp(max=nodes + 1))
        for row, rows in enumerate(count.tolist()):
            for name in ("tokens", "parents", "depths"):
                a, b = getattr(made, name), getattr(wanted, name)
                assert torch.equal(a[row, :rows], b[row, :rows])
        compared.append(int(count.sum()))
        return made

    monkeypatch.setattr(speculator, "compute_draft_logits", counted)
    monkeypatch.setattr(proposer, "propose", both)
    prompts = [tokens(5 + i, 37) for i in range(3)]
    params = [greedy(8), sampled(8, seed=3), greedy(8, presence_penalty=0.5)]
    want = plain_of("dense").outputs(prompts, params)
    for proposal in PROPOSALS:
        with proposing(trees, proposal):
            assert_same(trees.generate(prompts, params), want, plain_of("dense"))
    assert sum(compared) > 30 * nodes


def test_the_option_switches_it_off(trees_of: TreesOf, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trees_of("dense").runner.model_state
    sampler = SimpleNamespace(
        sampling_states=state.noise.states,
        use_fp64_gumbel=False,
        use_flashinfer=True,
        use_xpu_sampler=True,
        logits_processors=[],
    )
    for option, shared in ((False, False), (True, True), ("auto", True)):
        sampler.use_flashinfer = True
        monkeypatch.setattr(state, "noise", None)
        options = dataclasses.replace(state.options, shared_noise=option)
        monkeypatch.setattr(state, "options", options)
        state.custom_sampler(sampler)
        assert (state.noise is not None) == shared
        # A sampler with noise of its own would make the trees guess the wrong noise.
        assert sampler.use_flashinfer != shared


def test_more_is_accepted_of_the_packaged_models() -> None:
    """Fixed prompts and seeds; the measured gains are far above the margin asked for here."""
    from vllm.tokenizers import get_tokenizer

    names = {"nano": "target", "nano-dflash16": "drafter", "nano-weaver16": "adapter"}
    trees = TreeEngine(
        {name: NANO / part for name, part in names.items()}, "nano", budget=31, block=16
    )
    prompts = [p.token_ids[:64] for p in load_prompts(4, get_tokenizer(str(NANO / "target")))]
    params = [sampled(32, seed=n, temperature=1.0) for n in range(4)]
    lengths: dict[tuple[str, bool], float] = {}
    for proposal in PROPOSALS:
        outputs = []
        for shared in (False, True):
            with proposing(trees, proposal, shared):
                outputs.append(trees.generate(prompts, params))
                lengths[proposal, shared] = trees.stats()["mean_accepted_length"]
        assert_same(*outputs)
    print(lengths)
    assert lengths["weaver", True] > 1.15 * lengths["weaver", False]
    assert lengths["ddtree", True] > 1.05 * lengths["ddtree", False]
    assert lengths["chain", True] > 1.03 * lengths["chain", False]
