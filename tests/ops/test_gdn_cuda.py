# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of tree verification against Transformers' recurrence, path by path, float64.

Every test runs the kernel's source on emulated threads, compiled with g++; with a GPU and the
full library built, also there. The emulator's own checks are tested with kernels that are wrong,
and find no two accesses of the kernel to shared memory that nothing orders.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import rms_ratio
from test_gdn import Case, expected_outputs, expected_state, make_case
from torch import Tensor

from vllm_weaver.ops import (
    GdnStash,
    ancestor_words,
    causal_conv1d_tree,
    conv_table,
    gdn_commit,
    gdn_decode,
    gdn_gate,
)
from vllm_weaver.ops.cuda import Library, NotBuilt, build, load, load_library
from vllm_weaver.ops.gdn import cuda, raw
from vllm_weaver.ops.gdn.raw import tree_verify_raw
from vllm_weaver.ops.gdn.triton import GdnTritonStash

NARROW = {torch.float16: 7e-4, torch.bfloat16: 2.1e-3}
"""Rounding of the output, and what products in halves add."""
BF16, F16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])


@dataclass
class Machine:
    """Where a test runs the kernel."""

    device: str

    def moved(self, case: Case) -> Case:
        tensors = {
            f.name: getattr(case, f.name).to(self.device, copy=True)
            for f in fields(case)
            if isinstance(getattr(case, f.name), Tensor)
        }
        return replace(case, **tensors)

    def verify(self, case: Case, **options: Any) -> tuple[Tensor, GdnTritonStash]:
        """Outputs and stash on the CPU."""
        out, stash = self.moved(case).verify(backend="cuda", **options)
        tensors = {
            f.name: getattr(stash, f.name).cpu()
            for f in fields(stash)
            if isinstance(getattr(stash, f.name), Tensor)
        }
        return out.cpu(), replace(stash, **tensors)


