# SPDX-License-Identifier: Apache-2.0
"""`TreeWeaver` against `build_weaver_tree` with `TreeScorer`, and its scores against the oracle.

The kernels run on a GPU if there is one, else in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from typing import Any

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
from torch import Tensor

from vllm_weaver.adapter import AdapterError, WeaverAdapter, WeaverConfig
from vllm_weaver.tree import DraftTree, Sampling, SharedNoise, build_weaver_tree

if CUDA or INTERPRETED:
    from vllm_weaver.weave import TreeWeaver
if INTERPRETED:
    # A third of the interpreter's time goes into looking for integer overflows.
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def expected_tree(case: Any, roots: Tensor, budget: int, **options: Any) -> DraftTree:
    """The definition, on the CPU, for the live requests alone."""
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, budget + 1)
    depth = case.adapter.config.depth
    return build_weaver_tree(scorer, roots.clamp(min=0), budget, depth, **options)


def adapter_there(case: Any) -> WeaverAdapter:
    """A copy of the case's adapter where the kernels run; the definition's stays on the CPU."""
    return copy.deepcopy(case.adapter).to(DEVICE)


def weaver_for(case: Any, budget: int, *, tables: bool = False, **options: Any) -> TreeWeaver:
    adapter = adapter_there(case)
    embed, lm_head = case.embed.to(DEVICE), case.lm_head.to(DEVICE)
    projected = adapter.precompute(embed, lm_head) if tables else None
    return TreeWeaver(
        adapter,
        None if tables else embed,
        None if tables else lm_head,
        budget=budget,
        pool=case.ids.shape[2],
        tables=projected,
        **{"max_requests": case.ids.shape[0], **options},
    )


def build(weaver: TreeWeaver, case: Any, roots: Tensor, nodes: int | None = None) -> DraftTree:
    step = (x.to(DEVICE) for x in case.step)
    return weaver.build(*step, roots.to(DEVICE), nodes=nodes).to("cpu")


@needs_kernel
@pytest.mark.parametrize("tables", [False, True])
def test_roots_may_be_put_in_place(make_case, tables: bool) -> None:
    case = make_case(variant="v1", requests=2)
    roots = torch.tensor([5, 3])
    expected = build(weaver_for(case, 6, tables=tables), case, roots)
    weaver = weaver_for(case, 6, tables=tables, max_requests=4)
    states, tokens = weaver.roots
    h_ver, *rest = (x.to(DEVICE) for x in case.step)
    states[:2], tokens[:2] = h_ver, roots.to(DEVICE)
    found = weaver.build(states[:2], *rest, tokens[:2])
    assert_same(found.to("cpu"), expected)


def assert_same(actual: DraftTree, expected: DraftTree, requests: Any = slice(None)) -> None:
    for field in fields(DraftTree):
        a, b = getattr(actual, field.name)[requests], getattr(expected, field.name)[requests]
        assert torch.equal(a, b), (field.name, a, b)


CASES = {
    "v1": (dict(variant="v1", requests=1), 5, dict()),
    "v2": (dict(variant="v2", requests=2), 7, dict(expansion_width=4, children=3)),
    "two layers, RoPE": (dict(variant="v2", num_layers=2, requests=1), 4, dict(tables=True)),
    "two layers": (
        dict(variant="v1", num_layers=2, activation="gelu_tanh", requests=2),
        *(6, dict(expansion_width=3, children=2, tables=True)),
    ),
    "one node": (dict(variant="v1", requests=3), 1, dict()),
    "wide pool": (
        dict(variant="v1", requests=1, pool=35),
        *(8, dict(expansion_width=4, full_pools=True, tables=True)),
    ),
    "deep and narrow": (
        dict(variant="v2", requests=1, depth=9),
        *(9, dict(expansion_width=4, children=1, tables=True)),
    ),
    "budget 63": (
        dict(variant="v1", requests=1),
        *(63, dict(children=6, full_pools=True, tables=True)),
    ),
    "four requests": (
        dict(variant="v2", requests=4),
        *(4, dict(expansion_width=4, full_pools=True, tables=True)),
    ),
}


@needs_kernel
@pytest.mark.parametrize("name", CASES)
def test_trees_are_those_of_the_definition(make_case, name: str) -> None:
    kind, budget, options = CASES[name]
    case = make_case(**kind, seed=len(name))
    roots = torch.arange(case.ids.shape[0]) + 3
    weaver = weaver_for(case, budget, **options)
    actual = build(weaver, case, roots)
    actual.validate()
    shape = {k: v for k, v in options.items() if k != "tables"}
    assert_same(actual, expected_tree(case, roots, budget, **shape))
    layers = case.adapter.config.num_layers
    per_round = 1 + 5 * layers + (0 if options.get("tables") else 2)
    assert weaver.launches == 4 + 5 * (layers - 1) + per_round * weaver.rounds


@needs_kernel
def test_ties_over_a_large_frontier_with_an_odd_width(make_case) -> None:
    """Equal scores everywhere; the frontier has several parts that each give a round's nodes."""
    case = make_case(requests=1, pool=32)
    case.adapter.lm_head_query_in.weight.data.zero_()
    case.logits.fill_(1.0)
    options = dict(expansion_width=3, children=16)
    actual = build(weaver_for(case, 30, **options), case, torch.tensor([1]))
    assert_same(actual, expected_tree(case, torch.tensor([1]), 30, **options))


