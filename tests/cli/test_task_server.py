from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo.cli.task_server import make_server
from echo.errors import ConfigError
from echo.tasks.host import Limits
from echo.tasks.http_host import TOKEN_VARIABLE, HttpHost
from echo.tasks.task import Example

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("7710", r"--listen 7710: write HOST:PORT"),
        ("127.0.0.1:99999", "write HOST:PORT"),
        ("0.0.0.0:0", r"anybody who reaches this address .* set ECHO_TASK_TOKEN to a secret"),
    ],
)
def test_an_address_that_will_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, listen: str, message: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=message):
        make_server(CONFIG, [], listen)


@pytest.mark.slow
def test_the_command_serves_the_configured_task_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "echo.cli.task_server", "--listen", "127.0.0.1:0"]
    command += ["--config", str(CONFIG), "--set", "task.kind=countdown"]
    with subprocess.Popen(command, cwd=CONFIG.parents[1], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            line = run.stdout.readline()
            port = int(line.partition("port ")[2].partition(";")[0])
            limits = Limits(score_s=60, step_s=60)
            host = HttpHost(f"http://127.0.0.1:{port}", limits, max_concurrent=1)
            assert host.describe().name == "CountdownTask"
            answer = {"digits": [2, 2, 8], "target": 20}
            example = Example(index=0, split="train", prompt="228>20=", answer=answer)
            assert host.score(example, "2*(2+8)") == 1.0
            run.send_signal(signal.SIGTERM)
            assert run.wait(120) == 128 + signal.SIGTERM
        finally:
            run.kill()
