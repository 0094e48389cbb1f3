# SPDX-License-Identifier: Apache-2.0
"""Tokens per pass of a testbed's models under many settings, and of adapters trained otherwise.

    python -m benchmarks.testbed.ablate RUN --size bench --parts main,arms,variants --minutes 8

RUN is the directory of a `benchmarks.testbed.train` run (its `work` has corpus and rollouts).
Parts: `main` has all budgets, temperatures and prompt sets with the trained adapter; `arms` changes
the tree builder one setting at a time; `variants` trains short runs on the same frozen states, one
change each. Results are written after each part and variant; what does not fit into the time is
left out and listed. Intervals are 95 %, prompts resampled; ratios are paired.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter
from vllm_weaver.adapter import load as load_adapter

from . import arms, export, gdn, weaver
from .arms import BUDGETS, Arm, Case
from .config import SIZES, Size, Stage
from .drafter import Drafter
from .evaluate import Walk, cross_entropy, prompts_of, ratio
from .evaluate import _interval as interval
from .pack import HUMAN_EVAL
from .rollouts import windows
from .states import Rows, TextStates
from .target import RUNTIME

PARTS = ("main", "arms", "variants")
_LEAST_PROMPT, _ROUND_TO = 32, 16
_HUMAN_EVAL_TOKENS = 64

VARIANTS = {
    "base": weaver.Variant(),
    "v1": weaver.Variant(version="v1"),
    "2 layers": weaver.Variant(layers=2),
    "half the MLP": weaver.Variant(mlp=-2),
    "loss kl": weaver.Variant(loss="kl"),
    "loss tv": weaver.Variant(loss="tv"),
    "loss lk_mix": weaver.Variant(loss="lk_mix"),
    "loss lk_log": weaver.Variant(loss="lk_log"),
    "loss ce": weaver.Variant(loss="ce"),
    "weights flat": weaver.Variant(weigh="flat"),
    "weights by path, B=63": weaver.Variant(weigh="path"),
    "weights by path, B=15": weaver.Variant(weigh="path", path_budget=15),
    "weights by length": weaver.Variant(weigh="length"),
    "lk_mix, by path": weaver.Variant(loss="lk_mix", weigh="path"),
}


# Rounds after the first, lines of a round, nodes of a line.
SPINES = ((2, 8, 2), (4, 8, 1), (4, 8, 2), (4, 4, 4), (4, 8, 4), (5, 8, 2), (6, 8, 1), (6, 4, 4),
          (6, 8, 2))  # fmt: skip


def main_arms(temperature: int) -> dict[str, Arm]:
    """Every budget; at temperature 1 also with the target's own noise."""
    found = {}
    for shared in (False, True)[: 1 + temperature]:
        suffix = ", shared noise" if shared else ""
        found[f"chain{suffix}"] = Arm("chain", shared=shared)
        found[f"weaver chain{suffix}"] = Arm("weaver_chain", shared=shared)
        for budget in BUDGETS:
            for kind in ("ddtree", "weaver"):
                found[f"{kind} B={budget}{suffix}"] = Arm(kind, budget, shared=shared)
    return found


def setting_arms(temperature: int, most_pool: int) -> dict[str, Arm]:
    """B = 63 with one setting changed."""
    base = Arm("weaver")

    def changed(**settings: Any) -> Arm:
        return dataclasses.replace(base, **settings)

    found = {"base": base, "ddtree": Arm("ddtree"), "chain": Arm("chain")}
    found |= {f"children {n}": changed(children=n) for n in (2, 4, 16, 32)}
    found |= {f"width {n}": changed(width=n) for n in (1, 2, 8, 16)}
    found |= {f"pool {n}": changed(pool=n) for n in (16, 32, 64, 128, 256, 512) if n <= most_pool}
    found |= {f"heat {h}": changed(heat=h) for h in (0.4, 0.55, 0.7, 0.85, 1.2)}
    found |= {f"ddtree, heat {h}": Arm("ddtree", heat=h) for h in (0.55, 0.7, 0.85, 1.2)}
    found["grow and prune"] = changed(kind="grown")
    found["grow and prune, 8 rounds of 16"] = changed(kind="grown", rounds=8, width=16)
    found |= {
        f"spine, {n} rounds of {w} x {line}": changed(kind="spine", rounds=n, width=w, line=line)
        for n, w, line in SPINES
    }
    if temperature:
        found["shared noise"] = changed(shared=True)
        found |= {
            f"shared noise, spine, {n} rounds of 8 x 2": changed(
                kind="spine", rounds=n, shared=True
            )
            for n in (4, 5, 6)
        }
        found |= {
            f"shared noise, heat {h}": changed(shared=True, heat=h) for h in (0.4, 0.55, 0.7, 0.85)
        }
        found["shared noise, children 16"] = changed(shared=True, children=16)
        found["ddtree, shared noise"] = Arm("ddtree", shared=True)
    return found


