"""CPU of viewers of a run with 200 nodes: the learner's for a status, and that of `echo-rl top`.

One process stands in for the learner: the real transport, keys and rules for viewers, and the
status of a made-up run whose numbers change. `echo-rl top` runs on a pseudo-terminal, whose output
is read and dropped. Its share of a core is the difference of its CPU seconds from the end of its
start to the end of the measurement, in seconds of wall time. `status` rows are CPU seconds of one
status in JSON, and of the drawing of one screen, medians of the rounds.

    python bench/bench_viewers.py
    python bench/bench_viewers.py --serve DIR        serve only, for a look: echo-rl top DIR
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import harness
from rich.console import Console

from echo.core.monitoring.metrics import Counters
from echo.core.monitoring.status import (
    CostStatus,
    LinkStatus,
    NodeStatus,
    RunStatus,
    StepStatus,
    VersionStatus,
    thinned,
)
from echo.net.transport import Connected, Disconnected, Received, TransportOptions
from echo.net.zmq import ZmqTransport
from echo.roles.viewers import MakeStatus, Operate, Viewers
from echo.runtime.access import write_access
from echo.runtime.identity import load_or_create_keys
from echo.ui.top import TopScreen
from echo.wire.actions import Action, HangUp, PeerFaults, Send
from echo.wire.messages import Outcome

SIZES = ((80, 24), (200, 50))
START_S = 6.0
"""Seconds after which `echo-rl top` has started."""
ROUNDS = 50


def made_up(num_nodes: int, step: int) -> RunStatus:
    """Return the status of a run at `step` with this many workers and relays."""
    chance = random.Random(step)
    nodes = [
        NodeStatus(
            node_id="learner", role="learner", state="training", version=f"v{step}",
            staleness=0, tokens_per_s=48_000.0, bytes_sent_per_s=60e6, uplink_bytes_per_s=125e6,
            price_per_h=2.5,
        )
    ]  # fmt: skip
    for number in range(num_nodes - 1):
        is_relay = number % 20 == 0
        nodes.append(
            NodeStatus(
                node_id=f"{'relay' if is_relay else 'worker'}-{number}",
                role="relay" if is_relay else "worker",
                state="relaying" if is_relay else chance.choice(
                    ("generating", "generating", f"generating, fetching v{step} 61/120", "waiting")
                ),
                version=f"v{step - chance.randrange(3)}",
                staleness=chance.randrange(3),
                tokens_per_s=0.0 if is_relay else 1500 + 300 * chance.random(),
                bytes_per_s=2e6 * chance.random(),
                bytes_sent_per_s=8e6 * chance.random() if is_relay else 0.0,
                rtt_s=0.02 + 0.1 * chance.random(),
                num_leases=0 if is_relay else chance.randrange(12),
                num_errors=chance.choice((0, 0, 0, 3)),
                parent=f"relay-{number // 20 * 20}",
                price_per_h=0.05 if is_relay else 0.4,
                seen_s=2 * chance.random(),
                mismatch_kl=None if is_relay else 0.001 * chance.random(),
                reward=None if is_relay else 0.5 + 0.2 * chance.random(),
            )
        )  # fmt: skip
    rewards = [(each, 0.2 + 0.6 * each / (each + 300) + 0.05 * chance.random())
               for each in range(1, step + 1)]  # fmt: skip
    slowest = LinkStatus(parent="relay-0", child="worker-7", bytes_per_s=2e6, remaining_s=41.0)
    return RunStatus(
        run_name="synthetic", at=time.time(), elapsed_s=30.0 * step, step=step, max_steps=2000,
        max_staleness=4, publish_period=1, eta_s=30.0 * (2000 - step), nodes=tuple(nodes),
        reward_history=thinned(rewards),
        eval_history=tuple((each, 0.3 + each / 3000, 0.35 + each / 3000)
                           for each in range(0, step, 50)),
        staleness_tokens={0: 600, 1: 300, 2: 100}, idle_ratio=0.06, recent_idle_ratio=0.04,
        last_step=StepStatus(step=step, reward=rewards[-1][1], mean_staleness=0.6, max_staleness=2,
                             accepted_tokens_per_s=285_000.0, seconds=29.6, useful_share=0.71),
        num_buffered=40, groups_per_step=64, num_leased=900,
        versions=(VersionStatus(version=f"v{step}", done=0.63, num_nodes=num_nodes - 1,
                                num_complete=100, slowest=slowest),),
        broadcast_bytes=3 << 40,
        cost=CostStatus(per_h=81.2, total=676.4, per_million_tokens=0.08, standby_per_h=0.0,
                        unconfirmed_per_h=0.0, budget_per_run=2000.0, num_active=190,
                        num_standby=0),
        notices=tuple(f"12:0{n}:00 worker-{n} joined" for n in range(6)),
    )  # fmt: skip


class Server:
    """The learner's end of viewers, without a learner."""

    def __init__(self, transport: ZmqTransport, num_nodes: int) -> None:
        self._transport, self._num_nodes = transport, num_nodes
        self._viewers = Viewers(Counters(), PeerFaults())
        self._step = 800

    async def run(self) -> None:
        """Serve until cancelled; a step is made ten times a second, unless viewers are busy."""
        loop, viewers = asyncio.get_running_loop(), self._viewers
        while True:
            events: list[Any] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    events = await self._transport.receive()
            self._step += not events
            for event in events:
                match event:
                    case Connected(peer, None, user) if user:
                        self._act(viewers.connected(peer, user, now=loop.time()))
                    case Disconnected(peer):
                        viewers.disconnected(peer)
                    case Received(peer, frames) if peer in viewers:
                        self._act(viewers.receive(peer, frames, now=loop.time()))
            self._act(viewers.expire(now=loop.time()))

    def _act(self, actions: list[Action]) -> None:
        now = asyncio.get_running_loop().time()
        for action in actions:
            match action:
                case Send():
                    self._transport.send(action.peer, action.frames)
                case HangUp():
                    self._transport.hang_up(action.peer)
                case MakeStatus():
                    data = made_up(self._num_nodes, self._step).to_json()
                    self._act(self._viewers.status_made(data, now=now))
                case Operate(peer, operation):
                    outcome = Outcome(number=operation.number, is_done=True, text="as asked")
                    self._act(self._viewers.operation_done(peer, outcome))


