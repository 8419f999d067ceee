# SPDX-License-Identifier: Apache-2.0
"""Node SpargeProfileLoad: a profile by its name."""

from __future__ import annotations

import logging

from comfy_api.latest import io

from ..sparge.tune import ProfileError, profile_path
from .host import profile_folder
from .profiles import NamedProfile

logger = logging.getLogger("sparge")

#: Type of what flows from this node to SpargeAttention: a NamedProfile.
ProfileSocket = io.Custom("SPARGE_PROFILE")


class SpargeProfileLoad(io.ComfyNode):
    """Loads a profile. A graph that names a profile this machine lacks still runs: that run
    measures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeProfileLoad",
            display_name="Load Sparge Profile",
            category="model/patch",
            description=(
                "Hands Sparge Attention what an earlier run measured, so that this run need not "
                "measure. A profile that is missing or does not fit the model is not used, the "
                "line under Sparge Attention says why, and the run measures."
            ),
            search_aliases=["sparse attention", "spargeattn", "measurement"],
            inputs=[
                io.String.Input(
                    "name",
                    default="",
                    tooltip=(
                        "Name of a file in models/sparge_profiles, which Sparge Report saves. "
                        "Faster, because the run need not measure; truer without, because "
                        "then this very run is measured."
                    ),
                )
            ],
            outputs=[
                ProfileSocket.Output(
                    "profile", tooltip="For the input profile of Sparge Attention."
                )
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, name: str = "") -> str:
        """Changes with the file, so that one that was written since is read again."""
        try:
            return str(profile_path(profile_folder(), name).stat().st_mtime_ns)
        except (ProfileError, OSError):
            return ""

    @classmethod
    def execute(cls, name: str = "") -> io.NodeOutput:
        found = NamedProfile.load(profile_folder(), name)
        if found.profile is None:
            logger.warning("[Sparge] %s", found.problem)
        return io.NodeOutput(found)
