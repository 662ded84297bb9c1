"""Train the larger one of the two small language models of the examples, from scratch.

The model learns from the sources of Python's own library and of installed packages, from a recall
task in which a document of ``name = value`` lines must be remembered exactly, and from the tasks of
`kvpass eval`.  Answers that lie thousands of tokens back only come out right if the keys and values
held in the cache are good, which is what makes the model useful for trying out ways of storing that
cache in fewer bits.

    python -m examples.train_small_model --minutes 100

Tokenizer, tokens and a checkpoint of each seed are kept in a folder (``--corpus``): made on one
machine, they can be trained on at another; and the same command with more minutes or tokens goes
on from the checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.small_model_batches import MAX_POSITIONS, Batches, Corpus, recall_sequence
from examples.small_model_data import held_out_files, read_texts, recall_document
from examples.small_model_training import Budget, Training, token_losses

DEFAULT_OUT = Path(__file__).resolve().parent / "larger_model"
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 6
HIDDEN = HEADS * HEAD_DIM
# Rotary embeddings turn the faster pairs of channels so far that a key cannot be found again by
# them: over 4,096 tokens, 14 channels of 64 turn by less than half a radian with a base of 1e5, and
# 32 with this one.
ROPE_THETA = 1e8


def new_model(tokenizer: Any) -> Any:
    """An untrained Llama of about five million parameters that fits ``tokenizer``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    start_with_recall_heads(model)
    return model


def start_with_recall_heads(model: Any) -> None:
    """Set first weights with which looking things up in the context is learned within minutes.

    In the first layer, heads look one, two, three and four tokens back, by their biases alone, and
    write what they find to separate subspaces.  In the second, queries read the subspace
    of one offset and keys that of the next one, so that a token looks for places after an
    earlier copy of what it follows itself.  All of it stays trainable.
    """
    half, pairs, strength = HEAD_DIM // 2, 8, 6.0
    angles = ROPE_THETA ** (-torch.arange(pairs) / half)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    spaces = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0].split(HEAD_DIM)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.05)
        first.v_proj.weight.copy_(0.07 * torch.randn(HEAD_DIM, HIDDEN).repeat(KV_HEADS, 1))
        first.k_proj.bias.view(-1, HEAD_DIM)[:, :pairs] = strength
        queries = first.q_proj.bias.view(-1, HEAD_DIM)
        for j, space in enumerate(spaces):
            queries[j, :pairs] = strength * torch.cos((j + 1) * angles)
            queries[j, half : half + pairs] = -strength * torch.sin((j + 1) * angles)
            first.o_proj.weight[:, j * HEAD_DIM : (j + 1) * HEAD_DIM] = 0.1 * space.T
        one, two, three, _ = spaces
        second.q_proj.weight.copy_(1.3 * torch.cat([one, one, two, two]))
        second.k_proj.weight.copy_(1.3 * torch.cat([two, three]))


def held_out_loss(model: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[float, float]:
    """Mean loss over whole ``texts``, in nats per token and in bits per byte."""
    nats, n_tokens = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        for start in range(0, len(ids), MAX_POSITIONS - 1):
            window = [tokenizer.bos_token_id, *ids[start : start + MAX_POSITIONS - 1]]
            with torch.inference_mode():
                nats += float(
                    token_losses(model, torch.tensor([window], device=model.device)).sum()
                )
        n_tokens += len(ids)
    n_bytes = sum(len(text.encode()) for text in texts)
    return nats / n_tokens, nats / math.log(2) / n_bytes


def unigram_loss(tokenizer: Any, train_ids: Any, texts: Sequence[str]) -> float:
    """Nats per token of ``texts`` under the (add-one) token frequencies of ``train_ids``."""
    import numpy as np

    counts = np.bincount(train_ids, minlength=len(tokenizer)) + 1
    log_p = np.log(counts / counts.sum())
    ids = [i for t in texts for i in tokenizer.encode(t, add_special_tokens=False, verbose=False)]
    return -float(log_p[ids].mean())


def recall_accuracy(
    model: Any, tokenizer: Any, n_tokens: int, n_documents: int = 16, seed: int = 1
) -> float:
    """Share of answers that greedy decoding gets fully right, four queries per document.

    All tokens are predicted in one pass: greedy decoding gives the whole answer exactly when
    each of its tokens is the most likely one after the right ones before it.
    """
    rng, right, total = random.Random(seed), 0, 0
    for _ in range(n_documents):
        document = recall_document(rng, tokenizer, n_tokens, n_queries=4)
        ids, weights = recall_sequence(tokenizer, document)
        with torch.inference_mode():
            best = (
                model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
                .logits[0]
                .argmax(-1)
            )
        hits = [bool(best[i - 1] == ids[i]) for i, weight in enumerate(weights) if weight]
        per_query = len(hits) // len(document.answers)
        for start in range(0, len(hits), per_query):
            right += all(hits[start : start + per_query - 1])  # the line end does not count
            total += 1
    return right / total


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write model (as bfloat16) and tokenizer to ``out``, replacing each file in one step."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def recall_shares(model: Any, tokenizer: Any, documents: int) -> dict[int, float]:
    """Recall over several lengths (in tokens)."""
    model.eval()
    lengths = (1024, 2048, MAX_POSITIONS)
    # Four questions and answers go behind the document.
    found = {n: recall_accuracy(model, tokenizer, n - 4 * 7, documents) for n in lengths}
    model.train()
    return found


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the model")
    parser.add_argument("--corpus", type=Path, default=Path("corpus"), help="folder for the tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="to train on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--batch", type=int, default=16_384, metavar="TOKENS", help="of a step")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    return parser.parse_args()


def main() -> None:
    """Train, save and measure the model."""
    from transformers import AutoModelForCausalLM

    args = parse_arguments()
    torch.manual_seed(args.seed)
    corpus = Corpus.of(args.corpus)
    tokenizer = corpus.tokenizer
    model = new_model(tokenizer).to(args.device)
    training = Training(model, Batches(corpus, args.seed, args.batch), args.lr)
    checkpoint = args.corpus / f"checkpoint-{args.seed}.pt"
    if checkpoint.exists():
        training.load(checkpoint)

    def kept() -> str:
        save(model, tokenizer, args.out)
        return str(recall_shares(model, tokenizer, 8))

    budget = Budget(args.tokens, args.minutes)
    training.run(budget, args.workers, args.save_every, checkpoint, kept)
    save(model, tokenizer, args.out)
    progress = training.progress
    print(f"tokens seen: {progress.tokens:,} in {progress.minutes:.1f} minutes")

    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    model = model.to(args.device).eval()
    held_out = read_texts(held_out_files())
    nats, bits = held_out_loss(model, tokenizer, held_out)
    print(f"parameters: {model.num_parameters():,}")
    print(f"held-out loss: {nats:.3f} nats/token, {bits:.3f} bits/byte")
    print(f"unigram loss: {unigram_loss(tokenizer, corpus.ids, held_out):.3f} nats/token")
    for n_tokens, share in recall_shares(model, tokenizer, 64).items():
        print(f"recall over {n_tokens} tokens: {share:.1%} of 256 queries")


if __name__ == "__main__":
    main()
