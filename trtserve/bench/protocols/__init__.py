"""How requests travel: gRPC, HTTP generate, OpenAI's API, or an executor in this process."""
