"""``kvpass bench start``: time to the first tokens in a process of its own, cold and warm.

A contender runs twice in folders for compiled code that no other uses: with nothing in them, and in
a second process with what the first one left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import compile_seconds
from kvpass.errors import cut
from kvpass.inspect.report import reports
from kvpass.options import ready_planner
from kvpass.report import Section, number

EAGER, COMPILE = "eager", "torch.compile"
# The folders for compiled code.
_CACHES = ("KVPASS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_RESULT = "kvpass start: "
# The module that a process runs.
_PROCESS = "kvpass.cli.first_tokens"
# The passes of `GraphReport.seconds` that compile; the others are rules, with what goes with them.
_KERNELS, _INNER = "lower", "inner compile"
_TOKENS = 6


@dataclass(frozen=True)
class Start:
    """A process from its first instruction to a few tokens.

    Attributes:
        contender: ``eager``, ``torch.compile`` or a recipe.
        warm: whether an earlier process has left compiled code.
        tokens: seconds of each token: the first is that of the prompt.
        imports, load: seconds until torch and transformers, and then the model, are there.
        parts: seconds of compilation within ``tokens``: ``dynamo``, and what the backend does.
        problem: why it did not run, or empty.
    """

    contender: str
    warm: bool
    tokens: tuple[float, ...] = ()
    imports: float = 0.0
    load: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class StartSetting:
    """What is started.

    Attributes:
        model: a model folder, a ``config.json`` or a preset, see `kvpass.cli.models`.
        prompt: tokens of the prompt.
        dtype, device: of the model.
        threads: CPU threads of torch; None: its default.
    """

    model: str
    prompt: int
    dtype: str
    device: str
    threads: int | None = None


def bench_start(setting: StartSetting, recipes: Sequence[str]) -> Iterator[Start]:
    """Starts the plain model, ``torch.compile`` and each recipe, cold and then warm."""
    for contender in (EAGER, COMPILE, *recipes):
        with tempfile.TemporaryDirectory(prefix="kvpass_start_") as folder:
            caches = {name: str(Path(folder) / name.lower()) for name in _CACHES}
            # Inductor's precompiled headers are always among temporary files.
            caches["TMPDIR"] = folder
            # Eager has nothing to find.
            times = 1 if contender == EAGER else 2
            yield from _started_again(setting, contender, {**os.environ, **caches}, times)


def warm_starts(setting: StartSetting, recipes: Sequence[str]) -> Iterator[Start]:
    """Starts each recipe twice where this process keeps compiled code: the second time, all is
    there. (What the first one finds is not known: it counts as cold.)"""
    for recipe in recipes:
        yield from _started_again(setting, recipe, dict(os.environ), 2)


def _started_again(
    setting: StartSetting, contender: str, environment: dict[str, str], times: int
) -> Iterator[Start]:
    """Processes one after the other, the later ones warm; none after one that fails."""
    for i in range(times):
        start = _started(setting, contender, environment)
        yield replace(start, warm=i > 0)
        if start.problem:
            break


def _started(setting: StartSetting, contender: str, environment: dict[str, str]) -> Start:
    """Runs one process, which prints what it has measured."""
    asked = json.dumps({**asdict(setting), "contender": contender, "began": time.time()})
    done = subprocess.run(
        [sys.executable, "-m", _PROCESS, asked],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_RESULT):
            found = json.loads(line.removeprefix(_RESULT))
            return Start(**{**found, "tokens": tuple(found["tokens"])})
    lines = done.stderr.strip().splitlines()
    problem = lines[-1] if lines else f"it ended with exit code {done.returncode}"
    return Start(contender, False, problem=cut(problem))


@torch.no_grad()
def measure_start(
    setting: StartSetting, contender: str, began: float, load_model: Callable[[], Any]
) -> Start:
    """What `bench_start` has a process of its own do, which was started at ``began`` (seconds of
    the epoch)."""
    import transformers  # noqa: F401  (its import is part of what is measured)

    imports = time.time() - began
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    before = time.time()
    model = load_model()
    load = time.time() - before
    if contender == COMPILE:
        model.compile()
    elif contender != EAGER:
        model.compile(backend="kvpass", options={"recipe": ready_planner(contender)})
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(0, size, (1, setting.prompt), generator=generator).to(setting.device)
    cache, tokens = None, []
    for _ in range(_TOKENS):
        before = time.perf_counter()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        # Waits for the device.
        ids.tolist()
        tokens.append(time.perf_counter() - before)
    return Start(contender, False, tuple(tokens), imports, load, _parts())


def _parts() -> dict[str, float]:
    """Seconds of compilation in this process, by who spent them."""
    dynamo, backend = compile_seconds()
    own = [report.seconds for report in reports()]
    if not own:
        return {"dynamo": dynamo, "inductor": backend} if backend else {}
    kernels, inner = (sum(s.get(name, 0.0) for s in own) for name in (_KERNELS, _INNER))
    rules = sum(sum(s.values()) for s in own) - kernels - inner
    return {"dynamo": dynamo, "rules": rules, "kernels": kernels, "inductor": inner}


def start_section(setting: StartSetting, starts: Sequence[Start]) -> Section:
    """The table: a row for each process."""
    header = ["start", "caches", "imports", "model", "1st token", "2nd", "3rd", "then"]
    header += ["dynamo", "rules", "kernels", "inductor"]
    rows = []
    for start in starts:
        row = [start.contender, "warm" if start.warm else "cold"]
        if start.problem:
            rows.append([*row, f"not run: {start.problem}"])
            continue
        first, second, third, *more = start.tokens
        then = sum(more) / len(more)
        row += map(number, (start.imports, start.load, first, second, third, then))
        rows.append(row + [_seconds(start, part) for part in header[8:]])
    title = (
        f"Seconds from the start of a process: {setting.model}, {setting.dtype} on "
        f"{setting.device}, a prompt of {setting.prompt} tokens"
    )
    notes = [
        "1st token: the prompt, with all that is compiled for it; then: each further token",
        "dynamo to inductor: parts of the compilation of all graphs; rules: kvpass's own passes, "
        "kernels: those it generates",
    ]
    return Section(title, header, rows, notes)


def _seconds(start: Start, part: str) -> str:
    return number(start.parts[part]) if part in start.parts else ""


def run_asked(text: str, load_model: Callable[[str, str, str], Any]) -> None:
    """`measure_start` of what `bench_start` asks a process for; prints what it has measured.

    Args:
        text: the process's argument.
        load_model: makes the model from its name, dtype and device.
    """
    asked: dict[str, Any] = json.loads(text)
    contender, began = asked.pop("contender"), asked.pop("began")
    setting = StartSetting(**asked)
    load = partial(load_model, setting.model, setting.dtype, setting.device)
    print(_RESULT + json.dumps(asdict(measure_start(setting, contender, began, load))))
