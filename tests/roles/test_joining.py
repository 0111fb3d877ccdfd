"""Both tables of joining: total, without dead ends, obeyed, and of one mind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_args
from unittest import mock

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from echo.core.errors import RefusedError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import Lineage
from echo.roles import joining, members
from echo.roles.joining import (
    IGNORED,
    INHERITED_FILES,
    Admission,
    AdmissionSettings,
    Assets,
    Built,
    Configure,
    Joining,
    NodeState,
    answer_fault,
    describe_assets,
    digest_mismatch,
    fingerprint,
    show_fingerprint,
    sign_answer,
)
from echo.roles.members import Member, Presence, Roster
from echo.roles.plans import Plans
from echo.runtime.identity import Identity, JoinSource
from echo.tasks.tokenization import CONFIG_FILES, TEMPLATE_FILE, TOKENIZER_FILES
from echo.weights.topology.sites import Site
from echo.wire.actions import Action, Note, PeerFaults, Routes, Send, Stop
from echo.wire.codec import Frame, decode_envelope, decode_message, encode
from echo.wire.messages import (
    LEARNER_ID,
    ROUTED_MESSAGES,
    Ack,
    Admitted,
    Asset,
    AssetRequest,
    Deliver,
    Failed,
    Finish,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Message,
    NodeStats,
    Partial,
    Pulse,
    Ready,
    Reclaim,
    Refuse,
    Rehello,
    TopologyPlan,
    Welcome,
)
from echo.wire.seals import SealKeys
from tests.promises.conftest import MakeWorld
from tests.promises.world import World
from tests.roles.harness import (
    KEY,
    PUBLIC_KEY,
    make_broadcast,
    make_hello,
    make_node_settings,
    message_of,
)

FILE = b"[1, 2]"
DIGESTS = {"model": "aaaa"}
HEARTBEAT = Heartbeat(installed=None, capacity=0, leases=(), stats=NodeStats())


class Node:
    """A worker's end, with what it has said."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.work: list[Message] = []
        settings = make_node_settings(digests=DIGESTS)
        self.joining = Joining(settings, make_broadcast("w1"), self)

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        self.said.append(message)
        return []

    def on_welcome(self, version_bytes: int, *, now: float) -> list[Action]:
        return []

    def on_admitted(self, *, now: float) -> list[Action]:
        return self.to_learner(HEARTBEAT)

    def on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        self.work.append(message)
        return []

    def facts(self) -> dict[str, Any]:
        """Return all that an ignored event must leave as it is."""
        return vars(self.joining) | {"said": [*self.said], "work": [*self.work]}


