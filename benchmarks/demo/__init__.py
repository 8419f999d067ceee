# SPDX-License-Identifier: Apache-2.0
"""Demo of the library.

trained: a clip of the small video DiT. made_up: one attention call as large as a video model's.
"""
