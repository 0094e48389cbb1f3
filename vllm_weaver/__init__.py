# SPDX-License-Identifier: Apache-2.0
"""Lossless tree speculative decoding for Gated DeltaNet language models, as a vLLM plugin.

Data flows one way: marginals (DFlash) -> :mod:`~vllm_weaver.adapter` -> :mod:`~vllm_weaver.tree`
-> verification (:mod:`~vllm_weaver.ops`) -> acceptance -> commit. Those packages know nothing of
vLLM; :mod:`~vllm_weaver.engine` plugs them into it. Importing this package imports none of them.
"""

__version__ = "0.1.0"
