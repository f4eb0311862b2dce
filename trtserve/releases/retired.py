"""Options that old guides use: which tool had them, up to which release, and what replaces them here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtserve.releases.retired_tables import TABLES, TOOLS_OF

TEMPLATE_TOOL = "fill_template.py"
# Tools that lead from a model to a repository: guides give their options in any order.
_CHAIN = {"trtllm-build": "build", "build.py": "build", TEMPLATE_TOOL: "repo", "convert_checkpoint.py": "convert"}


@dataclass(frozen=True, kw_only=True)
class Retired:
    """One option of an upstream tool.

    `last` is the last release that had it, None when the tool still has it. `instead` says what to do here.
    """

    tool: str
    option: str
    last: str | None
    instead: str

    @property
    def answer(self) -> str:
        """What to say to somebody who typed it."""
        kind = "a key" if self.tool == TEMPLATE_TOOL and not self.option.startswith("-") else "an option"
        if self.last is None:
            return f"{self.option} is {kind} of {self.tool}. {self.instead}"
        return f"{self.option} was {kind} of {self.tool} until TensorRT-LLM {self.last}. {self.instead}"


def _rows() -> Iterator[Retired]:
    for tool, table in TABLES.items():
        for line in table.strip().splitlines():
            option, last, instead = line.split(maxsplit=2)
            yield Retired(tool=tool, option=_written(tool, option), last=None if last == "-" else last, instead=instead)


_LAUNCHER_HYPHENS = ("log_file", "no_mpi")


def _written(tool: str, option: str) -> str:
    """The option as its tool spells it; what fill_template.py takes are keys."""
    if tool == TEMPLATE_TOOL and len(option) > 1:
        return option
    hyphens = tool in ("benchmark_core_model.py", "end_to_end_test.py", "inflight_batcher_llm_client.py", "genai-perf")
    if hyphens or option in _LAUNCHER_HYPHENS:
        option = option.replace("_", "-")
    return f"-{option}" if len(option) == 1 else f"--{option}"


def _key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


RETIRED = {(row.tool, _key(row.option)): row for row in _rows()}
"""(tool, option without dashes) → its entry."""


def retired(tool: str, option: str) -> Retired | None:
    """The entry for an option of an upstream tool, in any spelling (`--max_output_len`, `max-output-len`)."""
    return RETIRED.get((tool, _key(option)))


def retired_in(command: str, option: str) -> Retired | None:
    """The entry for an option that somebody gave to `trtserve <command>`, whichever upstream tool it is of."""
    found = (retired(tool, option) for tool in TOOLS_OF.get(command, tuple(TABLES)))
    return next((entry for entry in found if entry is not None), None)


def retired_elsewhere(option: str) -> str | None:
    """The answer to an option that no release has any more, of a tool whose work another command does.

    What a tool still has is left out: of another command it may mean something else.
    """
    for tool, command in _CHAIN.items():
        found = retired(tool, option)
        if found is not None and found.last is not None:
            return f"{found.answer} `trtserve {command}` does that tool's work."
    return None
