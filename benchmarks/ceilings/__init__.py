# SPDX-License-Identifier: Apache-2.0
"""Ceilings of this GPU: the most of one kind of work that small kernels and PyTorch reach."""
