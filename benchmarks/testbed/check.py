# SPDX-License-Identifier: Apache-2.0
"""Checks exported models against code that this project did not write, in float32 on a CPU.

    python -m benchmarks.testbed.check vllm_weaver/demo/models --size nano

Target: logits and layer outputs against Transformers' `Qwen3_5ForCausalLM`. Drafter (where
`speculators` is installed): hidden states against `speculators`' DFlash model. Sizes: the weights
of all three together. Prints one line per check; exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from . import drafter as drafting
from . import export
from .config import SIZES, Size

_TOLERANCE = 2e-3  # logits of magnitude 20 in float32, summed in two orders
_MOST_BYTES = 20_000_000


def check_target(directory: Path, size: Size, ids: Tensor) -> dict[str, float]:
    """Largest differences of logits and of the layer outputs that the drafter reads."""
    from transformers import Qwen3_5ForCausalLM

    theirs = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours = export.load_target(directory, size.target, "cpu")
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True)
        hidden, auxiliary, _ = ours(ids, size.drafter.target_layers)
        assert auxiliary is not None
        # Transformers' entry 0 is the embedding, so layer i's output is entry i + 1.
        states = [expected.hidden_states[i + 1] for i in size.drafter.target_layers]
        return {
            "logits": float((ours.logits(hidden) - expected.logits).abs().max()),
            "layer outputs": float((auxiliary - torch.cat(states, -1)).abs().max()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    arguments = parser.parse_args()
    size, models = SIZES[arguments.size], arguments.models
    torch.manual_seed(0)
    ids = torch.randint(2, size.target.vocab, (2, 96))
    differences = {f"target, {k}": v for k, v in check_target(models / "target", size, ids).items()}
    try:
        import speculators  # noqa: F401
    except ImportError:
        print("drafter: not compared, speculators is not installed")
    else:
        target = export.load_target(models / "target", size.target, "cpu")
        drafter = drafting.Drafter.load(
            models / "drafter", size.drafter, size.target, "cpu", torch.float32
        )
        differences["drafter, hidden states"] = drafting.agreement(
            size, target, models / "target", drafter, ids
        )
    failed = False
    for name, difference in differences.items():
        good = difference <= _TOLERANCE
        failed |= not good
        print(f"{name}: largest difference {difference:.2e} {'ok' if good else 'TOO LARGE'}")
    files = [
        f for n in ("target", "drafter", "adapter") for f in (models / n).glob("*.safetensors")
    ]
    total = sum(f.stat().st_size for f in files)
    failed |= size.name == "nano" and total > _MOST_BYTES
    print(f"weights: {total / 1e6:.2f} MB in {len(files)} files")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
