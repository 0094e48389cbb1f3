# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: everything here runs inside vLLM's processes.

:func:`register` is the ``vllm.general_plugins`` entry point. It only adds start-up hooks; no
class of vLLM is replaced until a configuration asks for it with
``additional_config={"weaver": {...}}``.
"""


def register() -> None:
    """Entry point of the plugin group ``vllm.general_plugins``. Idempotent and cheap."""
    from vllm_weaver.engine.plugin import install_hooks

    install_hooks()
