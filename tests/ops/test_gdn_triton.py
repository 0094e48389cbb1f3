# SPDX-License-Identifier: Apache-2.0
"""The Triton backend of the Gated DeltaNet ops against Transformers' recurrence and decode's bits.

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
    CUDA,
    DEVICE,
    INTERPRETED,
    assert_passes_interpreted,
    needs_gpu,
    needs_kernel,
    runs_elsewhere,
)
from oracles import rms_ratio
from test_gdn import Case, expected_outputs, expected_state, make_case
from torch import Tensor

from vllm_weaver.ops import (
    ancestor_words,
    causal_conv1d_tree,
    conv_commit,
    conv_table,
    gdn_commit,
    gdn_decode,
    gdn_gate,
)
from vllm_weaver.ops.gdn import gdn_commit_layers

FLOAT32 = 3e-6
# Rounding of the output, and what products in halves add. The interpreter truncates to bfloat16.
NARROW = {torch.float16: 7e-4, torch.bfloat16: 4e-3 if INTERPRETED else 2.1e-3}


def moved(case: Case) -> Case:
    tensors = {
        f.name: getattr(case, f.name).to(DEVICE, copy=True)
        for f in fields(case)
        if isinstance(getattr(case, f.name), Tensor)
    }
    return replace(case, **tensors)


def verify(case: Case, **options: object) -> tuple[Tensor, object]:
    out, stash = moved(case).verify(backend="triton", **options)
    return out.cpu(), stash


def assert_outputs_match(case: Case, out: Tensor, tolerance: float) -> None:
    for r, tree in enumerate(case.trees):
        error = rms_ratio(out[r, : len(tree)], expected_outputs(case, r))
        assert error < tolerance, (r, error)
        assert torch.equal(out[r, len(tree) :], torch.zeros_like(out[r, len(tree) :]))


def commit(stash: object, path: Tensor, length: Tensor, state: Tensor, slots: Tensor, **kw) -> None:
    source = kw.pop("source_indices", None)
    gdn_commit(
        stash,
        path.to(DEVICE),
        length.to(DEVICE),
        state,
        slots.to(DEVICE),
        source_indices=None if source is None else source.to(DEVICE),
        **kw,
    )


def decode_path(case: Case, request: int, path: list[int], state: Tensor) -> Tensor:
    """State [HV, V, K] after the backend's `gdn_decode`, called for one request once per node."""
    state = state[None].clone()
    for node in path:
        gdn_decode(
            *(x[request, node][None] for x in moved(case).rows),
            state,
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
            backend="triton",
        )
    return state[0]


GEN = torch.Generator().manual_seed(7)
TREES = {
    "random": oracles.random_tree(GEN, 40),
    "chain": oracles.chain(17),
    "chain_of_70": oracles.chain(70),
    "star": oracles.star(65),
    "comb": oracles.comb(33),
    "depth_15": oracles.wide(64),
    "root_alone": oracles.chain(1),
    "two_nodes": oracles.chain(2),
    "odd_127": oracles.random_tree(GEN, 127, reach=9),
}
LARGE = {
    "chain_of_256": oracles.chain(256),
    "random_256": oracles.random_tree(GEN, 256, reach=30),
    "comb_200": oracles.comb(200),
}


@needs_kernel
@pytest.mark.parametrize("name", TREES)
def test_every_node_equals_the_recurrence_along_its_path(name: str) -> None:
    case = make_case([TREES[name]])
    assert_outputs_match(case, verify(case)[0], FLOAT32)


@needs_kernel
@pytest.mark.parametrize("name", ["depth_15", "odd_127", "chain_of_70", "star", "two_nodes"])
@pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
def test_narrow_inputs_lose_little_more_than_the_rounding_of_the_output(
    name: str, dtype: torch.dtype
) -> None:
    case = make_case([TREES[name]], dtype=dtype)
    out, _ = verify(case)
    assert out.dtype == dtype
    assert_outputs_match(case, out, NARROW[dtype])


