# SPDX-License-Identifier: Apache-2.0
"""Tensor ops of tree decoding, each a PyTorch reference and one dispatcher; nothing of vLLM."""

from vllm_weaver.ops.accept import AcceptedPaths, PathCounts, accept_paths, count_paths
from vllm_weaver.ops.attention import merge_attention, tree_attention
from vllm_weaver.ops.compact import compact_kv
from vllm_weaver.ops.conv import (
    ConvStash,
    causal_conv1d_prefill,
    causal_conv1d_tree,
    conv_commit,
    conv_commit_layers,
    conv_table,
)
from vllm_weaver.ops.gather import gather_paths, gather_rows
from vllm_weaver.ops.gdn import (
    GdnPending,
    GdnStash,
    ancestor_words,
    gdn_commit,
    gdn_commit_layers,
    gdn_decode,
    gdn_gate,
    gdn_prefill,
    gdn_tree_verify,
)
from vllm_weaver.ops.noise import keyed_gumbel
from vllm_weaver.ops.pool import top_pool
from vllm_weaver.ops.propose import PathRows, choose_chain, load_roots, store_trees
from vllm_weaver.ops.step import StepTensors, StoredTrees, prepare_step, state_slots

__all__ = [
    "AcceptedPaths",
    "ConvStash",
    "GdnPending",
    "GdnStash",
    "PathCounts",
    "PathRows",
    "StepTensors",
    "StoredTrees",
    "accept_paths",
    "ancestor_words",
    "causal_conv1d_prefill",
    "causal_conv1d_tree",
    "choose_chain",
    "compact_kv",
    "conv_commit",
    "conv_commit_layers",
    "conv_table",
    "count_paths",
    "gather_paths",
    "gather_rows",
    "gdn_commit",
    "gdn_commit_layers",
    "gdn_decode",
    "gdn_gate",
    "gdn_prefill",
    "gdn_tree_verify",
    "keyed_gumbel",
    "load_roots",
    "merge_attention",
    "prepare_step",
    "state_slots",
    "store_trees",
    "top_pool",
    "tree_attention",
]
