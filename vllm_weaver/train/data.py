# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens and their hidden states, in speculators' own files, one row at a time.

A data directory is what `speculators prepare-data` writes: a Hugging Face dataset with columns
`input_ids`, `loss_mask`, `seq_len`. Row N's hidden states are `hs_N.safetensors` with `token_ids`
[L] and `hidden_states` [L, layers + 1, d]: the drafter's auxiliary layers, then the last layer's
output before the final norm, or these in FP8 with `hidden_states_scales` [L, 1, 1]. Everything is
checked when it is read, nothing is kept. A file `extraction.json` beside the states, which
`vllm-weaver extract` writes, names target and layers. Knows neither models nor training.

Shapes: L tokens of a row, A anchors, D draft depth, d width.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_weaver.train.errors import DataError, first_line, require
from vllm_weaver.train.moving import Lead
from vllm_weaver.train.recipe import DataRecipe

RECORD_NAME = "extraction.json"
_SCALES = "hidden_states_scales"
_SERVER_SECONDS = 30


@dataclass(frozen=True)
class Layout:
    """What hidden-state files must hold.

    Attributes:
        width, vocab: of the target.
        layer_ids: the drafter's auxiliary layers, speculators' numbering.
        last_layer: number of the target's layers, the id of its last output.
    """

    width: int
    vocab: int
    layer_ids: tuple[int, ...]
    last_layer: int

    @property
    def file_layers(self) -> list[int]:
        """Layer ids in a file, in order."""
        return [*self.layer_ids, self.last_layer]


@dataclass
class Document:
    """One row.

    | field | shape, dtype | meaning |
    |---|---|---|
    | `tokens_L` | [L] int64 | |
    | `trained_L` | [L] bool | positions that a loss may cover (the answers of a chat) |
    | `states_Lkd` | [L, layers + 1, d] | auxiliary states, then the last layer's output before the
      final norm, as stored: one tensor, so that it moves as a whole |
    """

    index: int
    tokens_L: Tensor
    trained_L: Tensor
    states_Lkd: Tensor

    @property
    def auxiliary_Lx(self) -> Tensor:
        """Auxiliary states side by side, [L, layers * d], a view."""
        return self.states_Lkd[:, :-1].flatten(1)

    @property
    def last_Ld(self) -> Tensor:
        """Last layer's output before the final norm, [L, d], a view."""
        return self.states_Lkd[:, -1]

    def pin_memory(self) -> Document:
        """The same with states that a GPU fetches by itself; PyTorch's loader asks for it."""
        return replace(self, states_Lkd=self.states_Lkd.pin_memory())


@dataclass(frozen=True)
class Skipped:
    """A row that is left out, and why."""

    index: int
    reason: str


