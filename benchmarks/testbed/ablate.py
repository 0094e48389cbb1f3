# SPDX-License-Identifier: Apache-2.0
"""Tokens per pass of a testbed's models under many settings, and of adapters trained otherwise.

    python -m benchmarks.testbed.ablate RUN --size bench --parts main,arms,variants --minutes 8

RUN is the directory of a `benchmarks.testbed.train` run (its `work` has corpus and rollouts).
Parts: `main` has all budgets, temperatures and prompt sets with the trained adapter; `arms` changes
the tree builder one setting at a time; `variants` trains short runs on the same frozen states, one
change each, and long ones that differ in what keeps the adapter from learning its blocks by heart,
all of the same seconds (`--variants ce,path,fresh` chooses by words of the names, in this order).
Results are written after each part and variant; what does not fit into the time is left out and
listed. Intervals are 95 %, prompts resampled; ratios are paired.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import sys
import time
import traceback
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
from .config import SIZES, Regular, Size, Stage
from .drafter import Drafter
from .evaluate import Walk, cross_entropy, prompts_of, ratio
from .evaluate import _interval as interval
from .pack import HUMAN_EVAL
from .rollouts import group_rows
from .states import TextStates
from .target import RUNTIME

PARTS = ("main", "arms", "variants")
# A short variant's seconds: what is expected of the first one.
_SHORT_S = 15.0
# Seconds that compiling a long variant's step is expected to take.
_COMPILE_S = 30.0
_PLAIN = Regular()
_LEAST_PROMPT, _ROUND_TO = 32, 16
_HUMAN_EVAL_TOKENS = 64

VARIANTS = {
    "base": weaver.Variant(),
    "loss ce": weaver.Variant(loss="ce"),
    "weights flat": weaver.Variant(weigh="flat"),
    "weights by path, B=63": weaver.Variant(weigh="path"),
    "weights by length": weaver.Variant(weigh="length"),
    "v1": weaver.Variant(version="v1"),
    "2 layers": weaver.Variant(layers=2),
    "half the MLP": weaver.Variant(mlp=-2),
    "loss kl": weaver.Variant(loss="kl"),
    "loss tv": weaver.Variant(loss="tv"),
    "loss lk_mix": weaver.Variant(loss="lk_mix"),
    "loss lk_log": weaver.Variant(loss="lk_log"),
    "weights by path, B=15": weaver.Variant(weigh="path", path_budget=15),
    "lk_mix, by path": weaver.Variant(loss="lk_mix", weigh="path"),
}

# Trained for as long as each other, many passes over the kept blocks.
LONG = {
    "kept blocks": Regular(),
    "fresh rows, 8 uses": Regular(uses=8, sets=1),
    "fresh anchors, 8 uses": Regular(uses=8),
    "fresh rows, 8 uses, decay 0.1": Regular(uses=8, sets=1, muon_decay=0.1),
    "fresh rows, 4 uses": Regular(uses=4, sets=1),
    "kept, dropout 0.1": Regular(dropout=0.1),
    "kept, dropout 0.3": Regular(dropout=0.3),
    "kept, averaged weights": Regular(average=0.998),
    "kept, decay 0.1": Regular(muon_decay=0.1),
}


def choose(words: str) -> list[str]:
    """Names of `VARIANTS` and `LONG` that have one of the words, a word's names after those of
    the words before it; all names if there are no words. What others are compared with comes
    first of its kind. Raises ValueError for a word that no name has."""
    names = [*VARIANTS, *LONG]
    if not words:
        return names
    found: list[str] = []
    for word in words.split(","):
        having = [n for n in names if re.search(rf"\b{re.escape(word.strip())}\b", n)]
        if not having:
            raise ValueError(f"no variant is named {word!r}: the names are {'; '.join(names)}")
        for name in having:
            first = _base(name)
            found += [n for n in dict.fromkeys((first, name)) if n not in found]
    return found


def _base(name: str) -> str:
    """The variant that one is compared with."""
    return next(iter(LONG if name in LONG else VARIANTS))


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
    if temperature:
        found["shared noise"] = changed(shared=True)
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
        # Whether steps compile, and the shares of dropout that one was compiled for.
        self.compiles, self.compiled_for = True, set[float]()

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

    def variants_part(
        self, names: Sequence[str], steps: int, rows: int, share: float, long_seconds: float
    ) -> None:
        record = self.record["variants"] = {
            "steps": steps,
            "rows": rows,
            "long_rows": self.size.train_adapter.rows,
            "long_seconds": long_seconds,
            "found": {},
        }
        if self.late("variants", 60):
            return
        draft = self._draft(share)
        record["blocks"] = draft.drafted
        base: dict[str, dict[str, Walk]] = {}
        # Seconds of the longest so far: of the short ones, and of the long ones beside training.
        longest, beside = _SHORT_S, 15.0
        for name in names:
            needed = 1.5 * longest
            regular = LONG.get(name, _PLAIN)
            if name in LONG:
                needed = long_seconds + beside + self._compile_seconds(regular)
            if self.late(f"variant {name}", needed):
                continue
            variant = VARIANTS.get(name, weaver.BASE)
            if variant.mlp is not None and variant.mlp < 0:
                mlp = self.size.adapter.mlp // -variant.mlp
                variant = dataclasses.replace(variant, mlp=mlp)
            if name in LONG:
                self._compile(regular)
            began = time.time()
            if name in LONG:
                # As the size's own training.
                stage, before = self.size.train_adapter, RUNTIME.compiled
                RUNTIME.compiled = self.device == "cuda" and self.compiles
                try:
                    adapter, trained = self._train(
                        variant, stage, draft, name, long_seconds, regular
                    )
                finally:
                    RUNTIME.compiled = before
            else:
                stage = dataclasses.replace(self.size.train_adapter, steps=steps, rows=rows)
                most = None if self.device == "cpu" else 3 * _SHORT_S
                adapter, trained = self._train(variant, stage, draft, name, most)
            found: dict[str, Any] = {
                "variant": dataclasses.asdict(variant),
                "regular": trained["regular"],
                "compared_with": _base(name),
                "parameters": trained["parameters"],
                "steps": trained["steps"],
                "seconds": trained["seconds"],
                "drafted": trained["drafted"],
                "training_overlap": trained["history"][-1]["overlap"],
            }
            for key, case in self.cases.items():
                walks = self.measure(case, variant_arms(int(key[-1])), adapter)
                with_base = base.setdefault(f"{_base(name)}, {key}", walks)
                found[key] = {
                    "arms": figures(walks),
                    "ratios_to_base": {k: ratio(w, with_base[k]) for k, w in walks.items()},
                    **dict(arms.overlaps(case, self.target, adapter)),
                }
            record["found"][name] = found
            values = {k: found[k]["arms"]["weaver B=63"]["value"] for k in self.cases}
            self.log(f"variant {name}: {values}")
            self.save()
            spent = time.time() - began
            if name in LONG:
                beside = max(beside, spent - trained["seconds"])
            else:
                longest = max(longest, spent)

    def _train(
        self,
        variant: weaver.Variant,
        stage: Stage,
        draft: weaver.Draft,
        name: str,
        seconds: float | None,
        regular: Regular = _PLAIN,
    ) -> tuple[WeaverAdapter, dict[str, Any]]:
        torch.manual_seed(self.seed + 4)
        adapter, trained = weaver.train_adapter(
            self.size,
            self.target,
            draft,
            self.device,
            seconds=seconds,
            log=self.log,
            variant=variant,
            stage=stage,
            regular=regular,
            name=name,
        )
        return adapter.eval().requires_grad_(False), trained

    def _compile_seconds(self, regular: Regular) -> float:
        """Seconds that `_compile` may take."""
        needed = self.device == "cuda" and self.compiles
        return _COMPILE_S if needed and regular.dropout not in self.compiled_for else 0.0

    def _compile(self, regular: Regular) -> None:
        """Compile the size's own step on a GPU, so that no training is timed with it."""
        if not self._compile_seconds(regular):
            return
        RUNTIME.compiled = True
        try:
            size = dataclasses.replace(self.size, regular=regular)
            weaver.try_step(size, self.target, self.device, torch.bfloat16)
            self.compiled_for.add(regular.dropout)
        except Exception:  # whatever a compiler raises, the plain step still trains, slowly
            traceback.print_exc()
            self.compiles = False
        finally:
            RUNTIME.compiled = False

    @torch.no_grad()
    def _draft(self, share: float) -> weaver.Draft:
        """The frozen states of a share of the run's rows, in the training's own precision."""
        size = self.size
        stream = torch.from_numpy(np.load(self.work / "train.npy").astype(np.int32))
        stream = stream.to(self.device)
        torch.manual_seed(self.seed + 2)
        groups = group_rows(size, self.work, range(1), stream, self.device, share)
        more = range(1, 1 + size.regular.sets)
        further = group_rows(size, self.work, more, stream, self.device, share) if more else []
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        before, RUNTIME.dtype = RUNTIME.dtype, dtype
        try:
            layers, block = size.drafter.target_layers, size.drafter.block
            states = TextStates(self.target, groups, layers, block, dtype)
            drafter = self._drafter(dtype)
            draft = weaver.Draft(size, self.target, drafter, states, further=further)
        finally:
            RUNTIME.dtype = before
        self.log(f"states of {len(states.ids)} tokens and {draft.drafted} blocks")
        return draft


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
    parser.add_argument(
        "--variants", default="", help="words of their names, e.g. ce,flat,path,fresh; in order"
    )
    parser.add_argument(
        "--long", type=float, default=40.0, help="seconds of training of a long variant"
    )
    given = parser.parse_args()
    try:
        variants = choose(given.variants)
    except ValueError as error:
        parser.error(str(error))
    parts = given.parts.split(",")
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest")
    ablation = Ablation(given)
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
            ablation.variants_part(variants, given.steps, given.rows, given.share, given.long)
    ablation.save()
    ablation.log(f"wrote {ablation.out}")


if __name__ == "__main__":
    main()
