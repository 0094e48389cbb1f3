# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in training and measuring, and packages that only they need.

Knows nothing of models or data.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXTRA = "pip install 'vllm-weaver[train]'"


class TrainError(Exception):
    """Training or measuring cannot go on: one line with what, why and what to do."""


class RecipeError(TrainError):
    """A recipe that cannot be right."""


class DataError(TrainError):
    """Data or hidden states that do not fit, or cannot be read."""


class SaveError(TrainError):
    """A checkpoint could not be written; the last good one is still there."""


def require(module: str, purpose: str) -> Any:
    """Import an optional package.

    Raises:
        TrainError: it is not installed; says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).split(".")[0]
        raise TrainError(
            f"{purpose} needs the package {missing}, which is not installed: {_EXTRA}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
