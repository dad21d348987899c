"""A hook of mkdocs.yml: files outside docs/ that pages show or name.

mkdocs build --strict --site-dir build/site
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = "results/*/*.png"


def on_files(files: Files, config: Any) -> Files:
    """Add the figures of the results."""
    for path in sorted(ROOT.glob(SHOWN)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show those figures; name other files of the repository without a link."""
    markdown = markdown.replace("](../results/", "](results/")
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"`\1`", markdown)
