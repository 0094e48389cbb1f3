# SPDX-License-Identifier: Apache-2.0
"""From a drafter's marginals to one tree per request.

Knows the adapter and the tree builders; does not know how the marginals were computed, nor which
requests are in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_weaver.adapter import AdapterError, AdapterTables, WeaverAdapter, load
from vllm_weaver.engine.config import WeaverConfigError, WeaverOptions, draft_depth
from vllm_weaver.engine.step import tree_tensors
from vllm_weaver.ops import choose_chain
from vllm_weaver.tree import DraftTree, SharedNoise, build_ddtree, build_weaver_tree
from vllm_weaver.tree.draft_tree import num_words
from vllm_weaver.tree.shared_noise import MARGINAL_WEIGHT, OUTSIDE_PENALTY

if TYPE_CHECKING:
    from vllm_weaver.engine.compat import Vocabulary
    from vllm_weaver.weave import TreeWeaver

#: Candidates per depth without an adapter. Noise can bring one to the front that is no node of a
#: tree by probability alone.
MARGINAL_POOL = 256
#: The best of them, with or without noise, that a DDTree is built from.
DDTREE_RANKS = 64
WEAVER_REQUESTS = 64
"""Requests that a `TreeWeaver` has buffers for; a larger batch is woven by the definition."""


def adapter_path(name: str) -> Path:
    """Local path of an adapter, fetched from the Hugging Face hub if it names one.

    Args:
        name: a file or directory, or ``org/repository:file`` (``org/repository`` for a directory
            of ours).

    Raises:
        WeaverConfigError: neither exists.
    """
    if Path(name).exists():
        return Path(name)
    repository, _, file = name.partition(":")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise WeaverConfigError(
            f"weaver: adapter {name!r} does not exist; pass a file, a directory, or "
            "'org/repository:file' on the Hugging Face hub"
        )
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file:
            return Path(hf_hub_download(repository, file))
        return Path(snapshot_download(repository))
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeaverConfigError(
            f"weaver: adapter {name!r} is no local path and could not be fetched ({reason}); "
            "download it and pass its path"
        ) from error


def load_adapter(vllm_config: Any, options: WeaverOptions, **kwargs: Any) -> WeaverAdapter:
    """Load the adapter for this target and drafter.

    Raises:
        WeaverConfigError: missing, damaged, or made for another target or a deeper drafter.
    """
    assert options.adapter is not None
    try:
        return load(
            adapter_path(options.adapter),
            target_width=vllm_config.model_config.get_hidden_size(),
            vocab_size=vllm_config.model_config.get_vocab_size(),
            depth=draft_depth(vllm_config),
            **kwargs,
        )
    except AdapterError as error:
        raise WeaverConfigError(f"weaver: {error}") from error


def check_adapter(vllm_config: Any, options: WeaverOptions) -> None:
    """Refuse an adapter that does not fit, before any process is started.

    Raises:
        WeaverConfigError: see :func:`load_adapter`.
    """
    load_adapter(vllm_config, options)


@dataclass
class Marginals:
    """What the drafter says of the next D tokens of R requests.

    Attributes:
        hidden: drafter states after its final norm, [R, D, d].
        ids: the P best tokens of each depth, falling, int64 [R, D, P].
        logits: their raw logits, [R, D, P].
        log_probs: their log-probabilities over the whole vocabulary, float32 [R, D, P].
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    log_probs: torch.Tensor

    def first(self, count: int) -> Marginals:
        """Those of the first requests, as views."""
        return Marginals(*(x[:count] for x in vars(self).values()))

    def upto(self, depth: int) -> Marginals:
        """Those of the first depths, as views."""
        return Marginals(*(x[:, :depth] for x in vars(self).values()))


