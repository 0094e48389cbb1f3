# SPDX-License-Identifier: Apache-2.0
"""``vllm-weaver inspect``: an adapter's facts, and whether it fits. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class InspectError(Exception):
    """Why an adapter cannot be used, in one line."""


def inspect_adapter(path: str, target: Path | None, drafter: Path | None) -> dict[str, Any]:
    """Load an adapter, check it against its companions, and describe it.

    Args:
        path: a file, a directory (ours, or speculators' with the adapter in it), or
            ``org/repository:file`` on the Hugging Face hub.
        target: directory of the target model.
        drafter: directory of the DFlash drafter.

    Raises:
        InspectError: it is damaged or does not fit.
    """
    from vllm_weaver.adapter import AdapterError, describe, load
    from vllm_weaver.engine.config import WeaverConfigError
    from vllm_weaver.engine.proposer import adapter_path
    from vllm_weaver.train.convert import adapter_in
    from vllm_weaver.train.drafter import DrafterFacts
    from vllm_weaver.train.errors import TrainError

    wanted: dict[str, Any] = {}
    fits = {}
    if target is not None:
        config = _text_config(target)
        wanted["target_width"] = _whole_number(config, "hidden_size", target)
        wanted["vocab_size"] = _whole_number(config, "vocab_size", target)
        fits["fits_target"] = f"yes ({target})"
    if drafter is not None:
        try:
            facts = DrafterFacts.read(str(drafter))
        except TrainError as error:
            raise InspectError(str(error)) from error
        wanted["depth"] = facts.depth
        if wanted.setdefault("target_width", facts.width) != facts.width:
            raise InspectError(
                f"{drafter} has hidden_size {facts.width}, {target} {wanted['target_width']}: use "
                "the drafter that was trained for this target"
            )
        fits["fits_drafter"] = f"yes ({drafter})"
    try:
        local = adapter_in(adapter_path(path))
        adapter = load(local, **wanted)
    except (AdapterError, WeaverConfigError) as error:
        raise InspectError(str(error)) from error
    return {"path": str(local), **describe(adapter), **fits}


def _text_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InspectError(f"{file}: {reason}: pass a model's directory") from error
    if not isinstance(config, dict):
        raise InspectError(f"{file}: holds no object: pass a model's directory")
    return {**config, **config.get("text_config", {})}


def _whole_number(config: dict[str, Any], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise InspectError(
            f"{directory}/config.json has {name} {value!r}: pass the directory of a model that has "
            "it"
        )
    return value
