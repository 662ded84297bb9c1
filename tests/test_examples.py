"""The examples run, and refuse bad input with a sentence."""

from __future__ import annotations

import pytest

from examples import add_a_rule, quickstart
from kvpass.rules import RULES


def test_quickstart_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "300", "--new-tokens", "8", "--texts", "1", "--scored", "4"]
    quickstart.main([*sizes, "--questions", "2", "--inner", "eager"])
    out = capsys.readouterr().out
    for part in ("fuse_attention", "bits/element", "plain", "kivi-4bit", "kivi-2bit"):
        assert part in out


def test_quickstart_names_a_missing_model() -> None:
    with pytest.raises(SystemExit, match="'nowhere' is not a model folder"):
        quickstart.main(["--model", "nowhere"])


def test_the_shipped_model_recalls() -> None:
    """At least 90 percent over 1,024 tokens in float32, as its page says."""
    model, tokenizer = quickstart.load(str(quickstart.SMALL_MODEL), "float32")
    prompts = [quickstart.recall_prompt(tokenizer, 1024, 40, seed) for seed in (1, 2)]
    assert quickstart.recall_accuracy(model, prompts) >= 0.9


def test_the_example_rule_fuses_what_was_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    rules = list(RULES)
    try:
        add_a_rule.main()
    finally:
        RULES[:] = rules
    without, with_rule = capsys.readouterr().out.split("With the rule:")
    assert "fired   decode_reader: decoded in front of getitem" in without
    assert "fuse_attention" not in without
    assert "fired   spell_out_einsum: bhqd,bhtd->bhqt is a matmul" in with_rule
    assert "fired   fuse_attention" in with_rule
