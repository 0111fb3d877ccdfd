"""When to make an anchor, and whether a version goes as a delta at all.

The learner makes a delta against its last published version each time. Two more questions are
answered here, each from sizes that were measured in this run and by the same yardstick: the bytes
that a node has to fetch (`cheapest_path`).

**An anchor** is what a node without any version fetches, and then the deltas made since. It is due
as soon as that way costs ANCHOR_MARGIN more than a fresh anchor would, or leads over more than
MAX_STEPS parcels, each of which costs a pass over the image. At lr 1e-6 a bf16 delta is 1/116 and
an anchor 2/3 of the image: the steps decide, one anchor in 16 versions. At 5e-6 (1/37) it is one
in 7. The first version always gets one, unless anchors turn out hardly smaller than the image.

**A delta** is worth its base only if it is clearly shorter than what needs no base: if the last one
was more than DELTA_SHARE of an anchor (or image), the next version goes without, and a delta is
tried again RETRY_AFTER versions later: steps shrink when the learning rate decays.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo.core.rollout import PolicyVersion
from echo.delta.paths import Offer, cheapest_path, path_bytes

ANCHOR_MARGIN = 0.25
"""Share of an anchor that the deltas behind it may cost before a new one is due."""
MAX_STEPS = 16
"""Parcels after one another that a node is asked to decode."""
DELTA_SHARE = 0.8
"""Share of what needs no base up to which a delta is worth sending."""
RETRY_AFTER = 8
"""Versions after which a delta is tried again."""
ANCHOR_SHARE = 2 / 3
"""Anchor to image before one has been measured: byte planes of bf16 weights."""
USELESS_SHARE = 0.95
"""Anchor to image above which anchors are not made."""


class AnchorPlan:
    """Decides in which coded forms the learner makes a version."""

    def __init__(self, full_bytes: int) -> None:
        """Plan for images of `full_bytes` bytes."""
        self._full_bytes = full_bytes
        self._anchor_bytes: int | None = None
        self._delta_bytes = 0
        """Size of the last delta; 0 before the first, which is always tried."""
        self._newest: PolicyVersion | None = None
        self._num_since_delta = 0
        """Versions since one was last coded as a delta."""

    def made(self, offer: Offer) -> None:
        """Note what was made of a version, with its size: full image, anchor or delta."""
        if offer.version != self._newest:
            self._newest = offer.version
            self._num_since_delta += 1
        if offer.kind == "anchor":
            self._anchor_bytes = offer.num_bytes
        elif offer.kind == "delta":
            self._delta_bytes, self._num_since_delta = offer.num_bytes, 0

    def is_anchor_due(self, offers: Sequence[Offer], newest: PolicyVersion) -> bool:
        """Return whether the newest version should be packed as an anchor too.

        Args:
            offers: what can be had of the versions up to the newest.
            newest: the version that has just been published.
        """
        anchor_bytes = self._expected_anchor_bytes
        if anchor_bytes > USELESS_SHARE * self._full_bytes:
            return False
        path = cheapest_path((), offers, newest)
        return (
            path is None
            or len(path) > MAX_STEPS
            or path_bytes(path) > (1 + ANCHOR_MARGIN) * anchor_bytes
        )

    def is_delta_due(self) -> bool:
        """Return whether the next version should be coded against the last one."""
        alone = min(self._expected_anchor_bytes, self._full_bytes)
        is_worthwhile = self._delta_bytes <= DELTA_SHARE * alone
        return is_worthwhile or self._num_since_delta + 1 >= RETRY_AFTER

    @property
    def _expected_anchor_bytes(self) -> float:
        if self._anchor_bytes is None:
            return ANCHOR_SHARE * self._full_bytes
        return self._anchor_bytes
