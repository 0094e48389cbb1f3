# SPDX-License-Identifier: Apache-2.0
"""The Triton backend of the tree convolution against Transformers', path by path.

The kernels run on a GPU if there is one, else in Triton's interpreter; an environment variable
chooses the interpreter before anything is imported, so one test runs this file again in a process
of its own.
"""

from __future__ import annotations

from dataclasses import fields, replace

import oracles
import pytest
import torch
from interpreter import (
    DEVICE,
    INTERPRETED,
    assert_passes_interpreted,
    needs_gpu,
    needs_kernel,
    runs_elsewhere,
)
from oracles import rms_ratio
from test_conv import Case, assert_rows_match, make_case
from torch import Tensor

from vllm_weaver.ops import conv_commit, conv_table
from vllm_weaver.ops.conv import conv_commit_layers

GEN = torch.Generator().manual_seed(5)


def moved(case: Case) -> Case:
    tensors = {
        f.name: getattr(case, f.name).to(DEVICE, copy=True)
        for f in fields(case)
        if isinstance(getattr(case, f.name), Tensor)
    }
    return replace(case, **tensors)


def commit(stash: object, path: Tensor, length: Tensor, state: Tensor, slots: Tensor, **kw) -> None:
    kw = {name: x.to(DEVICE) for name, x in kw.items()}
    conv_commit(stash, path.to(DEVICE), length.to(DEVICE), state, slots.to(DEVICE), **kw)


@needs_kernel
@pytest.mark.parametrize(
    "tree",
    [
        oracles.chain(1),
        oracles.chain(17),
        oracles.star(33),
        oracles.comb(63),
        oracles.random_tree(GEN, 127, reach=7),
    ],
    ids=["root_alone", "chain", "star", "comb", "random"],
)
@pytest.mark.parametrize("channels", [24, 300])
def test_every_node_equals_the_convolution_along_its_path(
    tree: oracles.Tree, channels: int
) -> None:
    case = make_case([tree], channels=channels)
    assert_rows_match(case, moved(case).run(backend="triton")[0].cpu(), 1e-5)


@needs_kernel
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_any_width_reaches_past_the_root_into_the_history(width: int) -> None:
    case = make_case([oracles.random_tree(GEN, 12, reach=3)], width=width)
    assert_rows_match(case, moved(case).run(backend="triton")[0].cpu(), 1e-5)


@needs_kernel
def test_requests_with_other_node_counts_do_not_mix() -> None:
    trees = [oracles.random_tree(GEN, n, reach=4) for n in (9, 1, 20, 13)]
    case = make_case(trees, num_rows=24, slots=[3, 0, 5, 1])
    assert_rows_match(case, moved(case).run(backend="triton")[0].cpu(), 1e-5)


@needs_kernel
def test_bfloat16_rows_are_summed_in_float32() -> None:
    case = make_case([oracles.wide(32)], dtype=torch.bfloat16)
    y, _ = moved(case).run(backend="triton")
    assert y.dtype == torch.bfloat16
    # The interpreter truncates to bfloat16.
    assert_rows_match(case, y.cpu(), torch.finfo(torch.bfloat16).eps * (2 if INTERPRETED else 1))


@needs_kernel
def test_buffers_given_are_filled_and_no_others_made() -> None:
    case = moved(make_case([oracles.comb(20), oracles.chain(5)]))
    table = conv_table(case.parents, case.num_nodes, 4)
    expected, stash = case.run(backend="triton", table=table)
    out = torch.full_like(expected, float("nan"))
    kept = stash.x.clone()
    stash.x.fill_(float("nan"))
    y, again = case.run(backend="triton", table=table, out=out, stash=stash)
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, expected)
    assert again.x.data_ptr() == stash.x.data_ptr()
    for r, tree in enumerate(case.trees):
        assert torch.equal(stash.x[r, : len(tree)], kept[r, : len(tree)])
        assert torch.equal(stash.x[r, : len(tree)], case.x[r, : len(tree)])


