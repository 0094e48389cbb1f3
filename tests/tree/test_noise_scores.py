# SPDX-License-Identifier: Apache-2.0
"""Trees built with the sampler's noise, where the target's distribution is known exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from vllm_weaver.tree import (
    DraftTree,
    Sampling,
    SharedNoise,
    accept,
    build_ddtree,
    build_grown_tree,
    build_weaver_tree,
    drawn_log_probs,
    noise_given_draw,
    outside_filters,
)

R, D, V = 6, 5, 24
FIELDS = tuple(field.name for field in dataclasses.fields(DraftTree))
MILD = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02}


def sampling_of(
    requests: int,
    temperature: float = 1.0,
    top_k: int = V,
    top_p: float = 1.0,
    min_p: float = 0.0,
    device: str = "cpu",
) -> Sampling:
    on = {"device": device}
    return Sampling(
        torch.full((requests,), temperature, **on),
        torch.full((requests,), top_k, dtype=torch.int32, **on),
        torch.full((requests,), top_p, **on),
        torch.full((requests,), min_p, **on),
        filtered=top_k < V or top_p < 1 or min_p > 0,
    )


class Markov:
    """A target whose next token depends on the last one, and drafts that know it exactly.

    The pool of each depth is the whole vocabulary, in an order of its own.
    """

    def __init__(self, device: str = "cpu", seed: int = 0, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.log_p = (scale * torch.randn(V, V, generator=generator)).log_softmax(-1).to(device)
        order = torch.rand(R, D, V, generator=generator).argsort(-1)
        self.ids_RDP = order.to(device)
        uniform = torch.rand(R, D, V, generator=generator, dtype=torch.float64)
        by_token = -torch.log(-torch.log(uniform)).float().to(device)
        self.by_token_RDV = by_token
        self.noise_RDP = by_token.gather(-1, self.ids_RDP)
        self.roots_R = torch.arange(R, device=device)

    def expand(
        self, request_N: Tensor, node_N: Tensor, tokens_N: Tensor, depths_N: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor]:
        ids_NP = self.ids_RDP[request_N.long(), depths_N.long()]
        return ids_NP, self.log_p[tokens_N.long()].gather(-1, ids_NP)

    def sampled(self, tree: DraftTree, sampling: Sampling) -> Tensor:
        """[R, T]: argmax over the vocabulary of what is left of log p, at its temperature, + G."""
        logits = self.log_p[tree.tokens.long()] / sampling.temperature_R[:, None, None]
        rows = torch.arange(R, device=logits.device)[:, None].expand(tree.tokens.shape)
        if sampling.filtered:
            dropped = outside_filters(logits.log_softmax(-1), sampling.at(rows))
            logits = logits.masked_fill(dropped, -torch.inf)
        depth_RT = tree.depths.long().clamp(max=D - 1)
        return (logits + self.by_token_RDV[rows, depth_RT]).argmax(-1)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}], ids=["T=1", "T=0.7"])
def test_a_draft_that_equals_the_target_is_accepted_whole(device: str, options: dict) -> None:
    markov, sampling = Markov(device), sampling_of(R, **options, device=device)
    expand = SharedNoise(markov.noise_RDP, sampling).expanding(markov.expand)
    chain = build_weaver_tree(expand, markov.roots_R, D, D, children=1)
    _, length = accept(chain, markov.sampled(chain, sampling))
    assert length.tolist() == [D + 1] * R
    # In a tree, the drawn token is the first child of every node that has one.
    for tree in (
        build_weaver_tree(expand, markov.roots_R, 40, D, expansion_width=1),
        build_grown_tree(expand, markov.roots_R, 40, D),
    ):
        sampled = markov.sampled(tree, sampling).cpu()
        for r in range(R):
            parents = tree.parents[r].tolist()
            for row in range(int(tree.num_nodes[r])):
                if row in parents:
                    assert tree.tokens[r, parents.index(row)] == sampled[r, row]


def test_more_of_a_tree_is_accepted_with_filters_too(device: str) -> None:
    """Over many noises: per request, not by luck."""
    plain = shared = 0
    for seed in range(40):
        markov, sampling = Markov(device, seed, scale=1.0), sampling_of(R, **MILD, device=device)
        noise = SharedNoise(markov.noise_RDP, sampling)
        for expand, kind in ((markov.expand, 0), (noise.expanding(markov.expand), 1)):
            tree = build_weaver_tree(expand, markov.roots_R, 12, D, children=4)
            tree.validate()
            _, length = accept(tree, markov.sampled(tree, sampling))
            total = int(length.sum())
            plain, shared = (plain, shared + total) if kind else (plain + total, shared)
    assert shared > 1.3 * plain


def test_independent_depths_are_accepted_whole_from_marginals(device: str) -> None:
    markov = Markov(device)
    markov.log_p[:] = markov.log_p[:1].clone()
    sampling = sampling_of(R, device=device)
    noise = SharedNoise(markov.noise_RDP, sampling)
    log_probs_RDP = markov.log_p[0][markov.ids_RDP]
    scores, ids = noise.marginals(log_probs_RDP, markov.ids_RDP, weight=1.0)
    assert bool((scores[..., 1:] <= scores[..., :-1]).all())
    chain = DraftTree.chain(markov.roots_R, ids[..., 0])
    _, length = accept(chain, markov.sampled(chain, sampling))
    assert length.tolist() == [D + 1] * R
    tree = build_ddtree(scores, ids, markov.roots_R, 12)
    tree.validate()
    _, in_tree = accept(tree, markov.sampled(tree, sampling))
    assert float(in_tree.float().mean()) > 3


def test_greedy_requests_are_left_alone_bit_for_bit(device: str) -> None:
    markov = Markov(device)
    sampling = sampling_of(R, **MILD, device=device)
    greedy = torch.arange(R, device=device) % 2 == 0
    sampling.temperature_R[greedy] = 0
    noise = SharedNoise(markov.noise_RDP, sampling)
    for width in (1, 3):
        a, b = (
            build_weaver_tree(expand, markov.roots_R, 20, D, expansion_width=width)
            for expand in (markov.expand, noise.expanding(markov.expand))
        )
        for name in FIELDS:
            same = (getattr(a, name) == getattr(b, name)).view(R, -1).all(-1)
            assert bool(same[greedy].all())
            assert name not in ("tokens", "parents") or not bool(same[~greedy].any())
    log_probs = markov.log_p[0][markov.ids_RDP].sort(-1, descending=True).values
    log_probs[..., -2:] = -torch.inf
    log_probs[..., 5] = log_probs[..., 4]
    scores, ids = noise.marginals(log_probs, markov.ids_RDP)
    assert torch.equal(scores[greedy], log_probs[greedy])
    assert torch.equal(ids[greedy], markov.ids_RDP[greedy])


def test_without_weight_the_scores_are_the_tempered_log_probabilities() -> None:
    torch.manual_seed(0)
    log_q = torch.randn(R, V).log_softmax(-1)
    noise = torch.randn(R, V)
    found = drawn_log_probs(log_q, noise, sampling_of(R, 0.5), 0.0)
    torch.testing.assert_close(found, (2 * log_q).log_softmax(-1))
    # Of a vocabulary, half of whose mass the pool lacks, nothing is scaled up.
    part = log_q - torch.tensor(2.0).log()
    whole = drawn_log_probs(part, noise, sampling_of(R), 0.0, whole=True)
    torch.testing.assert_close(whole, part)


def test_missing_candidates_are_never_placed() -> None:
    log_q = torch.randn(1, D, V).log_softmax(-1)
    log_q[..., 3], log_q[..., 4] = -torch.inf, torch.nan
    ids = torch.arange(V).repeat(1, D, 1)
    ids[..., 5] = -1
    noise = torch.zeros(1, D, V)
    noise[..., 3:6] = 50.0

    def expand(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        depths_N = arguments[3].long()
        return ids[0, depths_N], log_q[0, depths_N]

    shared = SharedNoise(noise, sampling_of(1))
    tree = build_weaver_tree(shared.expanding(expand), torch.tensor([9]), 30, D, children=V)
    scores, sorted_ids = shared.marginals(log_q, ids)
    flat = build_ddtree(scores, sorted_ids, torch.tensor([9]), 30)
    for built in (tree, flat):
        assert int(built.num_nodes) == 31
        assert not set(built.tokens[0, 1:].tolist()) & {3, 4, 5, -1}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 0.7},
    ],
)
def test_filters_drop_what_a_sampler_drops(device: str, options: dict) -> None:
    torch.manual_seed(1)
    sampling = sampling_of(R, **options, device=device)
    log_q = (torch.randn(R, V) / options.get("temperature", 1.0)).log_softmax(-1)
    dropped = outside_filters(log_q.to(device), sampling).cpu()
    for r in range(R):
        order = log_q[r].argsort(descending=True).tolist()
        q = log_q[r].exp()
        kept = [t for t in order if q[t] >= options.get("min_p", 0.0) * q[order[0]]]
        kept = kept[: options.get("top_k", V)]
        total, mass, left = sum(float(q[t]) for t in kept), 0.0, []
        for token in kept:
            if left and mass / total >= options.get("top_p", 1.0):
                break
            left.append(token)
            mass += float(q[token])
        assert {t for t in range(V) if not dropped[r, t]} == set(left)


def test_noise_given_a_draw_draws_it_and_is_gumbel_again() -> None:
    torch.manual_seed(2)
    count = 60_000
    log_p = torch.tensor([0.6, 0.25, 0.1, 0.05]).log().expand(count, 4)
    drawn = torch.multinomial(log_p.exp(), 1)[:, 0]
    ids = torch.arange(5).expand(count, 5)
    # Token 4 is one that the sampler's filters dropped.
    wide = torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf)
    fresh = -torch.log(-torch.log(torch.rand(count, 6, dtype=torch.float64))).float()
    own = log_p.gather(1, drawn[:, None])[:, 0]
    noise = noise_given_draw(fresh[:, :5], wide, ids, fresh[:, 5], own, drawn)
    assert torch.equal((wide + noise).argmax(-1), drawn)
    for token in range(5):
        law = torch.exp(-torch.exp(-noise[:, token].double().sort().values))
        steps = (torch.arange(count) + 0.5) / count
        assert float((law - steps).abs().max()) < 1.63 / count**0.5
    assert float(torch.corrcoef(noise.T).fill_diagonal_(0).abs().max()) < 0.02
