"""Tasks that misbehave in every way, for tests of the processes in which they run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

from echo.tasks.environment import Environment
from echo.tasks.task import Example, RetryCall, Task


class Misbehaving(Task):
    """Does what the completion says."""

    def __init__(self) -> None:
        self.num_calls = self.num_tries = 0
        self.questions: asyncio.Queue[tuple[float, asyncio.Future[float]]] | None = None

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="?", source=f"rows.jsonl:{index + 1}")

    def reward(self, example: Example, completion: str) -> float:
        self.num_calls += 1
        verb, _, rest = completion.partition(" ")
        result: float = getattr(self, verb)(rest)
        return result

    def number(self, rest: str) -> float:
        return float(rest)

    def calls(self, rest: str) -> float:
        return self.num_calls

    def pid(self, rest: str) -> float:
        return os.getpid()

    def fail(self, rest: str) -> float:
        raise ZeroDivisionError(rest)

    def regex(self, rest: str) -> float:
        """Keep the interpreter's lock in one match, for longer than anybody waits."""
        return float(re.fullmatch(r"(a+)+b", "a" * 60) is not None)

    def hog(self, rest: str) -> float:
        return float(len(bytearray(int(rest))))

    def crash(self, rest: str) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0.0

    def leave(self, rest: str) -> float:
        os._exit(7)

    def child(self, rest: str) -> float:
        """Start a process and wait for it without end."""
        program = f"import os, time, pathlib; pathlib.Path({rest!r}).write_text(str(os.getpid()))"
        subprocess.run([sys.executable, "-c", f"{program}; time.sleep(600)"], check=False)
        return 0.0

    def alarm(self, rest: str) -> float:
        """Leave an alarm behind that is due at once after the call."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1e-2)
        return 1.0

    def budget(self, rest: str) -> float:
        """Leave a limit of processor time behind."""
        signal.setitimer(signal.ITIMER_PROF, 1e-2)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-2)
        return 1.0

    def busy(self, rest: str) -> float:
        begun_at = time.process_time()
        while time.process_time() < begun_at + float(rest):
            pass
        return 1.0

    def fork(self, rest: str) -> float:
        """Forget to end the child that does a part of the work."""
        return 2.0 if os.fork() else 3.0

    async def ask(self, rest: str) -> float:
        """Ask what was begun in the first such call."""
        if self.questions is None:
            self.questions = asyncio.Queue()
            self.answering = asyncio.create_task(self.answer(self.questions))
        reply = asyncio.get_running_loop().create_future()
        await self.questions.put((float(rest), reply))
        result: float = await reply
        return result

    async def answer(self, questions: asyncio.Queue[tuple[float, asyncio.Future[float]]]) -> None:
        while True:
            number, reply = await questions.get()
            reply.set_result(2 * number)

    def print(self, rest: str) -> float:
        print(rest, flush=True)
        return 1.0

    def retry(self, rest: str) -> float:
        """Work at a later call only."""
        self.num_tries += 1
        if self.num_tries < int(rest):
            raise RetryCall("the judge is being started")
        return 1.0

    def sleep(self, rest: str) -> float:
        time.sleep(float(rest))
        return 1.0


class Unready(Misbehaving):
    """Lacks a file."""

    def prepare(self) -> None:
        raise FileNotFoundError("no such sandbox")


class Counting(Environment):
    """Wants to be told 1, 2, 3; anything else is tried as a mischief."""

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="Count!", answer=3)

    def begin(self, example: Example) -> dict[str, int]:
        return {"said": 0, "last": int(example.answer)}

    def reply(self, state: dict[str, int], text: str) -> str | None:
        if not text.strip().isdigit():
            return f"{Misbehaving().reward(self.example(0, split='train'), text):.12g}"
        is_next = int(text) == state["said"] + 1
        state["said"] += is_next
        if state["said"] == state["last"]:
            return None
        return "go on" if is_next else "no"

    def outcome(self, state: dict[str, int]) -> float:
        return state["said"] / state["last"]


class Brief(Counting):
    """Gives up after two turns."""

    max_turns = 2


class Parting(Environment):
    """Takes its time to say goodbye."""

    num_ended = 0

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="?")

    def begin(self, example: Example) -> Example:
        return example

    async def reply(self, state: Example, text: str) -> str | None:
        return text or None

    async def outcome(self, state: Example) -> float:
        return 1.0

    async def end(self, state: Example) -> None:
        await asyncio.sleep(0)
        type(self).num_ended += 1
