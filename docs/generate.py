"""Fill in the generated parts of the pages in docs/, write the schema of setup files and a page for each command.

`--check` compares instead.

A page marks such a part with `<!-- generated: NAME -->` and `<!-- end of generated part -->`; NAME is a key of PARTS.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trtserve
from trtserve import errors
from trtserve.bench.targets import RATES, TIMES
from trtserve.cli.app import command_tree
from trtserve.cli.parser import help_sections, split_help
from trtserve.client.spec import REQUEST_OPTIONS, tensors_of
from trtserve.nvidia.releases import LAST_WITH_ENGINES, RELEASES, Row, load_table, order
from trtserve.nvidia.releases.containers import (
    Container,
    all_containers,
    containers_of,
    driver_of,
    driver_versions,
    kernels,
)
from trtserve.nvidia.releases.converters import converters
from trtserve.nvidia.releases.loaders import evidence, takes_stages
from trtserve.pipeline.setup_file import (
    AIMS,
    BENCHMARK_KEYS,
    SCALARS,
    SEARCH_KEYS,
    SERVED_MODEL,
    benchmark_options,
    cluster_options,
    model_options,
    range_options,
    server_options,
)
from trtserve.repository.check import RULES
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    MODELS,
    ConfigField,
    OpenvinoSupport,
    Parameter,
    added_parameters,
    parameters_of,
    profile,
)
from trtserve.repository.profiles import config_fields as template_fields
from trtserve.repository.tables import releases_text
from trtserve.specs.bench import RANDOM
from trtserve.specs.cluster import OPTIONS, ClusterSpec
from trtserve.specs.options import Option, options_of

DOCS = Path(__file__).parent
COMMANDS = DOCS / "reference" / "cli"
END = "<!-- end of generated part -->"


def commands() -> str:
    """Return the help of `trtserve` itself, whose list of commands leads to a page for each."""
    return "\n\n".join(_reference(command_tree(), "trtserve", None)).partition("\n\n")[2]


def command_pages() -> dict[Path, str]:
    """Return a page for each command: what `--help` prints, as Markdown."""
    tree = command_tree()
    root = tree.context_class(tree, info_name="trtserve")
    return {
        COMMANDS / f"{name}.md": "\n\n".join(_reference(command, f"trtserve {name}", root)) + "\n"
        for name, command in tree.commands.items()
    }


def _reference(node: Any, path: str, parent: Any) -> Iterator[str]:
    context = node.context_class(node, info_name=path.rpartition(" ")[2], parent=parent)
    description, examples = split_help(node.help)
    depth = path.count(" ")
    yield f"{'#' * max(1, depth)} `{path}`"
    yield description
    if examples:
        yield _console(examples)
    yield "**Usage**\n\n" + _console([f"{path} {' '.join(node.collect_usage_pieces(context))}"])
    below = getattr(node, "commands", {})
    if below:
        places = {name: f"#{path.replace(' ', '-')}-{name}" if depth else f"cli/{name}.md" for name in below}
        names = (f"- [`{path} {name}`]({place}): {_summary(below[name])}" for name, place in places.items())
        yield "**Commands**\n\n" + "\n".join(names)
    for title, records in help_sections(node, context, commands=False):
        yield f"**{title}**\n\n" + "\n".join(f"- `{names}`: {text}" for names, text in records)
    if node.epilog:
        linked = r"[\1](../../\1.md)" if depth else r"[\1](../\1.md)"
        yield re.sub(r"(?<=Guide: )`trtserve help ([a-z/-]+?)(\.md)?`", linked, inspect.cleandoc(node.epilog))
    for name, command in below.items() if depth else ():
        yield from _reference(command, f"{path} {name}", context)


def _summary(node: Any) -> str:
    return inspect.cleandoc(node.help).partition("\n\n")[0].replace("\n", " ")


def _console(lines: Iterable[str]) -> str:
    return "```console\n" + "\n".join(f"$ {line.strip()}" for line in lines) + "\n```"


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [(code, name if name == "–" else f"`{name}`", meaning) for code, name, meaning in errors.exit_codes()]
    return _table(("Code", "Class", "When"), rows)


def rules() -> str:
    """Return the rules of `trtserve check REPOSITORY`."""
    rows = []
    for rule in RULES:
        needs = ", ".join(filter(None, [rule.needs if rule.needs != "files" else "", "start" if rule.stops else ""]))
        rows.append((f"`{rule.name}`", rule.severity, rule.about, needs or "–"))
    return _table(("Rule", "Kind", "What must hold", "Needs"), rows)


def query_inputs() -> str:
    """Return the flags of `query` that fill a tensor, and the tensor's name in each model."""
    models = profile().models
    declared = {name: {tensor.name for tensor in models[name].inputs} for name in (CORE, ENSEMBLE, BLS)}
    heads = ("Flag", *(f"`{name}`" for name in declared), "What it does")
    return _table(heads, [_query_input_row(option, declared) for option in REQUEST_OPTIONS.values()])