class LearnerEnd:
    """The learner's end, with what has become of its nodes."""

    def __init__(self) -> None:
        self.work: list[Message] = []
        self.time_of_day = 1e9
        self.roster = Roster(heartbeat_s=2.0, dead_after_s=10.0)
        routes = Routes(Counters())
        routes.learn("w1", "peer")
        self.admission = Admission(
            AdmissionSettings(
                run_id="run",
                key=KEY,
                settings={"seed": 1},
                assets={"tokenizer.json": FILE},
                digests=DIGESTS,
                heartbeat_s=2.0,
                dead_after_s=10.0,
                seal_keys=SealKeys(b"learner"),
                time_of_day=lambda: self.time_of_day,
            ),
            lineages=(),
            roster=self.roster,
            counters=Counters(),
            routes=routes,
            peer_faults=PeerFaults(),
            plans=Plans(
                Site(LEARNER_ID, "learner", ""),
                chunk_bytes=1 << 20,
                uplinks={},
                roster=self.roster,
                broadcast=make_broadcast(LEARNER_ID),
                routes=routes,
            ),
            role=self,
        )

    def drop(self, member: Member, *, now: float) -> list[Action]:
        return []

    def on_work(
        self, member: Member, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        self.work.append(message)
        return []

    @property
    def presence(self) -> Presence:
        member = self.roster.nodes.get("w1")
        return Presence.UNKNOWN if member is None else member.presence

    def bring_to(self, presence: Presence) -> None:
        """Let the node come as far as that."""
        if presence is not Presence.UNKNOWN:
            self.hear(HELLO)
        if presence is Presence.ADMITTED:
            self.hear(READY)

    def hear(self, message: Message, *, now: float = 0.0) -> list[Action]:
        """Handle a message of the node."""
        return self.admission.receive("w1", message, [], now=now)


def said_in(actions: list[Action]) -> list[Message]:
    """Return the messages that are sent."""
    return [message_of(action.frames) for action in actions if isinstance(action, Send)]


def welcome_in(actions: list[Action]) -> Welcome:
    """Return the one message that is sent."""
    [message] = said_in(actions)
    assert isinstance(message, Welcome)
    return message


HELLO = make_hello(digests=DIGESTS)
READY = Ready(incarnation="i1", digests=DIGESTS)
WELCOME = welcome_in(LearnerEnd().hear(HELLO))
OF_LEARNER: dict[type[Message], Message] = {
    type(message): message
    for message in (
        WELCOME,
        Asset(name="tokenizer.json"),
        Admitted(incarnation="i1"),
        Refuse(reason="digest_mismatch", detail="both values"),
        Rehello(),
        Finish(reason="all steps done"),
        TopologyPlan(epoch=1, parents=()),
        Pulse(step=1, newest=None),
        Grant(leases=()),
        Reclaim(leases=()),
        Ack(group_id=1, attempt=0, outcome="accepted"),
    )
}
OF_NODE: dict[type[Message], Message] = {
    type(message): message
    for message in (
        HELLO,
        AssetRequest(name="tokenizer.json"),
        READY,
        HEARTBEAT,
        Deliver(group_id=1, attempt=0),
        Partial(group_id=1, attempt=0),
        Failed(group_id=1, attempt=0, reason="reward_error", detail="it raised"),
        Goodbye(reason="stopped by its operator"),
    )
}

ALIVE = [state for state in NodeState if state is not NodeState.STOPPED]
TABLES: list[Mapping[Any, Mapping[type, Any]]] = [Joining.TABLE, Admission.TABLE]


def messages_of(table: Mapping[Any, Mapping[type, Any]]) -> set[type]:
    """Return the messages that a table knows."""
    return {event for row in table.values() for event in row if issubclass(event, Message)}


def reachable(table: Mapping[Any, Mapping[type, Any]], start: StrEnum) -> set[StrEnum]:
    """Return the states to which a table leads from one, itself included."""
    found, todo = {start}, [start]
    while todo:
        for step in table[todo.pop()].values():
            if step.then is not None and step.then not in found:
                found.add(step.then)
                todo.append(step.then)
    return found


# --- the tables alone ----------------------------------------------------------------------------


def test_every_state_has_an_entry_for_every_event() -> None:
    for table, states in zip(TABLES, (NodeState, Presence), strict=True):
        events = {event for row in table.values() for event in row}
        assert set(table) == set(states)
        assert {state: events - row.keys() for state, row in table.items()} == {
            state: set() for state in table
        }
        assert all(
            any(row[event] is not IGNORED for row in table.values())
            for event in events - {joining.AnswerToAnother, joining.NameHeld}
        )


def test_every_routed_message_is_an_event_of_exactly_one_end() -> None:
    of_node, of_learner = messages_of(Admission.TABLE), messages_of(Joining.TABLE)
    assert of_node | of_learner == set(get_args(ROUTED_MESSAGES))
    assert of_node & of_learner == set()
    assert (of_node, of_learner) == (set(OF_NODE), set(OF_LEARNER))


def test_every_state_is_reached_and_leads_to_admission_or_to_an_end() -> None:
    assert reachable(Joining.TABLE, NodeState.DIALLING) == set(NodeState)
    assert reachable(Admission.TABLE, Presence.UNKNOWN) == set(Presence)
    for state in ALIVE:
        assert {NodeState.ADMITTED, NodeState.STOPPED} <= reachable(Joining.TABLE, state)
    assert set(Joining.TABLE[NodeState.STOPPED].values()) == {IGNORED}
    for presence in Presence:
        assert {Presence.ADMITTED, Presence.UNKNOWN} <= reachable(Admission.TABLE, presence)


def moves(table: Mapping[Any, Mapping[type, Any]]) -> set[tuple[str, str, str]]:
    """Return (state, event, next state) of each entry that changes the state."""
    return {
        (str(state), event.__name__, str(step.then))
        for state, row in table.items()
        for event, step in row.items()
        if step.then not in (None, state)
    }


def test_the_drawings_in_the_docstring_are_the_tables() -> None:
    """The words below the drawings name the moves that are not drawn."""
    node, learner = (joining.__doc__ or "").split("The learner's end")
    arrow = re.compile(r"(\w+) --(\w+)--> (?=(\w+))")
    later = ("joining", "configuring", "readying", "admitted")
    words = {(state, "Lost", "dialling") for state in later}
    ends = ("Refuse", "Finish", "GaveUp")
    words |= {(state, end, "stopped") for state in ("dialling", *later) for end in ends}
    words |= {(state, "UnfitWelcome", "stopped") for state in later[:3]}
    words |= {(state, "AnotherChannel", "joining") for state in later[1:3]}
    words |= {(state, "Rehello", "joining") for state in later[2:]}
    assert {*arrow.findall(node), *words} == moves(Joining.TABLE)
    gone = ("Goodbye", "Silent", "ReadyRefused", "Expelled")
    words = {(state, event, "unknown") for state in ("known", "admitted") for event in gone}
    words |= {("admitted", "Restarted", "known")}
    assert {*arrow.findall(learner), *words} == moves(Admission.TABLE)


# --- each end obeys its table --------------------------------------------------------------------


def answering(node: Joining, welcome: Welcome = WELCOME, **changes: Any) -> Welcome:
    """Return a Welcome in answer to what a node has said last."""
    return sign_answer(replace(welcome, answers=node.hello_hash, **changes), KEY)


def feed(node: Joining, event: type) -> list[Action]:
    """Let an event of the table happen to a node."""
    match event:
        case joining.Linked:
            return node.linked(now=1.0)
        case joining.Lost:
            return node.lost(retry_at=5.0, now=1.0)
        case joining.Built:
            return node.configured({"task": "bbbb"}, now=1.0)
        case joining.GaveUp:
            return node.give_up("refused", RefusedError("another key"), now=1.0)
        case joining.AnswerToAnother:
            return node.receive(replace(WELCOME, incarnation="i0"), [], now=1.0)
        case joining.AnotherChannel:
            return node._take(joining.AnotherChannel(), [], 1.0)
        case joining.UnfitWelcome:
            return node.receive(answering(node, digests={"model": "cccc"}), [], now=1.0)
    if event is Welcome:
        return node.receive(answering(node), [], now=1.0)
    return node.receive(OF_LEARNER[event], [FILE] if event is Asset else [], now=1.0)


WAY: dict[NodeState, list[type]] = {
    NodeState.DIALLING: [],
    NodeState.JOINING: [joining.Linked],
    NodeState.CONFIGURING: [joining.Linked, Welcome],
    NodeState.READYING: [joining.Linked, Welcome, Asset, Built],
    NodeState.ADMITTED: [joining.Linked, Welcome, Asset, Built, Admitted],
    NodeState.STOPPED: [joining.GaveUp],
}


def node_in(state: NodeState) -> Node:
    """Return a node that has come as far as that."""
    node = Node()
    for event in WAY[state]:
        feed(node.joining, event)
    assert node.joining.state is state
    return node


@pytest.mark.parametrize("state", NodeState)
def test_a_node_does_with_each_event_what_its_table_says(state: NodeState) -> None:
    for event, step in Joining.TABLE[state].items():
        node = node_in(state)
        before = node.facts()
        actions = feed(node.joining, event)
        assert node.joining.state is (step.then or state), event
        assert {type(message) for message in node.said} <= messages_of(Admission.TABLE)
        if step is IGNORED:
            assert (actions, node.facts()) == ([], before), event
        has_stop = any(isinstance(action, Stop) for action in actions)
        assert has_stop == (step.then is NodeState.STOPPED), event
        assert bool(node.work) == (event in joining.WORK_OF_LEARNER and step is not IGNORED)


@pytest.mark.parametrize("presence", Presence)
def test_the_learner_does_with_each_message_what_its_table_says(presence: Presence) -> None:
    for event, message in OF_NODE.items():
        end = LearnerEnd()
        end.bring_to(presence)
        step = Admission.TABLE[presence][event]
        actions = end.hear(message)
        assert end.presence is (step.then or presence), event
        assert {type(each) for each in said_in(actions)} <= messages_of(Joining.TABLE)
        assert bool(end.work) != bool(said_in(actions)), "each is answered or passed on"


@pytest.mark.parametrize("presence", [Presence.KNOWN, Presence.ADMITTED])
@pytest.mark.parametrize(
    ("message", "now", "event", "answers"),
    [
        (replace(HELLO, incarnation="i2"), 1.0, joining.NameHeld, []),
        (replace(HELLO, incarnation="i2"), 4.0, joining.Restarted, [Welcome]),
        (replace(HELLO, digests={"model": "cccc"}), 1.0, joining.HelloRefused, [Refuse]),
        (replace(READY, incarnation="i2"), 1.0, joining.ReadyOfAnother, [Rehello]),
        (replace(READY, digests={"model": "cccc"}), 1.0, joining.ReadyRefused, [Refuse]),
    ],
)
def test_the_learner_judges_a_message_by_what_it_says(
    presence: Presence, message: Message, now: float, event: type, answers: list[type]
) -> None:
    end = LearnerEnd()
    end.bring_to(presence)
    actions = end.hear(message, now=now)
    assert end.presence is (Admission.TABLE[presence][event].then or presence)
    assert [type(each) for each in said_in(actions)] == answers


def test_a_welcome_has_the_time_of_a_clock_that_was_set_since_the_start() -> None:
    end = LearnerEnd()
    assert welcome_in(end.hear(HELLO, now=1.0)).time_of_day == 1e9
    end.time_of_day += 3600.0  # the machine was suspended for an hour
    assert welcome_in(end.hear(HELLO, now=2.0)).time_of_day == 1e9 + 3600.0


def test_a_learner_with_all_nodes_that_it_keeps_says_why_no_other_can_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "MAX_NODES", 1)
    end = LearnerEnd()
    end.bring_to(Presence.ADMITTED)
    notes = []
    for now, name in enumerate(("w2", "w3", "w2")):
        notes += end.admission.receive(name, replace(HELLO, node_id=name), [], now=float(now))
    [note] = notes
    assert isinstance(note, Note)
    assert note.text.startswith("w2 cannot join: 1 nodes are known, the most that a learner keeps")
    assert "network.dead_after_s = 10 s" in note.text
    assert end.admission.counters["refused/too_many_nodes"] == 3
    end.admission.take_silent(now=11.0)
    later = end.admission.receive("w2", replace(HELLO, node_id="w2"), [], now=11.0)
    assert not [action for action in later if isinstance(action, Note)]
    assert list(end.roster.nodes) == ["w2"]


