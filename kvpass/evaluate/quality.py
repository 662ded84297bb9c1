"""Quality measures that run through the cache token by token, as generation does.

A prompt is attended exactly whatever its cache will keep; only what is read back later shows what
packing costs. So both measures prefill a prompt and then feed one token at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvpass._torch import is_compiled, mark_dynamic
from kvpass.errors import OptionError, check_whole
from kvpass.tensor.size import held_bytes, size_alone, stored_bits

NewCache = Callable[[], Any]


@dataclass(frozen=True)
class RecallPrompt:
    """A document ``[T]`` to read, and for each question about it the token ids that ask it and
    those of the right answer."""

    document: Tensor
    queries: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Quality:
    """What a cache does to a model's predictions.

    Attributes:
        perplexity: see `kvpass.evaluate.perplexity`.
        divergence: Kullback-Leibler divergence of the predictions from those without packing, mean
            in nats per token. It shows losses that are too small for the perplexity of as many
            tokens.
    """

    perplexity: float
    divergence: float


@torch.no_grad()
def perplexity(
    model: Any,
    texts: Sequence[Tensor],
    prompt: int,
    new_cache: NewCache | None = None,
    progress: bool = False,
    batch: int = 1,
) -> float:
    """Perplexity of what follows the first ``prompt`` tokens of each text, read through the cache:
    ``exp`` of the mean negative log-likelihood in nats per token.

    Args:
        model: a causal language model, compiled or not.
        texts: token ids ``[T]`` each, longer than ``prompt``.
        prompt: tokens that are prefilled and not scored.
        new_cache: makes the cache to pass, e.g. an oracle; None: the model makes its own.
        progress: show a bar.
        batch: texts read at a time, if they are of one length.

    Raises:
        OptionError: if a text has nothing to score.
    """
    total, count = 0.0, 0
    for ids in _bar(_batches(texts, prompt, batch), "perplexity", progress):
        for position, found, _ in predictions(model, ids, prompt, new_cache):
            total += _surprise(found, ids[:, position])
            count += len(ids)
    return math.exp(total / count)


@torch.no_grad()
def quality(
    model: Any,
    texts: Sequence[Tensor],
    prompt: int,
    new_cache: NewCache | None = None,
    reference: Any = None,
    progress: bool = False,
    batch: int = 1,
) -> Quality:
    """Perplexity, and divergence from a reference that reads the same tokens beside it.

    Args:
        model, texts, prompt, new_cache, progress, batch: see `perplexity`.
        reference: the model without packing; None: ``model`` itself with a cache of its own making,
            if it is not compiled.

    Raises:
        OptionError: if a text has nothing to score, or the model is compiled and there is no
            reference.
    """
    if reference is None and is_compiled(model):
        raise OptionError(
            "The model is compiled, so that it cannot be its own reference: the divergence would "
            "be 0. Pass reference=, the model without kvpass (copy.deepcopy(model) before "
            "model.compile)."
        )
    total, apart, count = 0.0, 0.0, 0
    for ids in _bar(_batches(texts, prompt, batch), "quality", progress):
        plain = predictions(model if reference is None else reference, ids, prompt)
        packed = predictions(model, ids, prompt, new_cache)
        for (position, expected, _), (_, found, _) in zip(plain, packed, strict=True):
            total += _surprise(found, ids[:, position])
            apart += float((expected.exp() * (expected - found)).sum())
            count += len(ids)
    return Quality(math.exp(total / count), apart / count)


@torch.no_grad()
def recall_accuracy(
    model: Any,
    prompts: Sequence[RecallPrompt],
    new_cache: NewCache | None = None,
    progress: bool = False,
) -> float:
    """Share of the questions that greedy decoding answers with every token right.

    Args:
        model, new_cache, progress: see `perplexity`.
        prompts: documents and questions. Each document is read once; its cache is copied for each
            question.
    """
    right, count = 0, 0
    for prompt in _bar(prompts, "recall", progress):
        _, cache = step(model, prompt.document[None], new_cache() if new_cache else None)
        for question, answer in prompt.queries:
            right += _answers(model, copy.deepcopy(cache), question, answer)
            count += 1
    return right / count


def cache_size(cache: Any) -> dict[str, Any]:
    """Bytes and bits per element, by name, of one of a cache's sequences if it were alone, and how
    many tokens it has."""
    held, bits = size_alone(_tensors(cache))
    return {"bytes": held, "bits": bits, "cached": int(cache.get_seq_length())}


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """Position of the first token in which two sequences ``[T]`` differ; None if there is none."""
    shared = min(a.numel(), b.numel())
    different = (a[:shared] != b[:shared]).nonzero()
    if different.numel():
        return int(different[0])
    return None if a.numel() == b.numel() else shared


def cache_bytes(*caches: Any) -> tuple[int, float]:
    """Bytes that the keys and values of transformers caches hold, and bits per element stored. What
    layers share, or caches that `copy.deepcopy` has made of one, counts once as bytes."""
    tensors = _tensors(*caches)
    return held_bytes(tensors), stored_bits(tensors)


def _tensors(*caches: Any) -> list[Tensor]:
    return [t for cache in caches for layer in cache.layers for t in (layer.keys, layer.values)]


def _batches(texts: Sequence[Tensor], prompt: int, batch: int) -> list[Tensor]:
    """Token ids ``[B, T]``; as many texts at a time as are of one length."""
    for text in texts:
        if not 0 < prompt < text.numel():
            raise OptionError(
                f"prompt={prompt} is not supported for a text of {text.numel()} tokens; "
                f"allowed: 1 to {text.numel() - 1}."
            )
    check_whole("batch", batch, 1)
    same = (torch.stack(list(run)) for _, run in groupby(texts, torch.numel))
    return [ids for run in same for ids in run.split(batch)]


def predictions(
    model: Any, ids: Tensor, prompt: int, new_cache: NewCache | None = None
) -> Iterator[tuple[int, Tensor, Any]]:
    """Every position ``prompt ... T - 1``, with the log-probabilities ``[B, V]`` in float32 that
    the tokens ``[B, T]`` before it predict, and the cache, which holds those tokens."""
    logits, cache = step(model, ids[:, :prompt], new_cache() if new_cache else None)
    yield prompt, logits.log_softmax(-1), cache
    for position in range(prompt + 1, ids.shape[1]):
        logits, _ = step(model, ids[:, position - 1 : position], cache)
        yield position, logits.log_softmax(-1), cache


def _surprise(predicted: Tensor, tokens: Tensor) -> float:
    """Sum of negative log-likelihoods of tokens ``[B]``."""
    return -float(predicted.gather(1, tokens[:, None].to(predicted.device)).sum())


def step(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits ``[B, V]`` after the last token of ``[B, T]``, in float32, and the cache."""
    logits, cache = read(model, ids, cache)
    return logits[:, -1].float(), cache


def read(model: Any, ids: Tensor, cache: Any, keep: int = 1) -> tuple[Tensor, Any]:
    """Logits ``[B, K, V]`` after the last ``keep`` tokens of ``[B, T]`` (0: after all), in the
    model's dtype, and the cache."""
    # Steps out of texts of all lengths share a graph, and so do prompts.
    ids = ids.contiguous()
    if ids.shape[1] > 1:
        mark_dynamic(ids, 1)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    return out.logits, out.past_key_values


def _answers(model: Any, cache: Any, question: Tensor, answer: Tensor) -> bool:
    """Whether the greedy continuation of ``question`` is ``answer``."""
    for token in question:
        logits, _ = step(model, token.view(1, 1), cache)
    for token in answer[:-1]:
        if int(logits.argmax()) != int(token):
            return False
        logits, _ = step(model, token.view(1, 1), cache)
    return int(logits.argmax()) == int(answer[-1])


def _bar(items: Sequence[Any], name: str, show: bool) -> Iterable[Any]:
    return tqdm(items, desc=name, disable=not show, leave=False)
