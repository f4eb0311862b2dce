"""The gateway: the HTTP server that clients talk to, in front of Triton's own, which crashes on malformed requests.

One process per Triton server, `python -m trtserve.gateway SETTINGS`, started and stopped with it:

    listener     connections: limits and time-outs of uvicorn's sockets
    app          the application: access and limits for all paths, Triton's protocol below /v2, FastAPI for the rest
    access       API key, Host and Origin
    gate         which requests are running, and whether new ones are let in
    guard        the checks of request bodies
    paths        the paths of Triton's HTTP protocol, and the groups that are closed by default
    relay        requests to Triton and answers back, until either side ends
    health       whether Triton, its stubs and its models can answer
    openai       OpenAI's APIs below /v1, on Triton's gRPC: the core of all APIs
    anthropic    Anthropic's messages on that core
    balancing    which of several servers gets a request
    page         the page of `start --ui`

Import from the modules: this package stays empty, so that `start` can write the settings without loading FastAPI.
"""
