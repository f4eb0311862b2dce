"""The process that renders chat templates: Jinja's sandbox, with bounds on time and memory that the kernel keeps.

A template is a program by an unknown author. The sandbox keeps it from Python's internals, but not from loops without
an end and texts of gigabytes, and one call of a filter can take hours. So it runs in a process that timers interrupt:
the first one between two steps of Python, the others wherever it is, which ends the process.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import resource
import signal
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SLOWEST = 10  # times as long as alone
_COMPILING = 0.1  # seconds of computing, once for a template
_LATEST = 1.5  # times as long, in one call of which Python sees no end


class _Late(BaseException):
    """The time is over. No Exception, which Jinja would look at."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's turns for training; only its body is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def main(memory: int) -> None:
    """Answer requests from stdin until it ends, in at most `memory` bytes."""
    for timer in (signal.SIGVTALRM, signal.SIGALRM):  # end the process, whatever it does
        signal.signal(timer, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, _late)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        full = False
        try:
            answer = _answer(**json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
        except _Late:
            answer = {"late": True}
        except MemoryError:
            answer, full = {"error": f"it needs more than {memory >> 20} MiB of memory"}, True
        _set_timers(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if full:
            return  # the next process begins with all its memory


def _late(*_: object) -> None:
    raise _Late


def _answer(template: str, variables: dict[str, Any], seconds: float, most: int) -> dict[str, Any]:
    try:
        _set_timers(max(seconds, _COMPILING))
        compiled = _compiled(template)
        _set_timers(seconds)
        text = io.StringIO()
        for piece in compiled.generate(variables):
            if text.tell() + len(piece) > most:
                return {"error": f"it makes more than {most} characters"}
            text.write(piece)
        text.getvalue().encode()  # half a character has no tokens
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template is third-party code
        return {"error": str(error)[:1000] or type(error).__name__}
    return {"text": text.getvalue()}


def _set_timers(seconds: float) -> None:
    """Allow this many seconds of computing; on a machine with other work they take longer, but not for ever."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds * _LATEST)
    signal.setitimer(signal.ITIMER_REAL, seconds * _SLOWEST)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own filter escapes HTML; models are trained without that
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
