# SPDX-License-Identifier: Apache-2.0
"""Reads and writes adapter checkpoints, and refuses those that cannot be right.

Two layouts: the published `.pth` (`config`, `state_dict`, `metadata`; spec section 2) and our
directory of `model.safetensors` + `config.json`. The header of our `model.safetensors` repeats the
config, so the weights never depend on a second file: `config.json` is the copy for people and
other tools. Knows nothing of the target, of trees or of vLLM; what the caller knows of the target
(width, vocabulary, the drafter's depths) is checked here when given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vllm_weaver.adapter.config import AdapterError, Variant, WeaverConfig
from vllm_weaver.adapter.model import WeaverAdapter

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
PUBLISHED_KIND = "dflash_tfm_weaver"

_HEADER_KEY = "weaver_config"
# Segments that wrappers (data parallel, torch.compile) put into parameter names.
_WRAPPER_SEGMENTS = frozenset(("module", "_orig_mod"))
_ANCHOR = "output_norm.weight"


@dataclass(frozen=True)
class _Raw:
    """A checkpoint as stored: `source` is named in errors, `config` is not yet understood."""

    source: Path
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: dict[str, Tensor]
    beside: Path | None = None


def load(
    path: str | os.PathLike[str],
    *,
    target_width: int | None = None,
    vocab_size: int | None = None,
    depth: int | None = None,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> WeaverAdapter:
    """Load an adapter from a published `.pth`, or from our directory (or either file in it).

    | argument | meaning |
    |---|---|
    | `target_width` | the target's hidden size; must equal the adapter's |
    | `vocab_size` | the target's vocabulary; must equal the recorded one, if one is recorded |
    | `depth` | draft depths that the drafter gives; the adapter reads its first `config.depth`,
      so fewer are refused |
    | `activation` | v1 only: "gelu" or "gelu_tanh", in place of what the config says |
    | `dtype` | of the parameters; default: float32 on a CPU, else as stored |
    | `device` | default: the CPU |

    Pickled code is never run (`weights_only`). `q_proj`, `k_proj`, `v_proj` stored apart are joined
    and wrapper prefixes dropped. The variant is read from the tensors and must fit the config.

    Errors: `AdapterError`, one line with the file, the tensor, both shapes and a remedy, for a file
    that is missing, damaged, of another kind, incomplete, with foreign, mis-shaped or non-finite
    tensors, or made for another target or a deeper drafter.
    """
    raw = _read(Path(path))
    tensors = _canonical(raw)
    variant = _variant_of(raw.source, tensors)
    config = _parse_config(raw.source, raw.config, variant)
    if activation is not None:
        try:
            config = replace(config, activation=activation)
        except AdapterError as error:
            raise AdapterError(f"{raw.source}: {error}") from error
    _check_beside(raw, variant)
    _check_target(raw.source, config, tensors, target_width, vocab_size, depth)

    adapter = WeaverAdapter(config, device="meta")
    _check_tensors(raw.source, adapter.state_dict(), tensors)
    device = torch.device("cpu" if device is None else device)
    if dtype is None:
        stored = tensors["token_in.weight"].dtype
        dtype = torch.float32 if device.type == "cpu" else stored
    adapter.load_state_dict(
        {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()},
        assign=True,
    )
    adapter.metadata = dict(raw.metadata)
    return adapter.eval()


def save(
    adapter: WeaverAdapter,
    directory: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `model.safetensors` and `config.json` into `directory`, which is made if need be.

    `metadata` (anything JSON takes; default: the adapter's own) is stored beside the config;
    `dtype` converts the floats on their way out. Each file is written under another name, synced
    and renamed, weights first; since the weights' header carries the config too, a full disk or a
    kill at any moment leaves a checkpoint that loads. Do not save to one directory from two
    processes at once.

    Errors: `AdapterError` when a parameter is not finite (nothing is written) or the metadata is
    not JSON; `OSError` or `SafetensorError` when the disk refuses.
    """
    directory = Path(directory)
    tensors = {}
    for name, tensor in adapter.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(
                f"{directory}: {name} {tuple(tensor.shape)} holds NaN or Inf: the last checkpoint "
                "is kept; lower the learning rate or resume from it"
            )
        tensors[name] = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
    record = adapter.config.to_dict()
    record["dtype"] = str(tensors["token_in.weight"].dtype).removeprefix("torch.")
    record["metadata"] = dict(adapter.metadata if metadata is None else metadata)
    try:
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise AdapterError(
            f"{directory}: metadata is not JSON ({error}): pass strings, numbers, lists, dicts"
        ) from error

    directory.mkdir(parents=True, exist_ok=True)
    header = {"format": "pt", _HEADER_KEY: text}
    _replace_file(
        directory / WEIGHTS_NAME,
        lambda file: safetensors.torch.save_file(tensors, file, metadata=header),
    )
    _replace_file(directory / CONFIG_NAME, lambda file: file.write_text(text, encoding="utf-8"))


