# SPDX-License-Identifier: Apache-2.0
"""Scores of candidates for a sampler whose noise is known: what will it draw?

A sampler that draws argmax(log p + G), with Gumbel noise G fixed before p is known, can be guessed
better than by probability: where the draft q is close to p, a candidate with much noise is likely
to win. The builders stay as they are; they get log-probabilities of being *drawn, given the noise*,
in place of those of being drawn. A tree may depend on the noise, so that this changes how much of
it is accepted and never what is emitted. Derivation: docs/method.md, section 3.

The module does not know where the noise comes from.

Shape legend: R requests; D draft depth; P candidate pool; N nodes expanded at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_weaver.tree.best_first import ExpandFn
from vllm_weaver.tree.draft_tree import DraftTree
from vllm_weaver.tree.order import best, stable_keys

CONDITIONAL_WEIGHT = 1.0
"""Weight of the noise beside conditional log-probabilities: an adapter's."""
MARGINAL_WEIGHT = 0.75
"""Weight of the noise beside marginal log-probabilities: a drafter's, further from the target's."""
OUTSIDE_PENALTY = 1.0
"""Nats taken from a candidate that the request's filters would drop if q were p."""

_MEAN_NOISE = 0.5772156649
"""Euler's constant, the mean of Gumbel noise."""


@dataclass
class Sampling:
    """How each request samples; `filtered` is known to the host.

    | name          | shape | dtype   | meaning                                                   |
    |---------------|-------|---------|-----------------------------------------------------------|
    | temperature_R | [R]   | float32 | 0 is greedy                                               |
    | top_k_R       | [R]   | integer | candidates that may be drawn; the vocabulary's size or    |
    |               |       |         | more for all                                              |
    | top_p_R       | [R]   | float32 | mass that may be drawn; 1 for all                         |
    | min_p_R       | [R]   | float32 | least probability, as a share of the largest; 0 for all   |
    | filtered      |       | bool    | whether any request has top-k, top-p or min-p: without,   |
    |               |       |         | no pool is sorted                                         |
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    filtered: bool

    def parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p."""
        return self.temperature_R, self.top_k_R, self.top_p_R, self.min_p_R

    def first(self, count: int) -> Sampling:
        """The first requests alone, as views."""
        temperature_R, top_k_R, top_p_R, min_p_R = (x[:count] for x in self.parameters())
        return Sampling(temperature_R, top_k_R, top_p_R, min_p_R, self.filtered)

    def at(self, request_N: Tensor) -> Sampling:
        """The same, one entry per index of `request_N`, of any shape."""
        if not self.filtered:
            # What is not read is not gathered: builders ask in every round.
            temperature = self.temperature_R[request_N]
            return Sampling(temperature, self.top_k_R, self.top_p_R, self.min_p_R, False)
        temperature, top_k, top_p, min_p = (x[request_N] for x in self.parameters())
        return Sampling(temperature, top_k, top_p, min_p, True)


def outside_filters(log_q: Tensor, sampling: Sampling) -> Tensor:
    """bool [..., P]: candidates that min-p, top-k and top-p drop, in a sampler's order.

    `log_q` [..., P] are log-probabilities at the request's temperature, -inf for none; `sampling`
    has one entry for each of the leading dimensions. The filters act on the pool as on a
    vocabulary: probabilities are renormalised over the pool, and after top-k over what it left. The
    best candidate is never dropped.
    """
    top_k, top_p, min_p = (
        x[..., None] for x in (sampling.top_k_R, sampling.top_p_R, sampling.min_p_R)
    )
    sorted_q, order = log_q.sort(dim=-1, descending=True, stable=True)
    rank_P = torch.arange(log_q.shape[-1], device=log_q.device)
    dropped = (rank_P >= top_k) | (sorted_q < sorted_q[..., :1] + min_p.log())
    kept_q = sorted_q.masked_fill(dropped, -torch.inf).softmax(-1)
    # Top-p keeps a candidate while those before it hold less than p. Sums reach 1 by rounding.
    before = kept_q.cumsum(-1) - kept_q
    dropped = (dropped | ((before >= top_p) & (top_p < 1))) & (rank_P > 0)
    return torch.empty_like(dropped).scatter_(-1, order, dropped)


