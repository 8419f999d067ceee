# SPDX-License-Identifier: Apache-2.0
"""What this GPU does at most of one kind of work: small kernels, and PyTorch's own products."""
