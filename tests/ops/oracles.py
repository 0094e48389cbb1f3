# SPDX-License-Identifier: Apache-2.0
"""What the tests of the recurrent ops are held to: Transformers' functions, path by path, float64.

Transformers' `torch_recurrent_gated_delta_rule` and `causal_conv1d_update` know nothing of trees:
here each root-to-leaf path is one of their sequences. The module uses nothing of `vllm_weaver`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5


class _TorchInDouble:
    """The torch module, except that what it calls float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _recurrence(double: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Transformers' recurrence; it casts to float32 inside, which the float64 form turns off."""
    function = inspect.unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    if not double:
        return function
    return FunctionType(
        function.__code__,
        {**function.__globals__, "torch": _TorchInDouble()},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def gdn_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, HV, V] and last states [B, HV, V, K] of sequences [B, L, ...] from `state`."""
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    group = v.shape[2] // q.shape[2]
    out, last = _recurrence(dtype == torch.float64)(
        q.repeat_interleave(group, 2),
        k.repeat_interleave(group, 2),
        v,
        g,
        beta,
        initial_state=state.transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, last.transpose(-1, -2)


def conv_sequence(x_BLC: Tensor, history_BHC: Tensor, weight_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Activated rows [B, L, C] and final histories [B, H, C] of sequences of raw rows, float64."""
    function = inspect.unwrap(modeling_qwen3_5.causal_conv1d_update)
    history = history_BHC.double().transpose(1, 2).contiguous()
    y = function(x_BLC.double().transpose(1, 2), history, weight_CW.double(), None, "silu")
    return y.transpose(1, 2), history.transpose(1, 2)


@dataclass
class Tree:
    """Parents of a tree's nodes, root first, with its paths spelt out."""

    parents: list[int]

    def __len__(self) -> int:
        return len(self.parents)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """The path of every leaf."""
        inner = set(self.parents)
        return [self.path(node) for node in range(len(self)) if node not in inner]

    def deepest(self) -> list[int]:
        """The longest path, the last one of its length."""
        return max(reversed(self.paths()), key=len)


def random_tree(generator: torch.Generator, size: int, reach: int | None = None) -> Tree:
    """Each node's parent is drawn from the `reach` nodes before it (all of them if None)."""
    parents = [-1]
    for node in range(1, size):
        low = 0 if reach is None else max(0, node - reach)
        parents.append(int(torch.randint(low, node, (), generator=generator)))
    return Tree(parents)


def chain(size: int) -> Tree:
    return Tree(list(range(-1, size - 1)))


def star(size: int) -> Tree:
    return Tree([-1] + [0] * (size - 1))


def comb(size: int) -> Tree:
    """A spine of even nodes, each with one odd leaf beside it."""
    return Tree([-1] + [(node - 1) // 2 * 2 for node in range(1, size)])


def wide(size: int, depth: int = 15) -> Tree:
    """A spine of `depth` nodes below the root, and the rest spread over its depths as leaves."""
    return Tree(
        [min(node, depth + 1) - 1 if node <= depth else node % depth for node in range(size)]
    )


def batch(trees: list[Tree], num_rows: int, garbage: int = 9999) -> tuple[Tensor, Tensor]:
    """Parents [R, T] int32, garbage past each tree's nodes, and num_nodes [R] int32."""
    rows = [tree.parents + [garbage] * (num_rows - len(tree)) for tree in trees]
    return (
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
    )


def padded(paths: list[list[int]], length: int | None = None) -> Tensor:
    """Paths as int32 rows, padded with -1."""
    length = max(map(len, paths)) if length is None else length
    return torch.tensor([p + [-1] * (length - len(p)) for p in paths], dtype=torch.int32)


def along_paths(tree: Tree, run: Callable[[Tensor], Tensor], template: Tensor) -> Tensor:
    """Outputs [T, ...] of all nodes; `run` maps paths of nodes [B, L] to outputs [B, L, ...]."""
    paths = tree.paths()
    index = padded(paths).long()
    out = run(index.clamp(min=0))
    result = template.new_zeros(len(tree), *out.shape[2:], dtype=torch.float64)
    live = index >= 0
    result[index[live]] = out[live]
    return result


def gdn_tree(
    tree: Tree, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Outputs [T, HV, V] of one tree's nodes, float64; inputs [T, ...], state [HV, V, K]."""

    def run(index: Tensor) -> Tensor:
        start = state.expand(len(index), *state.shape)
        return gdn_sequence(*(x[index] for x in (q, k, v, g, beta)), start)[0]

    return along_paths(tree, run, v)


def conv_tree(tree: Tree, x_TC: Tensor, history_HC: Tensor, weight_CW: Tensor) -> Tensor:
    """Activated rows [T, C] of the nodes of one tree, float64."""

    def run(index: Tensor) -> Tensor:
        history = history_HC.expand(len(index), *history_HC.shape)
        return conv_sequence(x_TC[index], history, weight_CW)[0]

    return along_paths(tree, run, x_TC)


def rms_ratio(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    expected = expected.double()
    error = (actual.double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt().clamp(min=1e-30))
