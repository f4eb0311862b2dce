"""A model on PyTorch that also chooses tokens: the next step is sent while the GPU computes the last one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.executor.engine.model import Chosen, Draws, PendingStep, StepInputs
from trtserve.executor.torch.adapters import spans_of
from trtserve.executor.torch.draw_words import DrawArrays, DrawWriter, Words, choose_tokens
from trtserve.executor.torch.model import TorchModel, decoding_apart, max_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtserve.executor.torch.graphs import DecodeGraphs, PromptGraphs

Array = npt.NDArray[Any]
# Seconds of the host between two steps when the second needs the tokens of the first.
_BETWEEN = 5e-4
# Times of the step that decodes one sequence, which steps of `brief_tokens` take.
_BRIEF = 1.55


TokenChooser: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]"
"""Takes logits f32[r, V], which may be overwritten, words, table and bits of guides; writes tokens i32[r] and log-probs
f32[r, 2]."""


def choose_on_cpu(
    logits: Tensor, words: Tensor, table: Tensor, allowed: Tensor, tokens: Tensor, log_probs: Tensor
) -> None:
    chosen, numbers = choose_tokens(logits.numpy(), words.numpy(), table.numpy(), allowed.numpy().view(np.uint32))
    tokens.copy_(torch.from_numpy(chosen))
    log_probs.copy_(torch.from_numpy(numbers))


@dataclass(frozen=True, slots=True)
class _Results:
    """What a step gives, on its way to the host; on a GPU the tensors are filled when `arrived` is."""

    tokens: Tensor
    log_probs: Tensor | None
    logits: Tensor | None
    arrived: Any


class PendingTorchStep:
    """`PendingStep` of a `ChoosingTorchModel`."""

    def __init__(self, model: ChoosingTorchModel, draws: DrawArrays, results: _Results | Tensor) -> None:
        """`results` are logits [r, V] on the device if the guides of the step are not known yet."""
        self._model = model
        self._draws = draws
        self._results = results

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        """See `PendingStep.choose`."""
        assert isinstance(self._results, Tensor)
        self._results = self._model.choose(self._results, self._draws, allowed)

    def result(self) -> Chosen:
        """See `PendingStep.result`. The GIL is released while the GPU computes."""
        results, numbers = self._results, self._draws.numbers
        assert isinstance(results, _Results)
        if results.arrived is not None:
            with self._model.faults:
                results.arrived.synchronize()
        log_probs = np.zeros((len(numbers), 2), np.float32)
        if results.log_probs is not None:
            log_probs = results.log_probs.numpy()[numbers]
        logits = np.zeros((0, 0), np.float32) if results.logits is None else results.logits.numpy()
        return Chosen(results.tokens.numpy()[numbers].tolist(), log_probs, logits)


class ChoosingTorchModel(TorchModel):
    """`ChoosingModel` on PyTorch. With tensor parallelism every rank chooses the same tokens."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.max_rows = max_rows(config)
        self._writer = DrawWriter(self.max_rows)
        self._tokens = torch.zeros(self.max_rows, dtype=torch.int32, device=self.device)
        self._log_probs = torch.zeros((self.max_rows, 2), dtype=torch.float32, device=self.device)
        self._table = torch.zeros((self.max_rows, self.vocab_size), dtype=torch.int16, device=self.device)
        words = -(-self.vocab_size // 32)
        self._allowed = torch.zeros((self.max_rows, words), dtype=torch.int32, device=self.device)
        self._chooser = self._make_chooser()
        self._graphs: DecodeGraphs | None = None
        self._hidden: Tensor | None = None  # where captured steps of later stages read what the one before computed
        self._prompt_graphs: PromptGraphs | None = None
        self.plain_costs: list[float] = []
        self.brief_tokens = 0
        # Matrices of codes are widened for more rows, which would take that memory once more. With ranks such steps
        # were never measured.
        algorithm = config.model.quantization.algorithm
        most = 512 if algorithm is None or algorithm.startswith("FP8") else 256
        # The states of a prompt's tokens follow from each other.
        if config.model.mapping.ranks > 1 or self._mixers:
            most = 0
        self._captured_tokens = min(most, config.build.max_num_tokens)

    def _make_chooser(self) -> TokenChooser:
        if self.device == "cpu":
            return choose_on_cpu
        from trtserve.executor.torch.step_kernels import KernelSampler

        return KernelSampler(self.max_rows, self.vocab_size, self.device).choose

    def start(self, draws: Draws, step: StepInputs) -> PendingStep:
        return self.launch(self.arrays(draws), step)

    def arrays(self, draws: Draws) -> DrawArrays:
        return self._writer.write(draws)

    def launch(self, draws: DrawArrays, step: StepInputs) -> PendingStep:
        """Send a step whose draws are arrays, as every rank of a group does.

        If it has guides, which depend on the tokens before it, only its logits are computed: `choose` follows.
        """
        with self.faults, torch.inference_mode():
            self._begin(draws)
            logits = self._run(draws.words[: 0 if draws.guided else None], step)
            return PendingTorchStep(self, draws, logits if draws.guided else self._fetch(draws, logits))

    def _begin(self, draws: DrawArrays) -> None:
        """Write what has occurred in sequences that are new in their slots."""
        for entry, tokens, numbers in draws.new_rows:
            self._table[entry].zero_()
            self._table[entry, self._copy(tokens)] = self._copy(numbers)

    def _run(self, words: Words, step: StepInputs) -> Tensor:
        """Compute a step and choose a token for each of `words`; return its logits.

        Tokens that a captured step chooses with words of zeros change nothing else.
        """
        if self._graphs is not None and self._graphs.fits(step):
            return self._replay(self._graphs, words, step)
        apart = decoding_apart(np.diff(step.subsequence_begins), step.past_lens) > 0
        if self._prompt_graphs is not None and self._prompt_graphs.fits(step, apart=apart):
            return self._prompt_graphs.replay(words, step, *self.places(step))
        inputs = self.inputs(step)
        if (step.token_ids < 0).any():
            inputs = replace(inputs, token_ids=self._resolve(inputs.token_ids))
        logits = self.compute(inputs)
        if len(words):  # rows with draws come first
            self._choose(logits[: len(words)], self._copy(words))
        return logits

    def _replay(self, graphs: DecodeGraphs, words: Words, step: StepInputs) -> Tensor:
        positions, long = step.positions, step.long_sequences
        if long is not None and self.long_rope_beyond is not None:
            positions = positions + self.max_position * long
        store, adapters = self.adapters, step.adapters
        spans = None if store is None or adapters is None else spans_of(store.places(adapters))
        return graphs.replay(words, step, positions, spans)

    def choose(self, logits: Tensor, draws: DrawArrays, allowed: npt.NDArray[np.uint32]) -> _Results:
        """Choose the tokens of a step with guides; see `PendingStep.choose`."""
        with self.faults, torch.inference_mode():
            self._allow_and_choose(logits, draws, allowed)
            return self._fetch(draws, logits)

    def _allow_and_choose(self, logits: Tensor, draws: DrawArrays, allowed: npt.NDArray[np.uint32]) -> None:
        self._allowed[: len(allowed)] = self._copy(allowed.view(np.int32))
        self._choose(logits[: len(draws.words)], self._copy(draws.words))

    def warm_up(self) -> None:
        """Compile the kernels, and capture decode steps as CUDA graphs."""
        super().warm_up()
        if self.device != "cpu":
            self._capture()

    def _capture(self) -> None:
        from trtserve.executor.torch.graphs import MOST_DRAFTED, DecodeGraphs, GraphRecorder, PromptGraphs

        group = self._group
        with torch.inference_mode():
            if group.stage:
                self._hidden = torch.zeros((self.max_rows, self.hidden_size), dtype=self.decoder.dtype, device="cuda")
            graphs = DecodeGraphs(
                rows=self.max_rows,
                max_position=self.max_position,
                page=self.tokens_per_block,
                spare_block=self.spare_block,
                spare_state=self._spare_state if self._mixers else None,
                vocab=self.vocab_size,
                chosen=self._tokens,
                adapters=self.adapters,
                compute=self.compute_stage,
                choose=self._choose,
                parts=group.stages,
                hidden=self._hidden,
                outputs=None
                if group.last_stage
                else torch.empty((self.max_rows, self.hidden_size), dtype=self.decoder.dtype, device="cuda"),
            )
            prompt_graphs = PromptGraphs(
                most=self._captured_tokens,
                blocks=-(-self.max_position // self.tokens_per_block),
                spare_place=self.spare_block * self.tokens_per_block,
                logits=graphs.logits,
                compute=self.compute,
                choose=self._choose,
                resolve=self._resolve,
            )
            recorder = GraphRecorder()
            prompt_graphs.capture(recorder)  # the larger steps
            graphs.capture(recorder)
        self._graphs, self._prompt_graphs = graphs, prompt_graphs
        if prompt_graphs.sizes:
            tokens = min(MOST_DRAFTED, self._captured_tokens, self.max_rows)
            self.plain_costs = graphs.seconds(tokens)
            self.step_costs = [each + _BETWEEN for each in prompt_graphs.seconds(tokens)]
            self.brief_tokens = prompt_graphs.tokens_within(_BRIEF * self.plain_costs[0])

    def _choose(self, logits: Tensor, words: Tensor) -> None:
        rows = len(logits)
        self._chooser(logits, words, self._table, self._allowed, self._tokens[:rows], self._log_probs[:rows])

    def _resolve(self, ids: Tensor) -> Tensor:
        """Replace ids of -1 - n by the token that was chosen for row n; a failed row's is any token."""
        chosen = self._tokens.long()[(-1 - ids).clamp(min=0)]
        return torch.where(ids < 0, chosen.clamp(min=0), ids)

    def _fetch(self, draws: DrawArrays, logits: Tensor) -> _Results:
        """Copy the results to the host, without waiting."""
        chosen_from, rows = len(draws.words), len(logits)
        on_host = np.delete(np.arange(rows), draws.numbers)
        tokens = self._to_host(self._tokens[:chosen_from])
        log_probs = self._to_host(self._log_probs[:chosen_from]) if draws.log_probs else None
        others = None
        if len(on_host):
            others = self._to_host(logits if len(on_host) == rows else logits[self._copy(on_host)])
        arrived = None
        if self.device != "cpu":
            arrived = torch.cuda.Event()
            arrived.record()
        return _Results(tokens, log_probs, others, arrived)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self.device == "cpu":
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    def _copy(self, array: Array) -> Tensor:
        tensor = super()._copy(array)
        # The executor writes the next step to the same arrays.
        return tensor.clone() if self.device == "cpu" else tensor
