# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of tree decoding on ``/metrics`` of ``vllm serve``.

A ``vllm.stat_logger_plugins`` entry point: vLLM builds it in the front-end process. It does
nothing for an engine without trees.
"""

from __future__ import annotations

import json
import time
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_weaver.engine.config import requested
from vllm_weaver.engine.stats import PUBLISH_SECONDS, stats_file

_COUNTERS = {
    "target_passes": "Target passes that verified a tree.",
    "emitted_tokens": "Tokens emitted by those passes, bonus tokens included.",
    "tree_nodes": "Tree nodes verified, roots excluded.",
    "chain_fallbacks": "Requests that ran as chains: their sampling reads the whole prefix.",
}


class WeaverStatLogger(StatLoggerBase):
    """Exports the counters that rank 0 publishes."""

    def __init__(self, vllm_config: Any, engine_index: int = 0):
        self._file = stats_file(vllm_config.instance_id) if requested(vllm_config) else None
        self._read_at = 0.0
        self._seen: dict[str, int] = {}
        if self._file is None:
            return
        labels = {
            "model_name": vllm_config.model_config.served_model_name,
            "engine": str(engine_index),
        }
        self._counters = {
            name: _series(Counter, f"vllm_weaver:{name}", text, labels)
            for name, text in _COUNTERS.items()
        }
        self._mean = _series(
            Gauge,
            "vllm_weaver:mean_accepted_length",
            "Tokens emitted per verifying target pass since start, bonus included.",
            labels,
        )

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called after every engine step; reads the file at most once per publishing interval."""
        if self._file is None or time.monotonic() - self._read_at < PUBLISH_SECONDS:
            return
        self._read_at = time.monotonic()
        try:
            snapshot = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return  # not published yet
        for name, counter in self._counters.items():
            grown = snapshot[name] - self._seen.get(name, 0)
            # A reset of the worker's counters starts them again at 0.
            counter.inc(grown if grown >= 0 else snapshot[name])
            self._seen[name] = snapshot[name]
        self._mean.set(snapshot["mean_accepted_length"])

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


_families: dict[str, Any] = {}


def _series(kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
    """A series with its labels set; its family is registered once per process."""
    if name not in _families:
        _families[name] = kind(name, text, list(labels))
    return _families[name].labels(**labels)
