"""Files are whole or absent; names are safe; results go where they can be written."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.main import get_command

import sufficit
from sufficit.cli.console import app
from sufficit.errors import UserError
from sufficit.files import check_output, is_unfinished, make_folder, temporary_folder, writing


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def break_off() -> None:
        with writing(path) as part:
            part.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        break_off()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"a\.txt.*No space left"),
        writing(tmp_path / "a.txt"),
    ):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("sufficit compare --model m", True),
        ("__main__.py compare --model m", True),
        ("sufficit sanity --model m", False),
        ("__main__.py -q tests", False),
        ("", False),
    ],
)
def test_a_run_belongs_to_the_command_that_wrote_it(
    tmp_path: Path, command: str, refused: bool
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": command}))
    with pytest.raises(UserError, match="a run of sufficit compare") if refused else nullcontext():
        check_output(tmp_path, command="sanity")


def test_every_command_that_writes_a_record_owns_it(tmp_path: Path) -> None:
    import sufficit.cli  # noqa: F401  # has all commands

    commands = {*get_command(app).commands}
    without = {"export", "figure", "methods", "models", "report"}
    without |= {"serve", "status"}
    assert without < commands
    for command in commands - without:
        (tmp_path / "run.json").write_text(json.dumps({"command": f"sufficit {command} -x"}))
        with pytest.raises(UserError, match=f"a run of sufficit {command}: choose another --out"):
            check_output(tmp_path, command="serve")


def test_files_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    with writing(tmp_path / "x" / "a.json") as part:
        (tmp_path / "x").mkdir()
        part.write_text("1")
        own = part.name
    dead, living, other = (
        tmp_path / own.replace(own.split("-")[2].split(".")[0], pid)
        for pid in ("4194999", "1", "7")
    )
    elsewhere = tmp_path / ".b.part-00000000-4194999.json"
    for path in (dead, living, elsewhere, tmp_path / ".hidden.json"):
        path.write_text("half")
    with writing(tmp_path / "b.json") as part:
        part.write_text("2")
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {living.name, elsewhere.name, ".hidden.json", "b.json"}
    assert is_unfinished(other.name)
    assert not is_unfinished(".hidden.json")


def test_a_folder_that_can_not_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be made: Not a directory"):
        make_folder(tmp_path / "file" / "below")


def test_a_name_as_long_as_names_may_be_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'é' * 125}.json"  # 255 bytes
    with writing(path) as part:
        part.write_text("1")
        assert is_unfinished(part.name)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.processes
def test_the_temporary_folder_of_a_killed_process_is_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os, signal\n"
        "from sufficit.files import temporary_folder\n"
        "temporary_folder()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    source = str(Path(sufficit.__file__).parents[1])
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", code], env=env, check=False)
    (left,) = tmp_path.iterdir()
    (tmp_path / "other").mkdir()
    own = [temporary_folder(), temporary_folder()]
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "other", *own])