@needs_gpu
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_up_to_256_rows(name: str, dtype: torch.dtype) -> None:
    case = make_case([LARGE[name]], dtype=dtype)
    assert_outputs_match(case, verify(case)[0], NARROW.get(dtype, FLOAT32))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("tiling", [(16, 32, 32), (32, 32, 64), (64, 64, 32)], ids=str)
def test_every_tiling_gives_the_same(dtype: torch.dtype, tiling: tuple[int, int, int]) -> None:
    from vllm_weaver.ops.gdn.triton import Tiling, tree_verify

    case = make_case([oracles.random_tree(GEN, 40), oracles.comb(33)], dtype=dtype)
    on_device = moved(case)
    words = ancestor_words(on_device.parents, on_device.num_nodes)
    out, _ = tree_verify(
        *(*on_device.rows, on_device.state, on_device.slots, on_device.num_nodes, words),
        *(64**-0.5, True),
        tiling=Tiling(*tiling, 4, 2),
    )
    assert_outputs_match(case, out.cpu(), NARROW.get(dtype, FLOAT32))


@needs_kernel
def test_256_rows_of_any_depth() -> None:
    case = make_case([oracles.random_tree(GEN, 256, reach=30)], dtype=torch.float16, heads=(1, 1))
    assert_outputs_match(case, verify(case)[0], NARROW[torch.float16])


@needs_kernel
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
@pytest.mark.parametrize("dim", [64, 128])
def test_value_heads_share_their_key_head(heads: tuple[int, int], dim: int) -> None:
    case = make_case([oracles.random_tree(GEN, 17), oracles.comb(12)], heads=heads, dim=dim)
    assert_outputs_match(case, verify(case)[0], FLOAT32)


@needs_kernel
@pytest.mark.parametrize("name", ["depth_15", "odd_127", "root_alone"])
def test_a_bound_on_the_depth_changes_only_rounding(name: str) -> None:
    case = make_case([TREES[name]])
    depth = len(TREES[name].deepest()) - 1
    assert_outputs_match(case, verify(case, max_depth=depth)[0], FLOAT32)
    narrow = make_case([TREES[name]], dtype=torch.float16)
    assert_outputs_match(narrow, verify(narrow, max_depth=depth)[0], NARROW[torch.float16])


@needs_kernel
def test_requests_with_other_node_counts_do_not_mix() -> None:
    trees = [oracles.random_tree(GEN, size, reach=5) for size in (17, 1, 33, 9)]
    case = make_case(trees, num_rows=40, slots=[4, 0, 5, 2])
    assert_outputs_match(case, verify(case)[0], FLOAT32)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_strong_decay_neither_overflows_nor_blurs(dtype: torch.dtype) -> None:
    case = make_case([TREES["depth_15"]], dtype=dtype)
    for low, high in ((50.0, 51.0), (0.0, 500.0)):
        gen = torch.Generator().manual_seed(1)
        case.g.uniform_(-high, -low, generator=gen)
        assert_outputs_match(case, verify(case)[0], NARROW.get(dtype, FLOAT32))


@needs_kernel
def test_mild_decay_far_below_a_strong_one_keeps_its_precision() -> None:
    case = make_case([oracles.chain(16)])
    case.g[:, :8] = -900.0
    case.g[:, 8:] *= 0.01
    assert_outputs_match(case, verify(case)[0], FLOAT32)


@needs_kernel
@pytest.mark.parametrize("max_depth", [None, 15])
def test_equal_keys_do_not_blow_up_the_solve(max_depth: int | None) -> None:
    # Powers of X would reach 6,435 here, and their rounding in halves the size of the outputs.
    case = make_case([oracles.wide(64)], dtype=torch.float16, decay=1e-3)
    case.k[:] = case.k[:, :1] + 0.05 * case.k
    case.beta[:] = 0.98 + 0.02 * case.beta
    assert_outputs_match(case, verify(case, max_depth=max_depth)[0], 4e-3)


