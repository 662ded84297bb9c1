"""Models and texts that commands load. Imports torch only when one does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def load_model(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    """A causal language model in eval mode and its tokenizer, from a folder or, by a name as
    ``Qwen/Qwen3-0.6B``, from the Hugging Face hub.

    Raises:
        OptionError: if there is no such model, or it cannot be loaded there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpass.errors import OptionError

    local = Path(path).exists() or path.count("/") != 1
    if local and not (Path(path) / "config.json").is_file():
        raise OptionError(f"'{path}' is not a model folder: it has no config.json.")
    try:
        # Before the model is loaded: a device that torch does not know is found at once.
        target = torch.device(device)
        with quiet_torchao():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), local_files_only=local
            ).to(target)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise OptionError(f"'{path}' cannot be loaded on {device}: {reason}.") from None
    return model.eval(), tokenizer


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Hides two warnings of torchao, which transformers imports wherever it is installed."""
    messages = {"torchao": "Failed to load", "torch.utils._pytree": "%s is an Enum subclass"}
    with ExitStack() as stack:
        for name, message in messages.items():
            logger = logging.getLogger(name)
            hides = partial(lambda start, record: not str(record.msg).startswith(start), message)
            logger.addFilter(hides)
            stack.callback(logger.removeFilter, hides)
        yield


def load_or_make_model(text: str, dtype: str, device: str) -> Any:
    """`load_model`; or a model with random weights, of a ``config.json`` or a preset.

    Raises:
        OptionError: if there is none of them.
    """
    import torch

    from kvpass.bench.models import PRESETS, random_model, written_config
    from kvpass.estimate.shapes import model_shape
    from kvpass.machine import pick_device

    if not text.endswith(".json") and text.split(",")[0] not in PRESETS:
        return load_model(text, dtype, device)[0]
    config, precision = written_config(text), getattr(torch, dtype)
    # Before any weight is made: whether it keeps keys and values.
    model_shape(config, precision)
    return random_model(config, precision, pick_device(device))


def check_texts(paths: Sequence[str]) -> None:
    """Looks for the text files, which is quick, before a model is loaded.

    Raises:
        OptionError: if one is missing.
    """
    from kvpass.errors import OptionError

    for path in paths:
        if not Path(path).is_file():
            raise OptionError(f"Text file '{path}' does not exist.")


def read_texts(paths: Sequence[str]) -> Iterator[Any]:
    """The texts of files, read one after the other; of .jsonl files each line's object.

    Raises:
        OptionError: if one is not text, or a line of a .jsonl file is no JSON object.
    """
    from kvpass.errors import OptionError

    for path in paths:
        try:
            if not path.endswith(".jsonl"):
                yield Path(path).read_text(encoding="utf-8")
                continue
            with Path(path).open(encoding="utf-8") as lines:
                yield from (_object(line) for line in lines if line.strip())
        except UnicodeDecodeError:
            raise OptionError(f"'{path}' is no text in UTF-8.") from None
        except ValueError as error:
            raise OptionError(f"'{path}' cannot be read: {error}.") from None


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line is {type(found).__name__}, not an object")
    return found
