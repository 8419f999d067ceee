# SPDX-License-Identifier: Apache-2.0
"""Outputs of tiny models with sparse attention in their hosts beside the models' own, case by case:
`python -m benchmarks.hosts`."""
