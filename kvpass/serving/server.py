"""`PackedServer`: transformers' server, with an API like OpenAI's, over a packed pool."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvpass.errors import OptionError
from kvpass.plan import Plan
from kvpass.recipes import Recipe
from kvpass.serving.cache import PackedPagedCache
from kvpass.serving.manager import default_page_size
from kvpass.serving.serve import serve_packed

# What is answered from packed pages; the last one also by models without a chat template.
_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/completions")


class PackedServer:
    """A server for one model. Its routes are those of ``transformers serve``, and ``/metrics``.

    Args:
        name: what clients call the model.
        load: loads the model and its tokenizer; once more after ``/reset``.
        planner: how keys and values are packed.
        host, port: where it listens; port 0: at a free one.
        pool: fields of transformers' ``ContinuousBatchingConfig``; what is not given follows from
            the memory.

    Raises:
        OptionError: if the model or the recipe cannot be served, or the address is taken.
        PlanError: if the recipe does not fit the model, or has to be calibrated.

    Attributes:
        summary: what the pool has room for.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], tuple[Any, Any]],
        planner: Recipe | Plan,
        *,
        host: str = "localhost",
        port: int = 8000,
        **pool: Any,
    ) -> None:
        self._socket = _listening(host, port)
        try:
            models = _PackedModels(name, load, planner)
            (loaded,) = models.loaded_models.values()
            config = _pool_config(loaded.model, planner, pool)
            self.summary = _summary(loaded.model, config)
            self._state = _PackedState(config)
        except BaseException:
            self._socket.close()
            raise
        # Asks for the numbers at once.
        self._registry = CollectorRegistry()
        self._registry.register(_PoolMetrics(self))
        self._server = uvicorn.Server(uvicorn.Config(self._app(models), log_level="warning"))

    def _app(self, models: _PackedModels) -> FastAPI:
        """The routes of transformers' server, and ``/metrics``."""
        state = self._state
        app: FastAPI = build_server(
            models,
            _Chat(models, state),
            completion_handler=CompletionHandler(models, state),
            response_handler=_Responses(models, state),
            transcription_handler=TranscriptionHandler(models, state),
            systemone_handler=SystemOneHandler(models, state),
            generation_state=state,
        )
        app.get("/metrics")(lambda: Response(self.metrics(), media_type="text/plain"))
        return app

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def cache(self) -> PackedPagedCache | None:
        """The pool; None before the first request."""
        return self._state.cache

    def metrics(self) -> bytes:
        """What the pool holds, as text for Prometheus."""
        return bytes(generate_latest(self._registry))

    def run(self) -> None:
        """Takes requests until it is stopped, or interrupted by Ctrl-C."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._state.shutdown()

    def stop(self) -> None:
        """Lets `run` return when the open requests are answered. From any thread."""
        self._server.should_exit = True


def _listening(host: str, port: int) -> socket.socket:
    """A socket; before a model is loaded, which takes longer.

    Raises:
        OptionError: if there is none at that address.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise OptionError(f"Nothing can listen at {host}:{port}: {error.strerror}.") from None


def _pool_config(
    model: Any, planner: Recipe | Plan, pool: Mapping[str, Any]
) -> ContinuousBatchingConfig:
    plan = planner.plan(model.config) if isinstance(planner, Recipe) else planner
    layers = model.config.get_text_config().num_hidden_layers
    page_size = default_page_size([plan.layer_at(i) for i in range(layers)])
    return ContinuousBatchingConfig(**{"page_size": page_size, **pool})


def _summary(model: Any, config: ContinuousBatchingConfig) -> str:
    """What the pool will have room for, before it is made with the first request."""
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(continuous_batching_config=config)
    model.set_attn_implementation(attention)
    found: str = manager.make_cache(torch.device("meta")).summary()
    return found


class _PackedModels(ModelManager):
    """transformers' record of loaded models: one, which is packed as soon as it is loaded."""

    def __init__(
        self, name: str, load: Callable[[], tuple[Any, Any]], planner: Recipe | Plan
    ) -> None:
        self._load, self._planner = load, planner
        self._model: Any = None
        super().__init__(force_model=name)

    def _load_processor(self, *_: Any, **__: Any) -> Any:
        self._model, tokenizer = self._load()
        serve_packed(self._model, self._planner)
        return tokenizer

    def _load_model(self, *_: Any, **__: Any) -> Any:
        # Called next; nothing else keeps the model then.
        model, self._model = self._model, None
        return model

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:
        """The one model, as clients list it."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]


class _Templated(BaseHandler):
    """What transformers' routes of messages have in common."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        found: tuple[str, Any, Any] = super()._resolve_model(body)
        if found[2].chat_template is None:
            raise HTTPException(400, f"The model has no chat template; allowed: {_ROUTES[-1]}.")
        return found


class _Chat(_Templated, ChatCompletionHandler):
    pass


class _Responses(_Templated, ResponseHandler):
    pass


class _PackedState(GenerationState):
    """transformers' record of what generates: nothing but the packed pool."""

    def __init__(self, config: Any) -> None:
        super().__init__(continuous_batching=True, cb_config=config)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The one of the packed pool.

        Raises:
            HTTPException: 400, to a request that would be answered without it.
        """
        if not use_cb:
            raise HTTPException(
                400, f"A packed pool generates text; allowed: {', '.join(_ROUTES)}."
            )
        return super().get_manager(model_id, use_cb)

    @property
    def cache(self) -> PackedPagedCache | None:
        """The pool; None before the first request."""
        manager = getattr(self._cb_manager, "_cb", None)
        return getattr(getattr(manager, "batch_processor", None), "cache", None)


class _PoolMetrics(Collector):
    """The numbers of a server's pool; none before the first request."""

    def __init__(self, server: PackedServer) -> None:
        self.server = server

    def collect(self) -> Iterable[Metric]:
        """Reads the pool at this moment."""
        cache = self.server.cache
        if cache is None:
            return
        for name, (text, value) in cache.usage().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"kvpass_{name}", text, value)
