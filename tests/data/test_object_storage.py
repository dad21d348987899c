"""Images on object storage: folders, shards, and servers that fail."""

from pathlib import Path

from object_storage import put, put_folder
from shard_files import png
from sufficit.data.images import list_images, open_images


def test_a_folder_of_more_than_a_page_is_that_on_disk(s3: str, tmp_path: Path) -> None:
    one = png(0)
    for number in range(1200):
        path = tmp_path / "in" / f"c{number % 3}" / f"{number // 9:03d}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one)
    for number in range(1100):  # in one folder
        path = tmp_path / "in" / "c!" / f"{number}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one)
    (tmp_path / "in" / "notes.txt").write_text("no image")
    root = put_folder(s3, "pages", tmp_path / "in")
    local, remote = list_images(tmp_path / "in"), list_images(root)
    assert len(remote) == 2300
    facts = [(image.name, image.folder, image.size) for image in remote]
    assert facts == [(image.name, image.folder, image.size) for image in local]
    assert remote[0].file == f"{root}/{remote[0].name}"


def test_odd_names_are_listed_and_read(s3: str) -> None:
    names = ["a b/1 #?%41.png", "é/ü&+.png", "x=1/[2]*.png", "dot./..3.png"]
    objects = {f"in/{name}": png(k) for k, name in enumerate(names)}
    root = put(s3, "odd", objects | {"in/": b"", "in/a b/": b"", "in//nameless.png": b"x"})
    found = {image.name: image for image in open_images(f"{root}/in/")}
    assert sorted(found) == sorted(names)
    for name in names:
        assert found[name].content() == objects[f"in/{name}"]