@needs_kernel
def test_state_and_rows_stay_bitwise_alone() -> None:
    case = moved(make_case([oracles.comb(20), oracles.chain(5)]))
    before = case.x.clone(), case.conv_state.clone()
    case.run(backend="triton")
    assert torch.equal(case.x.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(case.conv_state, before[1])


@needs_kernel
def test_inert_requests_give_zeros_and_touch_nothing() -> None:
    case = moved(make_case([oracles.chain(3)] * 3, slots=[-1, 2, -1]))
    case.conv_state[0] = float("nan")
    y, stash = case.run(backend="triton")
    assert torch.equal(y[[0, 2]], torch.zeros_like(y[[0, 2]])) and not y.isnan().any()
    before = case.conv_state.clone()
    path = oracles.padded([[9999, 9999], [0, 1], [-1, -1]])
    commit(stash, path, torch.tensor([2, 0, 2]), case.conv_state, case.slots)
    assert torch.equal(case.conv_state.nan_to_num(), before.nan_to_num())


@needs_kernel
@pytest.mark.parametrize("width", [2, 4])
def test_commit_at_every_depth_keeps_the_last_rows_of_the_path(width: int) -> None:
    case = moved(make_case([oracles.wide(24), oracles.comb(21)], width=width))
    _, stash = case.run(backend="triton")
    paths = [tree.deepest() for tree in case.trees]
    path = oracles.padded(paths)
    for m in range(path.shape[1] + 1):
        state = case.conv_state.clone()
        lengths = [min(m, len(paths[0])), min(path.shape[1] - m, len(paths[1]))]
        commit(stash, path, torch.tensor(lengths), state, case.slots)
        for r, n in enumerate(lengths):
            rows = torch.cat([case.conv_state[r], case.x[r, paths[r][:n]]])
            assert torch.equal(state[r], rows[len(rows) - (width - 1) :])
        assert torch.equal(state[2:], case.conv_state[2:])


@needs_kernel
def test_commit_into_another_slot_leaves_the_source() -> None:
    case = moved(make_case([oracles.chain(6)] * 3, slots=[2, 0, 1]))
    _, stash = case.run(backend="triton")
    path, length = oracles.padded([list(range(6))] * 3), torch.tensor([2, 6, 0])
    moved_to, in_place = case.conv_state.clone(), case.conv_state.clone()
    target = torch.tensor([5, 4, 3], dtype=torch.int32)
    commit(stash, path, length, moved_to, target, source_indices=case.slots)
    commit(stash, path, length, in_place, case.slots)
    assert torch.equal(moved_to[:3], case.conv_state[:3])
    assert torch.equal(moved_to[[5, 4]], in_place[[2, 0]])
    assert torch.equal(moved_to[3], case.conv_state[3])


@needs_kernel
def test_commit_from_no_slot_writes_nothing() -> None:
    case = moved(make_case([oracles.chain(3)] * 2))
    _, stash = case.run(backend="triton")
    before = case.conv_state.clone()
    path, length, source = oracles.padded([[0, 1]] * 2), torch.tensor([2, 2]), torch.tensor([-1, 1])
    commit(stash, path, length, case.conv_state, case.slots, source_indices=source)
    assert torch.equal(case.conv_state[0], before[0])
    assert not torch.equal(case.conv_state[1], before[1])


@needs_kernel
def test_poison_in_the_stash_past_num_nodes_does_not_reach_a_commit() -> None:
    case = moved(make_case([oracles.comb(9), oracles.chain(3)], num_rows=12))
    _, stash = case.run(backend="triton")
    for r, tree in enumerate(case.trees):
        stash.x[r, len(tree) :] = float("nan")
    path = oracles.padded([tree.deepest() for tree in case.trees])
    path[path < 0] = 9999
    length = torch.tensor([len(tree.deepest()) for tree in case.trees])
    commit(stash, path, length, case.conv_state, case.slots)
    assert not case.conv_state.isnan().any()


@needs_kernel
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layers_committed_at_once_have_the_bits_of_one_by_one(backend: str) -> None:
    cases = [make_case([oracles.wide(20), oracles.chain(9)]) for _ in range(3)]
    for case in cases[1:]:
        case.x.mul_(2)
    cases = [moved(case) if backend == "triton" else case for case in cases]
    device = cases[0].x.device
    path = oracles.padded([tree.deepest() for tree in cases[0].trees]).to(device)
    length = torch.tensor([7, 2], dtype=torch.int32, device=device)
    target = torch.tensor([3, 1], dtype=torch.int32, device=device)
    stashes = [case.run(backend=backend)[1] for case in cases]
    states = [case.conv_state.clone() for case in cases]
    source = cases[0].slots
    conv_commit_layers(stashes, path, length, states, target, source_indices=source)
    for case, stash, state in zip(cases, stashes, states, strict=True):
        alone = case.conv_state.clone()
        conv_commit(stash, path, length, alone, target, source_indices=source)
        assert torch.equal(state, alone)


@needs_kernel
def test_strided_states_are_read_and_written_in_place() -> None:
    case = moved(make_case([oracles.comb(9)]))
    channels_first = case.conv_state.transpose(1, 2).contiguous().transpose(1, 2)
    assert not channels_first.is_contiguous()
    path, length = oracles.padded([case.trees[0].deepest()]), torch.tensor([2])
    outputs = []
    for state in (case.conv_state, channels_first):
        y, stash = replace(case, conv_state=state).run(backend="triton")
        outputs.append(y)
        commit(stash, path, length, state, case.slots)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(case.conv_state, channels_first)


@needs_kernel
def test_bias_and_no_activation() -> None:
    case = moved(make_case([oracles.chain(6)]))
    plain, _ = case.run(activation=None, backend="triton")
    bias = torch.linspace(-1, 1, 24, device=DEVICE)
    biased, _ = case.run(bias=bias, activation=None, backend="triton")
    assert torch.allclose(biased, plain + bias, rtol=1e-6, atol=1e-6)
    activated, _ = case.run(bias=bias, backend="triton")
    assert rms_ratio(activated, torch.nn.functional.silu((plain + bias).double())) < 1e-6


@needs_gpu
def test_a_captured_graph_serves_other_trees_and_lengths() -> None:
    first = make_case([oracles.wide(40), oracles.chain(5)], num_rows=40)
    second = make_case([oracles.comb(9), oracles.random_tree(GEN, 39)], num_rows=40)
    case = moved(first)
    table = conv_table(case.parents, case.num_nodes, 4)
    out, stash = case.run(backend="triton", table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(backend="triton", table=table, out=out, stash=stash)
    for f in ("x", "conv_state", "slots", "weight", "parents", "num_nodes"):
        getattr(case, f).copy_(getattr(second, f))
    table.copy_(conv_table(case.parents, case.num_nodes, 4))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_rows_match(second, out.cpu(), 1e-5)


@runs_elsewhere
def test_kernels_without_gpu_or_interpreter_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot run on cpu tensors without TRITON_INTERPRET=1"):
        make_case([oracles.chain(3)]).run(backend="triton")


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