@needs_kernel
def test_verify_leaves_state_and_inputs_bitwise_alone() -> None:
    case = moved(make_case([TREES["random"], oracles.chain(3)]))
    before = [x.clone() for x in (*case.rows, case.state)]
    case.verify(backend="triton")
    for x, y in zip((*case.rows, case.state), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@needs_kernel
def test_stash_aliases_no_input() -> None:
    case = moved(make_case([oracles.random_tree(GEN, 12)]))
    _, stash = case.verify(backend="triton")
    clean = case.state.clone()
    path, length = oracles.padded([case.trees[0].deepest()]), torch.tensor([3])
    commit(stash, path, length, clean, case.slots)
    for x in case.rows:
        x.fill_(float("nan"))
    commit(stash, path, length, case.state, case.slots)
    assert torch.equal(case.state, clean)


@needs_kernel
def test_buffers_given_are_filled_and_no_others_made() -> None:
    case = moved(make_case([TREES["random"], oracles.chain(3)]))
    words = ancestor_words(case.parents, case.num_nodes)
    expected, stash = case.verify(backend="triton", ancestors=words)
    buffers = [getattr(stash, f.name) for f in fields(stash)]
    buffers = [x for x in buffers if isinstance(x, Tensor)]
    kept = [x.clone() for x in buffers]
    for x in (*buffers, out := torch.full_like(expected, float("nan"))):
        x.fill_(float("nan"))
    got, again = case.verify(backend="triton", ancestors=words, out=out, stash=stash)
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, expected)
    for f, x, y in zip([f for f in fields(again)][: len(buffers)], buffers, kept, strict=True):
        assert getattr(again, f.name).data_ptr() == x.data_ptr()
        for r, tree in enumerate(case.trees):
            assert torch.equal(x[r, : len(tree)], y[r, : len(tree)])


@needs_kernel
def test_nothing_past_the_nodes_is_read_from_the_ancestors() -> None:
    case = moved(make_case([oracles.random_tree(GEN, 70), oracles.comb(65)], num_rows=80))
    words = ancestor_words(case.parents, case.num_nodes)
    expected = case.verify(backend="triton", ancestors=words)[0]
    for r, tree in enumerate(case.trees):
        words[r, len(tree) :] = -1
        words[r, : len(tree), 1] |= -1 << (len(tree) - 64)
    assert torch.equal(case.verify(backend="triton", ancestors=words)[0], expected)


@needs_kernel
def test_inert_requests_give_zeros_and_touch_nothing() -> None:
    trees = [oracles.random_tree(GEN, 9), oracles.chain(4), oracles.star(5)]
    case = make_case(trees, slots=[-1, 3, -1])
    case.state[0] = float("nan")
    case.num_nodes[2] = 0
    out, stash = verify(case)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert rms_ratio(out[1, :4], expected_outputs(case, 1)) < FLOAT32
    state = case.state.to(DEVICE, copy=True)
    path, length = oracles.padded([[9999, 9999], [0, 1], [-1, -1]]), torch.tensor([2, 0, 2])
    for exact in (True, False):
        commit(stash, path, length, state, case.slots, exact=exact)
        assert torch.equal(state.cpu().nan_to_num(), case.state.nan_to_num())


