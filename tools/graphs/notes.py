# SPDX-License-Identifier: Apache-2.0
"""Texts of the notes in the graphs. Headings have what must be read first: only their letters are
large enough when a graph opens. No `code` marks: in Nodes 2.0 they are blue on brown."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Model, Node
from .node_types import NOTE

STEPS = {
    "models": "Download the models: ComfyUI offers what is missing",
    "run": "Write the prompt and press Run",
    "read": "Then read the node Sparge Attention: how much faster it was",
}
BYPASS = (
    "**Compare**: select *Sparge Attention*, press Ctrl+B to bypass it, and run the same seed "
    "again."
)
BYPASS_BOTH = (
    "**Compare**: select both green nodes, press Ctrl+B to bypass them, and run the same seed "
    "again."
)
COMPARED = (
    "**Compare**: the second green node shows both clips beside each other and says how much they "
    "differ. Its *view* can split one picture between them, or show the difference."
)
REPORTED = "*Sparge Attention Report* shows what was skipped where."


def note(name: str, title: str, text: str, height: int) -> Node:
    return Node(name, NOTE, (text,), title=title, height=height)


def start(
    what: str, tokens: str, gain: str, more: str = "", height: int = 270, **steps: str
) -> Node:
    """tokens: how many tokens it has, and of what, as 44,520 video tokens (28 x 30 x 53).
    steps: those of STEPS that are others in this graph."""
    todo = "<br>".join(f"{n}. {step}" for n, step in enumerate((STEPS | steps).values(), 1))
    clip = "picture" if "image tokens" in tokens else "clip"
    text = (
        f"# {what}\n\n## {todo}\n\n"
        "The first run compiles the kernels for your GPU, once, in a few seconds. "
        f"This {clip} has {tokens}: more tokens, more gain. {gain}"
    )
    return note("start", "Start here", f"{text}\n\n{more}".rstrip(), height)


def settings(
    compare: str = BYPASS, more: str = REPORTED, height: int = 270, what: str = "clip"
) -> Node:
    text = (
        "# Faster or truer?\n\n"
        f"## The {what} looks right: set *quality* to fast<br>"
        "It differs too much: set it to high\n\n"
        "Still too much: raise *start_percent* (advanced) to 0.3. Nothing else has to be chosen."
        "\n\n"
        "**Is it on?** After a run, two lines on *Sparge Attention* say so, or why not. The log "
        "says more.\n\n"
        f"{compare} {more}"
    )
    return note("settings", "Faster or truer", text.rstrip(), height)


def files(models: Sequence[Model], more: str = "", height: int = 270) -> Node:
    rows = [f"* [{model.file}]({model.url}) → models/{model.folder}" for model in models]
    text = "# Where the files go\n\n" + "\n".join(rows) + (f"\n\n{more}" if more else "")
    return note("files", "Models", text, height)


def shards(transformer: Sequence[Model], vae: Model, text: Model, height: int) -> Node:
    """Files of a model whose transformer is published in several."""
    links = ", ".join(f"[{n} of {len(transformer)}]({x.url})" for n, x in enumerate(transformer, 1))
    lines = (
        "# Where the files go\n\n"
        f"* Transformer, every file (ComfyUI offers only the first): {links} → "
        f"models/{transformer[0].folder}\n"
        f"* [VAE]({vae.url}) → save it as models/{vae.folder}/{vae.file}\n"
        f"* [{text.file}]({text.url}) → models/{text.folder}\n\n"
        "Choose the first file of the transformer in *Load CogVideoX*: it finds the others beside "
        "it. Nothing has to be converted."
    )
    return note("files", "Models", lines, height)
