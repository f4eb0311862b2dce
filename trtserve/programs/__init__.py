"""The Python programs of the Triton models, copied into every model repository.

They run inside Triton's Python stub, possibly in a container without trtserve, so they import only the standard
library, NumPy, transformers, `triton_python_backend_utils` and each other (by relative imports). `repo.programs` copies
the modules that a model needs to `<model>/1/trtserve_models`; in trtserve itself they are `trtserve.programs`.

One package per model, each with `model.py` and its `TritonPythonModel`, and `shared` for what several models use.
"""
