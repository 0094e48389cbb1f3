# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes, from a trace of torch.profiler.

    python -m benchmarks.e2e.timeline TRACE --steps 8 --png step.png

Classifies GPU kernels by name, and by the `record_function` range that launched them where one
names a category; counts what makes the host wait for the device. A trace without GPU events, of a
CPU run, is classified by operators instead.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

#: Category and what the names of its kernels or operators look like; the first match decides.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("commit", r"commit|replay|compact|path_first"),
    ("GDN", r"gdn|gated_delta|delta_rule|causal_conv1d|conv_tree|tree_conv|l2norm|fused_sigmoid"
            r"|chunk_fwd|chunk_local|solve_tril|recompute_w_u|tree_verify|conv1d"),
    ("attention", r"flash|attention|attn|paged|reshape_and_cache|scaled_dot|fmha|softmax_scale"
                  r"|cache_kernel|kv_cache|concat_and_cache|merge_state|merge_splits"),
    ("weave", r"weave|weaver|adapter|expand_node|best_first|ddtree|frontier"),
    ("sampler", r"gumbel|sampl|topk|top_k|topp|argmax|softmax|multinomial|rejection|radix|sort"
                r"|logsumexp|temperature|min_p|penalt|gatherTopK"),
    ("GEMM", r"gemm|cutlass|nvjet|xmma|cublas|splitk|wgmma|aten::mm|aten::addmm|aten::bmm"
             r"|aten::linear|aten::matmul|sm90_"),
    ("norm, rotary, activation", r"norm|rotary|rope|silu|act_and_mul|gelu"),
    ("communication", r"nccl|all_reduce|allreduce|all_gather"),
    ("copy", r"memcpy|memset|copy_kernel|CatArray|aten::copy_|aten::cat"),
)  # fmt: skip
OTHER, IDLE = "other", "idle"
#: `record_function` ranges that decide a category for what was launched inside them.
RANGES: tuple[tuple[str, str], ...] = (
    ("drafter", r"draft|speculat|dflash"),
    ("weave", r"weave|propose"),
    ("commit", r"commit"),
    ("sampler", r"sample|accept"),
)
_COMPILED = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in PATTERNS]
_COMPILED_RANGES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in RANGES]
_GRAPH, _KERNEL = re.compile(r"cu(da)?GraphLaunch"), re.compile(r"cu(da)?LaunchKernel")
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")

