"""Give a rented worker machine back with the user's command.

A worker on standby still costs money. So a worker leaves by itself if it has been on standby, or
without the learner, for `worker.release_after_s` seconds (`roles/worker/departure.py`). The worker
then takes no more leases, delivers its results, and runs the user's command that gives the machine
back. Its Goodbye reports whether the command has succeeded. If the command has failed, the learner
continues to count the cost of the machine.

The command also runs when the learner reports the end of the run. It does not run after Ctrl-C or
an error, because the operator may want to look at the machine.
"""

from __future__ import annotations

import asyncio
import logging

from echo.config.schema import NetworkSection, WorkerSection
from echo.roles.worker.departure import ReleaseTerms
from echo.runtime.commands import run_shell

RELEASE_TIMEOUT_S = 60.0
"""Time limit of the command worker.on_release, seconds.

Providers answer in seconds, so there is time for retries.
"""


def terms_of(section: WorkerSection, network: NetworkSection) -> ReleaseTerms:
    """Return how long a worker waits on standby, and how long it waits for a silent learner.

    A worker waits for a silent learner at least `dead_after_s`, and at most `reconnect_for_s`.
    After `reconnect_for_s` the worker would end with an error and keep the machine.
    """
    after_s = section.release_after_s
    if after_s is None:
        return ReleaseTerms()
    gone_s = min(max(after_s, network.dead_after_s), network.reconnect_for_s)
    return ReleaseTerms(standby_s=after_s, learner_gone_s=gone_s)


class RentedMachine:
    """The worker's machine. `give_back` runs the release command once."""

    def __init__(self, command: str | None, *, log: logging.Logger) -> None:
        """`command` is the shell command that gives the machine back, or None."""
        self._command, self._log = command, log
        self._releasing: asyncio.Task[bool] | None = None

    @property
    def is_releasing(self) -> bool:
        """Whether the release command has started. It may still run after the node has ended."""
        return self._releasing is not None

    async def give_back(self, reason: str) -> bool:
        """Run the release command, at the first call only. Return whether the command succeeded."""
        if self._command is None:
            return False
        if self._releasing is None:
            work = release(self._command, reason=reason, log=self._log)
            self._releasing = asyncio.create_task(work, name="release")
        return await asyncio.shield(self._releasing)


async def release(
    command: str, *, reason: str, log: logging.Logger, timeout_s: float = RELEASE_TIMEOUT_S
) -> bool:
    """Run a shell command with a time limit, and log its output. Return whether it succeeded.

    Args:
        command: the shell command, which gets the reason in ECHO_RELEASE_REASON.
        reason: the reason for giving the machine back.
        log: receives the command's output.
        timeout_s: seconds after which the command and its child processes are killed.
    """
    log.info("giving the machine back: running worker.on_release")
    environment = {"ECHO_RELEASE_REASON": reason}
    try:
        end = await run_shell(command, environment=environment, timeout_s=timeout_s)
    except OSError as error:  # no memory for another process, or no space for its output
        outcome = f"could not be started: {error}"
    else:
        for line in end.lines:
            log.info("on_release: %s", line)
        if end.has_succeeded:
            log.info("on_release %s: the machine is given back", end.outcome)
            return True
        outcome = end.outcome
    log.error("on_release %s: the machine may go on billing; release it yourself", outcome)
    return False
