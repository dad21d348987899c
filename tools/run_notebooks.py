"""Run the notebooks of docs/ in place, so that they show what they print.

python tools/run_notebooks.py [WORD ...]
"""

import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLOURS = 128
NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path, **parameters: object) -> nbformat.NotebookNode:
    """The notebook after a run in a kernel of its own; `parameters` follow its own ones."""
    notebook = nbformat.read(path, 4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    own = cell.source
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    cell.source = own
    return notebook


def reduced(picture: str) -> str:
    """A PNG with fewer colours, in base 64."""
    with Image.open(BytesIO(b64decode(picture))) as image:
        small, file = image.convert("RGB").quantize(COLOURS), BytesIO()
    small.save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def main() -> None:
    """Run the notebooks whose names hold one of the words given, or all."""
    for path in [
        one for one in NOTEBOOKS if any(word in one.stem for word in sys.argv[1:] or [""])
    ]:
        with TemporaryDirectory() as folder:  # for what a notebook writes
            notebook = executed(path, Path(folder))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times, which differ from run to run
            shown = [one for one in cell.get("outputs", ()) if one.get("name") != "stderr"]
            cell.update({"outputs": shown} if cell.cell_type == "code" else {})  # no bars
            for picture in (one.data for one in shown if "image/png" in one.get("data", ())):
                picture["image/png"] = reduced(picture["image/png"])
        path.write_text(nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main()
