# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's published files, converted to the layout that ComfyUI core loads."""
