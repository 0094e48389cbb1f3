# SPDX-License-Identifier: Apache-2.0
"""Rows are sampled in chunks of whole requests, bounded by memory alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import Plain, assert_same, sampled, tokens

from vllm_weaver.engine import sampler as module
from vllm_weaver.engine.sampler import TreeSampler


def chunks(rows: list[int], vocab_size: int) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *rows])
    batch: Any = SimpleNamespace(num_reqs=len(rows), cu_num_logits_np=starts)
    logits: Any = SimpleNamespace(shape=(int(starts[-1]), vocab_size))
    return TreeSampler._chunks(logits, batch)


def test_memory_bounds_chunks() -> None:
    assert chunks([64] * 64, 512) == [(0, 64)]
    found = chunks([64] * 64, 248_320)
    most = module.get_max_chunk_logits(248_320)
    assert len(found) > 1 and all(64 * (end - start) <= most for start, end in found)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]


def test_a_requests_rows_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As penalties and bad words need it."""
    monkeypatch.setattr(module, "get_max_chunk_logits", lambda vocab_size: 64)
    assert chunks([40, 40, 1, 128, 1], 512) == [(0, 1), (1, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("most", [1, 20])
def test_chunks_do_not_change_tokens(
    plain: Plain, trees: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with top-p and logprobs, whose rows are all sampled, a few requests at a time."""
    seen: list[list[tuple[int, int]]] = []
    own = TreeSampler._chunks

    def cut(logits: torch.Tensor, batch: Any) -> list[tuple[int, int]]:
        seen.append(own(logits, batch))
        return seen[-1]

    monkeypatch.setattr(module, "get_max_chunk_logits", lambda vocab_size: most)
    monkeypatch.setattr(TreeSampler, "_chunks", staticmethod(cut))
    prompts = [tokens(n, seed=7) for n in (5, 9, 14)]
    params = [
        sampled(8, seed=1, top_p=0.9, logprobs=1),
        sampled(8, seed=2, top_p=0.7, temperature=1.2),
        sampled(8, seed=3),
    ]
    assert_same(trees.generate(prompts, params), plain.outputs(prompts, params))
    assert max(map(len, seen)) > 1
