"""Triton's interpreter, faster."""

from __future__ import annotations

from typing import Any


def patch_language_once() -> None:
    """Lets the interpreter replace Triton's language once for each module of kernels that a launch
    calls: it does so for each call of one function by another, a third of its time."""
    from triton.runtime import interpreter

    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched = set[int]()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def restore_all(scope: Any) -> None:
        restore(scope)
        patched.clear()

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_all
