"""Environments of the package `verifiers`, used as tasks.

    [task]
    kind = "verifiers"
    options = { env = "my_env", args = { num_examples = 500 } }

`env` is the argument of `verifiers.load_environment`. It is the id of an installed environment, or
the name of a module. Such a module lies beside the configuration and has a function
`load_environment`. The environment keeps its own loop, stop conditions, tools and rubric. Only its
model is replaced. `_Policy` below is a verifiers client that gets its answers from the workers'
engines. Each episode is a coroutine of the environment. The coroutine waits in `_Policy` for each
turn of the policy.

The environment may only append messages to a conversation. The environment must not change earlier
messages, since their tokens are trained on. Rubrics that compare the rollouts of a group are
refused, since the reward of each episode is computed separately.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.core.reward_parts import find_name_fault
from echo.tasks.environment import Environment, find_calls, without_calls
from echo.tasks.messages import Message
from echo.tasks.task import Example

TESTED = "verifiers 0.2.1"
"""The release of verifiers whose interface this module uses. Releases 0.3 and 0.4 have a different
interface.
"""

MODEL = "policy"


class VerifiersTask(Environment):
    """A task whose episodes run in an environment of verifiers.

    Args:
        env: the environment's id, or the name of its module.
        args: keyword arguments of the environment's `load_environment`.
    """

    def __init__(self, *, env: str = "", args: Mapping[str, Any] | None = None) -> None:
        if not env:
            raise ConfigError(
                'task.kind = verifiers: name the environment, such as task.options.env = "my_env"'
            )
        self._name = env
        self._args = dict(args or {})

    def prepare(self) -> None:
        """Load the environment. This may take long."""
        assert self._environment is not None

    def example(self, index: int, *, split: str) -> Example:
        """Return a row of the environment's dataset as an example.

        For the split "heldout" the row is from the environment's evaluation dataset.
        """
        rows = self._rows[split]
        if not rows:
            raise DataError(f"the environment {self._name} has no {split} rows")
        row = rows[index % len(rows)]
        prompt = row["prompt"]
        return Example(
            index=index,
            split=split,
            prompt=prompt if isinstance(prompt, str) else _plain(prompt),
            answer=row.get("answer", ""),
            info={"row": {name: value for name, value in row.items() if name != "prompt"}},
            source=f"{self._name} {split}:{index % len(rows)}",
        )

    def num_examples(self, *, split: str) -> int:
        return len(self._rows[split])

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the schemas of the row's tools.

        A row without tools gets the environment's tools.
        """
        info = example.info["row"].get("info")
        info = json.loads(info) if isinstance(info, str) and info else info
        own = info.get("tool_defs") if isinstance(info, dict) else None
        tools = own if own is not None else self._environment.tool_defs
        return [_schema(tool) for tool in tools or []]

    def begin(self, example: Example) -> _Session:
        """Start the environment's coroutine, and wait for its first request."""
        session = _Session(self._environment, example)
        first = session.next_request()
        if first is None or _plain(first) != _as_messages(example.prompt):
            session.end()
            raise RuntimeError(
                f"{self._name} changes its prompt when a rollout begins; the prompt has been sent "
                "to workers already, so it must stand in the dataset"
            )
        return session

    def reply(self, state: _Session, text: str) -> list[Message] | None:
        """Pass a turn to the environment, and return the messages that it appends.

        Return None if the environment has ended the episode.
        """
        return state.reply(text)

    def outcome(self, state: _Session) -> float | dict[str, float]:
        """Return the reward of the episode from the environment's rubric.

        If the rubric adds up several functions, the result has a part for each function.
        """
        reward, scores = state.outcome()
        return _parts(self._environment.rubric, scores, reward) or reward

    def end(self, state: _Session) -> None:
        """Cancel the environment's coroutine for the episode."""
        state.end()

    @functools.cached_property
    def _environment(self) -> Any:
        vf = _import_verifiers()
        try:
            environment = vf.load_environment(self._name, **self._args)
        except Exception as error:  # an environment's own code raises anything
            raise ConfigError(
                f"task.options.env = {self._name!r}: {type(error).__name__}: {error}; install it "
                "(prime env install), or put its module into the current directory"
            ) from error
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"task.options.env = {self._name!r}: its rubric compares the rollouts of a group; "
                "only rewards of single rollouts can be used"
            )
        return environment

    @functools.cached_property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        environment = self._environment
        rows = {
            "train": _dataset(environment.get_dataset),
            "heldout": _dataset(environment.get_eval_dataset),
        }
        if not rows["train"]:
            raise DataError(f"the environment {self._name} has no training rows")
        return rows


