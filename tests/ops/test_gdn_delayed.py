# SPDX-License-Identifier: Apache-2.0
"""Delayed commit: a verification that first commits the earlier step's path, against both ops.

Like `test_gdn_triton.py`, the kernels run on a GPU, or in Triton's interpreter in a process of
their own; the reference runs everywhere.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import oracles
import pytest
import torch
from interpreter import (
    DEVICE,
    INTERPRETED,
    assert_passes_interpreted,
    needs_kernel,
    runs_elsewhere,
)
from oracles import rms_ratio
from test_gdn import Case, expected_state, make_case
from test_gdn_triton import NARROW, moved
from torch import Tensor

from vllm_weaver.ops import GdnPending, ancestor_words, conv_commit, conv_table, gdn_commit

BACKENDS = ["reference", pytest.param("triton", marks=needs_kernel)]
GEN = torch.Generator().manual_seed(21)
PAST = 9999
"""What a path holds past its length."""


def on(backend: str, x: Any) -> Any:
    """A case or a tensor where the backend's ops run."""
    if backend == "reference":
        return x.clone() if isinstance(x, Tensor) else replace(x, state=x.state.clone())
    return x.to(DEVICE, copy=True) if isinstance(x, Tensor) else moved(x)


def pending_of(
    backend: str, stash: object, paths: list[list[int]], lengths: list[int], **kw: Any
) -> GdnPending:
    path = oracles.padded(paths)
    path[path < 0] = PAST
    for r, n in enumerate(lengths):
        path[r, n:] = PAST
    length = torch.tensor(lengths, dtype=torch.int32)
    return GdnPending(stash, on(backend, path), on(backend, length), **kw)


def poison(stash: object, paths: list[list[int]], lengths: list[int]) -> None:
    """NaN in every row of the stash that is not on a request's path."""
    for field in fields(stash):  # type: ignore[arg-type]
        value = getattr(stash, field.name)
        if isinstance(value, Tensor):
            for r, (path, n) in enumerate(zip(paths, lengths, strict=True)):
                off = torch.ones(value.shape[1], dtype=torch.bool, device=value.device)
                off[path[:n]] = False
                value[r, off] = float("nan")


def commit_then_verify(
    backend: str, case: Case, pending: GdnPending, **options: Any
) -> tuple[Tensor, object]:
    """The two ops that a delayed commit stands for; `case.state` is advanced in place."""
    earlier = pending.aligned()
    gdn_commit(earlier.stash, earlier.path, earlier.length, case.state, case.slots)
    return case.verify(backend=backend, **options)


