# SPDX-License-Identifier: Apache-2.0
"""The expanded target: tensors of a `Qwen3_5ForCausalLM`, one after another.

Knows names and layouts of the format; `scales.py` has the formulas. Every projection that reads
the residual stream is random beside the small model's rows; every projection that writes to it is
zero beside the small model's block, so extra heads, MLP channels and layers compute and add zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .filler import Filler
from .scales import (
    Stream,
    key_heads,
    large_eps,
    layer_places,
    rotary_map,
    rows_of_heads,
    spread,
    stream,
)
from .shapes import Attention, Gdn, Large, ShapeError, TargetShape

# Final norm's gain on the constant channel, and what unused `lm_head` rows have there: their logit
# is some -1e5 to -1e8, which is no probability at any temperature, and finite in bfloat16.
SPARE_GAIN = 2.0**-4
SPARE_LOGIT = -(2.0**33)


class TargetPlan:
    """Everything that follows from a small target and a large shape.

    Raises:
        ShapeError: something does not fit.
    """

    def __init__(self, small: TargetShape, large: Large) -> None:
        pattern = _period(small.layer_types)
        layer_types = tuple(pattern[i % len(pattern)] for i in range(large.layers))
        for name, a, b in (
            ("mlp", small.mlp, large.mlp),
            ("vocab", small.vocab, large.vocab),
            ("GDN key dim", small.gdn.key_dim, large.gdn.key_dim),
            ("GDN value dim", small.gdn.value_dim, large.gdn.value_dim),
        ):
            if a > b:
                raise ShapeError(f"{name}: the small target's {a} is more than {b}")
        if small.gdn.conv != large.gdn.conv:
            raise ShapeError(f"convolution width {large.gdn.conv} is not {small.gdn.conv}")
        self.small = small
        self.large = large
        self.layer_types = layer_types
        self.places = layer_places(small.layer_types, layer_types)
        self.eps = large_eps(small, large.gdn.key_dim, large.gdn.value_dim)
        self.stream: Stream = stream(small.width, large.width, small.eps, self.eps)

    @property
    def spare(self) -> int:
        """The channel that holds the constant."""
        return self.large.width - 1

    def config(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """The large `config.json` from the small one."""
        large = self.large
        factor = large.attention.rotary / large.attention.head_dim
        config = {
            **small,
            "hidden_size": large.width,
            "num_hidden_layers": large.layers,
            "layer_types": list(self.layer_types),
            "intermediate_size": large.mlp,
            "vocab_size": large.vocab,
            "num_attention_heads": large.attention.heads,
            "num_key_value_heads": large.attention.kv_heads,
            "head_dim": large.attention.head_dim,
            "partial_rotary_factor": factor,
            "rope_parameters": {
                **(small.get("rope_parameters") or {}),
                "partial_rotary_factor": factor,
            },
            "linear_num_key_heads": large.gdn.key_heads,
            "linear_num_value_heads": large.gdn.value_heads,
            "linear_key_head_dim": large.gdn.key_dim,
            "linear_value_head_dim": large.gdn.value_dim,
            "linear_conv_kernel_dim": large.gdn.conv,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": large.max_positions,
            "tie_word_embeddings": False,
        }
        config.pop("_name_or_path", None)
        return config


def target_tensors(
    plan: TargetPlan, small: Mapping[str, Tensor], fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of the large target.

    `small` holds the small target's tensors under the same names; of a tied one, no `lm_head`.
    """
    d_s, d_l = plan.small.width, plan.large.width
    real, vocab = plan.small.vocab, plan.large.vocab
    embed = small["model.embed_tokens.weight"]
    out = fill.normal("embed", vocab, d_l, std=plan.stream.scale)
    out[:real, d_s:] = 0
    out[:, plan.spare] = plan.stream.constant
    yield "model.embed_tokens.weight", fill.put(out, embed, real, d_s, scale=plan.stream.scale)

    at = {place: i for i, place in enumerate(plan.places)}
    for layer, kind in enumerate(plan.layer_types):
        name = f"model.layers.{layer}."
        source = None
        if layer in at:
            prefix = f"model.layers.{at[layer]}."
            source = {k.removeprefix(prefix): v for k, v in small.items() if k.startswith(prefix)}
        if kind == "full_attention":
            tensors = _attention(plan, name, source, fill)
        else:
            tensors = _gdn(plan, name, source, fill)
        for part, tensor in (*tensors, *_mlp(plan, name, source, fill)):
            yield name + part, tensor
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name + norm, _norm(plan, None if source is None else source[norm], fill, 0.0)

    yield "model.norm.weight", _norm(plan, small["model.norm.weight"], fill, SPARE_GAIN)
    head = small.get("lm_head.weight", embed)
    out = fill.normal("lm_head", vocab, d_l, std=d_s**-0.5)
    out[:real, plan.spare] = 0
    out[real:, plan.spare] = SPARE_LOGIT
    yield "lm_head.weight", fill.put(out, head, real, d_s)


