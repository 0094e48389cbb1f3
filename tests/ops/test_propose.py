# SPDX-License-Identifier: Apache-2.0
"""Ops around a proposal against loops over requests and rows, reference and kernels alike.

The kernels run on a GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, assert_passes_interpreted, needs_kernel, runs_elsewhere
from torch import Tensor

from vllm_weaver.ops import (
    PathCounts,
    PathRows,
    StoredTrees,
    choose_chain,
    count_paths,
    load_roots,
    state_slots,
    store_trees,
)
from vllm_weaver.tree import DraftTree

TRITON = pytest.param("triton", marks=needs_kernel)
both = pytest.mark.parametrize("backend", ["reference", TRITON])


def device_of(backend: str) -> str:
    return DEVICE if backend == "triton" else "cpu"


def tensors(tree: DraftTree) -> list[Tensor]:
    return [tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors]


def random_trees(requests: int, rows: int, seed: int) -> DraftTree:
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((requests, rows), -1, dtype=torch.int32)
    for row in range(1, rows):
        parents[:, row] = torch.randint(max(0, row - 5), row, (requests,), generator=g)
    tokens = torch.randint(1, 200_000, parents.shape, generator=g)
    return DraftTree.from_parents(tokens, parents, torch.randint(1, rows + 1, (requests,)))


# ------------------------------------------------------------------ load_roots


def roots_case(backend: str, requests: int, index: torch.dtype, dtype: torch.dtype) -> dict:
    """Values of 9 slots for a batch of some of them, and buffers for 6 requests."""
    g = torch.Generator().manual_seed(requests)
    slots = torch.randperm(9, generator=g)[:requests].to(index)
    sources = [
        torch.randint(-(2**60), 2**60, (9,), generator=g),
        torch.arange(9) % 2 == 0,
        torch.randn(9, generator=g),
        torch.randint(0, 99, (9,), dtype=torch.int32, generator=g),
        torch.randint(0, 99, (9,), generator=g),
    ]
    targets = [torch.full((6,), 7).to(x.dtype) for x in sources]
    # Tokens of the slots are int64, those of the roots may be int32.
    targets[4] = targets[4].int()
    on = {"device": device_of(backend)}
    wide = torch.randn(40, 1500, generator=g).to(dtype)
    return {
        "hidden": wide.to(**on)[:, :1310],
        "slots": slots.to(**on),
        "sources": [x.to(**on) for x in sources],
        "out_states": torch.zeros(6, 1310, dtype=dtype, **on),
        "targets": [x.to(**on) for x in targets],
        "backend": backend,
    }


def assert_loaded(case: dict, rows: list[int]) -> None:
    count = len(rows)
    slots = case["slots"].long()
    assert torch.equal(case["out_states"][:count], case["hidden"][rows])
    assert not case["out_states"][count:].any()
    for source, target in zip(case["sources"], case["targets"], strict=True):
        assert torch.equal(target[:count], source[slots].to(target.dtype))
        assert bool((target[count:] == torch.tensor(7).to(target.dtype)).all())


@both
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roots_of_a_batch_of_unequal_requests(
    dtype: torch.dtype, index: torch.dtype, backend: str
) -> None:
    case = roots_case(backend, 4, index, dtype)
    starts = torch.tensor([0, 8, 9, 20, 33], dtype=index, device=case["hidden"].device)
    rejected = torch.tensor([5, 0, 10, 3], dtype=torch.int32, device=starts.device)
    load_roots(row_ends=starts[1:], num_rejected=rejected, **case)
    assert_loaded(case, [2, 8, 9, 29])


@both
def test_roots_and_positions_of_paths_alone(backend: str) -> None:
    """Trees of 12 rows, of which 5 are kept in path order; paths of 1, 5 and 3 rows."""
    case = roots_case(backend, 3, torch.int32, torch.float32)
    on = {"device": case["hidden"].device}
    lengths = torch.tensor([1, 5, 3], dtype=torch.int32, **on)
    paths = PathRows(
        rows=12,
        width=5,
        positions=torch.arange(100, 140, **on),
        out_positions=torch.zeros(15, dtype=torch.int64, **on),
        out_rejected=torch.zeros(3, dtype=torch.int32, **on),
    )
    load_roots(row_ends=lengths, num_rejected=12 - lengths, paths=paths, **case)
    assert_loaded(case, [0, 9, 12])
    assert paths.out_rejected.tolist() == [4, 0, 2]
    kept = [100 + 12 * r + i for r in range(3) for i in range(5)]
    assert paths.out_positions.tolist() == kept


def test_roots_that_do_not_fit_are_refused() -> None:
    case = roots_case("reference", 2, torch.int32, torch.float32)
    ends = torch.tensor([3, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_rejected has shape \[1\], expected \[2\]"):
        load_roots(row_ends=ends, num_rejected=ends[:1], **case)
    with pytest.raises(ValueError, match="5 sources and 4 targets"):
        load_roots(row_ends=ends, num_rejected=ends, **{**case, "targets": case["targets"][:4]})
    case["targets"][2] = case["targets"][2].double()
    with pytest.raises(ValueError, match=r"targets\[2\] is torch.float64"):
        load_roots(row_ends=ends, num_rejected=ends, **case)


# ------------------------------------------------------------------ choose_chain


@both
@pytest.mark.parametrize(("depth", "rows"), [(1, 2), (7, 12), (15, 64), (63, 64), (70, 130)])
@pytest.mark.parametrize("only_chains", [False, True])
def test_chains_beside_trees(only_chains: bool, depth: int, rows: int, backend: str) -> None:
    """The chain of `DraftTree.chain` for some requests, the others' trees as they were."""
    requests = 5
    tree = random_trees(requests, rows, rows)
    g = torch.Generator().manual_seed(rows)
    pools = torch.randint(1, 200_000, (requests, depth + 2, 3), generator=g)
    roots = torch.randint(1, 200_000, (requests,), generator=g)
    chain_only = torch.tensor([False, True, True, False, True])
    # A column of a wider pool, as the drafter's best tokens are.
    tokens = pools[:, :depth, 0]
    chain = DraftTree.chain(roots, tokens, num_rows=rows)
    out = [torch.full_like(x, -77) for x in tensors(tree)]
    on = device_of(backend)
    out = [x.to(on) for x in out]
    choose_chain(
        pools.to(on)[:, :depth, 0],
        roots.to(on),
        chain_only.to(on),
        None if only_chains else [x.to(on) for x in tensors(tree)],
        out,
        backend=backend,
    )
    for found, one, other in zip(out, tensors(chain), tensors(tree), strict=True):
        first = (chain_only | only_chains).view(-1, *[1] * (one.dim() - 1))
        assert torch.equal(found.cpu(), torch.where(first, one, other))