def steps(
    trees: list[Any], later: list[Any], slots: list[int], backend: str, **options: Any
) -> tuple[Case, Case, object]:
    """A verified step, the case of the next one on the same states, and the first one's stash."""
    first = on(backend, make_case(trees, slots=slots, num_rows=40, seed=1, **options))
    second = on(backend, make_case(later, slots=slots, num_rows=40, seed=2, **options))
    _, stash = first.verify(backend=backend)
    return first, replace(second, state=first.state), stash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_path_is_committed_and_the_tree_verified_against_it(
    backend: str, dim: int, dtype: torch.dtype
) -> None:
    sizes = (17, 1, 40, 9)
    trees = [oracles.random_tree(GEN, n, reach=4) for n in sizes]
    later = [oracles.random_tree(GEN, n, reach=4) for n in (33, 9, 17, 40)]
    options = {"dim": dim, "dtype": dtype}
    _, case, stash = steps(trees, later, [4, 0, 5, 2], backend, **options)
    paths = [tree.deepest() for tree in trees]
    lengths = [len(paths[0]), 1, 0, min(3, len(paths[3]))]
    poison(stash, paths, lengths)
    pending = pending_of(backend, stash, paths, lengths)
    eager = replace(case, state=case.state.clone())
    expected, _ = commit_then_verify(backend, eager, pending)
    out, made = case.verify(backend=backend, pending=pending)
    assert torch.equal(case.state, eager.state)
    for r, tree in enumerate(later):
        own = slice(0, len(tree))
        limit = NARROW.get(dtype, 3e-6) if backend == "triton" else 1e-6
        assert rms_ratio(out[r, own].cpu(), expected[r, own].cpu()) < limit
        assert not out[r, len(tree) :].any()
    assert torch.equal(case.state[[1, 3]].cpu(), make_case(trees, seed=1, **options).state[[1, 3]])
    # The new stash commits as one of a step without a pending path.
    again = pending_of(backend, made, [tree.deepest() for tree in later], [2, 3, 1, 0])
    gdn_commit(again.stash, again.path, again.length, case.state, case.slots)
    assert bool(case.state[case.slots.long()].isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_equal_the_recurrence(backend: str) -> None:
    trees = [oracles.wide(20), oracles.chain(9)]
    _, case, stash = steps(trees, trees, [1, 0], backend)
    plain = make_case(trees, slots=[1, 0], num_rows=40, seed=1)
    paths = [tree.deepest() for tree in trees]
    lengths = [len(paths[0]), 5]
    case.verify(backend=backend, pending=pending_of(backend, stash, paths, lengths))
    for r, slot in enumerate((1, 0)):
        expected = expected_state(plain, r, paths[r][: lengths[r]])
        assert rms_ratio(case.state[slot].cpu(), expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_inert_requests_commit_nothing_and_empty_trees_do(backend: str) -> None:
    trees = [oracles.chain(6)] * 3
    _, case, stash = steps(trees, trees, [3, 1, 2], backend)
    case.slots[0] = -1
    case.num_nodes[1] = 0
    pending = pending_of(backend, stash, [[0, 1, 2]] * 3, [3, 2, 0])
    before = case.state.clone()
    eager = replace(case, state=case.state.clone())
    commit_then_verify(backend, eager, pending)
    out, _ = case.verify(backend=backend, pending=pending)
    assert not out[:2].any()
    assert torch.equal(case.state, eager.state)
    assert torch.equal(case.state[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])
    assert not torch.equal(case.state[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_may_move_between_the_steps(backend: str) -> None:
    """One left, one came, and the others changed places."""
    trees = [oracles.wide(20), oracles.chain(9), oracles.chain(4)]
    first = on(backend, make_case(trees, slots=[2, 0, 5], seed=1))
    _, stash = first.verify(backend=backend)
    later = [oracles.chain(5), oracles.wide(20), oracles.chain(3)]
    case = on(backend, make_case(later, slots=[5, 3, 2], seed=2))
    case = replace(case, state=first.state)
    requests = on(backend, torch.tensor([2, -1, 0], dtype=torch.int32))
    paths = [tree.deepest() for tree in trees]
    pending = pending_of(backend, stash, paths, [4, 7, 3], requests=requests)
    alone = case.state.clone()
    gdn_commit(stash, pending.path, pending.length, alone, first.slots)
    before = case.state.clone()
    case.verify(backend=backend, pending=pending)
    assert torch.equal(case.state[[2, 5]], alone[[2, 5]])
    assert torch.equal(case.state[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_of_delayed_commits_give_the_states_of_eager_ones(backend: str) -> None:
    gen = torch.Generator().manual_seed(3)
    slots = [1, 0]
    # Keys and values of 128, where a thread holds tiles of rows.
    state = on(backend, make_case([oracles.chain(1)] * 2, seed=99, dim=128).state)
    eager = state.clone()
    pending = None
    for window in range(9 if INTERPRETED or backend == "reference" else 64):
        trees = [oracles.random_tree(gen, 12, reach=5) for _ in slots]
        case = make_case(trees, seed=window, decay=0.2, slots=slots, dim=128)
        case = on(backend, case)
        _, stash = replace(case, state=state).verify(backend=backend, pending=pending)
        # Every commit that came before this window is in the state now.
        assert torch.equal(state, eager)
        paths = [tree.paths()[window % len(tree.paths())] for tree in trees]
        lengths = [(window + r) % (len(path) + 1) for r, path in enumerate(paths)]
        pending = pending_of(backend, stash, paths, lengths)
        gdn_commit(stash, pending.path, pending.length, eager, case.slots)
    assert not torch.equal(state, eager)


@needs_kernel
@pytest.mark.parametrize(
    "tiling",
    # With blocks of 32 by 32, rows and the state's tiles have one shape (`recurrence.places`).
    [(16, 64, 32), (16, 32, 64), (32, 32, 32), (32, 128, 32), (64, 64, 128), (64, 128, 128)],
    ids=str,
)
def test_every_tiling_gives_the_same(tiling: tuple[int, int, int]) -> None:
    from vllm_weaver.ops.gdn.triton import Tiling, empty_stash, launch_verify

    trees = [oracles.random_tree(GEN, 40), oracles.comb(33)]
    _, case, stash = steps(trees, trees, [3, 1], "triton", dim=128, dtype=torch.float16)
    paths = [tree.deepest() for tree in trees]
    pending = pending_of("triton", stash, paths, [len(paths[0]), 4])
    eager = replace(case, state=case.state.clone())
    expected, _ = commit_then_verify("triton", eager, pending)
    own = empty_stash(2, 40, 1, 2, 128, 128, torch.float16, case.state.device)
    words = ancestor_words(case.parents, case.num_nodes)
    out = launch_verify(
        *(case.rows, case.state, case.slots, case.num_nodes, words, 128**-0.5, True),
        stash_rows=(own.k_RTHK, own.v_RTHV),
        stash_gates=(own.g_RTH, own.beta_RTH),
        A_log=None,
        dt_bias=None,
        max_depth=None,
        out=None,
        tiling=Tiling(*tiling, 4, 2),
        pending=pending,
    )
    assert torch.equal(case.state, eager.state)
    for r, tree in enumerate(trees):
        own_rows = slice(0, len(tree))
        assert rms_ratio(out[r, own_rows].cpu(), expected[r, own_rows].cpu()) < 7e-4


@needs_kernel
def test_a_bfloat16_state_is_rounded_after_every_node() -> None:
    trees = [oracles.chain(9)]
    _, case, stash = steps(trees, trees, [2], "triton", dim=128)
    case = replace(case, state=case.state.bfloat16())
    pending = pending_of("triton", stash, [trees[0].deepest()], [7])
    eager = replace(case, state=case.state.clone())
    commit_then_verify("triton", eager, pending)
    case.verify(backend="triton", pending=pending)
    assert torch.equal(case.state, eager.state)


@needs_kernel
def test_raw_rows_commit_from_the_activated_ones_of_the_step_before() -> None:
    from vllm_weaver.ops.gdn.raw import tree_verify_raw

    trees = [oracles.wide(20), oracles.chain(9)]
    case = moved(make_case(trees, dtype=torch.bfloat16, dim=128, seed=4))
    R, T, HV = case.g.shape
    C = 2 * 128 + HV * 128
    gen = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).bfloat16().to(DEVICE)

    history, taps, A_log, dt_bias = normal(6, 3, C), normal(C, 4), normal(HV).float(), normal(HV)
    words = ancestor_words(case.parents, case.num_nodes)
    table = conv_table(case.parents, case.num_nodes, 4)
    rows = [torch.empty(R, T, C, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]

    def verify(state: Tensor, step: int, **options: Any) -> tuple[Tensor, Any]:
        x, a, b = inputs[step]
        return tree_verify_raw(
            *(x, history, taps, a, b, A_log, dt_bias, state, case.slots, case.num_nodes),
            *(words, table, 1),
            rows=rows[step],
            **options,
        )

    inputs = [(normal(R, T, C), normal(R, T, HV), normal(R, T, HV)) for _ in range(2)]
    eager, late = case.state.clone(), case.state.clone()
    _, stash = verify(eager, 0)
    paths = [tree.deepest() for tree in trees]
    pending = pending_of("triton", stash.rows_stash(rows[0], 128), paths, [7, 3])
    gdn_commit(stash, pending.path, pending.length, eager, case.slots)
    conv_commit(stash.conv, pending.path, pending.length, history, case.slots)
    with pytest.raises(ValueError, match="shares memory"):
        verify(late, 0, pending=pending)
    with pytest.raises(ValueError, match="needs the triton backend's stash of rows"):
        verify(late, 1, pending=replace(pending, stash=stash))
    with pytest.raises(ValueError, match="the cuda backend commits no pending path"):
        verify(late, 1, pending=pending, backend="cuda")
    expected, _ = verify(eager, 1)
    out, _ = verify(late, 1, pending=pending)
    assert torch.equal(late, eager)
    for r, tree in enumerate(trees):
        own = slice(0, len(tree))
        assert rms_ratio(out[r, own].cpu(), expected[r, own].cpu()) < NARROW[torch.bfloat16]


@needs_kernel
def test_a_stash_that_is_still_read_is_not_written() -> None:
    trees = [oracles.chain(6)] * 2
    _, case, stash = steps(trees, trees, [0, 1], "triton")
    pending = pending_of("triton", stash, [[0, 1]] * 2, [2, 1])
    with pytest.raises(ValueError, match=r"shares memory with pending\.stash.*two stashes"):
        case.verify(backend="triton", pending=pending, stash=stash)


def test_what_does_not_fit_together_is_refused() -> None:
    trees = [oracles.chain(6)] * 2
    _, case, stash = steps(trees, trees, [0, 1], "reference")
    fits = pending_of("reference", stash, [[0, 1]] * 2, [2, 1])

    def verify(pending: GdnPending, backend: str = "reference") -> None:
        case.verify(backend=backend, pending=pending)

    with pytest.raises(ValueError, match="pending is of 1 requests, not 2"):
        verify(GdnPending(stash.select(slice(0, 1)), fits.path[:1], fits.length[:1]))
    with pytest.raises(ValueError, match=r"pending\.stash is of 2 requests, its path of 1"):
        verify(GdnPending(stash, fits.path[:1], fits.length[:1], fits.length))
    with pytest.raises(ValueError, match=r"pending.length has shape \[1\], expected \[2\]"):
        verify(replace(fits, length=fits.length[:1]))
    with pytest.raises(ValueError, match=r"pending\.path is torch.float32, expected int32"):
        verify(replace(fits, path=fits.path.float()))
    with pytest.raises(ValueError, match="the cuda backend commits no pending path"):
        verify(fits, "cuda")
    with pytest.raises(ValueError, match="the stash is of backend"):
        verify(replace(fits, stash=replace(stash, backend="triton")))


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
