# SPDX-License-Identifier: Apache-2.0
"""Trains target, drafter and adapter from nothing, one after another, and evaluates them.

    python -m benchmarks.testbed.train --size nano --out models --seed 0
    python -m benchmarks.testbed.train --size nano --out models --target DIR

Stages: data (a process of its own, while kernels compile), target, rollouts (the target's own
text, in another process), drafter, adapter, evaluate. Each stage's files are written when it ends.
With `--target DIR` that target is kept; with `--from DIR` all models that are not trained come
from there. `--against DIR` evaluates the drafter and adapter there too, on the same text.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.adapter import load as load_adapter
from vllm_weaver.adapter import save as save_adapter

from . import drafter as drafting
from . import export, gdn, weaver
from .config import SIZES, SPECIAL_TOKENS, Size
from .evaluate import cross_entropy, evaluate, prompts_of
from .optim import Optimiser, train
from .rollouts import group_rows, held_out_file, read, rows_file, windows
from .states import Rows, TextStates, compiled, pass_rows
from .target import RUNTIME, Target, linear, piece

STAGES = ("target", "drafter", "adapter", "evaluate")
# With `--within`: seconds of the evaluation.
_EVALUATION_S = 48.0
# Of a given prompt: tokens to continue it with, and how often at temperature 1.
_GIVEN_TOKENS, _GIVEN_SAMPLES = 64, 16
# bfloat16 inputs: the two forms differ by a percent or so; a wrong kernel by far more.
_MOST_RULE_ERROR = 0.08


@piece
def _next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(linear(hidden, head).float().flatten(0, 1), labels.flatten())


class Run:
    """One run's directories, clock, record and device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.size: Size = SIZES[arguments.size]
        self.seed: int = arguments.seed
        self.out: Path = arguments.out
        self.archive: Path | None = arguments.archive
        self.work: Path = arguments.work or self.out / "work"
        self.source: Path | None = arguments.source
        self.target: Path | None = arguments.target
        self.against: Path | None = arguments.against
        self.prompts: Path | None = arguments.prompts
        self.within: float | None = arguments.within
        self.stages: list[str] = arguments.stages.split(",")
        if self.target is not None:
            self.stages = [name for name in self.stages if name != "target"]
        elif self.source is not None and "target" not in self.stages:
            self.target = self.source / "target"
        limits = (item.split("=") for item in arguments.limits.split(",") if item)
        self.limits = {name: float(value) for name, value in limits}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.start = time.time()
        self.compile_adapter = self.device == "cuda"
        # Groups of rows that the target and the drafter read compiled.
        self.compiled_passes, self.compiled_drafts = set[int](), set[int]()
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.record: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.testbed.train", *sys.argv[1:]]),
            "size": self.size.name,
            "seed": self.seed,
            "device": torch.cuda.get_device_name()
            if self.device == "cuda"
            else platform.processor(),
            "torch": torch.__version__,
            "config": json.loads(json.dumps(self.size, default=vars)),
            "stages": {},
        }
        self.out.mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.start:6.1f}s] {text}", flush=True)

    def moment(self, text: str) -> None:
        """Log a line that the record keeps, with its second."""
        self.log(text)
        seconds = round(time.time() - self.start, 1)
        self.record.setdefault("moments", []).append([seconds, text])

    def save_record(self) -> None:
        self.record["seconds"] = round(time.time() - self.start, 1)
        text = json.dumps(self.record, indent=1)
        (self.out / "results.json").write_text(text)
        if self.archive:
            self.archive.mkdir(parents=True, exist_ok=True)
            (self.archive / "results.json").write_text(text)

    def finish(self, name: str, record: dict[str, Any], *directories: Path) -> None:
        """Note a stage's record, and pack its files where they survive a later failure."""
        self.record["stages"][name] = record
        self.save_record()
        if self.archive:
            with tarfile.open(self.archive / f"{name}.tar", "w") as tar:
                for directory in directories:
                    tar.add(directory, arcname=directory.name)

    def seconds_of(self, stage: str) -> float | None:
        """The limit of a stage, so that the run ends `within` its time."""
        if self.within is None or stage in self.limits:
            return self.limits.get(stage)
        shares = self.size.shares
        left = self.within - (time.time() - self.start) - shares.ending_s
        if "evaluate" in self.stages:
            left -= _EVALUATION_S
        if stage == "adapter":
            return max(1.0, left)
        left -= shares.drafting_s
        most = max(left - shares.adapter * self.within, shares.drafter_least * left)
        return max(1.0, min(shares.drafter * left, most))

    def model_directory(self, name: str) -> Path:
        """Where a model lies: in this run's output if it trains it, else copied from elsewhere."""
        directory = self.out / name
        given = self.target if name == "target" else self.source and self.source / name
        if name not in self.stages and given and given != directory and not directory.exists():
            shutil.copytree(given, directory)
        return directory


