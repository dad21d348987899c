"""Data without read permission, as a user whom permissions bind: nothing is lost."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from small_runs import assert_same_rows, config_for, interrupted, run_small, write_photos
from sufficit.data.image_files import BadImageError, read_image
from sufficit.data.images import list_images
from sufficit.errors import GoneError, UserError
from sufficit.runs.engine import run
from sufficit.runs.job import make_job

NOBODY = 65534
METHODS = ("gradcam", "layercam", "random", "center")


@contextmanager
def bound() -> Iterator[None]:
    """As another user, where the tests run as root, who may read everything."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


@contextmanager
def without(mode: int, path: Path) -> Iterator[None]:
    """Another mode of a file or folder for a while."""
    usual = path.stat().st_mode
    path.chmod(mode)
    try:
        with bound():
            yield
    finally:
        path.chmod(usual)


@pytest.fixture
def open_photos() -> Iterator[Path]:
    """Photos that every user may read, in a folder where every user may write."""
    top = Path(tempfile.mkdtemp(prefix="sufficit-test-"))
    top.chmod(0o777)
    yield write_photos(top)
    shutil.rmtree(top)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_a_class_folder_without_permission_is_named_before_anything_is_scored(
    open_photos: Path, mode: int
) -> None:
    out = open_photos.parent / "out"
    with without(mode, open_photos / "bee"):
        with pytest.raises(UserError, match=r"photos/bee can't be opened \(Permission denied\)"):
            run_small(config_for(open_photos), out)
        assert not out.exists()
    with bound():
        assert len(list_images(open_photos)) == 11


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_class_folder_that_loses_its_permission_stops_the_run_which_resumes(
    open_photos: Path, mode: int
) -> None:
    config, top = config_for(open_photos), open_photos.parent
    with bound():
        run_small(config, top / "whole")
        job = make_job(config, unit=4)  # the images are listed
    with (
        without(mode, open_photos / "bee"),
        pytest.raises(GoneError, match=r"photos/bee can't be read any more .*to resume"),
    ):
        run(job, top / "out", progress=False)
    with bound():
        results = run_small(config, top / "out")
    assert (results.n, results.skipped) == (11, {})
    assert_same_rows(top / "whole", top / "out", METHODS)


def test_a_run_is_not_refused_after_its_data_were_closed_for_a_while(open_photos: Path) -> None:
    config, top = config_for(open_photos), open_photos.parent
    with bound():
        run_small(config, top / "whole")
        interrupted(lambda: run_small(config, top / "out"))
    for mode in (0o000, 0o444, 0o111):
        with without(mode, open_photos / "cat"), pytest.raises(UserError, match="photos/cat"):
            run_small(config, top / "out")
    with bound():
        run_small(config, top / "out")
    assert_same_rows(top / "whole", top / "out", METHODS)


def test_a_shard_that_loses_its_permission_stops_the_run(open_photos: Path) -> None:
    shard, top = open_photos.parent / "photos.tar", open_photos.parent
    with tarfile.open(shard, "w") as tar:
        tar.add(open_photos, "photos")
    config = config_for(open_photos, data=str(shard), targets="prediction", checks="controls,fill")
    with bound():
        job = make_job(config, unit=4)
    with without(0o000, shard), pytest.raises(GoneError, match="photos.tar can't be read any more"):
        run(job, top / "out", progress=False)
    with bound():
        results = run_small(config, top / "out")
    assert (results.n, results.skipped) == (11, {})


def test_one_file_without_permission_is_skipped_and_listed(open_photos: Path) -> None:
    file = open_photos / "bee" / "01.png"
    with without(0o000, file):
        with pytest.raises(BadImageError, match="Permission denied"):
            read_image(file, None)
        results = run_small(
            config_for(open_photos, checks="controls,fill"), open_photos.parent / "out"
        )
    assert results.n == 10
    assert [*results.skipped] == ["bee/01.png"]


def test_the_only_image_of_a_folder_may_be_deleted_meanwhile(open_photos: Path) -> None:
    config = config_for(open_photos, checks="controls,fill")
    for number in ("04", "07", "10"):
        (open_photos / "bee" / f"{number}.png").unlink()
    job = make_job(config, unit=4)
    (open_photos / "bee" / "01.png").unlink()
    results = run(job, open_photos.parent / "out", progress=False)
    assert (results.n, [*results.skipped]) == (7, ["bee/01.png"])


def test_lost_and_found_is_not_opened(open_photos: Path) -> None:
    (open_photos / "lost+found").mkdir(0o700)
    with bound():
        assert len(list_images(open_photos)) == 11
