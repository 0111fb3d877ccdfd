"""A long run whose nodes are killed, ended and frozen at random, and an audit of all of it.

    python -m tests.e2e.soak [--minutes 60] [--seed N]

A learner, a relay and three workers run as processes over loopback. In the first two thirds of the
time each of them now and then gets SIGKILL or SIGTERM and is started again, or SIGSTOP and SIGCONT;
one worker is only frozen, so that one process lives through everything. A worker that is down may
lose its stored versions, or half of a file. In the last third nobody is disturbed. Then the learner
is resumed for a few last steps, and the run has to end by itself. Checked are:

* each process ends when it is told to, with the exit code of what ended it, and never otherwise;
* the ledger keeps the promises (audit.py), what it says of files of groups is true, each surviving
  step has its row of metrics, and workers installed what was published, bit for bit;
* memory and open descriptors of a process do not grow from the second quarter of its life to the
  last, nor do the files that are not history;
* in the end no process, listening socket or temporary file is left.

Each node draws its fate from the seed and its name. What that hits depends on the machine, too, so
a seed repeats the events and not always the failure.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from echo.core.errors import EchoError
from echo.records.ledger import read_group, read_records, stored_groups
from echo.records.run_files import read_metrics
from tests.e2e.cluster import Cluster, NodeProcess
from tests.e2e.fork_server import ForkServer

WORKERS = ("steady", "w1", "w2")
NODES = ("learner", "relay", *WORKERS)
PAUSE_S = {"learner": 60.0, "relay": 45.0} | dict.fromkeys(WORKERS, 30.0)
"""Mean time between two events of a node, in a run of at least `LONG_MINUTES`."""
LONG_MINUTES = 5.0
LEAST_S = 1.0
"""Before it, a new process does not handle signals yet."""
LOOK_S = 0.2
SAMPLE_S = 1.0
PATIENCE_S = 45.0
"""For a node that was told to end. A worker without its learner then has to be told again."""
END_S = 150.0
LAST_STEPS = 5
ENDLESS = 1_000_000
"""Steps; no soak makes as many."""
RUN_DIR_BYTES = 10 << 20
"""So little that files of groups are removed within the hour."""
SETTINGS = {
    "checkpoint.interval_steps": 10,
    "limits.run_dir_bytes": RUN_DIR_BYTES,
    "network.reconnect_for_s": 600,
}
HISTORY = ("ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "installed.jsonl")
"""Files that tell of each step and so grow for ever, beside logs."""
HELD_BYTES = 2 * RUN_DIR_BYTES
"""For all files that are not history: the run's, and the stores and spare images of its nodes."""

MIN_SAMPLES = 150
"""Of what is judged: before, a process is still warming up."""
GROWN_BYTES = 16 << 20
GROWN_DESCRIPTORS = 16
GROWN_FILES = 20


@dataclass
class Samples:
    """What a process, or the disk, held from second to second."""

    num_bytes: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    """Open descriptors, or files."""

    def add(self, num_bytes: int, count: int) -> None:
        self.num_bytes.append(num_bytes)
        self.count.append(count)

    @property
    def can_be_judged(self) -> bool:
        return len(self.count) >= MIN_SAMPLES

    def problems(self) -> list[str]:
        """Return what a process holds ever more of."""
        (rss, rss_after), (fds, fds_after) = growth(self.num_bytes), growth(self.count)
        found = []
        if rss_after > rss + GROWN_BYTES:
            found.append(f"memory grew from {rss:.0f} to {rss_after:.0f} bytes")
        if fds_after > fds + GROWN_DESCRIPTORS:
            found.append(f"open descriptors grew from {fds:g} to {fds_after:g}")
        return found


def growth(samples: list[int]) -> tuple[float, float]:
    """Return the medians of the second and of the last quarter."""
    quarter = len(samples) // 4
    return median(samples[quarter : 2 * quarter]), median(samples[-quarter:])


