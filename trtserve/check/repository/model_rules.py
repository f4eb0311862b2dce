"""Rules about what every model has: its files, parameters, tensors and steps."""

from __future__ import annotations

from trtserve.check.repository import ensembles, files, loading, settings, tensors
from trtserve.check.repository.findings import Rule

FILES = (
    Rule(name="no-model", about="there is a model", find=files.no_models, stops=True),
    Rule(
        name="placeholder",
        about="no `${…}` of NVIDIA's templates is left",
        find=files.unfilled,
        stops=True,
        complaints=(18,),
    ),
    Rule(name="config-syntax", about="config.pbtxt can be read", find=files.unparsed, stops=True, complaints=(18,)),
    Rule(name="stray-folder", about="every folder is a model", find=files.stray_folders, stops=True),
    Rule(name="model-name", about="`name` is that of the folder", find=files.wrong_names, stops=True, complaints=(4,)),
    Rule(name="version-folder", about="every model has a version", find=files.no_versions, stops=True),
    Rule(
        name="version-served",
        about="the versions that a policy or a step asks for are there",
        find=loading.unserved_versions,
        stops=True,
    ),
    Rule(name="warmup", about="warm-up names tensors and files that are there", find=loading.wrong_warmup, stops=True),
    Rule(name="environment", about="EXECUTION_ENV_PATH leads somewhere", find=loading.absent_environments),
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
    Rule(name="program-syntax", about="programs are Python", find=files.broken_programs),
    Rule(name="program-module", about="programs find their own modules", find=files.lacking_modules, stops=True),
    Rule(
        name="program-package",
        about="programs import packages that there are",
        find=files.unknown_packages,
        severity="warning",
        complaints=(3,),
    ),
    Rule(
        name="program-slow",
        about="no answer counts the vocabulary, as the program of 0.13 does",
        find=files.slow_programs,
        severity="warning",
        complaints=(22,),
    ),
    Rule(name="file-access", about="files can be read, links lead somewhere", find=files.unreadable, stops=True),
    Rule(name="manifest-models", about="the models that the manifest names are there", find=files.lacking_models),
    Rule(
        name="manifest-engine",
        about="engine and manifest tell the same: builder, limits, vocabulary, ranks, sizes of files",
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

SETTINGS = (
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
        stops=True,
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
    Rule(name="batch-none", about="models of the chain have an axis of batches", find=loading.without_batches),
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
    Rule(name="instance-kind", about="instances are on processors that there are", find=loading.wrong_instances),
    Rule(
        name="instance-engine",
        about="instances of one engine have GPUs of their own",
        find=loading.engine_twice,
        severity="warning",
        complaints=(23, 27),
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

TENSORS = (
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
    Rule(name="tensor-twice", about="no tensor is declared twice", find=tensors.declared_twice),
    Rule(name="logits-type", about="logits have the engine's type", find=tensors.wrong_logits, complaints=(39,)),
    Rule(
        name="feature-unreachable",
        about="what the engine was built for is declared",
        find=tensors.unused_features,
        severity="warning",
        complaints=(23,),
    ),
)

ENSEMBLES = (
    Rule(name="ensemble-step", about="steps name models of the repository", find=ensembles.absent_steps, stops=True),
    Rule(name="ensemble-map", about="maps name tensors of the step", find=ensembles.unknown_ends, stops=True),
    Rule(name="ensemble-input", about="needed inputs of a step are mapped", find=ensembles.unmapped_inputs, stops=True),
    Rule(
        name="ensemble-source",
        about="each tensor is made once, each input used",
        find=ensembles.without_source,
        stops=True,
    ),
    Rule(name="ensemble-type", about="both ends have one type", find=ensembles.unequal_types, stops=True),
    Rule(name="ensemble-dims", about="both ends have the same dims", find=ensembles.unequal_dims, stops=True),
    Rule(
        name="ensemble-batch",
        about="batches fit every step",
        find=ensembles.larger_batches,
        stops=True,
        complaints=(23,),
    ),
    Rule(
        name="ensemble-policy",
        about="it streams when a step does",
        find=ensembles.own_policy,
        severity="warning",
        complaints=(20,),
    ),
)