def _query_input_row(option: Option, declared: Mapping[str, set[str]]) -> tuple[str, ...]:
    tensors = ([f"`{name}`" for name in tensors_of(option.name) if name in known] for known in declared.values())
    return (_spellings(*option.flags), *(", ".join(names) or "–" for names in tensors), option.declared.help)


def query_flags() -> str:
    """Return all other flags of `query`."""
    command: Any = command_tree()
    others = [each for each in command.commands["query"].params if each.name not in REQUEST_OPTIONS]
    rows = [
        (_spellings(*each.opts, *each.secondary_opts), each.help) for each in others if each.param_type_name == "option"
    ]
    return _table(("Flag", "What it does"), rows)


def parameters() -> str:
    """Return a table for each Triton model, with the parameters that a supported release has."""
    tables = {model: (*parameters_of(model), *added_parameters(model)) for model in MODELS}
    return "\n\n".join(_model_parameters(model, rows) for model, rows in tables.items() if rows)


def _model_parameters(model: str, rows: tuple[Parameter, ...]) -> str:
    heads = ("Parameter", "Releases", "Kind", "Values", "Default", "Meaning", "On openvino")
    return f"## {model}\n\n" + _table(heads, map(_parameter_row, rows))


def _parameter_row(row: Parameter) -> tuple[str, ...]:
    unset = row.default or ("required" if row.required else f"`{row.unset}`" if row.unset else "unset")
    expected = row.values.expected.removeprefix("one of ")
    return (
        f"`{row.name}`",
        releases_text(row),
        row.values.kind,
        expected,
        unset,
        row.meaning,
        _on_openvino(row.support),
    )


def _on_openvino(support: OpenvinoSupport) -> str:
    but = f"; {support.differs}" if support.differs else ""
    if support.kind != "refused":
        return f"{support.kind}: {support.why}" if support.why else f"{support.kind}{but}"
    values = f"refused for {', '.join(support.refused_values)}" if support.refused_values else "refused"
    exception = f", except {', '.join(support.accepted_values)}" if support.accepted_values else ""
    return f"{values}{exception}: {support.why}{but}"


def config_fields() -> str:
    """Return the settings of config.pbtxt that are fields, not parameters."""
    return _table(("Field", "Values", "Meaning", "Set with"), map(_field_row, template_fields()))


def _field_row(field: ConfigField) -> tuple[str, ...]:
    kinds = {"int": "a whole number", "bool": "true or false"}
    values = ", ".join(f"TYPE_{each}" for each in field.types) or kinds[field.kind]
    return (f"`{field.name}`", values, field.meaning, f"`{field.flag or f'--set {field.name}=VALUE'}`")