class HiddenStateData(Dataset[Document | Skipped]):
    """Rows of a data directory, read and checked on access.

    Raises:
        DataError: the directory is not readable, or its record names other layers.
    """

    def __init__(self, recipe: DataRecipe, layout: Layout) -> None:
        datasets = require("datasets", "reading prepared data")
        self.recipe, self.layout = recipe, layout
        self.path = Path(recipe.path)
        self.directory = Path(recipe.hidden_states or self.path / "hidden_states")
        if not self.path.is_dir():
            raise DataError(
                f"{self.path}: no such directory: make it with `speculators prepare-data` or "
                "`vllm-weaver extract`"
            )
        try:
            self._rows = datasets.load_from_disk(str(self.path))
            columns = set(self._rows.column_names)
        except Exception as error:
            raise DataError(
                f"{self.path}: not a prepared dataset ({first_line(error)}): make it with "
                "`speculators prepare-data` or `vllm-weaver extract`"
            ) from error
        missing = {"input_ids", "loss_mask"} - columns
        if missing:
            raise DataError(
                f"{self.path}: column {sorted(missing)[0]} is missing: make the data with "
                "`speculators prepare-data` or `vllm-weaver extract`"
            )
        if len(self._rows) == 0:
            raise DataError(f"{self.path}: holds no rows: prepare more data")
        self._rows = self._rows.with_format("torch")
        self._generator: Any = None
        self._check_record()

    def __len__(self) -> int:
        return len(self._rows)

    def split(self) -> tuple[range, range]:
        """Rows to train on and rows held out: the last `held_out` of all, at least one."""
        count, share = len(self), self.recipe.held_out
        held = 0 if share == 0 else max(1, round(share * count))
        if held >= count:
            raise DataError(
                f"{self.path}: {count} rows cannot spare a share of {share} to measure with: "
                "prepare more data, or set data.held_out = 0"
            )
        return range(count - held), range(count - held, count)

    def file(self, index: int) -> Path:
        """Where row `index`'s hidden states are."""
        return self.directory / f"hs_{index}.safetensors"

    def missing(self, rows: Sequence[int]) -> int:
        """How many of these rows have no file."""
        if not self.directory.is_dir():
            return len(rows)
        present = {path.name for path in self.directory.iterdir()}
        return sum(f"hs_{row}.safetensors" not in present for row in rows)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Row `index`'s tokens and which of them a loss may cover, cut to `max_length`."""
        row, most = self._rows[index], self.recipe.max_length
        return row["input_ids"][:most].long(), row["loss_mask"][:most].bool()

    def __getitem__(self, index: int) -> Document | Skipped:
        """Row `index`.

        Raises:
            DataError: its file is missing or wrong, and the recipe does not say to skip it.
        """
        tokens_L, trained_L = self.tokens(index)
        try:
            states = self._states(index, tokens_L)
            if isinstance(states, Skipped):
                return states
            self._check(index, tokens_L, states)
        except DataError as error:
            if self.recipe.on_bad == "skip":
                return Skipped(index, str(error))
            raise
        return Document(
            index=index,
            tokens_L=tokens_L,
            trained_L=trained_L,
            states_Lkd=states,
        )

    def _states(self, index: int, tokens_L: Tensor) -> Tensor | Skipped:
        """[L, layers + 1, d], as stored."""
        file, length = self.file(index), len(tokens_L)
        if not file.exists():
            if self.recipe.on_missing == "generate":
                return self._generate(index)[:length]
            if self.recipe.on_missing == "skip":
                return Skipped(index, f"{file}: missing")
            raise DataError(
                f"{file}: missing: make it with `speculators generate-offline-data` or "
                "`vllm-weaver extract`, or set data.on_missing"
            )
        remedy = "delete it and extract it again"
        if file.stat().st_size == 0:
            raise DataError(f"{file}: empty: {remedy}")
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                if not {"token_ids", "hidden_states"} <= names:
                    raise DataError(
                        f"{file}: holds {', '.join(sorted(names)) or 'nothing'}, not token_ids and "
                        "hidden_states: it is no hidden-state file of speculators"
                    )
                stored = opened.get_tensor("token_ids").long()
                # Only what is used of a long row is read.
                part = opened.get_slice("hidden_states")
                whole = list(part.get_shape())
                states: Tensor = part[:length]
                if len(states) < whole[0]:
                    # A part of the file's mapping would be handed over with all of it.
                    states = states.clone()
                if _SCALES in names:
                    # Speculators' FP8 files: a scale per token, applied as its own reader does.
                    scales = opened.get_slice(_SCALES)[:length]
                    states = states.to(torch.bfloat16) * scales.to(torch.bfloat16)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{file}: not readable ({first_line(error)}), it may be truncated: {remedy}"
            ) from error
        if whole[:1] != [len(stored)]:
            raise DataError(f"{file}: hidden_states is {whole} for {len(stored)} tokens: {remedy}")
        if not torch.equal(stored[:length], tokens_L):
            both = min(len(stored), length)
            differs = (stored[:both] != tokens_L[:both]).nonzero()
            place = int(differs[0]) if len(differs) else both
            raise DataError(
                f"{file}: its tokens differ from row {index} of {self.path} at position {place}: "
                "they were made from other data or with another tokenizer; extract them again"
            )
        return states

    def _check(self, index: int, tokens_L: Tensor, states: Tensor) -> None:
        file, layout = self.file(index), self.layout
        if len(tokens_L) and int(tokens_L.max()) >= layout.vocab:
            raise DataError(
                f"row {index} of {self.path} holds token {int(tokens_L.max())} but the target's "
                f"vocabulary has {layout.vocab}: the data was made with another tokenizer; "
                "prepare it with this target's"
            )
        wanted = (len(tokens_L), len(layout.file_layers), layout.width)
        shape = tuple(states.shape)
        if shape[2:] != wanted[2:]:
            raise DataError(
                f"{file}: states are {shape[-1]} wide but the target is {layout.width}: they are "
                "another target's; extract them with this one"
            )
        if shape[1] != wanted[1]:
            raise DataError(
                f"{file}: holds {shape[1]} layers, not the {wanted[1]} that this drafter needs: "
                f"extract layers {layout.file_layers} (the drafter's, then the target's last)"
            )
        if not states.is_floating_point():
            raise DataError(f"{file}: states are {states.dtype}: extract them as bfloat16")
        # The extremes carry NaN and Inf, at the price of one pass.
        if states.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(states)):
            raise DataError(
                f"{file}: states hold NaN or Inf: delete the file and extract it again, or set "
                'data.on_bad = "skip"'
            )

    def _check_record(self) -> None:
        file = self.directory / RECORD_NAME
        if not file.is_file():
            return
        try:
            layers = json.loads(file.read_text(encoding="utf-8"))["layer_ids"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}: damaged ({first_line(error)}): delete it or extract again"
            ) from error
        if layers != self.layout.file_layers:
            raise DataError(
                f"{file}: the states are those of layers {layers}, but drafter and target need "
                f"{self.layout.file_layers}: extract them for this drafter"
            )

    def check_server(self, rows: Sequence[int]) -> str | None:
        """Name of the model that the server gives, if some of these rows have to be asked of it.

        Raises:
            DataError: no server answers, or it serves no model.
        """
        if self.recipe.on_missing != "generate" or not self.missing(rows):
            return None
        address = f"{self.recipe.endpoint.rstrip('/')}/models"
        try:
            with urllib.request.urlopen(address, timeout=_SERVER_SECONDS) as answer:
                name: str = json.load(answer)["data"][0]["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self.recipe.endpoint}: no vLLM server answers there ({first_line(error)}), and "
                f"{self.missing(rows)} rows have no hidden states: start it for extraction, see "
                "docs/training.md, or correct data.endpoint"
            ) from error
        return name

    def _generate(self, index: int) -> Tensor:
        """Ask a running server, through speculators' own client."""
        if self._generator is None:
            module = require("speculators.train.data", "extracting hidden states from a server")
            transfer = require("hs_connectors", "extracting hidden states from a server")
            self._generator = module.ArrowDataset(
                max_len=self.recipe.max_length,
                datapath=str(self.path),
                transfer=transfer.FP8Transfer(self.directory),
                vllm_endpoint=self.recipe.endpoint,
                on_missing="generate",
                max_retries=1,
                generation_validation_retries=1,
            )
        answer = self._generator[index]
        if not isinstance(answer, dict):
            # The client's account of its attempts comes first, and may list a row's tokens.
            reason = str(getattr(answer, "reason", answer)).split("): ", 1)[-1][:200]
            raise DataError(
                f"row {index}: {self.recipe.endpoint} gave no hidden states ({reason}): start the "
                "server for extraction, see docs/training.md"
            )
        last = answer["verifier_last_hidden_states"]
        auxiliary = answer["hidden_states"]
        if auxiliary.shape[1] % last.shape[1]:
            raise DataError(
                f"row {index}: {self.recipe.endpoint} gave states of {tuple(auxiliary.shape)} and "
                f"{tuple(last.shape)}: extract layers {self.layout.file_layers}"
            )
        layers = auxiliary.unflatten(1, (-1, last.shape[1]))
        return torch.cat([layers, last[:, None]], dim=1)


