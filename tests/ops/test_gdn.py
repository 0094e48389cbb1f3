# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet ops against Transformers' recurrence, replayed along every root-to-node path."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import oracles
import pytest
import torch
from oracles import Tree, rms_ratio
from torch import Tensor

from vllm_weaver.ops import (
    GdnStash,
    ancestor_words,
    gdn_commit,
    gdn_decode,
    gdn_gate,
    gdn_prefill,
    gdn_tree_verify,
)

SLOTS = 6


@dataclass
class Case:
    """Inputs of a batch of trees; request r uses slot `slots[r]`, -1 for an inert request."""

    trees: list[Tree]
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    slots: Tensor
    parents: Tensor
    num_nodes: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def verify(self, **options: object) -> tuple[Tensor, GdnStash]:
        return gdn_tree_verify(
            *self.rows, self.state, self.slots, self.parents, self.num_nodes, **options
        )

    def decode_path(self, request: int, path: list[int], state: Tensor) -> Tensor:
        """State [HV, V, K] after `gdn_decode`, called for one request once per node."""
        state = state[None].clone()
        for node in path:
            gdn_decode(
                *(x[request, node][None] for x in self.rows),
                state,
                torch.zeros(1, dtype=torch.int32),
            )
        return state[0]


def make_case(
    trees: list[Tree],
    seed: int = 0,
    heads: tuple[int, int] = (1, 2),
    dim: int = 64,
    num_rows: int | None = None,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float32,
    slots: list[int] | None = None,
) -> Case:
    """A batch of trees; past each one's nodes, NaN in every per-node input and garbage parents."""
    gen = torch.Generator().manual_seed(seed)
    R, T = len(trees), num_rows or max(map(len, trees))
    HK, HV = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    # A shared direction makes keys resemble each other, as in a trained layer.
    q = (normal(R, T, HK, dim) + normal(HK, dim)).to(dtype)
    k = (normal(R, T, HK, dim) + normal(HK, dim)).to(dtype)
    v = normal(R, T, HV, dim).to(dtype)
    g = -torch.rand(R, T, HV, generator=gen) * decay
    beta = torch.rand(R, T, HV, generator=gen)
    for r, tree in enumerate(trees):
        for x in (q, k, v, g, beta):
            x[r, len(tree) :] = float("nan")
    parents, num_nodes = oracles.batch(trees, T)
    return Case(
        trees,
        *(q, k, v, g, beta),
        state=normal(SLOTS, HV, dim, dim) * 0.3,
        slots=torch.tensor(slots or list(range(R)), dtype=torch.int32),
        parents=parents,
        num_nodes=num_nodes,
    )


def expected_outputs(case: Case, request: int) -> Tensor:
    tree = case.trees[request]
    rows = (x[request, : len(tree)] for x in case.rows)
    return oracles.gdn_tree(tree, *rows, case.state[case.slots[request]])


def expected_state(
    case: Case, request: int, path: list[int], dtype: torch.dtype = torch.float64
) -> Tensor:
    rows = (x[request, path][None] for x in case.rows)
    return oracles.gdn_sequence(*rows, case.state[case.slots[request]][None], dtype)[1][0]


def assert_outputs_match(case: Case, out: Tensor, tolerance: float) -> None:
    for r, tree in enumerate(case.trees):
        assert rms_ratio(out[r, : len(tree)], expected_outputs(case, r)) < tolerance
        assert torch.equal(out[r, len(tree) :], torch.zeros_like(out[r, len(tree) :]))


GEN = torch.Generator().manual_seed(7)
TREES = {
    "random": oracles.random_tree(GEN, 40),
    "random_deep": oracles.random_tree(GEN, 63, reach=4),
    "chain": oracles.chain(17),
    "chain_of_256": oracles.chain(256),
    "star": oracles.star(65),
    "comb": oracles.comb(63),
    "depth_15": oracles.wide(64),
    "root_alone": oracles.chain(1),
    "two_nodes": oracles.chain(2),
    "odd_127": oracles.random_tree(GEN, 127, reach=9),
    "random_256": oracles.random_tree(GEN, 256, reach=30),
}


