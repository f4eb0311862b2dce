"""BLS model in front of `llmapi`: the text tensors of `tensorrt_llm_bls`, mapped to those of the LLM API."""
