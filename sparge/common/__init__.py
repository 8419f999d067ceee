# SPDX-License-Identifier: Apache-2.0
"""Helpers that know nothing of attention."""