class _Session:
    """An episode: the environment's coroutine, and its requests for turns."""

    def __init__(self, environment: Any, example: Example) -> None:
        self._environment = environment
        self._requests: queue.SimpleQueue[list[Any] | BaseException | None] = queue.SimpleQueue()
        self._turn: asyncio.Future[str | None] | None = None
        self._conversation: list[Message] = []
        self._state: Any = None
        row = {**example.info["row"], "prompt": example.prompt}
        self._task = asyncio.run_coroutine_threadsafe(self._run(row), _loop())

    def next_request(self) -> list[Any] | None:
        """Wait until the environment asks for a turn, and return the prompt.

        Return None if the environment has ended the episode.
        """
        request = self._requests.get()
        if isinstance(request, BaseException):
            self._requests.put(request)  # for the same call again, if a connection was lost
            raise request
        if request is not None:
            self._conversation = _plain(request)
        return request

    def reply(self, text: str) -> list[Message] | None:
        before = self._conversation
        self._answer(text)
        request = self.next_request()
        if request is None:
            return None
        now = self._conversation
        turn = now[len(before) : len(before) + 1]
        if now[: len(before)] != before or [m.get("role") for m in turn] != ["assistant"]:
            raise RuntimeError(
                "the environment rewrites what was said before; only environments that add to a "
                "conversation can be trained on"
            )
        return [
            {"role": message["role"], "content": _text(message.get("content"))}
            for message in now[len(before) + 1 :]
        ]

    def outcome(self) -> tuple[float, Mapping[str, float]]:
        """Return the reward, and the unweighted score of each function of the rubric."""
        if self._state is None:
            # The environment waits for a turn, but no space is left: `_Policy` raises
            # OverlongPromptError.
            self._answer(None)
            if self.next_request() is not None:
                raise RuntimeError("the environment goes on although there is no space for a turn")
        error = self._state["error"]
        if error is not None:
            cause = error.__cause__ or error
            raise RuntimeError(f"{type(error).__name__}: {cause!r}")
        return float(self._state["reward"] or 0.0), self._state["metrics"] or {}

    def end(self) -> None:
        self._task.cancel()

    def _answer(self, text: str | None) -> None:
        turn = self._turn
        assert turn is not None
        if not turn.done():  # done if an error has ended the environment, and the call is repeated
            _loop().call_soon_threadsafe(turn.set_result, text)

    async def sample(self, prompt: list[Any]) -> str | None:
        """Ask the policy for a turn, and return its text.

        Return None if there is no space for a turn.
        """
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put(prompt)
        return await self._turn

    async def _run(self, row: Mapping[str, Any]) -> None:
        try:
            self._state = await self._environment._run_rollout_state(  # noqa: SLF001, its wrapper drops the state
                row, _policy(self), MODEL, {}
            )
        except BaseException as error:
            self._requests.put(error)
            raise
        self._requests.put(None)


def _parts(rubric: Any, scores: Mapping[str, float], reward: float) -> dict[str, float]:
    """Return each function's weighted score. If the scores do not add up to the reward, return {}.

    A rubric of one function has no parts, and a function with weight 0 is left out. The sum of the
    scores differs from the reward in two cases: two functions have the same name, or the rubric
    computes its reward in another way.
    """
    # verifiers has no public way to learn the weights.
    names, weights = rubric._get_reward_func_names(), rubric._get_reward_weights()  # noqa: SLF001
    parts = {
        name: weight * scores[name]
        for name, weight in zip(names, weights, strict=False)
        if weight and name in scores
    }
    is_sum = math.isclose(math.fsum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-9)
    return parts if len(parts) > 1 and is_sum and not find_name_fault(parts) else {}


def _policy(session: _Session) -> Any:
    """Return a client for verifiers whose answers are turns of the policy."""
    vf = _import_verifiers()
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class _Policy(Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
            text = await session.sample(prompt)
            if text is None:
                raise vf.OverlongPromptError("no space for another turn")
            return text

        async def raise_from_native_response(self, response: str) -> None:
            pass

        async def from_native_response(self, response: str) -> Any:
            calls = [
                ToolCall(
                    id=f"call_{uuid.uuid4().hex[:12]}",
                    name=call.name or "malformed",
                    arguments=json.dumps(call.arguments),
                )
                for call in find_calls(response)
            ]
            message = ResponseMessage(
                content=without_calls(response) if calls else response,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(
                id=uuid.uuid4().hex, created=int(time.time()), model=MODEL, message=message
            )

        async def close(self) -> None:
            pass

    return _Policy(None)


def _import_verifiers() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            "task.kind = verifiers needs the package verifiers: "
            + install_command("worker", "verifiers")
        ) from error
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "unknown")
        raise ConfigError(
            f"task.kind = verifiers: version {version} of the package has another interface than "
            f"{TESTED}; pip install {TESTED.replace(' ', '==')}"
        )
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    return verifiers


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all environments, which runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="echo-verifiers", daemon=True).start()
    return loop


def _dataset(get: Any) -> list[dict[str, Any]]:
    try:
        rows = get()
    except ValueError:  # the environment has no such dataset
        return []
    # A lease contains rows as JSON.
    return [json.loads(json.dumps(dict(row), default=str)) for row in rows]


def _as_messages(prompt: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _plain(prompt)


def _plain(messages: Any) -> list[Message]:
    dumped = [m if isinstance(m, dict) else m.model_dump() for m in messages]
    return [
        {name: value for name, value in message.items() if value is not None}
        for message in json.loads(json.dumps(dumped, default=str))
    ]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _schema(tool: Any) -> dict[str, Any]:
    table = tool if isinstance(tool, dict) else tool.model_dump()
    function = {name: table[name] for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}