class Soak:
    """One such run."""

    def __init__(self, cluster: Cluster, *, minutes: float, seed: int) -> None:
        self.cluster = cluster
        self.seed = seed
        self.problems: list[str] = []
        self._minutes = minutes
        self._pace = min(1.0, minutes / LONG_MINUTES)
        self._began = time.monotonic()
        self._nodes: dict[str, NodeProcess] = {}
        self._expected: dict[NodeProcess, int] = {}
        """Exit codes of nodes that were told to end."""
        self._frozen: set[str] = set()
        self._samples: dict[NodeProcess, Samples] = {}
        self._files = Samples()
        self._temporary = cluster.directory / "tmp"
        self._temporary.mkdir()

    def run(self) -> list[str]:
        """Run all of it; return what was wrong."""
        try:
            self._begin()
            self._pass_time()
            self._finish()
            self._check_records()
            self._check_growth()
            self._check_leftovers()
        except (AssertionError, EchoError) as error:
            self.problems.append(str(error))
        return self.problems

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    # --- events ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start all nodes; the time counts from the first step on."""
        for name in NODES:
            self._start(name)
        self.cluster.wait_for_step(1, self._nodes["learner"])
        self._began = time.monotonic()
        self._storm_until = self._began + 40 * self._minutes
        self._calm_until = self._began + 60 * self._minutes

    def _pass_time(self) -> None:
        """Play the lives of all nodes until the calm is over."""
        lives = {name: self._life(name, random.Random(f"{self.seed}/{name}")) for name in NODES}
        due = [(0.0, name) for name in NODES]
        sampled_at = 0.0
        while due or time.monotonic() < self._calm_until:
            now = time.monotonic()
            if now > self._calm_until + END_S:
                raise AssertionError(f"{[name for _, name in due]} are not through")
            while due and due[0][0] <= now:
                _, name = heapq.heappop(due)
                pause_s = next(lives[name], None)
                if pause_s is not None:
                    heapq.heappush(due, (time.monotonic() + pause_s, name))
            if now >= sampled_at + SAMPLE_S:
                sampled_at = now
                self._look()
            time.sleep(LOOK_S)

    def _life(self, name: str, rng: random.Random) -> Iterator[float]:
        """Disturb a node until the storm is over; yield the seconds until the next act."""
        while True:
            fate = "SIGSTOP"
            while fate == "SIGSTOP":
                pause_s = LEAST_S + rng.expovariate(1 / (PAUSE_S[name] * self._pace))
                fate = rng.choice(("SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP"))
                if time.monotonic() + pause_s > self._storm_until:
                    return
                yield pause_s
                if fate == "SIGSTOP" or name == "steady":
                    fate = "SIGSTOP"
                    yield from self._freeze(name, rng.uniform(0.5, 8.0))
            yield from self._end(name, signal.Signals[fate])
            if name in WORKERS and rng.random() < 0.5:
                self._damage(name, rng)
            yield rng.uniform(0.0, 5.0)
            self._start(name)

    def _start(self, name: str, *, max_steps: int = ENDLESS) -> None:
        """Start a node; a learner goes on with the run if there is one."""
        role = "worker" if name in WORKERS else name
        more = ["--resume-or-begin"] if role == "learner" else []
        own = {"run.max_steps": max_steps, "network.store_dir": str(self._store_dir(name))}
        settings: dict[str, object] = {**SETTINGS, **own}
        if role == "worker":
            addresses = [self.cluster.relay_address, self.cluster.learner_address]
            settings["worker.connect"] = addresses if name != "w2" else addresses[1:]
        env = {"REWARD_S": "0.02", "TMPDIR": str(self._temporary)}
        node = self.cluster.start(
            role, *more, name="" if role == "learner" else name, settings=settings, env=env
        )
        self._nodes[name] = node
        self._samples[node] = Samples()
        self._say(f"{name} starts as process {node.process.pid}")

    def _store_dir(self, name: str) -> Path:
        return self.cluster.directory / "stores" / name

    def _freeze(self, name: str, pause_s: float) -> Iterator[float]:
        self._say(f"{name} is frozen for {pause_s:.1f} s")
        self._frozen.add(name)
        self._nodes[name].process.send_signal(signal.SIGSTOP)
        yield pause_s
        self._nodes[name].process.send_signal(signal.SIGCONT)
        self._frozen.remove(name)
        self._say(f"{name} goes on")

    def _end(self, name: str, number: signal.Signals) -> Iterator[float]:
        """Send a signal and wait until the process has ended."""
        node = self._nodes[name]
        code = -number if number == signal.SIGKILL else 128 + number
        self._expected[node] = code
        self._say(f"{name} gets {number.name}")
        for _ in range(2):
            node.process.send_signal(number)
            give_up_at = time.monotonic() + PATIENCE_S
            while node.is_running and time.monotonic() < give_up_at:
                yield LOOK_S
            if not node.is_running:
                self._say(f"{name} has ended with {node.process.returncode}")
                return
            self._say(f"{name} has not ended after {PATIENCE_S:.0f} s")
        raise AssertionError(f"{name} does not end after {number.name} twice")

    def _damage(self, name: str, rng: random.Random) -> None:
        """Delete what a worker that is down has stored, or one file of it, or half of a file."""
        store = self._store_dir(name)
        partials = self.cluster.run_dir / "workers" / name / "partials.bin"
        files = [path for path in (*sorted(store.glob("v*")), partials) if path.exists()]
        # Two numbers whatever there is, so that the next fates stay those of the seed.
        which, is_deleted = rng.random(), rng.random() < 0.5
        path = [store, *files][int(which * (1 + len(files)))]
        if path == store:
            shutil.rmtree(store, ignore_errors=True)
            what = "its stored versions"
        elif is_deleted:
            path.unlink()
            what = path.name
        else:
            os.truncate(path, path.stat().st_size // 2)
            what = f"half of {path.name}"
        self._say(f"{name} loses {what}")

    def _look(self) -> None:
        """Measure all nodes and the disk; a node that has ended by itself is a fault."""
        for name, node in self._nodes.items():
            code = node.process.poll()
            if code is not None:
                expected = self._expected.get(node)
                assert code == expected, f"{name} ended with {code}, not {expected}"
            elif node not in self._expected and name not in self._frozen:
                try:
                    process = psutil.Process(node.process.pid)
                    self._samples[node].add(process.memory_info().rss, process.num_fds())
                except psutil.Error:
                    continue  # it ends at this moment
        self._files.add(*self._held())

    def _held(self) -> tuple[int, int]:
        """Return bytes and number of the files that are not history.

        The number leaves out those of groups, of which each life of the learner begins one.
        """
        num_bytes = count = 0
        for place, _, names in os.walk(self.cluster.directory):
            directory = Path(place)
            if directory.name == "logs":
                continue
            for name in names:
                if name in HISTORY or name.endswith(".out"):
                    continue
                with suppress(FileNotFoundError):  # nodes go on meanwhile
                    num_bytes += (directory / name).lstat().st_size
                    count += directory.name != "groups"
        return num_bytes, count

    # --- the end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Interrupt the learner, resume it for some last steps, and wait for all to end."""
        learner = self._nodes["learner"]
        before = self._last_step
        self.cluster.wait_for(lambda: self._last_step > before, "one more step", alive=learner)
        learner.process.send_signal(signal.SIGTERM)
        code = self.cluster.wait_for_end(learner, within_s=END_S)
        assert code == 128 + signal.SIGTERM, f"the learner ended with {code} after SIGTERM"
        last = self._last_step + LAST_STEPS
        self._say(f"the learner is resumed until step {last}")
        self._start("learner", max_steps=last)
        self.cluster.finish(*self._nodes.values())
        self._say("all nodes have ended")

    @property
    def _last_step(self) -> int:
        trained = self.cluster.records("trained")
        return int(trained[-1]["step"]) if trained else 0

    def _check_records(self) -> None:
        """Audit ledger, metrics, files of groups and installed versions."""
        found = self.cluster.audit()
        num_lives = len(found.fork_steps)
        self._say(f"{found.num_steps} steps, {len(found.accepted)} groups, {num_lives} lineages")
        rows = [int(row["step"]) for row in read_metrics(self.cluster.run_dir).train]
        missing = sorted(set(range(1, found.num_steps + 1)) - set(rows))
        if missing or len(rows) != found.num_steps:
            self.problems.append(f"{len(rows)} rows of metrics, without those of {missing}")
        run_dir = self.cluster.run_dir
        for stored in stored_groups(read_records(run_dir)):
            accepted = stored.accepted
            if stored.removed is None:
                read_group(run_dir, accepted.group, accepted.place)
            elif (run_dir / "groups" / accepted.place.file).exists():
                self.problems.append(f"{accepted.place.file} was removed and is there")
        sealed = {
            tuple(each["version"]): each["image_hash"] for each in self.cluster.records("sealed")
        }
        for name in WORKERS:
            for each in self.cluster.installed(name):
                if sealed.get(tuple(each["version"])) != each["image_hash"]:
                    self.problems.append(f"{name} installed {each}, which nobody published")

    def _check_growth(self) -> None:
        """Compare the quarters of each life, and those of the disk."""
        for node, samples in self._samples.items():
            if not samples.can_be_judged:
                continue
            (rss, rss_after), fds = growth(samples.num_bytes), growth(samples.count)
            self._say(
                f"{node.name}, process {node.process.pid}, {len(samples.count)} samples: "
                f"{rss / 2**20:.1f} -> {rss_after / 2**20:.1f} MiB, "
                f"{fds[0]:g} -> {fds[1]:g} descriptors"
            )
            self.problems += [f"{node.name}: {problem}" for problem in samples.problems()]
        most = max(self._files.num_bytes)
        self._say(f"files of at most {most / 2**20:.1f} MiB")
        if most > HELD_BYTES:
            self.problems.append(f"files took {most} bytes, more than {HELD_BYTES}")
        if self._files.can_be_judged:
            before, after = growth(self._files.count)
            self._say(f"{before:g} -> {after:g} files")
            if after > before + GROWN_FILES:
                self.problems.append(f"files grew from {before:g} to {after:g}")

    def _check_leftovers(self) -> None:
        """Look for processes, sockets and temporary files of this run."""
        give_up_at = time.monotonic() + PATIENCE_S
        while (left := self._processes()) and time.monotonic() < give_up_at:
            time.sleep(LOOK_S)
        for process in left:
            self.problems.append(f"{process} is left")
            with suppress(psutil.Error):
                process.kill()
        for address in (self.cluster.learner_address, self.cluster.relay_address):
            with socket.socket() as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    own.bind(("127.0.0.1", int(address.rpartition(":")[2])))
                    own.listen()
                except OSError as error:
                    self.problems.append(f"{address} is still taken: {error}")
        left_files = [path for path in self.cluster.directory.rglob("*") if path.is_socket()]
        left_files += self._temporary.iterdir()
        self.problems += [f"{path} is left" for path in left_files]

    def _processes(self) -> list[psutil.Process]:
        """Return the processes that run in the cluster's directory."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()).is_relative_to(self.cluster.directory):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


def soak(directory: Path, *, minutes: float, seed: int) -> list[str]:
    """Soak a new cluster in a directory; return what was wrong."""
    from echo.engine.model import build_model, save_tiny_model

    model = directory / "model"
    save_tiny_model(model, build_model(seed=0))
    forks = ForkServer()
    cluster = Cluster(directory / "site", model, forks)
    try:
        return Soak(cluster, minutes=minutes, seed=seed).run()
    finally:
        cluster.close()
        forks.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it takes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="echo-soak-")).resolve()
    print(f"seed {options.seed}, in {directory}", flush=True)
    problems = soak(directory, minutes=options.minutes, seed=options.seed)
    for problem in problems:
        print(problem)
    if problems:
        print(f"seed {options.seed}: {len(problems)} problems; logs are in {directory / 'site'}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
