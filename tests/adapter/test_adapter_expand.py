# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_weaver.adapter import AdapterError, AdapterTables
from vllm_weaver.tree import build_weaver_tree

SHAPES = [("v1", 1), ("v2", 1), ("v1", 2), ("v2", 2)]
ROWS = 14


def rounds_of(tree, depth, width):
    """Expandable nodes of every request in topological order, `width` per request and round."""
    requests, rows = tree.parents.shape
    queues = [
        [n for n in range(rows) if tree.depths[request, n] < depth] for request in range(requests)
    ]
    while any(queues):
        entries = []
        for request, queue in enumerate(queues):
            group, ready = [], set()
            while (
                queue and len(group) < width and int(tree.parents[request, queue[0]]) not in ready
            ):
                ready.add(queue[0])
                group.append(queue.pop(0))
            entries += [(request, node) for node in group]
            entries += [(request, -1)] * (width - len(group))
        yield torch.tensor(entries, dtype=torch.int32).unbind(1)


def expand_all(scorer, tree, depth, width=3):
    """{(request, node): (ids, log-probabilities)} from calls such as a builder makes."""
    scored = {}
    for request_N, node_N in rounds_of(tree, depth, width):
        index = (request_N.long(), node_N.long().clamp(min=0))
        ids, log_probs = scorer(request_N, node_N, tree.tokens[index], tree.depths[index], tree)
        for i, (request, node) in enumerate(zip(request_N.tolist(), node_N.tolist(), strict=True)):
            if node < 0:
                assert (ids[i] == -1).all()
                assert (log_probs[i] == -torch.inf).all()
            else:
                scored[request, node] = (ids[i], log_probs[i])
    return scored


def assert_equals_definition(case, tree, scored, tolerance=2e-5):
    depth = case.adapter.config.depth
    count = 0
    for request in range(tree.parents.shape[0]):
        for node in range(tree.parents.shape[1]):
            level = int(tree.depths[request, node])
            if level == depth:
                continue
            one = [x[request : request + 1] for x in case.step]
            path = torch.tensor([tree.path(request, node)])
            expected = case.adapter.score_children(*one, path, case.embed, case.lm_head)[0]
            ids, log_probs = scored[request, node]
            assert ids.dtype == case.ids.dtype
            assert torch.equal(ids, case.ids[request, level])
            assert log_probs.dtype == torch.float32
            torch.testing.assert_close(log_probs, expected, atol=tolerance, rtol=0)
            count += 1
    assert count == len(scored)


@pytest.mark.parametrize("gather_rows", [False, True])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_every_node_of_random_trees_scores_as_the_definition(
    make_case, random_tree, variant, num_layers, width, gather_rows
):
    case = make_case(variant, num_layers)
    for seed in range(3):
        tree = random_tree(3, ROWS, 4, 40, seed)
        scorer = case.adapter.begin(
            *case.step, case.embed, case.lm_head, ROWS, gather_rows=gather_rows
        )
        assert_equals_definition(case, tree, expand_all(scorer, tree, 4, width))


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_the_builder_grows_the_same_trees_from_the_scorer_as_from_the_definition(
    make_case, variant, num_layers
):
    case = make_case(variant, num_layers)

    def definition(request_N, node_N, tokens_N, depths_N, tree):
        ids = torch.full((len(node_N), 6), -1, dtype=torch.int32)
        log_probs = torch.full((len(node_N), 6), float("nan"))
        for i, (request, node) in enumerate(zip(request_N.tolist(), node_N.tolist(), strict=True)):
            if node < 0:
                continue
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[request, at]))
                at = int(tree.parents[request, at])
            one = [x[request : request + 1] for x in case.step]
            log_probs[i] = case.adapter.score_children(
                *one, torch.tensor([path]), case.embed, case.lm_head
            )[0]
            ids[i] = case.ids[request, len(path) - 1]
        return ids, log_probs

    roots = torch.tensor([5, 6, 7], dtype=torch.int32)
    for budget, width in ((1, None), (23, 4), (40, None)):
        scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, budget + 1)
        fast = build_weaver_tree(scorer, roots, budget, 4, expansion_width=width, children=5)
        plain = build_weaver_tree(definition, roots, budget, 4, expansion_width=width, children=5)
        assert (plain.num_nodes == budget + 1).all()
        for name in ("tokens", "parents", "depths", "num_nodes", "ancestors"):
            assert torch.equal(getattr(fast, name), getattr(plain, name)), name