def module(
    name: str, *arguments: object, without_gpu: bool = False, told: bool = False
) -> subprocess.Popen[bytes]:
    """Start a module of this package as a process; `told`, one that is written to."""
    command = [sys.executable, "-m", f"benchmarks.testbed.{name}", *map(str, arguments)]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if without_gpu else {})}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE if told else None)


def start_data(run: Run) -> subprocess.Popen[bytes] | None:
    """Start the corpus process; None where this run's corpus is there already."""
    if (run.work / "corpus.json").exists():
        return None
    arguments = [run.work, "--size", run.size.name]
    if run.target is not None:
        # A target that is there has its tokenizer, and reads no training text.
        arguments += ["--tokenizer", run.target / "tokenizer.json"]
        arguments += ["--max-tokens", run.size.max_prompt_tokens]
    return module("data", *arguments, without_gpu=True)


def load_data(run: Run, process: subprocess.Popen[bytes] | None) -> dict[str, Tensor]:
    if process is not None and process.wait():
        raise RuntimeError("the corpus process failed; its message is above")
    run.record["corpus"] = json.loads((run.work / "corpus.json").read_text())
    shutil.copy(run.work / "corpus.json", run.out / "corpus.json")
    run.finish("corpus", {}, run.work / "heldout", run.work / "tokenizer.json")
    run.log(f"corpus: { {k: v for k, v in run.record['corpus'].items() if k != 'sources'} }")
    return {
        name: torch.from_numpy(np.load(run.work / f"{name}.npy").astype(np.int32)).to(run.device)
        for name in ("train", "heldout")
    }


class Rollouts:
    """The process that writes the target's own text, and what it has written.

    Without a `target` it gets ready beside the target's training, and is told where it lies
    (`tell`) when that has ended.
    """

    def __init__(self, run: Run, target: Path | None) -> None:
        self._run, size = run, run.size
        self._first = [rows_file(run.work, i) for i, g in enumerate(size.groups) if g.rows]
        self._held_out = held_out_file(run.work)
        for file in (*self._first, self._held_out):
            file.unlink(missing_ok=True)
        arguments = [run.work, "--size", size.name, "--target", target or "-", "--seed", run.seed]
        self._process = module("rollouts", *arguments, told=target is None)

    def tell(self, target: Path) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # A process that has died is noticed where its rows are waited for.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{target}\n".encode())
            pipe.close()

    def written(self) -> bool:
        """Whether the drafter's rows are there."""
        return all(file.exists() for file in self._first)

    def _wait(self, files: Sequence[Path]) -> None:
        while not all(file.exists() for file in files):
            ended = self._process.poll() is not None
            # What was written before it ended is there now.
            if ended and not all(file.exists() for file in files):
                raise RuntimeError("the rollouts process failed; its message is above")
            time.sleep(0.2)

    def _rows(self, sets: range, stream: Tensor, seed: int) -> list[Rows]:
        torch.manual_seed(self._run.seed + seed)
        return group_rows(self._run.size, self._run.work, sets, stream, self._run.device)

    def first(self, stream: Tensor) -> list[Rows]:
        """The drafter's rows: the target's own text of each group, then source text."""
        self._wait(self._first)
        rows = self._rows(range(1), stream, 2)
        self._run.moment(f"rows: {[tuple(r.ids.shape) for r in rows]}")
        return rows

    def held_out(self) -> Rows:
        """Rows after held-out source, every other one sampled."""
        self._wait([self._held_out])
        return read(self._held_out, self._run.device)

    def further(self, stream: Tensor) -> list[Rows]:
        """The rows of the further sets; none if the size has no such sets, or they failed."""
        sets = self._run.size.regular.sets
        if self._process.wait():
            # The adapter has rows without them, and a drafter that took minutes.
            self._run.moment("no further rows: the rollouts process failed; its message is above")
            return []
        rows = self._rows(range(1, 1 + sets), stream, 5) if sets else []
        self._run.moment(f"further rows: {[tuple(r.ids.shape) for r in rows]}")
        return rows


