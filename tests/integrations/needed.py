# SPDX-License-Identifier: Apache-2.0
"""Reason why tests are skipped where diffusers or what it needs is not installed."""

REASON = "needs diffusers, transformers and accelerate (requirements-dev.txt)"
