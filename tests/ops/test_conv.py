# SPDX-License-Identifier: Apache-2.0
"""Causal convolution on trees and sequences against Transformers', path by path."""

from __future__ import annotations

from dataclasses import dataclass

import oracles
import pytest
import torch
from oracles import Tree, rms_ratio
from torch import Tensor

from vllm_weaver.ops import (
    ConvStash,
    causal_conv1d_prefill,
    causal_conv1d_tree,
    conv_commit,
    conv_table,
)

SLOTS = 6
GEN = torch.Generator().manual_seed(5)


@dataclass
class Case:
    """Inputs of a batch of trees; request r uses slot `slots[r]`."""

    trees: list[Tree]
    x: Tensor
    conv_state: Tensor
    slots: Tensor
    weight: Tensor
    parents: Tensor
    num_nodes: Tensor

    def run(self, **options: object) -> tuple[Tensor, ConvStash]:
        return causal_conv1d_tree(
            self.x,
            self.conv_state,
            self.slots,
            self.weight,
            self.parents,
            self.num_nodes,
            **options,
        )


def make_case(
    trees: list[Tree],
    channels: int = 24,
    width: int = 4,
    num_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    slots: list[int] | None = None,
) -> Case:
    """A batch of trees with NaN rows and garbage parents past each tree's nodes."""
    gen = torch.Generator().manual_seed(0)
    R, T = len(trees), num_rows or max(map(len, trees))
    x = torch.randn(R, T, channels, generator=gen).to(dtype)
    for r, tree in enumerate(trees):
        x[r, len(tree) :] = float("nan")
    return Case(
        trees,
        x,
        torch.randn(SLOTS, width - 1, channels, generator=gen).to(dtype),
        torch.tensor(slots or list(range(R)), dtype=torch.int32),
        torch.randn(channels, width, generator=gen).to(dtype),
        *oracles.batch(trees, T),
    )


def assert_rows_match(case: Case, y: Tensor, rtol: float) -> None:
    for r, tree in enumerate(case.trees):
        history = case.conv_state[case.slots[r]]
        expected = oracles.conv_tree(tree, case.x[r, : len(tree)], history, case.weight)
        torch.testing.assert_close(y[r, : len(tree)].double(), expected, rtol=rtol, atol=3e-6)
        assert torch.equal(y[r, len(tree) :], torch.zeros_like(y[r, len(tree) :]))


@pytest.mark.parametrize(
    "tree",
    [
        oracles.chain(1),
        oracles.chain(2),
        oracles.chain(17),
        oracles.star(33),
        oracles.comb(63),
        oracles.wide(64),
        oracles.random_tree(GEN, 127, reach=7),
    ],
    ids=["root_alone", "two_nodes", "chain", "star", "comb", "depth_15", "random"],
)
def test_every_node_equals_the_convolution_along_its_path(tree: Tree) -> None:
    case = make_case([tree])
    assert_rows_match(case, case.run()[0], 1e-5)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_any_width_reaches_past_the_root_into_the_history(width: int) -> None:
    case = make_case([oracles.random_tree(GEN, 12, reach=3)], width=width)
    assert_rows_match(case, case.run()[0], 1e-5)


def test_requests_with_other_node_counts_do_not_mix() -> None:
    trees = [oracles.random_tree(GEN, n, reach=4) for n in (9, 1, 20, 13)]
    case = make_case(trees, num_rows=24, slots=[3, 0, 5, 1])
    assert_rows_match(case, case.run()[0], 1e-5)


def test_bfloat16_rows_are_summed_in_float32() -> None:
    case = make_case([oracles.wide(32)], dtype=torch.bfloat16)
    y, _ = case.run()
    assert y.dtype == torch.bfloat16
    assert_rows_match(case, y, torch.finfo(torch.bfloat16).eps)


def test_table_counts_hops_past_the_root_from_the_most_recent_row() -> None:
    parents = torch.tensor([[-1, 0, 1, 1, 3, 77]], dtype=torch.int32)
    table = conv_table(parents, torch.tensor([5], dtype=torch.int32), 4)
    assert table.dtype == torch.int32
    assert table.tolist() == [
        [[-1, -2, -3], [0, -1, -2], [1, 0, -1], [1, 0, -1], [3, 1, 0], [-1, -1, -1]]
    ]


def test_table_given_or_made_is_the_same() -> None:
    case = make_case([oracles.comb(20), oracles.chain(5)])
    table = conv_table(case.parents, case.num_nodes, 4)
    assert torch.equal(case.run(table=table)[0], case.run()[0])


