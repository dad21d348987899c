import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    names_in,
    place,
    read_json,
    remove_folder,
    writing,
)

pytestmark = pytest.mark.processes


def write(path: Path, content: bytes) -> None:
    with writing(path) as part:
        part.write_bytes(content)


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


def test_a_path_lists_reads_and_deletes_objects(bucket: str, object_server: ObjectServer) -> None:
    folder = place(f"{bucket}/run")
    assert not folder.exists()
    assert list(folder.glob("*")) == []
    write(folder / "a.bin", bytes(range(200)))
    write(folder / "units/b [1].bin", b"b")
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
    (folder / "a.bin").unlink()
    (folder / "a.bin").unlink(missing_ok=True)
    remove_folder(folder / "units")
    remove_folder(folder / "units")
    assert object_server.keys(f"{bucket}/run") == []


def test_a_folder_with_signs_of_patterns_is_listed(bucket: str) -> None:
    folder = place(f"{bucket}/run [a]*?")
    write(folder / "x.npz", b"x")
    write(place(f"{bucket}/run a/x.npz"), b"other")
    assert [str(path) for path in folder.glob("*.npz")] == [f"{bucket}/run [a]*?/x.npz"]


def test_making_and_removing_folders_touches_no_bucket(
    bucket: str, object_server: ObjectServer
) -> None:
    folder = place(f"{bucket}/run")
    write(folder / "a", b"a")
    place("s3://made-by-accident/run").mkdir(parents=True, exist_ok=True)
    folder.rmdir()
    names = {one["Name"] for one in object_server.client().list_buckets()["Buckets"]}
    assert "made-by-accident" not in names
    assert object_server.keys(f"{bucket}/run") == ["a"]


def test_what_other_processes_write_is_seen_at_once(
    bucket: str, object_server: ObjectServer
) -> None:
    folder = place(f"{bucket}/run")
    write(folder / "a", b"a")
    assert len(list(folder.iterdir())) == 1
    object_server.client().put_object(Bucket=bucket[5:], Key="run/b", Body=b"b")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    assert (folder / "b").exists()
    object_server.client().delete_object(Bucket=bucket[5:], Key="run/b")
    assert not (folder / "b").exists()


def test_more_than_a_thousand_objects_are_listed_and_deleted(
    bucket: str, object_server: ObjectServer
) -> None:
    folder, client = place(f"{bucket}/many"), object_server.client()
    for number in range(1005):
        client.put_object(Bucket=bucket[5:], Key=f"many/{number:04d}.bin", Body=b"")
    assert len(list(folder.iterdir())) == 1005
    assert len(list(folder.glob("*.bin"))) == 1005
    remove_folder(folder)
    assert object_server.keys(f"{bucket}/many") == []


def test_an_object_appears_whole_or_not_at_all(bucket: str, object_server: ObjectServer) -> None:
    path = place(f"{bucket}/run/big.bin")
    with suppress(RuntimeError), writing(path) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert not path.exists()
    write(path, b"first")
    object_server.faults.append(denied("PUT"))
    with pytest.raises(GoneError, match="AccessDenied|Access Denied|Permission"):
        write(path, b"second")
    object_server.faults.clear()
    assert path.read_bytes() == b"first"
    large = os.urandom(101 * 2**20)  # in parts
    write(path, large)
    assert any("uploadId=" in address for _, address in object_server.requests)
    assert path.read_bytes() == large


def test_an_upload_in_parts_that_never_ends_is_not_seen(
    bucket: str, object_server: ObjectServer
) -> None:
    client = object_server.client()
    given = {"Bucket": bucket[5:], "Key": "run/units/scores-000000.safetensors"}
    started = client.create_multipart_upload(**given)["UploadId"]
    client.upload_part(**given, UploadId=started, PartNumber=1, Body=bytes(5 * 2**20))
    folder = place(f"{bucket}/run")
    assert not folder.exists()
    assert list((folder / "units").glob("scores-*")) == []


def test_a_path_works_in_another_process_and_in_threads(
    bucket: str, object_server: ObjectServer
) -> None:
    path = place(f"{bucket}/run/a.bin")
    write(path, b"abc")  # the path is connected now
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


