"""Options of `trtserve query` become tensors with the names and types that the queried model declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.described_models import described
from tests.support.tiny_models import write_tiny_model
from trtserve.client.request import RequestContext, read_token_ids, request_tensors, with_named_adapter
from trtserve.client.spec import REQUEST_OPTIONS, QuerySpec, is_direct, tensors_of
from trtserve.client.tensors import ModelDescription, Tensor
from trtserve.client.tokenizer import PreparedPrompts, TokenizerFiles
from trtserve.errors import UsageError
from trtserve.programs.preprocessing.word_lists import Spellings, word_list
from trtserve.repository.profiles import BLS, CORE, ENSEMBLE

TEXT = PreparedPrompts(texts=("p",))
IDS = PreparedPrompts(token_ids=((1, 5, 9),))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return TokenizerFiles(write_tiny_model(tmp_path_factory.mktemp("tokenizer")))


def tensors(
    model: ModelDescription,
    prompts: PreparedPrompts,
    *,
    files: TokenizerFiles | None = None,
    repository: Path | None = None,
    inputs: tuple[tuple[str, str], ...] = (),
    **options: Any,
) -> dict[str, Tensor]:
    spec = QuerySpec(prompts=prompts.texts, token_ids=prompts.token_ids, options=options, inputs=inputs)
    context = RequestContext(spec=spec, model=model, prompts=prompts, tokenizer=files, repository=repository)
    return {tensor.name: tensor for tensor in request_tensors(context)}


def test_core_model_gets_token_ids_under_its_input_names() -> None:
    sent = tensors(described(CORE), IDS, max_tokens=4, top_k=2, top_p=0.5, length_penalty=1.5, min_tokens=2, seed=3)
    assert sent["input_ids"].shape == (1, 3)
    expected: dict[str, list[Any]] = {
        "input_ids": [1, 5, 9],
        "input_lengths": [3],
        "request_output_len": [4],
        "runtime_top_k": [2],
        "runtime_top_p": [0.5],
        "len_penalty": [1.5],
        "min_tokens": [2],
        "seed": [3],
        "streaming": [False],
        "exclude_input_in_output": [True],
        "return_num_output_tokens": [True],
        "return_finish_reason": [True],
    }
    assert {name: tensor.flat() for name, tensor in sent.items()} == expected


@pytest.mark.parametrize("name", [CORE, ENSEMBLE, BLS])
def test_every_scalar_option_reaches_the_models_that_have_it(name: str) -> None:
    model, prompts = described(name), IDS if name == CORE else TEXT
    for option in filter(lambda option: is_direct(option.name), REQUEST_OPTIONS.values()):
        value: Any = option.choices[0] if option.choices else True if option.type is bool else 1
        known = [tensor for tensor in tensors_of(option.name) if tensor in model.inputs]
        if known:
            assert tensors(model, prompts, **{option.name: value})[known[0]].flat() == [value]
        else:
            with pytest.raises(UsageError, match="has no input"):
                tensors(model, prompts, **{option.name: value})


def test_every_option_names_inputs_of_some_model() -> None:
    declared = {name for model in (CORE, ENSEMBLE, BLS) for name in described(model).inputs}
    assert {tensor for name in REQUEST_OPTIONS for tensor in tensors_of(name)} <= declared


def test_older_release_gets_its_input_names() -> None:
    sent = tensors(described(BLS, release="0.16"), TEXT, seed=3, min_tokens=2, return_perf_metrics=True)
    assert {"random_seed", "min_length", "return_kv_cache_reuse_stats"} <= sent.keys()
    assert not sent.keys() & {"return_num_output_tokens", "return_finish_reason"}


def test_rows_of_a_batch_share_the_options() -> None:
    sent = tensors(described(BLS), PreparedPrompts(texts=("a", "b")), top_k=2, stop_words=["x"])
    assert (sent["text_input"].shape, sent["text_input"].flat()) == ((2, 1), ["a", "b"])
    assert (sent["top_k"].shape, sent["top_k"].flat()) == ((2, 1), [2, 2])
    assert (sent["stop_words"].shape, sent["stop_words"].flat()) == ((2, 2), ["x", " x"] * 2)


def test_token_id_rows_are_padded_and_sent_with_lengths() -> None:
    sent = tensors(described(CORE), PreparedPrompts(token_ids=((1, 5, 9), (1,))))
    assert (sent["input_ids"].shape, sent["input_ids"].flat()) == ((2, 3), [1, 5, 9, 1, 0, 0])
    assert sent["input_lengths"].flat() == [3, 1]


def test_batch_above_the_models_maximum_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 8 prompts per request, not 9"):
        tensors(described(BLS), PreparedPrompts(texts=("a",) * 9))


def test_words_are_tokenized_for_the_core_model(files: TokenizerFiles) -> None:
    sent = tensors(described(CORE), IDS, files=files, bad_words=["ab", "c"])["bad_words_list"]
    spellings = Spellings(lambda text: files.encode(text, special=False))
    assert sent.flat() == word_list([["ab", "c"]], spellings.of).reshape(-1).tolist()


def test_core_model_gets_every_end_id_unless_one_is_chosen() -> None:
    prompts = PreparedPrompts(token_ids=((1,),), end_ids=(2, 7, 9))
    sent = tensors(described(CORE), prompts)
    assert sent["end_id"].flat() == [2]
    assert sent["stop_words_list"].flat() == [7, 9, 1, 2]
    sent = tensors(described(CORE), prompts, end_id=5)
    assert (sent["end_id"].flat(), "stop_words_list" in sent) == ([5], False)


def test_words_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(UsageError, match="--bad-words needs a tokenizer") as caught:
        tensors(described(CORE), IDS, bad_words=["x"])
    assert "--tokenizer" in str(caught.value.hint)


def test_embedding_bias_as_words_or_as_vector(files: TokenizerFiles) -> None:
    sent = tensors(
        described(BLS), TEXT, embedding_bias=["a=b=2.5"], embedding_bias_words=["c"], embedding_bias_weights=[-1.0]
    )
    assert sent["embedding_bias_words"].flat() == ["a=b", "c"]
    assert sent["embedding_bias_weights"].flat() == [2.5, -1.0]
    vector = np.array(tensors(described(CORE), IDS, files=files, embedding_bias=["a=2"])["embedding_bias"].flat())
    assert len(vector) == len(files.tokenizer)
    assert set(np.flatnonzero(vector)) == set(files.encode("a", special=False))


@pytest.mark.parametrize("text", ["word", "=1", "a=much", "a=nan", "a=inf"])
def test_invalid_bias_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="WORD=WEIGHT"):
        tensors(described(BLS), TEXT, embedding_bias=[text])


def test_every_bias_word_needs_a_weight() -> None:
    with pytest.raises(UsageError, match="1 times and --embedding-bias-weights 2 times"):
        tensors(described(BLS), TEXT, embedding_bias_words=["a"], embedding_bias_weights=[1.0, 2.0])


def test_guide_may_be_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    model = described(BLS)
    asked = tensors(model, TEXT, guide_type="json_schema", guide=f"@{tmp_path}/schema.json")
    assert asked["guided_decoding_guide"].flat() == ['{"type": "object"}']
    assert tensors(model, TEXT, guide_type="regex", guide="a+")["guided_decoding_guide"].flat() == ["a+"]
    assert "guided_decoding_guide" not in tensors(model, TEXT, guide_type="json")
    with pytest.raises(UsageError, match="--guide-type"):
        tensors(model, TEXT, guide="a+")
    with pytest.raises(UsageError, match="takes no --guide"):
        tensors(model, TEXT, guide_type="json", guide="not json")
    with pytest.raises(UsageError, match="cannot be read"):
        tensors(model, TEXT, guide_type="regex", guide="@/nowhere")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder as hf_lora_convert writes it: [1, rows, columns]."""
    np.save(tmp_path / "model.lora_weights.npy", np.ones((1, 2, 6), np.float32))
    np.save(tmp_path / "model.lora_config.npy", np.array([[[0, 0, 1], [1, 0, 1]]], np.int32))
    return tmp_path


