# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one script a question; see results/ for what was measured."""
