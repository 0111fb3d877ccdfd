"""Real sessions in virtual time, with a timed engine and no model.

Worker nodes, sessions, leases, buffer and transport are those of a run. The engine computes how
long each token takes instead of computing tokens, and the learner waits instead of training.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import virtual_time
from april_engine import Lengths, Script, Setting, TimedEngine
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.load import parse_config
from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group, Lineage, PolicyVersion, find_fault
from echo.engine.engine import Sampling
from echo.leases.book import LeaseBook
from echo.leases.outbox import Outbox
from echo.leases.partials import PartialRules
from echo.leases.scheduler import LeaseSettings, RecordEnd, RecordGrant, RunState, StoreGroup
from echo.net.transport import TransportOptions
from echo.roles.joining import AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.roles.worker import Worker
from echo.runtime import node
from echo.runtime.node import Node
from echo.runtime.worker.node import WorkerNode, WorkerParts
from echo.sim.network import Network, Port
from echo.sim.transport import SimTransport
from echo.tasks.rewards import InlineHost, Limits, TaskHost
from echo.tasks.task import Example, Task
from echo.weights.manifest import TensorSpec, build_manifest, sign
from echo.weights.topology.sites import Site
from echo.wire.actions import Action
from echo.wire.messages import LEARNER_ID, Lease

ADDRESS = "tcp://learner:7700"
OPTIONS = TransportOptions(
    heartbeat_s=10, dead_after_s=60, min_redial_s=0.1, max_redial_s=1, linger_s=0.1
)
NETWORK = {"heartbeat_s": 5.0, "dead_after_s": 60.0, "lease_timeout_s": 3600.0}


class Chance(Task):
    """Rewards that teach nothing."""

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="?")

    def reward(self, example: Example, completion: str) -> float:
        return 0.0


class Content:
    """What is sampled, judged, trained and published: nothing, here."""

    vocab_size = 8

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sampling = Sampling(1.0, 1.0, 0, setting.max_tokens, ())

    def make_host(self) -> TaskHost:
        """Return where a worker has answers judged."""
        return InlineHost(Chance(), Limits(score_s=10.0, step_s=10.0))

    def make_script(self) -> Script:
        """Return what the rows of an engine sample."""
        return Lengths(self.setting)

    def lease(self, group_id: int, attempt: int) -> Lease:
        return Lease(
            group_id=group_id, attempt=attempt, seed=group_id,
            prompt_ids=(1,) * self.setting.prompt_tokens,
            example={"index": group_id, "split": "train", "prompt": "?"},
        )  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make a step; return what to note of it."""
        return {}

    def image(self, version: PolicyVersion) -> tuple[Sequence[TensorSpec], bytearray]:
        """Return the present weights."""
        image = bytearray(random.Random(f"{version}").randbytes(2048))
        return [TensorSpec("w", "uint8", (len(image),), 0, len(image))], image


