# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a model: tells whether a profile was measured on the model at hand."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NORMS = 8  # weights of norms that tell a model from its finetunes
VALUES = 64  # values kept of each norm: enough to tell models apart, a few KB in all
#: Largest relative distance of norms between the same weights in different dtypes: bf16 rounds by
#: 2^-9 = 0.002, fp8 checkpoints keep their norms in 16 bits.
SAME_NORMS = 0.005
#: In the name of a weight whose layer PEFT has put into one with a LoRA.
_WRAPPED = ".base_layer"


class Fit(enum.Enum):
    FITS = "fits"
    DIFFERENT_WEIGHTS = "different weights"
    """Same architecture, other norms: a finetune or a merged LoRA. Usable, with a warning."""
    OTHER_MODEL = "other model"
    """Another architecture. Not usable."""


@dataclass(frozen=True)
class Verdict:
    fit: Fit
    sentence: str
    """Sentence that a user reads."""

    @property
    def usable(self) -> bool:
        return self.fit is not Fit.OTHER_MODEL


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """An architecture and samples of a few of its norm weights."""

    architecture: str
    """Class name of the model, such as "WanModel"."""
    norms: Mapping[str, Tensor]
    """Samples of each norm by name, (up to 64,) float32 on the CPU."""

    @classmethod
    def of(cls, architecture: str, weights: Mapping[str, Tensor]) -> Fingerprint:
        """Makes a fingerprint from a few small norm weights of the model. It reads them, so it
        waits for the GPU."""
        return cls(
            architecture,
            {
                name: weight.detach().flatten()[:VALUES].to("cpu", torch.float32, copy=True)
                for name, weight in weights.items()
            },
        )

    @classmethod
    def of_network(
        cls, network: nn.Module, instead: Mapping[str, Tensor] | None = None, **marks: Tensor
    ) -> Fingerprint:
        """Fingerprint of a few norms, spread over the depth of a model. instead: weights by name
        that the model has in place of its present ones. marks: other samples, such as of what is
        patched onto its weights. Waits for the GPU."""
        network = getattr(network, "_orig_mod", network)  # torch.compile's wrapper
        norms = {
            name.replace(_WRAPPED, ""): weight.as_subclass(Tensor)  # GGUF has a class of its own
            for name, weight in network.named_parameters()
            if "norm" in name and "lora_" not in name and weight.ndim == 1
            and weight.is_floating_point() and not weight.is_meta
        }  # fmt: skip
        names = sorted(norms)[:: max(1, len(norms) // NORMS)][:NORMS]
        instead = instead or {}
        chosen = {name: instead.get(name, norms[name]) for name in names}
        return cls.of(type(network).__name__, chosen | marks)

    def compare(self, measured_on: Fingerprint) -> Verdict:
        """Whether what was measured on another fingerprint holds for this one."""
        if self.architecture != measured_on.architecture:
            return Verdict(
                Fit.OTHER_MODEL,
                f"The profile was measured on {measured_on.architecture} and this model is "
                f"{self.architecture}, so it is not used and this run measures.",
            )
        here = {name: norm.shape for name, norm in self.norms.items()}
        if here != {name: norm.shape for name, norm in measured_on.norms.items()}:
            return Verdict(
                Fit.OTHER_MODEL,
                f"The profile was measured on a {self.architecture} of another size, so it is not "
                "used and this run measures.",
            )
        changed = [n for n, norm in self.norms.items() if not _same(norm, measured_on.norms[n])]
        if changed:
            return Verdict(
                Fit.DIFFERENT_WEIGHTS,
                f"The profile was measured on other weights of {self.architecture} "
                f"({changed[0]} differs): a finetune or a LoRA. It is used; measure again if the "
                "picture suffers.",
            )
        return Verdict(Fit.FITS, f"The profile was measured on this {self.architecture}.")


def _same(norm: Tensor, other: Tensor) -> bool:
    return float((norm - other).norm()) <= SAME_NORMS * float(norm.norm())