def test_adapter_from_a_folder(adapter: Path) -> None:
    sent = tensors(described(BLS), TEXT, lora_path=str(adapter), lora_task_id=7)
    assert (sent["lora_weights"].shape, sent["lora_weights"].datatype) == ((1, 2, 6), "FP16")
    assert (sent["lora_config"].shape, sent["lora_config"].flat()) == ((1, 2, 3), [0, 0, 1, 1, 0, 1])
    assert sent["lora_task_id"].flat() == [7]
    assert "lora_weights" not in tensors(described(BLS), TEXT, lora_task_id=7)


def test_inconsistent_adapter_options_are_refused(adapter: Path) -> None:
    with pytest.raises(UsageError, match="needs --lora-task-id"):
        tensors(described(BLS), TEXT, lora_path=str(adapter))
    with pytest.raises(UsageError, match="omit --lora-path"):
        tensors(described(BLS), TEXT, lora="x", lora_path=str(adapter))
    np.save(adapter / "model.lora_config.npy", np.zeros((1, 1, 3), np.int32))
    with pytest.raises(UsageError, match="2 rows of weights and 1 rows"):
        tensors(described(BLS), TEXT, lora_path=str(adapter), lora_task_id=7)
    (adapter / "model.lora_weights.npy").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        tensors(described(BLS), TEXT, lora_path=str(adapter), lora_task_id=7)


