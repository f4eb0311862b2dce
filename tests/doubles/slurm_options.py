"""Options of sbatch and srun that this project may use, with their forms (Slurm's manual; pyxis for containers)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COUNT = r"[1-9]\d*"
_TIME = r"(\d+-)?\d+(:\d\d){0,2}|\d+"
_WORD = r"[^\s]+"
# Long name → (one-letter name or "", form of the value; "" for a switch).
_COMMON = {
    "account": ("A", _WORD),
    "partition": ("p", _WORD),
    "time": ("t", _TIME),
    "job-name": ("J", _WORD),
    "nodes": ("N", _COUNT),
    "ntasks": ("n", _COUNT),
    "ntasks-per-node": ("", _COUNT),
    "cpus-per-task": ("c", _COUNT),
    "gpus-per-node": ("", r"(\w+:)?\d+"),
    "gpus-per-task": ("", r"(\w+:)?\d+"),
    "gres": ("", r"gpu(:\w+)?(:\d+)?"),
    "mem": ("", r"\d+[KMGT]?"),
    "output": ("o", _WORD),
    "error": ("e", _WORD),
    "chdir": ("D", _WORD),
    "export": ("", _WORD),
    "exclusive": ("", ""),
    "nodelist": ("w", _WORD),
    "constraint": ("C", _WORD),
    "reservation": ("", _WORD),
    "qos": ("q", _WORD),
    "container-image": ("", _WORD),
    "container-mounts": ("", _WORD),
    "container-workdir": ("", _WORD),
    "container-name": ("", _WORD),
    "container-env": ("", _WORD),
}
SBATCH = _COMMON | {"parsable": ("", ""), "dependency": ("d", _WORD), "signal": ("", _WORD), "requeue": ("", "")}
SRUN = _COMMON | {
    "mpi": ("", "pmix|pmi2|none|pmix_v[345]"),
    "label": ("l", ""),
    "kill-on-bad-exit": ("K", r"[01]?"),
    "cpu-bind": ("", "none|cores|sockets"),
    "overlap": ("", ""),
    "unbuffered": ("u", ""),
    "no-container-mount-home": ("", ""),
    "container-remap-root": ("", ""),
    "jobid": ("", r"\d+"),
}


class OptionError(Exception):
    """The message of sbatch or srun before it exits with 255 (unknown option) or 1 (bad value)."""


@dataclass
class Parsed:
    """Options, and the words after them."""

    values: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def count(self, name: str, default: int) -> int:
        """Value of an option that counts something."""
        return int(self.values.get(name, default))


def _name(argument: str, table: dict[str, tuple[str, str]], tool: str) -> tuple[str, str | None]:
    if argument.startswith("--"):
        name, equals, value = argument.removeprefix("--").partition("=")
        if name not in table:
            raise OptionError(f"{tool}: unrecognized option '--{name}'")
        return name, value if equals else None
    for name, (letter, _) in table.items():
        if letter and argument[1] == letter:
            return name, argument[2:] or None
    raise OptionError(f"{tool}: invalid option -- '{argument[1:2]}'")


def parse(arguments: list[str], table: dict[str, tuple[str, str]], tool: str) -> Parsed:
    """Parse options up to the first other word."""
    parsed = Parsed()
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            parsed.rest = [argument, *rest]
            break
        name, value = _name(argument, table, tool)
        form = table[name][1]
        if form == "":
            if value is not None:
                raise OptionError(f"{tool}: option '--{name}' doesn't allow an argument")
            value = "1"
        elif value is None and name != "kill-on-bad-exit":
            value = next(rest, None)
            if value is None:
                raise OptionError(f"{tool}: option '--{name}' requires an argument")
        if form and re.fullmatch(form, value or "") is None:
            raise OptionError(f"{tool}: error: Invalid value '{value}' for --{name}")
        parsed.values[name] = value or "1"
    return parsed


def script_options(text: str) -> list[str]:
    """The arguments of the #SBATCH lines before the first command; OptionError for lines that Slurm would not read."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("#!"):
        raise OptionError(
            "sbatch: error: This does not look like a batch script. The first line must start with #! followed by the "
            "path to an interpreter."
        )
    found: list[str] = []
    begun = False
    for line in lines[1:]:
        if line.startswith("#SBATCH"):
            if begun:
                raise OptionError(f"(strict double) Slurm ignores this line, which comes after a command: {line}")
            found += _words(line.removeprefix("#SBATCH"))
        elif re.match(r"#\s*SBATCH|\s+#SBATCH", line):
            raise OptionError(f"(strict double) Slurm takes this line for a comment: {line}")
        elif line.strip() and not line.startswith("#"):
            begun = True
    return found


def _words(text: str) -> list[str]:
    import shlex

    words = shlex.split(text, comments=True)
    if not words:
        raise OptionError("(strict double) #SBATCH without an option")
    return words