@pytest.fixture(scope="module", params=["emulator", "gpu"])
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param == "emulator":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        build.build("emulator")
        load(emulated=True)
        return Machine("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    try:
        kind = load_library().kind
    except NotBuilt as error:
        pytest.skip(str(error))
    if kind != "full":
        pytest.skip("needs the full build: python -m vllm_weaver.ops.cuda.build full")
    return Machine("cuda")


@pytest.fixture
def gpu(machine: Machine) -> Machine:
    if machine.device != "cuda":
        pytest.skip("is about the GPU")
    return machine


@pytest.fixture
def emulated_ops(machine: Machine) -> Iterator[Any]:
    if machine.device != "cpu":
        pytest.skip("is about the emulator")
    ops = load(emulated=True)
    yield ops
    ops.set_order(0)
    ops.find_races(False)


def assert_outputs_match(case: Case, out: Tensor, tolerance: float | None = None) -> None:
    tolerance = NARROW[case.q.dtype] if tolerance is None else tolerance
    for r, tree in enumerate(case.trees):
        error = rms_ratio(out[r, : len(tree)], expected_outputs(case, r))
        assert error < tolerance, (r, error)
        assert torch.equal(out[r, len(tree) :], torch.zeros_like(out[r, len(tree) :]))


def reference_stash(stash: GdnTritonStash) -> GdnStash:
    """The same stash for the reference's exact commit, which does not look at u."""
    k = stash.k_RTHK.float()
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    v = stash.v_RTHV.float()
    return GdnStash(k, v, stash.g_RTH, stash.beta_RTH, torch.full_like(v, float("nan")))


GEN = torch.Generator().manual_seed(7)
TREES = {
    "root_alone": oracles.chain(1),
    "two_nodes": oracles.chain(2),
    "star_16": oracles.star(16),
    "chain_of_17": oracles.chain(17),
    "comb_33": oracles.comb(33),
    "random_40": oracles.random_tree(GEN, 40),
    "depth_15": oracles.wide(64),
    "star_65": oracles.star(65),
    "chain_of_70": oracles.chain(70),
    "odd_127": oracles.random_tree(GEN, 127, reach=9),
    "random_128": oracles.random_tree(GEN, 128),
}
LARGE = {
    "chain_of_129": oracles.chain(129),
    "comb_200": oracles.comb(200),
    "random_256": oracles.random_tree(GEN, 256, reach=30),
}


@pytest.mark.parametrize("name", TREES)
def test_every_node_equals_the_recurrence_along_its_path(machine: Machine, name: str) -> None:
    case = make_case([TREES[name]], dtype=BF16, heads=(1, 1))
    out, _ = machine.verify(case)
    assert out.dtype == BF16
    assert_outputs_match(case, out)


@pytest.mark.parametrize("name", ["chain_of_17", "depth_15", "random_128"])
def test_heads_of_128(machine: Machine, name: str) -> None:
    case = make_case([TREES[name]], dtype=BF16, heads=(1, 1), dim=128)
    assert_outputs_match(case, machine.verify(case)[0])


@pytest.mark.parametrize("name", ["two_nodes", "depth_15", "odd_127"])
def test_float16_rows_lose_little_more_than_the_rounding_of_the_output(
    machine: Machine, name: str
) -> None:
    case = make_case([TREES[name]], dtype=F16, heads=(1, 1))
    assert_outputs_match(case, machine.verify(case)[0])


@DTYPES
@pytest.mark.parametrize("name", LARGE)
def test_longer_trees_go_in_passes(machine: Machine, name: str, dtype: torch.dtype) -> None:
    case = make_case([LARGE[name]], dtype=dtype, heads=(1, 1))
    assert_outputs_match(case, machine.verify(case)[0])


def test_passes_past_the_nodes_give_zeros(machine: Machine) -> None:
    trees = [oracles.random_tree(GEN, 140, reach=9), oracles.comb(20), oracles.chain(64)]
    case = make_case(trees, dtype=BF16, heads=(1, 1), num_rows=200)
    assert_outputs_match(case, machine.verify(case)[0])


@pytest.mark.parametrize("form", cuda.FORMS, ids=str)
def test_every_form_gives_the_same(machine: Machine, form: cuda.Form) -> None:
    size = min(16 * form.tiles, 70)
    case = make_case([oracles.random_tree(GEN, size)], dtype=BF16, heads=(1, 1), dim=128)
    on_device = machine.moved(case)
    out, _ = cuda.tree_verify(
        *(*on_device.rows, on_device.state, on_device.slots, on_device.num_nodes),
        ancestor_words(on_device.parents, on_device.num_nodes),
        *(128**-0.5, True),
        form=form,
    )
    assert_outputs_match(case, out.cpu())


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (2, 4)])
def test_value_heads_share_their_key_head(machine: Machine, heads: tuple[int, int]) -> None:
    case = make_case([oracles.random_tree(GEN, 17), oracles.comb(12)], heads=heads, dtype=BF16)
    out, stash = machine.verify(case)
    assert_outputs_match(case, out)
    for r, tree in enumerate(case.trees):
        assert torch.equal(stash.k_RTHK[r, : len(tree)], case.k[r, : len(tree)])


def test_requests_with_other_node_counts_do_not_mix(machine: Machine) -> None:
    trees = [oracles.random_tree(GEN, size, reach=5) for size in (17, 1, 33, 9)]
    case = make_case(trees, num_rows=40, slots=[4, 0, 5, 2], dtype=BF16)
    assert_outputs_match(case, machine.verify(case)[0])


@DTYPES
def test_strong_decay_neither_overflows_nor_blurs(machine: Machine, dtype: torch.dtype) -> None:
    case = make_case([TREES["depth_15"]], dtype=dtype, heads=(1, 1))
    for low, high in ((50.0, 51.0), (0.0, 500.0)):
        gen = torch.Generator().manual_seed(1)
        case.g.uniform_(-high, -low, generator=gen)
        assert_outputs_match(case, machine.verify(case)[0])


def test_equal_keys_do_not_blow_up_the_solve(machine: Machine) -> None:
    # Powers of X would reach 6,435 here, and their rounding in halves the size of the outputs.
    case = make_case([oracles.wide(64), oracles.chain(64)], dtype=F16, decay=1e-3)
    case.k[:] = case.k[:, :1] + 0.05 * case.k
    case.beta[:] = 0.98 + 0.02 * case.beta
    assert_outputs_match(case, machine.verify(case)[0], 4e-3)


