# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's published files as ComfyUI core names them, for the node that loads them and the
command that converts them."""
