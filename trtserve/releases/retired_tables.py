"""What old guides type for NVIDIA's tools, and what does the same here.

One table per tool. A line is: the option, the last release that had it (- when the tool still has it), and what to do
here. Sources: the tools of the tagged releases, and the guides that still spread.
"""

from __future__ import annotations

TRTLLM_BUILD = """
max_output_len                   0.11  Give --max_seq_len: tokens of prompt and answer together.
tp_size                          0.11  Parallelism is a property of the checkpoint: `trtserve convert --tp-size`.
pp_size                          0.11  Parallelism is a property of the checkpoint: `trtserve convert --pp-size`.
cp_size                          0.11  Leave it out: checkpoints are not converted for context parallelism here.
world_size                       0.8   Ranks are those of the checkpoint: `trtserve convert --tp-size`, --pp-size.
timing_cache                     0.8   It was split into --input_timing_cache and --output_timing_cache.
use_custom_all_reduce            0.11  Leave it out: the way to reduce is chosen when the engine runs.
multi_block_mode                 0.11  It is chosen at run time: `trtserve repo --set multi_block_mode=true`.
context_fmha_fp32_acc            0.11  Chosen at run time: `trtserve repo --set enable_context_fmha_fp32_acc=true`.
strongly_typed                   0.10  Leave it out: networks are strongly typed.
weight_only_precision            0.10  Precision is a property of the checkpoint: `trtserve convert --quantize`.
attention_qk_half_accumulation   0.10  Leave it out: the kernels choose how they accumulate.
use_context_fmha_for_generation  0.10  Leave it out: it was for tests only.
builder_opt                      0.13  Leave it out: the builder has one level.
builder_force_num_profiles       0.14  Set the environment variable BUILDER_FORCE_NUM_PROFILES.
lookup_plugin                    0.14  Leave it out: embeddings need no plugin.
enable_xqa                       0.15  Leave it out: XQA kernels are always on.
auto_parallel                    1.1   Choose the parallelism yourself: `trtserve convert --tp-size`, --pp-size.
gpus_per_node                    1.1   Leave it out: `trtserve start` writes it into the engine's config.json.
cluster_key                      1.1   It belonged to --auto_parallel, which is gone; leave it out.
checkpoint_dir                   -     Here the checkpoint is the argument: `trtserve build CHECKPOINT`.
output_dir                       -     Here it is --out.
log_level                        -     Leave it out: the log is kept whole, and a build that fails names it.
"""