def test_rows_of_any_size_keep_their_precision(machine: Machine) -> None:
    case = make_case([oracles.random_tree(GEN, 40)], dtype=BF16, heads=(1, 1))
    case.k[:, ::3] *= 1e4
    case.q[:, ::2] *= 1e-3
    case.v[..., ::2] *= 1e5
    case.state[:, :, ::2] *= 1e5
    out, _ = machine.verify(case)
    # Columns of V that differ in size do not cost each other precision.
    expected = expected_outputs(case, 0)
    for columns in (slice(0, None, 2), slice(1, None, 2)):
        assert rms_ratio(out[0, ..., columns], expected[..., columns]) < NARROW[BF16]


def test_a_write_strength_of_zero_or_one_is_exact(machine: Machine) -> None:
    case = make_case([oracles.random_tree(GEN, 20)], dtype=BF16, heads=(1, 1))
    case.beta[:] = (case.beta > 0.5).float()
    assert_outputs_match(case, machine.verify(case)[0])


def test_verify_leaves_state_and_inputs_bitwise_alone(machine: Machine) -> None:
    case = machine.moved(make_case([oracles.random_tree(GEN, 20), oracles.chain(3)], dtype=BF16))
    before = [x.clone() for x in (*case.rows, case.state)]
    case.verify(backend="cuda")
    for x, y in zip((*case.rows, case.state), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_stash_holds_the_rows_and_commits_like_the_recurrence(machine: Machine) -> None:
    case = make_case([oracles.wide(24), oracles.random_tree(GEN, 20, reach=4)], dtype=BF16)
    _, stash = machine.verify(case)
    kept = stash.k_RTHK, stash.v_RTHV, stash.g_RTH, stash.beta_RTH
    for x, y in zip(kept, case.rows[1:], strict=True):
        for r, tree in enumerate(case.trees):
            assert torch.equal(x[r, : len(tree)], y[r, : len(tree)])
    paths = [tree.deepest() for tree in case.trees]
    state = case.state.clone()
    lengths = torch.tensor([len(p) for p in paths])
    gdn_commit(reference_stash(stash), oracles.padded(paths), lengths, state, case.slots)
    for r, path in enumerate(paths):
        assert rms_ratio(state[case.slots[r]], expected_state(case, r, path)) < 1e-6
        decoded = case.decode_path(r, path, case.state[case.slots[r]])
        assert torch.equal(state[case.slots[r]], decoded)


def test_windows_of_verify_and_commit_stay_close_to_the_recurrence(machine: Machine) -> None:
    gen = torch.Generator().manual_seed(11)
    state = make_case([oracles.chain(1)], seed=99, heads=(1, 1)).state
    truth = state[0].double()
    for window in range(6):
        trees = [oracles.random_tree(gen, 12, reach=5)]
        case = make_case(trees, seed=window, decay=0.2, heads=(1, 1), dtype=BF16)
        case = replace(case, state=state)
        out, stash = machine.verify(case)
        assert_outputs_match(case, out)
        path = trees[0].deepest()[: window + 1]
        gdn_commit(
            *(reference_stash(stash), oracles.padded([path]), torch.tensor([len(path)])),
            *(state, case.slots),
        )
        rows = (x[0, path][None] for x in case.rows)
        truth = oracles.gdn_sequence(*rows, truth[None])[1][0]
    assert rms_ratio(state[0], truth) < 1e-6


def test_given_buffers_are_overwritten_even_if_poisoned(machine: Machine) -> None:
    case = machine.moved(make_case([TREES["random_40"], oracles.chain(3)], dtype=BF16))
    words = ancestor_words(case.parents, case.num_nodes)
    expected, stash = case.verify(backend="cuda", ancestors=words)
    buffers = [x for x in vars(stash).values() if isinstance(x, Tensor)]
    kept = [x.clone() for x in buffers]
    for x in (*buffers, out := torch.full_like(expected, float("nan"))):
        x.fill_(float("nan"))
    got, again = case.verify(backend="cuda", ancestors=words, out=out, stash=stash)
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, expected)
    assert again.k_RTHK.data_ptr() == stash.k_RTHK.data_ptr()
    for x, y in zip(buffers, kept, strict=True):
        for r, tree in enumerate(case.trees):
            assert torch.equal(x[r, : len(tree)], y[r, : len(tree)])
            assert bool(x[r, len(tree) :].isnan().all())


