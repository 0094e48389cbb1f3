# SPDX-License-Identifier: Apache-2.0
"""prepare_step against trees laid out row by row, reference and kernel alike.

The kernel runs on a GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from interpreter import CUDA, DEVICE, needs_kernel
from torch import Tensor

from vllm_weaver.ops import StepTensors, StoredTrees, ancestor_words, prepare_step

TRITON = pytest.param("triton", marks=needs_kernel)
both = pytest.mark.parametrize("backend", ["reference", TRITON])


@dataclass
class Case:
    """Stored trees of `parents` and `nodes` by slot, and a batch that schedules some of them."""

    parents: list[list[int]]
    nodes: list[int]
    slots: list[int]
    counts: list[int]
    others: int
    rows: int

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + count)
        return starts

    @property
    def entries(self) -> int:
        return self.starts[-1] + self.others

    def stored(self) -> StoredTrees:
        """Past `nodes`, what no reader may use."""
        S, rows = len(self.parents), self.rows
        parents = torch.full((S, rows), 10**6, dtype=torch.int32)
        depths = torch.full((S, rows), -99, dtype=torch.int32)
        nodes = torch.tensor(self.nodes, dtype=torch.int32)
        for slot, tree in enumerate(self.parents):
            for row, parent in enumerate(tree):
                parents[slot, row] = parent
                depths[slot, row] = depths[slot, parent] + 1 if parent >= 0 else 0
        words = ancestor_words(torch.where(parents < rows, parents, -1), nodes)
        words[torch.arange(rows) >= nodes[:, None]] = -1
        return StoredTrees(parents, depths, nodes, words)


def make_case(seed: int, rows: int, requests: int, others: int = 7, uniform: bool = False) -> Case:
    rng = random.Random(seed)
    slots = rng.sample(range(requests + 3), requests)
    parents, nodes = [], []
    for _ in range(requests + 3):
        count = rng.randint(1, rows)
        parents.append([-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, count))])
        nodes.append(count)
    counts = [rows if uniform else rng.randint(1, rows) for _ in slots]
    return Case(parents, nodes, slots, counts, others, rows)


def expected_rows(case: Case, R: int, T: int, width: int) -> dict[str, list]:
    """Every buffer as nested lists; tokens are those of `run`."""
    want: dict[str, list] = {name: [] for name in StepTensors._fields}
    for r in range(R):
        known = r < len(case.slots)
        tree = case.parents[case.slots[r]] if known else []
        count = case.counts[r] if known else 0
        n = min(len(tree), count)
        depths: list[int] = []
        tables, masks = [], []
        for row in range(T):
            live = row < n
            bits, hops = 1 << row, [-1] * (width - 1)
            if live:
                depths.append(depths[tree[row]] + 1 if row else 0)
                line = [row]
                while len(line) <= max(width, row + 1):
                    line.append(tree[line[-1]] if line[-1] >= 0 else line[-1] - 1)
                hops = line[1:width]
                bits = sum(1 << a for a in set(line) if a >= 0)
            tables.append(hops)
            words = [(bits >> (64 * w)) & (2**64 - 1) for w in range(-(-T // 64))]
            masks.append([w - 2**64 if w >= 2**63 else w for w in words])
        dead = [0] * (T - n)
        start = case.starts[r] if known else 0
        want["tokens"].append([1000 + start + i for i in range(n)] + dead)
        want["parents"].append(tree[:n] + [-1] * (T - n))
        want["depths"].append(depths + dead)
        want["num_nodes"].append(n)
        want["ancestors"].append(masks)
        want["context_lens"].append(500 + 10 * r if known else 0)
        want["offsets"].append([d - i for i, d in enumerate(depths)] + dead)
        want["conv_table"].append(tables)
    return want


def run(
    case: Case,
    R: int,
    T: int,
    width: int,
    backend: str,
    positions: Tensor | None,
    index: torch.dtype = torch.int32,
) -> tuple[StepTensors, Tensor | None]:
    device = DEVICE if backend == "triton" else "cpu"
    out = StepTensors.empty(R, T, width, device)
    for buffer in out:
        buffer.fill_(-77)
    lens = [500 + 10 * r + c for r, c in enumerate(case.counts)] + [31, 41]
    positions = None if positions is None else positions.to(device)
    prepare_step(
        StoredTrees(*(x.to(device) for x in case.stored())),
        torch.tensor(case.slots, dtype=index, device=device),
        torch.tensor(case.starts, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.arange(1000, 1000 + case.entries, dtype=index, device=device),
        positions,
        out,
        backend=backend,
    )
    return out, positions


def assert_step(case: Case, out: StepTensors, positions: Tensor | None, width: int) -> None:
    R, T = out.tokens.shape
    want = expected_rows(case, R, T, width)
    for name, buffer in out._asdict().items():
        assert buffer.tolist() == want[name], name
    if positions is not None:
        linear = torch.arange(case.entries)
        for r, start in enumerate(case.starts[:-1]):
            n = want["num_nodes"][r]
            linear[start : start + n] += torch.tensor(want["offsets"][r][:n], dtype=torch.int64)
        for axis, row in enumerate(positions.cpu().view(-1, case.entries)):
            assert torch.equal(row, linear + 100 * axis)


@both
@pytest.mark.parametrize(
    ("rows", "requests", "padding"), [(1, 1, 0), (2, 3, 2), (16, 3, 1), (64, 2, 0), (65, 2, 1)]
)
def test_every_buffer_holds_the_scheduled_trees(
    rows: int, requests: int, padding: int, backend: str
) -> None:
    case = make_case(rows, rows, requests)
    positions = torch.arange(case.entries)
    out, moved = run(case, requests + padding, rows, 4, backend, positions)
    assert_step(case, out, moved, 4)


@both
def test_widest_tree_and_every_axis_of_a_position(backend: str) -> None:
    case = make_case(1, 256, 2, uniform=True)
    wide = torch.zeros(3, case.entries + 9, dtype=torch.int64)
    wide[:, : case.entries] = torch.arange(case.entries) + 100 * torch.arange(3)[:, None]
    out, moved = run(case, 2, 256, 4, backend, wide[:, : case.entries], torch.int64)
    assert_step(case, out, moved, 4)


@both
def test_buffers_narrower_than_what_is_stored(backend: str) -> None:
    case = make_case(2, 100, 3)
    case.counts = [20, 3, 17]
    out, moved = run(case, 4, 20, 2, backend, torch.arange(case.entries))
    assert_step(case, out, moved, 2)


@both
def test_without_positions_or_convolution(backend: str) -> None:
    case = make_case(3, 12, 2)
    out, _ = run(case, 3, 12, 1, backend, None)
    assert out.conv_table.shape == (3, 12, 0)
    assert_step(case, out, None, 1)


@both
def test_a_batch_of_padding_alone(backend: str) -> None:
    case = Case([[-1]], [1], [], [], others=4, rows=8)
    out, moved = run(case, 2, 8, 4, backend, torch.arange(4))
    assert_step(case, out, moved, 4)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_no_allocation_and_stable_addresses_in_a_captured_graph() -> None:
    first, second = make_case(4, 64, 3, uniform=True), make_case(5, 64, 3, uniform=True)
    inputs = [*(x.cuda() for x in first.stored())]
    slots = torch.tensor(first.slots, dtype=torch.int32, device="cuda")
    starts = torch.tensor(first.starts, dtype=torch.int32, device="cuda")
    lens = torch.tensor([564, 574, 584], dtype=torch.int32, device="cuda")
    ids = torch.arange(1000, 1000 + first.entries, dtype=torch.int32, device="cuda")
    positions = torch.arange(first.entries, device="cuda")
    out = StepTensors.empty(4, 64, 4, "cuda")
    prepare_step(StoredTrees(*inputs), slots, starts, lens, ids, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_step(StoredTrees(*inputs), slots, starts, lens, ids, positions, out)
    for buffer, value in zip(inputs, second.stored(), strict=True):
        buffer.copy_(value)
    slots.copy_(torch.tensor(second.slots))
    graph.replay()
    assert_step(second, out, positions, 4)


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    case = make_case(0, 8, 2)
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    ids = torch.empty(case.entries, dtype=torch.int32, device="meta")
    prepare_step(
        StoredTrees(*(x.to("meta") for x in case.stored())),
        starts[:2],
        starts,
        starts,
        ids,
        ids.long(),
        StepTensors.empty(3, 8, 4, "meta"),
    )


def test_bad_input_is_refused_by_name() -> None:
    case = make_case(0, 8, 2)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference, triton"):
        run(case, 2, 8, 4, "cuda", None)
    with pytest.raises(ValueError, match="slots holds 2 requests, the buffers are for 1"):
        run(case, 1, 8, 4, "reference", None)
    with pytest.raises(ValueError, match=r"the buffers have 9 rows, stored trees \[5, 8\]"):
        run(case, 2, 9, 4, "reference", None)
    with pytest.raises(ValueError, match=r"positions has shape \[3\]"):
        run(case, 2, 8, 4, "reference", torch.arange(3))
    with pytest.raises(ValueError, match=r"positions is torch\.int32"):
        run(case, 2, 8, 4, "reference", torch.arange(case.entries).int())