def draw_anchors(trained_L: Tensor, depth: int, count: int, seed: int) -> Tensor:
    """At most `count` anchors of a row, drawn without replacement, in rising order.

    An anchor is the last known token of a block: it may be trained on, one token stands before it
    (whose state gave it) and `depth` after it.
    """
    valid = trained_L.clone()
    valid[:1] = False
    valid[max(0, len(valid) - depth) :] = False
    places = valid.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(places), generator=generator)[:count]
    return places[chosen].sort().values


@dataclass(frozen=True)
class Plan:
    """Which rows each unit of a run holds: a function of the seed alone.

    Attributes:
        rows: rows to train on.
        documents: rows of a unit.
        units: units of a step.
        steps: steps of the run.
        seed: of the order.
    """

    rows: range
    documents: int
    units: int
    steps: int
    seed: int

    @classmethod
    def of(
        cls, rows: range, documents: int, units: int, epochs: float, steps: int | None, seed: int
    ) -> Plan:
        """A run of `epochs` passes, or of `steps` if that is shorter."""
        most = max(1, round(epochs * len(rows) / (documents * units)))
        return cls(rows, documents, units, most if steps is None else min(steps, most), seed)

    def unit(self, number: int) -> list[tuple[int, int]]:
        """(row, seed of its anchors) of unit `number` of the run."""
        places = range(number * self.documents, (number + 1) * self.documents)
        return [(self._row(place), self.seed * 1_000_003 + place) for place in places]

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, len(self.rows))
        return self.rows[self._order(epoch)[within]]

    def _order(self, epoch: int) -> list[int]:
        cached: dict[int, list[int]] = self.__dict__.setdefault("_orders", {})
        if epoch not in cached:
            generator = torch.Generator().manual_seed(self.seed * 7919 + epoch)
            cached.clear()
            cached[epoch] = torch.randperm(len(self.rows), generator=generator).tolist()
        return cached[epoch]

    def batches(self, first_step: int, rank: int, world: int) -> Iterator[list[tuple[int, int]]]:
        """Units of one process, from a step on."""
        for step in range(first_step, self.steps):
            for unit in range(rank, self.units, world):
                yield self.unit(step * self.units + unit)


