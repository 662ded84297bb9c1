"""``kvpass serve``: clients of an API like OpenAI's get the answers that they get alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx2
import openai
import pytest
import torch
from transformers import AutoTokenizer

from kvpass import oracle_cache, recipe
from kvpass.errors import OptionError
from kvpass.serving.serve import is_known_version
from tests.command import failure
from tests.models import tiny_model

if not is_known_version():
    pytest.skip("another continuous batching", allow_module_level=True)

from kvpass.serving.server import PackedServer

RECIPE = recipe("kivi-2bit", group=8, residual=16)
CLIENTS, NEW = 32, 12
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def load() -> tuple[Any, Any]:
    """In float64, no order of summation changes a code or a token."""
    tokenizer = AutoTokenizer.from_pretrained("examples/small_model")
    model = tiny_model(dtype=torch.float64, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = -1
    return model, tokenizer


@contextmanager
def running(chat: str | None = CHAT) -> Iterator[tuple[PackedServer, str]]:
    """A server that takes requests, and its address."""

    def load_with_template() -> tuple[Any, Any]:
        model, tokenizer = load()
        tokenizer.chat_template = chat
        return model, tokenizer

    server = PackedServer(
        "tiny", load_with_template, RECIPE, port=0,
        page_size=8, num_blocks=120, max_requests_per_batch=8, max_batch_tokens=64,
    )  # fmt: skip
    thread = Thread(target=server.run)
    thread.start()
    url = f"http://localhost:{server.port}"
    try:
        while True:
            try:
                assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
                break
            except httpx2.ConnectError:
                time.sleep(0.05)
        yield server, url
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


def texts() -> list[str]:
    """Some that begin alike, and some that do not."""
    words = "a cache of keys and values is packed in two bits " * 3
    return [f"{'' if i % 2 else words}{i} requests " * (1 + i % 3) for i in range(CLIENTS)]


def alone(text: str, model: Any, tokenizer: Any) -> str:
    """The answer by the oracle, which is given one token at a time."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    cache = oracle_cache(RECIPE.plan(model.config), model.config, model)
    answer: list[int] = []
    with torch.no_grad():
        for position in range(len(ids) + NEW - 1):
            token = [*ids, *answer][position]
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits
            if position >= len(ids) - 1:
                answer.append(int(logits[0, -1].argmax()))
    # A stream leaves out a character whose last bytes are not generated.
    return str(tokenizer.decode(answer, skip_special_tokens=True)).rstrip("\ufffd")


async def ask(client: openai.AsyncOpenAI, text: str) -> str:
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], stream=True,
        max_tokens=NEW, temperature=0,
    )  # fmt: skip
    return "".join([event.choices[0].delta.content or "" async for event in stream])


async def leave(client: openai.AsyncOpenAI) -> None:
    """Reads one token of many, then closes the connection."""
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "leave"}], stream=True,
        max_tokens=400, temperature=0,
    )  # fmt: skip
    async for _ in stream:
        await stream.close()
        return


def test_many_clients_at_once_get_what_they_get_alone() -> None:
    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            assert [model.id for model in (await client.models.list()).data] == ["tiny"]
            *answers, _, _ = await asyncio.gather(
                *(ask(client, text) for text in texts()), leave(client), leave(client)
            )
            return answers

    with running() as (server, url):
        assert httpx2.get(f"{url}/metrics").text == ""
        assert "in the bytes of" in server.summary
        answers = asyncio.run(run(url))
        # Nothing is left of the clients that went away.
        deadline = time.monotonic() + 30
        while server.cache.usage()["requests"][1] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "\nkvpass_requests 0.0\n" in httpx2.get(f"{url}/metrics").text
        usage = server.cache.usage()
    assert 0 < usage["kept_pages"][1] == usage["used_pages"][1] <= usage["pool_pages"][1]
    assert usage["shared_tokens_total"][1] > 0
    model, tokenizer = load()
    assert answers == [alone(text, model, tokenizer) for text in texts()]
    assert len(set(answers)) > CLIENTS // 2


def test_what_is_not_served_from_packed_pages_is_refused() -> None:
    message = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    question = {"a": {"type": "choice", "instructions": "b", "criteria": {"c": "d", "e": "f"}}}
    with running(chat=None) as (server, url):
        said = httpx2.post(f"{url}/v1/chat/completions", json=message)
        assert (said.status_code, said.json()["detail"]) == (
            400, "The model has no chat template; allowed: /v1/completions.",
        )  # fmt: skip
        asked = {"model": "tiny", "state": "a", "questions": question}
        said = httpx2.post(f"{url}/v1/systemone", json=asked)
        assert said.status_code == 400
        assert said.json()["detail"].startswith("A packed pool generates text; allowed: /v1/chat")
        with pytest.raises(
            OptionError, match=f"listen at localhost:{server.port}: Address already"
        ):
            PackedServer("tiny", load, RECIPE, port=server.port)
        other = httpx2.post(f"{url}/v1/completions", json={"model": "b", "prompt": "a"})
        assert other.status_code == 400
        assert "pinned to 'tiny'" in other.text


def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no config.json" in failure(capsys, "serve", "nowhere")
    assert "Unknown recipe 'kivi'" in failure(
        capsys, "serve", "examples/small_model", "--recipe", "kivi"
    )
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None if name == "uvicorn" else True)
    assert "pip install 'kvpass[serve]'" in failure(capsys, "serve", "examples/small_model")