BUILD_PY = """
use_inflight_batching         0.7   Leave it out: every engine batches in flight.
use_gpt_attention_plugin      0.7   It became --gpt_attention_plugin, which is on (auto) by default.
use_gemm_plugin               0.7   It became --gemm_plugin of trtllm-build.
use_lora_plugin               0.7   It became --lora_plugin.
use_lookup_plugin             0.7   Leave it out: embeddings need no plugin.
use_layernorm_plugin          0.7   Leave it out: norms need no plugin.
use_rmsnorm_plugin            0.7   Leave it out: norms need no plugin.
enable_context_fmha           0.7   It became --context_fmha, which is enabled by default.
enable_context_fmha_fp32_acc  0.7   Chosen at run time: `trtserve repo --set enable_context_fmha_fp32_acc=true`.
dense_context_fmha            0.7   Leave it out: StreamingLLM is not supported any more.
enable_pos_shift              0.7   Leave it out: StreamingLLM is not supported any more.
parallel_build                0.7   It became --workers of trtllm-build.
timing_cache                  0.7   It was split into --input_timing_cache and --output_timing_cache.
visualize                     0.7   It became --visualize_network.
world_size                    0.7   Ranks are --tp-size times --pp-size of `trtserve convert`.
model_dir                     0.7   Build in two steps: `trtserve convert MODEL`, then `trtserve build CHECKPOINT`.
ft_model_dir                  0.7   Convert from the Hugging Face model: `trtserve convert MODEL`.
bin_model_dir                 0.7   Convert from the Hugging Face model: `trtserve convert MODEL`.
meta_ckpt_dir                 0.7   Bring Meta's files into the Hugging Face format first.
quant_ckpt_path               0.7   Convert the quantised Hugging Face model itself: `trtserve convert MODEL`.
hf_lora_dir                   0.7   `trtserve lora FOLDER` converts it, `trtserve repo --lora NAME=FOLDER` serves it.
use_weight_only               0.7   Use `trtserve convert --quantize int8`.
weight_only_precision         0.7   Use `trtserve convert --quantize`.
use_smooth_quant              0.7   Use `trtserve convert --quantize int8_sq`.
per_token                     0.7   It is part of `trtserve convert --quantize int8_sq`.
per_channel                   0.7   It is part of `trtserve convert --quantize int8_sq`.
per_group                     0.7   The group size is read from the quantised model.
group_size                    0.7   The group size is read from the quantised model.
int8_kv_cache                 0.7   Of the checkpoint: `trtserve convert --converter upstream` passes it on behind `--`.
enable_fp8                    0.7   Use `trtserve convert --quantize fp8`.
use_prompt_tuning             0.7   Give --max_prompt_embedding_table_size instead.
use_parallel_embedding        0.7   Use `trtserve convert --use-parallel-embedding`.
embedding_sharding_dim        0.7   Use `trtserve convert --embedding-sharding-dim`.
use_embedding_sharing         0.15  Leave it out: tied embeddings are shared by themselves.
vocab_size                    0.7   It is read from the model's config.json.
n_layer                       0.7   It is read from the model's config.json.
n_head                        0.7   It is read from the model's config.json.
n_kv_head                     0.7   It is read from the model's config.json.
n_embd                        0.7   It is read from the model's config.json.
n_positions                   0.7   It is read from the model's config.json.
inter_size                    0.7   It is read from the model's config.json.
hidden_act                    0.7   It is read from the model's config.json.
rotary_base                   0.7   It is read from the model's config.json.
rotary_scaling                0.7   It is read from the model's config.json.
rotary_pct                    0.7   It is read from the model's config.json.
rms_norm_eps                  0.7   It is read from the model's config.json.
multiple_of                   0.7   It is read from the model's config.json.
ffn_dim_multiplier            0.7   It is read from the model's config.json.
no_bias                       0.7   It is read from the model's config.json.
moe_num_experts               0.7   It is read from the model's config.json.
moe_top_k                     0.7   It is read from the model's config.json.
random_seed                   0.7   Leave it out: it was for models without weights.
"""

CONVERT = """
model_dir                        -     Here the model is the argument: `trtserve convert MODEL`.
output_dir                       -     Here it is --out.
output_model_dir                 -     Here it is --out.
meta_ckpt_dir                    -     Bring Meta's files into the Hugging Face format first.
nemo_ckpt_path                   -     Export the NeMo model to the Hugging Face format first.
ckpt_type                        -     The Hugging Face format is read; convert others to it first.
gpt_variant                      -     Leave it out: it is read from the model's config.json.
world_size                       -     It is --tp-size.
load_by_shard                    -     Leave it out: weights stream by shard always.
load_model_on_cpu                -     Leave it out: no GPU is used.
use_weight_only                  -     It is --quantize int8.
weight_only_precision            -     It is --quantize int8 or --quantize int4.
use_weight_only_with_precision   -     It is --quantize int8 or --quantize int4.
smoothquant                      -     It is --quantize int8_sq.
per_channel                      -     It is part of --quantize int8_sq.
per_token                        -     It is part of --quantize int8_sq.
use_fp8                          -     It is --quantize fp8.
enable_fp8                       -     It is --quantize fp8.
use_fp8_rowwise                  -     Rowwise FP8 is read from a model that has it.
int8_kv_cache                    -     `trtserve convert --converter upstream` passes it on, written behind `--`.
fp8_kv_cache                     -     `trtserve convert --converter upstream` passes it on, written behind `--`.
quant_ckpt_path                  -     Convert the quantised Hugging Face model itself.
ammo_quant_ckpt_path             0.9   Convert the quantised Hugging Face model itself.
group_size                       -     It is read from the quantised model.
per_group                        -     It is read from the quantised model.
use_embedding_sharing            0.15  Leave it out: tied embeddings are shared by themselves.
moe_tp_mode                      0.9   Give --moe-tp-size and --moe-ep-size.
moe_num_experts                  -     It is read from the model's config.json.
moe_top_k                        -     It is read from the model's config.json.
moe_renorm_mode                  -     It is read from the model's config.json.
n_layer                          -     It is read from the model's config.json.
n_head                           -     It is read from the model's config.json.
n_kv_head                        -     It is read from the model's config.json.
n_embd                           -     It is read from the model's config.json.
inter_size                       -     It is read from the model's config.json.
vocab_size                       -     It is read from the model's config.json.
hidden_act                       -     It is read from the model's config.json.
rotary_base                      -     It is read from the model's config.json.
hf_lora_dir                      0.8   `trtserve lora FOLDER` converts an adapter.
use_prompt_tuning                0.8   Give --max_prompt_embedding_table_size when the engine is built.
max_prompt_embedding_table_size  0.7   Give it when the engine is built: `trtserve build`.
log_level                        -     Leave it out: `trtserve --debug convert` says more.
"""