def test_state_and_rows_stay_bitwise_alone() -> None:
    case = make_case([oracles.comb(20), oracles.chain(5)])
    before = case.x.clone(), case.conv_state.clone()
    case.run()
    assert torch.equal(case.x.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(case.conv_state, before[1])


def test_inert_requests_give_zeros_and_touch_nothing() -> None:
    case = make_case([oracles.chain(3)] * 3, slots=[-1, 2, -1])
    case.conv_state[0] = float("nan")
    y, stash = case.run()
    assert torch.equal(y[[0, 2]], torch.zeros_like(y[[0, 2]])) and not y.isnan().any()
    before = case.conv_state.clone()
    path = oracles.padded([[9999, 9999], [0, 1], [-1, -1]])
    conv_commit(stash, path, torch.tensor([2, 0, 2]), case.conv_state, case.slots)
    assert torch.equal(case.conv_state.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("width", [2, 4])
def test_commit_at_every_depth_keeps_the_last_rows_of_the_path(width: int) -> None:
    case = make_case([oracles.wide(24), oracles.comb(21)], width=width)
    _, stash = case.run()
    paths = [tree.deepest() for tree in case.trees]
    path = oracles.padded(paths)
    for m in range(path.shape[1] + 1):
        state = case.conv_state.clone()
        lengths = [min(m, len(paths[0])), min(path.shape[1] - m, len(paths[1]))]
        conv_commit(stash, path, torch.tensor(lengths), state, case.slots)
        for r, n in enumerate(lengths):
            rows = torch.cat([case.conv_state[r], case.x[r, paths[r][:n]]])
            assert torch.equal(state[r], rows[len(rows) - (width - 1) :])
        assert torch.equal(state[2:], case.conv_state[2:])


def test_commit_into_another_slot_leaves_the_source() -> None:
    case = make_case([oracles.chain(6), oracles.chain(6), oracles.chain(6)], slots=[2, 0, 1])
    _, stash = case.run()
    path, length = oracles.padded([list(range(6))] * 3), torch.tensor([2, 6, 0])
    moved, in_place = case.conv_state.clone(), case.conv_state.clone()
    target = torch.tensor([5, 4, 3], dtype=torch.int32)
    conv_commit(stash, path, length, moved, target, source_indices=case.slots)
    conv_commit(stash, path, length, in_place, case.slots)
    assert torch.equal(moved[:3], case.conv_state[:3])
    assert torch.equal(moved[[5, 4]], in_place[[2, 0]])
    assert torch.equal(moved[3], case.conv_state[3])


def test_commit_from_no_slot_writes_nothing() -> None:
    case = make_case([oracles.chain(3)] * 2)
    _, stash = case.run()
    before = case.conv_state.clone()
    path, length, source = oracles.padded([[0, 1]] * 2), torch.tensor([2, 2]), torch.tensor([-1, 1])
    conv_commit(stash, path, length, case.conv_state, case.slots, source_indices=source)
    assert torch.equal(case.conv_state[0], before[0])
    assert not torch.equal(case.conv_state[1], before[1])


def test_poison_in_the_stash_past_num_nodes_does_not_reach_a_commit() -> None:
    case = make_case([oracles.comb(9), oracles.chain(3)], num_rows=12)
    _, stash = case.run()
    for r, tree in enumerate(case.trees):
        stash.x[r, len(tree) :] = float("nan")
    path = oracles.padded([tree.deepest() for tree in case.trees])
    path[path < 0] = 9999
    length = torch.tensor([len(tree.deepest()) for tree in case.trees])
    conv_commit(stash, path, length, case.conv_state, case.slots)
    assert not case.conv_state.isnan().any()


def test_selected_requests_of_a_stash_commit_as_before() -> None:
    case = make_case([oracles.chain(8), oracles.comb(8), oracles.wide(8)])
    _, stash = case.run()
    path, length = oracles.padded([t.deepest() for t in case.trees]), torch.tensor([2, 4, 1])
    whole, parts = case.conv_state.clone(), case.conv_state.clone()
    conv_commit(stash, path, length, whole, case.slots)
    for rows in (torch.tensor([2, 0]), slice(1, 2)):
        conv_commit(stash.select(rows), path[rows], length[rows], parts, case.slots[rows])
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_windows_of_verify_and_commit_equal_one_long_sequence_bit_for_bit(threads: int) -> None:
    """The conv window and its committed rows never drift: every accepted row is the chain's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gen = torch.Generator().manual_seed(2)
        case = make_case([oracles.chain(1)], channels=30)
        state, start = case.conv_state.clone(), case.conv_state.clone()
        rows, outputs = [], []
        for window in range(64):
            tree = oracles.random_tree(gen, 13, reach=4)
            parents, num_nodes = oracles.batch([tree], 13)
            x = torch.randn(1, 13, 30, generator=gen)
            y, stash = causal_conv1d_tree(x, state, case.slots, case.weight, parents, num_nodes)
            path = tree.deepest()[: window % 5]
            conv_commit(
                stash, oracles.padded([path], 13), torch.tensor([len(path)]), state, case.slots
            )
            rows.append(x[0, path])
            outputs.append(y[0, path])
        sequence = torch.cat(rows)
        starts = torch.tensor([0, len(sequence)])
        y = causal_conv1d_prefill(
            sequence, start, case.slots, case.weight, starts, torch.tensor([True])
        )
        assert torch.equal(y, torch.cat(outputs))
        assert torch.equal(start, state)
    finally:
        torch.set_num_threads(before)


def test_prefill_of_any_lengths_equals_the_convolution() -> None:
    lengths = [5, 1, 2, 0, 300, 3]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    case = make_case([oracles.chain(sum(lengths))], num_rows=sum(lengths) + 2, channels=1000)
    x, state = case.x[0], case.conv_state
    slots = torch.tensor([2, 0, -1, 3, 5, 1], dtype=torch.int32)
    initial = torch.tensor([True, True, True, True, False, True])
    state[5] = float("nan")
    before = state.clone()
    y = causal_conv1d_prefill(x, state, slots, case.weight, starts, initial)
    for r, slot in enumerate(slots.tolist()):
        part = slice(int(starts[r]), int(starts[r + 1]))
        if slot < 0:
            assert torch.equal(y[part], torch.zeros_like(y[part]))
        elif lengths[r] == 0:
            assert torch.equal(state[slot], before[slot])
        else:
            history = before[slot] if initial[r] else torch.zeros_like(before[slot])
            expected, last = oracles.conv_sequence(x[part][None], history[None], case.weight)
            torch.testing.assert_close(y[part].double(), expected[0], rtol=1e-5, atol=3e-6)
            assert torch.equal(state[slot].double(), last[0])
    assert torch.equal(y[-2:], torch.zeros_like(y[-2:]))
    assert torch.equal(state[4], before[4])


def test_prefill_in_pieces_equals_prefill_at_once_bit_for_bit() -> None:
    case = make_case([oracles.chain(11)])
    x, slot = case.x[0], torch.tensor([2], dtype=torch.int32)
    whole, pieces = case.conv_state.clone(), case.conv_state.clone()
    y = causal_conv1d_prefill(
        x, whole, slot, case.weight, torch.tensor([0, 11]), torch.tensor([False])
    )
    parts, first = [], 0
    for size in (1, 1, 2, 4, 3):
        starts, initial = torch.tensor([0, size]), torch.tensor([first > 0])
        part = x[first : first + size]
        parts.append(causal_conv1d_prefill(part, pieces, slot, case.weight, starts, initial))
        first += size
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(pieces, whole)


def test_strided_states_are_read_and_written_in_place() -> None:
    case = make_case([oracles.comb(9)])
    channels_first = case.conv_state.transpose(1, 2).contiguous().transpose(1, 2)
    assert not channels_first.is_contiguous()
    path, length = oracles.padded([case.trees[0].deepest()]), torch.tensor([2])
    outputs = []
    for state in (case.conv_state, channels_first):
        case.conv_state = state
        y, stash = case.run()
        outputs.append(y)
        conv_commit(stash, path, length, state, case.slots)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(case.conv_state, channels_first)


def test_bias_and_no_activation() -> None:
    case = make_case([oracles.chain(6)])
    plain, _ = case.run(activation=None)
    bias = torch.linspace(-1, 1, 24)
    biased, _ = case.run(bias=bias, activation=None)
    assert torch.equal(biased, plain + bias)
    activated, _ = case.run(bias=bias)
    assert rms_ratio(activated, torch.nn.functional.silu((plain + bias).double())) < 1e-6


def test_bad_input_is_refused_in_one_line() -> None:
    case = make_case([oracles.chain(4)])
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference"):
        case.run(backend="cuda")
    with pytest.raises(ValueError, match="activation 'gelu' is not known"):
        case.run(activation="gelu")
    with pytest.raises(ValueError, match=r"table has shape \[1, 4, 2\], expected \[1, 4, 3\]"):
        case.run(table=torch.zeros(1, 4, 2, dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"conv_state has shape \[6, 3, 24\], expected \[6, 4, 24\]"
    ):
        case.weight = torch.zeros(24, 5)
        case.run()
