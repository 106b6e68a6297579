"""What others wrote reaches a terminal as text: no markup is read in it, no control character is obeyed."""

from __future__ import annotations

import io
import logging
import random
import re
from importlib.metadata import EntryPoint

import pytest
import typer
from rich.panel import Panel
from rich.text import Text
from typer.testing import CliRunner

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.messages import get_logger, message, printable
from hf_speculate_tools import cli
from hf_speculate_tools.commands import Grid, by_depth, progress, say, say_json
from hf_speculate_tools.commands.reporting import LiteralConsole, show


OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # styles and movements, as rich writes them
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

PIECES = (
    *("[red]", "[/]", "[/red]", "[bold", "[link=file:///x]", "[@click=quit]", "[d]", "[k]", "\\[", "\\", ":smile:"),
    *("\x1b]0;PWNED\x07", "\x1b[2J", "\x1b[31m", "\x9b31m", "\r", "\x00", "\x08", "\x7f", "\x0c", "\u202e", "\u2066"),
    *("\udcff", "\u2028", "head", "a b", "é", "模型", "%s", "{}", "{x}", "-", "--x"),
)


def names(seed: int, count: int, without: str = "") -> list[str]:
    choose = random.Random(seed)
    pieces = [piece for piece in PIECES if not set(piece) & set(without)]
    return ["".join(choose.choices(pieces, k=choose.randrange(1, 6))) for _ in range(count)]


def shown_on_console(renderable) -> str:
    """The characters that arrive at a terminal, without the styles of the console's own."""
    file = io.StringIO()
    LiteralConsole(file=file, force_terminal=True, width=400, color_system="truecolor").print(renderable)
    return OURS.sub("", file.getvalue())


def check_shown(text: str, name: str) -> None:
    assert not CONTROLS.search(text), (name, text)
    assert printable(name) in text, (name, text)


def check_everywhere(name: str, capsys, caplog) -> None:
    """All ways on which a text comes to the terminal."""
    grid = Grid(title=name, columns=["a", name], rows=[[name, "1"]], words={"a"}, caption=name)
    table = shown_on_console(grid.rich())
    check_shown(table, name)
    assert table.count(printable(name)) == 4, (name, table)
    check_shown(shown_on_console(f"<{name}>"), name)
    for ready_made in (Text(f"<{name}>"), Panel(Text(name), title=Text(name))):  # rich itself takes some characters out
        assert not CONTROLS.search(shown_on_console(ready_made))
    for is_error in (False, True):
        say(f"<{name}>", err=is_error)
    out, err = capsys.readouterr()
    check_shown(out, name)
    check_shown(err, name)
    say_json({name: name})
    assert re.fullmatch(r"[ -~]*\n", capsys.readouterr().out)
    for error in (SpeculateError(f"<{name}>"), CheckpointError(f"<{name}>")):
        check_shown(str(error), name)
    get_logger("hf_speculate.tests").warning(f"<{name}>")
    check_shown(caplog.records[-1].getMessage(), name)
    caplog.clear()


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_names_are_shown_as_they_are(capsys, caplog, count):
    for name in names(0, count):
        check_everywhere(name, capsys, caplog)


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_command_lines_are_quoted_as_they_are(count):
    """Nothing raw, whatever a file, a command, an option or a value is called."""
    forms = (
        "{}",
        "push {}",
        "drafters {}",
        "drafters --x{}",
        "generate x -s {}",
        "bench {}",
        "generate -n {}",
        "card {}",
    )
    for number, name in enumerate(names(1, count, without="\0")):
        arguments = [part.replace("{}", name) for part in forms[number % len(forms)].split()]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code in (1, 2), (arguments, result.output)
        assert isinstance(result.exception, SystemExit), (arguments, result.exception)
        assert not CONTROLS.search(result.output), arguments  # no terminal, so no styles


