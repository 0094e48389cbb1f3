# SPDX-License-Identifier: Apache-2.0
"""What shared noise is worth: tokens per target pass with and without it, by way of sampling.

    python -m benchmarks.testbed.noise vllm_weaver/demo/models --out noise.json
    python -m benchmarks.testbed.noise vllm_weaver/demo/models --settings T=1 --weights 0.5,1,2

Prompts are windows of the installed source that the models were not trained on (see `data.py`); the
target continues them with the sampling of each setting, and trees are drafted at every position, as
in `evaluate.py`. Intervals are from prompts resampled together.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter
from vllm_weaver.adapter import load as load_adapter
from vllm_weaver.tree import (
    CONDITIONAL_WEIGHT,
    MARGINAL_WEIGHT,
    DraftTree,
    ExpandFn,
    accept,
    build_ddtree,
    build_weaver_tree,
    outside_filters,
)

from . import data, export, gdn
from .config import EOS_ID, SIZES, Size
from .drafter import Drafter
from .evaluate import (
    BUDGETS,
    Walk,
    block_states,
    prompts_of,
    ratio,
    sampling_at,
    shared_noise,
    walk,
)
from .target import RUNTIME, Target

SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.5": {"top_p": 0.5},
    "top-k 20": {"top_k": 20},
    "top-k 2": {"top_k": 2},
    "min-p 0.2": {"min_p": 0.2},
}
_RANKS = 64
_TEXTS_AT_ONCE = {"cpu": 8, "cuda": 64}


def held_out_stream(tokenizer: Tokenizer) -> Tensor:
    """Tokens of the installed files that belong to the held-out part, in order of hash."""
    files = {}
    for _, paths in data.sources(standard_library_only=False):
        for path in paths:
            content = data.read_source(path)
            digest = hashlib.sha256(content or b"").digest()
            if content is not None and data.is_held_out(digest):
                files[digest] = content
    parts = [[*tokenizer.encode(files[d].decode()).ids, EOS_ID] for d in sorted(files)]
    return torch.tensor([token for part in parts for token in part])


def open_models(
    models: Path, size: Size, device: str
) -> tuple[Target, Drafter, WeaverAdapter, Tensor]:
    """Target, drafter and adapter of a folder, in float32, and the held-out stream."""
    RUNTIME.dtype, RUNTIME.rule = torch.float32, gdn.plain
    torch.set_float32_matmul_precision("highest")
    target = export.load_target(models / "target", size.target, device).requires_grad_(False)
    drafter = Drafter.load(models / "drafter", size.drafter, size.target, device, torch.float32)
    adapter = load_adapter(models / "adapter", dtype=torch.float32, device=device)
    stream = held_out_stream(Tokenizer.from_file(str(models / "target" / "tokenizer.json")))
    return target, drafter, adapter, stream


def log_p_of(logits: Tensor, options: dict[str, Any]) -> Tensor:
    """Log-probabilities [..., V] as a sampler with these options draws."""
    logits = logits.float() / options.get("temperature", 1.0)
    sampling = sampling_at(1, logits.device, logits.shape[-1], **options)
    if sampling.filtered:
        log_q = logits.log_softmax(-1)
        index = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        logits = logits.masked_fill(outside_filters(log_q, sampling.at(index)), -torch.inf)
    return logits.log_softmax(-1)


class Arms:
    """Walks of each arm, by prompt."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.walks: dict[str, list[Walk]] = {}

    def add(self, name: str, tree: DraftTree, following_RD: Tensor, count: int) -> None:
        samples = torch.cat([following_RD, following_RD[:, -1:]], 1)
        sampled_RT = samples.gather(1, tree.depths.long())
        _, length = accept(tree, sampled_RT.int(), max_depth=self.depth)
        self.walks.setdefault(name, []).append(walk(length.view(-1, count).long()))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Tokens per pass of each arm and the gain of those with noise, with intervals."""
        sums: dict[str, Walk] = {}
        for name, found in self.walks.items():
            tokens, passes = (torch.cat([w[i] for w in found]).cpu().double() for i in (0, 1))
            sums[name] = tokens, passes
        once = {name: (tokens, tokens) for name, (tokens, _) in sums.items()}
        result = {}
        for name, (tokens, passes) in sums.items():
            per_pass = ratio((tokens, passes), once[name])
            arm: dict[str, Any] = {"tokens_per_pass": per_pass["ratio"]}
            arm["interval"] = [per_pass["low"], per_pass["high"]]
            plain = name.partition(" noise")[0]
            if plain != name:
                arm["gain"] = ratio((tokens, passes), sums[plain])
            result[name] = arm
        return result


@torch.no_grad()
def measure(
    size: Size,
    target: Target,
    drafter: Drafter,
    adapter: WeaverAdapter,
    prompts: Tensor,
    tokens: int,
    options: dict[str, Any],
    budgets: tuple[int, ...],
    weights: tuple[float, ...],
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Arms for one way of sampling; `weights` are tried beside those of the package."""
    depth, device, context = size.drafter.depth, prompts.device, prompts.shape[1]
    ids = target.generate(
        prompts,
        context + tokens + size.drafter.block,
        torch.ones(len(prompts), dtype=torch.bool, device=device),
        torch.Generator(device).manual_seed(seed),
        lambda logits: log_p_of(logits, options),
    )
    arms = Arms(depth)
    tables = adapter.precompute(target.embedding, target.head)
    count = tokens - 1
    for number, part in enumerate(ids.split(_TEXTS_AT_ONCE[device.type])):
        anchors = (context + torch.arange(count, device=device)).expand(len(part), count)
        h_ver, h_draft, window, states = block_states(target, drafter, part, anchors, size)
        root, following = window[:, 0].contiguous(), window[:, 1:]
        logits_RDV = target.logits(h_draft).float()
        pool_logits, pool = logits_RDV.topk(size.adapter.pool)
        log_q = logits_RDV.log_softmax(-1).gather(-1, pool)
        rows = ((number << 20) + torch.arange(len(part), device=device)).repeat_interleave(count)
        log_p = log_p_of(target.logits(states), options)
        sampling = sampling_at(len(root), device, size.target.vocab, **options)
        noise = shared_noise(log_p, pool, following, rows, anchors.flatten(), sampling)
        del log_p, logits_RDV
        marginals = {"": (log_q, pool), " noise": noise.marginals(log_q, pool, MARGINAL_WEIGHT)}
        for weight in weights:
            marginals[f" noise x {weight:g}"] = noise.marginals(log_q, pool, weight)
        for ending, (scores, tokens_RDP) in marginals.items():
            best, best_ids = scores[..., :_RANKS], tokens_RDP[..., :_RANKS]
            arms.add(f"chain{ending}", DraftTree.chain(root, best_ids[..., 0]), following, count)
            for budget in budgets:
                tree = build_ddtree(best, best_ids, root, budget)
                arms.add(f"ddtree {budget}{ending}", tree, following, count)
        conditionals: dict[str, float | None] = {"": None, " noise": CONDITIONAL_WEIGHT}
        conditionals.update({f" noise x {weight:g}": weight for weight in weights})
        for budget in budgets:
            for ending, used in conditionals.items():
                expand: ExpandFn = adapter.begin(
                    *(h_ver, h_draft, pool, pool_logits),
                    embed=None,
                    lm_head=None,
                    max_nodes=budget + 1,
                    tables=tables,
                )
                if used is not None:
                    expand = noise.expanding(expand, used)
                tree = build_weaver_tree(expand, root, budget, depth, full_pools=True)
                arms.add(f"weaver {budget}{ending}", tree, following, count)
    return arms.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--settings", default="T=1,T=0.7,top-p 0.9", help="of " + ", ".join(SETTINGS)
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--weights", default="", help="other weights of the noise to try")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, models = SIZES[arguments.size], arguments.models
    started = time.time()
    target, drafter, adapter, stream = open_models(models, size, device)
    prompts = prompts_of(stream, dataclasses.replace(size, eval_prompts=arguments.prompts)).to(
        device
    )
    numbers = tuple(int(b) for b in arguments.budgets.split(","))
    weights = tuple(float(w) for w in arguments.weights.split(",") if w)
    settings = {}
    for name in arguments.settings.split(","):
        settings[name] = measure(
            size,
            target,
            drafter,
            adapter,
            prompts,
            arguments.tokens,
            SETTINGS[name],
            numbers,
            weights,
            arguments.seed,
        )
        for arm, found in settings[name].items():
            print(name, arm, json.dumps(found), flush=True)
    record = {
        "command": "python -m benchmarks.testbed.noise "
        + " ".join(f"--{k} {v}" for k, v in vars(arguments).items() if k not in ("models", "out")),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "held_out_tokens": len(stream),
        "seconds": round(time.time() - started, 1),
        "settings": settings,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
