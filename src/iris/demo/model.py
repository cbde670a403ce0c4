"""all-MiniLM-L6-v2 in plain torch, on packed tokens.

A BERT: six layers of self-attention and a feed-forward block, each followed by a residual and LayerNorm. Sentences are
packed: activations are (M, hidden) with the tokens of all sentences one after the other and no padding, so every row is
a real token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from iris.demo.inputs import MAX_SENTENCE_TOKENS, MAX_TOKENS


@dataclass(frozen=True)
class Tokens:
    """The tokens of some sentences.

    Attributes:
        ids: token numbers of each sentence, with the marks at its start and end.
        truncated: how many sentences were longer than ``MAX_SENTENCE_TOKENS``.
        left_out: how many sentences at the end did not fit into ``MAX_TOKENS``.
    """

    ids: list[list[int]]
    truncated: int = 0
    left_out: int = 0

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sentence."""
        return [len(sentence) for sentence in self.ids]

    @property
    def count(self) -> int:
        """Number of tokens of all sentences: the rows of the matmuls."""
        return sum(self.lengths)


def tokenize(folder: Path, sentences: Sequence[str], limit: int = MAX_TOKENS) -> Tokens:
    """The tokens of ``sentences``: of as many, from the first on, as have no more than ``limit`` tokens together."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_SENTENCE_TOKENS)
    ids: list[list[int]] = []
    truncated = total = 0
    for sentence in sentences:
        encoding = tokenizer.encode(sentence)
        if total + len(encoding.ids) > limit:
            break
        ids.append(encoding.ids)
        total += len(encoding.ids)
        # What was cut off is kept by the tokenizer as further encodings.
        truncated += bool(encoding.overflowing)
    return Tokens(ids, truncated, len(sentences) - len(ids))


class Model:
    """The weights in float32 and the steps of the model.

    Attributes:
        layers: number of layers.
        hidden: width of the activations.
    """

    def __init__(self, folder: Path, device: torch.device):
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.hidden: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._eps: float = config["layer_norm_eps"]
        self._tensors = load_file(folder / "model.safetensors", device=str(device))
        self._device = device

    def weight(self, layer: int, name: str) -> torch.Tensor:
        """A weight or bias of a layer, as ``"intermediate.dense.weight"``: (outputs, inputs), or (outputs,)."""
        return self._tensors[f"encoder.layer.{layer}.{name}"]

    def feed_forward_input(self, tokens: Tokens, layer: int) -> torch.Tensor:
        """(M, hidden): what the feed-forward block of ``layer`` gets for the sentences."""
        x = self.embed(tokens)
        for below in range(layer):
            x = self.feed_forward(self.attention(x, tokens.lengths, below), below)
        return self.attention(x, tokens.lengths, layer)

    def embed(self, tokens: Tokens) -> torch.Tensor:
        """(M, hidden): embeddings of word, position in the sentence and kind of sentence, normalised."""
        words = torch.tensor([token for sentence in tokens.ids for token in sentence], device=self._device)
        positions = torch.cat([torch.arange(length, device=self._device) for length in tokens.lengths])
        x = self._tensors["embeddings.word_embeddings.weight"][words]
        x = x + self._tensors["embeddings.position_embeddings.weight"][positions]
        # Single sentences are all of the first kind; the second one marks the other half of a pair.
        x = x + self._tensors["embeddings.token_type_embeddings.weight"][0]
        return self._layer_norm(x, "embeddings.LayerNorm")

    def attention(self, x: torch.Tensor, lengths: Sequence[int], layer: int) -> torch.Tensor:
        """(M, hidden): self-attention within each sentence, with its residual and LayerNorm."""
        q, k, v = (
            self._linear(x, layer, f"attention.self.{name}").view(-1, self._heads, self.hidden // self._heads)
            for name in ("query", "key", "value")
        )
        mixed = []
        for parts in zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True):
            # Heads lead, for the products of their rows to be one batch.
            queries, keys, values = (part.transpose(0, 1) for part in parts)
            mixed.append(F.scaled_dot_product_attention(queries, keys, values).transpose(0, 1))
        out = self._linear(torch.cat(mixed).reshape(x.shape), layer, "attention.output.dense")
        return self._layer_norm(out + x, f"encoder.layer.{layer}.attention.output.LayerNorm")

    def feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """(M, hidden): the feed-forward block in plain torch, with its residual and LayerNorm."""
        inner = F.gelu(self._linear(x, layer, "intermediate.dense"))
        return self.finish(self._linear(inner, layer, "output.dense"), x, layer)

    def finish(self, out: torch.Tensor, x: torch.Tensor, layer: int) -> torch.Tensor:
        """(M, hidden): residual and LayerNorm at the end of ``layer``, whose second matmul gave ``out`` for ``x``."""
        return self._layer_norm(out + x, f"encoder.layer.{layer}.output.LayerNorm")

    def sentence_vectors(self, x: torch.Tensor, tokens: Tokens, layer: int) -> torch.Tensor:
        """(sentences, hidden): what the model makes of the sentences when ``layer`` gave ``x``; of length 1."""
        for above in range(layer + 1, self.layers):
            x = self.feed_forward(self.attention(x, tokens.lengths, above), above)
        means = torch.stack([sentence.mean(0) for sentence in x.split(tokens.lengths)])
        return F.normalize(means)

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return F.linear(x, self.weight(layer, f"{name}.weight"), self.weight(layer, f"{name}.bias"))

    def _layer_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, (self.hidden,), weight, bias, self._eps)


def closest_pair(vectors: torch.Tensor) -> tuple[int, int, float] | None:
    """The two sentences whose vectors, of length 1, are closest, and the cosine between them; None for one sentence."""
    if len(vectors) < 2:
        return None
    cosines = vectors @ vectors.t()
    # Each pair once, and no sentence with itself.
    cosines.masked_fill_(torch.ones_like(cosines, dtype=torch.bool).tril(), -2)
    first, second = divmod(int(cosines.argmax()), len(vectors))
    return first, second, float(cosines[first, second])
