"""The guard of a task's process: what the node's death and the task's own end leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.test_rewards import is_running, wait_until

# Two processes: a node that only waits, and one that becomes guard and task. What the task's code
# may set, it sets; what it starts goes to sessions of its own, and one loses its parent at once.
PROGRAM = """
import os, signal, socket, sys, time
from pathlib import Path
from echo.tasks.processes.guard import fork_guarded

node = os.getpid()
if os.fork():
    time.sleep(600)
fork_guarded(node, socket.socketpair()[0])
signal.alarm(0)
signal.setitimer(signal.ITIMER_REAL, 0)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
names = ["task"]
if not os.fork():
    os.setsid()
    names = ["child"]
    if not os.fork():
        os.setsid()
        names = ["grandchild"]
if names == ["child"] and sys.argv[2] == "orphan":
    os._exit(0)
part = Path(sys.argv[1], f".{names[0]}")
part.write_text(str(os.getpid()))
part.rename(Path(sys.argv[1], names[0]))
if names == ["task"] and sys.argv[2] == "leave":
    time.sleep(float(sys.argv[3]))
    os._exit(7)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "orphan", "leave"])
def test_nothing_of_a_task_outlives_its_node_or_its_process(how: str, tmp_path: Path) -> None:
    node = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), how, "0.3"])
    wanted = {"task", "child", "grandchild"} - ({"child"} if how == "orphan" else set())
    try:
        assert wait_until(lambda: wanted <= {path.name for path in tmp_path.iterdir()})
        pids = [int((tmp_path / name).read_text()) for name in wanted]
        if how != "leave":
            node.send_signal(signal.SIGKILL)
            node.wait(60)
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))
    finally:
        node.kill()
        node.wait(60)
