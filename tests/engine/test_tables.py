# SPDX-License-Identifier: Apache-2.0
"""Which rows of the vocabulary a rank weaves with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_weaver import weave
from vllm_weaver.adapter import AdapterTables
from vllm_weaver.engine import compat
from vllm_weaver.engine.compat import Vocabulary
from vllm_weaver.engine.config import WeaverOptions
from vllm_weaver.engine.proposer import Proposer

ROWS = torch.arange(10.0).reshape(5, 2)


def vocabulary(rank: int | None, dtype: torch.dtype = torch.float32, added: int = 0) -> Vocabulary:
    """Five tokens, on one rank or on two with three rows each, of which the last is padding."""
    padded = torch.cat([ROWS, torch.full((1, 2), 9.0)])
    rows = ROWS if rank is None else padded[3 * rank : 3 * rank + 3]

    def layer(factor: int) -> Any:
        weight = (factor * rows).to(dtype)
        return SimpleNamespace(weight=weight, org_vocab_size=5, num_embeddings=5 + added)

    found = object.__new__(Vocabulary)
    found.embedding, found.head, found.sharded = layer(1), layer(10), rank is not None
    return found


class Adapter:
    """Stands in for one on a GPU; its tables are negative rows."""

    config = SimpleNamespace(candidate_pool_size=4)
    device = torch.device("cuda")

    def precompute(self, embed: torch.Tensor, lm_head: torch.Tensor) -> AdapterTables:
        return AdapterTables(-embed, -lm_head)


def woven(monkeypatch: pytest.MonkeyPatch, held: Vocabulary, **options: Any) -> Any:
    """What a `TreeWeaver` is made of; None if none is made."""
    made: list[Any] = []

    def keep(adapter: Any, embed: Any, lm_head: Any, *, tables: Any, **rest: Any) -> object:
        made.append((embed, lm_head, tables))
        return object()

    monkeypatch.setattr(weave, "TreeWeaver", keep)
    adapter: Any = Adapter()
    proposer = Proposer(WeaverOptions(**options), 3, 2, 5, adapter, held, max_requests=2)
    assert (proposer.weaver is None) == (not made)
    return made[0] if made else None


def test_ranks_weave_with_tables_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    other = vocabulary(1)
    sent: list[torch.Tensor] = []

    def gather(rows: torch.Tensor, dim: int) -> torch.Tensor:
        sent.append(rows)
        return torch.cat([rows, -(10 if len(sent) == 2 else 1) * other.embedding.weight], dim)

    monkeypatch.setattr(compat, "tensor_model_parallel_all_gather", gather)
    embed, lm_head, tables = woven(monkeypatch, vocabulary(0))
    assert embed is None and lm_head is None and len(sent) == 2
    # Without the padding of the last rank.
    assert torch.equal(tables.token_input, -ROWS) and torch.equal(tables.pool_rows, -10 * ROWS)


def test_one_rank_weaves_with_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, tables = woven(monkeypatch, vocabulary(None))
    assert torch.equal(tables.token_input, -ROWS) and torch.equal(tables.pool_rows, -10 * ROWS)
    embed, lm_head, tables = woven(monkeypatch, vocabulary(None), adapter_tables=False)
    assert tables is None and torch.equal(embed, ROWS) and torch.equal(lm_head, 10 * ROWS)


@pytest.mark.parametrize(
    ("held", "options"),
    [
        (vocabulary(0), {"adapter_tables": False}),
        (vocabulary(0, added=2), {}),
        (vocabulary(0, dtype=torch.int8), {}),
        (vocabulary(None, dtype=torch.int8), {}),
        (vocabulary(None), {"candidate_pool": 4096}),
    ],
)
def test_the_definition_serves_what_has_no_tables(
    monkeypatch: pytest.MonkeyPatch, held: Vocabulary, options: dict[str, Any]
) -> None:
    if "candidate_pool" in options:
        monkeypatch.setattr(weave, "MAX_POOL", 4)
    assert woven(monkeypatch, held, **options) is None
