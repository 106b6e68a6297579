"""Commands made of a settings class, whose fields are the options: each is declared, documented and set once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from .options import JsonOnly, Markdown, Out, Plot, Quick, Threads
from .reporting import prepare, report
from .tables import Grid


_SHOWN = {"threads": Threads, "quick": Quick, "json_only": JsonOnly, "markdown": Markdown, "plot": Plot, "out": Out}


def add_command(
    app: typer.Typer,
    name: str,
    settings: type[Any],
    measure: Callable[[Any], dict[str, Any]],
    tables: Callable[[dict[str, Any]], Sequence[Grid | str]],
    examples: str = "",
    draw: Callable[[dict[str, Any], Path], Sequence[Path]] | None = None,
) -> None:
    """Adds a command that measures and reports.

    Args:
        app: application that gets the command.
        name: name of the command.
        settings: a dataclass; fields whose annotation holds a `typer.Option` or `typer.Argument` are options. If it has
            `QUICK` (name of a field -> value), `--quick` sets these where the user gave no value.
        measure: function from the settings to a JSON-serialisable result; its docstring begins with the command's help.
        tables: function from the result to its tables.
        examples: end of the help text.
        draw: function from the result and a folder to the pictures written there, for `--plot`.
    """
    quick_values: dict[str, Any] = getattr(settings, "QUICK", {})
    hidden = {"quick"} if not quick_values else set()
    hidden |= {"plot"} if draw is None else set()
    shown = {key: hint for key, hint in _SHOWN.items() if key not in hidden}

    def command(_context: typer.Context, **given: Any) -> None:
        how = {key: given.pop(key, None) for key in _SHOWN}
        if how["quick"]:
            given |= {key: value for key, value in quick_values.items() if not _was_given(_context, key)}
        chosen = settings(**given)  # it may refuse, which needs no torch
        prepare(how["threads"])
        result = measure(chosen)
        parts = list(tables(result))
        try:
            if draw is not None and how["plot"] is not None:
                parts += [f"wrote {path}" for path in draw(result, how["plot"])]
        finally:  # a picture that fails must not cost minutes of measuring
            report(result, parts, json_only=how["json_only"], markdown=how["markdown"], out=how["out"])

    context = _parameter("_context", typer.Context, inspect.Parameter.empty)
    output = [_parameter(key, hint, False if get_args(hint)[0] is bool else None) for key, hint in shown.items()]
    _sign(command, [context, *_parameters(settings), *output])
    about = (inspect.getdoc(measure) or "").partition("\n\n")[0]
    app.command(name, help=about, epilog=examples)(command)


def command_of(settings: type[Any], run: Callable[[Any], None]) -> Callable[..., None]:
    """A function for `typer.Typer.command` whose parameters are the options of a settings class; see `add_command`."""

    def command(**given: Any) -> None:
        run(settings(**given))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    _sign(command, _parameters(settings))
    return command


def _parameters(settings: type[Any]) -> list[inspect.Parameter]:
    """The options of a settings class."""
    kinds = (typer.models.OptionInfo, typer.models.ArgumentInfo)
    hints = get_type_hints(settings, include_extras=True)
    options = [field for field in fields(settings) if any(isinstance(a, kinds) for a in get_args(hints[field.name]))]
    return [_parameter(field.name, hints[field.name], _default(field)) for field in options]


def _sign(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Gives a function the parameters that typer reads."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _default(field: Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
