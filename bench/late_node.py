"""Learner or worker of a run with delays between continents.

    python bench/late_node.py learner --config FILE --law lognormal --speedup 600
    python bench/late_node.py worker --config FILE --law lognormal --speedup 600

A group is late after its acknowledgement: the learner's buffer hands it out once its delay has
passed. A worker is late at its install: it keeps its weights until its delay has passed, then takes
the newest complete version. The transport is left alone, since half an hour there would expire
leases, links and acknowledgements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from learning.delays import DelayInjector, Direction, add_options, read_injectors

from echo.cli.commands.node import read_run_file, run_role
from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group
from echo.roles.worker.installing import Install
from echo.runtime.learner import setup
from echo.runtime.learner.node import LearnerNode
from echo.runtime.worker import setup as worker_setup
from echo.runtime.worker.node import WorkerNode
from echo.wire.actions import Action


class DelayedBuffer(StalenessBuffer):
    """A learner's buffer whose groups may be taken only once their delay has passed.

    Meanwhile they take up room there and grow old. Groups that a resumed run or a failed step has
    put back have arrived before.
    """

    _delays: DelayInjector | None = None
    _learner: LearnerNode | None = None
    _hidden: Set[int] = frozenset()

    def begin(self, delays: DelayInjector, learner: LearnerNode) -> None:
        """Delay what comes from now on; wake the learner whenever a group becomes visible."""
        self._delays = delays
        self._learner = learner

    def put(self, group: Group) -> None:
        """Add a group, and hide it for its delay."""
        super().put(group)
        if self._delays is not None:
            self._hidden |= {group.group_id}
            delay_s = self._delays.draw(group.worker_id)
            asyncio.get_running_loop().call_later(delay_s, self._reveal, group.group_id)

    def put_back(self, groups: Sequence[Group], *, num_taken: int) -> None:
        """Undo the last `take`."""
        delays, self._delays = self._delays, None
        super().put_back(groups, num_taken=num_taken)
        self._delays = delays

    def take(self, num_groups: int, *, step: int) -> list[Group] | None:
        """Remove and return the oldest visible groups, or None if there are too few."""
        hidden = {n: self._groups.pop(n) for n in self._hidden & self._groups.keys()}
        try:
            return super().take(num_groups, step=step)
        finally:
            self._groups |= hidden

    def _reveal(self, group_id: int) -> None:
        self._hidden -= {group_id}
        if self._learner is not None:
            self._learner.wake()


class LateWorker(WorkerNode):
    """A worker that keeps each version for its delay; the first is installed at once.

    When the delay has passed it takes the version that is then the newest, which may not be the one
    that its role has asked for.
    """

    delays: DelayInjector | None = None
    _kept_until = 0.0

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a worker, an install in its time."""
        if isinstance(action, Install) and self.delays is not None:
            self.spawn(self._wait_and_install(self.delays), name="late install")
        else:
            super().on_action(action)

    async def _wait_and_install(self, delays: DelayInjector) -> None:
        await asyncio.sleep(max(0.0, self._kept_until - self.now))
        self._kept_until = self.now + delays.draw(self.role.settings.node_id)
        newest = self.role.broadcast.newest_complete
        assert newest is not None
        super().on_action(Install(newest))


def delay_groups(learner: LearnerNode, delays: DelayInjector) -> None:
    """Let each group be trained only once its delay has passed since it was acknowledged."""
    buffer = learner.role.buffer
    assert isinstance(buffer, DelayedBuffer), "wrap_nodes comes first"
    buffer.begin(delays, learner)


def delay_installs(worker: WorkerNode, delays: DelayInjector) -> None:
    """Let a worker keep each version for its delay."""
    assert isinstance(worker, LateWorker), "wrap_nodes comes first"
    worker.delays = delays


def wrap_nodes() -> None:
    """Have learners and workers of this process built of the parts that can be late."""
    setup.StalenessBuffer = DelayedBuffer  # type: ignore[attr-defined]
    worker_setup.WorkerNode = LateWorker  # type: ignore[attr-defined]


def delay_nodes(injectors: dict[Direction, DelayInjector]) -> None:
    """Have learners and workers of this process built with their delays."""
    wrap_nodes()
    build_learner, build_worker = setup.build_learner, worker_setup.build_worker

    async def build_late_learner(*args: Any, **kwargs: Any) -> LearnerNode:
        node = await build_learner(*args, **kwargs)
        delay_groups(node, injectors["rollouts"])
        return node

    async def build_late_worker(*args: Any, **kwargs: Any) -> WorkerNode:
        node = await build_worker(*args, **kwargs)
        delay_installs(node, injectors["weights"])
        return node

    if "rollouts" in injectors:
        setup.build_learner = build_late_learner
    if "weights" in injectors:
        worker_setup.build_worker = build_late_worker


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=("learner", "worker"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_options(parser)
    arguments = parser.parse_args()
    config = read_run_file(arguments.config, arguments.set, arguments.role)
    injectors = read_injectors(arguments, config.run.seed)
    delay_nodes(injectors)
    code = run_role(config, arguments.role, has_report=False)
    for injector in injectors.values():
        if metrics := injector.metrics():
            print(json.dumps(metrics))
    return code


if __name__ == "__main__":
    sys.exit(main())
