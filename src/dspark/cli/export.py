"""`dspark export`: a drafter in a layout that other engines read.

The directory is printed on standard output, what the copy lacks on standard error. What the
layouts are is told in `dspark.interop.export`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import ui

EPILOG = """Examples:

  dspark export runs/mine --out mine-deepspec --with-embeddings default

  dspark export dspark --out for-vllm --layout speculators
"""


class Layout(StrEnum):
    deepspec = "deepspec"
    speculators = "speculators"


def export(
    drafter: Annotated[
        str,
        typer.Argument(
            help="Directory with a drafter's checkpoint, or the name of one that ships for the"
            " default model.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory to write; new or empty.", show_default=False),
    ],
    layout: Annotated[
        Layout,
        typer.Option(
            help="'deepspec': flat, read by most engines; 'speculators': vLLM's, which knows a"
            " draft vocabulary."
        ),
    ] = Layout.deepspec,
    with_embeddings: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Store this target's embedding and output head, too, for loaders that want them.",
            show_default="none",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into DIR even if it is not empty.")
    ] = False,
) -> None:
    """Write a copy of a drafter for other engines; an option that they lack is refused by name."""
    from dspark.drafters.trained import shipped
    from dspark.interop import export as exporting
    from dspark.models.loading import DEFAULT

    directory = shipped(DEFAULT).get(drafter) or Path(drafter).expanduser()
    notes = exporting.export(
        directory,
        out.expanduser(),
        layout=layout.value,
        with_embeddings=with_embeddings,
        force=force,
    )
    for note in notes:
        ui.note(f"note: {note}")
    print(out)
