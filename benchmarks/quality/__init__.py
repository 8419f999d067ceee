# SPDX-License-Identifier: Apache-2.0
"""Distance of sparse attention from dense on real activations, mode by mode and density by density.

python -m benchmarks.quality --help
"""
