"""Put what `sufficit demo` shows into the README: its picture, a sentence, the answer, a table.

    sufficit demo --out shown --no-open && python tools/readme_demo.py shown

The picture of the demo becomes docs/demo.jpg; what is between `<!-- demo -->` and
`<!-- end of demo -->` in README.md is written again.
"""

import re
import shutil
import sys
from pathlib import Path

from sufficit import RunResults
from sufficit.cli.demo import PICTURE

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


def main(demo: Path) -> None:
    """Copy the picture of a demo, fill the README from its results."""
    shutil.copyfile(demo / PICTURE, ROOT / "docs" / "demo.jpg")
    results = RunResults.read(demo)
    found = results.verdict
    words = [f"> **{found.answer}**", f"> {found.sure}", f"> {found.change}"]
    text = "\n\n".join(["\n>\n".join(words), table(results)])
    page = ROOT / "README.md"
    page.write_text(BETWEEN.sub(lambda _: f"\n{text}\n\n", page.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
