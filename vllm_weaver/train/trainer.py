# SPDX-License-Identifier: Apache-2.0
"""Trains an adapter: one loop over units of documents, for one process or several.

Knows how the parts fit together and in which order a step runs. Data, models, losses, optimisers
and checkpoints are modules of their own. A run is a function of its recipe: the same steps give
the same parameters, whether or not it was stopped and resumed in between.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_weaver.adapter import AdapterError, WeaverAdapter
from vllm_weaver.adapter import load as load_adapter
from vllm_weaver.adapter import save as save_adapter
from vllm_weaver.train.blocks import Blocks, conditional, make_blocks, make_pools
from vllm_weaver.train.data import (
    Document,
    HiddenStateData,
    Layout,
    Plan,
    Skipped,
    draw_anchors,
    stream,
)
from vllm_weaver.train.drafter import DrafterFacts, FrozenDrafter
from vllm_weaver.train.errors import DataError, RecipeError, SaveError, TrainError, first_line
from vllm_weaver.train.logs import Log
from vllm_weaver.train.losses import (
    depth_weights,
    length_weights,
    path_weights,
    pool_losses,
    text_log_probs,
)
from vllm_weaver.train.moving import Lead
from vllm_weaver.train.optim import Optimizers, schedule
from vllm_weaver.train.parallel import accumulating, load_whole, share, whole, wrap
from vllm_weaver.train.processes import Processes, host_memory
from vllm_weaver.train.recipe import Recipe
from vllm_weaver.train.state import Checkpoints, check_same_run
from vllm_weaver.train.target import FrozenTarget

_GOES_ON, _STOPS, _FAILED = 0, 1, 2


class Trainer:
    """One run.

    Attributes:
        recipe, processes: as given.
        target, drafter, data, adapter: the loaded parts.
        plan: which rows each step sees.
        server: name of the model that is asked for missing hidden states, if one is.
        step: optimiser steps done.
    """

    def __init__(self, recipe: Recipe, processes: Processes) -> None:
        """Load everything and check that it fits together; writes nothing.

        Raises:
            TrainError: something is missing, damaged, or made for something else.
        """
        self.recipe, self.processes = recipe, processes
        train, device = recipe.train, processes.device
        if train.units % processes.world:
            raise RecipeError(
                f"train.units is {train.units}, which {processes.world} processes cannot share: "
                f"make it a multiple of {processes.world}"
            )
        self.target, self.drafter, self.data = load_frozen(recipe, device)
        facts = self.drafter.facts
        config = recipe.adapter_config(
            self.target.width, self.target.vocab, facts.block, recipe.target.path, facts.name
        )
        torch.manual_seed(train.seed)
        self.adapter = WeaverAdapter(config)
        if recipe.adapter.start_from:
            self._start_from(recipe.adapter.start_from)
        self.adapter.to(device)
        share(self.adapter, train.parallel, processes)
        self.depth = config.depth
        self.pool = config.candidate_pool_size
        self.training_rows, self.held_out_rows = self.data.split()
        self.server = self.data.check_server(range(len(self.data)))
        self.plan = Plan.of(
            self.training_rows, train.documents, train.units, train.epochs, train.steps, train.seed
        )
        self.step = 0
        self.optimizers = Optimizers(self.adapter, train)
        self.checkpoints = Checkpoints(recipe.output, train.keep)
        self._weights_D = depth_weights(self.depth, train.depth_decay, device)
        model: nn.Module = self.adapter
        if train.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        self._model = wrap(model, train.parallel, processes)
        self._stop = False
        # Whether the parameters are those of `step`, not on their way to the next.
        self._whole = True
        self.skipped: dict[int, str] = {}

    def resume(self) -> bool:
        """Take up the newest checkpoint; False if there is none.

        Raises:
            TrainError: none is readable, or it belongs to another recipe.
        """
        state = self.checkpoints.load()
        if state is None:
            return False
        # Settings that the checkpoint's version did not know have their defaults.
        check_same_run(Recipe.from_dict(state["recipe"]).to_dict(), self.recipe.to_dict())
        if state["rows"] != len(self.data):
            raise RecipeError(
                f"{self.data.path} has {len(self.data)} rows but the run to resume had "
                f"{state['rows']}: put the data back, or choose another output"
            )
        load_whole(self.adapter, state["adapter"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.step = state["step"]
        return True

    def run(self) -> Path:
        """Train to the end and return the adapter's directory.

        A stop signal, and an error in the data, end the run after a checkpoint of the last whole
        step.

        Raises:
            TrainError: data, disk or numbers do not let it go on; nothing of earlier steps is lost.
            KeyboardInterrupt: a signal asked to stop; the checkpoint is written.
        """
        with (
            Log(
                Path(self.recipe.output),
                self.plan.steps,
                self.step,
                writes=self.processes.first,
            ) as log,
            self._signals(),
        ):
            self._check_states()
            log.say(self._greeting())
            try:
                self._loop(log)
            except (DataError, KeyboardInterrupt, FloatingPointError) as error:
                self._save(log)
                if isinstance(error, FloatingPointError):
                    raise TrainError(
                        f"step {self.step + 1}: {error}; step {self.step} is saved: start another "
                        "run with lower learning rates, from adapter.start_from = "
                        f"'{Path(self.recipe.output) / 'adapter'}'"
                    ) from error
                raise
            except RuntimeError as error:
                # PyTorch's handler of a reader's death raises wherever this thread is just then.
                # Several processes save together, and the others know nothing of it.
                if not str(error).startswith("DataLoader worker") or self.processes.world > 1:
                    raise
                if self._whole:
                    self._save(log)
                raise DataError(
                    f"{self.data.path}: a reading process ended ({first_line(error)}), for want of "
                    "memory perhaps: lower data.workers, then go on with --resume"
                ) from error
            if self.step not in self.checkpoints.steps():
                self._save(log)
            return Path(self.recipe.output) / "adapter"

    def steps(self) -> Iterator[dict[str, Tensor]]:
        """Run the remaining steps; yields each one's figures (sums over this process's units)."""
        batches = self.plan.batches(self.step, self.processes.rank, self.processes.world)
        lead = Lead(self.processes.device)
        units = stream(self.data, batches, lead)
        train = self.recipe.train
        units_here = train.units // self.processes.world
        while self.step < self.plan.steps:
            sums: dict[str, Tensor] = {}
            for number in range(units_here):
                unit = self._next(units)
                with accumulating(self._model, self.adapter, more=number < units_here - 1):
                    loss, figures = self._unit(unit)
                    (loss / units_here).backward()
                lead.launched()
                for name, value in figures.items():
                    sums[name] = sums[name] + value if name in sums else value
            factor = schedule(self.step, self.plan.steps, train.warmup, train.decay)
            self._whole = False
            norm = self.optimizers.step(factor)
            self.step += 1
            self._whole = True
            sums |= {"gradient_norm": torch.tensor(norm), "rate": torch.tensor(factor)}
            yield sums

    def _loop(self, log: Log) -> None:
        train = self.recipe.train
        totals: dict[str, Tensor] = {}
        since, first = time.perf_counter(), self.step
        for sums in self.steps():
            # Read when they are reported: reading waits for the device.
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
            log.advance(self.step)
            if self.step % train.log_every == 0 or self.step == self.plan.steps:
                seconds = time.perf_counter() - since
                log.report(self.step, "train", self._figures(totals, seconds, self.step - first))
                totals, since, first = {}, time.perf_counter(), self.step
            if train.measure_every and self.step % train.measure_every == 0:
                log.report(self.step, "held_out", self.measure())
                since = time.perf_counter()
            if self.step % train.save_every == 0 or self.step == self.plan.steps:
                self._save(log)
                since = time.perf_counter()
            if self.processes.highest(_STOPS if self._stop else _GOES_ON) == _STOPS:
                raise KeyboardInterrupt

    def _next(
        self, units: Iterator[list[tuple[Document | Skipped, int]]]
    ) -> list[tuple[Document, Tensor]]:
        """The next unit's documents with their anchors; an error here stops all processes."""
        error: DataError | None = None
        unit: list[tuple[Document | Skipped, int]] = []
        try:
            unit = next(units)
        except DataError as caught:
            error = caught
        if self.processes.highest(_GOES_ON if error is None else _FAILED) == _FAILED:
            raise error or DataError("another process found bad data: see its message")
        chosen = []
        for document, seed in unit:
            if isinstance(document, Skipped):
                self.skipped[document.index] = document.reason
                continue
            anchors = draw_anchors(document.trained_L, self.depth, self.recipe.train.blocks, seed)
            chosen.append((document, anchors))
        return chosen

    def _unit(self, unit: Sequence[tuple[Document, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a unit's positions, and figures to add up."""
        blocks = make_blocks(self.target, self.drafter, unit, self.depth)
        if blocks is None:
            return self._nothing(), {}
        pools = make_pools(self.target, blocks, self.pool)
        train, device = self.recipe.train, self.processes.device
        weight_RD = blocks.trained_RD * self._weights_D
        loss = weighed = torch.zeros((), device=device)
        accepted_RD = []
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=train.precision == "bfloat16"
        ):
            parts = conditional(self._model, self.target, blocks, pools)  # type: ignore[arg-type]
        for chosen, log_q_RDP in parts:
            losses_RD, accepted = pool_losses(
                train.loss, log_q_RDP, pools.p_RDP[chosen], pools.hit_RDP[chosen], train.eta
            )
            weights_RD = weight_RD[chosen]
            if train.weigh == "path":
                text_RD = text_log_probs(log_q_RDP, pools.hit_RDP[chosen])
                weights_RD = weights_RD * path_weights(text_RD, train.path_budget)
            elif train.weigh == "length":
                followed_RD = accepted * blocks.trained_RD[chosen]
                weights_RD = weights_RD * length_weights(followed_RD)
            loss = loss + (losses_RD * weights_RD).sum()
            weighed = weighed + weights_RD.sum()
            accepted_RD.append(accepted)
        loss = loss / weighed.clamp(min=1e-6)
        return loss, self._unit_figures(loss, torch.cat(accepted_RD), blocks, pools.p_RDP, unit)

    @torch.no_grad()
    def _unit_figures(
        self,
        loss: Tensor,
        accepted_RD: Tensor,
        blocks: Blocks,
        p_RDP: Tensor,
        unit: Sequence[tuple[Document, Tensor]],
    ) -> dict[str, Tensor]:
        trained_RD = blocks.trained_RD
        # A block is followed as long as its depths are trained on.
        reached_RD = (accepted_RD * trained_RD).cumprod(-1)
        tokens = sum(len(document.tokens_L) for document, _ in unit)
        return {
            "loss": loss.detach(),
            "units": torch.ones(()),
            "accepted_D": (accepted_RD * trained_RD).sum(0),
            "outside_D": ((1 - p_RDP.sum(-1)) * trained_RD).sum(0),
            "positions_D": trained_RD.sum(0),
            "length": reached_RD.sum(),
            "blocks": torch.tensor(len(blocks)),
            "documents": torch.tensor(len(unit)),
            "tokens": torch.tensor(tokens),
        }

    def _figures(
        self, totals: dict[str, Tensor], seconds: float, steps: int
    ) -> dict[str, float | list[float]]:
        """Totals of all processes as the numbers of a report."""
        norm, rate = totals.pop("gradient_norm"), totals.pop("rate")
        zeros = torch.zeros(self.depth)
        parts = {
            name: self.processes.sums(totals.get(name, zero).double())
            for name, zero in (
                *((n, zeros[0]) for n in ("loss", "units", "length", "blocks")),
                *((n, zeros[0]) for n in ("documents", "tokens")),
                *((n, zeros) for n in ("accepted_D", "outside_D", "positions_D")),
            )
        }
        positions_D = parts["positions_D"].clamp(min=1)
        figures: dict[str, float | list[float]] = {
            "loss": float(parts["loss"] / parts["units"].clamp(min=1)),
            "expected_length": 1 + float(parts["length"] / parts["blocks"].clamp(min=1)),
            "acceptance": float(parts["accepted_D"].sum() / positions_D.sum()),
            "mass_outside_pool": float(parts["outside_D"].sum() / positions_D.sum()),
            "gradient_norm": float(norm) / steps,
            "rate": float(rate) / steps,
            "documents_per_second": float(parts["documents"]) / seconds,
            "blocks_per_second": float(parts["blocks"]) / seconds,
            "tokens_per_second": float(parts["tokens"]) / seconds,
            "seconds_per_step": seconds / steps,
            "host_memory_gib": host_memory() / 2**30,
            "skipped_rows": float(len(self.skipped)),
            "acceptance_by_depth": (parts["accepted_D"] / positions_D).tolist(),
        }
        if self.processes.device.type == "cuda":
            figures["device_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return figures

    @torch.no_grad()
    def measure(self) -> dict[str, float | list[float]]:
        """Acceptance on held-out rows, teacher-forced; each process measures its share."""
        rows = self.held_out_rows[: self.recipe.train.measure_documents]
        totals: dict[str, Tensor] = {}
        started = time.perf_counter()
        world = self.processes.world
        # As many passes in each process: where parameters are shards, all gather them together.
        for place in range(self.processes.rank, -(-len(rows) // world) * world, world):
            document = self.data[rows[place]] if place < len(rows) else None
            if not isinstance(document, Document):
                self._nothing()
                continue
            blocks = self.recipe.train.blocks
            anchors = draw_anchors(document.trained_L, self.depth, blocks, rows[place])
            _, figures = self._unit([(document, anchors)])
            for name, value in figures.items():
                totals[name] = totals[name] + value.cpu() if name in totals else value.cpu()
        totals |= {"gradient_norm": torch.zeros(()), "rate": torch.zeros(())}
        figures_now = self._figures(totals, time.perf_counter() - started, 1)
        kept = ("loss", "expected_length", "acceptance", "mass_outside_pool")
        return {name: figures_now[name] for name in (*kept, "acceptance_by_depth")}

    def _nothing(self) -> Tensor:
        """A loss of 0 through all parameters: processes must go through their model in step."""
        depth, width = self.depth, self.target.width
        device = self.processes.device
        queries = self._model(
            torch.zeros(1, width, device=device),
            torch.zeros(1, depth, width, device=device),
            torch.zeros(1, depth, dtype=torch.long, device=device),
            self.target.embedding_Vd,
        )
        loss: Tensor = 0.0 * queries.float().sum()
        return loss

    def _save(self, log: Log) -> None:
        """Checkpoint and adapter of the last whole step.

        Raises:
            SaveError: the disk refused; the last good checkpoint is still there.
        """
        weights, moments = whole(self.adapter.state_dict()), self.optimizers.state_dict()
        if not self.processes.first:
            return
        self.checkpoints.save(
            self.step,
            {
                "recipe": self.recipe.to_dict(),
                "rows": len(self.data),
                "adapter": weights,
                "optimizers": moments,
            },
        )
        from vllm_weaver.train.card import run_record

        directory = Path(self.recipe.output) / "adapter"
        try:
            adapter = WeaverAdapter(self.adapter.config, device="meta")
            adapter.load_state_dict(weights, assign=True)
            save_adapter(adapter, directory, metadata=run_record(self))
        except Exception as error:
            # safetensors has its own type for a full disk.
            raise SaveError(
                f"{directory}: could not be written ({first_line(error)}); the checkpoint of step "
                f"{self.step} is there: free space, then go on with --resume"
            ) from error
        log.say(f"step {self.step}: saved {self.checkpoints.file(self.step)}")

    def _start_from(self, path: str) -> None:
        try:
            given = load_adapter(
                path,
                target_width=self.target.width,
                vocab_size=self.target.vocab,
                depth=self.drafter.facts.depth,
                dtype=torch.float32,
            )
            self.adapter.load_state_dict(given.state_dict())
        except (AdapterError, RuntimeError) as error:
            raise RecipeError(
                f"adapter.start_from: {first_line(error)}: give the sizes of that adapter in "
                "section adapter"
            ) from error

    @torch.no_grad()
    def _check_states(self) -> None:
        """Refuse states that do not give the text: another target's, or of another layer."""
        for row in self.training_rows[:8]:
            document = self.data[row]
            if isinstance(document, Skipped) or len(document.tokens_L) < 16:
                continue
            device, head_Vd = self.processes.device, self.target.head_Vd
            last_Ld = document.last_Ld[:256].to(device, head_Vd.dtype)
            logits_LV = (self.target.final_norm(last_Ld) @ head_Vd.T).float()[:-1]
            wanted_L = document.tokens_L[1:257].to(device)[: len(logits_LV)]
            cost = float(nn.functional.cross_entropy(logits_LV[: len(wanted_L)], wanted_L))
            if cost > math.log(self.target.vocab):
                raise DataError(
                    f"{self.data.file(row)}: the target's head gives this row's text {cost:.1f} "
                    f"nats per token, more than a blind guess ({math.log(self.target.vocab):.1f}): "
                    "the last layer in the files is not this target's output before its final "
                    f"norm; extract layers {self.data.layout.file_layers}"
                )
            return

    def _greeting(self) -> str:
        train = self.recipe.train
        return (
            f"{sum(p.numel() for p in self.adapter.parameters()):,} parameters, "
            f"{len(self.training_rows)} rows, steps {self.step} to {self.plan.steps} of "
            f"{train.units} x {train.documents} rows on {self.processes.world} x "
            f"{self.processes.device.type}"
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first stop signal ends the run after its step, a second one at once."""

        def handle(number: int, frame: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only the main thread may set handlers.
            with contextlib.suppress(ValueError):
                before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def load_frozen(
    recipe: Recipe, device: torch.device
) -> tuple[FrozenTarget, FrozenDrafter, HiddenStateData]:
    """Target, drafter and data of a recipe, checked against each other.

    Raises:
        TrainError: something is missing, damaged, or made for something else.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # The drafter's facts and the data are cheap to read, so their errors come first.
    facts = DrafterFacts.read(recipe.drafter.path)
    target = FrozenTarget.load(recipe.target.path, device, dtype)
    drafter = FrozenDrafter.load(recipe.drafter.path, target, device, dtype)
    layout = Layout(
        width=target.width,
        vocab=target.vocab,
        layer_ids=facts.layer_ids,
        last_layer=target.layers,
    )
    return target, drafter, HiddenStateData(recipe.data, layout)


def train(recipe: Recipe, *, resume: bool = False, device: str | None = None) -> Path:
    """Run a recipe in this process (and its peers, under `torchrun`).

    Returns the adapter's directory. Raises as `Trainer.run`, and TrainError when the output
    already holds a run and `resume` is not set.
    """
    processes = Processes.join(device)
    try:
        found = Checkpoints(recipe.output, recipe.train.keep).steps()
        if found and not resume:
            raise TrainError(
                f"{recipe.output} holds a run at step {found[-1]}: pass --resume to go on, or "
                "choose another output"
            )
        trainer = Trainer(recipe, processes)
        if resume:
            trainer.resume()
        return trainer.run()
    finally:
        processes.leave()
