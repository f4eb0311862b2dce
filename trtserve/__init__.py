"""From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server.

The library (docs/reference/library.md) is loaded when one of its names is first used.
"""

from trtserve._version import __version__ as __version__

TYPE_CHECKING = False  # the module `typing` would take most of the time of the import

if TYPE_CHECKING:
    from trtserve.client.generation import Generation
    from trtserve.errors import TrtserveError
    from trtserve.library.async_client import AsyncClient, AsyncTextStream
    from trtserve.library.client import Client, TextStream
    from trtserve.library.importing import import_model
    from trtserve.library.serving import serve

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Client",
    "Generation",
    "TextStream",
    "TrtserveError",
    "import_model",
    "serve",
]

_MODULES = {
    "AsyncClient": "library.async_client",
    "AsyncTextStream": "library.async_client",
    "Client": "library.client",
    "Generation": "client.generation",
    "TextStream": "library.client",
    "TrtserveError": "errors",
    "import_model": "library.importing",
    "serve": "library.serving",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