@pytest.mark.parametrize("num_rows", [80, 140])
def test_nothing_past_the_nodes_is_read_from_the_ancestors(machine: Machine, num_rows: int) -> None:
    trees = [oracles.random_tree(GEN, 70), oracles.comb(65)]
    case = machine.moved(make_case(trees, num_rows=num_rows, dtype=BF16, heads=(1, 1)))
    words = ancestor_words(case.parents, case.num_nodes)
    expected = case.verify(backend="cuda", ancestors=words)[0]
    for r, tree in enumerate(case.trees):
        words[r, len(tree) :] = -1
        words[r, : len(tree), 1] |= -1 << (len(tree) - 64)
    assert torch.equal(case.verify(backend="cuda", ancestors=words)[0], expected)


def test_inert_requests_give_zeros_and_touch_nothing(machine: Machine) -> None:
    trees = [oracles.random_tree(GEN, 9), oracles.chain(4), oracles.star(5)]
    case = make_case(trees, slots=[-1, 3, -1], dtype=BF16)
    case.state[0] = float("nan")
    case.num_nodes[2] = 0
    on_device = machine.moved(case)
    out = torch.full_like(on_device.v, float("nan"))
    _, stash = on_device.verify(backend="cuda", out=out)
    out = out.cpu()
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert rms_ratio(out[1, :4], expected_outputs(case, 1)) < NARROW[BF16]
    assert torch.equal(stash.v_RTHV[1, :4].cpu(), case.v[1, :4])


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


def test_raw_gates_are_those_of_the_gate(machine: Machine) -> None:
    case = make_case([oracles.random_tree(GEN, 20), oracles.chain(3)], dtype=BF16)
    a, b, weights = raw_gates(case)
    g, beta = gdn_gate(a, b, **weights)
    gated, raw = replace(case, g=g, beta=beta), replace(case, g=a, beta=b)
    on_device = {name: x.to(machine.device) for name, x in weights.items()}
    out, stash = machine.verify(raw, **on_device)
    assert_outputs_match(gated, out)
    for r, tree in enumerate(case.trees):
        assert rms_ratio(stash.g_RTH[r, : len(tree)], g[r, : len(tree)]) < 1e-6
        assert rms_ratio(stash.beta_RTH[r, : len(tree)], beta[r, : len(tree)]) < 1e-6


@pytest.mark.parametrize("size", [20, 140])
def test_bfloat16_states(machine: Machine, size: int) -> None:
    case = make_case([oracles.random_tree(GEN, size)], dtype=BF16, heads=(1, 1))
    case = replace(case, state=case.state.bfloat16())
    assert_outputs_match(case, machine.verify(case)[0])


def test_strided_states_and_parts_of_wider_rows_are_read_in_place(machine: Machine) -> None:
    case = machine.moved(make_case([oracles.wide(20), oracles.chain(4)], dtype=BF16))
    expected, _ = case.verify(backend="cuda")
    pages = torch.full((len(case.state), case.state[0].numel() + 100), float("nan")).to(case.state)
    strided = pages[:, 60:-40].unflatten(1, case.state.shape[1:])
    strided.copy_(case.state)
    R, T = case.q.shape[:2]
    packed = torch.cat([x.reshape(R, T, -1) for x in (case.q, case.k, case.v)], -1)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in packed.split([64, 64, 128], -1))
    out, _ = replace(case, q=q, k=k, v=v, state=strided).verify(backend="cuda")
    assert torch.equal(out, expected)
    assert bool(pages[:, :60].isnan().all() and pages[:, -40:].isnan().all())


def test_scale_reaches_the_equations(machine: Machine) -> None:
    case = make_case([oracles.random_tree(GEN, 15)], dtype=BF16)
    assert_outputs_match(case, machine.verify(case, scale=1.0)[0] * 64**-0.5)


