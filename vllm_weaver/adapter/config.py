# SPDX-License-Identifier: Apache-2.0
"""Sizes and choices of a Weaver adapter, and the two dictionaries that state them.

The published checkpoints carry one dictionary (spec section 2), `config.json` beside our own
`model.safetensors` the other; both are read here, and refused here when they say something that
this code does not do. It does not know about files, tensors or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Variant = Literal["v1", "v2"]

MODEL_TYPE = "weaver"
# The only prompt encoder and score head that spec section 2 describes.
ENCODER_MODE = 3
SCORE_HEAD = 4

_ACTIVATIONS: dict[str, tuple[str, ...]] = {"v1": ("gelu", "gelu_tanh"), "v2": ("swiglu",)}
_ACTIVATION_ALIASES = {"silu": "swiglu", "gelu_pytorch_tanh": "gelu_tanh"}

_REQUIRED_KEYS = (
    "d_model",
    "d_embed",
    "d_rank",
    "num_layers",
    "num_heads",
    "mlp_dim",
    "K",
    "candidate_pool_size",
)
_OPTIONAL_KEYS = frozenset(
    (
        "variant",
        "activation",
        "rope_base",
        "norm_eps",
        "encoder_mode",
        "score_head",
        "vocab_size",
        "target_hidden_size",
        "drafter",
        "drafter_block_size",
        "speculators_model_type",
        "speculators_config",
    )
)
# Keys that other tools write into a config.json and that say nothing about the function.
_IGNORED_KEYS = frozenset(
    (
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "metadata",
        "model_type",
        "speculators_version",
        "torch_dtype",
        "transformers_version",
    )
)


class AdapterError(ValueError):
    """An adapter, its file or its inputs are not usable; one line: what, why, what to do."""


@dataclass(frozen=True, kw_only=True)
class WeaverConfig:
    """Everything that fixes an adapter's function, and what it knows about its target.

    | field | default | meaning |
    |---|---|---|
    | `d_model` | | width of the target and the drafter (hidden states, `lm_head` rows) |
    | `d_embed` | | width of the target's token embedding rows |
    | `d_rank` | 2048 | the adapter's own width r |
    | `num_layers`, `num_heads`, `mlp_dim` | 1, 16, 2048 | blocks; head_dim = d_rank / num_heads |
    | `depth` | 15 | D, draft depths (key `K`: DFlash's block without its anchor) |
    | `candidate_pool_size` | 512 | P of training; any pool can be scored |
    | `variant` | "v1" | "v1": learned positions and a GELU MLP; "v2": RoPE and a gated SiLU MLP |
    | `activation` | by variant | v1: "gelu" (exact, the default) or "gelu_tanh"; v2: "swiglu" |
    | `rope_base`, `norm_eps` | 1e4, 1e-6 | |
    | `vocab_size` | None | rows of the target's vocabulary, if recorded |
    | `target`, `drafter` | None | their names, if recorded |
    | `drafter_block_size` | None | DFlash's block (anchor included), if recorded |

    Raises `AdapterError` for a value outside its range. Source: spec section 2.
    """

    d_model: int
    d_embed: int
    d_rank: int = 2048
    num_layers: int = 1
    num_heads: int = 16
    mlp_dim: int = 2048
    depth: int = 15
    candidate_pool_size: int = 512
    variant: Variant = "v1"
    activation: str | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    vocab_size: int | None = None
    target: str | None = None
    drafter: str | None = None
    drafter_block_size: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "d_model",
            "d_embed",
            "d_rank",
            "num_layers",
            "num_heads",
            "mlp_dim",
            "depth",
            "candidate_pool_size",
        ):
            _require_positive_int(name, getattr(self, name))
        for name in ("vocab_size", "drafter_block_size"):
            if getattr(self, name) is not None:
                _require_positive_int(name, getattr(self, name))
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise AdapterError(f"{name} is {value!r}: it must be a positive number")
        for name in ("target", "drafter"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise AdapterError(f"{name} is {value!r}: it must be a name")
        if self.variant not in _ACTIVATIONS:
            raise AdapterError(f"variant is {self.variant!r}: it must be 'v1' or 'v2'")
        if self.d_rank % self.num_heads:
            raise AdapterError(
                f"d_rank {self.d_rank} does not divide into num_heads {self.num_heads}: "
                "head_dim = d_rank / num_heads must be whole"
            )
        if self.variant == "v2" and self.head_dim % 2:
            raise AdapterError(
                f"head_dim {self.head_dim} (d_rank {self.d_rank} / num_heads {self.num_heads}) "
                "is odd: RoPE in variant v2 rotates pairs, choose an even head_dim"
            )
        known = _ACTIVATIONS[self.variant]
        activation = known[0] if self.activation is None else self.activation
        if isinstance(activation, str):
            activation = _ACTIVATION_ALIASES.get(activation, activation)
        if activation not in known:
            raise AdapterError(
                f"activation is {self.activation!r}: variant {self.variant} takes "
                + " or ".join(repr(name) for name in known)
            )
        object.__setattr__(self, "activation", activation)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_rank // self.num_heads

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, variant: Variant | None = None) -> WeaverConfig:
        """Read the published `config` dictionary or our `config.json`.

        `variant` is what the tensors show. A dictionary need not name its variant; whatever in it
        tells (`variant`, `activation`, `rope_base`) must agree with the tensors and with the rest.
        Without any such evidence the variant is v1.

        Errors: `AdapterError` for a missing key, an unknown key (it could change the function), a
        value of the wrong kind, another encoder or score head, or contradicting variants.
        """
        if not isinstance(data, Mapping):
            raise AdapterError(f"the config is a {type(data).__name__}, not a dictionary")
        unknown = [
            str(key)
            for key in data
            if key not in _REQUIRED_KEYS and key not in _OPTIONAL_KEYS and key not in _IGNORED_KEYS
        ]
        if unknown:
            raise AdapterError(
                f"unknown config key {unknown[0]!r} = {data[unknown[0]]!r}: it may change what the "
                "adapter computes; put notes under 'metadata', or use a newer vllm-weaver"
            )
        missing = [key for key in _REQUIRED_KEYS if key not in data]
        if missing:
            raise AdapterError(
                f"config key {missing[0]!r} is missing: a Weaver config has "
                + ", ".join(_REQUIRED_KEYS)
            )
        for key, only in (("encoder_mode", ENCODER_MODE), ("score_head", SCORE_HEAD)):
            if data.get(key, only) != only:
                raise AdapterError(
                    f"{key} is {data[key]!r}: only {only} is implemented; use an adapter that was "
                    f"trained with {key} = {only}"
                )
        model_type = data.get("speculators_model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise AdapterError(
                f"speculators_model_type is {model_type!r}, not {MODEL_TYPE!r}: this is not a "
                "Weaver adapter"
            )
        width = data.get("target_hidden_size")
        if width is not None and width != data["d_model"]:
            raise AdapterError(
                f"target_hidden_size is {width!r} but d_model is {data['d_model']!r}: "
                "they are the same width, correct the config"
            )
        optional = {
            key: data[key]
            for key in (
                "activation",
                "rope_base",
                "norm_eps",
                "vocab_size",
                "drafter",
                "drafter_block_size",
            )
            if data.get(key) is not None
        }
        return cls(
            variant=_agreed_variant(data, variant),
            depth=data["K"],
            target=_target_name(data),
            **{key: data[key] for key in _REQUIRED_KEYS if key != "K"},
            **optional,
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`: `from_dict` gives the same config back."""
        data: dict[str, Any] = {
            "speculators_model_type": MODEL_TYPE,
            "architectures": ["WeaverAdapter"],
            "variant": self.variant,
            "d_model": self.d_model,
            "d_embed": self.d_embed,
            "d_rank": self.d_rank,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "K": self.depth,
            "candidate_pool_size": self.candidate_pool_size,
            "activation": self.activation,
            "norm_eps": self.norm_eps,
            "encoder_mode": ENCODER_MODE,
            "score_head": SCORE_HEAD,
            "target_hidden_size": self.d_model,
            "speculators_config": {
                "algorithm": MODEL_TYPE,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.depth}],
                "verifier": {"name_or_path": self.target},
            },
        }
        if self.variant == "v2":
            data["rope_base"] = self.rope_base
        for key in ("vocab_size", "drafter", "drafter_block_size"):
            if getattr(self, key) is not None:
                data[key] = getattr(self, key)
        return data


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{name} is {value!r}: it must be a whole number of 1 or more")


