# SPDX-License-Identifier: Apache-2.0
"""Orders of tokens by which query blocks and key blocks are cut."""
