"""Defines the exceptions that Echo raises on purpose.

EchoError
├── ConfigError            a setting is wrong: where, what, and the remedy
├── DataError              a dataset row, file or model directory is unusable: which, and the remedy
├── ProtocolError
│   ├── LocalProtocolError     this process broke the rules because of a bug, and stops
│   └── RemoteProtocolError    a peer broke the rules: its message is counted and refused
│       └── ForgedError            a peer forwarded data without a valid signature or seal
├── TransportError         a socket failed (zmq's errors end here, chained to the original)
├── StorageError           the disk failed or a file on it is damaged
├── RefusedError           the learner refused this node for good: the reason, in detail
├── PlanError              no plan satisfies the constraints: the reasons
├── EngineError            the model runtime failed
├── RankError              one of the processes that train together failed: which, and how
├── DivergedError          the policy has become worse than a limit of the user
└── RolledBackError        the run must be resumed from a checkpoint before a divergence

A message contains the error, its place, the values and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EchoError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(EchoError):
    """A configuration is wrong. The message lists all problems, with remedies."""


class DataError(EchoError):
    """A dataset row, a file or a model directory cannot be used."""


class ProtocolError(EchoError):
    """A message broke the rules of the protocol."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol's rules because of a bug."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the protocol's rules. Its message is counted and refused."""


class ForgedError(RemoteProtocolError):
    """A peer forwarded a message or chunk that its origin has not validly signed or sealed."""


class TransportError(EchoError):
    """An operation on a socket failed."""


class StorageError(EchoError):
    """The disk is full or cannot be written, or a file on it is damaged."""


class RefusedError(EchoError):
    """The learner refused this node for good. It would also refuse a retry."""


class PlanError(EchoError):
    """No plan satisfies the constraints. The message lists the reasons."""


class EngineError(EchoError):
    """The inference engine that runs the model failed."""


class RankError(EchoError):
    """A process of a sharded training failed, so the other processes cannot continue."""


class DivergedError(EchoError):
    """The policy has diverged, and the user's settings require that the training ends."""

    def __init__(self, text: str, *, good_step: int) -> None:
        super().__init__(text)
        self.good_step = good_step


class RolledBackError(EchoError):
    """The learner must resume from a checkpoint that was written before a divergence."""


def in_one(what: str, problems: Iterable[str]) -> str:
    """Return one error message that lists the distinct problems of `what`."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return "\n  ".join([f"the {what} has {len(unique)} problems:", *unique])


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to `word`; None if no candidate is similar."""
    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.7)), None)
