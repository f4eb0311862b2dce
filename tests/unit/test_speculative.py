"""Speculative decoding with models that are functions: the result equals that of the target alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.programs.bls import inputs as bls_inputs
from trtserve.programs.bls import inputs as settings
from trtserve.programs.bls import speculative
from trtserve.programs.bls import texts as stop_words
from trtserve.programs.shared.inner_models import InnerModelError
from trtserve.programs.shared.lora_names import LoraNames

Next = Callable[[Sequence[int]], int]
END = 0
PROMPT = [5, 6, 7]


def target_token(tokens: Sequence[int]) -> int:
    return (3 * tokens[-1] + tokens[-2] + len(tokens)) % 11 + 1


def often_right(tokens: Sequence[int]) -> int:
    return target_token(tokens) if len(tokens) % 3 else 1


def plain(count: int, token: Next = target_token, end: int = END) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        if (new := token(tokens)) == end:
            break
        tokens.append(new)
    return tokens[len(PROMPT) :]


class Models:
    """Target and draft behind `call_streamed`: each takes ids, and answers as the core model does."""

    def __init__(self, draft: Next, target: Next = target_token) -> None:
        self.next = {"draft": draft, "target": target}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.returns_prompt = False
        self.longest = {"draft": 1000, "target": 1000}
        self.error: type[Exception] = RuntimeError
        self.says_reason = False
        self.always: dict[str, Any] = {}

    def __call__(
        self, model: str, inputs: Any, outputs: Sequence[str], request_id: str, *, pushed: bool = False
    ) -> Iterator[dict[str, Any]]:
        assert not pushed
        assert request_id == "id"
        self.calls.append((model, inputs))
        token, count = self.next[model], int(inputs["request_output_len"].item())
        drafts = inputs["draft_input_ids"].reshape(-1).tolist() if "draft_input_ids" in inputs else None
        prompt = inputs["input_ids"].reshape(-1).tolist()
        assert int(inputs["input_lengths"].item()) == len(prompt)
        if len(prompt) >= self.longest[model]:
            raise self.error(f"Prompt length ({len(prompt)}) exceeds maximum input length ({self.longest[model] - 1})")
        count = min(count, self.longest[model] - len(prompt))
        tokens, reason = list(prompt), b"length"
        for place in range(count):
            new = token(tokens)
            if new == END:
                reason = b"end_id"
                break
            tokens.append(new)
            if drafts is not None and (place >= len(drafts) or drafts[place] != new):
                break
        yield self.answer(tokens if self.returns_prompt else tokens[len(prompt) :], len(tokens) - len(prompt), reason)

    def answer(self, ids: list[int], new: int, reason: bytes) -> dict[str, Any]:
        answer = {
            "output_ids": np.array([[ids]], dtype=np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
            "kv_cache_alloc_new_blocks": np.array([[2]], dtype=np.int32),
            "first_token_time_ns": np.array([[len(self.calls)]], dtype=np.int64),
            "last_token_time_ns": np.array([[len(self.calls)]], dtype=np.int64),
            "output_log_probs": np.full((1, 1, new), -0.5, dtype=np.float32),
            "cum_log_probs": np.full((1, 1), -0.5 * new, dtype=np.float32),
            **({} if "draft" in self.calls[-1][0] else self.always),
        }
        if self.calls[-1][0] == "draft":
            answer["generation_logits"] = np.zeros((1, 1, max(new, 1), 12), dtype=np.float32)
        if self.says_reason:
            answer["finish_reason"] = np.array([[reason]], dtype=np.object_)
        return answer

    def named(self, model: str) -> list[dict[str, Any]]:
        return [inputs for name, inputs in self.calls if name == model]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def start(models: Models, *, count: int = 20, drafts: int = 4, **options: Any) -> dict[str, Any]:
        models.error = InnerModelError
        monkeypatch.setattr(speculative, "call_streamed", models)
        monkeypatch.setattr(bls_inputs, "call_streamed", models)
        declared = options.get("declared", {"exclude_input_in_output", "return_finish_reason", "seed", "min_tokens"})
        names = settings.BlsSettings(
            core="target",
            draft="draft",
            lora=LoraNames(Path("nowhere")),
            inputs=frozenset(declared),
            outputs=("cum_log_probs",),
            longest=options.get("longest"),
            draft_longest=options.get("draft_longest"),
        )
        numbers = {"max_tokens": count, "num_draft_tokens": drafts, **options.get("client", {})}
        client = {name: np.array([[value]]) for name, value in numbers.items()}
        inputs = {
            "input_ids": np.array([[*PROMPT, 0]], dtype=np.int32),
            "input_lengths": np.array([[len(PROMPT)]], dtype=np.int32),
            **options.get("inputs", {}),
        }
        core = bls_inputs.CoreModel("target", "id", lora=LoraNames(Path("nowhere")), adapter=None)
        cancelled = options.get("cancelled", threading.Event())
        decoding = speculative.SpeculativeDecoding(names, core, client, inputs, request_id="id", cancelled=cancelled)
        outcome: dict[str, Any] = decoding.run(stop_words.StopWords(options.get("words", ())), as_letters)
        return outcome

    return start


def as_letters(rows: Sequence[list[int]]) -> list[str]:
    return ["".join(chr(96 + token) for token in row) for row in rows]


def new_ids(outcome: dict[str, Any]) -> list[int]:
    ids: list[int] = outcome["output_ids"].reshape(-1).tolist()
    assert outcome["sequence_length"].tolist() == [[len(ids)]]
    assert ids[: len(PROMPT)] == PROMPT
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("draft", [target_token, often_right, lambda _: 1], ids=["right", "often", "wrong"])
@pytest.mark.parametrize("drafts", [1, 2, 5, 40])
@pytest.mark.parametrize("returns_prompt", [False, True])
def test_equal_to_the_target_alone(run: Any, draft: Next, drafts: int, returns_prompt: bool) -> None:
    models = Models(draft)
    models.returns_prompt = returns_prompt
    declared = set() if returns_prompt else {"exclude_input_in_output"}
    assert new_ids(run(models, drafts=drafts, declared=declared)) == plain(20)
    assert len(models.named("target")) <= 20


@pytest.mark.parametrize("says_reason", [False, True])
@pytest.mark.parametrize("draft", [target_token, often_right], ids=["right", "often"])
def test_ends_on_the_end_id(run: Any, draft: Next, says_reason: bool) -> None:
    def ending(tokens: Sequence[int]) -> int:
        return END if len(tokens) == len(PROMPT) + 9 else target_token(tokens)

    models = Models(draft, ending)
    models.says_reason = says_reason
    assert new_ids(run(models, drafts=4)) == plain(9)


def test_a_draft_that_is_always_right_saves_rounds(run: Any) -> None:
    models = Models(target_token)
    outcome = run(models, count=20, drafts=4)
    assert [int(inputs["request_output_len"].item()) for inputs in models.named("target")] == [5, 5, 5, 5]
    assert [int(inputs["request_output_len"].item()) for inputs in models.named("draft")] == [4, 4, 4, 4]
    assert outcome["acceptance_rate"].item() == 1
    assert outcome["total_draft_tokens"].item() == outcome["total_accepted_draft_tokens"].item() == 16


def test_outputs_cover_all_rounds(run: Any) -> None:
    models = Models(often_right)
    models.says_reason = True
    outcome = run(models, count=12, drafts=3, client={"return_finish_reason": True})
    rounds = len(models.named("target"))
    drafted = sum(inputs["draft_input_ids"].size for inputs in models.named("target") if "draft_input_ids" in inputs)
    assert outcome["total_draft_tokens"].item() == drafted
    assert outcome["total_accepted_draft_tokens"].item() == 12 - rounds
    assert outcome["acceptance_rate"].item() == pytest.approx((12 - rounds) / drafted)
    assert outcome["kv_cache_alloc_new_blocks"].item() == 2 * rounds
    assert outcome["output_log_probs"].shape == (1, 1, 12)
    assert outcome["cum_log_probs"].item() == -6
    assert outcome["first_token_time_ns"].item() == 2
    assert outcome["last_token_time_ns"].item() == len(models.calls)
    assert outcome["finish_reason"].tolist() == [[b"length"]]


def test_outputs_that_old_releases_always_send_are_passed_on(run: Any) -> None:
    """The target fills them with zeros; clients of 0.12 and 0.13 read them from every answer."""
    models = Models(often_right)
    models.always = {
        "context_logits": np.zeros((1, 1, 1), dtype=np.float32),
        "generation_logits": np.zeros((1, 1, 1, 1), dtype=np.float32),
        "batch_index": np.array([[0]], dtype=np.int32),
    }
    outcome = run(models, count=12, drafts=3)
    assert {name: outcome[name].shape for name in models.always} == {
        name: value.shape for name, value in models.always.items()
    }


def test_draft_logits_go_to_the_target(run: Any) -> None:
    models = Models(often_right)
    run(models, count=8, drafts=3, client={"use_draft_logits": True, "draft_acceptance_threshold": 0.5})
    assert all(inputs["return_generation_logits"].item() for inputs in models.named("draft"))
    first = models.named("target")[0]
    assert first["draft_logits"].shape == (1, 3, 12)
    assert first["draft_acceptance_threshold"].tolist() == [[0.5]]
    assert not first["return_generation_logits"].item()


def test_the_draft_model_gets_only_its_inputs(run: Any) -> None:
    models = Models(often_right)
    given = {"lora_task_id": np.array([[3]]), "return_log_probs": np.array([[True]]), "end_id": np.array([[2]])}
    run(models, count=6, drafts=3, inputs={**given, "min_tokens": np.array([[5]])})
    assert not {"lora_task_id", "return_log_probs"} & models.named("draft")[0].keys()
    assert models.named("draft")[0]["end_id"].item() == 2
    assert models.named("draft")[0]["min_tokens"].item() == 3
    assert models.named("target")[0]["min_tokens"].item() == 5
    assert all("lora_task_id" in inputs for inputs in models.named("target"))


def test_the_seed_changes_with_the_position(run: Any) -> None:
    models = Models(lambda _: 1)
    run(models, count=3, drafts=2, inputs={"seed": np.array([[7]], dtype=np.uint64)})
    assert [inputs["seed"].item() for inputs in models.named("target")] == [7, 8, 9]
    old = Models(lambda _: 1)
    run(old, count=2, drafts=2, declared={"random_seed", "min_length"})
    assert [inputs["random_seed"].item() for inputs in old.named("target")] == [0, 1]
    assert "min_length" in old.named("draft")[0]


def test_stop_words_end_the_loop(run: Any) -> None:
    letters = as_letters([plain(20)])[0]
    word = letters[7:10]
    models = Models(often_right)
    found = as_letters([new_ids(run(models, drafts=2, words=[word]))])[0]
    assert word in found
    assert len(found) <= letters.index(word) + len(word) + 2
    assert letters.startswith(found)


def test_stop_word_ids_end_the_loop_of_models_without_a_reason(run: Any) -> None:
    ids = plain(20)
    words = np.array([[ids[4:6], [2, -1]]], dtype=np.int32)
    models = Models(lambda _: 1)  # nothing is accepted: one token a round
    assert new_ids(run(models, drafts=2, inputs={"stop_words_list": words})) == ids[:6]


@pytest.mark.parametrize(("limits", "expected"), [({"longest": 10}, 7), ({"draft_longest": 8}, 20)])
def test_limits_of_the_engines(run: Any, limits: dict[str, int], expected: int) -> None:
    models = Models(target_token)
    assert new_ids(run(models, drafts=4, **limits)) == plain(expected)
    asked = [inputs["input_ids"].size + inputs["request_output_len"].item() for inputs in models.named("draft")]
    assert 0 < max(asked) <= limits.get("draft_longest", max(asked))


def test_a_cancelled_request_returns_what_it_has(run: Any) -> None:
    cancelled = threading.Event()
    cancelled.set()
    assert len(new_ids(run(Models(target_token), drafts=2, cancelled=cancelled))) == 3


def test_the_prompt_can_be_left_out(run: Any) -> None:
    outcome = run(Models(target_token), client={"exclude_input_in_output": True})
    assert outcome["output_ids"].reshape(-1).tolist() == plain(20)


@pytest.mark.parametrize(("model", "expected"), [("target", 9), ("draft", 20)])
def test_limits_that_only_the_core_models_report(run: Any, model: str, expected: int) -> None:
    """A KV cache that ends before its engine: the target's end is that of the answer, the draft's that of drafts."""
    models = Models(often_right)
    models.longest[model] = len(PROMPT) + 9
    assert new_ids(run(models, drafts=4)) == plain(expected)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_prompt_that_is_too_long_is_an_error(run: Any, model: str) -> None:
    models = Models(often_right)
    models.longest[model] = 2
    with pytest.raises(Exception, match="exceeds maximum input length") as caught:
        run(models)
    assert ("The draft model draft answered" in str(caught.value)) == (model == "draft")
