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
from collections.abc import Iterator
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
from .rollouts import load, windows
from .states import Rows, TextStates
from .target import RUNTIME, Target, linear, piece

STAGES = ("target", "drafter", "adapter", "evaluate")
# With `--within`: seconds that later stages need, evaluation among them, and the drafter's share of
# what is left.
_AFTER_DRAFTER_S, _AFTER_ADAPTER_S, _EVALUATION_S = 75.0, 55.0, 48.0
_DRAFTER_SHARE = 0.6
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
        left = self.within - (time.time() - self.start)
        if "evaluate" not in self.stages:
            left += _EVALUATION_S
        if stage == "adapter":
            return max(1.0, left - _AFTER_ADAPTER_S)
        return max(1.0, (left - _AFTER_DRAFTER_S) * _DRAFTER_SHARE)

    def model_directory(self, name: str) -> Path:
        """Where a model lies: in this run's output if it trains it, else copied from elsewhere."""
        directory = self.out / name
        given = self.target if name == "target" else self.source and self.source / name
        if name not in self.stages and given and given != directory and not directory.exists():
            shutil.copytree(given, directory)
        return directory


def module(name: str, *arguments: object, without_gpu: bool = False) -> subprocess.Popen[bytes]:
    """Start a module of this package as a process."""
    command = [sys.executable, "-m", f"benchmarks.testbed.{name}", *map(str, arguments)]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if without_gpu else {})}
    return subprocess.Popen(command, env=environment)


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


def start_rollouts(run: Run, target: Path) -> subprocess.Popen[bytes]:
    return module(
        "rollouts", run.work, "--size", run.size.name, "--target", target, "--seed", run.seed
    )


def load_rollouts(
    run: Run, process: subprocess.Popen[bytes], stream: Tensor
) -> tuple[list[Rows], list[Rows]]:
    """The target's own text of each group, with the group's rows of source text after it; and the
    rows of the further sets."""
    if process.wait():
        raise RuntimeError("the rollouts process failed; its message is above")
    torch.manual_seed(run.seed + 2)
    found: tuple[list[Rows], list[Rows]] = ([], [])
    for i, group in enumerate(run.size.groups):
        own = None
        if group.rows:
            own = load(run.work / f"rollouts{i}.npz", group, 1.0, run.device)
        for which, sets in enumerate((1, run.size.regular.sets)):
            text = windows(stream, sets * group.text_rows, group.length).int()
            start = torch.full((len(text),), run.size.drafter.block, device=run.device)
            rows = Rows(text, start.int())
            if own is not None:
                rows.ids = torch.cat([own[which].ids, rows.ids])
                rows.start = torch.cat([own[which].start, rows.start])
            found[which].append(rows)
        shapes = [tuple(rows[-1].ids.shape) for rows in found]
        run.log(f"rows: {shapes[0]}, of them source text: {group.text_rows}; further: {shapes[1]}")
    return found


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
    run.log("warm-up: target compiled")


def warm_up_drafts(run: Run, target: Target, directory: Path) -> None:
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
    if "drafter" in run.stages:
        states = TextStates(target, random, shape.target_layers, shape.block, run.dtype)
        packed = states.draw(rows)
        try:
            drafting.try_step(size, directory, packed, run.device, run.dtype)
        except Exception:  # whatever a compiler raises, dense masks still train, slowly
            run.log("warm-up: compiled drafter failed, dense attention instead")
            traceback.print_exc()
            drafting.DENSE_ATTENTION = True
            drafting.try_step(size, directory, packed, run.device, run.dtype)
        run.log("warm-up: drafter compiled")
    if "adapter" in run.stages:
        try:
            with compiled(run.compile_adapter):
                weaver.try_step(size, target, run.device, run.dtype)
        except Exception:  # whatever a compiler raises, the plain step still trains, slowly
            run.log("warm-up: compiled adapter failed, plain steps instead")
            traceback.print_exc()
            run.compile_adapter = False
        run.log("warm-up: adapter compiled")


@contextlib.contextmanager
def compiled(value: bool) -> Iterator[None]:
    """Within this context, pieces run compiled or not. Not: many shapes, no gradients."""
    before, RUNTIME.compiled = RUNTIME.compiled, value
    try:
        yield
    finally:
        RUNTIME.compiled = before


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
    record["parameters"] = sum(p.numel() for p in target.parameters())
    record["tokens"] = record["steps"] * stage.rows * size.sequence
    export.save_target(target, run.work / "tokenizer.json", run.out / "target")
    run.finish("target", record, run.out / "target")


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
    process: subprocess.Popen[bytes],
    data: dict[str, Tensor],
) -> None:
    """Drafter, then adapter, on one store of the target's states."""
    size, device = run.size, run.device
    shape = size.drafter
    groups, further = load_rollouts(run, process, data["train"])
    states = TextStates(target, groups, shape.target_layers, shape.block, run.dtype)
    run.log(f"target's states of {len(states.ids)} tokens, on {states.place}")
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
        record["parameters"] = sum(w.numel() for w in weights.values())
        tokenizer = directory / "tokenizer.json"
        export.save_drafter(weights, shape, size.target, tokenizer, run.out / "drafter")
        run.finish("drafter", record, run.out / "drafter")
    if "adapter" in run.stages:
        torch.manual_seed(run.seed + 4)
        drafter = drafting.Drafter.load(
            run.model_directory("drafter"), shape, size.target, device, run.dtype
        )
        draft = weaver.Draft(size, target, drafter, states, further=further)
        run.log(f"drafter's states of {draft.drafted} blocks")
        if not size.regular.uses:
            draft.finish()
        held_out = weaver.held_out_blocks(size, target, drafter, data["heldout"], run.dtype)
        run.log("blocks of held-out text")
        with compiled(run.compile_adapter):
            adapter, record = weaver.train_adapter(
                size,
                target,
                draft,
                device,
                seconds=run.seconds_of("adapter"),
                log=run.log,
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
        own_text = start_rollouts(run, run.target)
    choose_kernels(run)
    if "target" in run.stages:
        warm_up_target(run)
        data = load_data(run, data_process)
        train_target(run, data)
    directory = run.model_directory("target")
    if drafts or "evaluate" in run.stages:
        # From here on the target is the exported one, rounded to bfloat16.
        target = export.load_target(directory, size.target, run.device).requires_grad_(False)
        with compiled(False):
            if drafts:
                own_text = own_text or start_rollouts(run, directory)
                warm_up_drafts(run, target, directory)
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