@pytest.mark.parametrize("presence", Presence)
def test_the_learner_forgets_whoever_is_silent_or_expelled(presence: Presence) -> None:
    is_known = presence is not Presence.UNKNOWN
    end = LearnerEnd()
    end.bring_to(presence)
    assert end.admission.expel("w1", now=1.0) is is_known
    assert end.presence is Presence.UNKNOWN
    end = LearnerEnd()
    end.bring_to(presence)
    assert end.admission.take_silent(now=9.9) == []
    assert [member.node_id for member in end.admission.take_silent(now=10.0)] == ["w1"] * is_known
    assert end.presence is Presence.UNKNOWN


def test_what_only_the_other_end_says_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="Pulse from w1 is not for the learner"):
        LearnerEnd().hear(Pulse(step=1, newest=None))
    with pytest.raises(RemoteProtocolError, match="Hello is not for a worker"):
        Node().joining.receive(HELLO, [], now=0.0)


# --- both together -------------------------------------------------------------------------------


def converse(node: Node, end: LearnerEnd) -> None:
    """Deliver what the node says, and each answer, until nobody has anything to say."""
    heard = 0
    while heard < len(node.said):
        answers = end.hear(node.said[heard])
        heard += 1
        for answer in said_in(answers):
            payload: list[Frame] = [FILE] if isinstance(answer, Asset) else []
            for action in node.joining.receive(answer, payload, now=1.0):
                if isinstance(action, Configure):
                    node.joining.configured(DIGESTS, now=1.0)
    node.said.clear()


