"""Deltas on their base across nodes: seals, chains of versions, damage, and who is served what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from echo.core.rollout import PolicyVersion
from echo.weights.delta import encode_delta, open_block, split_blocks
from echo.weights.manifest import encode_signed, sign
from echo.weights.store import writing
from echo.weights.store.encoded import OpenBlock
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import AuditChunks, Transfer
from echo.weights.store.memory import RecycledMemory, touched_memory
from echo.weights.store.patches import Patch, PatchMode
from echo.wire.messages import FULL, Announce, Chunk, Fetch, Form, Gone, Subscribe
from tests.roles.harness import CHUNK_BYTES, KEY, message_of
from tests.weights.encoded_versions import BLOCK_BYTES, described, key_of, sent_chunks, v
from tests.weights.net import KEEP, NET_BYTES, Net, content, image_of, run

MODES: list[PatchMode] = ["copy", "now", "on_install"]
IN_PLACE: list[PatchMode] = ["now", "on_install"]


def chain(*names: str, mode: PatchMode) -> Net:
    """Return nodes each of which takes its weights from the one before; all hold v0."""
    net = Net(*names)
    for parent, child in itertools.pairwise(names):
        net.nodes[child].patch_mode = mode
        net.attach(child, parent)
    run(net.publish(0)[:1])
    net.settle()
    return net


def publish_delta(net: Net, step: int, *, is_sealed: bool = True) -> None:
    """Publish a version as a delta on the one before, with its seal or without."""
    *pieces, seal = net.publish(step, step - 1, is_on_base=True)
    run([*pieces, seal] if is_sealed else pieces)


def seal(net: Net, step: int) -> None:
    net.publish(step, step - 1, is_on_base=True)[-1]()


def is_sealed(net: Net, name: str, step: int) -> bool:
    return net.nodes[name].store[v(step)].signed is not None


def audit(net: Net) -> None:
    """Let time go by until all audits are through."""
    for _ in range(3):
        net.wait(1.0)
        net.settle()


def until(net: Net, name: str, kind: type) -> Any:
    """Deliver and work until a node is about to do a kind of work; take that out and return it."""
    for _ in range(1000):
        found = [each for each in net.works if each[0] == name and isinstance(each[1], kind)]
        if found:
            net.works.remove(found[0])
            return found[0][1]
        if net.works:
            net.decode()
        else:
            net.deliver(net.busy()[0])
    raise AssertionError(f"{name} never does that")


@pytest.mark.parametrize("mode", MODES)
def test_deltas_on_their_base_go_over_three_hops(mode: PatchMode) -> None:
    net = chain("a", "b", "c", "d", mode=mode)
    before = net.nodes["d"].bytes_received
    for step in range(1, 5):
        publish_delta(net, step)
        net.settle()
        net.check()
        assert all(net.holds(name, step) for name in "bcd")
    audit(net)
    assert {(name, v(4)) for name in "bcd"} <= set(net.audited)
    assert not net.damaged
    assert net.nodes["d"].bytes_received - before < 2 * NET_BYTES
    for name in "bcd":
        stores = {id(image.storage) for image in net.nodes[name].store.values()}
        assert (len(stores) == 1) == (mode != "copy")
        assert not [image for image in net.nodes[name].store.values() if image.signed is None]


@pytest.mark.parametrize("mode", MODES)
def test_chunks_that_come_before_their_tables_wait_for_them(mode: PatchMode) -> None:
    net = chain("a", "b", "c", mode=mode)
    net.is_overtaking = True
    for step in range(1, 4):
        net.sent.clear()
        publish_delta(net, step)
        net.settle()
        assert all(net.holds(name, step) for name in "bc")
        chunks = [(to, m.version, m.index) for _, to, m in net.sent if isinstance(m, Chunk)]
        assert chunks
        assert len(chunks) == len(set(chunks)), "it was sent twice"
    assert not net.num_refused
    assert not net.failed


def test_chunks_without_a_table_are_bounded_and_forgotten_with_their_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "MAX_WINDOW_BYTES", 4 * CHUNK_BYTES)
    early = writing.EarlyChunks()
    for index in range(9):  # however short they are
        early.keep("a", Chunk(version=v(1), index=index), [b""])
    early.keep("b", Chunk(version=v(1), index=0), [b"another"])
    assert [(peer, message.index) for peer, message, _ in early.take(3)] == [
        ("a", 0), ("a", 1), ("a", 2),
    ]  # fmt: skip
    early.keep("b", Chunk(version=v(1), index=7), [bytes(CHUNK_BYTES)])
    assert [message.index for _, message, _ in early.take(100)] == [3, 7]
    early.keep("b", Chunk(version=v(1), index=7), [bytes(CHUNK_BYTES)])
    early.clear()
    assert not early.take(100)


# --- seals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_sealed_is_used_and_never_offered_in_full(mode: PatchMode) -> None:
    net = chain("a", "b", "c", mode=mode)
    publish_delta(net, 1, is_sealed=False)
    net.settle()
    assert net.holds("c", 1)
    assert ("c", v(1)) in net.arrived
    announced = [m for _, _, m in net.sent if isinstance(m, Announce) and m.version == v(1)]
    assert not announced
    # Whoever knows of it from others, and asks for it in full: its key is not here.
    fetch = Fetch(version=v(1), ranges=((0, 1),), credit_bytes=1 << 20)
    [answer, *_] = net.nodes["b"].receive("late", fetch, [], now=net.now)
    assert isinstance(message_of(answer.frames), Gone)  # type: ignore[union-attr]
    seal(net, 1)
    net.settle()
    assert is_sealed(net, "b", 1)
    assert is_sealed(net, "c", 1)
    audit(net)
    assert set(net.audited) == {("b", v(1)), ("c", v(1))}


@pytest.mark.parametrize("mode", MODES)
def test_a_seal_may_come_before_the_version(mode: PatchMode) -> None:
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1)
    work = until(net, "b", OpenBlock)
    while net.busy():
        net.deliver(net.busy()[0])  # the seal among it
    net.works.append(("b", work))
    net.settle()
    assert net.holds("b", 1)
    assert is_sealed(net, "b", 1)
    audit(net)
    assert net.audited == [("b", v(1))]


@pytest.mark.parametrize("mode", MODES)
def test_a_seal_that_was_lost_is_asked_for(mode: PatchMode) -> None:
    """With its link, say; nothing newer need follow."""
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1, is_sealed=False)
    net.settle()
    seal(net, 1)
    net.queues[net.link("b") or "", "b"].clear()
    net.settle()
    assert not is_sealed(net, "b", 1)
    net.attach("b", "a")
    net.settle()
    assert is_sealed(net, "b", 1)


@pytest.mark.parametrize("mode", MODES)
def test_several_deltas_follow_each_other_without_any_seal(mode: PatchMode) -> None:
    net = chain("a", "b", "c", mode=mode)
    for step in (1, 2, 3):
        publish_delta(net, step, is_sealed=False)
    net.settle()
    assert net.holds("c", 3)
    seal(net, 3)
    net.settle()
    audit(net)
    assert ("c", v(3)) in net.audited
    assert is_sealed(net, "c", 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_seal_of_another_image_is_refused_once_and_the_next_version_is_taken(
    mode: PatchMode,
) -> None:
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1, is_sealed=False)
    net.settle()
    _, manifest = described(1, NET_BYTES)
    [tensor] = manifest.tensors
    other = msgspec.structs.replace(
        manifest, tensors=(msgspec.structs.replace(tensor, name="another"),)
    )
    link = net.link("b") or ""
    for _ in range(2):
        frame = encode_signed(sign(other, KEY, key_of(1, FULL)))
        net.deliver((link, "b"), (Announce(version=v(1)), [frame]))
    assert len([note for note in net.notes if "describes another image" in note]) == 1
    assert not is_sealed(net, "b", 1)
    assert not net.failed
    net.perform("b", net.nodes["b"].receiver.requests.subscribe(now=net.now))
    publish_delta(net, 2)
    net.settle()
    assert net.holds("b", 2)
    assert is_sealed(net, "b", 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_seal_of_other_bytes_is_found_by_the_audit(mode: PatchMode) -> None:
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1, is_sealed=False)
    net.settle()
    _, manifest = described(1, NET_BYTES)
    hashes = bytes(len(manifest.chunk_hashes))
    lie = msgspec.structs.replace(manifest, chunk_hashes=hashes)
    frame = encode_signed(sign(lie, KEY, key_of(1, FULL)))
    net.deliver((net.link("b") or "", "b"), (Announce(version=v(1)), [frame]))
    net.wait(1.0)
    while net.works:
        net.decode()
    assert net.damaged == [("b", v(1))]
    image = net.nodes["b"].store.get(v(1))
    assert image is None or not image.is_complete


# --- one after the other --------------------------------------------------------------------------


def test_a_version_that_is_ready_waits_for_its_base_to_be_written() -> None:
    net = chain("a", "b", "c", mode="on_install")
    node = net.nodes["b"]
    installs: list[tuple[str, PolicyVersion]] = []
    for step in (1, 2):
        publish_delta(net, step)
        while net.busy() or net.works:
            net.decode() if net.works else net.deliver(net.busy()[0])
    assert node.newest_complete == v(1)
    assert v(1) not in node.store
    assert content(node.store[v(0)]) == image_of(0)
    form = Form("delta", v(1))
    assert node.encoded_versions[v(2), form].is_complete
    assert net.installs == [("b", v(1)), ("c", v(1))], "what waits is passed on all the same"
    net.installs, installs = [], net.installs
    net.installs.append(installs[0])
    net.install()
    net.decode()
    assert net.holds("b", 1)
    net.settle()
    assert net.holds("b", 2)
    assert content(net.nodes["c"].store[v(0)]) == image_of(0)
    net.installs += installs[1:]
    net.settle()
    assert net.holds("c", 2)
    net.check()


@pytest.mark.parametrize("mode", IN_PLACE)
def test_while_a_version_is_written_nothing_is_fetched_anew(mode: PatchMode) -> None:
    """Its seal comes meanwhile, and the next delta."""
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1, is_sealed=False)
    if mode == "now":
        work = until(net, "b", ApplyPatch)
    else:
        net_works(net)
        work = net.nodes["b"].patch_of(v(1))
        net.installs.clear()
    assert isinstance(work, ApplyPatch)
    sent = len(net.sent)
    seal(net, 1)
    publish_delta(net, 2)
    while net.busy() or net.works:
        net.decode() if net.works else net.deliver(net.busy()[0])
    fetched = [m.form for _, _, m in net.sent[sent:] if isinstance(m, Fetch)]
    assert set(fetched) <= {Form("delta", v(1))}
    assert net.nodes["b"].newest_complete == v(1)
    net.works.append(("b", work))
    net.settle()
    assert net.holds("b", 2)
    assert is_sealed(net, "b", 2)
    net.check()


def net_works(net: Net) -> None:
    """Deliver and work, but install nothing."""
    while net.busy() or net.works:
        net.decode() if net.works else net.deliver(net.busy()[0])


@pytest.mark.parametrize("mode", IN_PLACE)
def test_a_version_that_cannot_be_written_in_place_comes_in_another_form(mode: PatchMode) -> None:
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1)
    publish_delta(net, 2)
    if mode == "now":
        work = until(net, "b", ApplyPatch)
    else:
        net_works(net)
        work = net.nodes["b"].patch_of(v(1))
        net.installs.clear()
    assert isinstance(work, ApplyPatch)
    storage = net.nodes["b"].store[v(0)].storage
    net.perform("b", net.nodes["b"].worked(work, "no space left on device", now=net.now))
    assert any("cannot be written in place: no space" in note for note in net.notes)
    net.settle()
    assert net.holds("b", 2)
    assert net.nodes["b"].store[v(2)].storage is not storage
    assert bytes(storage) == image_of(0)
    assert not net.failed
    net.check()


# --- who is served what ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_written", [0, 1, 2, 100])
def test_children_get_the_old_version_whole_while_the_new_one_is_written(num_written: int) -> None:
    """`Net` compares each chunk that is sent with the learner's."""
    net = chain("a", "b", mode="now")
    publish_delta(net, 1)
    work = until(net, "b", ApplyPatch)
    for number in list(work.patch.blocks)[:num_written]:
        start = number * BLOCK_BYTES
        work.patch.blocks[number].write(work.image[start : start + BLOCK_BYTES])
    node = net.nodes["b"]
    num_chunks = node.store[v(0)].num_chunks
    fetch = Fetch(version=v(0), ranges=((0, num_chunks),), credit_bytes=1 << 20)
    sent = len(net.sent)
    net.perform("b", node.receive("late", fetch, [], now=net.now))
    assert len([m for _, peer, m in net.sent[sent:] if peer == "late"]) == num_chunks
    net.works.append(("b", work))
    net.settle()
    net.perform("b", node.receive("late", fetch, [], now=net.now))
    assert net.holds("b", 0)
    assert net.holds("b", 1)


