# SPDX-License-Identifier: Apache-2.0
"""Writes the trained models as files that Transformers, vLLM and `vllm_weaver.adapter` read.

Knows the formats, not the training. Targets are Transformers' `Qwen3_5ForCausalLM`; drafters are
z-lab's DFlash format, whose embedding and head are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import EOS_ID, MASK_ID, SPECIAL_TOKENS, DrafterShape, TargetShape
from .target import Target


def target_config(shape: TargetShape, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `Qwen3_5TextConfig`."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "linear_conv_kernel_dim": shape.conv,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "linear_key_head_dim": shape.gdn_head_dim,
        "linear_value_head_dim": shape.gdn_head_dim,
        "layer_types": [
            "full_attention" if shape.is_attention(i) else "linear_attention"
            for i in range(shape.layers)
        ],
        # No mrope_section: vLLM 0.32 would take a text-only model for a multimodal one.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_factor,
        },
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        "mamba_ssm_dtype": "float32",
    }


def save_weights(weights: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", dtype).contiguous() for k, v in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer_file: Path, directory: Path, max_positions: int) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[EOS_ID],
        mask_token=SPECIAL_TOKENS[MASK_ID],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(directory)


def save_target(
    target: Target, tokenizer_file: Path, directory: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    from transformers import Qwen3_5TextConfig

    save_weights(dict(target.state_dict()), directory, dtype)
    Qwen3_5TextConfig(**target_config(target.shape, dtype)).save_pretrained(directory)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    save_tokenizer(tokenizer_file, directory, target.shape.max_positions)


def load_target(directory: Path, shape: TargetShape, device: str) -> Target:
    target = Target(shape)
    weights = load_file(directory / "model.safetensors")
    target.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return target.to(device)


def save_drafter(
    weights: dict[str, Tensor],
    shape: DrafterShape,
    target: TargetShape,
    tokenizer_file: Path,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`weights` are the drafter's own: layers, `fc`, `hidden_norm`, `norm`."""
    save_weights(weights, directory, dtype)
    heads, kv_heads, head_dim = shape.heads(target)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(shape.target_layers)},
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": target.width,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": target.max_positions,
        "max_window_layers": shape.layers,
        "num_attention_heads": heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target.layers,
        "rms_norm_eps": target.eps,
        "rope_theta": target.rope_theta,
        "rope_scaling": None,
        "sliding_window": None,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_tokenizer(tokenizer_file, directory, target.max_positions)