@pytest.mark.parametrize(
    ("state", "presence"),
    [(state, presence) for state in NodeState for presence in Presence if state in ALIVE],
)
def test_from_any_two_states_the_ends_come_to_agree(state: NodeState, presence: Presence) -> None:
    node, end = node_in(state), LearnerEnd()
    node.said.clear()
    end.bring_to(presence)
    for _ in range(4):
        match node.joining.state:
            case NodeState.DIALLING:
                node.joining.linked(now=1.0)
            case NodeState.ADMITTED:
                node.said.append(HEARTBEAT)
            case _:
                node.joining.repeat(1.0)
        converse(node, end)
    assert (node.joining.state, end.presence) == (NodeState.ADMITTED, Presence.ADMITTED)
    assert end.work


@pytest.mark.parametrize("state", [NodeState.CONFIGURING, NodeState.READYING])
def test_a_learner_that_is_restarted_meanwhile_is_heard(state: NodeState) -> None:
    """A relay keeps the link: only the answer to a Hello tells of the new learner."""
    node, lineages = node_in(state), (Lineage(1, 0), Lineage(2, 3))
    old_hello = node.joining.hello_hash
    assert node.joining.receive(answering(node.joining), [], now=1.5) == []
    assert node.joining.state is state, "the same once more"
    # What it expects of rollouts is no setting: other prompts, or more groups a step, do no harm.
    longer = {**WELCOME.settings, joining.EXPECTED: {"rollouts": 9, "prompt_tokens": 9}}
    changes: dict[str, Any] = {"lineages": lineages, "nonce": b"another", "settings": longer}
    node.said.clear()
    assert node.joining.receive(answering(node.joining, **changes), [], now=2.0) == []
    assert node.joining.state is NodeState.JOINING
    assert [type(message) for message in node.said] == [Hello]
    late = sign_answer(replace(WELCOME, answers=old_hello), KEY)
    assert node.joining.receive(late, [], now=2.1) == []
    assert node.joining.state is NodeState.JOINING, "no channel begins twice"
    again = answering(node.joining, **changes)
    assert node.joining.receive(again, [], now=2.5) == []
    assert (node.joining.lineages, node.joining.state) == (lineages, state)
    other = sign_answer(replace(again, settings={"seed": 2}), KEY)
    [stop] = node.joining.receive(other, [], now=3.0)
    assert isinstance(stop, Stop)
    assert stop.reason == "settings_changed"


