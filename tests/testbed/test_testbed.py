# SPDX-License-Identifier: Apache-2.0
"""The testbed's own parts: what travels arrives whole, losses and arms mean what they say."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.testbed import ablate, arms, optim, pack, rollouts, train, weaver
from benchmarks.testbed import target as target_module
from benchmarks.testbed.config import BENCH, TOY, Regular
from benchmarks.testbed.drafter import Drafter
from benchmarks.testbed.states import Rows, TextStates, part_rows
from benchmarks.testbed.target import RUNTIME, Target
from vllm_weaver.train.losses import depth_weights, length_weights, path_weights, pool_losses

DEPTH, WIDTH, VOCAB = TOY.drafter.depth, TOY.target.width, TOY.target.vocab


class Operations(TorchDispatchMode):
    """Names of the operators that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.seen.add(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def test_corpus_file_gives_its_work_directory_back(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "heldout").mkdir(parents=True)
    train = np.arange(5000, dtype=np.uint16)
    np.save(work / "train.npy", train)
    np.save(work / "heldout.npy", train[:700])
    (work / "tokenizer.json").write_text("{}")
    (work / "heldout" / "000.py").write_text("x = 1\n")
    (work / "corpus.json").write_text(json.dumps({"train_tokens": 5000, "vocab": 9}))
    prompts = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(prompts, "wt") as file:
        file.write(json.dumps({"prompt": "def f():\n"}) + "\n")
    packed = tmp_path / "corpus.tar.xz"
    assert pack.pack_corpus(work, packed, 1000, 100, prompts) == packed.stat().st_size
    pack.unpack_corpus(packed, tmp_path / "back")
    back = tmp_path / "back"
    assert np.array_equal(np.load(back / "train.npy"), train[:1000])
    assert np.array_equal(np.load(back / "heldout.npy"), train[:100])
    assert json.loads((back / pack.HUMAN_EVAL).read_text()) == ["def f():\n"]
    record = json.loads((back / "corpus.json").read_text())
    assert (record["train_tokens"], record["held_out_tokens"], record["vocab"]) == (1000, 100, 9)


def test_models_in_pieces_of_several_calls_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_PIECE_BYTES", 9000)
    model = tmp_path / "adapter"
    model.mkdir()
    (model / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(20000))
    out = tmp_path / "out"
    assert pack.split(out, [model], 0, 2) == (2, 4)
    pieces = sorted(out.iterdir())
    with pytest.raises(ValueError, match="not all pieces"):
        pack.join(tmp_path / "models", pieces)
    assert pack.split(out, [model], 2, 9) == (2, 4)
    pieces = sorted(out.iterdir())
    assert pack.join(tmp_path / "models", pieces) == ["adapter"]
    back = tmp_path / "models" / "adapter" / "model.safetensors"
    assert back.read_bytes() == (model / "model.safetensors").read_bytes()
    pieces[1].write_bytes(b"x" * 9000)
    with pytest.raises(ValueError, match="damaged"):
        pack.join(tmp_path / "models", pieces)


def test_prompts_are_grouped_by_length_and_keep_their_ends() -> None:
    prompts = [list(range(n)) for n in (10, 33, 47, 70, 900)]
    groups = ablate.by_length(prompts, 512)
    assert [(len(g), len(g[0])) for g in groups] == [(2, 32), (1, 64), (1, 512)]
    assert all(ids[-1] + 1 in (33, 47, 70, 900) for group in groups for ids in group)


@pytest.mark.parametrize("name", list(ablate.VARIANTS))
def test_dense_losses_equal_those_of_the_package(name: str) -> None:
    """The testbed masks the vocabulary where the package gathers a pool."""
    variant = ablate.VARIANTS[name]
    variant = dataclasses.replace(variant, version="v2", layers=1, mlp=None)
    torch.manual_seed(0)
    adapter = weaver.new_adapter(TOY, "cpu", variant)
    torch.nn.init.normal_(adapter.lm_head_query_in.weight, std=0.05)
    rows, pool = 5, TOY.adapter.pool
    head, embedding = torch.randn(VOCAB, WIDTH) * 0.2, torch.randn(VOCAB, WIDTH)
    h_ver, h_draft, states = (torch.randn(rows, *s, WIDTH) for s in ((), (DEPTH,), (DEPTH,)))
    drafted = h_draft @ head.T
    logits, ids = drafted.topk(pool)
    tokens = torch.randint(VOCAB, (rows, DEPTH + 1))
    # Half of the text is what the drafter knows, so that paths are followed for a while.
    known = torch.rand(rows, DEPTH) < 0.5
    tokens[:, 1:] = torch.where(known, ids[..., 1], tokens[:, 1:])
    weight_D = depth_weights(DEPTH, 10.0, "cpu")
    share = torch.tensor(0.7)
    inputs = (h_ver, h_draft, logits[..., -1], tokens, states)
    loss, overlap_D = weaver.adapter_loss(
        adapter, inputs, head, embedding, weight_D, share, variant
    )
    queries = adapter(h_ver, h_draft, tokens[:, :-1], embedding)
    log_q = (logits + (queries @ head.T).gather(-1, ids)).log_softmax(-1)
    p = (states @ head.T).softmax(-1).gather(-1, ids)
    hit = ids == tokens[:, 1:, None]

    def of(kind: Any) -> Tensor:
        return pool_losses(kind, log_q, p, hit)[0]

    accepted = pool_losses("tv", log_q, p, hit)[1]
    each = 0.7 * of("kl") + 0.3 * of("tv") if variant.loss == "anneal" else of(variant.loss)
    text = (log_q * hit).sum(-1).masked_fill(~hit.any(-1), -torch.inf)
    weights = {
        "decay": weight_D.expand(rows, DEPTH),
        "flat": torch.ones(rows, DEPTH),
        "path": path_weights(text, variant.path_budget),
        "length": length_weights(accepted),
    }[variant.weigh]
    torch.testing.assert_close(loss, (each * weights).sum() / weights.sum(), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(overlap_D, accepted.mean(0), atol=1e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def models() -> tuple[Target, Any, Any]:
    """A target, a drafter of noise and an adapter, all untrained."""
    torch.manual_seed(1)
    RUNTIME.dtype = torch.float32
    target = Target(TOY.target).requires_grad_(False)
    adapter = weaver.new_adapter(TOY, "cpu")
    torch.nn.init.normal_(adapter.lm_head_query_in.weight, std=0.02)
    adapter.requires_grad_(False)

    def drafter(auxiliary: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        return torch.randn(*anchors.shape, DEPTH, WIDTH)

    return target, drafter, adapter


@pytest.fixture(scope="module")
def cases(models: tuple[Target, Any, Any]) -> list[arms.Case]:
    target, drafter, _ = models
    prompts = [torch.randint(2, VOCAB, (2, 32)), torch.randint(2, VOCAB, (1, 48))]
    block = TOY.drafter.block
    return [
        arms.prepare(TOY, target, drafter, arms.write(target, prompts, 6, block, t, seed=3))
        for t in (0, 1)
    ]


def test_noise_of_a_position_is_that_of_the_targets_draw(cases: list[arms.Case]) -> None:
    """The pool is the whole vocabulary here: log p + noise must be largest at the text's token."""
    greedy, sampled = cases
    for part in greedy.parts:
        drawn = part.pool.gather(-1, part.p_pool.argmax(-1, keepdim=True))[..., 0]
        assert torch.equal(drawn.long(), part.tokens[:, 1:])
    for part in sampled.parts:
        assert part.noise is not None and part.pool.shape[-1] == VOCAB
        drawn = part.pool.gather(-1, (part.p_pool.log() + part.noise).argmax(-1, keepdim=True))
        assert torch.equal(drawn[..., 0].long(), part.tokens[:, 1:])


def test_every_arm_walks_the_whole_text(
    cases: list[arms.Case], models: tuple[Target, Any, Any]
) -> None:
    target, _, adapter = models
    tables = adapter.precompute(target.embedding, target.head)
    for temperature, case in enumerate(cases):
        chosen = ablate.main_arms(temperature) | ablate.setting_arms(temperature, VOCAB)
        chosen = {k: a for k, a in chosen.items() if a.budget < 100}
        for name, (tokens, passes) in arms.run(case, chosen, DEPTH, adapter, tables).items():
            assert tokens.tolist() == [5, 5, 5], name
            assert ((passes >= 1) & (passes <= 5)).all(), name


def test_heat_and_noise_that_change_nothing_change_no_tree(
    cases: list[arms.Case], models: tuple[Target, Any, Any]
) -> None:
    target, _, adapter = models
    tables = adapter.precompute(target.embedding, target.head)
    part = cases[1].parts[0]
    assert part.noise is not None
    plain = arms.build(part, arms.Arm("weaver", 15), DEPTH, adapter, tables)
    still = dataclasses.replace(part, noise=torch.zeros_like(part.noise))
    same = arms.build(still, arms.Arm("weaver", 15, shared=True), DEPTH, adapter, tables)
    assert torch.equal(plain.tokens, same.tokens) and torch.equal(plain.parents, same.parents)
    moved = arms.build(part, arms.Arm("weaver", 15, shared=True), DEPTH, adapter, tables)
    assert not torch.equal(plain.tokens, moved.tokens)


def test_target_that_is_its_own_drafter_accepts_everything_with_shared_noise(
    models: tuple[Target, Any, Any], cases: list[arms.Case]
) -> None:
    """With the target's own logits for marginals, the noise picks the very token it draws."""
    target, _, adapter = models
    tables = adapter.precompute(target.embedding, target.head)
    parts = []
    for part in cases[1].parts:
        assert part.noise is not None
        best = (part.p_pool.log() + part.noise).log_softmax(-1).sort(-1, descending=True)
        ids = part.pool.long().gather(-1, best.indices)
        parts.append(dataclasses.replace(part, shared_best=(best.values, ids)))
    case = dataclasses.replace(cases[1], parts=parts)
    walks = arms.run(case, {"chain": arms.Arm("chain", shared=True)}, DEPTH, adapter, tables)
    assert walks["chain"][1].tolist() == [1, 1, 1]


@pytest.fixture
def draft(models: tuple[Target, Any, Any], monkeypatch: pytest.MonkeyPatch) -> weaver.Draft:
    """Blocks of two groups in seven parts; a block's states say which token it is anchored at."""
    target, _, _ = models
    torch.manual_seed(4)
    monkeypatch.setattr(weaver, "_BLOCKS_AT_ONCE", 8)
    size = dataclasses.replace(TOY, groups=TOY.groups[:2])
    rows = [
        Rows(torch.randint(2, VOCAB, (n, group.length)), torch.tensor([16, 20] * n)[:n])
        for n, group in zip((6, 7), size.groups, strict=True)
    ]
    layers, block = size.drafter.target_layers, size.drafter.block
    states = TextStates(target, rows, layers, block, torch.float32)

    def drafter(auxiliary: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        known = torch.stack([ids.gather(1, anchors), anchors], -1).float()[:, :, None]
        return torch.nn.functional.pad(known, (0, WIDTH - 2)).expand(-1, -1, DEPTH, -1)

    return weaver.Draft(size, target, drafter, states)  # type: ignore[arg-type]


def _anchors_are_right(draft: weaver.Draft) -> bool:
    """Every block stands in its own row, with a block's room, and has the states of its anchor."""
    done, begin = 0, 0
    blocks = draft.blocks
    for group, rows in zip(TOY.groups[:2], (6, 7), strict=True):
        count = rows * group.blocks
        row = begin + torch.arange(rows).repeat_interleave(group.blocks) * group.length
        start = torch.tensor([16, 20] * rows)[:rows].repeat_interleave(group.blocks)
        anchors = blocks.anchors[done : done + count]
        local = anchors - row
        assert (local >= start).all() and (local <= group.length - DEPTH - 1).all()
        said = blocks.h_draft[done : done + count, :, :2]
        assert torch.equal(said[..., 0], blocks.ids[anchors].float()[:, None].expand(-1, DEPTH))
        assert torch.equal(said[..., 1], local.float()[:, None].expand(-1, DEPTH))
        done, begin = done + count, begin + rows * group.length
    return done == len(blocks.anchors)


def test_blocks_are_drafted_anew_in_their_places(draft: weaver.Draft) -> None:
    total = len(draft.blocks.anchors)
    assert draft.drafted == total == 6 * 4 + 7 * 3 and _anchors_are_right(draft)
    first = draft.blocks.anchors.clone()
    for call in range(1, 28):
        draft.renew(5 / 3)
        # What is owed is less than the part that is next, which has 8 blocks at most.
        assert 0 <= 5 / 3 * call - (draft.drafted - total) < 8 + 1e-6
    assert draft.drafted == 2 * total
    assert (draft.blocks.anchors != first).float().mean() > 0.5
    assert _anchors_are_right(draft)


def test_further_rows_take_turns_with_those_there(
    draft: weaver.Draft, models: tuple[Target, Any, Any]
) -> None:
    target, _, _ = models
    groups, blocks = draft._states.groups, draft.blocks
    # 5 of group 0 do not divide into its parts of 2 rows; group 1 has none.
    starts = [torch.full((5,), 20), torch.full((0,), 20)]
    draft.take_turns_with(
        [
            Rows(torch.randint(2, VOCAB, (len(start), group.ids.shape[1])), start)
            for group, start in zip(groups, starts, strict=True)
        ]
    )
    before = [group.ids.clone() for group in groups]
    further = draft._further[0].ids.clone()
    draft.renew(len(blocks.anchors), other_rows=True)
    assert torch.equal(groups[1].ids, before[1])
    # No row is lost: all are still in one place or in the other.
    everywhere = torch.cat([groups[0].ids, draft._further[0].ids]).tolist()
    assert sorted(everywhere) == sorted(torch.cat([before[0], further]).tolist())
    assert len({tuple(r) for r in groups[0].ids.tolist()} & {tuple(r) for r in further.tolist()})
    assert not torch.equal(groups[0].ids, before[0])
    done = begin = 0
    for group, shape in zip(groups, TOY.groups[:2], strict=True):
        end = begin + group.ids.numel()
        assert torch.equal(blocks.ids[begin:end], group.ids.flatten().int())
        hidden, auxiliary, _ = target(group.ids.long(), TOY.drafter.target_layers)
        assert auxiliary is not None
        torch.testing.assert_close(blocks.hidden[begin:end], hidden.flatten(0, 1))
        kept = draft._states.auxiliary[begin:end]
        torch.testing.assert_close(kept, auxiliary.flatten(0, 1))
        anchors = blocks.anchors[done : done + len(group.ids) * shape.blocks]
        row = torch.arange(len(group.ids)).repeat_interleave(shape.blocks)
        local = anchors - begin - row * shape.length
        assert (local >= group.start[row]).all() and (local < shape.length - DEPTH).all()
        said = blocks.h_draft[done : done + len(anchors), 0, 0]
        assert torch.equal(said, blocks.ids[anchors].float())
        done, begin = done + len(anchors), end


@pytest.mark.parametrize("sets", [0, 1, 2])
def test_rows_of_files_are_the_drafters_and_those_of_further_sets(
    tmp_path: Path, models: tuple[Target, Any, Any], monkeypatch: pytest.MonkeyPatch, sets: int
) -> None:
    """Each prefix and both temperatures have the same share everywhere."""
    target, _, _ = models
    group = dataclasses.replace(TOY.groups[0], rows=16, length=18, prefixes=(14, 16))
    text = dataclasses.replace(TOY.groups[2], length=20, text_rows=4)
    size = dataclasses.replace(TOY, groups=(group, text))
    monkeypatch.setattr(rollouts, "_BATCH", 4)
    stream = torch.randint(2, VOCAB, (200,))
    written = []
    for which in range(1 + sets):
        ids, start = rollouts.generate(target, stream, group)
        assert len(ids) == 16
        # The first token says here whether its row was sampled.
        ids[:, 0] = torch.arange(len(ids)) % 2
        rollouts.save(rollouts.rows_file(tmp_path, 0, which), (ids, start))
        written += ids.tolist()
    for share in (1.0, 0.5):
        own = rollouts.group_rows(size, tmp_path, range(1), stream, "cpu", share)
        further = (
            rollouts.group_rows(size, tmp_path, range(1, 1 + sets), stream, "cpu", share)
            if (sets)
            else []
        )
        for rows, count in ((own, 1), *([(further, sets)] if sets else [])):
            assert [len(r.ids) for r in rows] == [16 * share * count, 4 * share * count]
            assert [len(r.start) for r in rows] == [len(r.ids) for r in rows]
            for prefix in group.prefixes:
                sampled = rows[0].ids[rows[0].start == prefix, 0].float()
                assert len(sampled) == 8 * share * count and sampled.sum() == 4 * share * count
        if share == 1.0:
            together = own[0].ids.tolist() + (further[0].ids.tolist() if sets else [])
            assert sorted(together) == sorted(written)
    with pytest.raises(ValueError, match="16 rows, not 12: write it anew"):
        fewer = dataclasses.replace(group, rows=12)
        rollouts.load(rollouts.rows_file(tmp_path, 0), fewer, 1.0, "cpu")


def test_prompts_of_unequal_lengths_are_continued_as_each_alone(
    models: tuple[Target, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches of a few rows at a time, too."""
    target, _, _ = models
    prompts = [torch.randint(2, VOCAB, (n, length)) for n, length in ((2, 33), (3, 48))]
    alone = [target.generate(p, 60, torch.zeros(len(p), dtype=torch.bool)) for p in prompts]
    monkeypatch.setattr(target_module, "_PREFILL_TOKENS", 70)
    together = arms.write(target, prompts, 8, 4, 0, seed=1)
    for one, (text, noise) in zip(alone, together, strict=True):
        assert noise is None and text.ids.shape[1] == text.context + 12
        assert torch.equal(one[:, : text.context + 12], text.ids)


def test_merged_parts_walk_as_those_they_are_made_of(
    cases: list[arms.Case], models: tuple[Target, Any, Any]
) -> None:
    target, _, adapter = models
    tables = adapter.precompute(target.embedding, target.head)
    case = cases[1]
    assert [len(p.tokens) for p in case.parts] == [15]
    apart = [
        arms.Part(**{n: _cut(getattr(case.parts[0], n), place) for n in _PART_FIELDS})
        for place in (slice(0, 10), slice(10, 15))
    ]
    assert len(arms._merged(apart, 14)) == 2 and len(arms._merged(apart, 15)) == 1
    chosen = {"ddtree": arms.Arm("ddtree", 15), "noisy": arms.Arm("weaver", 15, shared=True)}
    walks = [
        arms.run(dataclasses.replace(case, parts=p), chosen, DEPTH, adapter, tables)
        for p in (apart, arms._merged(apart, 15))
    ]
    for name in chosen:
        for a, b in zip(walks[0][name], walks[1][name], strict=True):
            assert torch.equal(a, b)


_PART_FIELDS = [field.name for field in dataclasses.fields(arms.Part)]


def _cut(value: Any, place: slice) -> Any:
    if isinstance(value, tuple):
        return tuple(v[place] for v in value)
    return value[place] if isinstance(value, Tensor) else value


@pytest.mark.parametrize("slow", [0.0, 3.0])
def test_a_stage_that_is_slow_for_a_while_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    """At `slow` seconds a step for its first 100 s, then at 1: it ends close to its 400 s, unless
    its own steps are fewer."""
    clock = [0.0]
    monkeypatch.setattr(optim.time, "time", lambda: clock[0])
    weight = torch.nn.Parameter(torch.ones(1))
    stage = dataclasses.replace(TOY.train_adapter, steps=500)
    optimiser = optim.Optimiser([("weight", weight)], stage)

    def loss_of(progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        clock[0] += slow if clock[0] < 100 and slow else 1.0
        return weight.square().sum(), {}

    record = optim.train("x", stage, optimiser, loss_of, seconds=400, log=lambda text: None)
    assert 380 <= record["seconds"] <= 402
    assert record["steps"] == pytest.approx(333 if slow else 400, abs=15)
    short = dataclasses.replace(stage, steps=100)
    record = optim.train("x", short, optimiser, loss_of, seconds=400, log=lambda text: None)
    assert record["steps"] == record["planned_steps"] == 100


def arguments_of(out: Path, size: str) -> argparse.Namespace:
    (out / "work").mkdir(exist_ok=True)
    return argparse.Namespace(
        size=size, seed=0, out=out, archive=None, work=None, source=None, target=None,
        against=None, prompts=None, within=465.0, stages="target,drafter,adapter",
        limits="target=135",
    )  # fmt: skip


def test_adapter_has_its_share_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train.Run(arguments_of(tmp_path, size="bench"))
    shares = BENCH.shares
    monkeypatch.setattr(train.time, "time", lambda: run.start + spent)
    for spent in (240.0, 280.0, 340.0):
        left = 465 - spent - shares.ending_s
        assert run.seconds_of("adapter") == pytest.approx(left)
        drafter = run.seconds_of("drafter")
        assert drafter is not None
        rest = left - shares.drafting_s - drafter
        assert rest >= min(shares.adapter * 465, (left - shares.drafting_s) * 2 / 3) - 1e-6
        assert drafter <= shares.drafter * (left - shares.drafting_s) + 1e-6
    assert run.seconds_of("target") == 135


@pytest.mark.parametrize(("rows", "most"), [(12288, 170), (12288, 256), (7, 2), (1, 9), (97, 40)])
def test_parts_of_rows_have_one_shape_where_that_costs_little(rows: int, most: int) -> None:
    at_once = part_rows(rows, most)
    assert 1 <= at_once <= min(rows, most)
    assert rows % at_once == 0 or at_once == min(rows, most)
    assert 2 * at_once >= min(rows, most)


def random_drafter() -> Drafter:
    shape, width = TOY.drafter, TOY.target.width
    torch.manual_seed(6)
    sizes = {
        "fc": (width, 3 * width), "hidden_norm": (width,), "norm": (width,),
    }  # fmt: skip
    heads, kv_heads, head_dim = shape.heads(TOY.target)
    for i in range(shape.layers):
        layer = f"layers.{i}."
        sizes |= {layer + n: (width,) for n in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{layer}self_attn.{n}_norm": (head_dim,) for n in "qk"}
        sizes |= {f"{layer}self_attn.q_proj": (heads * head_dim, width)}
        sizes |= {f"{layer}self_attn.{n}_proj": (kv_heads * head_dim, width) for n in "kv"}
        sizes |= {f"{layer}self_attn.o_proj": (width, heads * head_dim)}
        sizes |= {f"{layer}mlp.{n}_proj": (shape.mlp, width) for n in ("gate", "up")}
        sizes |= {f"{layer}mlp.down_proj": (width, shape.mlp)}
    weights = {f"{n}.weight": torch.randn(s) * s[-1] ** -0.5 for n, s in sizes.items()}
    return Drafter(weights, shape, TOY.target, "cpu", torch.float32)


def test_drafted_states_are_multiplied_with_the_head_at_once(
    models: tuple[Target, Any, Any],
) -> None:
    """Not block by block, which at 15 rows each is several times slower on a GPU."""
    target, _, _ = models
    auxiliary = torch.randn(4, 48, 3 * TOY.target.width)
    anchors = torch.tensor([[17, 30]]).expand(4, -1)
    ids = torch.randint(2, VOCAB, (4, 48))
    drafter, embedding = random_drafter(), target.embedding.detach()
    h_draft = drafter(auxiliary, ids, anchors, embedding).flatten(0, 1)
    with torch.no_grad(), Operations() as operations:
        logits = h_draft @ target.head.detach().T
    assert logits.shape == (8, DEPTH, VOCAB)
    assert "mm" in operations.seen and "bmm" not in operations.seen


def test_an_adapter_is_trained_without_further_rows_if_writing_them_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        def wait(self) -> int:
            return status

    monkeypatch.setattr(train, "module", lambda *arguments, **options: Process())
    target, stream = tmp_path / "target", torch.randint(2, VOCAB, (2000,))
    for status in (0, 1):
        run = train.Run(arguments_of(tmp_path, size="toy"))
        own_text = train.Rollouts(run, target)
        for i, group in enumerate(TOY.groups[:2]):
            rows = torch.zeros(group.rows, group.length), torch.full((group.rows,), 16)
            rollouts.save(rollouts.rows_file(run.work, i, 1), rows)
        further = own_text.further(stream)
        assert len(further) == (0 if status else len(TOY.groups))
        moments = [text for _, text in run.record["moments"]]
        assert ("the rollouts process failed" in moments[-1]) is bool(status)


@pytest.mark.slow
def test_frozen_passes_give_the_same_compiled(
    models: tuple[Target, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fresh blocks cost: the drafter's pass, the pool's floor, the target's pass."""
    target, _, _ = models
    shape, drafter = TOY.drafter, random_drafter()
    rows = Rows(torch.randint(2, VOCAB, (4, 48)), torch.full((4,), 16))
    found = []
    for groups in ((), {0}):
        torch.manual_seed(7)
        states = TextStates(target, [rows], shape.target_layers, shape.block, torch.float32, groups)
        draft = weaver.Draft(TOY, target, drafter, states, [3], compiled=groups)
        found.append((states.auxiliary, draft.blocks.h_draft, draft.blocks.floor))
        assert not RUNTIME.compiled
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled, atol=2e-3, rtol=2e-3)
    assert float(found[0][1].std()) > 0.1


def test_blocks_are_renewed_without_a_wait_for_the_device(draft: weaver.Draft) -> None:
    """A value that the host reads, or a shape that depends on values, would stop it."""
    draft.take_turns_with([Rows(g.ids.clone(), g.start.clone()) for g in draft._states.groups])
    with Operations() as operations:
        draft.renew(len(draft.blocks.anchors), other_rows=True)
    seen = operations.seen
    assert {"rms_norm", "mm", "bmm", "copy_", "index"} & seen
    assert not {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal"} & seen


def test_each_part_is_drafted_once_a_round(
    draft: weaver.Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    monkeypatch.setattr(draft, "_draft", turns.append)
    draft.renew(3 * len(draft.blocks.anchors))
    rounds = [turns[i : i + 7] for i in range(0, len(turns), 7)]
    assert len(rounds) == 3 and all(sorted(r) == list(range(7)) for r in rounds)


@pytest.mark.parametrize("regular", [Regular(), Regular(uses=2, dropout=0.2, average=0.9)])
def test_record_of_a_training_shows_held_out_overlap_and_blocks_drafted(
    models: tuple[Target, Any, Any], draft: weaver.Draft, regular: Regular
) -> None:
    target, drafter, _ = models
    stream = torch.randint(2, VOCAB, (600,))
    rows = Rows(*rollouts.generate_held_out(target, stream, TOY))
    assert len(rows.ids) == TOY.eval_prompts
    held_out = weaver.held_out_blocks(TOY, target, drafter, rows, torch.float32)
    assert {k: len(b.anchors) for k, b in held_out.items()} == {"T=0": 32, "T=1": 32}
    first = draft.blocks.anchors.clone()
    stage = dataclasses.replace(TOY.train_adapter, steps=24, rows=15)
    _, record = weaver.train_adapter(
        TOY,
        target,
        draft,
        "cpu",
        seconds=None,
        log=lambda text: None,
        stage=stage,
        regular=regular,
        held_out=held_out,
    )
    assert [entry["step"] for entry in record["held_out"]] == [12, 24]
    assert all(len(entry["T=1"]) == DEPTH for entry in record["held_out"])
    assert 0 < record["held_out"][-1]["T=0"][0] < 1
    assert record["blocks"] == len(first) and record["regular"] == dataclasses.asdict(regular)
    wanted = len(first) + (24 * 15 / regular.uses if regular.uses else 0)
    assert 0 <= wanted - record["drafted"] < 8
    assert torch.equal(draft.blocks.anchors, first) == (regular.uses == 0)
    assert _anchors_are_right(draft)
    draft.finish()
    with pytest.raises(RuntimeError, match="let go"):
        draft.renew(len(first))


def test_averaged_weights_follow_and_are_swapped_in() -> None:
    adapter = weaver.new_adapter(TOY, "cpu")
    average = weaver._Average(adapter, 0.5)
    weight = adapter.token_in.weight
    first = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    average.update()  # the first decay is 1 / 11
    average.swap()
    torch.testing.assert_close(weight.detach(), first + 10 / 11)
    average.swap()
    torch.testing.assert_close(weight.detach(), first + 1)


def test_dropout_hides_states_from_the_adapter_alone(draft: weaver.Draft) -> None:
    """A new adapter's query is zero: whatever it sees, the drafter's own marginals are scored."""
    torch.manual_seed(5)
    target = Target(TOY.target).requires_grad_(False)
    adapter = weaver.new_adapter(TOY, "cpu")
    step = weaver._step_of(TOY, target, adapter)
    pick = torch.arange(len(draft.blocks.anchors))
    plain, hidden = (step(draft.blocks, pick, 0.0, share)[0] for share in (0.0, 0.5))
    torch.testing.assert_close(plain, hidden)
    torch.nn.init.normal_(adapter.lm_head_query_in.weight, std=0.05)
    plain, hidden = (step(draft.blocks, pick, 0.0, share)[0] for share in (0.0, 0.5))
    assert abs((plain - hidden).item()) > 1e-3


def test_floor_of_a_pool_is_the_same_for_bfloat16_and_its_float32() -> None:
    logits = torch.randn(40, 500).mul(4).bfloat16()
    floor = weaver.pool_floor(logits, 30)
    assert torch.equal(floor, weaver.pool_floor(logits.float(), 30))
    reached = (logits.float() >= floor[:, None]).sum(-1)
    assert (reached >= 30).all() and (reached <= 40).all()


def test_variants_are_chosen_by_words_in_their_order() -> None:
    names = ablate.choose("ce,path,flat,fresh,dropout")
    assert names == [
        "base",
        "loss ce",
        "weights by path, B=63",
        "weights by path, B=15",
        "lk_mix, by path",
        "weights flat",
        "kept blocks",
        "fresh rows, 8 uses",
        "fresh anchors, 8 uses",
        "fresh rows, 8 uses, decay 0.1",
        "fresh rows, 4 uses",
        "kept, dropout 0.1",
        "kept, dropout 0.3",
    ]
    assert ablate.choose("") == [*ablate.VARIANTS, *ablate.LONG]
    with pytest.raises(ValueError, match="no variant is named 'speed'"):
        ablate.choose("base,speed")


def test_shapes_of_the_bench_size_are_exported_and_read_back(tmp_path: Path) -> None:
    """Its head and embedding are apart and its drafter has heads of its own, in small here:
    against speculators' own drafter, on the exported target."""
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    from tokenizers import Tokenizer, models

    from benchmarks.testbed import drafter as drafting
    from benchmarks.testbed import export

    assert BENCH.drafter.heads(BENCH.target) == (8, 4, 128)
    assert BENCH.target.head_dim == 256 and not BENCH.target.tied
    size = dataclasses.replace(
        TOY,
        target=dataclasses.replace(TOY.target, tied=False),
        drafter=dataclasses.replace(TOY.drafter, attention=(4, 2, 32)),
    )
    torch.manual_seed(2)
    RUNTIME.dtype = torch.float32
    target = Target(size.target).requires_grad_(False)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    export.save_target(target, tmp_path / "tokenizer.json", tmp_path / "target", torch.float32)
    back = export.load_target(tmp_path / "target", size.target, "cpu").requires_grad_(False)
    assert torch.equal(back.head, target.head) and not torch.equal(back.head, back.embedding)
    model = drafting.new_speculator(size, tmp_path / "target", "cpu", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    export.save_drafter(
        drafting.own_weights(model),
        size.drafter,
        size.target,
        tmp_path / "tokenizer.json",
        tmp_path / "drafter",
        torch.float32,
    )
    drafter = drafting.Drafter.load(
        tmp_path / "drafter", size.drafter, size.target, "cpu", torch.float32
    )
    ids = torch.randint(2, VOCAB, (1, 64))
    difference = drafting.agreement(size, back, tmp_path / "target", drafter, ids)
    assert 0 < difference < 1e-3
