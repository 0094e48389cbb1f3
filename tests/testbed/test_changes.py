# SPDX-License-Identifier: Apache-2.0
"""Paper engines follow texts that change as the engine's scheduler would."""

from __future__ import annotations

import pytest

from benchmarks.testbed.changes import PaperEngine, _Clock, acceptance, follow


def test_an_engine_on_paper_leaves_plain_decoding_and_returns_to_it() -> None:
    hard, easy, again = follow(8, (("hopeless", 12), ("greedy", 30), ("hopeless", 12)), most=8)
    assert hard["nodes"] == again["nodes"] == 0 and easy["nodes"] >= 7
    assert hard["of_best"] > 0.9 and easy["of_best"] > 0.75 and again["of_best"] > 0.8
    assert 0 < hard["noticed_after"] < 5 and 0 < again["noticed_after"] < 12
    assert easy["noticed_after"] < 10 and hard["over_plain"] == 1 and easy["over_plain"] > 3


def test_a_step_on_paper_takes_its_graph_its_states_and_what_follows() -> None:
    clock = _Clock()
    engine = PaperEngine(clock)
    # Weights, 2 % and 64 states.
    assert engine.step_of(64, 0) == pytest.approx(15.5 * 1.02 + 0.065 * 63)
    assert engine.step_of(64, 3) > engine.step_of(64, 1) > engine.step_of(64, 0)
    accepted = acceptance("greedy")
    assert len(accepted) == 63 and (accepted[15:] <= accepted[14]).all()
    assert engine.rate(64, 3, accepted) == pytest.approx(
        64 * float(1 + accepted[:3].sum()) / engine.step_of(64, 3)
    )
    assert engine.best(64, accepted) >= engine.rate(64, 3, accepted)
