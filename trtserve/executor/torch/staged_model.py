"""One stage of a pipeline: a step goes through the stages in parts, so that all of them compute at the same time.

While a later stage computes one part, the first one computes another. The last stage chooses the tokens of each part
and sends them to the first, which needs them for the same sequences of the next step; nothing waits on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.executor.engine.model import Chosen, StepInputs
from trtserve.executor.torch.choosing_model import ChoosingTorchModel
from trtserve.executor.torch.draw_words import DrawArrays, Words
from trtserve.executor.torch.micro_batches import MicroBatch, micro_batches
from trtserve.executor.torch.ranks import AwaitedTensor, Ranks

if TYPE_CHECKING:
    from trtserve.executor.torch.graphs import DecodeGraphs

Rows = npt.NDArray[np.intp]

# A part of a step with prompts has at least this many tokens: with fewer, a GPU reads its weights as long as for all.
_LEAST_TOKENS: Final = {"cpu": 8, "cuda": 256}


@dataclass(slots=True)
class StagedStep:
    """A step on this stage: `PendingStep`. Only the first stage has results."""

    model: StagedModel
    draws: DrawArrays
    on_host: Rows
    """The rows whose logits go to the host."""
    logits: Tensor | None = None
    """f32[r, V] on the last stage: those of all rows of a step with guides."""
    computed: Any = None
    """An event on a GPU: this stage has computed the step."""
    tokens: list[tuple[Rows, AwaitedTensor]] = field(default_factory=list)
    """On the first stage, the rows of each part, and their tokens and log-probabilities i32[r, 3]."""
    others: AwaitedTensor | None = None
    """On rank 0, the logits of `on_host`."""

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        """See `PendingStep.choose`."""
        self.model.choose_guided(self, allowed)

    def result(self) -> Chosen:
        """See `PendingStep.result`. The GIL is released while the GPUs compute."""
        found = np.zeros((len(self.draws.words), 3), np.int32)
        logits = np.zeros((0, 0), np.float32)
        with self.model.faults:
            if self.computed is not None:
                self.computed.synchronize()
            for rows, arrival in self.tokens:
                found[rows] = arrival.on_host().numpy()
            if self.others is not None:
                logits = self.others.on_host().numpy()
        chosen = found[self.draws.numbers]
        return Chosen(chosen[:, 0].tolist(), chosen[:, 1:].copy().view(np.float32), logits)


class StagedModel(ChoosingTorchModel):
    """`ChoosingModel` of one rank of a pipeline; all ranks take the same calls."""

    _group: Ranks

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._arriving: list[tuple[Rows, AwaitedTensor]] = []  # tokens of the step before
        self._part_of: Rows = np.zeros(0, np.intp)  # of each row of the step before

    def launch(self, draws: DrawArrays, step: StepInputs) -> StagedStep:
        """See `ChoosingTorchModel.launch`. A step with guides is not divided: its tokens are chosen together."""
        rows = len(step.rows)
        pending = StagedStep(self, draws, np.delete(np.arange(rows), draws.numbers))
        with self.faults, torch.inference_mode():
            self._begin(draws)
            parts = [MicroBatch(step, np.arange(rows))] if draws.guided else self._parts(step)
            arriving, self._arriving = self._arriving, []
            self._part_of = np.zeros(rows, np.intp)
            others = self._room_for_logits(pending)
            for number, part in enumerate(parts):
                self._part_of[part.rows] = number
                self._take(arriving, part.step.token_ids)
                drawn = part.rows[part.rows < len(draws.words)]
                logits = self._run(draws.words[drawn if not draws.guided else drawn[:0]], part.step)
                if draws.guided:
                    pending.logits = logits
                else:
                    self._pass_tokens(pending, drawn)
                    self._keep(pending, part.rows, logits, others)
            if not draws.guided:
                self._pass_logits(pending, others)
            if self.device != "cpu":
                pending.computed = torch.cuda.Event()
                pending.computed.record()
        return pending

    def choose_guided(self, pending: StagedStep, allowed: npt.NDArray[np.uint32]) -> None:
        """Choose the tokens of a step with guides; see `PendingStep.choose`."""
        draws = pending.draws
        with self.faults, torch.inference_mode():
            others = self._room_for_logits(pending)
            if self._group.last_stage:
                assert pending.logits is not None
                self._allow_and_choose(pending.logits, draws, allowed)
                self._keep(pending, np.arange(len(pending.logits)), pending.logits, others)
            self._pass_tokens(pending, np.arange(len(draws.words)))
            self._pass_logits(pending, others)

    def _parts(self, step: StepInputs) -> list[MicroBatch]:
        decodes = len(step.token_ids) == len(step.past_lens)
        least = 1 if decodes else _LEAST_TOKENS[self.device]
        return micro_batches(step, self._group.stages, least=least, part_of=self._part_of)

    def _take(self, arriving: list[tuple[Rows, AwaitedTensor]], ids: npt.NDArray[np.int64]) -> None:
        """Write those tokens of the step before that `ids` refer to, and let the stream wait for no others."""
        wanted = -1 - ids[ids < 0]
        for number, (rows, arrival) in reversed([*enumerate(arriving)]):
            if ((wanted >= rows[0]) & (wanted <= rows[-1])).any():
                together = rows[-1] - rows[0] + 1 == len(rows)
                place = slice(rows[0], rows[-1] + 1) if together else self._copy(rows)
                self._tokens[place] = arrival.on_device()[:, 0]
                del arriving[number]

    def _replay(self, graphs: DecodeGraphs, words: Words, step: StepInputs) -> Tensor:
        if self._hidden is not None:
            self._group.receive(self._hidden[: len(step.rows)])
        output = super()._replay(graphs, words, step)
        if not self._group.last_stage:
            self._group.send(output.clone())  # the next part overwrites it
        return output

    def _choose(self, logits: Tensor, words: Tensor) -> None:
        if self._group.last_stage:
            super()._choose(logits, words)

    def _pass_tokens(self, pending: StagedStep, rows: Rows) -> None:
        """Send the tokens and log-probabilities that were chosen for `rows` to the first stage, or expect them."""
        count = len(rows)
        if count and self._group.last_stage:
            tokens = self._tokens[:count].unsqueeze(1)
            self._group.send_to_first(torch.cat([tokens, self._log_probs[:count].view(torch.int32)], 1))
        elif count and self._group.stage == 0:
            pending.tokens.append((rows, self._group.expect((count, 3), torch.int32)))
            self._arriving.append(pending.tokens[-1])

    def _room_for_logits(self, pending: StagedStep) -> Tensor | None:
        """Return a tensor for the logits of the step that go to the host, if this rank sends any."""
        group, count = self._group, len(pending.on_host)
        if not count or not group.last_stage or group.tp_rank:
            return None
        return torch.empty((count, self.vocab_size), dtype=torch.float32, device=self.device)

    def _keep(self, pending: StagedStep, rows: Rows, logits: Tensor, others: Tensor | None) -> None:
        """Copy the logits of `rows` that go to the host to their place."""
        kept = np.flatnonzero(np.isin(rows, pending.on_host))
        if others is not None and len(kept):
            others[self._copy(np.searchsorted(pending.on_host, rows[kept]))] = logits[self._copy(kept)]

    def _pass_logits(self, pending: StagedStep, others: Tensor | None) -> None:
        """Send the logits that go to the host to rank 0, or expect them."""
        group, count = self._group, len(pending.on_host)
        if others is not None:
            group.send_to_first(others)
        elif count and group.rank == 0:
            pending.others = group.expect((count, self.vocab_size), torch.float32)
