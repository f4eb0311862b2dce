"""Rules about engines: where they lie, their files, ranks and GPUs, and whether their limits meet the parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject
from trtserve.errors import TrtserveError, counted
from trtserve.releases import release_of
from trtserve.repo.engine import lacking_files, rank_sizes
from trtserve.triton.core_models import LLMAPI_FILE, Groups, world_size
from trtserve.triton.parameters import PARAMETERS
from trtserve.triton.profiles import CORE

_RANK = re.compile(r"rank(\d+)\.(engine|xml|bin)")
_TRUE = ("true", "1")
# Ranks of one tensor-parallel engine hold the same share of every layer.
_ALIKE = 0.8
_PATHS = ("gpt_model_path", "encoder_model_path", "multimodal_model_path", "visual_model_path", "lora_prefetch_dir")
_FILES = ("xgrammar_tokenizer_info_path",)


def unreadable(subject: Subject) -> Iterator[Fault]:
    """config.json, model.yaml and lists of GPUs can be read."""
    for model in subject.models.values():
        if model.fault is not None:
            own = model.role == LLMAPI and LLMAPI_FILE in model.fault.message
            yield Fault(
                model=model.name,
                file=model.version / LLMAPI_FILE if own else model.file,
                what=model.fault.message,
                fix=model.fault.hint
                or (f"Correct {LLMAPI_FILE}." if own else "Take the file over from the engine again."),
            )


def not_there(subject: Subject) -> Iterator[Fault]:
    """Folders and files that parameters name are there."""
    for model in subject.models.values():
        for key in (*_PATHS, *_FILES):
            text = model.parameters.get(key, "")
            unread = model.embedded and key in _FILES  # it has no meaning there
            if not text or unread or _exists(subject, model, key, text):
                continue
            yield _fault(
                model,
                f"{key} is {text!r}, which is not on this machine.",
                "A path of another machine or container? Paths relative to the repository hold everywhere; where one "
                "is mounted elsewhere: trtserve repo --container-paths FOLDER",
            )


def _exists(subject: Subject, model: ModelFolder, key: str, text: str) -> bool:
    path = subject.located(text, model.name)
    return path.is_file() if key in _FILES else path.is_dir()


def outside(subject: Subject) -> Iterator[Fault]:
    """A repository that is complete in itself takes its engine from itself."""
    for model in subject.of(CORE):
        entry = (subject.facts.get("core_models") or {}).get(model.name) or {}
        if not entry.get("engine") or model.core is None or model.core.engine is None:
            continue
        if model.core.engine.resolve() != (subject.path / entry["engine"]).resolve():
            yield _fault(
                model,
                f"gpt_model_path leads to {model.core.engine}; the engine of this repository is {entry['engine']}.",
                f"Write {entry['engine']}, or make the repository again with the other engine.",
            )


def incomplete_config(subject: Subject) -> Iterator[Fault]:
    """The engine's config.json is there and is one of an engine."""
    for model in subject.of(CORE):
        if model.core is None or model.core.engine is None:
            continue
        if not (model.core.engine / "config.json").is_file():
            yield _fault(model, f"{model.core.engine} has no config.json.", "Take it over from the engine's folder.")
        elif not model.build or not model.pretrained:
            yield _fault(
                model,
                f"{model.core.engine / 'config.json'} has no build_config or no pretrained_config: it is no engine's.",
                "Run `trtserve build` on the checkpoint, and make the repository with the engine.",
            )


def lacking_ranks(subject: Subject) -> Iterator[Fault]:
    """Every rank has its file, and none is empty."""
    for model in subject.engines:
        assert model.core is not None
        assert model.core.engine is not None
        for name in lacking_files(model.core.engine, model.engine, embedded=model.embedded):
            yield _fault(
                model,
                f"The engine has no {name}, or it is empty; its mapping has "
                f"{counted(world_size(model.engine), 'rank')}.",
                "Copy every file of the engine, or build it again.",
            )


def further_ranks(subject: Subject) -> Iterator[Fault]:
    """There is no file of a rank that the engine does not have."""
    for model in subject.gpu_engines:
        assert model.core is not None
        assert model.core.engine is not None
        ranks = world_size(model.engine)
        for name in rank_sizes(model.core.engine):
            found = _RANK.fullmatch(name)
            if found is not None and int(found[1]) >= ranks:
                yield _fault(
                    model,
                    f"{name} belongs to an engine of more ranks; config.json tells of {ranks}.",
                    "Two engines in one folder? Remove it and copy one engine.",
                )