@needs_kernel
@pytest.mark.parametrize("tables", [False, True])
def test_with_the_samplers_noise_trees_are_those_of_the_definition(make_case, tables: bool) -> None:
    """A greedy request, a plain one, and one with every filter, in one batch."""
    case = make_case(requests=3, pool=9)
    generator = torch.Generator().manual_seed(5)
    noise_RDP = -torch.log(-torch.log(torch.rand(case.ids.shape, generator=generator)))
    sampling = Sampling(
        temperature_R=torch.tensor([0.0, 1.0, 0.7]),
        top_k_R=torch.tensor([512, 512, 6], dtype=torch.int32),
        top_p_R=torch.tensor([1.0, 1.0, 0.9]),
        min_p_R=torch.tensor([0.0, 0.0, 0.02]),
        filtered=True,
    )
    noise = SharedNoise(noise_RDP, sampling)
    there = SharedNoise(
        noise_RDP.to(DEVICE), Sampling(*(x.to(DEVICE) for x in sampling.parameters()), True)
    )
    roots, options = torch.tensor([1, 2, 3]), dict(expansion_width=3, children=4)
    weaver = weaver_for(case, 10, tables=tables, **options)
    actual = weaver.build(*(x.to(DEVICE) for x in case.step), roots.to(DEVICE), there).to("cpu")
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, 11)
    depth = case.adapter.config.depth
    expected = build_weaver_tree(noise.expanding(scorer), roots, 10, depth, **options)
    assert_same(actual, expected)
    plain = build(weaver_for(case, 10, tables=tables, **options), case, roots)
    assert_same(plain, actual, slice(0, 1))
    assert not torch.equal(plain.tokens[1:], actual.tokens[1:])


@needs_kernel
def test_ties_go_to_the_candidate_inserted_first(make_case) -> None:
    """Without a correction and with equal logits, every depth's scores are exactly equal."""
    case = make_case(requests=2, pool=8)
    case.adapter.lm_head_query_in.weight.data.zero_()
    case.logits.fill_(1.0)
    roots = torch.tensor([1, 2])
    options = dict(expansion_width=3, children=4)
    actual = build(weaver_for(case, 9, **options), case, roots)
    assert_same(actual, expected_tree(case, roots, 9, **options))


@needs_kernel
def test_padding_and_impossible_candidates_are_never_placed(make_case) -> None:
    case = make_case(requests=2, pool=6)
    case.ids[0, :, 3:] = -1
    case.logits[0, :, 3:] = math.nan
    case.logits[1, :, 2:] = -math.inf
    case.ids[1, 1] = -1
    roots = torch.tensor([1, 2])
    actual = build(weaver_for(case, 8, expansion_width=4), case, roots)
    assert_same(actual, expected_tree(case, roots, 8, expansion_width=4))
    assert int(actual.num_nodes[1]) < 9


@needs_kernel
def test_inert_requests_have_no_row_and_disturb_nothing(make_case) -> None:
    case = make_case(requests=3)
    roots = torch.tensor([4, -1, 5])
    expected = expected_tree(case, roots, 6, expansion_width=3)
    case.h_ver[1], case.h_draft[1], case.logits[1] = math.nan, math.nan, math.nan
    case.ids[1] = 2**30
    weaver = weaver_for(case, 6, expansion_width=3, max_requests=4, tables=True)
    actual = build(weaver, case, roots)
    assert_same(actual, expected, [0, 2])
    assert int(actual.num_nodes[1]) == 0
    assert not actual.tokens[1].any() and not actual.ancestors[1].any()
    assert bool((actual.parents[1] == -1).all())


@needs_kernel
def test_later_builds_owe_nothing_to_earlier_ones(make_case) -> None:
    first, second = make_case(requests=2, seed=1), make_case(requests=2, seed=2)
    second.adapter, second.embed, second.lm_head = first.adapter, first.embed, first.lm_head
    roots = torch.tensor([7, 8])
    weaver = weaver_for(first, 5, tables=True)
    build(weaver, first, roots)
    actual = build(weaver, second, roots + 1)
    expected = expected_tree(second, roots + 1, 5)
    assert_same(actual, expected)


