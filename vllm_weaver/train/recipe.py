# SPDX-License-Identifier: Apache-2.0
"""Recipes: everything that fixes a training run, as one TOML file.

Knows the names, types and ranges of the settings. Touches no model, no data and no device; paths
are made absolute (relative ones are relative to the working directory) and not looked at.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_weaver.adapter import AdapterError, WeaverConfig
from vllm_weaver.train.errors import RecipeError

Loss = Literal["lk_mix", "lk_log", "kl", "tv", "ce"]
Parallel = Literal["ddp", "fsdp2"]
Weigh = Literal["depth", "path", "length"]


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A frozen model: a directory, or `org/repository` on the Hugging Face hub."""

    path: str


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where tokens and hidden states come from.

    Attributes:
        path: directory that `speculators prepare-data` or `vllm-weaver extract` wrote.
        hidden_states: directory of `hs_N.safetensors`; empty: `hidden_states` in `path`.
        endpoint: of a vLLM server that extracts hidden states; used where a file is missing and
            `on_missing` is "generate".
        on_missing: what to do where a row has no file: "raise", "skip" it, or "generate".
        on_bad: what to do with an unreadable or wrong file: "raise" or "skip" it.
        max_length: tokens of a row that are used; longer rows are cut.
        held_out: share of the rows, from the end, that is kept for measuring.
        workers: processes that read files, up to two rows ahead each; 0 reads in the training
            process.
    """

    path: str
    hidden_states: str = ""
    endpoint: str = "http://localhost:8000/v1"
    on_missing: Literal["raise", "skip", "generate"] = "raise"
    on_bad: Literal["raise", "skip"] = "raise"
    max_length: int = 4096
    held_out: float = 0.05
    workers: int = 2


@dataclass(frozen=True, kw_only=True)
class AdapterRecipe:
    """Size of the adapter; width, depth and vocabulary follow from target and drafter.

    Attributes:
        start_from: adapter whose weights to start from; its size must be the one given here.
    """

    variant: Literal["v1", "v2"] = "v2"
    rank: int = 2048
    heads: int = 16
    layers: int = 1
    mlp: int = 2048
    pool: int = 512
    depth: int | None = None
    start_from: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How to train.

    A *unit* is what one process runs through at once: `documents` rows with `blocks` blocks each.
    An optimiser step is the mean over `units` units, whichever processes ran them, so that the
    result does not depend on their number.

    Attributes:
        epochs: passes over the training rows; with `steps` given, the shorter of the two counts.
        loss: see `vllm_weaver.train.losses`.
        eta: of "lk_mix": the weight of KL is exp(-eta * acceptance).
        depth_decay: depth k weighs exp(-(k - 1) / depth_decay); 0 weighs all alike.
        weigh: what a position weighs beside that: nothing more ("depth"), whether a tree of
            `path_budget` nodes gets there ("path"), or what it adds to a chain's expected length
            ("length"); see `vllm_weaver.train.losses`.
        muon_lr, adam_lr: peak learning rates, of matrices and of everything else.
        warmup, decay: shares of the run in which the rates rise and fall.
        clip: largest norm of the gradient; 0 does not clip.
        parallel: with several processes, whether each holds the whole adapter ("ddp") or a shard of
            it and of its optimisers' states ("fsdp2").
        save_every, keep: steps between checkpoints, and how many are kept.
    """

    epochs: float = 1.0
    steps: int | None = None
    documents: int = 4
    blocks: int = 64
    units: int = 8
    loss: Loss = "lk_mix"
    eta: float = 3.0
    depth_decay: float = 0.0
    weigh: Weigh = "depth"
    path_budget: int = 63
    muon_lr: float = 2e-4
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0
    adam_lr: float = 2e-4
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_weight_decay: float = 0.0
    warmup: float = 0.02
    decay: float = 0.2
    clip: float = 1.0
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    parallel: Parallel = "ddp"
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    measure_every: int = 0
    measure_documents: int = 32
    save_every: int = 500
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe; see the classes of its sections and `recipes/` for examples."""

    output: str
    target: ModelRecipe
    drafter: ModelRecipe
    data: DataRecipe
    adapter: AdapterRecipe = field(default_factory=AdapterRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read and check a TOML file.

        Raises:
            RecipeError: unreadable, or a key or value that is wrong.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RecipeError(f"{path}: {reason}: pass a recipe's TOML file") from error
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"{path}: not TOML ({error}): correct that line") from error
        try:
            return cls.from_dict(table)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Recipe:
        """Read and check a recipe's tables.

        Raises:
            RecipeError: a key or value that is wrong.
        """
        recipe = _build(cls, table, "")
        recipe._check()
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` gives the same recipe back."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def adapter_config(
        self, width: int, vocab: int, block: int, target: str, drafter: str
    ) -> WeaverConfig:
        """The adapter's config for a target of this width and a drafter of this block size.

        Raises:
            RecipeError: sizes that do not fit together.
        """
        size = self.adapter
        depth = block - 1 if size.depth is None else size.depth
        if depth > block - 1:
            raise RecipeError(
                f"adapter.depth is {depth} but the drafter's block of {block} has {block - 1} "
                "draft depths: leave adapter.depth out"
            )
        if size.pool > vocab:
            raise RecipeError(
                f"adapter.pool is {size.pool} but the vocabulary has {vocab} tokens: lower it"
            )
        try:
            return WeaverConfig(
                d_model=width,
                d_embed=width,
                d_rank=size.rank,
                num_layers=size.layers,
                num_heads=size.heads,
                mlp_dim=size.mlp,
                depth=depth,
                candidate_pool_size=size.pool,
                variant=size.variant,
                vocab_size=vocab,
                target=target,
                drafter=drafter,
                drafter_block_size=block,
            )
        except AdapterError as error:
            raise RecipeError(f"section adapter: {error}") from error

    def _check(self) -> None:
        data, train = self.data, self.train
        positive = {
            "data.max_length": data.max_length,
            "adapter.rank": self.adapter.rank,
            "adapter.heads": self.adapter.heads,
            "adapter.layers": self.adapter.layers,
            "adapter.mlp": self.adapter.mlp,
            "adapter.pool": self.adapter.pool,
            "train.documents": train.documents,
            "train.blocks": train.blocks,
            "train.units": train.units,
            "train.epochs": train.epochs,
            "train.muon_lr": train.muon_lr,
            "train.adam_lr": train.adam_lr,
            "train.log_every": train.log_every,
            "train.measure_documents": train.measure_documents,
            "train.save_every": train.save_every,
            "train.keep": train.keep,
            "train.path_budget": train.path_budget,
        }
        if train.steps is not None:
            positive["train.steps"] = train.steps
        if self.adapter.depth is not None:
            positive["adapter.depth"] = self.adapter.depth
        for name, value in positive.items():
            if not value > 0:
                raise RecipeError(f"{name} is {value}: it must be greater than 0")
        not_negative = {
            "data.workers": data.workers,
            "train.eta": train.eta,
            "train.depth_decay": train.depth_decay,
            "train.muon_weight_decay": train.muon_weight_decay,
            "train.adam_weight_decay": train.adam_weight_decay,
            "train.clip": train.clip,
            "train.measure_every": train.measure_every,
        }
        for name, value in not_negative.items():
            if not value >= 0:
                raise RecipeError(f"{name} is {value}: it must be 0 or more")
        shares = {
            "data.held_out": data.held_out,
            "train.warmup": train.warmup,
            "train.decay": train.decay,
            "train.muon_momentum": train.muon_momentum,
            "train.adam_betas[0]": train.adam_betas[0],
            "train.adam_betas[1]": train.adam_betas[1],
        }
        for name, value in shares.items():
            if not 0 <= value < 1:
                raise RecipeError(f"{name} is {value}: it must be from 0 to below 1")
        if train.warmup + train.decay > 1:
            raise RecipeError(
                f"train.warmup {train.warmup} and train.decay {train.decay} are more than the "
                "whole run together: lower one"
            )
        for name, text in {
            "output": self.output,
            "target.path": self.target.path,
            "drafter.path": self.drafter.path,
            "data.path": self.data.path,
        }.items():
            if not text:
                raise RecipeError(f"{name} is empty: give a path")


def _build(kind: type[Any], table: Any, where: str) -> Any:
    if not isinstance(table, dict):
        raise RecipeError(f"{where[:-1]} is {table!r}: it must be a table [{where[:-1]}]")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in fields:
            raise RecipeError(f"unknown setting {where}{key}: known here are {', '.join(fields)}")
    values = {}
    for name, f in fields.items():
        if name in table:
            values[name] = _value(hints[name], table[name], f"{where}{name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RecipeError(f"{where}{name} is missing: add it")
    return kind(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{name}.")
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if value not in arguments:
            raise RecipeError(f"{name} is {value!r}: choose one of {', '.join(arguments)}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise RecipeError(f"{name} is {value!r}: it must be {len(arguments)} numbers")
        pairs = enumerate(zip(arguments, value, strict=True))
        return tuple(_value(a, v, f"{name}[{i}]") for i, (a, v) in pairs)
    if type(None) in arguments:
        if value is None:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
    if hint is bool or isinstance(value, bool):
        good = hint is bool and isinstance(value, bool)
    elif hint is float:
        good = isinstance(value, int | float)
    else:
        good = isinstance(value, hint)
    if not good:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise RecipeError(f"{name} is {value!r}: it must be {kinds[hint]}")
    return hint(value)
