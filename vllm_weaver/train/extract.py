# SPDX-License-Identifier: Apache-2.0
"""Makes data without a server: the target's own text and its hidden states, with Transformers.

Writes exactly what `speculators prepare-data` and its hidden-state extraction write, so that either
side can read the other's. For small targets and for machines without vLLM; large ones are served
(docs/training.md). Knows Transformers' models and the file formats; nothing of drafts or training.

Shapes: L tokens of a row, d width, B rows at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_weaver.train.data import RECORD_NAME
from vllm_weaver.train.drafter import DrafterFacts
from vllm_weaver.train.errors import DataError, SaveError, TrainError, first_line, require
from vllm_weaver.train.target import read_config

# Prompts from one text at most, and more characters than a token ever has on average.
_WINDOWS, _CHARACTERS = 8, 16
_TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts")


@dataclass(frozen=True)
class ExtractOptions:
    """What to make.

    Attributes:
        target, drafter: models; of the drafter only the layer ids are used.
        output: data directory to write.
        prompts: a folder of text files, or a .jsonl file with `text` or `input_ids` in each line.
        rows: prompts to continue at most, eight from one text; 0 takes one from each.
        prompt_tokens: length of a prompt; shorter texts are left out.
        tokens: how many tokens to generate after a prompt.
        continuations: rows per prompt. From 2 on, `diagnose` can bound every marginal-only drafter.
        temperature: 0 is greedy.
        batch: rows generated at once.
        seed: of the sampling.
    """

    target: str
    drafter: str
    output: Path
    prompts: Path
    rows: int = 0
    prompt_tokens: int = 64
    tokens: int = 192
    continuations: int = 1
    temperature: float = 1.0
    batch: int = 32
    seed: int = 0

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            TrainError: names the option.
        """
        for name in ("prompt_tokens", "tokens", "continuations", "batch"):
            if getattr(self, name) < 1:
                raise TrainError(f"--{name.replace('_', '-')} is {getattr(self, name)}: pass 1 up")
        if self.rows < 0 or self.temperature < 0:
            raise TrainError("--rows and --temperature must be 0 or more")


