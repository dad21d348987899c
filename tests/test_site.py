"""What the hook of the site makes: pages of notebooks and of the command line, and tooltips."""

import mkdocs_files
import typer

from sufficit.cli import app


def test_a_notebook_becomes_a_page() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "execute_result", "data": {"image/png": "QUJD", "text/plain": "x"}},
                {"output_type": "execute_result", "data": {"text/html": "<table>\n  </table>"}},
            ],
        },
    ]
    made = mkdocs_files.notebook({"cells": cells})
    assert made.startswith("# A title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n![")
    assert "](data:image/png;base64,QUJD)" in made
    assert made.endswith("<table>\n</table>")


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    made = mkdocs_files.command_line()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"\n## sufficit {name}\n" in made
        for option in command.params:
            shown = option.opts if option.param_type_name == "option" else [option.name.upper()]
            assert all(f"`{word}`" in made for word in shown), (name, option.name)
    assert "\n    sufficit demo\n    sufficit demo --images" in made  # examples are code


def test_tooltips_are_the_words_of_the_page_on_msi() -> None:
    made = dict(line[2:].split("]: ", 1) for line in mkdocs_files.tooltips().splitlines())
    assert made["zero line"] == "the MSI of marking the whole image"
    assert made["twin"].startswith("a copy of the model")
    assert "heatmap" not in made  # an everyday word
    assert not any("](" in about or "`" in about for about in made.values())
