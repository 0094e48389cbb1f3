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
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_weaver.engine.step import RowLayout, depth_offset
from vllm_weaver.tree import accept

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_weaver.engine.state import TreeStateMixin


class TreeSampler:
    """Takes the place of vLLM's rejection sampler for batches that carry drafts."""

    enable_adaptive_verification = False

    def __init__(self, sampler: Any, state: TreeStateMixin):
        self.sampler = sampler
        self.state = state

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
        chunks = self._chunks(logits, input_batch)
        sampled = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        processed: list[torch.Tensor] = []
        keep_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        for start, end in chunks:
            low = int(input_batch.cu_num_logits_np[start])
            high = int(input_batch.cu_num_logits_np[end])
            tokens, chunk_processed = self.sampler.sample(
                logits[low:high],
                input_batch.expanded_idx_mapping[low:high],
                input_batch.idx_mapping[start:end],
                input_batch.idx_mapping_np[start:end],
                layout.positions[low:high],
                layout.input_ids[low:high],
                input_batch.expanded_local_pos[low:high],
                input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
                return_logprobs=num_logprobs != NO_LOGPROBS,
            )
            sampled[low:high] = tokens
            if keep_processed and num_logprobs != NO_LOGPROBS:
                processed.append(chunk_processed)

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
        if num_logprobs != NO_LOGPROBS:
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

    @staticmethod
    def _chunks(logits: torch.Tensor, batch: InputBatch) -> list[tuple[int, int]]:
        """Request ranges whose float32 logits stay below vLLM's bound."""
        limit = get_max_chunk_logits(logits.shape[1])
        if logits.shape[0] <= limit:
            return [(0, batch.num_reqs)]
        return list(_iter_request_chunks(batch.cu_num_logits_np, limit))

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
        self.layout = RowLayout(np.diff(self.starts_np), batch.cu_num_logits.device)
        self.input_ids = batch.input_ids[batch.logits_indices]
        draft_tokens = self.input_ids
        if invalid_drafts is not None:
            draft_tokens = draft_tokens.masked_fill(invalid_drafts, -1)
        self.tree = state.trees.load(
            batch.idx_mapping, self.layout.pack(draft_tokens), self.layout.counts
        )
        self.depth = state.depth
        linear = batch.positions[batch.logits_indices]
        self.positions = linear + depth_offset(self.tree, self.layout)

    def walk(self, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accepted path [R, D + 1], its length [R] and the emitted tokens [R, D + 1]."""
        sampled_RT = self.layout.pack(sampled)
        path, length = accept(self.tree, sampled_RT.to(torch.int32), max_depth=self.depth)
        width = min(path.shape[1], sampled_RT.shape[1])
        tokens = torch.full_like(path, -1, dtype=torch.int64)
        on_path = path[:, :width].long()
        emitted = sampled_RT.gather(1, on_path.clamp(min=0))
        tokens[:, :width] = torch.where(on_path >= 0, emitted, torch.full_like(emitted, -1))
        return path, length, tokens

    def path_order(
        self, path: torch.Tensor, length: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logit rows with each path in front of its request's rows, and the tokens there."""
        order = self.layout.path_first(path, length.clamp(min=1), self.layout.num_entries)
        rows = torch.zeros(self.layout.index.shape, dtype=torch.int64, device=tokens.device)
        width = min(tokens.shape[1], rows.shape[1])
        rows[:, :width] = tokens[:, :width].clamp(min=0)
        return order, self.layout.flatten(rows)
