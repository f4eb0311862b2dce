"""The command line of tritonserver: flags and value forms of the containers 24.08 … 26.07, errors as it prints them.

Read from src/command_line_parser.cc of the server repository's release branches r24.08 … r26.07; the error texts were
compared with a real 2.51.0. Stricter than the real one in two points: no abbreviated flags (getopt_long accepts them),
and a flag that may stand once must not stand twice with different values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

# One line per kind of value. ArgBool, ArgInt, ArgFloat, ArgStr, ArgNone and the composed forms of the source.
_INTEGERS = """
exit-timeout-secs log-verbose repository-poll-secs model-load-thread-count model-load-retry-count http-port
http-thread-count grpc-port grpc-infer-allocation-pool-size grpc-keepalive-time grpc-keepalive-timeout
grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
grpc-max-connection-age grpc-max-connection-age-grace sagemaker-port sagemaker-thread-count vertex-ai-port
vertex-ai-thread-count metrics-port pinned-memory-pool-byte-size buffer-manager-thread-count
response-cache-byte-size trace-rate trace-count trace-log-frequency
"""
_BOOLEANS = """
log-info log-warning log-error exit-on-error strict-readiness model-namespacing enable-peer-access allow-http
reuse-http-port allow-grpc reuse-grpc-port grpc-use-ssl grpc-use-ssl-mutual grpc-keepalive-permit-without-calls
allow-sagemaker allow-vertex-ai allow-metrics allow-gpu-metrics allow-cpu-metrics strict-model-config
"""
_TEXTS = """
id log-format log-file model-store model-repository model-control-mode load-model model-config-name http-address
http-header-forward-pattern grpc-address grpc-header-forward-pattern grpc-server-cert grpc-server-key grpc-root-cert
grpc-infer-response-compression-level sagemaker-safe-port-range vertex-ai-default-model metrics-address trace-file
trace-level backend-directory repoagent-directory cache-directory rate-limit http-restricted-api
grpc-restricted-protocol metrics-config trace-config cache-config rate-limit-resource host-policy model-load-gpu-limit
"""
_FLOATS = "metrics-interval-ms min-supported-compute-capability"
_PAIRS = "cuda-memory-pool-byte-size cuda-virtual-address-size"
_NONE = "help disable-auto-complete-config"
# Later flags: name, kind and the first container.
_ADDED = {
    "grpc-max-response-pool-size": ("int", "25.03"),
    "grpc-infer-thread-count": ("int", "25.06"),
    "http-max-input-size": ("int", "25.06"),
    "allow-client-shm": ("bool", "26.05"),
}
_REPEATED = frozenset(
    {"model-repository", "model-store", "load-model", "backend-config", "cuda-memory-pool-byte-size", "host-policy"}
    | {"metrics-config", "trace-config", "cache-config", "rate-limit-resource", "model-load-gpu-limit"}
    | {"cuda-virtual-address-size", "http-restricted-api", "grpc-restricted-protocol"}
)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_TRUE, _FALSE = frozenset({"true", "1", "on"}), frozenset({"false", "0", "off"})


class UsageError(Exception):
    """The message that tritonserver prints below its usage text before it exits with 1."""


@dataclass
class Options:
    """A parsed command line: the last value of each flag, and all values of those that may be repeated."""

    values: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(default_factory=dict)

    def integer(self, name: str, default: int) -> int:
        """Value of an integer flag."""
        return int(self.values.get(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """Value of a boolean flag."""
        return self.values[name].lower() in _TRUE if name in self.values else default

    @property
    def repositories(self) -> list[str]:
        """Model repositories in their order."""
        return self.repeated.get("model-repository", []) + self.repeated.get("model-store", [])

    @property
    def explicit(self) -> bool:
        """Whether only the models named by --load-model are loaded."""
        return self.values.get("model-control-mode") == "explicit"

    def backend_setting(self, backend: str, setting: str) -> str | None:
        """Value of one --backend-config; the last one holds."""
        found = None
        for text in self.repeated.get("backend-config", []):
            name, _, pair = text.partition(",")
            key, _, value = pair.partition("=")
            if (name, key) == (backend, setting):
                found = value
        return found


def _kinds(container: str) -> dict[str, str]:
    kinds = dict.fromkeys(_INTEGERS.split(), "int") | dict.fromkeys(_BOOLEANS.split(), "bool")
    kinds |= dict.fromkeys(_TEXTS.split(), "text") | dict.fromkeys(_FLOATS.split(), "float")
    kinds |= dict.fromkeys(_PAIRS.split(), "pair") | dict.fromkeys(_NONE.split(), "none")
    kinds["backend-config"] = "backend"
    kinds |= {name: kind for name, (kind, since) in _ADDED.items() if container >= since}
    return kinds


def _check_value(name: str, kind: str, text: str) -> None:
    problem = _PROBLEMS[kind](text)
    if problem:
        raise UsageError(f'Bad option: "--{name}".\n{problem}\n')


def _integer_problem(text: str) -> str | None:
    return None if _INTEGER.fullmatch(text) else f"Invalid option value. Got {text}"


def _boolean_problem(text: str) -> str | None:
    return None if text.lower() in _TRUE | _FALSE else f"invalid value for bool option: {text}"


def _float_problem(text: str) -> str | None:
    try:
        float(text)
    except ValueError:
        return f"Invalid option value. Got {text}"
    return None


def _pair_problem(text: str) -> str | None:
    parts = text.split(":")
    if len(parts) != 2:
        return (
            "Cannot parse pair option due to incorrect number of inputs.--<pair option> argument requires format "
            f"<first>:<second>. Found: {text}"
        )
    return next((problem for part in parts if (problem := _integer_problem(part))), None)


def _backend_problem(text: str) -> str | None:
    if re.fullmatch(r"[^,=]*,?[^,=]+=.*", text) is None or "," not in text:
        return f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {text}"
    return None


def _text_problem(text: str) -> str | None:
    return None if text else "(strict double) empty value"


_PROBLEMS: dict[str, Callable[[str], str | None]] = {
    "int": _integer_problem,
    "bool": _boolean_problem,
    "float": _float_problem,
    "pair": _pair_problem,
    "backend": _backend_problem,
    "text": _text_problem,
}


def _split(arguments: list[str], kinds: dict[str, str]) -> list[tuple[str, str]]:
    """(flag, value) in their order; both `--flag=value` and `--flag value` as getopt_long takes them."""
    found: list[tuple[str, str]] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") or argument == "--":
            raise UsageError(f"Unexpected argument: {argument}")
        name, equals, value = argument.removeprefix("--").partition("=")
        kind = kinds.get(name)
        if kind is None:
            raise UsageError(f"tritonserver: unrecognized option '--{name}'")
        if kind == "none":
            if equals:
                raise UsageError(f"tritonserver: option '--{name}' doesn't allow an argument")
        elif not equals:
            following = next(rest, None)
            if following is None:
                raise UsageError(f"tritonserver: option '--{name}' requires an argument")
            value = following
        found.append((name, value))
    return found


def parse(arguments: list[str], container: str) -> Options:
    """Parse and check a command line of one container's tritonserver; UsageError as it would print it."""
    kinds = _kinds(container)
    options = Options()
    for name, value in _split(arguments, kinds):
        if kinds[name] != "none":
            _check_value(name, kinds[name], value)
        if name in _REPEATED:
            options.repeated.setdefault(name, []).append(value)
        elif options.values.get(name, value) != value:
            raise UsageError(f"(strict double) --{name} stands twice with different values")
        options.values[name] = value
    _check_together(options)
    return options


def _check_together(options: Options) -> None:
    mode = options.values.get("model-control-mode", "none")
    if mode not in {"none", "poll", "explicit"}:
        raise UsageError('Bad option: "--model-control-mode".\ninvalid argument for --model-control-mode')
    models = options.repeated.get("load-model", [])
    if models and mode != "explicit":
        raise UsageError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in models and len(models) > 1:
        raise UsageError("Error: Use of '--load-model=*' with another '--load-model' argument.")
    if not options.repositories:
        raise UsageError("(strict double) no --model-repository")
    ports = [
        options.integer(f"{name}-port", port) for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002))
    ]
    if len(set(ports)) < len(ports):
        raise UsageError(f"Error: two services are configured to the same port: {ports}")
    if not all(0 < port < 65536 for port in ports):
        raise UsageError(f"(strict double) port out of range: {ports}")
