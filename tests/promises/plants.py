"""A fault of a few lines for each promise, under which its tests must fail.

`pytest tests/promises -k test_07 --plant 07` plants one; `test_plants.py` does so for each (--all).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo.core import buffer
from echo.core.buffer import StalenessBuffer
from echo.core.timers import earliest
from echo.leases import results
from echo.leases.book import LeaseBook, LeasedWorker
from echo.leases.grants import admission, dispatch
from echo.leases.grants.admission import Quota
from echo.leases.grants.relief import Relief
from echo.leases.groups import OpenGroup
from echo.leases.mismatch import Mismatches
from echo.leases.open_groups import AppendRecord, FinishedGroups
from echo.leases.partials import ShippedPartials
from echo.leases.results import Results
from echo.leases.scheduler import Scheduler
from echo.leases.worker.outbox import Outbox
from echo.records import ledger
from echo.roles import joining
from echo.roles.control import ControlLink
from echo.roles.joining import Admission, Joining
from echo.roles.learner import Learner
from echo.roles.members import Member, Presence, Roster
from echo.roles.node import DialingRole
from echo.roles.review import WorkerReview
from echo.runtime.learner.batches import stalls
from echo.weights import receiver
from echo.weights.delta import BlockPatch, decode_block
from echo.weights.manifest import SignedManifest
from echo.weights.parents import Parents
from echo.weights.store import encoded, items, trust, writing
from echo.weights.store.items import Transfer
from echo.weights.store.patches import Patch
from echo.weights.watchdog import Watchdog
from echo.wire.actions import Stop
from echo.wire.codec import decode_envelope
from echo.wire.messages import Ack

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}
"""By the number of the promise, in two digits, and the letter of one of its tests."""


def plant(number: int, letter: str = "") -> Callable[[Plant], Plant]:
    """Enter the plant of a promise, or of what one of its tests alone can find."""

    def enter(planted: Plant) -> Plant:
        PLANTS[f"{number:02d}{letter}"] = planted
        return planted

    return enter


def ignore_age(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a module find tokens of any age fit to be trained on."""
    find = module.find_fault

    def without_age(*arguments: Any, **named: Any) -> str | None:
        return None if (fault := find(*arguments, **named)) == "stale" else fault

    patch.setattr(module, "find_fault", without_age)


@plant(1)
def train_on_tokens_of_any_age(patch: pytest.MonkeyPatch) -> None:
    """Lease by the learner's step, and check neither on arrival nor at consumption."""
    ignore_age(patch, results)
    ignore_age(patch, buffer)
    patch.setattr(admission, "most_promised", lambda **numbers: 10**9)
    patch.setattr(admission, "oldest_version", lambda lineages, **numbers: None)


@plant(2)
def lease_by_the_learners_step(patch: pytest.MonkeyPatch) -> None:
    """Take the learner's step where the worker's version belongs."""

    def limit(self: Quota, installed_step: int) -> int:
        return (self.max_staleness + self.step + 1) * self.groups_per_step

    patch.setattr(Quota, "limit", limit)
    patch.setattr(admission, "oldest_version", lambda lineages, **numbers: None)


@plant(3)
def accept_what_is_too_old(patch: pytest.MonkeyPatch) -> None:
    """Leave the age of a result to the buffer."""
    ignore_age(patch, results)


@plant(4)
def publish_as_measured(patch: pytest.MonkeyPatch) -> None:
    """Let the period follow the broadcast, whatever the bound, and a learner that waits wait."""
    from echo.runtime.learner.batches.waiting import BatchWait
    from echo.weights.schedule import PublishPace

    def is_due(self: PublishPace, step: int) -> bool:
        last = self._published_step
        return last is None or step - last >= self.period

    patch.setattr(PublishPace, "is_due", is_due)

    def check(self: BatchWait, *, now: float) -> Any:
        self.check_at = now + 0.5
        return ""

    patch.setattr(PublishPace, "limit", lambda self, max_staleness: None)
    patch.setattr(BatchWait, "check", check)


@plant(5)
def sample_with_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """Lease to workers whose weights are a version behind, and train on what they make."""
    train_on_tokens_of_any_age(patch)