def load_prompts(run: Run, tokenizer_file: Path) -> list[Tensor]:
    """The given prompts, each [1, length]; a first line that says where one is from is not read."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    prompts = []
    for path in sorted(run.prompts.glob("*.py")) if run.prompts else []:
        text = path.read_text(encoding="utf-8")
        text = text.split("\n", 1)[1] if text.startswith("# From ") else text
        prompts.append(torch.tensor([tokenizer.encode(text).ids], device=run.device))
    return prompts


def choose_kernels(run: Run) -> None:
    RUNTIME.dtype = run.dtype
    if run.device != "cuda":
        return
    torch.set_float32_matmul_precision("high")
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    if "target" not in run.stages:
        return
    shape = run.size.target
    RUNTIME.compiled = True
    heads = (shape.gdn_key_heads, shape.gdn_value_heads, shape.gdn_head_dim)
    try:
        rule = gdn.fla_kernels()
        errors = gdn.relative_errors(rule, *heads, run.device)
    except Exception as error:  # whatever a foreign kernel raises, the plain form still trains
        run.log(f"delta rule: plain PyTorch, since the Triton form failed: {error!r}")
        return
    run.log(f"delta rule, relative errors of o, dq, dk, dv, dg, dbeta: {errors}")
    run.record["delta_rule_errors"] = errors
    if max(errors) < _MOST_RULE_ERROR:
        RUNTIME.rule = rule


def target_loss(target: Target, ids: Tensor) -> Tensor:
    hidden, _, _ = target(ids[:, :-1])
    return _next_token_loss(hidden, target.head, ids[:, 1:].contiguous())


def warm_up_target(run: Run) -> None:
    """Compile the target's training step on random tokens."""
    size = run.size
    target = Target(size.target).to(run.device)
    shape = (size.train_target.rows, size.sequence + 1)
    for _ in range(2):
        ids = torch.randint(2, size.target.vocab, shape, device=run.device)
        target_loss(target, ids).backward()
    run.moment("warm-up: target compiled")


def warm_up_drafts(run: Run, target: Target, directory: Path, own_text: Rollouts) -> None:
    """Compile the drafter's and the adapter's step on random tokens; fail early if need be."""
    size, shape = run.size, run.size.drafter
    low, high = len(SPECIAL_TOKENS), size.target.vocab
    rows = [group.step_rows for group in size.groups]
    random = [
        Rows(
            torch.randint(low, high, (n, group.length), device=run.device),
            torch.full((n,), shape.block, device=run.device),
        )
        for n, group in zip(rows, size.groups, strict=True)
    ]
    weights: dict[str, Tensor] = {}
    if "drafter" in run.stages:
        states = TextStates(target, random, shape.target_layers, shape.block, run.dtype)
        packed = states.draw(rows)
        try:
            weights = drafting.try_step(size, directory, packed, run.device, run.dtype)
        except Exception:  # whatever a compiler raises, dense masks still train, slowly
            run.log("warm-up: compiled drafter failed, dense attention instead")
            traceback.print_exc()
            drafting.DENSE_ATTENTION = True
            weights = drafting.try_step(size, directory, packed, run.device, run.dtype)
        run.moment("warm-up: drafter compiled")
    if "adapter" in run.stages:
        try:
            with compiled(run.compile_adapter):
                weaver.try_step(size, target, run.device, run.dtype)
        except Exception:  # whatever a compiler raises, the plain step still trains, slowly
            run.log("warm-up: compiled adapter failed, plain steps instead")
            traceback.print_exc()
            run.compile_adapter = False
        run.moment("warm-up: adapter compiled")
    if run.device == "cuda":
        warm_up_passes(run, target, weights, own_text)


