# SPDX-License-Identifier: Apache-2.0
"""Training: the right alignment, the same result however it was run, nothing lost on failure."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import ADAPTER, DRAFTER, TARGET, MakeRecipe, with_data
from nano_runs import train_in_a_process, weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_weaver.adapter import load
from vllm_weaver.train.blocks import conditional, make_blocks, make_pools
from vllm_weaver.train.data import Document
from vllm_weaver.train.errors import DataError, RecipeError, SaveError, TrainError
from vllm_weaver.train.optim import Optimizers
from vllm_weaver.train.plan import dry_run
from vllm_weaver.train.processes import Processes
from vllm_weaver.train.state import Checkpoints
from vllm_weaver.train.trainer import Trainer, load_frozen, train

CPU = torch.device("cpu")

_KILLS_ITSELF = """
import os, signal
from vllm_weaver.train.optim import Optimizers
step, calls = Optimizers.step, []
def mortal(*arguments):
    calls.append(0)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)
Optimizers.step = mortal
"""


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_target_states_and_drafts_line_up_with_the_text(make_recipe: MakeRecipe) -> None:
    """Against the whole target, run by Transformers: shift a position and this fails."""
    import transformers

    target, _, data = load_frozen(make_recipe(), CPU)
    document = data[0]
    assert isinstance(document, Document)
    _, drafter, _ = load_frozen(make_recipe(), CPU)
    anchors = torch.tensor([9, 20])
    blocks = make_blocks(target, drafter, [(document, anchors)], 15)
    assert blocks is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_LV = model(document.tokens_L[None]).logits[0]
    for number, anchor in enumerate(anchors.tolist()):
        text = document.tokens_L[anchor : anchor + 16]
        assert torch.equal(blocks.tokens_RN[number], text)
        own = blocks.states_RDd[number] @ target.head_Vd.T
        # The files are bfloat16.
        assert (own - logits_LV[anchor : anchor + 15]).abs().max() < 0.3
        root = blocks.h_ver_Rd[number] @ target.head_Vd.T
        assert (root - logits_LV[anchor - 1]).abs().max() < 0.3


def test_trained_adapter_beats_the_marginals_on_these_blocks(make_recipe: MakeRecipe) -> None:
    """The package's own adapter, trained elsewhere: wrong tokens or states would undo it."""
    recipe = make_recipe()
    target, drafter, data = load_frozen(recipe, CPU)
    documents = [(data[row], torch.arange(9, 40, 3)) for row in range(4)]
    blocks = make_blocks(target, drafter, documents, 15)  # type: ignore[arg-type]
    assert blocks is not None
    pools = make_pools(target, blocks, 256)
    adapter = load(ADAPTER)
    with torch.no_grad():
        ((_, log_q_RDP),) = conditional(adapter, target, blocks, pools)
    mine = torch.minimum(pools.p_RDP, log_q_RDP.exp()).sum(-1).mean(0)
    plain = pools.logits_RDP.log_softmax(-1).exp()
    base = torch.minimum(pools.p_RDP, plain).sum(-1).mean(0)
    assert (mine[2:] > base[2:] + 0.1).all()


