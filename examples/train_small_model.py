"""Train the small language model that the examples use, from scratch, on a CPU.

The model learns two things at once: the source text of Python's own standard library, and a
recall task in which a document of ``name = value`` lines must be remembered exactly.  Recall
over a thousand tokens only works if the keys and values held in the cache are good, which is
what makes the model useful for trying out ways of storing that cache in fewer bits.

Run ``python -m examples.train_small_model`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.small_model_data import (
    RecallDocument,
    encode,
    held_out_files,
    read_texts,
    recall_document,
    training_files,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

DEFAULT_OUT = Path(__file__).resolve().parent / "small_model"
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
HEAD_DIM = 64
ROPE_THETA = 100_000.0
BOS = "<s>"
# The curriculum: as soon as recall is learned at the longest length so far, the next one joins.
LENGTHS = (48, 128, 384, 1024, 2048)
LEARNED = 0.25  # nats per answer token, a running mean over some 30 steps
# Pieces that tokens never cross: an assignment sign, one digit, a word, signs, white space.
WORDS = r" = |\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# ---------------------------------------------------------------------------------------------
# Data


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer that keeps every digit apart and puts ``<s>`` first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def recall_sequence(
    tokenizer: Any, document: RecallDocument, length: int = MAX_POSITIONS
) -> tuple[list[int], list[float]]:
    """The ids of ``document`` with all its queries answered, cut to ``length``, and weights.

    A weight is 1 for the tokens of an answer and for the line end after it, and 0 elsewhere.
    """
    ids: list[int] = tokenizer.encode(document.text)
    weights = [0.0] * len(ids)
    for i, answer in enumerate(document.answers):
        for text, weight in ((document.prompt(i), 0.0), (f"{answer}\n", 1.0)):
            part = encode(tokenizer, text)
            ids += part
            weights += [weight] * len(part)
    return ids[:length], weights[:length]


class TrainingData:
    """Batches for training: half library text, half recall, made from one seed."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], seed: int) -> None:
        """Tokenize ``texts``, which takes some seconds."""
        import numpy as np

        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.n_seen = 0  # tokens in all batches made so far
        files = (tokenizer.encode(text, verbose=False) for text in texts)
        self.ids: np.ndarray[Any, Any] = np.concatenate([np.array(f, np.uint16) for f in files])
        self.lines = [line for text in texts for line in text.splitlines(keepends=True)]

    def text(self, length: int) -> tuple[list[int], list[float]]:
        """A random window of library text after ``<s>``, all of it weighted 1."""
        start = self.rng.randrange(len(self.ids) - length)
        window = self.ids[start : start + length - 1].tolist()
        return [self.tokenizer.bos_token_id, *window], [1.0] * length

    def recall(self, length: int) -> tuple[list[int], list[float]]:
        """A recall document over 30 to 90 % of ``length``, one in four with library lines."""
        n_tokens = int(length * self.rng.uniform(0.3, 0.9))
        filler: list[str] = []
        if self.rng.random() < 0.25:
            start = self.rng.randrange(len(self.lines))
            filler = [line for line in self.lines[start : start + 200] if len(line) < 100]
        document = recall_document(
            self.rng,
            self.tokenizer,
            n_tokens,
            n_queries=(length - n_tokens) // 7 + 2,
            filler=filler,
        )
        return recall_sequence(self.tokenizer, document, length)

    def batch(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids and weights of some sequences of ``length`` tokens, and which of them are recall.

        The weights of every sequence sum to 1.  All sequences of the first length are recall,
        because looking things up is learned sooner without the text, and then one in two or four.
        """
        import torch

        size = max(2, 1024 // length)
        is_recall = (torch.arange(size) % 4 == 1) | (length == LENGTHS[0])
        ids = torch.zeros(size, length, dtype=torch.long)
        weights = torch.zeros(size, length)
        for row in range(size):
            tokens, weight = (self.recall if is_recall[row] else self.text)(length)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, : len(weight)] = torch.tensor(weight)
        self.n_seen += ids.numel()
        return ids, weights / weights.sum(1, keepdim=True), is_recall


# ---------------------------------------------------------------------------------------------
# Model and measurements


def new_model(tokenizer: Any) -> Any:
    """An untrained Llama of about two million parameters that fits ``tokenizer``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=3 * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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

    In the first layer, heads look one, two and three tokens back, by their biases alone, and
    write what they find to three separate subspaces.  In the second, queries read the subspace
    of one offset and keys that of the next one, so that a token looks for places after an
    earlier copy of what it follows itself.  All of it stays trainable.
    """
    import torch

    half, pairs, strength = HEAD_DIM // 2, 8, 5.0
    angles = ROPE_THETA ** (-torch.arange(pairs) / half)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    spaces = torch.linalg.qr(torch.randn(3 * HEAD_DIM, 3 * HEAD_DIM))[0].split(HEAD_DIM)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.05)
        first.v_proj.weight.copy_(0.07 * torch.randn(HEAD_DIM, 3 * HEAD_DIM).repeat(2, 1))
        first.k_proj.bias.view(-1, HEAD_DIM)[:, :pairs] = strength
        queries = first.q_proj.bias.view(-1, HEAD_DIM)
        for j, space in enumerate(spaces):
            queries[j, :pairs] = strength * torch.cos((j + 1) * angles)
            queries[j, half : half + pairs] = -strength * torch.sin((j + 1) * angles)
            first.o_proj.weight[:, j * HEAD_DIM : (j + 1) * HEAD_DIM] = 0.1 * space.T
        one, two, three = spaces
        second.q_proj.weight.copy_(1.3 * torch.cat([one, one, two, two]))
        second.k_proj.weight.copy_(1.3 * torch.cat([two, three]))


def token_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each token after the first; (batch, length) gives length - 1."""
    import torch

    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(ids.shape[0], -1)


def held_out_loss(model: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[float, float]:
    """Mean loss over whole ``texts``, in nats per token and in bits per byte."""
    import torch

    nats, n_tokens = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        for start in range(0, len(ids), MAX_POSITIONS - 1):
            window = [tokenizer.bos_token_id, *ids[start : start + MAX_POSITIONS - 1]]
            with torch.inference_mode():
                nats += float(token_losses(model, torch.tensor([window])).sum())
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
    import torch

    rng, right, total = random.Random(seed), 0, 0
    for _ in range(n_documents):
        document = recall_document(rng, tokenizer, n_tokens, n_queries=4)
        ids, weights = recall_sequence(tokenizer, document)
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)
        hits = [bool(best[i - 1] == ids[i]) for i, weight in enumerate(weights) if weight]
        per_query = len(hits) // len(document.answers)
        for start in range(0, len(hits), per_query):
            right += all(hits[start : start + per_query - 1])  # the line end does not count
            total += 1
    return right / total


# ---------------------------------------------------------------------------------------------
# Training


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write model (as bfloat16) and tokenizer to ``out``, replacing each file in one step."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def learning_rate(step: int, progress: float, peak: float, warmup: int = 100) -> float:
    """Linear warm-up over ``warmup`` steps, and a cosine down to 2 % at ``progress`` 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * cosine)


def update(
    model: Any, optimizer: torch.optim.Optimizer, data: TrainingData, length: int
) -> tuple[float | None, float]:
    """One step on a new batch; its losses on text (if there was any) and on recall, in nats."""
    import torch

    ids, weights, is_recall = data.batch(length)
    losses = (token_losses(model, ids) * weights[:, 1:]).sum(1)
    torch.autograd.backward(losses.mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    text = None if is_recall.all() else losses[~is_recall].mean().item()
    return text, losses[is_recall].mean().item()


def train(model: Any, data: TrainingData, args: argparse.Namespace) -> None:
    """Train ``model`` as the command line says, saving it now and then."""
    import torch
    from tqdm.auto import tqdm

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    started, step, level, progress = time.monotonic(), 0, 0, 0.0
    recall_loss, text_loss = math.log(10), math.log(VOCAB_SIZE)
    with tqdm(total=args.tokens, unit="token", unit_scale=True, mininterval=5) as bar:
        while progress < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, progress, args.lr)
            length = data.rng.choice(LENGTHS[min(level, 1) : level + 1])
            text, recall = update(model, optimizer, data, length)
            if text is not None:
                text_loss += 0.03 * (text - text_loss)
            if length == LENGTHS[level]:
                recall_loss += 0.03 * (recall - recall_loss)
            step += 1
            bar.set_postfix(
                length=LENGTHS[level], text=text_loss, recall=recall_loss, refresh=False
            )
            bar.update(data.n_seen - bar.n)
            minutes = (time.monotonic() - started) / 60
            progress = max(data.n_seen / args.tokens, minutes / args.minutes)
            learned = recall_loss < LEARNED and level + 1 < len(LENGTHS)
            if learned:
                level, recall_loss = level + 1, math.log(10)
            if learned or step % args.save_every == 0:
                save(model, data.tokenizer, args.out)
                bar.write(f"step {step}, {minutes:.0f} min, recall: {recall_shares(model, data)}")


def recall_shares(model: Any, data: TrainingData) -> dict[int, float]:
    """A quick measurement of recall over several lengths (in tokens)."""
    model.eval()
    shares = {n: recall_accuracy(model, data.tokenizer, n, 8) for n in (64, 256, 1024, 2000)}
    model.train()
    return shares


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=2_250_000, help="to train on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--save-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Train, save and measure the model."""
    import torch
    from transformers import AutoModelForCausalLM

    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    texts = read_texts(training_files())
    tokenizer = train_tokenizer(texts)
    data = TrainingData(tokenizer, texts, args.seed)
    model = new_model(tokenizer)
    train(model, data, args)
    save(model, tokenizer, args.out)
    print(f"tokens seen: {data.n_seen:,} in {(time.monotonic() - started) / 60:.0f} minutes")

    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    held_out = read_texts(held_out_files())
    nats, bits = held_out_loss(model, tokenizer, held_out)
    print(f"parameters: {model.num_parameters():,}")
    print(f"held-out loss: {nats:.3f} nats/token, {bits:.3f} bits/byte")
    print(f"unigram loss: {unigram_loss(tokenizer, data.ids, held_out):.3f} nats/token")
    for n_tokens in (1024, 2000):
        share = recall_accuracy(model, tokenizer, n_tokens, n_documents=64)
        print(f"recall over {n_tokens} tokens: {share:.1%} of 256 queries")


if __name__ == "__main__":
    main()
