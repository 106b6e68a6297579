"""`hf-speculate push` and `hf-speculate card`: a head's upload to the Hub, and its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path

from ..commands import say


Folder = Annotated[Path, typer.Argument(help="Folder of a head.")]

# Apps, so that the examples are in the help.
push_app, card_app = typer.Typer(add_completion=False), typer.Typer(add_completion=False)


@push_app.command(
    epilog="""
\b
Examples:
  hf-speculate push runs/my-head
  hf-speculate push runs/my-head --repo-id me/my-head --private
"""
)
def push(
    folder: Folder,
    repo_id: Annotated[
        str | None,
        typer.Option(
            help="Repository: owner/name, or name for one of yours (default: the recipe's, else the folder's name)."
        ),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility of a new repository (default: the owner's setting)."),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message (default: written by hf-speculate).")] = None,
) -> None:
    """Upload a head to the Hub, with its model card.

    Provenance, recipe and training curves are uploaded too. Checkpoints, logs and local paths are not.
    """
    folder = _checked_folder(folder)
    from ..hub import check_upload, push_folder

    if repo_id is not None:
        check_upload(repo_id)
    result = push_folder(folder, repo_id, private=private, commit_message=message)
    say(f"uploaded {folder}: {result.commit_url}")


@card_app.command(
    epilog="""
\b
Examples:
  hf-speculate card runs/my-head
  hf-speculate card runs/my-head --repo-id me/my-head --print
"""
)
def card(
    folder: Folder,
    repo_id: Annotated[
        str | None, typer.Option(help="Repository that the code in the card loads from (default: the folder).")
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Also print the card.")] = False,
) -> None:
    """Regenerate a head's model card. Hand-written cards are kept.

    The card comes from the head's files and its provenance.
    """
    folder = _checked_folder(folder)
    from ..hub import recorded_card

    path = folder / "README.md"
    if not recorded_card(folder, repo_id):
        raise SpeculateError(f"{path} is hand-written and was kept: move it away to generate one.")
    say(path.read_text(encoding="utf-8") if show else f"wrote {path}")


def _checked_folder(folder: Path) -> Path:
    folder = Path(user_path(folder))
    if not folder.is_dir():
        raise SpeculateError(f"{folder} is not a folder of a head.")
    return folder
