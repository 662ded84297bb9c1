"""Saved caches: a model goes on as if it had never stopped, and a damaged file answers nothing."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import kvpass
from kvpass import PackedKV, cocktail, load_cache, recipe, save_cache
from kvpass.errors import CacheFileError, OptionError, StaleHandleError
from kvpass.zoo import families
from tests.cocktail.requests import any_bits
from tests.harness import compiled, graphs_compiled, run_steps
from tests.models import prompt, tiny_model
from tests.strategies import poisoned

ROOT = Path(__file__).parents[2]
KIVI = recipe("kivi-2bit", group=8, residual=16)
PLANNERS = {
    "kivi": KIVI,
    "before RoPE": recipe("kivi-2bit", group=8, residual=16, before_rope=True),
    "rotated-4bit": recipe("rotated-4bit"),
    "cocktail": recipe("cocktail"),
}
CALIBRATED: dict[str, dict[str, Any]] = {
    "skvq-k2v2": {"group": 8, "window": 8, "sinks": 3},
    "kvquant-nuq3-1%": {"window": 8, "sinks": 1},
    "kvmix": {"group": 8, "residual": 16},
}
# A window of 40 tokens fills up meanwhile.
PROMPT, STEPS = 35, 12


def model_of(family: str) -> Any:
    # Recurrent and convolution states beside keys and values.
    hybrid = family == "falcon_h1"
    return families.tiny_model(family, "eager") if hybrid else tiny_model(family, layers=1)


def planner_of(name: str, model: Any) -> Any:
    if name in PLANNERS:
        return PLANNERS[name]
    return kvpass.calibrate(model, name, [prompt(1, 60)], progress=False, **CALIBRATED[name])


@pytest.mark.parametrize(
    ("name", "family", "static"),
    [
        *((name, "llama", False) for name in ("kivi", "before RoPE", "rotated-4bit")),
        *((name, "llama", False) for name in (*CALIBRATED, "cocktail")),
        *(("kivi", family, False) for family in ("mistral", "falcon_h1")),
        *(("kivi", family, True) for family in ("llama", "mistral")),
    ],
)
def test_to_load_and_go_on_is_never_to_have_stopped(
    name: str, family: str, static: bool, tmp_path: Path
) -> None:
    model = model_of(family)
    planner = planner_of(name, model)
    twin, path = compiled(model, planner), tmp_path / "cache.safetensors"
    torch._dynamo.reset()

    @settings(max_examples=2, derandomize=True)
    @given(st.integers(1, STEPS - 1), st.integers(0, 9))
    def check(stop: int, seed: int) -> None:
        ids = prompt(1, PROMPT + STEPS, seed)
        cache = StaticCache(config=model.config, max_cache_len=90) if static else None
        with poisoned(), cocktail.use(any_bits(1, PROMPT, seed, chunk=32)):
            _, cache = run_steps(twin, ids[:, : PROMPT + stop], [PROMPT] + [1] * stop, cache=cache)
        read, rest = ids.split([PROMPT + stop, STEPS - stop], dim=1)
        save_cache(cache, path, model=twin, tokens=read)
        saved = [t for t in load_file(path).values() if t.is_floating_point()]
        assert all(bool(t.float().isfinite().all()) for t in saved), "unwritten memory"
        wanted, _ = run_steps(twin, rest, [1] * rest.shape[1], cache=cache)
        graphs = graphs_compiled()
        loaded = load_cache(path, twin, tokens=read)
        got, _ = run_steps(twin, rest, [1] * rest.shape[1], cache=loaded)
        assert torch.equal(got, wanted)
        assert graphs_compiled() == graphs
        again, _ = run_steps(twin, rest, [1] * rest.shape[1], cache=load_cache(path, twin))
        assert torch.equal(again, wanted), "the file is as it was"

    check()


class Saved:
    """A model, what it has read, its cache and the file of that."""

    def __init__(self, folder: Path, planner: Any = KIVI, tokens: int = 40) -> None:
        self.model = compiled(tiny_model("llama", layers=1), planner)
        self.path, self.ids = folder / "a.safetensors", prompt(1, tokens)
        _, self.cache = run_steps(self.model, self.ids, [tokens])
        self.save()

    def save(self, **options: Any) -> None:
        given = {"cache": self.cache, "path": self.path, "model": self.model, "tokens": self.ids}
        save_cache(**{**given, **options})

    def load(self, **options: Any) -> Any:
        return load_cache(**{"path": self.path, "model": self.model, **options})


def parts(cache: Any) -> list[torch.Tensor]:
    found = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return [p for t in found for p in (t.state if isinstance(t, PackedKV) else [t])]


def test_another_process_goes_on(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    code = (
        "import sys, torch, kvpass, kvpass.backend\n"
        "from tests.harness import compiled, run_steps\n"
        "from tests.models import prompt, tiny_model\n"
        # Another number of threads than here.
        "torch.set_num_threads(3 - min(2, int(sys.argv[3])))\n"
        "model = compiled(\n"
        "    tiny_model('llama', layers=1), kvpass.recipe('kivi-2bit', group=8, residual=16))\n"
        "cache = kvpass.load_cache(sys.argv[1], model, tokens=prompt(1, 40))\n"
        "logits, _ = run_steps(model, prompt(1, 8, 5), [1] * 8, cache=cache)\n"
        "torch.save(logits, sys.argv[2])\n"
    )
    arguments = [str(saved.path), str(tmp_path / "logits.pt"), str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, check=True)
    wanted, _ = run_steps(saved.model, prompt(1, 8, 5), [1] * 8, cache=saved.cache)
    assert torch.equal(torch.load(arguments[1]), wanted)


def test_tensors_are_mapped_and_shared_as_they_were(tmp_path: Path) -> None:
    model = compiled(tiny_model("llama"), PLANNERS["before RoPE"])
    path, ids = tmp_path / "a.safetensors", prompt(1, 300)
    _, cache = run_steps(model, ids, [300])
    save_cache(cache, path, model=model, tokens=ids)
    loaded = load_cache(path, model)
    first, second = (layer.keys for layer in loaded.layers)
    assert first.cos_sin is second.cos_sin
    # All of them are parts of one mapping, which is longer than any.
    ends = [t.data_ptr() + t.nbytes for t in parts(loaded)]
    assert max(ends) - min(t.data_ptr() for t in parts(loaded)) <= path.stat().st_size
    assert sum(t.nbytes for t in parts(loaded)) > 0.9 * path.stat().st_size
    before = path.read_bytes()
    for tensor in parts(loaded):
        tensor.zero_()
    assert path.read_bytes() == before


def test_room_for_later_tokens_is_not_saved(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    small = saved.path.stat().st_size
    for tensor in (saved.cache.layers[0].keys, saved.cache.layers[0].values):
        tensor.grow("capacity", 4096)
    saved.save()
    assert saved.path.stat().st_size == small
    rest, steps = prompt(1, 4, 1), [1] * 4
    got, wanted = (
        run_steps(saved.model, rest, steps, cache=c)[0] for c in (saved.load(), saved.cache)
    )
    assert torch.equal(got, wanted)


def test_compressed_caches_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    saved = Saved(tmp_path, tokens=300)
    saved.cache.layers[0].note = torch.empty(0)
    saved.save()
    wanted, size = parts(saved.load()), saved.path.stat().st_size
    for level in (1, 22):
        saved.save(zstd=level)
        assert saved.path.stat().st_size < 0.9 * size
        loaded = saved.load()
        assert all(torch.equal(a, b) for a, b in zip(parts(loaded), wanted, strict=True))
        assert loaded.layers[0].note.shape == (0,)
    content = bytearray(saved.path.read_bytes())
    for at in range(len(content) - 400, len(content), 40):
        content[at] ^= 1
        saved.path.write_bytes(content)
        with pytest.raises(CacheFileError, match="differs from its checksum"):
            saved.load()
        content[at] ^= 1


def test_compression_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path)
    for level in (0, 23, 1.5, True):
        with pytest.raises(OptionError, match=r"zstd=.*; allowed: None, or a level from 1 to 22"):
            saved.save(zstd=level)
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs zstandard, .*: pip install 'kvpass\[zstd\]'"):
        saved.save(zstd=1)
    rewritten(saved.path, zstd=1)
    with pytest.raises(OptionError, match="needs zstandard"):
        saved.load()


def rewritten(path: Path, **changes: Any) -> None:
    """The file with another text, whose checksum is right."""
    with safe_open(path, framework="pt") as file:
        text = json.dumps({**json.loads(file.metadata()["kvpass_cache"]), **changes})
    metadata = {"kvpass_cache": text, "kvpass_cache_crc32": str(crc32(text.encode()))}
    save_file(load_file(path), path, metadata)


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    saved = Saved(tmp_path)

    def refuses(sentence: str, **options: Any) -> None:
        with pytest.raises(CacheFileError, match=sentence) as caught:
            saved.load(**options)
        assert str(caught.value).count("\n") == 0

    def other(planner: Any = KIVI, **options: Any) -> Any:
        return compiled(tiny_model("llama", **{"layers": 1, **options}), planner)

    refuses("is for another model: its config or its weights differ", model=other(seed=1))
    refuses("is for another model: its config or its weights differ", model=other(layers=2))
    refuses("a model in float32, this one is in bfloat16", model=other(dtype=torch.bfloat16))
    refuses("'kivi-2bit', this model is compiled with 'kivi-4bit'", model=other("kivi-4bit"))
    refuses("'kivi-2bit' with other options, this model", model=other("kivi-2bit"))
    refuses("holds other tokens", tokens=prompt(1, 40, 1))
    refuses("'.*none' does not exist", path=tmp_path / "none")
    (tmp_path / "text").write_text("no cache")
    refuses("is damaged, or no saved cache", path=tmp_path / "text")
    kvpass.Plan().save(tmp_path / "plan.safetensors")
    refuses("is damaged, or no saved cache: KeyError", path=tmp_path / "plan.safetensors")
    refuses("is damaged, or no saved cache", path=tmp_path)
    rewritten(saved.path, format=1)
    refuses("has format 1; this version reads 2")
    # Not compiled yet: it goes on in the format in which the cache was begun.
    saved.save()
    plain = tiny_model("llama", layers=1)
    assert isinstance(saved.load(model=plain).layers[0].keys, PackedKV)
    saved.save(model=plain)
    refuses("is for a model without kvpass, this model is compiled with 'kivi-2bit'")


def test_what_cannot_be_saved_is_refused_in_a_sentence(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    before = saved.path.read_bytes()
    for other in (saved.ids[:, 1:], saved.ids.expand(2, 40)):
        shape = f"{list(other.shape)} where the cache holds [1, 40] sequences and tokens"
        with pytest.raises(OptionError, match=re.escape(shape)):
            saved.save(tokens=other)
    with pytest.raises(OptionError, match=r"tokens=.* is not supported; allowed: whole numbers"):
        saved.save(tokens=0.5)
    with pytest.raises(CacheFileError, match="No EncoderDecoderCache can be saved"):
        saved.save(cache=EncoderDecoderCache(saved.cache, DynamicCache()))
    with pytest.raises(CacheFileError, match="layers are not those of the model's config"):
        saved.save(model=tiny_model("mistral", layers=1))
    with pytest.raises(OptionError, match=r"cannot be written: .*No such file"):
        saved.save(path=tmp_path / "none" / "b")
    saved.cache.layers[0].note = [1]
    with pytest.raises(
        CacheFileError, match=r"holds \[1\] as 'layers.0.note', which cannot be saved"
    ):
        saved.save()
    del saved.cache.layers[0].note
    stale = saved.cache.layers[0].keys
    run_steps(saved.model, prompt(1, 1), [1], cache=saved.cache)
    saved.cache.layers[0].keys = stale
    with pytest.raises(StaleHandleError):
        saved.save()
    assert saved.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [saved.path]


def damaged(content: bytes, kind: int, draw: random.Random) -> bytes:
    """The file with flipped bits, cut, longer, with zeros, or with two parts swapped."""
    found, (a, b) = bytearray(content), sorted(draw.sample(range(len(content)), 2))
    if kind == 0:
        for _ in range(draw.randint(1, 3)):
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del found[a:]
    elif kind == 2:
        found += content[a:b]
    elif kind == 3:
        found[a:b] = bytes(b - a)
    else:
        n = min(b - a, len(found) - b, draw.randint(1, 4096))
        found[a : a + n], found[b : b + n] = found[b : b + n], found[a : a + n]
    return bytes(found)


def test_damaged_files_answer_nothing(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    content, wanted = saved.path.read_bytes(), parts(saved.load())
    header = int.from_bytes(content[:8], "little") + 8
    draw, sentences = random.Random(0), []
    for i in range(500):
        # Half of them within the header, which is short.
        part = content[:header] if i % 2 else content
        saved.path.write_bytes(damaged(part, i % 5, draw) + content[len(part) :])
        try:
            found = parts(saved.load())
        except CacheFileError as error:
            sentences.append(str(error))
        else:
            # Of no meaning: spaces behind the header, or equal parts that were swapped.
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(sentences) > 400
    assert not any("\n" in sentence for sentence in sentences)
    # The header of another file of the same model and sizes.
    _, saved.cache = run_steps(saved.model, prompt(1, 40, 1), [40])
    saved.save(tokens=prompt(1, 40, 1))
    saved.path.write_bytes(saved.path.read_bytes()[:header] + content[header:])
    with pytest.raises(CacheFileError, match="is damaged, or no saved cache"):
        saved.load()


def test_strides_and_shared_memory_are_kept(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    layer, base = saved.cache.layers[0], torch.arange(24.0)
    layer.turned, layer.flat = base.view(1, 4, 6).transpose(1, 2), base
    layer.row = base[3:9]
    saved.save()
    loaded = saved.load().layers[0]
    for name in ("turned", "flat", "row"):
        found, wanted = getattr(loaded, name), getattr(layer, name)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
