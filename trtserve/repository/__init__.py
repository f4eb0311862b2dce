"""Triton Inference Server: model configuration, the server process, and clients.

What the models are:

- `tables/`: tensors and parameters of NVIDIA's models per release, as YAML; `parameters` and `profiles` read them
- `settings`: what `--set` may set; `config`: writes and reads config.pbtxt

What a repository on disk will serve:

- `preflight`: models, engines and settings, read from its files; `core_models`: the models that run an engine
- `engine_match`: does an engine fit this machine; `embedded`: does the embedded executor accept the parameters

The server process:

- `installation`: finds tritonserver and its Python stub; `stub_probe`: one round trip through the stub
- `tritonserver`: command line, health, shared memory; `startup`: waits until it is ready, stops it
- `server_log`: reasons of failures, lines of ranks; `metrics`: reads the metrics page

Clients, all with the interface `client.Client`:

- `grpc_client`, `http_client`, `local_client` (an executor in this process)
- `tensors`: values to bytes and back; `call_errors`: the errors that users see
"""
