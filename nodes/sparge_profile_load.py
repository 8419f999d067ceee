# SPDX-License-Identifier: Apache-2.0
"""Node SpargeProfileLoad: a profile by its name."""

from __future__ import annotations

import logging

from comfy_api.latest import io

from ..sparge.sampling import NamedProfile
from ..sparge.tune.profile_path import SUFFIX
from .host import profile_file, profile_names, show_on_node

logger = logging.getLogger("sparge")

#: Type of what flows from this node to SpargeAttention: a NamedProfile.
ProfileSocket = io.Custom("SPARGE_PROFILE")


#: The one choice where no profile was saved; the canvas shows "undefined" for a list without any.
NONE_SAVED = "none saved yet"


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
                "measure. Where a profile is missing or does not fit the model, Sparge Attention "
                "says why, and the run measures."
            ),
            search_aliases=["sparse attention", "spargeattn", "measurement"],
            inputs=[
                io.Combo.Input(
                    "name",
                    options=profile_names() or [NONE_SAVED],
                    optional=True,  # where no profile was saved, the graph still runs
                    tooltip=(
                        "A profile that Sparge Attention Report saved; press R to see new ones. "
                        "Faster, because the run need not measure; truer without, because then "
                        "this very run is measured."
                    ),
                )
            ],
            outputs=[
                ProfileSocket.Output(
                    "profile", tooltip="For the input profile of Sparge Attention."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, name: str | None = None) -> bool:
        """Accepts names that are not in the list: such a run measures."""
        return True

    @classmethod
    def fingerprint_inputs(cls, name: str | None = None) -> str:
        """Changes with the file, so that one that was written since is read again."""
        try:
            file = profile_file(str(name or ""))
            return str(file.stat().st_mtime_ns) if file else ""
        except OSError:
            return ""

    @classmethod
    def execute(cls, name: str | None = None) -> io.NodeOutput:
        name = str(name or "")  # null where the list is empty; a number in an API graph
        shown = name.removesuffix(SUFFIX)
        if shown.strip() and shown != NONE_SAVED:
            found = NamedProfile.load(shown, profile_file(name))
        else:
            found = NamedProfile(shown, None, "Load Sparge Profile has no name")
        if found.profile is None:
            logger.warning("[Sparge] %s", found.problem)
        show_on_node(cls.hidden.unique_id if cls.hidden else None, str(found))
        return io.NodeOutput(found)
