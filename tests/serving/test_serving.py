"""Many requests at once over packed pages: each gets the answer that it gets alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import oracle_cache, recipe, serve_packed
from kvpass.errors import CacheStateError, OptionError
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.serving.serve import is_known_version
from tests.models import prompt, tiny_model

if not is_known_version():
    pytest.skip("another continuous batching", allow_module_level=True)

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvpass.serving.attention import _TARGETS
from kvpass.serving.pages import BlockPages, sector_bytes

PAGE = 8
NEW = 14
# GiB of the host's memory for requests of these models, or less than their exact tokens take.
HOST, TOO_LITTLE = 2e-3, 1e-6


def mixed(group: int) -> Plan:
    """What `auto` and KVmix come to: each tensor of each layer stored in its own way, some tokens
    exact by a ratio."""
    by_channel, by_token = Codec(2, "channel", group), Codec(4, "token", group)
    ratio = RetentionPolicy(pack_every=group, pivotal=0.3)
    layers = {
        "0": LayerPlan(
            TensorPlan(by_channel, ratio), TensorPlan(by_token, replace(ratio, pivotal=0.6))
        ),
        "1": LayerPlan(
            TensorPlan(by_token, RetentionPolicy(12, sinks=3)),
            TensorPlan(replace(by_token, bits=2), RetentionPolicy(12, group, sinks=3)),
        ),
    }
    return Plan(layers=layers)


RECIPES = {
    "fp": recipe("fp"),
    "kivi": recipe("kivi-2bit", group=8, residual=16),
    "skvq": recipe("skvq-k2v2", group=8, window=12, clip=False, reorder=False),
    "rotated": recipe("rotated-4bit", group=8, window=12, sinks=0),
    "mixed": mixed(8),
}

# Prompts that begin alike, for up to 0, 21, 40 and 49 tokens.
_TEXT, _OTHER = prompt(1, 60, seed=1)[0].tolist(), prompt(1, 60, seed=2)[0].tolist()
PROMPTS = [
    _TEXT[:5], _TEXT[:48], _TEXT[:49], _TEXT[:40] + _OTHER[:9], _TEXT[:21] + _OTHER[:30],
    _OTHER[:33], _TEXT[:52],
]  # fmt: skip


# With groups that fill vectors.
KERNELS = {
    "fp": recipe("fp"),
    "kivi": recipe("kivi-2bit", group=16, residual=16),
    "skvq": recipe("skvq-k2v2", group=16, window=12, clip=False, reorder=False),
    "rotated": recipe("rotated-4bit", group=16, window=12, sinks=0),
    "mixed": mixed(16),
}


# Layers with windows, which begin inside groups, beside others; with scores of attention sinks.
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"layers": 3, "layer_types": _LAYERS, "attention": "eager"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {**_WINDOWS, "sliding_window": 37},
    "gpt_oss": {**_WINDOWS, "sliding_window": 30},
}


@lru_cache(None)
def model(dtype: torch.dtype = torch.float64, family: str = "llama") -> Any:
    """In float64, no order of summation changes a code or a token."""
    found = tiny_model(family, dtype=dtype, **MODELS[family])
    if family == "gpt_oss":
        found.set_experts_implementation("eager")
    found.generation_config.do_sample = False
    found.generation_config.eos_token_id = -1
    return found


@lru_cache(None)
def alone(name: str, number: int, recipes: str, family: str) -> list[int]:
    """The answer to a prompt by the oracle, which is given one token at a time."""
    oracle = model(family=family)
    found = globals()[recipes][name]
    plan = found if isinstance(found, Plan) else found.plan(oracle.config)
    cache = oracle_cache(plan, oracle.config, oracle)
    ids, answer = list(PROMPTS[number]), []
    with torch.no_grad():
        for position in range(len(ids) + NEW):
            logits = oracle(torch.tensor([[ids[position]]]), past_key_values=cache).logits
            if position >= len(PROMPTS[number]) - 1:
                ids.append(int(logits[0, -1].argmax()))
                answer.append(ids[-1])
    return answer


@dataclass
class Server:
    """Continuous batching step by step, in this thread."""

    name: str
    blocks: int
    requests: int = 4
    batch: int = 24
    forks: int = 0
    dtype: torch.dtype = torch.float64
    page: int = PAGE
    family: str = "llama"
    offload: float = 0.0

    def __post_init__(self) -> None:
        self.model = model(self.dtype, self.family)
        serve_packed(self.model, (RECIPES if self.dtype == torch.float64 else KERNELS)[self.name])
        generation = transformers.GenerationConfig(
            do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=self.forks + 1
        )
        config = ContinuousBatchingConfig(
            page_size=self.page, num_blocks=self.blocks, max_batch_tokens=self.batch,
            max_requests_per_batch=self.requests, per_request_processors=True,
            cpu_offload_space=self.offload,
        )  # fmt: skip
        self.manager = self.model.init_continuous_batching(generation, config)
        self.processor = self.manager._create_batch_processor()
        self.cache = self.processor.cache

    def add(self, number: int, name: str, **options: Any) -> None:
        self.manager.add_request(PROMPTS[number], f"{number}/{name}", **options)

    def step(self) -> bool:
        if not self.processor.prepare_next_batch():
            return False
        self.processor._generation_step(self.model)
        self.processor.update_batch()
        return True

    def finish(self) -> dict[str, Any]:
        while self.step():
            pass
        self.check_empty()
        self.model.set_attn_implementation(MODELS[self.family].get("attention", "sdpa"))
        queue = self.manager.output_router.output_queue
        outputs = [queue.get() for _ in range(queue.qsize())]
        return {output.request_id: output for output in outputs}

    def check_empty(self) -> None:
        host = self.processor.offloading_manager
        assert (host._exact, host._request_id_to_cpu_blocks) == ({}, {})
        for allocator in self.cache.allocators:
            assert (allocator.lengths, allocator.steps, allocator.block_table) == ({}, {}, {})
            assert allocator._needed() == set()
            pages = allocator.exact.free + list(allocator.exact.page_of.values())
            assert sorted(pages) == list(range(allocator.exact.tokens.shape[2]))
        self.cache.evict_cached_blocks()
        self.cache.pool.try_to_free_sectors()
        assert self.cache.compute_free_capacity() == 1.0


def agree(
    name: str, outputs: dict[str, Any], recipes: str = "RECIPES", family: str = "llama"
) -> None:
    for request_id, output in outputs.items():
        expected = alone(name, int(request_id.split("/")[0]), recipes, family)
        assert output.error is None
        assert output.generated_tokens == expected[: len(output.generated_tokens)], request_id


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in RECIPES), ("gemma2", "skvq"), ("gpt_oss", "kivi")],
)
@settings(max_examples=8)
@given(data=st.data())
def test_each_answer_is_that_of_the_request_alone(
    family: str, name: str, data: st.DataObject
) -> None:
    """Whatever else is served: arrivals, cancellations, forks, shared prefixes, evictions."""
    forks = data.draw(st.sampled_from([0, 0, 2]), label="forks")
    server = Server(
        name,
        blocks=data.draw(st.integers(9, 40), label="blocks"),
        requests=data.draw(st.integers(1, 5), label="requests"),
        batch=data.draw(st.integers(5, 70), label="batch"),
        forks=forks,
        family=family,
        offload=data.draw(st.sampled_from([0.0, HOST]), label="host"),
    )
    wanted = {}
    for i in range(data.draw(st.integers(1, 7), label="arrivals")):
        number = data.draw(st.integers(0, len(PROMPTS) - 1), label="prompt")
        tokens = data.draw(st.integers(1, NEW), label="tokens")
        server.add(number, str(i), max_new_tokens=tokens)
        copies = [f"{number}/{i}", *(f"{number}/{i}__child#{k}" for k in range(forks))]
        wanted |= dict.fromkeys(copies, tokens)
        for _ in range(data.draw(st.integers(0, 6), label="steps")):
            server.step()
        if data.draw(st.integers(0, 4), label="cancel") == 0:
            server.manager.cancel_request(copies[-1])
            wanted[copies[-1]] = 0
    outputs = server.finish()
    agree(name, outputs, family=family)
    assert {k for k, v in wanted.items() if v} <= outputs.keys() <= wanted.keys()
    assert all(len(outputs[k].generated_tokens) == v for k, v in wanted.items() if v)


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in KERNELS), ("gemma2", "skvq"), ("gpt_oss", "kivi")],
)
def test_kernels_give_the_same_answers(family: str, name: str) -> None:
    """Prompts of several chunks beside decode steps, in float32: by the kernels alone."""
    _TARGETS.clear()
    server = Server(
        name, blocks=40, requests=5, batch=40, dtype=torch.float32, page=16, family=family
    )
    for i in range(len(PROMPTS)):
        server.add(i, "kernel", max_new_tokens=NEW)
        server.step()
    agree(name, server.finish(), "KERNELS", family)
    used = {(key[0], op.namespace) for key, op in _TARGETS.items() if torch.float32 in key}
    assert used == {("append_pages", "kvpass_cpp"), ("attention_pages", "kvpass_cpp")}


@pytest.mark.parametrize("name", RECIPES)
def test_requests_that_begin_alike_share_blocks(name: str) -> None:
    """A prompt of 48 tokens leaves all its blocks, and exact tokens, to the next ones."""
    server = Server(name, blocks=40, requests=8, batch=64)
    server.add(1, "first", max_new_tokens=NEW)
    server.step()
    for number, shared in ((6, 48), (1, 40), (3, 40)):
        server.add(number, f"after {shared}", max_new_tokens=NEW)
        server.step()
        assert server.cache.allocators[0].steps[f"{number}/after {shared}"].past == shared
    agree(name, server.finish())


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "kivi"), ("llama", "mixed"), ("gemma2", "skvq")]
)
def test_requests_that_lose_their_blocks_go_on_behind_them(family: str, name: str) -> None:
    """In a pool that is too small for all, each token is computed once: requests wait in the host's
    memory. Without room there they begin anew."""
    numbers, computed = (0, 5, 0, 3, 0, 4), {}
    for offload in (0.0, HOST):
        server = Server(name, blocks=14, requests=5, batch=60, offload=offload, family=family)
        for i, number in enumerate(numbers):
            server.add(number, f"waits {i}", max_new_tokens=NEW)
        agree(name, server.finish(), family=family)
        usage = server.cache.usage()
        computed[offload] = sum(usage[f"{x}_tokens_total"][1] for x in ("computed", "shared"))
        assert (usage["moved_requests_total"][1] > 0) == (offload > 0)
    assert computed[HOST] == sum(len(PROMPTS[i]) + NEW - 1 for i in numbers) < computed[0.0]


def test_host_memory_for_exact_tokens_alone_is_said_to_be_too_little() -> None:
    with pytest.warns(UserWarning, match="holds no page beside the exact tokens of 5 requests"):
        server = Server("kivi", blocks=14, requests=5, offload=TOO_LITTLE)
    server.finish()


def test_forks_share_full_blocks_and_copy_the_last() -> None:
    server = Server("kivi", blocks=40, requests=8, batch=64, forks=3)
    server.add(2, "parent", max_new_tokens=NEW)
    server.step()
    allocator = server.cache.allocators[0]
    tables = list(allocator.block_table.values())
    assert len(tables) == 4
    assert len({tuple(table[: 48 // PAGE]) for table in tables}) == 1
    assert allocator.lengths.keys() == allocator.block_table.keys()
    agree("kivi", server.finish())


def test_a_window_gives_its_blocks_back() -> None:
    """What a request holds of layers with a window does not grow with it, chunk by chunk."""
    server = Server("skvq", blocks=40, batch=8, family="gemma2")
    sliding, full = server.cache.allocators
    assert (sliding.layer_indices, full.layer_indices) == ([0, 2], [1])
    server.add(6, "long", max_new_tokens=NEW)
    held = []
    while server.step():
        if table := sliding.block_table.get("6/long"):
            held.append(len([block for block in table if block >= 0]))
            assert len(table) == len(full.block_table["6/long"])
    # Tokens of the window, and of the step, wherever a page begins.
    assert len(held) > 15
    assert max(held) <= -(-(37 + 8) // PAGE) + 1 < len(held)
    agree("skvq", server.finish(), family="gemma2")


@pytest.mark.parametrize(
    ("layers", "waste"), [((1, 5), 0), ((1, 1), 0), ((4, 22), 0.02), ((3, 4), 0.15), ((7,), 0)]
)
def test_sectors_hold_whole_blocks_of_each_type(layers: tuple[int, ...], waste: float) -> None:
    layer = recipe("kivi-4bit").layer_plan("0", 128, 128)
    groups = [BlockPages([layer] * n, 8, 128, 64, torch.bfloat16) for n in layers]
    used = sum(pages.nbytes for pages in groups)
    sector = sector_bytes(groups)
    assert all(sector % pages.nbytes == 0 for pages in groups)
    assert used <= sum(pages.nbytes for pages in groups) <= (1 + waste) * used


def test_a_request_that_fails_hurts_no_other() -> None:
    server = Server("kivi", blocks=40)
    server.add(1, "good", max_new_tokens=NEW)
    server.step()
    server.add(2, "bad", max_new_tokens=NEW, no_such_option=1)
    server.add(3, "good", max_new_tokens=NEW)
    outputs = server.finish()
    assert "no_such_option" in outputs.pop("2/bad").error
    assert len(outputs) == 2
    agree("kivi", outputs)


def test_the_methods_of_the_model_serve_packed_pages() -> None:
    serve_packed(model(), RECIPES["kivi"])
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=30)
    outputs = model().generate_batch(PROMPTS, continuous_batching_config=config, max_new_tokens=NEW)
    answers = [output.generated_tokens for output in outputs.values()]
    assert answers == [alone("kivi", i, "RECIPES", "llama")[:NEW] for i in range(len(PROMPTS))]
    assert model().config._attn_implementation == "sdpa"
    manager = model().init_continuous_batching()
    assert manager.continuous_batching_config.page_size == 64
    with pytest.raises(CacheStateError, match="is being served"):
        model()(torch.tensor([[1]]))
    model().set_attn_implementation("sdpa")


@pytest.mark.parametrize(("name", "least"), [("kivi-4bit", 3.2), ("kivi-2bit", 5.0), ("fp", 1.0)])
def test_a_pool_holds_more_tokens(name: str, least: float) -> None:
    layer, page = recipe(name).layer_plan("0", 128, 128), 256
    pages = BlockPages([layer] * 32, 8, 128, page, torch.bfloat16)
    plain = 32 * 2 * 8 * 128 * page * torch.bfloat16.itemsize
    assert plain / pages.nbytes >= least


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "window", "least"),
    [((10, 52), 16, 128, 1024, (2.7, 4.4)), ((12, 12), 8, 64, 128, (2.8, 4.6))],
    ids=["gemma-3-27b", "gpt-oss-20b"],
)
def test_a_request_with_windows_takes_less(
    layers: tuple[int, int], heads: int, dim: int, window: int, least: tuple[float, float]
) -> None:
    """Of 32,768 tokens, with its exact ones, against the tokens that transformers' pool holds."""
    tokens, page = 32768, 64
    plain = layers[0] * tokens + layers[1] * window
    for name, bound in zip(("kivi-4bit", "kivi-2bit"), least, strict=True):
        layer = recipe(name).layer_plan("0", dim, dim)
        groups = [
            BlockPages([layer] * n, heads, dim, page, torch.bfloat16, seen)
            for n, seen in zip(layers, (0, window), strict=True)
        ]
        sector_bytes(groups)
        exact = sum(len(g.keys) * g.most_exact_pages * page for g in groups)
        packed = sum(g.request_bytes(tokens) for g in groups)
        token = 2 * heads * dim * torch.bfloat16.itemsize
        assert plain * token / (packed + exact * token) >= bound


