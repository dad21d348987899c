"""Plain settings as TOML, which the standard library reads but does not write."""

import json
from collections.abc import Mapping, Sequence

from sufficit.errors import UserError

Plain = str | bool | int | float | Sequence[str]


def as_toml(content: Mapping[str, Plain | None]) -> str:
    r"""A line a key; None has no line.

    >>> print(as_toml({"model": 'a "b" \\ c', "seed": 0, "lax": ["x"], "size": None}), end="")
    model = "a \"b\" \\ c"
    seed = 0
    lax = ["x"]
    """
    lines = [f"{key} = {_value(value)}" for key, value in content.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Plain) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    return f"[{', '.join(_text(item) for item in value)}]"


def _text(text: str) -> str:
    """A basic string: JSON's, but for one character that TOML does not allow as it is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} can't be written as UTF-8: rename the file or folder") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