@needs_kernel
@pytest.mark.parametrize("full_pools", [True, False])
@pytest.mark.parametrize("width", [3, None])
def test_smaller_trees_are_those_of_a_smaller_budget(
    make_case, full_pools: bool, width: int | None
) -> None:
    """One width for all, and widths that fall with the size: 1 up to 16 nodes, 2 beyond.

    Every number of nodes with each width, and with one of the two kinds of pools.
    """
    case = make_case(requests=2, pool=8)
    roots = torch.tensor([7, 8])
    shape = dict(expansion_width=width, children=4, full_pools=full_pools)
    weaver = weaver_for(case, 18, tables=True, **shape)
    for nodes in (1, 12, 18) if full_pools else (4, 17, 18):
        part = build(weaver, case, roots, nodes)
        assert weaver.launches == 4 + 6 * weaver.shape_for(nodes)[1]
        part.validate()
        assert_same(part, expected_tree(case, roots, nodes, **shape).padded(19))
    with pytest.raises(ValueError, match="nodes is 19: pass 1 to the budget, 18"):
        build(weaver, case, roots, 19)


@needs_kernel
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_scores_on_the_frontier_are_the_oracles(make_case, oracle, variant: str) -> None:
    case = make_case(variant, requests=1)
    weaver = weaver_for(case, 4, expansion_width=2)
    build(weaver, case, torch.tensor([3]))
    keys, tokens, parents = (x[0].cpu() for x in weaver._frontier)
    row_tokens, row_parents = (x[0].tolist() for x in weaver._tree[:2])
    bits = (keys >> 32).int()
    pools, checked = case.ids[0].tolist(), 0
    for place in (bits < 0x7F800000).nonzero().flatten().tolist():
        row, rest = int(parents[place]), int(tokens[place])
        path = [rest]
        while row >= 0:
            path.insert(0, row_tokens[row])
            row = row_parents[row]
        expected = sum(
            float(oracle(case, 0, path[:k])[pools[k - 1].index(path[k])])
            for k in range(1, len(path))
        )
        score = -float(bits[place].view(torch.float32))
        assert score == pytest.approx(expected, abs=2e-5)
        checked += 1
    assert checked > 4


def full_size(requests: int) -> tuple[WeaverAdapter, Tensor, Tensor, list[Tensor]]:
    """A random adapter of the published size in bfloat16, its target's matrices, and a step."""
    torch.manual_seed(0)
    config = WeaverConfig(d_model=5120, d_embed=5120)
    adapter = WeaverAdapter(config, device=DEVICE, dtype=torch.bfloat16)
    adapter.lm_head_query_in.weight.data.normal_(std=0.02)
    vocab = 32_000
    embed = torch.randn(vocab, 5120, device=DEVICE, dtype=torch.bfloat16)
    lm_head = torch.randn(vocab, 5120, device=DEVICE, dtype=torch.bfloat16) * 0.02
    logits = torch.randn(requests * 15, vocab, device=DEVICE) * 3
    best, ids = logits.topk(512)
    hidden = torch.randn(requests, 15, 5120, device=DEVICE, dtype=torch.bfloat16)
    step = [torch.randn_like(hidden[:, 0]), hidden, ids.view(requests, 15, 512)]
    return adapter, embed, lm_head, [*step, best.view(requests, 15, 512)]


@needs_gpu
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_full_size_trees_are_as_good_as_the_definitions(requests: int) -> None:
    """bfloat16 rounds differently in both, so the trees' own worth is compared, in float32."""
    adapter, embed, lm_head, step = full_size(requests)
    roots = torch.arange(requests, device=DEVICE)
    shape = dict(budget=63, full_pools=True)
    trees = {"definition": None, "raw": None, "tables": None, "no overlap": None}
    tables = adapter.precompute(embed, lm_head)
    rest = dict(max_requests=requests, pool=512, **shape)
    scorer = adapter.begin(*step, embed, lm_head, 64)
    trees["definition"] = build_weaver_tree(scorer, roots, max_depth=15, **shape)
    for name, options in {
        "raw": dict(embed=embed, lm_head=lm_head),
        "tables": dict(embed=None, lm_head=None, tables=tables),
        "no overlap": dict(embed=None, lm_head=None, tables=tables, overlap=False),
    }.items():
        weaver = TreeWeaver(adapter, **options, **rest)
        results = [weaver.build(*step, roots).to("cpu") for _ in range(3)]
        for other in results[1:]:
            assert_same(other, results[0])
        results[0].validate()
        trees[name] = results[0].to(DEVICE)
    assert_same(trees["no overlap"].to("cpu"), trees["tables"].to("cpu"))
    exact = adapter.float()
    worth = {}
    for name, tree in trees.items():
        scorer = exact.begin(*(x.float() if x.is_floating_point() else x for x in step),
                             embed.float(), lm_head.float(), 64)  # fmt: skip
        worth[name] = tree_worth(scorer, tree)
        assert bool((tree.num_nodes == 64).all())
    for name, value in worth.items():
        torch.testing.assert_close(value, worth["definition"], rtol=0.05, atol=0.05, msg=name)