async def serve(run_dir: Path, num_nodes: int) -> None:
    """Serve the made-up run to viewers, with its keys in `run_dir`, until cancelled."""
    keys, _ = load_or_create_keys(run_dir)
    transport = ZmqTransport("tcp://127.0.0.1:0", TransportOptions(), keys)
    await transport.start()
    write_access(run_dir, str(transport.listen_address), keys)
    await Server(transport, num_nodes).run()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(run_dir: Path, size: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Run `echo-rl top` on a terminal of this size; return its share of a core and its output."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "xterm-256color"
        command = [sys.executable, "-m", "echo.cli.main", "top", str(run_dir)]
        os.execv(sys.executable, command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    num_bytes = read_for(terminal, START_S)
    assert num_bytes > 1000, "echo-rl top has drawn nothing"
    since, before = time.monotonic(), cpu_s(pid)
    num_bytes = read_for(terminal, seconds)
    elapsed_s, used_s = time.monotonic() - since, cpu_s(pid) - before
    os.write(terminal, b"q")
    read_for(terminal, 2.0)
    os.waitpid(pid, 0)
    os.close(terminal)
    return {
        "what": "echo-rl top",
        "columns": size[0],
        "rows": size[1],
        "share_of_core": round(used_s / elapsed_s, 4),
        "bytes_per_s": round(num_bytes / elapsed_s),
    }


def read_for(terminal: int, seconds: float) -> int:
    """Read from a terminal for some seconds; return the number of bytes."""
    until, num_bytes = time.monotonic() + seconds, 0
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                num_bytes += len(os.read(terminal, 1 << 16))
            except OSError:  # it has ended
                break
    return num_bytes


def median_cpu_s(call: Callable[[], Any]) -> float:
    """Return the median CPU seconds of a call."""
    rounds = []
    for _ in range(ROUNDS):
        before = time.process_time()
        call()
        rounds.append(time.process_time() - before)
    return statistics.median(rounds)


def single_costs(num_nodes: int) -> list[dict[str, Any]]:
    """Return the CPU seconds of one status in JSON, and of one screen drawn."""
    status = made_up(num_nodes, 800)
    data = status.to_json()
    rows = [
        {"what": "status to JSON", "cpu_s": median_cpu_s(status.to_json), "bytes": len(data)},
        {
            "what": "status from JSON",
            "cpu_s": median_cpu_s(lambda: RunStatus.from_json(data, source="bench")),
        },
    ]
    for columns, height in SIZES:
        seconds = median_cpu_s(partial(draw, status, columns, height))
        rows.append({"what": "screen", "columns": columns, "rows": height, "cpu_s": seconds})
    return rows


def draw(status: RunStatus, columns: int, height: int) -> None:
    """Draw a status as echo-rl top does, into memory."""
    screen = TopScreen(by="bench")
    screen.show(status, may_operate=True)
    console = Console(file=io.StringIO(), force_terminal=True, width=columns)
    console.print(screen.render(columns, height))


def main() -> None:
    """Measure, or serve only."""
    parser = harness.new_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--serve", type=Path, metavar="DIR")
    options = harness.parse(parser, seconds=8.0)
    if options.serve is not None:
        asyncio.run(serve(options.serve, options.nodes))
        return
    rows = single_costs(options.nodes)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", directory, "--nodes", str(options.nodes)]
        )
        try:
            while not (run_dir / "keys" / "operate").exists():
                time.sleep(0.1)
            rows += [watch(run_dir, size, options.seconds) for size in SIZES]
        finally:
            server.terminate()
            server.wait()
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(harness.save("viewers", {"nodes": options.nodes, "rows": rows}))


if __name__ == "__main__":
    main()
