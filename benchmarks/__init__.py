# SPDX-License-Identifier: Apache-2.0
"""One script a question; see results/ for what was measured."""
