"""A hook of mkdocs.yml: pages made of notebooks and of the command line, tooltips, other files.

mkdocs build --strict --site-dir build/site
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FIGURES, NOTEBOOKS = "results/*/*.png", "docs/notebooks/*.ipynb"
WORD = re.compile(r"^\| \*\*([^*]+)\*\* \| (.*) \|$", re.MULTILINE)
EVERYDAY = ("heatmap", "mask", "target", "significant")  # underlined, they would be noise
EXAMPLES = re.compile(r"^(sufficit .*)\n\n(?=sufficit )", re.MULTILINE)
HELP = """
import typer
from sufficit.cli import app

found = typer.main.get_command(app)
for name, command in found.commands.items():
    print(f"\\n## sufficit {name}\\n\\n" + (command.help or "").replace("\\b", ""))
    print("\\n| option | default | what it does |\\n|---|---|---|")
    for one in command.params:
        words = " ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
        if one.param_type_name == "argument":
            words = f"`{one.name.upper()}`"
        default = one.default if isinstance(one.default, (str, int, float)) else ""
        about = (getattr(one, "help", "") or "").replace("|", "\\\\|")
        if not (isinstance(one.default, bool) or default == ""):
            words += " |" + f" `{default}` "
        else:
            words += " | "
        print(f"| {words}| {about} |")
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the figures of the results, the notebooks, and the page of the command line."""
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        text = notebook(json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for path in sorted(ROOT.glob(FIGURES)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "cli.md", content=command_line()))
    return files


def notebook(found: dict[str, Any]) -> str:
    """A notebook as a page: its text, its code, and what it printed and drew."""
    parts = []
    for cell in found["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            if "image/png" in data:
                parts.append(
                    f"![What the cell above draws](data:image/png;base64,{data['image/png']})"
                )
            elif "text/html" in data:
                parts.append(re.sub(r"\n\s*", "\n", data["text/html"]))
            else:
                text = "".join(output.get("text", ())) or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def command_line() -> str:
    """Every command with its options, as the program itself describes them."""
    # A process of its own: the program changes how warnings are shown.
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    text = EXAMPLES.sub(r"\1\n", done.stdout)
    text = re.sub(r"^(?=sufficit )", "    ", text, flags=re.MULTILINE)
    return f"# The command line\n\n`sufficit COMMAND --help-all` prints the same.\n{text}"


def tooltips() -> str:
    """The words that msi.md explains, as abbreviations with a tooltip."""
    words = WORD.findall((ROOT / "docs" / "msi.md").read_text())
    plain = re.compile(r"\[([^\]]*)\]\([^)]*\)")
    words = [one for one in words if one[0] not in EVERYDAY]
    found = {word: plain.sub(r"\1", about).replace("`", "") for word, about in words}
    return "\n".join(f"*[{word}]: {about}" for word, about in found.items())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show those figures; name other files of the repository without a link; add tooltips."""
    if page.file.src_uri.startswith("notebooks/"):
        return re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown)
    markdown = markdown.replace("](../results/", "](results/")
    markdown = re.sub(r"(\]\(notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"`\1`", markdown)
    # The page that explains the words needs no tooltips, and generated text has words as names.
    own = page.file.src_uri in ("msi.md", "api.md", "cli.md")
    return markdown if own else f"{markdown}\n\n{tooltips()}\n"