#: Host calls and operators after which the host has waited for the device.
SYNCS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
)
_EVENTS = ("cudaEventSynchronize", "cuEventSynchronize")
#: Range around a step of the engine.
STEP = "benchmark.step"
_DRIVER = {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2"}


@dataclass(frozen=True)
class Event:
    """One complete event of a trace; times in microseconds."""

    name: str
    kind: str
    start: float
    duration: float
    thread: Any
    correlation: int | None

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.duration

    @property
    def on_device(self) -> bool:
        """Whether the GPU did it."""
        return self.kind in _GPU_CATEGORIES


def read_trace(file: Path) -> list[Event]:
    """Complete events of a trace in Chrome's format, in order of time."""
    data = json.loads(file.read_text())
    events = []
    for raw in data["traceEvents"]:
        if raw.get("ph") != "X" or "dur" not in raw:
            continue
        arguments = raw.get("args") or {}
        events.append(
            Event(
                name=raw["name"],
                kind=raw.get("cat", ""),
                start=float(raw["ts"]),
                duration=float(raw["dur"]),
                thread=raw.get("tid"),
                correlation=arguments.get("correlation"),
            )
        )
    return sorted(events, key=lambda event: (event.start, -event.duration))


def category(name: str) -> str:
    """Category of a kernel or operator by its name."""
    return next((label for label, pattern in _COMPILED if pattern.search(name)), OTHER)


def classify(events: list[Event]) -> list[tuple[Event, str]]:
    """The events that take the device's time, each with its category.

    Kernels take the category of the innermost named range around their launch, or around the
    launch of their CUDA graph; outside such ranges, as in the target's pass, the category that
    their name tells. Without kernels: the outermost operators of the trace, likewise.
    """
    ranges = [
        (event, label)
        for event in events
        if event.kind == "user_annotation"
        for label, pattern in _COMPILED_RANGES
        if pattern.search(event.name)
    ]
    kernels = [event for event in events if event.on_device]
    if kernels:
        launches: dict[int, Event] = {}
        for event in events:
            if event.kind in ("cuda_runtime", "cuda_driver") and event.correlation is not None:
                launches[event.correlation] = event
        found = []
        for event in kernels:
            launch = launches.get(event.correlation) if event.correlation is not None else None
            label = None if launch is None else _range_of(launch, ranges)
            found.append((event, label or category(event.name)))
        return found
    found = []
    ends: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.kind != "cpu_op" or event.start < ends[event.thread]:
            continue
        ends[event.thread] = event.end
        found.append((event, _range_of(event, ranges) or category(event.name)))
    return found


def _range_of(event: Event, ranges: list[tuple[Event, str]]) -> str | None:
    around = [
        (outer.duration, label)
        for outer, label in ranges
        if outer.thread == event.thread and outer.start <= event.start and event.end <= outer.end
    ]
    return min(around)[1] if around else None


def host_syncs(events: list[Event]) -> Counter[str]:
    """How often the host waited for the device, or may have, by call.

    A copy from the device into pageable memory blocks; into pinned memory it does not, and is not
    counted. `aten::item` contains `aten::_local_scalar_dense`, so only the outer one counts.
    """
    found: Counter[str] = Counter()
    inside: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.kind == "gpu_memcpy":
            if "DtoH" in event.name and "Pageable" in event.name:
                found["copy to pageable memory"] += 1
            continue
        if event.name in SYNCS or event.name in _DRIVER:
            if event.name.startswith("aten::"):
                if event.start < inside[event.thread]:
                    continue
                inside[event.thread] = event.end
            found[event.name] += 1
    return found


def blocking_syncs(events: list[Event]) -> Counter[str]:
    """What stalls the pipeline: `host_syncs` inside the steps, without waits for an event.

    Waiting for an event is how asynchronous scheduling fetches finished outputs. Where a GPU was
    traced, operators count by the calls of CUDA inside them alone: `aten::item` of a CPU tensor
    makes none. What lies outside all `benchmark.step` ranges is the benchmark's own.
    """
    steps = [(e.start, e.end) for e in events if e.name == STEP and e.kind == "user_annotation"]
    if steps:
        events = [
            event
            for event in events
            if event.on_device or any(start <= event.start < end for start, end in steps)
        ]
    found = host_syncs(events)
    traced = any(event.on_device for event in events)
    for name in list(found):
        if name in _EVENTS or (traced and name.startswith("aten::")):
            del found[name]
    return found


def summarise(events: list[Event], steps: int) -> dict[str, Any]:
    """Milliseconds per step by category, idle time between kernels, and host syncs per step."""
    classified = classify(events)
    by_category: dict[str, float] = defaultdict(float)
    by_name: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, label in classified:
        by_category[label] += event.duration
        by_name[label][event.name] += event.duration
    busy = union_length([(event.start, event.end) for event, _ in classified])
    span = 0.0
    if classified:
        span = max(e.end for e, _ in classified) - min(e.start for e, _ in classified)
    per = 1e3 * max(steps, 1)
    return {
        "steps": steps,
        "source": "GPU kernels" if any(e.on_device for e, _ in classified) else "CPU operators",
        "ms_per_step": span / per,
        "categories": {
            label: total / per
            for label, total in [*_largest(by_category), (IDLE, max(span - busy, 0.0))]
        },
        "largest": {
            label: [[name[:120], total / per] for name, total in _largest(names)[:5]]
            for label, names in by_name.items()
        },
        "events_per_step": len(classified) / max(steps, 1),
        "graph_launches_per_step": _launches(events, _GRAPH) / max(steps, 1),
        "kernel_launches_per_step": _launches(events, _KERNEL) / max(steps, 1),
        "host_syncs_per_step": {k: v / max(steps, 1) for k, v in host_syncs(events).items()},
        "blocking_syncs_per_step": sum(blocking_syncs(events).values()) / max(steps, 1),
    }


def _launches(events: list[Event], name: re.Pattern[str]) -> int:
    kinds = ("cuda_runtime", "cuda_driver")
    return sum(event.kind in kinds and bool(name.match(event.name)) for event in events)


def _largest(totals: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(totals.items(), key=lambda item: -item[1])


def union_length(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def one_step(events: list[Event], steps: int) -> list[tuple[Event, str]]:
    """The classified events of a step's length from the middle of the trace."""
    classified = classify(events)
    if not classified:
        return []
    first = min(event.start for event, _ in classified)
    length = (max(event.end for event, _ in classified) - first) / max(steps, 1)
    middle = first + (steps // 2) * length
    begin = min((e.start for e, _ in classified if e.start >= middle), default=first)
    return [(e, label) for e, label in classified if begin <= e.start < begin + length]


def table(summary: dict[str, Any]) -> str:
    """Markdown."""
    whole = summary["ms_per_step"] or 1.0
    lines = ["| category | ms per step | share |", "|---|---|---|"]
    for label, ms in summary["categories"].items():
        lines.append(f"| {label} | {ms:.3f} | {100 * ms / whole:.1f} % |")
    lines.append(f"| **step** ({summary['source']}) | {summary['ms_per_step']:.3f} | |")
    syncs = ", ".join(f"{k} {v:.2f}" for k, v in summary["host_syncs_per_step"].items()) or "none"
    launches = (
        f"Launches per step: {summary['graph_launches_per_step']:.2f} graphs, "
        f"{summary['kernel_launches_per_step']:.2f} kernels beside them."
    )
    return "\n".join(lines) + f"\n\n{launches} Host waits per step: {syncs}.\n"


def main(
    trace: Annotated[Path, typer.Argument(help="a trace of torch.profiler")],
    steps: Annotated[int, typer.Option(help="steps in it")] = 8,
    png: Annotated[Path | None, typer.Option(help="picture of one step")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="the table as JSON")] = None,
) -> None:
    """Table and picture of where a step's time goes."""
    events = read_trace(trace)
    summary = summarise(events, steps)
    typer.echo(table(summary))
    if json_path is not None:
        json_path.write_text(json.dumps(summary, indent=1) + "\n")
    if png is not None:
        from .plots import plot_step

        plot_step({trace.stem: one_step(events, steps)}, png)


if __name__ == "__main__":
    typer.run(main)
