# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models for tests: targets, DFlash drafters, Weaver adapters, a tokenizer.

Everything is a function of a fixed seed and of the text in this file; nothing is fetched. The
weights are scaled so that the greedy token is clear at almost every position. The adapters and
drafters know nothing of their targets' continuations: these models show that outputs are equal,
never that drafts are good. Written in float32, the precision in which losslessness is tested.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
NUM_TARGET_LAYERS = 4
MAX_POSITIONS = 2048
PAD_ID, EOS_ID, MASK_ID = 0, 1, 2

# z-lab numbering: i is the output of decoder layer i (speculators' layer id is i + 1).
TARGET_LAYER_IDS = (0, 2)

# Attention shapes (query heads, key/value heads, head dim). A hybrid target needs its drafter to
# have its own KV shape: vLLM 0.32 otherwise splits the drafter's layers over cache groups.
DENSE_HEADS = (4, 2, 32)
HYBRID_HEADS = (4, 2, 64)

_CORPUS = (
    "def build(self, tree, budget=63):\n    for node in range(len(tree)):\n"
    "        if node is None:\n            return False\n"
    "        self.nodes.append(node)\n    return True\n",
    "import os\nimport sys\nfrom typing import Any\n\n\nclass Node:\n"
    "    def __init__(self, value):\n        self.value = value\n        self.children = []\n",
    "The quick brown fox jumps over the lazy dog. A tree has one root and many leaves, and each "
    "path from the root is one guess at what comes next.\n",
    "with open(path, 'rb') as file:\n    data = file.read()\n    print(f'{len(data)} bytes')\n",
)


def make_models(root: Path, *, seed: int = 0) -> dict[str, Path]:
    """Write every tiny model below `root` and return its directories by name.

    Names: `dense` (Qwen3) and `hybrid` (Qwen3.5, 3 GDN : 1 attention), and for each target
    `<target>-dflash8`, `<target>-dflash16` (DFlash drafters of depth 7 and 15, z-lab format) and,
    when `vllm_weaver.adapter` is importable, `<target>-weaver8`, `<target>-weaver16` (v2 adapters
    of depth 7 and 15) and `<target>-weaver16-v1`. A model that is already there is kept, so one
    directory can serve several test processes one after another.
    """
    root = Path(root)
    tokenizer = root / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        _write_tokenizer(tokenizer)
    paths: dict[str, Path] = {"tokenizer": tokenizer}

    def add(name: str, write: Any, *args: Any) -> None:
        directory = root / name
        if not (directory / "config.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            write(directory, *args)
            for file in tokenizer.iterdir():
                shutil.copy(file, directory / file.name)
        paths[name] = directory

    add("dense", _write_dense, seed)
    add("hybrid", _write_hybrid, seed + 1)
    for offset, (target, heads) in enumerate((("dense", DENSE_HEADS), ("hybrid", HYBRID_HEADS))):
        for block in (8, 16):
            add(f"{target}-dflash{block}", _write_dflash, heads, block, seed + 10 * offset + block)
    if importlib.util.find_spec("vllm_weaver.adapter") is None:
        return paths
    for offset, target in enumerate(("dense", "hybrid")):
        for block, variant, suffix in ((8, "v2", ""), (16, "v2", ""), (16, "v1", "-v1")):
            add(
                f"{target}-weaver{block}{suffix}",
                _write_weaver,
                variant,
                block - 1,
                seed + 100 + 10 * offset + block,
            )
    return paths


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|eos|>", "<|mask|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 112,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|mask|>", "<|start|>"],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(directory)


def _common_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
    }


def _write_dense(directory: Path, seed: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads, kv_heads, head_dim = DENSE_HEADS
    config = Qwen3Config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **_common_config(),
    )
    _save_target(Qwen3ForCausalLM(config), directory, seed)


def _write_hybrid(directory: Path, seed: int) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads, kv_heads, head_dim = HYBRID_HEADS
    config = Qwen3_5TextConfig(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        # No mrope_section: vLLM 0.32 would take a text-only model for a multimodal one.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        **_common_config(),
    )
    _save_target(Qwen3_5ForCausalLM(config), directory, seed)


def _save_target(model: Any, directory: Path, seed: int) -> None:
    """Redraw the weights from `seed`, wide enough that the logits' argmax is clear, and save."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                decay = torch.rand(parameter.shape, generator=generator) * 8 + 0.5
                parameter.copy_(decay.log())
            elif "dt_bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif parameter.ndim >= 2:
                std = 1.0 if "embed" in name else 3.0 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.to(torch.float32).save_pretrained(directory)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def _write_dflash(
    directory: Path, attention: tuple[int, int, int], block_size: int, seed: int
) -> None:
    heads, kv_heads, head_dim = attention
    hidden, mlp, layers = HIDDEN_SIZE, 2 * HIDDEN_SIZE, 2
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        draw = torch.randn(rows, columns, generator=generator)
        weights[f"{name}.weight"] = draw * (2.0 / math.sqrt(columns))

    for layer in range(layers):
        prefix = f"layers.{layer}"
        matrix(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden)
        matrix(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden)
        matrix(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden)
        matrix(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim)
        matrix(f"{prefix}.mlp.gate_proj", mlp, hidden)
        matrix(f"{prefix}.mlp.up_proj", mlp, hidden)
        matrix(f"{prefix}.mlp.down_proj", hidden, mlp)
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(head_dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
    matrix("fc", hidden, hidden * len(TARGET_LAYER_IDS))
    weights["hidden_norm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = torch.ones(hidden)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dflash_config": {
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(TARGET_LAYER_IDS),
        },
        "dtype": "float32",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": NUM_TARGET_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _write_weaver(directory: Path, variant: str, depth: int, seed: int) -> None:
    from vllm_weaver.adapter import WeaverAdapter, WeaverConfig, save

    rank = HIDDEN_SIZE
    config = WeaverConfig(
        d_model=HIDDEN_SIZE,
        d_embed=HIDDEN_SIZE,
        d_rank=rank,
        num_heads=4,
        mlp_dim=rank,
        depth=depth,
        candidate_pool_size=64,
        variant=variant,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = WeaverAdapter(config)
        # A new adapter scores the marginals unchanged; this one must have a say of its own.
        torch.nn.init.normal_(adapter.lm_head_query_in.weight, std=rank**-0.5)
        torch.nn.init.normal_(adapter.output_norm.bias, std=0.3)
        torch.nn.init.normal_(adapter.embed_norm.bias, std=0.3)
    save(adapter, directory)
