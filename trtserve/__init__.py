"""From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server.

The library (docs/reference/library.md) is loaded when one of its names is first used.
"""

from trtserve._version import __version__ as __version__

TYPE_CHECKING = False  # the module `typing` would take most of the time of the import

if TYPE_CHECKING:
    from trtserve.client.answer import Generation
    from trtserve.errors import TrtserveError
    from trtserve.library import AsyncClient, AsyncTextStream, Client, TextStream, import_model, serve

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
    "AsyncClient": "library",
    "AsyncTextStream": "library",
    "Client": "library",
    "Generation": "client.answer",
    "TextStream": "library",
    "TrtserveError": "errors",
    "import_model": "library",
    "serve": "library",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