def _agreed_variant(data: Mapping[str, Any], from_tensors: Variant | None) -> Variant:
    claims: list[tuple[str, str]] = []
    if from_tensors is not None:
        claims.append(("the tensors", from_tensors))
    if data.get("variant") is not None:
        claims.append((f"variant {data['variant']!r}", str(data["variant"])))
    activation = data.get("activation")
    if isinstance(activation, str):
        activation = _ACTIVATION_ALIASES.get(activation, activation)
        for variant, names in _ACTIVATIONS.items():
            if activation in names:
                claims.append((f"activation {data['activation']!r}", variant))
    if data.get("rope_base") is not None:
        claims.append((f"rope_base {data['rope_base']!r}", "v2"))
    if not claims:
        return "v1"
    first_source, first = claims[0]
    for source, claim in claims[1:]:
        if claim != first:
            raise AdapterError(
                f"{first_source} mean variant {first} but {source} means variant {claim}: "
                "the config belongs to another checkpoint, use the one saved with these tensors"
            )
    return cast(Variant, first)


def _target_name(data: Mapping[str, Any]) -> str | None:
    block = data.get("speculators_config")
    if not isinstance(block, Mapping):
        return None
    verifier = block.get("verifier")
    if not isinstance(verifier, Mapping):
        return None
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) else None
