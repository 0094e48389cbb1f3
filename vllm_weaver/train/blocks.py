# SPDX-License-Identifier: Apache-2.0
"""From documents to blocks: what adapter, drafter and target say at the anchors.

Knows the three models' interfaces and how positions line up; no losses, trees or files.

Alignment: the block at anchor a has root token t_a. The target's state at a - 1 gave it (`h_ver`);
the target's state at a + k - 1 gives token t_{a+k}, the one at depth k = 1..D; the drafter's state
at depth k is that of its k-th mask.

Shapes: R blocks, D draft depth, P pool, d width, V vocabulary, L tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter, pool_log_probs
from vllm_weaver.train.data import Document
from vllm_weaver.train.drafter import FrozenDrafter
from vllm_weaver.train.moving import to_device
from vllm_weaver.train.target import FrozenTarget

# Elements of the largest matrix of logits that is held at once.
_LOGITS_AT_ONCE = 2**28


@dataclass
class Blocks:
    """What is known at R anchors.

    | field | shape, dtype | meaning |
    |---|---|---|
    | `h_ver_Rd` | [R, d] | target's state after its final norm that gave the root token |
    | `h_draft_RDd` | [R, D, d] | drafter's states after its final norm |
    | `tokens_RN` | [R, D + 1] int64 | root token and the text's next D |
    | `states_RDd` | [R, D, d] | target's states after its final norm: that of depth k gives the
      text's k-th token |
    | `trained_RD` | [R, D] bool | depths that a loss may cover |
    """

    h_ver_Rd: Tensor
    h_draft_RDd: Tensor
    tokens_RN: Tensor
    states_RDd: Tensor
    trained_RD: Tensor

    def __len__(self) -> int:
        return self.h_ver_Rd.shape[0]

    def part(self, chosen: slice) -> Blocks:
        """Some of the blocks."""
        return Blocks(*(getattr(self, f.name)[chosen] for f in fields(self)))


@dataclass
class Pools:
    """Candidates at R anchors, and the target's and the drafter's view of them.

    | field | shape, dtype | meaning |
    |---|---|---|
    | `ids_RDP` | [R, D, P] int64 | the drafter's best tokens, best first |
    | `logits_RDP` | [R, D, P] float32 | the drafter's raw logits |
    | `p_RDP` | [R, D, P] float32 | target's probabilities, normalised over the vocabulary |
    | `hit_RDP` | [R, D, P] bool | where the text's own token stands |
    """

    ids_RDP: Tensor
    logits_RDP: Tensor
    p_RDP: Tensor
    hit_RDP: Tensor


@torch.no_grad()
def make_blocks(
    target: FrozenTarget,
    drafter: FrozenDrafter,
    documents: Sequence[tuple[Document, Tensor]],
    depth: int,
) -> Blocks | None:
    """Blocks of some documents at given anchors ([A] each); None if there are none.

    `depth` is how many of the drafter's depths are used.
    """
    device, dtype = target.head_Vd.device, target.head_Vd.dtype
    parts = []
    for document, anchors_A in documents:
        if len(anchors_A) == 0:
            continue
        anchors_A = to_device(anchors_A, device)
        tokens_L = to_device(document.tokens_L, device)
        # Whole: a part of each row would be gathered on the host first.
        states = replace(document, states_Lkd=to_device(document.states_Lkd, device))
        auxiliary_Lx = states.auxiliary_Lx.to(dtype)
        normed_Ld = target.final_norm(states.last_Ld.to(dtype))
        h_draft_ADd = drafter.states(auxiliary_Lx, tokens_L, anchors_A, target.embedding_Vd)
        window_AN = anchors_A[:, None] + torch.arange(depth + 1, device=device)
        parts.append(
            Blocks(
                h_ver_Rd=normed_Ld[anchors_A - 1],
                h_draft_RDd=h_draft_ADd[:, :depth],
                tokens_RN=tokens_L[window_AN],
                states_RDd=normed_Ld[window_AN[:, :-1]],
                trained_RD=to_device(document.trained_L, device)[window_AN[:, 1:]],
            )
        )
    if not parts:
        return None
    return Blocks(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Blocks)))


def at_once(blocks: int, depth: int, vocab: int) -> list[slice]:
    """Split R blocks so that their logits over the vocabulary fit."""
    step = max(1, _LOGITS_AT_ONCE // (depth * vocab))
    return [slice(start, start + step) for start in range(0, blocks, step)]


@torch.no_grad()
def make_pools(target: FrozenTarget, blocks: Blocks, pool: int) -> Pools:
    """The drafter's best `pool` tokens per depth; logits in the head's dtype, then float32."""
    parts = []
    head_Vd = target.head_Vd
    for chosen in at_once(len(blocks), blocks.h_draft_RDd.shape[1], target.vocab):
        some = blocks.part(chosen)
        # In the head's dtype: in float32 the same order takes twice the bytes, and a copy of all.
        logits_RDP, ids_RDP = (some.h_draft_RDd.to(head_Vd.dtype) @ head_Vd.T).topk(pool)
        p_RDV = (some.states_RDd.to(head_Vd.dtype) @ head_Vd.T).softmax(-1, dtype=torch.float32)
        hit_RDP = ids_RDP == some.tokens_RN[:, 1:, None]
        parts.append(Pools(ids_RDP, logits_RDP.float(), p_RDV.gather(-1, ids_RDP), hit_RDP))
    return Pools(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Pools)))


def conditional(
    adapter: WeaverAdapter, target: FrozenTarget, blocks: Blocks, pools: Pools
) -> list[tuple[slice, Tensor]]:
    """The adapter's log-probabilities along the text, [., D, P] float32, in parts of the blocks.

    `adapter` may be wrapped (data parallel, compiled). With gradients, each part's logits over the
    vocabulary live until its backward pass is done and are not kept between.
    """
    head_Vd = target.head_Vd
    queries_RDd = adapter(
        blocks.h_ver_Rd, blocks.h_draft_RDd, blocks.tokens_RN[:, :-1], target.embedding_Vd
    )
    parts = []
    for chosen in at_once(len(blocks), queries_RDd.shape[1], target.vocab):
        # A product with the whole head is one GEMM; gathering R x D x P rows of it would move
        # more bytes than it saves operations.
        products_RDV = queries_RDd[chosen].to(head_Vd.dtype) @ head_Vd.T
        correction_RDP = products_RDV.gather(-1, pools.ids_RDP[chosen])
        log_q_RDP = pool_log_probs(pools.ids_RDP[chosen], pools.logits_RDP[chosen], correction_RDP)
        parts.append((chosen, log_q_RDP))
    return parts
