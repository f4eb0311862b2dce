"""Tensors and parameters of `preprocessing` and `postprocessing`."""

from __future__ import annotations

PREPROCESSING_INPUTS = """
QUERY                   STRING  1            -                0.12
DECODER_QUERY           STRING  1            optional         0.12
IMAGE                   FP16    3,224,224    optional         0.12  0.12
IMAGE_BYTES             UINT8   -1,-1,-1,-1  optional         0.15
IMAGE_URL               STRING  1            optional         0.15
IMAGES                  STRING  -1           optional         0.20
VIDEO_BYTES             UINT8   -1,-1,-1,-1  optional         0.16
REQUEST_OUTPUT_LEN      INT32   1            -                0.12
BAD_WORDS_DICT          STRING  -1           optional         0.6
STOP_WORDS_DICT         STRING  -1           optional         0.6
EMBEDDING_BIAS_WORDS    STRING  -1           optional         0.6
EMBEDDING_BIAS_WEIGHTS  FP32    -1           optional         0.6
END_ID                  INT32   1            optional         0.12
PAD_ID                  INT32   1            optional         0.12
PROMPT_EMBEDDING_TABLE  FP16    -1,-1        optional,ragged  0.12  0.12
PROMPT_TABLE_EXTRA_ID   UINT64  1            optional         0.13
"""

UNION_PREPROCESSING_INPUTS = """
LORA_NAME     STRING  1      optional  1.2
LORA_TASK_ID  UINT64  1      optional  1.2
LORA_WEIGHTS  $lora   -1,-1  optional  1.2
LORA_CONFIG   INT32   -1,3   optional  1.2
"""

PREPROCESSING_OUTPUTS = """
INPUT_ID                    INT32   -1           -  0.5
REQUEST_INPUT_LEN           INT32   1            -  0.5
DECODER_INPUT_ID            INT32   -1           -  0.11
REQUEST_DECODER_INPUT_LEN   INT32   1            -  0.11
BAD_WORDS_IDS               INT32   2,-1         -  0.5
STOP_WORDS_IDS              INT32   2,-1         -  0.5
EMBEDDING_BIAS              FP32    -1           -  0.6
REQUEST_OUTPUT_LEN          INT32   -1           -  0.7
OUT_END_ID                  INT32   1            -  0.12
OUT_PAD_ID                  INT32   1            -  0.12
OUT_PROMPT_EMBEDDING_TABLE  FP16    -1,-1        -  0.12  0.12
OUT_PROMPT_TABLE_EXTRA_IDS  UINT64  -1           -  0.13
PIXEL_VALUES                FP16    -1,-1,-1,-1  -  0.15
ASPECT_RATIO_IDS            INT64   -1           -  0.15
ASPECT_RATIO_MASK           INT64   -1,-1        -  0.15
CROSS_ATTENTION_MASK        INT64   -1,-1,-1     -  0.15
IMAGE_SIZES                 INT64   2            -  0.16  0.19
IMAGE_SIZES                 INT64   -1,2         -  0.20
IS_VIDEO_INPUT              BOOL    1            -  0.16
ATTENTION_MASK              INT64   -1           -  0.19
IMAGE_GRID_THW              INT64   3            -  0.19
VISION_INPUT_ID             INT32   -1           -  0.19
"""

UNION_PREPROCESSING_OUTPUTS = """
OUT_LORA_TASK_ID  UINT64  1      -  1.2
OUT_LORA_WEIGHTS  $lora   -1,-1  -  1.2
OUT_LORA_CONFIG   INT32   -1,3   -  1.2
"""

POSTPROCESSING_INPUTS = """
TOKENS_BATCH       INT32  -1,-1     -         0.5
SEQUENCE_LENGTH    INT32  -1        -         0.6
CUM_LOG_PROBS      FP32   -1        optional  0.9   0.13
OUTPUT_LOG_PROBS   FP32   -1,-1     optional  0.9   0.13
CONTEXT_LOGITS     FP32   -1,-1     optional  0.8   0.13
GENERATION_LOGITS  FP32   -1,-1,-1  optional  0.8   0.13
BATCH_INDEX        INT32  1         optional  0.12  0.13
"""

POSTPROCESSING_OUTPUTS = """
OUTPUT                 STRING  -1        -  0.6
OUT_CUM_LOG_PROBS      FP32    -1        -  0.6   0.13
OUT_OUTPUT_LOG_PROBS   FP32    -1,-1     -  0.6   0.13
OUT_CONTEXT_LOGITS     FP32    -1,-1     -  0.8   0.13
OUT_GENERATION_LOGITS  FP32    -1,-1,-1  -  0.8   0.13
OUT_BATCH_INDEX        INT32   1         -  0.12  0.13
"""
