"""What a Triton model repository is: its models in every release, making one, reading one, and checking one.

- `tables/`: tensors and parameters of NVIDIA's models per release, as YAML; `profiles` reads them
- `config`: writes and reads config.pbtxt; `settings`: what `--set` may set; `templates`: fills NVIDIA's own templates
- `layout`: names and paths in a repository; `programs`: the model.py programs that are copied into it

Making one:

- `options`: configurations from the spec and the engine; `embedded`: whether the embedded executor starts with them
- `tokenizer`, `adapters`, `draft`: what a repository has besides an engine
- `assembling`: repositories of engines; `llmapi`: those of the LLM API; `publishing`: writes or adds to one

Reading one:

- `served`: everything that `start` asks of a repository on disk; `core_models`: the models that run an engine
- `engines`: engine folders, whether an engine fits a machine, and the command that makes it again
- `check/`: the rules of `trtserve check REPOSITORY`, which `start` applies too
"""