def test_adapter_by_name(adapter: Path, tmp_path: Path) -> None:
    entry = {"task_id": 5, "folder": "."}
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"left": entry}}))
    by_name = tensors(described(BLS), TEXT, lora="left")
    assert by_name["lora_name"].flat() == ["left"]
    assert "lora_task_id" not in by_name
    resolved = tensors(described(BLS, release="1.2"), TEXT, repository=adapter, lora="left")
    assert resolved["lora_task_id"].flat() == [5]
    assert resolved["lora_weights"].shape == (1, 2, 6)
    with pytest.raises(UsageError, match="no adapter 'right'") as caught:
        tensors(described(BLS), TEXT, repository=adapter, lora="right")
    assert "left" in str(caught.value.hint)
    with pytest.raises(UsageError, match="accepts no adapter names"):
        tensors(described(BLS, release="1.2"), TEXT, lora="left")


def test_an_adapter_is_a_model_too(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"left": {"task_id": 5, "folder": "."}}}))
    asked = with_named_adapter(QuerySpec(model="left", options={"max_tokens": 2}), adapter)
    assert (asked.model, asked.options) == (None, {"max_tokens": 2, "lora": "left"})
    for name in ("demo", None):
        spec = QuerySpec(model=name)
        assert with_named_adapter(spec, adapter) is spec
    spec = QuerySpec(model="left")
    assert with_named_adapter(spec, None) is spec
    with pytest.raises(UsageError, match="names an adapter already"):
        with_named_adapter(QuerySpec(model="left", options={"lora": "left"}), adapter)


def test_prompt_table_task_is_selected(tmp_path: Path) -> None:
    table = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    np.save(tmp_path / "table.npy", table)
    path = str(tmp_path / "table.npy")
    sent = tensors(described(BLS), TEXT, prompt_embedding_table_path=path, prompt_task_id=1, prompt_table_extra_id=9)
    assert sent["prompt_embedding_table"].shape == (1, 3, 4)
    assert sent["prompt_embedding_table"].flat() == table[1].reshape(-1).tolist()
    assert (sent["prompt_vocab_size"].flat(), sent["prompt_table_extra_id"].flat()) == ([3], [9])
    with pytest.raises(UsageError, match="2 tasks"):
        tensors(described(BLS), TEXT, prompt_embedding_table_path=path, prompt_task_id=2)
    with pytest.raises(UsageError, match="--prompt-embedding-table-path"):
        tensors(described(BLS), TEXT, prompt_task_id=1)
    np.save(tmp_path / "table.npy", table[0, 0])
    with pytest.raises(UsageError, match="tasks, rows, hidden"):
        tensors(described(BLS), TEXT, prompt_embedding_table_path=path)


def test_core_model_gets_one_extra_id_per_token(tmp_path: Path) -> None:
    prompts = PreparedPrompts(token_ids=((1, 321, 320), (319,)))
    sent = tensors(described(CORE), prompts, prompt_table_extra_id=9, vocab_size=320)
    assert (sent["prompt_table_extra_ids"].shape, sent["prompt_table_extra_ids"].flat()) == ((2, 3), [0, 9, 9, 0, 0, 0])
    with pytest.raises(UsageError, match="--vocab-size"):
        tensors(described(CORE), prompts, prompt_table_extra_id=9)
    (tmp_path / CORE / "1").mkdir(parents=True)
    (tmp_path / CORE / "1" / "config.json").write_text('{"pretrained_config": {"vocab_size": 321}}')
    known = tensors(described(CORE), prompts, repository=tmp_path, prompt_table_extra_id=9)
    assert known["prompt_table_extra_ids"].flat() == [0, 9, 0, 0, 0, 0]


