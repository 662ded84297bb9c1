"""The training loop of the small model: two optimizers, one schedule, checkpoints to go on from."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.small_model_batches import LENGTHS, MAX_POSITIONS, VOCAB_SIZE, Batch, Batches

LEARNED = 0.25  # nats per answer token, a running mean over some 30 steps
WARMUP = 100  # steps
# The learning rate falls over this last part of a training. Checkpoints are from before, so that a
# longer training can go on from them.
COOL_DOWN = 0.3


@dataclass
class Progress:
    """How far a training has come.

    Attributes:
        tokens, minutes: so much was trained on, for so long.
        level: as `Batches.level`.
        running: means of the last losses by kind of sequence, in nats per weighted token; recall
            of the longest sequences only.
    """

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    level: int = 0
    running: dict[str, float] = field(
        default_factory=lambda: {
            "text": math.log(VOCAB_SIZE), "recall": math.log(10), "tasks": math.log(10),
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """What a training may take: whichever ends first."""

    tokens: int
    minutes: float

    def spent(self, progress: Progress) -> float:
        """The share of it that is spent."""
        return max(progress.tokens / self.tokens, progress.minutes / self.minutes)


def token_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each token after the first; (batch, length) gives length - 1."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(ids.shape[0], -1)


def learning_rate(step: int, spent: float, peak: float) -> float:
    """Linear warm-up, a plateau, and a linear fall to 2 % over the last part."""
    return peak * min(1.0, (step + 1) / WARMUP, max(0.02, (1 - spent) / COOL_DOWN))


class Training:
    """A model, its optimizers, and how far they have come."""

    def __init__(self, model: Any, batches: Batches, peak: float) -> None:
        """Matrices of the layers learn by Muon, embeddings, biases and norms by AdamW; ``peak``:
        the highest learning rate of both."""
        self.model, self.batches, self.peak = model, batches, peak
        self.progress = Progress()
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=peak, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        ]

    def run(
        self, budget: Budget, workers: int, every: int, checkpoint: Path, kept: Callable[[], str]
    ) -> None:
        """Trains until the budget is spent.

        Args:
            workers: processes that make batches; 0: this one does.
            every: steps between calls of ``kept``, which saves the model and says how good it is,
                and between checkpoints.
        """
        from tqdm.auto import tqdm

        progress, before = self.progress, self.progress.minutes
        started = time.monotonic()
        with tqdm(total=budget.tokens, unit="token", unit_scale=True, mininterval=5) as bar:
            bar.update(progress.tokens)
            for batch in _loaded(self.batches, workers):
                self.step(batch, budget)
                progress.minutes = before + (time.monotonic() - started) / 60
                bar.set_postfix({"level": progress.level, **progress.running}, refresh=False)
                bar.update(batch.ids.numel())
                if self._next_level() or progress.step % every == 0:
                    if budget.spent(progress) < 1 - COOL_DOWN:
                        self.save(checkpoint)
                    told = f"step {progress.step}, {progress.minutes:.1f} min, "
                    bar.write(f"{told}{progress.tokens:,} tokens, recall: {kept()}")
                if budget.spent(progress) >= 1:
                    return

    def step(self, batch: Batch, budget: Budget) -> None:
        """One step on a batch."""
        progress, device = self.progress, self.model.device
        lr = learning_rate(progress.step, budget.spent(progress), self.peak)
        with torch.autocast(device.type, torch.bfloat16):
            tokens = token_losses(self.model, batch.ids.to(device))
        losses = (tokens * batch.weights[:, 1:].to(device)).sum(1)
        torch.autograd.backward(losses.mean())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step, progress.tokens = progress.step + 1, progress.tokens + batch.ids.numel()
        self._record(batch, losses.detach().cpu())

    def _record(self, batch: Batch, losses: torch.Tensor) -> None:
        """Adds the losses of a batch to the running means."""
        longest = batch.ids.shape[1] == LENGTHS[self.progress.level]
        for kind in set(batch.kinds):
            if kind != "recall" or longest:
                rows = torch.tensor([k == kind for k in batch.kinds])
                mean = float(losses[rows].mean())
                self.progress.running[kind] += 0.03 * (mean - self.progress.running[kind])

    def _next_level(self) -> bool:
        """Goes on to longer sequences if recall is learned; whether it does."""
        progress = self.progress
        if progress.running["recall"] >= LEARNED or LENGTHS[progress.level] == MAX_POSITIONS:
            return False
        progress.level += 1
        progress.running["recall"] = math.log(10)
        self.batches.level.fill_(progress.level)
        return True

    def save(self, file: Path) -> None:
        """Writes all that a training needs to go on, in one step."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(state, file.with_suffix(".part"))
        os.replace(file.with_suffix(".part"), file)

    def load(self, file: Path) -> None:
        """Goes on from what `save` wrote, with other sequences than before."""
        state = torch.load(file, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.batches.level.fill_(self.progress.level)
        self.batches.seed += self.progress.step


def _loaded(batches: Batches, workers: int) -> Iterator[Batch]:
    """Batches without end."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)
    return iter(loader)
