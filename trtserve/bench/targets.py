"""Find what is measured: a model of a Triton server, a server with OpenAI's API, or an engine in this process."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from trtserve.bench.messages import takes_text
from trtserve.bench.protocols.base import OpenAi, Target
from trtserve.bench.requests import Limits
from trtserve.client.base import (
    CORE_MODEL,
    Client,
    Endpoint,
    ModelDescription,
)
from trtserve.client.query import describe_model
from trtserve.client.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.files import parse_json
from trtserve.specs import BenchSpec


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured, and its tokenizer."""

    target: Target | None
    """None if the server did not answer; then the core model is assumed."""
    name: str
    takes_text: bool
    """Whether prompts are text; a core model gets token ids."""
    tokenizer: TokenizerFiles | None
    """None where no tokenizer is needed or none was found."""
    adds_special_tokens: bool
    """Whether the server encodes prompts with special tokens."""
    limits: Limits | None = None
    """Limits of an engine in this process; those of a server are in its repository."""

    @property
    def core_model(self) -> str:
        """Name of the core model, whose engine sets the limits."""
        return CORE_MODEL if self.takes_text or self.target is None else self.target.model.name

    def require_tokenizer(self, reason: str) -> TokenizerFiles:
        """Return the tokenizer. If there is none, raise a UsageError that begins with `reason`."""
        if self.tokenizer is None:
            raise UsageError(
                f"{reason}, and the server's tokenizer is not available here.",
                hint="Give the tokenizer's folder with --tokenizer; `trtserve import ID --download-only` fetches one.",
            )
        return self.tokenizer


def find_measured(spec: BenchSpec, endpoint: Endpoint, client: Client, *, offline: bool) -> Measured:
    """Return what `spec` measures. Raises ServerUnreachableError, RequestError and UsageError."""
    if spec.openai is not None and spec.in_process is not None:
        raise UsageError("--openai measures a server and --in-process an engine without one; give one of them.")
    if spec.openai is not None:
        return _openai_server(spec, endpoint, spec.openai)
    if spec.in_process is not None:
        return _engine(spec, endpoint, spec.in_process)
    try:
        model = describe_model(client, spec.model or endpoint.model)
    except ServerUnreachableError:
        if not offline or spec.model not in (None, CORE_MODEL):
            raise
        return Measured(
            target=None, name=CORE_MODEL, takes_text=False, tokenizer=None, adds_special_tokens=False, limits=None
        )
    if spec.protocol == "http" and endpoint.tls is not None:
        raise UsageError("Triton has no encryption over HTTP; leave --ssl out or use --protocol grpc.")
    text = takes_text(model)
    return Measured(
        target=Target(
            protocol=spec.protocol, endpoint=endpoint, model=model, streams=spec.streaming and model.decoupled
        ),
        name=model.name,
        takes_text=text,
        tokenizer=_tokenizer(spec, endpoint, client, needed=text),
        adds_special_tokens=not text or server_adds_special_tokens(client),
    )


def _tokenizer(spec: BenchSpec, endpoint: Endpoint, client: Client, *, needed: bool) -> TokenizerFiles | None:
    if not needed and spec.dataset is None and spec.ignore_eos:
        return None
    tokenizer = find_tokenizer(spec.tokenizer, endpoint, client)
    if tokenizer is None and endpoint.repository is not None:  # the folder from which the LLM API loads
        folder = endpoint.repository / CORE_MODEL / "1" / "model"
        tokenizer = TokenizerFiles(folder) if any(folder.glob("tokenizer*")) else None
    return tokenizer


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or brackets around something else than an IPv6 address
        return False


def _openai_server(spec: BenchSpec, endpoint: Endpoint, url: str) -> Measured:
    url = url.rstrip("/")
    if not _is_address(url):
        raise UsageError(f"--openai is {url!r}; expected an address such as http://localhost:8000/v1.")
    name = spec.model or _first_model(url, endpoint.connect_timeout)
    # No Triton model stands behind it; prompts are texts.
    model = ModelDescription(name=name, decoupled=True, max_batch_size=0, inputs={}, outputs={})
    return Measured(
        target=Target(
            protocol="openai",
            endpoint=endpoint,
            model=model,
            streams=spec.streaming,
            openai=OpenAi(url=url, model=name, chat=spec.chat, ignore_eos=spec.ignore_eos),
        ),
        name=name,
        takes_text=True,
        tokenizer=_given_tokenizer(spec, endpoint),
        adds_special_tokens=True,
    )


def _given_tokenizer(spec: BenchSpec, endpoint: Endpoint) -> TokenizerFiles | None:
    if spec.tokenizer is not None and not spec.tokenizer.is_dir():
        raise UsageError(f"--tokenizer is {spec.tokenizer}; expected the folder of a tokenizer.")
    served = None if endpoint.repository is None else endpoint.repository / "preprocessing" / "1" / "tokenizer"
    folder = spec.tokenizer or served
    return TokenizerFiles(folder) if folder is not None and folder.is_dir() else None


def _first_model(url: str, timeout: float) -> str:
    """Return the name of the only model of a server with OpenAI's API."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if "OPENAI_API_KEY" in os.environ else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/models", headers=headers), timeout=timeout) as page:
            names = [entry["id"] for entry in parse_json(page.read())["data"]]
    except urllib.error.HTTPError as error:
        raise RequestError(f"{url}/models answers with status {error.code}.", hint="Name the model: --model.") from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise ServerUnreachableError(f"No server with OpenAI's API answers at {url}: {reason}.") from None
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{url}/models does not list models.", hint="Name the model: --model.") from None
    if len(names) != 1:
        raise UsageError(f"Choose the model with --model; {url} has {', '.join(names) or 'none'}.")
    return str(names[0])


def _engine(spec: BenchSpec, endpoint: Endpoint, name: str) -> Measured:
    from trtserve.server.local_engine import find_local_engine

    if spec.workers > 1:
        raise UsageError("--in-process runs the engine in this process; leave --workers out.")
    engine = find_local_engine(name, spec.tokenizer)
    pretrained, build = engine.config.get("pretrained_config", {}), engine.config.get("build_config", {})
    return Measured(
        target=Target(
            protocol="in-process",
            endpoint=endpoint,
            model=engine.describe(),
            streams=spec.streaming,
            engine=Path(engine.path),
            tokenizer=engine.tokenizer,
        ),
        name=CORE_MODEL,
        takes_text=False,
        tokenizer=None if engine.tokenizer is None else TokenizerFiles(engine.tokenizer),
        adds_special_tokens=True,
        limits=Limits(
            vocab_size=pretrained.get("vocab_size"),
            max_input_len=build.get("max_input_len"),
            max_seq_len=build.get("max_seq_len"),
        ),
    )
