# SPDX-License-Identifier: Apache-2.0
"""Adapter and tree growth joined on one device: the fast way from marginals to a Weaver tree.

`TreeWeaver` builds the trees of `tree.build_weaver_tree` with the scores of `adapter.TreeScorer`,
which remain the definition. It knows nothing of vLLM, of drafters or of tensor parallelism.
"""

from vllm_weaver.weave.weaver import MAX_POOL, TreeWeaver

__all__ = ["MAX_POOL", "TreeWeaver"]
