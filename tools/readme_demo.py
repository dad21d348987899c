"""Put what `sufficit demo` shows into the README: its picture, a sentence, the answer, a table.

    python tools/readme_demo.py

The demo is run as a user runs it. Its picture becomes docs/demo.jpg; what is between
`<!-- demo -->` and `<!-- end of demo -->` in README.md is written anew.
"""

import re
import shutil
import tempfile
from pathlib import Path

from sufficit import RunResults
from sufficit.cli.demo import PHOTOGRAPHS, PICTURE, run_photos
from sufficit.data.pets import CREDIT

ROOT = Path(__file__).parents[1]
BETWEEN = re.compile(r"(?<=<!-- demo -->\n).*?(?=<!-- end of demo -->)", re.DOTALL)
SHOWN = ("lax+fit", "gradcam+fit", "lax", "gradcam", "center+fit", "everything", "random")


def table(results: RunResults) -> str:
    """Some methods and controls, as a table in Markdown."""
    content = results.content()
    heads = ["", "MSI", "95 % interval", "mask size", "pointing"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for name in SHOWN:
        found = content.summaries[name]
        msi = found["msi"]
        cells = [f"`{name}`", f"{msi.mean:.2f}", f"{msi.low:.2f} to {msi.high:.2f}"]
        cells += [f"{found[column].mean:.2f}" for column in ("mask_penalty", "pointing")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the demo, copy its picture, fill the README."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_photos(Path(folder), PHOTOGRAPHS, seed=0)
        shutil.copyfile(Path(folder) / PICTURE, ROOT / "docs" / "demo.jpg")
        found = results.verdict
        words = [f"> **{found.answer}**", f"> {found.sure}", f"> {found.change}"]
        parts = ["\n>\n".join(words), table(results)]
    page = ROOT / "README.md"
    text = "\n\n".join(parts)
    filled = BETWEEN.sub(lambda _: f"\n{text}\n\n", page.read_text())
    page.write_text(filled)
    print(text, CREDIT, sep="\n")


if __name__ == "__main__":
    main()
