"""The relay role: a session and a transport; it needs one open port, no GPU and no torch."""

from __future__ import annotations

import logging

from echo.core.errors import LocalProtocolError, RemoteProtocolError, StorageError
from echo.net.transport import Transport
from echo.protocol.joining import Configure
from echo.protocol.node_session import NodeSession
from echo.protocol.relay_session import RelaySession
from echo.runtime.arenas import ArenaStore
from echo.runtime.arenas_parcels import SavedParcel
from echo.runtime.node import Node
from echo.runtime.threads import Pool, Threads
from echo.weights.receiver import VersionArrived
from echo.wire.actions import Action


class DialingNode(Node):
    """What relay and worker share: a session that dials out."""

    session: NodeSession
    arenas: ArenaStore | None = None
    """Where received versions lie; None in memory without a bound."""

    async def recover(self) -> None:
        """Take over what a former process of this node has left of the run's versions."""
        arenas, broadcast = self.arenas, self.session.broadcast
        if arenas is None:
            return
        files = self.threads.pool("recovery")
        for saved in await files.run(arenas.recover, broadcast.run_id):
            try:
                manifest = broadcast.manifest(saved.version, saved.signed_manifest)
                has_chunk = await files.run(arenas.verify_held, manifest, saved.arena)
            except (RemoteProtocolError, StorageError) as error:
                self.log.warning("dropped %s, which was left here: %s", saved.version, error)
                arenas.drop(saved.version)
                continue
            text = "found %s: %d of %d chunks are right"
            self.log.info(text, saved.version, sum(has_chunk), manifest.num_chunks)
            self.perform(broadcast.recover(saved.version, saved.arena, has_chunk, now=self.now))
        for parcel in await files.run(arenas.recover_parcels):
            await self._resume(parcel, files)

    async def _resume(self, saved: SavedParcel, files: Pool) -> None:
        """Go on with an anchor that was on its way."""
        broadcast, journal = self.session.broadcast, saved.journal
        try:
            parcel = await files.run(broadcast.rebuild, saved.version, journal.records())
            journal.open()
        except OSError as error:
            self.log.warning("dropped %s, which was left here: %s", journal.path, error)
            journal.remove()
            return
        text = "found %s as anchor: %d of %d chunks are right"
        self.log.info(text, saved.version, parcel.num_held, parcel.num_chunks)
        parcel.journal = journal
        self.perform(broadcast.resume(parcel, now=self.now))

    def release(self) -> None:
        """Let go of the arenas; what they hold is found by the next process."""
        if self.arenas is not None:
            self.arenas.close()

    def connected(self, peer: str) -> list[Action]:
        """Handle that a dialled link stands."""
        return self.session.connected(peer, now=self.now)

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, reason, now=self.now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Handle that a Dial was carried out."""
        self.session.dialled(address, purpose, peer)

    def dial_failed(self, peer: str, reason: str, *, is_refused: bool) -> list[Action]:
        """Handle that an attempt to dial failed; the transport goes on trying."""
        return self.session.dial_failed(peer, reason, is_refused=is_refused)

    async def drain(self) -> None:
        """Say goodbye, so that nobody waits for this node; the transport delivers it."""
        self.session.is_leaving = True
        self.perform(self.session.leave("stopped by its operator"))


class RelayNode(DialingNode):
    """A relay."""

    def __init__(
        self,
        session: RelaySession,
        transport: Transport,
        *,
        arenas: ArenaStore | None = None,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` starts them."""
        super().__init__(session, transport, threads=threads, log=log)
        self.session: RelaySession = session
        self.arenas = arenas

    async def work(self) -> None:
        """Start looking for the learner; everything else happens in the session."""
        self.perform(self.session.start(now=self.now))

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a relay."""
        match action:
            case VersionArrived():
                self.log.info("holds %s", action.version)
            case Configure():
                self.spawn(self._set_up(), name="set-up")
            case _:
                raise LocalProtocolError(f"a relay cannot {type(action).__name__}")

    async def _set_up(self) -> None:
        """Be ready: a relay has no task and no engine, only what it held before."""
        await self.recover()
        self.perform(self.session.configured({}, now=self.now))
