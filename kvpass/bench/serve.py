"""``kvpass bench serve``: many requests at once, from packed pools and from transformers' own."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvpass.bench.models import CacheShape, layer_sizes
from kvpass.errors import OptionError, check
from kvpass.options import ready_planner
from kvpass.oracle import oracle_cache
from kvpass.plan import Plan
from kvpass.recipes import Recipe
from kvpass.report import Section, number
from kvpass.serving.manager import default_page_size
from kvpass.serving.pages import BlockPages
from kvpass.serving.serve import check_version, serve_packed

PLAIN = "transformers"
# Mean tokens of prompts and of answers in ShareGPT (Kwon et al. 2023, section 6.1), whose lengths
# are spread about as log-normal numbers with this deviation are.
_PROMPT, _ANSWER, _SPREAD = 161.0, 338.0, 1.0
_SHORTEST = 4
# How far a served token's logit may be below the largest one, in deviations of logits: sums in
# another order, and in 16 bits codes on the other side of a border, choose between near ones.
_TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.3, torch.float16: 0.1}
# The request that is checked has at least so many tokens, if one has.
_CHECKED = 256


@dataclass(frozen=True)
class ServeSetting:
    """What is served.

    Attributes:
        requests: how many.
        memory: bytes of a pool, exact tokens of packed ones included.
        scale: of ShareGPT's lengths.
        rate: requests per second, as a Poisson process; None: all at once.
        batch_tokens: of a step, at most.

    Raises:
        OptionError: if a number is not positive.
    """

    requests: int
    memory: int
    scale: float = 1.0
    rate: float | None = None
    batch_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("memory", "scale", "rate"):
            value = getattr(self, name)
            check(name, value, value is None or value > 0, "positive numbers")


@dataclass(frozen=True)
class Request:
    """A prompt, the number of tokens it is answered with, and when it comes, in seconds."""

    prompt: list[int]
    answer: int
    at: float

    @property
    def tokens(self) -> int:
        """The tokens of prompt and answer."""
        return len(self.prompt) + self.answer


@dataclass
class Served:
    """One pool's measurements.

    Attributes:
        room: what the pool holds.
        error: how far a served token's logit was below the largest one, see `shortfall`.
        seconds: from the first request to the last token.
        first_token_s: of each request, from its coming.
        gaps: of each further token, the tokens of all requests that are being answered, and the
            seconds since the one before.
    """

    name: str
    room: str = ""
    error: float = math.nan
    tolerance: float = 0.0
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps: list[tuple[int, float]] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        """Whether the answer was; then no speed is reported."""
        return not self.error <= self.tolerance

    @property
    def status(self) -> str:
        """A word for it, as in other benchmarks."""
        return "wrong" if self.wrong else "timed"


def make_requests(setting: ServeSetting, vocabulary: int, longest: int) -> list[Request]:
    """Random prompts of random lengths, none longer with its answer than ``longest``; the same ones
    every time."""
    g = random.Random(0)

    def length(mean: float, most: int) -> int:
        middle = math.log(mean * setting.scale) - _SPREAD**2 / 2
        return max(_SHORTEST, min(int(g.lognormvariate(middle, _SPREAD)), most))

    found, at = [], 0.0
    for _ in range(setting.requests):
        prompt = [g.randrange(vocabulary) for _ in range(length(_PROMPT, longest // 2))]
        found.append(Request(prompt, length(_ANSWER, longest - len(prompt)), at))
        at += g.expovariate(setting.rate) if setting.rate else 0.0
    return found


@torch.no_grad()
def bench_serve(model: Any, setting: ServeSetting, recipes: Sequence[str]) -> list[Served]:
    """Serves the same requests from a pool of the same bytes: transformers', and one packed by each
    recipe.

    Raises:
        OptionError: if a recipe cannot be served, or the memory holds no request.
    """
    check_version()
    planners = [ready_planner(name) for name in recipes]
    config = model.config.get_text_config()
    requests = make_requests(setting, config.vocab_size, min(config.max_position_embeddings, 4096))
    longest = max(request.tokens for request in requests)
    shape = layer_sizes(config)
    size = shape.plain_bytes(1, 1, model.dtype)
    if longest * size > setting.memory:
        raise OptionError(
            f"A pool of {setting.memory:,} bytes does not hold a request of {longest} tokens, "
            f"which takes {longest * size:,} where it is not packed."
        )
    checked = _checked(requests)
    served = [_serve(model, PLAIN, _plain_config(setting, size), setting, requests)]
    _judge(served[0][0], model, requests[checked], served[0][1][checked], None)
    for name, planner in zip(recipes, planners, strict=True):
        plan = planner.plan(model.config) if isinstance(planner, Recipe) else planner
        pool = _packed_config(plan, setting, requests, shape, model.dtype)
        serve_packed(model, planner)
        try:
            found, answers = _serve(model, f"kvpass {name}", pool, setting, requests)
        finally:
            del model.init_continuous_batching
        served.append((found, answers))
        _judge(found, model, requests[checked], answers[checked], plan)
    return [found for found, _ in served]


def _plain_config(setting: ServeSetting, token_bytes: int) -> ContinuousBatchingConfig:
    config = ContinuousBatchingConfig(max_batch_tokens=setting.batch_tokens)
    config.num_blocks = max(1, setting.memory // (token_bytes * config.page_size))
    return config


def _packed_config(
    plan: Plan,
    setting: ServeSetting,
    requests: Sequence[Request],
    shape: CacheShape,
    dtype: torch.dtype,
) -> ContinuousBatchingConfig:
    """A pool of the memory, which is divided for requests of the mean length."""
    layers = [plan.layer_at(i) for i in range(shape.layers)]
    page = default_page_size(layers)
    pages = BlockPages(layers, shape.kv_heads, shape.head_dim, page, dtype)
    exact = shape.plain_bytes(1, pages.most_exact_pages * page, dtype)
    mean, longest = statistics.mean(r.tokens for r in requests), max(r.tokens for r in requests)
    packed, most = (math.ceil(tokens / page) * pages.nbytes for tokens in (mean, longest))
    if exact + most > setting.memory:
        raise OptionError(
            f"A pool of {setting.memory:,} bytes does not hold a request of {longest} tokens, "
            f"which takes {exact + most:,}, {exact:,} of them for exact tokens."
        )
    active = min(setting.memory // (exact + packed), len(requests))
    active = max(1, min(active, (setting.memory - most) // exact))
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=(setting.memory - active * exact) // pages.nbytes,
        max_requests_per_batch=active,
        max_batch_tokens=setting.batch_tokens,
    )


def _serve(
    model: Any,
    name: str,
    pool: ContinuousBatchingConfig,
    setting: ServeSetting,
    requests: Sequence[Request],
) -> tuple[Served, list[list[int]]]:
    """The measurements of one pool, and the answers. A first request, which is not counted, has
    kernels compiled."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1)
    found = Served(name, requests=len(requests), tolerance=_TOLERANCES[model.dtype])
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=pool
    ) as manager:
        manager.add_request(requests[0].prompt, "warm", max_new_tokens=2)
        while manager.get_result("warm", timeout=1) is None:
            if not manager.is_running():
                raise RuntimeError(f"{name} serves nothing")
        began = time.perf_counter()
        outputs: dict[int, Any] = {}
        cache = manager.batch_processor.cache
        packed = getattr(cache, "summary", None)
        found.room = packed() if packed else f"room for {cache.max_tokens_read:,} tokens"
        for i, request in enumerate(requests):
            time.sleep(max(0.0, began + request.at - time.perf_counter()))
            manager.add_request(
                request.prompt, str(i), max_new_tokens=request.answer, record_timestamps=True
            )
        while len(outputs) < len(requests) and manager.is_running():
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                outputs[int(output.request_id)] = output
        found.seconds = time.perf_counter() - began
    for i, request in enumerate(requests):
        output = outputs.get(i)
        if output is None or output.error is not None:
            raise RuntimeError(f"{name} did not answer request {i}: {output and output.error}")
        found.tokens += len(output.generated_tokens)
        found.first_token_s.append(output.timestamps[0] - began - request.at)
    stamps = [outputs[i].timestamps for i in range(len(requests))]
    found.gaps = _gaps([len(request.prompt) for request in requests], stamps)
    return found, [outputs[i].generated_tokens for i in range(len(requests))]


