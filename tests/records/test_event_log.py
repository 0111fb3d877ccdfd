from __future__ import annotations

from pathlib import Path

import pytest

from echo.core.errors import DataError, StorageError
from echo.records import event_log
from echo.records.event_log import HEAD, EventFile, read_frames

FRAMES = [b"head", b"x" * 5000, bytes(range(256)) * 3, b"tail"]


def write(path: Path, frames: list[bytes] = FRAMES) -> Path:
    file = EventFile(path)
    assert all(file.write(frame) for frame in frames)
    file.close()
    return path


def test_frames_come_back_and_long_ones_take_less_space(tmp_path: Path) -> None:
    path = write(tmp_path / "log")
    assert list(read_frames(path)) == FRAMES
    assert path.stat().st_size < 1500


def test_at_its_bound_a_log_ends_with_an_empty_frame_and_stays_below(tmp_path: Path) -> None:
    path = tmp_path / "log"
    frames = [bytes(range(start, start + 80)) for start in (0, 80, 160)]
    file = EventFile(path, max_bytes=200)
    assert [file.write(frame) for frame in frames] == [True, True, False]
    file.close()
    assert list(read_frames(path)) == [*frames[:2], b""]
    assert path.stat().st_size <= 200 + len(HEAD) + 12


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_found_wherever_it_is(tmp_path: Path, damage: str) -> None:
    data = write(tmp_path / "log").read_bytes()
    wholes = set()
    for place in range(len(HEAD), len(data)):
        path = tmp_path / "damaged"
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        path.write_bytes(flipped if damage == "flip" else data[:place])
        fault, frames = "", []
        try:
            for frame in read_frames(path):
                frames.append(frame)  # noqa: PERF402 - those before the damage
        except DataError as error:
            fault = str(error)
        assert frames == FRAMES[: len(frames)]
        if fault:
            assert f"{path}: the frame at byte " in fault
        else:
            wholes.add(len(frames))
    # Cut between two frames, nothing is missing that anybody could know of; and some bits say only
    # from where in a run of the same bytes to copy.
    assert wholes == ({0, 1, 2, 3} if damage == "cut" else {4})


def test_a_frame_that_grows_beyond_the_bound_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "log")
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 4999)
    with pytest.raises(DataError, match="is damaged"):
        list(read_frames(path))


@pytest.mark.parametrize("content", [b"", b"echo event log, 0.0.9\n", b"SQLite format 3\0" * 9])
def test_what_another_version_or_program_has_written_is_refused_and_shown(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DataError, match=r"is no event log of echo-rl .* it begins with") as caught:
        list(read_frames(tmp_path / "log"))
    assert repr(content[:10])[:-1] in str(caught.value)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "log")
    with pytest.raises(StorageError, match="is there already"):
        EventFile(path)
    with pytest.raises(StorageError, match="cannot be written: No such file"):
        EventFile(tmp_path / "nowhere" / "log")
    assert list(read_frames(path)) == FRAMES
