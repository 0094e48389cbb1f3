# SPDX-License-Identifier: Apache-2.0
"""The demo from start to end: prompts, one arm after another, comparison, report.

Engines run in this process, one at a time. Whatever vLLM writes goes to a log, which is kept
only if something fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weaver.demo import sources
from vllm_weaver.demo.arms import ARMS, ArmResult, Setting, best_gap, run_arm
from vllm_weaver.demo.machine import provenance
from vllm_weaver.demo.sources import Prompt, load_prompts

if TYPE_CHECKING:
    from rich.console import Console

MODELS = Path(__file__).parent / "models"

#: Gap of the two best log-probabilities below which rounding may choose either token.
TIE = {"float32": 1e-4, "bfloat16": 0.1}


class DemoError(Exception):
    """Why the demo cannot run, and what to do, in one line."""


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        prompts: number of prompts.
        tokens: most tokens to generate per prompt.
        budget: tree nodes without the root.
        arms: keys of :data:`~vllm_weaver.demo.arms.ARMS`.
        temperature: 0 is greedy.
        seed: of the sampling.
        shared_noise: build trees with the sampler's noise, where the temperature is above 0.
        models: directory with ``target``, ``drafter`` and ``adapter``.
        sources: directory of the source files that prompts are cut from.
    """

    prompts: int = 4
    tokens: int = 64
    budget: int = 63
    arms: tuple[str, ...] = tuple(ARMS)
    temperature: float = 0.0
    seed: int = 0
    shared_noise: bool = True
    models: Path = MODELS
    sources: Path = sources.PROMPTS

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            DemoError: names the option, its value and what to pass.
        """
        files = len(sources.available(self.sources))
        if files == 0:
            raise DemoError(f"no prompts in {self.sources}: it must hold *.py files")
        ranges = {"prompts": (1, files), "tokens": (1, 2048), "budget": (1, 255)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise DemoError(f"--{name} is {value}: pass a number from {low} to {high}")
        if not 0 <= self.temperature <= 2:
            raise DemoError(f"--temperature is {self.temperature}: pass a number from 0 to 2")
        for arm in self.arms:
            if arm not in ARMS:
                raise DemoError(f"--arms names {arm!r}: choose from {','.join(ARMS)}")
        if not self.arms:
            raise DemoError(f"--arms is empty: choose from {','.join(ARMS)}")
        needed = {"target"} | ({"drafter"} if set(self.arms) - {"ar"} else set())
        for part in sorted(needed | ({"adapter"} if "weaver" in self.arms else set())):
            if not (self.models / part / "config.json").exists():
                raise DemoError(f"{self.models} has no {part}/config.json: pass --models DIR")


@dataclass(frozen=True)
class Comparison:
    """One prompt's tokens of an arm against plain decoding's.

    Attributes:
        equal: all tokens are the same.
        first_difference: place of the first token that is not; -1 if none.
        gap: there, plain decoding's best log-probability less the arm's token's; None if it was
            not looked up.
    """

    equal: bool
    first_difference: int = -1
    gap: float | None = None

    def tie(self, limit: float) -> bool:
        """Whether the tokens part where rounding alone may decide."""
        return self.gap is not None and self.gap <= limit


@dataclass(frozen=True)
class Report:
    """Results of a run.

    Attributes:
        setting: what the arms shared.
        prompts: what was continued.
        results: one per arm, in order.
        comparisons: per arm, one per prompt; empty where plain decoding was not run.
    """

    setting: Setting
    prompts: list[Prompt]
    results: list[ArmResult]
    comparisons: dict[str, list[Comparison]]

    @property
    def lossless(self) -> bool:
        """No arm's tokens differ from plain decoding's, ties aside."""
        limit = TIE[self.setting.dtype]
        return all(c.equal or c.tie(limit) for cs in self.comparisons.values() for c in cs)

    def verdict(self, arm: str) -> str:
        """The table's last column."""
        comparisons = self.comparisons.get(arm)
        if not comparisons:
            return "not compared"
        if all(c.equal for c in comparisons):
            return "yes"
        limit = TIE[self.setting.dtype]
        ties = sum(not c.equal and c.tie(limit) for c in comparisons)
        other = sum(not c.equal for c in comparisons) - ties
        return f"no: {other} of {len(comparisons)} differ" if other else f"yes, {ties} at a tie"

    def to_dict(self) -> dict[str, Any]:
        """Everything that was measured, as JSON takes it."""
        return {
            **provenance(),
            "setting": {
                **asdict(self.setting),
                "models": "packaged" if self.setting.models == MODELS else str(self.setting.models),
                "dtype": self.setting.dtype,
            },
            "prompts": [
                {"name": p.name, "origin": p.origin, "tokens": len(p.token_ids)}
                for p in self.prompts
            ],
            "arms": [self._arm(result) for result in self.results],
        }

    def _arm(self, result: ArmResult) -> dict[str, Any]:
        comparisons = self.comparisons.get(result.arm, [])
        return {
            "arm": result.arm,
            "name": ARMS[result.arm],
            "tokens": result.tokens,
            "target_passes": result.target_passes,
            "pass_tokens": result.pass_tokens,
            "mean_accepted_length": result.mean_accepted_length,
            "seconds": result.seconds,
            "start_seconds": result.start_seconds,
            "equal_to_ar": all(c.equal for c in comparisons) if comparisons else None,
            "differences": [
                {"prompt": number, "token": c.first_difference, "gap": c.gap}
                for number, c in enumerate(comparisons)
                if not c.equal
            ],
            "token_ids": result.token_ids,
            "texts": result.texts,
        }