def unequal_ranks(subject: Subject) -> Iterator[Fault]:
    """The ranks of a tensor-parallel engine are about as large as each other."""
    for model in subject.gpu_engines:
        assert model.core is not None
        assert model.core.engine is not None
        mapping = model.pretrained.get("mapping") or {}
        sizes = {name: size for name, size in rank_sizes(model.core.engine).items() if name.endswith(".engine")}
        if int(mapping.get("pp_size") or 1) > 1 or len(sizes) < 2 or not all(sizes.values()):
            continue
        smallest = min(sizes, key=lambda name: sizes[name])
        if sizes[smallest] < _ALIKE * max(sizes.values()):
            yield _fault(
                model,
                f"{smallest} has {sizes[smallest]} bytes, another rank {max(sizes.values())}: was its copy cut off?",
                "Compare its size with the original's.",
            )


def contradicting_mapping(subject: Subject) -> Iterator[Fault]:
    """The world size of the mapping is tensor × pipeline × context parallel."""
    for model in subject.engines:
        mapping = model.pretrained.get("mapping") or {}
        sizes = [int(mapping.get(key) or 1) for key in ("tp_size", "pp_size", "cp_size")]
        product = sizes[0] * sizes[1] * sizes[2]
        if int(mapping.get("world_size") or product) != product:
            yield _fault(
                model,
                f"mapping says world_size {mapping['world_size']}, and tp × pp × cp is {product}.",
                "config.json was edited, or belongs to another engine: take it over again.",
            )


def wrong_release(subject: Subject) -> Iterator[Fault]:
    """The engine was built by the release whose tensors the repository has."""
    for model in subject.gpu_engines:
        version, release = (model.core.version if model.core else None), subject.member(model.name).get("release")
        if version is None or release is None:
            continue
        built = _release(version)
        if built != release:
            yield _fault(
                model,
                f"The engine was built by TensorRT-LLM {version}, and the repository is made for release {release}.",
                "Make the repository again without --release, or build the engine with that release.",
            )


def _release(version: str) -> str:
    try:
        return release_of(version)
    except TrtserveError:
        return version


def wrong_groups(subject: Subject) -> Iterator[Fault]:
    """gpu_device_ids and participant_ids have a group for each instance, and a number for each rank."""
    for model, key, groups in _groups(subject):
        assert model.core is not None
        ranks = model.core.world_size
        wrong = next((group for group in groups if not _fits(model, key, len(group), ranks)), None)
        if wrong is not None:
            nodes = f" on num_nodes {model.parameters['num_nodes']}" if "num_nodes" in model.parameters else ""
            yield _fault(
                model,
                f"{key} has the group {','.join(map(str, wrong))} of {len(wrong)} for {counted(ranks, 'rank')}{nodes}.",
                "A group has one number for each rank (tensor × pipeline parallel); gpu_device_ids over several nodes "
                "are those of one of them, with num_nodes.",
            )


def _fits(model: ModelFolder, key: str, count: int, ranks: int) -> bool:
    """A number for each rank; GPUs: for each rank of one of num_nodes, as TensorRT-LLM counts where that is set."""
    nodes = model.parameters.get("num_nodes", "")
    return count * int(nodes) == ranks if key == "gpu_device_ids" and nodes.isdigit() else count == ranks


def wrong_instances(subject: Subject) -> Iterator[Fault]:
    """There are as many instances as groups of GPUs."""
    for model, key, groups in _groups(subject):
        if len(groups) != model.instances:
            yield _fault(
                model,
                f"{key} has {counted(len(groups), 'group')}, and instance_group counts "
                f"{counted(model.instances, 'instance')}.",
                "Make the two numbers equal.",
            )


def repeated_numbers(subject: Subject) -> Iterator[Fault]:
    """No GPU is given twice to one engine, and no MPI rank twice to anything."""
    taken: Counter[int] = Counter()
    for model, key, groups in _groups(subject):
        own = Counter(number for group in groups for number in group)
        if key == "participant_ids":
            taken += own
        twice = [number for number, count in own.items() if count > 1]
        if twice and model.role != LLMAPI:
            yield _fault(
                model,
                f"{key} names {', '.join(map(str, twice))} more than once.",
                "Give each rank a number of its own.",
            )
        elif key == "participant_ids" and any(taken[number] > 1 for number in own):
            shared = sorted(number for number in own if taken[number] > 1)
            yield _fault(
                model, f"{key} names {shared}, which another model has.", "Every rank works for one model only."
            )


def shared_gpus(subject: Subject) -> Iterator[Fault]:
    """Models have the same GPUs, as a leader's ranks give them, or none in common, as an orchestrator needs."""
    placed = [(model, groups) for model, key, groups in _groups(subject) if key == "gpu_device_ids"]
    for number, (model, groups) in enumerate(placed):
        for other, others in placed[:number]:
            shared = {gpu for group in groups for gpu in group} & {gpu for group in others for gpu in group}
            if shared and groups != others:
                told = ", ".join(map(str, sorted(shared)))
                yield _fault(
                    model,
                    f"gpu_device_ids of {model.name} and {other.name} share GPU {told} but are not the same: no "
                    "launch can give them.",
                    "Give each model GPUs of its own (--multi-model), or the same ones to both.",
                )


