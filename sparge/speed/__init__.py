# SPDX-License-Identifier: Apache-2.0
"""Times of calls and measurements on a GPU."""
