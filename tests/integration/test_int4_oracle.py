"""int4 engines of every family against transformers: with the weights of the engine, and with those of the model.

Weights of an engine are rounded to 4 bits in groups of inputs. The first comparison leaves only what float16 and the
int8 output head cost; the second shows what 4 bits cost random weights, which have no redundancy (`Family.int4`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.families import FAMILIES, in_turn
from tests.support.paged_steps import PagedSteps
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.quantized import group_size
from trtserve.executor.openvino.paged_model import PagedModel
from trtserve.executor.openvino.weight_quantization import quantize_in_groups
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

Logits = npt.NDArray[np.float32]

CASES = [(name, FAMILIES[name].logits[0]) for name in in_turn(3, 4) if FAMILIES[name].logits]
# The root mean square of the difference as a share of the standard deviation of the logits, of the median token.
OF_THE_SAME_WEIGHTS = 0.045
# Matrices of GPT-2 and gpt-oss, which are stored [in, out].
CONV1D = re.compile(r"\.h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)\.weight$")
TRANSPOSED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
# Besides embeddings, output head and norms: routers, convolutions, gates of delta rules, what mixes Gemma 3n's streams.
FLOATS = re.compile(
    r"((?<!input_)gate|gate\.wg|router|router\.(layer|proj)|kv_b_proj|conv1d|conv\.conv|in_proj_(a|b|ba)"
    r"|(correction|prediction)_coefs|altup_(unembed_)?projections\.\d+)\.weight$|bias$"
)
SEQUENCE = [int(token) for token in np.random.default_rng(11).integers(3, 259, 90)]
SCHEDULE = [{"a": 40}, {"a": 34}, *[{"a": 1}] * 4, {"a": 12}]


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A matrix [..., out, in] as 4 bits hold it."""
    rows = values.astype(np.float16).reshape(-1, values.shape[-1])
    whole: npt.NDArray[np.float32] = quantize_in_groups(rows, group_size(rows.shape[-1])).dequantized()
    return whole.reshape(values.shape)


def originals(folder: Path) -> tuple[Logits, Logits]:
    """Logits [tokens, vocab] of transformers with the model's weights, and with those of an int4 engine."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    # The eager attention of its Falcon adds alibi twice.
    kind = "sdpa" if "falcon" in (folder / "config.json").read_text() else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
    ids = torch.tensor([SEQUENCE])
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits[0].numpy()
        for name, values in model.named_parameters():
            if re.search(r"\.\d+\.", name) and values.ndim > 1 and not FLOATS.search(name):
                turned = CONV1D.search(name) or (
                    model.config.model_type == "gpt_oss" and TRANSPOSED_EXPERTS.search(name)
                )
                stored = values.mT if turned else values
                stored.copy_(torch.from_numpy(rounded(stored.numpy())))
        return plain, model(ids, use_cache=False).logits[0].numpy()


def shares(ours: Logits, theirs: Logits) -> Logits:
    """Root mean square of each token's difference, as a share of the standard deviation of all logits."""
    found: Logits = np.sqrt(np.square(ours - theirs).mean(axis=-1)) / theirs.std()
    return found


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_logits_of_int4_engines(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", name, gain=1.0, **overrides)
    spec = ConvertSpec(dtype="float16", quantize="int4", tp_size=2)
    checkpoint = convert_model(Model(path=folder), spec, out=tmp_path / "checkpoint")
    engine = build_engine(checkpoint, BuildSpec(max_seq_len=128, runtime="openvino"), out=tmp_path / "engine")
    ours = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE}).run(SCHEDULE)["a"]
    plain, same = originals(folder)
    assert np.median(shares(ours, same)) < OF_THE_SAME_WEIGHTS
    # A router that hesitates sends a token to another expert.
    assert (shares(ours, same) > 0.2).mean() < 0.08
    assert 0.05 < np.median(shares(ours, plain)) < FAMILIES[name].int4
