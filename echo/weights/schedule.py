"""The publication schedule: decides when to publish a version, and in which forms.

**Period.** The publish period is the number of steps between two publications. The period is fixed,
or it is the smallest number of steps that takes at least as long as a broadcast. The period is at
most S + 1, where S is the present staleness bound. If two versions were further apart, the workers'
version would become too old before the learner publishes the next version, and learner and workers
would wait forever.

**Path.** A node can fetch a version as its full image, as a keyframe (compressed, without a base),
or as a delta against an older version. The older version, too, can be fetched in several forms. The
node takes the path with the fewest bytes. Of paths with equal bytes, the node takes the path with
the fewest steps, because each step costs a pass over the whole image.

**Forms.** A small version is published only as its image, and so is every version with codec =
"full". For all other versions the learner first makes a delta against the last published version,
and offers the image after the first segment of the delta. The learner makes a keyframe from time to
time. The sizes measured in this run determine which forms are made, so that nodes fetch few bytes.

* A node without any version fetches the last **keyframe**, and then the deltas made since. A new
  keyframe is due in two cases: this path has more bytes than a new keyframe plus KEYFRAME_MARGIN,
  or more than MAX_STEPS encoded versions. At a learning rate of 1e-6, a keyframe has 2/3 of the
  bytes of a bf16 image, and a delta has 1/116. Then every 16th version gets a keyframe. At 5e-6, a
  delta has 1/37 of the image's bytes, and every 7th version gets a keyframe. For the first version
  a keyframe is always begun, because no keyframe has shown its size yet. The image is a path, too:
  if a keyframe is not much smaller than the image, no further keyframe becomes due.
* A **delta** is made only if deltas are clearly smaller than the forms without a base. If the last
  delta was larger than WORTHWHILE_SHARE of a keyframe or image, the next versions get no delta.
  After RETRY_AFTER versions a delta is tried again, because deltas shrink when the learning rate
  decays.

With codec = "delta" every version with a base gets a delta. With codec = "auto" a keyframe or delta
is abandoned if its first segment is hardly smaller than the same part of the image.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from echo.core.rollout import PolicyVersion
from echo.fleet.overlap import auto_publish_period
from echo.wire.messages import ItemId

# --- publish period -------------------------------------------------------------------------------

MAX_PENDING = 64
"""Largest number of published versions whose arrival is measured at the same time. Above it, the
oldest version is no longer measured.
"""


class PublishPace:
    """Determines the publish period: fixed, or adapted to measured broadcasts."""

    def __init__(self, *, period: int, is_auto: bool, max_staleness: int) -> None:
        """Start with `period` steps between publications.

        Args:
            period: number of steps between publications; the first value if the period is adapted.
            is_auto: whether the period is adapted to measured broadcasts.
            max_staleness: the staleness bound S; the period is at most S + 1.
        """
        self.period = period
        self._longest = period
        self._is_auto = is_auto
        self._max_staleness = max_staleness
        self._published_step: int | None = None
        self._published_at: dict[PolicyVersion, float] = {}
        self._num_bytes = 0
        self.broadcast_s: float | None = None
        """Seconds that the last broadcast to every node took; None before the first broadcast."""
        self.num_broadcasts = 0
        """Number of completed broadcasts. Versions that arrived together count once."""

    def limit(self, max_staleness: int) -> None:
        """Change the staleness bound to S. The period becomes at most S + 1.

        If this shortens an adapted period, the next measurement may lengthen the period again.
        """
        self._max_staleness = max_staleness
        longest = self.period if self._is_auto else self._longest
        self.period = min(longest, max_staleness + 1)

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` must be published."""
        last = self._published_step
        return last is None or step - last >= min(self.period, self._max_staleness + 1)

    def is_overdue(self, step: int) -> bool:
        """Return whether the last published version is too old for the next step.

        If the result is False, a due publication may be postponed.
        """
        last = self._published_step
        return last is None or step - last > self._max_staleness

    @property
    def choices(self) -> range:
        """The possible publish periods: the fixed one, or all that the staleness bound allows."""
        if self._is_auto:
            return range(1, self._max_staleness + 2)
        return range(self.period, self.period + 1)

    @property
    def is_awaited(self) -> bool:
        """Whether some node has not received all published versions yet."""
        return bool(self._published_at)

    def published(self, version: PolicyVersion, *, num_bytes: int, now: float) -> None:
        """Record that a version of `num_bytes` bytes was published at the time `now`."""
        self._num_bytes = num_bytes
        self._published_step = version.step
        self._published_at[version] = now
        if len(self._published_at) > MAX_PENDING:
            del self._published_at[min(self._published_at)]

    def received(
        self, installed: Sequence[PolicyVersion | None], *, now: float, train_s: float | None
    ) -> bool:
        """Record the newest version on each node; return whether a broadcast has just completed.

        `installed` has None for a node without a version. `train_s`, the duration of a training
        step, adapts the period; None if unknown.
        """
        slowest = min((v for v in installed if v is not None), default=None)
        if slowest is None or None in installed:
            return False
        arrived = [v for v in self._published_at if v <= slowest]
        if not arrived:
            return False
        self.broadcast_s = now - self._published_at[max(arrived)]
        self.num_broadcasts += 1
        for version in arrived:
            del self._published_at[version]
        if self._is_auto and train_s is not None:
            self.period = auto_publish_period(train_s, self.broadcast_s, self._max_staleness)
        return True

    def metrics(self) -> dict[str, float]:
        """Return metrics: the period, and the seconds and goodput of the last broadcast."""
        row: dict[str, float] = {"publish_period": self.period}
        if self.broadcast_s is not None:
            row["broadcast/seconds"] = self.broadcast_s
            row["broadcast/goodput"] = self._num_bytes / max(self.broadcast_s, 1e-6)
        return row


