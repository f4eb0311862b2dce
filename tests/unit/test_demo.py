"""The shipped demo model: a complete, small Hugging Face folder whose tokenizer and ids are as Llama clients expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "trtserve" / "demo"
CORPUS = ROOT / "examples" / "demo_model" / "corpus.jsonl"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 8_000_000
LONGEST_ANSWER = 50  # tokens, EOS included: what the examples of Triton's tutorials ask for


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return content


def read_corpus() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO, legacy=False, padding_side="left")


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_folder_is_complete_and_small() -> None:
    assert {path.name for path in DEMO.iterdir()} == FILES
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_heads_and_vocabulary_divide_among_ranks(tensor_parallel: int) -> None:
    config = read_json("config.json")
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    assert [config[size] % tensor_parallel for size in sizes] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ids_in_configs_are_those_of_llama(name: str) -> None:
    config = read_json(name)
    assert [config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 2, 2]


def test_ids_of_tokenizer_are_those_of_llama(tokenizer: Any) -> None:
    ids = [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ids == [0, 1, 2, 2]
    assert len(tokenizer) == read_json("config.json")["vocab_size"]


def test_a_prompt_opens_with_bos_and_has_no_eos(tokenizer: Any) -> None:
    assert tokenizer("What is ML?")["input_ids"] == [1, *plain_ids(tokenizer, "What is ML?")]


@pytest.mark.parametrize(
    "text",
    [
        "What is ML?",
        " leading and trailing ",
        "two  spaces\n\tand a tab",
        "Grüße, 世界 🙂",
        "e\u0301 \u200d \x00",
        "don't .",
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(plain_ids(tokenizer, text)) == text


def test_no_spelling_leads_to_two_answers() -> None:
    answers: dict[str, str] = {}
    for entry in read_corpus():
        for question in entry["questions"]:
            assert answers.setdefault(question.rstrip("?.!").lower(), entry["answer"]) == entry["answer"]


def test_question_and_answer_meet_at_a_token_boundary(tokenizer: Any) -> None:
    for entry in read_corpus():
        answer = plain_ids(tokenizer, f" {entry['answer']}")
        for question in entry["questions"]:
            assert plain_ids(tokenizer, f"{question} {entry['answer']}") == plain_ids(tokenizer, question) + answer


def test_answers_fit_the_usual_limit(tokenizer: Any) -> None:
    assert max(len(plain_ids(tokenizer, f" {entry['answer']}")) + 1 for entry in read_corpus()) <= LONGEST_ANSWER