def containers() -> str:
    """Return the versions in each of NVIDIA's images."""
    heads = ("Container", "TensorRT-LLM", "TensorRT", "CUDA", "Python", "PyTorch")
    rows = [
        (each.tag, each.tensorrt_llm, each.tensorrt, each.cuda, each.python, each.pytorch) for each in all_containers()
    ]
    return _table(heads, rows)


def engine_groups() -> str:
    """Return the containers that can share an engine, a row for each group."""
    groups: list[list[Container]] = []
    for each in all_containers():
        if groups and (groups[-1][0].release, groups[-1][0].tensorrt) == (each.release, each.tensorrt):
            groups[-1].append(each)
        else:
            groups.append([each])
    rows = [
        (
            ", ".join(each.tag for each in group),
            group[0].release,
            group[0].tensorrt,
            f"`tensorrt_llm.{'_tensorrt_engine.' if order(group[0].release) >= (1, 0) else ''}LLM`",
        )
        for group in groups
    ]
    return _table(("Containers", "Release", "TensorRT", "Python class that builds engines"), rows)


@dataclass(frozen=True, kw_only=True)
class SourceBuild(Row):
    """How the container of a release is built from source."""

    repository: str  # on GitHub, cloned at the release's tag
    commands: Sequence[str]  # run in the clone
    note: str


def source_build(release: str) -> SourceBuild:
    builds = (SourceBuild(**row) for row in load_table("containers")["source_builds"])
    return next(build for build in builds if build.within(release))


def source_builds() -> str:
    """Return how to build an image from source: a section for the releases that are built alike."""
    alike: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for release in RELEASES:
        build = source_build(release)
        alike.setdefault((build.repository, tuple(build.commands), build.note), []).append(release)
    sections, bases = [], load_table("containers")["base_images"]
    for (repository, commands, note), releases in alike.items():
        rows = [
            (release, f"v{containers_of(release)[0].tensorrt_llm}", bases.get(release, "–")) for release in releases
        ]
        lines = "\n".join(f"$ {command}" for command in commands)
        sections.append(
            f"### Releases {releases[0]} – {releases[-1]}\n\nRepository `{repository}`. {note}\n\n"
            f"{_table(('Release', 'Tag', 'Base images'), rows)}\n\n"
            f"```console\n$ git clone -b <tag> https://github.com/{repository}.git\n"
            f"$ cd {repository.partition('/')[2]}\n{lines}\n```"
        )
    return "\n\n".join(sections)


def drivers() -> str:
    """Return the driver that each CUDA comes with, and the containers with that CUDA."""
    rows = []
    for cuda, driver in driver_versions().items():
        tags = [each.tag for each in all_containers() if driver_of(each) == driver]
        rows.append((cuda, driver, f"{tags[0]} – {tags[-1]}"))
    return _table(("CUDA", "Driver", "Containers"), rows)


def gpu_kernels() -> str:
    """Return the GPUs that TensorRT-LLM has kernels for, with the first and last release."""
    heads = ("Compute capability", "Architecture", "Examples", "From", "Until")
    return _table(
        heads, [(row.capability, row.architecture, row.examples, row.since, row.until or "–") for row in kernels()]
    )


_MARKS = {"run": "run", "text": "read", "inferred": "inferred"}


def loaders() -> str:
    """Return what the loader of each release accepts of each family, and how that was verified."""
    last = RELEASES.index(LAST_WITH_ENGINES) + 1
    releases = RELEASES[:last]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in load_table("loaders")["families"].values():
        architectures = family["architectures"]
        for architecture in architectures:
            since = converters()[architecture].since if architecture in converters() else RELEASES[0]
            cells = tuple(_loader_cell(architecture, each) if order(each) >= order(since) else "–" for each in releases)
            rows.setdefault((architectures[0], *cells), []).append(architecture.removesuffix("ForCausalLM"))
    return _table(("Family", *releases), ((", ".join(names), *key[1:]) for key, names in rows.items()))