def tree_worth(scorer: Any, tree: DraftTree) -> Tensor:
    """Sum of path probabilities of each tree's nodes, node after node."""
    R, T = tree.tokens.shape
    request = torch.arange(R, device=tree.device)
    score = torch.zeros(R, T, device=tree.device)
    children = tree.parents
    for row in range(T):
        node = torch.full_like(request, row)
        depths = tree.depths[:, row]
        inert = depths >= 15
        ids, log_probs = scorer(
            request, node.masked_fill(inert, -1), tree.tokens[:, row], depths, tree
        )
        for child in range(row + 1, T):
            hit = (children[:, child] == row)[:, None] & (ids == tree.tokens[:, child, None])
            gained = torch.where(hit, log_probs, 0.0).sum(1)
            mine = children[:, child] == row
            score[:, child] = torch.where(mine, score[:, row] + gained, score[:, child])
    return score[:, 1:].exp().sum(1)


@needs_gpu
def test_replayed_graphs_follow_their_inputs(make_case) -> None:
    """Fewer requests than captured, other values at the same addresses, and other addresses."""
    case = make_case(requests=4)
    roots = torch.tensor([1, 2, 3, 4])
    weaver = weaver_for(case, 7, expansion_width=2)
    step = [x.to(DEVICE) for x in case.step]
    weaver.build(*step, roots.to(DEVICE))
    launches = weaver.launches
    weaver.build(*step, roots.to(DEVICE), nodes=1)
    assert weaver.launches < launches
    for seed, requests in ((1, 4), (2, 3), (3, 3), (4, 1)):
        other = make_case(requests=4, seed=seed)
        other.adapter, other.embed, other.lm_head = case.adapter, case.embed, case.lm_head
        for old, new in zip(step, other.step, strict=True):
            old.copy_(new)
        actual = weaver.build(*(x[:requests] for x in step), roots[:requests].to(DEVICE))
        assert weaver.launches == launches
        actual = actual.to("cpu")
        assert_same(actual, expected_tree(other, roots, 7, expansion_width=2), slice(requests))


@needs_kernel
def test_passes_that_warm_up_capture_nothing(make_case, monkeypatch) -> None:
    case = make_case(requests=2)
    roots = torch.tensor([1, 2])
    weaver = weaver_for(case, 5)
    replayed: list[int] = []
    monkeypatch.setattr(weaver, "_graphs", {})
    monkeypatch.setattr(weaver, "_replay", lambda requests, *rest: replayed.append(requests))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step = [x.to(DEVICE) for x in case.step]
    with weaver.without_graphs():
        actual = weaver.build(*step, roots.to(DEVICE)).to("cpu")
    assert not replayed
    assert_same(actual, expected_tree(case, roots, 5))
    weaver.build(*step, roots.to(DEVICE))
    assert replayed == [2]


@needs_kernel
def test_launches_overlap_by_default_where_the_device_can(make_case, monkeypatch) -> None:
    from vllm_weaver.weave import weaver as module

    def can(capability: tuple[int, int], kind: str = "cuda", hip: str | None = None) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(module, "INTERPRETED", False)
            patch.setattr(torch.version, "hip", hip)
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            return module.can_overlap(torch.device(kind))

    assert can((9, 0)) and can((10, 0)) and can((12, 1))
    assert not can((8, 9)) and not can((9, 4), hip="6.4") and not can((9, 0), "cpu")
    case = make_case()
    for asked in (False, True):
        assert weaver_for(case, 5, overlap=asked)._overlap is asked
    assert weaver_for(case, 5)._overlap is module.can_overlap(torch.device(DEVICE))


@needs_kernel
def test_unfit_arguments_are_refused(make_case) -> None:
    case = make_case(requests=2)
    with pytest.raises(ValueError, match="max_requests is 0"):
        weaver_for(case, 5, max_requests=0)
    with pytest.raises(AdapterError, match="needs the whole table"):
        TreeWeaver(adapter_there(case), None, None, max_requests=1, budget=5, pool=6)
    weaver = weaver_for(case, 5)
    assert weaver.nbytes() > 0
    with pytest.raises(AdapterError, match="candidate_ids_RDP"):
        weaver.build(
            *(x.to(DEVICE) for x in (case.h_ver, case.h_draft, case.ids[:, :2], case.logits)),
            torch.zeros(2, dtype=torch.int32, device=DEVICE),
        )


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
