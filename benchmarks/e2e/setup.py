# SPDX-License-Identifier: Apache-2.0
"""What commands of this package share before any engine starts: models, device, options."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .arms import Models

PACKAGED = Path(__file__).parents[2] / "vllm_weaver/demo"

#: Options that the commands share.
Target = Annotated[str | None, typer.Option(help="real target, in place of --small")]
Drafter = Annotated[str | None, typer.Option(help="its DFlash drafter")]
Adapter = Annotated[str | None, typer.Option(help="its Weaver adapter")]
Prompts = Annotated[
    Path | None, typer.Option(help="text to cut prompts from; default: held-out source")
]
EngineArguments = Annotated[
    list[str] | None, typer.Option(help="ARM=JSON or all=JSON: more arguments of vLLM")
]
CompileCache = Annotated[
    Path | None, typer.Option(help="directory for compiled kernels, to keep between runs")
]


def choose_models(
    target: str | None,
    drafter: str | None,
    adapter: str | None,
    small: Path,
    shape: str,
    layers: int | None,
) -> Models:
    """The checkpoints named, or a small trio, as it is (`shape` "none") or expanded.

    Raises:
        typer.BadParameter: the trio cannot be expanded so.
    """
    if target is not None:
        return Models(target, drafter, adapter)
    if shape == "none":
        parts = [str(small / part) for part in ("target", "drafter", "adapter")]
        return Models(*parts, function=parts[0])
    return expand_small(small, shape, layers, Path(tempfile.mkdtemp(prefix="expanded-")))


def expand_small(small: Path, shape: str, layers: int | None, out: Path) -> Models:
    """Light directories of the expanded trio, in `out`.

    Raises:
        typer.BadParameter: see :func:`choose_models`.
    """
    import torch

    from benchmarks.expand.shapes import ShapeError, named
    from benchmarks.expand.trio import Trio

    try:
        trio = Trio.below(small, named(shape, layers))
        on_gpu = torch.cuda.is_available()
        trio.write(out, torch.bfloat16 if on_gpu else torch.float32, whole=False)
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from error
    name = "the packaged models" if small == PACKAGED / "models" else small.name
    title = f"shapes of {shape}{f', {layers} layers' if layers else ''}, function of {name}"
    parts = [str(out / part) for part in ("target", "drafter", "adapter")]
    return Models(*parts, expanded=True, title=title, function=str(small / "target"))


def read_model_config(model: str | None) -> dict[str, Any] | None:
    """`config.json` of a directory or of a repository on the hub."""
    if model is None:
        return None
    file = Path(model) / "config.json"
    if not file.exists():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(model, "config.json"))
    return json.loads(file.read_text())


def device_bytes() -> int:
    """Memory of the first GPU, without taking any of it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0]) << 20


def engine_arguments(items: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`--engine ARM=JSON`, by arm.

    Raises:
        typer.BadParameter: it is none.
    """
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            found[name] = json.loads(text)
        except ValueError:
            raise typer.BadParameter(f"--engine {item}: pass ARM=JSON") from None
    return found


def compile_caches(cache: Path | None) -> dict[str, str]:
    """Environment of engines that keep compiled kernels in a directory."""
    if cache is None:
        return {}
    root = cache.resolve()
    return {
        "VLLM_CACHE_ROOT": str(root / "vllm"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        # What Triton's autotuner chose, too.
        "TRITON_CACHE_AUTOTUNING": "1",
    }


def enough(texts: Iterable[str], tokens: int) -> list[str]:
    """Texts until they surely hold that many tokens: a token is at most some ten characters."""
    found: list[str] = []
    size = 0
    for text in texts:
        found.append(text)
        size += len(text)
        if size > 10 * tokens:
            break
    return found
