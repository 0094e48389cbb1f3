# SPDX-License-Identifier: Apache-2.0
"""Hidden states asked of a server while training: the protocol of vLLM's extraction connector.

The server here speaks it as speculators 0.9 and vLLM 0.32 do: `/v1/models`; `/v1/completions` with
token ids, one token and `return_token_ids`; the answer names a safetensors file, which is written
behind a locked `.lock` file after the answer.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_data import MakeRecipe, with_data
from nano_runs import weights
from safetensors.torch import load_file, save_file

from vllm_weaver.train.data import Document, HiddenStateData, Layout
from vllm_weaver.train.errors import DataError
from vllm_weaver.train.plan import dry_run
from vllm_weaver.train.processes import Processes
from vllm_weaver.train.recipe import DataRecipe
from vllm_weaver.train.trainer import Trainer, train

LAYOUT = Layout(width=256, vocab=4096, layer_ids=(2, 4, 6, 7), last_layer=8)


class Server:
    """An extraction server over the hidden states that are there; `fault` makes it go wrong."""

    def __init__(self, data: Path, storage: Path) -> None:
        import datasets

        self.rows = list(datasets.load_from_disk(str(data)).with_format(None)["input_ids"])
        self.data, self.storage = data, storage
        self.asked: list[int] = []
        self.fault = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer({"object": "list", "data": [{"id": "nano", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions" and body["model"] == "nano"
                assert body["max_tokens"] == 1 and body["return_token_ids"] is True
                self.answer(*outer.complete(body["prompt"]))

            def answer(self, content: dict[str, Any], status: int = 200) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def complete(self, prompt: list[int]) -> tuple[dict[str, Any], int]:
        row = self.rows.index(prompt)
        self.asked.append(row)
        if self.fault == "refuses":
            return {"error": {"message": "This model's maximum context length is 16 tokens"}}, 400
        tensors = load_file(self.data / "hidden_states" / f"hs_{row}.safetensors")
        if self.fault == "nan":
            tensors["hidden_states"][3] = float("nan")
        if self.fault == "layers":
            tensors["hidden_states"] = tensors["hidden_states"][:, 1:].contiguous()
        if self.fault == "width":
            tensors["hidden_states"] = tensors["hidden_states"][..., :64].contiguous()
        file = self.storage / f"generated_{row}_{len(self.asked)}.safetensors"
        if self.fault != "no file":
            lock = open(f"{file}.lock", "w")  # noqa: SIM115 - held until the file is written
            fcntl.flock(lock, fcntl.LOCK_EX)

            def write() -> None:
                time.sleep(0.1)
                save_file(tensors, file)
                lock.close()

            threading.Thread(target=write).start()
        given = prompt[:-1] if self.fault == "tokens" else prompt
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": given}
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "nano"}
        answer |= {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}}
        if self.fault == "plain server":
            del answer["kv_transfer_params"]
        return answer, 200


@pytest.fixture
def server(made_data: Path, tmp_path: Path) -> Iterator[Server]:
    storage = tmp_path / "shared"
    storage.mkdir()
    running = Server(made_data, storage)
    yield running
    running.close()


def _open(data: Path, **settings: Any) -> HiddenStateData:
    return HiddenStateData(DataRecipe(path=str(data), workers=0, **settings), LAYOUT)


def test_missing_states_are_asked_of_a_server(data: Path, server: Server, tmp_path: Path) -> None:
    expected = _open(data)
    states = tmp_path / "states"
    states.mkdir()
    (data / "hidden_states" / "hs_5.safetensors").rename(states / "hs_5.safetensors")
    opened = _open(data, hidden_states=str(states), on_missing="generate", endpoint=server.endpoint)
    assert opened.check_server(range(6)) == "nano" and opened.check_server([5]) is None
    document, same = opened[4], expected[4]
    assert isinstance(document, Document) and isinstance(same, Document)
    assert torch.equal(document.auxiliary_Lx, same.auxiliary_Lx)
    assert torch.equal(document.last_Ld, same.last_Ld)
    assert isinstance(opened[5], Document)
    assert server.asked == [4]
    # What was handed over is gone, and its lock.
    assert not list(server.storage.iterdir())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refuses", "gave no hidden states .*maximum context length is 16"),
        ("plain server", "Response missing kv_transfer_params.*start the server for extraction"),
        ("tokens", "Prompt token IDs mismatch"),
        ("no file", "Failed to load hidden states"),
        ("nan", "non-finite values"),
        ("layers", r"holds 4 layers, not the 5 .*extract layers \[2, 4, 6, 7, 8\]"),
        ("width", "states are 64 wide but the target is 256"),
    ],
)
def test_servers_that_go_wrong_are_named_in_one_line(
    fault: str, said: str, data: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import speculators.data_generation.vllm_client as client

    monkeypatch.setattr(client, "RETRY_BACKOFF_BASE", 0)
    (data / "hidden_states" / "hs_3.safetensors").unlink()
    server.fault = fault
    opened = _open(data, on_missing="generate", endpoint=server.endpoint)
    with pytest.raises(DataError, match=said) as caught:
        opened[3]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    server.fault = ""
    assert isinstance(opened[3], Document)


def test_server_that_is_not_there_is_named_before_the_first_step(
    make_recipe: MakeRecipe, data: Path
) -> None:
    (data / "hidden_states" / "hs_4.safetensors").unlink()
    recipe = with_data(
        make_recipe(), path=str(data), on_missing="generate", endpoint="http://127.0.0.1:1/v1"
    )
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/v1: no vLLM server.*refused.*1 rows"):
        train(recipe)
    assert not Path(recipe.output).exists()


def test_training_online_is_training_from_files(
    make_recipe: MakeRecipe, data: Path, server: Server
) -> None:
    """Half of the rows from a server, the rest from files, read in a process of its own."""
    settings = {"train__steps": 2, "train__documents": 1}
    offline = make_recipe("offline", **settings)
    train(offline)
    for row in range(0, 12, 2):
        (data / "hidden_states" / f"hs_{row}.safetensors").unlink()
    online = with_data(
        make_recipe("online", **settings),
        path=str(data),
        on_missing="generate",
        endpoint=server.endpoint,
        workers=1,
    )
    facts = dry_run(Trainer(online, Processes(0, 1, torch.device("cpu"))))
    assert facts["server for extraction"].endswith("serving nano")
    train(online)
    assert server.asked and all(row % 2 == 0 for row in server.asked)
    mine, theirs = weights(online), weights(offline)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
