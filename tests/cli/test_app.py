"""What every command shares: -h, the options of RunConfig, and text that is safe to print."""

import pytest
import typer
from rich.console import Console

from sufficit.cli import app
from sufficit.cli.app import literal
from sufficit.runs.config import RunConfig

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_h_prints_the_help_of_every_command(sufficit, command: str) -> None:
    short, long = sufficit(command, "-h"), sufficit(command, "--help")
    assert short.code == 0
    assert short.out == long.out
    assert "-h" in short.out


@pytest.mark.parametrize("command", ["serve", "sanity", "train-lax"])
def test_options_of_a_run_are_those_of_run_config(sufficit, command: str) -> None:
    own = {"precision", "batch_size", "alpha_min"} if command == "train-lax" else set()
    shared = [one for one in COMMANDS[command].params if one.name in RunConfig.__annotations__]
    assert len(shared) > 8
    for option in (one for one in shared if one.name not in own):
        assert option.help == RunConfig.__dataclass_fields__[option.name].metadata["help"]
    run = sufficit(command, "--num-classes", "1", "--out" if command != "serve" else "--host", "x")
    assert run.code == 2
    assert "Invalid value for '--num-classes'" in run.err


@pytest.mark.parametrize(
    "text", ["[red]a[/]", "[/]", "a[b", "back\\[red]", ":cat:", "[link=x]y[/link]"]
)
def test_literal_text_is_printed_as_it_is(text: str) -> None:
    console = Console(emoji=False, width=80)
    with console.capture() as captured:
        console.print(f"[bold]{literal(text)}[/]", literal(text), highlight=False)
    assert captured.get() == f"{text} {text}\n"


def test_literal_text_gives_the_terminal_no_orders() -> None:
    assert literal("\x1b]0;x\x07\u202e\r\x9b") == r"\x1b]0;x\x07\u202e\r\x9b"
