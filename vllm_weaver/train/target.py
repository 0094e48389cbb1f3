# SPDX-License-Identifier: Apache-2.0
"""What training needs of a frozen target: its embedding, its head, its final norm.

The layers between are never loaded: their outputs come from hidden-state files. Knows the file
layout of Transformers checkpoints and how they name these three tensors; not how files of hidden
states look, nor the drafter.

Shapes: V vocabulary, d width.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.train.errors import TrainError, first_line

# Families whose RMSNorm multiplies by 1 + w. Others multiply by w.
_ONE_PLUS_NORM = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
)
# Bytes of a tensor that are on the host at once on their way to its device.
_AT_ONCE = 2**26
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


def model_file(model: str, name: str) -> Path | None:
    """A file of a model: in its directory, or fetched from the Hugging Face hub; None if absent.

    Raises:
        TrainError: no such directory, or the hub cannot be reached.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    if directory.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise TrainError(
            f"{model}: no such model directory: pass a directory, or org/repository on the "
            "Hugging Face hub"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise TrainError(
            f"{model}: {name} could not be fetched ({first_line(error)}): download the model and "
            "pass its directory"
        ) from error


def read_config(model: str) -> dict[str, Any]:
    """A model's config.json, the text model's keys on top where they are nested.

    Raises:
        TrainError: missing or not JSON.
    """
    file = model_file(model, "config.json")
    if file is None:
        raise TrainError(f"{model}: has no config.json: pass a model's directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(
            f"{file}: not readable JSON ({first_line(error)}): fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise TrainError(f"{file}: holds no object: pass a model's directory")
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def weight_files(model: str) -> dict[str, Path]:
    """File of each tensor of a model.

    Raises:
        TrainError: no safetensors, or a damaged index.
    """
    index = model_file(model, _INDEX_NAME)
    if index is not None:
        try:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainError(f"{index}: damaged ({first_line(error)}): fetch it again") from error
        return _Shards(model, names)
    single = model_file(model, _SINGLE_NAME)
    if single is None:
        raise TrainError(f"{model}: has neither {_INDEX_NAME} nor {_SINGLE_NAME}: fetch the model")
    try:
        with safetensors.safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except Exception as error:
        raise TrainError(
            f"{single}: not a readable safetensors file ({first_line(error)}): fetch it again"
        ) from error


class _Shards(dict[str, Path]):
    """Resolves a shard when it is asked for, so that the hub is asked for few of them."""

    def __init__(self, model: str, names: dict[str, str]) -> None:
        super().__init__(dict.fromkeys(names, Path()))
        self._model, self._names = model, names

    def __getitem__(self, name: str) -> Path:
        file = model_file(self._model, self._names[name])
        if file is None:
            raise TrainError(f"{self._model}: shard {self._names[name]} is missing: fetch it")
        return file


def read_tensor(file: Path, name: str, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """One tensor, piece by piece to its device: the host holds 64 MiB of it and no copy.

    Safetensors' own way to a GPU (0.8) goes through pinned memory of the tensor's size, rounded up
    to a power of two, which PyTorch keeps for the life of the process.

    Raises:
        TrainError: unreadable, or not of a floating-point type.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            shape: list[int] = opened.get_slice(name).get_shape()
            if len(shape) < 2:
                tensor: Tensor = opened.get_tensor(name)
                return _checked(file, name, tensor).to(device, dtype, copy=True)
        whole = torch.empty(shape, dtype=dtype, device=device)
        rows = max(1, _AT_ONCE // (4 * max(1, math.prod(shape[1:]))))
        for start in range(0, shape[0], rows):
            # Opened anew: what was read of a file stays in memory until it is closed.
            with safetensors.safe_open(file, framework="pt") as opened:
                piece = opened.get_slice(name)[start : start + rows]
                whole[start : start + rows] = _checked(file, name, piece)
    except TrainError:
        raise
    except torch.OutOfMemoryError as error:
        raise TrainError(
            f"{file}: {name} finds no room on {device} ({first_line(error)}): free some, or use a "
            "GPU with more memory"
        ) from error
    except Exception as error:
        raise TrainError(
            f"{file}: {name} cannot be read ({first_line(error)}): fetch the file again"
        ) from error
    return whole


def _checked(file: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _FLOATS:
        raise TrainError(
            f"{file}: {name} is {tensor.dtype}: use the checkpoint before quantisation"
        )
    return tensor


@dataclass
class FrozenTarget:
    """The target's ends.

    Attributes:
        name: as given.
        width, vocab, layers: hidden size d, rows V of the head, number of decoder layers.
        embedding_Vd, head_Vd: token embedding and raw `lm_head`; one tensor if they are tied.
        gain_d: what the final norm multiplies by, float32.
        eps: of the final norm.
    """

    name: str
    width: int
    vocab: int
    layers: int
    embedding_Vd: Tensor
    head_Vd: Tensor
    gain_d: Tensor
    eps: float

    @classmethod
    def load(cls, model: str, device: torch.device | str, dtype: torch.dtype) -> FrozenTarget:
        """Read a target's ends.

        Raises:
            TrainError: missing, damaged, or not a decoder with these tensors.
        """
        config = read_config(model)
        sizes = []
        for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
            value = config.get(key)
            if not isinstance(value, int):
                raise TrainError(
                    f"{model}: config.json has {key} {value!r}: pass the target's directory"
                )
            sizes.append(value)
        width, vocab, layers = sizes
        files = weight_files(model)

        def read(*endings: str, dtype: torch.dtype = dtype) -> Tensor | None:
            names = [n for n in files if n.endswith(endings) or n in [e[1:] for e in endings]]
            names = [
                n
                for n in names
                if ".layers." not in n and not n.startswith(("mtp", "model.visual"))
            ]
            if not names:
                return None
            name = min(names, key=len)
            return read_tensor(files[name], name, device, dtype)

        embedding = read(".embed_tokens.weight")
        if embedding is None:
            raise TrainError(f"{model}: has no embed_tokens.weight: use a decoder-only target")
        head = read(".lm_head.weight")
        if head is None:
            if not config.get("tie_word_embeddings", False):
                raise TrainError(
                    f"{model}: has no lm_head.weight, and its embedding is not tied: fetch it again"
                )
            head = embedding
        for name, tensor in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
            if tuple(tensor.shape) != (vocab, width):
                raise TrainError(
                    f"{model}: {name} is {tuple(tensor.shape)} but config.json makes it "
                    f"({vocab}, {width}): fetch both again"
                )
        gain = read(".norm.weight", dtype=torch.float32)
        if gain is None or tuple(gain.shape) != (width,):
            raise TrainError(f"{model}: has no final norm of width {width}: use another target")
        if str(config.get("model_type", "")) in _ONE_PLUS_NORM:
            gain = gain + 1
        return cls(
            name=model,
            width=width,
            vocab=vocab,
            layers=layers,
            embedding_Vd=embedding,
            head_Vd=head,
            gain_d=gain,
            eps=float(config.get("rms_norm_eps", 1e-6)),
        )

    def final_norm(self, last: Tensor) -> Tensor:
        """Outputs of the last layer [..., d] -> states after the final norm, in their dtype."""
        return F.rms_norm(last.float(), self.gain_d.shape, self.gain_d, self.eps).to(last.dtype)

    def bytes(self) -> int:
        """Memory of the tensors."""
        tensors = {t.data_ptr(): t for t in (self.embedding_Vd, self.head_Vd, self.gain_d)}
        return sum(t.numel() * t.element_size() for t in tensors.values())
