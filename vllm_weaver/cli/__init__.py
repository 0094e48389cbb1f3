# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-weaver``. Importing this package imports nothing else."""


def main() -> None:
    """Entry point of the command; exits the process with 0, 1 (failed) or 2 (wrong usage)."""
    from vllm_weaver.cli.app import app

    app()
