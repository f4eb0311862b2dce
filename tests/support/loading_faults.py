"""Single faults in what Triton reads when it loads a model, and in the build settings of engines."""

from __future__ import annotations

from typing import Any

from tests.support.repository_changes import (
    BLS,
    CORE,
    ENGINE,
    POST,
    PRE,
    Fault,
    assign,
    both,
    content,
    edit,
    instances,
    parameter,
    replaced,
    step,
    text,
)
from trtserve.repository.programs import PACKAGE

_YAML = f"{CORE}/1/model.yaml"
_VLLM = "vllm_model/1/model.json"
_SLOW = "class TritonPythonModel:\n    def execute(self, requests):\n        return len(self.tokenizer.vocab)\n"


def warmed_up(config: Any, name: str = "QUERY", **fields: Any) -> None:
    """Add a request that warms the model up."""
    tensor = config.model_warmup.add(name="first", batch_size=1).inputs[name]
    tensor.data_type, tensor.dims[:] = 13, [1]
    for field, value in fields.items():
        setattr(tensor, field, value)


def _on_gpu(config: Any) -> None:
    config.instance_group[0].kind = 1


LOADING_FAULTS: tuple[Fault, ...] = (
    Fault("upstream-old", "version-served", "a step asks for an absent version", step(1, assign("model_version", 3))),
    Fault(
        "cpp",
        "version-served",
        "a policy of an absent version",
        edit(POST, lambda config: config.version_policy.specific.versions.append(2)),
    ),
    Fault(
        "upstream-old",
        "warmup",
        "a warm-up of an unknown input",
        edit(PRE, lambda config: warmed_up(config, "QUERRY", zero_data=True)),
    ),
    Fault(
        "openvino",
        "warmup",
        "a warm-up without its file",
        edit(PRE, lambda config: warmed_up(config, input_data_file="prompt")),
    ),
    Fault(
        "upstream-1.1",
        "environment",
        "an environment of another machine",
        parameter(PRE, "EXECUTION_ENV_PATH", "/envs/python.tar.gz"),
    ),
    Fault(
        "upstream-1.1",
        "environment",
        "an environment that is not in the model's folder",
        parameter(PRE, "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/python.tar.gz"),
    ),
    Fault("openvino", "instance-kind", "an instance on a GPU", edit(PRE, _on_gpu)),
    Fault(
        "cpp",
        "instance-kind",
        "GPUs for an instance of the CPU",
        edit(PRE, lambda config: config.instance_group[0].gpus.append(0)),
    ),
    Fault("upstream-python", "instance-engine", "two instances of one engine", instances(CORE, 2)),
    Fault("upstream-old", "batch-none", "no axis of batches", edit(BLS, assign("max_batch_size", 0))),
    Fault("llmapi", "batch-inner", "batches for the LLM", edit("tiny", assign("max_batch_size", 8))),
    Fault("upstream", "program-slow", "the program of 0.13", replaced(f"{POST}/1/model.py", _SLOW)),
    Fault(
        "openvino",
        "program-package",
        "a package that does not exist",
        text(f"{PRE}/1/{PACKAGE}/preprocessing/model.py", "import numpy", "import numpyx"),
    ),
    Fault("cpp", "inner-model", "a model that asks itself", parameter("tiny", "tensorrt_llm_model_name", "tiny")),
    Fault("cpp", "inner-model", "the tokenizer for an engine", parameter(BLS, "tensorrt_llm_model_name", PRE)),
    Fault("draft", "inner-model", "the target drafts", parameter("tiny", "tensorrt_llm_draft_model_name", CORE)),
    Fault("llmapi", "llmapi-keyword", "a keyword of no release", content(_YAML, "foo", to=1)),
    Fault("llmapi", "llmapi-dropped", "a keyword of 0.21", content(_YAML, "use_cuda_graph", to=True)),
    # What an engine was built for.
    Fault("cpp", "engine-plan", "an engine of other bytes", replaced(f"{CORE}/1/rank0.engine", "0123456789012")),
    Fault("gpus", "engine-extra", "a rank twice", replaced(f"{CORE}/1/rank1.engine", "ftrt engine 0")),
    Fault("openvino", "engine-plan", "an invalid network", replaced(f"{CORE}/1/rank0.xml", "net")),
    Fault("openvino", "engine-plan", "weights without their end", replaced(f"{CORE}/1/rank0.bin", "we")),
    Fault(
        "cpp",
        "engine-in-flight",
        "a continuous cache",
        content(ENGINE, "build_config", "kv_cache_type", to="CONTINUOUS"),
    ),
    Fault(
        "newest",
        "engine-in-flight",
        "padded inputs",
        content(ENGINE, "build_config", "plugin_config", "remove_input_padding", to=False),
    ),
    Fault(
        "cpp",
        "engine-in-flight",
        "no attention plugin",
        content(ENGINE, "build_config", "plugin_config", "gpt_attention_plugin", to=None),
    ),
    Fault(
        "cpp",
        "engine-encoder",
        "a decoder without its encoder",
        content(ENGINE, "pretrained_config", "architecture", to="DecoderModel"),
    ),
    Fault("newest", "decoding-mode", "Medusa without its heads", parameter(CORE, "decoding_mode", "medusa")),
    Fault(
        "newest",
        "length-hidden",
        "tokens of a step below the prompts",
        content(ENGINE, "build_config", "max_num_tokens", to=32),
    ),
    Fault(
        "gpus",
        "logits-pipeline",
        "logits over stages",
        both(
            content(ENGINE, "pretrained_config", "mapping", to={"world_size": 2, "tp_size": 1, "pp_size": 2}),
            content(ENGINE, "build_config", "gather_generation_logits", to=True),
        ),
    ),
    Fault("upstream-vllm", "vllm-argument", "an argument misspelt", content(_VLLM, "max_modle_len", to=9)),
    Fault("upstream-vllm", "vllm-model", "a model that is not there", content(_VLLM, "model", to="/nowhere")),
    Fault("upstream-vllm", "vllm-adapters", "no list of adapters", content(_VLLM, "enable_lora", to=True)),
    Fault("upstream-vllm", "vllm-gpus", "too many GPUs", parameter("vllm_model", "GPU_DEVICE_IDS", "0,1")),
    Fault(
        "upstream-vllm", "vllm-metrics", "NVIDIA's metrics", parameter("vllm_model", "REPORT_CUSTOM_METRICS", "true")
    ),
)
