# SPDX-License-Identifier: Apache-2.0
"""Random trees with the true continuation hidden in them, in place of the proposer's.

Random-weight drafters are almost always wrong, so that their trees exercise nothing beyond the
root. These hold plain decoding's own tokens up to a random depth, at random places of the node
order and among random siblings, so that paths of every length and shape are accepted.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_weaver.tree import DraftTree


class OracleProposer:
    """Takes the place of ``WeaverSpeculator.proposer`` in an in-process engine.

    Args:
        runner: the engine's model runner.
        continuations: plain decoding's tokens by prompt.
        vocab_size: of the target.
        seed: of the trees.
    """

    def __init__(
        self,
        runner: Any,
        continuations: dict[tuple[int, ...], list[int]],
        vocab_size: int,
        seed: int = 0,
    ):
        self.runner = runner
        self.continuations = continuations
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.base = runner.speculator.proposer
        self.slots: torch.Tensor | None = None
        self.depths_offered: list[int] = []
        original = runner.speculator.propose

        def propose(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.slots = input_batch.idx_mapping
            return original(input_batch, *args, **kwargs)

        runner.speculator.propose = propose
        runner.speculator.proposer = self

    @property
    def pool_size(self) -> int:
        return self.base.pool_size

    def future(self, slot: int) -> list[int]:
        """Tokens that plain decoding emits after what the request holds now."""
        states = self.runner.req_states
        length, prompt = int(states.total_len.gpu[slot]), int(states.prompt_len.np[slot])
        tokens = states.all_token_ids.gpu[slot, :length].tolist()
        return self.continuations.get(tuple(tokens[:prompt]), [])[length - prompt :]

    def propose(
        self, h_ver: torch.Tensor, marginals: Any, roots: torch.Tensor, chain_only: torch.Tensor
    ) -> DraftTree:
        assert self.slots is not None
        budget, depth = self.base.budget, self.base.depth
        tokens = torch.zeros(len(roots), budget + 1, dtype=torch.int32)
        parents = torch.full((len(roots), budget + 1), -1, dtype=torch.int32)
        tokens[:, 0] = roots
        for row, slot in enumerate(self.slots.tolist()):
            chain = bool(chain_only[row])
            true = self.future(slot)[: self._integer(depth + 1)]
            self.depths_offered.append(len(true))
            spine, level = [0], [0]
            for node in range(1, budget + 1):
                grow = len(spine) - 1 < len(true) and (chain or self._integer(3) == 0)
                if grow or (chain and level[node - 1] < depth):
                    parent = spine[-1] if grow else node - 1
                    token = true[len(spine) - 1] if grow else self._integer(self.vocab_size)
                    if grow:
                        spine.append(node)
                else:
                    parent = self._integer(node)
                    while level[parent] >= depth or (chain and parent):
                        parent = self._integer(node) if not chain else 0
                    token = self._integer(self.vocab_size)
                    if parent == spine[-1] and len(spine) - 1 < len(true):
                        # Only one child may carry the true token.
                        while token == true[len(spine) - 1]:
                            token = self._integer(self.vocab_size)
                level.append(level[parent] + 1)
                parents[row, node], tokens[row, node] = parent, token
        nodes = torch.full((len(roots),), budget + 1, dtype=torch.int32)
        return DraftTree.from_parents(tokens, parents, nodes)

    def _integer(self, high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=self.generator))
