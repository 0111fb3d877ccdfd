"""What a node believes: Welcome as the learner signed it, and nothing that a relay makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import RefusedError
from echo.core.rollout import Lineage
from echo.weights.store import (
    FINGERPRINT_BYTES,
    fingerprint,
    show_fingerprint,
    sign_welcome,
    welcome_fault,
)
from echo.wire.codec import decode_envelope, decode_message, encode
from echo.wire.messages import Welcome
from tests.protocol.harness import KEY, PUBLIC_KEY, Process, Run

OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_PUBLIC_KEY = OTHER_KEY.public_key().public_bytes_raw()
KNOWN = fingerprint(PUBLIC_KEY)
RELAY = "tcp://r1:1"

WELCOME = Welcome(
    run_id="run",
    incarnation="w1#1",
    public_key=PUBLIC_KEY,
    lineages=(Lineage(1, 0), Lineage(2, 3)),
    settings={"sampling.temperature": 1, "task.options": {"reward": "exact", "sizes": (1, 2.5)}},
    assets={"config.json": ("aa", 2)},
    digests={"model": "bb"},
    heartbeat_s=5,  # a whole number: it arrives as 5.0
    dead_after_s=45.0,
)

OTHERWISE: dict[str, Any] = {
    "run_id": "another",
    "incarnation": "w1#2",
    "lineages": (Lineage(1, 0),),
    "settings": {"sampling.temperature": 1, "task.options": {"reward": "evil.py:f"}},
    "assets": {"config.json": ("cc", 2)},
    "digests": {},
    "heartbeat_s": 6.0,
    "dead_after_s": 1e9,
}


def arrived(welcome: Welcome) -> Welcome:
    """Return a message as it is read at the other end."""
    frames = encode(welcome, source="learner", target="w1")
    read: Welcome = decode_message(decode_envelope(frames))
    return read


def test_what_the_learner_signed_is_believed_with_and_without_a_fingerprint() -> None:
    signed = arrived(sign_welcome(WELCOME, KEY))
    assert signed.signature
    assert (signed.settings["sampling.temperature"], signed.heartbeat_s) == (1, 5.0)
    for known in (KNOWN, None):
        assert welcome_fault(signed, known=known) is None


@pytest.mark.parametrize("name", OTHERWISE)
def test_no_field_can_be_changed_on_the_way(name: str) -> None:
    assert OTHERWISE.keys() == {*Welcome.__struct_fields__} - {"public_key", "signature"}
    changed = msgspec.structs.replace(sign_welcome(WELCOME, KEY), **{name: OTHERWISE[name]})
    for known in (KNOWN, None):
        fault = welcome_fault(arrived(changed), known=known)
        assert fault is not None
        assert fault[0] == "wrong_signature"


def test_whoever_signs_with_another_key_is_told_from_the_learner_by_the_fingerprint() -> None:
    posing = msgspec.structs.replace(WELCOME, public_key=OTHER_PUBLIC_KEY)
    fault = welcome_fault(arrived(sign_welcome(posing, OTHER_KEY)), known=KNOWN)
    assert fault is not None
    assert fault[0] == "wrong_signing_key"
    for text in (show_fingerprint(KNOWN), show_fingerprint(fingerprint(OTHER_PUBLIC_KEY))):
        assert text in fault[1]
    assert "runs/NAME/keys/join" in fault[1]


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32)])
def test_a_key_that_is_none_is_a_fault_and_no_error(key: bytes) -> None:
    welcome = msgspec.structs.replace(WELCOME, public_key=key)
    assert welcome_fault(welcome, known=None) is not None


def test_a_fingerprint_has_128_bits() -> None:
    assert len(KNOWN) == FINGERPRINT_BYTES == 16
    assert len(show_fingerprint(KNOWN)) == 22


# --- through a relay that is anybody -------------------------------------------------------------


def rewrite(relay: Process, **changes: Any) -> None:
    """Have a relay change every Welcome that it forwards; with another key it signs it anew."""
    forward = relay.session.forward

    def forward_changed(peer: str, envelope: Any, frames: list[Any]) -> Any:
        message = decode_message(envelope)
        if isinstance(message, Welcome):
            message = msgspec.structs.replace(message, **changes)
            if message.public_key == OTHER_PUBLIC_KEY:
                message = sign_welcome(message, OTHER_KEY)
            frames = encode(message, source=envelope.source, target=envelope.target)
            envelope = decode_envelope(frames)
        return forward(peer, envelope, frames)

    relay.session.forward = forward_changed


@pytest.mark.parametrize("role", ["worker", "relay"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"task.options": {"reward": "evil.py:f"}}}, "wrong_signature"),
        ({"assets": {"evil.py": ("00", 1)}}, "wrong_signature"),
        ({"run_id": "another"}, "wrong_signature"),
        ({"public_key": OTHER_PUBLIC_KEY}, "wrong_signing_key"),
    ],
)
def test_a_relay_cannot_change_what_a_node_inherits(
    tmp_path: Path, changes: dict[str, Any], reason: str, role: str
) -> None:
    run = Run(tmp_path)
    run.start_learner()
    rewrite(run.start_relay("r1"), **changes)
    run.world.run(2.0)
    if role == "worker":
        node = run.start_worker("w1", connect=[RELAY], fingerprint=KNOWN)
    else:
        node = run.start_relay("r2", connect=[RELAY], fingerprint=KNOWN)
    run.world.run(5.0)
    assert node.stop is not None
    assert node.stop.reason == reason
    assert isinstance(node.stop.error, RefusedError)
    assert f"over {RELAY} (r1): " in str(node.stop.error)
    assert not any("configured" in note for note in node.notes), "nothing of it was used"
    assert not node.session.broadcast.run_id


def test_a_file_with_a_name_of_its_own_is_refused_whoever_signed_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_learner(assets={"config.json": b"{}", "evil.py": b"1"})
    worker = run.start_worker("w1", fingerprint=KNOWN)
    run.world.run(5.0)
    assert worker.stop is not None
    assert worker.stop.reason == "unknown_file"
    assert "offers the files ['evil.py']" in str(worker.stop.error)
    assert not any("configured" in note for note in worker.notes)


def test_without_a_fingerprint_the_first_key_counts_and_no_other_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    worker = run.start_worker("w1")
    run.world.run(3.0)
    assert worker.session.is_admitted
    run.world.kill(learner)
    run.start_learner(key=OTHER_KEY)
    run.world.run(10.0)
    assert worker.stop is not None
    assert worker.stop.reason == "another_run"