def test_progress_prints_no_markup_or_control_characters_of_others(monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setenv("COLUMNS", "300")
    for name in names(2, 20):
        with progress("[/]", 2) as advance:
            advance(name)
    assert not CONTROLS.search(OURS.sub("", file.getvalue()).replace("\r", ""))
    assert "[/]: " in file.getvalue()


def test_help_shows_brackets_of_other_packages_as_text(monkeypatch):
    words = "[d] [/] [/red] [bold]x 'hf-speculate[train]' \x1b[31m"

    def greet(name: str = typer.Option("x", help=words)) -> None:
        pass

    greet.__doc__ = words

    class Point(EntryPoint):
        def load(self):
            return greet

    points = {"greet": Point("greet", "other:greet", cli.COMMANDS_GROUP)}
    monkeypatch.setattr("hf_speculate_tools.cli.groups.MainGroup.installed", lambda self: points)
    result = CliRunner().invoke(cli.app, ["greet", "--help"])
    assert result.exit_code == 0, result.exception
    assert " ".join(result.stdout.split()).count(printable(words)) == 2


@pytest.mark.rest  # imports everything
def test_help_of_every_command_shows_its_brackets(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")

    def check(command, path: list[str]) -> None:
        texts = [command.help, command.epilog, *(getattr(each, "help", None) for each in command.params)]
        shown = " ".join(CliRunner().invoke(cli.app, [*path, "--help"]).stdout.replace("│", " ").split())
        for text in filter(None, texts):
            for bracket in re.findall(r"\\?\[[^\]\n]*\]", text):
                assert bracket.removeprefix("\\") in shown, (path, bracket)

    root = typer.main.get_command(cli.app)
    context = typer.Context(root)
    check(root, [])
    for name in root.list_commands(context):
        check(root.get_command(context, name), [name])


def test_a_command_whose_packages_are_not_installed(monkeypatch):
    """The true sentence, in its help and for any options."""

    class Point(EntryPoint):
        def load(self):
            raise SpeculateError("training needs datasets: pip install 'hf-speculate[train]'")

    points = {"train": Point("train", "other:train", cli.COMMANDS_GROUP)}
    monkeypatch.setattr("hf_speculate_tools.cli.groups.MainGroup.installed", lambda self: points)
    shown = " ".join(CliRunner().invoke(cli.app, ["train", "--help"]).stdout.split())
    assert "training needs datasets: pip install 'hf-speculate[train]'" in shown
    assert "broken" not in shown
    for arguments in ([], ["--target", "x", "--data", "y"], ["--config=x", "y"]):
        result = CliRunner().invoke(cli.app, ["train", *arguments])
        assert result.exit_code == 1
        assert result.stderr == "hf-speculate: error: training needs datasets: pip install 'hf-speculate[train]'\n"


def test_messages_have_no_secrets():
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
    for text in (f"bad key Bearer {token}", f"https://me:{token[4:]}@host/x refuses"):
        assert token[4:] not in str(SpeculateError(text))
        assert token[4:] not in message(text)
    result = CliRunner().invoke(cli.app, ["drafters", "x", token])
    assert "unexpected extra argument" in result.stderr
    assert token not in result.stderr


def test_loggers_are_the_ones_of_the_package(caplog):
    logger = get_logger("hf_speculate.tests")
    assert logger is get_logger("hf_speculate.tests") is logging.getLogger("hf_speculate.tests")
    logger.warning("%s of %d", "\x1b", 2)
    assert caplog.records[-1].getMessage() == "\\x1b of 2"


@pytest.mark.parametrize(("width", "is_narrow"), [(120, False), (64, True)])
def test_tables_of_narrow_terminals_break_words_and_no_figures(monkeypatch, capsys, width, is_narrow):
    monkeypatch.setattr("hf_speculate_tools.commands.reporting.console", lambda: LiteralConsole(width=width))
    rows = [{"name": "draft_model:model=some-model", **{f"speed {each}": 1234.5 for each in range(6)}}]
    columns = {"name": "{name}", **{f"speed\n{each}": f"{{speed {each}:.1f}}" for each in range(6)}}
    show([Grid.of("", rows, columns)], markdown=False)
    printed = capsys.readouterr().out
    assert printed.count("1234.5") == 6
    assert ("┃" in printed) is not is_narrow
    assert max(map(len, printed.splitlines())) <= width


@pytest.mark.parametrize(
    ("rates", "shown"),
    [({}, "no drafts"), ({1: 0.7, 2: 0.45}, "1:0.70 2:0.45"), ({1: 0.7, 2: 0.0, 3: 0.0}, "1:0.70 2:0.00")],
)
def test_acceptance_by_depth_ends_where_nothing_was_accepted(rates, shown):
    assert by_depth(rates) == shown
