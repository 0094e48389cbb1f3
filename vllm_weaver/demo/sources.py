# SPDX-License-Identifier: Apache-2.0
"""The demo's prompts: the beginnings of source files that the models were not trained on.

Knows files and a tokenizer's two calls; nothing of models or engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parent / "prompts"
PROMPT_TOKENS = 256

_ORIGIN = "# From "


@dataclass(frozen=True)
class Prompt:
    """The beginning of a source file.

    Attributes:
        name: the file's name.
        origin: where the file is from, as its first line says; empty if it does not.
        token_ids: the prompt.
        text: its text.
    """

    name: str
    origin: str
    token_ids: list[int]
    text: str


def available(directory: Path = PROMPTS) -> list[Path]:
    """Prompt files, in order of name."""
    return sorted(directory.glob("*.py"))


def load_prompts(
    count: int, tokenizer: Any, directory: Path = PROMPTS, max_tokens: int = PROMPT_TOKENS
) -> list[Prompt]:
    """The first ``count`` prompts, each of whole lines and at most ``max_tokens`` tokens.

    Args:
        count: how many.
        tokenizer: the target's, with ``encode`` and ``decode``.
        directory: of the source files.
        max_tokens: length of a prompt; a longer first line is cut.
    """
    return [_prompt(path, tokenizer, max_tokens) for path in available(directory)[:count]]


def _prompt(path: Path, tokenizer: Any, max_tokens: int) -> Prompt:
    source, origin = path.read_text(encoding="utf-8"), ""
    if source.startswith(_ORIGIN):
        first, _, source = source.partition("\n")
        origin = first.removeprefix(_ORIGIN).strip()
    text = ""
    token_ids: list[int] = []
    for line in source.splitlines(keepends=True):
        longer = tokenizer.encode(text + line, add_special_tokens=False)
        if len(longer) > max_tokens:
            token_ids = token_ids or longer[:max_tokens]
            break
        text, token_ids = text + line, longer
    return Prompt(path.name, origin, token_ids, tokenizer.decode(token_ids))
