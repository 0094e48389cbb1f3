# SPDX-License-Identifier: Apache-2.0
"""Plain Python definitions of the trees, one request at a time, and tables to grow them from.

Written from the method's text, with heaps and lists; shares no code with the package.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

Path = tuple[int, ...]
NO_CANDIDATE = float("-inf")


@dataclass
class Node:
    token: int
    parent: int
    depth: int


def add(a: float, b: float) -> float:
    """The float32 sum of two float32 values."""
    return float(np.float32(a) + np.float32(b))


def ddtree(log_probs: list[list[float]], ids: list[list[int]], budget: int) -> list[Node]:
    """Nodes without the root, in the order in which a heap pops them."""
    nodes: list[Node] = []
    # (-score, rank tuple, parent row, score of the parent)
    heap: list[tuple[float, Path, int, float]] = []

    def push(prefix: Path, rank: int, parent: int, parent_score: float) -> None:
        depth = len(prefix)
        if depth == len(log_probs) or rank == len(log_probs[depth]):
            return
        if ids[depth][rank] < 0 or log_probs[depth][rank] == NO_CANDIDATE:
            return
        score = add(parent_score, log_probs[depth][rank])
        heapq.heappush(heap, (-score, (*prefix, rank), parent, parent_score))

    push((), 0, 0, 0.0)
    while heap and len(nodes) < budget:
        negative, ranks, parent, parent_score = heapq.heappop(heap)
        depth = len(ranks)
        nodes.append(Node(ids[depth - 1][ranks[-1]], parent, depth))
        push(ranks[:-1], ranks[-1] + 1, parent, parent_score)
        push(ranks, 0, len(nodes), -negative)
    return nodes


Table = Callable[[int, Path], tuple[list[int], list[float]]]
"""Candidates of the node that a path of tokens (without the root's) leads to, per request."""


def random_table(
    seed: int,
    pool: int,
    values: list[float] | None = None,
    absent: float = 0.0,
    vocabulary: int = 1000,
) -> Table:
    """Random conditionals; `values` forces ties, `absent` is the share of missing candidates."""
    cache: dict[tuple[int, Path], tuple[list[int], list[float]]] = {}

    def table(request: int, path: Path) -> tuple[list[int], list[float]]:
        key = (request, path)
        if key not in cache:
            rng = random.Random(f"{seed}/{request}/{path}")
            ids = rng.sample(range(vocabulary), pool)
            if values is not None:
                log_probs = [rng.choice(values) for _ in ids]
            else:
                logits = [rng.gauss(0, 2.5) for _ in ids]
                log_probs = torch.tensor(logits).log_softmax(0).tolist()
            for i in range(pool):
                if rng.random() < absent:
                    # Either mark alone must do.
                    if rng.random() < 0.5:
                        ids[i] = -1
                    else:
                        log_probs[i] = rng.choice([NO_CANDIDATE, float("nan")])
            cache[key] = ids, log_probs
        return cache[key]

    return table


def best_children(table: Table, request: int, path: Path, children: int) -> list[tuple[float, int]]:
    ids, log_probs = table(request, path)
    usable = [i for i in range(len(ids)) if ids[i] >= 0 and log_probs[i] > NO_CANDIDATE]
    usable.sort(key=lambda i: (-log_probs[i], i))
    return [(log_probs[i], ids[i]) for i in usable[:children]]


def weaver_tree(
    table: Table, request: int, budget: int, max_depth: int, width: int, children: int
) -> tuple[list[Node], set[Path]]:
    """Nodes without the root, best first, and the paths of the expanded ones."""
    nodes: list[Node] = []
    scores: list[float] = []
    expanded: set[Path] = set()
    paths: list[Path] = [()]
    # (-score, insertion number, token, parent row)
    frontier: list[tuple[float, int, int, int]] = []
    inserted = 0

    def expand(row: int, score: float) -> None:
        nonlocal inserted
        expanded.add(paths[row])
        for log_prob, token in best_children(table, request, paths[row], children):
            frontier.append((-add(score, log_prob), inserted, token, row))
            inserted += 1

    expand(0, 0.0)
    while frontier and len(nodes) < budget:
        frontier.sort()
        popped = frontier[: min(width, budget - len(nodes))]
        del frontier[: len(popped)]
        first = len(nodes) + 1
        for negative, _, token, parent in popped:
            paths.append((*paths[parent], token))
            nodes.append(Node(token, parent, len(paths[-1])))
            scores.append(-negative)
        if len(nodes) == budget:
            break
        for row, (negative, *_) in enumerate(popped, start=first):
            if len(paths[row]) < max_depth:
                expand(row, -negative)
    order = sorted(range(len(nodes)), key=lambda i: -scores[i])
    row_of = {0: 0, **{i + 1: row for row, i in enumerate(order, start=1)}}
    ranked = [Node(nodes[i].token, row_of[nodes[i].parent], nodes[i].depth) for i in order]
    return ranked, expanded


def grown_tree(
    table: Table,
    request: int,
    budget: int,
    max_depth: int,
    rounds: int,
    width: int,
    children: int,
) -> list[Node]:
    """Nodes without the root, best first."""
    scores: list[float] = []
    paths: list[Path] = []
    unexpanded: set[int] = set()

    def expand(path: Path, score: float) -> None:
        for log_prob, token in best_children(table, request, path, children):
            if len(path) + 1 < max_depth:
                unexpanded.add(len(scores))
            scores.append(add(score, log_prob))
            paths.append((*path, token))

    expand((), 0.0)
    for _ in range(rounds - 1):
        popped = sorted(unexpanded, key=lambda i: (-scores[i], i))[:width]
        unexpanded -= set(popped)
        for i in popped:
            expand(paths[i], scores[i])
    kept = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:budget]
    row_of = {(): 0} | {paths[i]: row for row, i in enumerate(kept, start=1)}
    return [Node(paths[i][-1], row_of[paths[i][:-1]], len(paths[i])) for i in kept]