@pytest.mark.parametrize("name", TREES)
def test_every_node_equals_the_recurrence_along_its_path(name: str) -> None:
    case = make_case([TREES[name]])
    assert_outputs_match(case, case.verify()[0], 1e-6)


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("dim", [64, 128])
def test_value_heads_share_their_key_head(heads: tuple[int, int], dim: int) -> None:
    case = make_case([oracles.random_tree(GEN, 17), oracles.comb(12)], heads=heads, dim=dim)
    assert_outputs_match(case, case.verify()[0], 1e-6)


def test_equations_are_exact_in_float64() -> None:
    case = make_case([TREES["random_deep"], TREES["depth_15"]])
    case = replace(
        case, **{f: getattr(case, f).double() for f in ("q", "k", "v", "g", "beta", "state")}
    )
    assert_outputs_match(case, case.verify()[0], 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_lose_only_the_rounding_of_the_output(dtype: torch.dtype) -> None:
    case = make_case([TREES["random"]], dtype=dtype)
    out, _ = case.verify()
    assert out.dtype == dtype
    # The oracle sees the very inputs, so what is left is one rounding of the output.
    expected = expected_outputs(case, 0)
    assert torch.allclose(out[0].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_requests_with_other_node_counts_do_not_mix(num_requests: int) -> None:
    sizes = [17, 1, 33, 9][:num_requests]
    trees = [oracles.random_tree(GEN, size, reach=5) for size in sizes]
    case = make_case(trees, num_rows=40, slots=[4, 0, 5, 2][:num_requests])
    assert_outputs_match(case, case.verify()[0], 1e-6)


@pytest.mark.parametrize("low,high", [(50.0, 51.0), (500.0, 501.0), (0.0, 500.0)])
def test_strong_decay_neither_overflows_nor_blurs(low: float, high: float) -> None:
    case = make_case([TREES["depth_15"], TREES["random_deep"]])
    g = torch.empty_like(case.g).uniform_(-high, -low, generator=torch.Generator().manual_seed(1))
    case.g.copy_(torch.where(case.g.isnan(), case.g, g))
    assert_outputs_match(case, case.verify()[0], 1e-6)


def test_mild_decay_far_below_a_strong_one_keeps_its_precision() -> None:
    case = make_case([oracles.chain(16)])
    case.g[:, :8] = -900.0
    case.g[:, 8:] *= 0.01
    assert_outputs_match(case, case.verify()[0], 1e-6)


def test_spine_only_tree_equals_chain() -> None:
    case = make_case([oracles.wide(64)])
    spine = case.trees[0].deepest()
    rows = (x[:, spine].contiguous() for x in case.rows)
    chain = Case(
        [oracles.chain(len(spine))],
        *rows,
        case.state,
        case.slots,
        *oracles.batch([oracles.chain(len(spine))], len(spine)),
    )
    out_tree, out_chain = case.verify()[0][:, spine], chain.verify()[0]
    assert rms_ratio(out_tree, out_chain) < 1e-6


def test_verify_leaves_state_and_inputs_bitwise_alone() -> None:
    case = make_case([TREES["random"], oracles.chain(3)])
    before = [x.clone() for x in (*case.rows, case.state, case.parents)]
    case.verify()
    for x, y in zip((*case.rows, case.state, case.parents), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_stash_aliases_no_input() -> None:
    case = make_case([oracles.random_tree(GEN, 12)])
    _, stash = case.verify()
    clean = case.state.clone()
    path, length = oracles.padded([case.trees[0].deepest()]), torch.tensor([3])
    gdn_commit(stash, path, length, clean, case.slots)
    for x in case.rows:
        x.fill_(float("nan"))
    gdn_commit(stash, path, length, case.state, case.slots)
    assert torch.equal(case.state, clean)


def test_ancestor_words_given_or_made_are_the_same() -> None:
    case = make_case([oracles.random_tree(GEN, 70), oracles.comb(65)], num_rows=80, decay=500.0)
    words = ancestor_words(case.parents, case.num_nodes)
    assert words.shape == (2, 80, 2)
    for r, tree in enumerate(case.trees):
        for node in range(80):
            bits = {j for j in range(128) if int(words[r, node, j // 64]) >> (j % 64) & 1}
            assert bits == (set(tree.path(node)) if node < len(tree) else set())
    # Nothing past the nodes is read, whatever it holds.
    for r, tree in enumerate(case.trees):
        words[r, len(tree) :] = -1
        words[r, : len(tree), 1] |= -1 << (len(tree) - 64)
    assert torch.equal(case.verify(ancestors=words)[0], case.verify()[0])


def test_inert_requests_give_zeros_and_touch_nothing() -> None:
    trees = [oracles.random_tree(GEN, 9), oracles.chain(4), oracles.star(5)]
    case = make_case(trees, slots=[-1, 3, -1])
    case.state[0] = float("nan")  # what a careless read of slot -1, clamped, would find
    case.num_nodes[2] = 0
    out, stash = case.verify()
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert_outputs_match(
        replace(
            case,
            trees=trees[1:2],
            **{f: getattr(case, f)[1:2] for f in ("q", "k", "v", "g")},
            beta=case.beta[1:2],
            slots=case.slots[1:2],
        ),
        out[1:2],
        1e-6,
    )
    before = case.state.clone()
    path, length = oracles.padded([[9999, 9999], [0, 1], [-1, -1]]), torch.tensor([2, 0, 2])
    for exact in (True, False):
        gdn_commit(stash, path, length, case.state, case.slots, exact=exact)
        assert torch.equal(case.state.nan_to_num(), before.nan_to_num())


def test_decode_of_one_token_equals_the_recurrence() -> None:
    case = make_case([oracles.chain(1)] * 3, heads=(2, 4), slots=[4, 0, 2])
    before = case.state.clone()
    state = case.state.clone()
    out = gdn_decode(*(x[:, 0] for x in case.rows), state, case.slots)
    for r in range(3):
        assert rms_ratio(out[r], expected_outputs(case, r)[0]) < 1e-6
        assert rms_ratio(state[case.slots[r]], expected_state(case, r, [0])) < 1e-6
    untouched = [1, 3, 5]
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("heads,dim", [((1, 2), 64), ((2, 6), 128), ((3, 3), 20)])
def test_decode_bits_do_not_depend_on_the_batch(heads: tuple[int, int], dim: int) -> None:
    case = make_case([oracles.chain(1)] * 5, heads=heads, dim=dim)
    rows = [x[:, 0] for x in case.rows]
    together = case.state.clone()
    out = gdn_decode(*rows, together, case.slots)
    for r in range(5):
        alone = case.state.clone()
        single = gdn_decode(*(x[r : r + 1] for x in rows), alone, case.slots[r : r + 1])
        assert torch.equal(single[0], out[r])
        assert torch.equal(alone[r], together[r])


def test_decode_ignores_inert_rows() -> None:
    case = make_case([oracles.chain(1)] * 3, slots=[-1, 2, -1])
    state = case.state.clone()
    case.state[:2] = float("nan")
    out = gdn_decode(*(x[:, 0] for x in case.rows), case.state, case.slots)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert torch.equal(case.state[2], case.decode_path(1, [0], state[2]))
    assert torch.equal(case.state[3:], state[3:]) and bool(case.state[:2].isnan().all())


def test_exact_commit_is_bit_identical_to_decode_at_every_depth() -> None:
    case = make_case([TREES["depth_15"], TREES["random_deep"]], heads=(2, 4))
    _, stash = case.verify()
    paths = [tree.deepest() for tree in case.trees]
    path = oracles.padded(paths)
    for m in range(path.shape[1] + 1):
        state = case.state.clone()
        # The two requests stop at different depths.
        lengths = [min(m, len(paths[0])), min(path.shape[1] - m, len(paths[1]))]
        gdn_commit(stash, path, torch.tensor(lengths, dtype=torch.int32), state, case.slots)
        for r in range(2):
            assert torch.equal(state[r], case.decode_path(r, paths[r][: lengths[r]], case.state[r]))
        assert torch.equal(state[2:], case.state[2:])


def test_product_commit_equals_the_recurrence_at_every_depth() -> None:
    case = make_case([TREES["depth_15"], TREES["random_deep"]], heads=(2, 4))
    _, stash = case.verify()
    paths = [tree.deepest() for tree in case.trees]
    path = oracles.padded(paths)
    for m in range(0, path.shape[1] + 1, 3):
        state = case.state.clone()
        lengths = [min(m, len(p)) for p in paths]
        gdn_commit(stash, path, torch.tensor(lengths), state, case.slots, exact=False)
        for r, n in enumerate(lengths):
            if n == 0:
                assert torch.equal(state[r], case.state[r])
            else:
                assert rms_ratio(state[r], expected_state(case, r, paths[r][:n])) < 1e-6


@pytest.mark.parametrize("exact", [True, False])
def test_commit_into_another_slot_leaves_the_source(exact: bool) -> None:
    case = make_case([oracles.wide(32), oracles.chain(6), oracles.chain(6)], slots=[2, 0, 1])
    _, stash = case.verify()
    path = oracles.padded([tree.deepest() for tree in case.trees])
    length = torch.tensor([5, 2, 0], dtype=torch.int32)
    target = torch.tensor([4, 5, 3], dtype=torch.int32)
    moved, in_place = case.state.clone(), case.state.clone()
    gdn_commit(stash, path, length, moved, target, source_indices=case.slots, exact=exact)
    gdn_commit(stash, path, length, in_place, case.slots, exact=exact)
    assert torch.equal(moved[:3], case.state[:3])
    assert torch.equal(moved[[4, 5]], in_place[[2, 0]])
    assert torch.equal(moved[3], case.state[3])


@pytest.mark.parametrize("exact", [True, False])
def test_commit_from_no_slot_writes_nothing(exact: bool) -> None:
    case = make_case([oracles.chain(3)] * 2)
    _, stash = case.verify()
    before = case.state.clone()
    path, length, source = oracles.padded([[0, 1]] * 2), torch.tensor([2, 2]), torch.tensor([-1, 1])
    gdn_commit(stash, path, length, case.state, case.slots, source_indices=source, exact=exact)
    assert torch.equal(case.state[0], before[0])
    assert not torch.equal(case.state[1], before[1])


def test_commits_of_a_block_boundary_and_of_the_whole_path_agree() -> None:
    case = make_case([oracles.wide(32)], slots=[1])
    _, stash = case.verify()
    path = oracles.padded([case.trees[0].deepest()])
    boundary = torch.tensor([3], dtype=torch.int32)
    gdn_commit(stash, path, torch.tensor([6]), case.state, boundary, source_indices=case.slots)
    gdn_commit(stash, path[:, 6:], torch.tensor([5]), case.state, boundary)
    gdn_commit(stash, path, torch.tensor([11]), case.state, case.slots)
    assert torch.equal(case.state[3], case.state[1])


def test_poison_in_the_stash_past_num_nodes_does_not_reach_a_commit() -> None:
    case = make_case([oracles.random_tree(GEN, 9), oracles.wide(20)], num_rows=24)
    _, stash = case.verify()
    path = oracles.padded([tree.deepest() for tree in case.trees], 17)
    length = torch.tensor([len(tree.deepest()) for tree in case.trees])
    results = []
    for poisoned in (False, True):
        if poisoned:
            for field in fields(stash):
                value = getattr(stash, field.name)
                if isinstance(value, Tensor):
                    for r, tree in enumerate(case.trees):
                        value[r, len(tree) :] = float("nan")
            # Nor do the path's columns past its length.
            path[path < 0] = 9999
        for exact in (True, False):
            state = case.state.clone()
            gdn_commit(stash, path, length, state, case.slots, exact=exact)
            results.append(state)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not results[0].isnan().any()


def test_selected_requests_of_a_stash_commit_as_before() -> None:
    case = make_case([oracles.wide(20), oracles.chain(20), oracles.random_tree(GEN, 20)])
    _, stash = case.verify()
    path = oracles.padded([tree.deepest() for tree in case.trees])
    length = torch.tensor([4, 7, 2])
    whole, parts = case.state.clone(), case.state.clone()
    gdn_commit(stash, path, length, whole, case.slots)
    for rows in (torch.tensor([2, 0]), slice(1, 2)):
        gdn_commit(stash.select(rows), path[rows], length[rows], parts, case.slots[rows])
    assert torch.equal(parts, whole)


def test_64_windows_stay_bit_equal_to_decode_and_close_to_transformers() -> None:
    gen = torch.Generator().manual_seed(11)
    start = make_case([oracles.chain(1)] * 2, seed=99).state
    state, decoded = start.clone(), start.clone()
    accepted: list[list[tuple[Tensor, ...]]] = [[], []]
    slots = [1, 0]
    for window in range(64):
        trees = [oracles.random_tree(gen, 12, reach=5) for _ in slots]
        case = replace(make_case(trees, seed=window, decay=0.2, slots=slots), state=state)
        _, stash = case.verify()
        paths = [tree.paths()[window % len(tree.paths())] for tree in trees]
        lengths = [window % (len(path) + 1) for path in paths]
        gdn_commit(stash, oracles.padded(paths), torch.tensor(lengths), state, case.slots)
        for r, slot in enumerate(slots):
            path = paths[r][: lengths[r]]
            decoded[slot] = case.decode_path(r, path, decoded[slot])
            accepted[r] += [tuple(x[r, node] for x in case.rows) for node in path]
        assert torch.equal(state, decoded)
    for r, slot in enumerate(slots):
        rows = [torch.stack(x)[None] for x in zip(*accepted[r], strict=True)]
        for dtype in (torch.float32, torch.float64):
            _, expected = oracles.gdn_sequence(*rows, start[slot][None], dtype)
            assert rms_ratio(state[slot], expected[0]) < 1e-6
            assert (state[slot] - expected[0]).abs().max() < 1e-6 * expected.abs().max()


def test_strided_states_are_read_and_written_in_place() -> None:
    case = make_case([oracles.wide(20), oracles.chain(4)])
    dense = case.state.clone()
    # As in a cache whose pages hold more than the state.
    pages = torch.full((SLOTS, dense[0].numel() + 100), float("nan"))
    strided = pages[:, 60:-40].unflatten(1, dense.shape[1:])
    strided.copy_(dense)
    path, length = oracles.padded([t.deepest() for t in case.trees]), torch.tensor([5, 3])
    outs = []
    for state in (dense, strided):
        case = replace(case, state=state)
        out, stash = case.verify()
        outs.append(out)
        gdn_commit(stash, path, length, state, case.slots)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(strided, dense)
    assert bool(pages[:, :60].isnan().all() and pages[:, -40:].isnan().all())


def test_scale_and_norm_options_reach_the_equations() -> None:
    case = make_case([oracles.random_tree(GEN, 15)])
    unit = [x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in (case.q, case.k)]
    normed = replace(case, q=unit[0], k=unit[1])
    out, _ = case.verify()
    assert rms_ratio(normed.verify(qk_l2norm=False)[0], out) < 1e-6
    assert rms_ratio(case.verify(scale=1.0)[0] * 64**-0.5, out) < 1e-6


def test_gates_match_the_formula_and_keep_float32() -> None:
    gen = torch.Generator().manual_seed(3)
    a, b = (torch.randn(50, 6, generator=gen).mul(8).bfloat16() for _ in range(2))
    A_log, dt_bias = torch.randn(6, generator=gen), torch.randn(6, generator=gen).bfloat16()
    g, beta = gdn_gate(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    x = (a.float() + dt_bias.float()).double()
    torch.testing.assert_close(
        g.double(), -A_log.double().exp() * torch.log1p(x.exp()), rtol=1e-6, atol=1e-30
    )
    torch.testing.assert_close(beta.double(), b.double().sigmoid(), rtol=1e-6, atol=0)
    huge = gdn_gate(torch.tensor([[500.0, -500.0]]), torch.zeros(1, 2), *torch.zeros(2, 2))[0]
    assert torch.equal(huge, torch.tensor([[-500.0, 0.0]]))


def test_gate_bits_do_not_depend_on_the_batch() -> None:
    gen = torch.Generator().manual_seed(3)
    a, b = (torch.randn(77, 3, generator=gen) for _ in range(2))
    A_log, dt_bias = torch.randn(3, generator=gen), torch.randn(3, generator=gen)
    together = gdn_gate(a, b, A_log, dt_bias)
    for row in range(77):
        alone = gdn_gate(a[row : row + 1], b[row : row + 1], A_log, dt_bias)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def packed(lengths: list[int], seed: int = 0, tail: int = 0) -> tuple[list[Tensor], Tensor]:
    """Per-token inputs [M + tail, ...] of packed sequences, the tail NaN, and query_start_loc."""
    total = sum(lengths)
    case = make_case([oracles.chain(total)], seed=seed, decay=0.3)
    rows = [
        torch.cat(
            [x[0], torch.full_like(x[0, :1], float("nan")).repeat(tail, *[1] * (x.dim() - 2))]
        )
        for x in case.rows
    ]
    return rows, torch.tensor([0, *lengths]).cumsum(0).int()


def test_prefill_of_any_lengths_equals_the_recurrence() -> None:
    lengths = [63, 1, 64, 0, 65, 130]
    rows, starts = packed(lengths, tail=3)
    state = make_case([oracles.chain(1)]).state
    before = state.clone()
    slots = torch.tensor([2, 0, -1, 3, 5, 1], dtype=torch.int32)
    initial = torch.tensor([True, False, True, True, False, True])
    state[5] = float("nan")  # a fresh sequence's slot may hold anything
    out = gdn_prefill(*rows, state, slots, starts, initial)
    for r, slot in enumerate(slots.tolist()):
        part = slice(int(starts[r]), int(starts[r + 1]))
        if slot < 0:
            assert torch.equal(out[part], torch.zeros_like(out[part]))
        elif lengths[r] == 0:
            assert torch.equal(state[slot], before[slot])
        else:
            start = before[slot] if initial[r] else torch.zeros_like(before[slot])
            expected, last = oracles.gdn_sequence(*(x[part][None] for x in rows), start[None])
            assert rms_ratio(out[part], expected[0]) < 1e-6
            assert rms_ratio(state[slot], last[0]) < 1e-6
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    assert torch.equal(state[4], before[4])


def test_prefill_in_pieces_equals_prefill_at_once() -> None:
    rows, starts = packed([150])
    slot = torch.tensor([2], dtype=torch.int32)
    whole, pieces = torch.zeros(SLOTS, 2, 64, 64), torch.zeros(SLOTS, 2, 64, 64)
    out = gdn_prefill(*rows, whole, slot, starts, torch.tensor([False]))
    outs, first = [], 0
    for size in (1, 70, 64, 15):
        part = [x[first : first + size] for x in rows]
        outs.append(
            gdn_prefill(*part, pieces, slot, torch.tensor([0, size]), torch.tensor([first > 0]))
        )
        first += size
    assert rms_ratio(torch.cat(outs), out) < 1e-6
    assert rms_ratio(pieces[2], whole[2]) < 1e-6


def test_single_token_sequences_of_a_prefill_are_decodes_bit_for_bit() -> None:
    rows, starts = packed([1, 5, 1])
    state = make_case([oracles.chain(1)]).state
    decoded = state.clone()
    slots = torch.tensor([3, 1, 0], dtype=torch.int32)
    out = gdn_prefill(*rows, state, slots, starts, torch.ones(3, dtype=torch.bool))
    token = starts[[0, 2]].long()
    expected = gdn_decode(*(x[token] for x in rows), decoded, slots[[0, 2]])
    assert torch.equal(out[token], expected)
    assert torch.equal(state[[3, 0]], decoded[[3, 0]])


def test_bad_input_is_refused_in_one_line() -> None:
    case = make_case([oracles.chain(4)], heads=(1, 2))
    _, stash = case.verify()
    path, length = oracles.padded([[0, 1]]), torch.tensor([1])
    with pytest.raises(ValueError, match="unknown backend 'metal'; available: reference"):
        case.verify(backend="metal")
    with pytest.raises(ValueError, match=r"parents has shape \[1, 3\], expected \[1, 4\]"):
        replace(case, parents=case.parents[:, :3]).verify()
    with pytest.raises(ValueError, match="not a multiple of the 2 key heads"):
        rows = {"q": case.q.expand(1, 4, 2, 64), "v": case.v.repeat(1, 1, 2, 1)[:, :, :3]}
        replace(case, **rows).verify()
    with pytest.raises(ValueError, match="expected int64 words"):
        case.verify(ancestors=torch.zeros(1, 4, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="expected float32: a narrower state"):
        replace(case, state=case.state.bfloat16()).verify()
    with pytest.raises(ValueError, match="length 3 exceeds the path's 2 columns"):
        gdn_commit(stash, path, torch.tensor([3]), case.state, case.slots)
    with pytest.raises(ValueError, match=r"length is .*, expected int32"):
        gdn_commit(stash, path, length.float(), case.state, case.slots)
