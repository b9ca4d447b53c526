"""The entry point of the console script: prints errors with a hint, and sets the exit status."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from autopar.cli.app import cli
from autopar.errors import AutoparError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv``, and exit with its status."""
    # graphs and prices live until the command ends, so there is little garbage: fewer collections save a tenth of the time
    gc.set_threshold(1_000_000, 20, 100)
    try:
        status = cli.main(argv, prog_name="autopar", standalone_mode=False)
        sys.stdout.flush()
    except AutoparError as error:
        status = error.exit_status
        _print_error(error.message, error.hint)
        for change in getattr(error, "changes", ()):
            click.echo(f"{click.style('or:', fg='cyan', bold=True)} {change.text}", err=True, color=_color())
    except click.exceptions.NoArgsIsHelpError as error:
        status = error.exit_code
        click.echo(error.format_message(), err=True)
    except click.ClickException as error:
        status = error.exit_code
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "autopar"
        _print_error(error.format_message(), f"`{path} --help` lists arguments and options")
    except (KeyboardInterrupt, click.Abort):
        status = 130  # 128 + SIGINT, the shells' convention
        click.echo("interrupted", err=True)
    except BrokenPipeError:
        # the reader of the pipe is gone; without this, Python would report that again when it flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        if os.environ.get("AUTOPAR_TRACEBACK"):
            raise
        status = 1
        where = f"{error.filename}: " if error.filename is not None else ""  # a full disk has no name
        _print_error(f"{where}{error.strerror or error}", "give a file or folder that can be read or written")
    except Exception as error:
        if os.environ.get("AUTOPAR_TRACEBACK"):
            raise
        status = 1
        _print_error(
            f"{type(error).__name__}: {error} ({_where(error)})",
            "this is a bug in autopar; AUTOPAR_TRACEBACK=1 shows the traceback",
        )
    gc.freeze()  # skip the collection at exit, which takes another tenth
    sys.exit(status if isinstance(status, int) else 0)


def _print_error(message: str, hint: str | None) -> None:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True, color=_color())
    if hint:
        click.echo(f"{click.style('hint:', fg='cyan', bold=True)} {hint}", err=True, color=_color())


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


def _where(error: BaseException) -> str:
    frame = error.__traceback__
    assert frame is not None
    while frame.tb_next is not None:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
