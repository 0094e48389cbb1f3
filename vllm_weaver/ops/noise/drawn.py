# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Scores of candidates given the sampler's noise, in one Triton launch for all nodes of a round;
the best candidate of every depth, in another.

Their definition is `drawn_log_probs` in `vllm_weaver.tree.shared_noise`, a dozen small operations
and a sort. A sort is not needed: the thresholds of top-k and top-p are found by halving, and only
for requests that have them. The module knows nothing of vLLM or of trees.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HALVINGS = 40
"""Of an interval of 100 nats: thresholds to 1e-10, finer than float32 log-probabilities."""


@triton.jit
def drawn(
    log_q,
    noise,
    temperature,
    top_k,
    top_p,
    min_p,
    P,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
):
    """Log-probabilities to be drawn, of G pools of one request: tiles [G, PB], their other
    arguments scalars. Temperature 0 gives `log_q` as it is.
    """
    # A NaN compares as false.
    present = log_q > -float("inf")
    scores = tl.where(
        present, log_q / tl.where(temperature == 0.0, 1.0, temperature), -float("inf")
    )
    # A pool without candidates has no maximum to subtract.
    top = tl.maximum(tl.max(scores, 1), -1.0e30)
    part = weight + tl.zeros_like(top)
    if (temperature != 0.0) & ((top_k < P) | (top_p < 1.0) | (min_p > 0.0)):
        mass = tl.where(present, tl.exp(scores - top[:, None]), 0.0)
        total = tl.sum(mass, 1)
        keep = present & (mass >= min_p)
        # The highest threshold that keeps enough: top_k candidates, then top_p of their mass.
        low = top - 100.0
        high = top
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            enough = tl.sum((keep & (scores >= middle[:, None])).to(tl.int32), 1) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        at_top = tl.sum((keep & (scores >= top[:, None])).to(tl.int32), 1) >= top_k
        keep = keep & (scores >= tl.where(at_top, top, low)[:, None])
        wanted = top_p * tl.sum(tl.where(keep, mass, 0.0), 1)
        low = top - 100.0
        high = top
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            held = tl.where(keep & (scores >= middle[:, None]), mass, 0.0)
            enough = tl.sum(held, 1) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        at_top = tl.sum(tl.where(keep & (scores >= top[:, None]), mass, 0.0), 1) >= wanted
        keep = keep & (scores >= tl.where(at_top, top, low)[:, None])
        count = tl.maximum(tl.sum(keep.to(tl.int32), 1), 1)
        kept = tl.sum(tl.where(keep, mass, 0.0), 1) / total
        part = weight * kept * (1.0 - 1.0 / count)
        scores = tl.where(keep, scores, scores - penalty)
    noised = scores + part[:, None] * noise
    best = tl.maximum(tl.max(noised, 1), -1.0e30)
    spread = tl.where(present, tl.exp(noised - best[:, None]), 0.0)
    total = best + tl.log(tl.sum(spread, 1))
    return tl.where(temperature == 0.0, log_q, noised - total[:, None])


@triton.jit
def drawn_kernel(
    log_q_ptr,
    noise_ptr,
    request_ptr,
    depths_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    log_q_stride_n,
    noise_stride_r,
    noise_stride_d,
    P,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N,); one program holds a pool of up to BLOCK candidates."""
    n = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)[None, :]
    mask = p < P
    log_q = tl.load(log_q_ptr + n * log_q_stride_n + p, mask=mask, other=-float("inf"))
    r = tl.load(request_ptr + n).to(tl.int64)
    d = tl.load(depths_ptr + n).to(tl.int64)
    noise = tl.load(noise_ptr + r * noise_stride_r + d * noise_stride_d + p, mask=mask, other=0.0)
    scores = drawn(
        *(log_q.to(tl.float32), noise, tl.load(temperature_ptr + r), tl.load(top_k_ptr + r)),
        *(tl.load(top_p_ptr + r), tl.load(min_p_ptr + r), P, weight, penalty, HALVINGS),
    )
    tl.store(out_ptr + n * P + p, scores, mask=mask)


@triton.jit
def best_kernel(
    log_q_ptr,
    noise_ptr,
    ids_ptr,
    wanted_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    log_q_stride_r,
    log_q_stride_d,
    noise_stride_r,
    noise_stride_d,
    ids_stride_r,
    ids_stride_d,
    P,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (D, R); one program holds a pool of up to BLOCK candidates, if its request is wanted."""
    r = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0)
    if tl.load(wanted_ptr + r) == 0:
        return
    p = tl.arange(0, BLOCK)[None, :]
    mask = p < P
    at = log_q_ptr + r * log_q_stride_r + d * log_q_stride_d + p
    log_q = tl.load(at, mask=mask, other=-float("inf")).to(tl.float32)
    noise = tl.load(noise_ptr + r * noise_stride_r + d * noise_stride_d + p, mask=mask, other=0.0)
    ids = tl.load(ids_ptr + r * ids_stride_r + d * ids_stride_d + p, mask=mask, other=-1)
    scores = drawn(
        *(log_q, noise, tl.load(temperature_ptr + r), tl.load(top_k_ptr + r)),
        *(tl.load(top_p_ptr + r), tl.load(min_p_ptr + r), P, weight, penalty, HALVINGS),
    )
    scores = tl.where((log_q > -float("inf")) & (ids >= 0), scores, -float("inf"))
    # Of equal scores the first; the first of all where there is no candidate.
    top = tl.max(scores, 1)
    first = tl.min(tl.where(scores == top[:, None], p, BLOCK), 1)
    best = tl.sum(tl.where(p == first[:, None], ids, 0).to(tl.int64), 1)
    place = out_ptr + r * tl.num_programs(0) + d + tl.arange(0, 1)
    tl.store(place, best.to(tl.int32))


