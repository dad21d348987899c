"""Requests with a picture: read in a stream, cut off at the limits, looked at before decoding."""

import asyncio
import io
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeVar

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.images import BadImageError, decode_image
from sufficit.web.limits import Limits
from sufficit.web.refusals import GoneError, RefusedError

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # all that is ever decoded
NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF or PPM"
MOST_FIELDS = 40
FIELD_BYTES = 1000
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True)
class Upload:
    """The bytes of a file, and the text fields beside it."""

    file: bytes
    fields: dict[str, list[str]]

    def read(self, form: type[Form]) -> Form:
        """The fields as a form; what may be repeated is a list, what may not is one text."""
        wanted = {
            name: values if name in form.model_fields and _many(form, name) else _one(name, values)
            for name, values in self.fields.items()
        }
        try:
            return form.model_validate(wanted)
        except ValidationError as error:
            raise RefusedError(422, _told(error)) from error


async def receive(request: Request, limits: Limits) -> Upload:
    """A multipart request within the limits."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise RefusedError(415, "send multipart/form-data with the image in the field file")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.seconds):
            return await _parsed(request, limits)
    except TimeoutError as error:
        message = f"the image did not arrive within {limits.seconds:g} seconds"
        raise RefusedError(408, message) from error
    except ClientDisconnect as error:
        raise GoneError from error
    except (MultiPartException, ValueError) as error:
        raise RefusedError(400, f"the form can't be read: {error or 'it is damaged'}") from error


async def _parsed(request: Request, limits: Limits) -> Upload:
    parser = MultiPartParser(
        request.headers,
        _capped(request, limits),
        max_files=1,
        max_fields=MOST_FIELDS,
        max_part_size=FIELD_BYTES,
    )
    form = await parser.parse()
    try:
        return await _upload(form)
    finally:
        await form.close()


async def _capped(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """The request's body, refused once it is longer than the limit."""
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limits.bytes:
            raise _too_large(limits)
        yield chunk


async def _upload(form: FormData) -> Upload:
    fields: dict[str, list[str]] = {}
    content = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) and name == "file":
            content = await value.read()
        elif isinstance(value, str) and name != "file":
            fields.setdefault(name, []).append(value)
        else:
            wanted = "a file" if name == "file" else "text, not a file"
            raise RefusedError(422, f"the field {name[:40]!r} must be {wanted}")
    if content is None:
        raise RefusedError(422, "send the image in the field file")
    if not content:
        raise RefusedError(400, "the file is empty: choose another")
    return Upload(content, fields)


def check_picture(content: bytes, limits: Limits) -> None:
    """Raise unless the bytes begin as a picture of a known kind and of a size within the limits."""
    try:
        with Image.open(io.BytesIO(content), formats=KINDS) as opened:
            width, height = opened.size
    except UnidentifiedImageError as error:
        raise RefusedError(415, f"this is not an image: send {NAMES}") from error
    except BOMBS as error:
        raise _too_many_pixels(limits) from error
    except Exception as error:  # Pillow raises whatever a damaged header leads it to
        raise _damaged() from error
    if width * height > limits.pixels:
        raise _too_many_pixels(limits, f" of {width} x {height}")


def decode(content: bytes, view: View | None, limits: Limits) -> Tensor:
    """What the model sees of a picture: [1,C,H,W] in 0..1."""
    try:
        return decode_image(io.BytesIO(content), view, KINDS, limits.pixels)[None]
    except BadImageError as error:
        if "too large" in str(error):
            raise _too_many_pixels(limits) from error
        if "mode" in str(error):
            raise RefusedError(400, str(error)) from error
        raise _damaged() from error
    except Exception as error:  # as above
        raise _damaged() from error


def _too_large(limits: Limits) -> RefusedError:
    return RefusedError(413, f"the file is too large: the limit is {limits.megabytes:g} MB")


def _too_many_pixels(limits: Limits, size: str = "") -> RefusedError:
    most = f"{limits.megapixels:g} million pixels"
    return RefusedError(413, f"the image{size} is too large: the limit is {most}; make it smaller")


def _damaged() -> RefusedError:
    return RefusedError(400, "the image is damaged or cut off: it can't be read to its end")


def _many(form: type[BaseModel], name: str) -> bool:
    return "list" in str(form.model_fields[name].annotation)


def _one(name: str, values: list[str]) -> str:
    if len(values) > 1:
        raise RefusedError(422, f"the field {name[:40]!r} must be given once, got {len(values)}")
    return values[0]


def _told(error: ValidationError) -> str:
    """The first thing that is wrong with a form, in a sentence."""
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0])[:40] if first["loc"] else "the form"
    if first["type"] == "extra_forbidden":
        return f"there is no field {field!r}"
    came = "" if first["type"] == "missing" else f", got {str(first['input'])[:40]!r}"
    return f"{field}: {first['msg']}{came}"