def test_a_chain_longer_than_the_rows_is_refused() -> None:
    out = tensors(random_trees(1, 4, 0))
    roots = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"chains are \[1, 4\]"):
        choose_chain(torch.ones(1, 4, dtype=torch.int32), roots, roots > 0, None, out)


# ------------------------------------------------------------------ store_trees


@both
@pytest.mark.parametrize("rows", [2, 12, 64, 130])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_trees_are_kept_by_slot(index: torch.dtype, rows: int, backend: str) -> None:
    on = device_of(backend)
    tree = random_trees(3, rows, rows)
    words = tree.ancestors.shape[2]
    stored = StoredTrees(
        torch.full((6, rows), -9, dtype=torch.int32, device=on),
        torch.full((6, rows), -9, dtype=torch.int32, device=on),
        torch.full((6,), -9, dtype=torch.int32, device=on),
        torch.full((6, rows, words), -9, dtype=torch.int64, device=on),
    )
    slots = [4, 0, 5]
    out = torch.zeros(3, rows - 1, dtype=torch.int64, device=on)
    given = [x.to(on) for x in tensors(tree)]
    store_trees(given, torch.tensor(slots, dtype=index, device=on), stored, out, backend=backend)
    assert torch.equal(out.cpu(), tree.tokens[:, 1:].long())
    kept = (tree.parents, tree.depths, tree.num_nodes, tree.ancestors)
    for buffer, value in zip(stored, kept, strict=True):
        assert torch.equal(buffer[slots].cpu(), value)
        assert bool((buffer[[1, 2, 3]] == -9).all())


# ------------------------------------------------------------------ count_paths


@both
@pytest.mark.parametrize("depth", [1, 7, 70])
def test_totals_of_paths(depth: int, backend: str) -> None:
    g = torch.Generator().manual_seed(depth)
    rows, requests = 2 * depth + 1, 6
    want = [[0] * (depth + 2), [0] * rows, [0] * (rows + 1)]
    on = device_of(backend)
    counts = PathCounts(*(torch.zeros(len(x), dtype=torch.int64, device=on) for x in want))
    for _ in range(3):
        length = torch.randint(0, depth + 2, (requests,), generator=g)
        path = torch.full((requests, depth + 1), -1, dtype=torch.int32)
        for r, count in enumerate(length.tolist()):
            below = torch.randperm(rows - 1, generator=g)[: max(0, count - 1)].sort()[0] + 1
            path[r, :count] = torch.cat([torch.zeros(min(count, 1)), below])
            want[0][count] += 1
            for row in below.tolist():
                want[1][row] += 1
        nodes = torch.randint(0, rows + 1, (requests,), dtype=torch.int32, generator=g)
        for count in nodes.tolist():
            want[2][count] += 1
        count_paths(*(path.to(on), length.int().to(on), nodes.to(on), counts), backend=backend)
    assert [x.tolist() for x in counts] == want


# ------------------------------------------------------------------ state_slots


@both
@pytest.mark.parametrize("requests", [1, 5, 200])
def test_slots_of_states(requests: int, backend: str) -> None:
    g = torch.Generator().manual_seed(requests)
    # Block 0 holds nothing; the rows are those of a wider table.
    wide = torch.randint(-1, 4, (requests, 9), dtype=torch.int32, generator=g)
    seq_lens = torch.randint(0, 60, (requests,), dtype=torch.int32, generator=g)
    nodes = torch.randint(0, 3, (requests,), dtype=torch.int32, generator=g)
    on = device_of(backend)
    for block_size in (0, 10):
        out = torch.full((requests,), 99, dtype=torch.int32, device=on)
        table = wide.to(on)[:, :6]
        state_slots(table, seq_lens.to(on), nodes.to(on), block_size, out, backend=backend)
        for r in range(requests):
            column = max(0, (int(seq_lens[r]) - 1) // 10) if block_size else 0
            block = int(wide[r, column])
            assert int(out[r]) == (block if block > 0 and nodes[r] > 0 else -1)


def test_unknown_backends_are_refused() -> None:
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="state_slots: unknown backend 'cuda'"):
        state_slots(one[:, None], one, one, 0, one, backend="cuda")


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
