# SPDX-License-Identifier: Apache-2.0
"""What the library does, to look at. made_up: attention on a video-like example. trained: a clip of
the small video DiT, which is shown instead where its weights are."""