@pytest.mark.parametrize("mode", IN_PLACE)
def test_what_a_socket_still_holds_does_not_change(mode: PatchMode) -> None:
    """Frames of images, of the first one too, that libzmq has yet to send."""
    net = chain("a", "b", mode=mode)
    node = net.nodes["b"]
    frames = []
    for step in range(3):
        num_chunks = node.store[v(step)].num_chunks
        fetch = Fetch(version=v(step), ranges=((0, num_chunks),), credit_bytes=1 << 20)
        held = [a.frames[1] for a in node.receive("late", fetch, [], now=0.0) if len(a.frames) > 1]  # type: ignore[union-attr]
        assert held == sent_chunks(step, image_of(step))
        frames.append(held)
        publish_delta(net, step + 1)
        net.settle()
        assert net.holds("b", step + 1)
    for step, held in enumerate(frames):
        assert held == sent_chunks(step, image_of(step)), (
            "it has become another version on its way out"
        )


def test_a_chunk_that_has_changed_in_memory_does_not_leave() -> None:
    """It would be another text under a nonce that is used up."""
    net = chain("a", "b", mode="now")
    publish_delta(net, 1)
    net.settle()
    node = net.nodes["b"]
    damaged = node.store[v(1)]
    damaged.place(5)[17] ^= 4
    fetch = Fetch(version=v(1), ranges=((4, 7),), credit_bytes=1 << 20)
    answers = [message_of(a.frames) for a in node.receive("late", fetch, [], now=net.now)]  # type: ignore[union-attr]
    assert [type(answer) for answer in answers[:2]] == [Chunk, Gone]
    again = [message_of(a.frames) for a in node.receive("late", fetch, [], now=net.now)]  # type: ignore[union-attr]
    assert isinstance(again[0], Gone)
    heard = node.receive("late", Subscribe(newest=None), [], now=net.now)
    offered = [m for a in heard if isinstance(m := message_of(a.frames), Announce)]  # type: ignore[union-attr]
    assert [(m.version, len(m.offers)) for m in offered] == [(v(0), 1)]
    net.wait(1.0)
    while net.works:
        net.decode()
    assert net.damaged == [("b", v(1))], "the audit takes no note of it"