class TimedLearner(Node):
    """A learner that waits for its batches and takes `train_s` for each."""

    session: Learner

    def __init__(self, session: Learner, transport: SimTransport, content: Content):
        super().__init__(session, transport, log=logging.getLogger("bench.learner"))
        self.session = session
        self.setting = content.setting
        self.content = content
        self.steps: list[dict[str, float]] = []
        self._key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
        self._has_news = asyncio.Event()

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        return self.session.disconnected(peer, now=self.now)

    def on_action(self, action: Action) -> None:
        match action:
            case StoreGroup():
                asyncio.get_running_loop().call_soon(self._stored, action.group)
            case RecordGrant() | RecordEnd():
                pass

    def _stored(self, group: Group) -> None:
        self._buffer.put(group)
        self.perform(self.session.stored(group.group_id, now=self.now))
        self._has_news.set()

    @property
    def _buffer(self) -> StalenessBuffer:
        buffer = self.session.buffer
        assert isinstance(buffer, StalenessBuffer)
        return buffer

    async def work(self) -> None:
        setting, session = self.setting, self.session
        self._publish()
        while session.step < setting.num_steps:
            waited_from = self.now
            groups = None
            while groups is None:
                self._buffer.evict(step=session.step)
                groups = self._buffer.take(setting.groups_per_step, step=session.step)
                if groups is None:
                    self._has_news.clear()
                    await self._has_news.wait()
            waited_s = self.now - waited_from
            await asyncio.sleep(setting.train_s)
            self._note(groups, waited_s, self.content.train(groups))
            self.perform(session.advance(session.step + 1, now=self.now))
            self._publish()
        self.stop("finished")

    def _note(self, groups: list[Group], waited_s: float, noted: dict[str, float]) -> None:
        step = self.session.step
        ages, lengths = [], []
        for group in groups:
            assert find_fault(
                group, step=step, max_staleness=self.setting.max_staleness,
                lineages=self.session.lineages,
            ) is None  # fmt: skip
            for rollout in group.rollouts:
                lengths.append(rollout.num_tokens)
                ages.append(step - rollout.policy_versions[rollout.completion_mask, 1])
        age = np.concatenate(ages)
        self.steps.append(
            {
                "at": self.now,
                "waited_s": waited_s,
                "tokens": int(sum(lengths)),
                "trained_tokens": len(age),
                "mean_staleness": float(age.mean()),
                "max_staleness": int(age.max()),
                "mean_length": float(np.mean(lengths)),
                **noted,
            }
        )

    def _publish(self) -> None:
        session = self.session
        version = PolicyVersion(1, session.step)
        tensors, image = self.content.image(version)
        manifest = build_manifest(
            run_id="bench", version=version, model_digest="", image=image, chunk_bytes=1 << 16,
            tensors=tensors,
        )  # fmt: skip
        signed = sign(manifest, self._key)
        self.perform(session.broadcast.publish(signed, manifest, image, now=self.now))


def make_session(content: Content, key: Ed25519PrivateKey) -> Learner:
    """Return the learner's session of a new run."""
    setting, lineages = content.setting, (Lineage(1, 0),)
    buffer = StalenessBuffer(
        max_staleness=setting.max_staleness, lineages=lineages, trims_stale=True
    )
    config = parse_config({"network": NETWORK})
    return Learner(
        LearnerSettings(
            admission=AdmissionSettings(
                run_id="bench", key=key, settings={}, assets={}, digests={},
                heartbeat_s=5.0, dead_after_s=60.0,
            ),
            leases=LeaseSettings(
                max_staleness=setting.max_staleness, groups_per_step=setting.groups_per_step,
                group_size=setting.group_size, vocab_size=content.vocab_size,
                max_completion_tokens=content.sampling.max_completion_tokens, trims_stale=True,
                heartbeat_s=5.0,
            ),
            site=Site(LEARNER_ID, "learner", ADDRESS),
        ),
        RunState(leases=LeaseBook(timeout_s=3600.0), lineages=lineages),
        broadcast=node.make_broadcast(LEARNER_ID, config.network),
        buffer=buffer, prompts=content,
    )  # fmt: skip


async def make_worker(
    name: str, content: Content, engine: TimedEngine, network: Network, directory: Path
) -> WorkerNode:
    """Return a worker that samples with the timed engine."""
    setting = content.setting
    table = {"network": NETWORK, "worker": {"connect": [ADDRESS]}, "security": {"curve": False}}
    config = parse_config(table)
    transport = SimTransport(network, Port(name), OPTIONS)
    await transport.start()
    settings = node.node_settings(
        config, "worker", node_id=name, advertise=None, max_image_bytes=1 << 20
    )
    session = Worker(
        settings, node.make_broadcast(name, config.network),
        Outbox(max_deliveries=64, retry_s=10.0), now=asyncio.get_running_loop().time(),
    )  # fmt: skip
    parts = WorkerParts(
        engine=engine, host=content.make_host(), runner=None, decode=content.decode,
        group_size=setting.group_size, sampling=content.sampling,
        max_prompt_tokens=1 << 20, groups_per_batch=setting.groups_per_worker,
        rules=PartialRules(
            over_submission=setting.over_submission,
            stale_tokens=setting.stale_tokens,  # type: ignore[arg-type]
            max_age=setting.max_staleness, ship_s=None,
        ),
        agents=None, partials_path=directory / f"{name}.bin", digests={},
        installed_path=directory / f"{name}.jsonl",
        read_local_image=lambda: None,
    )  # fmt: skip
    return WorkerNode(
        session, transport, build=lambda settings, assets: parts,
        log=logging.getLogger(f"bench.{name}"),
    )  # fmt: skip