@pytest.mark.parametrize("depth", [1, 15])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_chains_of_depth_one_and_fifteen(make_case, variant, depth):
    case = make_case(variant, depth=depth, pool=1 if depth == 1 else 3)
    rows = depth + 1
    chain = torch.arange(-1, depth, dtype=torch.int32).expand(3, -1)
    tokens = torch.randint(40, (3, rows), dtype=torch.int32)
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, rows)
    for node in range(depth):
        request_N = torch.arange(3, dtype=torch.int32)
        level = torch.full((3,), node, dtype=torch.int32)
        ids, log_probs = scorer(
            request_N, level, tokens[:, node], level, SimpleNamespace(parents=chain)
        )
        expected = case.adapter.score_children(
            *case.step, tokens[:, : node + 1], case.embed, case.lm_head
        )
        assert torch.equal(ids, case.ids[:, node])
        torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_precomputed_tables_change_nothing(make_case, random_tree, variant, num_layers):
    case = make_case(variant, num_layers)
    tables = case.adapter.precompute(case.embed, case.lm_head)
    assert tables.token_input.shape == tables.pool_rows.shape == (40, 16)
    tree = random_tree(3, ROWS, 4, 40)
    plain = expand_all(case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS), tree, 4)
    for gather_rows in (False, True):
        scorer = case.adapter.begin(
            *case.step, None, None, ROWS, tables=tables, gather_rows=gather_rows
        )
        for key, (ids, log_probs) in expand_all(scorer, tree, 4).items():
            assert torch.equal(ids, plain[key][0])
            torch.testing.assert_close(log_probs, plain[key][1], atol=1e-5, rtol=0)


def sharded(table, start, stop):
    """This rank's part of `table`'s dot products, as a vocabulary-parallel lm_head gives it."""

    def products(ids_NP, query_Nd):
        assert (ids_NP >= 0).all()
        inside = (ids_NP >= start) & (ids_NP < stop)
        rows = table[start:stop][torch.where(inside, ids_NP - start, 0)]
        return torch.einsum("npd,nd->np", rows, query_Nd).masked_fill(~inside, 0.0)

    return products


@pytest.mark.parametrize("projected", [False, True])
def test_a_vocabulary_split_over_ranks_scores_as_the_whole(make_case, random_tree, projected):
    case = make_case("v1")
    case.ids[1, 2, 3:] = -1
    tree = random_tree(3, ROWS, 4, 40)
    whole = expand_all(case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS), tree, 4)
    tables = case.adapter.precompute(case.embed, case.lm_head)
    embed, lm_head = (
        (tables.token_input, tables.pool_rows) if projected else (case.embed, case.lm_head)
    )
    parts = [sharded(lm_head, 0, 17), sharded(lm_head, 17, 40)]

    def all_reduced(ids_NP, query_Nd):
        return sum(part(ids_NP, query_Nd) for part in parts)

    def rows(ids):
        return torch.nn.functional.embedding(ids, embed)

    split = AdapterTables(rows, all_reduced) if projected else None
    scorer = case.adapter.begin(*case.step, rows, all_reduced, ROWS, tables=split)
    for key, (ids, log_probs) in expand_all(scorer, tree, 4).items():
        assert torch.equal(ids, whole[key][0])
        torch.testing.assert_close(log_probs, whole[key][1], atol=1e-5, rtol=0)


def test_inert_entries_and_poisoned_requests_disturb_nobody(make_case, random_tree):
    case = make_case("v1", 2)
    tree = random_tree(3, ROWS, 4, 40)
    clean = expand_all(case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS), tree, 4)
    # Request 1 is padding: its hidden states are garbage, and all its entries are inert.
    case.h_ver[1] = float("nan")
    case.h_draft[1] = float("nan")
    case.logits[1] = float("nan")
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS)
    scorer._kv[:, scorer._stride - ROWS - 1 : scorer._stride] = float("nan")
    garbage = torch.tensor([-7, 2_000_000_000], dtype=torch.int32)
    inert = torch.tensor([-1, -1], dtype=torch.int32)
    seen = 0
    for request_N, node_N in rounds_of(tree, 4, 3):
        keep = (request_N != 1) & (node_N >= 0)
        request_N, node_N = request_N[keep], node_N[keep]
        if not len(node_N):
            continue
        index = (request_N.long(), node_N.long())
        ids, log_probs = scorer(
            torch.cat([garbage, request_N, torch.tensor([1], dtype=torch.int32)]),
            torch.cat([inert, node_N, inert[:1]]),
            torch.cat([garbage, tree.tokens[index], garbage[:1]]),
            torch.cat([garbage, tree.depths[index], garbage[1:]]),
            tree,
        )
        assert (ids[[0, 1, -1]] == -1).all()
        assert (log_probs[[0, 1, -1]] == -torch.inf).all()
        for i, key in enumerate(zip(request_N.tolist(), node_N.tolist(), strict=True)):
            torch.testing.assert_close(log_probs[2 + i], clean[key][1], atol=1e-5, rtol=0)
            seen += 1
    assert seen == sum(1 for request, _ in clean if request != 1)


