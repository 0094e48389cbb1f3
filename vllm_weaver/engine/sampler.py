# SPDX-License-Identifier: Apache-2.0
"""Acceptance: vLLM's own sampler at every node, then a walk from the root.

Noise is keyed by (request seed, position), so the token sampled at a node is the one that plain
decoding would draw after the same prefix; following it from node to node gives plain decoding's
tokens whatever the tree was. No draft probabilities are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_weaver.engine.compat import iter_request_chunks
from vllm_weaver.engine.step import RowLayout, depth_offset
from vllm_weaver.ops import accept_paths

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_weaver.engine.state import TreeStateMixin


class TreeSampler:
    """Takes the place of vLLM's rejection sampler for batches that carry drafts."""

    enable_adaptive_verification = False

    def __init__(self, sampler: Any, state: TreeStateMixin):
        self.sampler = sampler
        self.state = state
        self.level_by_level = state.device.type == "cpu"

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample every row, walk every tree.

        Args:
            logits: [num_logits, V]; a request's rows lie together, root first.
            input_batch: vLLM's batch.
            draft_logits: unused; the rule needs no draft probabilities.
            invalid_drafts: rows whose draft a grammar refused, bool [num_logits] or None.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        layout = _Rows(self.state, input_batch, invalid_drafts)
        num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        wants_logprobs = num_logprobs != NO_LOGPROBS
        processed: list[torch.Tensor] = []
        if self._by_level(input_batch, wants_logprobs):
            sampled = self._sample_paths(logits, input_batch, layout)
        else:
            sampled = self._sample_all(logits, input_batch, layout, wants_logprobs, processed)
        path, length, tokens_out = layout.walk(sampled)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            length,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        step = self.state.step
        if step is not None:
            self.state.step = step.with_path(path, num_sampled)
            self.state.stats.record(self.state.step)
        logprobs = None
        if wants_logprobs:
            scores = torch.cat(processed) if processed else logits
            logprobs = self._logprobs(scores, layout, path, num_sampled, tokens_out, num_logprobs)
        return SamplerOutput(
            sampled_token_ids=tokens_out,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def _by_level(self, batch: InputBatch, wants_logprobs: bool) -> bool:
        """Whether to sample node after node, which only pays where a row is dear: on a CPU.

        Not with requests whose sampling reads neighbouring rows, nor where rows off the path are
        wanted.
        """
        return (
            self.level_by_level
            and not wants_logprobs
            and not bool(self.state.chain_only[batch.idx_mapping].any())
        )

    def _sample_all(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        layout: _Rows,
        wants_logprobs: bool,
        processed: list[torch.Tensor],
    ) -> torch.Tensor:
        """Sample every row; appends processed logits to ``processed`` where they are wanted."""
        parts = []
        keep = wants_logprobs and self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        for start, end in self._chunks(logits, batch):
            low = int(batch.cu_num_logits_np[start])
            high = int(batch.cu_num_logits_np[end])
            sampled, chunk = self.sampler.sample(
                logits[low:high],
                batch.expanded_idx_mapping[low:high],
                batch.idx_mapping[start:end],
                batch.idx_mapping_np[start:end],
                layout.positions[low:high],
                layout.input_ids[low:high],
                batch.expanded_local_pos[low:high],
                batch.seq_lens_cpu_upper_bound.numpy()[start:end],
                return_logprobs=wants_logprobs,
            )
            parts.append(sampled)
            if keep:
                processed.append(chunk)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample_paths(self, logits: torch.Tensor, batch: InputBatch, layout: _Rows) -> torch.Tensor:
        """Sample the root of every tree, then the child that it points to, and so on.

        Returns:
            The same tokens as :meth:`_sample_all` on the accepted paths, -1 elsewhere.
        """
        sampled = torch.full((logits.shape[0],), -1, dtype=torch.int64)
        tokens, parents = layout.tree.tokens, layout.tree.parents
        live = layout.tree.live_rows()
        requests = torch.arange(batch.num_reqs)
        nodes = torch.zeros_like(requests)
        while len(requests):
            entries = layout.layout.index[requests, nodes]
            on_host = requests.numpy()
            sampled[entries], _ = self.sampler.sample(
                logits[entries],
                batch.expanded_idx_mapping[entries],
                batch.idx_mapping[requests],
                batch.idx_mapping_np[on_host],
                layout.positions[entries],
                layout.input_ids[entries],
                batch.expanded_local_pos[entries],
                batch.seq_lens_cpu_upper_bound.numpy()[on_host],
            )
            child = (
                live[requests]
                & (parents[requests] == nodes[:, None])
                & (tokens[requests] == sampled[entries, None])
            )
            hit = child.any(-1)
            requests, nodes = requests[hit], child.int().argmax(-1)[hit]
        return sampled

    @staticmethod
    def _chunks(logits: torch.Tensor, batch: InputBatch) -> list[tuple[int, int]]:
        """Request ranges whose float32 logits stay below vLLM's bound."""
        limit = get_max_chunk_logits(logits.shape[1])
        if logits.shape[0] <= limit:
            return [(0, batch.num_reqs)]
        return list(iter_request_chunks(batch.cu_num_logits_np, limit))

    def _logprobs(
        self,
        scores: torch.Tensor,
        layout: _Rows,
        path: torch.Tensor,
        length: torch.Tensor,
        tokens_out: torch.Tensor,
        num_logprobs: int,
    ) -> LogprobsTensors:
        """Log-probabilities in path order: row i of a request is its i-th emitted token."""
        order, emitted = layout.path_order(path, length, tokens_out)
        return compute_topk_scores(
            scores[order],
            num_logprobs,
            emitted,
            layout.starts_np.tolist(),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class _Rows:
    """Rows of logits of a batch, as one tree per request.

    A request without drafts is a tree with the root alone.
    """

    def __init__(
        self, state: TreeStateMixin, batch: InputBatch, invalid_drafts: torch.Tensor | None
    ):
        self.starts_np = batch.cu_num_logits_np
        self.depth = state.depth
        step, total = state.step, len(batch.logits_indices)
        if (
            invalid_drafts is None
            and step is not None
            and step.layout.uniform
            and step.num_requests == batch.num_reqs
            and step.num_tokens == total
        ):
            # Every entry of the batch is a row of a tree, as the step has laid them out.
            self.layout, self.tree = step.layout, step.tree
            self.input_ids = batch.input_ids[:total]
            known = step.positions
            if known is None:
                known = batch.positions[:total] + step.depth_offset()
            self.positions: torch.Tensor = known
            return
        self.layout = RowLayout.of(np.diff(self.starts_np), batch.cu_num_logits.device)
        self.input_ids = batch.input_ids[batch.logits_indices]
        draft_tokens = self.input_ids
        if invalid_drafts is not None:
            draft_tokens = draft_tokens.masked_fill(invalid_drafts, -1)
        self.tree = state.trees.load(
            batch.idx_mapping, self.layout.pack(draft_tokens), self.layout.counts
        )
        linear = batch.positions[batch.logits_indices]
        self.positions = linear + depth_offset(self.tree, self.layout)

    def walk(self, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accepted path [R, D + 1], its length [R] and the emitted tokens [R, D + 1]."""
        tree = self.tree
        accepted = accept_paths(
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.num_nodes,
            tree.ancestors,
            self.layout.pack(sampled),
            self.depth,
        )
        return accepted.path, accepted.length, accepted.emitted

    def path_order(
        self, path: torch.Tensor, length: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logit rows with each path in front of its request's rows, and the tokens there."""
        order = self.layout.path_first(path, length.clamp(min=1), self.layout.num_entries)
        rows = torch.zeros(self.layout.index.shape, dtype=torch.int64, device=tokens.device)
        width = min(tokens.shape[1], rows.shape[1])
        rows[:, :width] = tokens[:, :width].clamp(min=0)
        return order, self.layout.flatten(rows)