def tables_of_all_ranks(
    adapter: WeaverAdapter, vocabulary: Vocabulary, embed: torch.Tensor, lm_head: torch.Tensor
) -> AdapterTables:
    """The adapter's tables of the whole vocabulary, [V, r] each, on every rank.

    Each rank projects the rows that it holds; only what comes out is sent.

    Args:
        adapter: whole on every rank.
        vocabulary: of the target.
        embed, lm_head: `Vocabulary.tables` of this rank.
    """
    mine = adapter.precompute(embed, lm_head)
    tables = (vocabulary.gather(cast(torch.Tensor, x)) for x in (mine.token_input, mine.pool_rows))
    return AdapterTables(*tables)


class Proposer:
    """Builds trees of a fixed number of rows.

    With `max_requests`, an adapter on a GPU and the vocabulary's rows in plain tables, Weaver trees
    of up to `WEAVER_REQUESTS` requests come from a `TreeWeaver`; where the vocabulary is split over
    ranks each of them holds the adapter's tables whole and builds by itself. Else trees come from
    `TreeScorer` and `build_weaver_tree`, which is the definition, and which shares a split
    vocabulary's work among the ranks.

    Attributes:
        out: buffers for the trees of a batch, of no fewer requests and of `budget` + 1 rows; None
            makes new ones for every batch.
    """

    def __init__(
        self,
        options: WeaverOptions,
        budget: int,
        depth: int,
        vocab_size: int,
        adapter: WeaverAdapter | None,
        vocabulary: Vocabulary | None,
        max_requests: int | None = None,
    ):
        self.options = options
        self.budget = budget
        self.depth = depth
        self.adapter = adapter
        self.vocabulary = vocabulary
        default = MARGINAL_POOL if adapter is None else adapter.config.candidate_pool_size
        self.pool_size = min(options.candidate_pool or default, vocab_size)
        self.ranks = min(options.candidate_pool or DDTREE_RANKS, vocab_size)
        self.out: DraftTree | None = None
        self.weaver: TreeWeaver | None = None
        if adapter is not None and vocabulary is not None and max_requests is not None:
            self.weaver = self._make_weaver(adapter, vocabulary, max_requests)

    def _make_weaver(
        self, adapter: WeaverAdapter, vocabulary: Vocabulary, max_requests: int
    ) -> TreeWeaver | None:
        held = vocabulary.tables()
        if adapter.device.type != "cuda" or held is None:
            return None
        if vocabulary.sharded and not self.options.adapter_tables:
            return None
        from vllm_weaver.weave import MAX_POOL, TreeWeaver

        if self.pool_size > MAX_POOL:
            return None
        projected = None
        if self.options.adapter_tables:
            projected = tables_of_all_ranks(adapter, vocabulary, *held)
        embed, lm_head = held if projected is None else (None, None)
        return TreeWeaver(
            adapter,
            embed,
            lm_head,
            max_requests=min(max_requests, WEAVER_REQUESTS),
            budget=self.budget,
            pool=self.pool_size,
            tables=projected,
            expansion_width=self.options.expansion_width,
            children=self.options.children,
            full_pools=self.pool_size >= self.options.children,
        )

    def propose(
        self,
        h_ver_Rd: torch.Tensor,
        marginals: Marginals,
        root_tokens_R: torch.Tensor,
        chain_only_R: torch.Tensor,
        noise: SharedNoise | None = None,
        nodes: int | None = None,
    ) -> DraftTree:
        """Trees of R requests, T = budget + 1 rows.

        Args:
            h_ver_Rd: target states, after the final norm, at the positions whose logits gave the
                roots.
            marginals: of the depths below the roots.
            root_tokens_R: last sampled tokens.
            chain_only_R: requests that get the drafter's chain, bool.
            noise: of the sampler, for the candidates of ``marginals``; None builds by probability
                alone, as for greedy requests.
            nodes: N below the root of each tree that can be of use; a Weaver tree has no more, and
                no tree is deeper. Marginals below depth N may be anything finite.
        """
        near = marginals if nodes is None else marginals.upto(nodes)
        log_probs, ids = near.log_probs, near.ids
        tree = None
        if self.options.proposal == "ddtree":
            if noise is not None:
                log_probs, ids = noise.marginals(log_probs, ids, count=self.ranks)
            log_probs, ids = log_probs[..., : self.ranks], ids[..., : self.ranks]
            best = ids[..., 0]
            tree = build_ddtree(log_probs, ids, root_tokens_R, self.budget)
        elif self.options.proposal == "chain":
            best = best_of_pools(near, torch.ones_like(chain_only_R), noise)
        else:
            best = best_of_pools(near, chain_only_R, noise)
            tree = self._weave(h_ver_Rd, marginals, root_tokens_R, noise, nodes)
        best = best[:, : min(self.depth, self.budget)]
        given = None if tree is None else tree_tensors(tree)
        out = self._buffers(root_tokens_R)
        choose_chain(best, root_tokens_R, chain_only_R, given, tree_tensors(out))
        return out

    def _buffers(self, root_tokens_R: torch.Tensor) -> DraftTree:
        """Where the trees of so many requests go."""
        requests, rows = len(root_tokens_R), self.budget + 1
        if self.out is not None:
            return DraftTree(*(x[:requests] for x in tree_tensors(self.out)))
        return empty_trees(requests, rows, root_tokens_R.device)

    def _weave(
        self,
        h_ver_Rd: torch.Tensor,
        marginals: Marginals,
        root_tokens_R: torch.Tensor,
        noise: SharedNoise | None,
        nodes: int | None,
    ) -> DraftTree:
        assert self.adapter is not None and self.vocabulary is not None
        depth = self.adapter.config.depth
        hidden, ids, logits = (
            part[:, :depth] for part in (marginals.hidden, marginals.ids, marginals.logits)
        )
        if self.weaver is not None and len(root_tokens_R) <= self.weaver.max_requests:
            return self.weaver.build(h_ver_Rd, hidden, ids, logits, root_tokens_R, noise, nodes)
        scorer = self.adapter.begin(
            h_ver_Rd,
            hidden,
            ids,
            logits,
            self.vocabulary.embed,
            self.vocabulary.logits,
            self.budget + 1,
        )
        tree = build_weaver_tree(
            scorer if noise is None else noise.expanding(scorer),
            root_tokens_R,
            self.budget if nodes is None else nodes,
            depth,
            expansion_width=self.options.expansion_width,
            children=self.options.children,
            full_pools=self.pool_size >= self.options.children,
        )
        return tree.padded(self.budget + 1)