class _Rows(Dataset[tuple[Document | Skipped, int]]):
    """Rows in the order of their use, so that a worker process hands over one at a time."""

    def __init__(self, data: HiddenStateData, rows: list[tuple[int, int]]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Document | Skipped, int]:
        row, seed = self._rows[number]
        return self._data[row], seed


def stream(
    data: HiddenStateData, units: Iterator[list[tuple[int, int]]], lead: Lead | None = None
) -> Iterator[list[tuple[Document | Skipped, int]]]:
    """Read units in order, ahead of their use when the recipe gives worker processes.

    At most two rows per worker are held on the host at any time, and the one that is handed over.
    With a `lead` on a GPU the states of each go to the device as soon as they are read.
    """
    workers = data.recipe.workers
    wanted = list(units)
    loader = torch.utils.data.DataLoader(
        _Rows(data, [row for unit in wanted for row in unit]),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=lead is not None and lead.on_gpu,
    )

    def placed(document: Document | Skipped) -> Document | Skipped:
        if lead is None or isinstance(document, Skipped):
            return document
        try:
            return replace(document, states_Lkd=lead.move(document.states_Lkd))
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"row {document.index}: {tuple(document.states_Lkd.shape)} states find no room on "
                "the device, which holds those of two units: lower train.documents or "
                "data.max_length"
            ) from error

    rows = iter(loader)
    try:
        for unit in wanted:
            read = []
            for _ in unit:
                try:
                    document, seed = next(rows)
                except DataError as error:
                    # Its frames hold the readers. What a reader raised has its traceback as text.
                    raise error.with_traceback(None) from error.__cause__
                except RuntimeError as error:
                    raise DataError(
                        f"{data.path}: a reading process failed ({first_line(error)}): set "
                        "data.workers = 0 to see where"
                    ) from (error.with_traceback(None) if workers else error)
                read.append((placed(document), seed))
            yield read
    finally:
        # An error's traceback holds this frame: readers and the thread that pins are to end now,
        # not in the middle of a row when Python does.
        del rows
