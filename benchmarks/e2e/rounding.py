# SPDX-License-Identifier: Apache-2.0
"""How far bfloat16 alone moves the scores of a target's two best tokens.

    python -m benchmarks.e2e.rounding --out rounding.json

Every place of held-out texts, in bfloat16 and in float32, by Transformers' code on a CPU: by the
gap of the two best tokens in bfloat16, how often float32 has the other one ahead; and of tokens
drawn at temperature 1 with the same noise, how many differ, and by how much scores would have to
move for bfloat16's logits to give float32's token (`shift_needed`). Two engines that round in
different ways differ by about the root of two more than one does from float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_weaver.ops import keyed_gumbel

from .doubts import shift_needed
from .exact import load_plain
from .prompts import held_out_texts, load_tokenizer
from .setup import PACKAGED

if TYPE_CHECKING:
    from torch import Tensor

GAPS = (0.0, 0.03125, 0.0625, 0.125, 0.1875, 0.25, 0.375)
SHARES = (0.5, 0.9, 0.99, 0.999)
SAMPLINGS: dict[str, dict[str, float]] = {"T = 1": {}, "top-p": {"top_p": 0.9}}


def rounding(
    out: Annotated[Path, typer.Option(help="JSON file")] = Path("rounding.json"),
    target: Annotated[Path, typer.Option(help="small target")] = PACKAGED / "models/target",
    places: Annotated[int, typer.Option(help="least places to look at")] = 14_000,
    length: Annotated[int, typer.Option(help="most tokens of a text")] = 384,
    draws: Annotated[int, typer.Option(help="tokens drawn at each place")] = 4,
) -> None:
    """Gaps of a target's two best tokens, in bfloat16 and in float32."""
    import torch
    import transformers

    forms = [load_plain(target, dtype) for dtype in (torch.bfloat16, torch.float32)]
    rounded, exact, seen = [], [], 0
    moved_draws: dict[str, list[float]] = {name: [] for name in SAMPLINGS}
    for ids in _texts(target, length):
        with torch.inference_mode():
            # A head in bfloat16, as vLLM's.
            short, whole = (form(torch.tensor([ids])).logits[0].float() for form in forms)
        values, best = short.topk(2, -1)
        rounded.append(values[:, 0] - values[:, 1])
        chosen = whole.gather(1, best)
        exact.append(chosen[:, 0] - chosen[:, 1])
        for name, sampling in SAMPLINGS.items():
            for seed in range(seen, seen + draws):
                options = {**sampling, "temperature": 1.0, "seed": seed}
                moved_draws[name] += _draw(short, whole, options)
        seen += len(ids)
        if seen >= places:
            break
    gap, true = torch.cat(rounded), torch.cat(exact)
    close = gap < 1
    moved = (gap - true)[close]
    shares = torch.quantile(moved.abs(), torch.tensor(SHARES))
    found = {
        "command": "python -m benchmarks.e2e.rounding",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "target": target.name if target != PACKAGED / "models/target" else "the packaged target",
        "places": len(gap),
        "moved_where_gap_below_1": {
            "standard_deviation": float(moved.std()),
            "absolute": {str(share): float(x) for share, x in zip(SHARES, shares, strict=True)},
        },
        "by_gap": [
            {
                "gap": wanted,
                "places": int(here.sum()),
                "mean": float(true[here].mean()),
                "standard_deviation": float(true[here].std()),
                "other_ahead": float((true[here] < 0).float().mean()),
            }
            for wanted in GAPS
            if (here := gap == wanted).sum() > 1
        ],
        "drawn": {
            name: {
                "draws": draws * len(gap),
                "differ": len(shifts),
                "largest_shifts": sorted(shifts, reverse=True)[:10],
            }
            for name, shifts in moved_draws.items()
        },
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    typer.echo(json.dumps(found, indent=1))


def _draw(short: Tensor, whole: Tensor, options: dict[str, float]) -> list[float]:
    """Shifts that `short` needs for the tokens of `whole`, [P, V] both, where they differ."""
    import torch

    places, vocab_size = short.shape
    noise = keyed_gumbel(
        torch.tensor([int(options["seed"])]),
        torch.arange(places)[None],
        torch.arange(vocab_size).expand(1, places, vocab_size),
        use_fp64=False,
        backend="reference",
    )[0]
    drawn = []
    for logits in (short, whole):
        values, order = logits.double().sort(-1, descending=True)
        mass = values.softmax(-1)
        kept = mass.cumsum(-1) - mass < options.get("top_p", 1.0)
        first = (values + noise.gather(1, order)).masked_fill(~kept, -torch.inf).argmax(-1)
        drawn.append(order.gather(1, first[:, None])[:, 0])
    found = []
    for place in (drawn[0] != drawn[1]).nonzero()[:, 0].tolist():
        scores = dict(enumerate(short[place].tolist()))
        shift = shift_needed(scores, [0] * (place + 1), [], options, int(drawn[1][place]))
        assert shift is not None
        found.append(shift)
    return found


def _texts(target: Path, length: int) -> Iterator[list[int]]:
    tokenizer = load_tokenizer(str(target))
    for text in held_out_texts():
        # Characters enough for so many tokens.
        ids = tokenizer.encode(text[: 16 * length]).ids[:length]
        if len(ids) >= min(256, length):
            yield ids


if __name__ == "__main__":
    typer.run(rounding)
