"""Turns rollouts into text for a terminal.

A model's text may contain escape sequences. Printable characters and line breaks are printed
unchanged. Python's escapes replace all other characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from echo.core.rollout import PolicyVersion
from echo.core.units import counted, one_line

VERSION_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Styles of the parts of a completion. Each version gets the next style. If there is only one
version, no style is used."""

MAX_QUOTED = 40
"""Number of characters that are quoted from the text that a chain continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive tokens of a completion.

    All tokens come from one version, or all from the task.
    """

    text: str
    num_tokens: int
    version: PolicyVersion
    is_sampled: bool
    """Whether the policy sampled the tokens. Other tokens, such as answers of tools, are not
    trained on."""
    follows: str | None = None
    """If the part begins a branch, the text that comes before the part in its chain. Otherwise
    None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """A rollout to show: its texts, and what the ledger says about its group."""

    group: int
    attempt: int
    index: int
    """Position of the rollout in its group."""
    worker: str
    end: str
    """How the group ended, for example "trained in step 7"."""
    step: int | None
    """The optimizer step that trained on the rollout; None if the rollout was not trained on."""
    reward: float
    group_mean: float
    """Mean reward of the group to which the rollout belongs."""
    finish_reason: str
    staleness: tuple[int, int] | None
    """The smallest and the largest staleness of the rollout's trainable tokens, in steps. None if
    the rollout was not trained on."""
    prompt: str
    parts: Sequence[Part]
    """The parts of the completion."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward, under their names; empty if the reward has no parts."""
    branches: Sequence[Sequence[int]] = ()
    """The branches that connect the chains of an agent's rollout (core/chains.py)."""
    num_chains: int = 1

    @property
    def completion(self) -> str:
        """The text of the whole completion, including text that the task inserted."""
        return "".join(part.text for part in self.parts)


def render(rollout: ShownRollout, *, has_prompt: bool = True) -> Text:
    """Return a rollout as text: a header line, the prompt (if `has_prompt`), and the completion."""
    text = Text.assemble(
        (f"group {rollout.group}.{rollout.index}", "bold"),
        f"  {rollout.end}  reward ",
        (f"{rollout.reward:g}", "bold"),
        _parts_text(rollout.reward_parts),
        f" (group {rollout.group_mean:.3g})  {one_line(rollout.worker)}  ",
        ", ".join(_versions(rollout.parts)),
        "" if rollout.staleness is None else f"  staleness {_span(rollout.staleness)}",
        f"  ended by {rollout.finish_reason}",
        f"  {num_chains} chains" if (num_chains := rollout.num_chains) > 1 else "",
        (f"\n{_indented(rollout.prompt, 2)}" if has_prompt else "", "dim"),
        "\n    ",
    )
    versions = list(dict.fromkeys(part.version for part in rollout.parts))
    for part in rollout.parts:
        style = VERSION_STYLES[versions.index(part.version) % len(VERSION_STYLES)]
        if not part.is_sampled:
            style = "dim italic"
        elif len(versions) == 1:
            style = ""
        if part.follows is not None:
            text.append(f"\n    after {_quoted(part.follows)}:\n    ", style="bold")
        text.append(_indented(part.text, 4)[4:], style=style)
    return text.append("\n")


def _parts_text(parts: Mapping[str, float]) -> str:
    return " = " + " + ".join(f"{name} {value:g}" for name, value in parts.items()) if parts else ""


def _quoted(text: str) -> str:
    """Return the end of a text from the model on one line.

    If there is no text, return "nothing".
    """
    if not text:
        return "nothing"
    line = one_line(text.replace("\n", " "))
    return f'"...{line[-MAX_QUOTED:]}"' if len(line) > MAX_QUOTED else f'"{line}"'


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + one_line(line) for line in text.split("\n"))


def _versions(parts: Sequence[Part]) -> Iterator[str]:
    for version in dict.fromkeys(part.version for part in parts if part.is_sampled):
        number = sum(p.num_tokens for p in parts if p.is_sampled and p.version == version)
        yield f"{version} {counted(number, 'token')}"


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}-{high}"
