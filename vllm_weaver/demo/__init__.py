# SPDX-License-Identifier: Apache-2.0
"""``vllm-weaver demo``: the same text four ways, on models that ship with the package.

:mod:`~vllm_weaver.demo.run` decodes prompts with plain decoding, the DFlash chain, DDTree and
Weaver at one budget and compares their tokens; :mod:`~vllm_weaver.demo.show` prints text, a tree
and a table. Importing this package imports neither vLLM nor PyTorch.
"""
