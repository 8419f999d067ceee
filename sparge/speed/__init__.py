# SPDX-License-Identifier: Apache-2.0
"""What calls and measurements cost on a GPU."""
