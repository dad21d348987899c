"""Where the object is, from files that others made, as the model sees the image."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sufficit.classifier.checkpoint import View
from sufficit.data.images import ImageSource, list_images
from sufficit.data.loader import Entry
from sufficit.data.truth import (
    OBJECT,
    TruthError,
    TruthFiles,
    TruthMasks,
    boxes_at,
    truth_from,
    with_boxes,
)
from sufficit.errors import UserError

BOX = (20, 10, 40, 30)  # x, y, width, height: columns 20 to 59, rows 10 to 39


def photo(folder: Path, name: str, size: tuple[int, int] = (100, 60)) -> None:
    """An image of width x height, bright in BOX alone."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[10:40, 20:60] = 255
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        photo(tmp_path / "photos", name)
    return tmp_path / "photos"


def entries(photos: Path) -> dict[str, Entry]:
    return {image.name: Entry(i, image) for i, image in enumerate(list_images(photos))}


def write_coco(path: Path, **changed: object) -> Path:
    content = {
        "images": [{"id": 7, "file_name": "dog/1.png"}, {"id": 9, "file_name": "cat/1.png"}],
        "annotations": [
            {"image_id": 7, "bbox": [*BOX], "category_id": 1},
            {"image_id": 7, "bbox": [0, 0, 5, 5], "category_id": 2},
            {"image_id": 9, "bbox": [*BOX], "category_id": 3},
        ],
        "categories": [{"id": 1, "name": "Dog"}, {"id": 2, "name": "ball"}],
    } | changed
    path.write_text(json.dumps(content))
    return path


def write_voc(folder: Path) -> Path:
    for name, (x, y, w, h) in {"dog/1": BOX, "cat/1": BOX}.items():
        path = folder / f"{name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        sides = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
        path.write_text(
            f"<annotation><object><name>dog</name><bndbox>{sides}</bndbox></object></annotation>"
        )
    return folder


def write_csv(path: Path) -> Path:
    box = ",".join(map(str, BOX))
    path.write_text(f"image,x,y,width,height\ncat/1.png,{box}\nphotos/dog/1.png,{box}\n")
    return path


def write_masks(folder: Path) -> Path:
    for name in ("dog/1.png", "cat/1.png"):
        photo(folder, name)
    return folder


