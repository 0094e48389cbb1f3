# SPDX-License-Identifier: Apache-2.0
"""Training, measuring and converting of adapters (spec section 7). Imports no vLLM.

`recipe` fixes a run, `trainer` runs it; `measure` says what an adapter is worth and `report` shows
it; `extract` makes data, `convert` changes forms. Packages of the extra `train` are imported where
they are needed. Importing this package imports nothing else.
"""