def warm_up_passes(
    run: Run, target: Target, weights: dict[str, Tensor], own_text: Rollouts
) -> None:
    """While the first rows are still being written, compile the frozen passes over rows of each
    group: the drafter's, which are over a half of what fresh blocks cost, then the target's. What
    there is no time for, or does not compile, runs as it is."""
    size = run.size

    def draft(group: int) -> None:
        args = (size.drafter, size.target, run.device, run.dtype)
        place = run.model_directory("drafter")
        drafter = (
            drafting.Drafter(weights, *args) if weights else drafting.Drafter.load(place, *args)
        )
        weaver.try_draft(size, target, drafter, group, run.device, run.dtype)

    def read_rows(group: int) -> None:
        shape = size.groups[group]
        rows = pass_rows(shape.rows + shape.text_rows, shape.length)
        ids = torch.randint(2, size.target.vocab, (rows, shape.length), device=run.device)
        with torch.no_grad():
            target(ids, size.drafter.target_layers)

    tasks = [("drafter", draft, run.compiled_drafts)] * ("adapter" in run.stages)
    tasks.append(("target", read_rows, run.compiled_passes))
    for name, task, found in tasks:
        for group in range(len(size.groups)):
            if own_text.written():
                return
            try:
                with compiled(True):
                    task(group)
            except Exception:  # whatever a compiler raises, the plain pass still runs, slowly
                traceback.print_exc()
                return
            found.add(group)
            run.moment(f"warm-up: {name}'s pass over rows of {size.groups[group].length} compiled")