def leading_participants(subject: Subject) -> Iterator[Fault]:
    """Rank 0 is the orchestrator's."""
    for model, key, groups in _groups(subject):
        if key == "participant_ids" and any(0 in group for group in groups):
            yield _fault(model, "participant_ids names 0, which is the orchestrator's rank.", "Count from 1.")


def several_groups(subject: Subject) -> Iterator[Fault]:
    """The python variant takes one group of GPUs."""
    for model, key, groups in _groups(subject):
        if model.core is not None and model.core.backend == "python" and len(groups) > 1:
            yield _fault(
                model, f"{key} has {len(groups)} groups; the python variant takes one.", "Use the C++ backend for more."
            )


def _groups(subject: Subject) -> Iterator[tuple[ModelFolder, str, Groups]]:
    for model in subject.of(CORE, LLMAPI):
        if model.core is None or model.embedded:
            continue
        for key, groups in (
            ("gpu_device_ids", model.core.gpu_device_ids),
            ("participant_ids", model.core.participant_ids),
        ):
            if groups:
                yield model, key, groups


def wrong_worker(subject: Subject) -> Iterator[Fault]:
    """The program of the workers is where the containers have it."""
    default = next(row.text for row in PARAMETERS[CORE] if row.name == "executor_worker_path")
    for model in subject.of(CORE):
        text = model.parameters.get("executor_worker_path", default)
        if text != default and not subject.located(text, model.name).is_file():
            yield _fault(
                model, f"executor_worker_path is {text!r}, which is not here.", f"NVIDIA's containers have {default}."
            )


def many_beams(subject: Subject) -> Iterator[Fault]:
    """No more beams than the engine was built for."""
    for model in subject.gpu_engines:
        built = model.limit("max_beam_width") or 1
        said = _number(model, "max_beam_width")
        if said is not None and said > built:
            yield _fault(
                model,
                f"max_beam_width is {said}; the engine was built for {built}.",
                f"Set it to {built}, or build with --max-beam-width {said}.",
            )


def no_paged_context(subject: Subject) -> Iterator[Fault]:
    """Chunked context and KV reuse need paged context attention in the engine."""
    for model in subject.gpu_engines:
        plugins = model.build.get("plugin_config") or {}
        for key in ("enable_chunked_context", "enable_kv_cache_reuse"):
            if model.parameters.get(key, "").lower() in _TRUE and not plugins.get("use_paged_context_fmha"):
                yield _fault(
                    model,
                    f"{key} is true; the engine was built without use_paged_context_fmha.",
                    "Build it with --use-paged-context-fmha enable, or set the parameter to false.",
                )


def both_cache_sizes(subject: Subject) -> Iterator[Fault]:
    """The KV cache has a size in tokens, or a share of the memory."""
    for model in subject.of(CORE):
        tokens, share = (
            model.parameters.get(key) for key in ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction")
        )
        if tokens and share and not model.embedded:
            yield _fault(
                model,
                f"Both max_tokens_in_paged_kv_cache ({tokens}) and kv_cache_free_gpu_mem_fraction ({share}) are set; "
                "the smaller one counts.",
                "Leave one of them empty: trtserve plan says what they come to.",
            )


def small_cache(subject: Subject) -> Iterator[Fault]:
    """The KV cache holds the longest sequence of the engine."""
    for model in subject.engines:
        tokens, longest = _number(model, "max_tokens_in_paged_kv_cache"), model.limit("max_seq_len")
        if tokens is not None and longest is not None and tokens < longest:
            yield _fault(
                model,
                f"The KV cache holds {tokens} tokens; one sequence of the engine may have {longest}.",
                f"Raise max_tokens_in_paged_kv_cache to {longest} or more.",
            )


def large_shares(subject: Subject) -> Iterator[Fault]:
    """The KV caches of the models of one GPU take no more than there is."""
    models = [model for model in subject.gpu_engines if model.core is not None and not model.core.gpu_device_ids]
    shares = [_share(model) for model in models]
    if len(models) > 1 and sum(shares) > 1 and any("kv_cache_free_gpu_mem_fraction" in m.parameters for m in models):
        told = ", ".join(f"{model.name} {share:g}" for model, share in zip(models, shares, strict=True))
        yield _fault(
            models[-1],
            f"kv_cache_free_gpu_mem_fraction of models on the same GPUs comes to {sum(shares):g} ({told}).",
            "All load at once and see the same free memory: give shares that add up to 0.9.",
        )


def _share(model: ModelFolder) -> float:
    try:
        return float(model.parameters.get("kv_cache_free_gpu_mem_fraction") or 0.9)
    except ValueError:
        return 0.0


def _number(model: ModelFolder, key: str) -> int | None:
    text = model.parameters.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _fault(model: ModelFolder, what: str, fix: str) -> Fault:
    return Fault(model=model.name, file=model.file, what=what, fix=fix)