def test_uninitialised_cache_rows_are_never_read(make_case, random_tree):
    case = make_case("v2", 2)
    tree = random_tree(3, ROWS, 4, 40)
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS)
    cache = scorer._kv.unflatten(1, (3, scorer._stride))
    cache[:, :, 5:] = float("nan")
    assert_equals_definition(case, tree, expand_all(scorer, tree, 4))


def test_padding_candidates_get_minus_infinity(make_case, random_tree):
    case = make_case("v2")
    case.ids[:, 1:, 2:] = -1
    case.logits[:, 1:, 2:] = float("nan")
    tree = random_tree(3, ROWS, 4, 40)
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS)
    scored = expand_all(scorer, tree, 4)
    assert_equals_definition(case, tree, scored)
    deep = [log_probs for (r, n), (_, log_probs) in scored.items() if tree.depths[r, n] > 0]
    assert deep
    for log_probs in deep:
        assert (log_probs[2:] == -torch.inf).all()
        assert torch.isfinite(log_probs[:2]).all()


def test_bfloat16_adapter_stays_near_float32(make_case, random_tree):
    case = make_case("v1")
    tree = random_tree(3, ROWS, 4, 40)
    case.adapter.lm_head_query_in.weight.data *= 0.2
    full = expand_all(case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS), tree, 4)
    case.adapter.to(torch.bfloat16)
    low = (case.h_ver.bfloat16(), case.h_draft.bfloat16(), case.ids, case.logits)
    scorer = case.adapter.begin(*low, case.embed.bfloat16(), case.lm_head.bfloat16(), ROWS)
    for key, (_, log_probs) in expand_all(scorer, tree, 4).items():
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs, full[key][1], atol=0.15, rtol=0)


class RefuseHostReads(TorchDispatchMode):
    """Fails on operations whose result, or its shape, has to come back to the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            raise AssertionError(f"{name} reads a value back to the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_nothing_is_read_back_to_the_host(make_case, random_tree, variant, num_layers):
    case = make_case(variant, num_layers)
    tree = random_tree(3, ROWS, 4, 40)
    calls = list(rounds_of(tree, 4, 3))
    with RefuseHostReads():
        scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS)
        for request_N, node_N in calls:
            index = (request_N.long(), node_N.long().clamp(min=0))
            scorer(request_N, node_N, tree.tokens[index], tree.depths[index], tree)
    with pytest.raises(AssertionError, match="reads a value back"), RefuseHostReads():
        calls[0][0].sum().item()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"embed": torch.zeros(40, 9)}, ("(40, 9)", "embed_norm.weight", "10")),
        ({"lm_head": torch.zeros(40, 9)}, ("(40, 9)", "output_norm.weight", "12")),
        ({"embed": None}, ("embed", "precompute")),
        ({"max_nodes": 0}, ("max_nodes is 0",)),
        ({"lm_head": lambda ids, query: ids, "gather_rows": True}, ("gather_rows",)),
        (
            {"tables": AdapterTables(torch.zeros(40, 16), torch.zeros(40, 15))},
            ("tables.pool_rows", "(40, 15)", "16"),
        ),
    ],
)
def test_begin_refuses_what_does_not_fit(make_case, change, words):
    case = make_case("v1")
    values = {"embed": case.embed, "lm_head": case.lm_head, "max_nodes": ROWS} | change
    with pytest.raises(AdapterError) as caught:
        case.adapter.begin(*case.step, **values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_tree_larger_than_announced_is_refused(make_case, random_tree):
    case = make_case("v1")
    tree = random_tree(3, ROWS, 4, 40)
    scorer = case.adapter.begin(*case.step, case.embed, case.lm_head, ROWS - 1)
    root = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(AdapterError, match=f"{ROWS} rows but .* max_nodes {ROWS - 1}"):
        scorer(torch.arange(3, dtype=torch.int32), root, root, root, tree)
