# SPDX-License-Identifier: Apache-2.0
"""Losses between the target's conditional and the adapter's, on the candidate pool.

Knows two distributions over one pool and a token; not where they come from. The target's
probabilities `p` are those of its whole vocabulary, read at the pool's tokens: they sum to less
than 1, and what is missing is lost, whatever the adapter does. The adapter's `log_q` sum to 1 over
the pool. Acceptance is their overlap, sum min(p, q): the probability that a token sampled from q
survives verification against p, and 1 - acceptance is the total variation distance (the tokens
outside the pool, which q cannot propose, included). Source: spec section 7, arXiv 2602.23881.

| name | per position |
|---|---|
| `kl` | sum p (log p - log q) |
| `tv` | 1 - acceptance |
| `lk_mix` | w kl + (1 - w) tv, w = exp(-eta acceptance), no gradient through w |
| `lk_log` | -log acceptance |
| `ce` | -log q of the text's own token; 0 where it is outside the pool |

Shapes: R blocks, D draft depth, P pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_weaver.train.recipe import Loss

_LEAST_ACCEPTANCE = 1e-6


def acceptance(log_q_RDP: Tensor, p_RDP: Tensor) -> Tensor:
    """[R, D] float32: sum over the pool of min(p, q)."""
    return torch.minimum(p_RDP, log_q_RDP.exp()).sum(-1)


def pool_losses(
    loss: Loss, log_q_RDP: Tensor, p_RDP: Tensor, hit_RDP: Tensor, eta: float = 3.0
) -> tuple[Tensor, Tensor]:
    """The loss and the acceptance at every position, both [R, D] float32.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `log_q_RDP` | [R, D, P] float32 | adapter's log-probabilities over the pool |
    | `p_RDP` | [R, D, P] float32 | target's probabilities of the pool's tokens |
    | `hit_RDP` | [R, D, P] bool | which pool entry is the text's next token, if any |

    The acceptance carries no gradient. Raises ValueError for an unknown loss.
    """
    accepted_RD = acceptance(log_q_RDP, p_RDP)
    plain_RD = accepted_RD.detach()
    if loss == "ce":
        return -(log_q_RDP * hit_RDP).sum(-1), plain_RD
    if loss == "tv":
        return 1 - accepted_RD, plain_RD
    if loss == "lk_log":
        return -accepted_RD.clamp(min=_LEAST_ACCEPTANCE).log(), plain_RD
    kl_RD = (torch.special.xlogy(p_RDP, p_RDP) - p_RDP * log_q_RDP).sum(-1)
    if loss == "kl":
        return kl_RD, plain_RD
    if loss == "lk_mix":
        weight_RD = torch.exp(-eta * plain_RD)
        return weight_RD * kl_RD + (1 - weight_RD) * (1 - accepted_RD), plain_RD
    raise ValueError(f"loss is {loss!r}: choose one of lk_mix, lk_log, kl, tv, ce")


def text_log_probs(log_q_RDP: Tensor, hit_RDP: Tensor) -> Tensor:
    """[R, D] float32: log q of the text's own token, -inf where it is outside the pool."""
    return (log_q_RDP * hit_RDP).sum(-1).masked_fill(~hit_RDP.any(-1), -torch.inf)


def path_weights(text_RD: Tensor, budget: int) -> Tensor:
    """[R, D] float32: how surely a tree of `budget` nodes has the parent of the text's k-th token.

    min(1, budget q_1 ... q_{k-1}) with `text_RD` = log q_k from `text_log_probs`; 0 after a token
    outside the pool. A best-first tree holds the paths of highest probability, about those above
    1 / budget: what the adapter says below a node that no tree reaches costs nothing, and a chain
    (`budget` 1) reaches less than a tree. No gradient passes through the weights.
    """
    before_RD = torch.nn.functional.pad(text_RD.detach().cumsum(-1)[:, :-1], (1, 0))
    return (budget * before_RD.exp()).clamp(max=1.0)


def length_weights(accepted_RD: Tensor) -> Tensor:
    """[R, D] float32: dE / da_k of a chain's expected length E = sum_m a_1 ... a_m.

    `accepted_RD` [R, D] are acceptances a_k (0 where the text is not followed). With loss `tv` the
    weighted sum has exactly the gradient of -E. No gradient passes through the weights.
    """
    accepted_RD = accepted_RD.detach()
    before_RD = torch.nn.functional.pad(accepted_RD.cumprod(-1)[:, :-1], (1, 0), value=1.0)
    # What a path that has passed depth k still brings, itself included; from the last depth up.
    after = torch.zeros_like(accepted_RD[:, 0])
    columns = []
    for k in reversed(range(accepted_RD.shape[1])):
        columns.append(1 + after)
        after = accepted_RD[:, k] * (1 + after)
    return before_RD * torch.stack(columns[::-1], dim=1)


def depth_weights(depth: int, decay: float, device: torch.device | str) -> Tensor:
    """[D] float32: exp(-(k - 1) / decay) at depth k, or ones if `decay` is 0."""
    steps_D = torch.arange(depth, device=device, dtype=torch.float32)
    return torch.ones_like(steps_D) if decay == 0 else torch.exp(-steps_D / decay)
