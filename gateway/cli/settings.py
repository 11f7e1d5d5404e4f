"""What the verbs share that read a settings file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.console import Exit, VerbError

if TYPE_CHECKING:
    from gateway.config.load import Loaded

# `readable=False`: `check_file` tells that a file may not be read, with exit code 3. Typer would exit with 2.
ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config", "-c", envvar="GATEWAY_CONFIG", help="The settings file.", readable=False
    ),
]
DEFAULT_FILE: Final = Path("gateway.yaml")


def named(context: typer.Context, file: Path | None, config: Path) -> Path:
    """Return the settings file that a command line names, as an argument or by `--config`.

    Raises:
        VerbError: it names two (exit code 2).
    """
    source = context.get_parameter_source("config")
    said = source is not None and source.name == "COMMANDLINE"
    if file is not None and said and file != config:
        raise VerbError(f"two settings files are named: {file} and {config}", code=Exit.USAGE)
    return file or config


def usable(file: Path) -> Loaded:
    """Return the configuration; print what is wrong with it, and leave when it cannot be used."""
    from gateway.config.load import check_file

    checked = check_file(file)
    for finding in checked.findings:
        sys.stderr.write(finding.excerpt() + "\n")
    if checked.loaded is None:
        raise typer.Exit(Exit.INVALID_CONFIG)
    return checked.loaded
