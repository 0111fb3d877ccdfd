"""Versions on disk: they are read as they were written, and their bytes are bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.engine.weights import Weights, publish_image
from echo.train.attribution import VersionRetention
from echo.weights.manifest import Manifest, build_manifest


def publication(step: int, lineage: int = 1) -> tuple[Manifest, bytearray, Weights]:
    weights = {"a": torch.full((100,), float(step)), "b": torch.arange(3)}
    specs, image = publish_image(weights, "bfloat16")
    manifest = build_manifest(
        run_id="r",
        version=PolicyVersion(lineage, step),
        tensors=specs,
        image=image,
        chunk_bytes=1024,
    )
    return manifest, image, weights


def keep(retention: VersionRetention, step: int) -> bool:
    manifest, image, _ = publication(step)
    return retention.keep(manifest, image)


def steps(retention: VersionRetention) -> list[int]:
    return [version.step for version in retention.versions]


def test_a_version_comes_back_bit_by_bit_also_in_another_process(tmp_path: Path) -> None:
    manifest, image, weights = publication(7, lineage=2)
    retention = VersionRetention(tmp_path / "versions", max_bytes=1 << 20, max_versions=4)
    assert retention.keep(manifest, image)
    (tmp_path / "versions" / "v2_8.partial").write_bytes(b"half")
    for each in (
        retention,
        VersionRetention(tmp_path / "versions", max_bytes=1 << 20, max_versions=4),
    ):
        assert each.versions == [PolicyVersion(2, 7)]
        path = each.find(PolicyVersion(2, 7))
        assert path is not None
        found = load_file(path)
        assert torch.equal(found["a"], weights["a"].bfloat16())
        assert torch.equal(found["b"], weights["b"])
        assert each.find(PolicyVersion(1, 7)) is None
    assert not list((tmp_path / "versions").glob("*.partial"))


def test_the_oldest_go_first_and_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    by_number = VersionRetention(tmp_path / "number", max_bytes=1 << 20, max_versions=3)
    for step in range(6):
        assert keep(by_number, step)
    assert steps(by_number) == [3, 4, 5]
    by_size = VersionRetention(tmp_path / "size", max_bytes=3000, max_versions=99)
    for step in range(20):
        assert keep(by_size, step)
        used = sum(path.stat().st_size for path in (tmp_path / "size").iterdir())
        assert used <= 3000
    assert steps(by_size)[-1] == 19
    assert len(by_size.versions) < 20
    for version in by_size.versions:
        by_size.forget(version)
        assert by_size.find(version) is None
    too_small = VersionRetention(tmp_path / "size", max_bytes=100, max_versions=3)
    assert not keep(too_small, 0)
    assert list((tmp_path / "size").iterdir()) == []


def test_one_that_cannot_be_deleted_is_an_error_of_the_disk(tmp_path: Path) -> None:
    retention = VersionRetention(tmp_path, max_bytes=1 << 20, max_versions=1)
    keep(retention, 0)
    (tmp_path / "v1_0.safetensors").unlink()
    (tmp_path / "v1_0.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"cannot keep .* in"):
        keep(retention, 1)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot keep versions in"):
        VersionRetention(tmp_path / "file", max_bytes=1, max_versions=1)
