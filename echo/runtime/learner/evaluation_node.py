"""An evaluation by workers: a learner publishes one version and trains nothing.

Workers join as in a run. Each answer is a group of one rollout. The group's lease has the seed that
an evaluation on one machine would use. A lost lease is granted again with the same seed. So the
scores do not depend on which workers sampled which answers. Answers are kept only in memory: after
an interruption the evaluation starts again.

    weights --> image --> broadcast
    role --> StoreGroup --> answer --> acknowledgement        all answers --> scores
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from echo.core.errors import DataError, EchoError, EngineError, LocalProtocolError
from echo.core.records import Discarded
from echo.core.rollout import Group, PolicyVersion
from echo.core.units import counted
from echo.leases.open_groups import AppendRecord
from echo.leases.results import GroupStored, StoreGroup
from echo.net.transport import Transport
from echo.roles.learner import GrantsDue, GrantsStopped, Learner
from echo.roles.plans import Publishing
from echo.runtime.episodes import Opening
from echo.runtime.learner.batches.prompts import Prompt, PromptSource
from echo.runtime.learner.batches.waiting import BatchWait
from echo.runtime.learner.shutdown import RunShutdown
from echo.runtime.learner.versions.evaluation import Answer, Answers, EvalResult, result_of
from echo.runtime.learner.versions.publish import Publisher, VersionEncoder
from echo.runtime.node import Node
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.task import Example
from echo.tasks.tokenization import TextCodec
from echo.wire.actions import Action
from echo.wire.messages import BAD_LOGPROBS, Lease

if TYPE_CHECKING:
    from echo.engine.weights import Weights

VERSION = PolicyVersion(1, 0)
"""The version number of the published weights."""
PROGRESS_S = 10.0
"""Smallest time between two log lines about progress, seconds."""


class HeldoutGroups:
    """The prompts of an evaluation as groups of one answer each, and the answers so far.

    The groups of sampled answers come first, prompt by prompt. The groups of greedy answers follow.
    """

    num_trimmed_tokens = 0
    admission_staleness = 0

    def __init__(self, source: PromptSource, openings: Sequence[Opening]) -> None:
        """Make the groups, without answers.

        Raises:
            DataError: if an example cannot be sent to a worker.
        """
        self.openings = openings
        prompts = [
            source.prompt_of(each.example, each.prompt_ids.tolist(), index, seed=0)
            for index, each in enumerate(openings)
        ]
        self._places: list[tuple[Prompt, int, bool]] = [
            (prompt, seed, False)
            for prompt, opening in zip(prompts, openings, strict=True)
            for seed in opening.seeds
        ]
        self._places += [
            (prompt, opening.seeds[0], True)
            for prompt, opening in zip(prompts, openings, strict=True)
        ]
        self._answers: dict[int, Answer] = {}

    @property
    def num_groups(self) -> int:
        """Number of groups, which is also the number of answers to collect."""
        return len(self._places)

    @property
    def is_complete(self) -> bool:
        """Whether every group has an answer."""
        return len(self._answers) == self.num_groups

    def __len__(self) -> int:
        return len(self._answers)

    def num_unspent(self, *, step: int) -> int:
        """Return the number of groups that are answered and need no more leases."""
        return len(self._answers)

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of an attempt at a group. All attempts have the same seed."""
        prompt, seed, is_greedy = self._places[group_id]
        return msgspec.structs.replace(
            prompt.lease, group_id=group_id, attempt=attempt, seed=seed, is_greedy=is_greedy
        )

    def example(self, group_id: int) -> Example:
        """Return the example of a group, with its answer."""
        return self._places[group_id][0].example

    def put(self, group_id: int, answer: Answer) -> None:
        """Store the answer of a group."""
        self._answers[group_id] = answer

    def answers(self) -> tuple[Answers, Answers]:
        """Return the sampled and the greedy answers to each prompt.

        All groups must have been answered.
        """
        ordered = iter(self._answers[group_id] for group_id in range(self.num_groups))
        sampled = [[next(ordered) for _ in each.seeds] for each in self.openings]
        return sampled, [[next(ordered)] for _ in self.openings]