MAKERS = {
    "coco.json": write_coco,
    "voc": write_voc,
    "boxes.csv": write_csv,
    "masks": write_masks,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_file_says_where_the_object_is(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    truth = TruthFiles(MAKERS[kind](tmp_path / kind))
    known = entries(photos)
    assert truth.check([*known]) == 2
    wanted = torch.zeros(60, 100, dtype=torch.uint8)
    wanted[10:40, 20:60] = OBJECT
    for name in ("cat/1.png", "dog/1.png"):
        assert torch.equal(truth.read(known[name], None), wanted)
    assert not truth.read(known["dog/2.png"], None).any()  # none is known


def test_a_worker_gets_the_path_and_reads_the_same(photos: Path, tmp_path: Path) -> None:
    truth = TruthFiles(write_coco(tmp_path / "c.json"))
    entry = entries(photos)["dog/1.png"]
    wanted = truth.read(entry, None)
    sent = pickle.dumps(truth)
    assert len(sent) < 500  # not what was read
    again = pickle.loads(sent)
    assert again.digest() == truth.digest()
    assert torch.equal(again.read(entry, None), wanted)


VIEWS = {
    "all": None,
    "middle": View((40, 40)),  # 100 x 60 becomes 67 x 40, and its middle is seen
    "resize": View((32, 32), resize=48),
    "stretch": View((30, 90), stretch=True),
    "larger": View((120, 120)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("kind", ["boxes.csv", "masks"])
def test_the_truth_is_where_the_pixels_are_that_the_model_sees(
    kind: str, view: View | None, photos: Path, tmp_path: Path
) -> None:
    """The image is bright in the box and nowhere else."""
    entry = entries(photos)["dog/1.png"]
    truth = TruthFiles(MAKERS[kind](tmp_path / kind)).read(entry, view)
    pixels = entry.image.read(view).mean(0)
    assert truth.shape == pixels.shape
    certain = (pixels > 0.95) | (pixels < 0.05)  # at edges the image is interpolated
    assert torch.equal((truth == OBJECT)[certain], (pixels > 0.5)[certain])
    assert certain.float().mean() > 0.75
    assert (truth == OBJECT).any()


def test_a_box_by_hand_through_resize_and_crop(tmp_path: Path) -> None:
    photo(tmp_path / "photos", "a.png", (200, 100))
    (tmp_path / "t.csv").write_text("image,x,y,width,height\na.png,60,20,80,40\n")
    entry = entries(tmp_path / "photos")["a.png"]
    # Halved to 100 x 50, of which columns 25 to 74 are seen: the box is at x 30 - 25 = 5, 40 wide.
    found = TruthFiles(tmp_path / "t.csv").read(entry, View((50, 50)))
    wanted = torch.zeros(50, 50, dtype=torch.uint8)
    wanted[10:30, 5:45] = OBJECT
    assert torch.equal(found, wanted)
    # A box beyond the view leaves nothing, one over the edge is cut.
    (tmp_path / "t.csv").write_text("image,x,y,width,height\na.png,0,0,50,100\n")
    assert not TruthFiles(tmp_path / "t.csv").read(entry, View((50, 50))).any()
    (tmp_path / "t.csv").write_text("image,x,y,width,height\na.png,-30,-5,90,15\n")
    found = TruthFiles(tmp_path / "t.csv").read(entry, View((50, 50)))
    assert found.nonzero().amax(0).tolist() == [4, 4]  # rows 0 to 4, columns 0 to 4
    assert int((found == OBJECT).sum()) == 25


def test_a_picture_turned_by_exif_has_the_box_of_how_it_looks(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[30:40, :10] = 255  # turned: the upper left corner
    Image.fromarray(pixels).save(tmp_path / "photos" / "a.jpg", exif=exif, quality=95)
    (tmp_path / "t.csv").write_text("image,x,y,width,height\na.jpg,0,0,10,10\n")
    entry = entries(tmp_path / "photos")["a.jpg"]
    found = TruthFiles(tmp_path / "t.csv").read(entry, None)
    assert found.shape == (80, 40)
    assert entry.image.read(None)[0, 2:8, 2:8].min() > 0.8
    assert found.nonzero().amax(0).tolist() == [9, 9]


# How an image that looks upright is stored, by the number of its orientation.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: upright.swapaxes(0, 1)[::-1],
    7: lambda upright: upright.swapaxes(0, 1)[::-1, ::-1],
    8: lambda upright: upright.swapaxes(0, 1)[:, ::-1],
}


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("orientation", STORED)
def test_boxes_and_masks_fit_images_of_every_orientation(
    tmp_path: Path, orientation: int, suffix: str
) -> None:
    upright = np.zeros((40, 80, 3), np.uint8)
    upright[5:15, 50:70] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    stored = np.ascontiguousarray(STORED[orientation](upright))
    for folder in ("photos", "masks"):
        Image.fromarray(stored).save(tmp_path / folder / f"a{suffix}", exif=exif)
    (tmp_path / "t.csv").write_text(f"image,x,y,width,height\na{suffix},50,5,20,10\n")
    entry = entries(tmp_path / "photos")[f"a{suffix}"]
    wanted = torch.from_numpy(upright[..., 0] > 0)
    seen = entry.image.read(None)
    assert torch.equal(seen[0] > 0.5, wanted)
    for truth in ("t.csv", "masks"):
        assert torch.equal(TruthFiles(tmp_path / truth).read(entry, None) == OBJECT, wanted)


def test_masks_that_were_replaced_have_another_digest(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "masks" / "dog").mkdir(parents=True)
    path = tmp_path / "masks" / "dog" / "1.bmp"
    mask = np.zeros((60, 100), np.uint8)
    Image.fromarray(mask).save(path)
    listed = TruthFiles(tmp_path / "masks")
    before, size, time = listed.digest(), path.stat().st_size, path.stat().st_mtime_ns
    assert TruthFiles(tmp_path / "masks").digest() == before
    mask[10:40, 20:60] = 255
    Image.fromarray(mask).save(path)
    os.utime(path, ns=(time, time + 10**6))
    assert path.stat().st_size == size
    assert TruthFiles(tmp_path / "masks").digest() != before
    elsewhere = pickle.loads(pickle.dumps(listed))
    with pytest.raises(UserError, match="masks was changed after it was listed"):
        elsewhere.digest()
    with pytest.raises(UserError, match=r"1\.bmp was changed after it was listed"):
        listed.read(entries(photos)["dog/1.png"], None)


def test_boxes_of_the_images_own_class_count_where_there_are_some(
    photos: Path, tmp_path: Path
) -> None:
    truth, known = TruthFiles(write_coco(tmp_path / "c.json")), entries(photos)
    assert not truth.read(known["dog/1.png"], None)[:5, :5].any()  # the ball
    changed = write_coco(tmp_path / "c.json", categories=[])
    both = TruthFiles(changed).read(known["dog/1.png"], None)
    assert both[0, 0] == both[10, 20] == OBJECT


def test_masks_of_any_mode_and_size_with_the_same_proportions(photos: Path, tmp_path: Path) -> None:
    known = entries(photos)["dog/2.png"]
    grey = np.zeros((60, 100), np.uint8)
    grey[10:40, 20:60] = 255
    for mode, values in (("L", grey), ("L", grey // 255), ("1", grey > 0), ("RGB", grey)):
        picture = Image.fromarray(values).convert(mode) if mode != "L" else Image.fromarray(values)
        for size in ((100, 60), (50, 30)):
            path = tmp_path / "m" / "dog" / "2.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.resize(size, Image.Resampling.NEAREST).save(path)
            found = TruthFiles(tmp_path / "m").read(known, View((60, 100), stretch=True))
            if size == (100, 60):
                assert (found == OBJECT).nonzero().amin(0).tolist() == [10, 20]
                assert int((found == OBJECT).sum()) == 30 * 40
    palette = Image.fromarray((grey > 0).astype(np.uint8) * 3).convert("P")
    palette.putdata((grey.ravel() > 0) * 3)
    palette.save(tmp_path / "m" / "dog" / "2.png")
    found = TruthFiles(tmp_path / "m").read(known, None)
    assert int((found == OBJECT).sum()) == 30 * 40
    photo(tmp_path / "m", "dog/2.png", (60, 100))
    with pytest.raises(TruthError, match="2.png has 60 x 100 pixels, the image 100 x 60"):
        TruthFiles(tmp_path / "m").read(known, None)
    (tmp_path / "m" / "dog" / "2.png").write_bytes(b"no image")
    with pytest.raises(TruthError, match="not a readable image"):
        TruthFiles(tmp_path / "m").read(known, None)


def test_the_box_of_a_mask_is_the_smallest_around_it() -> None:
    mask = torch.zeros(1, 6, 6, dtype=torch.bool)
    mask[0, 1, 2] = mask[0, 3, 4] = True
    found = with_boxes(mask)[0]
    wanted = torch.zeros(6, 6, dtype=torch.uint8)
    wanted[1:4, 2:5] = 1
    wanted[1, 2] = wanted[3, 4] = OBJECT
    assert torch.equal(found, wanted)
    assert not with_boxes(torch.zeros(1, 4, 4)).any()


def test_names_may_begin_above_or_below_the_folder_of_the_images(
    photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("image,x,y,width,height\ndata/photos/dog/2.jpg,0,0,5,5\n")
    truth = TruthFiles(tmp_path / "t.csv")
    assert truth.key("dog/2.png") == "data/photos/dog/2.jpg"
    assert truth.key("2.png") == "data/photos/dog/2.jpg"
    assert truth.key("cat/2.png") is None
    (tmp_path / "t.csv").write_text("image,x,y,width,height\n1,0,0,5,5\n")
    with pytest.raises(UserError, match="1 in .*t.csv fits two images"):
        TruthFiles(tmp_path / "t.csv").check([*entries(photos)])
    (tmp_path / "t.csv").write_text("image,x,y,width,height\na/dog/2,0,0,5,5\nb/dog/2,0,0,5,5\n")
    with pytest.raises(UserError, match="two or more truths for dog/2.png"):
        TruthFiles(tmp_path / "t.csv").check([*entries(photos)])


def test_masks_in_memory_follow_the_order_of_the_images() -> None:
    masks = torch.zeros(2, 4, 4)
    masks[1, 2, 2] = 0.3
    source = [*ImageSource.from_tensors(torch.rand(2, 3, 4, 4))]
    truth = truth_from(masks)
    assert isinstance(truth, TruthMasks)
    assert truth.check(["a", "b"]) == 1
    assert truth.read(Entry(1, source[1]), None)[2, 2] == OBJECT
    with pytest.raises(UserError, match=r"truth must be \[N,H,W\] with N = 3 images"):
        truth.check(["a", "b", "c"])
    with pytest.raises(UserError, match="truth must be masks .* or a path, got list"):
        truth_from([1])


BILLION = """<?xml version="1.0"?>
<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>
<annotation><object><name>&c;</name></object></annotation>"""
EXTERNAL = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>'
BROKEN = {
    "a.xml": [
        (BILLION, "declares a DOCTYPE or entities"),
        (EXTERNAL, "declares a DOCTYPE or entities"),
        (EXTERNAL.encode("utf-16"), "could not be read"),
        ("<annotation><object>", "could not be read as XML"),
        ("<a><object><name>x</name></object></a>", "an object has no bndbox"),
        (
            "<a><object><bndbox><xmin>x</xmin><ymin>1</ymin><xmax>2</xmax><ymax>3</ymax></bndbox>"
            "</object></a>",
            "numbers of pixels, got 'x'",
        ),
    ],
    "a.json": [
        ("[1, 2", "could not be read"),
        ("[" * 100_000, "could not be read"),
        ("[1, 2]", "is no COCO file of boxes"),
        ('{"images": [{"id": 1, "file_name": 3}], "annotations": []}', "is no COCO file"),
        (
            '{"images": [{"id": 1, "file_name": "a"}],'
            ' "annotations": [{"image_id": 1, "bbox": [0, 0, NaN, 1]}]}',
            "numbers of pixels, got nan",
        ),
        (
            '{"images": [{"id": 1, "file_name": "a"}],'
            ' "annotations": [{"image_id": 2, "bbox": [0, 0, 1, 1]}]}',
            "is no COCO file",
        ),
        (
            '{"images": [{"id": 1, "file_name": "a"}],'
            ' "annotations": [{"image_id": 1, "bbox": [0, 0, 1]}]}',
            "is no COCO file",
        ),
    ],
    "a.csv": [
        ("image,x,y,width\na,1,2,3\n", "has no column 'height'"),
        ("", "has no column 'image'"),
        ("image,x,y,width,height\na,1,2,-3,4\n", "must have width and height"),
        ("image,x,y,width,height\na,1,2,1e300,4\n", "numbers of pixels"),
        ("image,x,y,width,height\na,1\n", "numbers of pixels, got None"),
        (b"\xff\xfe\x00", "could not be read"),
        ('image,x,y,width,height\n"' + "a" * 200_000 + '",1,2,3,4\n', "could not be read as CSV"),
        ("image,x,y,width,height\n", "has no masks and no boxes"),
    ],
    "a.yaml": [("a: 1", "is no truth: give a folder of masks")],
}
CASES = [(name, *case) for name, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(("name", "content", "message"), CASES, ids=range(len(CASES)))
def test_a_broken_or_hostile_file_is_refused(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t" / name
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    at = path.parent if name.endswith(".xml") else path
    with pytest.raises(UserError, match=message):
        TruthFiles(at).records  # noqa: B018


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sufficit.data.truth.MOST_XML", 64)
    monkeypatch.setattr("sufficit.data.truth.MOST_BYTES", 64)
    write_voc(tmp_path / "voc")
    for path in (tmp_path / "voc", write_coco(tmp_path / "a.json"), write_csv(tmp_path / "a.csv")):
        with pytest.raises(
            UserError, match=r"could not be read: it has \d+ bytes, the limit is 64"
        ):
            boxes_at(path)
    with pytest.raises(UserError, match="no truth at"):
        TruthFiles(tmp_path / "nothing").check(["a"])
