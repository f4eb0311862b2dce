"""What commands declare: options of the specs that they take, options that several share, completion of values.

A command takes specs as parameters: `def convert(model: …, spec: ConvertSpec, out: OutOption)`. Each stands for the
options of its fields (`specs/options.py`); what the command line gives comes back as a spec that has been checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from trtserve.errors import UsageError
from trtserve.specs.options import Option, Spec, options_of


def models(incomplete: str) -> list[str]:
    """Return the names of imported models and of artefacts in the store; folders for a word that begins a path."""
    from trtserve.artifacts import Adapter, Checkpoint, Engine, Model, ModelRepository
    from trtserve.store import Store

    if _is_path(incomplete):
        return paths(incomplete)
    store = Store()
    kinds = (Model, Checkpoint, Engine, ModelRepository, Adapter)
    return sorted(
        {record.name for record in store.recorded()} | {name for kind in kinds for name in store.by_name(kind)}
    )


def sources(incomplete: str) -> list[str]:
    """Return what can be imported: demo, aliases, folders for a word that begins a path, and names of the store."""
    from trtserve.store.sources import ALIASES, DEMO

    return paths(incomplete) if _is_path(incomplete) else sorted({DEMO, *ALIASES, *models(incomplete)})


def imports(incomplete: str) -> list[str]:
    from trtserve.store import Store

    return sorted(record.name for record in Store().recorded())


def servers(incomplete: str) -> list[str]:
    """Return the names of recorded servers."""
    from trtserve.server.state import recorded_servers
    from trtserve.store import Store

    return sorted(server.name for server in recorded_servers(Store()))


def gpus(incomplete: str) -> list[str]:
    """Return the names of GPUs that `plan --gpu` knows."""
    from trtserve.pipeline.gpu_fit import GPUS

    return sorted(GPUS)


def paths(incomplete: str) -> list[str]:
    """Return the files and folders that the word may be completed to; folders end with a slash."""
    return sorted(_paths(incomplete))


def _is_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "/" in text


def _paths(incomplete: str) -> Iterator[str]:
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head + slash or ".").expanduser()
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(start) and (start.startswith(".") or not path.name.startswith(".")):
            yield f"{head}{slash}{path.name}{'/' if path.is_dir() else ''}"


JSON_HELP = "Print the result as JSON."
DRY_RUN_HELP = "Print what would be done, with every external command."
QUIET_HELP = "No progress on stderr."
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of the result.",
        show_default="a folder of the store",
        autocompletion=paths,
    ),
]
VERIFY_HELP = "Compare what is made with the original, as `check` does, and stop if it differs."
VerifyOption = Annotated[bool, typer.Option("--verify", help=VERIFY_HELP)]
ServerArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Name of the server; default: the only one.", autocompletion=servers),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="NAME", help="Same as NAME, as `query` and `bench` take it.", autocompletion=servers
    ),
]


def one_name(name: str | None, server: str | None) -> str | None:
    """Return the server that was named as argument or with --server. Raises UsageError for two different ones."""
    if name is not None and server not in (None, name):
        raise UsageError(f"{name} and --server {server} name two servers; give one.")
    return name or server


class Fields:
    """Which fields of a spec are options of a command: `Annotated[BuildSpec, Fields("runtime")]`.

    Without names all of them, except for those of `without`. `defaults` replaces defaults, `texts` the help and what it
    says of the default, `panel` the heading.
    """

    def __init__(
        self,
        *only: str,
        without: tuple[str, ...] = (),
        defaults: Mapping[str, Any] | None = None,
        texts: Mapping[str, tuple[str, str]] | None = None,
        panel: str | None = None,
    ) -> None:
        self._only, self._without, self._panel = only, without, panel
        self._defaults, self._texts = defaults or {}, texts or {}

    def of(self, spec: type[Spec]) -> dict[str, Option]:
        """Return field → option of `spec`."""
        options = options_of(spec)
        names = [name for name in self._only or options if name not in self._without]
        return {name: self._changed(options[name]) for name in names}

    def _changed(self, option: Option) -> Option:
        declared = option.declared if self._panel is None else replace(option.declared, panel=self._panel, common=False)
        if option.name in self._texts:
            text, unset = self._texts[option.name]
            declared = replace(declared, help=text, unset=unset)
        if option.name in self._defaults:
            declared = replace(declared, unset=None)
        return replace(option, default=self._defaults.get(option.name, option.default), declared=declared)


def with_spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is a spec by the options of its fields.

    A field that several specs share is one option. A parameter of the command itself takes the place of the field of
    its name, which then keeps its default. Of two options with the same flag, the first one has it.
    """
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())
    specs = {each.name: spec for each in own if (spec := _spec_of(each.annotation)) is not None}
    if not specs:
        return command
    kept = [name for name in signature.parameters if name not in specs]
    fields = {
        parameter: {name: option for name, option in which.of(spec).items() if name not in kept}
        for parameter, (spec, which) in specs.items()
    }

    @functools.wraps(command)
    def body(**given: Any) -> None:
        made = {
            parameter: spec(**{name: option.value_of(given[name]) for name, option in fields[parameter].items()})
            for parameter, (spec, _) in specs.items()
        }
        command(**{name: given[name] for name in kept}, **made)

    expanded = list(_expanded(own, fields))
    body.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
    body.__annotations__ = {each.name: each.annotation for each in expanded}
    return body


def _spec_of(annotation: Any) -> tuple[type[Spec], Fields] | None:
    kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(kind, type) and issubclass(kind, Spec)):
        return None
    return kind, next((each for each in metadata if isinstance(each, Fields)), Fields())


def _expanded(own: list[inspect.Parameter], fields: Mapping[str, Mapping[str, Option]]) -> Iterator[inspect.Parameter]:
    flags = {flag for each in own for flag in getattr(_declared(each), "param_decls", None) or ()}
    names: set[str] = set()
    for each in own:
        if each.name not in fields:
            yield each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        for name, option in fields[each.name].items():
            if name not in names:
                yield _parameter(option, flags)
                names.add(name)


def _declared(parameter: inspect.Parameter) -> Any:
    return next(iter(getattr(parameter.annotation, "__metadata__", ())), None)


def _parameter(option: Option, taken: set[str]) -> inspect.Parameter:
    """Return the parameter from which Typer makes `option`; flags in `taken` are left out, and its own are added."""
    declared = option.declared
    # A switch that can only be turned off begins with the slash.
    flags = [flag for flag in declared.flags or (option.flag,) if not taken & set(flag.strip("/").split("/"))]
    taken.update(part for flag in flags for part in flag.strip("/").split("/"))
    shown = declared.unset if declared.unset is not None else option.default is not None
    info = typer.Option(
        *(f" {flag}" if flag.startswith("/") else flag for flag in flags),
        help=declared.help,
        rich_help_panel=None if declared.common else declared.panel,
        metavar=option.metavar,
        envvar=declared.variable,
        show_default=shown,
        autocompletion=declared.extra.get("completes") or (paths if option.type is Path else None),
    )
    kind: Any = list[str] if option.repeatable else option.type
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if option.repeatable else option.default,
        annotation=Annotated[kind | None, info],
    )
