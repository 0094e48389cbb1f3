# SPDX-License-Identifier: Apache-2.0
"""Random trees with the true continuation hidden in them, in place of the proposer's.

Random-weight drafters are almost always wrong, so that their trees exercise nothing beyond the
root. These hold plain decoding's own tokens up to a random depth, at random places of the node
order and among random siblings, so that paths of every length and shape are accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm_weaver.tree import DraftTree

SHAPES = ("random", "spine", "bush", "root")


class OracleProposer:
    """Takes the place of ``WeaverSpeculator.proposer`` in an in-process engine.

    Until :meth:`follow` is called it passes everything on to the engine's own proposer.

    Attributes:
        shape: ``random`` trees of B nodes; ``spine``: the chain of true tokens, followed by
            wrong ones down to the drafter's depth; ``bush``: the same chain, and after it wrong
            nodes at random places; ``root``: no nodes below the root.
    """

    def __init__(self, runner: Any, seed: int = 0):
        self.runner = runner
        self.weaver = None
        self.base = runner.speculator.proposer
        self.vocab_size = runner.model_config.get_vocab_size()
        self.generator = torch.Generator().manual_seed(seed)
        self.slots: list[int] = []
        original = runner.speculator.propose

        def propose(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.slots = input_batch.idx_mapping.tolist()
            return original(input_batch, *args, **kwargs)

        runner.speculator.propose = propose
        runner.speculator.proposer = self
        self.reset()

    def reset(self) -> None:
        """Let the engine's own proposer work."""
        self.shape: str | None = None
        self.depths: Iterator[int] | None = None
        self.continuations: dict[tuple[int, ...], list[int]] = {}

    def follow(
        self,
        outputs: Iterable[Any],
        shape: str = "random",
        depths: Iterable[int] | None = None,
        seed: int = 0,
    ) -> None:
        """Hide the tokens of plain decoding's ``outputs`` in the trees of their prompts.

        Args:
            outputs: plain decoding's, or what it would emit.
            shape: see above.
            depths: true tokens in each tree, one tree after another, over and over; random if
                left out.
            seed: of the trees.
        """
        assert shape in SHAPES
        self.reset()
        self.shape = shape
        self.depths = None if depths is None else itertools.cycle(depths)
        self.generator.manual_seed(seed)
        self.continuations = {tuple(x.prompt): x.tokens for x in outputs}

    def future(self, slot: int) -> list[int]:
        """Tokens that plain decoding emits after what the request holds now."""
        states = self.runner.req_states
        length, prompt = int(states.total_len.gpu[slot]), int(states.prompt_len.np[slot])
        tokens = states.all_token_ids.gpu[slot, :length].tolist()
        return self.continuations.get(tuple(tokens[:prompt]), [])[length - prompt :]

    def propose(
        self,
        h_ver: torch.Tensor,
        marginals: Any,
        roots: torch.Tensor,
        chain_only: torch.Tensor,
        noise: Any = None,
        nodes: int | None = None,
    ) -> DraftTree:
        """See ``Proposer.propose``."""
        if self.shape is None:
            return self.base.propose(h_ver, marginals, roots, chain_only, noise, nodes)
        rows = self.base.budget + 1
        tokens = torch.zeros(len(roots), rows, dtype=torch.int32)
        parents = torch.full((len(roots), rows), -1, dtype=torch.int32)
        num_nodes = torch.ones(len(roots), dtype=torch.int32)
        tokens[:, 0] = roots
        for row, slot in enumerate(self.slots):
            depth = next(self.depths) if self.depths else self._below(self.base.depth + 1)
            true = self.future(slot)[:depth]
            if self.shape == "root":
                tree = []
            elif self.shape == "random" and not chain_only[row]:
                tree = self._tree(true)
            else:
                tree = self._chain(true)
                if self.shape == "bush" and not chain_only[row]:
                    tree = self._grow(tree)
            for node, (parent, token) in enumerate(tree, start=1):
                parents[row, node], tokens[row, node] = parent, token
            num_nodes[row] = len(tree) + 1
        return DraftTree.from_parents(tokens, parents, num_nodes)

    def _chain(self, true: list[int]) -> list[tuple[int, int]]:
        depth = min(self.base.depth, self.base.budget)
        guesses = [self._below(self.vocab_size) for _ in range(depth - len(true))]
        return list(enumerate([*true[:depth], *guesses]))

    def _grow(self, tree: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The tree, filled up with leaves whose token none of its nodes has."""
        used = {token for _, token in tree}
        parents = len(tree)
        while len(tree) < self.base.budget:
            token = self._below(self.vocab_size)
            if token not in used:
                tree.append((self._below(parents), token))
        return tree

    def _tree(self, true: list[int]) -> list[tuple[int, int]]:
        budget, depth = self.base.budget, self.base.depth
        tree: list[tuple[int, int]] = []
        spine, level = [0], [0]
        for node in range(1, budget + 1):
            offered = len(spine) - 1
            if offered < len(true) and self._below(2):
                parent, token = spine[-1], true[offered]
                spine.append(node)
            else:
                parent = self._below(node)
                while level[parent] >= depth:
                    parent = self._below(node)
                token = self._below(self.vocab_size)
                # Only one child may carry the true token.
                while parent in spine and token in true:
                    token = self._below(self.vocab_size)
            level.append(level[parent] + 1)
            tree.append((parent, token))
        return tree

    def _below(self, high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=self.generator))
