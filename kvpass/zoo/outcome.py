"""Modes of the zoo and outcomes of its runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mode:
    """How a model is called.

    Attributes:
        attention: transformers' implementation, ``sdpa`` or ``eager``.
        cache: ``dynamic`` or ``static``.
        padded: a batch of three with padding on the left, instead of one sequence without.
    """

    attention: str = "sdpa"
    cache: str = "dynamic"
    padded: bool = False

    def __str__(self) -> str:
        return f"{self.attention}/{self.cache}" + ("/padded" if self.padded else "")


@dataclass(frozen=True)
class Outcome:
    """The result of one family in one mode with one recipe.

    Attributes:
        status: ``ok``; ``wrong`` or ``crash`` (kvpass is at fault); ``timeout``; ``unchecked``
            (packed, but there is no oracle for this kind of cache); ``no such attention``;
            ``plain fails`` and ``compile fails`` (the model does not run without kvpass, or not
            with ``torch.compile(backend="eager")``).
        tensors: keys and values in the cache at the end; packed: those of them that are packed.
        fused: packed ones that attention reads as they are; decoded: those decoded in front of it.
        refused: how many modules were refused, by reason.
        graphs, breaks: that Dynamo compiled, and graph breaks.
        outside: cache tensors decoded outside compiled code.
        error, tolerance: of the logits, relative to the largest one.
        effect: what packing changes, relative to the largest logit.
        problem: one line about what went wrong.
        seconds: of the compiled run.
    """

    family: str
    mode: Mode
    recipe: str
    status: str
    tensors: int = 0
    packed: int = 0
    fused: int = 0
    decoded: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    graphs: int = 0
    breaks: int = 0
    outside: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    effect: float = 0.0
    problem: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether kvpass is at fault."""
        return self.status in ("wrong", "crash", "timeout")