def drawn_best(
    log_q_RDP: Tensor,
    ids_RDP: Tensor,
    noise_RDP: Tensor,
    wanted_R: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    *,
    weight: float,
    penalty: float,
) -> Tensor:
    """The candidate of each depth that is most likely to be drawn, int32 [R, D].

    | name          | shape     | dtype   | meaning                                                |
    |---------------|-----------|---------|--------------------------------------------------------|
    | log_q_RDP     | [R, D, P] | float   | the draft's marginals; -inf or NaN: none               |
    | ids_RDP       | [R, D, P] | integer | their tokens; below 0 for padding                      |
    | noise_RDP     | [R, D, P] | float32 | the sampler's noise; all three with unit stride in P   |
    | wanted_R      | [R]       | bool    | requests that get tokens; of others the result is      |
    |               |           |         | undefined                                              |
    | the rest      |           |         | as in `drawn_scores`                                   |

    The first of `SharedNoise.marginals`, up to ties within rounding: what mass the pools lack
    changes all scores of a pool alike. Runs on a GPU, or in Triton's interpreter. Nothing waits for
    the device.
    """
    R, D, P = log_q_RDP.shape
    out_RD = torch.empty((R, D), dtype=torch.int32, device=log_q_RDP.device)
    if out_RD.numel():
        best_kernel[(D, R)](
            *(log_q_RDP, noise_RDP, ids_RDP, wanted_R.view(torch.uint8)),
            *(temperature_R, top_k_R, top_p_R, min_p_R, out_RD),
            *log_q_RDP.stride()[:2],
            *noise_RDP.stride()[:2],
            *ids_RDP.stride()[:2],
            P,
            weight,
            penalty,
            HALVINGS=HALVINGS,
            BLOCK=triton.next_power_of_2(P),
        )
    return out_RD


def drawn_scores(
    log_q_NP: Tensor,
    noise_RDP: Tensor,
    request_N: Tensor,
    depths_N: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    *,
    weight: float,
    penalty: float,
) -> Tensor:
    """Log-probabilities to be drawn, float32 [N, P].

    | name          | shape     | dtype   | meaning                                                |
    |---------------|-----------|---------|--------------------------------------------------------|
    | log_q_NP      | [N, P]    | float   | the draft's; -inf or NaN: none                         |
    | noise_RDP     | [R, D, P] | float32 | the sampler's noise by request and depth               |
    | request_N     | [N]       | integer | request of each pool, in 0 .. R - 1                    |
    | depths_N      | [N]       | integer | depth of the node above it, in 0 .. D - 1              |
    | temperature_R | [R]       | float32 | 0: the row is copied, bit for bit                      |
    | top_k_R       | [R]       | int32   | P or more for none                                     |
    | top_p_R       | [R]       | float32 | 1 for none                                             |
    | min_p_R       | [R]       | float32 | 0 for none                                             |
    | weight        |           | float   | of the noise                                           |
    | penalty       |           | float   | nats that a candidate outside the filters loses        |

    Of candidates that tie at a filter's threshold all are kept, as vLLM's sampler does. Runs on a
    GPU, or in Triton's interpreter. Nothing waits for the device.
    """
    count, pool = log_q_NP.shape
    log_q_NP, noise_RDP = log_q_NP.contiguous(), noise_RDP.contiguous()
    out_NP = torch.empty((count, pool), dtype=torch.float32, device=log_q_NP.device)
    drawn_kernel[(count,)](
        log_q_NP,
        noise_RDP,
        request_N.contiguous(),
        depths_N.contiguous(),
        temperature_R,
        top_k_R,
        top_p_R,
        min_p_R,
        out_NP,
        log_q_NP.stride(0),
        noise_RDP.stride(0),
        noise_RDP.stride(1),
        pool,
        weight,
        penalty,
        HALVINGS=HALVINGS,
        BLOCK=triton.next_power_of_2(pool),
    )
    return out_NP
