"""`save_cache` and `load_cache`: the cache of a compiled model in a file.

A file has the format of safetensors: tensors, and a JSON text that says what they are. The text
holds a checksum of every tensor, and has one itself. All are compared when a file is loaded:
attention reads every token in its first step, so that nothing would be saved by comparing them
later, and a damaged file must not answer anything. Tensors are mapped, not copied: a page takes
memory of its own only when a step writes to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import safetensors
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, StaticCache

from kvpass.errors import CacheFileError, KvpassError, OptionError, check, cut, shown, shown_path
from kvpass.format.dtypes import dtype_name
from kvpass.store.compression import check_level, compressed, decompressed
from kvpass.store.contents import Reader, Writer
from kvpass.store.identity import Identity

FORMAT = 2
# In a file's metadata: the JSON text, and its checksum.
_TEXT, _CHECKSUM = "kvpass_cache", "kvpass_cache_crc32"
# The tensor of the token ids.
_TOKENS = "tokens"


def save_cache(
    cache: Any, path: str | Path, *, model: Any, tokens: Any, zstd: int | None = None
) -> None:
    """Writes a cache to a safetensors file, without pickle; a file of that name is replaced when
    the new one is whole.

    Args:
        cache: a ``DynamicCache`` or ``StaticCache`` of transformers that ``model`` has filled.
            Layers of any kind: full or sliding attention, recurrent or convolution states. It is
            not changed.
        path: of the file, ``*.safetensors``.
        model: the causal language model, compiled by kvpass or not.
        tokens: the ids that the cache holds, int ``[B, T]``, or ``[T]`` of one sequence; the file
            holds them as its tensor ``tokens``. The last token that ``generate`` returns has not
            been read, and is not among them.
        zstd: the level from 1 to 22 of compression, which needs the extra ``kvpass[zstd]``: packed
            tokens of texts take 17 to 29% less at level 1, and are decompressed when they are
            loaded, not mapped. None: not compressed.

    Raises:
        CacheFileError: if the cache is of another kind, or not one of ``model``.
        OptionError: if ``tokens`` are not those of the cache, ``zstd`` is not allowed, or the file
            cannot be written.
        StaleHandleError: if a later step has extended one of the cache's tensors.
    """
    check_level(zstd)
    write_cache(cache, Path(path), model.config, Identity.of(model), token_ids(tokens), zstd)


def load_cache(path: str | Path, model: Any, *, tokens: Any = None) -> Any:
    """The cache that `save_cache` wrote: ``model`` goes on as if it had never stopped.

    On a CPU the tensors are mapped, unless the file is compressed: it may be replaced or removed
    while they are in use, but not be written to. No graph is compiled beyond those that a process
    needs for the steps to come. A model that is compiled only afterwards goes on in the format in
    which the cache was begun.

    Args:
        path: of the file.
        model: the model that the cache is of, on any device.
        tokens: the ids that the cache must hold, as in `save_cache`; None: any.

    Raises:
        CacheFileError: if the file is missing, damaged, of another format, of other tokens, or for
            another model, dtype or recipe.
    """
    identity = Identity.of(model)
    with opened(path) as saved:
        saved.check(identity, None if tokens is None else token_ids(tokens))
        return saved.cache(model)


def token_ids(tokens: Any) -> Tensor:
    """Ids as int32 ``[B, T]``.

    Raises:
        OptionError: if they are something else.
    """
    ids: Tensor = torch.as_tensor(tokens).detach().cpu()
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    fits = ids.dim() in (1, 2) and ids.numel() > 0 and whole
    check("tokens", tuple(ids.shape), fits, "whole numbers, [B, T] or [T]")
    return ids.view(-1, ids.shape[-1]).to(torch.int32)


def write_cache(
    cache: Any, path: Path, config: Any, identity: Identity, ids: Tensor, zstd: int | None
) -> int:
    """`save_cache` for a model of this config and identity; ``ids`` are int32 ``[B, T]``. Returns
    the bytes of all that the cache holds, without compression."""
    _check_kind(cache, config)
    _check_tokens(cache, ids)
    writer = Writer()
    layers = [writer.value(vars(x), f"layers.{i}") for i, x in enumerate(cache.layers)]
    plain, tensors = {n: _facts(t) for n, t in writer.tensors.items()}, writer.tensors
    if zstd is not None:
        tensors = {name: compressed(tensor, zstd) for name, tensor in tensors.items()}
    tensors = {_TOKENS: ids, **tensors}
    checked = {n: [*_facts(t), _checksum(t)] for n, t in tensors.items()}
    versions = {x.__name__: x.__version__ for x in (safetensors, torch, transformers)}
    header = {
        "format": FORMAT, **asdict(identity), "kind": type(cache).__name__, "room": _room(cache),
        "kinds": layer_kinds(cache), "versions": versions, "layers": layers, "tensors": checked,
        "zstd": zstd, "plain": plain,
    }  # fmt: skip
    text = json.dumps(header)
    _replace(path, tensors, {_TEXT: text, _CHECKSUM: str(crc32(text.encode()))})
    return _nbytes(plain)


def _check_kind(cache: Any, config: Any) -> None:
    """Refuses a cache that cannot be made anew from the model's ``config``.

    Raises:
        CacheFileError: if this is one.
    """
    kind = type(cache)
    if kind not in (DynamicCache, StaticCache):
        allowed = "a DynamicCache or a StaticCache of transformers"
        raise CacheFileError(f"No {kind.__name__} can be saved; allowed: {allowed}.")
    if layer_kinds(cache) != layer_kinds(_new_cache(kind.__name__, config, _room(cache))):
        raise CacheFileError(
            "The cache's layers are not those of the model's config: make it with "
            f"{kind.__name__}(config=model.config), as generate does."
        )


def _check_tokens(cache: Any, ids: Tensor) -> None:
    """Refuses ``ids``, int32 ``[B, T]``, of another shape than the cache's.

    Raises:
        OptionError: if they are such.
    """
    held = (getattr(layer, "keys", None) for layer in cache.layers)
    rows = next((t.shape[0] for t in held if t is not None and t.dim() == 4), len(ids))
    found, wanted = list(ids.shape), [rows, int(cache.get_seq_length())]
    if found != wanted:
        raise OptionError(
            f"tokens are {found} where the cache holds {wanted} sequences and tokens; allowed: "
            "those that the model has read, which the last one of generate's is not."
        )


def _room(cache: Any) -> int | None:
    """How many tokens a static cache has room for."""
    rooms = (getattr(layer, "max_cache_len", 1) for layer in cache.layers)
    return max(rooms) if type(cache) is StaticCache else None


def _replace(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file beside ``path``, which then takes its place.

    Raises:
        OptionError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        save_file(dict(tensors), str(beside), metadata)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        reason = cut(str(getattr(error, "strerror", None) or error)).rstrip(".")
        raise OptionError(f"{shown_path(path)} cannot be written: {reason}.") from None
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def opened(path: str | Path) -> Iterator[SavedCache]:
    """The file at ``path``, whose text has been compared with its checksum.

    Raises:
        CacheFileError: if it is missing, damaged or of another format; also from within.
    """
    name = shown_path(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata[_TEXT]
            if str(crc32(text.encode())) != metadata[_CHECKSUM]:
                raise ValueError("its text differs from its checksum")
            header = json.loads(text)
            if (found := header["format"]) != FORMAT:
                raise CacheFileError(
                    f"The saved cache {name} has format {shown(found)}; this version reads "
                    f"{FORMAT}."
                )
            yield SavedCache(name, header, file)
    except KvpassError:
        raise
    except FileNotFoundError:
        raise CacheFileError(f"The saved cache {name} does not exist.") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        reason = cut(f"{type(error).__name__}: {error}").rstrip(".")
        raise CacheFileError(f"{name} is damaged, or no saved cache: {reason}.") from None


@dataclass(frozen=True)
class SavedCache:
    """A file that is open.

    Attributes:
        name: of the file, as errors show it.
        header: what the JSON text says.
        file: of safetensors.
    """

    name: str
    header: Mapping[str, Any]
    file: Any

    def check(self, identity: Identity, tokens: Tensor | None) -> None:
        """Refuses what is for another model than that of ``identity``, or of other ``tokens``.

        Raises:
            CacheFileError: if the cache is.
        """
        if (problem := identity.difference(self.header)) is not None:
            raise CacheFileError(f"The saved cache {self.name} is for {problem}.")
        if tokens is not None and not torch.equal(tokens, self.tokens):
            raise CacheFileError(f"The saved cache {self.name} holds other tokens.")

    @property
    def identity(self) -> Identity:
        """The identity of the model that it is for."""
        return Identity(**{f.name: self.header[f.name] for f in fields(Identity)})

    @property
    def tokens(self) -> Tensor:
        """The ids, int32 ``[B, T]``."""
        return self._checked(_TOKENS)

    @property
    def plain_nbytes(self) -> int:
        """Bytes of all that the cache holds, without compression."""
        return _nbytes(self.header["plain"])

    def cache(self, model: Any) -> Any:
        """The cache, for ``model``."""
        header, device = self.header, model.device
        # Neither is an inference tensor, which no later step could extend outside inference mode.
        with torch.inference_mode(False):
            tensors = {name: self._tensor(name).to(device) for name in header["plain"]}
            reader = Reader(tensors, device)
            cache = _new_cache(header["kind"], model.config, header["room"])
            for layer, saved in zip(cache.layers, header["layers"], strict=True):
                vars(layer).update(reader.value(saved))
        return cache

    def _tensor(self, name: str) -> Tensor:
        tensor = self._checked(name)
        if self.header["zstd"] is None:
            return tensor
        dtype, shape = self.header["plain"][name]
        return decompressed(tensor, getattr(torch, dtype), shape)

    def _checked(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        if [*_facts(tensor), _checksum(tensor)] != self.header["tensors"][name]:
            raise ValueError(f"tensor {shown(name)} differs from its checksum")
        return tensor


def layer_kinds(cache: Any) -> list[str]:
    """The names of the layers' classes."""
    return [type(layer).__name__ for layer in cache.layers]


def _new_cache(kind: str, config: Any, room: int | None) -> Any:
    """An empty cache of this kind, with ``room`` for tokens if it is static."""
    if kind == "StaticCache":
        return StaticCache(config=config, max_cache_len=room)
    return DynamicCache(config=config)


def _facts(tensor: Tensor) -> list[Any]:
    return [dtype_name(tensor.dtype), list(tensor.shape)]


def _nbytes(facts: Mapping[str, Any]) -> int:
    """Bytes of tensors of which these are the `_facts`."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in facts.values())


def _checksum(tensor: Tensor) -> int:
    """The CRC-32 of a contiguous tensor's bytes."""
    return crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