def test_draft_tokens_and_lookahead_numbers() -> None:
    sent = tensors(described(CORE), IDS, draft_tokens_csv="4,5", lookahead_config="[7, 3,2]")
    assert sent["draft_input_ids"].flat() == [4, 5]
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    assert [sent[name].flat() for name in names] == [[7], [3], [2]]
    with pytest.raises(UsageError, match="window,ngram"):
        tensors(described(CORE), IDS, lookahead_config="7")
    with pytest.raises(UsageError, match="no input 'draft_input_ids'"):
        tensors(described(BLS), TEXT, draft_tokens_csv="4,5")


def test_token_ids_from_a_file_or_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("1, 2,3\n\n4,\n")
    assert read_token_ids(str(tmp_path / "ids.csv"), "--x") == ((1, 2, 3), (4,))
    assert read_token_ids(" 5, 6", "--x") == ((5, 6),)
    (tmp_path / "bad.csv").write_text("1,two\n")
    (tmp_path / "none.csv").write_text("\n")
    (tmp_path / "large.csv").write_text(str(2**31))
    for name, words in (
        ("bad", "separated by commas"),
        ("none", "no token ids"),
        ("large", "token ids must be"),
        ("x", "read"),
    ):
        with pytest.raises(UsageError, match=words):
            read_token_ids(str(tmp_path / f"{name}.csv"), "--x")


def test_input_may_replace_defaults_but_not_given_options() -> None:
    sent = tensors(described(BLS), TEXT, inputs=(("max_tokens", "7"), ("exclude_input_in_output", "false")))
    assert (sent["max_tokens"].flat(), sent["exclude_input_in_output"].flat()) == ([7], [False])
    for inputs in ((("top_k", "2"),), (("text_input", "x"),), (("seed", "1"), ("seed", "2"))):
        with pytest.raises(UsageError, match="given twice"):
            tensors(described(BLS), TEXT, inputs=inputs, top_k=1)


def test_chat_turn_ends_at_its_end_tokens() -> None:
    prompts = PreparedPrompts(texts=("p",), end_words=("<|eot|>",))
    assert tensors(described(BLS), prompts, stop_words=["x"])["stop_words"].flat() == ["x", " x", "<|eot|>"]
    assert "stop_words" not in tensors(described(BLS), prompts, end_id=5)
    assert tensors(described(CORE), PreparedPrompts(token_ids=((1,),), end_ids=(2,)))["end_id"].flat() == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0; it must be at least 0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"presence_penalty": float("inf")}, "--presence-penalty is inf; it must be at most 1000000000"),
        ({"presence_penalty": -2e9}, "--presence-penalty is -2000000000.0; it must be at least -1000000000"),
        ({"presence_penalty": float("nan")}, "--presence-penalty is nan; it must be a finite number"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 5.0}, "--top-p is 5.0; it must be at least 0 and at most 1"),
        ({"seed": 2**64}, "--seed is"),
        ({"max_tokens": 0}, "--max-tokens is 0; it must be at least 1"),
        ({"beam_width": 0}, "--beam-width is 0"),
        ({"num_return_sequences": 0}, "--num-return-sequences is 0"),
        ({"end_id": -2}, "--end-id is -2"),
        ({"lora_task_id": -1}, "--lora-task-id is -1"),
        ({"embedding_bias_weights": [float("nan")]}, "--embedding-bias-weights is nan"),
        ({"temprature": 1}, "no option 'temprature'"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        QuerySpec(prompts=("p",), options=options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token_ids": ((1,),)}, "not both"),
        ({"system": "s", "raw": True}, "--raw"),
        ({"protocol": "ftp"}, "--protocol"),
        ({"compression": "brotli"}, "none, deflate, gzip"),
        ({"compression": "gzip", "protocol": "http"}, "--protocol grpc"),
        ({"stop_after_ms": 0}, "--stop-after-ms is 0"),
        ({"stop_via_cancel": True}, "--stop-after-ms"),
    ],
)
def test_conflicting_options_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        QuerySpec(prompts=("p",), **settings)


def test_unknown_output_is_refused_and_known_ones_are_listed() -> None:
    def ask(*outputs: str) -> None:
        spec = QuerySpec(prompts=TEXT.texts, outputs=outputs)
        request_tensors(RequestContext(spec=spec, model=described(BLS), prompts=TEXT, tokenizer=None, repository=None))

    ask("text_output")
    with pytest.raises(UsageError, match="has no output 'logits'") as caught:
        ask("text_output", "logits")
    assert "generation_logits" in str(caught.value.hint)