def bf16_images(num_versions: int, num_bytes: int) -> list[bytes]:
    chance = np.random.default_rng(5)
    words = chance.integers(0, 1 << 16, num_bytes // 2, dtype=np.uint16)
    images = [words.tobytes()]
    for _ in range(num_versions - 1):
        words = words + (chance.random(words.size) < 0.1).astype(np.uint16)
        images.append(words.tobytes())
    return images


def patches_of(images: list[bytes]) -> list[Patch]:
    """Return what leads from each image to the next."""
    patches = []
    for step in range(len(images) - 1):
        patch = Patch(v(step), v(step + 1), BLOCK_BYTES)
        for number, (start, stop) in enumerate(split_blocks(len(images[0]), BLOCK_BYTES)):
            old, new = (memoryview(image)[start:stop] for image in images[step : step + 2])
            coded = encode_delta(old, new, word_bytes=2)
            patch.blocks[number] = open_block(memoryview(coded.coded), old, coded.old_hash)
        patches.append(patch)
    return patches


@pytest.mark.slow
def test_whoever_reads_while_another_writes_gets_the_bytes_of_one_version() -> None:
    """A thread reads v0 again and again, while v1, v2 ... are written, some of them taken back."""
    num_versions = 6
    images = bf16_images(num_versions, 32 * BLOCK_BYTES)
    storage = memoryview(bytearray(images[0]))
    signed, manifest = described(0, len(images[0]))
    has_chunk = bytearray(b"\1") * manifest.num_chunks
    image = Transfer(signed, manifest, storage, has_chunk, manifest.num_chunks, may_change=True)
    is_over, wrong, num_read = threading.Event(), [], 0

    def read() -> None:
        nonlocal num_read
        spans = [(0, len(storage)), (CHUNK_BYTES, 9 * CHUNK_BYTES), (BLOCK_BYTES + 6, 30_000)]
        while not is_over.is_set():
            for start, stop in spans:
                if image.read(start, stop) != images[0][start:stop]:
                    wrong.append((start, stop))
            num_read += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(2):
            for patch in patches_of(images):
                image.later.append(patch)
                for _ in range(3):
                    patch.write(storage)
            assert storage == images[-1]
            for patch in reversed(image.later[:]):
                patch.take_back(storage)
                image.later = image.later[:-1]
            assert storage == images[0], turn
    finally:
        is_over.set()
        reader.join(timeout=30)
    assert not wrong
    assert num_read > 3


def test_a_patch_that_comes_and_goes_while_somebody_reads_is_noticed() -> None:
    images = bf16_images(2, 4 * BLOCK_BYTES)
    [patch] = patches_of(images)
    signed, manifest = described(0, len(images[0]))

    class Unlucky(Transfer):
        """Whose memory is written to, and restored, at the worst moment: while it is copied."""

        num_reads = 0

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "storage":
                Unlucky.num_reads += 1
                if Unlucky.num_reads == 1:
                    self.later.append(patch)
                    torn = bytearray(images[0])
                    patch.write(memoryview(torn))
                    self.later = []
                    return torn
            return value

    has_chunk = bytearray(b"\1") * manifest.num_chunks
    image = Unlucky(signed, manifest, bytearray(images[0]), has_chunk, may_change=True)
    assert image.read(0, len(images[0])) == images[0]
    assert Unlucky.num_reads > 1


# --- eviction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_versions_in_one_memory_are_given_up_like_any_others(mode: PatchMode) -> None:
    net = chain("a", "b", mode=mode)
    for step in range(1, 8):
        publish_delta(net, step)
        net.settle()
    node = net.nodes["b"]
    assert sorted(node.store) == [v(step) for step in range(8 - KEEP, 8)]
    assert len(net.rooms["b"].live) == (1 if mode != "copy" else KEEP)
    oldest = node.store[v(8 - KEEP)]
    assert len(oldest.later) == (KEEP - 1 if mode != "copy" else 0)
    assert all(net.holds("b", step) for step in range(8 - KEEP, 8))


def test_what_is_ready_is_kept_with_its_base_until_something_newer_is_whole() -> None:
    net = chain("a", "b", mode="on_install")
    publish_delta(net, 1)
    net_works(net)
    node, store = net.nodes["b"], net.nodes["b"].receiver.store
    form = Form("delta", v(0))
    net.perform("b", node.evict(now=net.now))
    assert (v(1), form) in node.encoded_versions
    assert v(0) in node.store
    run(net.publish(2)[:1])
    store.encoded_versions[v(1), form].frames.clear()
    net_works(net)
    assert net.holds("b", 2)
    assert not node.encoded_versions.get((v(1), form))
    assert node.patch_of(v(1)) is None
    net.installs.clear()
    publish_delta(net, 3)
    net.settle()
    assert net.holds("b", 3)


def test_what_is_being_written_is_kept_whatever_comes() -> None:
    net = chain("a", "b", mode="on_install")
    publish_delta(net, 1)
    net_works(net)
    work = net.nodes["b"].patch_of(v(1))
    assert work is not None
    net.installs.clear()
    for step in (2, 3, 4):
        run(net.publish(step)[:1])
        net_works(net)
    assert net.holds("b", 4)
    net.works.append(("b", work))
    net.settle()
    net.check()
    assert net.holds("b", 4)
    assert net.nodes["b"].newest_complete == v(4)


# --- damaged memory -------------------------------------------------------------------------------


def place_of(step: int, *, is_changed: bool) -> int:
    """Return the place of a byte that v(step) changes of the version before, or does not."""
    old, new = image_of(step - 1), image_of(step)
    words = [(old[at : at + 2] != new[at : at + 2]) for at in range(0, NET_BYTES - 1, 2)]
    sparse = [
        at
        for at, is_so in enumerate(words)
        if is_so == is_changed and 0.0 < block_share(words, at) < 0.15
    ]
    return 2 * sparse[0]


def block_share(words: list[bool], at: int) -> float:
    size = BLOCK_BYTES // 2
    block = words[at // size * size :][:size]
    return sum(block) / len(block)


def flip(net: Net, name: str, step: int, place: int) -> None:
    net.nodes[name].store[v(step)].storage[place] ^= 4


@pytest.mark.parametrize("mode", MODES)
def test_a_bit_that_flips_under_a_change_is_found_before_the_version_counts(
    mode: PatchMode,
) -> None:
    net = chain("a", "b", mode=mode)
    flip(net, "b", 0, place_of(1, is_changed=True))
    publish_delta(net, 1)
    net.settle()
    assert any("not those that the learner had" in note for note in net.notes)
    assert net.arrived[-1] == ("b", v(1))
    assert net.holds("b", 1)
    assert (v(1), Form("delta", v(0))) not in net.nodes["b"].encoded_versions
    audit(net)
    assert v(0) not in net.nodes["b"].store, "nobody is served what is damaged"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_a_bit_that_flips_beside_the_changes_is_found_by_the_audit(mode: PatchMode) -> None:
    net = chain("a", "b", "c", mode=mode)
    flip(net, "c", 0, place_of(1, is_changed=False))
    storage = net.nodes["c"].store[v(0)].storage
    *pieces, sealing = net.publish(1, 0, is_on_base=True)
    run(pieces)
    for _ in range(1000):
        if not (net.busy() or net.works or net.installs):
            break
        try:
            net.decode() if net.works else net.install() if net.installs else net.deliver(
                net.busy()[0]
            )
        except AssertionError:  # of what arrives at c, which is damaged
            net.arrived.append(("c", v(1)))
    run([sealing])
    net.settle()
    audit(net)
    assert net.damaged == [("c", v(1))]
    assert any("is not what the learner signed" in note for note in net.notes)
    assert ("c", v(1)) not in net.audited[:-1]
    assert net.holds("c", 1)
    image = net.nodes["c"].store[v(1)]
    assert image.storage is not storage
    assert [m.form for name, _, m in net.sent if name == "c" and isinstance(m, Fetch)][-1] == FULL
    publish_delta(net, 2)
    net.settle()
    assert net.holds("c", 2)
    assert not net.failed


def damage(net: Net, name: str) -> None:
    """Damage all memory of a node, and let the audit that runs find it."""
    node = net.nodes[name]
    for image in node.store.values():
        image.storage[0:8] = bytes(8)
    net.now += 1.0
    actions = node.expire(now=net.now)
    [work] = [each for each in actions if isinstance(each, AuditChunks)]
    net.perform(name, [each for each in actions if each is not work])
    fault = work.run()
    assert fault
    net.perform(name, node.worked(work, fault, now=net.now))


@pytest.mark.parametrize("mode", IN_PLACE)
def test_damage_is_survived_while_newer_versions_wait(mode: PatchMode) -> None:
    """The memory of v1 is damaged while v2 is about to be written over it, and v3 waits for v2."""
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1)
    net.settle()
    publish_delta(net, 2)
    if mode == "now":
        work = until(net, "b", ApplyPatch)
    else:
        net_works(net)
        work = net.nodes["b"].patch_of(v(2))
        net.installs.clear()
    assert isinstance(work, ApplyPatch)
    publish_delta(net, 3)
    while net.busy():
        net.deliver(net.busy()[0])
    damage(net, "b")
    assert ("b", v(1)) in net.damaged
    assert not [e for e in net.nodes["b"].encoded_versions.values() if e.is_ready]
    # What was under way ends, and counts for nothing.
    work.run()
    net.perform("b", net.nodes["b"].worked(work, "", now=net.now))
    net.settle()
    assert net.holds("b", 3)
    assert not net.failed
    net.check()


@pytest.mark.parametrize("mode", IN_PLACE)
def test_a_version_that_was_passed_is_fetched_again_where_it_is_the_newest_in_full(
    mode: PatchMode,
) -> None:
    """v2 has no seal yet: the way back leads over v1, whose manifest was done with."""
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1)
    net.settle()
    publish_delta(net, 2, is_sealed=False)
    net.settle()
    net.perform("b", net.nodes["b"].evict(now=net.now))
    assert net.holds("b", 2)
    damage(net, "b")
    net.settle()
    assert net.holds("b", 2)
    fetched = [(m.version, m.form) for _, _, m in net.sent if isinstance(m, Fetch)]
    assert fetched[-2:] == [(v(1), FULL), (v(2), Form("delta", v(1)))]


