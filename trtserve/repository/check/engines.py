"""Rules about engines: their files and ranks, what they were built for, the KV cache, adapters and drafts."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trtserve.client.request import AdapterEntry, read_adapter_table
from trtserve.errors import RepositoryError, TrtserveError, counted
from trtserve.files import read_text, whole_number
from trtserve.nvidia.engine_files import begins_like_an_engine
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.options import speculative_mode
from trtserve.repository.adapters import CONFIG, WEIGHTS, adapter_files, resolve_adapters
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import (
    Finding,
    every_model,
    model_rule,
    of_role,
    refusal,
    rule,
    with_engine,
    with_gpu_engine,
)
from trtserve.repository.draft import require_pair
from trtserve.repository.engines import lacking_files, rank_sizes
from trtserve.repository.profiles import BLS, CORE
from trtserve.repository.programs import model_names
from trtserve.repository.served import LLMAPI_FILE

_RANK = re.compile(r"rank(\d+)\.(engine|xml|bin)")
_CONSTANT = re.compile(r'\boffset="(\d{1,20})"[^>]{0,999}?\bsize="(\d{1,20})"')
# The least size of a rank compared with the largest one: all ranks of tensor parallelism hold equal shares.
_SMALLEST_SHARE = 0.8
_FOLDER_KEYS = (
    "gpt_model_path", "encoder_model_path", "multimodal_model_path", "visual_model_path", "lora_prefetch_dir",
)  # fmt: skip
_TOKENIZER_INFO = "xgrammar_tokenizer_info_path"
_IN_FLIGHT = ("inflight_fused_batching", "inflight_batching")
# Decoding modes that require support in the engine → their name in its config.json.
_BUILT_MODES = {
    "medusa": "medusa",
    "lookahead": "lookahead_decoding",
    "explicit_draft_tokens": "explicit_draft_tokens",
    "redrafter": "explicit_draft_tokens",
    "eagle": "eagle",
}
_COPY_AGAIN = "Copy every file of the engine again, or build it again."


@model_rule("core-files", "config.json, model.yaml and lists of GPUs can be read", every_model, stops=True)
def unreadable_files(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if (error := model.unreadable) is not None:
        in_yaml = model.role == LLMAPI and LLMAPI_FILE in error.message
        yield model.finding(
            error.message,
            error.hint or (f"Correct {LLMAPI_FILE}." if in_yaml else "Copy the file from the engine again."),
            model.version / LLMAPI_FILE if in_yaml else None,
        )


@model_rule("path", "paths of engines and adapters exist on this machine", every_model)
def absent_paths(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    for key in (*_FOLDER_KEYS, _TOKENIZER_INFO):
        text = model.parameters.get(key, "")
        if not text or (model.embedded and key == _TOKENIZER_INFO):  # the embedded executor ignores it
            continue
        path = repository.located(text, model.name)
        if not (path.is_file() if key == _TOKENIZER_INFO else path.is_dir()):
            yield model.finding(
                f"{key} is {text!r}, which is not on this machine.",
                "Is it a path of another machine or container? Paths relative to the repository work everywhere; "
                "for a repository that is mounted elsewhere: trtserve repo --container-paths FOLDER",
            )


@model_rule("path-outside", "the engine is the repository's own", of_role(CORE))
def foreign_engine_paths(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    recorded, folder = repository.core_entry(model).get("engine"), model.engine_folder
    if recorded and folder is not None and folder.resolve() != (repository.path / recorded).resolve():
        yield model.finding(
            f"gpt_model_path leads to {folder}; the engine of this repository is {recorded}.",
            f"Write {recorded}, or make the repository again with the other engine.",
        )


@model_rule("engine-config", "an engine has its config.json", of_role(CORE), stops=True)
def incomplete_configs(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    folder = model.engine_folder
    if folder is None:
        return
    if not (folder / "config.json").is_file():
        yield model.finding(f"{folder} has no config.json.", "Copy it from the engine's folder.")
    elif not model.engine_described:
        yield model.finding(
            f"{folder / 'config.json'} has no build_config or no pretrained_config, so it is not an engine's.",
            "Run `trtserve build` on the checkpoint, and make the repository with the engine.",
        )


@rule("engine-rank", "no rank's file is missing or empty", stops=True)
def missing_ranks(repository: Repository) -> Iterator[Finding]:
    for model, folder in repository.engines:
        for name in lacking_files(folder, model.engine, executor=model.executor):
            yield model.finding(
                f"{name} is missing or empty; the engine's mapping has {counted(model.engine.mapping.ranks, 'rank')}.",
                _COPY_AGAIN,
            )


@rule("engine-extra", "no rank is of another engine, or a copy of another rank")
def wrong_ranks(repository: Repository) -> Iterator[Finding]:
    """No rank belongs to a larger engine or is a copy of another rank."""
    for model, folder in repository.gpu_engines:
        ranks, sizes = model.engine.mapping.ranks, rank_sizes(folder)
        for name in sizes:
            found = _RANK.fullmatch(name)
            if found is not None and int(found[1]) >= ranks:
                yield model.finding(
                    f"{name} belongs to an engine of more ranks; config.json has {ranks}.",
                    "Are there two engines in one folder? Remove it and copy one engine.",
                )
        first, *others = sorted(name for name, size in sizes.items() if name.endswith(".engine") and size) or [""]
        for name in others:
            if sizes[name] == sizes[first] and filecmp.cmp(folder / first, folder / name, shallow=False):
                yield model.finding(f"{name} is a copy of {first}: every rank has its own weights.", _COPY_AGAIN)


@rule("engine-size", "ranks are about equally large", severity="warning")
def unequal_ranks(repository: Repository) -> Iterator[Finding]:
    for model, folder in repository.gpu_engines:
        sizes = {name: size for name, size in rank_sizes(folder).items() if name.endswith(".engine")}
        if model.engine.mapping.pp_size > 1 or len(sizes) < 2 or not all(sizes.values()):
            continue
        smallest = min(sizes, key=lambda name: sizes[name])
        if sizes[smallest] < _SMALLEST_SHARE * max(sizes.values()):
            yield model.finding(
                f"{smallest} has {sizes[smallest]} bytes, another rank {max(sizes.values())}: was the copy cut off?",
                "Compare its size with the original's.",
            )


@rule("engine-plan", "files of engines begin as they should, and are not cut off")
def damaged_files(repository: Repository) -> Iterator[Finding]:
    for model, folder in repository.engines:
        if model.embedded:
            for graph in sorted(folder.glob("rank*.xml")):
                yield from _damaged_graph(model, graph, graph.with_suffix(".bin"))
            continue
        for name, size in rank_sizes(folder).items():
            if size and name.endswith(".engine") and not begins_like_an_engine(folder / name):
                yield model.finding(f"{name} does not begin like a TensorRT engine; TensorRT refuses it.", _COPY_AGAIN)


def _damaged_graph(model: ModelFolder, graph: Path, weights: Path) -> Iterator[Finding]:
    if not graph.is_file() or not weights.is_file():
        return
    try:
        content, size = read_text(graph, RepositoryError, errors="replace"), weights.stat().st_size
    except RepositoryError as error:
        yield model.finding(error.message, _COPY_AGAIN)
        return
    needed = max((int(found[1]) + int(found[2]) for found in _CONSTANT.finditer(content)), default=0)
    if not content.lstrip().startswith("<"):
        yield model.finding(f"{graph.name} does not describe a network.", _COPY_AGAIN)
    elif size < needed:
        yield model.finding(
            f"{weights.name} has {size} bytes, and {graph.name} needs {needed}: it is cut off.", _COPY_AGAIN
        )


@model_rule("engine-mapping", "world size is tp × pp × cp", with_engine)
def contradicting_mappings(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    mapping = model.engine.mapping
    if mapping.world_size not in (None, mapping.product):
        yield model.finding(
            f"mapping has world_size {mapping.world_size}, and tp × pp × cp is {mapping.product}.",
            "config.json was edited, or belongs to another engine: copy it again.",
        )


@model_rule("engine-release", "engine and repository have one release", with_gpu_engine)
def wrong_release(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    version = model.core.version if model.core is not None else None
    release = repository.part(model.name).get("release")
    if version is None or release is None:
        return
    try:
        built = release_of(version)
    except TrtserveError:
        built = version
    if built != release:
        yield model.finding(
            f"The engine was built by TensorRT-LLM {version}, and the repository is for release {release}.",
            "Make the repository again without --release, or build the engine with that release.",
        )


@model_rule("beam-width", "no more beams than the engine was built for", with_gpu_engine, stops=True)
def many_beams(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    built, beams = model.limit("max_beam_width") or 1, model.number("max_beam_width")
    if beams is not None and beams > built:
        yield model.finding(
            f"max_beam_width is {beams}; the engine was built for {built}.",
            f"Set it to {built}, or build with --max-beam-width {beams}.",
        )


@model_rule("paged-context", "chunked context and KV reuse have what they need", with_gpu_engine)
def without_paged_context(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    for key in ("enable_chunked_context", "enable_kv_cache_reuse"):
        if model.is_true(key) and not model.engine.build.plugin_config.use_paged_context_fmha:
            yield model.finding(
                f"{key} is true; the engine was built without use_paged_context_fmha.",
                "Build it with --use-paged-context-fmha enable, or set the parameter to false.",
            )


@model_rule("engine-in-flight", "the engine can batch in flight", with_gpu_engine)
def without_in_flight_batching(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    plugins = model.engine.plugin_keys
    paged = str(model.engine.build.kv_cache_type).lower() != "continuous"
    reasons = {
        "a continuous KV cache": not paged or model.engine.build.plugin_config.paged_kv_cache is False,
        "padded inputs": plugins.get("remove_input_padding") is False,
        "no attention plugin": not (
            model.engine.plugin_keys.get("gpt_attention_plugin", "auto")
            or model.engine.plugin_keys.get("mamba_conv1d_plugin")
        ),
    }
    if any(reasons.values()) and model.parameters.get("gpt_model_type") in _IN_FLIGHT:
        yield model.finding(
            "Requests cannot be batched in flight: the engine was built with "
            f"{' and '.join(reason for reason, applies in reasons.items() if applies)}.",
            "Build it again with trtllm-build's defaults.",
        )


@model_rule("engine-encoder", "a decoder has its encoder", with_gpu_engine)
def missing_encoders(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.engine.model.architecture == "DecoderModel" and not model.parameters.get("encoder_model_path"):
        yield model.finding(
            "The engine is the decoder of an encoder-decoder model, and encoder_model_path is not set.",
            "Name the encoder's engine: trtserve repo --set encoder_model_path=FOLDER",
        )


@model_rule("decoding-mode", "the engine was built for the decoding mode", with_gpu_engine, severity="warning")
def other_decoding_modes(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    mode = model.parameters.get("decoding_mode", "")
    needed, built = _BUILT_MODES.get(mode), speculative_mode(model.engine.build.speculative_decoding_mode)
    if needed is not None and built != needed:
        yield model.finding(
            f"decoding_mode is {mode}; the engine was built for {built or 'none'}.",
            f"Remove decoding_mode, or build with --speculative-decoding-mode {needed}.",
        )


@model_rule("length-hidden", "prompts may be as long as the engine was built for", with_gpu_engine, severity="warning")
def short_prompts(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    longest, step = model.limit("max_input_len"), model.limit("max_num_tokens")
    if longest is not None and step is not None and step < longest and not model.is_true("enable_chunked_context"):
        yield model.finding(
            f"Prompts end at {step} tokens (max_num_tokens); the engine was built for {longest} (max_input_len).",
            "Set enable_chunked_context to true, or build with a larger --max-num-tokens.",
        )


@model_rule("logits-pipeline", "logits are not gathered over pipeline stages", with_gpu_engine, severity="warning")
def logits_over_stages(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    stages = model.engine.mapping.pp_size
    gathered = [name for name in ("context", "generation") if model.engine.build_keys.get(f"gather_{name}_logits")]
    if stages > 1 and gathered:
        yield model.finding(
            f"The engine gathers {' and '.join(gathered)} logits over {stages} pipeline stages: servers were "
            "reported to crash on requests for them.",
            "Try one request that asks for them; tensor-parallel engines are not affected.",
        )


@model_rule("cache-both", "KV cache by tokens or by share, not both", of_role(CORE), severity="warning")
def two_cache_sizes(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    tokens = model.parameters.get("max_tokens_in_paged_kv_cache")
    share = model.parameters.get("kv_cache_free_gpu_mem_fraction")
    if tokens and share and not model.embedded:
        yield model.finding(
            f"Both max_tokens_in_paged_kv_cache ({tokens}) and kv_cache_free_gpu_mem_fraction ({share}) are set; "
            "the smaller one counts.",
            "Leave one of them empty: `trtserve plan` prints what each comes to.",
        )


@model_rule("cache-small", "the KV cache holds one sequence", with_engine, severity="warning")
def small_caches(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    tokens, longest = model.number("max_tokens_in_paged_kv_cache"), model.limit("max_seq_len")
    if tokens is not None and longest is not None and tokens < longest:
        yield model.finding(
            f"The KV cache holds {tokens} tokens; one sequence of the engine may have {longest}.",
            f"Raise max_tokens_in_paged_kv_cache to {longest} or more.",
        )


@rule("cache-shares", "shares of one GPU's memory add up to at most 1", severity="warning")
def large_cache_shares(repository: Repository) -> Iterator[Finding]:
    def share(model: ModelFolder) -> float:
        try:
            return float(model.parameters.get("kv_cache_free_gpu_mem_fraction") or 0.9)
        except ValueError:
            return 0.0

    models = [model for model, _ in repository.gpu_engines if model.core and not model.core.gpu_device_ids]
    shares = {model.name: share(model) for model in models}
    given = any("kv_cache_free_gpu_mem_fraction" in model.parameters for model in models)
    if given and len(models) > 1 and (total := sum(shares.values())) > 1:
        listed = ", ".join(f"{name} {value:g}" for name, value in shares.items())
        yield models[-1].finding(
            f"kv_cache_free_gpu_mem_fraction of models on the same GPUs adds up to {total:g} ({listed}).",
            "All load at once and see the same free memory: use shares that add up to 0.9.",
        )


_MAKE_AGAIN = "Make the repository again: trtserve repo --lora NAME=FOLDER"


@rule("lora-table", "lora.json can be read")
def invalid_tables(repository: Repository) -> Iterator[Finding]:
    for file, entries in _tables(repository):
        if isinstance(entries, RepositoryError):
            yield Finding(file=file, what=entries.message, fix=_MAKE_AGAIN)


@rule("lora-files", "adapters have their files")
def missing_files(repository: Repository) -> Iterator[Finding]:
    for file, name, entry in _adapters(repository):
        folder = repository.path / entry.folder
        core = repository.models.get(model_names(file.stem.removeprefix("lora"))[CORE])
        wanted = (WEIGHTS, CONFIG) if core is None else adapter_files(core.engine)
        missing = [each for each in wanted if not (folder / each).is_file()]
        if missing:
            what = f"The adapter {name} has no {' and no '.join(missing)} in {entry.folder}."
            yield Finding(file=file, what=what, fix=_MAKE_AGAIN)


@rule("lora-fit", "adapters fit the engine: plugin, modules, layers, ranks, content")
def unfit_adapters(repository: Repository) -> Iterator[Finding]:
    for file, name, entry in _adapters(repository):
        core = repository.models.get(model_names(file.stem.removeprefix("lora"))[CORE])
        folder = repository.path / entry.folder
        if (
            core is None
            or not core.engine.build_keys
            or not all((folder / each).is_file() for each in adapter_files(core.engine))
        ):
            continue
        try:
            (found,) = resolve_adapters({name: folder}, core.engine)
        except RepositoryError as error:
            yield core.finding(error.message, error.hint or _MAKE_AGAIN, folder)
            continue
        if found.task_id != entry.task_id:
            yield core.finding(
                f"The files of the adapter {name} have changed: its task id is {entry.task_id}, and the server "
                "would use a cached adapter with that id.",
                _MAKE_AGAIN,
                folder,
            )


@model_rule("lora-cache", "cache pages hold the engine's ranks", with_gpu_engine, severity="warning")
def small_pages(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    built = model.engine.build.lora_config.max_lora_rank
    largest = whole_number(model.parameters.get("lora_cache_max_adapter_size") or "64")
    if model.engine.plugin_keys.get("lora_plugin") and largest is not None and largest < built:
        yield model.finding(
            f"lora_cache_max_adapter_size is {largest}; the engine takes ranks up to {built}.", f"Set it to {built}."
        )


@model_rule("draft", "draft and target fit each other", of_role(BLS))
def unfit_drafts(repository: Repository, bls: ModelFolder) -> Iterator[Finding]:
    target = repository.core_of(bls)
    draft = repository.models.get(bls.parameters.get("tensorrt_llm_draft_model_name", ""))
    if target is None or draft is None or not (target.engine_described and draft.engine_described):
        return
    if (error := refusal(partial(require_pair, target.engine, draft.engine, draft.name))) is not None:
        yield draft.finding(error.message, error.hint or "", bls.file)


def _tables(repository: Repository) -> Iterator[tuple[Path, dict[str, AdapterEntry] | RepositoryError]]:
    """Every table of adapters: name → entry, or why it is not one."""
    yield from ((file, _read_table(file)) for file in sorted(repository.path.glob("lora*.json")))


def _read_table(file: Path) -> dict[str, AdapterEntry] | RepositoryError:
    try:
        return read_adapter_table(file)
    except RepositoryError as error:
        return error


def _adapters(repository: Repository) -> Iterator[tuple[Path, str, AdapterEntry]]:
    for file, entries in _tables(repository):
        if not isinstance(entries, RepositoryError):
            yield from ((file, name, entry) for name, entry in sorted(entries.items()))
