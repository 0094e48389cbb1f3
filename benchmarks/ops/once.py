# SPDX-License-Identifier: Apache-2.0
"""Launches every kernel of a step once, for tools that watch kernels, and checks nothing.

    ncu --clock-control none -k regex:tree_verify -c 2 python -m benchmarks.ops.once --parts gdn
    compute-sanitizer --tool memcheck python -m benchmarks.ops.once --small

Shapes are Qwen3.6-27B's; `--small` has fewer rows, keys and layers, or a toy's where a tool that
looks at every access would take too long. Launches come in the order of a step; what is compiled
comes before them, so a tool sees each kernel's first launch.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.ops import attention, step, weave
from vllm_weaver.tree import build_ddtree

PARTS = ("gdn", "attention", "step", "weave")


def run_gdn(requests: int, small: bool) -> None:
    """Convolution and verification of two layers, in every built form, and their commits."""
    from benchmarks.ops import gdn
    from vllm_weaver.ops.conv import conv_commit_layers
    from vllm_weaver.ops.cuda import NotBuilt, load
    from vllm_weaver.ops.gdn import gdn_commit_layers
    from vllm_weaver.ops.gdn.raw import tree_verify_raw

    case = gdn.make_case(requests, 20 if small else 64, dead=3)
    pools, slots = gdn.pool_of(requests, 2)
    history = torch.randn(requests + 1, gdn.W - 1, gdn.C, device=gdn.DEVICE).to(gdn.DTYPE)
    histories = [history, history.clone()]
    backends = ["triton"]
    try:
        load()
        backends.append("cuda")
    except NotBuilt as error:
        print(error)
    gates = case.a, case.b, case.A_log, case.dt_bias
    for backend in backends:
        stashes = [
            tree_verify_raw(
                *(case.x, one, case.weight, *gates, pool, slots, case.num_nodes, case.words),
                *(case.table, gdn.HK),
                max_depth=gdn.DEPTH,
                backend=backend,
            )[1]
            for pool, one in zip(pools, histories, strict=True)
        ]
    path = torch.full((requests, gdn.DEPTH + 1), -1, dtype=torch.int32)
    length = torch.zeros(requests, dtype=torch.int32)
    for r in range(requests):
        nodes = case.path(r)[: gdn.DEPTH + 1]
        path[r, : len(nodes)], length[r] = torch.tensor(nodes, dtype=torch.int32), len(nodes)
    path, length = path.to(gdn.DEVICE), length.to(gdn.DEVICE)
    gdn_commit_layers(stashes, path, length, pools, slots)
    conv_commit_layers([stash.conv for stash in stashes], path, length, histories, slots)


def run_attention(requests: int, small: bool) -> None:
    """The tree's attention over a paged context."""
    shapes = attention.TOY if attention.INTERPRET else attention.FULL
    case = attention.Case(shapes, requests, 100 if small else 4096, copies=1)
    case.store()
    attention.ours(case)


def run_step(requests: int, small: bool) -> None:
    """Layout, acceptance, compaction and gather of a step, and DDTree."""
    shapes = step.TOY if small else step.FULL
    one = step.Step(requests, 5, shapes)
    one.prepare()
    one.accept()
    one.compact()
    one.gather()
    ids = torch.arange(64, device=step.DEVICE).expand(requests, step.DEPTH, 64)
    log_probs = torch.randn(ids.shape, device=step.DEVICE).log_softmax(-1)
    log_probs = log_probs.sort(-1, descending=True).values
    roots = torch.zeros(requests, dtype=torch.int64, device=step.DEVICE)
    build_ddtree(log_probs, ids.contiguous(), roots, shapes.rows - 1)


def run_weave(requests: int, small: bool) -> None:
    """Candidates and tree from the drafter's logits."""
    shape = weave.SMALL if small else weave.FULL
    dtype = torch.float32 if step.INTERPRET else torch.bfloat16
    one = weave.Step(shape, requests, step.DEVICE, dtype)
    tables = one.adapter.precompute(one.embed, one.lm_head)
    one.weave(one.weaver(7 if small else 63, tables))


RUN = {"gdn": run_gdn, "attention": run_attention, "step": run_step, "weave": run_weave}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="of gdn, attention, step, weave")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="fewer rows and layers, short context")
    args = parser.parse_args()
    for part in args.parts.split(","):
        if part not in RUN:
            parser.error(f"no part {part!r}: choose of {', '.join(PARTS)}")
        RUN[part](args.requests, args.small)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{part}: launched", flush=True)


if __name__ == "__main__":
    main()
