# SPDX-License-Identifier: Apache-2.0
"""Generate in a process of its own: a JSON request on standard input, the answer on a line.

Request: ``runs``, each with ``engine``, the arguments of ``LLM``, ``prompts``, lists of tokens, and
``params``, the arguments of ``SamplingParams``, and ``tables``, whether to ask for the adapter's;
``ray``, whether to start a Ray cluster first. Answer: ``runs``, each with its ``tokens``, the
``stats`` of every worker that keeps some, of every rank the ``tables`` and, if the engine runs in
this process, the ``classes`` that do its work; ``loaded``, the modules of the package in this
process. Its line begins with ``ANSWER``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from typing import Any


def main() -> None:
    request = json.loads(sys.stdin.read())
    if request.get("ray"):
        import ray

        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
        )
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    answer: dict[str, Any] = {"runs": [answer_of(run) for run in request["runs"]]}
    answer["loaded"] = sorted(name for name in sys.modules if name.startswith("vllm_weaver"))
    print("ANSWER", json.dumps(answer), flush=True)
    if request.get("ray"):
        ray.shutdown()


def answer_of(run: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    gc.freeze()  # else each of a start's collections goes through all of vLLM's modules
    llm = LLM(**run["engine"])
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(**run["params"]), use_tqdm=False)
    answer: dict[str, Any] = {"tokens": [list(x.outputs[0].token_ids) for x in outputs]}
    if "weaver" in (run["engine"].get("additional_config") or {}):
        answer["stats"] = llm.collective_rpc("weaver_stats")
    if run.get("tables"):
        answer["tables"] = llm.collective_rpc(tables_of)
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        parts = [worker, worker.model_runner, *layers]
        parts += [layer.impl for layer in layers if hasattr(layer, "impl")]
        answer["classes"] = sorted({f"{type(x).__module__}.{type(x).__name__}" for x in parts})
    return answer


def tables_of(worker: Any) -> dict[str, Any]:
    """Shapes and digests of the adapter's tables as a rank would weave with them."""
    from vllm_weaver.engine.proposer import tables_of_all_ranks

    proposer = worker.model_runner.speculator.proposer
    vocabulary = proposer.vocabulary
    tables = tables_of_all_ranks(proposer.adapter, vocabulary, *vocabulary.tables())
    found = [tables.token_input, tables.pool_rows]
    return {
        "sharded": vocabulary.sharded,
        "held": [list(x.shape) for x in vocabulary.tables()],
        "shapes": [list(x.shape) for x in found],
        "digests": [digest_of(x) for x in found],
    }


def digest_of(table: Any) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(table.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