@pytest.mark.parametrize("mode", IN_PLACE)
def test_a_delta_that_is_kept_for_others_does_not_keep_its_patch(mode: PatchMode) -> None:
    net = chain("a", "b", mode=mode)
    publish_delta(net, 1)
    net.settle()
    encoded = net.nodes["b"].encoded_versions[v(1), Form("delta", v(0))]
    assert encoded.patch is None
    net.check()


# --- memory that is handed out again --------------------------------------------------------------


def test_recycled_memory_is_free_only_when_nobody_can_reach_it() -> None:
    memory = RecycledMemory()
    first = memory.take(1000)
    address = np.frombuffer(first, np.uint8).ctypes.data
    first[:3] = b"abc"
    holders: list[Any] = [first[1:2], np.frombuffer(first, np.uint8)[5:], first.toreadonly()[3:4]]
    del first
    while holders:
        other = memory.take(1000)
        assert np.frombuffer(other, np.uint8).ctypes.data != address
        del other
        holders.pop()
    again = memory.take(1000)
    seen = {np.frombuffer(again, np.uint8).ctypes.data}
    others = [memory.take(1000) for _ in range(2)]
    seen |= {np.frombuffer(each, np.uint8).ctypes.data for each in others}
    assert len(seen) == 3


def noting(made: list[int]) -> Callable[[int], npt.NDArray[np.uint8]]:
    """Return a maker of memory that notes the address of each piece."""

    def make(num_bytes: int) -> npt.NDArray[np.uint8]:
        piece = touched_memory(num_bytes)
        made.append(piece.ctypes.data)
        return piece

    return make


def test_memory_of_another_size_is_not_kept() -> None:
    made = list[int]()
    memory = RecycledMemory(make=noting(made))
    for num_bytes in (1000, 2000, 1000):
        assert len(memory.take(num_bytes)) == num_bytes
    assert len(made) == 3


def test_memory_grows_up_to_a_number_of_pieces() -> None:
    memory = RecycledMemory(2, max_pieces=3)
    assert memory.has_free
    assert not memory.can_grow, "the first image makes its memory"
    held = [memory.take(1000), memory.take(1000)]
    assert not memory.has_free
    assert memory.can_grow
    memory.grow()
    assert memory.has_free
    assert not memory.can_grow
    held.append(memory.take(1000))
    assert not memory.has_free
    held.pop()
    assert memory.has_free
    assert len(memory.take(1000)) == 1000


def test_memory_for_the_images_to_come_is_made_with_the_first() -> None:
    made = list[int]()
    memory = RecycledMemory(2, noting(made))
    held = memory.take(1000)
    assert len(made) == 2
    for _ in range(4):
        new = memory.take(1000)
        assert np.frombuffer(new, np.uint8).ctypes.data in made
        assert not np.shares_memory(np.frombuffer(new, np.uint8), np.frombuffer(held, np.uint8))
        held = new
