"""When to make an anchor or a composite, and whether a version goes as a delta at all.

The learner makes a delta against its last published version each time. Three more questions are
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

**A composite** leads from 2, 4 or 8 versions back to the newest in one step. It is shorter than the
chain it replaces, since weights that moved twice are sent once: SPAN_EXPONENT describes by how
much until one of that span has been measured. The learner has to code it and its uplink carries it
once, so it is worth making if it spares the nodes that lag, by what they hold, at least its own
size in all. One after the other is chosen, the most useful first, as each one changes what the
next would spare. Only the learner makes them, from images that it still holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from echo.delta.paths import Offer, cheapest_path, path_bytes
from echo.rollout import PolicyVersion

ANCHOR_MARGIN = 0.25
"""Share of an anchor that the deltas behind it may cost before a new one is due."""
MAX_STEPS = 16
"""Parcels after one another that a node is asked to decode."""
DELTA_SHARE = 0.8
"""Share of what needs no base up to which a delta is worth sending."""
RETRY_AFTER = 8
"""Versions after which a delta is tried again."""
COMPOSITE_SPANS = (2, 4, 8)
SPAN_EXPONENT = 0.75
"""The delta over k versions is about k ** 0.75 times one (bf16, lr 1e-7 to 5e-6, k to 16)."""
ANCHOR_SHARE = 2 / 3
"""Anchor to image before one has been measured: byte planes of bf16 weights."""
USELESS_SHARE = 0.95
"""Anchor to image above which anchors are not made."""
MAX_VERSIONS = 64
"""Versions that are remembered."""


class AnchorPlan:
    """Decides which parcels the learner makes besides the delta of each version."""

    def __init__(self, full_bytes: int) -> None:
        """Plan for images of `full_bytes` bytes."""
        self._full_bytes = full_bytes
        self._anchor_bytes: int | None = None
        self._delta_bytes: dict[int, int] = {}
        """Size of the last delta over so many versions."""
        self._versions: list[PolicyVersion] = []
        self._tried: PolicyVersion | None = None
        """The last version that was coded as a delta on the one before."""

    def made(self, offer: Offer) -> None:
        """Note what was made of a version, with its size: full image, anchor, delta, composite."""
        if offer.version not in self._versions:
            self._versions = [*self._versions, offer.version][-MAX_VERSIONS:]
        if offer.kind == "anchor":
            self._anchor_bytes = offer.num_bytes
        elif offer.base in self._versions:
            span = self._since(offer.base, offer.version)
            self._delta_bytes[span] = offer.num_bytes
            if span == 1:
                self._tried = offer.version

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
        if self._tried is None or self._delta_bytes[1] <= DELTA_SHARE * alone:
            return True
        return (
            self._tried not in self._versions
            or self._since(self._tried, self._versions[-1]) + 1 >= RETRY_AFTER
        )

    def composites(
        self,
        offers: Sequence[Offer],
        newest: PolicyVersion,
        installed: Iterable[PolicyVersion],
        *,
        bases: Container[PolicyVersion] | None = None,
    ) -> list[PolicyVersion]:
        """Return the bases from which a composite to the newest version is worth making.

        Args:
            offers: what can be had of the versions up to the newest.
            newest: the version that has just been published.
            installed: the version that each node holds, once per node.
            bases: versions whose images the learner still has; None for all of them.
        """
        laggards = Counter(version for version in installed if version != newest)
        known = list(offers)
        candidates = {
            base: Offer(newest, base, "delta", size)
            for span in COMPOSITE_SPANS
            if (base := self._before(newest, span)) is not None
            and (bases is None or base in bases)
            and (size := self._expected_delta_bytes(span)) is not None
            and not any(offer.base == base and offer.version == newest for offer in offers)
        }
        chosen: list[PolicyVersion] = []
        while candidates:
            gains = {
                base: _spared(laggards, known, offer) - offer.num_bytes
                for base, offer in candidates.items()
            }
            best = max(gains, key=gains.__getitem__)
            if gains[best] < 0:
                break
            chosen.append(best)
            known.append(candidates.pop(best))
        return chosen

    @property
    def _expected_anchor_bytes(self) -> float:
        if self._anchor_bytes is None:
            return ANCHOR_SHARE * self._full_bytes
        return self._anchor_bytes

    def _expected_delta_bytes(self, span: int) -> int | None:
        """Return the size of a delta over `span` versions, None before any was measured."""
        if not self._delta_bytes:
            return None
        measured = min(self._delta_bytes, key=lambda known: (abs(known - span), known))
        factor = math.pow(span / measured, SPAN_EXPONENT)
        return max(1, min(round(self._delta_bytes[measured] * factor), self._full_bytes))

    def _since(self, base: PolicyVersion, version: PolicyVersion) -> int:
        return self._versions.index(version) - self._versions.index(base)

    def _before(self, version: PolicyVersion, span: int) -> PolicyVersion | None:
        """Return what was published `span` versions before."""
        if version not in self._versions:
            return None
        index = self._versions.index(version) - span
        return self._versions[index] if index >= 0 else None


def _spared(laggards: Counter[PolicyVersion], offers: list[Offer], extra: Offer) -> int:
    """Return how many bytes all laggards together would not have to fetch."""
    total = 0
    for held, num_nodes in laggards.items():
        now = cheapest_path([held], offers, extra.version)
        then = cheapest_path([held], [*offers, extra], extra.version)
        if now is not None and then is not None:
            total += num_nodes * (path_bytes(now) - path_bytes(then))
    return total