def raw_gates(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(3)
    HV = case.v.shape[2]
    a, b = (torch.randn(*case.g.shape, generator=gen).bfloat16() for _ in range(2))
    for r, tree in enumerate(case.trees):
        a[r, len(tree) :] = b[r, len(tree) :] = float("nan")
    weights = {
        "A_log": torch.randn(HV, generator=gen),
        "dt_bias": torch.randn(HV, generator=gen).bfloat16(),
    }
    return a, b, weights


@needs_kernel
def test_raw_gates_are_those_of_the_gate() -> None:
    case = make_case([TREES["random"], oracles.chain(3)])
    a, b, weights = raw_gates(case)
    g, beta = gdn_gate(a, b, **weights)
    gated = replace(case, g=g, beta=beta)
    raw = replace(case, g=a, beta=b)
    on_device = {name: x.to(DEVICE) for name, x in weights.items()}
    out, stash = verify(raw, **on_device)
    assert_outputs_match(gated, out, FLOAT32)
    assert_outputs_match(gated, raw.verify(**weights, backend="reference")[0], FLOAT32)
    for r, tree in enumerate(case.trees):
        assert rms_ratio(stash.g_RTH[r, : len(tree)].cpu(), g[r, : len(tree)]) < 1e-6
    # The commit of gates made in the verification has the bits of decode with raw gates.
    path = case.trees[0].deepest()[:6]
    state = case.state.to(DEVICE, copy=True)
    length = torch.tensor([len(path), 0])
    commit(stash, oracles.padded([path, path]), length, state, case.slots)
    decoded = case.state[:1].to(DEVICE, copy=True)
    for node in path:
        rows = (x[0, node][None] for x in moved(raw).rows)
        slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        gdn_decode(*rows, decoded, slot, **on_device, backend="triton")
    assert torch.equal(state[0], decoded[0])


@needs_kernel
def test_decode_of_one_token_equals_the_recurrence() -> None:
    case = make_case([oracles.chain(1)] * 3, heads=(2, 4), slots=[4, 0, 2])
    on_device = moved(case)
    out = gdn_decode(
        *(x[:, 0] for x in on_device.rows), on_device.state, on_device.slots, backend="triton"
    )
    for r in range(3):
        assert rms_ratio(out[r].cpu(), expected_outputs(case, r)[0]) < 1e-6
        state = on_device.state[case.slots[r]].cpu()
        assert rms_ratio(state, expected_state(case, r, [0])) < 1e-6
    untouched = [1, 3, 5]
    assert torch.equal(on_device.state[untouched].cpu(), case.state[untouched])


@needs_kernel
def test_decode_ignores_inert_rows() -> None:
    case = moved(make_case([oracles.chain(1)] * 3, slots=[-1, 2, -1]))
    before = case.state.clone()
    out = gdn_decode(*(x[:, 0] for x in case.rows), case.state, case.slots, backend="triton")
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert torch.equal(case.state[2], decode_path(case, 1, [0], before[2]))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(case.state[others], before[others])


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_exact_commit_is_bit_identical_to_decode_at_every_depth(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    case = make_case([oracles.wide(24), oracles.random_tree(GEN, 20, reach=4)], dtype=dtype)
    case = replace(case, state=case.state.to(state_dtype))
    _, stash = verify(case)
    paths = [tree.deepest() for tree in case.trees]
    path = oracles.padded(paths)
    start = case.state.to(DEVICE, copy=True)
    for m in range(0, path.shape[1] + 1, 5):
        state = start.clone()
        lengths = [min(m, len(paths[0])), min(path.shape[1] - m, len(paths[1]))]
        commit(stash, path, torch.tensor(lengths, dtype=torch.int32), state, case.slots)
        for r in range(2):
            expected = decode_path(case, r, paths[r][: lengths[r]], start[r])
            assert torch.equal(state[r], expected)
        assert torch.equal(state[2:], start[2:])


@needs_kernel
def test_product_commit_equals_the_recurrence_at_every_depth() -> None:
    case = make_case([oracles.chain(35), oracles.wide(24)])
    _, stash = verify(case)
    paths = [tree.deepest() for tree in case.trees]
    for m in (0, 1, 9, 16, 17, 35):
        state = case.state.to(DEVICE, copy=True)
        lengths = [min(m, len(p)) for p in paths]
        path = oracles.padded(paths)
        path[path < 0] = 9999
        commit(stash, path, torch.tensor(lengths), state, case.slots, exact=False)
        for r, n in enumerate(lengths):
            if n == 0:
                assert torch.equal(state[r].cpu(), case.state[r])
            else:
                assert rms_ratio(state[r].cpu(), expected_state(case, r, paths[r][:n])) < FLOAT32


@needs_kernel
@pytest.mark.parametrize("exact", [True, False])
def test_commit_into_another_slot_leaves_the_source(exact: bool) -> None:
    case = make_case([oracles.wide(20), oracles.chain(6), oracles.chain(6)], slots=[2, 0, 1])
    _, stash = verify(case)
    path = oracles.padded([tree.deepest() for tree in case.trees])
    length = torch.tensor([5, 2, 0], dtype=torch.int32)
    target = torch.tensor([4, 5, 3], dtype=torch.int32)
    start = case.state.to(DEVICE, copy=True)
    moved_to, in_place = start.clone(), start.clone()
    commit(stash, path, length, moved_to, target, source_indices=case.slots, exact=exact)
    commit(stash, path, length, in_place, case.slots, exact=exact)
    assert torch.equal(moved_to[:3], start[:3])
    assert torch.equal(moved_to[[4, 5]], in_place[[2, 0]])
    assert torch.equal(moved_to[3], start[3])


@needs_kernel
@pytest.mark.parametrize("exact", [True, False])
def test_commit_from_no_slot_writes_nothing(exact: bool) -> None:
    case = make_case([oracles.chain(3)] * 2)
    _, stash = verify(case)
    state = case.state.to(DEVICE, copy=True)
    path, length, source = oracles.padded([[0, 1]] * 2), torch.tensor([2, 2]), torch.tensor([-1, 1])
    commit(stash, path, length, state, case.slots, source_indices=source, exact=exact)
    assert torch.equal(state[0].cpu(), case.state[0])
    assert not torch.equal(state[1].cpu(), case.state[1])


@needs_kernel
def test_poison_in_the_stash_past_num_nodes_does_not_reach_a_commit() -> None:
    case = make_case([oracles.random_tree(GEN, 9), oracles.wide(20)], num_rows=24)
    _, stash = verify(case)
    for field in fields(stash):
        value = getattr(stash, field.name)
        if isinstance(value, Tensor):
            for r, tree in enumerate(case.trees):
                value[r, len(tree) :] = float("nan")
    path = oracles.padded([tree.deepest() for tree in case.trees], 17)
    path[path < 0] = 9999
    length = torch.tensor([len(tree.deepest()) for tree in case.trees])
    for exact in (True, False):
        state = case.state.to(DEVICE, copy=True)
        commit(stash, path, length, state, case.slots, exact=exact)
        for r, tree in enumerate(case.trees):
            expected = expected_state(case, r, tree.deepest())
            assert rms_ratio(state[r].cpu(), expected) < FLOAT32


@needs_kernel
def test_selected_requests_of_a_stash_commit_as_before() -> None:
    case = make_case([oracles.wide(20), oracles.chain(20), oracles.random_tree(GEN, 20)])
    _, stash = verify(case)
    path = oracles.padded([tree.deepest() for tree in case.trees])
    length = torch.tensor([4, 7, 2])
    whole, parts = case.state.to(DEVICE, copy=True), case.state.to(DEVICE)
    commit(stash, path, length, whole, case.slots)
    for rows in (torch.tensor([2, 0]), slice(1, 2)):
        selected = stash.select(rows.to(DEVICE) if isinstance(rows, Tensor) else rows)
        commit(selected, path[rows], length[rows], parts, case.slots[rows])
    assert torch.equal(parts, whole)


@needs_kernel
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layers_committed_at_once_have_the_bits_of_one_by_one(backend: str) -> None:
    cases = [make_case([oracles.wide(20), oracles.chain(9)], seed=seed) for seed in range(3)]
    cases = [moved(case) if backend == "triton" else case for case in cases]
    device = cases[0].state.device
    path = oracles.padded([tree.deepest() for tree in cases[0].trees]).to(device)
    length = torch.tensor([7, 2], dtype=torch.int32, device=device)
    target = torch.tensor([3, 1], dtype=torch.int32, device=device)
    boundary = torch.tensor([5, -1], dtype=torch.int32, device=device)
    count = torch.tensor([4, 2], dtype=torch.int32, device=device)
    stashes = [case.verify(backend=backend)[1] for case in cases]
    source = cases[0].slots
    states = [case.state.clone() for case in cases]
    gdn_commit_layers(
        stashes,
        path,
        length,
        states,
        target,
        source_indices=source,
        boundary_indices=boundary,
        boundary_length=count,
    )
    for case, stash, state in zip(cases, stashes, states, strict=True):
        alone = case.state.clone()
        gdn_commit(stash, path, count, alone, boundary, source_indices=source)
        gdn_commit(stash, path, length, alone, target, source_indices=source)
        assert torch.equal(state, alone)
        assert not torch.equal(state[5], state[3])


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_tiling_of_the_commit_has_decodes_bits(dtype: torch.dtype) -> None:
    from vllm_weaver.ops.gdn.triton_replay import CommitTiling, commit_layers

    case = make_case([oracles.chain(5), oracles.wide(20)], dim=128, dtype=dtype)
    _, stash = verify(case)
    paths = [tree.deepest()[:5] for tree in case.trees]
    length = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=DEVICE)
    decoded = [decode_path(case, r, paths[r], case.state[r].to(DEVICE)) for r in range(2)]
    path, slots = oracles.padded(paths).to(DEVICE), case.slots.to(DEVICE)
    for tiling in ((16, 128), (32, 128), (32, 64), (16, 32), (32, 32), None):
        state = case.state.to(DEVICE, copy=True)
        chosen = None if tiling is None else CommitTiling(*tiling)
        commit_layers([stash], path, length, [state], slots, slots, tiling=chosen)
        assert all(torch.equal(state[r], decoded[r]) for r in range(2)), tiling


@needs_kernel
def test_windows_stay_bit_equal_to_decode_and_close_to_transformers() -> None:
    gen = torch.Generator().manual_seed(11)
    start = make_case([oracles.chain(1)] * 2, seed=99).state
    state, decoded = start.to(DEVICE, copy=True), start.to(DEVICE, copy=True)
    accepted: list[list[tuple[Tensor, ...]]] = [[], []]
    slots = [1, 0]
    for window in range(8 if INTERPRETED else 64):
        trees = [oracles.random_tree(gen, 12, reach=5) for _ in slots]
        case = make_case(trees, seed=window, decay=0.2, slots=slots)
        _, stash = replace(moved(case), state=state).verify(backend="triton")
        paths = [tree.paths()[window % len(tree.paths())] for tree in trees]
        lengths = [window % (len(path) + 1) for path in paths]
        commit(stash, oracles.padded(paths), torch.tensor(lengths), state, case.slots)
        for r, slot in enumerate(slots):
            path = paths[r][: lengths[r]]
            decoded[slot] = decode_path(case, r, path, decoded[slot])
            accepted[r] += [tuple(x[r, node] for x in case.rows) for node in path]
        assert torch.equal(state, decoded)
    for r, slot in enumerate(slots):
        rows = [torch.stack(x)[None] for x in zip(*accepted[r], strict=True)]
        _, expected = oracles.gdn_sequence(*rows, start[slot][None])
        assert rms_ratio(state[slot].cpu(), expected[0]) < 1e-6


@needs_kernel
def test_strided_states_are_read_and_written_in_place() -> None:
    case = moved(make_case([oracles.wide(20), oracles.chain(4)]))
    dense = case.state.clone()
    pages = torch.full((len(dense), dense[0].numel() + 100), float("nan"), device=DEVICE)
    strided = pages[:, 60:-40].unflatten(1, dense.shape[1:])
    strided.copy_(dense)
    path, length = oracles.padded([t.deepest() for t in case.trees]), torch.tensor([5, 3])
    outs = []
    for state in (dense, strided):
        out, stash = replace(case, state=state).verify(backend="triton")
        outs.append(out)
        commit(stash, path, length, state, case.slots)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(strided, dense)
    assert bool(pages[:, :60].isnan().all() and pages[:, -40:].isnan().all())


@needs_kernel
def test_rows_may_be_parts_of_wider_ones() -> None:
    case = moved(make_case([oracles.comb(20), oracles.chain(4)], dim=64))
    R, T = case.q.shape[:2]
    packed = torch.cat([x.reshape(R, T, -1) for x in (case.q, case.k, case.v)], -1)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in packed.split([64, 64, 128], -1))
    sliced = replace(case, q=q, k=k, v=v)
    assert torch.equal(sliced.verify(backend="triton")[0], case.verify(backend="triton")[0])