class EvaluationNode(Node):
    """The learner of an evaluation: it grants held-out prompts until all are answered."""

    def __init__(
        self,
        role: Learner,
        transport: Transport,
        groups: HeldoutGroups,
        publisher: Publisher,
        *,
        weights: Callable[[], Weights],
        host: TaskHost | None,
        text: TextCodec,
        codec: str,
        reconnect_for_s: float,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Connect the parts of an evaluation.

        Args:
            role: the learner's role, whose prompts and buffer are `groups`.
            transport: the transport that workers connect to.
            groups: the held-out prompts and their answers.
            publisher: turns the weights into the version that is published.
            weights: slow function that returns the weights to evaluate, by name.
            host: scores the answers; None if workers score them.
            text: decodes the answers.
            codec: the value of network.codec.
            reconnect_for_s: seconds without any worker after which the evaluation ends.
            threads: the pools of threads; if None, real threads are used.
            log: the log of this node.
        """
        super().__init__(role, transport, threads=threads, log=log)
        self.role: Learner = role
        self.engines: set[str] = set()
        """Kind and data type of each engine that has sampled an answer."""
        self._groups, self._publisher, self._weights = groups, publisher, weights
        self._host, self._text, self._codec = host, text, codec
        self._scoring = self.threads.pool("reward", MAX_BLOCKING)
        self._failure: EchoError | None = None
        self._is_stopping = False
        self._is_work_over = asyncio.Event()
        self._said_at, self._num_said = 0.0, 0
        self._waiting = BatchWait(
            role,
            address=str(transport.listen_address),
            reconnect_for_s=reconnect_for_s,
            remedy="start workers and repeat the command",
            log=log,
        )
        self._shutdown = RunShutdown(
            role, transport, report=self.report, wait_until=self.wait_until, clock=lambda: self.now
        )

    def release(self) -> None:
        """End the threads that encode versions."""
        self._publisher.coder.close()

    def result(self, version: PolicyVersion) -> EvalResult:
        """Return the scores of the finished evaluation. The result names `version`."""
        return result_of(version, self._groups.openings, *self._groups.answers(), self._text)

    # --- answers ---------------------------------------------------------------------------------

    def on_action(self, action: Action) -> None:
        """Store an answer or the failure of a group; ignore other records."""
        match action:
            case StoreGroup(group):
                if self._host is None:
                    self._answer(group, Answer.of(group.rollouts[0], self._text))
                else:
                    self.spawn(self._score(self._host, group), name="reward")
            case AppendRecord():
                if isinstance(action.record, Discarded):
                    self._failed(action.record, action.cause)
            case _:
                raise LocalProtocolError(f"an evaluation cannot {type(action).__name__}")

    async def _score(self, host: TaskHost, group: Group) -> None:
        text = self._text.decode(group.rollouts[0].token_ids.tolist())
        example = self._groups.example(group.group_id)
        reward: float | RewardError | None
        try:
            reward = await self._scoring.run(host.score, example, text)
        except RewardError as error:
            reward = error
        self._answer(group, Answer(text, reward))

    def _answer(self, group: Group, answer: Answer) -> None:
        """Store an answer, and acknowledge its group."""
        self._groups.put(group.group_id, answer)
        member = self.role.roster.nodes.get(group.worker_id)
        if member is not None and member.stats.engine:
            self.engines.add(member.stats.engine)
        self.report(GroupStored(group.group_id))
        self._waiting.wake()

    def _failed(self, record: Discarded, cause: str) -> None:
        """Store the failure of a group as its answer, and end the evaluation for some failures.

        The evaluation goes on after a failed reward, and after log-probabilities that are not
        finite. Any other failure ends the evaluation. So a prompt that no worker can sample does
        not count as a wrong answer.
        """
        what, _, _ = (cause or record.reason).partition("\n")
        error = RewardError(what, reason=record.reason)
        self._groups.put(record.group, Answer("", error))
        if not record.reason.startswith("reward_") and record.reason != BAD_LOGPROBS:
            name = self._groups.example(record.group)
            self._failure = DataError(f"no worker can answer {name}: {record.reason}: {what}")
        self._waiting.wake()

    # --- the evaluation --------------------------------------------------------------------------

    async def work(self) -> None:
        """Publish the version, wait for all answers, announce the end to every node, and stop."""
        try:
            await self._publish()
            self._waiting.begin(now=self.now)
            while not (self._groups.is_complete or self._is_stopping or self._failure):
                if await self._waiting.wait():
                    self._check()
                self._say_progress()
            self.report(GrantsStopped())
            ended = "finished" if self._groups.is_complete else "stopped"
            await self._shutdown.announce(f"the evaluation is {ended}")
        finally:
            self._is_work_over.set()
        if not self._is_stopping:
            self.stop("finished", self._failure)

    async def _publish(self) -> None:
        encoder = VersionEncoder(
            self.role.broadcast,
            self._publisher.coder,
            codec=self._codec,
            pool=self.threads.pool("coder"),
            perform=self.perform,
            spawn=self.spawn,
            clock=lambda: self.now,
        )
        make = self.threads.pool("model")
        publication = await make.run(lambda: self._publisher.make(self._weights(), VERSION))
        self.report(Publishing())
        await encoder.publish(publication)
        await encoder.wait()

    def _check(self) -> None:
        """Grant due leases. End the evaluation if no worker can install the version."""
        reason = self._waiting.check(now=self.now)
        stats = [member.stats for member in self.role.roster.members("worker")]
        if reason == "no_weights" and stats and all(each.refused_version for each in stats):
            self._failure = EngineError(f"no worker can install the weights: {stats[0].refusal}")
        self.report(GrantsDue())

    def _say_progress(self) -> None:
        if self.now < self._said_at + PROGRESS_S or len(self._groups) == self._num_said:
            return
        self._said_at, self._num_said = self.now, len(self._groups)
        answers = counted(self._groups.num_groups, "answer")
        workers = counted(len(self.role.roster.members("worker")), "worker")
        self.log.info("%d of %s, %s", self._num_said, answers, workers)

    async def drain(self) -> None:
        """Stop without a result, after announcing the end to every node."""
        self._is_stopping = True
        self._waiting.wake()
        await self._is_work_over.wait()
        self.log.info(
            "stopped with %d of %s, so there are no scores; repeat the command for them",
            len(self._groups), counted(self._groups.num_groups, "answer"),
        )  # fmt: skip
