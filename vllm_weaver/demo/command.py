# SPDX-License-Identifier: Apache-2.0
"""The demo as a command: a console that survives the redirection of vLLM's output, and files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

from vllm_weaver.demo.run import DemoOptions, run_demo, write_json
from vllm_weaver.demo.show import show_header, show_report

_PLAIN_WIDTH = 100


def open_console() -> Console:
    """A console on a copy of standard output, as wide as the terminal."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return Console(file=sys.stdout, width=_PLAIN_WIDTH, highlight=False)
    terminal = os.isatty(descriptor)
    width = os.get_terminal_size(descriptor).columns if terminal else _PLAIN_WIDTH
    file = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", buffering=1)
    return Console(file=file, width=width or _PLAIN_WIDTH, highlight=False)


def run_command(options: DemoOptions, json_path: Path | None) -> bool:
    """Run the demo and print it.

    Args:
        options: what to run.
        json_path: where to write the results, if anywhere.

    Returns:
        Whether all tokens equal plain decoding's.

    Raises:
        DemoError: see :func:`~vllm_weaver.demo.run.run_demo`.
    """
    console = open_console()
    options.check()
    show_header(console, options)
    report, token_text = run_demo(options, console)
    show_report(console, report, token_text)
    if json_path is not None:
        write_json(report, json_path)
        console.print(f"written: {json_path}", style="dim")
    return report.lossless
