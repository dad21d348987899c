import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from google_server import google_server
from object_server import SECRET, ObjectServer, busy, denied, environment_with, slow
from sufficit.data.images import list_images
from sufficit.errors import GoneError, UserError, without_secrets
from sufficit.files import (
    check_output,
    is_remote,
    local_file,
    make_folder,
    names_in,
    place,
    read_json,
    writing,
)
from sufficit.lock import locked

pytestmark = pytest.mark.processes


def put(path: Path, content: bytes) -> None:
    """Make an object, which Sufficit itself never does."""
    assert is_remote(path)
    path.fs.pipe_file(path.path, content)


def test_words_become_local_or_remote_paths(bucket: str) -> None:
    assert place("a/b") == Path("a/b")
    assert place(Path("a/b")) == Path("a/b")
    assert place("file:///a/b") == Path("/a/b")
    assert not is_remote("C:/photos")
    assert not is_remote(Path("s3:/photos"))
    path = place(f"{bucket}/a/b.json")
    assert is_remote(path)
    assert str(path) == f"{bucket}/a/b.json"
    assert (path.name, path.stem, path.suffix) == ("b.json", "b", ".json")
    assert str(path.parent / "c") == f"{bucket}/a/c"
    assert place(path) is path  # type: ignore[comparison-overlap]


def test_a_path_lists_and_reads_objects(bucket: str) -> None:
    folder = place(f"{bucket}/run")
    assert not folder.exists()
    assert list(folder.glob("*")) == []
    put(folder / "a.bin", bytes(range(200)))
    put(folder / "units/b [1].bin", b"b")
    assert (folder.is_dir(), folder.is_file(), folder.exists()) == (True, False, True)
    assert ((folder / "a.bin").is_dir(), (folder / "a.bin").is_file()) == (False, True)
    assert not (folder / "a").exists()  # a key that only starts like this
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin", "units"]
    assert [str(p) for p in folder.glob("*.bin")] == [f"{bucket}/run/a.bin"]
    assert [p.name for p in (folder / "units").glob("b*")] == ["b [1].bin"]
    assert sorted(p.name for p in folder.rglob("*.bin")) == ["a.bin", "b [1].bin"]
    assert (folder / "a.bin").stat().st_size == 200
    with (folder / "a.bin").open("rb", 16) as file:
        assert file.read(3) == b"\0\1\2"
        file.seek(-2, os.SEEK_END)
        assert file.read() == b"\xc6\xc7"
        file.seek(100)
        assert file.read(50) == bytes(range(100, 150))
    with local_file(folder / "a.bin") as copy:
        assert copy.read_bytes() == bytes(range(200))
        assert copy.suffix == ".bin"
    assert not copy.exists()


def test_a_folder_with_signs_of_patterns_is_listed(bucket: str) -> None:
    folder = place(f"{bucket}/run [a]*?")
    put(folder / "x.npz", b"x")
    put(place(f"{bucket}/run a/x.npz"), b"other")
    assert [str(path) for path in folder.glob("*.npz")] == [f"{bucket}/run [a]*?/x.npz"]


def test_what_other_processes_write_is_seen_at_once(
    bucket: str, object_server: ObjectServer
) -> None:
    folder = place(f"{bucket}/run")
    put(folder / "a", b"a")
    assert len(list(folder.iterdir())) == 1
    object_server.client().put_object(Bucket=bucket[5:], Key="run/b", Body=b"b")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    assert (folder / "b").exists()
    object_server.client().delete_object(Bucket=bucket[5:], Key="run/b")
    assert not (folder / "b").exists()


@pytest.mark.slow
def test_more_than_a_thousand_objects_are_listed(bucket: str, object_server: ObjectServer) -> None:
    folder, client = place(f"{bucket}/many"), object_server.client()
    for number in range(1005):
        client.put_object(Bucket=bucket[5:], Key=f"many/{number:04d}.bin", Body=b"")
    assert len(list(folder.iterdir())) == 1005
    assert len(list(folder.glob("*.bin"))) == 1005


def test_a_path_works_in_another_process_and_in_threads(
    bucket: str, object_server: ObjectServer
) -> None:
    path = place(f"{bucket}/run/a.bin")
    put(path, b"abc")  # the path is connected now
    assert pickle.loads(pickle.dumps(path)) == path
    assert SECRET.encode() not in pickle.dumps(path)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read_bytes())"
    source = str(Path(sys.modules["sufficit"].__file__ or "").parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(path),
        env=environment_with(object_server) | {"PYTHONPATH": source},
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout == b"b'abc'\n"
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: path.read_bytes(), range(40))) == {b"abc"}


@pytest.mark.parametrize(
    "word",
    [
        "s3://KEY:abcPASSdef@bucket/photos",
        "s3://KEY:abc/PASS+def@bucket/photos",
        "s3://PASS@bucket/photos",
        "gs://bucket/photos?X-Goog-Signature=PASS",
        "s3://bucket/a.npz?AWSAccessKeyId=K&Signature=a/PASS%3D&Expires=1",
        "https://host/a.npz?sv=2&sig=PASS",
        "https://user:PASS@host/a.npz",
    ],
)
def test_credentials_in_a_path_are_refused_and_not_repeated(word: str) -> None:
    with pytest.raises(UserError, match="set them in the environment") as raised:
        place(word)
    assert "PASS" not in str(raised.value)
    assert "PASS" not in without_secrets(f"sufficit compare --data {word} -m x")


