"""The lists that vLLM's registry has."""

_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
_MULTIMODAL_MODELS = {"LlavaForConditionalGeneration": ("llava", "LlavaForConditionalGeneration")}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertEmbeddingModel")}
_SEQUENCE_CLASSIFICATION_MODELS = {"BertForSequenceClassification": ("bert", "BertForSequenceClassification")}
