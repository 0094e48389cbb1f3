# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named ``cpu`` that compiles nothing: the interpreter runs every kernel."""
