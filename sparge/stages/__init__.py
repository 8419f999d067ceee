# SPDX-License-Identifier: Apache-2.0
"""Stages of a call, from checked tensors to the launches."""
