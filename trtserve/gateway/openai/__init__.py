"""The OpenAI API in front of a Triton server: completions and chat, streamed or whole."""
