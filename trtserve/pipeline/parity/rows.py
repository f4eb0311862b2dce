"""Compare tables of which prompts touch few rows (embeddings, positions, head) row by row.

Rows are compared by their products with a few random vectors, so neither side copies the other's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.unified import HEAD, CheckpointReader
from trtserve.pipeline.parity.comparison import BOUNDS, Precision, Verdict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Products = npt.NDArray[np.float32]

# Checkpoint name → name of the figure.
_TABLES: Mapping[str, str] = {
    "transformer.vocab_embedding.weight": "rows of the embedding",
    "transformer.position_embedding.weight": "rows of the positions",
    HEAD: "rows of the head",
}
_POSITIONS = ("wpe.weight", "embed_positions.weight")
_SEED, _VECTORS = 20240301, 4
# Rows converted to float32 at a time.
_ROWS = 4096


def products_of(model: Any) -> dict[str, Products]:
    """Return the products f32[rows, 4] of every table of a transformers model, keyed by checkpoint name."""
    vocabulary, positions, head = _TABLES
    parameters = dict(model.named_parameters())
    tables = {vocabulary: model.get_input_embeddings().weight, head: model.get_output_embeddings().weight}
    learned = next((values for name, values in parameters.items() if name.endswith(_POSITIONS)), None)
    if learned is not None:
        tables[positions] = learned
    inward = next((values for name, values in parameters.items() if name.endswith("project_in.weight")), None)
    outward = next((values for name, values in parameters.items() if name.endswith("project_out.weight")), None)
    # OPT-350m's embeddings are narrower than its layers; a checkpoint stores the products.
    through = {vocabulary: None if inward is None else inward.T, head: outward}
    return {name: _products(table.detach(), through.get(name)) for name, table in tables.items()}


def _products(table: Any, through: Any) -> Products:
    import torch

    with torch.inference_mode():
        size = table.shape[1] if through is None else through.shape[1]
        vectors = torch.from_numpy(_vectors(size))
        products: Products = (table @ (vectors if through is None else through.detach() @ vectors)).numpy()
    return products


def _vectors(size: int) -> Products:
    import numpy as np

    return np.random.default_rng(_SEED).standard_normal((size, _VECTORS), dtype=np.float32)


def judged(reader: CheckpointReader, originals: Mapping[str, Products], bounds: Precision) -> Iterator[Verdict]:
    """Return each table's row farthest from the original's, as a share of the products' root mean square."""
    import numpy as np

    held = set(reader.names())
    for name, figure in _TABLES.items():
        if name not in held or name not in originals:
            continue
        table = reader.merged(name)
        vectors = _vectors(table.shape[1])
        parts = [table[row : row + _ROWS].astype(np.float32) @ vectors for row in range(0, len(table), _ROWS)]
        own, original = np.concatenate(parts), originals[name]
        # OPT's position table starts with two unused rows.
        gaps = np.abs(own - original[-len(own) :]) if len(own) <= len(original) else np.array([np.inf])
        root = float(np.sqrt(np.square(original).mean()))
        value = float(gaps.max()) / root if root else float(gaps.max())
        yield Verdict(name=figure, value=value, relation="at most", bound=BOUNDS[bounds].largest)