def test_a_node_that_has_built_before_is_ready_at_once() -> None:
    node = node_in(NodeState.ADMITTED)
    feed(node.joining, joining.Lost)
    feed(node.joining, joining.Linked)
    assert feed(node.joining, Welcome) == []
    assert node.joining.state is NodeState.READYING
    assert isinstance(node.said[-1], Ready)


FILES = {"config.json": b"{}", "tokenizer.json": b"[1, 2]"}


def test_files_are_hashed_once_and_not_for_each_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node that configures repeats its Hello; a tokenizer may have tens of MB."""
    end = LearnerEnd()
    hashing = mock.Mock(wraps=blake3)
    monkeypatch.setattr(joining, "blake3", hashing)
    for _ in range(2):
        welcome = welcome_in(end.hear(HELLO))
    assert welcome.assets == WELCOME.assets
    assert all(call.args != (FILE,) for call in hashing.call_args_list)


def test_equal_or_missing_hashes_agree() -> None:
    ours = {"model": "aa", "tokenizer": "", "task": "t"}
    theirs = {"model": "aa", "tokenizer": "bb", "dataset": "d"}
    assert digest_mismatch(ours=ours, theirs=theirs) is None
    assert digest_mismatch(ours={}, theirs=theirs) is None


def test_files_are_taken_if_they_are_the_ones_announced() -> None:
    described = describe_assets(FILES)
    assert described["config.json"] == (blake3(b"{}").hexdigest(), 2)
    assets = Assets(described, settings={"seed": 1})
    assert assets.missing == ["config.json", "tokenizer.json"]
    with pytest.raises(RemoteProtocolError, match=r"config\.json does not match"):
        assets.add("config.json", b"[]")
    with pytest.raises(RemoteProtocolError, match=r"config\.json does not match"):
        assets.add("config.json", b"{}}")
    for name, data in FILES.items():
        assets.add(name, data)
    assert (assets.missing, assets.files) == ([], FILES)


def test_files_that_came_before_the_link_was_lost_are_not_asked_for_again() -> None:
    node, files = Node(), {"config.json": b"{}", "tokenizer.json": FILE, "vocab.txt": b"1"}
    changed = files | {"tokenizer.json": b"[3]"}
    for offered, now in ((files, 0.0), (changed, 1.0)):
        node.joining.linked(now=now)
        welcome = answering(node.joining, assets=describe_assets(offered))
        node.joining.receive(welcome, [], now=now)
        for name in ("config.json", "tokenizer.json"):
            if offered is files:
                node.joining.receive(Asset(name=name), [files[name]], now=now)
        node.joining.lost(retry_at=now, now=now)
    asked = [message.name for message in node.said if isinstance(message, AssetRequest)]
    assert asked == ["config.json", "tokenizer.json", "vocab.txt", "tokenizer.json"]


def test_the_learner_sends_no_other_names_than_a_node_takes() -> None:
    assert {*CONFIG_FILES, *TOKENIZER_FILES, TEMPLATE_FILE} == INHERITED_FILES


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/b", ".hidden", "a\\b", "/etc/passwd", "evil.py", "evil.so", "modeling_x.py",
     "model.safetensors", "sitecustomize.py", "CONFIG.JSON", "config.json "],
)  # fmt: skip
def test_a_file_has_a_known_name_and_cannot_be_written_anywhere_else(name: str) -> None:
    node = Node()
    node.joining.linked(now=0.0)
    offer = answering(node.joining, assets={name: ("00", 1)})
    [stop] = node.joining.receive(offer, [], now=0.0)
    assert isinstance(stop, Stop)
    assert stop.reason == "unknown_file"


# --- what the learner has signed ------------------------------------------------------------------

OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_PUBLIC_KEY = OTHER_KEY.public_key().public_bytes_raw()
KNOWN = fingerprint(PUBLIC_KEY)

UNSIGNED = Welcome(
    run_id="run",
    incarnation="w1#1",
    public_key=PUBLIC_KEY,
    lineages=(Lineage(1, 0), Lineage(2, 3)),
    settings={"sampling.temperature": 1, "task.options": {"reward": "exact", "sizes": (1, 2.5)}},
    assets={"config.json": ("aa", 2)},
    digests={"model": "bb"},
    heartbeat_s=5,  # a whole number: it arrives as 5.0
    dead_after_s=45.0,
    uplink_bytes_per_s=1e6,
    version_bytes=1000,
    answers=b"hash",
    seal_key=b"key",
    nonce=b"1",
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
    "uplink_bytes_per_s": None,
    "version_bytes": 0,
    "time_of_day": 1e9,
    "answers": b"hush",
    "seal_key": b"another",
    "nonce": b"2",
}


def arrived(welcome: Welcome) -> Welcome:
    """Return a message as it is read at the other end."""
    frames = encode(welcome, source="learner", target="w1")
    read: Welcome = decode_message(decode_envelope(frames))
    return read


def test_what_the_learner_signed_is_believed_with_and_without_a_fingerprint() -> None:
    signed = arrived(sign_answer(UNSIGNED, KEY))
    assert signed.signature
    assert (signed.settings["sampling.temperature"], signed.heartbeat_s) == (1, 5.0)
    for known in (KNOWN, None):
        assert answer_fault(signed, known=known) is None


@pytest.mark.parametrize("name", OTHERWISE)
def test_no_field_can_be_changed_on_the_way(name: str) -> None:
    assert OTHERWISE.keys() == {*Welcome.__struct_fields__} - {"public_key", "signature"}
    changed = replace(sign_answer(UNSIGNED, KEY), **{name: OTHERWISE[name]})
    for known in (KNOWN, None):
        fault = answer_fault(arrived(changed), known=known)
        assert fault is not None
        assert fault[0] == "wrong_signature"


def test_whoever_signs_with_another_key_is_told_from_the_learner_by_the_fingerprint() -> None:
    posing = replace(UNSIGNED, public_key=OTHER_PUBLIC_KEY)
    fault = answer_fault(arrived(sign_answer(posing, OTHER_KEY)), known=KNOWN)
    assert fault is not None
    assert fault[0] == "wrong_signing_key"
    for text in (show_fingerprint(KNOWN), show_fingerprint(fingerprint(OTHER_PUBLIC_KEY))):
        assert text in fault[1]
    assert "runs/NAME/keys/join" in fault[1]


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32)])
def test_a_key_that_is_none_is_a_fault_and_no_error(key: bytes) -> None:
    welcome = replace(UNSIGNED, public_key=key)
    assert answer_fault(welcome, known=None) is not None


# --- through a relay that is anybody -------------------------------------------------------------


def rewrite(world: World, **changes: Any) -> None:
    """Have the relay change every Welcome that it forwards; with another key it signs it anew."""
    relay = world.node("r1").role
    forward = relay.forward

    def forward_changed(peer: str, envelope: Any, frames: list[Any]) -> Any:
        message = decode_message(envelope)
        if isinstance(message, Welcome):
            message = replace(message, **changes)
            if message.public_key == OTHER_PUBLIC_KEY:
                message = sign_answer(message, OTHER_KEY)
            frames = encode(message, source=envelope.source, target=envelope.target)
            envelope = decode_envelope(frames)
        return forward(peer, envelope, frames)

    relay.forward = forward_changed


def start(world: World, name: str, via: str) -> None:
    """Start a node that knows the learner's key from its operator."""
    key = world.node("learner").role.settings.admission.key.public_key().public_bytes_raw()
    with mock.patch.object(JoinSource, "fingerprint", return_value=fingerprint(key)):
        (world.worker if name.startswith("w") else world.relay)(name, via=[via])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("w1", {"settings": {"task.options": {"reward": "evil.py:f"}}}, "wrong_signature"),
        ("w1", {"public_key": OTHER_PUBLIC_KEY}, "wrong_signing_key"),
        ("r2", {"run_id": "another"}, "wrong_signature"),
        ("r2", {"public_key": OTHER_PUBLIC_KEY}, "wrong_signing_key"),
    ],
)
def test_a_relay_cannot_change_what_a_node_inherits(
    make_world: MakeWorld, name: str, changes: dict[str, Any], reason: str
) -> None:
    world = make_world()
    world.learner()
    world.relay()
    world.run(1.0)
    rewrite(world, **changes)
    start(world, name, "r1")
    world.run_until(lambda: world.end(name), within_s=3.0)
    found, text = world.end(name) or ("", "")
    assert found == reason
    assert world.has_failed(name)
    assert "over tcp://r1:7700 (r1): " in text
    node = world.node(name)
    assert getattr(node, "_parts", None) is None, "nothing of it was used"
    assert not node.role.broadcast.trust.run_id


def test_without_a_fingerprint_the_first_key_counts_and_no_other_after_it(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.is_admitted("w1"))
    run_id = world.node("learner").role.settings.admission.run_id
    world.kill("learner")
    other = Identity(run_id, OTHER_KEY)
    with mock.patch("echo.runtime.learner.setup.load_or_create_identity", return_value=other):
        world.learner()
    world.run_until(lambda: world.end("w1"), within_s=10.0)
    reason, _ = world.end("w1") or ("", "")
    assert reason == "another_run"
