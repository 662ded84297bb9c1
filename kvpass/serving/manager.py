"""`PackedBatchingManager`: transformers' continuous batching over a packed pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from types import MethodType
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from kvpass.errors import check, check_choice
from kvpass.plan import LayerPlan, Plan
from kvpass.serving.attention import paged_attention
from kvpass.serving.cache import PackedPagedCache
from kvpass.serving.offload import PackedOffloading
from kvpass.serving.pages import aligned

ATTENTION = "kvpass_paged"
# Tokens of a page, at least, if the user does not say: in longer ones more tokens are exact, too.
_PAGE_SIZE = 64
# What `_ready` sets in a config: without a batch in flight, and without padding.
_OFF = {"use_async_batching": False, "use_cuda_graph": False, "max_blocks_per_request": 0}

log = logging.getLogger(__name__)


class PackedBatchingManager(ContinuousBatchingManager):
    """transformers' manager, which makes a packed cache, and has the model attend to it.

    Raises:
        OptionError: if the configuration asks for what packed pages do not have.
    """

    def __init__(self, plan: Plan, layers: int, model: Any, config: Any, **kwargs: Any) -> None:
        self.plans = [plan.layer_at(i) for i in range(layers)]
        self.asked = None if config is None else config.max_requests_per_batch
        ready = _ready(config, self.plans)
        # transformers would pin memory for it, for which there must be a GPU.
        self._offload_space, ready.cpu_offload_space = ready.cpu_offload_space, 0.0
        super().__init__(model=model, continuous_batching_config=ready, **kwargs)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Has the model attend to packed pages until the manager stops."""
        if model.config._attn_implementation != ATTENTION:
            self._original_attn_impl = model.config._attn_implementation
            model.set_attn_implementation(ATTENTION)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """What the class above does, with a packed cache."""
        if isinstance(self.batch_processor, ContinuousBatchProcessor):
            self.batch_processor.reset()
            return self.batch_processor
        model, config = self.model, self.continuous_batching_config
        cache = self.make_cache(model.device)
        log.info("The pool has %s", cache.summary())
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(config, cache.num_blocks, cache.max_batch_tokens)
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=SCHEDULER_MAPPING[config.scheduler_type](
                cache=cache,
                safety_margin=config.safety_margin,
                max_requests_per_batch=config.max_requests_per_batch,
            ),
            distributed_helper=self.distributed_helper,
        )
        cache.io = processor.inputs_and_outputs
        processor.offloading_manager = PackedOffloading(
            cache,
            processor.scheduler,
            self._offload_space,
            config.cpu_offload_space_safety_threshold,
            processor.inputs_and_outputs.compute_stream,
            self.distributed_helper,
        )
        return processor

    def make_cache(self, device: torch.device) -> PackedPagedCache:
        """The pool; on the device ``meta`` one that holds nothing, but says what it would hold."""
        model = self.model
        return PackedPagedCache(
            model.config.get_text_config(),
            self.plans,
            self.continuous_batching_config,
            device,
            model.dtype,
            model._supports_logits_to_keep(),
            self.asked,
        )


def default_page_size(plans: Sequence[LayerPlan]) -> int:
    """The tokens of a page, if the user does not say, where layers are packed by ``plans``."""
    return aligned(_PAGE_SIZE, _key_group(plans))


def _key_group(plans: Sequence[LayerPlan]) -> int:
    return max(plan.keys.codec.token_group for plan in plans)


def _ready(
    config: ContinuousBatchingConfig | None, plans: Sequence[LayerPlan]
) -> ContinuousBatchingConfig:
    """A copy of the user's ``config`` for layers packed by ``plans``.

    Raises:
        OptionError: if it asks for what packed pages do not have.
    """
    if config is None:
        ready = ContinuousBatchingConfig(page_size=default_page_size(plans))
    else:
        ready = copy(config)
    size, group = ready.page_size, _key_group(plans)
    check("page_size", size, size % group == 0, f"multiples of the keys' group of {group} tokens")
    space = ready.cpu_offload_space
    check("cpu_offload_space", space, space is None or space >= 0, "0 or more GiB, or None")
    for name in ("varlen_compile_config", "decode_compile_config"):
        check(name, getattr(ready, name), getattr(ready, name) is None, "None")
    check(
        "default_compile_level", ready.default_compile_level, not ready.default_compile_level, "0"
    )
    check_choice("scheduler_type", ready.scheduler_type, tuple(SCHEDULER_MAPPING))
    for name, off in _OFF.items():
        value = getattr(ready, name)
        check(name, value, not value or value == (False, False), f"None, {off}")
        setattr(ready, name, off)
    return ready


def install(model: Any, plan: Plan, layers: int) -> None:
    """Has the model's own methods make managers of packed pools, by ``plan`` for ``layers``."""

    def init_continuous_batching(
        model: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> PackedBatchingManager:
        """transformers' method, with a packed pool."""
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        if isinstance(kept, PackedBatchingManager):
            kept.switch_to_cb_friendly_attn(model)
            return kept
        generation = copy(generation_config or model.generation_config)
        if generation.eos_token_id is None:
            generation.eos_token_id = -1
        return PackedBatchingManager(
            plan,
            layers,
            model,
            continuous_batching_config,
            generation_config=generation,
            workload_hints=workload_hints,
        )

    model.init_continuous_batching = MethodType(init_continuous_batching, model)


AttentionInterface.register(ATTENTION, paged_attention)