def _loader_cell(architecture: str, release: str) -> str:
    stages = "tp, pp" if takes_stages(architecture, release) else "tp"
    return f"{stages} · {_MARKS[evidence(architecture, release).kind]}"


def decisions() -> str:
    """Return the list of decisions, by their titles."""
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    titles = (page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages)
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))


def library() -> str:
    """Return the reference of `import trtserve`, from the docstrings of its public names."""
    return "\n\n".join(_documented(name, getattr(trtserve, name), "###") for name in sorted(trtserve.__all__))


def _documented(name: str, found: Any, heading: str) -> str:
    parts = [f"{heading} `{name}`"]
    if inspect.isclass(found):
        parts += [_prose(found)]
        if "Args:" in (found.__init__.__doc__ or ""):
            parts += [_call(name, found), _prose(found.__init__)]
        own = {
            each: getattr(found, each)
            for kind in reversed(found.__mro__)
            for each in vars(kind)
            if kind.__module__.startswith("trtserve.") and not each.startswith("_") and callable(getattr(found, each))
        }
        parts += [_documented(f"{name}.{each}", method, heading + "#") for each, method in own.items()]
        properties = {each: value for each, value in vars(found).items() if isinstance(value, property)}
        parts += [f"- `.{each}`: {_prose(value)}" for each, value in properties.items()]
    else:
        parts += [_call(name, found), _prose(found)]
    return "\n\n".join(parts)


def _call(name: str, found: Any) -> str:
    names = []
    for each in inspect.signature(found).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        default = "" if each.default is each.empty else "=…" if each.name == "progress" else f"={each.default!r}"
        names.append(f"{'**' if each.kind is each.VAR_KEYWORD else ''}{each.name}{default}")
    prefix = "await " if inspect.iscoroutinefunction(found) else ""
    return f"```python\n{prefix}{name}({', '.join(each for each in names if each != 'self')})\n```"


def _prose(found: Any) -> str:
    """Return a docstring as Markdown, with its sections as lists."""
    lines: list[str] = []
    for line in (inspect.getdoc(found) or "").splitlines():
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*): (.+)", line)
        if section := re.fullmatch(r"(Args|Raises|Yields):", line):
            lines += [f"**{section[1].replace('Args', 'Arguments')}**", ""]
        elif entry:
            lines.append(f"- {_spellings(*entry[1].split(', '))}: {entry[2]}")
        elif line.startswith(" ") and lines[-1]:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exit-codes": exit_codes,
    "rules": rules,
    "query-inputs": query_inputs,
    "query-flags": query_flags,
    "parameters": parameters,
    "config-fields": config_fields,
    "containers": containers,
    "engine-groups": engine_groups,
    "source-builds": source_builds,
    "drivers": drivers,
    "gpu-kernels": gpu_kernels,
    "loaders": loaders,
    "decisions": decisions,
    "library": library,
}


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def _spellings(*flags: str) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _replace(path: Path, text: str | None) -> None:
    """Write a page, or remove that of a command which is gone."""
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


_TYPES = {int: "integer", float: "number", bool: "boolean"}
_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": ["string", "number"], "description": "At most this time, such as 300ms or 2s."}
_RATE = {"type": "number", "exclusiveMinimum": 0, "description": "At least this."}
_BENCHMARK_TYPES: Mapping[str, Any] = {
    "traffic": {"enum": list(RANDOM)},
    "limits": {
        "type": "object",
        "properties": {**dict.fromkeys(TIMES, _TIME), **dict.fromkeys(RATES, _RATE)},
        "additionalProperties": False,
    },
}