def test_drafter_in_speculators_format_gives_the_same_states(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    from vllm_weaver.train.convert import convert

    directory = convert(ADAPTER, tmp_path / "both", "speculators", drafter=DRAFTER, target=TARGET)
    recipe = make_recipe()
    other = dataclasses.replace(
        recipe, drafter=dataclasses.replace(recipe.drafter, path=str(directory))
    )
    states = []
    for each in (recipe, other):
        target, drafter, data = load_frozen(each, CPU)
        document = data[1]
        assert isinstance(document, Document)
        blocks = make_blocks(target, drafter, [(document, torch.tensor([12, 30]))], 15)
        assert blocks is not None
        states.append(blocks.h_draft_RDd)
    assert torch.equal(*states)


def test_training_lowers_the_loss_and_writes_a_loadable_adapter(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(train__steps=10, train__measure_every=10, train__save_every=100)
    adapter = load(train(recipe))
    assert adapter.metadata["step"] == 10
    lines = (Path(recipe.output) / "metrics.jsonl").read_text().splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
    assert len(losses) == 10
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert any(json.loads(line)["kind"] == "held_out" for line in lines)


def test_killed_run_resumes_to_the_identical_result(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """SIGKILL in the middle of step 5, then --resume: bit for bit the run that was never killed."""
    settings = {"train__steps": 8, "train__save_every": 2}
    straight = make_recipe("straight", **settings)
    train(straight)
    killed = make_recipe("killed", **settings)
    process = train_in_a_process(killed, tmp_path, before=_KILLS_ITSELF)
    assert process.returncode == -signal.SIGKILL
    checkpoints = Checkpoints(killed.output, 2)
    assert checkpoints.steps() == [2, 4]
    # A kill can leave these behind; both are ignored.
    (checkpoints.directory / ".step-00000099.pt.tmp").write_bytes(b"half")
    with open(Path(killed.output) / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "ki')
    train(killed, resume=True)
    _assert_same(weights(killed), weights(straight))
    lines = (Path(killed.output) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 9))


def test_bad_shard_ends_the_run_with_its_last_step_saved(
    make_recipe: MakeRecipe, data: Path
) -> None:
    recipe = with_data(make_recipe(train__save_every=100), path=str(data))
    plan = Trainer(recipe, Processes(0, 1, CPU)).plan
    row = plan.unit(2 * plan.units)[0][0]
    file = data / "hidden_states" / f"hs_{row}.safetensors"
    whole = load_file(file)
    poisoned = whole["hidden_states"].clone()
    poisoned[3] = float("inf")
    seen = {row for number in range(2 * plan.units) for row, _ in plan.unit(number)}
    assert row not in seen
    save_file({**whole, "hidden_states": poisoned}, file)
    with pytest.raises(DataError, match=rf"hs_{row}\.safetensors: states hold NaN"):
        train(recipe)
    assert Checkpoints(recipe.output, 2).steps() == [2]
    # Mended, the run goes on as if nothing had happened.
    save_file(whole, file)
    train(recipe, resume=True)
    untouched = make_recipe("untouched", train__save_every=100)
    train(untouched)
    _assert_same(weights(recipe), weights(untouched))


@pytest.mark.parametrize("where", ["a unit", "the optimisers' step"])
def test_a_killed_reader_ends_the_run_with_its_last_whole_step_saved(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """PyTorch raises wherever the training thread is just then; half a step is never saved."""
    recipe = make_recipe(train__save_every=100, data__workers=1)
    unit, optimise = Trainer._unit, Optimizers.step
    calls = iter(range(100))

    def kill() -> None:
        (reader,) = multiprocessing.active_children()
        os.kill(reader.pid or 0, signal.SIGKILL)
        time.sleep(30)

    def run_unit(self: Trainer, *args: Any) -> Any:
        if where == "a unit" and self.step == 2:
            kill()
        return unit(self, *args)

    def run_optimisers(self: Optimizers, *args: Any) -> Any:
        norm = optimise(self, *args)
        if where != "a unit" and next(calls) == 2:
            kill()
        return norm

    monkeypatch.setattr(Trainer, "_unit", run_unit)
    monkeypatch.setattr(Optimizers, "step", run_optimisers)
    with pytest.raises(DataError, match=r"a reading process ended .* killed.*lower data\.workers"):
        train(recipe)
    monkeypatch.undo()
    saved = Checkpoints(recipe.output, 2).steps()
    assert saved == ([2] if where == "a unit" else [])
    if saved:
        train(recipe, resume=True)
        untouched = make_recipe("untouched", train__save_every=100)
        train(untouched)
        _assert_same(weights(recipe), weights(untouched))


def test_bad_shards_may_be_skipped_and_are_counted(make_recipe: MakeRecipe, data: Path) -> None:
    for file in sorted((data / "hidden_states").glob("hs_*.safetensors"))[:5]:
        file.write_bytes(b"")
    recipe = with_data(make_recipe(), path=str(data), on_bad="skip")
    metadata: dict[str, Any] = load(train(recipe)).metadata
    assert metadata["rows_skipped"] > 0


def test_full_disk_leaves_the_last_good_checkpoint(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_recipe("straight")
    train(straight)
    recipe = make_recipe("full")
    write = torch.save

    def full(content: Any, file: Any) -> None:
        if content["step"] < 4:
            write(content, file)
            return
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SaveError, match=r"No space left.*step-00000002\.pt.*--resume"):
        train(recipe)
    monkeypatch.undo()
    folder = Path(recipe.output) / "checkpoints"
    assert [file.name for file in folder.iterdir()] == ["step-00000002.pt"]
    assert load(Path(recipe.output) / "adapter").metadata["step"] == 2
    train(recipe, resume=True)
    _assert_same(weights(recipe), weights(straight))


def test_file_that_cannot_grow_leaves_the_last_good_checkpoint(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real write that the system cuts short in the middle of a checkpoint."""
    straight = make_recipe("straight")
    train(straight)
    recipe = make_recipe("limited")
    save = Checkpoints.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self: Checkpoints, step: int, state: Any) -> None:
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file(2).stat().st_size // 2, hard))
        save(self, step, state)

    monkeypatch.setattr(Checkpoints, "save", limited)
    try:
        with pytest.raises(SaveError, match=r"could not be written.*step-00000002\.pt.*--resume"):
            train(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    folder = Path(recipe.output) / "checkpoints"
    assert [file.name for file in folder.iterdir()] == ["step-00000002.pt"]
    train(recipe, resume=True)
    _assert_same(weights(recipe), weights(straight))


def test_compiled_model_trains_as_the_plain_one(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced whole, without the code generator, whose compilation takes a minute."""
    plain, traced = (
        make_recipe(n, train__steps=2, train__compile=n == "traced") for n in ("plain", "traced")
    )
    train(plain)
    compiler, calls = torch.compile, 0

    def trace(model: Any) -> Any:
        nonlocal calls
        calls += 1
        return compiler(model, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", trace)
    train(traced)
    assert calls == 1
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(traced)[name], tensor, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("weigh", ["path", "length"])
def test_weights_along_the_path_train_and_are_resumed_with_their_own_recipe_only(
    weigh: str, make_recipe: MakeRecipe
) -> None:
    plain = make_recipe("plain", train__steps=1)
    other = make_recipe("other", train__steps=1, train__weigh=weigh)
    train(plain)
    train(other)
    name = "lm_head_query_in.weight"
    assert not torch.equal(weights(plain)[name], weights(other)[name])
    with pytest.raises(RecipeError, match=rf"train\.weigh is 'depth' but .* had '{weigh}'"):
        train(make_recipe("other", train__steps=1), resume=True)


def test_damaged_checkpoint_falls_back_to_the_one_before(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    checkpoints = Checkpoints(recipe.output, 2)
    assert checkpoints.steps() == [2, 4]
    expected = weights(recipe)
    checkpoints.file(4).write_bytes(checkpoints.file(4).read_bytes()[:1000])
    train(recipe, resume=True)
    _assert_same(weights(recipe), expected)
    checkpoints.file(2).write_bytes(b"")
    checkpoints.file(4).write_bytes(b"")
    with pytest.raises(TrainError, match="no checkpoint is readable"):
        train(recipe, resume=True)


def test_finished_run_is_not_overwritten_and_other_recipes_do_not_resume_it(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make_recipe(train__steps=1)
    train(recipe)
    with pytest.raises(TrainError, match="holds a run at step 1: pass --resume"):
        train(recipe)
    with pytest.raises(RecipeError, match=r"train\.eta is 1\.0 but .* had 3\.0"):
        train(make_recipe(train__steps=1, train__eta=1.0), resume=True)


def test_gradient_that_is_not_finite_ends_the_run_before_it_spoils_anything(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_weaver.train import trainer

    recipe = make_recipe()
    real, calls = trainer.pool_losses, 0

    def spoiled(*arguments: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        loss, accepted = real(*arguments)
        return (loss * float("nan") if calls > 4 else loss), accepted

    monkeypatch.setattr(trainer, "pool_losses", spoiled)
    with pytest.raises(TrainError, match="step 3: the gradient's norm is nan; step 2 is saved"):
        train(recipe)
    assert load(Path(recipe.output) / "adapter").metadata["step"] == 2


def test_states_that_do_not_give_the_text_are_refused(make_recipe: MakeRecipe, data: Path) -> None:
    """As many layers, as wide, finite, and yet the last is not the target's last."""
    for file in (data / "hidden_states").glob("hs_*.safetensors"):
        whole = load_file(file)
        states = whole["hidden_states"].clone()
        states[:, -1] = -states[:, -1]
        save_file({**whole, "hidden_states": states}, file)
    recipe = with_data(make_recipe(), path=str(data))
    with pytest.raises(DataError, match="more than a blind guess"):
        train(recipe)


def test_models_that_do_not_belong_together_are_refused(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    other = tmp_path / "drafter"
    shutil.copytree(DRAFTER, other)
    config = json.loads((other / "config.json").read_text())
    recipe = make_recipe()
    recipe = dataclasses.replace(
        recipe, drafter=dataclasses.replace(recipe.drafter, path=str(other))
    )
    for change, said in (
        ({"hidden_size": 128}, "hidden_size is 128 but that of .* is 256"),
        ({"vocab_size": 512}, "vocab_size is 512 but that of .* is 4096"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 5, 9]}},
            "reads layer 10 but .* has 8",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 5]}},
            r"fc\.weight is \(256, 1024\) but its config makes it \(256, 768\)",
        ),
        ({"dflash_config": None}, "use a DFlash drafter"),
    ):
        (other / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(TrainError, match=said):
            load_frozen(recipe, CPU)
    with pytest.raises(TrainError, match="no such model directory"):
        load_frozen(
            dataclasses.replace(recipe, drafter=dataclasses.replace(recipe.drafter, path="/none")),
            CPU,
        )


def test_dry_run_tells_the_cost_and_writes_nothing(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    facts = dry_run(Trainer(recipe, Processes(0, 1, CPU)))
    assert "s, " in facts["time per step"] and facts["layers in the files"] == [2, 4, 6, 7, 8]
    assert not Path(recipe.output).exists()


def test_bfloat16_run_keeps_float32_masters_and_stays_near_the_plain_one(
    make_recipe: MakeRecipe,
) -> None:
    plain = make_recipe("plain", train__steps=1)
    half = make_recipe("half", train__steps=1, train__precision="bfloat16")
    for recipe in (plain, half):
        train(recipe)
    one, two = weights(plain), weights(half)
    assert all(tensor.dtype == torch.float32 for tensor in two.values())
    name = "lm_head_query_in.weight"
    cosine = torch.nn.functional.cosine_similarity(one[name].flatten(), two[name].flatten(), dim=0)
    assert cosine > 0.9


def test_start_from_continues_an_adapter_of_the_same_size_only(make_recipe: MakeRecipe) -> None:
    first = make_recipe("first", train__steps=1)
    path = train(first)
    second = make_recipe("second", train__steps=1, adapter__start_from=str(path))
    trainer = Trainer(second, Processes(0, 1, CPU))
    _assert_same(dict(trainer.adapter.state_dict()), weights(first))
    with pytest.raises(RecipeError, match=r"adapter\.start_from"):
        Trainer(
            make_recipe("third", adapter__start_from=str(path), adapter__rank=64),
            Processes(0, 1, CPU),
        )
