# SPDX-License-Identifier: Apache-2.0
"""What the library does, to look at. trained: a clip of the small video DiT. made_up: one attention
call as large as a video model's."""
