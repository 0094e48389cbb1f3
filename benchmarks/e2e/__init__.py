# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark: `python -m benchmarks.e2e` (see `benchmarks/README.md`).

Each arm's engine runs in a process of its own; this process tells them in turn to decode for a
while, so that arms take turns on one device and a ratio never compares two runs.
"""
