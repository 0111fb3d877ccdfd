from __future__ import annotations

import math
import re
import sys

import pytest

from echo.errors import ConfigError
from echo.ui.extras import import_extra


def test_an_installed_package_is_imported() -> None:
    assert import_extra("math", extra="none", wanted_by="the test") is math


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    expected = (
        "metrics.wandb needs no_such_package, which is not installed; "
        "install it with pip install 'echo-rl[wandb]', or do without metrics.wandb"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        import_extra("no_such_package.part", extra="wandb", wanted_by="metrics.wandb")


def test_a_broken_package_shows_its_cause(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_installed", raising=False)
    with pytest.raises(ConfigError, match=r"cannot be imported .*no_such_dependency"):
        import_extra("half_installed", extra="wandb", wanted_by="metrics.wandb")
