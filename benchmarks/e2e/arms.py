# SPDX-License-Identifier: Apache-2.0
"""Arms of the benchmark, and the options of vLLM that make each.

Plain data: imports neither vLLM nor PyTorch, and says nothing of how an arm is timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LABELS = {
    "ar": "AR",
    "stock": "vLLM DFlash chain",
    "chain": "chain, our verifier",
    "ddtree": "DDTree",
    "weaver": "Weaver",
}
_EXTENSION = "benchmarks.e2e.extension.BenchmarkExtension"


class ArmError(ValueError):
    """An arm that cannot be run: one line that says what to pass."""


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Attributes:
        kind: a key of `LABELS`.
        rows: drafted tokens or tree nodes of a pass; 0 for AR.
        options: further entries of the `weaver` section.
        name: of the arm in results; `kind` and rows, with what `options` add.
    """

    kind: str
    rows: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Short and unique."""
        if self.kind == "ar":
            return "ar"
        extra = "".join(f",{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.kind}-{self.rows}{extra}"

    @property
    def label(self) -> str:
        """For tables and figures."""
        return LABELS[self.kind] + (f", {self.rows}" if self.rows else "")

    @property
    def ours(self) -> bool:
        """Whether the plugin serves it."""
        return self.kind in ("chain", "ddtree", "weaver")


def parse_arms(text: str, budget: int, widths: list[int], chain: int) -> list[Arm]:
    """`ar,stock,chain,ddtree,weaver` to arms, AR first.

    `stock` alone stands for every width; `kind-rows` names one; `kind-rows:key=value` sets an
    option of the `weaver` section, several joined by `:`.

    Raises:
        ArmError: unknown kind, or a number that is none.
    """
    arms = [Arm("ar")]
    for item in filter(None, (part.strip() for part in text.split(","))):
        head, *settings = item.split(":")
        kind, _, rows = head.partition("-")
        if kind not in LABELS:
            raise ArmError(f"arm {item!r}: choose from {', '.join(LABELS)}")
        if rows and not rows.isdigit():
            raise ArmError(f"arm {item!r}: {rows!r} is no number of rows")
        options = {}
        for setting in settings:
            key, sign, value = setting.partition("=")
            if not sign:
                raise ArmError(f"arm {item!r}: {setting!r} is not key=value")
            options[key] = _value(value)
        if kind == "ar":
            continue
        if rows:
            sizes = [int(rows)]
        else:
            sizes = {"stock": widths, "chain": [chain]}.get(kind, [budget])
        arms += [Arm(kind, size, options) for size in sizes]
    if len({arm.name for arm in arms}) < len(arms):
        raise ArmError(f"arms {text!r}: one is named twice")
    return arms


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Models:
    """What is run: directories or names on the hub.

    Attributes:
        target, drafter, adapter: models; the last two only if an arm needs them.
        expanded: load with `load_format="expanded"` (`benchmarks/expand`).
        title: what they are, for people; the target's name if empty.
        function: small target with the target's function, if there is one.
    """

    target: str
    drafter: str | None
    adapter: str | None
    expanded: bool = False
    title: str = ""
    function: str | None = None


@dataclass(frozen=True)
class Sizes:
    """The largest of everything that one engine must hold."""

    batch: int
    context: int
    tokens: int


def engine_options(
    arm: Arm,
    models: Models,
    sizes: Sizes,
    *,
    device: str,
    kv_bytes: int,
    memory_share: float,
    seed: int,
    triton_prefill: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one arm. `extra` has the last word.

    Raises:
        ArmError: the arm needs a model that is not given.
    """
    cpu = device == "cpu"
    rows = arm.rows + 1
    options: dict[str, Any] = {
        "model": models.target,
        "dtype": "float32" if cpu else "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        # Room for a whole tree after the last token, so that none is cut.
        "max_model_len": sizes.context + sizes.tokens + 2 * arm.rows + 2,
        "max_num_seqs": sizes.batch,
        # vLLM reserves the budget twice for each request that speculates.
        "max_num_batched_tokens": max(512 if cpu else 8192, sizes.batch * (2 * arm.rows + 1)),
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": seed,
        "worker_extension_cls": _EXTENSION,
    }
    if models.expanded:
        options["load_format"] = "expanded"
    if cpu:
        options |= {"enforce_eager": True, "async_scheduling": False}
    else:
        options["gpu_memory_utilization"] = memory_share
        if triton_prefill:
            options["gdn_prefill_backend"] = "triton"
    if arm.kind == "ar":
        # It judges the others' tokens: by its logits, whose size says how coarse they are.
        options["logprobs_mode"] = "raw_logits"
    if arm.kind == "stock":
        # Or large batches of the baseline would run without graphs: vLLM's default is 512 rows.
        largest = max(512, 2 ** math.ceil(math.log2(sizes.batch * rows)))
        if not cpu:
            options["compilation_config"] = {"max_cudagraph_capture_size": largest}
    if arm.kind != "ar":
        if models.drafter is None:
            raise ArmError(f"arm {arm.name} needs --drafter")
        options["speculative_config"] = {
            "method": "dflash",
            "model": models.drafter,
            "num_speculative_tokens": arm.rows,
        }
    if arm.ours:
        section: dict[str, Any] = {"proposal": arm.kind, **arm.options}
        if arm.kind == "weaver":
            if models.adapter is None:
                raise ArmError(f"arm {arm.name} needs --adapter")
            section["adapter"] = models.adapter
        options["additional_config"] = {"weaver": section}
    return {**options, **extra}


def shared_options(options: Mapping[str, Any], sockets: str, share: float) -> dict[str, Any]:
    """`options` for an engine whose target's weights another process holds.

    vLLM's own means (`vllm preload`, `load_format="ipc_cache"`); drafters are not held so.

    Args:
        options: of :func:`engine_options`.
        sockets: directory of the other process's socket.
        share: of the device's memory; with the weights, which vLLM takes off.
    """
    shared = {**options, "gpu_memory_utilization": share, "load_format": "ipc_cache"}
    shared["model_loader_extra_config"] = {"socket_dir": sockets, "fallback": False}
    if "speculative_config" in options:
        draft = {"load_format": options.get("load_format", "auto")}
        shared["speculative_config"] = options["speculative_config"] | {"draft_load_config": draft}
    return shared


def describe(arm: Arm) -> dict[str, Any]:
    """As JSON takes it."""
    return {"arm": arm.name, "label": arm.label, **asdict(arm)}
