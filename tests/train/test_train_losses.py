# SPDX-License-Identifier: Apache-2.0
"""Losses against their written definitions, the schedule, and the ceiling of marginals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from vllm_weaver.train.losses import (
    depth_weights,
    length_weights,
    path_weights,
    pool_losses,
    text_log_probs,
)
from vllm_weaver.train.measure import best_marginal, left_out_overlap, walk
from vllm_weaver.train.optim import schedule


def _example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """log q and p over a pool of 6 out of 9 tokens, [2, 3, 6]; the hit is outside once."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 6, generator=generator)
    p = torch.randn(2, 3, 9, generator=generator).softmax(-1)[..., :6]
    hit = torch.zeros(2, 3, 6, dtype=torch.bool)
    hit[..., 2] = True
    hit[0, 0] = False
    return logits, p, hit


def test_losses_equal_their_definitions_term_by_term() -> None:
    logits, p, hit = _example()
    log_q = logits.log_softmax(-1)
    given = {
        name: pool_losses(name, log_q, p, hit, 2.0)[0]
        for name in ("kl", "tv", "lk_mix", "lk_log", "ce")
    }
    for r, d in itertools.product(range(2), range(3)):
        q = [math.exp(float(x)) for x in log_q[r, d]]
        target = [float(x) for x in p[r, d]]
        pairs = list(zip(target, q, strict=True))
        accepted = sum(min(a, b) for a, b in pairs)
        kl = sum(a * math.log(a / b) for a, b in pairs)
        weight = math.exp(-2.0 * accepted)
        expected = {
            "kl": kl,
            "tv": 1 - accepted,
            "lk_mix": weight * kl + (1 - weight) * (1 - accepted),
            "lk_log": -math.log(accepted),
            "ce": 0.0 if (r, d) == (0, 0) else -math.log(q[2]),
        }
        for name, value in expected.items():
            assert float(given[name][r, d]) == pytest.approx(value, abs=1e-5), name


def test_mass_outside_the_pool_is_lost() -> None:
    """Even the best q is charged what the pool lacks."""
    _, p, hit = _example()
    best = (p / p.sum(-1, keepdim=True)).log()
    loss, accepted = pool_losses("tv", best, p, hit)
    torch.testing.assert_close(loss, 1 - p.sum(-1))
    torch.testing.assert_close(accepted, p.sum(-1))


@pytest.mark.parametrize("name", ["kl", "lk_mix", "lk_log"])
def test_descent_on_the_logits_reaches_the_pools_limit(name: str) -> None:
    logits, p, hit = _example(1)
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        loss, accepted = pool_losses(name, logits.log_softmax(-1), p, hit)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    torch.testing.assert_close(accepted, p.sum(-1), atol=0.02, rtol=0)


def test_mix_has_no_gradient_through_its_weight() -> None:
    logits, p, hit = _example(2)
    first = logits.clone().requires_grad_()
    log_q = first.log_softmax(-1)
    loss, accepted = pool_losses("lk_mix", log_q, p, hit, 3.0)
    (gradient,) = torch.autograd.grad(loss.sum(), first)
    weight = torch.exp(-3.0 * accepted)
    second = logits.clone().requires_grad_()
    log_q = second.log_softmax(-1)
    kl, tv = (pool_losses(name, log_q, p, hit)[0] for name in ("kl", "tv"))  # type: ignore[arg-type]
    (expected,) = torch.autograd.grad((weight * kl + (1 - weight) * tv).sum(), second)
    torch.testing.assert_close(gradient, expected)


def test_depth_weights_fall_from_one() -> None:
    assert depth_weights(3, 0, "cpu").tolist() == [1, 1, 1]
    assert depth_weights(3, 2.0, "cpu").tolist() == pytest.approx([1, math.exp(-0.5), math.exp(-1)])


def test_path_weights_say_which_parents_a_tree_of_the_budget_holds() -> None:
    q = torch.tensor([[[0.5, 0.5], [0.02, 0.98], [0.1, 0.9], [0.6, 0.4]]])
    hit = torch.tensor([[[True, False], [True, False], [False, False], [True, False]]])
    # Before depths 1 to 4 the text's path has 1, 0.5, 0.01, and nothing: its third token is not in
    # the pool.
    text = text_log_probs(q.log(), hit)
    assert path_weights(text, 1)[0].tolist() == pytest.approx([1, 0.5, 0.01, 0])
    assert path_weights(text, 63)[0].tolist() == pytest.approx([1, 1, 0.63, 0])


def test_length_weights_make_tv_the_gradient_of_the_expected_length() -> None:
    logits, p, hit = _example(3)
    first = logits.clone().requires_grad_()
    _, accepted = pool_losses("tv", first.log_softmax(-1), p, hit)
    live = torch.minimum(p, first.log_softmax(-1).exp()).sum(-1)
    torch.testing.assert_close(live, accepted)
    (expected,) = torch.autograd.grad(-live.cumprod(-1).sum(), first)
    second = logits.clone().requires_grad_()
    loss, accepted = pool_losses("tv", second.log_softmax(-1), p, hit)
    (gradient,) = torch.autograd.grad((length_weights(accepted) * loss).sum(), second)
    torch.testing.assert_close(gradient, expected)


def test_schedule_rises_stays_and_falls_but_never_stands_still() -> None:
    factors = [schedule(step, 100, 0.1, 0.3) for step in range(100)]
    assert factors[:10] == sorted(factors[:10]) and factors[9] == 1
    assert set(factors[10:70]) == {1.0}
    assert factors[70:] == sorted(factors[70:], reverse=True)
    assert min(factors) > 0
    assert schedule(0, 1, 0.02, 0.2) == 1


def test_best_marginal_is_the_maximum_over_all_distributions() -> None:
    """Against a search over a grid of all distributions on three tokens."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
    grid = [(a / 100, b / 100, (100 - a - b) / 100) for a in range(101) for b in range(101 - a)]
    best = max(
        float(torch.minimum(p, torch.tensor(q, dtype=torch.float64)).sum(-1).mean()) for q in grid
    )
    assert best_marginal(p) == pytest.approx(best, abs=1e-9)
    assert left_out_overlap(p) <= best


def test_best_marginal_of_equal_conditionals_is_one() -> None:
    p = torch.rand(1, 50).softmax(-1).expand(4, 50)
    assert best_marginal(p) == pytest.approx(1, abs=1e-6)
    assert left_out_overlap(p) == pytest.approx(1, abs=1e-6)


def test_walk_counts_the_passes_of_an_engine() -> None:
    assert walk([1, 1, 1, 1]) == 4
    assert walk([3, 9, 9, 2, 9]) == 2
    assert walk([9, 1]) == 1
