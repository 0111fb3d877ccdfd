from __future__ import annotations

import pytest
import torch

from echo.engine.model import free_gpu_bytes, pick_device, pick_dtype, set_num_threads


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_is_named_is_taken(name: str) -> None:
    assert pick_device(name) == name


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_cpu_has_no_gpu_memory() -> None:
    assert free_gpu_bytes("cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_here_has_no_memory() -> None:
    assert free_gpu_bytes("cuda:0") is None


def test_zero_threads_leave_the_setting_alone() -> None:
    before = torch.get_num_threads()
    try:
        set_num_threads(1)
        set_num_threads(0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_mixed_precision_is_for_gpus_unless_asked_for() -> None:
    assert pick_dtype("auto", "cpu") == torch.float32
    assert pick_dtype("auto", "cuda:1") == torch.bfloat16
    assert pick_dtype("float32", "cuda") == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