QUANTIZE = """
qformat         -  It is `trtserve convert --quantize`, which runs quantize.py where a format needs calibration.
kv_cache_dtype  -  `trtserve convert --quantize int8_sq` (int4_awq, fp8) passes it on, written behind `--`.
"""

LORA = """
i               -  The adapter is the argument: `trtserve lora ADAPTER`.
in_file         -  The adapter is the argument: `trtserve lora ADAPTER`.
o               -  It is --out.
out_dir         -  It is --out.
"""

LAUNCH = """
tritonserver             -     The tritonserver on PATH is started, else that of the container.
force                    -     Leave it out: only ports that are taken matter; --auto-ports finds free ones.
log                      -     `trtserve logs` shows the log; `-- --log-verbose=3` makes it say more.
log_file                 -     Leave it out: the log is kept, `trtserve logs` shows it.
tensorrt_llm_model_name  -     Leave it out: the core models are read from the repository.
no_mpi                   -     Leave it out: one rank is started without mpirun where the release can.
trtllm_llmapi_launch     -     Leave it out: repositories of the llmapi runtime are launched so.
trt_root                 0.9   Leave it out: TensorRT is that of the container.
"""

TEMPLATE = """
i      -     A folder of templates is filled by `trtserve repo --from-template DIR KEY:VALUE,…`, with --in-place.
max_num_sequences              0.7   Leave it out: the executor holds max_batch_size sequences, which the engine says.
enable_trt_overlap             0.9   Leave it out: the executor overlaps by itself; later an experiment is called so.
tokenizer_type                 0.8   Leave it out: the files of the tokenizer say what it is.
tokenizer_dir                  -     Here it is --tokenizer.
decoupled_mode                 -     Here it is --streaming or --no-streaming.
decoupled                      -     Here it is --streaming or --no-streaming.
triton_max_batch_size          -     Here it is --triton-max-batch-size.
preprocessing_instance_count   -     Here it is --preprocessing-instance-count.
postprocessing_instance_count  -     Here it is --postprocessing-instance-count.
bls_instance_count             -     Here it is --bls-instance-count.
triton_backend                 -     Here it is --triton-backend.
engine_dir                     -     Here the engine is the argument: `trtserve repo ENGINE`.
gpt_model_path                 -     Here the engine is the argument: `trtserve repo ENGINE`.
max_kv_cache_length            0.6   It became max_attention_window_size.
"""

CLIENT = """
tokenizer_type         -     Leave it out: the files of the tokenizer say what it is.
dtype                  -     Leave it out: the model declares the type of its prompt table.
overwrite_output_text  -     Leave it out: whether answers accumulate is read from the model.
url_target             -     Serve both models in one repository (`trtserve repo --draft-engine`), then --url.
url_draft              -     Serve both models in one repository (`trtserve repo --draft-engine`), then --url.
"""

RUN_PY = """
max_output_len                     -     Here it is --max-tokens.
engine_dir                         -     Here it is --engine, with --local.
input_text                         -     Here the prompt is the argument: `trtserve query "TEXT"`.
num_beams                          -     Here it is --beam-width.
lora_dir                           -     Here it is --lora.
lora_task_uids                     -     Here it is --lora-task-id.
max_input_length                   -     Leave it out: the engine says what it takes.
streaming_interval                 -     Leave it out: every token is shown when it comes.
run_profiling                      -     Use `trtserve bench`.
use_py_session                     0.19  Leave it out: there is one executor.
medusa_choices                     -     Give it to the repository: `trtserve repo --set medusa_choices=…`.
eagle_choices                      -     Give it to the repository: `trtserve repo --set eagle_choices=…`.
kv_cache_free_gpu_memory_fraction  -     Give it to the repository: `trtserve repo --kv-cache-free-gpu-mem-fraction`.
max_attention_window_size          -     Give it to the repository: `trtserve repo --max-attention-window-size`.
output_csv                         -     Here it is --save DIR, for every output.
output_npy                         -     Here it is --save DIR, for every output.
"""

