# SPDX-License-Identifier: Apache-2.0
"""The expanded Weaver adapter.

It reads normalised states and embedding rows of the expanded pair, and has a residual stream of its
own, of `d_rank` channels, whose constant comes from the biases of the two input projections.
Formulas: `scales.py`. The norm of the states alone keeps its epsilon only up to a factor: an
error of (d_l / d_s - 1) eps / 2 relative to the states' mean square, about 1e-5 at the 27B's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter, WeaverConfig

from .filler import Filler
from .scales import Stream, rotary_map, rows_of_heads, stream
from .shapes import Attention, Large, ShapeError
from .target import TargetPlan


def expand_adapter(
    small: WeaverAdapter, target: TargetPlan, fill: Filler, large: Large
) -> WeaverAdapter:
    """The adapter that scores for the expanded pair as `small` scores for the small one.

    Raises:
        ShapeError: something does not fit.
    """
    old = small.config
    if old.d_model != target.small.width or old.d_embed != target.small.width:
        raise ShapeError(f"adapter width {old.d_model} is not the target's {target.small.width}")
    if old.mlp_dim > large.rank_mlp or old.num_heads > large.rank_heads:
        raise ShapeError(
            f"adapter MLP {old.mlp_dim} and {old.num_heads} heads do not fit into "
            f"{large.rank_mlp} and {large.rank_heads}"
        )
    d = target.stream
    eps = (d.scale**2 * old.norm_eps * d.small - d.constant**2) / d.large
    if eps <= 0:
        raise ShapeError(f"adapter eps {old.norm_eps} is too small for the target's constant")
    config = replace(
        old,
        d_model=large.width,
        d_embed=large.width,
        d_rank=large.rank,
        num_heads=large.rank_heads,
        mlp_dim=large.rank_mlp,
        norm_eps=eps,
        vocab_size=None if old.vocab_size is None else large.vocab,
    )
    r = stream(old.d_rank, large.rank, old.norm_eps, eps)
    new = WeaverAdapter(config, device="meta")
    tensors = dict(_tensors(dict(small.state_dict()), old, config, d, r, fill))
    new.load_state_dict(tensors, assign=True)
    new.metadata = {
        **small.metadata,
        "expanded_from": {"d_model": old.d_model, "d_rank": old.d_rank},
    }
    return new.eval()


def _tensors(
    small: dict[str, Tensor],
    old: WeaverConfig,
    new: WeaverConfig,
    d: Stream,
    r: Stream,
    fill: Filler,
) -> Iterator[tuple[str, Tensor]]:
    def norm(name: str, over: Stream) -> Iterator[tuple[str, Tensor]]:
        weight = fill.full(over.large, value=1.0)
        weight[-1] = 0.0
        yield (
            f"{name}.weight",
            fill.put(weight, small[f"{name}.weight"], over.small, scale=over.gain),
        )
        yield f"{name}.bias", fill.put(fill.full(over.large), small[f"{name}.bias"], over.small)

    for name, source in (("output_norm", "proposal_in"), ("embed_norm", "token_in")):
        yield from norm(name, d)
        weight, bias = f"{source}.weight", f"{source}.bias"
        out = fill.full(r.large, d.large)
        yield weight, fill.put(out, small[weight], r.small, d.small, scale=r.scale)
        out = fill.put(fill.full(r.large), small[bias], r.small, scale=r.scale)
        out[-1] = r.constant
        yield bias, out
    if old.variant == "v1":
        out = fill.full(old.depth, r.large)
        yield "pos_emb", fill.put(out, small["pos_emb"], old.depth, r.small, scale=r.scale)
    for index in range(old.num_layers):
        block = f"blocks.{index}."
        yield from norm(block + "norm_attn", r)
        yield from _attention(block, small, old, new, r, fill)
        yield from norm(block + "norm_mlp", r)
        yield from _mlp(block, small, old, new, r, fill)
    yield from norm("out_norm", r)
    name = "lm_head_query_in.weight"
    yield name, fill.put(fill.full(d.large, r.large), small[name], d.small, r.small)


def _attention(
    block: str,
    small: dict[str, Tensor],
    old: WeaverConfig,
    new: WeaverConfig,
    r: Stream,
    fill: Filler,
) -> Iterator[tuple[str, Tensor]]:
    straight = turned = list(range(old.head_dim))
    if old.variant == "v2":
        a, b = (
            Attention(c.num_heads, c.num_heads, c.head_dim, rotary=c.head_dim) for c in (old, new)
        )
        turned = rotary_map(a, b)
    pairs = [(head, head) for head in range(old.num_heads)]
    name = f"{block}qkv_proj.weight"
    out = fill.normal(name, 3 * r.large, r.large, std=r.small**-0.5)
    query_scale = (new.head_dim / old.head_dim) ** 0.5
    for part, (channels, scale) in enumerate(
        ((turned, query_scale), (turned, 1.0), (straight, 1.0))
    ):
        rows, source = rows_of_heads(pairs, old.head_dim, new.head_dim, channels)
        start = part * r.large
        out[start : start + old.num_heads * new.head_dim] = 0
        fill.put(
            out, small[name], rows + start, r.small, small_rows=source + part * r.small, scale=scale
        )
    yield name, out
    columns, source = rows_of_heads(pairs, old.head_dim, new.head_dim, straight)
    name = f"{block}o_proj.weight"
    out = fill.full(r.large, r.large)
    yield name, fill.put(out, small[name], r.small, columns, small_columns=source, scale=r.scale)


def _mlp(
    block: str,
    small: dict[str, Tensor],
    old: WeaverConfig,
    new: WeaverConfig,
    r: Stream,
    fill: Filler,
) -> Iterator[tuple[str, Tensor]]:
    halves = 1 if old.variant == "v1" else 2
    into, out_of = ("fc1", "fc2") if halves == 1 else ("gate_up_proj", "down_proj")
    m_s, m_l = old.mlp_dim, new.mlp_dim
    rows = torch.cat([torch.arange(m_s) + half * m_l for half in range(halves)])
    name = f"{block}{into}.weight"
    out = fill.normal(name, halves * m_l, r.large, std=r.small**-0.5)
    yield name, fill.put(out, small[name], rows, r.small)
    name = f"{block}{into}.bias"
    yield name, fill.put(fill.full(halves * m_l), small[name], rows)
    name = f"{block}{out_of}.weight"
    yield name, fill.put(fill.full(r.large, m_l), small[name], r.small, m_s, scale=r.scale)
    name = f"{block}{out_of}.bias"
    yield name, fill.put(fill.full(r.large), small[name], r.small, scale=r.scale)