# --- cheapest path from the held versions to the wanted one ---------------------------------------


class FetchPath(NamedTuple):
    """The items that a node must fetch, in order, to get a version."""

    num_bytes: int
    num_steps: int
    items: tuple[ItemId, ...]


def cheapest_paths(
    held: Collection[PolicyVersion], offers: Mapping[ItemId, int]
) -> dict[PolicyVersion, FetchPath]:
    """Return the cheapest path from the held versions to each version that can be reached.

    The cheapest path has the fewest bytes. Of paths with equal bytes, the path with the fewest
    steps is cheaper. Of paths with equal steps, the first in `offers` is taken. A delta leads to a
    newer version than its base, so one pass over the deltas, oldest first, finds all paths.

    Args:
        held: versions whose image the node has. The paths to these versions are empty.
        offers: items that can be fetched, with the number of bytes to transfer.
    """
    start: PolicyVersion | None = None  # start of the paths without a base
    paths: dict[PolicyVersion | None, FetchPath] = {
        place: FetchPath(0, 0, ()) for place in (start, *held)
    }
    for item, num_bytes in sorted(offers.items(), key=lambda offer: offer[0][0]):
        version, form = item
        way = paths.get(form.base)
        if way is not None and (form.base is None or form.base < version):
            path = FetchPath(way.num_bytes + num_bytes, way.num_steps + 1, (*way.items, item))
            if version not in paths or path[:2] < paths[version][:2]:
                paths[version] = path
    return {version: path for version, path in paths.items() if version is not None}


# --- full image, keyframe or delta ----------------------------------------------------------------

MIN_IMAGE_BYTES = 4 << 20
"""Smallest image, in bytes, for which codec = "auto" makes encoded versions.

A smaller image fits into one credit window.
"""
WORTHWHILE_SHARE = 0.9
"""Largest size of an encoded version, as a share of the bytes that nodes would fetch without it.

An encoded version that spares less is not worth its encoding, and a pass over the image at every
node. A version is abandoned if its first segment has a larger share of its part of the image.
"""
KEYFRAME_MARGIN = 0.25
"""A new keyframe is due if the present path is larger than that keyframe by more than this share of
the keyframe's bytes.

The present path is the last keyframe and all later deltas.
"""
MAX_STEPS = 16
"""Largest number of encoded versions on the path to the newest version. Each of them costs a node a
pass over the whole image."""
RETRY_AFTER = 8
"""A delta is tried again after this number of versions without a delta. So a run whose deltas stay
large encodes a useless delta for one version in eight.
"""


class FormSchedule:
    """Decides in which forms the learner publishes a version."""

    def __init__(self, codec: str) -> None:
        """Start with no versions made.

        Args:
            codec: "auto", "full" (never make an encoded version) or "delta" (always make a delta,
                however large).
        """
        self._codec = codec
        self._full_bytes = 0
        self._keyframe_bytes = 0
        """Size of the last keyframe in bytes; 0 before the first keyframe."""
        self._delta_bytes = 0
        """Size of the last delta in bytes; 0 before the first delta."""
        self._newest: PolicyVersion | None = None
        self._num_since_delta = 0
        """Number of versions since the last delta."""

    def begin(self, image_bytes: int, *, has_base: bool) -> Literal["full", "keyframe", "delta"]:
        """Return the forms in which to publish the next version.

        Args:
            image_bytes: size of the version's image.
            has_base: whether a delta against the last published version is possible.

        Returns:
            "full" for the image only; "keyframe" for the image, and a keyframe if due; "delta" for
            a delta, then the image, and a keyframe if due.
        """
        self._full_bytes = image_bytes
        is_auto = self._codec == "auto"
        if self._codec == "full" or (is_auto and image_bytes < MIN_IMAGE_BYTES):
            return "full"
        return "delta" if has_base and (not is_auto or self._is_delta_due) else "keyframe"

    def is_hopeless(self, coded_bytes: int, image_bytes: int) -> bool:
        """Return whether to abandon an encoded version. Its first segment decides.

        The arguments are the coded and the decoded size of this segment.
        """
        return self._codec == "auto" and coded_bytes > WORTHWHILE_SHARE * image_bytes

    def made(self, item: ItemId, num_bytes: int) -> None:
        """Record that a form of a version was made, with `num_bytes` bytes."""
        version, form = item
        if version != self._newest:
            self._newest = version
            self._num_since_delta += 1
        if form.kind == "keyframe":
            self._keyframe_bytes = num_bytes
        elif form.kind == "delta":
            self._delta_bytes, self._num_since_delta = num_bytes, 0

    def is_keyframe_due(self, offers: Mapping[ItemId, int], newest: PolicyVersion) -> bool:
        """Return whether to add a keyframe to the forms of the newest version.

        Args:
            offers: the items of all versions up to the newest, with their sizes in bytes.
            newest: the version that has just been published.
        """
        path = cheapest_paths((), offers).get(newest)
        return (
            path is None
            or path.num_steps > MAX_STEPS
            or path.num_bytes > (1 + KEYFRAME_MARGIN) * self._keyframe_bytes
        )

    @property
    def _is_delta_due(self) -> bool:
        alone = min(self._keyframe_bytes or self._full_bytes, self._full_bytes)
        is_worthwhile = self._delta_bytes <= WORTHWHILE_SHARE * alone
        return is_worthwhile or self._num_since_delta + 1 >= RETRY_AFTER
