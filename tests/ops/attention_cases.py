# SPDX-License-Identifier: Apache-2.0
"""Trees and inputs for the tests of tree attention, and the float64 oracle along explicit paths."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from interpreter import DEVICE
from torch import Tensor

from vllm_weaver.ops import tree_attention

NAN = float("nan")

# Trees as parent lists; a parent comes before its children.


def chain(n: int) -> list[int]:
    return [i - 1 for i in range(n)]


def star(n: int) -> list[int]:
    return [-1] + [0] * (n - 1)


def comb(n: int) -> list[int]:
    """A spine of even nodes, each with one odd leaf."""
    return [-1] + [i - 1 if i % 2 else i - 2 for i in range(1, n)]


def bushy(n: int, seed: int = 0, depth: int = 15) -> list[int]:
    rng = random.Random(seed)
    parents, depths = [-1], [0]
    while len(parents) < n:
        # Half of the time the newest deep node goes on, so that the full depth is reached.
        parent = len(parents) - 1 if rng.random() < 0.5 else rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def path_of(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass
class Case:
    """Inputs of one call; `trees[r]` are the parents of request r's live rows."""

    trees: list[list[int]]
    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    ancestors: Tensor
    num_nodes: Tensor
    scale: float
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def inputs(self, device: str) -> list[Tensor]:
        """The op's positional tensors."""
        fields = (self.q, self.k_new, self.v_new, self.k_cache, self.v_cache, self.block_table)
        fields += (self.context_lens, self.ancestors, self.num_nodes)
        return [x.to(device) for x in fields]

    def scales(self, device: str) -> dict[str, Tensor | None]:
        """The op's scales of a float8 cache."""
        fields = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: None if x is None else x.to(device) for name, x in fields.items()}

    def run(self, backend: str) -> Tensor:
        device = "cpu" if backend == "reference" else DEVICE
        options = {"scale": self.scale, "backend": backend, **self.scales(device)}
        return tree_attention(*self.inputs(device), **options).cpu()


def make_case(
    trees: list[list[int]],
    contexts: list[int],
    *,
    rows: int | None = None,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
    joint_layout: bool = False,
    seed: int = 0,
) -> Case:
    """Random inputs with everything poisoned that must not be read.

    Rows past a tree, cache slots past a context and blocks of nobody hold NaN; block tables go on
    with ids far out of range. `joint_layout` makes the caches views of one tensor
    [blocks, HKV, block_size, 2 * D_h], as vLLM has it on a CPU.
    """
    g = torch.Generator().manual_seed(seed)
    requests = len(trees)
    rows = rows or max(map(len, trees))
    pages = [-(-n // block_size) for n in contexts]
    blocks = sum(pages) + 3
    order = torch.randperm(blocks, generator=g).tolist()

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * magnitude).to(dtype)

    q, k_new, v_new = (rand(requests, rows, n, head_dim) for n in (heads, kv_heads, kv_heads))
    joint = torch.full((blocks, kv_heads, block_size, 2 * head_dim), NAN, dtype=dtype)
    table = torch.full((requests, max(pages) + 2), 2**30, dtype=torch.int32)
    ancestors = torch.full((requests, rows, -(-rows // 64)), -1, dtype=torch.int64)
    for r, (tree, context) in enumerate(zip(trees, contexts, strict=True)):
        for page in range(pages[r]):
            block = table[r, page] = order.pop()
            filled = min(block_size, context - page * block_size)
            joint[int(block), :, :filled] = rand(kv_heads, filled, 2 * head_dim)
        for x in (q, k_new, v_new):
            x[r, len(tree) :] = NAN
        for node in range(len(tree)):
            words = [0] * ancestors.shape[2]
            for a in path_of(tree, node):
                words[a // 64] |= 1 << a % 64
            ancestors[r, node] = torch.tensor([w - 2**64 if w >= 2**63 else w for w in words])
    view = joint.permute(0, 2, 1, 3)
    k_cache, v_cache = view[..., :head_dim], view[..., head_dim:]
    if not joint_layout:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    return Case(
        trees,
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        table,
        torch.tensor(contexts, dtype=torch.int32),
        ancestors,
        torch.tensor([len(t) for t in trees], dtype=torch.int32),
        head_dim**-0.5,
    )


def attend_along_paths(case: Case) -> Tensor:
    """float64 oracle: each node by itself, over its context and its path; zeros for dead rows."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    block_size = case.k_cache.shape[1]
    group = case.q.shape[2] // case.k_new.shape[2]
    for r, tree in enumerate(case.trees):
        context = int(case.context_lens[r])
        at = [(int(case.block_table[r, p // block_size]), p % block_size) for p in range(context)]
        for node in range(len(tree)):
            path = path_of(tree, node)
            k = torch.stack([case.k_cache[a] for a in at] + [case.k_new[r, p] for p in path])
            v = torch.stack([case.v_cache[a] for a in at] + [case.v_new[r, p] for p in path])
            k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("hd,nhd->hn", case.q[r, node].double(), k) * case.scale
            out[r, node] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def assert_matches_oracle(case: Case, backend: str, tolerance: float | None = None) -> None:
    expected = attend_along_paths(case)
    out = case.run(backend)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    dead = torch.arange(case.q.shape[1]) >= case.num_nodes[:, None]
    assert (out[dead] == 0).all(), "rows past num_nodes must be zero"
    if tolerance is None:
        # Softmax weights and output are rounded to the type; all else is float32.
        tolerance = torch.finfo(case.q.dtype).eps
    if case.q.dtype == torch.float32:
        tolerance = max(tolerance, 5e-6)
    error = (out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.2e}"
