# SPDX-License-Identifier: Apache-2.0
"""All cases, and the hosts of each."""

from __future__ import annotations

from collections.abc import Iterator

from . import diffusion, hosts, loops, texts
from .case import Case
from .hosts import Host

#: The model of text whose attention upstream's function is tried in; others ask for the same.
UPSTREAMS_TEXT = "Llama, heads of keys for all"
#: Models of pipelines that choose their attention by the name of a backend. The others call
#: PyTorch's whatever they are asked for.
DISPATCHING = ("Wan 2.1", "Wan 2.2", "HunyuanVideo", "LTX", "Flux")


def cases() -> Iterator[tuple[Case, tuple[Host, ...]]]:
    for case in loops.cases():
        yield case, hosts.ANY_MODEL
    for case in texts.cases():
        upstream = hosts.UPSTREAM if case.model == UPSTREAMS_TEXT else None
        of_text = (hosts.SPARGE_SDPA, hosts.SDPA_CALL, upstream, hosts.TRANSFORMERS)
        yield case, tuple(host for host in of_text if host)
    for case in diffusion.cases():
        of_pipeline = (*hosts.ANY_MODEL, hosts.DIFFUSERS, hosts.DIFFUSERS_AUTO)
        if case.name == "one prompt":
            of_pipeline += (hosts.DIFFUSERS_NATIVE,)
            if case.model in DISPATCHING:
                of_pipeline += (hosts.DIFFUSERS_BACKEND,)
        yield case, of_pipeline
