"""`echo-rl rollouts RUN`: shows the completions of a run with their rewards.

The command reads the ledger and the group files of a run; the run may be under way. The learner
removes old group files that a resume does not need. The command prints the number of removed
groups, whose rollouts cannot be shown.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from echo.cli.output import print_json, run_command
from echo.cli.parsers import rollouts_parser
from echo.config.memory.models import find_model
from echo.core.chains import Tree
from echo.core.errors import ConfigError, DataError, StorageError
from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.core.units import counted
from echo.records.ledger import StoredGroup, read_group, read_records, stored_groups
from echo.records.run_files import read_config
from echo.tasks import tokenization
from echo.tasks.tokenization import UNKNOWN, load_tokenizer
from echo.ui.rollouts import Part, ShownRollout, render

if TYPE_CHECKING:
    from rich.console import Console

CHOICES = ("step", "group", "grep", "best", "worst", "random", "parquet")
"""Options with which the command reads the rollouts of all groups. Without them it reads only the
newest groups."""
Decode = Callable[[list[int]], str]
"""The type of a function that converts token ids to text."""
NUM_NEWEST = 8
"""Number of rollouts that are shown by default. They are the newest rollouts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rollouts of a run that the command line selects; return the exit code."""
    return run_command(_run, rollouts_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    stored = stored_groups(read_records(arguments.run))
    decode = decoder_of(arguments.run)
    chosen = [each for each in stored if _is_asked_for(each, arguments)]
    is_plain = not arguments.json and all(getattr(arguments, name) is None for name in CHOICES)
    read = _newest if is_plain else rollouts_of
    found = _ordered(list(read(arguments.run, chosen, decode)), arguments)
    if not found:
        raise DataError(_none_found(arguments, stored, chosen))
    if arguments.json:
        print_json(msgspec.json.encode(_row(each)).decode() for each in found)
    elif arguments.parquet is not None:
        _write_parquet(arguments.parquet, [_row(each) for each in found])
        console.print(f"{counted(len(found), 'rollout')} in {arguments.parquet}")
    else:
        for before, each in zip([None, *found], found, strict=False):
            # The rollouts of a group share its prompt.
            console.print(render(each, has_prompt=before is None or before.group != each.group))
        if is_plain:
            console.print(
                f"the newest {counted(len(found), 'rollout')} of "
                f"{counted(len(stored), 'accepted group')}; others: "
                "--step, --group, --grep, --best, --worst, --random (see --help)"
            )
    if removed := describe_removed(chosen):
        print(removed, file=sys.stderr)  # --json writes rows alone
    return 0


def _is_asked_for(each: StoredGroup, arguments: Namespace) -> bool:
    return (arguments.step is None or each.step == arguments.step) and (
        arguments.group is None or each.accepted.group == arguments.group
    )


def _none_found(
    arguments: Namespace, stored: Sequence[StoredGroup], chosen: Sequence[StoredGroup]
) -> str:
    if not stored:
        return f"{arguments.run}: no group has been accepted yet"
    if chosen and arguments.grep is None:
        deleted = f"others have deleted the files of {counted(len(chosen), 'such group')}"
        return f"{arguments.run}: {describe_removed(chosen) or deleted}"
    if chosen:
        return f"{arguments.run}: no rollout that is still kept has {arguments.grep!r} in it"
    steps = [each.step for each in stored if each.step is not None]
    groups = [each.accepted.group for each in stored]
    trained = f"steps {min(steps)} to {max(steps)}" if steps else "no step yet"
    return (
        f"{arguments.run}: no such rollouts; it has groups {min(groups)} to {max(groups)} and "
        f"{trained}"
    )


def describe_removed(stored: Sequence[StoredGroup]) -> str:
    """Return text that says how many groups' files were removed; "" if no file was removed."""
    removals = [each.removed for each in stored if each.removed is not None]
    if not removals:
        return ""
    steps = sorted({each.step for each in removals})
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    causes = " and ".join(sorted({each.cause for each in removals}))
    return (
        f"the rollouts of {len(removals)} of {counted(len(stored), 'group')} were removed at "
        f"{when} ({causes})"
    )


def _newest(run_dir: Path, stored: Sequence[StoredGroup], decode: Decode) -> Iterator[ShownRollout]:
    number = 0
    for each in reversed(stored):
        for rollout in rollouts_of(run_dir, [each], decode):
            if number < NUM_NEWEST:
                yield rollout
            number += 1
        if number >= NUM_NEWEST:
            return


def rollouts_of(
    run_dir: Path, stored: Sequence[StoredGroup], decode: Decode
) -> Iterator[ShownRollout]:
    """Yield the rollouts of each group whose file has not been removed.

    Raises:
        StorageError: if the file of a group is damaged.
    """
    for each in stored:
        try:
            group = read_group(run_dir, each.accepted.group, each.accepted.place)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        prompt = decode(group.prompt_ids.tolist())
        for index, rollout in enumerate(group.rollouts):
            yield _shown(each, group, index, rollout, prompt, decode)


