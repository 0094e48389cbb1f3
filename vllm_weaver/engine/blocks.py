# SPDX-License-Identifier: Apache-2.0
"""Size and layout of a hybrid target's cache blocks.

vLLM sizes the blocks before it asks for the layers' cache specs: a page of attention must hold one
recurrent state, with a convolution row for each draft, and a group has as many layers as the
smallest kind, which is the drafter. Trees leave no rows in the state, and where the user asks for a
layout whose layers lie side by side in a block, a block holds a token's rows in all attention
layers, the drafter's too, or as many states as a group of plain decoding.

Everything here acts through methods of the worker that vLLM asks, so an engine without trees is
not touched.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_weaver.engine import compat

logger = compat.init_logger(__name__)

#: Recurrent states that lie side by side start at multiples of this, in bytes.
_STATE_ALIGNMENT = 256


def layouts_for_trees(vllm_config: Any, supported: list[str]) -> list[str]:
    """The layouts to choose from: the asked one, if it puts a block's layers side by side.

    Args:
        vllm_config: the engine's configuration, with its layers.
        supported: names of layouts that every attention backend takes, the best first.
    """
    return _side_by_side(vllm_config, supported) or supported


def specs_for_trees(
    vllm_config: Any, wanted: int, supported: list[str], specs: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Cache specs of all layers, in blocks that fit states without room for drafts.

    Args:
        vllm_config: the engine's configuration; its cache section gets the sizes.
        wanted: block size before vLLM fitted it to states, in tokens.
        supported: names of layouts that every attention backend takes.
        specs: asks the layers, which read the cache section.
    """
    if not vllm_config.model_config.is_hybrid:
        return specs()
    _fit_blocks(vllm_config, wanted)
    found = specs()
    if not _side_by_side(vllm_config, supported):
        return found
    cache = vllm_config.cache_config
    state = max(x.real_page_size_bytes for x in found.values() if isinstance(x, MambaSpec))
    state = _round_up(state, _STATE_ALIGNMENT)
    layers = vllm_config.compilation_config.static_forward_context
    drafts = {name for name in found if compat.is_draft_layer(layers[name])}
    least = block_tokens(found, drafts, state)
    aligned = cache.mamba_cache_mode == "align"
    if aligned:
        # A path crosses one boundary at most.
        least = max(least, vllm_config.num_speculative_tokens + 1)
    base = wanted if cache.user_specified_block_size else 1
    cache.block_size = _supported_size(vllm_config, base, least)
    if aligned:
        cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = state
    logger.info(
        "vllm-weaver: cache blocks of %d tokens, the drafter's rows beside the target's",
        cache.block_size,
    )
    return specs()


def block_tokens(specs: dict[str, Any], drafts: Iterable[str], state: int) -> int:
    """Tokens whose rows in all attention layers fill as much as a group's recurrent states.

    Args:
        specs: cache spec of each layer.
        drafts: names of the drafter's layers.
        state: bytes of one layer's state.
    """
    full = {name: x for name, x in specs.items() if isinstance(x, FullAttentionSpec)}
    states = sum(isinstance(x, MambaSpec) for x in specs.values())
    # Plain decoding's groups have as many layers as there are of the rarer kind.
    groups = math.ceil(states / min(states, len(full.keys() - set(drafts))))
    per_token = sum(x.page_size_bytes // x.block_size for x in full.values())
    return math.ceil(math.ceil(states / groups) * state / per_token)


def requested_layout() -> str | None:
    """The layout that the user has set, if any."""
    return envs.VLLM_KV_CACHE_LAYOUT


def _fit_blocks(vllm_config: Any, wanted: int) -> None:
    """Let vLLM size blocks and pages anew, for states as they are without speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    plain.cache_config.block_size = wanted
    plain.cache_config.mamba_page_size_padded = None
    current_platform.update_block_size_for_backend(plain)


def _backends(vllm_config: Any) -> list[Any]:
    """Attention backends of the layers, the recurrent ones left out."""
    return [x for x in get_current_attn_backends(vllm_config) if not x.is_ssm()]


def _takes_any_multiple(backend: Any) -> bool:
    """Whether a backend's kernels take blocks of any multiple of some size."""
    sizes = backend.get_supported_kernel_block_sizes()
    return any(isinstance(size, MultipleOf) for size in sizes)


def _side_by_side(vllm_config: Any, supported: list[str]) -> list[str]:
    """The asked layout if it has a block's layers side by side and all attention takes it whole."""
    layouts = [KVCacheLayout[x] for x in supported if x == requested_layout()]
    if not layouts or not vllm_config.model_config.is_hybrid:
        return []
    with set_current_vllm_config(vllm_config):
        whole = all(_takes_any_multiple(x) for x in _backends(vllm_config))
    return [x.name for x in layouts if whole and x.is_block_outermost and x.is_block_compact]


def _supported_size(vllm_config: Any, base: int, least: int) -> int:
    """The smallest multiple of ``base`` from ``least`` on that all attention backends take."""
    with set_current_vllm_config(vllm_config):
        backends = _backends(vllm_config)
        size = _round_up(least, base)
        while not all(backend.supports_block_size(size) for backend in backends):
            size += base
    return size


def _round_up(number: int, base: int) -> int:
    return math.ceil(number / base) * base
