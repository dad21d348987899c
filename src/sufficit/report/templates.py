"""Templates, styles and scripts as text; the report and the page share the viewer among them."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

HOME = "sufficit.report"


def asset(name: str, package: str = HOME) -> str:
    """A file of a package as text, else the report's file of that name."""
    found = files(package).joinpath(name)
    found = found if found.is_file() else files(HOME).joinpath(name)
    return found.read_text(encoding="utf-8")


@cache
def environment(package: str = HOME) -> Environment:
    """Where a package's templates are found, with all that they print escaped."""
    return Environment(
        loader=FunctionLoader(lambda name: asset(name, package)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def look_and_feel(package: str = HOME) -> dict[str, Markup | str]:
    """The styles, the script after the viewer's, and the script's digest for the policy."""
    script = script_of(package)
    return {
        "style": Markup(asset("page.css")),
        "dark": Markup(asset("dark.css")),
        "script": Markup(script),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def script_of(package: str = HOME) -> str:
    """The viewer and what shows it, in a scope of their own."""
    inner = asset("viewer.js") + "\n" + asset("page.js", package)
    return f'"use strict";\n(() => {{\n{inner}}})();\n'
