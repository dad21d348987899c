"""Untrusted images are decoded in another process: what it may take, and that it is killed."""

import asyncio
import io
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException

import bombs
from sufficit import View
from sufficit.data.image_files import decode_image
from sufficit.web import Limits
from sufficit.web.decoding import Decoder, _Process

USUAL = _Process.started


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(Limits(pixels=10_000_000))


def decoded(decoder: Decoder, content: bytes, view: View | None = None) -> torch.Tensor:
    async def ask() -> torch.Tensor:
        return await decoder.decode(content, view)

    return asyncio.run(ask())


def refused(decoder: Decoder, content: bytes) -> tuple[int, str]:
    with pytest.raises(HTTPException) as error:
        decoded(decoder, content)
    return error.value.status_code, str(error.value.detail)


def as_file(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("view", [None, View((16, 20)), View((24, 24), 30, channels=1)])
def test_pixels_are_those_of_a_run(
    decoder: Decoder, encode: Callable[..., bytes], view: View | None
) -> None:
    content = encode(torch.rand(3, 40, 30, generator=torch.Generator().manual_seed(0)))
    wanted = decode_image(io.BytesIO(content), view)[None]
    assert torch.equal(decoded(decoder, content, view), wanted)


def test_what_is_wrong_is_said_in_plain_words(decoder: Decoder) -> None:
    deep = as_file(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "tiff")
    small = as_file(Image.new("L", (64, 64), 9), "png")
    large = "too large to open safely"
    for content, status, words in (
        (deep, 400, "the image can't be used: pixels of mode F"),
        (b"no image", 415, "the file is not an image"),
        (small[:-30], 400, "the image is corrupt or cut off"),
        (bombs.big_picture(5000), 413, f"the image is {large} (5000 x 5000, the limit is 10000000"),
        (bombs.big_picture(), 413, "the image is too large, the limit is 10 million pixels"),
    ):
        found, text = refused(decoder, content)
        assert (found, text[: len(words)]) == (status, words)
    assert decoded(decoder, small).shape == (1, 3, 64, 64)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that never answer, whatever the machine does; the list has those started."""
    usual, found = _Process.started, list["subprocess.Popen[bytes]"]()

    def started(self: _Process) -> "subprocess.Popen[bytes]":
        popen = usual(self)
        popen.send_signal(signal.SIGSTOP)
        found.append(popen)
        return popen

    with monkeypatch.context() as patched:
        patched.setattr(_Process, "started", started)
        yield found


def small_picture(decoder: Decoder) -> torch.Size:
    """The shape of a picture that is decoded as usual."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Process, "started", USUAL)
        decoder.limits = Limits(decode_seconds=600)
        return decoded(decoder, as_file(Image.new("RGB", (9, 7)), "png")).shape


def test_an_image_that_takes_too_long_ends_its_process_and_no_more(
    frozen: list["subprocess.Popen[bytes]"],
) -> None:
    decoder = Decoder(Limits(decode_seconds=0.01))
    for _ in range(3):  # more than there are processes
        status, text = refused(decoder, b"any image")
        assert (status, text[:41]) == (413, "the image takes more than 0.01 seconds to")
    assert [process.wait() for process in frozen] == [-signal.SIGKILL] * 3
    assert small_picture(decoder) == (1, 3, 7, 9)


def test_nothing_is_decoded_for_a_client_that_is_gone(
    frozen: list["subprocess.Popen[bytes]"],
) -> None:
    decoder = Decoder(Limits(decode_seconds=600))

    async def story(late: bool) -> None:
        decoding = asyncio.ensure_future(decoder.decode(b"any image", None))
        await asyncio.sleep(0)
        while late and not frozen:
            await asyncio.sleep(0.01)
        decoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await decoding

    for late in (True, False):  # while it is decoded, and before its process is there
        asyncio.run(story(late))
    assert small_picture(decoder) == (1, 3, 7, 9)
    assert [process.wait(timeout=300) for process in frozen] == [-signal.SIGKILL] * len(frozen)


def test_no_code_of_the_folder_it_runs_in_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "PIL.py", "sufficit.py", "zlib.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    small = as_file(Image.new("RGB", (9, 7)), "png")
    assert decoded(Decoder(Limits()), small).shape == (1, 3, 7, 9)
    assert not (tmp_path / "sprung").exists()
