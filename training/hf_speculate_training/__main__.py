"""The command as a module, `python -m hf_speculate_training train`, for `accelerate launch -m`."""

import typer

from hf_speculate.errors import SpeculateError

from .run.command import TRAIN_EXAMPLES, train


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("train", epilog=TRAIN_EXAMPLES)(train)


@app.callback()
def _only_names_commands() -> None:
    """Trains heads; `hf-speculate --help` lists the other commands."""


if __name__ == "__main__":
    try:
        app()
    except SpeculateError as error:
        from .run.arguments import process_index

        who = f" (process {process_index()})" if process_index() else ""
        raise SystemExit(f"hf-speculate: error{who}: {error}") from error
