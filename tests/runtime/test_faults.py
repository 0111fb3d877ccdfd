from __future__ import annotations

import subprocess
import sys

import pytest

from echo.errors import ConfigError
from echo.runtime.faults import Faults


def test_a_chosen_point_kills_like_a_real_kill_and_others_do_not() -> None:
    program = (
        "from echo.runtime.faults import Faults\n"
        "faults = Faults(['published:7'], role='learner')\n"
        "faults.reach('published', 6)\n"
        "faults.reach('trained', 7)\n"
        "print('alive', flush=True)\n"
        "faults.reach('published', 7)\n"
        "print('still alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-9, "alive\n")


def test_an_unknown_point_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"publish:7: no such point; a learner has stored, .*published"
    ):
        Faults(["trained:1", "publish:7"], role="learner")


@pytest.mark.parametrize("role", ["worker", "relay"])
def test_other_roles_have_no_points(role: str) -> None:
    Faults([], role=role)
    with pytest.raises(ConfigError, match=f"published:7: a {role} has no such points"):
        Faults(["published:7"], role=role)


def test_code_cannot_reach_a_point_that_nobody_could_choose() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Faults([], role="learner").reach("nowhere", 1)
