# SPDX-License-Identifier: Apache-2.0
"""The expanded DFlash drafter: tensors in z-lab's format, one after another.

It reads the expanded target's stream and embedding, so it carries the same scale and constant. Its
norms have plain gains. Knows names and layouts; `scales.py` has the formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .filler import Filler
from .scales import layer_places
from .shapes import DrafterShape, ShapeError
from .target import SPARE_GAIN, TargetPlan, attention_tensors, gated_mlp


class DrafterPlan:
    """Everything that follows from a small drafter and its target's plan.

    Raises:
        ShapeError: something does not fit.
    """

    def __init__(self, small: DrafterShape, target: TargetPlan) -> None:
        large = target.large.for_small(small)
        if small.width != target.small.width:
            raise ShapeError(f"drafter width {small.width} is not the target's")
        if small.eps != target.small.eps:
            raise ShapeError(
                f"drafter eps {small.eps} is not the target's {target.small.eps}: they share the "
                "embedding, and with it the constant"
            )
        if small.mlp > large.drafter_mlp:
            raise ShapeError(f"drafter mlp {small.mlp} is more than {large.drafter_mlp}")
        self.small, self.large, self.target = small, large, target
        kinds = ("full_attention",)
        self.places = layer_places(kinds * small.layers, kinds * large.drafter_layers)
        read = [target.places[i] for i in small.target_layers]
        extra = large.drafter_inputs - len(read)
        if extra < 0:
            raise ShapeError(f"{len(read)} inputs of the drafter are more than {len(read) + extra}")
        # The last layer's output is the target's business alone.
        free = [i for i in range(large.layers - 2, -1, -1) if i not in read]
        self.inputs = sorted(read + free[:extra])
        self.slots = [self.inputs.index(i) for i in read]

    def config(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """The large `config.json` from the small one."""
        large = self.large
        config = copy.deepcopy(dict(small))
        config["dflash_config"]["target_layer_ids"] = self.inputs
        return config | {
            "hidden_size": large.width,
            "num_hidden_layers": large.drafter_layers,
            "max_window_layers": large.drafter_layers,
            "layer_types": ["full_attention"] * large.drafter_layers,
            "intermediate_size": large.drafter_mlp,
            "num_attention_heads": large.drafter_attention.heads,
            "num_key_value_heads": large.drafter_attention.kv_heads,
            "head_dim": large.drafter_attention.head_dim,
            "vocab_size": large.vocab,
            "num_target_layers": large.layers,
            "rms_norm_eps": self.target.eps,
            "max_position_embeddings": large.max_positions,
        }


def drafter_tensors(
    plan: DrafterPlan, small: Mapping[str, Tensor], fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of the large drafter."""
    d_s, d_l = plan.small.width, plan.large.width
    spare = plan.target.spare
    # Inputs of the projection arrive scaled by the stream's factor and leave so.
    fc = fill.full(d_l, len(plan.inputs) * d_l)
    for i, slot in enumerate(plan.slots):
        block = small["fc.weight"][:, i * d_s : (i + 1) * d_s]
        fill.put(fc[:, slot * d_l : (slot + 1) * d_l], block, d_s, d_s)
    fc[spare, plan.slots[0] * d_l + spare] = 1.0
    yield "fc.weight", fc

    def norm(weight: Tensor | None, constant: float = 0.0) -> Tensor:
        out = fill.full(d_l, value=1.0)
        if weight is not None:
            fill.put(out, weight, d_s, scale=plan.target.stream.gain)
        out[spare] = constant
        return out

    at = {place: i for i, place in enumerate(plan.places)}
    for layer in range(plan.large.drafter_layers):
        name = f"layers.{layer}."
        source = None
        if layer in at:
            prefix = f"layers.{at[layer]}."
            source = {k.removeprefix(prefix): v for k, v in small.items() if k.startswith(prefix)}
        attention = attention_tensors(
            name, source, fill,
            widths=(d_s, d_l),
            shapes=(plan.small.attention, plan.large.drafter_attention),
            eps=(plan.small.eps, plan.target.eps), scale=plan.target.stream.scale,
            gated=False, offset=0.0,
        )  # fmt: skip
        mlp = gated_mlp(
            name, source, fill, (d_s, d_l), (plan.small.mlp, plan.large.drafter_mlp),
            plan.target.stream.scale,
        )  # fmt: skip
        for part, tensor in (*attention, *mlp):
            yield name + part, tensor
        for part in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name + part, norm(None if source is None else source[part])
    yield "hidden_norm.weight", norm(small["hidden_norm.weight"])
    yield "norm.weight", norm(small["norm.weight"], SPARE_GAIN)
