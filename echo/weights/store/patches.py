"""Patches: the bytes of an image that a delta changes, and the old bytes to undo the changes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from echo.core.rollout import PolicyVersion
from echo.weights.delta import BlockPatch

PatchMode: TypeAlias = Literal["copy", "now", "on_install"]
"""When a delta is written over its base. "copy": never, a copy is patched instead. "now": as soon
as the changes of all blocks are known. "on_install": when the engine installs the version.
"""


class Patch:
    """All changes that a delta makes to the image of its base."""

    def __init__(self, base: PolicyVersion, version: PolicyVersion, block_bytes: int) -> None:
        """Start with no changes; threads add the blocks.

        Args:
            base: the version that the image's memory holds.
            version: the version that the memory holds after the patch.
            block_bytes: number of image bytes in a block.
        """
        self.base = base
        self.version = version
        self.block_bytes = block_bytes
        self.blocks: dict[int, BlockPatch] = {}
        """The changes of each block, by the block's number; threads add blocks while a delta
        arrives."""

    @property
    def num_words(self) -> int:
        """Number of words that the patch changes."""
        return sum(block.new.size for block in self.blocks.values())

    def write(self, image: memoryview) -> None:
        """Write the new words into an image that holds the base."""
        for number, block in self.blocks.items():
            start = number * self.block_bytes
            block.write(image[start : start + self.block_bytes])

    def take_back(self, piece: memoryview, first: int = 0) -> None:
        """Write the old words into `piece`, which may contain old or new words.

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