@needs_kernel
def test_scale_and_norm_options_reach_the_equations() -> None:
    case = make_case([oracles.random_tree(GEN, 15)])
    unit = [x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in (case.q, case.k)]
    normed = replace(case, q=unit[0], k=unit[1])
    assert_outputs_match(case, verify(normed, qk_l2norm=False)[0], FLOAT32)
    assert_outputs_match(case, verify(case, scale=1.0)[0] * 64**-0.5, FLOAT32)


@needs_kernel
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_raw_rows_give_the_outputs_and_the_commits_bits_of_rows_convolved_before(
    dtype: torch.dtype, dim: int
) -> None:
    from vllm_weaver.ops.gdn.raw import tree_verify_raw

    case = make_case([oracles.wide(20), oracles.chain(9)], dtype=dtype, dim=dim)
    a, b, weights = raw_gates(case)
    gen = torch.Generator().manual_seed(5)
    R, T, C = 2, 20, 4 * dim
    x = torch.randn(R, T, C, generator=gen).to(dtype).to(DEVICE)
    history = torch.randn(6, 3, C, generator=gen).to(dtype).to(DEVICE)
    taps = torch.randn(C, 4, generator=gen).to(dtype).to(DEVICE)
    bias = torch.randn(C, generator=gen).to(dtype).to(DEVICE)
    for r, tree in enumerate(case.trees):
        x[r, len(tree) :] = float("nan")
    case = moved(case)
    a, b, weights = a.to(DEVICE), b.to(DEVICE), {n: w.to(DEVICE) for n, w in weights.items()}
    words = ancestor_words(case.parents, case.num_nodes)
    table = conv_table(case.parents, case.num_nodes, 4)
    y, conv = causal_conv1d_tree(
        *(x, history, case.slots, taps, case.parents, case.num_nodes), bias=bias, backend="triton"
    )
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in y.split([dim, dim, 2 * dim], -1))
    rows = replace(case, q=q, k=k, v=v, g=a, beta=b)
    out, stash = rows.verify(**weights, ancestors=words, backend="triton")
    out_raw, raw = tree_verify_raw(
        *(x, history, taps, a, b, weights["A_log"], weights["dt_bias"], case.state),
        *(case.slots, case.num_nodes, words, table, 1),
        bias=bias,
    )
    for r, tree in enumerate(case.trees):
        assert rms_ratio(out_raw[r, : len(tree)], out[r, : len(tree)]) < NARROW.get(dtype, FLOAT32)
        assert not out_raw[r, len(tree) :].any()
    path = oracles.padded([tree.deepest() for tree in case.trees])
    length = torch.tensor([7, 3])
    states = case.state.clone(), case.state.clone()
    commit(stash, path, length, states[0], case.slots)
    commit(raw, path, length, states[1], case.slots)
    if CUDA and dtype == torch.float32:
        # A float32 row's norm is summed in the order of the layout that its load gets.
        assert rms_ratio(*states) < 1e-6
    else:
        assert torch.equal(*states)
    histories = history.clone(), history.clone()
    conv_commit(conv, path.to(DEVICE), length.to(DEVICE), histories[0], case.slots)
    conv_commit(raw.conv, path.to(DEVICE), length.to(DEVICE), histories[1], case.slots)
    assert torch.equal(*histories)
    with pytest.raises(ValueError, match="commit a raw stash exactly"):
        commit(raw, path, length, states[1], case.slots, exact=False)


