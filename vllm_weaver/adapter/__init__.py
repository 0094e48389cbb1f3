# SPDX-License-Identifier: Apache-2.0
"""The Weaver adapter: turns a drafter's marginals into conditional scores (spec section 2).

`load` or construct a `WeaverAdapter`; `begin` gives one decode step's `TreeScorer`, which a tree
builder calls; `score_children` is the plain definition of what it computes; `forward` is the
teacher-forced pass for training. Knows nothing of tree building, acceptance or vLLM.
"""

from vllm_weaver.adapter.checkpoint import describe, load, save
from vllm_weaver.adapter.config import AdapterError, WeaverConfig
from vllm_weaver.adapter.expand import TreeScorer
from vllm_weaver.adapter.layers import PoolRows, TokenRows, pool_log_probs
from vllm_weaver.adapter.model import AdapterTables, WeaverAdapter

__all__ = [
    "AdapterError",
    "AdapterTables",
    "PoolRows",
    "TokenRows",
    "TreeScorer",
    "WeaverAdapter",
    "WeaverConfig",
    "describe",
    "load",
    "pool_log_probs",
    "save",
]
