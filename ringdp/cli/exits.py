"""How a command ends: in one line on stderr where something ended it, and with an exit code.

0    done, and every number is what it must be
1    a rank failed, a number is not what it must be, a schedule does not do what it is for, or what
     was found could not be printed
2    bad input: one line on stderr, and nothing was started
128+ ended by a signal, 130 for Ctrl-C
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import typer

from ringdp.errors import RingdpError, UsageError

# typer carries its own click since 0.20 or so, so the base class is found, not imported.
_ClickException: type[typer.BadParameter] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command; say what ended it, if anything did, and with which code to exit."""
    try:
        code = command() or 0
        if code == 128 + signal.SIGINT:  # what typer makes of Ctrl-C
            return _ended_by(signal.SIGINT)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except _ClickException as error:
        asked = getattr(error, "ctx", None)
        more = f"; see `{asked.command_path} --help`" if asked is not None else ""
        return _refuse(error.format_message().rstrip(".") + more)
    except UsageError as error:
        return _refuse(str(error))
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _ended_by(signal.SIGINT)
    except RingdpError as error:
        signum = getattr(error, "signum", None)
        if signum is not None:
            return _ended_by(signum)
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # a full disk that it is printed to, for one
        print_nowhere()
        if not isinstance(error, BrokenPipeError):  # which is no news: `| head` wants no more
            print(f"ringdp: {error}", file=sys.stderr)
        return 1


def print_nowhere() -> None:
    """From now on: what is left would fail again when the process ends."""
    with suppress(OSError):  # where it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    print("ringdp: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _ended_by(signum: int) -> int:
    print(f"ringdp: ended by {signal.Signals(signum).name}; every rank has ended", file=sys.stderr)
    return 128 + signum
