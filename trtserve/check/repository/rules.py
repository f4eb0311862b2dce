"""Every rule that a repository is checked by, in the order in which their findings are told."""

from __future__ import annotations

from trtserve.check.repository import (
    adapters,
    engines,
    ensembles,
    files,
    llmapi,
    machine,
    settings,
    tensors,
    tokenizers,
)
from trtserve.check.repository.findings import Rule

_FILES = (
    Rule(name="no-model", about="there is a model", find=files.no_models, stops=True),
    Rule(
        name="placeholder",
        about="no `${…}` of NVIDIA's templates is left",
        find=files.unfilled,
        stops=True,
        complaints=(18,),
    ),
    Rule(name="config-syntax", about="config.pbtxt can be read", find=files.unparsed, stops=True, complaints=(18,)),
    Rule(name="stray-folder", about="every folder is a model", find=files.stray_folders),
    Rule(name="model-name", about="`name` is that of the folder", find=files.wrong_names, stops=True, complaints=(4,)),
    Rule(name="version-folder", about="every model has a version", find=files.no_versions, stops=True),
    Rule(
        name="backend", about="backend or platform fits the model's name and tensors", find=files.wrong_kind, stops=True
    ),
    Rule(
        name="program-missing",
        about="python models have their model.py",
        find=files.no_programs,
        stops=True,
        complaints=(29,),
    ),
    Rule(name="program-syntax", about="programs are Python", find=files.broken_programs, stops=True),
    Rule(name="program-module", about="programs find their own modules", find=files.lacking_modules, stops=True),
    Rule(name="file-access", about="files can be read, links lead somewhere", find=files.unreadable, stops=True),
    Rule(name="manifest-models", about="the models that the manifest names are there", find=files.lacking_models),
    Rule(
        name="manifest-engine",
        about="engine and manifest tell the same: limits, vocabulary, ranks, sizes of files",
        find=files.stale_engines,
        stops=True,
        complaints=(16,),
    ),
    Rule(
        name="parameter-classes",
        about="parameter_classes.json is that of the release",
        find=files.stale_classes,
        severity="warning",
    ),
)
_TENSORS = (
    Rule(name="tensor-type", about="data types are those of the release", find=tensors.wrong_types, complaints=(4,)),
    Rule(name="tensor-dims", about="dims are those of the release", find=tensors.wrong_dims, complaints=(35,)),
    Rule(name="tensor-shape", about="reshape and ragged batches are declared", find=tensors.wrong_shapes),
    Rule(
        name="tensor-optional",
        about="what clients may leave out is optional",
        find=tensors.not_optional,
        complaints=(35,),
    ),
    Rule(name="tensor-missing", about="what a model needs is declared", find=tensors.lacking_tensors),
    Rule(
        name="tensor-release",
        about="no tensor belongs to another release only (`min_length`, `min_tokens`)",
        find=tensors.other_releases,
        complaints=(4, 19),
    ),
    Rule(name="tensor-name", about="no tensor is misspelt", find=tensors.misspelt, severity="warning"),
    Rule(name="tensor-twice", about="no tensor is declared twice", find=tensors.declared_twice, stops=True),
    Rule(name="logits-type", about="logits have the engine's type", find=tensors.wrong_logits, complaints=(39,)),
    Rule(
        name="feature-unreachable",
        about="what the engine was built for is declared",
        find=tensors.unused_features,
        severity="warning",
        complaints=(23,),
    ),
)
_ENSEMBLES = (
    Rule(name="ensemble-step", about="steps name models of the repository", find=ensembles.absent_steps, stops=True),
    Rule(name="ensemble-map", about="maps name tensors of the step", find=ensembles.unknown_ends, stops=True),
    Rule(name="ensemble-input", about="needed inputs of a step are mapped", find=ensembles.unmapped_inputs, stops=True),
    Rule(name="ensemble-source", about="each tensor is made once", find=ensembles.without_source, stops=True),
    Rule(name="ensemble-type", about="both ends have one type", find=ensembles.unequal_types, stops=True),
    Rule(name="ensemble-dims", about="both ends have the same dims", find=ensembles.unequal_dims, stops=True),
    Rule(
        name="ensemble-batch",
        about="batches fit every step",
        find=ensembles.larger_batches,
        stops=True,
        complaints=(23,),
    ),
    Rule(name="ensemble-policy", about="it streams when a step does", find=ensembles.own_policy, complaints=(20,)),
)
_SETTINGS = (
    Rule(
        name="parameter-release",
        about="parameters belong to the release",
        find=settings.other_releases,
        severity="warning",
        complaints=(19,),
    ),
    Rule(
        name="parameter-unknown",
        about="something reads each parameter",
        find=settings.unknown_keys,
        severity="warning",
        complaints=(19,),
    ),
    Rule(name="parameter-value", about="each value is one that is taken", find=settings.wrong_values),
    Rule(
        name="parameter-missing",
        about="mandatory parameters are there",
        find=settings.lacking_parameters,
        stops=True,
        complaints=(19,),
    ),
    Rule(name="parameter-empty", about="no list is empty on the C++ backend", find=settings.empty_lists),
    Rule(name="parameter-refused", about="the openvino runtime carries it out", find=settings.refused, stops=True),
    Rule(
        name="streaming",
        about="core and BLS model have one transaction policy",
        find=settings.mixed_policies,
        complaints=(20,),
    ),
    Rule(
        name="streaming-tokenizer",
        about="pre- and postprocessing answer once",
        find=settings.streaming_tokenizers,
        complaints=(20,),
    ),
    Rule(
        name="batch-engine",
        about="batches are not larger than the engine's",
        find=settings.large_batches,
        severity="warning",
        complaints=(23,),
    ),
    Rule(name="batch-inner", about="inner models take the BLS model's batches", find=settings.inner_batches),
    Rule(name="batch-preferred", about="preferred batches are possible", find=settings.preferred_batches, stops=True),
    Rule(
        name="queue-delay",
        about="queues hold requests back for less than a second",
        find=settings.long_delays,
        severity="warning",
        complaints=(23,),
    ),
    Rule(
        name="instance-count",
        about="the number of instances is given",
        find=settings.no_instances,
        severity="warning",
        complaints=(23,),
    ),
    Rule(
        name="instance-bls",
        about="BLS processes can fill the engine's batch",
        find=settings.one_at_a_time,
        severity="warning",
        complaints=(23,),
    ),
    Rule(name="inner-model", about="the models that a BLS model asks are there", find=settings.absent_models),
)
_ENGINES = (
    Rule(
        name="core-files",
        about="config.json, model.yaml and lists of GPUs can be read",
        find=engines.unreadable,
        stops=True,
        complaints=(2, 16),
    ),
    Rule(
        name="path",
        about="paths of engines and adapters lead somewhere here",
        find=engines.not_there,
        complaints=(7,),
    ),
    Rule(name="path-outside", about="the engine is the repository's own", find=engines.outside),
    Rule(
        name="engine-config", about="an engine has its config.json", find=engines.incomplete_config, complaints=(2, 16)
    ),
    Rule(
        name="engine-rank", about="no rank's file is missing or empty", find=engines.lacking_ranks, complaints=(16, 24)
    ),
    Rule(name="engine-extra", about="no file of another world size", find=engines.further_ranks, complaints=(13, 24)),
    Rule(
        name="engine-size",
        about="ranks are about equally large",
        find=engines.unequal_ranks,
        severity="warning",
        complaints=(16,),
    ),
    Rule(
        name="engine-mapping",
        about="world size is tp × pp × cp",
        find=engines.contradicting_mapping,
        complaints=(13, 24),
    ),
    Rule(
        name="engine-release",
        about="engine and repository are of one release",
        find=engines.wrong_release,
        complaints=(1, 4),
    ),
    Rule(name="gpu-ranks", about="groups have as many GPUs as ranks", find=engines.wrong_groups, complaints=(24, 25)),
    Rule(name="gpu-instances", about="as many instances as groups", find=engines.wrong_instances, complaints=(25,)),
    Rule(name="gpu-twice", about="no GPU and no MPI rank is used twice", find=engines.repeated_numbers),
    Rule(
        name="participant-zero",
        about="rank 0 is the orchestrator's",
        find=engines.leading_participants,
        complaints=(30,),
    ),
    Rule(name="gpu-python", about="the python variant has one group", find=engines.several_groups),
    Rule(
        name="worker-path",
        about="the worker's program is there",
        find=engines.wrong_worker,
        severity="warning",
        complaints=(30,),
    ),
    Rule(name="beam-width", about="no more beams than were built", find=engines.many_beams, stops=True),
    Rule(
        name="paged-context",
        about="chunked context and KV reuse have what they need",
        find=engines.no_paged_context,
        complaints=(23,),
    ),
    Rule(
        name="cache-both",
        about="KV cache by tokens or by share, not both",
        find=engines.both_cache_sizes,
        severity="warning",
        complaints=(27,),
    ),
    Rule(
        name="cache-small",
        about="the KV cache holds one sequence",
        find=engines.small_cache,
        severity="warning",
        complaints=(17, 27),
    ),
    Rule(
        name="cache-shares",
        about="shares of one GPU's memory add up to 1 at most",
        find=engines.large_shares,
        severity="warning",
        complaints=(27,),
    ),
)
_ADAPTERS = (
    Rule(name="lora-table", about="lora.json can be read", find=adapters.broken_tables, complaints=(38,)),
    Rule(name="lora-files", about="adapters have their files", find=adapters.lacking_files, complaints=(38,)),
    Rule(
        name="lora-fit",
        about="adapters fit the engine: plugin, modules, layers, ranks, content",
        find=adapters.not_fitting,
        complaints=(38,),
    ),
    Rule(
        name="lora-cache",
        about="cache pages take the engine's ranks",
        find=adapters.small_pages,
        severity="warning",
        complaints=(38,),
    ),
    Rule(name="draft", about="draft and target fit each other", find=adapters.wrong_drafts),
)
_TOKENIZERS = (
    Rule(name="tokenizer-path", about="tokenizer_dir is a folder here", find=tokenizers.absent, complaints=(7,)),
    Rule(name="tokenizer-files", about="it holds a tokenizer", find=tokenizers.without_files, complaints=(7,)),
    Rule(name="tokenizer-pair", about="both ends use one tokenizer", find=tokenizers.two_tokenizers, complaints=(21,)),
    Rule(
        name="tokenizer-vocabulary",
        about="its ids are within the engine's vocabulary",
        find=tokenizers.large_vocabularies,
        complaints=(7,),
    ),
    Rule(
        name="tokenizer-end",
        about="it ends texts as the model does",
        find=tokenizers.wrong_ends,
        severity="warning",
        complaints=(36,),
    ),
    Rule(
        name="tokenizer-load",
        about="it can be loaded, without code of strangers",
        find=tokenizers.not_working,
        needs="tokenizer",
        complaints=(7,),
    ),
    Rule(
        name="tokenizer-exact",
        about="it gives back what it was given",
        find=tokenizers.not_exact,
        severity="warning",
        needs="tokenizer",
        complaints=(21,),
    ),
    Rule(
        name="chat-template",
        about="the chat template takes a question",
        find=tokenizers.broken_templates,
        needs="tokenizer",
    ),
)
_LLMAPI = (
    Rule(name="llmapi-settings", about="there is a model.yaml", find=llmapi.no_settings),
    Rule(
        name="llmapi-keyword",
        about="no keyword is misspelt",
        find=llmapi.misspelt,
        severity="warning",
        complaints=(19,),
    ),
    Rule(name="llmapi-dropped", about="no keyword was dropped", find=llmapi.dropped, complaints=(19,)),
    Rule(name="llmapi-value", about="values are of their kind", find=llmapi.wrong_values),
    Rule(name="llmapi-model", about="the model is there", find=llmapi.absent_model, complaints=(7,)),
    Rule(
        name="llmapi-ranks",
        about="manifest and model.yaml have one parallelism",
        find=llmapi.other_ranks,
        complaints=(24,),
    ),
    Rule(name="llmapi-policy", about="config.pbtxt and model.yaml agree", find=llmapi.other_policy, complaints=(20,)),
)
_MACHINE = (
    Rule(
        name="machine-engine",
        about="TensorRT-LLM, TensorRT and GPU are those of the engine",
        find=machine.foreign_engines,
        needs="machine",
        complaints=(1,),
    ),
    Rule(
        name="machine-release",
        about="what is installed runs engines",
        find=machine.no_engine_path,
        needs="machine",
        complaints=(1,),
    ),
    Rule(name="machine-gpus", about="every rank has a GPU", find=machine.few_gpus, needs="machine", complaints=(25,)),
    Rule(
        name="machine-memory",
        about="python models have memory to share",
        find=machine.little_shared_memory,
        needs="machine",
        complaints=(28,),
    ),
)

RULES: tuple[Rule, ...] = (
    *_FILES,
    *_SETTINGS,
    *_ENGINES,
    *_TENSORS,
    *_ENSEMBLES,
    *_ADAPTERS,
    *_TOKENIZERS,
    *_LLMAPI,
    *_MACHINE,
)
