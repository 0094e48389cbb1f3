# SPDX-License-Identifier: Apache-2.0
"""The engine in processes of its own: one, several ranks, several ranks of Ray, a server."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generate import digest_of
from processes import HERE, environment, generate
from running import BUDGET, COMMON, VOCAB_SIZE, Plain, greedy, tokens
from safetensors.torch import load_file

from vllm_weaver.adapter import load

pytestmark = pytest.mark.slow

PROMPTS = [tokens(n, 70) for n in (6, 19)]
COUNT = 10
TENSOR_PARALLEL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def weaver_run(models: dict[str, Path], target: str, **options: Any) -> dict[str, Any]:
    """A run of ``generate.py`` with the target's own proposer, ranks compared."""
    return {
        "engine": {
            **COMMON,
            "model": str(models[target]),
            "speculative_config": {
                "method": "dflash",
                "model": str(models[f"{target}-dflash8"]),
                "num_speculative_tokens": BUDGET,
            },
            "additional_config": {
                "weaver": {"adapter": str(models[f"{target}-weaver8"]), "check_ranks": True}
            },
            **options,
        },
        "prompts": PROMPTS,
        "params": {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True},
    }


def assert_ran(run: dict[str, Any], want: list[list[int]], ranks: int) -> None:
    """The tokens are plain decoding's, and every rank verified the same trees."""
    assert run["tokens"] == want
    assert len(run["stats"]) == ranks and run["stats"][0]["target_passes"] > 0
    assert all(stats == run["stats"][0] for stats in run["stats"])


@pytest.fixture(scope="module")
def want(plain_of: Callable[..., Plain]) -> dict[str, list[list[int]]]:
    """Plain decoding's tokens on one rank, in this process."""
    return {
        target: [x.tokens for x in plain_of(target).outputs(PROMPTS, greedy(COUNT))]
        for target in ("dense", "hybrid")
    }


def test_two_ranks_build_the_same_trees_and_give_the_tokens_of_one(
    tiny_models: dict[str, Path], want: dict[str, list[list[int]]]
) -> None:
    """In a separate engine process, whose workers are processes as well."""
    run = weaver_run(tiny_models, "hybrid", tensor_parallel_size=2) | {"tables": True}
    # Functions go to the workers as they are.
    answer = generate({"runs": [run]}, VLLM_ALLOW_INSECURE_SERIALIZATION="1", **TENSOR_PARALLEL)
    assert_ran(answer["runs"][0], want["hybrid"], ranks=2)
    _assert_whole_tables(answer["runs"][0]["tables"], tiny_models)


def _assert_whole_tables(found: list[dict[str, Any]], models: dict[str, Path]) -> None:
    """Every rank has the adapter's tables of all tokens, of which it made its share."""
    adapter = load(models["hybrid-weaver8"], dtype=torch.float32)
    (file,) = models["hybrid"].glob("*.safetensors")
    weights = load_file(file)
    names = [name for name in weights if "embed_tokens" in name or "lm_head" in name]
    embed, head = (weights[name].float() for name in sorted(names, key=lambda x: "lm_head" in x))
    whole = adapter.precompute(embed, head)
    digests = [digest_of(x) for x in (whole.token_input, whole.pool_rows)]
    for rank in found:
        assert rank["sharded"] and [rows for rows, _ in rank["held"]] == [VOCAB_SIZE // 2] * 2
        assert rank["shapes"] == [list(whole.token_input.shape), list(whole.pool_rows.shape)]
        assert rank["digests"] == digests


def test_two_ranks_of_ray_give_the_tokens_of_one(
    tiny_models: dict[str, Path], want: dict[str, list[list[int]]]
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: install the extra 'ray'")
    run = weaver_run(
        tiny_models, "dense", tensor_parallel_size=2, distributed_executor_backend="ray"
    )
    path = os.pathsep.join([str(HERE / "ray_site"), str(HERE), os.environ.get("PYTHONPATH", "")])
    answer = generate(
        {"runs": [run], "ray": True},
        PYTHONPATH=path,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
        RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1",
        **TENSOR_PARALLEL,
    )
    assert_ran(answer["runs"][0], want["dense"], ranks=2)


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of ``vllm serve`` with trees, as a user starts it."""
    run = weaver_run(tiny_models, "dense")["engine"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        # The "vllm" command reads the version of a distribution that a CPU build lacks.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", run["model"]),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
        *("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(24 << 20)),
        *("--speculative-config", json.dumps(run["speculative_config"])),
        *("--additional-config", json.dumps(run["additional_config"])),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"not ready: {log.read_text()[-6000:]}")


def test_server_streams_plain_decodings_text(server: str, plain_of: Callable[..., Plain]) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    prompt = "def build(self, tree):"
    tokenizer = plain_of("dense").engine.llm.get_tokenizer()
    want = plain_of("dense").outputs([tokenizer.encode(prompt)], greedy(COUNT))[0]
    stream = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=COUNT,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert len(chunks) > 1 and chunks[-1].finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks) == want.text
    whole = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, temperature=0.7, top_p=0.9, seed=1
    )
    assert 0 < whole.usage.completion_tokens <= 6
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as page:
        metrics = page.read().decode()
    for series in ("vllm:spec_decode_num_drafts_total", "vllm_weaver:target_passes_total"):
        assert series in metrics
