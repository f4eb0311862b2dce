"""Arrays in .npy files, which may come from strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_array(path: Path) -> NDArray[Any]:
    """Return the array in an .npy file. Raises ValueError, which names the file, for anything else.

    Python objects are refused, and a shape that the file is too small for before memory is taken for it.
    """
    try:
        return np.array(np.lib.format.open_memmap(path, mode="r"))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy passes on what Python's tokenizer and parser raise for a damaged header
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"{path} is not an .npy file of plain numbers: {reason:.200}") from error
