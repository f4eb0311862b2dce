"""The paths of Triton's HTTP protocol, and its groups of operations that are closed by default.

Source: Triton's docs/protocol. Anything else that a client asks for below /v2 is refused without asking Triton.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote

from trtserve.gateway.refusals import RefusedError

Group = Literal["shared-memory", "trace", "logging", "model-control"]
GROUPS: Final[tuple[Group, ...]] = ("shared-memory", "trace", "logging", "model-control")
"""Operations that change or reveal more than a client of a model needs."""

_MODEL = r"/v2/models/(?P<model>[^/]{1,1024})"
_VERSION = r"(?:/versions/\d{1,18})?"
_REGION = r"(?:/region/[^/]{1,1024})?"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One kind of path."""

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    operation: str
    """`infer`, `generate` and `generate_stream` run a model, `live` and `ready` ask for health."""
    group: Group | None = None


def _route(operation: str, pattern: str, *methods: str, group: Group | None = None) -> Route:
    return Route(pattern=re.compile(pattern), methods=methods, operation=operation, group=group)


_ROUTES: Final = (
    _route("infer", _MODEL + _VERSION + "/infer", "POST"),
    _route("generate", _MODEL + _VERSION + "/generate", "POST"),
    _route("generate_stream", _MODEL + _VERSION + "/generate_stream", "POST"),
    _route("live", "/v2/health/live", "GET", "HEAD"),
    _route("ready", "/v2/health/ready", "GET", "HEAD"),
    _route("ready", _MODEL + _VERSION + "/ready", "GET", "HEAD"),
    _route("metadata", "/v2/?", "GET"),
    _route("metadata", _MODEL + _VERSION, "GET"),
    _route("metadata", _MODEL + _VERSION + "/(?:config|stats)", "GET"),
    _route("metadata", "/v2/models/stats", "GET"),
    _route("index", "/v2/repository/index", "POST"),
    _route("control", "/v2/repository/models/(?P<model>[^/]{1,1024})/(?:load|unload)", "POST", group="model-control"),
    _route("control", f"/v2/(?:system|cuda)sharedmemory{_REGION}/status", "GET", group="shared-memory"),
    _route("control", f"/v2/(?:system|cuda)sharedmemory{_REGION}/(?:un)?register", "POST", group="shared-memory"),
    _route("control", f"(?:{_MODEL}|/v2)/trace/setting", "GET", "POST", group="trace"),
    _route("control", "/v2/logging", "GET", "POST", group="logging"),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a request asks for."""

    operation: str
    path: str
    """The path as it was sent, for Triton."""
    model: str | None

    @property
    def runs_model(self) -> bool:
        """Whether a model runs."""
        return self.operation in ("infer", "generate", "generate_stream")


def find_target(method: str, path: str, *, open_groups: tuple[str, ...] = ()) -> Target:
    """Return what a request asks for. Raises RefusedError for paths, methods and groups that are not served."""
    for route in _ROUTES:
        found = route.pattern.fullmatch(path)
        if found is None:
            continue
        if route.group is not None and route.group not in open_groups:
            raise RefusedError(403, f"{route.group} is closed on this server: start it with --open-api {route.group}")
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise RefusedError(405, f"{path} expects {allowed}", headers={"allow": allowed})
        model = found.groupdict().get("model")
        return Target(operation=route.operation, path=path, model=None if model is None else unquote(model))
    raise RefusedError(404, "not a path of Triton's HTTP protocol")
