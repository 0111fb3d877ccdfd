"""The size of word of a block follows the tensors that lie in it."""

from __future__ import annotations

import pytest

from echo.weights.delta import word_bytes_of
from echo.weights.manifest import TensorSpec

TENSORS = [
    TensorSpec("a", "bfloat16", (50,), 0, 100),
    TensorSpec("nothing", "float32", (0,), 112, 0),
    TensorSpec("b", "float32", (25,), 112, 100),
    TensorSpec("c", "int64", (50,), 224, 400),
    TensorSpec("d", "float16", (100,), 624, 200),
]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 100, 2),
        (0, 200, 2),  # 100 bytes of bf16 against 88 of fp32
        (0, 212, 4),  # a tie
        (50, 212, 4),
        (99, 111, 2),
        (100, 112, 1),  # padding
        (112, 113, 4),
        (150, 620, 1),
        (600, 824, 2),
        (700, 710, 2),
        (824, 900, 1),
        (0, 824, 1),
    ],
)
def test_the_majority_of_bytes_decides(start: int, stop: int, expected: int) -> None:
    assert word_bytes_of(TENSORS, start, stop) == expected


def test_an_image_without_tensors_is_bytes() -> None:
    assert word_bytes_of([], 0, 10) == 1
    assert word_bytes_of(TENSORS[2:], 0, 50) == 1
