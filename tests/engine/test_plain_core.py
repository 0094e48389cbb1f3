# SPDX-License-Identifier: Apache-2.0
"""The plain runs that everything is compared with agree with Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import Plain, greedy, tokens
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("target", ["dense", "hybrid"])
def test_plain_decoding_is_transformers_greedy_output(
    tiny_models: dict[str, Path], plain_of: Callable[..., Plain], target: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models[target], dtype=torch.float32)
    prompts = [tokens(n, 80) for n in (12, 1)]
    for output in plain_of(target).outputs(prompts, greedy(24)):
        ids = torch.tensor([output.prompt])
        with torch.no_grad():
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert generated[0, ids.shape[1] :].tolist() == output.tokens
