"""How a relay or worker finds the join string of its run, and what follows from it."""

from __future__ import annotations

import socket
from pathlib import Path

from echo.config.fields import has_secret
from echo.config.schema import Config
from echo.core.errors import ConfigError
from echo.net.curve import CurveKeys
from echo.net.transport import format_address, is_loopback, parse_address, without_key
from echo.runtime.curve import Join
from echo.runtime.identity import load_signing_key
from echo.weights.store import fingerprint

ECHO_JOIN = "ECHO_JOIN"
"""Environment variable with the join string, which the command line reads (echo/cli/node.py)."""


def find_join(config: Config, role: str) -> Join | None:
    """Return the first join string among the addresses, security.join and its file.

    Without any of them it is that of the run directory, for nodes on the learner's machine.

    Raises:
        ConfigError: if the file cannot be read or holds something else.
    """
    connect = config.relay.connect if role == "relay" else config.worker.connect
    for address in filter(has_secret, connect):
        return Join.parse(address, source=f"{role}.connect")
    given = config.security.join
    if given is not None and has_secret(given):
        return Join.parse(given, source="security.join")
    if given is not None:
        path, key = Path(given).expanduser(), "security.join = "
    else:
        path, key = config.run_dir / "keys" / "join", ""
        if not path.exists():
            return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}{str(path)!r}: cannot be read: {error}; copy the learner's "
            "runs/NAME/keys/join there"
        ) from error
    return Join.parse(text, source=f"{key}{str(path)!r}")


def dial_addresses(config: Config, role: str) -> tuple[str, ...]:
    """Return the addresses that a relay or worker dials first, in order; no secret is in them."""
    connect = config.relay.connect if role == "relay" else config.worker.connect
    if connect:
        return tuple(_without_secret(address) for address in connect)
    join = find_join(config, role)
    return () if join is None else (join.address,)


def signing_fingerprint(config: Config, role: str) -> bytes | None:
    """Return the fingerprint of the learner's signing key; None where nothing here tells it.

    It stands in the join string. A run that is not encrypted has none: then it is that of the run
    directory, if the learner is dialled on this machine, and otherwise nobody is known to be the
    learner.
    """
    join = find_join(config, role) if config.security.curve else None
    if join is not None:
        return join.fingerprint
    if not all(map(is_loopback, dial_addresses(config, role))):
        return None
    try:
        key = load_signing_key(config.run_dir)
    except (OSError, ValueError):
        return None
    return fingerprint(key.public_key().public_bytes_raw())


def node_keys(config: Config, role: str) -> CurveKeys | None:
    """Return the keys of a relay or worker; None where links are not encrypted.

    Raises:
        ConfigError: if there is no join string; it says where to get it.
    """
    if not config.security.curve:
        return None
    join = find_join(config, role)
    if join is None:
        raise ConfigError(
            f"this {role} has no join string, and links are encrypted: copy the line in "
            "runs/NAME/keys/join on the learner's machine and set the environment's ECHO_JOIN to "
            "it, or name a file that holds it with security.join (a run that shall not be "
            "encrypted: security.curve=false on all its nodes)"
        )
    return CurveKeys.of_node(role, join.secret, *dial_addresses(config, role), join.address)


def join_address(address: str, advertise: str | None) -> str:
    """Return where others reach the learner that listens on `address`, as far as it can know.

    A wildcard stands for every interface; the one of the default route is then the best guess.
    """
    if advertise is not None:
        return advertise
    host, port = parse_address(address)
    if host not in ("0.0.0.0", "::"):
        return without_key(address)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    anyone = "2001:db8::1" if host == "::" else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((anyone, 9))  # chooses a route; nothing is sent
        except OSError:
            return format_address(socket.gethostname(), port)
        return format_address(str(probe.getsockname()[0]), port)


def _without_secret(address: str) -> str:
    key = address.partition("#")[2].partition(".")[0]
    return without_key(address) + (f"#{key}" if key else "")
