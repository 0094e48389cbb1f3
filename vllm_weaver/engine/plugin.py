# SPDX-License-Identifier: Apache-2.0
"""Start-up hooks: how a configuration that asks for trees gets our worker and layers.

vLLM runs one hook per target architecture before it chooses the worker class. Ours first runs
the hook that was there, then acts only if ``additional_config`` has a ``weaver`` key. Without the
key nothing else of this package is imported.
"""

from __future__ import annotations

from typing import Any

SUPPORTED_VLLM = "0.32."
_FINAL_NAMES = ("ForCausalLM", "ForConditionalGeneration")


def install_hooks() -> None:
    """Wrap vLLM's per-architecture configuration hooks. Idempotent."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    known = {name for name in ModelRegistry.get_supported_archs() if name.endswith(_FINAL_NAMES)}
    for architecture in known | set(MODELS_CONFIG_MAP):
        base = MODELS_CONFIG_MAP.get(architecture)
        if not getattr(base, "_weaver_hook", False):
            MODELS_CONFIG_MAP[architecture] = _hook(base)


def _hook(base: type[Any] | None) -> type[Any]:
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    parent = base or VerifyAndUpdateConfig

    class WeaverConfigHook(parent):  # type: ignore[misc, valid-type]
        """The architecture's own hook, then activation of the plugin if it is asked for."""

        _weaver_hook = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            parent.verify_and_update_config(vllm_config)
            extra = vllm_config.additional_config
            if isinstance(extra, dict) and "weaver" in extra:
                activate(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            parent.verify_and_update_model_config(model_config)

    return WeaverConfigHook


def activate(vllm_config: Any) -> None:
    """Check a configuration and point it at our worker.

    Raises:
        WeaverConfigError: the configuration cannot be served; one line says why and what to do.
    """
    import vllm

    from vllm_weaver.engine.config import WeaverConfigError, check_combination, options_of

    options = options_of(vllm_config)
    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise WeaverConfigError(
            f"weaver: vLLM is {vllm.__version__}; this release of vllm-weaver works with "
            f"{SUPPORTED_VLLM}x: install it, or remove additional_config['weaver']"
        )
    check_combination(vllm_config, options)

    from vllm_weaver.engine import compat
    from vllm_weaver.engine.proposer import check_adapter

    broken = compat.broken_contracts()
    if broken:
        raise WeaverConfigError(
            "weaver: vLLM's internals differ from those this release was built for: "
            + "; ".join(broken)
        )
    if options.proposal == "weaver":
        check_adapter(vllm_config, options)
    compat.use_worker(vllm_config)
    compat.choose_tree_sizes(vllm_config, options.rows_per_step, options.adapt)
    if options.adapt:
        compat.use_scheduler(vllm_config)
    compat.choose_backends(vllm_config)
    compat.install_layers()
