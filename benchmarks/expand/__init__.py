# SPDX-License-Identifier: Apache-2.0
"""Function-preserving expansion: a trained small model inside the shapes of a large one.

The expanded target, DFlash drafter and Weaver adapter compute what the small ones compute, at the
large one's cost. `scales.py` has the algebra, `README.md` beside this file what is exact.
"""
