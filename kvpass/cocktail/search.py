"""`chunk_bits`: which chunks of a context are worth many bits, by their relevance to a query."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpass.cocktail.bits import ChunkBits
from kvpass.cocktail.encoders import Encoder, Ranker, TokenEmbeddings
from kvpass.errors import OptionError, check, check_whole, is_number, shown
from kvpass.format.codec import BITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = list[int]
# 16 is the model's own dtype.
CHUNK_BITS = (*BITS, 16)


def chunk_bits(
    context: Any,
    query: str | Sequence[str],
    *,
    encoder: Encoder | Ranker | PreTrainedModel,
    tokenizer: Any,
    chunk: int = 32,
    alpha: float = 0.6,
    beta: float = 0.1,
    bits: tuple[float, float, float] = (2, 4, 16),
    input_ids: Any = None,
    starts: int | Sequence[int] | None = None,
) -> ChunkBits:
    """Bits of each chunk of a context, by its relevance to a query (Cocktail, section III-B).

    Chunks are counted in tokens of the model's input, so the context has to stand there token by
    token. Either the input is made of token ids, ``context_ids + query_ids``, and ``context`` is
    ``context_ids``; or ``context`` is a text, the input is what the tokenizer makes of a prompt
    around it, and is given as ``input_ids``: the context is looked for in there.

    Args:
        context: a text, token ids, or a batch of them: a list, or a tensor ``[B, T]`` of sequences
            without padding. A text is encoded as ``tokenizer(context)`` encodes it; if it is
            looked for in ``input_ids``, without special tokens.
        query: what is asked; one text for all, or one for each sequence.
        encoder: from a list of texts to vectors ``[N, D]``, whose cosines (equation 1) are the
            scores; or a `Ranker`. It sees a sequence at a time: its query, then its chunks. The
            model itself stands for `TokenEmbeddings` of it.
        tokenizer: the model's own.
        chunk: tokens in a chunk. What is left behind the last whole chunk stays exact.
        alpha, beta: see `thresholds`.
        bits: for chunks below the low threshold, between both, and above the high one.
        input_ids: the model's input, a row of token ids for each sequence, padding included.
        starts: at which token of the input each context begins; None: where it is first found in
            ``input_ids``, or 0 without them.

    Raises:
        OptionError: if a value is not allowed, a context is shorter than a chunk or not where it
            should be in the input, or the encoder fails to score each chunk.
    """
    # Only here: it imports whatever transformers can quantize models with.
    from transformers import PreTrainedModel

    if isinstance(encoder, PreTrainedModel):
        encoder = TokenEmbeddings(encoder, tokenizer)
    check_whole("chunk", chunk, 1)
    fits = isinstance(bits, Sequence) and len(bits) == 3 and all(b in CHUNK_BITS for b in bits)
    allowed = f"three of {', '.join(map(str, CHUNK_BITS))}, the fewest bits first"
    check("bits", bits, fits and list(bits) == sorted(bits), allowed)
    check_shares(alpha, beta)
    contexts = _batch("context", context, tokenizer, special=input_ids is None)
    queries = _queries(query, len(contexts))
    for ids in contexts:
        if len(ids) < chunk:
            raise OptionError(
                f"context has {len(ids)} tokens, less than a chunk of {chunk}; allowed: at least "
                "one chunk."
            )
    # The tail stays as it is, wherever a tokenizer lets it end.
    contexts = [ids[: len(ids) - len(ids) % chunk] for ids in contexts]
    found_starts = _starts(contexts, input_ids, starts, tokenizer)
    if tokenizer is None:
        raise OptionError("chunks are given to the encoder as texts; pass the model's tokenizer=.")
    chosen, scores = [], []
    for ids, asked in zip(contexts, queries, strict=True):
        pieces = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
        texts = list(tokenizer.batch_decode(pieces, skip_special_tokens=True))
        scores.append(relevance(encoder, texts, asked))
        low, high = thresholds(scores[-1], alpha, beta)
        few, some, many = bits
        # With alpha + beta = 1, rounding may leave the high threshold below the low one.
        chosen.append(tuple(many if s > high else few if s < low else some for s in scores[-1]))
    return ChunkBits(tuple(chosen), tuple(found_starts), chunk, tuple(scores))


def thresholds(scores: Sequence[float], alpha: float, beta: float) -> tuple[float, float]:
    """The low threshold, ``alpha`` of the way from the least score to the largest, and the high
    one, ``beta`` of the way back (Cocktail, equations 2 and 3)."""
    least, most = min(scores), max(scores)
    return least + (most - least) * alpha, most - (most - least) * beta


def relevance(encoder: Encoder | Ranker, chunks: list[str], query: str) -> tuple[float, ...]:
    """How relevant each chunk is to the query.

    Raises:
        OptionError: if the encoder returns anything but a vector for each text, or the ranker
            anything but a number for each chunk, or either returns what is not finite.
    """
    if isinstance(encoder, Ranker):
        ranks = encoder.rank(chunks, query)
        return tuple(_finite(ranks, "a number for each chunk", len(chunks), 1).tolist())
    vectors = _finite(encoder([query, *chunks]), "a vector for each text", 1 + len(chunks), 2)
    # Vectors of length 0 are like nothing.
    unit = normalize(vectors, dim=-1)
    return tuple((unit[1:] @ unit[0]).tolist())


def _finite(values: Any, wanted: str, rows: int, dims: int) -> Tensor:
    """What an encoder or a ranker returned, in float64."""
    try:
        numbers = torch.as_tensor(values).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(
            f"encoder returned {type(values).__name__}; allowed: {wanted}, as a tensor, an array "
            "or lists of numbers."
        ) from None
    if numbers.dim() != dims or len(numbers) != rows:
        raise OptionError(
            f"encoder returned the shape {list(numbers.shape)} for {rows}; allowed: {wanted}."
        )
    if not numbers.isfinite().all():
        raise OptionError(f"encoder returned NaN or infinity; allowed: {wanted}, finite.")
    return numbers


def _batch(name: str, given: Any, tokenizer: Any, special: bool) -> list[Ids]:
    """Token ids of each sequence of what may be one text, one row of token ids, or a batch."""
    if isinstance(given, Mapping):
        given = given["input_ids"]
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str):
        given = [given]
    items = list(given) if isinstance(given, Iterable) else []
    if not items:
        raise OptionError(f"{name} is empty or of another kind; allowed: texts or token ids.")
    if isinstance(items[0], int):
        items = [items]
    return [_ids(name, item, tokenizer, special) for item in items]


def _ids(name: str, item: Any, tokenizer: Any, special: bool) -> Ids:
    if isinstance(item, str):
        if tokenizer is None:
            raise OptionError(f"{name} is a text; pass the model's tokenizer=.")
        return list(tokenizer(item, add_special_tokens=special)["input_ids"])
    try:
        return [index(i) for i in item]
    except TypeError:
        raise OptionError(
            f"{name} of type {type(item).__name__} is not supported; allowed: a text, a row of "
            "token ids, or a batch of either."
        ) from None


def _queries(query: str | Sequence[str], count: int) -> list[str]:
    check("query", query, isinstance(query, Iterable), "a text for each context")
    queries = [query] * count if isinstance(query, str) else list(query)
    if len(queries) != count:
        raise OptionError(f"query has {len(queries)} texts for {count} contexts.")
    for asked in queries:
        if not isinstance(asked, str) or not asked.strip():
            raise OptionError(f"query {shown(asked)} is not supported; allowed: a text, not empty.")
    return queries


def _starts(
    contexts: list[Ids], input_ids: Any, starts: int | Sequence[int] | None, tokenizer: Any
) -> list[int]:
    """Where each context begins in the input."""
    count = len(contexts)
    given = [starts] * count if isinstance(starts, int) else starts
    if given is not None and len(given) != count:
        raise OptionError(f"starts has {len(given)} positions for {count} contexts.")
    if input_ids is None:
        return [0] * count if given is None else list(given)
    inputs = _batch("input_ids", input_ids, tokenizer, special=True)
    if len(inputs) != count:
        raise OptionError(f"input_ids has {len(inputs)} sequences for {count} contexts.")
    found = []
    for i, (ids, row) in enumerate(zip(contexts, inputs, strict=True)):
        tried = range(len(row) - len(ids) + 1) if given is None else [given[i]]
        # The first token alone spares most comparisons of whole contexts.
        likely = (p for p in tried if row[p : p + 1] == ids[:1])
        start = next((p for p in likely if row[p : p + len(ids)] == ids), None)
        if start is None:
            where = "in it" if given is None else f"at token {given[i]}"
            raise OptionError(
                f"input_ids of sequence {i} does not have the context's tokens {where}: a "
                "tokenizer may encode a text otherwise inside a prompt; pass the context as token "
                "ids of the input."
            )
        found.append(start)
    return found


def check_shares(alpha: float, beta: float) -> None:
    """`check` of what `thresholds` takes."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        check(name, value, is_number(value) and 0 <= value <= 1, "0 to 1")
    if alpha + beta > 1 and not math.isclose(alpha + beta, 1):
        raise OptionError(
            f"alpha={alpha} and beta={beta} are not supported: the low threshold would lie above "
            "the high one; allowed: at most 1 together."
        )
