# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers and pipelines of diffusers with random weights, for tests."""
