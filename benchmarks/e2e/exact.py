# SPDX-License-Identifier: Apache-2.0
"""What a small target's function says in float32, where two engines' bfloat16 disagree.

An expanded target computes the small one's function in the large one's dtype. The small one, in
float32 on a CPU and by Transformers' code, says how far two tokens are apart without either
engine's rounding.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

#: Packages whose kernels Transformers takes, where they are installed, whatever device a model is
#: on; importing them may initialise a GPU, whose memory the engines share out among themselves.
_GPU_ONLY = ("fla", "causal_conv1d")


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Within this context, packages with kernels for GPUs alone are not there for importing."""
    modules: dict[str, Any] = sys.modules
    before = {name: modules[name] for name in _GPU_ONLY if name in modules}
    modules.update(dict.fromkeys(_GPU_ONLY))
    try:
        yield
    finally:
        for name in _GPU_ONLY:
            del modules[name]
        modules.update(before)


def load_plain(directory: Path, dtype: Any) -> Any:
    """A small target on the CPU, by Transformers' code in plain PyTorch."""
    from transformers import AutoModelForCausalLM

    with _plain_torch():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


class ExactTarget:
    """Logits of a small target in float32.

    Attributes:
        directory: of the small target.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    @cached_property
    def _model(self) -> Any:
        import torch

        return load_plain(self.directory, torch.float32)

    def logits(self, before: Sequence[int]) -> list[float]:
        """Of all tokens, after the tokens `before`, prompt included."""
        import torch

        with torch.inference_mode():
            found = self._model(torch.tensor([list(before)]), logits_to_keep=1)
        return found.logits[0, -1].tolist()

    def distance(self, before: Sequence[int], own: int, other: int) -> float:
        """Logit of `own` less that of `other` after the tokens `before`, prompt included."""
        logits = self.logits(before)
        return logits[own] - logits[other]
