# SPDX-License-Identifier: Apache-2.0
"""Bytes that an engine needs, from a target's configuration: an estimate, made before any start.

vLLM puts all layers' caches into blocks of one size: a block of an attention group holds as many
tokens as fill one recurrent state. Measured sizes are in the results beside these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK_TOKENS = 16
_SLACK_SEQUENCES = 2
#: The smallest cache that an engine is given.
LEAST_CACHE = 256 << 20
_WORK = 6 << 30


@dataclass(frozen=True)
class CacheShape:
    """What a target and its drafter keep per token and per sequence.

    Attributes:
        attention_layers, gdn_layers, drafter_layers: counts.
        token_bytes: key and value of one token in one attention layer.
        state_bytes: recurrent state of one GDN layer, float32.
        conv_bytes: one row of its convolution's window.
        conv_rows: rows of that window without speculation.
    """

    attention_layers: int
    gdn_layers: int
    drafter_layers: int
    token_bytes: int
    state_bytes: int
    conv_bytes: int
    conv_rows: int

    @classmethod
    def of(
        cls, target: Mapping[str, Any], drafter: Mapping[str, Any] | None, itemsize: int
    ) -> CacheShape:
        """From the `config.json` of both."""
        text = target.get("text_config", target)
        kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
        gdn = kinds.count("linear_attention")
        key = text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0)
        values = text.get("linear_num_value_heads", 0)
        value = values * text.get("linear_value_head_dim", 0)
        return cls(
            attention_layers=len(kinds) - gdn,
            gdn_layers=gdn,
            drafter_layers=0 if drafter is None else drafter["num_hidden_layers"],
            token_bytes=2 * text["num_key_value_heads"] * text["head_dim"] * itemsize,
            state_bytes=value * text.get("linear_key_head_dim", 0) * 4,
            conv_bytes=(2 * key + value) * itemsize,
            conv_rows=text.get("linear_conv_kernel_dim", 1) - 1,
        )

    def sequence_bytes(self, tokens: int, rows: int, states: int, draft: bool) -> int:
        """Cache of one sequence of `tokens` that keeps `states` states; `rows` a pass drafts."""
        if not self.gdn_layers:
            layers = self.attention_layers + draft * self.drafter_layers
            blocks = math.ceil((tokens + rows) / _BLOCK_TOKENS)
            return blocks * _BLOCK_TOKENS * layers * self.token_bytes
        page = self.state_bytes + (self.conv_rows + rows) * self.conv_bytes
        block = _BLOCK_TOKENS * math.ceil(page / self.token_bytes / _BLOCK_TOKENS)
        group = min(self.attention_layers, self.gdn_layers)
        groups = math.ceil(self.attention_layers / group)
        groups += draft * math.ceil(self.drafter_layers / group)
        blocks = math.ceil(self.gdn_layers / group) * states
        blocks += math.ceil((tokens + 2 * rows) / block) * groups
        return blocks * group * block * self.token_bytes

    def cache_bytes(self, kind: str, rows: int, batch: int, tokens: int) -> int:
        """Cache that an arm needs to run `batch` sequences at once.

        vLLM's own speculation keeps a state for each drafted token, the plugin one in all.
        """
        states = 1 + rows if kind == "stock" else 1
        draft = kind != "ar"
        one = self.sequence_bytes(tokens, rows, states, draft)
        return (batch + _SLACK_SEQUENCES) * one + (64 << 20)


def weight_bytes(target: Mapping[str, Any], itemsize: int) -> int:
    """Parameters of a Qwen3.5-like text model, in bytes."""
    text = target.get("text_config", target)
    d, mlp = text["hidden_size"], text["intermediate_size"]
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    key = text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0)
    value = text.get("linear_num_value_heads", 0) * text.get("linear_value_head_dim", 0)
    attention = d * text["head_dim"] * (3 * heads + 2 * kv)
    gdn = d * (2 * key + 3 * value)
    layers = sum(gdn if kind == "linear_attention" else attention for kind in kinds)
    layers += len(kinds) * 3 * d * mlp
    embeddings = (1 if text.get("tie_word_embeddings") else 2) * text["vocab_size"] * d
    return (layers + embeddings) * itemsize


def drafter_bytes(drafter: Mapping[str, Any] | None, itemsize: int) -> int:
    """Parameters of a DFlash drafter without the embedding that it shares, in bytes."""
    if drafter is None:
        return 0
    d, heads = drafter["hidden_size"], drafter["num_attention_heads"]
    heads += drafter["num_key_value_heads"]
    layer = 2 * d * drafter["head_dim"] * heads + 3 * d * drafter["intermediate_size"]
    inputs = len(drafter["dflash_config"]["target_layer_ids"])
    return (drafter["num_hidden_layers"] * layer + inputs * d * d) * itemsize


@dataclass(frozen=True)
class Room:
    """What fits on the device beside the weights.

    Attributes:
        device: bytes of the device; None where there is no limit to mind.
        target, drafter: bytes of weights.
    """

    device: int | None
    target: int
    drafter: int

    def for_cache(self, kind: str, beside: int | None) -> int | None:
        """Most bytes that an arm's caches may take; `beside` is the cache of the AR beside it.

        Leaves memory for graphs, activations and the compiler of each engine.
        """
        if self.device is None:
            return None
        engines = 1 if beside is None or kind == "ar" else 2
        taken = engines * (self.target + _WORK) + (0 if kind == "ar" else self.drafter)
        return int(0.96 * self.device) - taken - (beside or 0 if kind != "ar" else 0)

    def among(self, engines: int, drafters: int, taken: int) -> int | None:
        """Most bytes that an arm's caches may take among engines over one copy of the target.

        `taken` is what the others' caches take; `drafters` engines hold a drafter each.
        """
        if self.device is None:
            return None
        fixed = self.target + engines * _WORK + drafters * self.drafter
        return int(0.96 * self.device) - fixed - taken
