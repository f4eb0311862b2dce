"""Entry point of the `trtserve` command."""

from __future__ import annotations

import errno
import io
import os
import sys

TYPE_CHECKING = False  # typing, signal and others are imported when Ctrl-C is handled
if TYPE_CHECKING:
    from typing import NoReturn

_SIGNALLED = 128
# Objects that are made before the collector looks at them: more than the start of a command makes.
_ALLOCATIONS = 100_000
# The code of MemoryLimitError: no module can be asked when this is needed.
_MEMORY = 14
_NO_MEMORY = b"error: Out of memory.\nnext:  Free some, or raise the limit of this shell (ulimit -v).\n"


class _Messages(io.TextIOWrapper):
    """The stream of messages and logs. What a full disk does not take is lost: no work ends because of a message."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            return _lost(error, len(text))

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            _lost(error, 0)


def _lost(error: OSError, length: int) -> int:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise error
    return length


def _end_at_once(number: int, _: object) -> NoReturn:
    os._exit(_SIGNALLED + number)


if __name__ == "__main__" or sys.argv[0].endswith("/trtserve"):
    # Until the command line takes over, Ctrl-C would print a traceback. The module `signal` takes too long to import.
    _signal = __import__("_signal")
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end_at_once)


def main() -> None:
    """Run the command line and exit with its code."""
    import gc
    import signal

    # Modules, classes and options live to the end: looking for garbage among them takes a tenth of a short command.
    gc.set_threshold(_ALLOCATIONS)
    # Of transformers only tokenizers are used; its advice to install PyTorch would mislead.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    prepare_streams()
    if isinstance(sys.stderr, io.TextIOWrapper):
        buffer = io.BufferedWriter(io.FileIO(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = _Messages(buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    try:
        from trtserve.cli import run
        from trtserve.process.signals import raise_interrupt

        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end_at_once):
            signal.signal(signal.SIGINT, raise_interrupt)
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the command line itself is being imported
        code = 130
    except MemoryError:
        _end_without_memory()
    except (ImportError, OSError) as error:  # a library cannot be mapped, or a folder of modules cannot be read
        if "failed to map segment" in str(error) or getattr(error, "errno", None) == errno.ENOMEM:
            _end_without_memory()
        raise
    if code > _SIGNALLED:  # one more signal on the way out changes nothing
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at the end, Python would print a traceback
    gc.freeze()  # the process gives all of its memory back at once: nothing is looked for in it before
    sys.exit(code)


def prepare_streams() -> None:
    """Let nothing that is read or printed fail because of the stream that it comes from or goes to."""
    from pathlib import Path

    if sys.stdin is None:  # our parent closed it
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - as long as the process
    for name in ("stdout", "stderr"):
        # A stream that our parent closed is None here, which nothing that prints expects.
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # it stays open when another stream writes to its descriptor
        # A letter that a terminal or a pipe cannot take is not a reason to fail.
        if getattr(sys, name).errors == "strict":
            getattr(sys, name).reconfigure(errors="replace")


def _end_without_memory() -> NoReturn:
    """Where not even an error can be explained: at once, for a library that lacked memory may wait for its threads."""
    os.write(2, _NO_MEMORY)
    os._exit(_MEMORY)


if __name__ == "__main__":
    main()
