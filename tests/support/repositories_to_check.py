"""Good repositories of every kind, tiny and without weights, for the check and for faults to be put into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.counting_vllm import nvidia_repository
from tests.support.engine_folders import built_here, write_engine
from tests.support.loading_faults import warmed_up
from tests.support.repository_changes import assign, edit, parameter, step
from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from tests.support.upstream_repositories import write_upstream, write_upstream_llmapi
from trtserve.artifacts import Engine, Model
from trtserve.repository.llmapi import plan_llmapi_repository
from trtserve.repository.publishing import assemble_repository
from trtserve.specs import RepositorySpec

SPEC = RepositorySpec(name="tiny")
_SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
}
_LORA = {
    "plugin_config": {"use_paged_context_fmha": True, "lora_plugin": "float16"},
    "lora_config": {"lora_target_modules": ["attn_q", "attn_v"], "max_lora_rank": 4},
}
# TensorRT-LLM's versions, one or two of each release.
VERSIONS: tuple[str, ...] = (
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.15.0",
    "0.16.0",
    "0.17.0.post1",
    "0.18.2",
    "0.19.0",
    "0.20.0",
    "0.21.0",
)
VERSIONS += ("1.0.3", "1.1.0", "1.2.0")


class RepositoryFactory:
    """Makes good repositories below one folder; tokenizers come from `hf`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf = write_tiny_model(folder / "hf")
        (self.hf / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        self._engines = 0

    def engine(self, **changes: Any) -> Engine:
        """An engine by NVIDIA's own tool."""
        self._engines += 1
        changes["model"] = {**_SHAPE, **changes.get("model", {})}
        return write_engine(self.folder / f"engine{self._engines}", **changes)

    def embedded(self, **build: Any) -> Engine:
        """An engine of the openvino runtime."""
        engine = self.engine(version=None, build={"max_beam_width": 1, **build})
        content = json.loads((engine.path / "config.json").read_text())
        content["trtserve"] = {"runtime": "openvino", "compute_precision": "bf16", "kv_precision": "u8"}
        (engine.path / "config.json").write_text(json.dumps(content))
        (engine.path / "rank0.engine").unlink()
        (engine.path / "rank0.xml").write_text('<net><data offset="0" size="7"/></net>')
        (engine.path / "rank0.bin").write_bytes(b"weights")
        return engine

    def adapter(self, name: str) -> Path:
        """A LoRA adapter of two rows, of rank 2."""
        folder = self.folder / name
        folder.mkdir()
        np.save(folder / "model.lora_weights.npy", np.full((1, 2, 256), 0.5, dtype=np.float16))
        np.save(folder / "model.lora_config.npy", np.array([[(1, 0, 2), (3, 1, 2)]], dtype=np.int32))
        return folder

    def own(self, name: str, engine: Engine, *, draft: Engine | None = None, **changes: Any) -> Path:
        """A repository that trtserve makes."""
        out = self.folder / "repositories" / name
        return make_repository(engine, self.hf, replace(SPEC, **changes), draft=draft, out=out).path

    def placed(self, name: str, first: str, second: str) -> Path:
        """Two models of two ranks each, on the GPUs that are given."""
        engine, settings = self.engine(version="1.2.0", tp_size=2), {"gpu_device_ids": first}
        path = self.own(name, engine, settings=settings)
        spec = replace(SPEC, name="other", suffix="_b", settings={"gpu_device_ids": second})
        return make_repository(engine, self.hf, spec, into=path).path

    def llmapi(self, name: str, *, tp_size: int = 1, into: Path | None = None, **changes: Any) -> Path:
        """A repository for the LLM API; its models may be added to another one."""
        out = self.folder / "repositories" / name
        spec = replace(SPEC, **changes) if into is None else replace(SPEC, name=name, **changes)
        return assemble_repository(
            plan_llmapi_repository(Model(path=self.hf), spec, tp_size=tp_size, out=out, into=into)
        ).path

    def upstream(self, name: str, version: str, **changes: Any) -> Path:
        """Write a repository in NVIDIA's layout; its engine and tokenizer are outside of it."""
        release = ".".join(version.split(".")[:2])
        engine = self.engine(version=version, build={"max_batch_size": 8})
        folder = self.folder / "repositories" / name
        return write_upstream(folder, release, engine=engine.path, tokenizer=self.hf, **changes)


def bases(factory: RepositoryFactory) -> dict[str, Path]:
    """The good repositories that faults are put into."""
    made, own = factory.engine, factory.own
    two = made(version="1.2.0", tp_size=2)
    target, draft = made(version="1.2.0", build={"max_draft_len": 4}), made(version="1.2.0")
    adapters = {"french": factory.adapter("french")}
    second = own("second", made(version="1.2.0"))
    make_repository(made(version="1.2.0"), factory.hf, replace(SPEC, name="other", suffix="_b"), into=second)
    return {
        "two models": second,
        "openvino": own("openvino", factory.embedded()),
        "cpp": own("cpp", built_here(made(version="0.18.2"))),
        "newest": own("newest", made(version="1.2.0")),
        "python": own("python", made(version="1.2.0"), triton_backend="python"),
        "gpus": own("gpus", two, settings={"gpu_device_ids": "0,1;2,3", "participant_ids": "1,2;3,4"}),
        "lora": own("lora", made(version="1.2.0", build=_LORA), lora=adapters),
        "draft": own("draft", target, draft=draft),
        "llmapi": factory.llmapi("llmapi", tp_size=2, settings={"gpu_device_ids": "0,1"}),
        "upstream": factory.upstream("upstream", "0.18.2"),
        "upstream-newest": factory.upstream("upstream-newest", "1.2.0"),
        "upstream-old": factory.upstream("upstream-old", "0.12.0"),
        "upstream-1.1": factory.upstream("upstream-1.1", "1.1.0"),
        "upstream-python": factory.upstream("upstream-python", "0.18.2", backend="python"),
        "upstream-llmapi": write_upstream_llmapi(factory.folder / "repositories/up-llmapi", "1.2", str(factory.hf)),
        "upstream-vllm": nvidia_repository(factory.folder / "repositories/up-vllm", model=str(factory.hf)),
    }


def unusual(factory: RepositoryFactory) -> dict[str, Path]:
    """Good repositories with rare features: versions, warm-up, environments, fixed batch sizes, keywords."""
    versions = factory.own("versions", factory.engine(version="1.2.0"))
    step(1, assign("model_version", 1))(versions)
    edit("postprocessing", lambda config: config.version_policy.specific.versions.append(1))(versions)
    warm = factory.own("warm", factory.embedded())
    edit("preprocessing", lambda config: warmed_up(config, input_data_file="prompt"))(warm)
    (warm / "preprocessing/warmup").mkdir()
    (warm / "preprocessing/warmup/prompt").write_bytes(b"Hello")
    static = factory.own("static", factory.engine(version="0.12.0", build={"plugin_config": {"paged_kv_cache": False}}))
    parameter("tensorrt_llm", "gpt_model_type", "V1")(static)
    parameter("preprocessing", "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/python.tar.gz")(static)
    (static / "preprocessing/python.tar.gz").touch()
    settings = {"cuda_graph_config.enable_padding": "true", "attn_backend": "FLASHINFER", "max_beam_width": "2"}
    medusa = factory.own("medusa", factory.engine(version="1.2.0", build={"speculative_decoding_mode": 4}))
    parameter("tensorrt_llm", "decoding_mode", "medusa")(medusa)
    keywords = factory.llmapi("keywords", settings=settings)
    return {"versions": versions, "warm-up": warm, "V1": static, "keywords": keywords, "medusa": medusa}


def others(factory: RepositoryFactory) -> dict[str, Path]:
    """Further good repositories: every release on both backends, and every feature that changes their form."""
    made, own = factory.engine, factory.own
    found: dict[str, Path] = {}
    for version in VERSIONS:
        found[f"cpp {version}"] = own(f"cpp{version}", made(version=version), streaming=version < "0.15")
        found[f"upstream {version}"] = factory.upstream(f"upstream{version}", version, streaming=version > "0.15")
    for release in ("0.19", "0.20", "1.0"):
        folder = factory.folder / "repositories" / f"up-llmapi-{release}"
        found[f"upstream llmapi {release}"] = write_upstream_llmapi(folder, release, str(factory.hf))
    gathered = {"gather_context_logits": True, "gather_generation_logits": True}
    logits = made(version="1.2.0", build=gathered, model={"logits_dtype": "float16"})
    found |= {
        "logits": own("logits", logits),
        "two models, the same GPUs": factory.placed("same", "0,1", "0,1"),
        "two models, GPUs of their own": factory.placed("apart", "0,1", "2,3"),
        "llmapi, two models": factory.llmapi("second", into=factory.llmapi("first"), suffix="_b"),
        "container paths": own("container", made(version="1.2.0"), container_paths="/models/tiny"),
        "absolute paths": own("absolute", made(version="1.2.0"), absolute_paths=True),
        "openvino, no streaming": own("quiet", factory.embedded(), streaming=False),
        "openvino 0.19": own("old", factory.embedded(), release="0.19"),
        "openvino, adapters": own("adapters", factory.embedded(**_LORA), lora={"german": factory.adapter("german")}),
        "openvino, draft": own("pair", factory.embedded(max_draft_len=4), draft=factory.embedded()),
        "cache": own("cache", made(version="1.2.0"), max_tokens_in_paged_kv_cache=4096, enable_kv_cache_reuse=True),
        "pipelines": own("pipelines", made(version="1.2.0", tp_size=2, pp_size=2)),
        "python upstream": factory.upstream("python-upstream", "0.17.0", backend="python"),
        "llmapi 0.19": factory.llmapi("llmapi019", release="0.19"),
        **unusual(factory),
        "llmapi quiet": factory.llmapi("quietapi", streaming=False, settings={"max_seq_len": "256"}),
    }
    return found
