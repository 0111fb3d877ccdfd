"""A learner's role without training, for what only publishes weights."""

from __future__ import annotations

from collections.abc import Sequence

from echo.config.schema import Config
from echo.core.buffer import StalenessBuffer
from echo.core.errors import LocalProtocolError
from echo.core.rollout import Lineage
from echo.leases.book import LeaseBook
from echo.leases.run import LeaseSettings, RunState
from echo.roles.joining import AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.runtime import node
from echo.runtime.identity import Identity
from echo.weights.topology.plan import Planner, with_backups
from echo.weights.topology.sites import PlannedNode, Site, survey
from echo.wire.messages import LEARNER_ID, Lease, TopologyPlan


def publishing_role(config: Config, identity: Identity, advertise: str) -> Learner:
    """Return the role of a learner that has nothing to lease."""
    lineages = (Lineage(lineage=1, fork_step=0),)
    return Learner(
        LearnerSettings(
            admission=AdmissionSettings(
                run_id=identity.run_id,
                key=identity.key,
                seal_keys=node.new_seal_keys(),
                settings={},
                assets={},
                digests={},
                heartbeat_s=config.network.heartbeat_s,
                dead_after_s=config.network.dead_after_s,
            ),
            leases=LeaseSettings(
                max_staleness=1,
                groups_per_step=1,
                group_size=2,
                max_completion_tokens=1,
                vocab_size=1,
                heartbeat_s=config.network.heartbeat_s,
                max_zero_signal_groups=20,
            ),
            site=Site(LEARNER_ID, "learner", advertise),
            chunk_bytes=config.network.chunk_bytes,
        ),
        RunState(leases=LeaseBook(timeout_s=config.network.lease_timeout_s), lineages=lineages),
        broadcast=node.make_broadcast(LEARNER_ID, config.network, keep_versions=1),
        buffer=StalenessBuffer(max_staleness=1, lineages=lineages),
        prompts=NoPrompts(),
    )


class NoPrompts:
    """The prompts of a learner without workers."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        raise LocalProtocolError(f"lease {group_id}/{attempt} where there are no workers")


class ForcedPlanning(Planner):
    """A learner's planning that always makes the same kind of plan."""

    def __init__(self, planning: Planner, kind: str, ways: int = 0) -> None:
        """Plan chain, star, or tree (`ways` is the fan-out)."""
        super().__init__(learner=planning.learner, chunk_bytes=planning.chunk_bytes)
        self.epoch = planning.epoch
        self._kind, self._ways = kind, ways

    def is_due(self, *, now: float, is_between: bool = False) -> bool:
        return False

    def plan(
        self,
        nodes: Sequence[PlannedNode],
        *,
        uplink_bytes_per_s: float | None,
        now: float,
        is_between: bool = False,
    ) -> dict[str, TopologyPlan]:
        # Who cannot be reached serves nobody: in a chain it comes last.
        ordered = sorted(nodes, key=lambda node: node.advertise is None)
        sites = [self._site(node, set()) for node in ordered]
        fleet = survey(sites, learner=self.learner, rtt_s=lambda *_: 0.0)
        count = len(sites) + 1
        fan_out = {"chain": 1, "star": count, "tree": self._ways}[self._kind]
        tree = [-1, *((node - 1) // fan_out for node in range(1, count))]
        self.epoch += 1
        parents = with_backups(fleet, tree, previous={})
        return {
            name: TopologyPlan(epoch=self.epoch, parents=hops) for name, hops in parents.items()
        }
