# SPDX-License-Identifier: Apache-2.0
"""Between the forms of an adapter: the published `.pth`, our directory, a speculators directory.

A speculators directory is a DFlash drafter in speculators' format with the adapter in its folder
`weaver`. vLLM takes it as `--speculative-config '{"model": DIR}'`: it reads the tree's budget from
it, and the method from "dflash" in the directory's name; the plugin is pointed at `DIR/weaver`.
Knows files and configs, runs no model.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_weaver.adapter import AdapterError, WeaverAdapter, load, save
from vllm_weaver.train.card import write_card
from vllm_weaver.train.drafter import DrafterFacts, architectures_of, drafter_tensors, is_drafter
from vllm_weaver.train.errors import SaveError, TrainError, first_line
from vllm_weaver.train.target import model_file
from vllm_weaver.tree import MAX_BUDGET

BUDGET = 63
FORMS = ("pth", "weaver", "speculators")
ADAPTER_FOLDER = "weaver"
_KIND = "dflash_tfm_weaver"
_COMPANIONS = "companions"
_RECORDED = ("vocab_size", "target", "drafter", "drafter_block_size")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def adapter_in(path: str | Path) -> Path:
    """Where the adapter of a path is: the path itself, or a speculators directory's folder."""
    path = Path(path)
    inner = path / ADAPTER_FOLDER
    return inner if is_drafter(path) and inner.is_dir() else path


def convert(
    source: str | Path,
    destination: str | Path,
    form: str,
    *,
    drafter: str | None = None,
    target: str | None = None,
    budget: int = BUDGET,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write an adapter in another form; returns what was written.

    Args:
        source: adapter in any of the forms.
        destination: file for "pth", directory for the others; must not exist.
        form: "pth", "weaver" or "speculators".
        drafter: DFlash drafter, z-lab's or speculators' format; needed for "speculators".
        target: name or directory of the target; default what the adapter records.
        budget: of "speculators": tree nodes where vLLM is not told a number. vLLM then takes any
            smaller number too, but of the larger ones only its multiples.
        dtype: of the adapter's weights; default as stored.

    Raises:
        AdapterError: the source is no adapter, or does not fit the drafter.
        TrainError: the destination exists, a companion is missing or the disk refuses.
    """
    if form not in FORMS:
        raise TrainError(f"form is {form!r}: choose one of {', '.join(FORMS)}")
    destination = Path(destination)
    if destination.exists():
        raise TrainError(f"{destination}: exists already: choose another name")
    adapter = load(adapter_in(source))
    _restore(adapter)
    if dtype is None:
        dtype = _stored_dtype(adapter_in(source))
    try:
        if form == "pth":
            _write_published(adapter, destination, dtype)
        elif form == "weaver":
            save(adapter, destination, dtype=dtype)
            write_card(destination)
        else:
            _write_speculators(adapter, destination, drafter, target, budget, dtype)
    except OSError as error:
        raise SaveError(f"{destination}: could not be written ({first_line(error)})") from error
    return destination


def _restore(adapter: WeaverAdapter) -> None:
    """Put into the config what a published file of ours keeps in its metadata."""
    metadata = dict(adapter.metadata)
    metadata.pop("speculator_kind", None)
    companions = metadata.pop(_COMPANIONS, None)
    if isinstance(companions, dict):
        kept = {k: v for k, v in companions.items() if k in _RECORDED and v is not None}
        adapter.config = replace(adapter.config, **kept)
    adapter.metadata = metadata


def _stored_dtype(path: Path) -> torch.dtype:
    """The floats' type in a file, which loading on a CPU widens."""
    if path.is_dir():
        path = path / "model.safetensors"
    if path.suffix == ".safetensors":
        import safetensors

        with safetensors.safe_open(path, framework="pt") as file:
            name = next(n for n in file.keys() if n.endswith("token_in.weight"))  # noqa: SIM118
            stored: torch.dtype = file.get_tensor(name).dtype
            return stored
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    return next(t.dtype for n, t in tensors.items() if n.endswith("token_in.weight"))


def _write_published(adapter: WeaverAdapter, file: Path, dtype: torch.dtype) -> None:
    config = adapter.config
    published: dict[str, Any] = {
        "d_model": config.d_model,
        "d_embed": config.d_embed,
        "d_rank": config.d_rank,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "mlp_dim": config.mlp_dim,
        "K": config.depth,
        "candidate_pool_size": config.candidate_pool_size,
        "encoder_mode": 3,
        "score_head": 4,
    }
    if config.variant == "v2":
        published |= {"rope_base": config.rope_base, "activation": config.activation}
    elif config.activation != "gelu":
        published["activation"] = config.activation
    content = {
        "config": published,
        "state_dict": {n: t.detach().to(dtype) for n, t in adapter.state_dict().items()},
        "metadata": {
            **adapter.metadata,
            "speculator_kind": _KIND,
            # The published config has no room for these.
            _COMPANIONS: {name: getattr(config, name) for name in _RECORDED},
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        torch.save(content, temporary)
        os.replace(temporary, file)
    except RuntimeError as error:
        # PyTorch's writer reports a full disk so.
        raise OSError(first_line(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_speculators(
    adapter: WeaverAdapter,
    directory: Path,
    drafter: str | None,
    target: str | None,
    budget: int,
    dtype: torch.dtype,
) -> None:
    if not 1 <= budget <= MAX_BUDGET:
        raise TrainError(f"budget is {budget}: choose from 1 to {MAX_BUDGET}")
    if drafter is None:
        raise TrainError(
            "a speculators directory holds the drafter too: pass --drafter with the DFlash drafter "
            "that this adapter refines"
        )
    facts = DrafterFacts.read(drafter)
    config = adapter.config
    for name, theirs, ours in (
        ("hidden_size", facts.width, config.d_model),
        ("vocab_size", facts.vocab, config.vocab_size or facts.vocab),
    ):
        if theirs != ours:
            raise AdapterError(
                f"{drafter}: {name} is {theirs} but the adapter was trained for {ours}: use the "
                "drafter that it was trained with"
            )
    if facts.depth < config.depth:
        raise AdapterError(
            f"{drafter}: drafts {facts.depth} tokens but the adapter reads {config.depth}: use the "
            "drafter that it was trained with"
        )
    target = target or config.target
    if not target:
        raise TrainError("the adapter does not record its target: pass --target")
    record = facts.speculators_config(target, _architectures(target), budget)
    # As stored: a drafter is served in the type that it was trained in.
    tensors = drafter_tensors(drafter, dtype=_drafter_dtype(drafter))
    record["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        from safetensors.torch import save_file

        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(record, indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        for name in _TOKENIZER_FILES:
            file = model_file(drafter, name)
            if file is not None:
                shutil.copy(file, temporary / name)
        save(adapter, temporary / ADAPTER_FOLDER, dtype=dtype)
        write_card(temporary / ADAPTER_FOLDER)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _architectures(target: str) -> list[str]:
    """A target's architectures where its config is at hand; the field may be empty."""
    return architectures_of(target) if Path(target).is_dir() else []


def _drafter_dtype(drafter: str) -> torch.dtype:
    import safetensors

    from vllm_weaver.train.target import weight_files

    files = weight_files(drafter)
    name = "fc.weight"
    if name not in files:
        raise TrainError(f"{drafter}: tensor {name} is missing: fetch the drafter again")
    with safetensors.safe_open(files[name], framework="pt") as file:
        dtype: torch.dtype = file.get_tensor(name).dtype
        return dtype
