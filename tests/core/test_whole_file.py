"""Whole files: what others may read or write at the same time is there as a whole, or not at all."""

from pathlib import Path

import pytest

from countoff.core.whole_file import temporary_beside, write_whole


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    """Also where a process that was killed has left its own, not complete."""
    path = tmp_path / "verdict.json"
    path.write_text("old")
    Path(temporary_beside(str(path), 3)).write_text("ha")
    write_whole(str(path), 3, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """Here the target is a directory, which no file replaces."""
    path = tmp_path / "verdict.json"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"verdict\.json"):
        write_whole(str(path), 0, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """In a directory that others may write to, it could lead to a file of the user's."""
    path, precious = tmp_path / "verdict.json", tmp_path / "precious"
    precious.write_text("mine")
    Path(temporary_beside(str(path), 0)).symlink_to(precious)
    write_whole(str(path), 0, b"new")
    assert (precious.read_text(), path.read_text()) == ("mine", "new")
