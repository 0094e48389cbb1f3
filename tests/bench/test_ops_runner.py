# SPDX-License-Identifier: Apache-2.0
"""The runner of the kernels' checks and benchmarks, and the module that launches each kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.ops import __main__ as runner
from benchmarks.ops.top_p import count_rows, flat_logits, last_kept, peaked_logits, wrong_rows


def test_parts_end_as_they_end_and_the_rest_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python(code: str) -> tuple[str, ...]:
        return (sys.executable, "-c", code)

    parts = {
        "good": runner.Part(
            python("open(r'{out}', 'w').write('7'); print('a'); print('b')"), 30, 1
        ),
        "bad": runner.Part(python("raise SystemExit(3)"), 30),
        "slow": runner.Part(python("import time; print('here', flush=True); time.sleep(60)"), 2),
        "absent": runner.Part(("no-such-tool-at-all",), 30),
    }
    monkeypatch.setattr(runner, "PARTS", parts)
    summary = runner.run_all(list(parts), tmp_path, 1.0)
    status = {name: ended["status"] for name, ended in summary["parts"].items()}
    assert status["good"] == 0 and status["bad"] == 3 and status["slow"] == "out of time"
    assert "no-such-tool" in status["absent"]
    assert (tmp_path / "good.json").read_text() == "7"
    assert json.loads((tmp_path / "summary.json").read_text())["parts"] == summary["parts"]
    with tarfile.open(tmp_path / "logs.tgz") as archive:
        assert {f"logs/{name}.log" for name in parts} <= set(archive.getnames())
    printed = capsys.readouterr().out
    assert "== good: 0" in printed and "\nb\n" in printed and "\na\n" not in printed
    assert "here" in printed


def test_nothing_starts_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PARTS", {"one": runner.Part((sys.executable, "-c", ""), 30)})
    summary = runner.run_all(["one"], tmp_path, 0.01)
    assert summary["parts"] == {"one": {"status": "no time left"}}


def test_every_part_names_what_is_there() -> None:
    root = Path(runner.__file__).parents[2]
    for part in runner.PARTS.values():
        modules = [b for a, b in zip(part.command, part.command[1:], strict=False) if a == "-m"]
        assert all(
            (root / name.replace(".", "/")).with_suffix(".py").exists()
            for name in modules
            if name != "pytest"
        )
    assert all((root / file).exists() for file in runner.TESTS)


def test_each_kernel_launches_once_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ops.once", "--small", "--parts", "attention,step,weave"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(runner.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{x}: launched" for x in ("attention", "step", "weave")]


def sorted_top_p(logits: torch.Tensor) -> torch.Tensor:
    """A row's top-p set of 0.9, with all that tie with its last token."""
    return logits.masked_fill_(logits < last_kept(logits, 0.9)[:, :1], float("-inf"))


def test_rows_with_a_wrong_top_p_set_are_found() -> None:
    logits = peaked_logits(6, 64, "cpu")
    ordered, order = logits.sort(-1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - 0.9
    dropped[:, -1] = False
    masked = torch.empty_like(logits).scatter_(
        1, order, ordered.masked_fill(dropped, float("-inf"))
    )
    last = last_kept(logits, 0.9)
    assert not wrong_rows(logits, masked, last).any()
    # One token too many, one too few, and the whole row.
    first = dropped.sum(-1)
    masked[1, order[1, first[1] - 1]] = ordered[1, first[1] - 1]
    masked[3, order[3, -1]] = float("-inf")
    masked[4] = logits[4]
    assert wrong_rows(logits, masked, last).tolist() == [False, True, False, True, True, False]
    # Of tokens that tie any number may stay.
    ties = torch.tensor([[3.0, 1.0, 1.0, 1.0, -9.0]])
    for kept in ([0, 1], [0, 2, 3], [0, 1, 2, 3]):
        one = torch.full_like(ties, float("-inf"))
        one[0, kept] = ties[0, kept]
        assert not wrong_rows(ties, one, last_kept(ties, 0.8)).any()


def test_what_a_row_left_behind_shows_in_the_next_call() -> None:
    """A filter that reads the place's row of the call before is right where rows stay in order."""
    logits = peaked_logits(6, 64, "cpu")
    before: list[torch.Tensor] = []

    def late(given: torch.Tensor) -> torch.Tensor:
        before.append(given.clone())
        limit = last_kept(before[-2 if len(before) > 1 else -1], 0.9)[:, :1]
        return given.masked_fill_(given < limit, float("-inf"))

    found = count_rows({"sorted": sorted_top_p, "late": late}, logits, 4)
    assert found["wrong, sorted"] == 0 < found["wrong, late"] <= found["differ"] <= 24

    def fresh(given: torch.Tensor) -> torch.Tensor:
        before.clear()
        return late(given)

    found = count_rows({"sorted": sorted_top_p, "fresh": fresh}, logits, 4)
    assert set(found.values()) == {0}


def test_kept_ties_differ_without_being_wrong() -> None:
    logits = flat_logits(6, 4096, "cpu")
    last = last_kept(logits, 0.9)[:, :1]
    assert ((logits == last).sum(-1) > 4096 / 64).all()

    def one(given: torch.Tensor) -> torch.Tensor:
        """Of the tokens that tie the first one alone."""
        ties = given == last_kept(given, 0.9)[:, :1]
        return sorted_top_p(given).masked_fill_(ties & (ties.cumsum(-1) > 1), float("-inf"))

    found = count_rows({"all": sorted_top_p, "one": one}, logits, 2)
    assert found == {"wrong, all": 0, "wrong, one": 0, "differ": 12}
