"""A model without weights, and the check that weights belong to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401 -- what all architectures share, and early
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from echo.core.errors import EngineError

MAX_NAMES_LISTED = 5
BUILDING = threading.Lock()
"""Held while a model is built: transformers switches initialisation and tying off for the whole
process meanwhile, so a model built in another thread at that moment would come out untied."""


def import_architecture(directory: Path) -> None:
    """Import the code of the model that config.json describes, which building it would do.

    Raises:
        EngineError: if there is no config.json, or not of a causal language model.
    """
    with _explaining(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def build_skeleton(directory: Path, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Build the model that config.json describes, weights uninitialised and tied as it says.

    Raises:
        EngineError: if there is no config.json, or not of a causal language model.
    """
    with _explaining(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with BUILDING, no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=False,
            )
    model.tie_weights()
    model.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(
            f"{directory}: no causal language model can be built from its config.json: {error}"
        ) from error


def check_weights(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not exactly those of a model.

    Args:
        own: the model's state dict; names that share memory are tied.
        tensors: what is to be installed; of tied names one is enough.

    Raises:
        EngineError: listing names that are missing or unknown, and shapes that differ.
    """
    places: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in own.items():
        places.setdefault((tensor.data_ptr(), *tensor.shape), []).append(name)
    missing = [" or ".join(names) for names in places.values() if not tensors.keys() & set(names)]
    unknown = [name for name in tensors if name not in own]
    wrong = [
        f"{name} {list(tensor.shape)} instead of {list(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    twice = [
        f"{first} and {second}"
        for first, *others in places.values()
        for second in others
        if first in tensors and second in tensors
        if not torch.equal(tensors[first], tensors[second])
    ]
    problems = {
        "missing": missing,
        "not in this model": unknown,
        "of the wrong shape": wrong,
        "tied by config.json but different": twice,
    }
    found = [f"{what}: {_shorten(names)}" for what, names in problems.items() if names]
    if found:
        raise EngineError(
            f"the weights do not fit the model, none was installed; {'; '.join(found)}; "
            "config.json and weights must come from the same model"
        )


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_LISTED
    listed = ", ".join(names[:MAX_NAMES_LISTED])
    return f"{listed} and {more} more" if more > 0 else listed
