"""The gateway: the HTTP server that clients talk to, in front of Triton's own, which crashes on malformed requests.

One process per Triton server, `python -m trtserve.gateway SETTINGS`, started and stopped with it:

    listener     connections: limits and time-outs of uvicorn's sockets
    app          the application: access and limits for all paths, Triton's protocol below /v2, FastAPI for the rest
    admission    who may send requests, how many run, and how long they may take
    guard        the checks of request bodies
    triton       Triton's HTTP protocol: its paths, the groups that are closed, whether its stubs and models answer
    relay        requests to Triton and answers back, until either side ends
    openai       OpenAI's APIs below /v1, on Triton's gRPC: the core of all APIs
    anthropic    Anthropic's messages on that core; ollama: Ollama's API
    replicas     several copies behind one port; balancing: who gets a request; grpc_front: the same for gRPC
    many         many models behind one port; keeping: which of them are loaded
    processes    several processes behind one port
    request_log  a line for each request
    page         the page of `start --ui`

Import from the modules: this package stays empty, so that `start` can write the settings without loading FastAPI.
"""