def drawn_log_probs(
    log_q: Tensor, noise: Tensor, sampling: Sampling, weight: float, *, whole: bool = False
) -> Tensor:
    """Log-probabilities [..., P] that a sampler with this noise draws each candidate of a pool.

    | name     | shape    | dtype   | meaning                                                      |
    |----------|----------|---------|--------------------------------------------------------------|
    | log_q    | [..., P] | float   | the draft's log-probabilities; -inf or NaN for none          |
    | noise    | [..., P] | float32 | the sampler's Gumbel noise of the candidates                 |
    | sampling |          |         | one entry for each of the leading dimensions                 |
    | weight   |          | float   | of the noise: 0 ignores it; 1 and a draft that equals the    |
    |          |          |         | target puts the drawn candidate first. Filters lower it: by  |
    |          |          |         | the draft's mass that they keep, and by 1 - 1 / candidates   |
    | whole    |          | bool    | `log_q` are normalised over the vocabulary: what the pool    |
    |          |          |         | lacks counts as one more candidate, of average noise         |
    | returns  | [..., P] | float32 | at most 0; greedy requests keep `log_q`, bit for bit         |
    """
    log_q = log_q.float()
    present = log_q > -torch.inf
    temperature = sampling.temperature_R[..., None]
    greedy = temperature == 0
    tempered = torch.where(present, log_q, -torch.inf) / torch.where(greedy, 1.0, temperature)
    part: Tensor | float = weight
    if sampling.filtered:
        outside = outside_filters(tempered, sampling)
        # Of a token that the target drops, the noise says nothing, nor of the only one left.
        kept = tempered.softmax(-1).masked_fill(outside, 0.0).nansum(-1, keepdim=True)
        count = (~outside & present).sum(-1, keepdim=True).clamp(min=1)
        filters = (
            (sampling.top_k_R < log_q.shape[-1]) | (sampling.top_p_R < 1) | (sampling.min_p_R > 0)
        )[..., None]
        part = torch.where(filters, weight * kept * (1 - 1 / count), weight)
        tempered = torch.where(outside, tempered - OUTSIDE_PENALTY, tempered)
    drawn = tempered + part * noise
    total = drawn.logsumexp(-1, keepdim=True)
    if whole:
        missing = 1 - log_q.exp().nansum(-1, keepdim=True)
        missing = missing.clamp(min=0).log() / torch.where(greedy, 1.0, temperature)
        total = torch.logaddexp(total, missing + part * _MEAN_NOISE)
    return torch.where(greedy, log_q, drawn - total)


