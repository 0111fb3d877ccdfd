"""Weights from parent to child, pulled chunk by chunk, forwarded as they arrive.

Theory of operation. Every node has at most one parent and any number of children; the learner has
no parent and gets its versions from `publish`. A node keeps a **store** of versions, each an arena
of the image's size with a record of the chunks it holds.

    child                         parent
      Subscribe(newest held)  ->            once per link, and when something seems to be missing
                              <-  Announce  newest version known, and each newer one as it appears
      Fetch(missing, credit)  ->            one version at a time
                              <-  Chunk     ascending, as soon as the parent holds it
      Credit(bytes)           ->            every quarter of the window
                              <-  Waiting   "I live, but wait for that chunk (or version) myself"
                              <-  Gone      the parent has newer versions only

Rules
* A parent announces a version as soon as it knows its manifest, before it holds all chunks: chains
  are pipelined, a chunk leaves as soon as it has arrived and its hash has matched.
* A node never stores or forwards a chunk that does not match the signed manifest.
* A node finishes the version that it is fetching before it takes the newest one, skipping those
  between. (Taking each newer version at once would starve a link that is slower than the pace of
  publication; this way every node is at most two transfers behind.)
* A version is kept while it is one of the newest `keep_versions`, or while it is whole and a child
  takes chunks of it. Everything else is dropped, so the store is bounded by the number of children.
* Whatever is lost is asked for again: after `stall_s` without an answer, or without a chunk, the
  child repeats its Subscribe, or its Fetch with what is missing; after a second such silence, or
  too many bad chunks, it declares the parent bad (`ParentFailed`) and the session gives it another
  one. The new Fetch names only what is missing: no chunk that is held is requested again. A parent
  that merely waits for its own parent says so (`Waiting`), so that one stall does not blame
  everybody below it.

This file has the child's half, `serving.py` the parent's. Seams: `codec`/`base` of the manifest for
deltas, `set_parent` for any topology, `Transfer.arena` for a store on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from echo.errors import LocalProtocolError, RemoteProtocolError
from echo.protocol.actions import Action, Note, Send, VersionArrived
from echo.protocol.codec import Frame, encode
from echo.protocol.manifest import Manifest, SignedManifest, verify
from echo.protocol.messages import (
    Announce,
    Chunk,
    Credit,
    Fetch,
    Gone,
    Message,
    Subscribe,
    Waiting,
)
from echo.protocol.serving import Child, Serving
from echo.protocol.transfer import Transfer as Transfer
from echo.protocol.transfer import new_arena
from echo.rollout import PolicyVersion

MAX_BAD_CHUNKS = 3
"""Chunks with a wrong hash after which a parent is given up; one can be a memory error."""


@dataclass(frozen=True, slots=True)
class ParentFailed:
    """The parent does not deliver; the session must choose another."""

    peer: str
    reason: str


class Broadcast:
    """One node's part in the distribution of weights, parent and child at once."""

    def __init__(
        self, *, node_id: str, window_bytes: int, keep_versions: int, stall_s: float
    ) -> None:
        """Start with an empty store, no parent and no children.

        Args:
            node_id: name of this node.
            window_bytes: credit that a child keeps outstanding.
            keep_versions: complete versions to keep for children and for falling back, at least 1.
            stall_s: seconds without a chunk, credit outstanding, before a Fetch is repeated.
        """
        if window_bytes < 1 or keep_versions < 1 or stall_s <= 0:
            raise ValueError("window_bytes, keep_versions and stall_s must be positive")
        self.node_id = node_id
        self.window_bytes = window_bytes
        self.keep_versions = keep_versions
        self.stall_s = stall_s
        self.store: dict[PolicyVersion, Transfer] = {}
        self._serving = Serving(self.store, node_id=node_id, stall_s=stall_s)
        self.parent: str | None = None
        self.fetching: PolicyVersion | None = None
        self.bytes_received = 0
        self.num_bad_chunks = 0
        self.num_duplicate_chunks = 0
        self._public_key: bytes | None = None
        self._run_id = ""
        self._max_image_bytes = 0
        self._local_image: tuple[bytearray, bytes] | None = None
        self._unspent_bytes = 0
        self._progress_at = 0.0
        self._is_stalled = False
        self._is_asking = False
        self._parent_bad_chunks = 0

    # --- state that others read ------------------------------------------------------------------

    @property
    def newest_complete(self) -> PolicyVersion | None:
        """Newest version held whole."""
        return max(
            (version for version, item in self.store.items() if item.is_complete), default=None
        )

    @property
    def newest_known(self) -> PolicyVersion | None:
        """Newest version whose manifest is known."""
        return self._serving.newest_known

    @property
    def children(self) -> dict[str, Child]:
        """Who takes weights from this node, by peer."""
        return self._serving.children

    @property
    def bytes_sent(self) -> int:
        """Weight bytes sent to children."""
        return self._serving.bytes_sent

    @property
    def deadline(self) -> float | None:
        """When `expire` should be called next; None while nothing is awaited."""
        if self.parent is None or (self.fetching is None and not self._is_asking):
            return None
        return self._progress_at + self.stall_s

    def progress(self) -> tuple[PolicyVersion | None, int, int]:
        """Return (version being fetched, chunks held, chunks in all)."""
        if self.fetching is None:
            return None, 0, 0
        item = self.store[self.fetching]
        return self.fetching, item.num_held, item.manifest.num_chunks

    def offer(self, image: bytearray, image_hash: bytes) -> None:
        """Offer bytes that lie on this machine already, as of the model's own directory.

        If the first version announced has this image by its signed hash, nothing is transferred;
        otherwise the offer is dropped and the version fetched.

        Args:
            image: laid out as a version's image; not changed any more.
            image_hash: BLAKE3-256 of it, computed here and now.
        """
        self._local_image = (image, image_hash)

    def trust(self, *, public_key: bytes, run_id: str, max_image_bytes: int) -> None:
        """Accept manifests of this run signed by this key, up to this size."""
        self._public_key, self._run_id, self._max_image_bytes = public_key, run_id, max_image_bytes

    # --- the learner's side ----------------------------------------------------------------------

    def publish(
        self, signed: SignedManifest, manifest: Manifest, image: bytearray, *, now: float
    ) -> list[Action]:
        """Add a complete version made here, and announce it."""
        if len(image) != manifest.num_bytes:
            raise LocalProtocolError(
                f"{manifest.version}: image of {len(image)} bytes, manifest says otherwise"
            )
        self.store[manifest.version] = Transfer(
            signed, manifest, image, bytearray(b"\1") * manifest.num_chunks, manifest.num_chunks
        )
        return [*self._serving.announce(now=now), *self._retire(now)]

    # --- links -----------------------------------------------------------------------------------

    def set_parent(self, peer: str | None, *, now: float) -> list[Action]:
        """Take weights from `peer` from now on; what is held is kept."""
        self.parent = peer
        self._parent_bad_chunks = 0
        self._is_stalled = self._is_asking = False
        return [*self.resubscribe(now=now), *self._request(now)]

    def remove_child(self, peer: str, *, now: float) -> list[Action]:
        """Forget a child whose link is gone."""
        self.children.pop(peer, None)
        return self._retire(now)

    def resubscribe(self, *, now: float) -> list[Action]:
        """Ask the parent what is newest: at first, and in case an Announce was lost."""
        if self.parent is None:
            return []
        if not self._is_asking and self.fetching is None:
            self._progress_at = now
        self._is_asking = True
        return [self._send(self.parent, Subscribe(newest=self.newest_complete))]

    # --- messages --------------------------------------------------------------------------------

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Handle one link message of the weights plane.

        Raises:
            RemoteProtocolError: if the peer broke a rule; the state is unchanged.
        """
        if peer == self.parent:
            self._is_asking = False
            self._is_stalled &= self.fetching is not None
        match message:
            case Subscribe() | Fetch() | Credit():
                return [*self._serving.receive(peer, message, now)]
            case Announce():
                return [*self._on_announce(peer, message, payload, now)]
            case Chunk():
                return self._on_chunk(peer, message, payload, now)
            case Waiting():
                if peer == self.parent and message.version == self.fetching:
                    self._progress_at, self._is_stalled = now, False
                return []
            case Gone():
                return [*self._on_gone(peer, message, now)]
        raise RemoteProtocolError(f"{type(message).__name__} does not belong to the weights plane")

    def expire(self, *, now: float) -> list[Action | ParentFailed]:
        """Repeat what brought nothing; after a second silence report the parent."""
        if self.deadline is None or now < self.deadline:
            return [*self._retire(now)]
        assert self.parent is not None
        if self._is_stalled:
            peer, self.parent = self.parent, None
            what = "no answer" if self.fetching is None else f"no chunk of {self.fetching}"
            return [ParentFailed(peer, f"{what} for {2 * self.stall_s:.1f} s")]
        self._is_stalled = True
        self._progress_at = now
        asking = self.resubscribe(now=now) if self._is_asking else []
        return [*asking, *self._request(now)]

    def _retire(self, now: float) -> list[Action]:
        """Drop versions that are neither among the newest nor being fetched."""
        complete = sorted((v for v, item in self.store.items() if item.is_complete), reverse=True)
        keep = set(complete[: self.keep_versions])
        keep.update(
            version for version in (self.fetching, self.newest_known) if version is not None
        )
        keep |= self._serving.pinned(now)
        self._serving.forget_silent(now)
        dropped = [version for version in self.store if version not in keep]
        return [action for v in dropped for action in self._serving.drop(v, now=now)]

    # --- as a child ------------------------------------------------------------------------------

    def _on_announce(
        self, peer: str, message: Announce, payload: list[Frame], now: float
    ) -> list[Action]:
        if peer != self.parent or message.version in self.store:
            return []
        if self._public_key is None:
            raise LocalProtocolError("a parent was set before the learner's key was known")
        if len(payload) != 1:
            raise RemoteProtocolError("an Announce without exactly one manifest")
        signed, manifest = verify(
            payload[0],
            public_key=self._public_key,
            run_id=self._run_id,
            max_bytes=self._max_image_bytes,
        )
        if manifest.version != message.version:
            raise RemoteProtocolError(
                f"an Announce of {message.version} with the manifest of {manifest.version}"
            )
        newest = self.newest_complete
        if newest is not None and manifest.version < newest:
            return []
        transfer = self._new_transfer(signed, manifest)
        self.store[manifest.version] = transfer
        actions = self._serving.announce(now=now)
        if transfer.is_complete:
            actions.append(VersionArrived(manifest.version))
        elif self.fetching is None:
            actions += self._fetch_newest(now)
        return actions + self._retire(now)

    def _new_transfer(self, signed: SignedManifest, manifest: Manifest) -> Transfer:
        """Return an empty transfer, or a whole one if this machine has the image already."""
        local, self._local_image = self._local_image, None
        if local is not None and local[1] == manifest.image_hash:
            has_chunk = bytearray(b"\1") * manifest.num_chunks
            return Transfer(signed, manifest, local[0], has_chunk, manifest.num_chunks)
        return Transfer(
            signed, manifest, new_arena(manifest.num_bytes), bytearray(manifest.num_chunks)
        )

    def _fetch_newest(self, now: float) -> list[Action]:
        newest = self.newest_known
        if newest is None or self.store[newest].is_complete:
            self.fetching = None
            return []
        self.fetching = newest
        return self._request(now)

    def _request(self, now: float) -> list[Action]:
        """Ask the parent for everything that is missing, with a full window of credit."""
        if self.parent is None or self.fetching is None:
            return []
        self._progress_at = now
        self._unspent_bytes = 0
        ranges = self.store[self.fetching].missing_ranges()
        return [
            self._send(
                self.parent,
                Fetch(version=self.fetching, ranges=ranges, credit_bytes=self.window_bytes),
            )
        ]

    def _on_chunk(
        self, peer: str, message: Chunk, payload: list[Frame], now: float
    ) -> list[Action | ParentFailed]:
        item = self.store.get(message.version)
        if item is None or peer != self.parent:
            return []
        if len(payload) != 1 or not 0 <= message.index < item.manifest.num_chunks:
            raise RemoteProtocolError(
                f"a Chunk of {message.version} with a bad index or without its bytes"
            )
        data = payload[0]
        start, stop = item.manifest.chunk_range(message.index)
        self.bytes_received += len(data)
        if item.has_chunk[message.index]:
            self.num_duplicate_chunks += 1
            return []
        if len(data) != stop - start or blake3(data).digest() != item.manifest.chunk_hash(
            message.index
        ):
            return self._on_bad_chunk(peer, message, now)
        item.hold(message.index, data)
        self._progress_at, self._is_stalled = now, False
        actions: list[Action | ParentFailed] = [
            *self._serving.forward(message.version, message.index)
        ]
        if item.is_complete:
            if self.fetching == message.version:
                self.fetching = None
            actions.append(VersionArrived(message.version))
            return [*actions, *self._fetch_newest(now), *self._retire(now)]
        if message.version == self.fetching:
            self._unspent_bytes += len(data)
            if self._unspent_bytes >= self.window_bytes // 4:
                actions.append(
                    self._send(
                        peer, Credit(version=self.fetching, credit_bytes=self._unspent_bytes)
                    )
                )
                self._unspent_bytes = 0
        return actions

    def _on_bad_chunk(self, peer: str, message: Chunk, now: float) -> list[Action | ParentFailed]:
        self.num_bad_chunks += 1
        self._parent_bad_chunks += 1
        text = f"chunk {message.index} of {message.version} from {peer} does not match its hash"
        if self._parent_bad_chunks >= MAX_BAD_CHUNKS:
            self.parent = None
            return [Note("warning", text), ParentFailed(peer, text)]
        return [Note("warning", f"{text}; asking again"), *self._request(now)]

    def _on_gone(self, peer: str, message: Gone, now: float) -> list[Action]:
        """Give up a version that the parent has no more; an Announce of a newer one follows."""
        if peer != self.parent or self.fetching != message.version:
            return []
        self.fetching = None
        return [*self._serving.drop(message.version, now=now), *self._fetch_newest(now)]

    def _send(self, peer: str, message: Message, *payload: Frame) -> Send:
        return Send(peer, encode(message, payload, source=self.node_id))
