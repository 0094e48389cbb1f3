# SPDX-License-Identifier: Apache-2.0
"""Slot pools and dead rows: the forms that never look at values equal those that do."""

from __future__ import annotations

import pytest
import torch

from vllm_weaver.ops import slots
from vllm_weaver.ops.dispatch import Backends


@pytest.mark.parametrize(
    "live", [[True, True, True], [False, True, True], [True, False, False], [False] * 3]
)
def test_writing_unseen_equals_writing_the_live_rows(live: list[bool]) -> None:
    gen = torch.Generator().manual_seed(0)
    pool = torch.randn(6, 2, 3, generator=gen)
    pool[0, 0, 0] = float("nan")
    rows = torch.randn(3, 2, 3, generator=gen)
    live_R = torch.tensor(live)
    index = torch.where(live_R, torch.tensor([4, 0, 2]), -1)
    expected, unseen = pool.clone(), pool.clone()
    slots.write_slots(expected, index, rows, live_R)
    slots._write_unseen(unseen, index, rows, live_R)
    assert torch.equal(unseen.nan_to_num(9.0), expected.nan_to_num(9.0))
    for r, slot in enumerate([4, 0, 2]):
        assert torch.equal(expected[slot], rows[r]) == live[r]


def test_blanking_by_selection_equals_blanking_in_place() -> None:
    live = torch.tensor([[True, True, False], [False, True, True]])
    x = torch.where(live[..., None], torch.arange(12.0).view(2, 3, 2) + 1, float("nan"))
    blank = slots.RowBlanker(live)
    in_place = blank(x.clone())
    blank._dead = None
    assert torch.equal(blank(x), in_place)
    assert torch.equal(in_place == 0, ~live[..., None].expand(2, 3, 2))


def test_registry_takes_the_device_default_and_imports_on_first_use() -> None:
    backends = Backends("op", abs)
    backends.register("other", "operator:neg", default_on=("cuda",))
    assert backends.pick(None, torch.device("cpu")) is abs
    assert backends.pick("other", torch.device("cpu"))(3) == -3
    assert backends.pick(None, torch.device("cuda"))(3) == -3
    assert backends.pick("reference", torch.device("cuda")) is abs
    with pytest.raises(ValueError, match="op: unknown backend 'x'; available: reference, other"):
        backends.pick("x", torch.device("cpu"))
