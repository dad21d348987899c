"""What every command shares: -h, the options of RunConfig, and text that is safe to print."""

import json
import subprocess
import sys

import pytest
import typer

from sufficit.classifier.digit_net import SMALL_NETS
from sufficit.cli import app
from sufficit.cli.console import FIRST, GROUPS, IN_FILE, MAIN, PANELS, RESPELLED
from sufficit.runs.config import TOML, RunConfig

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_h_prints_the_help_of_every_command(sufficit, command: str) -> None:
    short, long = sufficit(command, "-h"), sufficit(command, "--help")
    assert short.code == 0
    assert short.out == long.out
    assert "-h" in short.out


@pytest.mark.parametrize("command", ["serve", "sanity", "train-lax", "train-twin"])
def test_options_of_a_run_are_those_of_run_config(sufficit, command: str) -> None:
    own = {"precision", "batch_size", "alpha_min"} if command.startswith("train") else set()
    shared = [one for one in COMMANDS[command].params if one.name in RunConfig.__annotations__]
    assert len(shared) > 8
    for option in (one for one in shared if one.name not in own):
        assert option.help == RunConfig.__dataclass_fields__[option.name].metadata["help"]
    run = sufficit(command, "--num-classes", "1", "--out" if command != "serve" else "--host", "x")
    assert run.code == 2
    assert "Invalid value for '--num-classes'" in run.err


def test_methods_and_models_are_listed(sufficit) -> None:
    listed = sufficit("methods").out
    assert max(map(len, listed.splitlines())) <= 80
    assert "\u2026" not in listed, "no name is cut"
    assert "attnlrp 3 pixels" in " ".join(listed.split())
    assert "(transformer models only)" in " ".join(listed.split())
    assert "--methods takes its folder" in " ".join(listed.split())
    assert "as captum:DeepLift (extra captum)" in " ".join(listed.split())
    assert "as zennit:EpsilonPlus (extra lrp)" in " ".join(listed.split())
    assert "kpca-cam" in listed
    assert "control" in listed
    about = json.loads(sufficit("methods", "--json").out)
    assert about["finer-cam"]["options"]["nearest"]["default"] == 3
    assert about["gradcam"]["cost"] == 3
    assert about["rollout"]["nets"] == "transformer"
    one = sufficit("methods", "finer-cam").out
    assert "nearest=3: classes to compare with" in one
    assert "Zhang et al. 2025" in one
    wrong = sufficit("methods", "finercam")
    assert wrong.code == 2
    assert "Did you mean 'finer-cam'" in wrong.err
    named = sufficit("models", "ResNet18").out
    assert "torchvision:resnet18" in named
    assert "timm:resnet18" in named
    assert sufficit("models", "resnet1800").code == 2


def test_the_packages_own_models_are_listed_with_what_they_are_for(sufficit) -> None:
    run = sufficit("models", "sufficit:")
    listed = run.words.partition("Next")[0]
    named = [word for word in listed.split() if word.startswith("sufficit:")]
    assert named == [f"sufficit:{name}" for name in SMALL_NETS]
    assert "sufficit:digits ships with the package: ten digits" in run.words
    assert "sufficit:pets ships with the package: 37 breeds of cats and dogs" in run.words


@pytest.mark.processes
def test_help_does_not_load_torch_and_comes_at_once() -> None:
    code = (
        "import sys, time; sys.argv = ['sufficit', '--help']\n"
        "from sufficit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "assert time.process_time() < 1, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f" {command} " in done.stdout


def test_there_are_all_these_commands() -> None:
    wanted = {"compare", "demo", "evaluate", "explain", "figure", "methods", "models", "sanity"}
    assert wanted | {"serve", "train-lax", "train-twin"} <= set(COMMANDS)


def test_the_commands_are_in_four_groups_and_in_their_order(sufficit) -> None:
    assert [*COMMANDS] == [name for names in GROUPS.values() for name in names]
    printed = sufficit("--help").out
    places = [printed.index(f"─ {group} ─") for group in GROUPS]
    assert len(places) == 4
    assert places == sorted(places)
    for group, names in GROUPS.items():
        assert {COMMANDS[name].rich_help_panel for name in names} == {group}


@pytest.mark.parametrize("words", [("methods",), ("methods", "rise"), ("models", "resnet18")])
def test_a_list_ends_with_the_next_command(sufficit, words: tuple[str, ...]) -> None:
    last = sufficit(*words).out.splitlines()[-1]
    assert last.startswith("Next")
    assert " sufficit " in last


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_every_option_help(sufficit, command: str) -> None:
    printed = sufficit(command, "--help").out
    assert printed.count(f"sufficit {command}") > 1  # the usage, and an example
    for option in COMMANDS[command].params:
        assert option.name == "help" or option.help, (command, option.name)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_in_panels_of_one_order_and_those_that_matter_first(command: str) -> None:
    known = COMMANDS[command]
    options = [one for one in known.get_params(typer.Context(known)) if hasattr(one, "hidden")]
    shown = [one for one in options if not one.hidden and one.param_type_name == "option"]
    panels = [PANELS.index(one.rich_help_panel) for one in shown]
    assert panels == sorted(panels)
    first = [one.name for one in shown if one.rich_help_panel == MAIN]
    assert first == [name for name in FIRST.get(command, ()) if name in first]
    if command == "compare":
        assert first == list(FIRST["compare"])
        assert len(first) == 12
        assert {one.name for one in shown} == {*first, "help"}
    elif {"model", "data"} & {one.name for one in options}:
        assert len(first) in (4, 5)


def test_methods_has_one_name_on_every_command() -> None:
    words = {word for one in COMMANDS.values() for option in one.params for word in option.opts}
    assert "--methods" in words
    assert not {"--method", "--explainers", "--sources"} & words


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_use_options_that_exist(command: str) -> None:
    known = {
        word for option in COMMANDS[command].params for word in option.opts + option.secondary_opts
    }
    examples = (COMMANDS[command].help or "").splitlines()
    used = {w for line in examples if line.strip().startswith("sufficit") for w in line.split()}
    assert {word for word in used if word.startswith("-")} <= known


def test_compare_has_at_most_32_flags_and_help_all_shows_them(sufficit) -> None:
    flags = [one.opts[0] for one in COMMANDS["compare"].params]
    short, whole = (sufficit("compare", word).out for word in ("--help", "--help-all"))
    assert len(flags) == len({*flags}) <= 32
    assert [one for one in flags if f" {one} " not in whole] == []
    hidden = [one for one in flags if f" {one} " not in short]
    assert len(hidden) == len(flags) - 12
    assert "--help-all lists every option" in short


def test_every_option_of_a_run_is_a_flag_or_a_line_of_a_file() -> None:
    flags = {one.opts[0] for one in COMMANDS["compare"].params}
    for name, one in RunConfig.__dataclass_fields__.items():
        flag = f"--{name.replace('_', '-')}"
        assert (flag in flags) != (flag in IN_FILE), name
        assert (one.metadata["shown"] == TOML) == (flag in IN_FILE), name
    for command, known in COMMANDS.items():
        words = {word for option in known.params for word in option.opts + option.secondary_opts}
        assert not words & {*RESPELLED}, command