def test_says_what_the_pool_holds() -> None:
    """Of 2 layers with 2 heads of 16 channels in float64."""
    server = Server("kivi", blocks=20, requests=3)
    cache, token = server.cache, 2 * 2 * 2 * 16 * 8
    exact = 3 * cache.allocators[0].pages.most_exact_pages * PAGE
    plain = (20 * cache.allocators[0].pages.nbytes + exact * token) // token
    assert cache.summary() == (
        "room for 160 packed tokens and the exact ones of 3 requests in the bytes of "
        f"{plain} tokens in float64"
    )
    server.finish()


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("kivi-2bit", {"before_rope": True}, "keys before their rotary embedding"),
        ("cocktail", {}, "bits of chunks"),
        ("rotated-4bit", {}, "sinks before groups of tokens"),
    ],
)
def test_refuses_recipes(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=f"The plan of layer 0 has {reason}; allowed in packed"):
        serve_packed(tiny_model(), name, **fields)


def test_refuses_models_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = tiny_model("mistral", layer_types=["chunked_attention", "full_attention"])
    with pytest.raises(OptionError, match="has layers of chunked_attention; allowed"):
        serve_packed(chunked)
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(OptionError, match=r"transformers 5\.17\.0 is not supported in serving; "):
        serve_packed(model())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"page_size": 20}, "page_size=20 is not supported; allowed: multiples of the keys' group"),
        (
            {"cpu_offload_space": -1.0},
            r"cpu_offload_space=-1\.0 is not supported; allowed: 0 or more",
        ),
        ({"use_async_batching": True}, "use_async_batching=True is not supported; allowed: None"),
        ({"default_compile_level": 1}, "default_compile_level=1 is not supported"),
    ],
)
def test_refuses_configurations(option: dict[str, Any], message: str) -> None:
    serve_packed(model(), RECIPES["kivi"])
    with pytest.raises(OptionError, match=message):
        model().init_continuous_batching(None, ContinuousBatchingConfig(**option))