def describe(adapter: WeaverAdapter | str | os.PathLike[str]) -> dict[str, Any]:
    """What an adapter is, as plain data in the order a person wants to read it.

    A path is loaded, and so checked, first. Keys whose value is unknown are left out.
    """
    facts: dict[str, Any] = {}
    if not isinstance(adapter, WeaverAdapter):
        path = Path(adapter)
        adapter = load(path)
        facts["path"] = str(path)
    config = adapter.config
    facts |= {
        "variant": config.variant,
        "parameters": sum(parameter.numel() for parameter in adapter.parameters()),
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "target": config.target,
        "target_width": config.d_model,
        "embedding_width": config.d_embed,
        "vocab_size": config.vocab_size,
        "drafter": config.drafter,
        "drafter_block_size": config.drafter_block_size,
        "depth": config.depth,
        "candidate_pool_size": config.candidate_pool_size,
        "width": config.d_rank,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "mlp_dim": config.mlp_dim,
        "activation": config.activation,
        "rope_base": config.rope_base if config.variant == "v2" else None,
        "metadata": adapter.metadata or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _read(path: Path) -> _Raw:
    if path.is_dir():
        return _read_ours(path)
    if not path.exists():
        raise AdapterError(f"{path}: no such file: give a .pth file or a directory with our files")
    if path.suffix == ".json" or path.name == WEIGHTS_NAME:
        return _read_ours(path.parent)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, None)
    return _read_published(path)


def _read_published(path: Path) -> _Raw:
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged archive can fail in any of zip, pickle or storage code, each with its own type.
        raise AdapterError(
            f"{path}: not a readable checkpoint ({_first_line(error)}): it is damaged, truncated "
            "or of another kind; fetch it again"
        ) from error
    if not isinstance(payload, dict):
        raise AdapterError(
            f"{path}: holds a {type(payload).__name__}, not a dictionary of config, state_dict and "
            "metadata: it is not a Weaver checkpoint"
        )
    for key in ("config", "state_dict"):
        if not isinstance(payload.get(key), Mapping):
            keys = ", ".join(map(str, payload))
            raise AdapterError(
                f"{path}: has no dictionary {key!r} (keys: {keys[:160]}): "
                "it is not a Weaver checkpoint"
            )
    metadata = payload.get("metadata") or {}
    # Absent metadata is let pass, since the tensors' names and shapes are checked anyway.
    kind = metadata.get("speculator_kind") if isinstance(metadata, Mapping) else metadata
    if kind not in (PUBLISHED_KIND, None):
        raise AdapterError(
            f"{path}: metadata speculator_kind is {kind!r}, not {PUBLISHED_KIND!r}: "
            "it is not a Weaver checkpoint"
        )
    return _Raw(path, payload["config"], metadata, dict(payload["state_dict"]))


def _read_ours(directory: Path) -> _Raw:
    weights, config = directory / WEIGHTS_NAME, directory / CONFIG_NAME
    if not weights.is_file():
        raise AdapterError(
            f"{directory}: has no {WEIGHTS_NAME}: give a directory written by save(), or the path "
            "of the published .pth file itself"
        )
    return _read_safetensors(weights, config if config.is_file() else None)


