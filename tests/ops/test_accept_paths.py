# SPDX-License-Identifier: Apache-2.0
"""accept_paths against a plain walk from the root, reference and kernel alike.

The kernel runs on a GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import random

import pytest
import torch
from interpreter import CUDA, DEVICE, needs_kernel
from torch import Tensor

from vllm_weaver.ops import AcceptedPaths, accept_paths, ancestor_words

TRITON = pytest.param("triton", marks=needs_kernel)
both = pytest.mark.parametrize("backend", ["reference", TRITON])

Inputs = list[Tensor]


def walk(tokens: list[int], parents: list[int], sampled: list[int], max_depth: int) -> list[int]:
    path = [0] if parents else []
    while path and len(path) <= max_depth:
        here = path[-1]
        hits = [i for i in range(1, len(parents)) if parents[i] == here]
        hits = [i for i in hits if tokens[i] == sampled[here]]
        if not hits:
            break
        path.append(hits[0])
    return path


def make_trees(kind: str, count: int, rng: random.Random) -> list[int]:
    if kind == "chain":
        return list(range(-1, count - 1))
    if kind == "star":
        return [-1, *[0] * (count - 1)][:count]
    # Half of the nodes go on from the newest one, so that paths are long.
    return [-1, *(i - 1 if rng.random() < 0.5 else rng.randrange(i) for i in range(1, count))][
        :count
    ]


def make_batch(
    seed: int, T: int, max_depth: int, dtype: torch.dtype = torch.int64
) -> tuple[Inputs, list[list[int]]]:
    """Trees whose samples mostly hit a child, some of them siblings of equal tokens.

    Past `num_nodes` everything is garbage that would lead on from any row.
    """
    rng = random.Random(seed)
    kinds = ["chain", "star", "random", "random", "empty"]
    all_tokens, all_parents, all_depths, all_sampled, counts, paths = [], [], [], [], [], []
    for kind in kinds:
        count = 0 if kind == "empty" else rng.randint((T + 1) // 2, T)
        parents = make_trees(kind, count, rng)
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        tokens = [rng.randrange(5) for _ in range(T)]
        sampled = [rng.randrange(5) for _ in range(T)]
        for row in range(count):
            below = [i for i in range(count) if parents[i] == row]
            if below and rng.random() < 0.9:
                sampled[row] = tokens[rng.choice(below)]
        paths.append(walk(tokens, parents, sampled, max_depth))
        leaf = paths[-1][-1] if paths[-1] else 0
        dead = T - count
        all_tokens.append(tokens[:count] + [sampled[leaf]] * dead)
        all_parents.append(parents + [leaf] * dead)
        all_depths.append(depths + [-7] * dead)
        all_sampled.append(sampled)
        counts.append(count)
    parents_RT = torch.tensor(all_parents, dtype=torch.int32)
    num_nodes_R = torch.tensor(counts, dtype=torch.int32)
    words = ancestor_words(parents_RT, num_nodes_R)
    words[torch.arange(T) >= num_nodes_R[:, None]] = -1
    inputs = [
        torch.tensor(all_tokens, dtype=torch.int32),
        parents_RT,
        torch.tensor(all_depths, dtype=torch.int32),
        num_nodes_R,
        words,
        torch.tensor(all_sampled, dtype=dtype),
    ]
    return inputs, paths


def assert_paths(
    got: AcceptedPaths, inputs: Inputs, paths: list[list[int]], max_depth: int
) -> None:
    T, sampled = inputs[0].shape[1], inputs[5].tolist()
    width = max_depth + 1
    assert got.length.tolist() == [len(p) for p in paths]
    assert got.path.tolist() == [p + [-1] * (width - len(p)) for p in paths]
    emitted = [[sampled[r][i] for i in p] for r, p in enumerate(paths)]
    assert got.emitted.tolist() == [e + [-1] * (width - len(e)) for e in emitted]
    assert got.emitted.dtype == inputs[5].dtype and got.order.dtype == torch.int64
    order = [[r * T + i for i in p + list(range(len(p), T))] for r, p in enumerate(paths)]
    assert got.order.tolist() == order


@both
@pytest.mark.parametrize("T", [1, 2, 16, 63, 64, 65, 256])
def test_paths_are_those_of_a_plain_walk(T: int, backend: str) -> None:
    for seed, max_depth in ((0, T - 1), (1, min(T - 1, 15))):
        inputs, paths = make_batch(seed, T, max_depth)
        moved = [x.to(DEVICE) for x in inputs] if backend == "triton" else inputs
        assert_paths(accept_paths(*moved, max_depth, backend=backend), inputs, paths, max_depth)


@both
@pytest.mark.parametrize("max_depth", [0, 2, 100])
def test_the_depth_bound_cuts_paths_and_widens_columns(max_depth: int, backend: str) -> None:
    inputs, paths = make_batch(3, 20, max_depth, torch.int32)
    moved = [x.to(DEVICE) for x in inputs] if backend == "triton" else inputs
    assert_paths(accept_paths(*moved, max_depth, backend=backend), inputs, paths, max_depth)


@both
def test_given_buffers_are_filled_whatever_they_held(backend: str) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    inputs, paths = make_batch(4, 32, 15)
    R = len(paths)
    out = AcceptedPaths(
        torch.full((R, 16), 77, dtype=torch.int32, device=device),
        torch.full((R,), 77, dtype=torch.int32, device=device),
        torch.full((R, 16), 77, device=device),
        torch.full((R, 32), 77, device=device),
    )
    got = accept_paths(*(x.to(device) for x in inputs), 15, out=out, backend=backend)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_paths(out, inputs, paths, 15)


@both
def test_rows_of_wider_tensors_are_read_in_place(backend: str) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    inputs, paths = make_batch(5, 24, 23)
    views = []
    for x in inputs:
        wide = x.new_full((x.shape[0], *[n + 5 for n in x.shape[1:2]], *x.shape[2:]), -3)
        view = wide.to(device)[:, :24] if x.dim() > 1 else wide.to(device)
        views.append(view.copy_(x))
    assert_paths(accept_paths(*views, 23, backend=backend), inputs, paths, 23)


@both
def test_no_requests_give_empty_results(backend: str) -> None:
    inputs, _ = make_batch(6, 8, 7)
    got = accept_paths(*(x[:0].to(DEVICE) for x in inputs), 7, backend=backend)
    assert [tuple(x.shape) for x in got] == [(0, 8), (0,), (0, 8), (0, 8)]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_captured_graph_follows_other_samples() -> None:
    first, _ = make_batch(7, 64, 15)
    second, paths = make_batch(8, 64, 15)
    static = [x.cuda() for x in first]
    out = accept_paths(*static, 15)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accept_paths(*static, 15, out=out)
    for buffer, value in zip(static, second, strict=True):
        buffer.copy_(value)
    graph.replay()
    assert_paths(out, second, paths, 15)


def test_bad_input_is_refused_by_name() -> None:
    inputs, _ = make_batch(0, 8, 7)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference, triton"):
        accept_paths(*inputs, 7, backend="cuda")
    with pytest.raises(ValueError, match="max_depth is -1"):
        accept_paths(*inputs, -1)
    with pytest.raises(ValueError, match=r"sampled has shape \[5, 7\], expected \[5, 8\]"):
        accept_paths(*inputs[:5], inputs[5][:, :7], 7)
    with pytest.raises(ValueError, match=r"ancestors is torch\.int32"):
        accept_paths(*inputs[:4], inputs[4].int(), inputs[5], 7)
    good = accept_paths(*inputs, 7)
    with pytest.raises(ValueError, match=r"out\.emitted is torch\.int32, expected torch\.int64"):
        accept_paths(*inputs, 7, out=good._replace(emitted=good.emitted.int()))
    with pytest.raises(ValueError, match=r"out\.path has shape \[5, 8\], expected \[5, 5\]"):
        accept_paths(*inputs, 4, out=good)