@pytest.mark.parametrize(
    "word",
    [
        "hf://datasets/user/name@main/photos",
        "s3://bucket/a@b.png",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/birds/photos",
        "https://host:8080/a@b.png",
        "s3://bucket/what?.png",
    ],
)
def test_words_without_credentials_are_left_alone(word: str) -> None:
    assert without_secrets(word) == word


def test_an_unknown_scheme_and_a_missing_library_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="nope://a is no path .*write s3://BUCKET/FOLDER"):
        place("nope://a")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"s3://b/a .*pip install '\.\[s3\]'"):
        place("s3://b/a")
    monkeypatch.delitem(sys.modules, "sufficit.storage")
    monkeypatch.setitem(sys.modules, "upath.extensions", None)
    with pytest.raises(UserError, match=r"gs://b/a .*pip install '\.\[gcs\]'"):
        place("gs://b/a")


def test_a_missing_bucket_of_images_is_named_as_such(
    bucket: str, object_server: ObjectServer
) -> None:
    for root in ("s3://no-such-bucket/x", "s3://no-such-bucket"):
        with pytest.raises(UserError, match=f"at {root}/?: there is no such bucket"):
            list_images(root)
    with pytest.raises(UserError, match="no folder of images at .*: give an existing folder"):
        list_images(f"{bucket}/nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["exists", "is_file", "is_dir", "stat", "read_bytes", "iterdir"])
def test_a_server_that_is_gone_is_an_error_and_not_a_missing_file(
    bucket: str, object_server: ObjectServer, ask: str
) -> None:
    path = place(f"{bucket}/a")
    put(path, b"a")
    object_server.faults.append(denied())
    with pytest.raises(GoneError, match=f"{path} can't be reached .* to resume"):
        getattr(path, ask)()
    object_server.faults[:] = [busy(1000)]
    with pytest.raises(GoneError, match="can't be reached"):
        getattr(path, ask)()


def test_a_server_that_does_not_listen_is_gone_and_can_come_back(
    bucket: str, object_server: ObjectServer
) -> None:
    path = place(f"{bucket}/a")
    put(path, b"a")
    object_server.stop()
    with pytest.raises(GoneError, match="Could not connect to the endpoint"):
        path.exists()
    object_server.start()
    assert path.read_bytes() == b"a"


def test_a_busy_or_slow_server_is_asked_again(bucket: str, object_server: ObjectServer) -> None:
    path = place(f"{bucket}/a.json")
    put(path, b'{"a": 1}')
    object_server.faults[:] = [busy(2, "GET"), slow(0.2)]
    assert read_json(path) == {"a": 1}


def test_a_lost_connection_in_the_middle_of_a_file_is_gone(
    bucket: str, object_server: ObjectServer
) -> None:
    path = place(f"{bucket}/a.bin")
    put(path, bytes(1000))
    with path.open("rb", 100) as file:
        file.read(10)
        object_server.faults.append(denied("GET"))
        with pytest.raises(GoneError):
            file.read()


@pytest.mark.parametrize("word", ["s3://birds/run", "hf://datasets/me/mine"])
def test_results_are_written_to_local_folders_alone(
    word: str, bucket: str, object_server: ObjectServer
) -> None:
    path = place(word)
    reason = f"^cannot write to {word}: give a local folder as --out"
    with pytest.raises(UserError, match=reason):
        check_output(path)
    with pytest.raises(UserError, match=reason):
        make_folder(path)
    with pytest.raises(UserError, match=reason), writing(path):
        pass
    with pytest.raises(UserError, match=reason), locked(path):
        pass
    assert [one for one in object_server.requests if "run" in one[1]] == []


def test_an_out_among_the_images_is_refused(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is inside .*: choose another --out"):
        check_output(tmp_path / "photos/run", [place(f"{bucket}/photos"), tmp_path])
    check_output(tmp_path / "run", [place(f"{bucket}/photos"), tmp_path / "photos"])


def test_googles_storage_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with google_server() as (address, server):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        server.objects |= {"run/a.bin": bytes(range(100)), "run/units/b.bin": b"b"}
        folder = place("gs://birds/run")
        assert (folder.is_dir(), (folder / "a.bin").is_file()) == (True, True)
        assert (folder / "none").exists() is False
        assert sorted(names_in(folder)) == ["a.bin", "units"]
        assert [path.name for path in folder.rglob("*.bin")] == ["a.bin", "b.bin"]
        assert (folder / "a.bin").read_bytes() == bytes(range(100))
        with (folder / "a.bin").open("rb", 8) as file:
            file.seek(90)
            assert file.read(5) == bytes(range(90, 95))
        with pytest.raises(UserError, match="at gs://no-such-bucket/x: there is no such bucket"):
            list_images("gs://no-such-bucket/x")


def test_other_libraries_of_fsspec_serve_as_well() -> None:
    folder = place("memory://birds/run")
    put(folder / "a.json", b"[1]")
    assert read_json(folder / "a.json") == [1]
    assert names_in(folder) == ["a.json"]
