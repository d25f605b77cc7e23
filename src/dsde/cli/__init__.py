"""The command line. Every mistake of a user ends in one sentence and a proper exit code, never in a traceback."""

from __future__ import annotations

import os
import sys

import typer

from dsde.core.errors import DsdeError, InvalidInput

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

# Typer carries its own copy of click in some releases and imports the real one in others; this is the class in both.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `dsde` command."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run a command line; returns the exit code."""
    from dsde.cli.app import app

    try:
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InvalidInput as error:
        return _complain(str(error), USAGE_ERROR)
    except DsdeError as error:
        return _complain(str(error), FAILURE)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED
    except _ClickException as error:
        return _complain(error.format_message(), USAGE_ERROR)  # type: ignore[attr-defined]
    except BrokenPipeError:
        # The reader has gone (`dsde generate ... | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _complain(message: str, code: int) -> int:
    sentence = message.strip().rstrip(".")
    print(f"dsde: {sentence}.", file=sys.stderr)
    return code
