"""Files that a pattern names."""

from pathlib import Path

import pytest

from sufficit import UserError
from sufficit.data.image_files import expand, files_named, names_in_common


def test_ranges_expand_from_left_to_right() -> None:
    assert expand("{1..2}/{09..10}.tar") == ["1/09.tar", "1/10.tar", "2/09.tar", "2/10.tar"]
    assert expand("{3..2}.tar") == []


def test_files_are_named_by_ranges_stars_and_both(tmp_path: Path) -> None:
    for name in ("a/00.tar", "a/01.tar", "b/00.tar", "a/*.tar", "b/[1].tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")

    def named(pattern: str) -> list[str]:
        return names_in_common([*files_named(tmp_path / pattern, ".tar"), tmp_path / "x"])[:-1]

    assert named("*/0{0..0}.tar") == ["a/00.tar", "b/00.tar"]
    assert named("**/0*.tar") == ["a/00.tar", "a/01.tar", "b/00.tar"]
    assert named("a/*.tar") == ["a/*.tar"], "a file of this very name"
    assert named("b/[1].tar") == ["b/[1].tar"]
    (tmp_path / "folder.tar").mkdir()
    assert files_named(tmp_path / "folder.tar", ".tar") == []
    assert files_named(tmp_path / "a", ".tar") == []
    with pytest.raises(UserError, match=r"no file at .*a/02\.tar: check"):
        files_named(tmp_path / "a/{00..02}.tar", ".tar")