@needs_kernel
def test_what_the_kernels_cannot_take_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"takes head dims .* got K = 20 and V_h = 20: use backend"
    ):
        verify(make_case([oracles.chain(3)], dim=20))
    with pytest.raises(ValueError, match=r"float16, bfloat16 and float32, got torch.float64"):
        verify(make_case([oracles.chain(3)], dtype=torch.float64))
    with pytest.raises(ValueError, match="at most 256 rows, got 257"):
        verify(make_case([oracles.chain(3)], num_rows=257))
    case = make_case([oracles.chain(3)])
    _, stash = case.verify(backend="reference")
    with pytest.raises(ValueError, match="the stash is of backend 'reference', not 'triton'"):
        gdn_commit(
            *(stash, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
            *(case.state, case.slots),
            backend="triton",
        )
    with pytest.raises(ValueError, match="A_log and dt_bias come together"):
        case.verify(A_log=torch.zeros(2))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_captured_graph_serves_other_trees_and_lengths(dtype: torch.dtype) -> None:
    trees = [[oracles.wide(64), oracles.chain(5)], [oracles.comb(9), oracles.random_tree(GEN, 63)]]
    first, second = (make_case(t, num_rows=64, seed=s, dtype=dtype) for s, t in enumerate(trees))
    case = moved(first)
    words = ancestor_words(case.parents, case.num_nodes)
    out, stash = case.verify(backend="triton", ancestors=words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.verify(backend="triton", ancestors=words, out=out, stash=stash)
    for f in ("q", "k", "v", "g", "beta", "state", "slots", "parents", "num_nodes"):
        getattr(case, f).copy_(getattr(second, f))
    words.copy_(ancestor_words(case.parents, case.num_nodes))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_outputs_match(second, out.cpu(), NARROW.get(dtype, FLOAT32))


@needs_gpu
def test_decode_has_the_bits_of_vllms_packed_kernel() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode as packed_decode,
    )

    HK, HV, dim, R = 4, 12, 128, 3
    gen = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=DEVICE)

    state = normal(5, HV, dim, dim) * 0.3
    theirs = state.clone()
    slots = torch.tensor([3, 1, 4], dtype=torch.int32, device=DEVICE)
    weights = {"A_log": normal(HV), "dt_bias": normal(HV).bfloat16()}
    for _ in range(8):
        mixed = normal(R, (2 * HK + HV) * dim).bfloat16()
        a, b = normal(R, HV).bfloat16(), normal(R, HV).bfloat16()
        q, k, v = mixed.split([HK * dim, HK * dim, HV * dim], -1)
        parts = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        out = gdn_decode(*parts, a, b, state, slots, **weights, backend="triton")
        their_out = torch.empty(R, 1, HV, dim, dtype=torch.bfloat16, device=DEVICE)
        packed_decode(
            mixed_qkv=mixed,
            a=a,
            b=b,
            A_log=weights["A_log"],
            dt_bias=weights["dt_bias"],
            scale=dim**-0.5,
            initial_state=theirs,
            out=their_out,
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )
        assert torch.equal(out, their_out[:, 0])
        assert torch.equal(state, theirs)


@runs_elsewhere
def test_kernels_without_gpu_or_interpreter_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot run on cpu tensors without TRITON_INTERPRET=1"):
        verify(make_case([oracles.chain(3)]))


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
