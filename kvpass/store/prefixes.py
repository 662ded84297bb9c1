"""`PrefixStore`: a folder of caches, in which a prompt finds the longest that it begins with."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from kvpass.errors import CacheFileError, KvpassError, OptionError, check, check_whole, shown_path
from kvpass.store.cache_file import layer_kinds, opened, write_cache
from kvpass.store.compression import check_level
from kvpass.store.identity import Identity, needs_chunk_bits
from kvpass.store.index import GROUP, INDEX, Entry, Index, name_of
from kvpass.store.prompts import begun, sequence
from kvpass.store.usage import Clock, StoreStatistics

_SUFFIX = ".prefix"
_FILES = f"{64 * '[0-9a-f]'}{_SUFFIX}"
# Layers of which the first tokens alone are of use: no window has forgotten any, no state holds
# more.
_CROPPABLE = {"DynamicLayer", "DummyLayer"}


class PrefixStore:
    """Caches of texts in a folder, for any number of processes on one machine.

    A prompt goes on from the longest stored text that it begins with. The cache of a whole text is
    that of a process which has read it and not stopped; the rest of the prompt then reads it
    packed, as every later prompt of a chat does. Where all layers keep all tokens, the cache of a
    longer text is cropped: what is left is as it was stored, with fewer exact tokens at its end.
    Sliding windows and recurrent states cannot be cropped, so that only whole texts are found.

    Texts of fewer than 64 tokens are neither stored nor found. A store holds single sequences: the
    rows of a batch, of `num_return_sequences` or of beams, go on from what they all begin with.
    `cocktail`, whose chunks have the bits of one request, is refused. Models, dtypes and recipes
    are kept apart, see `kvpass.save_cache`.

    Args:
        folder: made if need be.
        max_bytes: caches that were used longest ago leave when all take more.
        min_new: a text that was generated or read is stored if this many tokens of it are not
            stored yet; a question about a long text, say, is not.
        zstd: compresses new caches, as in `kvpass.save_cache`; files of a folder may differ.

    Raises:
        OptionError: if a number is not allowed, zstandard is missing, or the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int = 16 << 30,
        min_new: int = 256,
        zstd: int | None = None,
    ) -> None:
        check_whole("max_bytes", max_bytes, 1)
        check_whole("min_new", min_new, 1)
        check_level(zstd)
        self._folder, self._max_bytes, self._min_new = Path(folder), max_bytes, min_new
        self._zstd = zstd
        # Where files are until they are whole.
        self._written = self._folder / "kvpass-written"
        try:
            self._written.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"The folder {shown_path(folder)} cannot be used: {error.strerror}."
            ) from None
        self._index = Index(self._folder / INDEX)
        # Held while a file or the index changes; a process that is killed lets it go.
        self._lock = FileLock(self._folder / "lock")
        self._counted = StoreStatistics(0, 0, 0)
        with self._lock:
            self._index.make()
            self._match_files()

    @property
    def statistics(self) -> StoreStatistics:
        """What the store has been good for until now."""
        files, nbytes, plain = self._index.totals()
        return replace(self._counted, files=files, nbytes=nbytes, plain_nbytes=plain)

    def find(self, model: Any, tokens: Any) -> Any:
        """The cache of the longest stored text that ``tokens`` begin with, but for their last: give
        it to the model with them as ``past_key_values``. None if there is none.

        Args:
            model: as in `kvpass.load_cache`.
            tokens: the ids of a prompt, int ``[1, T]`` or ``[T]``.

        Raises:
            OptionError: if they are those of several sequences, or the index cannot be read.
        """
        return self._find(model, _identity(model), sequence(tokens))

    def add(self, model: Any, cache: Any, tokens: Any, *, seconds: float = 0.0) -> bool:
        """Stores ``cache``, of ``tokens``, if ``min_new`` of them are new; whether it did.

        Args:
            model, cache, tokens: as in `kvpass.save_cache`; a ``DynamicCache`` of one sequence.
            seconds: that a token took to compute, for `statistics`; 0: not known.

        Raises:
            CacheFileError, OptionError, StaleHandleError: as `kvpass.save_cache`.
        """
        ids = sequence(tokens)
        return self._add(model, _identity(model), cache, ids, self._min_new, seconds)

    def prefill(self, model: Any, tokens: Any) -> bool:
        """Computes the cache of a text ahead, and stores it, however short it is; False if it was
        stored already. What begins with all of these ``tokens`` finds it uncropped.

        Args:
            model: as in `kvpass.load_cache`.
            tokens: ids, int ``[1, T]`` or ``[T]``, at least 64.

        Raises:
            OptionError: if there are fewer, or the cache cannot be stored.
        """
        ids, identity = sequence(tokens), _identity(model)
        check("tokens", ids.numel(), ids.numel() >= GROUP, f"at least {GROUP} ids")
        if self._file(name_of(identity, ids)).exists():
            return False
        cache = DynamicCache(config=model.config)
        seconds = _read(model, cache, ids)
        return self._add(model, identity, cache, ids, 0, seconds)

    @contextmanager
    def use(self, model: Any) -> Iterator[PrefixStore]:
        """Lets ``model.generate`` go on from the longest stored text that the prompt begins with,
        and store what it has read then; a warning says what could not be stored.

        What several rows begin with is read once and stored, if ``min_new`` tokens of it are new;
        they share it, see `kvpass.tensor.rows`. What follows is not stored. Within, ``generate``
        raises an `OptionError` for padding, ``past_key_values`` and ``cache_implementation``.

        Args:
            model: as in `kvpass.load_cache`, compiled; its weights must not change meanwhile.
        """
        identity, before = _identity(model), vars(model).get("generate")
        generate = model.generate

        def continued(inputs: Any = None, *args: Any, **options: Any) -> Any:
            ids = options.pop("input_ids", inputs)
            tokens, rows = begun(model, ids, options)
            cache = self._find(model, identity, tokens)
            cache = DynamicCache(config=model.config) if cache is None else cache
            if rows > 1:
                self._spread(model, identity, cache, tokens[:-1], rows)
            known, clock = int(cache.get_seq_length()), Clock()
            own = options.pop("logits_processor", None) or []
            options["logits_processor"] = LogitsProcessorList([clock, *own])
            found = generate(ids, *args, past_key_values=cache, **options)
            if rows == 1:
                # A step has seen all but the last.
                read = getattr(found, "sequences", found)[0, : int(cache.get_seq_length())]
                seconds = clock.seconds / (tokens.numel() - known)
                self._keep(model, identity, cache, sequence(read), seconds)
            return found

        model.generate = continued
        try:
            yield self
        finally:
            del model.generate
            if before is not None:
                model.generate = before

    def _spread(
        self, model: Any, identity: Identity, cache: Any, tokens: Tensor, rows: int
    ) -> None:
        """Makes so many ``rows`` of ``cache``, which holds the first of the ``tokens`` that they
        all begin with, after it has read the others if these are worth to be stored."""
        if tokens.numel() - int(cache.get_seq_length()) >= max(self._min_new, GROUP):
            seconds = _read(model, cache, tokens)
            self._keep(model, identity, cache, tokens, seconds)
        if cache.get_seq_length():
            cache.reorder_cache(torch.zeros(rows, dtype=torch.long))

    def _keep(
        self, model: Any, identity: Identity, cache: Any, tokens: Tensor, seconds: float
    ) -> None:
        """`_add`; a warning says why it could not."""
        try:
            self._add(model, identity, cache, tokens, self._min_new, seconds)
        except KvpassError as error:
            warnings.warn(f"kvpass: the text was not stored: {error}", stacklevel=3)

    def _find(self, model: Any, identity: Identity, tokens: Tensor) -> Any:
        """`find` for a model of this identity."""
        clock, wanted = Clock(), tokens[:-1]
        self._counted = replace(self._counted, lookups=self._counted.lookups + 1)
        while (best := self._index.best(identity, wanted)) is not None:
            entry, known = best
            try:
                with opened(self._file(entry.name)) as saved:
                    saved.check(identity, entry.tokens.unsqueeze(0))
                    cache = saved.cache(model)
            except CacheFileError:
                # Damaged, or it has left meanwhile.
                self._remove([entry.name])
                continue
            if known < entry.tokens.numel():
                cache.crop(known - entry.tokens.numel())
            # On a full disk what is stored can still be read.
            with suppress(OptionError):
                self._index.touch(entry.name)
            clock.stop(model.device)
            spared = entry.seconds * known - clock.seconds if entry.seconds else 0.0
            self._counted = self._counted.with_hit(known, spared)
            return cache
        return None

    def _add(
        self,
        model: Any,
        identity: Identity,
        cache: Any,
        tokens: Tensor,
        least: int,
        seconds: float,
    ) -> bool:
        """`add` if at least so many ``tokens`` are new; each took ``seconds``."""
        best = self._index.best(identity, tokens)
        if tokens.numel() < GROUP or tokens.numel() - (best[1] if best else 0) < least:
            return False
        entry = Entry(name_of(identity, tokens), tokens, _croppable(layer_kinds(cache)), seconds)
        written = self._written / entry.name
        with self._lock:
            batch = tokens.unsqueeze(0)
            plain = write_cache(cache, written, model.config, identity, batch, self._zstd)
            size = written.stat().st_size
            if size > self._max_bytes:
                written.unlink()
                return False
            file = written.replace(self._file(entry.name))
            try:
                self._index.add(entry, identity, size, plain)
            except OptionError:
                file.unlink()
                raise
            self._evict()
        return True

    def _evict(self) -> None:
        """Lets caches leave, those used longest ago first, until all fit."""
        sizes = self._index.sizes()
        over = sum(size for _, size in sizes) - self._max_bytes
        for name, size in sizes:
            if over <= 0:
                return
            self._remove([name])
            over -= size

    def _match_files(self) -> None:
        """Makes the index that of the files, and removes what killed processes have left."""
        for path in self._written.iterdir():
            path.unlink()
        files = {path.name.removesuffix(_SUFFIX) for path in self._folder.glob(_FILES)}
        known = {name for name, _ in self._index.sizes()}
        self._remove(sorted(known - files))
        for name in sorted(files - known):
            path = self._file(name)
            try:
                with opened(path) as saved:
                    tokens, kinds = saved.tokens[0].clone(), saved.header["kinds"]
                    plain = saved.plain_nbytes
            except CacheFileError:
                path.unlink()
                continue
            entry = Entry(name, tokens, _croppable(kinds))
            self._index.add(entry, saved.identity, path.stat().st_size, plain)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._file(name).unlink(missing_ok=True)
        self._index.remove(names)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def _croppable(kinds: Collection[str]) -> bool:
    """Whether the first tokens of layers of these kinds are of use without the others."""
    return set(kinds) <= _CROPPABLE


def _identity(model: Any) -> Identity:
    """`Identity.of` a model of which caches can be stored.

    Raises:
        OptionError: if the bits of chunks are those of a request: they would be lost, or fall on
            other tokens of what is left of its prompt.
    """
    if needs_chunk_bits(model):
        raise OptionError(
            "A PrefixStore serves no model whose chunks have the bits of a request ('cocktail'): "
            "what is stored has those of another one. Use another recipe."
        )
    return Identity.of(model)


@torch.no_grad()
def _read(model: Any, cache: Any, tokens: Tensor) -> float:
    """Reads what ``cache``, of one sequence, does not hold of ``tokens``, int32 ``[T]``; the
    seconds that each took."""
    clock = Clock()
    new = tokens[int(cache.get_seq_length()) :].long().unsqueeze(0).to(model.device)
    model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
    clock.stop(model.device)
    return clock.seconds / new.numel()