def variant_arms(temperature: int) -> dict[str, Arm]:
    found = {"weaver B=15": Arm("weaver", 15), "weaver B=63": Arm("weaver")}
    if temperature:
        found["weaver B=63, shared noise"] = Arm("weaver", shared=True)
    return found


class Ablation:
    """One run: models, cases, clock, record."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.started = time.time()
        self.deadline = self.started + 60 * given.minutes
        self.size: Size = SIZES[given.size]
        self.run: Path = given.run
        self.work: Path = given.work or given.run / "work"
        self.out: Path = given.out or given.run / f"ablations-{given.size}.json"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.seed: int = given.seed
        RUNTIME.dtype, RUNTIME.rule, RUNTIME.compiled = torch.float32, gdn.plain, False
        self.target = export.load_target(self.run / "target", self.size.target, self.device)
        self.target.requires_grad_(False)
        self.drafter = self._drafter(torch.float32)
        self.adapter = load_adapter(self.run / "adapter", dtype=torch.float32, device=self.device)
        name = torch.cuda.get_device_name() if self.device == "cuda" else platform.processor()
        self.record: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.testbed.ablate", *sys.argv[1:]]),
            "size": self.size.name,
            "seed": self.seed,
            "device": name,
            "torch": torch.__version__,
            "left_out": [],
        }
        self.cases: dict[str, Case] = {}

    def _drafter(self, dtype: torch.dtype) -> Drafter:
        size = self.size
        return Drafter.load(self.run / "drafter", size.drafter, size.target, self.device, dtype)

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.started:6.1f}s] {text}", flush=True)

    def late(self, what: str, needed: float) -> bool:
        """Whether `needed` seconds are no longer there for `what`, which is then left out."""
        if time.time() + needed < self.deadline:
            return False
        self.record["left_out"].append(what)
        self.log(f"left out for want of time: {what}")
        return True

    def save(self) -> None:
        self.record["seconds"] = round(time.time() - self.started, 1)
        partial = self.out.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(self.record, indent=1) + "\n")
        partial.replace(self.out)

    def prompt_sets(self) -> dict[str, tuple[list[Tensor], int]]:
        """Prompts, in groups of equal length, and how many tokens to write after them."""
        size = self.size
        stream = torch.from_numpy(np.load(self.work / "heldout.npy").astype(np.int32))
        stream = stream.to(self.device)
        self.record["held_out_ce"] = round(
            cross_entropy(self.target, stream, size.sequence, 64 if size.eval_prompts > 16 else 16),
            4,
        )
        found = {"held-out": ([prompts_of(stream, size)], size.eval_tokens)}
        file = self.work / HUMAN_EVAL
        if file.exists():
            tokenizer = Tokenizer.from_file(str(self.work / "tokenizer.json"))
            prompts = [tokenizer.encode(p).ids for p in json.loads(file.read_text())]
            if size.eval_prompts <= 16:
                prompts = prompts[: size.eval_prompts]
            groups = by_length(prompts, min(512, size.target.max_positions // 2))
            tokens = min(_HUMAN_EVAL_TOKENS, size.eval_tokens)
            found["HumanEval"] = ([torch.tensor(g, device=self.device) for g in groups], tokens)
        else:
            self.record["left_out"].append("HumanEval: the corpus has no such prompts")
        return found

    def make_cases(self, names: Sequence[str]) -> None:
        for name, (prompts, tokens) in self.prompt_sets().items():
            for temperature in (0, 1):
                key = f"{name}, T={temperature}"
                if not any(key.startswith(n) for n in names) or self.late(key, 20):
                    continue
                block = self.size.drafter.block
                texts = arms.write(self.target, prompts, tokens, block, temperature, self.seed)
                self.cases[key] = arms.prepare(self.size, self.target, self.drafter, texts)
                self.log(f"{key}: {sum(len(t.ids) for t, _ in texts)} texts of {tokens} tokens")

    def measure(
        self, case: Case, chosen: dict[str, Arm], adapter: WeaverAdapter
    ) -> dict[str, Walk]:
        tables = adapter.precompute(self.target.embedding, self.target.head)
        return arms.run(case, chosen, self.size.drafter.depth, adapter, tables)

    def main_part(self) -> None:
        record = self.record["main"] = {}
        for name, case in self.cases.items():
            if self.late(f"main, {name}", 10):
                continue
            walks = self.measure(case, main_arms(int(name[-1])), self.adapter)
            ratios = {}
            for arm in walks:
                if not arm.startswith("weaver B"):
                    continue
                noise = ", shared noise" if arm.endswith("noise") else ""
                others = {f"chain{noise}", "chain", arm.replace("weaver", "ddtree")}
                others |= {arm.removesuffix(noise)} if noise else set()
                ratios |= {f"{arm} / {o}": ratio(walks[arm], walks[o]) for o in sorted(others)}
            record[name] = {
                "prompts": len(next(iter(walks.values()))[0]),
                "arms": figures(walks),
                "ratios": ratios,
                "per_depth": {
                    **case.per_depth,
                    **dict(arms.overlaps(case, self.target, self.adapter)),
                },
            }
            self.log(f"{name}: { {k: v['value'] for k, v in record[name]['arms'].items()} }")
            self.save()

    def arms_part(self) -> None:
        record = self.record["arms"] = {}
        for name, case in self.cases.items():
            if self.late(f"arms, {name}", 20):
                continue
            chosen = setting_arms(int(name[-1]), min(512, self.size.target.vocab))
            walks = self.measure(case, chosen, self.adapter)
            record[name] = {
                "arms": figures(walks),
                "ratios_to_base": {k: ratio(w, walks["base"]) for k, w in walks.items()},
            }
            self.log(f"{name}: { {k: v['value'] for k, v in record[name]['arms'].items()} }")
            self.save()

    def variants_part(self, steps: int, rows: int, share: float, seconds: float) -> None:
        record = self.record["variants"] = {"steps": steps, "rows": rows, "found": {}}
        if self.late("variants", 60):
            return
        blocks = self._blocks(share)
        record["blocks"] = len(blocks.anchors)
        base: dict[str, dict[str, Walk]] = {}
        longest = seconds
        for name, variant in VARIANTS.items():
            if self.late(f"variant {name}", 1.5 * longest):
                continue
            began = time.time()
            if variant.mlp is not None and variant.mlp < 0:
                mlp = self.size.adapter.mlp // -variant.mlp
                variant = dataclasses.replace(variant, mlp=mlp)
            stage = dataclasses.replace(self.size.train_adapter, steps=steps, rows=rows)
            adapter, trained = self._train(variant, stage, blocks, name, seconds)
            found: dict[str, Any] = {
                "variant": dataclasses.asdict(variant),
                "parameters": trained["parameters"],
                "steps": trained["steps"],
                "seconds": trained["seconds"],
            }
            for key, case in self.cases.items():
                walks = self.measure(case, variant_arms(int(key[-1])), adapter)
                base.setdefault(key, walks)
                found[key] = {
                    "arms": figures(walks),
                    "ratios_to_base": {k: ratio(w, base[key][k]) for k, w in walks.items()},
                    **dict(arms.overlaps(case, self.target, adapter)),
                }
            record["found"][name] = found
            values = {k: found[k]["arms"]["weaver B=63"]["value"] for k in self.cases}
            self.log(f"variant {name}: {values}")
            self.save()
            longest = max(longest, time.time() - began)

    def _train(
        self,
        variant: weaver.Variant,
        stage: Stage,
        blocks: weaver.Blocks,
        name: str,
        seconds: float,
    ) -> tuple[WeaverAdapter, dict[str, Any]]:
        torch.manual_seed(self.seed + 4)
        adapter, trained = weaver.train_adapter(
            self.size,
            self.target,
            blocks,
            self.device,
            seconds=None if self.device == "cpu" else 3 * seconds,
            log=self.log,
            variant=variant,
            stage=stage,
            name=name,
        )
        return adapter.eval().requires_grad_(False), trained

    @torch.no_grad()
    def _blocks(self, share: float) -> weaver.Blocks:
        """The frozen states of a share of the run's rows, in the training's own precision."""
        size = self.size
        stream = torch.from_numpy(np.load(self.work / "train.npy").astype(np.int32))
        stream = stream.to(self.device)
        torch.manual_seed(self.seed + 2)
        groups = []
        for i, group in enumerate(size.groups):
            count = max(1, round(group.text_rows * share)) if group.text_rows else 0
            ids = windows(stream, count, group.length).int()
            start = torch.full((count,), size.drafter.block, device=self.device)
            if group.rows:
                with np.load(self.work / f"rollouts{i}.npz") as own:
                    given, begin = (
                        torch.from_numpy(own[k].astype(np.int32)) for k in ("ids", "start")
                    )
                # Rows of one prefix stand together, so a share is taken evenly.
                pick = torch.arange(0, len(given), max(1, round(1 / share)))
                ids = torch.cat([given[pick].to(self.device), ids])
                start = torch.cat([begin[pick].to(self.device), start])
            groups.append(Rows(ids, start))
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        before, RUNTIME.dtype = RUNTIME.dtype, dtype
        try:
            layers, block = size.drafter.target_layers, size.drafter.block
            states = TextStates(self.target, groups, layers, block, dtype)
            blocks = weaver.draft_blocks(size, self.target, self._drafter(dtype), states)
        finally:
            RUNTIME.dtype = before
        self.log(f"states of {len(states.ids)} tokens and {len(blocks.anchors)} blocks")
        return blocks


def by_length(prompts: Sequence[list[int]], most: int) -> list[list[list[int]]]:
    """Prompts of equal length together; a few first tokens are cut so that there are few lengths.
    Shorter ones than a first block are left out."""
    groups: dict[int, list[list[int]]] = {}
    for ids in prompts:
        length = min(most, len(ids) // _ROUND_TO * _ROUND_TO)
        if length >= _LEAST_PROMPT:
            groups.setdefault(length, []).append(ids[-length:])
    return [groups[length] for length in sorted(groups)]


def figures(walks: dict[str, Walk]) -> dict[str, dict[str, float]]:
    """Tokens per pass of each arm, with intervals."""
    return {name: interval(*found) for name, found in walks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="bench")
    parser.add_argument("--work", type=Path, help="corpus and rollouts (default: RUN/work)")
    parser.add_argument("--out", type=Path, help="results (default: RUN/ablations-SIZE.json)")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="of a variant's training")
    parser.add_argument("--rows", type=int, default=1024, help="blocks in a step of it")
    parser.add_argument("--share", type=float, default=0.5, help="of the run's rows, for variants")
    given = parser.parse_args()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest")
    ablation = Ablation(given)
    parts = given.parts.split(",")
    ablation.make_cases(("held-out", "HumanEval") if "main" in parts else ("held-out",))
    for name in PARTS:
        if name not in parts:
            continue
        if name == "main":
            ablation.main_part()
        elif name == "arms":
            ablation.arms_part()
        else:
            ablation.cases = {k: c for k, c in ablation.cases.items() if k.startswith("held-out")}
            ablation.variants_part(given.steps, given.rows, given.share, seconds=15.0)
    ablation.save()
    ablation.log(f"wrote {ablation.out}")


if __name__ == "__main__":
    main()
