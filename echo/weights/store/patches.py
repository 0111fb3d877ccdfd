"""Patches: which bytes of an image a delta changes, with the old bytes to take it back."""

from __future__ import annotations

from typing import Literal, TypeAlias

from echo.core.rollout import PolicyVersion
from echo.weights.delta import BlockPatch

PatchMode: TypeAlias = Literal["copy", "now", "on_install"]
"""When a delta is written over its base: never ("copy", a copy is patched), as soon as its blocks
are open ("now"), or when the engine installs the version.
"""


class Patch:
    """All changes that a delta makes to an image."""

    def __init__(self, base: PolicyVersion, version: PolicyVersion, block_bytes: int) -> None:
        """Start without a block.

        Args:
            base: the version that the memory holds.
            version: what it becomes.
            block_bytes: image bytes per block.
        """
        self.base = base
        self.version = version
        self.block_bytes = block_bytes
        self.blocks: dict[int, BlockPatch] = {}
        """By number; threads add blocks while a delta arrives."""

    @property
    def num_words(self) -> int:
        """Words that change."""
        return sum(block.new.size for block in self.blocks.values())

    def write(self, image: memoryview) -> None:
        """Write the new words to an image that holds the base."""
        for number, block in self.blocks.items():
            start = number * self.block_bytes
            block.write(image[start : start + self.block_bytes])

    def take_back(self, piece: memoryview, first: int = 0) -> None:
        """Write the old words to `piece`, whether or not the new ones had been written.

        Args:
            piece: the image, or a copy of a run of its blocks.
            first: number of the first block in `piece`.
        """
        num_blocks = -(-len(piece) // self.block_bytes)
        for number in range(first, first + num_blocks):
            block = self.blocks.get(number)
            if block is not None:
                start = (number - first) * self.block_bytes
                block.take_back(piece[start : start + self.block_bytes])
