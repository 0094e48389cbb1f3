# SPDX-License-Identifier: Apache-2.0
"""Self-trained models to test and measure with: a hybrid target, its drafter, its adapter."""
