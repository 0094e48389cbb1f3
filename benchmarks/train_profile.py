# SPDX-License-Identifier: Apache-2.0
"""Where a step of the adapter's training goes at the sizes of a large target, without the target.

    python -m benchmarks.train_profile DIR --json benchmarks/results/train-profile.json

Writes into DIR random models and hidden states in the real formats (Qwen3.6-27B's widths,
vocabulary and drafter by default: 9 GB, and 32 MB a row), then runs `vllm-weaver train --dry-run`
and `--profile` on the recipe of that target. The last layer's states point at the text's next
token, so that they pass for a target's; speed does not depend on what they hold. `--shape tiny` is
for trying it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_weaver.train.plan import dry_run
from vllm_weaver.train.processes import Processes, host_peak
from vllm_weaver.train.profile import profile
from vllm_weaver.train.recipe import Recipe
from vllm_weaver.train.trainer import Trainer

_RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3.6-27b.toml"
_MASK = 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of target and drafter, and of a row of data."""

    width: int
    vocab: int
    layers: int
    drafter_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    read: tuple[int, ...]  # z-lab's numbers of the layers that the drafter reads
    tokens: int
    block: int = 16


SHAPES = {
    "27b": Shape(5120, 248320, 64, 5, 32, 8, 128, 17408, (1, 16, 31, 46, 61), 512),
    "tiny": Shape(64, 512, 4, 2, 4, 2, 16, 96, (0, 2), 40),
}


class Maker:
    """Random tensors on the fastest device that there is."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.generator = torch.Generator(self.device).manual_seed(0)

    def __call__(self, *shape: int, scale: float | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.device)
        return (drawn * (scale or shape[-1] ** -0.5)).to(torch.bfloat16).cpu()


def write_target(shape: Shape, directory: Path, make: Maker) -> Tensor:
    """A target's ends; returns its head [V, d]."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": shape.width,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    head = make(shape.vocab, shape.width)
    save_file(
        {
            "model.embed_tokens.weight": make(shape.vocab, shape.width, scale=0.02),
            "model.norm.weight": torch.zeros(shape.width, dtype=torch.bfloat16),
            "lm_head.weight": head,
        },
        directory / "model.safetensors",
    )
    return head


def write_drafter(shape: Shape, directory: Path, make: Maker) -> None:
    """A DFlash drafter in z-lab's format."""
    directory.mkdir(parents=True)
    d, heads, kv, dim = shape.width, shape.heads, shape.kv_heads, shape.head_dim
    ones = {n: torch.ones(n, dtype=torch.bfloat16) for n in (d, dim)}
    tensors = {"fc.weight": make(d, d * len(shape.read)), "norm.weight": ones[d].clone()}
    tensors["hidden_norm.weight"] = ones[d].clone()
    for i in range(shape.drafter_layers):
        at = f"layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads * dim, d),
            ("self_attn.k_proj", kv * dim, d),
            ("self_attn.v_proj", kv * dim, d),
            ("self_attn.o_proj", d, heads * dim),
            ("mlp.gate_proj", shape.mlp, d),
            ("mlp.up_proj", shape.mlp, d),
            ("mlp.down_proj", d, shape.mlp),
        ):
            tensors[f"{at}{name}.weight"] = make(rows, columns)
        for name, size in (
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
            ("input_layernorm", d),
            ("post_attention_layernorm", d),
        ):
            tensors[f"{at}{name}.weight"] = ones[size].clone()
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": d,
        "vocab_size": shape.vocab,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.drafter_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "block_size": shape.block,
        "num_target_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.drafter_layers,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "dflash_config": {"mask_token_id": _MASK, "target_layer_ids": list(shape.read)},
    }
    (directory / "config.json").write_text(json.dumps(config))


def write_data(shape: Shape, directory: Path, rows: int, head: Tensor, make: Maker) -> None:
    """Rows of random tokens, with states whose last layer gives the text."""
    import datasets

    states = directory / "hidden_states"
    states.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, shape.vocab, (rows, shape.tokens), generator=generator)
    for row, ids in enumerate(tokens):
        hidden = make(shape.tokens, len(shape.read) + 1, shape.width, scale=1.0)
        # After the norm the next token's head row has a product of about sqrt(d) with this.
        hidden[:-1, -1] = head[ids[1:]] * shape.width**0.5
        save_file({"token_ids": ids, "hidden_states": hidden}, states / f"hs_{row}.safetensors")
    table = datasets.Dataset.from_dict(
        {
            "input_ids": tokens.tolist(),
            "loss_mask": [[1] * shape.tokens] * rows,
            "seq_len": [shape.tokens] * rows,
        }
    )
    table.set_format(type="torch")
    table.save_to_disk(str(directory))


def recipe_for(name: str, directory: Path, compiles: bool) -> Recipe:
    """The target's recipe over the made files, or a small one."""
    table: dict[str, Any] = tomllib.loads(_RECIPE.read_text(encoding="utf-8"))
    table["output"] = str(directory / "run")
    for part in ("target", "drafter", "data"):
        table[part]["path"] = str(directory / part)
    table["data"]["held_out"] = 0.0
    table["train"] |= {"epochs": 100.0, "steps": 16, "compile": compiles}
    if name == "tiny":
        table["adapter"] = {"rank": 32, "heads": 2, "mlp": 32, "pool": 64}
        table["train"] |= {"documents": 1, "units": 2, "blocks": 2, "precision": "float32"}
        table["data"]["workers"] = 0
    return Recipe.from_dict(table)


def write_all(shape: Shape, directory: Path, rows: int) -> None:
    """Models and rows."""
    make = Maker()
    head = write_target(shape, directory / "target", make)
    write_drafter(shape, directory / "drafter", make)
    write_data(shape, directory / "data", rows, head, make)


def measured(name: str, directory: Path, compiles: bool, part: str) -> dict[str, Any]:
    """One part's result, and the most host memory of its process: of loading, and of all."""
    trainer = Trainer(recipe_for(name, directory, compiles), Processes.join())
    loaded = host_peak()
    result = {"profile": profile, "dry_run": dry_run}[part](trainer)
    memory = {"peak": host_peak(), "peak_of_loading": loaded}
    return {part: result, "host_gib": {k: round(v / 2**30, 2) for k, v in memory.items()}}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a process of its own, so that its memory holds nothing of what ran before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="27b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    given = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    shape, directory = SHAPES[given.shape], given.directory
    if not (directory / "data").exists():
        alone(write_all, shape, directory, given.rows)
        say(f"models and {given.rows} rows in {directory}")
    record: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.train_profile", *sys.argv[1:]]),
        "shape": dataclasses.asdict(shape),
    }
    for name, compiles in (("plain", False), ("compiled", True))[: 1 + given.compile]:
        # The shares first, which are what is asked; each takes some ten steps of a second or more.
        # Memory is the last one's: the profiler keeps every operator of its steps.
        record[name] = {}
        for part in ("profile", "dry_run"):
            record[name] |= alone(measured, given.shape, directory, compiles, part)
            say(f"{name}: {json.dumps(record[name], indent=1)}")
            # Written after each, so that one that is cut off takes nothing with it.
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
