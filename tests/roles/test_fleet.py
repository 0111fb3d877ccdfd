"""Tests of the status of versions on their way to nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from echo.core.monitoring.status import LinkStatus, VersionStatus
from echo.core.rollout import PolicyVersion
from echo.roles.fleet import FleetView
from echo.roles.members import Member, Presence, Roster
from echo.wire.messages import Heartbeat, NodeStats
from tests.roles.harness import make_hello

V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)


def fleet_of(**nodes: tuple[PolicyVersion | None, dict[str, Any]]) -> FleetView:
    """A fleet whose newest version is V4, of 1000 bytes; per node what it has and fetches."""
    roster = Roster(heartbeat_s=2.0, dead_after_s=10.0)
    for name, (installed, stats) in nodes.items():
        member = Member.of(make_hello(name), now=0.0)
        roster.move(member, Presence.ADMITTED)
        heartbeat = Heartbeat(
            installed=installed, capacity=1, leases=(), stats=NodeStats(parent="r1", **stats)
        )
        member.beat(heartbeat, now=1.0)
    broadcast: Any = SimpleNamespace(newest_complete=V4, payload=SimpleNamespace(num_bytes=1000))
    return FleetView(roster, Mock(), broadcast)


def fetching(version: PolicyVersion, held: int, rate: float | None) -> dict[str, Any]:
    return {
        "fetching": version,
        "num_chunks_held": held,
        "num_chunks": 4,
        "downlink_bytes_per_s": rate,
    }


def test_versions_on_their_way_are_shown_with_the_link_that_ends_last() -> None:
    fleet = fleet_of(
        done=(V4, {}),
        fast=(V3, fetching(V4, 2, 100.0)),
        slow=(V3, fetching(V4, 3, 10.0)),
        late=(None, fetching(V3, 1, None)),
    )
    slowest = LinkStatus(parent="r1", child="slow", bytes_per_s=10.0, remaining_s=25.0)
    unknown = LinkStatus(parent="r1", child="late", bytes_per_s=None, remaining_s=None)
    assert fleet.versions() == (
        VersionStatus(
            version=str(V4), done=(1 + 0.5 + 0.75) / 4, num_nodes=4, num_complete=1, slowest=slowest
        ),
        VersionStatus(version=str(V3), done=0.25, num_nodes=1, num_complete=0, slowest=unknown),
    )


def test_a_fleet_without_receivers_lacks_nothing() -> None:
    [version] = fleet_of().versions()
    assert (version.done, version.num_nodes, version.slowest) == (1.0, 0, None)