def prepare_process() -> str:
    """Set up this process for engines in it, before vLLM is imported.

    Returns:
        The device: ``cuda`` or ``cpu``.
    """
    # Read when PyTorch is first imported: on a CPU, more threads than one slow small models down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false"
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    from vllm_weaver import cpu

    cpu.enable()
    return "cpu"


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send what the process writes to its standard output and error, from C++ too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in enumerate(saved, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)


def run_demo(options: DemoOptions, console: Console) -> tuple[Report, Callable[[int], str]]:
    """Run all arms and compare them.

    Args:
        options: what to run.
        console: for progress; must not write to descriptors 1 and 2, which are redirected.

    Returns:
        The results, and a function from a token to its text.

    Raises:
        DemoError: an option is wrong, or an engine failed.
    """
    options.check()
    handle, name = tempfile.mkstemp(prefix="vllm-weaver-demo-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        with output_to(log):
            results = _run(options, console)
    except KeyboardInterrupt:
        log.unlink(missing_ok=True)
        raise
    except Exception as error:
        with open(log, "a", encoding="utf-8") as file:
            _print_traceback(file)
        raise DemoError(f"{_reason(error)} (details: {log})") from error
    log.unlink(missing_ok=True)
    return results


def _run(options: DemoOptions, console: Console) -> tuple[Report, Callable[[int], str]]:
    from vllm_weaver.demo.show import Progress

    with Progress(console, options) as progress:
        progress.say("loading vLLM")
        setting = Setting(
            models=options.models,
            budget=options.budget,
            tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
            shared_noise=options.shared_noise,
            device=prepare_process(),
        )
        from vllm.tokenizers import get_tokenizer

        tokenizer = get_tokenizer(str(options.models / "target"))
        prompts = load_prompts(options.prompts, tokenizer, options.sources)
        token_ids = [prompt.token_ids for prompt in prompts]
        results = []
        for arm in options.arms:
            progress.start(arm)
            results.append(run_arm(arm, setting, token_ids, progress.advance))
            progress.finish(results[-1])
        plain = next((result for result in results if result.arm == "ar"), None)
        comparisons = {}
        for result in results:
            if plain is not None and result is not plain:
                comparisons[result.arm] = compare(setting, token_ids, result, plain)
    report = Report(setting, prompts, results, comparisons)
    return report, lambda token: tokenizer.decode([token])


def compare(
    setting: Setting, prompts: Sequence[list[int]], result: ArmResult, plain: ArmResult
) -> list[Comparison]:
    """Tokens of an arm against plain decoding's, prompt by prompt."""
    comparisons = []
    for prompt, got, want in zip(prompts, result.token_ids, plain.token_ids, strict=True):
        if got == want:
            comparisons.append(Comparison(equal=True))
            continue
        pairs = zip(got, want, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want)))
        gap = None
        if setting.temperature == 0 and place < min(len(got), len(want)):
            gap = best_gap(setting, [*prompt, *want[:place]], got[place])
        comparisons.append(Comparison(False, place, gap))
    return comparisons


def write_json(report: Report, path: Path) -> None:
    """Write the results.

    Raises:
        DemoError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"--json {path}: {error.strerror or error}") from error


def _reason(error: Exception) -> str:
    """First line of what went wrong, out of the frame that vLLM's configuration puts around it."""
    details = getattr(error, "errors", None)
    if callable(details):
        return str(details()[0]["msg"]).removeprefix("Value error, ")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _print_traceback(file: Any) -> None:
    import traceback

    traceback.print_exc(file=file)