BENCH = """
protocol                 -     Leave it out: it measures over gRPC.
i                        -     Leave it out: it measures over gRPC.
decoupled                -     Leave it out: it is read from the model.
stream_timeout           -     Here it is --timeout, for the whole measurement.
tensorrt_llm_model_name  -     Here it is --model.
time_delay_dist          -     Here it is --arrivals exponential or --arrivals constant.
op_stats_csv             -     Here it is --out, and --json.
dump_perfetto_trace      -     Here it is --out: it keeps every request.
exclude_input_in_output  -     Leave it out: it is read from the model.
check_perf_json          -     Compare the results of two runs: --json.
check_perf_key           -     Compare the results of two runs: --json.
check_perf_atol          -     Compare the results of two runs: --json.
check_perf_rtol          -     Compare the results of two runs: --json.
dataset                  -     It is a command here: `trtserve bench dataset --dataset FILE`.
tokenizer_type           -     Leave it out: the tokenizer's own files name its type.
histogram_key            -     Give the lengths: --input-mean, --output-mean.
"""

END_TO_END = """
test_bls                -     Here it is --model tensorrt_llm_bls.
test_llmapi             -     Leave it out: it is read from the model.
model_name              -     Here it is --model.
streaming               -     Leave it out: it is read from the model.
return_context_logits   -     Ask for them once: `trtserve query --return-context-logits`.
return_generation_logits  -   Ask for them once: `trtserve query --return-generation-logits`.
return_log_probs        -     Ask for them once: `trtserve query --return-log-probs`.
"""

GENAI_PERF = """
synthetic_input_tokens_mean       -     Here it is --input-mean.
synthetic_input_tokens_stddev     -     Here it is --input-stdev.
output_tokens_mean                -     Here it is --output-mean.
output_tokens_stddev              -     Here it is --output-stdev.
output_tokens_mean_deterministic  -     Leave it out, or give --ignore-eos: answers have the length that was asked for.
num_prompts                       -     Here it is --num-requests.
measurement_interval              -     Here it is --num-requests.
random_seed                       -     Here it is --seed.
profile_export_file               -     Here it is --out.
service_kind                      -     Leave it out: it measures Triton.
backend                           -     Leave it out: it measures models of TensorRT-LLM.
streaming                         -     Leave it out: it is read from the model.
extra_inputs                      -     Leave it out: answers have the length that was asked for.
"""

TABLES = {
    "trtllm-build": TRTLLM_BUILD,
    "build.py": BUILD_PY,
    "convert_checkpoint.py": CONVERT,
    "quantize.py": QUANTIZE,
    "launch_triton_server.py": LAUNCH,
    "fill_template.py": TEMPLATE,
    "inflight_batcher_llm_client.py": CLIENT,
    "run.py": RUN_PY,
    "hf_lora_convert.py": LORA,
    "benchmark_core_model.py": BENCH,
    "end_to_end_test.py": END_TO_END,
    "genai-perf": GENAI_PERF,
}

TOOLS_OF = {
    "import": ("trtllm-build", "convert_checkpoint.py", "quantize.py", "build.py", "fill_template.py"),
    "convert": ("convert_checkpoint.py", "quantize.py", "build.py", "trtllm-build"),
    "build": ("trtllm-build", "build.py", "convert_checkpoint.py", "quantize.py", "fill_template.py"),
    "repo": ("fill_template.py",),
    "start": ("launch_triton_server.py",),
    "lora": ("hf_lora_convert.py",),
    "query": ("inflight_batcher_llm_client.py", "run.py"),
    "bench": ("benchmark_core_model.py", "end_to_end_test.py", "genai-perf"),
}
"""Command of trtserve → the tools whose options its users may know; any other command: every tool."""
