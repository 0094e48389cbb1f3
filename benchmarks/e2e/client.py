# SPDX-License-Identifier: Apache-2.0
"""The other end of `engine.py`: starts engine processes and calls them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class EngineError(Exception):
    """An engine failed, died or took too long: one line, with the log's path.

    Attributes:
        engine: its name, where the error is one engine's.
    """

    def __init__(self, text: str, engine: str = ""):
        super().__init__(text)
        self.engine = engine


class EngineProcess:
    """One engine process. A call waits for its answer; `send` and `receive` do it in two parts."""

    def __init__(self, name: str, log: Path, environment: dict[str, str] | None = None):
        self.name = name
        self.log = log
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.e2e.engine", str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
        )
        self._buffer = b""

    def call(self, command: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Run one command.

        Raises:
            EngineError: it failed or took longer than `timeout` seconds.
        """
        self.send(command, **arguments)
        return self.receive(command, timeout)

    def send(self, command: str, **arguments: Any) -> None:
        """Start a command.

        Raises:
            EngineError: the process is dead.
        """
        assert self._process.stdin is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise EngineError(
                f"{self.name}: the engine's process is gone (log: {self.log})", self.name
            ) from error

    def receive(self, command: str, timeout: float) -> dict[str, Any]:
        """Answer of the command that was sent.

        Raises:
            EngineError: see :meth:`call`.
        """
        line = self._line(command, timeout)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(
                f"{self.name}: {command}: {answer['error']} (log: {self.log})", self.name
            )
        return answer["answer"]

    def _line(self, command: str, timeout: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                if left <= 0:
                    raise EngineError(
                        f"{self.name}: {command} took more than {timeout:.0f} s (log: {self.log})",
                        self.name,
                    )
                if selector.select(left):
                    part = os.read(descriptor, 1 << 20)
                    if not part:
                        raise EngineError(
                            f"{self.name}: the engine's process ended (log: {self.log})", self.name
                        )
                    self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def stop(self, timeout: float = 30) -> None:
        """Ask the process to end; end it if it does not."""
        process = self._process
        if process.poll() is None:
            try:
                self.send("stop")
                process.wait(timeout)
            except (EngineError, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
