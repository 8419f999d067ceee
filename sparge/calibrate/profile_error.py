# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a profile."""


class ProfileError(ValueError):
    """A profile cannot be read or written; the message is the sentence that a user reads."""
