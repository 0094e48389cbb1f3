# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo that need no engine, and the files that ship with it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_weaver.cli.app import app
from vllm_weaver.cli.inspect import inspect_adapter
from vllm_weaver.demo import run as demo_run
from vllm_weaver.demo.arms import ArmResult, Setting
from vllm_weaver.demo.run import MODELS, Comparison, Report, compare, output_to, write_json
from vllm_weaver.demo.show import show_report, typical
from vllm_weaver.demo.sources import PROMPTS, Prompt, available, load_prompts


class ByteTokenizer:
    """One token per byte."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def result(arm: str, *token_ids: list[int], passes: int = 2) -> ArmResult:
    texts = ["x" * len(ids) for ids in token_ids]
    return ArmResult(arm, list(token_ids), texts, passes, 3 * passes, 1.0, 1.0)


def setting(**options: object) -> Setting:
    return Setting(Path("models"), budget=4, tokens=4, **options)  # type: ignore[arg-type]


class TestPrompts:
    def test_are_whole_lines_within_the_limit(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("import os\nimport sys\nimport re\n")
        (prompt,) = load_prompts(1, ByteTokenizer(), tmp_path, max_tokens=25)
        assert prompt.text == "import os\nimport sys\n"
        assert prompt.token_ids == list(prompt.text.encode())

    def test_leave_the_line_of_origin_out(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("# From x 1.0 (MIT): a.py\nimport os")
        (prompt,) = load_prompts(1, ByteTokenizer(), tmp_path)
        assert (prompt.origin, prompt.text) == ("x 1.0 (MIT): a.py", "import os")

    def test_are_never_empty_even_if_the_first_line_is_long(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("x" * 50)
        (prompt,) = load_prompts(1, ByteTokenizer(), tmp_path, max_tokens=20)
        assert prompt.text == "x" * 20


class TestComparison:
    def test_finds_the_first_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def gap(setting: Setting, prompt: list[int], token: int) -> float:
            asked.append((prompt, token))
            return 0.5

        monkeypatch.setattr(demo_run, "best_gap", gap)
        plain, tree = result("ar", [1, 2, 3], [4, 5]), result("weaver", [1, 2, 3], [4, 6])
        found = compare(setting(), [[7], [8, 9]], tree, plain)
        assert found == [Comparison(True), Comparison(False, 1, 0.5)]
        assert asked == [([8, 9, 4], 6)]

    def test_a_shorter_output_differs_without_a_gap(self) -> None:
        found = compare(setting(), [[7]], result("weaver", [1, 2]), result("ar", [1, 2, 3]))
        assert found == [Comparison(False, 2, None)]

    def test_sampling_knows_no_ties(self) -> None:
        arms = result("weaver", [1, 9]), result("ar", [1, 2])
        assert compare(setting(temperature=1.0), [[7]], *arms) == [Comparison(False, 1, None)]

    @pytest.mark.parametrize(
        ("comparisons", "verdict", "lossless"),
        [
            ([Comparison(True), Comparison(True)], "yes", True),
            ([Comparison(True), Comparison(False, 3, 1e-6)], "yes, 1 at a tie", True),
            ([Comparison(True), Comparison(False, 3, 0.5)], "no: 1 of 2 differ", False),
            ([Comparison(True), Comparison(False, 3, None)], "no: 1 of 2 differ", False),
            ([], "not compared", True),
        ],
    )
    def test_verdict(self, comparisons: list[Comparison], verdict: str, lossless: bool) -> None:
        report = Report(setting(), [], [result("weaver")], {"weaver": comparisons})
        assert report.verdict("weaver") == verdict
        assert report.lossless is lossless


def test_differences_are_named_under_the_table(tmp_path: Path) -> None:
    prompt = Prompt("a.py", "", [7], "import os\n")
    results = [result("ar", [1, 2]), result("weaver", [1, 3])]
    report = Report(setting(), [prompt], results, {"weaver": [Comparison(False, 1, 0.25)]})
    console = Console(file=io.StringIO(), width=100)
    show_report(console, report, str)
    assert "no: 1 of 1 differ" in console.file.getvalue()
    assert "a.py: differs from token 1 on" in console.file.getvalue()
    write_json(report, tmp_path / "out.json")
    assert '"gap": 0.25' in (tmp_path / "out.json").read_text()
    with pytest.raises(demo_run.DemoError, match="nowhere"):
        write_json(report, tmp_path / "nowhere" / "out.json")


def test_the_tree_shown_is_the_one_nearest_to_the_mean() -> None:
    trees = [{"path": [0] * length} for length in (1, 7, 4, 4)]
    assert typical(trees, 4.4) is trees[2]


def test_what_the_process_writes_goes_to_the_log_and_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyError), output_to(log):
        os.write(1, b"from C\n")
        os.write(2, b"an error\n")
        raise KeyError
    os.write(1, b"visible\n")
    assert log.read_text() == "from C\nan error\n"
    assert capfd.readouterr().out == "visible\n"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--prompts", "3"], "--prompts is 3: pass a number from 1 to 2"),
        (["--prompts", "0"], "--prompts is 0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--budget", "256"], "--budget is 256: pass a number from 1 to 255"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--arms", "ar,eagle"], "'eagle': choose from ar,chain,ddtree,weaver"),
        (["--arms", ","], "--arms is empty"),
        (["--models", "nowhere"], "has no "),
        (["--sources", "nowhere"], "no prompts in "),
    ],
)
def test_wrong_options_are_one_line(
    demo_models: Path, demo_sources: Path, options: list[str], part: str
) -> None:
    good = ["--models", str(demo_models), "--sources", str(demo_sources), "--prompts", "1"]
    outcome = CliRunner().invoke(app, ["demo", *good, *options])
    assert outcome.exit_code == 1
    (line,) = outcome.stderr.splitlines()
    assert part in line


class TestShippedFiles:
    def test_the_models_fit_each_other(self) -> None:
        facts = inspect_adapter(str(MODELS / "adapter"), MODELS / "target", MODELS / "drafter")
        assert facts["depth"] == 15

    def test_the_weights_stay_under_20_mb(self) -> None:
        weights = list(MODELS.rglob("*.safetensors"))
        assert len(weights) == 3
        assert sum(file.stat().st_size for file in weights) < 20e6

    def test_every_prompt_says_where_it_is_from(self) -> None:
        prompts = load_prompts(100, ByteTokenizer())
        assert len(prompts) == len(available(PROMPTS)) >= 4
        assert all("(" in prompt.origin for prompt in prompts)
