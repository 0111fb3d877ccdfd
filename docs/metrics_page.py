"""Metrics reference as Markdown, checked against the code.

python docs/metrics_page.py > docs/metrics.md

Metrics are named where they are measured, so the names are read off the source; what each means
stands here. `metrics_page` refuses a name that has no meaning, and a meaning whose name is gone.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Every row": {
        "step": "Optimizer step.",
        "time": "When the row was written, seconds since 1970.",
        "lineage": "History that the step belongs to; a resume begins a new one.",
    },
    "Reward and completions": {
        "reward/mean": "Mean reward of the groups that the step trained on, and of those that were "
        "left out since the step before.",
        "reward/std": "Standard deviation of the same rewards.",
        "reward/*/mean": "Mean of a part of the rewards, where the task returns parts.",
        "completions/mean_length": "Mean length of a completion, tokens.",
        "completions/clipped_ratio": "Share of completions that ran into "
        "`sampling.max_completion_tokens`.",
        "eval/*/reward": "Mean held-out reward at the run's temperature; the middle is the task.",
        "eval/*/avg@*": "The same, where `eval.num_samples` answers were sampled for each prompt.",
        "eval/*/pass@*": "Probability that one of k answers is right, if every reward is 0 or 1.",
        "eval/*/reward/*": "Mean of a part of the held-out rewards.",
        "eval/*/greedy": "Mean held-out reward of the likeliest answers.",
        "eval/version": "Step of the weights that were evaluated.",
        "eval/seconds": "How long the evaluation took. On a CPU it shares the cores with training.",
        "eval/reward_errors": "Held-out rewards that failed; each counts as 0.",
        "eval/no_opinion": "Held-out answers without an opinion of the task; they are in no mean.",
    },
    "Groups": {
        "groups/useful": "Share of groups whose rewards differ, so that there is something to "
        "learn.",
        "groups/all_right": "Share whose rewards are equal and above 0.",
        "groups/all_wrong": "Share whose rewards are equal and 0 or less.",
        "groups/mixed": "Share that several policy versions sampled.",
        "groups/dropped/*": "Groups that did not count towards the step, by reason, as a share: "
        "`zero_variance`, `no_opinion`, `all_masked`, `lost_member`, `no_support`, `no_likely`.",
    },
    "Staleness and off-policy": {
        "staleness/mean": "Mean staleness of the trained tokens, optimizer steps.",
        "staleness/max": "Largest staleness of a trained token.",
        "staleness/hist": "Trained tokens by staleness, a table.",
        "staleness/bound": "Bound for new leases, in steps.",
        "is_ratio/mean": "Mean importance ratio, learner over sampler.",
        "is_ratio/max": "Largest importance ratio of a token.",
        "ess": "Effective sample size as a share of the tokens; 1 is on-policy.",
        "ess/rollouts": "The same of whole rollouts, each with the product of its tokens' ratios, "
        "as a share of the rollouts with a gradient.",
        "mismatch_kl": "Estimate of KL(sampler, learner), nats per token.",
        "clip_ratio/mean": "Share of tokens whose ratio was clipped.",
        "clip_ratio/low": "Share clipped at the lower end.",
        "clip_ratio/high": "Share clipped at the upper end.",
        "clip_ratio/dual": "Share that the dual clip bounded.",
        "gepo/gated": "Share of tokens for which GEPO used the learner's own probability.",
        "dropped/*": "Share of tokens that a correction left out, by reason: `veto`, "
        "`geometric`, `opsm`, `importance`, `m2`, `tv`, `lost_member`, `no_likely`.",
        "workers/*": "Of each worker, over its newest 50 trained groups, a table by name: "
        "`logprob_difference`, the mean of the learner's log-probability less the stated, nats; "
        "`mismatch_kl` and `ess` as above; `surprise`, by how many nats per token its samples are "
        "less likely than the learner's own, which a worker cannot state; `reward`, the mean. The "
        "64 workers with the largest mismatch.",
        "support/ids": "Mean number of ids that a trained token was drawn from, where these ids "
        "travelled.",
        "support/too_large": "Share of trained tokens whose ids were too many to travel.",
        "attribution/*": "Where the mismatch is from: `variance` of the log-ratio, nats squared; "
        "the shares of `staleness`, `numerics`, `truncation` and `tokenisation`; `skipped`, the "
        "share that could not be scored.",
    },
    "Optimizer step": {
        "loss/policy": "The policy loss; of several updates the mean.",
        "kl/reference": "Divergence from the frozen reference policy, nats per token.",
        "entropy/mean": "Mean entropy of the policy, nats per token.",
        "grad_norm": "Norm of the gradient before it is clipped; of several updates the mean.",
        "lr": "Learning rate of this step; of several updates the mean.",
        "optimizer/skipped_nonfinite": "Gradients so far that were not finite.",
    },
    "Time and throughput": {
        "time/step": "Seconds since the step before, or since the model was loaded, without an "
        "operator's pauses.",
        "time/train": "Seconds of it spent training.",
        "time/wait_for_batch": "Seconds of it spent waiting for groups.",
        "time/wait/*": "Seconds of waiting by what the workers' groups did meanwhile: `sampling`, "
        "`rewards`, `weights` (a newer version was on its way), `storing` (the learner's disk), "
        "`delivering`, `granting` (no group was granted).",
        "rollouts/idle_ratio": "Share of the workers' time since the step before in which they had "
        "no group.",
        "explain": "Why the learner waited long, or workers had no groups: a table with `cause`, "
        "`resource`, `setting` and `text`; see [A slow run](troubleshooting.md#a-slow-run). A wait "
        "that goes on has a row of its own.",
        "learner/idle_ratio": "Share of the time of all steps that the learner waited.",
        "time/pack": "Seconds of training spent on making micro-batches.",
        "time/forward_backward": "Seconds of training spent on loss and gradient.",
        "time/optimizer": "Seconds of training spent on clipping and updating.",
        "time/publish": "Seconds in which versions were made since the step before.",
        "perf/tokens_per_s": "Tokens through the model per second of the step, prompts included; "
        "rollouts without a gradient never get there.",
        "perf/scored_tokens_per_s": "Those of them that the loss saw.",
        "perf/mfu": "Model FLOPs utilization, of a GPU's dense bfloat16 peak: "
        "6 N T + 6 V h S + 6 sum over layers of H D s² for T tokens, S of them scored, in "
        "rollouts of s, with N weights without the head; no recomputation, no padding.",
        "perf/mfu_palm": "The same as most publish it: every token through the head, and the "
        "whole score matrix of a row.",
        "perf/row_fill": "Tokens in a micro-batch as a share of `learner.micro_batch_tokens`.",
        "perf/balance": "Work of the mean micro-batch as a share of the heaviest's.",
        "perf/peak_memory_gb": "Most memory that the step held on its GPU, 1e9 bytes; on a CPU, "
        "the process so far.",
        "perf/accepted_tokens_per_s": "Completion tokens of accepted groups per second; groups "
        "that were left out do not count.",
        "publish_period": "Optimizer steps between two published versions.",
        "broadcast/bytes": "Bytes of weights that the learner sent since the step before.",
        "broadcast/seconds": "Seconds until the last complete version had reached every node.",
        "broadcast/goodput": "Its bytes on the wire over these seconds, bytes/s.",
        "links/bytes": "Bytes of weights that each node received since the step before, a table by "
        "link, `PARENT > NODE`; the parent at the end of the step. The 64 links with the most, and "
        "the sum of the others.",
        "links/goodput": "Rate of these links, measured by transfers, bytes/s.",
    },
    "Lengths and unfinished rollouts": {
        "lengths/trained/mean": "Mean length of the completions trained last, tokens.",
        "lengths/trained/p90": "Their 90th percentile.",
        "lengths/sampled/mean": "Mean length in the order in which groups were granted, tokens.",
        "lengths/sampled/p90": "Their 90th percentile.",
        "lengths/bias": "Difference of the two means as a share of the sampled one.",
        "lengths/ks": "Largest distance between the two distributions, 0 to 1.",
        "partials/waiting": "Unfinished groups that wait to be continued.",
        "partials/mean_age": "Age of the oldest token of a group when it was continued, mean, "
        "steps.",
        "partials/wasted_ratio": "Share of the sampled tokens that will never be trained on.",
    },
    "Task code and engines": {
        "env/calls": "Calls of rewards and environments.",
        "env/errors": "Calls that failed.",
        "env/retries": "Calls that were made again.",
        "env/latency": "Seconds per call.",
        "env/no_opinion": "Answers for which the task gave None, left out of their groups.",
        "env/turns": "Turns of the policy per episode of an environment.",
        "env/tool_calls": "Results of tools per episode of an environment.",
        "env/turn_limit": "Episodes ended at `task.max_turns`.",
        "env/token_limit": "Episodes ended at `sampling.max_completion_tokens`.",
        "agents/trained_share": "Share of the tokens sampled in agents' sessions that are "
        "delivered to be trained; the rest is of sessions given up, and of chains beyond the most "
        "tokens of a rollout ([Training agents](training-agents.md#chains)).",
        "agents/abandoned_share": "Share of these tokens in sessions that were given up, or "
        "whose group another worker finished first.",
        "agents/chains": "Mean number of chains of an episode: 1 unless agents rewrite their "
        "history or make calls in parallel.",
        "agents/turns": "Mean number of an agent's answered calls per episode.",
        "engine/out_of_memory": "Times that an engine ran out of memory and halved its rollouts.",
        "engine/calls_failed": "Calls of an engine that raised; the group at fault ended.",
        "engine/installs_failed": "Versions that an engine refused; it kept the one before.",
        "engine/version_refused": "Leases given back because their version is not here.",
    },
    "Cost": {
        "cost/per_hour": "$ per hour at present, machines and traffic.",
        "cost/total": "$ since the start of the run, also before a resume.",
        "cost/per_step": "$ of this step.",
        "cost/by_node": "$ of each node since the step before, machine and traffic, a table by "
        "name. The 64 nodes with the most, and the sum of the others.",
        "cost/per_million_tokens": "`cost/total` per million completion tokens of the groups that "
        "the run has accepted.",
        "cost/standby_per_hour": "The part for machines on standby.",
        "cost/unconfirmed_per_hour": "The part for machines that left without confirming their "
        "release.",
        "workers/active": "Workers that generate.",
        "workers/standby": "Workers on standby.",
        "activation/rate": "Rollouts per second of the active set.",
        "activation/required_rate": "Rollouts per second that the learner needs.",
        "activation/predicted_idle": "Share of the time that it is predicted to wait.",
    },
    "Counts since the learner started": {
        "count/tokens/sampled": "Tokens that workers have sampled.",
        "count/tokens/trained": "Tokens that steps have trained on.",
        "count/tokens/too_old": "Sampled tokens thrown away for age: of groups refused or "
        "discarded as stale, and tokens masked or dropped in groups that were kept.",
        "count/accepted": "Groups accepted.",
        "count/duplicates": "Results of groups that had ended; harmless.",
        "count/refused/*": "Results and nodes refused, by "
        "[reason](troubleshooting.md#refused-and-discarded-groups).",
        "count/viewers/*": "[Viewers](security.md#viewers-and-operators) that were turned away "
        "(`too_many`) or `disconnected` for what they sent; acts refused to a key that is "
        "`read_only`.",
        "count/discarded/*": "Groups that ended untrained, by "
        "[reason](troubleshooting.md#refused-and-discarded-groups).",
        "count/steps_failed/*": "Optimizer steps that were undone, by reason.",
        "count/alerts/*": "Alerts raised, by [kind](operations.md#alerts); `not_sent`: left out, "
        "since too many waited to be sent.",
        "count/checkpoints_failed": "Checkpoints that could not be written.",
        "count/leases_expired": "Leases without progress for `network.lease_timeout_s`.",
        "count/leases_given_back": "Leases that a worker gave back for another one.",
        "count/mismatched_workers": "Workers that were set aside because what they state of their "
        "samples differs too much from the learner's own scores.",
        "count/leases_moved": "Leases that a worker gave up for an idle one that should be sooner.",
        "count/leases_cancelled": "Leases of the slower worker of a hedged group.",
        "count/hedges/issued": "Groups given to a second, faster worker.",
        "count/hedges/won": "Those that the second worker finished first.",
        "count/hedges/lost": "Those that the first worker finished first.",
        "count/hedges/tokens_lost": "Tokens of the slower copies.",
        "count/partials/*": "What became of unfinished rollouts: `resumed`, `handed_over`, "
        "`shipped`, `late`, and tokens `resumed_tokens`, `masked_tokens`, `trimmed_tokens`, "
        "`wasted_tokens`, `too_old_tokens`.",
        "count/dropped/*": "Messages and copies dropped at a bound (`no_route`, `partials_full`), "
        "or late, of a node that has joined again since (`other_channel`).",
        "count/protocol_errors": "Malformed messages.",
        "count/internal_errors": "Errors of Echo itself; please report them.",
        "net/*": "The learner's connections: `messages_in`, `messages_out`, `bytes_in`, "
        "`bytes_out`, `refused_sends` (a full queue), `discarded_messages`, `failed_handshakes`, "
        "`refused_clients` (a wrong secret), `closed_strangers`, `public_messages_in`.",
    },
}
"""By heading: each name, `*` for what varies, and what it means."""

_NOT_MEASURED = ("cli", "config", "sim", "ui")
"""Rooms that name metrics only to show or simulate them."""
_OTHER_NAMES = {
    *("application/json", "refs/convert/parquet"),  # no metrics at all
    "env/milliseconds",  # becomes env/latency
    "env/episodes",  # what env/turns and env/tool_calls are divided by
    # Become shares.
    *("agents/tokens_sampled", "agents/tokens_trained", "agents/tokens_abandoned"),
    *("agents/num_episodes", "agents/num_chains", "agents/num_turns"),
    # Counters of workers and relays, which write no metrics.
    *("count/cancelled", "count/failed/*", "count/forwarded/down", "count/forwarded/up"),
    *("count/dropped/no_link", "count/partials_unsaved", "weights/busy_ms"),
}
_FORM = re.compile(r"[a-z][a-z_]*(/[a-z0-9_@*]+)+")
_HEAD = """# Metrics