class TableExpand:
    """An `expand` that answers from a table, and checks what it is asked.

    Inert entries are answered with NaN and tokens of no meaning.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.expanded: list[set[Path]] = []
        self.sizes: list[int] = []

    def __call__(self, request_N, node_N, tokens_N, depths_N, tree):
        tree.validate()
        device = request_N.device
        assert {t.dtype for t in (request_N, node_N, tokens_N, depths_N)} == {torch.int32}
        requests, nodes = request_N.tolist(), node_N.tolist()
        tokens, depths = tokens_N.tolist(), depths_N.tolist()
        tree = tree.to("cpu")
        tree_tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        num_nodes = tree.num_nodes.tolist()
        assert requests == sorted(requests)
        self.sizes.append(len(nodes))
        self.expanded = self.expanded or [set() for _ in num_nodes]
        answers = []
        for r, node, token, depth in zip(requests, nodes, tokens, depths, strict=True):
            if node < 0:
                assert node == -1 and token == 0 and depth == 0
                answers.append(None)
                continue
            assert node < num_nodes[r] and token == tree_tokens[r][node]
            path = path_of(tree_tokens[r], parents[r], node)
            assert depth == len(path)
            assert path not in self.expanded[r], "expanded twice"
            self.expanded[r].add(path)
            answers.append(self.table(r, path))
        pool = len(self.table(0, ())[0])
        inert = ([7] * pool, [float("nan")] * pool)
        answers = [inert if a is None else a for a in answers]
        ids = torch.tensor([a[0] for a in answers], device=device).reshape(-1, pool)
        log_probs = torch.tensor([a[1] for a in answers], device=device).reshape(-1, pool)
        return ids, log_probs


def path_of(tokens: list[int], parents: list[int], row: int) -> Path:
    """Tokens from below the root to a row."""
    path: list[int] = []
    while row > 0:
        path.append(tokens[row])
        row = parents[row]
    return tuple(reversed(path))


def assert_tree_is(tree, request: int, root_token: int, nodes: list[Node]) -> None:
    """The tree holds exactly these nodes in this order, and inert rows after them."""
    num_rows = tree.num_rows
    count = len(nodes) + 1
    rest = num_rows - count
    assert int(tree.num_nodes[request]) == count
    assert tree.tokens[request].tolist() == [root_token, *(n.token for n in nodes)] + [0] * rest
    assert tree.parents[request].tolist() == [-1, *(n.parent for n in nodes)] + [-1] * rest
    assert tree.depths[request].tolist() == [0, *(n.depth for n in nodes)] + [0] * rest
    assert ancestor_words(tree, request, count) == tree.ancestors[request].tolist()


def ancestor_words(tree, request: int, count: int) -> list[list[int]]:
    parents = tree.parents[request].tolist()
    num_words = tree.ancestors.shape[2]
    table = []
    for row in range(tree.num_rows):
        bits = 0
        node = row if row < count else -1
        while node >= 0:
            bits |= 1 << node
            node = parents[node]
        words = [(bits >> (64 * w)) & (2**64 - 1) for w in range(num_words)]
        table.append([w - 2**64 if w >= 2**63 else w for w in words])
    return table


def random_parents(rng: random.Random, num_nodes: int, kind: str) -> list[int]:
    """Parents of a tree of a given shape, root first."""
    if kind == "chain":
        return list(range(-1, num_nodes - 1))
    if kind == "star":
        return [-1] + [0] * (num_nodes - 1)
    if kind == "comb":
        return [-1] + [max(0, i - 1 - (i % 2 == 0)) for i in range(1, num_nodes)]
    return [-1] + [rng.randrange(i) for i in range(1, num_nodes)]
