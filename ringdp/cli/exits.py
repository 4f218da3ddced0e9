"""How a command ends: its exit code, and one line on stderr if something stopped it.

0     done, and every number is what it must be
1     a rank failed, a number is wrong, a schedule breaks its contract, or output failed
2     bad input; nothing was started
128+  ended by a signal; 130 for Ctrl-C
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import typer

from ringdp.cli.launch import SignalError
from ringdp.errors import RingdpError, UsageError

# typer has bundled its own click since about 0.20, so its base class cannot be imported by name.
_ClickException: type[typer.BadParameter] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command, print what stopped it, if anything did, and return the exit code."""
    try:
        code = command() or 0
        if code == 128 + signal.SIGINT:  # typer's code for Ctrl-C
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except _ClickException as error:
        asked = getattr(error, "ctx", None)
        more = f"; see `{asked.command_path} --help`" if asked is not None else ""
        return _refuse(error.format_message().rstrip(".") + more)
    except UsageError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("ringdp: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except SignalError as error:
        print(error, file=sys.stderr)
        return 128 + error.signum
    except RingdpError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # stdout on a full disk, for example
        print_nowhere()
        if not isinstance(error, BrokenPipeError):  # a closed pipe is normal, as in `| head`
            print(f"ringdp: {error}", file=sys.stderr)
        return 1


def print_nowhere() -> None:
    """Discard further output: flushing the rest at exit would fail again."""
    with suppress(OSError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    print("ringdp: " + " ".join(message.split()), file=sys.stderr)
    return 2