def _gaps(prompts: Sequence[int], stamps: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """See `Served`: from the lengths of prompts and the times of each one's tokens."""
    events = sorted((time, i, k) for i, times in enumerate(stamps) for k, time in enumerate(times))
    found, held = [], 0
    for now, i, k in events:
        if k:
            found.append((held, now - stamps[i][k - 1]))
        held += 1 if k else prompts[i] + 1
        if k == len(stamps[i]) - 1:
            held -= prompts[i] + k + 1
    return found


def _checked(requests: Sequence[Request]) -> int:
    """The number of the request whose answer is checked: the shortest that is long enough."""
    lengths = [request.tokens for request in requests]
    enough = [length for length in lengths if length >= _CHECKED] or [max(lengths)]
    return lengths.index(min(enough))


def _judge(
    found: Served, model: Any, request: Request, answer: Sequence[int], plan: Plan | None
) -> None:
    """Notes how far a token of the answer was from the best one: by a plain cache, or by the
    oracle, which is given one token at a time."""
    ids = torch.tensor([[*request.prompt, *answer[:-1]]], device=model.device)
    if plan is None:
        logits = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    else:
        cache = oracle_cache(plan, model.config, model)
        steps = [model(one, past_key_values=cache).logits for one in ids.split(1, dim=1)]
        logits = torch.cat(steps, dim=1)
    given = torch.tensor(answer, device=model.device)
    found.error = shortfall(logits[0, -len(answer) :].float(), given)


def shortfall(logits: Tensor, given: Tensor) -> float:
    """The most by which the logits of ``given`` tokens ``[n]`` are below the largest of their
    ``logits`` ``[n, V]``, in deviations of these."""
    own = logits.gather(1, given.unsqueeze(1)).squeeze(1)
    return float(((logits.amax(dim=1) - own) / logits.std(dim=1)).max())


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line nearest to points, by least squares; slope 0 of one point."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return 0.0, statistics.mean(ys) if ys else math.nan
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope, intercept


def serve_section(setting: ServeSetting, served: Sequence[Served]) -> Section:
    """The table: a row for each pool."""
    header = ["pool", "requests/s", "tokens/s", f"x {PLAIN}", "1st token s, median", "p95"]
    header += ["ms between tokens", "and per 1,000 tokens", "error"]
    plain, rows = served[0], []
    for one in served:
        if one.wrong:
            why = f"a logit is {one.error:.2g} deviations low, allowed {one.tolerance}"
            rows.append([one.name, f"WRONG: {why}"])
            continue
        slope, intercept = line(one.gaps)
        first = sorted(one.first_token_s)
        numbers = (
            one.requests / one.seconds,
            one.tokens / one.seconds,
            plain.seconds / one.seconds,
            statistics.median(first),
            first[min(len(first) - 1, int(0.95 * len(first)))],
            1e3 * intercept,
            1e6 * slope,
        )
        rows.append([one.name, *map(number, numbers), f"{one.error:.1e}"])
    arrival = f"{setting.rate:g} a second" if setting.rate else "all at once"
    title = (
        f"{setting.requests} requests, {arrival}, lengths {setting.scale:g} x ShareGPT's, from "
        f"{setting.memory / 2**20:g} MiB"
    )
    notes = [f"{one.name}: {one.room}" for one in served if one.room]
    return Section(title, header, rows, notes)


def serve_json(served: Sequence[Served]) -> list[dict[str, Any]]:
    """A row for each pool, raw times included."""
    return [{"status": one.status, **asdict(one)} for one in served]
