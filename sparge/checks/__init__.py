# SPDX-License-Identifier: Apache-2.0
"""Arguments of callers: what is accepted, and sentences about what is not."""
