"""One process of bench_update.py: a learner that takes steps and publishes.

The receiver is that of broadcast/node.py, from which the words of the commands are. With `publish`
the clock starts, then weights are rounded, coded and sent as a run does it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import uvloop
from broadcast.node import LOG, configuration, force, is_planned
from broadcast.publishing import publishing_role
from broadcast.stream import commands, tell, tell_cpu
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.schema import Config
from echo.core.rollout import PolicyVersion
from echo.engine import allocator
from echo.net.transport import Transport
from echo.roles.learner import Learner
from echo.roles.plans import Publishing
from echo.runtime import node
from echo.runtime.identity import Identity
from echo.runtime.learner.versions.publish import Publisher, VersionEncoder, make_images
from echo.runtime.node import Node
from update.state import SCALES, SHAPES, Weights


class Stepper(Node):
    """A learner whose steps are noise."""

    role: Learner

    def __init__(
        self,
        role: Learner,
        transport: Transport,
        publisher: Publisher,
        weights: Weights,
        *,
        is_whole: bool,
    ) -> None:
        """Publish weights.

        Args:
            role: the learner's.
            transport: its links.
            publisher: makes versions.
            weights: of which.
            is_whole: whether each version is sealed before it is coded.
        """
        super().__init__(role, transport, log=LOG)
        self.role = role
        self._publisher = publisher
        self._weights = weights
        self._is_whole = is_whole
        self._versions = VersionEncoder(
            role.broadcast, publisher.coder, codec="delta", pool=self.threads.pool("coder"),
            perform=self.perform, spawn=self.spawn, clock=lambda: self.now,
        )  # fmt: skip
        self._step = -1

    async def work(self) -> None:
        tell(address=self.transport.listen_address)
        async for command in commands():
            match command:
                case ["plan"]:
                    await self.wait_until(lambda: is_planned(self.role, 1), within_s=600)
                    tell(planned=True)
                case ["step"]:
                    await asyncio.to_thread(self._weights.step)
                    tell(stepped=True)
                case ["publish"]:
                    await self._publish()
                case ["seal"]:
                    await self._versions.wait()
                    version = self.role.broadcast.newest_complete
                    assert version is not None
                    manifest = self.role.broadcast.store[version].manifest
                    tell(hash=manifest.image_hash.hex(), image_bytes=manifest.num_bytes)
                case ["cpu"]:
                    tell_cpu()
        self.stop("the benchmark is over")

    async def _publish(self) -> None:
        """Publish a version as the learner does after a step."""
        self._step += 1
        at, cpu_s = time.monotonic(), time.process_time()
        version = PolicyVersion(1, self._step)
        made = await asyncio.to_thread(self._publisher.make, self._weights.state, version)
        if self._is_whole:
            made = await asyncio.to_thread(self._publisher.coder.seal, made)
        self.report(Publishing())
        await self._versions.publish(made)
        tell(at=at, cpu_s=cpu_s)


async def run(config: Config, arguments: argparse.Namespace) -> None:
    transport = await node.start_transport(config.network, arguments.listen, None)
    identity = Identity("bench", Ed25519PrivateKey.generate())
    role = publishing_role(config, identity, str(transport.listen_address))
    force(role, "chain", 0)
    publisher = Publisher(
        identity,
        encrypts=config.security.curve,
        chunk_bytes=config.network.chunk_bytes,
        images=make_images(config.model.dtype, config.network),
    )
    weights = Weights(arguments.shape, arguments.share)
    is_whole = arguments.kind == "whole"
    await Stepper(role, transport, publisher, weights, is_whole=is_whole).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["changes", "whole"], default="changes")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--share", type=float, choices=SCALES, default=0.014)
    arguments = parser.parse_args()
    arguments.connect, arguments.curve = None, False
    allocator.tune(os.environ)
    uvloop.run(run(configuration(arguments), arguments))


if __name__ == "__main__":
    main()
