# SPDX-License-Identifier: Apache-2.0
"""Sparge Attention in other libraries. Each module imports its own, and this one none."""
