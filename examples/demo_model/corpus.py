"""The demo model's questions and answers, and what the model sees of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.jsonl")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One answer and the questions that lead to it."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One question as typed and the text that the model must continue it with."""

    question: str
    answer: str

    @property
    def completion(self) -> str:
        """The answer behind a space: question and completion put together read as running text."""
        return f" {self.answer}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """The question as written first, then as people in a hurry type it."""
        bare = self.question.rstrip("?.!")
        return tuple(dict.fromkeys((self.question, bare, self.question.lower(), bare.lower())))


def read_corpus(path: Path = CORPUS) -> list[Entry]:
    """Read one entry per line."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Entry(questions=tuple(row["questions"]), answer=row["answer"]) for row in rows]


def all_pairs(entries: list[Entry]) -> list[Pair]:
    """Every question with its answer."""
    return [Pair(question=question, answer=entry.answer) for entry in entries for question in entry.questions]