def train_target(run: Run, data: dict[str, Tensor]) -> None:
    size = run.size
    torch.manual_seed(run.seed)
    target = Target(size.target).to(run.device)
    stage = size.train_target
    optimiser = Optimiser(target.named_parameters(), stage, adam=("embed_tokens", "lm_head"))

    def loss_of(progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        return target_loss(target, windows(data["train"], stage.rows, size.sequence + 1)), {}

    record = train(
        "target", stage, optimiser, loss_of, seconds=run.limits.get("target"), log=run.log
    )
    run.moment("target trained")
    record["parameters"] = sum(p.numel() for p in target.parameters())
    record["tokens"] = record["steps"] * stage.rows * size.sequence
    export.save_target(target, run.work / "tokenizer.json", run.out / "target")
    run.finish("target", record, run.out / "target")


def free_memory(run: Run) -> None:
    """Give back what this process holds and does not use: the rollouts share the device with it,
    and the states' place depends on what is free."""
    if run.device == "cuda":
        torch.cuda.empty_cache()


def adapter_record(run: Run, steps: int) -> dict[str, Any]:
    """What the adapter's file says of its training and of the models that it belongs to."""
    size = run.size

    def digest(name: str) -> str:
        weights = run.model_directory(name) / "model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest()

    return {
        "trained_by": f"benchmarks.testbed.train --size {size.name} --seed {run.seed}",
        "steps": steps,
        "blocks_per_step": size.train_adapter.rows,
        "target": {
            "weights_sha256": digest("target"),
            "architecture": "Qwen3_5ForCausalLM",
            "hidden_size": size.target.width,
            "layers": size.target.layers,
            "vocab_size": size.target.vocab,
        },
        "drafter": {
            "weights_sha256": digest("drafter"),
            "architecture": "DFlashDraftModel",
            "block_size": size.drafter.block,
            "target_layer_ids": list(size.drafter.target_layers),
        },
    }


def train_drafts(
    run: Run,
    target: Target,
    directory: Path,
    own_text: Rollouts,
    data: dict[str, Tensor],
) -> None:
    """Drafter, then adapter, on one store of the target's states."""
    size, device = run.size, run.device
    shape = size.drafter
    groups = own_text.first(data["train"])
    free_memory(run)
    states = TextStates(
        target, groups, shape.target_layers, shape.block, run.dtype, run.compiled_passes
    )
    run.moment(f"target's states of {len(states.ids)} tokens, on {states.place}")
    if "drafter" in run.stages:
        torch.manual_seed(run.seed + 3)
        weights, record = drafting.train_drafter(
            size,
            states,
            directory,
            device,
            run.dtype,
            seconds=run.seconds_of("drafter"),
            log=run.log,
        )
        run.moment("drafter trained")
        record["parameters"] = sum(w.numel() for w in weights.values())
        tokenizer = directory / "tokenizer.json"
        export.save_drafter(weights, shape, size.target, tokenizer, run.out / "drafter")
        run.finish("drafter", record, run.out / "drafter")
    if "adapter" in run.stages:
        torch.manual_seed(run.seed + 4)
        drafter = drafting.Drafter.load(
            run.model_directory("drafter"), shape, size.target, device, run.dtype
        )
        draft = weaver.Draft(size, target, drafter, states, compiled=run.compiled_drafts)
        if not size.regular.uses:
            draft.finish()
        # A device works on after its host: else its time would be another line's.
        draft.wait()
        run.moment(f"drafter's states of {draft.drafted} blocks")
        held_out = weaver.held_out_blocks(size, target, drafter, own_text.held_out(), run.dtype)
        run.moment("blocks of held-out text")
        further = own_text.further(data["train"])
        draft.take_turns_with(further)
        regular = size.regular if further else dataclasses.replace(size.regular, sets=0)
        torch.manual_seed(run.seed + 4)
        with compiled(run.compile_adapter):
            adapter, record = weaver.train_adapter(
                size,
                target,
                draft,
                device,
                seconds=run.seconds_of("adapter"),
                log=run.log,
                regular=regular,
                held_out=held_out,
            )
        metadata = adapter_record(run, record["steps"])
        save_adapter(adapter, run.out / "adapter", dtype=torch.bfloat16, metadata=metadata)
        run.finish("adapter", record, run.out / "adapter")


def evaluate_models(run: Run, target: Target, directory: Path, heldout: Tensor) -> None:
    size = run.size
    RUNTIME.dtype = torch.float32
    RUNTIME.rule = gdn.plain
    torch.set_float32_matmul_precision("highest")
    places = {"trained": run.out}
    if run.against is not None:
        places["earlier"] = run.against
    for name in ("drafter", "adapter"):
        run.model_directory(name)
    models = {
        name: (
            drafting.Drafter.load(
                place / "drafter", size.drafter, size.target, run.device, torch.float32
            ),
            load_adapter(place / "adapter", dtype=torch.float32, device=run.device),
        )
        for name, place in places.items()
    }
    started = time.time()
    rows = 64 if size.eval_prompts > 16 else 16
    facts = {
        "held_out_ce": round(cross_entropy(target, heldout, size.sequence, rows), 4),
        "context": size.eval_context,
    }
    windows_of = [prompts_of(heldout, size)]
    held_out = evaluate(
        size, target, models, windows_of, size.eval_tokens, seed=run.seed, log=run.log
    )
    record = run.record["evaluation"] = {k: {**facts, **v} for k, v in held_out.items()}
    run.save_record()
    given = load_prompts(run, directory / "tokenizer.json")
    if given:
        run.log(f"given prompts: {len(given)}")
        found = evaluate(
            size,
            target,
            models,
            given,
            _GIVEN_TOKENS,
            samples=_GIVEN_SAMPLES,
            seed=run.seed,
            log=run.log,
        )
        for name, figures in found.items():
            record[name]["given_prompts"] = figures
    run.record["stages"]["evaluate"] = {"seconds": round(time.time() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="corpus and scratch (default: OUT/work)")
    parser.add_argument("--archive", type=Path, help="also pack each stage's files here")
    parser.add_argument("--target", type=Path, help="keep this target")
    parser.add_argument("--from", dest="source", type=Path, help="models of an earlier run")
    parser.add_argument("--against", type=Path, help="drafter and adapter to evaluate as well")
    parser.add_argument("--prompts", type=Path, help="directory of *.py to evaluate on as well")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limits",
        default="",
        help="most seconds of a stage, e.g. target=150,drafter=90; it is shortened to fit",
    )
    parser.add_argument(
        "--within", type=float, help="seconds of the run; drafter and adapter are shortened to fit"
    )
    arguments = parser.parse_args()
    run = Run(arguments)
    size = run.size
    drafts = bool({"drafter", "adapter"} & set(run.stages))
    data_process = start_data(run)
    own_text = None
    if drafts and run.target is not None:
        own_text = Rollouts(run, run.target)
    choose_kernels(run)
    if "target" in run.stages:
        warm_up_target(run)
        if drafts:
            own_text = Rollouts(run, None)
        data = load_data(run, data_process)
        train_target(run, data)
    directory = run.model_directory("target")
    if drafts or "evaluate" in run.stages:
        # From here on the target is the exported one, rounded to bfloat16.
        target = export.load_target(directory, size.target, run.device).requires_grad_(False)
        with compiled(False):
            if drafts:
                if own_text is None:
                    own_text = Rollouts(run, directory)
                elif "target" in run.stages:
                    free_memory(run)
                    own_text.tell(directory)
                warm_up_drafts(run, target, directory, own_text)
            if "target" not in run.stages:
                data = load_data(run, data_process)
            if own_text is not None:
                train_drafts(run, target, directory, own_text, data)
            if "evaluate" in run.stages:
                evaluate_models(run, target, directory, data["heldout"])
    run.save_record()
    run.log("done")


if __name__ == "__main__":
    main()
