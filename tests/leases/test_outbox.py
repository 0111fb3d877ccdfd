from __future__ import annotations

from echo.leases.worker.outbox import Outbox
from echo.wire.messages import Deliver


def fill(outbox: Outbox, *group_ids: int) -> None:
    for group_id in group_ids:
        message = Deliver(group_id=group_id, attempt=0)
        outbox.put((group_id, 0), message, b"header", b"arrays")


def due(outbox: Outbox, now: float) -> list[int]:
    return [encoded.message.group_id for encoded in outbox.take_due(now=now)]  # type: ignore[attr-defined]


def test_after_a_reconnection_everything_is_due() -> None:
    outbox = Outbox(max_deliveries=3, retry_s=5.0)
    fill(outbox, 1, 2)
    due(outbox, 1.0)
    outbox.resend_all()
    assert due(outbox, 1.1) == [1, 2]


def test_an_encoded_with_the_same_key_is_replaced() -> None:
    outbox = Outbox(max_deliveries=2, retry_s=5.0)
    fill(outbox, 1, 1)
    assert len(outbox) == 1
    [encoded] = outbox.take_due(now=0.0)
    assert encoded.payload == (b"header", b"arrays")