def test_check_output_asks_for_what_a_run_needs(bucket: str, object_server: ObjectServer) -> None:
    check_output(place(f"{bucket}/run"))
    assert object_server.keys(f"{bucket}/run") == []
    for folder in ("s3://no-such-bucket/run", "s3://no-such-bucket"):
        with pytest.raises(
            UserError, match=f"^{folder}/? could not be written: there is no such bu"
        ):
            check_output(place(folder))
    with pytest.raises(UserError, match="every file would be a commit. Choose another --out"):
        check_output(place("hf://datasets/me/mine"))
    write(place(f"{bucket}/photos/cat/1.png"), b"x")
    with pytest.raises(UserError, match="is inside .*: choose another --out"):
        check_output(place(f"{bucket}/photos/run"), [place(f"{bucket}/photos")])
    check_output(place(f"{bucket}/photos-run"), [place(f"{bucket}/photos")])
    check_output(place(f"{bucket}/photos/run"), [Path("photos")])
    object_server.faults.append(denied("PUT"))
    with pytest.raises(GoneError, match=f"^{bucket}/run can't .*check network, endpoint and cred"):
        check_output(place(f"{bucket}/run"))


def test_a_missing_bucket_of_images_is_named_as_such(
    bucket: str, object_server: ObjectServer
) -> None:
    for root in ("s3://no-such-bucket/x", "s3://no-such-bucket"):
        with pytest.raises(UserError, match=f"at {root}/?: there is no such bucket"):
            list_images(root)
    with pytest.raises(UserError, match="no folder of images at .*: give an existing folder"):
        list_images(f"{bucket}/nowhere")


@pytest.mark.parametrize("ask", ["exists", "is_file", "is_dir", "stat", "read_bytes", "iterdir"])
def test_a_server_that_is_gone_is_an_error_and_not_a_missing_file(
    bucket: str, object_server: ObjectServer, ask: str
) -> None:
    path = place(f"{bucket}/a")
    write(path, b"a")
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
    write(path, b"a")
    object_server.stop()
    with pytest.raises(GoneError, match="Could not connect to the endpoint"):
        path.exists()
    with pytest.raises(GoneError, match="Could not connect to the endpoint"):
        write(path, b"b")
    object_server.start()
    assert path.read_bytes() == b"a"


def test_a_busy_or_slow_server_is_asked_again(bucket: str, object_server: ObjectServer) -> None:
    path = place(f"{bucket}/a.json")
    object_server.faults.append(busy(2, "PUT"))
    write(path, b'{"a": 1}')
    object_server.faults[:] = [busy(2, "GET"), slow(0.2)]
    assert read_json(path) == {"a": 1}


def test_a_lost_connection_in_the_middle_of_a_file_is_gone(
    bucket: str, object_server: ObjectServer
) -> None:
    path = place(f"{bucket}/a.bin")
    write(path, bytes(1000))
    with path.open("rb", 100) as file:
        file.read(10)
        object_server.faults.append(denied("GET"))
        with pytest.raises(GoneError):
            file.read()


def test_googles_storage_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with google_server() as (address, server):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        folder = place("gs://birds/run")
        check_output(folder)
        assert server.objects == {}
        write(folder / "a.bin", bytes(range(100)))
        write(folder / "units/b.bin", b"b")
        assert [*server.objects] == ["run/a.bin", "run/units/b.bin"]
        assert (folder.is_dir(), (folder / "a.bin").is_file()) == (True, True)
        assert (folder / "none").exists() is False
        assert sorted(names_in(folder)) == ["a.bin", "units"]
        assert [path.name for path in folder.rglob("*.bin")] == ["a.bin", "b.bin"]
        assert (folder / "a.bin").read_bytes() == bytes(range(100))
        with (folder / "a.bin").open("rb", 8) as file:
            file.seek(90)
            assert file.read(5) == bytes(range(90, 95))
        with pytest.raises(UserError, match="there is no such bucket"):
            check_output(place("gs://no-such-bucket/run"))
        with pytest.raises(UserError, match="at gs://no-such-bucket/x: there is no such bucket"):
            list_images("gs://no-such-bucket/x")
        remove_folder(folder / "units")
        (folder / "a.bin").unlink()
        assert server.objects == {}


def test_other_libraries_of_fsspec_serve_as_well() -> None:
    folder = place("memory://birds/run")
    check_output(folder)
    write(folder / "a.json", b"[1]")
    assert read_json(folder / "a.json") == [1]
    assert names_in(folder) == ["a.json"]
    remove_folder(folder)
    assert names_in(folder) == []
