"""A folder of prefixes: what is found in it, what leaves it, and that nothing breaks it."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvpass import PrefixStore, recipe
from kvpass.errors import KvpassError, OptionError
from kvpass.store import index
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", group=8, residual=16)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
LENGTH = 100


@pytest.fixture(scope="module")
def read() -> tuple[Any, Any]:
    """A model, and its cache of 100 tokens, whichever they are said to be."""
    model = compiled(tiny_model("llama", layers=1), KIVI)
    return model, run_steps(model, prompt(1, LENGTH), [LENGTH])[1]


def eager(folder: Path, **options: Any) -> PrefixStore:
    """A store that takes short texts, too."""
    return PrefixStore(folder, min_new=1, **options)


def add(store: PrefixStore, read: tuple[Any, Any], seed: int) -> bool:
    return store.add(*read, prompt(1, LENGTH, seed))


def stored(store: PrefixStore, read: tuple[Any, Any], seed: int) -> bool:
    """Whether the text is there, and can be loaded."""
    return store.find(read[0], prompt(1, LENGTH + 9, seed)[:, : LENGTH + 1]) is not None


def joined(*texts: Tensor) -> Tensor:
    return torch.cat(texts, dim=1)


def test_generate_goes_on_from_the_longest_stored_text(tmp_path: Path) -> None:
    """Exact tokens: the answers are those without a store, whatever was cropped."""
    model = compiled(tiny_model("llama", layers=1), "fp")
    texts = [prompt(1, 150, seed) for seed in range(2)]
    store, draw = PrefixStore(tmp_path, min_new=40), random.Random(0)
    for _ in range(8):
        cuts = [draw.choice([0, 70, 150]), draw.randint(0, 150)]
        ids = joined(texts[0][:, : cuts[0]], texts[1][:, : cuts[1]], prompt(1, 3))
        wanted = model.generate(ids, **GREEDY)
        with store.use(model):
            found = model.generate(input_ids=ids, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(found.sequences, wanted)
    assert "generate" not in vars(model)
    counted = store.statistics
    assert (counted.lookups, counted.hits > 2, counted.tokens > 200) == (8, True, True)
    assert counted.nbytes == sum(f.stat().st_size for f in tmp_path.glob("*.prefix"))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_follows_a_whole_text_never_stopped(family: str, tmp_path: Path) -> None:
    model = compiled(tiny_model(family, layers=1), KIVI)
    store, text, question = PrefixStore(tmp_path), prompt(1, 90), prompt(1, 20, seed=1)
    _, cache = run_steps(model, text, [90], cache=DynamicCache(config=model.config))
    wanted = model.generate(joined(text, question), past_key_values=cache, **GREEDY)
    assert store.prefill(model, text[0].tolist())
    assert not store.prefill(model, text)
    assert store.prefill(model, text[:, :80]), "a text that a longer one begins with"
    with store.use(model):
        assert torch.equal(model.generate(joined(text, question), **GREEDY), wanted)
    assert (store.statistics.tokens, store.statistics.files) == (90, 2)
    # Without its last tokens, or behind all of them but one, which is to be computed.
    for shorter in (text[:, :-1], text):
        cache = store.find(model, shorter)
        known = None if cache is None else cache.get_seq_length()
        assert known == (80 if family == "mistral" else shorter.shape[1] - 1)
    other = compiled(tiny_model(family, layers=1), "kivi-2bit")
    assert store.find(other, joined(text, question)) is None


def test_rows_go_on_from_what_they_begin_with(tmp_path: Path) -> None:
    """A batch, sequences of one prompt, and beams: as from a cache that was repeated by hand."""
    model = compiled(tiny_model("llama", layers=1), KIVI)
    store, text = eager(tmp_path), prompt(1, 90)
    several = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 6}
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 6}
    question = joined(text, prompt(1, 1))
    batch = joined(text.expand(3, -1), prompt(3, 2, seed=1))
    for rows, ids, options in ((3, question, several), (2, question, beams), (3, batch, GREEDY)):
        _, cache = run_steps(model, text, [90], cache=DynamicCache(config=model.config))
        cache.reorder_cache(torch.zeros(rows, dtype=torch.long))
        torch.manual_seed(0)
        wanted = model.generate(ids, past_key_values=cache, **options)
        torch.manual_seed(0)
        with store.use(model):
            assert torch.equal(model.generate(ids, **options), wanted)
    counted = store.statistics
    assert (counted.lookups, counted.hits, counted.tokens, counted.files) == (3, 2, 180, 1)


def test_those_used_longest_ago_leave(read: Any, tmp_path: Path) -> None:
    store = eager(tmp_path / "one")
    assert add(store, read, 0)
    size = store.statistics.nbytes
    store = eager(tmp_path / "few", max_bytes=3 * size + size // 2)
    for seed in (0, 1, 2):
        assert add(store, read, seed)
    assert stored(store, read, 0)
    assert add(store, read, 3)
    assert [stored(store, read, seed) for seed in (0, 1, 2, 3)] == [True, False, True, True]
    assert store.statistics.files == 3
    tiny = eager(tmp_path / "few", max_bytes=size // 2)
    assert not add(tiny, read, 4), "larger than all that may be"
    assert stored(tiny, read, 0)
    assert not add(tiny, read, 0), "it is there"


def test_files_may_be_compressed(read: Any, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    for seed, level in enumerate((None, 1, 3)):
        assert add(eager(tmp_path, zstd=level), read, seed)
    (tmp_path / "index-1.sqlite").unlink()
    store = eager(tmp_path)
    assert all(stored(store, read, seed) for seed in range(3))
    assert store.statistics.compression > 1.1
    assert f"compressed {store.statistics.compression:.2f} times" in str(store.statistics)


def child(function: Callable[[], None]) -> multiprocessing.Process:
    """A process that runs ``function``, which knows all that this one does."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def test_several_processes_share_a_folder(read: Any, tmp_path: Path) -> None:
    stores = eager(tmp_path)

    def work(first: int) -> None:
        own = eager(tmp_path)
        for seed in range(first, first + 8):
            add(own, read, seed)
            assert stored(own, read, seed)
        os._exit(0)

    processes = [child(lambda first=first: work(first)) for first in (0, 4, 8)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert all(stored(stores, read, seed) for seed in range(16))
    assert stores.statistics.files == 16


def test_a_killed_process_leaves_the_store_readable(read: Any, tmp_path: Path) -> None:
    draw = random.Random(0)

    def work() -> None:
        own = eager(tmp_path)
        for seed in range(1000):
            add(own, read, seed)

    for _ in range(6):
        process = child(work)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store = eager(tmp_path)
        files = list(tmp_path.glob("*.prefix"))
        assert len(files) == store.statistics.files
        assert all(stored(store, read, seed) for seed in range(len(files)))
        assert not list((tmp_path / "kvpass-written").iterdir())
    assert files


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_store_readable(read: Any, tmp_path: Path) -> None:
    store = eager(tmp_path)
    add(store, read, 0)
    with full_disk():
        with pytest.raises(OptionError, match=r"cannot be written: .*File too large"):
            add(store, read, 1)
        assert stored(store, read, 0)
    assert not stored(store, read, 1)
    assert not list((tmp_path / "kvpass-written").iterdir())
    # A model's answer is not lost.
    model, text = read[0], prompt(1, 80, seed=2)
    wanted = model.generate(text, **GREEDY)
    said = pytest.warns(UserWarning, match="the text was not stored: ")
    with full_disk(), store.use(model), said:
        found = model.generate(text, **GREEDY)
    assert torch.equal(found, wanted)


def test_what_the_index_does_not_take_is_not_kept(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = eager(tmp_path)
    add(store, read, 0)
    monkeypatch.setattr(index, "_PATIENCE", 0)
    with closing(sqlite3.connect(tmp_path / "index-1.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OptionError, match="cannot be used: database is locked"):
            add(store, read, 1)
        assert stored(store, read, 0)
    assert store.statistics.files == len(list(tmp_path.glob("*.prefix"))) == 1


def test_damaged_files_leave(read: Any, tmp_path: Path) -> None:
    store = eager(tmp_path)
    for seed in (0, 1):
        add(store, read, seed)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.prefix")}
    for path, content in before.items():
        path.write_bytes(content[:-1])
    assert not stored(store, read, 0)
    assert store.statistics.files == 1
    # The index is made anew from the files; what cannot be read leaves.
    first, _ = before
    first.write_bytes(before[first])
    other = tmp_path / "weights.safetensors"
    other.write_bytes(b"not the store's")
    for broken in (b"", b"no database" * 999):
        (tmp_path / "index-1.sqlite").write_bytes(broken)
        store = eager(tmp_path)
        assert store.statistics.files == 1
        assert sorted(tmp_path.glob("*e*s")) == sorted([first, other][1:])
        assert stored(store, read, 0) or stored(store, read, 1)


def test_what_a_store_does_not_serve(read: Any, tmp_path: Path) -> None:
    model, text, store = read[0], prompt(1, 80), eager(tmp_path)
    with store.use(model):
        for given, sentence in (
            ({"past_key_values": DynamicCache()}, "past_key_values=.*; allowed: None, within Pre"),
            ({"cache_implementation": "static"}, "cache_implementation='static' .*: None"),
            ({"attention_mask": torch.zeros_like(text)}, "attention_mask=.*: without padding"),
            ({"inputs": None}, r"tokens=\(0,\) is not supported; allowed: whole numbers"),
        ):
            with pytest.raises(KvpassError, match=sentence):
                model.generate(**{"inputs": text, **GREEDY, **given})
    for options in ({"max_bytes": 0}, {"min_new": 0.5}):
        with pytest.raises(OptionError, match="is not supported; allowed: a whole number"):
            PrefixStore(tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"The folder '.*file' cannot be used: Not a directory."):
        PrefixStore(tmp_path / "file")
    batch = prompt(2, 80)
    for call in (store.find, store.prefill):
        with pytest.raises(OptionError, match=r"tokens=\(2, 80\) .*: those of one sequence"):
            call(model, batch)
    chunked = compiled(tiny_model("llama", layers=1), "cocktail")
    for call in (store.find, store.prefill):
        with pytest.raises(OptionError, match="whose chunks have the bits of a request"):
            call(chunked, text)
    with pytest.raises(OptionError, match="Use another recipe"), store.use(chunked):
        pass
    with pytest.raises(OptionError, match="tokens=63 is not supported; allowed: at least 64 ids"):
        store.prefill(model, text[:, :63])
