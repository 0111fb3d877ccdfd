"""Environments of verifiers', as people write them: one turn, several turns, tools."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def correct(completion: Any, answer: str, **_: Any) -> float:
    return float(answer in str(completion[-1].content))


def is_short(completion: Any, **_: Any) -> float:
    return float(len(str(completion[-1].content)) < 9)


def length(completion: Any, **_: Any) -> float:
    return float(len(str(completion[-1].content)))


async def said_all(completion: Any, state: Any, **_: Any) -> float:
    return int(state.get("said", 0)) / 3


class Count(vf.MultiTurnEnv):  # type: ignore[misc] # of no known type where it is missing
    """Wants 1, 2, 3."""

    async def setup_state(self, state: Any) -> Any:
        state["said"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        text = str(messages[-1].content)
        if text == "break":
            raise vf.ToolError("the sandbox is gone")
        state["said"] += text == str(state["said"] + 1)
        return [{"role": "user", "content": "go on"}]

    @vf.stop  # type: ignore[untyped-decorator] # as above
    async def is_counted(self, state: Any) -> bool:
        if state["trajectory"]:
            last = state["trajectory"][-1]["completion"][-1]
            if str(last.content) == "3" and state["said"] == 2:
                state["said"] = 3
                return True
        return False


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def rows(question: str) -> Any:
    return Dataset.from_list([{"question": f"{question} {n}", "answer": str(n)} for n in range(3)])


def load_environment(kind: str = "single") -> Any:
    if kind == "tools":
        rubric = vf.Rubric(funcs=[correct])
        return vf.ToolEnv(dataset=rows("add"), rubric=rubric, tools=[add], max_turns=4)
    if kind == "count":
        rubric = vf.Rubric(funcs=[said_all])
        return Count(dataset=rows("count"), rubric=rubric, system_prompt="Be brief.")
    if kind == "weighted":
        funcs, weights = [correct, is_short, length], [1.0, -0.5, 0.0]
        rubric = vf.Rubric(funcs=funcs, weights=weights)
        return vf.SingleTurnEnv(dataset=rows("say"), rubric=rubric)
    if kind == "grouped":  # two functions of one name with different weights
        rubrics = [vf.Rubric(funcs=[correct], weights=[weight]) for weight in (1.0, 2.0)]
        return vf.SingleTurnEnv(dataset=rows("say"), rubric=vf.RubricGroup(rubrics))
    if kind == "group":

        async def best(completions: Any, **_: Any) -> list[float]:
            return [1.0 for _ in completions]

        return vf.SingleTurnEnv(dataset=rows("say"), rubric=vf.Rubric(funcs=[best]))
    return vf.SingleTurnEnv(dataset=rows("say"), rubric=vf.Rubric(funcs=[correct]))