def _norm(plan: TargetPlan, small: Tensor | None, fill: Filler, spare: float) -> Tensor:
    """Gain of a (1 + w) norm over the stream; `spare` is 1 + w of the constant channel."""
    out = fill.full(plan.large.width)
    if small is not None:
        gain = (1 + small.float()) * plan.stream.gain - 1
        fill.put(out, gain, plan.small.width)
    out[plan.spare] = spare - 1
    return out


def _mlp(
    plan: TargetPlan, name: str, small: Mapping[str, Tensor] | None, fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    yield from gated_mlp(
        name, small, fill, (plan.small.width, plan.large.width), (plan.small.mlp, plan.large.mlp),
        plan.stream.scale,
    )  # fmt: skip


def gated_mlp(
    name: str,
    small: Mapping[str, Tensor] | None,
    fill: Filler,
    widths: tuple[int, int],
    channels: tuple[int, int],
    scale: float,
) -> Iterator[tuple[str, Tensor]]:
    """A gated MLP's three matrices; `widths` and `channels` are (small, large)."""
    (d_s, d_l), (m_s, m_l) = widths, channels
    for part in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        out = fill.normal(name + part, m_l, d_l, std=d_s**-0.5)
        yield part, out if small is None else fill.put(out, small[part], m_s, d_s)
    part = "mlp.down_proj.weight"
    out = fill.full(d_l, m_l)
    yield part, out if small is None else fill.put(out, small[part], d_s, m_s, scale=scale)


def head_norms(
    eps: tuple[float, float], dims: tuple[int, int], small: Mapping[str, Tensor] | None,
    channels: list[int], fill: Filler, offset: float,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Gains of the query's and the key's norm, stored less `offset`."""
    d_s, d_l = dims
    for part, factor in (("q_norm", 1.0), ("k_norm", (d_s / d_l) ** 0.5)):
        name = f"self_attn.{part}.weight"
        out = fill.full(d_l, value=1 - offset)
        if small is not None:
            gain = (small[name].float() + offset) * factor - offset
            fill.put(out, gain, torch.tensor(channels))
        yield name, out


def _attention(
    plan: TargetPlan, name: str, small: Mapping[str, Tensor] | None, fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    yield from attention_tensors(
        name, small, fill,
        widths=(plan.small.width, plan.large.width),
        shapes=(plan.small.attention, plan.large.attention),
        eps=(plan.small.eps, plan.eps), scale=plan.stream.scale, gated=True, offset=1.0,
    )  # fmt: skip


def attention_tensors(
    name: str,
    small: Mapping[str, Tensor] | None,
    fill: Filler,
    *,
    widths: tuple[int, int],
    shapes: tuple[Attention, Attention],
    eps: tuple[float, float],
    scale: float,
    gated: bool,
    offset: float,
) -> Iterator[tuple[str, Tensor]]:
    """Softmax attention with norms of query and key heads, of a target or a drafter.

    A `gated` query projection holds query and gate of each head in turn. `offset` is 1 for norms
    whose gain is 1 + w. Pairs are (small, large).
    """
    (d_s, d_l), (a, b) = widths, shapes
    channels = rotary_map(a, b)
    straight = list(range(a.head_dim))
    before_norm = (eps[1] / eps[0] * b.head_dim / a.head_dim) ** 0.5
    queries = spread(a.heads, b.heads, a.kv_heads, b.kv_heads)
    keys = key_heads(a.heads, b.heads, a.kv_heads, b.kv_heads)
    parts = 2 if gated else 1

    part = "self_attn.q_proj.weight"
    out = fill.normal(name + part, parts * b.heads * b.head_dim, d_l, std=d_s**-0.5)
    if small is not None:
        _clear_heads(out, queries, parts * b.head_dim)
        for half, (where, factor) in enumerate(((channels, before_norm), (straight, 1.0))[:parts]):
            # Query and gate halves of a head are heads of their own, twice as many.
            pairs = [(parts * large + half, parts * head + half) for large, head in queries]
            rows, source = rows_of_heads(pairs, a.head_dim, b.head_dim, where)
            fill.put(out, small[part], rows, d_s, small_rows=source, scale=factor)
    yield part, out
    for part, where, factor in (
        ("self_attn.k_proj.weight", channels, before_norm),
        ("self_attn.v_proj.weight", straight, 1.0),
    ):
        out = fill.normal(name + part, b.kv_heads * b.head_dim, d_l, std=d_s**-0.5)
        if small is not None:
            _clear_heads(out, keys, b.head_dim)
            rows, source = rows_of_heads(keys, a.head_dim, b.head_dim, where)
            fill.put(out, small[part], rows, d_s, small_rows=source, scale=factor)
        yield part, out
    part = "self_attn.o_proj.weight"
    out = fill.full(d_l, b.heads * b.head_dim)
    if small is not None:
        columns, source = rows_of_heads(queries, a.head_dim, b.head_dim, straight)
        fill.put(out, small[part], d_s, columns, small_columns=source, scale=scale)
    yield part, out
    yield from head_norms(eps, (a.head_dim, b.head_dim), small, channels, fill, offset)


def _clear_heads(out: Tensor, pairs: list[tuple[int, int]], head_dim: int) -> None:
    """Zero rows for the small model's heads, so that their padded channels are zero."""
    for head, _ in pairs:
        out[head * head_dim : (head + 1) * head_dim] = 0


def _gdn(
    plan: TargetPlan, name: str, small: Mapping[str, Tensor] | None, fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    a, b = plan.small.gdn, plan.large.gdn
    d_s, d_l = plan.small.width, plan.large.width
    values = spread(a.value_heads, b.value_heads, a.key_heads, b.key_heads)
    rows, source = _qkv_rows(a, b)

    part = "linear_attn.in_proj_qkv.weight"
    out = fill.normal(name + part, b.channels, d_l, std=d_s**-0.5)
    conv_name = "linear_attn.conv1d.weight"
    conv = fill.normal(name + conv_name, b.channels, 1, b.conv, std=b.conv**-0.5)
    if small is not None:
        keys = key_heads(a.value_heads, b.value_heads, a.key_heads, b.key_heads)
        key_width = b.key_heads * b.key_dim
        _clear_heads(out[:key_width], keys, b.key_dim)
        _clear_heads(out[key_width : 2 * key_width], keys, b.key_dim)
        _clear_heads(out[2 * key_width :], values, b.value_dim)
        fill.put(out, small[part], rows, d_s, small_rows=source)
        fill.put(conv, small[conv_name], rows, small_rows=source)
    yield part, out
    yield conv_name, conv

    value_rows, value_source = rows_of_heads(
        values, a.value_dim, b.value_dim, list(range(a.value_dim))
    )
    part = "linear_attn.in_proj_z.weight"
    out = fill.normal(name + part, b.value_heads * b.value_dim, d_l, std=d_s**-0.5)
    if small is not None:
        fill.put(out, small[part], value_rows, d_s, small_rows=value_source)
    yield part, out

    heads = torch.tensor([large for large, _ in values])
    small_heads = torch.tensor([head for _, head in values])
    for letter in "ba":
        part = f"linear_attn.in_proj_{letter}.weight"
        out = fill.normal(name + part, b.value_heads, d_l, std=d_s**-0.5)
        if small is not None:
            fill.put(out, small[part], heads, d_s, small_rows=small_heads)
        yield part, out
    for part, low, high in (("linear_attn.A_log", 0.0, 2.77), ("linear_attn.dt_bias", -4.0, 0.0)):
        out = fill.uniform(name + part, b.value_heads, low=low, high=high)
        yield (
            part,
            out if small is None else fill.put(out, small[part], heads, small_rows=small_heads),
        )
    part = "linear_attn.norm.weight"
    out = fill.full(b.value_dim, value=1.0)
    if small is not None:
        fill.put(out, small[part], a.value_dim, scale=(a.value_dim / b.value_dim) ** 0.5)
    yield part, out
    part = "linear_attn.out_proj.weight"
    out = fill.full(d_l, b.value_heads * b.value_dim)
    if small is not None:
        fill.put(
            out, small[part], d_s, value_rows, small_columns=value_source, scale=plan.stream.scale
        )
    yield part, out


def _qkv_rows(a: Gdn, b: Gdn) -> tuple[Tensor, Tensor]:
    """(large, small) rows of q, k, v in the joint projection and in the convolution."""
    keys = key_heads(a.value_heads, b.value_heads, a.key_heads, b.key_heads)
    values = spread(a.value_heads, b.value_heads, a.key_heads, b.key_heads)
    large, small = [], []
    for start_l, start_s, pairs, dim_l, dim_s in (
        (0, 0, keys, b.key_dim, a.key_dim),
        (b.key_heads * b.key_dim, a.key_heads * a.key_dim, keys, b.key_dim, a.key_dim),
        (2 * b.key_heads * b.key_dim, 2 * a.key_heads * a.key_dim, values, b.value_dim,
         a.value_dim),
    ):  # fmt: skip
        rows, source = rows_of_heads(pairs, dim_s, dim_l, list(range(dim_s)))
        large.append(rows + start_l)
        small.append(source + start_s)
    return torch.cat(large), torch.cat(small)


def _period(layer_types: tuple[str, ...]) -> tuple[str, ...]:
    """Shortest pattern whose repetition gives the layers."""
    for length in range(1, len(layer_types) + 1):
        pattern = layer_types[:length]
        if all(kind == pattern[i % length] for i, kind in enumerate(layer_types)):
            return pattern
    return layer_types