def empty_trees(requests: int, rows: int, device: torch.device) -> DraftTree:
    """Buffers for trees of so many rows, root included; no request has a tree yet."""
    shape = requests, rows

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    words = make(*shape, num_words(rows), dtype=torch.int64)
    return DraftTree(make(*shape), make(*shape), make(*shape), make(requests), words)


def best_of_pools(
    marginals: Marginals, wanted_R: torch.Tensor, noise: SharedNoise | None
) -> torch.Tensor:
    """The drafter's own tokens of each depth, [R, D]: the likeliest to be drawn.

    Args:
        marginals: best candidates first.
        wanted_R: requests whose tokens will be read, bool; those of others are undefined.
        noise: of the sampler, or None.
    """
    log_probs, ids = marginals.log_probs, marginals.ids
    if noise is None:
        return ids[..., 0]
    if ids.device.type != "cuda":
        return noise.marginals(log_probs, ids, count=1)[1][..., 0]
    # Only here, since Triton need not be installed elsewhere.
    from vllm_weaver.ops.noise.drawn import drawn_best

    return drawn_best(
        *(log_probs, ids, noise.noise_RDP, wanted_R, *noise.sampling.parameters()),
        weight=MARGINAL_WEIGHT,
        penalty=OUTSIDE_PENALTY,
    )
