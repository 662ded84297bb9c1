"""Texts for calibration, as batches of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpass.errors import OptionError, check_whole, cut, shown
from kvpass.format.dtypes import dtype_name

_KINDS = "texts, token ids, or a data set of mappings with 'input_ids' or 'text'"


def token_batches(
    data: Iterable[Any], tokenizer: Any, samples: int, length: int, batch: int
) -> list[Tensor]:
    """The first ``samples`` pieces of ``length`` tokens, in batches ``[<= batch, length]``.

    Args:
        data: texts; token ids, each one-dimensional or ``[1, T]``; or mappings with ``input_ids``
            or ``text``, as a data set yields them. A longer one is cut into pieces; what is left
            behind the last of them is dropped, but a shorter one is a piece of its own.
        tokenizer: for texts.

    Raises:
        OptionError: if there is no text, one is of another kind, or the tokenizer is missing.
    """
    for name, value in (("samples", samples), ("length", length), ("batch", batch)):
        check_whole(name, value, 1)
    if isinstance(data, str | Mapping) or not isinstance(data, Iterable):
        kind = type(data).__name__
        raise OptionError(f"data of type {kind} is not supported; allowed: {_KINDS}.")
    pieces: dict[int, list[Tensor]] = {}
    for piece in islice(_pieces(data, tokenizer, length), samples):
        pieces.setdefault(len(piece), []).append(piece)
    if not pieces:
        raise OptionError("data is empty; allowed: at least one text of two tokens.")
    # Pieces of one length need no padding.
    return [
        torch.stack(same[i : i + batch])
        for _, same in sorted(pieces.items(), reverse=True)
        for i in range(0, len(same), batch)
    ]


def _pieces(data: Iterable[Any], tokenizer: Any, length: int) -> Iterator[Tensor]:
    for item in data:
        ids = _token_ids(item, tokenizer)
        if len(ids) <= length:
            # One token has nothing to attend to.
            yield from [ids] if len(ids) > 1 else []
        else:
            yield from (p for p in ids.split(length) if len(p) == length)


def _encoded(tokenizer: Any, text: str) -> Any:
    """Token ids, by a tokenizer of transformers or of tokenizers."""
    # A text may be longer than the model reads at once, of which transformers warns.
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    try:
        if callable(tokenizer):
            return tokenizer(text, **quiet)["input_ids"]
        return tokenizer.encode(text).ids
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise OptionError(
            f"tokenizer={shown(tokenizer)} cannot be used ({cut(str(error))}); allowed: a "
            "tokenizer of transformers, or a tokenizers.Tokenizer."
        ) from None


def _token_ids(item: Any, tokenizer: Any) -> Tensor:
    if isinstance(item, Mapping):
        name = next((n for n in ("input_ids", "text") if n in item), None)
        if name is None:
            known = ", ".join(map(str, item)) or "nothing"
            raise OptionError(f"An item of the data set holds {known}; allowed: {_KINDS}.")
        return _token_ids(item[name], tokenizer)
    if isinstance(item, str):
        if tokenizer is None:
            raise OptionError("The data are texts, but there is no tokenizer; pass tokenizer=...")
        item = _encoded(tokenizer, item)
    try:
        ids = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(
            f"An item of type {type(item).__name__} is no text; allowed: {_KINDS}."
        ) from None
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32) or len(ids) == 0:
        raise OptionError(
            f"Token ids are {dtype_name(ids.dtype)} {list(ids.shape)}; allowed: "
            "whole numbers of one dimension."
        )
    return ids.long().cpu()
