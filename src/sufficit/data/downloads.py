"""Images on object storage, downloaded a unit at a time with few requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, cast

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.image_files import ImageFile, ahead
from sufficit.data.images import SourceImage
from sufficit.data.pixels import BadImageError, decode_image, while_there
from sufficit.data.shards import ShardImage
from sufficit.files import is_remote

if TYPE_CHECKING:
    from sufficit.storage import RemotePath

GAP = 2**16  # bytes between two images of a shard that a request may read in vain
MOST_RUN = 2**24  # bytes of a request for several images


@dataclass(frozen=True, slots=True)
class Download(ImageFile):
    """An image whose bytes are in memory, or with the problem that kept them away."""

    held: bytes = b""

    def read(self, view: View | None) -> Tensor:
        """Decode it as the model sees it: [C,H,W] in 0..1."""
        return decode_image(BytesIO(self.content()), view)

    def content(self) -> bytes:
        """The bytes of its file."""
        if self.problem:
            raise BadImageError(self.problem)
        return self.held


def download(images: Sequence[SourceImage]) -> list[SourceImage]:
    """The images, with the bytes of those on object storage in memory."""
    remote = [image for image in images if isinstance(image, ImageFile) and _can_be_fetched(image)]
    # Each thread that makes a path of hf:// connects and lists anew, so that it is made here.
    groups = [(cast("RemotePath", run[0].path), run) for run in runs(remote)]
    known: dict[SourceImage, Download] = {}
    if groups:
        for (_, run), found in zip(groups, ahead(_fetch, groups), strict=True):
            known |= zip(run, found, strict=True)
    return [known.get(image, image) for image in images]


def runs(images: Sequence[ImageFile]) -> list[list[ImageFile]]:
    """The images in groups of one request each: a file, or neighbours in a shard."""
    found: list[list[ImageFile]] = []
    for image in sorted(images, key=lambda image: (image.file, getattr(image, "start", 0))):
        if not (found and _follows(found[-1][0], found[-1][-1], image)):
            found.append([])
        found[-1].append(image)
    return found


def _follows(first: ImageFile, last: ImageFile, image: ImageFile) -> bool:
    """Whether the request for the images from first to last may read this one too."""
    if not (isinstance(first, ShardImage) and isinstance(last, ShardImage)):
        return False
    if not isinstance(image, ShardImage) or image.file != last.file:
        return False
    near = image.start - (last.start + last.size) <= GAP
    return near and image.start + image.size - first.start <= MOST_RUN


def _can_be_fetched(image: ImageFile) -> bool:
    return type(image) in (ImageFile, ShardImage) and is_remote(image.file) and not image.fault


def _fetch(asked: tuple["RemotePath", Sequence[ImageFile]]) -> list[Download]:
    """The images of one request."""
    path, run = asked
    first, last = run[0], run[-1]
    try:
        with while_there(first.root):
            if isinstance(first, ShardImage) and isinstance(last, ShardImage):
                whole = path.read_range(first.start, last.start + last.size)
                starts = [one.start - first.start for one in cast(Sequence[ShardImage], run)]
                contents = [whole[at : at + one.size] for at, one in zip(starts, run, strict=True)]
            else:
                contents = [path.read_bytes()]
    except OSError as error:
        return [_download(one, f"can't be opened ({error.strerror})") for one in run]
    return [_download(one, "", held) for one, held in zip(run, contents, strict=True)]


def _download(image: ImageFile, problem: str, held: bytes = b"") -> Download:
    known = (image.file, image.name, image.folder, problem, image.size, image.version)
    return Download(*known, held)
