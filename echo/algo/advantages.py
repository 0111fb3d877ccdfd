"""Group-relative advantages: each rollout is compared with the other rollouts of its prompt.

Shapes: N groups, G group size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STD_FLOOR = 1e-4
"""Number added to the standard deviation of a group's rewards, as in TRL. It keeps advantages
finite if rewards are nearly equal.
"""


def group_advantages(
    rewards: npt.NDArray[np.floating],
    *,
    normalize_by_std: bool,
    leave_one_out: bool = False,
    value_beta: float | None = None,
) -> npt.NDArray[np.float64]:
    """Return each rollout's advantage: its reward minus the mean reward of its group.

    With the reward r_ng of rollout g in group n:

        A_ng = r_ng - mean_g(r_n)

    If normalised, A is divided by std_g(r_n) + 1e-4, with the unbiased standard deviation std. With
    leave-one-out, the mean is over the other rollouts. Leave-one-out multiplies A by G / (G - 1).
    If all rewards of a group are equal, A is exactly 0.

    With value_beta b, the baseline is not the mean but V_n = b ln mean_g exp(r_ng / b). V is
    between the mean (b large) and the largest reward (b near 0), and estimates the best value of
    reward - b KL(policy || sampler) on the prompt.

    Args:
        rewards: [N, G] floating point, G >= 2.
        normalize_by_std: whether to divide by the group's standard deviation.
        leave_one_out: whether a rollout's baseline excludes its own reward.
        value_beta: b, > 0; None for the mean.

    Returns:
        [N, G]

    Raises:
        ValueError: if G < 2, the dtype cannot hold fractions, or a reward is not finite.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv:2503.20783;
    leave-one-out: RLOO, arXiv:2402.14740; V: OAPL, arXiv:2602.19362, eq. 2.
    Differs from the paper: 1e-4 is added to the standard deviation.
    Limits: after division by the standard deviation, groups with almost all rollouts right or
    almost all rollouts wrong have the largest advantages. Lost rollouts of a group are not
    detected.
    """
    _check(rewards)
    values = rewards.astype(np.float64)
    advantages = values - _baselines(values, value_beta)
    if leave_one_out:
        advantages *= values.shape[1] / (values.shape[1] - 1)
    if normalize_by_std:
        advantages /= values.std(1, ddof=1, keepdims=True) + STD_FLOOR
    is_equal = values.max(1, keepdims=True) == values.min(1, keepdims=True)
    return np.where(is_equal, 0.0, advantages)


def _check(rewards: npt.NDArray[np.floating]) -> None:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)}, expected [groups, group_size] with "
            "group_size >= 2: a rollout is measured against the others of its group"
        )
    if not np.issubdtype(rewards.dtype, np.floating):
        raise ValueError(f"rewards are {rewards.dtype}, which would round advantages to integers")
    is_finite = np.isfinite(rewards).all(1)
    if not is_finite.all():
        row = int(is_finite.argmin())
        raise ValueError(f"rewards of row {row} are not all finite: {rewards[row].tolist()}")


def _baselines(
    values: npt.NDArray[np.float64], value_beta: float | None
) -> npt.NDArray[np.float64]:
    """Return each group's baseline, [N, 1]: the mean reward, or V if `value_beta` is given."""
    if value_beta is None:
        means: npt.NDArray[np.float64] = values.mean(1, keepdims=True)
        return means
    # Relative to the largest reward, so that a small b does not overflow.
    largest = values.max(1, keepdims=True)
    mean = np.exp((values - largest) / value_beta).mean(1, keepdims=True)
    baselines: npt.NDArray[np.float64] = largest + value_beta * np.log(mean)
    return baselines


def overlong_penalties(
    num_tokens: npt.NDArray[np.integer], *, max_tokens: int, buffer_tokens: int
) -> npt.NDArray[np.float64]:
    """Return the length penalty of each completion, from -1 to 0. The caller adds it to the reward.

    The penalty is 0 up to max_tokens - buffer_tokens, and falls linearly to -1 at max_tokens.

    Args:
        num_tokens: number of completion tokens, 0..max_tokens; any shape.
        max_tokens: largest number of tokens of a completion.
        buffer_tokens: number of tokens before `max_tokens` over which the penalty falls to -1,
            1..max_tokens.

    Returns:
        Array in the shape of `num_tokens`.

    Raises:
        ValueError: if `buffer_tokens` is not in 1..max_tokens.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    Differs from the paper: nothing.
    Limits: a group with equal rewards gets a gradient from its lengths alone.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens = {buffer_tokens}: must lie in 1..max_tokens = {max_tokens}"
        )
    over = num_tokens - (max_tokens - buffer_tokens)
    return -np.clip(over / buffer_tokens, 0.0, 1.0)