def _shown(
    stored: StoredGroup,
    group: Group,
    index: int,
    rollout: Rollout,
    prompt: str,
    decode: Decode,
) -> ShownRollout:
    steps = rollout.policy_versions[rollout.completion_mask, 1]
    staleness = None
    if stored.consumed_at is not None and stored.max_staleness is not None:
        lags = stored.consumed_at - steps
        # The file has the tokens as they were sampled, before those beyond the bound were masked.
        lags = lags[lags <= stored.max_staleness]
        staleness = (int(lags.min()), int(lags.max())) if len(lags) else None
    return ShownRollout(
        group=group.group_id,
        attempt=group.attempt,
        index=index,
        worker=group.worker_id,
        end=stored.end,
        step=stored.step,
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        group_mean=float(np.mean(group.rewards)),
        finish_reason=rollout.finish_reason,
        staleness=staleness,
        prompt=prompt,
        parts=list(_parts(group, rollout, decode)),
        branches=rollout.branches.tolist(),
        num_chains=len(Tree.of(rollout, num_prompt=len(group.prompt_ids)).chains),
    )


def _parts(group: Group, rollout: Rollout, decode: Decode) -> Iterator[Part]:
    """Yield the parts of a completion. Each part was written by one policy version or by the task.

    A branch of the token tree begins a new part.
    """
    ids = [*group.prompt_ids.tolist(), *rollout.token_ids.tolist()]
    num_prompt = len(group.prompt_ids)
    kinds = [
        (*version, is_sampled)
        for version, is_sampled in zip(
            rollout.policy_versions.tolist(), rollout.completion_mask.tolist(), strict=True
        )
    ]
    tree = Tree.of(rollout, num_prompt=num_prompt)
    for piece in tree.pieces:
        way = tree.way_to(piece)
        before = [each for start, end in way for each in ids[num_prompt + start : num_prompt + end]]
        follows = decode(before) if piece.start else None
        # A character may consist of several tokens, so a part is what its tokens add to the text.
        before = before if piece.start else []
        end, shown = piece.start, decode(before)
        for (lineage, step, is_sampled), tokens in groupby(kinds[piece.start : piece.end]):
            number = len(list(tokens))
            end += number
            text = decode(before + ids[num_prompt + piece.start : num_prompt + end])
            if end < piece.end:  # a character that the next part completes is in the next part
                text = text.rstrip(UNKNOWN)
            yield Part(
                text=text[len(shown) :],
                num_tokens=number,
                version=PolicyVersion(lineage, step),
                is_sampled=is_sampled,
                follows=follows,
            )
            shown, follows = text, None


def _ordered(found: list[ShownRollout], arguments: Namespace) -> list[ShownRollout]:
    """Return the rollouts that contain the --grep text.

    If --best, --worst or --random is given, return only the number of rollouts that it states.
    """
    for name in ("best", "worst", "random"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name} {number}: must be at least 1")
    if arguments.grep is not None:
        found = [each for each in found if arguments.grep in each.prompt + each.completion]
    if arguments.best is not None:
        return sorted(found, key=lambda each: -each.reward)[: arguments.best]
    if arguments.worst is not None:
        return sorted(found, key=lambda each: each.reward)[: arguments.worst]
    if arguments.random is not None:
        return random.sample(found, min(arguments.random, len(found)))
    return found


def _row(rollout: ShownRollout) -> dict[str, Any]:
    low, high = rollout.staleness or (None, None)
    return {
        "group": rollout.group,
        "attempt": rollout.attempt,
        "index": rollout.index,
        "worker": rollout.worker,
        "end": rollout.end,
        "step": rollout.step,
        "reward": rollout.reward,
        "reward_parts": [
            {"name": name, "value": value} for name, value in rollout.reward_parts.items()
        ],
        "finish_reason": rollout.finish_reason,
        "staleness_min": low,
        "staleness_max": high,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "branches": [list(each) for each in rollout.branches],
        "parts": [
            {
                "text": part.text,
                "num_tokens": part.num_tokens,
                "lineage": part.version.lineage,
                "step": part.version.step,
                "is_sampled": part.is_sampled,
            }
            for part in rollout.parts
        ],
    }


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--parquet needs pyarrow, which is not installed: pip install pyarrow, or use --json"
        ) from error
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except OSError as error:
        raise StorageError(f"--parquet {path}: cannot be written: {error}") from error


def decoder_of(run_dir: Path) -> Decode:
    """Return a function that turns token ids into text with the run's tokenizer.

    Raises:
        DataError: if the tokenizer is not on this machine.
    """
    tokenizer = load_tokenizer(_model_dir(run_dir))
    return lambda ids: tokenization.decode(tokenizer, ids, ())


def _model_dir(run_dir: Path) -> Path:
    """Return the directory on this machine that has a run's tokenizer.

    Raises:
        DataError: if there is no such directory.
    """
    if (run_dir / "final").is_dir():
        return run_dir / "final"
    model: Any = read_config(run_dir).get("model") or {}
    name = model.get("name")
    directory = find_model(name, model.get("revision")) if isinstance(name, str) else None
    if directory is None:
        raise DataError(
            f"{run_dir}: the tokenizer of model.name = {name!r} is not on this machine; run the "
            "command where the learner runs"
        )
    return directory