A run writes a row of `metrics.jsonl` for every optimizer step and one for every evaluation.
The same names go to TensorBoard, trackio and wandb. A name appears once there is something to tell.

This page is generated: `python docs/metrics_page.py > docs/metrics.md`.
"""


def metrics_page() -> str:
    """Return the page.

    Raises:
        ValueError: if a name has no meaning, or a meaning no name.
    """
    known = {pattern for table in MEANINGS.values() for pattern in table}
    measured = set(names())
    strange = {name for name in measured if not is_known(name)}
    gone = {p for p in known if not any(fnmatchcase(name, p) for name in measured)}
    if strange or gone:
        raise ValueError(f"metrics without a meaning: {strange}; meanings without one: {gone}")
    parts = [_HEAD]
    for heading, table in MEANINGS.items():
        parts.append(f"\n## {heading}\n\n| metric | |\n|---|---|\n")
        parts += [f"| `{name}` | {meaning} |\n" for name, meaning in table.items()]
    return "".join(parts)


def is_known(name: str) -> bool:
    """Say whether a name, which may have `*` for what varies, has a meaning here."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(pattern, name)
        for table in MEANINGS.values()
        for pattern in table
    )


def names() -> Iterator[str]:
    """Yield the name of every metric in the source, `*` in place of what varies."""
    package = Path(__file__).parents[1] / "echo"
    plain = {name for table in MEANINGS.values() for name in table if "/" not in name}
    shown: set[str] = set()
    counted: set[str] = set()
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in _NOT_MEASURED and path.stem != "sinks":
            continue  # what writes the rows adds to each
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        calls = {id(text) for text in _counter_names(nodes)}
        reads = {id(text) for text in _read_names(nodes)}
        for node in nodes:
            if id(node) in calls:
                counted.add(_text(node))
            elif id(node) not in reads and (_FORM.fullmatch(_text(node)) or _text(node) in plain):
                shown.add(_text(node))
    yield from shown - _OTHER_NAMES
    yield from {f"count/{name}" for name in counted - shown} - _OTHER_NAMES


def _counter_names(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Yield the texts in calls such as `self.counters.add("accepted")`."""
    for owner, name in _calls(nodes, "add"):
        if "counters" in ast.unparse(owner):
            either = [name.body, name.orelse] if isinstance(name, ast.IfExp) else [name]
            yield from (text for text in either if _text(text))


def _read_names(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Yield what only looks up a metric: `row["time/step"]` and `row.get("ess")`."""
    yield from (name for _, name in _calls(nodes, "get"))
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield node.slice


def _calls(nodes: Sequence[ast.AST], method: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (object, first argument) of every call of a method of this name."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[first, *_]):
                if name == method:
                    yield owner, first


def _text(node: ast.AST) -> str:
    """Return a literal, with `*` for each inserted part; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "*" for part in node.values)
    return ""


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