def setup_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of setup files, from the same tables that their reader uses."""
    texts = {name: {"type": "string", "minLength": 1, "description": text} for name, text in SCALARS.items()}
    served = {"type": "string", "description": SERVED_MODEL}
    clusters = {
        kind: {
            "type": "object",
            "description": options_of(ClusterSpec)[kind].declared.help,
            "properties": _properties(cluster_options(kind)),
            "additionalProperties": False,
        }
        for kind in OPTIONS
    }
    measured = {
        name: {"description": text, **_BENCHMARK_TYPES.get(name, _TEXT)} for name, text in BENCHMARK_KEYS.items()
    }
    ranges = {
        name: {"type": "array", "minItems": 1, "items": _single(option)} for name, option in range_options().items()
    }
    searched = {
        "goal": {"description": SEARCH_KEYS["goal"], **_TEXT},
        "max": {"description": SEARCH_KEYS["max"], "enum": list(AIMS)},
        "ranges": {
            "type": "object",
            "description": SEARCH_KEYS["ranges"],
            "properties": ranges,
            "additionalProperties": False,
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Setup file of trtserve",
        "type": "object",
        "properties": {
            "models": _named("Models, by name.", {**texts, **_properties(model_options())}, "source"),
            "servers": _named(
                "Servers, by name.", {"model": served, **clusters, **_properties(server_options())}, "model"
            ),
            "benchmarks": _named("Benchmarks, by name.", {**measured, **_properties(benchmark_options())}, "server"),
            "tune": _named(
                "Searches, by name.", {**measured, **searched, **_properties(benchmark_options())}, "server"
            ),
        },
        "required": ["models"],
        "additionalProperties": False,
    }


def _named(description: str, properties: Mapping[str, Any], required: str) -> dict[str, Any]:
    entry = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return {"type": "object", "description": description, "additionalProperties": entry}


def _properties(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: _property(option) for name, option in options.items()}


def _property(option: Option) -> dict[str, Any]:
    value = _value(option)
    if option.container == "tuple":
        value = {"type": "array", "items": value}
    elif option.container == "dict":
        value = {"type": "object", "additionalProperties": value}
    if option.nullable:
        value = {"anyOf": [value, {"type": "null"}]}
    return {"description": option.declared.help, **value}


def _single(option: Option) -> dict[str, Any]:
    value = _value(option)
    return {"anyOf": [value, {"type": "null"}]} if option.nullable else value


def _value(option: Option) -> dict[str, Any]:
    if option.choices:
        return {"enum": list(option.choices)}
    if option.type not in _TYPES:
        # A version such as 25.12 needs no quotes: the file is read as it is written.
        return {"type": ["string", "number", "boolean"]}
    declared = option.declared
    bounds = {"minimum": declared.minimum, "exclusiveMinimum": declared.above, "maximum": option.maximum}
    return {"type": _TYPES[option.type], **{key: value for key, value in bounds.items() if value is not None}}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` name the stale ones and return 1."""
    check = "--check" in arguments
    stale = []
    unused = set(PARTS)
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")

        def part(match: re.Match[str]) -> str:
            unused.discard(match[1])
            return f"<!-- generated: {match[1]} -->\n\n{PARTS[match[1]]()}\n\n{END}"

        new = re.sub(rf"<!-- generated: ([a-z-]+) -->.*?{END}", part, text, flags=re.DOTALL)
        if new != text:
            stale.append(str(page.relative_to(DOCS.parent)))
            if not check:
                page.write_text(new, encoding="utf-8")
    schema = json.dumps(setup_schema(), indent=2, ensure_ascii=False) + "\n"
    whole = {DOCS / "reference" / "setup-file.schema.json": schema, **command_pages()}
    for path in sorted({*whole, *COMMANDS.glob("*.md")}):
        text = whole.get(path)
        if text == (path.read_text(encoding="utf-8") if path.exists() else None):
            continue
        stale.append(str(path.relative_to(DOCS.parent)))
        if not check:
            _replace(path, text)
    if unused:
        sys.stderr.write(f"No page has these generated parts: {', '.join(sorted(unused))}.\n")
        return 1
    if stale and check:
        sys.stderr.write(f"Stale: {', '.join(stale)}; run `make docs`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
