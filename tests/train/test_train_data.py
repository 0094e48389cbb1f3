# SPDX-License-Identifier: Apache-2.0
"""Hidden-state files: what is right is read as it is, what is wrong is named, nothing is kept."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import ROWS
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_weaver.train.data import (
    Document,
    HiddenStateData,
    Layout,
    Plan,
    Skipped,
    draw_anchors,
    stream,
)
from vllm_weaver.train.errors import DataError
from vllm_weaver.train.processes import host_memory
from vllm_weaver.train.recipe import DataRecipe

LAYOUT = Layout(width=256, vocab=4096, layer_ids=(2, 4, 6, 7), last_layer=8)


def _open(data: Path, layout: Layout = LAYOUT, **settings: Any) -> HiddenStateData:
    return HiddenStateData(DataRecipe(path=str(data), workers=0, **settings), layout)


def _rewrite(data: Path, row: int, **changes: Tensor) -> Path:
    file = data / "hidden_states" / f"hs_{row}.safetensors"
    save_file({**load_file(file), **changes}, file)
    return file


def test_rows_are_read_as_speculators_reads_them(data: Path) -> None:
    from speculators.train.data import ArrowDataset

    theirs = ArrowDataset(max_len=4096, datapath=str(data), on_missing="raise")
    ours = _open(data)
    for row in (0, ROWS - 1):
        document, expected = ours[row], theirs[row]
        assert isinstance(document, Document)
        assert torch.equal(document.tokens_L, expected["input_ids"])
        assert torch.equal(document.trained_L, expected["loss_mask"].bool())
        assert torch.equal(document.auxiliary_Lx, expected["hidden_states"])
        assert torch.equal(document.last_Ld, expected["verifier_last_hidden_states"])


def test_fp8_files_are_read_as_speculators_reads_them(data: Path) -> None:
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8
    from hs_connectors.transfer import FP8Transfer

    plain = _open(data)[3]
    quantised, scales = quantize_tensor_to_fp8(_states(data))
    _rewrite(data, 3, hidden_states=quantised, hidden_states_scales=scales)
    expected = FP8Transfer(data / "hidden_states").get_cached(3)
    read, cut = _open(data)[3], _open(data, max_length=20)[3]
    assert expected is not None and isinstance(plain, Document)
    assert isinstance(read, Document) and isinstance(cut, Document)
    assert torch.equal(read.last_Ld, expected["hidden_states"][:, -1])
    assert torch.equal(read.auxiliary_Lx, expected["hidden_states"][:, :-1].flatten(1))
    assert torch.equal(cut.last_Ld, read.last_Ld[:20])
    assert (read.last_Ld - plain.last_Ld).norm() < 0.05 * plain.last_Ld.norm()


def test_long_rows_are_cut(data: Path) -> None:
    whole, cut = _open(data)[1], _open(data, max_length=20)[1]
    assert isinstance(whole, Document) and isinstance(cut, Document)
    assert torch.equal(cut.auxiliary_Lx, whole.auxiliary_Lx[:20])
    assert len(cut.tokens_L) == len(cut.trained_L) == len(cut.last_Ld) == 20


def _truncate(data: Path) -> None:
    file = data / "hidden_states" / "hs_3.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _states(data: Path) -> Tensor:
    return load_file(data / "hidden_states" / "hs_3.safetensors")["hidden_states"]


def _poison(data: Path) -> None:
    states = _states(data)
    states[7, 2, 9] = float("nan")
    _rewrite(data, 3, hidden_states=states)


def _other_tokens(data: Path) -> None:
    tokens = load_file(data / "hidden_states" / "hs_3.safetensors")["token_ids"]
    tokens[5] += 1
    _rewrite(data, 3, token_ids=tokens)


DAMAGE = {
    "missing": (
        lambda d: (d / "hidden_states" / "hs_3.safetensors").unlink(),
        r"hs_3\.safetensors: missing: make it with",
    ),
    "empty": (
        lambda d: (d / "hidden_states" / "hs_3.safetensors").write_bytes(b""),
        r"hs_3\.safetensors: empty: delete it",
    ),
    "truncated": (_truncate, r"hs_3\.safetensors: not readable .*truncated: delete it"),
    "nan": (_poison, r"hs_3\.safetensors: states hold NaN or Inf"),
    "tokens": (_other_tokens, r"tokens differ from row 3 .* at position 5"),
    "layers": (
        lambda d: _rewrite(d, 3, hidden_states=_states(d)[:, 1:].contiguous()),
        r"holds 4 layers, not the 5 .*extract layers \[2, 4, 6, 7, 8\]",
    ),
    "width": (
        lambda d: _rewrite(d, 3, hidden_states=_states(d)[..., :128].contiguous()),
        "states are 128 wide but the target is 256",
    ),
    "length": (
        lambda d: _rewrite(d, 3, hidden_states=_states(d)[:-1].contiguous()),
        r"hidden_states is \[55, 5, 256\] for 56 tokens",
    ),
    "integers": (lambda d: _rewrite(d, 3, hidden_states=_states(d).int()), "states are torch.int"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named_or_skipped_and_the_others_read(data: Path, kind: str) -> None:
    damage, said = DAMAGE[kind]
    damage(data)
    opened = _open(data)
    with pytest.raises(DataError, match=said) as caught:
        opened[3]
    assert "\n" not in str(caught.value)
    assert isinstance(opened[2], Document)
    lenient = _open(data, on_bad="skip", on_missing="skip")
    skipped = lenient[3]
    assert isinstance(skipped, Skipped) and "hs_3" in skipped.reason
    assert isinstance(lenient[4], Document)


def test_tokens_of_another_tokenizer_are_refused(data: Path) -> None:
    small = Layout(width=256, vocab=300, layer_ids=(2, 4, 6, 7), last_layer=8)
    with pytest.raises(DataError, match=r"vocabulary has 300: .* another tokenizer"):
        _open(data, small)[0]


def test_record_of_other_layers_is_refused_before_a_row_is_read(data: Path) -> None:
    other = Layout(width=256, vocab=4096, layer_ids=(1, 4, 6, 7), last_layer=8)
    with pytest.raises(DataError, match=r"layers \[2, 4, 6, 7, 8\], but .* need \[1, 4, 6, 7, 8\]"):
        _open(data, other)


def test_directory_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        _open(tmp_path / "nothing")
    with pytest.raises(DataError, match="not a prepared dataset"):
        _open(tmp_path)


def test_held_out_rows_are_the_last_and_never_trained_on(data: Path) -> None:
    training, held_out = _open(data, held_out=0.2).split()
    assert [*training, *held_out] == list(range(ROWS)) and len(held_out) == 2
    assert len(_open(data, held_out=0.0).split()[1]) == 0


def test_plan_shows_each_row_once_an_epoch_whatever_the_number_of_processes() -> None:
    plan = Plan.of(range(10, 34), documents=2, units=4, epochs=2.0, steps=None, seed=5)
    assert plan.steps == 6
    alone = list(plan.batches(0, 0, 1))
    rows = [row for unit in alone for row, _ in unit]
    assert sorted(rows[:24]) == sorted(rows[24:]) == list(range(10, 34))
    assert rows[:24] != rows[24:]
    seeds = [seed for unit in alone for _, seed in unit]
    assert len(set(seeds)) == len(seeds)
    shared = [list(plan.batches(0, rank, 2)) for rank in range(2)]
    together = [unit for pair in zip(*shared, strict=True) for unit in pair]
    assert together == alone
    assert list(plan.batches(4, 0, 1)) == alone[16:]


def test_rows_have_other_anchors_in_every_epoch() -> None:
    """A run of several epochs repeats its rows, and not its blocks."""
    plan = Plan.of(range(8), documents=2, units=2, epochs=3.0, steps=None, seed=0)
    trained = torch.ones(400, dtype=torch.bool)
    drawn: dict[int, list[list[int]]] = {}
    for unit in plan.batches(0, 0, 1):
        for row, seed in unit:
            drawn.setdefault(row, []).append(draw_anchors(trained, 15, 16, seed).tolist())
    for anchors in drawn.values():
        assert len(anchors) == 3
        # 16 of 384 places: two epochs share one anchor or so.
        assert all(len(set(a) & set(b)) < 8 for a, b in itertools.pairwise(anchors))
        assert len({tuple(a) for a in anchors}) == 3


def test_anchors_leave_a_token_before_and_the_depth_after() -> None:
    trained = torch.ones(30, dtype=torch.bool)
    trained[5:9] = False
    anchors = draw_anchors(trained, 7, 100, seed=1).tolist()
    assert anchors == [a for a in range(1, 23) if not 5 <= a < 9]
    few = draw_anchors(trained, 7, 4, seed=1)
    assert len(few) == 4 and torch.equal(few, draw_anchors(trained, 7, 4, seed=1))
    assert not torch.equal(few, draw_anchors(trained, 7, 4, seed=2))
    assert len(draw_anchors(trained[:7], 7, 4, seed=1)) == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_gives_units_in_order(data: Path, workers: int) -> None:
    opened = HiddenStateData(DataRecipe(path=str(data), workers=workers), LAYOUT)
    units = [[(3, 1), (0, 2)], [(5, 3), (1, 4)], [(2, 5), (4, 6)]]
    read = list(stream(opened, iter(units)))
    assert [[(d.index, seed) for d, seed in unit] for unit in read] == units


def test_error_in_a_reading_process_arrives_with_its_message(data: Path) -> None:
    _truncate(data)
    opened = HiddenStateData(DataRecipe(path=str(data), workers=1), LAYOUT)
    with pytest.raises(DataError, match=r"hs_3\.safetensors: not readable"):
        list(stream(opened, iter([[(2, 0)], [(3, 0)]])))


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """240 MB in 60 files go through one process within the memory of a few."""
    datasets = pytest.importorskip("datasets")
    rows, length, layout = 60, 400, Layout(1000, 4096, (1, 2, 3, 4), 5)
    (tmp_path / "hidden_states").mkdir()
    states = torch.randn(length, 5, 1000, dtype=torch.bfloat16)
    tokens = torch.arange(length)
    for row in range(rows):
        file = tmp_path / "hidden_states" / f"hs_{row}.safetensors"
        save_file({"token_ids": tokens, "hidden_states": states}, file)
    table = datasets.Dataset.from_dict(
        {"input_ids": [tokens.tolist()] * rows, "loss_mask": [[1] * length] * rows}
    )
    table.save_to_disk(str(tmp_path))
    opened = _open(tmp_path, layout)
    read = stream(opened, iter([[(row, 0)] for row in range(rows)]))
    next(read)
    gc.collect()
    before, highest, total = host_memory(), 0, 0
    for unit in read:
        document = unit[0][0]
        assert isinstance(document, Document)
        total += document.auxiliary_Lx.nbytes + document.last_Ld.nbytes
        highest = max(highest, host_memory())
    assert total > 200e6
    assert highest - before < 40e6
