"""Untrusted images, decoded in processes of their own that can be killed."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from PIL import Image
from starlette.exceptions import HTTPException
from torch import Tensor

import sufficit
from sufficit.classifier.checkpoint import View
from sufficit.data.image_files import pixels_of
from sufficit.data.pictures import FORMATS, LargeImageError, NotAnImageError
from sufficit.web.schemas import Limits

PROCESSES = 2  # images that are decoded at once
FORMAT_NAMES = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
CORRUPT = "the image is corrupt or cut off: send it again, or another one"


class _Process:
    """A running `python -m sufficit.data.pictures`, or none yet."""

    popen: "subprocess.Popen[bytes] | None" = None

    def kill(self) -> None:
        """End it; the next image starts another."""
        popen, self.popen = self.popen, None
        if popen is not None:
            popen.kill()
            popen.communicate()

    def started(self) -> "subprocess.Popen[bytes]":
        """The process, started if need be."""
        if self.popen is None or self.popen.poll() is not None:
            self.kill()
            homes = [str(Path(sufficit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            found = {"PYTHONPATH": os.pathsep.join(filter(None, homes))}
            one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # which takes less memory
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "sufficit.data.pictures"],  # nothing of this folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | found | one_thread,
            )
            assert self.popen.stdout is not None
            self.popen.stdout.readline()  # it is ready, or it is gone
        return self.popen


class Decoder:
    """Decodes images within limits of time and memory, a few at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._lock = limits, threading.Lock()
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="sufficit-decoder")
        processes = [_Process() for _ in range(PROCESSES)]
        self._idle = list(processes)
        weakref.finalize(self, _end, processes)

    async def decode(self, content: bytes, view: View | None) -> Tensor:
        """The model's input for the bytes of an image: [1,C,H,W] in 0..1.

        A process that takes too long, or for which nobody waits any more, is killed.
        """
        busy, left = list[_Process](), threading.Event()
        work = self._threads.submit(self._ask, content, view or View(), busy, left)
        try:
            return await asyncio.wrap_future(work)
        finally:
            left.set()
            self._kill(busy)

    def _ask(
        self, content: bytes, view: View, busy: list[_Process], left: threading.Event
    ) -> Tensor:
        """What a process says of an image, in a thread of ours; it is `busy` meanwhile."""
        one, late = self._idle.pop(), threading.Event()

        def end() -> None:
            late.set()
            self._kill(busy)

        timer = threading.Timer(self.limits.decode_seconds, end)
        try:
            popen = one.started()
            assert popen.stdin is not None
            assert popen.stdout is not None
            busy.append(one)
            timer.start()
            if left.is_set():  # the client was gone before there was something to kill
                popen.kill()
            asked = {"view": asdict(view), "pixels": self.limits.pixels, "bytes": len(content)}
            popen.stdin.write(json.dumps(asked).encode() + b"\n" + content)
            popen.stdin.flush()
            answer = json.loads(popen.stdout.readline())
            if "error" in answer:
                raise refusal(answer["kind"], answer["error"], answer["cause"], self.limits)
            pixels = popen.stdout.read(answer["bytes"])
            seen = Image.frombytes(answer["mode"], tuple(answer["size"]), pixels)
        except (OSError, ValueError) as error:  # it died, or was killed
            one.kill()
            if not late.is_set():
                raise HTTPException(400, CORRUPT) from error
            text = f"the image takes more than {self.limits.decode_seconds:g} seconds to decode"
            raise HTTPException(413, f"{text}: send another one") from error
        finally:
            timer.cancel()
            with self._lock:
                busy.clear()
            self._idle.append(one)
        return pixels_of(seen)[None]

    def _kill(self, busy: list[_Process]) -> None:
        """End the process of one image, if it is still at it."""
        with self._lock:
            for one in busy:
                if one.popen is not None:
                    one.popen.kill()


def _end(processes: list[_Process]) -> None:
    for one in processes:
        one.kill()


def refusal(kind: str, text: str, caused: bool, limits: Limits) -> HTTPException:
    """What a client gets for an image that cannot be used."""
    if kind == NotAnImageError.__name__:
        return HTTPException(415, f"the file is not an image: send {FORMAT_NAMES}")
    if kind == LargeImageError.__name__:
        most = f"too large, the limit is {limits.pixels / 1e6:g} million pixels"
        return HTTPException(413, f"the image is {most if caused else text}: send a smaller one")
    return HTTPException(400, CORRUPT if caused else f"the image can't be used: {text}")