def test_the_order_of_warps_changes_no_bit(machine: Machine, emulated_ops: Any) -> None:
    for size in (16, 70, 140):
        trees = [oracles.random_tree(GEN, size)]
        case = make_case(trees, dtype=BF16, heads=(1, 1), num_rows=size + 3)
        expected, kept = machine.verify(case)
        for order in (1, 2, 3):
            emulated_ops.set_order(order)
            out, stash = machine.verify(case)
            assert torch.equal(out, expected)
            for f in ("k_RTHK", "v_RTHV", "g_RTH", "beta_RTH"):
                assert torch.equal(getattr(stash, f)[0, :size], getattr(kept, f)[0, :size])
        emulated_ops.set_order(0)


@pytest.mark.parametrize("form", cuda.FORMS, ids=str)
def test_barriers_order_all_accesses_to_shared_memory(
    machine: Machine, emulated_ops: Any, form: cuda.Form
) -> None:
    emulated_ops.find_races(True)
    rows = 16 * form.tiles
    trees = [oracles.random_tree(GEN, rows - 3)]
    case = make_case(trees, dtype=BF16, heads=(1, 1), dim=128, num_rows=rows)
    out, _ = cuda.tree_verify(
        *(*case.rows, case.state, case.slots, case.num_nodes),
        ancestor_words(case.parents, case.num_nodes),
        *(128**-0.5, True),
        form=form,
    )
    assert_outputs_match(case, out)


@pytest.mark.parametrize("size,num_rows", [(70, 90), (250, 256), (3, 140)])
def test_barriers_order_all_accesses_of_several_passes(
    machine: Machine, emulated_ops: Any, size: int, num_rows: int
) -> None:
    """Passes of 64 rows; the stash's rows are written, too."""
    emulated_ops.find_races(True)
    trees = [oracles.random_tree(GEN, size)]
    case = make_case(trees, dtype=BF16, heads=(1, 1), dim=128, num_rows=num_rows)
    assert_outputs_match(case, machine.verify(case)[0])


def test_what_the_kernel_cannot_take_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, case: Case, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            machine.verify(case, **options)

    small = make_case([oracles.chain(3)], dtype=BF16)
    refused(r"takes head dims .* K = 20 and V_h = 20", make_case([oracles.chain(3)], dim=20))
    refused(r"float16 or in bfloat16, got torch.float32", make_case([oracles.chain(3)]))
    refused("at most 256 rows, got 257", make_case([oracles.chain(3)], dtype=BF16, num_rows=257))
    refused("needs qk_l2norm", small, qk_l2norm=False)
    refused("takes states in float32", replace(small, state=small.state.half()))
    wide = torch.zeros(*small.state.shape[:-1], 80, device=machine.device)[..., :64]
    with pytest.raises(ValueError, match="dense within a slot"):
        replace(machine.moved(small), state=wide).verify(backend="cuda")

    def missing(emulated: bool) -> Library:
        raise NotBuilt("the CUDA kernels are not built: python -m ...")

    monkeypatch.setattr(cuda, "load_library", missing)
    refused("the CUDA kernels are not built: python -m", small)


# ---- The emulator and the build.


