# SPDX-License-Identifier: Apache-2.0
"""Bytes that an engine needs, from a target's configuration: an estimate, made before any start.

vLLM puts all layers' caches into blocks of one size: a block of an attention group holds as many
tokens as fill one recurrent state in each of its layers. Measured sizes are in the results beside
these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BLOCK_TOKENS = 16
_SLACK_SEQUENCES = 2
#: The smallest cache that an engine is given.
LEAST_CACHE = 256 << 20
#: Of an engine beside weights and caches, by kind. Measured: up to 3.6 GiB of AR's, 3.9 of stock
#: speculation, 7.7 of a tree engine for 64 requests (6.1 for 16), of which 2 are tables.
_WORK = {"ar": 4 << 30, "stock": 9 << 29}
_TREE_WORK = 8 << 30


@dataclass(frozen=True)
class CacheShape:
    """What a target and its drafter keep per token and per sequence.

    Attributes:
        attention_layers, gdn_layers, drafter_layers: counts.
        token_bytes: key and value of one token in one attention layer.
        state_bytes: recurrent state of one GDN layer, float32.
        conv_bytes: one row of its convolution's window.
        conv_rows: rows of that window without speculation.
        drafter_token_bytes: key and value of one token in one layer of the drafter.
        alike: whether the drafter has the target's heads, so that one group can hold both.
        side_by_side: whether the plugin's blocks hold layers side by side.
    """

    attention_layers: int
    gdn_layers: int
    drafter_layers: int
    token_bytes: int
    state_bytes: int
    conv_bytes: int
    conv_rows: int
    drafter_token_bytes: int
    alike: bool
    side_by_side: bool = True

    @classmethod
    def of(
        cls,
        target: Mapping[str, Any],
        drafter: Mapping[str, Any] | None,
        itemsize: int,
        side_by_side: bool = True,
    ) -> CacheShape:
        """From the `config.json` of both."""
        text = target.get("text_config", target)
        kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
        gdn = kinds.count("linear_attention")
        key = text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0)
        values = text.get("linear_num_value_heads", 0)
        value = values * text.get("linear_value_head_dim", 0)
        heads, drafts = (
            (0, 0) if x is None else (x["num_key_value_heads"], x["head_dim"])
            for x in (text, drafter)
        )
        return cls(
            attention_layers=len(kinds) - gdn,
            gdn_layers=gdn,
            drafter_layers=0 if drafter is None else drafter["num_hidden_layers"],
            token_bytes=2 * math.prod(heads) * itemsize,
            state_bytes=value * text.get("linear_key_head_dim", 0) * 4,
            conv_bytes=(2 * key + value) * itemsize,
            conv_rows=text.get("linear_conv_kernel_dim", 1) - 1,
            drafter_token_bytes=2 * math.prod(drafts) * itemsize,
            alike=heads == drafts,
            side_by_side=side_by_side,
        )

    def blocks(self, kind: str, rows: int) -> Blocks:
        """The blocks of an arm's cache, of whose passes each drafts `rows`."""
        draft = self.drafter_layers if kind != "ar" else 0
        states = 1 + rows if kind == "stock" else 1
        if not self.gdn_layers:
            token = self.attention_layers * self.token_bytes + draft * self.drafter_token_bytes
            return Blocks(_BLOCK_TOKENS, _BLOCK_TOKENS * token, 1, 0)
        wide = self.conv_rows + (rows if kind == "stock" else 0)
        page = self.state_bytes + wide * self.conv_bytes
        if draft and kind != "stock" and self.side_by_side:
            groups = math.ceil(self.gdn_layers / min(self.gdn_layers, self.attention_layers))
            token = self.attention_layers * self.token_bytes + draft * self.drafter_token_bytes
            held = math.ceil(self.gdn_layers / groups) * _round_up(page, 256)
            tokens = _round_up(math.ceil(held / token), _BLOCK_TOKENS)
            return Blocks(tokens, tokens * token, 1, groups)
        tokens = _round_up(math.ceil(page / self.token_bytes), _BLOCK_TOKENS)
        attention = [self.attention_layers, draft]
        if self.alike:
            attention = [sum(attention)]
        counts = [count for count in (*attention, self.gdn_layers) if count]
        # As many layers to a group as the rarest kind has, unless none has half as many again.
        group = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        return Blocks(
            tokens,
            group * tokens * self.token_bytes,
            sum(math.ceil(count / group) for count in attention),
            math.ceil(self.gdn_layers / group) * states,
        )

    def sequence_bytes(self, kind: str, rows: int, tokens: int) -> int:
        """Cache of one sequence of `tokens`, without prefix caching; `rows` a pass drafts.

        vLLM's own speculation keeps a state for each drafted token, the plugin one in all. A
        drafter whose page is not the target's is taken to be padded to it.
        """
        fresh = 0 if kind == "ar" else 2 * rows + 1
        return self.blocks(kind, rows).sequence_bytes(tokens + fresh)

    def cache_bytes(self, kind: str, rows: int, batch: int, tokens: int) -> int:
        """Cache that an arm needs to run `batch` sequences at once."""
        one = self.sequence_bytes(kind, rows, tokens)
        return (batch + _SLACK_SEQUENCES) * one + (64 << 20)


@dataclass(frozen=True)
class Blocks:
    """Cache blocks that all layers share.

    Attributes:
        tokens: that one holds for a group of attention layers.
        nbytes: of one block.
        attention: blocks that a sequence takes for so many tokens.
        states: blocks of recurrent states that it takes whatever its length.
    """

    tokens: int
    nbytes: int
    attention: int
    states: int

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes, fresh rows counted."""
        return (self.states + math.ceil(tokens / self.tokens) * self.attention) * self.nbytes


def blocks_of(config: Any) -> Blocks:
    """The blocks of an engine, from vLLM's `KVCacheConfig`."""
    attention = states = 0
    tokens = 1
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        spec = getattr(spec, "first_spec", spec)
        if hasattr(spec, "num_speculative_blocks"):
            kept = 2 if spec.mamba_cache_mode == "align" else 1
            states += kept + spec.num_speculative_blocks
        else:
            attention, tokens = attention + 1, max(tokens, spec.block_size)
    # Groups lie over one another: every tensor has the size of the one allocation.
    size = max(tensor.size for tensor in config.kv_cache_tensors)
    return Blocks(tokens, size // config.num_blocks, attention, states)


def _round_up(number: int, base: int) -> int:
    return math.ceil(number / base) * base


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
        own = self.target + self._own(kind)
        if beside is None or kind == "ar":
            return int(0.96 * self.device) - own
        return int(0.96 * self.device) - own - self.target - self._own("ar") - beside

    def among(self, kinds: Sequence[str], taken: int) -> int | None:
        """Most bytes that an arm's caches may take among engines over one copy of the target.

        `kinds` are all engines' with its own, `taken` is what the others' caches take.
        """
        if self.device is None:
            return None
        fixed = self.target + sum(map(self._own, kinds))
        return int(0.96 * self.device) - fixed - taken

    def _own(self, kind: str) -> int:
        """Bytes of an engine beside the target and its caches."""
        return _WORK.get(kind, _TREE_WORK) + (0 if kind == "ar" else self.drafter)
