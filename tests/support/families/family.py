"""What the tests know of a model family: a tiny model, and what must come out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.families.shards import Tensors

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, or a variant that has a config.json of its own."""

    config: Config
    """config.json of a model of a few kilobytes."""
    tensors: Callable[[Mapping[str, Any]], Shapes]
    """Names and shapes of the model's tensors, for a config.json."""
    ranks: Callable[..., list[Tensors]]
    """(source, config.json, tp_size, moe_ep_size=1) → expected tensors of each rank, calculated without trtserve."""
    expected: Config
    """The family's keys in the checkpoint's config.json, as TensorRT-LLM 1.2 writes them (`architecture` is added)."""

    shards: tuple[Config, ...] = ({},)
    """Changes of `config`; each of these models is converted for 1, 2 and 4 ranks."""
    logits: tuple[Config, ...] = ({},)
    """Changes of `config`; the logits and tokens of each of these models are compared with transformers.

    An int4 engine is made of the first one. Greedy decoding of a random model with a tied head repeats its last token,
    so a family with a tied head is compared untied where it can be.
    """
    int4: float = 0.3
    """How much int4 may change the median token's logits: RMS difference / standard deviation of the logits."""
    norm_centre: float = 1
    """Around which number the weights of norms lie: 0 where the model adds 1, and attention would be too sharp."""
    constants: frozenset[str] = frozenset()
    """Errors in the checkpoint's config.json (`conversion_faults`) that `trtserve check` must find by value."""
    real: Config = field(default_factory=dict)
    """Windows and position limits of published models, which no test prompt reaches."""

    since: str = "0.12"
    """The first TensorRT-LLM release with this family."""
    config_class: Literal["", "LLaMAConfig", "QWenConfig", "GemmaConfig", "Phi3Config", "FalconConfig"] = ""
    """TensorRT-LLM's config class if its keys differ between releases (`release_changes`)."""
    nvidia: bool = True
    """Whether TensorRT-LLM has the model (`converters.yaml`, `loaders.yaml`); otherwise only OpenVINO serves it."""
    stages: bool = True
    """Whether TensorRT-LLM loads the family in pipeline stages."""

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        name: str = self.config["architectures"][0]
        return name

    @property
    def experts(self) -> bool:
        """Whether experts replace the MLP."""
        return not {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"}.isdisjoint(self.config)

    @property
    def layers_key(self) -> str:
        """The key in config.json for the number of layers."""
        return "n_layer" if "n_layer" in self.config else "num_hidden_layers"
