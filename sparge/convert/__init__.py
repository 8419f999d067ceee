# SPDX-License-Identifier: Apache-2.0
"""Command-line converters from published checkpoint layouts to the ones ComfyUI core loads."""
