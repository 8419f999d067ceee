# SPDX-License-Identifier: Apache-2.0
"""Numbers the attention calls of a forward pass by layer (transformer block).

Where ComfyUI says which layer runs it is asked. In other models (LTXV, Mochi, CogVideoX) calls are
counted, one self-attention over the grid a layer, or several that have its heads between them, as
nodes make them that save memory. A layer whose call does not come would shift all after it:
skip-layer guidance replaces layers, STG leaves their self-attention out (of LTXV with sound;
without sound it does nothing). Both say so in the options of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..sparge.common.compiling import is_traced_whole, untraced
from ..sparge.session import UNNUMBERED, Layer, TextPosition
from .families import ModelLayout

#: Key of transformer_options: the pass, which has the counter.
FORWARD_KEY = "sparge_forward"

#: Replacement of a block, as ComfyUI calls it: with the block's arguments and itself.
Patch = Callable[..., Any]


@dataclass
class LayerCounter:
    """Numbers the self-attention calls of one forward pass."""

    layout: ModelLayout
    calls: int = 0
    """Calls counted so far: the number of the running layer, in models that publish none."""
    _of_layer: dict[int, int] = field(default_factory=dict, repr=False)
    _heads_left: int = field(default=0, repr=False)  # of the running layer, whose calls are to come
    _refiners: int = field(default=0, repr=False)  # refiners whose calls came
    _shortened: int | None = field(default=None, repr=False)

    def next(self, options: Mapping[str, Any], tokens: int, heads: int) -> Layer:
        """Layer of a self-attention call over so many tokens, which is counted."""
        published = self._published(options)
        if published is None and self._refiners < self.layout.refiners:
            return self._refiner()
        again = published is None and self.calls > 0 and self._is_without_text(tokens)
        if not again and not self._counts(tokens, published is not None):
            return self.peek(options)
        if heads <= self._heads_left:
            self._heads_left -= heads
        elif not again:
            left_out = self._left_out(options)
            while self.calls in left_out:
                self.calls += 1
            self.calls += 1
            self._heads_left = (self.layout.heads or heads) - heads
        number = self.calls - 1 if published is None else published
        earlier = self._of_layer.get(number, 0)
        self._of_layer[number] = earlier + 1
        return Layer(number, self.layout.row(number, earlier))

    def peek(self, options: Mapping[str, Any]) -> Layer:
        """Layer of a call that is not to be counted: the layer's own came before, if any did."""
        published = self._published(options)
        counted = self.calls - 1 if self._of_layer else self.calls
        number = counted if published is None else published
        row = self.layout.row(number, self._of_layer.get(number, 0))
        return Layer(number, row, beside=published is None)

    def _published(self, options: Mapping[str, Any]) -> int | None:
        """Number of the running layer, where ComfyUI says it in transformer_options."""
        index, place = options.get("block_index"), options.get("block")
        if isinstance(place, tuple):  # U-Net blocks, whose index starts again in each module
            return self.layout.places.get((*place[:2], index or 0))
        if not isinstance(index, int):
            return None
        return index + (self.layout.double if options.get("block_type") == "single" else 0)

    def _refiner(self) -> Layer:
        self._refiners += 1
        return Layer(UNNUMBERED, self.layout.refiner_row(self._refiners - 1))

    def _left_out(self, options: Mapping[str, Any]) -> Collection[int]:
        key = self.layout.left_out_key
        return (options.get(key) if key else None) or ()

    def at(self, layer: int) -> None:
        """Sets the layer that runs next."""
        self.calls, self._heads_left = layer, 0

    def _is_without_text(self, tokens: int) -> bool:
        """Whether a call is of pictures alone where text stands with them: the second one of a
        layer of SD3.5 medium and Boogu."""
        known, text = self.layout.tokens, self.layout.context
        if known is None or not 0 < text <= known.prefix + known.suffix:
            return False
        return tokens == known.tokens - text

    def _counts(self, tokens: int, published: bool) -> bool:
        """Whether a call is counted: not one of text or sound alone.

        LTXV drops tokens of guides that are smaller than the clip: all layers then have as many as
        the first, whose video comes before its sound.
        """
        if tokens >= self.layout.grid_tokens:
            return True
        alone = self.layout.text is TextPosition.NONE and tokens >= self.layout.frame_tokens
        if published or not alone:
            return False
        if self._shortened is None and not self._of_layer:
            self._shortened = tokens
        return tokens == self._shortened


class ReplacedBlocks:
    """Replacements of layers that tell the counter which layer they stand for. There is one for
    each, kept over a run, for new function objects would make compiled models recompile."""

    def __init__(self) -> None:
        self._telling: dict[tuple[Any, int], tuple[Patch, Patch]] = {}

    def told(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of a pass, with such replacements in place of the given ones."""
        patches = options.get("patches_replace") or {}
        if not patches.get("dit"):
            return options
        dit = {place: self._of(place, patch) for place, patch in patches["dit"].items()}
        return {**options, "patches_replace": {**patches, "dit": dit}}

    def _of(self, place: Any, patch: Patch) -> Patch:
        if not isinstance(place, tuple) or place[0] != "double_block" or len(place) != 2:
            return patch
        # What has an id must live.
        return self._telling.setdefault((place, id(patch)), (patch, _telling(place[1], patch)))[1]


def _telling(layer: int, patch: Patch) -> Patch:
    def telling(args: Mapping[str, Any], *rest: Any) -> Any:
        if is_traced_whole():
            return patch(args, *rest)
        _tell(args, layer)
        out = patch(args, *rest)
        _tell(args, layer + 1)
        return out

    return telling


@untraced
def _tell(args: Mapping[str, Any], layer: int) -> None:
    forward = (args.get("transformer_options") or {}).get(FORWARD_KEY)
    if forward is not None:
        forward.layers.at(layer)
