"""Options of NVIDIA's tools: the command line names the tool and proposes the right command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, cast

import pytest

from trtserve.cli.app import command_tree, run
from trtserve.cli.corrections import explain_unknown
from trtserve.cli.parser import UnknownOptionError
from trtserve.errors import ModelNotFoundError, UsageError
from trtserve.nvidia.releases.options import OldOption, old_option, old_option_of, old_options
from trtserve.repository.profiles import profile
from trtserve.repository.settings import resolve_settings

# From the guides themselves: what is typed, and what its answer must name.
GUIDES = [
    ("build c --max_output_len 64", "until TensorRT-LLM 0.11", "--max_seq_len"),
    ("build c --max-output-len=64", "trtllm-build", "--max_seq_len"),
    ("build c --tp_size 4", "until TensorRT-LLM 0.11", "trtserve convert --tp-size"),
    ("build c --world_size 4", "trtllm-build", "trtserve convert --tp-size"),
    ("build c --use_inflight_batching", "build.py", "in-flight batching"),
    ("build c --use_gpt_attention_plugin float16", "build.py", "--gpt_attention_plugin"),
    ("build c --use_gemm_plugin float16", "build.py", "--gemm_plugin"),
    ("build c --use_layernorm_plugin float16", "build.py", "Leave it out"),
    ("build c --enable_context_fmha", "build.py", "--context_fmha"),
    ("build c --use_lora_plugin float16", "build.py", "--lora_plugin"),
    ("build c --hidden_act gelu", "build.py", "config.json"),
    ("build c --model_dir m", "build.py", "trtserve convert MODEL"),
    ("build c --checkpoint_dir c", "trtllm-build", "trtserve build CHECKPOINT"),
    ("build c --output_dir e", "trtllm-build", "--out"),
    ("build --paged_kv_cache enable c", "deprecated", "--kv_cache_type paged"),
    ("build c --moe_plugin float16", "option of trtllm-build", "-- --moe_plugin"),
    ("import m --use_inflight_batching", "build.py", "in-flight batching"),
    ("import m --max_output_len 64", "trtllm-build", "--max_seq_len"),
    ("convert m --model_dir m", "convert_checkpoint.py", "trtserve convert MODEL"),
    ("convert m --output_dir c", "convert_checkpoint.py", "--out"),
    ("convert m --use_weight_only", "convert_checkpoint.py", "--quantize int8"),
    ("convert m --load_by_shard", "convert_checkpoint.py", "stream"),
    ("convert m --use_embedding_sharing", "until TensorRT-LLM 0.15", "Leave it out"),
    ("convert m --world_size 2", "convert_checkpoint.py", "--tp-size"),
    ("convert m --int8_kv_cache", "option of convert_checkpoint.py", "--converter upstream"),
    ("import m --int8_kv_cache", "option of convert_checkpoint.py", "--converter upstream"),
    ("convert m --qformat fp8", "option of quantize.py", "--quantize"),
    ("convert m --qformat int4_wo", "Corrected: trtserve convert m --quantize int4", "--quantize"),
    ("convert m --kv_cache_dtype int8", "option of quantize.py", "-- --kv_cache_dtype fp8"),
    ("repo e --gpu_device_ids 0", "fill_template.py", "trtserve repo … --set gpu_device_ids=VALUE"),
    ("repo e --decoding_mode top_k", "fill_template.py", "--set decoding_mode=VALUE"),
    ("repo e --logits_datatype TYPE_FP16", "fill_template.py", "--set logits_datatype=VALUE"),
    ("repo e --add_special_tokens true", "fill_template.py", "--set preprocessing.add_special_tokens=VALUE"),
    ("import m --decoding-mode top_k", "fill_template.py", "trtserve import … --set decoding_mode=VALUE"),
    ("repo e --tokenizer_type llama", "until TensorRT-LLM 0.8", "files of the tokenizer"),
    ("repo e --engine_dir e", "fill_template.py", "trtserve repo ENGINE"),
    ("repo e --decoupled_mode True", "fill_template.py", "--streaming"),
    ("start --paged_kv_cache enable", "deprecated", "--kv_cache_type paged"),
    ("start --max_output_len 64", "until TensorRT-LLM 0.11", "`trtserve build` does that tool's work"),
    ("convert m --enable_trt_overlap true", "until TensorRT-LLM 0.9", "`trtserve repo` does that tool's work"),
    ("query --max_num_sequences 8 hi", "until TensorRT-LLM 0.7", "max_batch_size"),
    ("repo e --int8_kv_cache", "until TensorRT-LLM 0.7", "trtserve convert --converter upstream"),
    ("repo e --use_gpt_attention_plugin float16", "build.py", "--gpt_attention_plugin"),
    ("start --no-mpi", "launch_triton_server.py", "without mpirun"),
    ("start --log", "launch_triton_server.py", "trtserve logs"),
    ("start --log-file f", "launch_triton_server.py", "trtserve logs"),
    ("start --force", "launch_triton_server.py", "--auto-ports"),
    ("start --tensorrt_llm_model_name a,b", "launch_triton_server.py", "read from the repository"),
    ("query --tokenizer-type llama hi", "inflight_batcher_llm_client.py", "Leave it out"),
    ("query --dtype float16 hi", "inflight_batcher_llm_client.py", "Leave it out"),
    ("query --overwrite-output-text hi", "inflight_batcher_llm_client.py", "Leave it out"),
    ("query --num_beams 2 hi", "run.py", "--beam-width"),
    ("query --max_output_len 8 hi", "run.py", "--max-tokens"),
    ("bench token-norm-dist --time-delay-dist constant", "benchmark_core_model.py", "--arrivals"),
    ("bench token-norm-dist --op-stats-csv f", "benchmark_core_model.py", "--out"),
    ("bench token-norm-dist --synthetic-input-tokens-mean 100", "genai-perf", "--input-mean"),
    ("bench --num-prompts 100", "genai-perf", "--num-requests"),
    ("bench token-norm-dist --dataset f", "benchmark_core_model.py", "trtserve bench dataset"),
    ("bench dataset --tokenizer_type auto", "benchmark_core_model.py", "Leave it out"),
    ("bench dataset --test-bls", "end_to_end_test.py", "--model tensorrt_llm_bls"),
]


@pytest.fixture(scope="module")
def tree() -> Any:
    return command_tree()


def _error(tree: Any, arguments: list[str]) -> UsageError:
    with pytest.raises((UsageError, UnknownOptionError)) as caught:
        tree(args=arguments, prog_name="trtserve", standalone_mode=False)
    error = caught.value
    return explain_unknown(error, tree) if isinstance(error, UnknownOptionError) else cast(UsageError, error)


@pytest.mark.parametrize(("typed", "was", "instead"), GUIDES)
def test_options_of_guides_name_their_tool_and_replacement(tree: Any, typed: str, was: str, instead: str) -> None:
    error = _error(tree, typed.split())
    assert was in str(error.hint)
    assert instead in str(error.hint)
    option = next(word for word in typed.split() if word.startswith("-")).partition("=")[0]
    assert option in error.message


@pytest.mark.parametrize("command", ["build c", "import m"])
@pytest.mark.parametrize("option", ["--lora_target_modules ", "--lora-target-modules="])
def test_blanks_between_modules_are_commas(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{command} {option}attn_q attn_k attn_v --max-lora-rank 8"
    assert run(line.split()) == ModelNotFoundError.code
    assert run(f"{line} --output_dir /x".split()) == UsageError.code
    corrected = capsys.readouterr().err.replace("lora_target_modules", "lora-target-modules")
    assert "--lora-target-modules attn_q,attn_k,attn_v --max-lora-rank 8 --out /x" in corrected


def _taken(tree: Any, command: str) -> set[str]:
    """Options that a command, or one below it, has itself."""
    node = tree.commands[command]
    nodes = [node, *getattr(node, "commands", {}).values()]
    return {
        option for each in nodes for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)
    }


def _rows() -> list[OldOption]:
    return [row for table in old_options().values() for row in table.values()]


def test_every_old_option_is_answered_by_its_own_command(tree: Any) -> None:
    for row in _rows():
        command = ["bench", "token-norm-dist"] if row.command == "bench" else [row.command]
        option = row.name if row.name.startswith("-") else f"--{row.name}"
        if option.replace("_", "-") not in _taken(tree, row.command):
            error = _error(tree, [*command, option])
            assert option in error.message
            assert row.tool in str(error.hint) or old_option_of(row.command, row.name) != row


def test_advice_and_replacements_name_commands_and_options_that_exist(tree: Any) -> None:
    for row in _rows():
        for quoted in row.advice.split("`")[1::2]:
            words = quoted.split(" -- ")[0].split()
            if words[0] == "trtserve" and words[1] in tree.commands:
                options = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
                assert options <= _taken(tree, words[1]), row
        uses = row.use.values() if isinstance(row.use, Mapping) else [row.use or "ARGUMENT"]
        everywhere = {option for command in tree.commands for option in _taken(tree, command)}
        assert {use.split()[0] for use in uses} <= everywhere | {"ARGUMENT"}, row


def test_any_spelling_is_found() -> None:
    first = old_option("trtllm-build", "--max_output_len")
    assert first is not None
    assert first.until == "0.11"
    assert old_option("trtllm-build", "max-output-len") is first
    assert old_option("trtllm-build", "--max_seq_len") is None


def test_options_of_other_commands_and_misspelt_ones(tree: Any) -> None:
    assert "`trtserve import`" in str(_error(tree, ["start", "--kv-precision", "f16"]).hint)
    assert "Did you mean --max-batch-size" in str(_error(tree, ["build", "c", "--max_batchsize", "4"]).hint)
    assert "`trtserve list -h`" in str(_error(tree, ["list", "--frobnicate"]).hint)
    assert "`trtserve -h`" in str(_error(tree, ["--frobnicate"]).hint)


def test_exit_code_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "c", "--max_output_len", "64"]) == 2
    error = capsys.readouterr().err
    assert "`trtserve build` has no option --max_output_len." in error
    assert "--max_seq_len" in error


@pytest.mark.parametrize(
    ("key", "release", "answer"),
    [
        ("max_num_sequences", None, "until TensorRT-LLM 0.7"),
        ("enable_trt_overlap", "0.19", "until TensorRT-LLM 0.9"),
        ("preprocessing.tokenizer_type", None, "until TensorRT-LLM 0.8"),
        ("postprocessing.tokenizer_type", "0.12", "files of the tokenizer"),
        ("decoupled_mode", None, "--streaming"),
        ("max_kv_cache_length", None, "max_attention_window_size"),
    ],
)
def test_set_answers_keys_of_old_templates(key: str, release: str | None, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_settings({key: "1"}, profile(release))
    assert answer in str(caught.value.hint)


def test_options_of_the_adapter_converter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora", "-i", "adapter", "-o", "weights", "--storage-type", "float16"]) == 2
    assert "-i is an option of hf_lora_convert.py. The adapter is the argument" in capsys.readouterr().err


# A command line of a guide, and the correction: on a GPU machine, and where the engine is for CPUs.
LINES = [
    (
        "build c --max_input_len 512 --max_output_len 256 --use_inflight_batching --use_gpt_attention_plugin float16",
        "build c --max-input-len 512 --max-seq-len 768 --gpt-attention-plugin float16",
        "build c --max-input-len 512 --max-seq-len 768",
    ),
    (
        "build c --max_batch_size 8 --gemm_plugin auto --paged_kv_cache enable",
        "build c --max-batch-size 8 --gemm-plugin auto",
        "build c --max-batch-size 8",
    ),
    (
        "build --checkpoint_dir c --output_dir e --tp_size 2 --moe_plugin auto --remove_input_padding enable",
        "build c --out e --remove-input-padding enable -- --moe_plugin auto",
        "build c --out e",
    ),
    ("build --use_inflight_batching c", "build c", "build c"),
    ("build c --paged_kv_cache=disable --strongly_typed", "build c --kv-cache-type continuous", "build c"),
    (
        "convert m --model_dir m --output_dir 'my out' --use_weight_only --weight_only_precision int4 --world_size 2",
        "convert m --out 'my out' --quantize int4 --tp-size 2",
        "",
    ),
    (
        "repo e --tokenizer t --engine_dir e --decoupled_mode 0 --max_queue_size 0 --decoding_mode top_k",
        "repo e --tokenizer t --no-streaming --max-queue-size 0 --set decoding_mode=top_k",
        "",
    ),
]

# Lines of other tools for commands that take no build's options.
OTHER_LINES = [
    (
        "query --engine_dir=e --max_output_len 50 --tokenizer_dir t --input_text 'What is ML?'",
        "`trtserve query` has none of the options --engine_dir, --max_output_len, --input_text.",
        "query 'What is ML?' --engine e --local --max-tokens 50 --tokenizer-dir t",
    ),
    (
        "bench -i grpc --request_rate 10 token_norm_dist --input_mean 128",
        "-i is an option of `trtserve bench token-norm-dist`: write it after token-norm-dist.",
        "bench token-norm-dist -i grpc --request-rate 10 --input-mean 128",
    ),
    (
        "bench --request_rate 10 dataset --dataset f.json",
        "--request_rate is an option of `trtserve bench dataset`: write it after dataset.",
        "bench dataset --request-rate 10 --dataset f.json",
    ),
    (
        "repo -i r/ensemble/config.pbtxt key:value",
        "`trtserve repo` has no option -i.",
        "repo key:value --from-template r/ensemble/config.pbtxt --in-place",
    ),
    (
        "start --tensorrt_llm_model_name a,b --force --log llama --http_port 9000",
        "`trtserve start` has none of the options --tensorrt_llm_model_name, --force, --log.",
        "start llama --http-port 9000",
    ),
    (
        "convert m --smoothquant 0.5 --per_token --per_channel",
        "`trtserve convert` has none of the options --smoothquant, --per_token, --per_channel.",
        "convert m --quantize int8_sq",
    ),
    (
        "bench -m ensemble --service-kind triton --num-prompts 100",
        (
            "`trtserve bench` needs a command before -m: token-norm-dist, token-from-histogram, dataset, prefix, "
            "sessions, replay, e2e, report or compare."
        ),
        "bench token-norm-dist -m ensemble --num-requests 100",
    ),
]


@pytest.mark.parametrize(("typed", "message", "corrected"), OTHER_LINES, ids=[line[-1] for line in OTHER_LINES])
def test_lines_of_other_tools_are_corrected(typed: str, message: str, corrected: str, tree: Any) -> None:
    error = _error(tree, shlex.split(typed))
    assert error.message == message
    assert str(error.hint).splitlines()[-1] == f"Corrected: trtserve {corrected}"


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("import demo --model-name second", "is an option of `trtserve query`. Here it may be --name."),
        ("convert m --int8_kv_cache", "trtserve convert --converter upstream MODEL -- --int8_kv_cache"),
        ("repo e --tokenizer t triton_max_batch_size:64,decoupled_mode:False", "without templates it is --set"),
        ("bench benchmark_core_model --x 1", "`trtserve bench -h` lists its commands."),
    ],
)
def test_uncertain_replacements_give_no_corrected_line(typed: str, advice: str, tree: Any) -> None:
    error = _error(tree, shlex.split(typed))
    assert advice in str(error.hint)
    assert "Corrected" not in str(error.hint)


@pytest.mark.parametrize("runtime", ["tensorrt_llm", "openvino"])
@pytest.mark.parametrize(("typed", "on_gpus", "on_cpus"), LINES, ids=[line.split()[0] for line, *_ in LINES])
def test_every_old_option_of_a_line_is_answered_at_once(
    typed: str, on_gpus: str, on_cpus: str, runtime: str, tree: Any
) -> None:
    wanted, more = (on_gpus, []) if runtime == "tensorrt_llm" or not on_cpus else (on_cpus, [])
    words = shlex.split(typed)
    if words[0] == "build":
        words, more = [*words, "--runtime", runtime], ["--runtime", runtime]
    error = _error(tree, words)
    lines = str(error.hint).splitlines()
    behind = wanted.partition(" -- ")
    expected = " ".join([behind[0], *more]) + "".join(behind[1:])
    assert lines[-1] == f"Corrected: trtserve {expected}"
    # Every wrong option is answered, and the command accepts the corrected line.
    wrong = [name.rstrip(".") for name in error.message.partition(" has ")[2].replace(",", "").split() if "--" in name]
    answered = [line.partition(" ")[0].rstrip(":").lstrip("-") for line in lines]
    assert {name.lstrip("-") for name in wrong} <= set(answered)
    tree(args=[*shlex.split(expected.partition(" -- ")[0]), "--help"], prog_name="trtserve", standalone_mode=False)


def test_a_line_with_an_unknown_option_is_not_corrected(tree: Any) -> None:
    error = _error(tree, ["build", "c", "--max_output_len", "5", "--what", "--max-batch-sise", "3"])
    assert error.message == "`trtserve build` has none of the options --max_output_len, --what, --max-batch-sise."
    assert str(error.hint).splitlines()[1:] == [
        "--what is unknown.",
        "--max-batch-sise: Did you mean --max-batch-size?",
    ]


@pytest.mark.parametrize(
    ("line", "corrected"),
    [
        ("import -m llama-2-7b --backend tensorrtllm", "import llama-2-7b --runtime tensorrt_llm"),
        ("import --model mine -s hf:org/x", "import hf:org/x --name mine"),
        ("import -m opt125m", "import opt125m"),
        ("start --image x --server-timeout 9 --frontend openai", "start --container x --ready-timeout 9"),
        ("start --repo r", "start --model-repo r"),
        ("remove -m gpt2", "remove gpt2"),
        ("list --repo r", "list"),
    ],
)
def test_options_of_triton_cli_are_translated(line: str, corrected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == UsageError.code
    assert f"Corrected: trtserve {corrected}\n" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "command"), [("infer", "query"), ("config", "inspect"), ("profile", "bench")])
def test_verbs_of_triton_cli_have_a_command(verb: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "-m", "gpt2"]) == UsageError.code
    assert f"Use `trtserve {command}`." in capsys.readouterr().err
