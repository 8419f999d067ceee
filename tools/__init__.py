# SPDX-License-Identifier: Apache-2.0
"""Commands beside the pack; neither the library nor the nodes import them."""
