# SPDX-License-Identifier: Apache-2.0
"""Prompts of an exact number of tokens, cut from text that the models have not seen.

By default from Python source that `benchmarks/testbed` holds out of training (by the hash of the
file), the standard library first and as many installed packages as are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SHUFFLE = "benchmarks.e2e"


class PromptError(ValueError):
    """No text to cut prompts from."""


def load_tokenizer(model: str) -> Any:
    """The fast tokenizer of a directory or a repository on the hub."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    return Tokenizer.from_pretrained(model)


def held_out_texts() -> Iterator[str]:
    """Held-out Python source of this machine, in an order that depends on the files alone."""
    from benchmarks.testbed.data import is_held_out, read_source, sources

    for _, paths in sources(standard_library_only=False):
        found = []
        for path in paths:
            content = read_source(path)
            if content is None:
                continue
            digest = hashlib.sha256(content).digest()
            if is_held_out(digest):
                found.append((hashlib.sha256(_SHUFFLE.encode() + digest).digest(), content))
        for _, content in sorted(found):
            yield content.decode()


def texts_of(path: Path) -> Iterator[str]:
    """A file, or the files of a directory in their order.

    Raises:
        PromptError: there is none.
    """
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not files or not path.exists():
        raise PromptError(f"--prompts {path}: give a text file or a directory of them")
    for file in files:
        if file.name != "README.md":
            yield file.read_text(encoding="utf-8")


def cut_prompts(tokenizer: Any, texts: Iterator[str], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens; each is consecutive text, and none shares a start.

    A prompt does not end with a line's end: indentation belongs to the token of the line break.

    Raises:
        PromptError: no text at all.
    """
    stream: list[int] = []
    wanted = count * length + 8 * length
    for text in texts:
        stream += tokenizer.encode(text, add_special_tokens=False).ids
        if len(stream) >= wanted:
            break
    if not stream:
        raise PromptError("no text to cut prompts from")
    while len(stream) < length + 64:
        stream = stream + stream
    prompts = []
    room = len(stream) - length - 32
    for number in range(count):
        start = (number * max(length, room // count)) % max(room, 1)
        end = start + length
        while end < len(stream) and tokenizer.decode([stream[end - 1]]).endswith("\n"):
            end += 1
        prompts.append(stream[end - length : end])
    return prompts


def cut_cells(
    tokenizer: Any, texts: Sequence[str], groups: Mapping[tuple[int, int], int], *, share: bool
) -> dict[tuple[int, int], list[list[list[int]]]]:
    """Prompts of cells, by batch and context: groups of a batch each.

    Cells of a context that have the same number of prompts have the same ones. With `share`, the
    others take the first of those of the cell with most.

    Args:
        tokenizer, texts: see :func:`cut_prompts`.
        groups: number of them, by batch and context.

    Raises:
        PromptError: no text at all.
    """
    found = {}
    for (batch, context), number in sorted(groups.items()):
        most = max(n * b for (b, c), n in groups.items() if c == context)
        count = most if share else number * batch
        every = cut_prompts(tokenizer, iter(texts), count, context)
        found[batch, context] = [every[i * batch : i * batch + batch] for i in range(number)]
    return found


class Stream:
    """Prompts of any length, cut one after another from one stream of tokens.

    Args:
        tokenizer: of the target.
        texts: whose tokens are used; from the start again when they end.

    Raises:
        PromptError: no text at all.
    """

    def __init__(self, tokenizer: Any, texts: Iterable[str]):
        self._tokens: list[int] = []
        for text in texts:
            self._tokens += tokenizer.encode(text, add_special_tokens=False).ids
        if not self._tokens:
            raise PromptError("no text to cut prompts from")
        self._next = 0

    def cut(self, count: int, length: int) -> list[list[int]]:
        """The next `count` prompts of `length` tokens."""
        found = []
        for _ in range(count):
            places = range(self._next, self._next + length)
            found.append([self._tokens[place % len(self._tokens)] for place in places])
            self._next += length
        return found
