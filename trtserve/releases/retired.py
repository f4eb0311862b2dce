"""Options that old guides use: which tool had them, up to which release, and what replaces them here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retired:
    """One option of an upstream tool.

    `last` is the last release that had it, None when the tool still has it. `instead` is what to do here, a sentence.
    """

    tool: str
    option: str
    last: str | None
    instead: str

    @property
    def answer(self) -> str:
        """What to say to somebody who typed it."""
        if self.last is None:
            return f"{self.option} belongs to {self.tool}. {self.instead}"
        return f"{self.option} of {self.tool} is gone since TensorRT-LLM {self.last}. {self.instead}"


_TABLES: dict[str, str] = {
    "trtllm-build": """
max_output_len              0.11  Give --max_seq_len: the tokens of prompt and answer together.
tp_size                     0.11  Parallelism belongs to the checkpoint: convert with --tp-size.
pp_size                     0.11  Parallelism belongs to the checkpoint: convert with --pp-size.
use_custom_all_reduce       0.11  Leave it out: the all-reduce strategy is chosen when the engine runs.
multi_block_mode            0.11  Set the parameter multi_block_mode of the repository.
context_fmha_fp32_acc       0.11  Set the parameter enable_context_fmha_fp32_acc of the repository.
""",
}


def _rows() -> dict[tuple[str, str], Retired]:
    found = {}
    for tool, table in _TABLES.items():
        for line in table.strip().splitlines():
            option, last, instead = line.split(maxsplit=2)
            found[tool, option] = Retired(
                tool=tool, option=f"--{option}", last=None if last == "-" else last, instead=instead
            )
    return found


RETIRED = _rows()


def retired(tool: str, option: str) -> Retired | None:
    """The entry for an option of an upstream tool, in any spelling (`--max_output_len`, `max-output-len`)."""
    return RETIRED.get((tool, option.lstrip("-").replace("-", "_")))
