"""Rules about what the models run and read: engines, adapters, tokenizers, LLMs; and about the machine."""

from __future__ import annotations

from trtserve.check.repository import adapters, engines, llmapi, machine, plans, tokenizers
from trtserve.check.repository.findings import Rule

ENGINES = (
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
        name="engine-config",
        about="an engine has its config.json",
        find=engines.incomplete_config,
        stops=True,
        complaints=(2, 16),
    ),
    Rule(
        name="engine-rank",
        about="no rank's file is missing or empty",
        find=engines.lacking_ranks,
        stops=True,
        complaints=(16, 24),
    ),
    Rule(name="engine-extra", about="no file of another world size", find=engines.further_ranks, complaints=(13, 24)),
    Rule(
        name="engine-plan",
        about="files of engines are such: tag, description, length of the weights",
        find=plans.no_engine_files,
        complaints=(1, 16),
    ),
    Rule(name="engine-copy", about="no rank is a copy of another", find=plans.copied_ranks, complaints=(16, 24)),
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
    Rule(name="gpu-shared", about="models have the same GPUs or their own", find=engines.shared_gpus),
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
    Rule(name="engine-in-flight", about="the engine can batch in flight", find=plans.not_in_flight, complaints=(23,)),
    Rule(name="engine-encoder", about="a decoder has its encoder", find=plans.no_encoder),
    Rule(
        name="decoding-mode",
        about="the engine was built for the way tokens are chosen",
        find=plans.other_decoding,
        severity="warning",
    ),
    Rule(
        name="length-hidden",
        about="prompts may be as long as the engine was built for",
        find=plans.hidden_limits,
        severity="warning",
        complaints=(17,),
    ),
    Rule(
        name="logits-pipeline",
        about="logits are not gathered over pipeline stages",
        find=plans.logits_of_stages,
        severity="warning",
        complaints=(39,),
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

ADAPTERS = (
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

TOKENIZERS = (
    Rule(
        name="tokenizer-path",
        about="tokenizer_dir is a folder here",
        find=tokenizers.absent,
        stops=True,
        complaints=(7,),
    ),
    Rule(name="tokenizer-files", about="it holds a tokenizer", find=tokenizers.without_files, complaints=(7,)),
    Rule(name="tokenizer-pair", about="both ends use one tokenizer", find=tokenizers.two_tokenizers, complaints=(21,)),
    Rule(
        name="tokenizer-vocabulary",
        about="its ids are within the engine's vocabulary",
        find=tokenizers.large_vocabularies,
        complaints=(7,),
    ),
    Rule(name="tokenizer-added", about="so are its added tokens", find=tokenizers.large_additions, severity="warning"),
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

LLMAPI = (
    Rule(name="llmapi-settings", about="there is a model.yaml", find=llmapi.no_settings, stops=True),
    Rule(
        name="llmapi-keyword",
        about="the LLM has every keyword",
        find=llmapi.unknown,
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

MACHINE = (
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
        name="machine-gpu-memory",
        about="no rank's engine is larger than a GPU",
        find=machine.large_engines,
        needs="machine",
        complaints=(14, 27),
    ),
    Rule(
        name="machine-memory",
        about="python models have memory to share",
        find=machine.little_shared_memory,
        needs="machine",
        complaints=(28,),
    ),
)
