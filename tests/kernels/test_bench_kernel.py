"""The benchmark of the kernels runs to its end where there is no GPU and no other kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [[], pytest.param(["--entropy", "--live", "0.5"], marks=pytest.mark.matrix)],
)
def test_the_quick_run_measures_ours_and_names_who_is_absent(
    option: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import bench_kernel
    import harness

    monkeypatch.setattr(harness, "RESULTS", harness.RESULTS)  # as it was before
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["bench_kernel.py", "--quick", "--out", str(out), *option])
    with torch.random.fork_rng(devices=[]):
        bench_kernel.main()
    result = json.loads(out.read_text())
    assert {"echo", "naive", "echo torch"} <= result["results"].keys()
    for name in ("echo", "echo torch"):
        assert result["results"][name]["max_logprob_error"] < 1e-4
        assert result["results"][name]["same_bits"]
        if not option:
            assert result["results"][name]["grad_weight_error"] < 1e-5
    assert "torch.compile  ABSENT" in capsys.readouterr().out
    assert result["absent"].keys() | result["results"].keys() >= {"cce", "liger chunked", "verl"}
    assert result["ceiling_tflops"] > 0
