from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from echo.core.errors import ConfigError, DataError, EngineError, StorageError
from echo.engine import weights
from echo.engine.model import build_model, load_directory, resolve_model
from echo.engine.weights import (
    ALIGNMENT_BYTES,
    find_nonfinite,
    publish_image,
    save_hf,
    tensors_from_image,
)
from echo.weights.manifest import TensorSpec
from tests.engine.patches import assert_identical

MakeTinyModel = Callable[..., Path]


def test_all_65536_bfloat16_values_survive_and_floats_are_rounded_to_nearest_even() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert every.isnan().any()
    state = {"every": every.view(256, 256), "x": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0])}
    specs, image = publish_image(state, "bfloat16")
    found = tensors_from_image(specs, memoryview(image))
    rounded = torch.tensor([1.0, 1 + 2**-6, -0.0], dtype=torch.bfloat16)
    assert_identical(found, {**state, "x": rounded})


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "float16", "int64", "bool"]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        min_size=1,
    )
)
def test_any_state_round_trips_sorted_aligned_and_without_overlap(
    layout: dict[str, tuple[str, list[int]]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randint(0, 2, shape, generator=generator).to(getattr(torch, dtype))
        for name, (dtype, shape) in layout.items()
    }
    specs, image = publish_image(state, "float32")
    expected = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    assert [spec.name for spec in specs] == sorted(state)
    end = 0
    for spec in specs:
        assert spec.offset % ALIGNMENT_BYTES == 0
        assert spec.offset >= end
        end = spec.offset + spec.num_bytes
    assert len(image) == end
    assert_identical(tensors_from_image(specs, memoryview(image)), expected)


def test_tied_tensors_travel_once_under_their_first_name() -> None:
    state = build_model(seed=0).state_dict()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= state.keys()
    specs, image = publish_image(state, "bfloat16")
    assert "lm_head.weight" not in {spec.name for spec in specs}
    assert len(image) == 201_472
    same_values = {"a": torch.ones(3), "b": torch.ones(3)}  # equal is not tied
    assert len(publish_image(same_values, "float32")[0]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_found_wherever_they_are(
    dtype: torch.dtype, value: float
) -> None:
    sound = torch.full((5, 7), torch.finfo(dtype).max, dtype=dtype)
    first, last = sound.clone(), sound.clone()
    first[0, 0] = last[-1, -1] = value
    others = {"d": sound[:0], "e": torch.ones(3, dtype=torch.int64)}
    assert find_nonfinite({"a": first, "b": sound, "c": last, **others}) == ["a", "c"]


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("w", "float32", (3,), 0, 12),
        TensorSpec("w", "float32", (2,), 4, 8),
        TensorSpec("w", "float32", (2,), 0, 4),
        TensorSpec("w", "float32", (2,), -4, 8),
        TensorSpec("w", "pickle", (2,), 0, 8),
    ],
)
def test_specs_that_do_not_fit_are_refused(spec: TensorSpec) -> None:
    with pytest.raises(EngineError, match=r"tensor w: .*do not fit|'pickle' is unknown"):
        tensors_from_image([spec], memoryview(bytearray(8)))


@pytest.mark.parametrize(("is_tied", "max_shard_bytes"), [(True, 10**9), (False, 100_000)])
def test_an_export_of_an_images_views_loads_with_identical_logits(
    tmp_path: Path, make_tiny_model: MakeTinyModel, is_tied: bool, max_shard_bytes: int
) -> None:
    torch.set_num_threads(1)
    source = make_tiny_model(seed=1, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    specs, image = publish_image(model.state_dict(), "bfloat16")
    tensors = tensors_from_image(specs, memoryview(image))
    target = tmp_path / "final"
    mask = os.umask(0o022)
    try:
        assets = {"config.json": source / "config.json"}
        save_hf(target, assets, tensors, max_shard_bytes=max_shard_bytes)
    finally:
        os.umask(mask)
    assert {oct(path.stat().st_mode & 0o777) for path in target.iterdir()} == {"0o644"}
    files = sorted(path.name for path in target.glob("*.safetensors"))
    if max_shard_bytes < 10**9:
        index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert files == sorted(set(index["weight_map"].values()))
        assert len(files) > 1
    else:
        assert files == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.bfloat16
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    read = load_directory(target, "bfloat16")
    assert ("lm_head.weight" in read) == (not is_tied)
    assert_identical(read, tensors)


@pytest.mark.parametrize("failing", ["save", "final", "final.partial"])
def test_a_failed_export_keeps_the_one_before(
    tmp_path: Path, tiny_model_dir: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets, final = {"config.json": tiny_model_dir / "config.json"}, tmp_path / "final"
    save_hf(final, assets, {"x": torch.ones(2)})
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == failing:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patched:
        if failing == "save":
            full = OSError(28, "No space left on device")
            patched.setattr(weights, "save_file", mock.Mock(side_effect=full))
        patched.setattr(Path, "rename", fail)
        with pytest.raises(StorageError, match=r"final: .*(Input/output error|No space left)"):
            save_hf(final, assets, {"x": torch.zeros(2)})
    assert load_directory(final, "float32")["x"].tolist() == [1, 1]
    final.rename(tmp_path / "final.previous")  # as a crash may leave it
    with pytest.raises(StorageError, match="No such file"):
        save_hf(final, {"a": tmp_path / "absent"}, {})
    assert load_directory(final, "float32")["x"].tolist() == [1, 1]
    save_hf(final, assets, {"x": torch.zeros(2)})
    assert load_directory(final, "float32")["x"].tolist() == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_missing_and_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match=r"model\.safetensors are missing.*pytorch_model\.bin"):
        load_directory(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 20)
    with pytest.raises(DataError, match=r"model\.safetensors: cannot read the weights"):
        load_directory(tmp_path, "float32")
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not an index of weights"):
        load_directory(tmp_path, "float32")


def test_a_model_is_a_local_directory_or_offline_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"model\.revision = 'main' has no effect"):
        resolve_model(str(tmp_path), "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, revision, message in (
        (str(tmp_path / "absent"), None, "no such directory"),
        (
            "nobody/nothing",
            "abc",
            r"\"nobody/nothing\": no dir.* or set model\.name to a directory",
        ),
        ("not a valid id!", None, "no id of a model on the hub either"),
    ):
        with pytest.raises(DataError, match=message):
            resolve_model(name, revision)