@plant(6)
def take_rollouts_of_an_abandoned_lineage(patch: pytest.MonkeyPatch) -> None:
    """Forget that a resume has undone steps."""
    for module in (results, buffer):
        find = module.find_fault

        def blind(*arguments: Any, find: Any = find, **named: Any) -> str | None:
            fault: str | None = find(*arguments, **named)
            return None if fault == "abandoned_version" else fault

        patch.setattr(module, "find_fault", blind)


@plant(7)
def grant_without_a_record(patch: pytest.MonkeyPatch) -> None:
    """Send leases that no record tells of."""
    grant = Scheduler.grant

    def unrecorded(self: Scheduler, *arguments: Any, **named: Any) -> Any:
        actions = grant(self, *arguments, **named)
        return [action for action in actions if not isinstance(action, AppendRecord)]

    patch.setattr(Scheduler, "grant", unrecorded)


@plant(8)
def acknowledge_on_arrival(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge a group before the disk has it."""
    deliver = Results.on_deliver

    def hasty(self: Results, node_id: str, message: Any, *rest: Any, **named: Any) -> Any:
        ack = Ack(group_id=message.group_id, attempt=message.attempt, outcome="accepted")
        return [*self._routes.to(node_id, ack), *deliver(self, node_id, message, *rest, **named)]

    patch.setattr(Results, "on_deliver", hasty)


@plant(9)
def take_the_newest_attempt_only(patch: pytest.MonkeyPatch) -> None:
    """Refuse a result whose attempt is not the newest granted."""
    find = Results._find_fault

    def strict(self: Results, group: Any, message: Any, *rest: Any) -> str | None:
        newest = self._groups.leases.group(group.group_id).newest_attempt
        return "old_attempt" if message.attempt != newest else find(self, group, message, *rest)

    patch.setattr(Results, "_find_fault", strict)


@plant(10)
def let_losers_go_on(patch: pytest.MonkeyPatch) -> None:
    """Tell nobody that another was first."""
    patch.setattr(Results, "_cancel", lambda self, leases: [])


@plant(11)
def keep_leases_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Neither expire a lease nor take it from a dead worker."""
    patch.setattr(LeaseBook, "expire", lambda self, *, now: [])
    patch.setattr(LeaseBook, "drop_worker", lambda self, worker: [])


@plant(12)
def lose_what_waits(patch: pytest.MonkeyPatch) -> None:
    """Forget, at a resume, the groups that were acknowledged and not yet trained."""
    from echo.runtime.learner.saving.resume import SavedRun

    recover = SavedRun.recover

    def forgetful(*arguments: Any, **named: Any) -> Any:
        return dataclasses.replace(recover(*arguments, **named), buffered=[])

    patch.setattr(SavedRun, "recover", forgetful)


@plant(13)
def count_void_steps(patch: pytest.MonkeyPatch) -> None:
    """Take the steps after the checkpoint for done."""
    patch.setattr(ledger, "is_surviving", lambda version, lineages: True)


@plant(14)
def forget_what_is_finished(patch: pytest.MonkeyPatch) -> None:
    """Take a second result of a group for a first one, whoever holds a lease of it."""
    deliver = LeaseBook.deliver

    def deliver_again(self: LeaseBook, group_id: int, attempt: int, worker_id: str) -> None:
        if not self.group(group_id).num_attempts:  # it has ended
            self.adopt(group_id, attempt, worker_id, now=0.0)
        deliver(self, group_id, attempt, worker_id)

    patch.setattr(LeaseBook, "deliver", deliver_again)
    patch.setattr(FinishedGroups, "__contains__", lambda self, group: False)
    patch.setattr(Results, "_may_end", lambda self, node_id, message: True)


@plant(15)
def ignore_failures(patch: pytest.MonkeyPatch) -> None:
    """Give a group that cannot be made no end."""
    patch.setattr(Results, "on_failed", lambda self, node_id, message, *, now: [])


@plant(16)
def try_the_same_batch_again(patch: pytest.MonkeyPatch) -> None:
    """Put all groups of a failed step back."""
    from echo.runtime.learner.batches.failed_steps import FailedSteps

    async def put_back(self: FailedSteps, groups: Any, error: Any) -> None:
        self._buffer.put_back(groups, num_taken=len(groups))

    patch.setattr(FailedSteps, "end_faulty", put_back)


@plant(17)
def lose_what_is_evicted(patch: pytest.MonkeyPatch) -> None:
    """Lose every seventh group on its way into the buffer."""
    put = StalenessBuffer.put

    def leaky(self: StalenessBuffer, group: Any, **named: Any) -> None:
        if group.group_id % 7 != 3:
            put(self, group, **named)

    patch.setattr(StalenessBuffer, "put", leaky)


@plant(18)
def take_files_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """Neither keep a second learner out, nor hash a record or a checkpoint."""
    from echo.runtime.learner.saving import checkpoint

    patch.setattr(ledger, "lock_directory", lambda *_, **__: os.open(os.devnull, os.O_RDONLY))
    patch.setattr(ledger, "_hash", lambda seq, body: b"")
    patch.setattr(checkpoint, "_verify", lambda path, sums: None)


@plant(22)
def say_installed(patch: pytest.MonkeyPatch) -> None:
    """Take a version that the engine refuses for installed."""
    from echo.core.errors import EngineError
    from echo.runtime.worker.node import WorkerParts

    install = WorkerParts.install

    def careless(*arguments: Any) -> str | None:
        try:
            return install(*arguments)
        except EngineError:
            return ""

    patch.setattr(WorkerParts, "install", careless)


@plant(23)
def begin_anew(patch: pytest.MonkeyPatch) -> None:
    """Find nothing right of what a killed process had fetched."""
    from echo.runtime.disk_store import MemoryStore

    patch.setattr(
        MemoryStore, "verify_held", lambda self, manifest, storage: bytearray(manifest.num_chunks)
    )


@plant(23, "b")
def believe_what_is_half_written(patch: pytest.MonkeyPatch) -> None:
    """Leave no mark of an image that is being written, and hash nothing that is found."""
    from echo.runtime.disk_store import DiskStore, MemoryStore

    patch.setattr(DiskStore, "begin_patch", lambda self, patch: None)
    patch.setattr(
        MemoryStore,
        "verify_held",
        lambda self, manifest, storage: bytearray(b"\1") * manifest.num_chunks,
    )


@plant(19)
def change_a_byte(patch: pytest.MonkeyPatch) -> None:
    """Write one byte of each chunk wrongly, after its hash was found right."""
    put = Transfer.put

    def careless(self: Transfer, index: int, data: Any, write: Any = None) -> None:
        put(self, index, data, write)
        self.place(index)[0] ^= 1

    patch.setattr(Transfer, "put", careless)


@plant(19, "b")
def write_in_place_carelessly(patch: pytest.MonkeyPatch) -> None:
    """Change a byte too many with every version that is written in place."""
    write = Patch.write

    def careless(self: Patch, image: memoryview) -> None:
        write(self, image)
        image[100] ^= 1

    patch.setattr(Patch, "write", careless)


@plant(20, "b")
def audit_nothing(patch: pytest.MonkeyPatch) -> None:
    """Look neither at what a delta replaces nor at what lies beside it."""
    patch.setattr(items.AuditChunks, "run", lambda self: "")
    patch.setattr(encoded.OpenBlock, "run", open_whatever_is_there)


def open_whatever_is_there(work: encoded.OpenBlock) -> str:
    """Open a block on any base."""
    base, assumed = bytearray(len(work.base)), work.encoded.patch
    decode_block(work.coded, work.base, memoryview(base))
    old, new = (np.frombuffer(each, np.uint8) for each in (bytes(work.base), base))
    assert assumed is not None
    assumed.blocks[work.block] = BlockPatch(None, old, new, b"", b"")
    return ""


@plant(22, "b")
def insist_on_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    """Keep a version ready that the engine has refused in place."""
    from echo.weights.receiver import Receiver

    patch.setattr(Receiver, "_refuse", lambda self, item_id, fault, now: [])


@plant(20)
def verify_nothing(patch: pytest.MonkeyPatch) -> None:
    """Take every chunk for the right one."""

    class Agreeing:
        def __init__(self, data: Any) -> None:
            pass

        def digest(self) -> Any:
            return Anything()

    class Anything(bytes):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    patch.setattr(writing, "blake3", Agreeing)


@plant(21)
def believe_every_signature(patch: pytest.MonkeyPatch) -> None:
    """Read manifests without asking who signed them, and for which run."""

    def trusting(frame: Any, **named: Any) -> Any:
        import msgspec

        from echo.weights.manifest import Manifest

        signed = msgspec.msgpack.decode(frame, type=SignedManifest)
        return signed, msgspec.msgpack.decode(signed.body, type=Manifest)

    patch.setattr(trust, "verify", trusting)
    patch.setattr(encoded, "verify", trusting)


@plant(25)
def stay_with_a_silent_way(patch: pytest.MonkeyPatch) -> None:
    """Keep to a relay over which nothing is heard of the learner any more."""

    def loyal(self: DialingRole, now: float) -> Any:
        return self.heartbeat(now=now) if now >= self._heartbeat_at else []

    patch.setattr(DialingRole, "_expire_admitted", loyal)


@plant(26)
def ask_for_everything_again(patch: pytest.MonkeyPatch) -> None:
    """Ask a new parent for all chunks, held or not."""

    def all_chunks(self: Transfer) -> tuple[tuple[int, int], ...]:
        return ((0, len(self.has_chunk)),)

    patch.setattr(Transfer, "missing", all_chunks)


@plant(27)
def believe_announcements(patch: pytest.MonkeyPatch) -> None:
    """Take an announcement for a delivery, and silence for patience."""
    patch.setattr(Watchdog, "check", lambda self, *arguments, **named: ("", False))


@plant(28)
def wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Do nothing by time while a chunk is being written."""
    from echo.runtime.node import Node

    work, on_timer = Node._work, Node._on_timer

    def blocking(self: Any, action: Any) -> None:
        work(self, action)
        self.num_blocking = getattr(self, "num_blocking", 0) + 1

    def finished(self: Any, action: Any, future: Any, done: Any = Node._on_finished) -> None:
        self.num_blocking -= 1
        done(self, action, future)

    def late(self: Any) -> None:
        if getattr(self, "num_blocking", 0):
            self._set_timer(self.now + 0.1)
        else:
            on_timer(self)

    patch.setattr(Node, "_work", blocking)
    patch.setattr(Node, "_on_finished", finished)
    patch.setattr(Node, "_on_timer", late)


@plant(25, "b")
def leave_leases_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Ask no worker for a lease."""
    patch.setattr(Relief, "choose_moves", lambda self, running: {})


@plant(25, "c")
def believe_what_is_reported(patch: pytest.MonkeyPatch) -> None:
    """Copy no group for its age."""
    patch.setattr(dispatch, "AGE_FACTOR", float("inf"))
    patch.setattr(Relief, "_withheld_from", lambda self, record: None)


@plant(29)
def say_that_it_waits(patch: pytest.MonkeyPatch) -> None:
    """Say how many groups are missing, and no more."""
    patch.setattr(stalls, "describe_wait", lambda fleet: "2 of 2 groups")


@plant(30)
def bound_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let the outbox grow, and grant without regard for what is promised."""
    patch.setattr(Outbox, "is_full", False)
    patch.setattr(admission, "most_promised", lambda **numbers: 10**9)


@plant(30, "d")
def look_for_space_with_a_heartbeat(patch: pytest.MonkeyPatch) -> None:
    """Arm no timer where space is lacking."""

    def deadline(self: receiver.Receiver) -> float | None:
        return earliest(self.watchdog.deadline(self.item), self.audit.deadline)

    patch.setattr(receiver.Receiver, "deadline", property(deadline))


@plant(31)
def wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Never give a learner up."""
    expire = ControlLink.expire

    def patient(self: ControlLink, **arguments: Any) -> Any:
        return [action for action in expire(self, **arguments) if not isinstance(action, Stop)]

    patch.setattr(ControlLink, "expire", patient)


@plant(33)
def say_everything_once(patch: pytest.MonkeyPatch) -> None:
    """Repeat nothing in joining."""
    repeat = Joining.repeat
    said: set[tuple[int, str, int]] = set()

    def once(self: Joining, now: float) -> Any:
        key = id(self), self.state, len(self._assets.missing)
        is_first = key not in said
        said.add(key)
        actions = repeat(self, now)
        return actions if is_first else []

    patch.setattr(Joining, "repeat", once)


@plant(34)
def grant_to_everybody_known(patch: pytest.MonkeyPatch) -> None:
    """Lease to nodes that are not admitted yet, and have no weights."""
    move = Roster.move

    def eager(self: Roster, member: Member, to: Presence) -> None:
        move(self, member, to)
        member.worker.capacity = 3

    def everybody(self: Roster, role: str | None = None) -> list[Member]:
        return [member for member in self.nodes.values() if role in (None, member.role)]

    patch.setattr(Roster, "move", eager)
    patch.setattr(Roster, "active", everybody)
    patch.setattr(LeasedWorker, "is_able", lambda self, usable: True)
    patch.setattr(Quota, "bounds", lambda self, workers: {w.installed: 10**6 for w in workers})


@plant(35)
def know_one_address(patch: pytest.MonkeyPatch) -> None:
    """Try the first address only."""
    addresses = vars(Parents)["learner_addresses"].fget
    patch.setattr(Parents, "learner_addresses", property(lambda self: addresses(self)[:1]))


@plant(35, "b")
def know_the_plan_alone(patch: pytest.MonkeyPatch) -> None:
    """Do not turn to the node at the other end of the control connection."""
    hops = vars(Parents)["_hops"].fget

    def without_control(self: Parents) -> Any:
        control, self.control = self.control, None
        found = hops(self)
        self.control = control
        return found

    patch.setattr(Parents, "_hops", property(without_control))


@plant(36)
def keep_no_partials(patch: pytest.MonkeyPatch) -> None:
    """Forget what leaving workers have begun."""
    patch.setattr(ShippedPartials, "put", lambda self, *arguments, **named: None)


@plant(37)
def plan_for_those_on_standby(patch: pytest.MonkeyPatch) -> None:
    """Lease to workers on standby, and plan weights for them."""

    def everybody(self: Roster, role: str | None = None) -> list[Member]:
        found = self.members(role)
        for member in found:
            member.node.is_standby = False
        return found

    patch.setattr(Roster, "active", everybody)


@plant(38)
def compare_no_hashes(patch: pytest.MonkeyPatch) -> None:
    """Let every node in, whatever it has, and follow every run."""

    patch.setattr(joining, "digest_mismatch", lambda *, ours, theirs: None)
    patch.setattr(Joining, "_find_mismatch", lambda self, message: None)


@plant(39)
def raise_at_garbage(patch: pytest.MonkeyPatch) -> None:
    """Let a peer's mistake end the node."""

    def fragile(self: Any, peer: str, frames: Any, *, now: float) -> Any:
        return self._receive(peer, decode_envelope(frames), frames, now)

    patch.setattr(DialingRole, "receive", fragile)
    patch.setattr(
        Learner,
        "receive",
        lambda self, peer, frames, *, now: self._receive(
            peer, decode_envelope(frames), frames[1:], now
        ),
    )


@plant(39, "c")
def believe_every_name(patch: pytest.MonkeyPatch) -> None:
    """Let whoever names a lease or a node speak for it."""

    patch.setattr(OpenGroup, "was_granted", lambda self, attempt, worker_id: True)
    patch.setattr(Admission, "is_missing_hello", lambda self, source, message: False)
    patch.setattr(Admission, "proves_name", lambda self, source, message: True)
    patch.setattr(Admission, "is_genuine", lambda self, envelope, message, payload: True)


@plant(39, "d")
def compare_no_workers(patch: pytest.MonkeyPatch) -> None:
    """Take what workers state of their samples for true."""
    patch.setattr(WorkerReview, "compare", lambda self, samples, *, now: [])


@plant(39, "e")
def compare_all_workers(patch: pytest.MonkeyPatch) -> None:
    """Compare workers of any engine with each other."""
    trained = Mismatches.trained

    def blind(self: Mismatches, sampled: Any, *, engine: str) -> None:
        trained(self, sampled, engine="any")

    patch.setattr(Mismatches, "trained", blind)
