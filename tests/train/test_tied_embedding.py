"""The gradient of a tied embedding equals autograd's, and no lookup makes one of the weight's size.

Autograd's own gradient of the same model, without the hook, is the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echo.train.models.tied_embedding import add_rows_in_place
from tests.train.test_trainer import make_groups
from tests.train.trainers import fast_trainer

IDS = torch.tensor([[3, 1, 3, 0, 4, 1]])  # 0 is padding, and two ids come twice


class Tied(nn.Module):
    """A lookup and a head with one weight, as transformers' models have them."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding.weight.data = torch.randn(6, 4, generator=generator)
        self.head.weight.data = torch.randn(6, 4, generator=generator)
        if is_tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def backward(self) -> None:
        states = self.embedding(IDS).tanh()
        (self.head(states).log_softmax(-1)[..., 2].sum() + states.square().sum()).backward()


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_rows_are_added_to_the_gradient_of_the_head() -> None:
    plain, model = Tied(), Tied()
    add_rows_in_place(model)
    for _ in range(2):  # the second adds to what is there
        plain.backward()
        with Operations() as operations:
            model.backward()
        found, expected = (gradient_of(each.embedding.weight) for each in (model, plain))
        assert torch.equal(found, expected)
        assert not [name for name in operations.names if "embedding_dense_backward" in name]


def test_a_lookup_gives_its_gradient_even_without_one_of_the_head() -> None:
    model, plain = Tied(), Tied()
    add_rows_in_place(model)
    for each in (model, plain):
        each.embedding(IDS).square().sum().backward()
    found, expected = (gradient_of(each.embedding.weight) for each in (model, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["two weights", "frozen", "scaled"])
def test_another_embedding_is_left_to_autograd(kind: str) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
            return super().forward(input) * 2.0

    model = Tied(is_tied=kind != "two weights")
    if kind == "frozen":
        model.requires_grad_(False)
    if kind == "scaled":
        model.embedding = Scaled(6, 4)
        model.head.weight = model.embedding.weight
    add_rows_in_place(model)
    assert not model.embedding._forward_hooks


@pytest.mark.parametrize(("dtype", "is_made"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_float32_step_makes_no_gradient_of_the_embeddings_size(
    tiny_model_dir: Any, dtype: Any, *, is_made: bool
) -> None:
    trainer = fast_trainer(tiny_model_dir, dtype=dtype)
    with Operations() as operations:
        trainer.step(make_groups())
    assert is_made == any("embedding_dense_backward" in name for name in operations.names)