def extract(options: ExtractOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Generate rows, then write tokens and hidden states.

    The hidden states come from one pass over each finished row, not from its generation. Returns
    what was written. Raises TrainError for inputs that do not fit, SaveError for a full disk.
    """
    options.check()
    if options.output.exists() and any(options.output.iterdir()):
        raise DataError(f"{options.output}: is not empty: choose another directory")
    facts = DrafterFacts.read(options.drafter)
    config = read_config(options.target)
    if facts.width != config.get("hidden_size"):
        raise TrainError(
            f"{options.drafter}: hidden_size is {facts.width} but that of {options.target} is "
            f"{config.get('hidden_size')}: use the drafter that was trained for this target"
        )
    layer_ids = [*facts.layer_ids, int(config["num_hidden_layers"])]
    datasets = require("datasets", "writing prepared data")
    transformers = require("transformers", "running a target")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.target)
    prompts = list(_prompts(options, tokenizer))
    if not prompts:
        raise DataError(
            f"{options.prompts}: holds no text of {options.prompt_tokens} tokens: give longer "
            "texts, or lower --prompt-tokens"
        )
    say(f"{len(prompts)} prompts of {options.prompt_tokens} tokens")
    model = _model(transformers, options.target, device)
    states = options.output / "hidden_states"
    rows: list[list[int]] = []
    torch.manual_seed(options.seed)
    try:
        states.mkdir(parents=True)
        record = {"target": options.target, "layer_ids": layer_ids}
        (states / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        wanted = [p for p in prompts for _ in range(options.continuations)]
        for start in range(0, len(wanted), options.batch):
            batch = torch.tensor(wanted[start : start + options.batch], device=device)
            tokens_BL = _continue(model, batch, options)
            hidden = _hidden_states(model, tokens_BL, layer_ids)
            for tokens_L, states_Lnd in zip(tokens_BL.cpu(), hidden.cpu(), strict=True):
                _write(states / f"hs_{len(rows)}.safetensors", tokens_L, states_Lnd)
                rows.append(tokens_L.tolist())
            say(f"{len(rows)} of {len(wanted)} rows")
        table = datasets.Dataset.from_dict(
            {
                "input_ids": rows,
                "loss_mask": [
                    [0] * options.prompt_tokens + [1] * (len(r) - options.prompt_tokens)
                    for r in rows
                ],
                "seq_len": [len(r) for r in rows],
            }
        )
        # Tensors out, as from `prepare-data`.
        table.set_format(type="torch")
        table.save_to_disk(str(options.output))
    except OSError as error:
        raise SaveError(
            f"{options.output}: could not be written ({first_line(error)}): free space, delete the "
            "directory and extract again"
        ) from error
    size = sum(file.stat().st_size for file in states.iterdir())
    return {
        "rows": len(rows),
        "tokens": sum(map(len, rows)),
        "layer_ids": layer_ids,
        "bytes": size,
        "path": str(options.output),
    }


def _prompts(options: ExtractOptions, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of prompts, all of the same length: the beginnings of the texts, then what
    follows them, until there are enough."""
    length, given = options.prompt_tokens, 0
    windows = _WINDOWS if options.rows else 1
    texts = list(_texts(options.prompts, tokenizer, windows * length))
    for window in range(windows):
        for tokens in texts:
            part = tokens[window * length : (window + 1) * length]
            if len(part) == length:
                yield part
                given += 1
                if given == options.rows:
                    return


def _texts(path: Path, tokenizer: Any, most: int) -> Iterator[list[int]]:
    """Token ids of the beginnings of all texts, `most` tokens of each."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text[: most * _CHARACTERS], add_special_tokens=False)
        return ids[:most]

    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.suffix in _TEXT_SUFFIXES):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            yield encode(text)
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: {first_line(error)}: pass a folder of text files or a .jsonl file"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            ids, text = entry.get("input_ids"), entry.get("text")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: correct the line") from error
        if isinstance(ids, list):
            yield [int(i) for i in ids]
        elif isinstance(text, str):
            yield encode(text)
        else:
            raise DataError(f"{path}:{number}: has neither text nor input_ids: add one")


def _model(transformers: Any, target: str, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    except Exception as error:
        raise TrainError(
            f"{target}: Transformers cannot load it ({first_line(error)}): pass a target's "
            "directory"
        ) from error
    # Rows go on after an end token, so that all have one length.
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


@torch.no_grad()
def _continue(model: Any, tokens_BL: Tensor, options: ExtractOptions) -> Tensor:
    """[B, L + tokens]: rows of one length, so that nothing is padded."""
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    grown: Tensor = model.generate(
        tokens_BL,
        attention_mask=torch.ones_like(tokens_BL),
        max_new_tokens=options.tokens,
        pad_token_id=0,
        **sampling,
    )
    return grown


@torch.no_grad()
def _hidden_states(model: Any, tokens_BL: Tensor, layer_ids: list[int]) -> Tensor:
    """[B, L, layers, d] bfloat16; the last layer's output is caught before the final norm."""
    caught: list[Tensor] = []
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    hook = body.norm.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        given = body(tokens_BL, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    # Entry i is the output of layer i - 1, but the last entry has been through the norm.
    last = len(given) - 1
    layers = [caught[-1] if i == last else given[i] for i in layer_ids]
    return torch.stack(layers, dim=2).to(torch.bfloat16)


def _write(file: Path, tokens_L: Tensor, states_Lnd: Tensor) -> None:
    from safetensors.torch import save_file

    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_file(
            {"token_ids": tokens_L.contiguous(), "hidden_states": states_Lnd.contiguous()},
            temporary,
        )
        os.replace(temporary, file)
    except Exception as error:
        raise SaveError(
            f"{file}: could not be written ({first_line(error)}): free space, delete "
            f"{file.parent.parent} and extract again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
