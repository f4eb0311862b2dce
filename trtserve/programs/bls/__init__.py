"""Model `tensorrt_llm_bls`: text in and out; calls the preprocessing and core models itself."""
