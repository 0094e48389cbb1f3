# SPDX-License-Identifier: Apache-2.0
"""The testbed's own parts: what travels arrives whole, losses and arms mean what they say."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.testbed import ablate, arms, pack, weaver
from benchmarks.testbed.config import TOY
from benchmarks.testbed.target import RUNTIME, Target
from vllm_weaver.train.losses import depth_weights, length_weights, path_weights, pool_losses

DEPTH, WIDTH, VOCAB = TOY.drafter.depth, TOY.target.width, TOY.target.vocab


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


def test_shapes_of_the_bench_size_are_exported_and_read_back(tmp_path: Path) -> None:
    """Its head and embedding are apart and its drafter has heads of its own, in small here:
    against speculators' own drafter, on the exported target."""
    pytest.importorskip("speculators", reason="the extra `train` is not installed")
    from tokenizers import Tokenizer, models

    from benchmarks.testbed import drafter as drafting
    from benchmarks.testbed import export
    from benchmarks.testbed.config import BENCH

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
