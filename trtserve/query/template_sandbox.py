"""Where chat templates run: Jinja's sandbox, with bounds on time and on the size of every value.

A template is a program by an unknown author, and it runs in the process that answers everyone. The sandbox keeps it
from Python's internals, but not from loops without an end and texts of gigabytes.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS: Final = 5.0
"""Longest time that a template may take."""
SIZE: Final = 32 << 20
"""Most characters of a text, or elements of a list, and of the result."""

_LARGEST_NUMBER = 1 << 20
_LARGEST_EXPONENT = 64
_WIDTH = re.compile(r"%[^%a-zA-Z]*(\d{4,}|\*)")
_deadline: ContextVar[float] = ContextVar("deadline")


class BoundedCode(CodeGenerator):
    """Jinja's compiler, which lets loops and joined texts go through the environment."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802 - Jinja's name
        node.iter = _through("bounded", [node.iter], node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.visit(_through("joined", node.nodes, node.lineno), frame)


class Generation(Extension):
    """`{% generation %}` marks the model's turns for training; only its body is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises TemplateError when a template takes too long, or makes too large a value."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
        self.filters = {name: _bounded_filter(each) for name, each in self.filters.items()}

    def render(self, compiled: Any, variables: dict[str, Any]) -> str:
        """Return the result of a compiled template."""
        token = _deadline.set(time.monotonic() + SECONDS)
        try:
            pieces, size = list[str](), 0
            for piece in compiled.generate(variables):
                size += len(piece)
                require_size(size)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _deadline.reset(token)

    def bounded(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop while there is time."""
        for value in values:
            require_time()
            yield value

    def joined(self, *values: Any) -> str:
        """Return the texts of values as one text."""
        texts = [str(value) for value in values]
        require_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        require_time()
        _require_numbers(args, kwargs)
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        require_time()
        if operator == "**" and (abs(left) > _LARGEST_NUMBER or abs(right) > _LARGEST_EXPONENT):
            raise TemplateError(f"{left} ** {right} is too large")
        if operator == "*":
            require_size(max(_length(left) * _number(right), _length(right) * _number(left)))
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise TemplateError("a field is too wide")
        return _sized(super().call_binop(context, operator, left, right))


def require_time() -> None:
    """Raise TemplateError when the template has taken too long."""
    if time.monotonic() > _deadline.get():
        raise TemplateError(f"it takes longer than {SECONDS:g} s")


def require_size(size: int) -> None:
    """Raise TemplateError for a text or list that is too large."""
    if size > SIZE:
        raise TemplateError(f"it makes a value of {size} characters or elements")


def _through(name: str, arguments: list[Any], line: int) -> Any:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None).set_lineno(line)


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        require_time()
        _require_numbers(args, kwargs)
        return _sized(function(*args, **kwargs))

    return bounded


def _require_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse widths and counts, which functions make texts of."""
    if any(isinstance(value, int) and abs(value) > _LARGEST_NUMBER for value in (*args, *kwargs.values())):
        raise TemplateError("a number is too large")
    if args and isinstance(args[0], str) and len(args) > 1 and _WIDTH.search(args[0]):
        raise TemplateError("a field is too wide")


def _sized(value: Any) -> Any:
    require_size(_length(value))
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | bytes) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0
