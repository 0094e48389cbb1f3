# SPDX-License-Identifier: Apache-2.0
"""Further tiny targets: other classes and head dims than those of ``tests/models.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from models import HIDDEN_SIZE, HYBRID_HEADS, VOCAB_SIZE, _common_config, _save_target
from safetensors.torch import load_file, save_file

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}

#: Of the multimodal model: they take its last token ids, in this order.
VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _hybrid_config(head_dim: int) -> dict[str, Any]:
    heads, kv_heads, attention_dim = HYBRID_HEADS
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": attention_dim,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        **_common_config(),
    }


def _finish(directory: Path, tokenizer: Path) -> Path:
    for file in tokenizer.iterdir():
        shutil.copy(file, directory / file.name)
    return directory


def wide_hybrid(root: Path, tokenizer: Path) -> Path:
    """Qwen3.5 with GDN heads of 128."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    directory = root / "hybrid128"
    config = Qwen3_5TextConfig(**_hybrid_config(128), rope_parameters=_ROPE)
    _save_target(Qwen3_5ForCausalLM(config), directory, seed=41)
    return _finish(directory, tokenizer)


def next_hybrid(root: Path, tokenizer: Path) -> Path:
    """Qwen3-Next, of whose feed-forward layers the last is a mixture of experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    directory = root / "next"
    config = Qwen3NextConfig(
        **_hybrid_config(64),
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        rope_parameters=_ROPE,
    )
    _save_target(Qwen3NextForCausalLM(config), directory, seed=42)
    return _finish(directory, tokenizer)


def multimodal_hybrid(root: Path, tokenizer: Path) -> Path:
    """Qwen3.5 with a vision tower, the class of the public checkpoints."""
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    directory = root / "multimodal"
    text = _hybrid_config(64)
    text["rope_parameters"] = {**_ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    ids = {name: VOCAB_SIZE - 4 + i for i, name in enumerate(VISION_TOKENS)}
    config = Qwen3_5Config(
        text_config=text,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 64,
        },
        **ids,
        tie_word_embeddings=False,
    )
    _save_target(Qwen3_5ForConditionalGeneration(config), directory, seed=43)
    vision = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for kind, file in (("image", "preprocessor"), ("video", "video_preprocessor")):
        name = {"image": "Qwen2VLImageProcessorFast", "video": "Qwen3VLVideoProcessor"}[kind]
        values = {f"{kind}_processor_type": name, **vision}
        (directory / f"{file}_config.json").write_text(json.dumps(values))
    _finish(directory, tokenizer)
    words = AutoTokenizer.from_pretrained(directory)
    unused = [f"<|unused{i}|>" for i in range(len(words), min(ids.values()))]
    words.add_tokens([*unused, *VISION_TOKENS.values()], special_tokens=True)
    words.save_pretrained(directory)
    return directory


def copy_of(source: Path, root: Path) -> Path:
    """A copy of a model, for tests that edit it."""
    directory = root / source.name
    shutil.copytree(source, directory)
    return directory


def reduced_vocabulary(drafter: Path, root: Path, every: int) -> Path:
    """A copy of a drafter with an output head of its own, for every ``every``-th token alone."""
    directory = copy_of(drafter, root)
    size = VOCAB_SIZE // every
    set_config(directory, draft_vocab_size=size)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(44)
    weights["lm_head.weight"] = torch.randn(size, HIDDEN_SIZE, generator=generator)
    # Distance from a token of the drafter to that of the target.
    weights["d2t"] = torch.arange(size) * (every - 1)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def set_config(directory: Path, **values: Any) -> Path:
    """Change entries of a model's ``config.json``; ``None`` removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for name, value in values.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    file.write_text(json.dumps(config))
    return directory
