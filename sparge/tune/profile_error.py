# SPDX-License-Identifier: Apache-2.0
"""Error of a profile that cannot be read or written."""


class ProfileError(ValueError):
    """A profile cannot be read or written; the message is the sentence that a user reads."""
