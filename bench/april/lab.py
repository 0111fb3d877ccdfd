"""Real roles in virtual time, with a timed engine and no model.

Learner and worker nodes, their roles, the ledger and the buffer are those of a run, on the
network of the simulator. The engine computes how long each token takes instead of computing tokens,
and the trainer waits instead of training.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from april import virtual_time
from april.engine import Lengths, Script, Setting, TimedEngine
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group, Lineage, PolicyVersion, find_fault
from echo.engine.engine import Sampling
from echo.engine.weights import Weights
from echo.leases.book import LeaseBook
from echo.leases.partials import PartialRules
from echo.leases.run import LeaseSettings, RunState
from echo.leases.worker.outbox import Outbox
from echo.net.transport import TransportOptions
from echo.records.ledger import Ledger
from echo.roles.joining import AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.roles.worker.worker import Worker
from echo.runtime import node
from echo.runtime.identity import JoinSource
from echo.runtime.learner.follower import Row
from echo.runtime.learner.node import LearnerNode, OpenedRun
from echo.runtime.learner.report import Progress
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.saving.resume import SavedRun
from echo.runtime.learner.setup import run_sections
from echo.runtime.learner.versions.publish import Coder, Publication
from echo.runtime.worker.node import WorkerNode, WorkerParts
from echo.sim.network import Network, Port
from echo.sim.transport import SimTransport
from echo.tasks.rewards import InlineHost, Limits, TaskHost
from echo.tasks.task import Example, Task
from echo.train.step import StepResult
from echo.weights.manifest import TensorSpec, build_manifest, sign
from echo.weights.topology.sites import Site
from echo.wire.messages import LEARNER_ID, Lease

ADDRESS = "tcp://learner:7700"
OPTIONS = TransportOptions(
    heartbeat_s=10, dead_after_s=60, min_redial_s=0.1, max_redial_s=1, linger_s=0.1
)
LINEAGES = (Lineage(1, 0),)
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


class TimedTrainer:
    """A trainer whose steps take `train_s` and are the content's affair."""

    def __init__(self, content: Content, clock: virtual_time.VirtualClock) -> None:
        self.step_count = 0
        self.noted: dict[str, float] = {}
        """What the last step was made of."""
        self._content = content
        self._clock = clock

    def refusal(self, group: Group) -> str | None:
        """Return None: whatever comes is trained on."""

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train."""
        setting, step = self._content.setting, self.step_count
        self._clock.sleep(setting.train_s)
        ages, lengths = [], []
        for group in groups:
            fault = find_fault(
                group, step=step, max_staleness=setting.max_staleness, lineages=LINEAGES
            )
            assert fault is None, fault
            for rollout in group.rollouts:
                lengths.append(rollout.num_tokens)
                ages.append(step - rollout.policy_versions[rollout.completion_mask, 1])
        age = np.concatenate(ages)
        self.noted = {
            "at": self._clock.now,
            "tokens": int(sum(lengths)),
            "trained_tokens": len(age),
            "mean_staleness": float(age.mean()),
            "max_staleness": int(age.max()),
            "mean_length": float(np.mean(lengths)),
            **self._content.train(groups),
        }
        self.step_count += 1
        return StepResult(metrics={})

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        """Find none."""
        return {}

    def tensors(self) -> dict[str, Any]:
        """Return nothing: the content has the weights."""
        return {}


class ContentPublisher:
    """Makes versions of the content's weights."""

    def __init__(self, content: Content, key: Ed25519PrivateKey) -> None:
        self.coder = Coder(key, encrypts=False)
        self._content = content
        self._key = key

    def prepare(self) -> bool:
        """Return True: a version can be made at any time."""
        return True

    def make(self, weights: Weights, version: PolicyVersion) -> Publication:
        """Return the present weights as a version."""
        tensors, image = self._content.image(version)
        manifest = build_manifest(
            run_id="bench", version=version, image=image, chunk_bytes=1 << 16,
            tensors=tensors,
        )  # fmt: skip
        return Publication(sign(manifest, self._key), manifest, image)


def make_role(content: Content, config: Config, key: Ed25519PrivateKey) -> Learner:
    """Return the learner's role of a new run."""
    setting, network = content.setting, config.network
    buffer = StalenessBuffer(
        max_staleness=setting.max_staleness, lineages=LINEAGES, trims_stale=True
    )
    return Learner(
        LearnerSettings(
            admission=AdmissionSettings(
                run_id="bench", key=key, settings={}, assets={}, digests={},
                seal_keys=node.new_seal_keys(),
                heartbeat_s=network.heartbeat_s, dead_after_s=network.dead_after_s,
            ),
            leases=LeaseSettings(
                max_staleness=setting.max_staleness, groups_per_step=setting.groups_per_step,
                group_size=setting.group_size, vocab_size=content.vocab_size,
                max_completion_tokens=content.sampling.max_completion_tokens, trims_stale=True,
                heartbeat_s=network.heartbeat_s, hedge_factor=setting.hedge_factor,
                is_eager=setting.is_eager,
                max_zero_signal_groups=20 * setting.groups_per_step,
            ),
            site=Site(LEARNER_ID, "learner", ADDRESS),
        ),
        RunState(leases=LeaseBook(timeout_s=network.lease_timeout_s), lineages=LINEAGES),
        broadcast=node.make_broadcast(LEARNER_ID, network),
        buffer=buffer, prompts=content,
    )  # fmt: skip


