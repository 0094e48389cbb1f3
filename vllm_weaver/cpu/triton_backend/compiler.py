# SPDX-License-Identifier: Apache-2.0
"""The compiler half, which Triton requires and the interpreter never calls."""

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """Supports the ``cpu`` target by interpretation only."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether ``target`` is ours."""
        return bool(target.backend == "cpu")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the cpu backend interprets: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _refuse
    get_codegen_implementation = _refuse
