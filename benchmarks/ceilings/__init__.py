# SPDX-License-Identifier: Apache-2.0
"""Ceilings of this GPU: most that it does of one kind of work, by small kernels and PyTorch's own
products."""