def _read_safetensors(weights: Path, config: Path | None) -> _Raw:
    try:
        with safetensors.safe_open(weights, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise AdapterError(
            f"{weights}: not a readable safetensors file ({_first_line(error)}): it is damaged or "
            "truncated; fetch or save it again"
        ) from error
    if _HEADER_KEY in header:
        record = _parse_json(weights, header[_HEADER_KEY])
        beside = config
    elif config is not None:
        record = _parse_json(config, _read_text(config))
        beside = None
    else:
        raise AdapterError(
            f"{weights}: has no config, neither in its header nor as {CONFIG_NAME} beside it: "
            f"put the {CONFIG_NAME} of this checkpoint there"
        )
    metadata = record.get("metadata")
    return _Raw(
        weights, record, metadata if isinstance(metadata, Mapping) else {}, tensors, beside=beside
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(
            f"{path}: not readable text ({_first_line(error)}): put the {CONFIG_NAME} of this "
            "checkpoint there"
        ) from error


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise AdapterError(
            f"{path}: its config is not JSON ({_first_line(error)}): save the checkpoint again"
        ) from error
    if not isinstance(record, dict):
        raise AdapterError(
            f"{path}: its config is a {type(record).__name__}, not an object: save it again"
        )
    return record


def _parse_config(path: Path, record: Mapping[str, Any], variant: Variant) -> WeaverConfig:
    try:
        return WeaverConfig.from_dict(record, variant=variant)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from error


def _check_beside(raw: _Raw, variant: Variant) -> None:
    """A config.json that says something else than the weights' own header is not guessed about."""
    if raw.beside is None:
        return
    other = _parse_config(raw.beside, _parse_json(raw.beside, _read_text(raw.beside)), variant)
    mine = _parse_config(raw.source, raw.config, variant)
    if other != mine:
        key = next(name for name in vars(mine) if getattr(mine, name) != getattr(other, name))
        raise AdapterError(
            f"{raw.beside}: {key} is {getattr(other, key)!r} but {raw.source.name} was saved with "
            f"{getattr(mine, key)!r}: delete {raw.beside.name} to use the weights' own config"
        )


def _canonical(raw: _Raw) -> dict[str, Tensor]:
    """Tensors under their published names: wrapper names dropped, q, k, v joined."""
    plain: dict[str, Tensor] = {}
    for stored_name, tensor in raw.tensors.items():
        if not isinstance(stored_name, str) or not isinstance(tensor, Tensor):
            raise AdapterError(
                f"{raw.source}: state_dict entry {stored_name!r} is a {type(tensor).__name__}, not "
                "a tensor: the file is damaged, fetch it again"
            )
        segments = [part for part in stored_name.split(".") if part not in _WRAPPER_SEGMENTS]
        name = ".".join(segments)
        if name in plain:
            raise AdapterError(
                f"{raw.source}: {name} is stored twice (also as {stored_name}): "
                "save the unwrapped module"
            )
        plain[name] = tensor
    prefixes = {name[: -len(_ANCHOR)] for name in plain if name.endswith("." + _ANCHOR)}
    if len(prefixes) == 1 and _ANCHOR not in plain:
        prefix = prefixes.pop()
        if all(name.startswith(prefix) for name in plain):
            plain = {name[len(prefix) :]: tensor for name, tensor in plain.items()}

    joined = dict(plain)
    for name in plain:
        if not name.endswith(".q_proj.weight"):
            continue
        block = name.removesuffix("q_proj.weight")
        parts = [f"{block}{part}_proj.weight" for part in "qkv"]
        for part in parts:
            if part not in plain:
                raise AdapterError(
                    f"{raw.source}: {part} is missing beside {name} {tuple(plain[name].shape)}: "
                    "the file is incomplete, fetch it again"
                )
            if plain[part].dim() != 2 or plain[part].shape != plain[name].shape:
                raise AdapterError(
                    f"{raw.source}: {part} has shape {tuple(plain[part].shape)} but {name} "
                    f"{tuple(plain[name].shape)}: the file is damaged, fetch it again"
                )
        if f"{block}qkv_proj.weight" in plain:
            raise AdapterError(
                f"{raw.source}: holds both {name} and {block}qkv_proj.weight: save one of them"
            )
        joined[f"{block}qkv_proj.weight"] = torch.cat([joined.pop(part) for part in parts])
    return joined


def _variant_of(path: Path, tensors: Mapping[str, Tensor]) -> Variant:
    gelu = any(".fc1." in name for name in tensors)
    gated = any(".gate_up_proj." in name for name in tensors)
    if gelu == gated:
        which = "both" if gelu else "neither"
        raise AdapterError(
            f"{path}: has {which} of blocks.N.fc1 (v1) and blocks.N.gate_up_proj (v2): "
            "it is not one Weaver adapter"
        )
    return "v1" if gelu else "v2"


def _check_target(
    path: Path,
    config: WeaverConfig,
    tensors: Mapping[str, Tensor],
    target_width: int | None,
    vocab_size: int | None,
    depth: int | None,
) -> None:
    if target_width is not None and target_width != config.d_model:
        stored = tensors.get(_ANCHOR)
        shape = (config.d_model,) if stored is None else tuple(stored.shape)
        raise AdapterError(
            f"{path}: {_ANCHOR} has shape {shape} but the target's width makes it "
            f"({target_width},): use the adapter that was trained for this target"
        )
    if None not in (vocab_size, config.vocab_size) and vocab_size != config.vocab_size:
        raise AdapterError(
            f"{path}: was trained for a vocabulary of {config.vocab_size} but the target has "
            f"{vocab_size}: use the adapter that was trained for this target"
        )
    if depth is not None and depth < config.depth:
        name = "pos_emb" if config.variant == "v1" else "config K"
        has = f"{(config.depth, config.d_rank)}" if config.variant == "v1" else str(config.depth)
        raise AdapterError(
            f"{path}: {name} is {has}, so it reads {config.depth} draft depths, but the drafter "
            f"gives {depth}: use a drafter of block size {config.depth + 1} or more"
        )


def _check_tensors(
    path: Path, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise AdapterError(
            f"{path}: tensor {missing[0]} {tuple(expected[missing[0]].shape)} is missing "
            f"({len(missing)} in all): the file is incomplete or its config is another's, "
            "fetch it again"
        )
    extra = [name for name in tensors if name not in expected]
    if extra:
        raise AdapterError(
            f"{path}: tensor {extra[0]} {tuple(tensors[extra[0]].shape)} is not part of this "
            f"adapter ({len(extra)} in all): its config is another's, or it needs a newer "
            "vllm-weaver"
        )
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape:
            raise AdapterError(
                f"{path}: {name} has shape {tuple(tensor.shape)} but the config makes it "
                f"{tuple(wanted.shape)}: the config is another's or the file damaged, "
                "fetch both again"
            )
        if not tensor.is_floating_point():
            raise AdapterError(
                f"{path}: {name} {tuple(tensor.shape)} is {tensor.dtype}, not floating point: "
                "quantised adapters are not supported, use the original"
            )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(
                f"{path}: {name} {tuple(tensor.shape)} holds NaN or Inf: the file is damaged or "
                "its training diverged; use another checkpoint"
            )


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, reach the disk, then take its name in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