def emulated_program(folder: Path, source: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    # Checks that some compilers have by default, and that fibres must pass.
    hardened = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3", "-fstack-protector-strong"]
    command = ["g++", "-std=c++17", "-O1", "-DWEAVER_EMULATE", f"-I{build.SOURCES}", *hardened]
    program, path = folder / source.split(".")[0], Path(__file__).parent / source
    subprocess.run([*command, "-x", "c++", path, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with one wrong kernel for each of its arguments."""
    return emulated_program(tmp_path_factory.mktemp("emulator"), "emulator_faults.cpp")


@pytest.fixture(scope="module")
def orderings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that orders accesses in a way of its first argument; with a second one it fails."""
    return emulated_program(tmp_path_factory.mktemp("emulator"), "orderings.cu")


@pytest.mark.parametrize(
    "fault,says",
    [
        ("none", "45 45"),
        ("no_barrier", "nan nan"),
        ("no_wait", "nan nan"),
        (
            "past_the_end",
            "error: emulator, block 0 0 0: access past shared memory at 128",
        ),
        ("misaligned", "error: emulator, block 0 0 0: misaligned access of 4 bytes at 2"),
        ("divergent", "error: emulator, block 0 0 0: lanes of a warp diverge"),
        ("deadlock", "error: emulator, block 0 0 0: deadlock: thread 0 waits at barrier 1"),
        ("counts", "error: emulator, block 0 0 0: threads disagree on the count of barrier 1"),
    ],
)
def test_the_emulator_shows_wrong_kernels(faults: Path, fault: str, says: str) -> None:
    done = subprocess.run([faults, fault], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(says)


RACES = {
    "block": ("write after read at numbers + 128", "read after write at numbers + 0"),
    "warp": ("read after write at matrices + 16",),
    "arrive_all": ("write after read at numbers + 256",),
    "arrive_pair": ("read after write at numbers + 0",),
    "arrive_both": ("write after read at numbers + 0",),
    "read_pair": ("read after write at numbers + 384", "write after read at numbers + 256"),
    "write_pair": ("write after write at numbers + 0",),
    "copy": ("read after write at copies + 1520",),
    "copy_barrier": ("write after read at copies + 512", "read after write at copies + 0"),
}
"""By what orders two accesses: what the emulator finds without it, the first warps first."""


@pytest.mark.parametrize("name", RACES)
def test_the_emulator_finds_what_nothing_orders(orderings: Path, name: str) -> None:
    def said(*arguments: str) -> str:
        done = subprocess.run([orderings, name, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout

    assert said() == f"{name}: no race\n"
    lines = said("wrong").removeprefix(f"{name}: emulator, block 0 0 0: ").splitlines()
    assert len(lines) == len(RACES[name])
    for line, expected in zip(lines, RACES[name], strict=True):
        assert line.startswith(f"race, {expected}: thread ")
        assert re.search(
            r"at orderings\.cu:\d+, nothing orders it after thread \d+ at orderings\.cu:\d+", line
        )
        assert ("a copy not waited for" in line) == (name == "copy")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no nvcc on PATH nor in .*: install CUDA 13"):
        build.compile_command(tmp_path / "x.so", "full")
    with pytest.raises(build.BuildError, match=r"no g\+\+ on PATH"):
        build.compile_command(tmp_path / "x.so", "emulator")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "none.cu")
    with pytest.raises(build.BuildError, match="the kernels are built from a checkout"):
        build.compile_command(tmp_path / "x.so", "full")


def test_a_library_brings_all_of_pytorch(tmp_path: Path) -> None:
    """Else one that was built beside a PyTorch without CUDA finds no stream where there is one."""
    source = tmp_path / "none.cpp"
    source.write_text("int nothing() { return 0; }")
    folder = Path(torch.__file__).parent / "lib"
    made = tmp_path / "none.so"
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(made), f"-L{folder}"]
    # The linker of many systems is told to leave out what it finds no use for.
    subprocess.run([*command, "-Wl,--as-needed", *build.LIBRARIES], check=True)
    assert b"\0libtorch.so\0" in made.read_bytes()
    for kind in ("full", "emulator"):
        if kind == "full" and shutil.which("nvcc") is None:
            continue
        assert build.compile_command(made, kind)[-len(build.LIBRARIES) :] == [*build.LIBRARIES]


REGISTERS = {(1, 4): 85, (4, 4): 128, (8, 4): 255}
"""At most so many registers a thread, by form: what its blocks per multiprocessor allow."""


def test_the_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton with its NVIDIA backend")
    import triton

    try:
        nvcc = build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    source = tmp_path / "forms.cu"
    instances = [
        "template __global__ void gdn::tree_verify<gdn::Config<gdn::Type::BFLOAT16, "
        f"gdn::Type::FLOAT32, 128, {tiles}, {pairs}, false>>(const __grid_constant__ gdn::Params);"
        for tiles, pairs in REGISTERS
    ]
    source.write_text("\n".join(['#include "gdn_tree_verify.cuh"', *instances]))
    target = tmp_path / "forms.cubin"
    arch = f"arch=compute_{build.ARCHITECTURE},code=sm_{build.ARCHITECTURE}"
    command = [nvcc, "-std=c++17", "-O3", "-cubin", "-gencode", arch, f"-I{build.SOURCES}"]
    subprocess.run([*command, source, "-o", target], check=True)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", target], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"ELi128ELi(\d)ELi(\d)ELb0.*\n.*REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    assert len(found) == len(REGISTERS), usage
    for tiles, pairs, registers, stack, local in (map(int, numbers) for numbers in found):
        assert registers <= REGISTERS[tiles, pairs], (tiles, pairs, registers)
        assert stack + local == 0, (tiles, pairs)


# ---- On a GPU alone.


def test_gates_have_the_bits_of_the_triton_backend(gpu: Machine) -> None:
    case = make_case([oracles.random_tree(GEN, 64)], dtype=BF16, heads=(2, 6), dim=128)
    a, b, weights = raw_gates(case)
    raw = gpu.moved(replace(case, g=a, beta=b))
    weights = {name: x.to(gpu.device) for name, x in weights.items()}
    stashes = [raw.verify(**weights, backend=name)[1] for name in ("cuda", "triton")]
    assert torch.equal(stashes[0].g_RTH, stashes[1].g_RTH)
    assert torch.equal(stashes[0].beta_RTH, stashes[1].beta_RTH)


def test_the_triton_commit_of_the_stash_has_decodes_bits(gpu: Machine) -> None:
    case = make_case([oracles.wide(24), oracles.chain(9)], dtype=BF16, dim=128)
    a, b, weights = raw_gates(case)
    raw = gpu.moved(replace(case, g=a, beta=b))
    weights = {name: x.to(gpu.device) for name, x in weights.items()}
    _, stash = raw.verify(**weights, backend="cuda")
    paths = [tree.deepest() for tree in case.trees]
    state, decoded = raw.state.clone(), raw.state.clone()
    lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32, device=gpu.device)
    gdn_commit(stash, oracles.padded(paths).to(gpu.device), lengths, state, raw.slots)
    for r, path in enumerate(paths):
        for node in path:
            rows = (x[r, node][None] for x in raw.rows)
            gdn_decode(*rows, decoded, raw.slots[r : r + 1], **weights, backend="triton")
    assert torch.equal(state, decoded)


@DTYPES
def test_a_captured_graph_serves_other_trees_and_lengths(gpu: Machine, dtype: torch.dtype) -> None:
    trees = [[oracles.wide(64), oracles.chain(5)], [oracles.comb(9), oracles.random_tree(GEN, 63)]]
    first, second = (make_case(t, num_rows=64, seed=s, dtype=dtype) for s, t in enumerate(trees))
    case = gpu.moved(first)
    words = ancestor_words(case.parents, case.num_nodes)
    out, stash = case.verify(backend="cuda", ancestors=words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.verify(backend="cuda", ancestors=words, out=out, stash=stash)
    for f in ("q", "k", "v", "g", "beta", "state", "slots", "parents", "num_nodes"):
        getattr(case, f).copy_(getattr(second, f))
    words.copy_(ancestor_words(case.parents, case.num_nodes))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_outputs_match(second, out.cpu())


def test_raw_rows_go_through_the_convolution_and_leave_their_gates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convolve(x, state, slots, weight, num_nodes, table, bias, activation, *, out, stash):
        """The convolution's kernel, which needs a GPU, by its definition."""
        assert out is None and stash is None and table is not None
        return causal_conv1d_tree(
            *(x, state, slots, weight, case.parents, num_nodes),
            bias=bias,
            activation=activation,
            backend="reference",
        )

    if machine.device == "cpu":
        monkeypatch.setattr("vllm_weaver.ops.gdn.raw.tree_conv", convolve)
    case = machine.moved(make_case([oracles.wide(20), oracles.chain(9)], dtype=BF16, heads=(1, 2)))
    R, T, HV = case.g.shape
    gen = torch.Generator().manual_seed(5)

    def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype).to(machine.device)

    C = 2 * 64 + HV * 64
    x, history, taps = drawn(R, T, C), drawn(6, 3, C), drawn(C, 4)
    a, b = drawn(R, T, HV), drawn(R, T, HV)
    A_log, dt_bias = drawn(HV, dtype=torch.float32), drawn(HV, dtype=torch.float32)
    words = ancestor_words(case.parents, case.num_nodes)
    out, stash = tree_verify_raw(
        *(x, history, taps, a, b, A_log, dt_bias, case.state, case.slots, case.num_nodes, words),
        *(conv_table(case.parents, case.num_nodes, 4), 1),
        backend="cuda",
    )
    y, _ = causal_conv1d_tree(
        *(x, history, case.slots, taps, case.parents, case.num_nodes), backend="reference"
    )
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in y.split([64, 64, HV * 64], -1))
    g, beta = gdn_gate(a, b, A_log, dt_bias)
    expected, _ = replace(case, q=q, k=k, v=v, g=g, beta=beta).verify(backend="reference")
    for r, tree in enumerate(case.trees):
        live = slice(0, len(tree))
        assert rms_ratio(out[r, live].cpu(), expected[r, live].cpu()) < 2 * NARROW[BF16]
        torch.testing.assert_close(stash.g_RTH[r, live], g[r, live], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stash.beta_RTH[r, live], beta[r, live], rtol=1e-4, atol=1e-5)
        assert torch.equal(stash.conv.x[r, live], x[r, live])
    assert stash.backend == "triton"


def test_raw_rows_know_two_backends() -> None:
    nothing = torch.empty(0)
    with pytest.raises(ValueError, match="raw rows have backends triton, cuda and auto, not 'nu"):
        tree_verify_raw(*[nothing] * 12, 1, backend="numpy")


@pytest.mark.parametrize(
    ("requests", "rows", "heads", "kernel"),
    [(1, 16, 48, "cuda"), (4, 16, 48, "cuda"), (16, 16, 48, "triton"), (64, 4, 48, "triton"),
     (64, 4, 12, "triton"), (16, 16, 12, "cuda"), (16, 17, 48, "cuda"), (64, 64, 48, "cuda")],
)  # fmt: skip
def test_the_faster_kernel_is_chosen_by_what_was_measured(
    requests: int, rows: int, heads: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for module, name in ((cuda, "cuda"), (raw, "triton")):
        monkeypatch.setattr(
            module, "launch_verify", lambda *_, name=name, **__: called.append(name)
        )
    monkeypatch.setattr(raw, "tree_conv", lambda *_, **__: (x, None))
    none, x = torch.empty(0), torch.empty(requests, rows, 96 + 16 * heads)
    tree_verify_raw(
        *(x, none, none, none, none, none, none),
        *(torch.empty(1, heads, 16, 16), none, none, none, none, 3),
        backend="auto",
    )
    assert called == [kernel]


def test_what_the_kernel_cannot_serve_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Library:
        raise NotBuilt("the CUDA kernels are not built: run this")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda, "load_library", missing)
    assert "head dims (64, 128), got K = 96" in str(cuda.why_not(96, 96, BF16, torch.float32))
    assert "16-bit rows" in str(cuda.why_not(64, 64, torch.float32, torch.float32))
    assert "not built: run this" in str(cuda.why_not(64, 64, BF16, torch.float32))
    monkeypatch.setattr(cuda, "load_library", lambda: Library(None, "full"))
    assert cuda.why_not(64, 64, BF16, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "capability 9.0, not 8.0" in str(cuda.why_not(64, 64, BF16, torch.float32))


def test_a_quick_build_serves_its_own_types_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_quick(emulated: bool = False) -> Library:
        return Library(None, "quick")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda, "load_library", only_quick)
    assert cuda.why_not(128, 128, BF16, torch.float32) is None
    for others in (
        (64, 64, BF16, torch.float32),
        (128, 64, BF16, torch.float32),
        (128, 128, F16, torch.float32),
        (128, 128, BF16, BF16),
    ):
        line = str(cuda.why_not(*others))
        assert line.endswith("python -m vllm_weaver.ops.cuda.build full") and "\n" not in line
    case = make_case([oracles.chain(2)], dtype=BF16)
    with pytest.raises(ValueError, match=r"heads of 128 alone: python -m .*\.build full"):
        case.verify(backend="cuda")


def test_the_full_build_goes_before_a_quick_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "library_path", lambda kind: tmp_path / kind)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    find = load_library.__wrapped__
    with pytest.raises(NotBuilt, match=r"python -m vllm_weaver\.ops\.cuda\.build full"):
        find()
    for kind in ("quick", "full"):
        (tmp_path / kind).touch()
        assert find().kind == kind