class Lab:
    """A learner on virtual time, and what its steps have been made of."""

    is_watching = False
    notices = ()

    def __init__(
        self,
        content: Content,
        clock: virtual_time.VirtualClock,
        transport: SimTransport,
        directory: Path,
    ) -> None:
        """Begin a run; its ledger is in the directory."""
        setting = self.setting = content.setting
        self.steps: list[dict[str, float]] = []
        table = {
            "run": {"max_steps": setting.num_steps, "dir": str(directory)},
            "model": {"name": "none"},
            "batch": {"groups_per_step": setting.groups_per_step, "group_size": setting.group_size},
            "sync": {"max_staleness": setting.max_staleness, "publish_period": 1},
            "network": {**NETWORK, "codec": "full"},
            "security": {"curve": False},
        }
        config = parse_config(table, role="learner")
        key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
        self._trainer = TimedTrainer(content, clock)
        trainer: Any = self._trainer
        publisher: Any = ContentPublisher(content, key)
        role = make_role(content, config, key)
        ledger = Ledger(directory, spool_bytes=config.limits.spool_bytes)
        checkpoints = Checkpoints(
            directory / "checkpoints", run_id="bench", interval_steps=1 << 30, interval_s=None,
            keep_last=1, min_free_bytes=0, now=0.0,
        )  # fmt: skip
        saved = SavedRun(ledger, checkpoints)
        saved.enter(saved.begin())
        buffer: Any = role.buffer
        self.node = LearnerNode(
            OpenedRun(
                ledger=ledger, checkpoints=checkpoints, activation=None,
                progress=Progress(staleness_tokens={}, now=clock.now),
                trainer=trainer, attribution=None, publisher=publisher, buffer=buffer,
                role=role, rewards=None, evaluator=None, export=self.export,
            ),
            transport, run_sections(config), self, log=logging.getLogger("bench.learner"),
        )  # fmt: skip

    def export(self, *_: Any) -> None:
        """Leave the weights, which say nothing, unwritten."""

    def write_samples(self, *_: Any) -> None:
        """Drop the samples."""

    def show(self, _: Any) -> None:
        """Draw nothing."""

    def save(self, _: Any) -> None:
        """Write nothing."""

    def write_metrics(self, step: int, row: Row) -> None:
        """Note a step; after the last one there is nothing to wait for."""
        waited_s = cast("float", row["time/wait_for_batch"])
        self.steps.append({"waited_s": waited_s, **self._trainer.noted})
        if step == self.setting.num_steps:
            self.node.stop("measured")


Summary = Callable[[Lab, Sequence[TimedEngine]], dict[str, Any]]


async def make_worker(
    name: str, content: Content, engine: TimedEngine, network: Network, directory: Path
) -> WorkerNode:
    """Return a worker that samples with the timed engine."""
    setting = engine.setting
    table = {
        "network": NETWORK,
        "worker": {"connect": [ADDRESS], "name": name},
        "security": {"curve": False},
    }
    config = parse_config(table)
    transport = SimTransport(network, Port(name), OPTIONS)
    await transport.start()
    join = JoinSource("worker", config.worker.connect, config.security, config.run_dir)
    log = logging.getLogger("bench.worker")
    settings = node.node_settings(config.worker, config.network, join, None, log=log)
    role = Worker(
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
        role, transport, build=lambda settings, assets: parts,
        log=logging.getLogger(f"bench.{name}"),
    )  # fmt: skip


def measure(
    setting: Setting, make_content: Callable[[Setting], Content] = Content
) -> dict[str, Any]:
    """Run a setting to its end in virtual time and return what it has shown."""
    content = make_content(setting)
    engines = {f"w{i}": (setting, content.make_script()) for i in range(setting.num_workers)}
    return play(content, engines, summarise)


def play(
    content: Content,
    workers: Mapping[str, tuple[Setting, Script]],
    summarise: Summary,
) -> dict[str, Any]:
    """Run to the last step in virtual time; return the summary of what has been measured.

    Args:
        content: what is sampled and trained, and by which numbers.
        workers: name -> the numbers of its engine, and what that samples.
        summarise: (learner, engines) -> the result.
    """

    async def main(clock: virtual_time.VirtualClock) -> dict[str, Any]:
        network = Network()
        transport = SimTransport(network, Port("learner", address=ADDRESS), OPTIONS)
        await transport.start()
        with tempfile.TemporaryDirectory() as scratch:
            lab = Lab(content, clock, transport, Path(scratch))
            engines = [TimedEngine(setting, clock, script) for setting, script in workers.values()]
            nodes = [
                await make_worker(name, content, engine, network, Path(scratch))
                for name, engine in zip(workers, engines, strict=True)
            ]
            tasks = [asyncio.create_task(each.run()) for each in nodes]
            await lab.node.run()
            result = summarise(lab, engines)
            for each in nodes:
                each.stop("measured")
            await asyncio.gather(*tasks)
        return result

    return virtual_time.run(main)


def summarise(lab: Lab, engines: Sequence[TimedEngine]) -> dict[str, Any]:
    """Return what a run has shown; its first steps, in which the pipeline fills, do not count."""
    setting, steps, uses = lab.setting, lab.steps, [engine.use for engine in engines]
    now = steps[-1]["at"]
    first = min(2, len(steps) - 1)
    counted = steps[first + 1 :]
    seconds = steps[-1]["at"] - steps[first]["at"]
    # Without staleness nothing is sampled while the learner trains.
    rollout_s = seconds if setting.max_staleness else sum(step["waited_s"] for step in counted)
    num_tokens = sum(step["tokens"] for step in counted)
    counts = lab.node.role.counters
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
