"""NVIDIA's own template folders, filled by the rules of its `fill_template.py` in each release.

`${name}` is replaced by the given value. A placeholder without one would stop Triton or be taken for a value, so it is
refused with file and line.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template

from trtserve.errors import RepositoryError, UsageError
from trtserve.files import read_text, require_own, write_whole, writing
from trtserve.nvidia.releases import NEWEST, normalize_release, order
from trtserve.nvidia.releases.options import TEMPLATE_TOOL, old_option
from trtserve.progress import SILENT, Progress
from trtserve.repository.config import parse_config
from trtserve.repository.profiles import CORE, find_parameter, profile

_CONFIG = "config.pbtxt"
_PLACEHOLDER = re.compile(r"\$\{([^}]*)\}")
# A line up to its comment; "#" within quotes is text.
_CODE = re.compile(r"""(?:[^"'#]|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?)*""")
_BLOCK = re.compile(
    r'^parameters\s*:?\s*\{\s*key\s*:\s*"(?P<key>[^"]*)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"'
    r'(?P<text>\$\{[^}]*\})"\s*,?\s*\}\s*\}\s*\n?',
    re.MULTILINE,
)
# Defaults of the tool, and the first release that has them.
_DEFAULTS = {"max_queue_size": ("0", "0.12"), "max_queue_delay_microseconds": ("0", "0.19")}
_RENAMED = {"visual_model_path": "Release 0.19 calls it multimodal_model_path"}


def fill_templates(
    folder: Path,
    substitutions: str,
    *,
    release: str | None = None,
    drop_unset: bool = False,
    progress: Progress = SILENT,
) -> dict[Path, str]:
    """Return path → filled config.pbtxt of a model's folder, or of every model in a folder of models.

    `substitutions` is `key:value,…` as the tool of `release` (default: the newest) reads it. With `drop_unset` optional
    parameters without a value are left out, which every runtime treats as unset. Raises UsageError for a text that the
    tool cannot read and for a key that no file has (a warning before 0.19) and RepositoryError for unfilled
    placeholders.
    """
    rules = NEWEST if release is None else normalize_release(release)
    values = parse_substitutions(substitutions, rules)
    own = folder if folder.is_file() else folder / _CONFIG
    found = [own] if own.is_file() else sorted(folder.glob(f"*/{_CONFIG}"))
    if not found:
        raise RepositoryError(
            f"Neither {folder} nor a folder in it has a {_CONFIG}.",
            hint="Give a model's folder, or one such as all_models/inflight_batcher_llm.",
        )
    texts = {path: read_text(path, RepositoryError) for path in found}
    _require_known(values, texts.values(), rules, progress)
    _require_values(values, texts, rules)
    defaults = {key: text for key, (text, since) in _DEFAULTS.items() if order(rules) >= order(since)}
    contents = {path: Template(text).safe_substitute({**defaults, **values}) for path, text in texts.items()}
    if drop_unset:
        contents = {path: _without_unset(text, rules) for path, text in contents.items()}
    _require_filled(contents)
    for path, text in contents.items():
        parse_config(text, path)
    top = _top(folder)
    return {path.relative_to(top): text for path, text in contents.items()}


def write_filled(folder: Path, filled: Mapping[Path, str], out: Path | None) -> None:
    """Write the filled templates of `folder`: in place, or into `out`, a new copy of the folder.

    Raises UsageError when `out` is not empty and for a link out of `folder`, ArtifactError or DiskSpaceError when the
    file system refuses.
    """
    top = _top(folder)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already and is not overwritten.", hint="Choose another --out.")
    if out is not None:
        for path in top.rglob("*"):
            require_own(path, top)
    with writing(out or top):
        if out is not None:
            try:
                shutil.copytree(top, out, dirs_exist_ok=True)
            except shutil.Error as error:  # one reason per file, each with two paths
                source, _, reason = error.args[0][0]
                raise RepositoryError(f"{source} cannot be copied to {out}: {reason}.") from error
        for path, text in filled.items():
            write_whole((out or top) / path, text)


def _top(folder: Path) -> Path:
    """Return the folder, also for a template that is named by its file."""
    return folder if folder.is_dir() else folder.parent


def parse_substitutions(text: str, release: str) -> dict[str, str]:
    """Split `key:value,key:value` as the tool of `release` does. Raises UsageError where that fails.

    From 0.16 on a backslash escapes the next character, first when splitting at commas and again at colons: `\\,`
    is a comma in a value, `\\\\:` a colon. Earlier releases cannot have either in a value.
    """
    escapes = order(release) >= order("0.16")
    pairs = _split(text, ",") if escapes else text.split(",")
    values = {}
    for pair in filter(None, pairs):
        parts = _split(pair, ":") if escapes else pair.split(":")
        if len(parts) != 2:
            how = r"a colon in a value is written \\:, a comma \," if escapes else "values hold no comma and no colon"
            raise UsageError(f"{pair!r} is not KEY:VALUE; in release {release} {how}.")
        values[parts[0]] = parts[1]
    return values


def _split(text: str, separator: str) -> list[str]:
    parts, kept = [""], False
    for letter in text:
        if kept or letter not in (separator, "\\"):
            parts[-1] += letter
            kept = False
        elif letter == "\\":
            kept = True
        else:
            parts.append("")
    return parts


def _require_known(values: Mapping[str, str], texts: Iterable[str], release: str, progress: Progress) -> None:
    everything = "\n".join(texts)
    for key in values:
        if key in everything:
            continue
        old = old_option(TEMPLATE_TOOL, key)
        gone = old.answer if old is not None and old.until is not None else _RENAMED.get(key)
        reason = f"The templates have no {key}" + ("" if gone is None else f". {gone.rstrip('.')}")
        if order(release) >= order("0.19"):
            raise UsageError(f"{reason}.", hint="Leave it out; NVIDIA's tool refuses it too from release 0.19 on.")
        progress.warn(f"{reason}. It is ignored, as NVIDIA's tool of release {release} does.")


def _require_values(values: Mapping[str, str], texts: Mapping[Path, str], release: str) -> None:
    """Raise one UsageError for all values that their parameters do not accept."""
    wrong: dict[str, str] = {}
    for path, text in texts.items():
        for block in _BLOCK.finditer(text):
            name = block["text"][2:-1]
            row = find_parameter(path.parent.name, block["key"], release)
            value = values.get(name, "").strip()
            if row is not None and value and not row.values.accepts(value):
                wrong[name] = f"{name}:{value}: expected {row.values.expected}."
    if wrong:
        hint = f"`trtserve help reference/parameters` lists the parameters of release {release}."
        raise UsageError("\n".join(wrong.values()), hint=hint)


def _without_unset(text: str, release: str) -> str:
    """Return `text` without unfilled parameters; those whose key is needed become empty."""
    core = {row.name: row for row in profile(release).models[CORE].parameters}

    def unset(found: re.Match[str]) -> str:
        row = core.get(found["key"])
        if row is not None and row.required:
            return found[0]
        if row is None or row.needs_key:  # NVIDIA's python models fail without some keys
            return found[0].replace(found["text"], "")
        return ""

    return _BLOCK.sub(unset, text)


def _leftovers(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line number, placeholder, and whether it is within quotes."""
    for number, line in enumerate(text.splitlines(), start=1):
        code = _CODE.findall(line)[0]
        for found in _PLACEHOLDER.finditer(code):
            before = re.sub(r"\\.", "", code[: found.start()])
            yield number, found[0], before.count('"') % 2 == 1


def _require_filled(texts: Mapping[Path, str]) -> None:
    """Raise one RepositoryError for all placeholders that are left."""
    left = [(path, *each) for path, text in texts.items() for each in _leftovers(text)]
    if not left:
        return
    lines = "\n".join(f"  {path}, line {number}: {placeholder}" for path, number, placeholder, _ in left)
    names = dict.fromkeys(f"{placeholder[2:-1]}:VALUE" for _, _, placeholder, quoted in left if not quoted)
    optional = any(quoted for *_, quoted in left)
    hints = [
        *([f"Triton cannot read the files without: {','.join(names)}"] if names else []),
        *(["Give the optional ones a value, or leave them out with --drop-unset."] if optional else []),
    ]
    raise RepositoryError(f"These placeholders have no value:\n{lines}", hint="\n".join(hints))
