# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on tokens, trees and sequences, in plain PyTorch: the definition (spec section 5).

Per value head, with a state S [V, K] (the spec's, transposed): H = e^g S; u = beta (v - H k);
S = H + u k^T; o = S q. On a tree the same recurrence runs along every root-to-node path at once, as
one unit lower-triangular solve. The module knows nothing of vLLM, of the convolution before it or
of the norm after it.

Legend: R requests; T rows of a tree, root included; HK / HV key / value heads; G = HV / HK; K / V
their dims; H = HV where a tensor is per value head; W words of ancestor bits; L columns of an
accepted path; M packed tokens. Internal tensors are float32 (float64 where the state is).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_weaver.ops.slots import RowBlanker, read_slots, write_slots

CHUNK = 64
"""Rows of a sequence that prefill solves at once."""


@dataclass(frozen=True)
class GdnStash:
    """What a commit needs of a verified tree. Opaque to callers but for `select`.

    k_RTHK (normalised), v_RTHV, g_RTH and beta_RTH are the exact replay's operands; u_RTHV is the
    solve's result, which the product form adds up.
    """

    k_RTHK: Tensor
    v_RTHV: Tensor
    g_RTH: Tensor
    beta_RTH: Tensor
    u_RTHV: Tensor
    backend: str = "reference"

    def select(self, requests: Tensor | slice) -> GdnStash:
        """Keep some of the requests, in the order given."""
        return replace(
            self,
            k_RTHK=self.k_RTHK[requests],
            v_RTHV=self.v_RTHV[requests],
            g_RTH=self.g_RTH[requests],
            beta_RTH=self.beta_RTH[requests],
            u_RTHV=self.u_RTHV[requests],
        )


@dataclass(frozen=True)
class GdnPending:
    """The accepted path of an earlier step, for the next verification to commit.

    stash: of that step's `gdn_tree_verify`; path [P, L] and length [P], int32: as `gdn_commit`
    takes them, P the requests of that step; requests [R], int32: which of these each request of the
    next step is, below 0 for none of them; None: the same ones in the same order.
    """

    stash: Any
    path: Tensor
    length: Tensor
    requests: Tensor | None = None

    def aligned(self) -> GdnPending:
        """The same with the next step's requests in place of the earlier one's."""
        if self.requests is None:
            return self
        index = self.requests.long().clamp(min=0)
        length = torch.where(self.requests >= 0, self.length[index], 0)
        return GdnPending(self.stash.select(index), self.path[index], length)


def gate(a: Tensor, b: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `gdn_gate`.

    softplus and sigmoid are spelt out in exp and log1p: the fused ones round the last few elements
    of a thread's share differently from the others, which would make a token's gates depend on its
    place in the batch.
    """
    x = (a.float() + dt_bias_H.float()).contiguous()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return -torch.exp(A_log_H.float()) * softplus, 1 / (1 + torch.exp(-b.float().contiguous()))


def decode(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RHV: Tensor,
    g_RH: Tensor,
    beta_RH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Reference of `gdn_decode`."""
    work = state.dtype
    live_R = state_indices_R >= 0
    state_RHVK = read_slots(state, state_indices_R)
    G = v_RHV.shape[1] // k_RHK.shape[1]
    k_RHK = _key(k_RHK.to(work), qk_l2norm).repeat_interleave(G, 1)
    q_RHK = (_key(q_RHK.to(work), qk_l2norm) * scale).repeat_interleave(G, 1)
    (token,) = _operands(*(x.to(work)[:, None] for x in (k_RHK, v_RHV, g_RH, beta_RH)))
    scratch = torch.empty_like(state_RHVK)
    _advance(state_RHVK, *token, scratch)
    out_RHV = torch.mul(state_RHVK, q_RHK[..., None, :], out=scratch).sum(-1)
    write_slots(state, state_indices_R, state_RHVK, live_R)
    return torch.where(live_R[:, None, None], out_RHV, 0).to(v_RHV.dtype)


def ancestor_words(parents_RT: Tensor, num_nodes_R: Tensor) -> Tensor:
    """Ancestors of every node, itself included, as bit words: one mask for all layers of a step.

    =========  ======================  =====  ======  ==============================================
    name       shape                   dtype  in/out  meaning
    =========  ======================  =====  ======  ==============================================
    parents    [R, T]                  int32  in      parent of each node, -1 at the root; past
                                                      `num_nodes` anything
    num_nodes  [R]                     int32  in      live nodes, root included
    words      [R, T, ceil(T / 64)]    int64  out     bit j % 64 of word j // 64: j is the row or an
                                                      ancestor of it; none set past `num_nodes`
    =========  ======================  =====  ======  ==============================================
    """
    # Each round joins a node's words with those of the node that it points at, and doubles how far
    # it points.
    T = parents_RT.shape[1]
    node_T = torch.arange(T, device=parents_RT.device)
    live_RT = node_T < num_nodes_R[:, None]
    pointer_RT = torch.where(live_RT & (parents_RT >= 0), parents_RT.long(), node_T)
    own_TW = node_T.new_zeros(T, (T + 63) // 64)
    own_TW.scatter_(1, (node_T // 64)[:, None], (torch.ones_like(node_T) << (node_T % 64))[:, None])
    words_RTW = torch.where(live_RT[..., None], own_TW, 0)
    for _ in range((T - 1).bit_length()):
        pointed = pointer_RT[..., None].expand_as(words_RTW)
        words_RTW = words_RTW | words_RTW.gather(1, pointed)
        pointer_RT = pointer_RT.gather(1, pointer_RT)
    return words_RTW


def tree_verify(
    q_RTHK: Tensor,
    k_RTHK: Tensor,
    v_RTHV: Tensor,
    g_RTH: Tensor,
    beta_RTH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    num_nodes_R: Tensor,
    ancestors_RTW: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, GdnStash]:
    """Reference of `gdn_tree_verify`, the ancestors given."""
    T, dtype = q_RTHK.shape[1], v_RTHV.dtype
    work = state.dtype
    node_T = torch.arange(T, device=q_RTHK.device)
    live_RT = (node_T < num_nodes_R[:, None]) & (state_indices_R >= 0)[:, None]
    bits_RTT = (ancestors_RTW[..., node_T // 64] >> (node_T % 64)) & 1
    within_RTT = bits_RTT.bool() & live_RT[:, :, None] & live_RT[:, None, :]

    blank = RowBlanker(live_RT)
    k_RTHK = _key(blank(k_RTHK.to(work, copy=True)), qk_l2norm)
    q_RTHK = _key(blank(q_RTHK.to(work, copy=True)), qk_l2norm).mul_(scale)
    v_RTHV = blank(v_RTHV.to(work, copy=True))
    g_RTH = blank(g_RTH.to(work, copy=True))
    beta_RTH = blank(beta_RTH.to(work, copy=True))
    out_RTHV, u_RTHV = _solve(
        q_RTHK, k_RTHK, v_RTHV, g_RTH, beta_RTH, within_RTT, read_slots(state, state_indices_R)
    )
    # The slot that an inert request reads may hold NaN.
    stash = GdnStash(k_RTHK, v_RTHV, g_RTH, beta_RTH, blank(u_RTHV))
    return blank(out_RTHV).to(dtype), stash


def commit(
    stash: GdnStash,
    path_RL: Tensor,
    length_R: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    source_indices_R: Tensor,
    exact: bool,
) -> None:
    """Reference of `gdn_commit`."""
    R, T = stash.g_RTH.shape[:2]
    L = path_RL.shape[1]
    first, last = 0, L
    if length_R.device.type == "cpu":
        # Steps below `first` concern every request and steps from `last` on none; on a GPU, finding
        # out would make the host wait.
        first, last = (int(x) for x in torch.aminmax(length_R))
        if last > L:
            raise ValueError(f"gdn_commit: length {last} exceeds the path's {L} columns")
        if last <= 0:
            return
        path_RL = path_RL[:, :last]

    request_R1 = torch.arange(R, device=path_RL.device)[:, None]
    node_RL = path_RL.long().clamp(0, T - 1)
    on_RL = torch.arange(last, device=path_RL.device) < length_R[:, None]
    k_RLHK = stash.k_RTHK[request_R1, node_RL]
    g_RLH = stash.g_RTH[request_R1, node_RL]
    state_RHVK = read_slots(state, source_indices_R)
    if exact:
        G = state_RHVK.shape[1] // k_RLHK.shape[2]
        tokens = _operands(
            k_RLHK.repeat_interleave(G, 2),
            stash.v_RTHV[request_R1, node_RL],
            g_RLH,
            stash.beta_RTH[request_R1, node_RL],
        )
        scratch = torch.empty_like(state_RHVK)
        for step, token in enumerate(tokens):
            before = None if step < first else state_RHVK.clone()
            _advance(state_RHVK, *token, scratch)
            if before is not None:
                state_RHVK = torch.where(on_RL[:, step, None, None, None], state_RHVK, before)
    else:
        blank = RowBlanker(on_RL)
        u_RLHV = stash.u_RTHV[request_R1, node_RL]
        state_RHVK = _apply(state_RHVK, blank(k_RLHK), blank(u_RLHV), blank(g_RLH))
    live_R = (state_indices_R >= 0) & (source_indices_R >= 0) & (length_R > 0)
    write_slots(state, state_indices_R, state_RHVK, live_R)


def prefill(
    q_MHK: Tensor,
    k_MHK: Tensor,
    v_MHV: Tensor,
    g_MH: Tensor,
    beta_MH: Tensor,
    state: Tensor,
    state_indices_R: Tensor,
    query_start_loc: Tensor,
    has_initial_state_R: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Reference of `gdn_prefill`: a sequence's chunks are chains, solved like trees one by one."""
    work = state.dtype
    live_R = state_indices_R >= 0
    start_R = query_start_loc[:-1].long()
    length_R = torch.where(live_R, query_start_loc[1:].long() - start_R, 0)
    state_RHVK = read_slots(state, state_indices_R)
    state_RHVK = torch.where(has_initial_state_R[:, None, None, None], state_RHVK, 0)
    out_MHV = torch.zeros_like(v_MHV)

    single = (length_R == 1).nonzero()[:, 0]
    if len(single):
        token = start_R[single]
        states = state_RHVK[single]
        out_MHV[token] = decode(
            q_MHK[token],
            k_MHK[token],
            v_MHV[token],
            g_MH[token],
            beta_MH[token],
            states,
            torch.arange(len(single), device=states.device),
            scale,
            qk_l2norm,
        )
        state_RHVK[single] = states

    longest = int(length_R.max())
    for first in range(0, longest if longest > 1 else 0, CHUNK):
        active = ((length_R > first) & (length_R > 1)).nonzero()[:, 0]
        row_T = torch.arange(first, min(first + CHUNK, longest), device=q_MHK.device)
        live_RT = row_T < length_R[active, None]
        token_RT = torch.where(live_RT, start_R[active, None] + row_T, 0)
        blank = RowBlanker(live_RT)
        k = _key(blank(k_MHK[token_RT].to(work)), qk_l2norm)
        q = _key(blank(q_MHK[token_RT].to(work)), qk_l2norm).mul_(scale)
        v, g, beta = (blank(x[token_RT].to(work)) for x in (v_MHV, g_MH, beta_MH))
        within_RTT = (row_T[:, None] >= row_T) & live_RT[:, :, None] & live_RT[:, None, :]
        out, u = _solve(q, k, v, g, beta, within_RTT, state_RHVK[active])
        out_MHV[token_RT[live_RT]] = out[live_RT].to(out_MHV.dtype)
        state_RHVK[active] = _apply(state_RHVK[active], k, u, g)

    write_slots(state, state_indices_R, state_RHVK, length_R > 0)
    return out_MHV


def _key(x: Tensor, l2norm: bool) -> Tensor:
    """Queries or keys in the working dtype, L2-normalised over the head dim if asked."""
    # A sum over a strided head dim would add in another order.
    x = x.contiguous()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) if l2norm else x


def _operands(
    k_RLHK: Tensor, v_RLHV: Tensor, g_RLH: Tensor, beta_RLH: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What `_advance` takes for each of L tokens, shaped for it: k, v, decay, beta."""
    return list(
        zip(
            k_RLHK.unsqueeze(-2).unbind(1),
            v_RLHV.unbind(1),
            torch.exp(g_RLH.contiguous())[..., None, None].unbind(1),
            beta_RLH.unsqueeze(-1).unbind(1),
            strict=True,
        )
    )


def _advance(
    state_RHVK: Tensor,
    k_RH1K: Tensor,
    v_RHV: Tensor,
    decay_RH11: Tensor,
    beta_RH1: Tensor,
    scratch_RHVK: Tensor,
) -> None:
    """One token of the recurrence, in place: the arithmetic of decode and of exact commit.

    Only elementwise products and sums, each rounded by itself, and sums over K, one per state row:
    unlike a batched matrix product, none of them takes another order when more requests are
    computed at once.
    """
    state_RHVK.mul_(decay_RH11)
    recalled_RHV = torch.mul(state_RHVK, k_RH1K, out=scratch_RHVK).sum(-1)
    u_RHV = beta_RH1 * (v_RHV - recalled_RHV)
    state_RHVK.add_(torch.mul(u_RHV[..., None], k_RH1K, out=scratch_RHVK))


def _solve(
    q_RTHK: Tensor,
    k_RTHK: Tensor,
    v_RTHV: Tensor,
    g_RTH: Tensor,
    beta_RTH: Tensor,
    within_RTT: Tensor,
    state_RHVK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs and updates (o, u), each [R, T, HV, V], of all rows: spec section 5, (I + X) U = R.

    within[i, j] says that j is i or an ancestor of i. q and k come normalised, q also scaled; dead
    rows are zeros.
    """
    R, T, HK, K = k_RTHK.shape
    HV, V = state_RHVK.shape[1:3]
    G = HV // HK
    # Keys and queries together, and the Gram matrices once per key head.
    kq = torch.cat([k_RTHK, q_RTHK], dim=1).transpose(1, 2)
    gram = (kq @ kq[:, :, :T].transpose(-1, -2)).view(R, HK, 1, 2, T, T)
    carried = (kq @ state_RHVK.view(R, HK, G * V, K).transpose(-1, -2)).view(R, HK, 2, T, G, V)
    carried = carried.permute(0, 1, 4, 2, 3, 5)

    # In float64, since the difference of two long sums must keep the small decay between near
    # nodes. Masked before the exponential, which would overflow where j is no ancestor.
    mask = gram.new_zeros(R, 1, T, T).masked_fill_(~within_RTT[:, None], float("-inf"))
    total = (within_RTT.double() @ g_RTH.double()).transpose(1, 2)
    gap = (total[..., :, None] - total[..., None, :]).to(mask.dtype)
    decay = gap.add_(mask).exp_().view(R, HK, G, T, T)
    from_root = total.exp().to(mask.dtype).view(R, HK, G, T, 1)

    beta = beta_RTH.transpose(1, 2).reshape(R, HK, G, T, 1)
    v = v_RTHV.transpose(1, 2).reshape(R, HK, G, T, V)
    # As U^T (I + X)^T = R^T, which the solver takes in the layout at hand. It takes the unit
    # diagonal as read, and looks at nothing on or above it.
    coupling = decay * gram[:, :, :, 0] * beta
    rest = (v - from_root * carried[:, :, :, 0]).mul_(beta)
    u = torch.linalg.solve_triangular(
        coupling.mT, rest.mT, upper=True, left=False, unitriangular=True
    ).mT
    out = (from_root * carried[:, :, :, 1]).add_((decay * gram[:, :, :, 1]) @ u)
    return (
        out.view(R, HV, T, V).transpose(1, 2),
        u.reshape(R, HV, T, V).transpose(1, 2),
    )


def _apply(state_RHVK: Tensor, k_RTHK: Tensor, u_RTHV: Tensor, g_RTH: Tensor) -> Tensor:
    """The state after the rows of a path, as one product: e^c_l S + sum_j e^(c_l - c_j) u_j k_j^T.

    Dead rows are zeros and stand after the live ones.
    """
    R, T, HK, K = k_RTHK.shape
    HV, V = state_RHVK.shape[1:3]
    total = g_RTH.double().cumsum(1)
    weight = (total[:, -1:] - total).exp().to(state_RHVK.dtype)
    weighted = (u_RTHV * weight[..., None]).permute(0, 2, 3, 1).reshape(R, HK, -1, T)
    added = (weighted @ k_RTHK.transpose(1, 2)).view(R, HV, V, K)
    decay = total[:, -1].exp().to(state_RHVK.dtype)
    return decay[..., None, None] * state_RHVK + added
