# SPDX-License-Identifier: Apache-2.0
"""One arm's engine in a process of its own: `python -m benchmarks.e2e.engine`.

Reads one JSON command per line from standard input and answers each with one line on the
descriptor that was standard output; everything that vLLM prints goes to the log file named first.
Between commands the engine stands still, with its requests running, so that engines of several
processes can take turns on one device.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .serving import StepLog

Answer = dict[str, Any]


class Decoding:
    """A batch of requests in the engine, advanced a part at a time.

    A step's time is the interval between two arrivals of outputs, so work that is in flight on the
    device is counted once. Steps count from the moment when every request has its first token
    until the first request ends: then the batch is the one that was asked for.
    """

    def __init__(
        self,
        engine: Any,
        prompts: list[list[int]],
        tokens: int,
        temperature: float,
        seed: int,
        tag: str,
    ):
        from .serving import add_request, parameters

        self.engine = engine
        self.tokens = tokens
        self.names = [f"{tag}-{number}" for number in range(len(prompts))]
        self.outputs: dict[str, list[int]] = {name: [] for name in self.names}
        self.passes = dict.fromkeys(self.names, 0)
        self.window_tokens = dict.fromkeys(self.names, 0)
        self.steps: list[tuple[float, int, int]] = []
        self.closed = False
        for number, (name, ids) in enumerate(zip(self.names, prompts, strict=True)):
            sampling = parameters(tokens, temperature=temperature, seed=seed + number)
            add_request(engine, name, ids, sampling)
        start = time.perf_counter()
        while not all(self.outputs.values()) and not self.closed:
            self._step()
        self.prefill_seconds = time.perf_counter() - start
        self.at_once = not self.closed

    def _step(self) -> dict[str, int]:
        """One engine step: tokens by request that it brought."""
        arrived: dict[str, int] = {}
        for result in self.engine.step():
            ids = result.outputs[0].token_ids
            if ids:
                self.outputs[result.request_id] += ids
                arrived[result.request_id] = len(ids)
            if result.finished:
                self.closed = True
        return arrived

    def advance(self, share: float, discard: int) -> Answer:
        """Decode until the requests have `share` of their tokens on average.

        The first `discard` steps, in which the pipeline fills again, are not counted.
        """
        target = share * self.tokens * len(self.names)
        last: float | None = None
        first = len(self.steps)
        skipped = 0
        while not self.closed and sum(map(len, self.outputs.values())) < target:
            arrived = self._step()
            now = time.perf_counter()
            if not arrived:
                continue
            if self.closed:
                break  # its batch was no longer whole
            if skipped < discard:
                skipped += 1
            else:
                if last is not None:
                    self.steps.append((now - last, sum(arrived.values()), len(arrived)))
                for name, count in arrived.items():
                    self.passes[name] += 1
                    self.window_tokens[name] += count
            last = now
        synchronize()
        new = self.steps[first:]
        return {
            "steps": len(new),
            "seconds": sum(step[0] for step in new),
            "tokens": sum(step[1] for step in new),
            "closed": self.closed,
        }

    def finish(self, complete: bool) -> Answer:
        """End the requests, after their last token if `complete`, and say what came out."""
        while complete and self.engine.has_unfinished_requests():
            self._step()
        left = [name for name in self.names if len(self.outputs[name]) < self.tokens]
        if left:
            self.engine.abort_request(left)
        while self.engine.has_unfinished_requests():
            self._step()
        return {
            "prefill_seconds": self.prefill_seconds,
            "at_once": self.at_once,
            "step_seconds": [step[0] for step in self.steps],
            "step_tokens": [step[1] for step in self.steps],
            "step_requests": [step[2] for step in self.steps],
            "request_passes": [self.passes[name] for name in self.names],
            "request_tokens": [self.window_tokens[name] for name in self.names],
            "outputs": [self.outputs[name][: self.tokens] for name in self.names],
        }


class Server:
    """Commands by name; each takes and returns what JSON takes."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.decoding: Decoding | None = None
        self.count = 0
        self.ranges: list[str] = []
        self.log: StepLog | None = None

    def hold(self, options: dict[str, Any], sockets: str) -> Answer:
        """Load the target's weights and hand them to engines, for as long as this process runs."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.weight_cache.daemon import WeightCacheDaemon

        import benchmarks.expand.loader  # noqa: F401

        begin = time.perf_counter()
        config = EngineArgs(**options).create_engine_config()
        meeting = f"file://{sockets}/ranks"
        daemon = WeightCacheDaemon(config, 0, 0, meeting, sockets)
        daemon.load_model()
        threading.Thread(target=daemon.serve_forever, daemon=True).start()
        return {"seconds": time.perf_counter() - begin}

    def start(self, options: dict[str, Any], plain_cpu: bool) -> Answer:
        """Start the engine. `plain_cpu`: with the float32 core that vLLM lacks on a CPU."""
        begin = time.perf_counter()
        from vllm import LLM

        imported = time.perf_counter()
        core: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if plain_cpu:
            from vllm_weaver.demo.plain_core import plain_core

            core = plain_core()
        with core:
            self.llm = LLM(**options)
        ready = time.perf_counter()
        call = self.llm.collective_rpc
        return {
            "import_seconds": imported - begin,
            "start_seconds": ready - imported,
            "memory": call("benchmark_memory")[0],
            "graphs": call("benchmark_graphs")[0],
        }

    def begin(self, prompts: list[list[int]], tokens: int, temperature: float, seed: int) -> Answer:
        """Add the requests and run their prompts."""
        if self.decoding is not None:
            self.finish(complete=False)
        self.count += 1
        self.decoding = Decoding(
            self.llm.llm_engine, prompts, tokens, temperature, seed, str(self.count)
        )
        synchronize()
        return {"prefill_seconds": self.decoding.prefill_seconds}

    def advance(self, share: float, discard: int) -> Answer:
        """See :class:`Decoding`."""
        assert self.decoding is not None
        return self.decoding.advance(share, discard)

    def finish(self, complete: bool) -> Answer:
        """See :class:`Decoding`."""
        assert self.decoding is not None
        found = self.decoding.finish(complete)
        self.decoding = None
        return found

    def warm(self, batches: list[int], temperature: float, vocab: int) -> Answer:
        """Decode a little with each batch, so that no kernel is compiled while timed."""
        start = time.perf_counter()
        for batch in batches:
            prompts = [[(7 * i + j) % vocab for j in range(32)] for i in range(batch)]
            self.begin(prompts, 40, temperature, 0)
            self.advance(1.0, 0)
            self.finish(False)
        return {"seconds": time.perf_counter() - start}

    def doubts(
        self,
        prompts: list[list[int]],
        tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ask: list[list[int]] | None = None,
    ) -> Answer:
        """Texts with scores at each place, as [token, value]: logits, of AR's engine.

        Of the 20 best tokens, or, where given, of the tokens that `ask` names for each request; of
        the token that was taken besides.
        """
        from vllm.sampling_params import RequestOutputKind

        from .serving import parameters

        shown = [{"logprob_token_ids": each} for each in ask] if ask else [{"logprobs": 20}]
        sampling = [
            parameters(
                tokens,
                temperature=temperature,
                seed=seed + number,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **shown[number % len(shown)],
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        results = [r.outputs[0] for r in self.llm.generate(inputs, sampling, use_tqdm=False)]
        return {
            "texts": [list(result.token_ids) for result in results],
            "scores": [
                [[[token, entry.logprob] for token, entry in place.items()] for place in r.logprobs]
                for r in results
            ],
        }

    def serve(self, requests: list[dict[str, Any]], fresh: bool = False) -> Answer:
        """Run requests to their ends: see :func:`benchmarks.e2e.serving.serve`.

        `fresh`: with an empty prefix cache.
        """
        from .serving import StepLog, serve

        if self.decoding is not None:
            self.finish(complete=False)
        engine = self.llm.llm_engine
        # With asynchronous scheduling a step may still hold the last requests' blocks.
        tries = 8 if fresh else 0
        while tries and not self.llm.reset_prefix_cache():
            engine.step()
            tries -= 1
        if fresh and not tries:
            raise RuntimeError("the prefix cache cannot be emptied")
        if self.log is None:
            self.log = StepLog(engine.engine_core.engine_core.scheduler)
        self.count += 1
        return serve(engine, requests, str(self.count), self.log)

    def profile(self, steps: int, trace: str) -> Answer:
        """Trace some steps of the decoding in progress into a file of Chrome's format."""
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        assert self.decoding is not None
        if not self.ranges:
            self.ranges = self.llm.collective_rpc("benchmark_ranges")[0]
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        done = tokens = 0
        synchronize()
        with profile(activities=activities) as profiler:
            while done < steps and not self.decoding.closed:
                with record_function("benchmark.step"):
                    arrived = self.decoding._step()
                done += bool(arrived)
                tokens += sum(arrived.values())
            synchronize()
        profiler.export_chrome_trace(trace)
        return {"steps": done, "tokens": tokens, "ranges": self.ranges}

    def memory(self) -> Answer:
        """Memory now."""
        return self.llm.collective_rpc("benchmark_memory")[0]

    def stats(self) -> Answer:
        """The plugin's own counters, reset; only for an engine with the plugin."""
        return self.llm.collective_rpc("weaver_stats", args=(True,))[0]


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def redirect(log: Path) -> Any:
    """Send standard output and error to `log`; returns a file on the old standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return answers


def end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever it is doing: it holds a device."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent(os.getppid())
    answers = redirect(Path(sys.argv[1]))
    from vllm_weaver.demo.run import prepare_process

    os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    prepare_process()
    server = Server()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        if name == "stop":
            break
        try:
            answer = {"answer": getattr(server, name)(**command)}
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = {"error": f"{type(error).__name__}: {first}"}
        answers.write(json.dumps(answer) + "\n")
    server.llm = None
    gc.collect()
    answers.close()


if __name__ == "__main__":
    main()
