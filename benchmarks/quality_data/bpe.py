# SPDX-License-Identifier: Apache-2.0
"""Byte-level byte-pair encoding, from the vocabulary and the merges that a GGUF file holds.

Text is cut into words, a word's bytes are shown as printable characters, and the pair that comes
first in the list of merges is joined until none is left (Sennrich et al., arXiv 1508.07909; bytes
as in GPT-2). Words are cut as SmolLM was trained: every digit alone, else as in GPT-2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

# [^\W\d_] is a letter, and the rare number that is no digit, such as a superscript. Of the space
# before a word the last character goes with the word; before a digit none does.
WORD = re.compile(r"\d|'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?=\d)|\s+(?!\S)|\s+")


class BytePairs:
    """encode and decode are inverse for text without special tokens."""

    def __init__(self, tokens: Sequence[str], merges: Iterable[str]) -> None:
        """Takes merges, pairs such as "t he", best first."""
        self._tokens = tokens
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Encodes a text. Raises ValueError where the vocabulary lacks a byte of it."""
        return [token for word in WORD.findall(text) for token in self._word(word)]

    def decode(self, ids: Iterable[int]) -> str:
        shown = "".join(self._tokens[index] for index in ids)
        return bytes(BYTE_OF[character] for character in shown).decode(errors="replace")

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            parts = self._merge([SHOWN_AS[byte] for byte in word.encode()])
            unknown = [part for part in parts if part not in self._ids]
            if unknown:
                raise ValueError(f"The vocabulary has no token for {unknown[0]!r} of {word!r}.")
            self._known[word] = [self._ids[part] for part in parts]
        return self._known[word]

    def _merge(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            ranked = [
                (self._ranks[pair], at)
                for at, pair in enumerate(pairwise(parts))
                if pair in self._ranks
            ]
            if not ranked:
                break
            at = min(ranked)[1]
            parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]
        return parts


def _shown_as() -> dict[int, str]:
    """A printable character for each byte: itself in Latin-1, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


SHOWN_AS = _shown_as()
BYTE_OF = {character: byte for byte, character in SHOWN_AS.items()}