@dataclass
class SharedNoise:
    """The sampler's noise for every candidate of every depth, and how each request samples.

    | name      | shape     | dtype   | meaning                                                    |
    |-----------|-----------|---------|------------------------------------------------------------|
    | noise_RDP | [R, D, P] | float32 | of the pool's candidates at depths 1..D: that of the row   |
    |           |           |         | that draws them, one depth above; the same for all nodes   |
    |           |           |         | of a depth                                                 |
    | sampling  |           |         | of the R requests                                          |
    """

    noise_RDP: Tensor
    sampling: Sampling

    def marginals(
        self,
        log_probs_RDP: Tensor,
        ids_RDP: Tensor,
        weight: float = MARGINAL_WEIGHT,
        count: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Marginals by their chance to be drawn, best first: what DDTree and a chain start from.

        | name          | shape     | dtype   | meaning                                            |
        |---------------|-----------|---------|----------------------------------------------------|
        | log_probs_RDP | [R, D, P] | float   | marginal log-probabilities over the vocabulary     |
        | ids_RDP       | [R, D, P] | integer | their tokens; below 0 for padding                  |
        | count         |           | int     | C, how many of the best to return; P if None       |
        | returns       |           |         | (log-probabilities float32, ids), both [R, D, C];  |
        |               |           |         | at equal score in the order given                  |
        """
        depth = log_probs_RDP.shape[1]
        request_R1 = torch.arange(log_probs_RDP.shape[0], device=log_probs_RDP.device)[:, None]
        drawn_RDP = drawn_log_probs(
            log_probs_RDP,
            self.noise_RDP[:, :depth],
            self.sampling.at(request_R1.expand(-1, depth)),
            weight,
            whole=True,
        ).clamp(max=0.0)
        drawn_RDP = torch.where((drawn_RDP > -torch.inf) & (ids_RDP >= 0), drawn_RDP, -torch.inf)
        pool = drawn_RDP.shape[-1]
        _, order = best(stable_keys(drawn_RDP), min(count or pool, pool))
        return drawn_RDP.gather(-1, order), ids_RDP.gather(-1, order)

    def expanding(self, expand: ExpandFn, weight: float = CONDITIONAL_WEIGHT) -> ExpandFn:
        """`expand` with its log-probabilities turned into those of being drawn.

        Its pools must be the ones of `noise_RDP`, in the same order, by depth.
        """

        def expand_drawn(
            request_N: Tensor, node_N: Tensor, tokens_N: Tensor, depths_N: Tensor, tree: DraftTree
        ) -> tuple[Tensor, Tensor]:
            ids_NP, log_probs_NP = expand(request_N, node_N, tokens_N, depths_N, tree)
            return ids_NP, self.drawn(log_probs_NP, request_N, depths_N, weight)

        return expand_drawn

    def drawn(self, log_q_NP: Tensor, request_N: Tensor, depths_N: Tensor, weight: float) -> Tensor:
        """`drawn_log_probs` [N, P] of the pools of nodes `depths_N` deep; one launch on a GPU.

        A token without a log-probability (-inf, NaN) has none here either.
        """
        if log_q_NP.device.type == "cuda":
            # Only here, since Triton need not be installed elsewhere.
            from vllm_weaver.ops.noise.drawn import drawn_scores

            return drawn_scores(
                log_q_NP,
                self.noise_RDP,
                request_N,
                depths_N,
                *self.sampling.parameters(),
                weight=weight,
                penalty=OUTSIDE_PENALTY,
            )
        request_N = request_N.long()
        noise_NP = self.noise_RDP[request_N, depths_N.long()]
        return drawn_log_probs(log_q_NP, noise_NP, self.sampling.at(request_N), weight)


def noise_given_draw(noise: Tensor, log_p: Tensor, ids: Tensor, drawn_noise: Tensor,
                     drawn_log_p: Tensor, drawn: Tensor) -> Tensor:  # fmt: skip
    """Gumbel noise as it must have been, given what a sampler drew: to replay a text's sampling.

    | name        | shape    | dtype   | meaning                                                   |
    |-------------|----------|---------|-----------------------------------------------------------|
    | noise       | [..., P] | float32 | independent standard Gumbel noise of the candidates       |
    | log_p       | [..., P] | float32 | the target's log-probabilities as it samples: tempered,   |
    |             |          |         | filtered, normalised over the vocabulary; -inf: dropped   |
    | ids         | [..., P] | integer | the candidates                                            |
    | drawn_noise | [...]    | float32 | independent noise of the drawn token                      |
    | drawn_log_p | [...]    | float32 | its log-probability, finite                               |
    | drawn       | [...]    | integer | the drawn token                                           |
    | returns     | [..., P] | float32 | noise under which argmax(log_p + noise) is `drawn`, with  |
    |             |          |         | the conditional law; over draws from p, standard again    |

    Source: top-down sampling of Gumbels (Maddison et al., arXiv 1411.0030). The largest of
    log p + G is a standard Gumbel variable Z whatever token attains it, and the others are
    Gumbel variables around log p that are cut off at Z: -log(e^-Z + e^-(log p + G)).
    """
    below = noise - torch.nn.functional.softplus(log_p + noise - drawn_noise[..., None])
    own = (drawn_noise - drawn_log_p)[..., None]
    return torch.where(ids == drawn[..., None], own, below)
