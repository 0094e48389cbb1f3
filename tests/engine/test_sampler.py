# SPDX-License-Identifier: Apache-2.0
"""Rows are sampled in the chunks in which plain decoding's kernels would take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import Plain, assert_same, sampled, tokens

from vllm_weaver.engine import sampler as module
from vllm_weaver.engine.sampler import TreeSampler


def chunks(
    rows: list[int],
    top_p: list[float],
    device: str,
    vocab_size: int = 512,
    top_k: list[int] | None = None,
) -> Any:
    states = SimpleNamespace(
        top_p=SimpleNamespace(np=np.array([0.5, *top_p])),
        top_k=SimpleNamespace(np=np.array([vocab_size, *(top_k or [vocab_size] * len(rows))])),
    )
    state: Any = SimpleNamespace(device=torch.device("cpu"))
    sampler = TreeSampler(SimpleNamespace(sampling_states=states), state)
    starts = np.cumsum([0, *rows])
    # A batch's slots: the first of all belongs to no request of it.
    batch: Any = SimpleNamespace(
        num_reqs=len(rows), cu_num_logits_np=starts, idx_mapping_np=1 + np.arange(len(rows))
    )
    logits: Any = SimpleNamespace(
        shape=(int(starts[-1]), vocab_size), device=SimpleNamespace(type=device)
    )
    return sampler._chunks(logits, batch)


def test_top_p_takes_no_more_rows_than_vllms_exact_kernel() -> None:
    assert module.EXACT_TOP_P_ROWS == 64
    plain = [1.0] * 5
    assert chunks([16] * 5, plain, "cuda") == [(0, 5)]
    assert chunks([16] * 5, [*plain[:4], 0.9], "cuda") == [(0, 4), (4, 5)]
    assert chunks([16] * 4, [0.9] * 4, "cuda") == [(0, 4)]
    assert chunks([16] * 5, [0.9] * 5, "cpu") == [(0, 5)]
    # A request's rows stay together, as penalties and bad words need it.
    assert chunks([40, 40, 1, 128, 1], [0.9] * 5, "cuda") == [(0, 1), (1, 3), (3, 4), (4, 5)]


def test_top_k_takes_the_other_kernel_at_every_number_of_rows() -> None:
    """Chunks would only cost: Qwen's own recipes have both."""
    assert chunks([16] * 5, [0.95] * 5, "cuda", top_k=[20] * 5) == [(0, 5)]
    # Greedy requests have neither, and a request with top-k alone has no limit of mass.
    assert chunks([16] * 5, [1.0, 1.0, 0.95, 0.95, 1.0], "cuda", top_k=[512, 20, 20, 20, 512]) == [
        (0, 5)
    ]
    assert chunks([16] * 5, [0.95] * 5, "cuda", top_k=[20, 20, 512, 20, 20]) == [(0, 4), (4, 5)]


def test_memory_bounds_chunks_as_before() -> None:
    assert len(chunks([64] * 64, [1.0] * 64, "cuda", 248_320)) > 1


@pytest.mark.parametrize("most", [1, 20])
def test_chunks_do_not_change_tokens(
    plain: Plain, trees: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with top-p and logprobs, whose rows are all sampled, a few requests at a time."""
    seen: list[list[tuple[int, int]]] = []
    own = TreeSampler._chunks

    def cut(self: TreeSampler, logits: torch.Tensor, batch: Any) -> list[tuple[int, int]]:
        on_gpu: Any = SimpleNamespace(shape=logits.shape, device=SimpleNamespace(type="cuda"))
        seen.append(own(self, on_gpu, batch))
        return seen[-1]

    monkeypatch.setattr(module, "EXACT_TOP_P_ROWS", most)
    monkeypatch.setattr(TreeSampler, "_chunks", cut)
    prompts = [tokens(n, seed=7) for n in (5, 9, 14)]
    params = [
        sampled(8, seed=1, top_p=0.9, logprobs=1),
        sampled(8, seed=2, top_p=0.7, temperature=1.2),
        sampled(8, seed=3),
    ]
    assert_same(trees.generate(prompts, params), plain.outputs(prompts, params))
    assert max(map(len, seen)) > 1