def measure(
    setting: Setting, make_content: Callable[[Setting], Content] = Content
) -> dict[str, Any]:
    """Run a setting to its end in virtual time and return what it has shown."""
    content = make_content(setting)

    async def main(clock: virtual_time.VirtualClock) -> dict[str, Any]:
        network = Network()
        transport = SimTransport(network, Port("learner", address=ADDRESS), OPTIONS)
        await transport.start()
        key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
        learner = TimedLearner(make_session(content, key), transport, content)
        engines = [
            TimedEngine(setting, clock, content.make_script()) for _ in range(setting.num_workers)
        ]
        with tempfile.TemporaryDirectory() as scratch:
            workers = [
                await make_worker(f"w{i}", content, engine, network, Path(scratch))
                for i, engine in enumerate(engines)
            ]
            tasks = [asyncio.create_task(worker.run()) for worker in workers]
            await learner.run()
            result = summarise(setting, learner, engines, clock.now)
            for worker in workers:
                worker.stop("measured")
            await asyncio.gather(*tasks)
        return result

    return virtual_time.run(main)


def summarise(
    setting: Setting, learner: TimedLearner, engines: Sequence[TimedEngine], now: float
) -> dict[str, Any]:
    """Return what a run has shown; its first steps, in which the pipeline fills, do not count."""
    steps, uses = learner.steps, [engine.use for engine in engines]
    first = min(2, len(steps) - 1)
    counted = steps[first + 1 :]
    seconds = steps[-1]["at"] - steps[first]["at"]
    # Without staleness nothing is sampled while the learner trains.
    rollout_s = seconds if setting.max_staleness else sum(step["waited_s"] for step in counted)
    num_tokens = sum(step["tokens"] for step in counted)
    counts = learner.session.counters
    num_sampled = sum(use.num_tokens for use in uses)
    return {
        "over_submission": setting.over_submission,
        "max_staleness": setting.max_staleness,
        "is_continuous": setting.is_continuous,
        "seed": setting.seed,
        "seconds": seconds,
        "num_steps": len(counted),
        "tokens_per_s": num_tokens / seconds,
        "rollout_tokens_per_s": num_tokens / rollout_s,
        "seconds_per_batch": seconds / len(counted),
        "rollout_s_per_batch": rollout_s / len(counted),
        "learner_idle": sum(step["waited_s"] for step in counted) / seconds,
        "rows_idle": 1 - sum(use.row_s for use in uses) / (len(uses) * setting.num_rows * now),
        "engines_idle": 1 - sum(use.busy_s for use in uses) / (len(uses) * now),
        "prefilled_per_sampled": sum(use.num_prefilled for use in uses) / num_sampled,
        "mean_staleness": float(np.mean([step["mean_staleness"] for step in counted])),
        "max_staleness_seen": max(step["max_staleness"] for step in counted),
        "mean_length": float(np.mean([step["mean_length"] for step in counted])),
        "masked_share": 1 - sum(step["trained_tokens"] for step in counted) / num_tokens,
        "resumed": counts["partials/resumed"],
        "wasted_tokens": counts["partials/wasted_tokens"],
        "steps": steps,
    }
