"""The pieces of the model against explicit loops in float64."""

import math

import numpy as np
import pytest
import torch

from iris.demo.inputs import MAX_TOKENS, read_sentences
from iris.demo.model import Model, Tokens, closest_pair, tokenize

SENTENCES = ["The dough rises.", "We missed the night train to the coast."]
# A few roundings of float32 for values around 1, through layers of sums of 384.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return Model(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def weights(folder) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items() if tensor.dtype == np.float32}


def layer_norm(row: np.ndarray, weights, name: str) -> np.ndarray:
    mean = sum(row) / len(row)
    variance = sum((value - mean) ** 2 for value in row) / len(row)
    return (row - mean) / math.sqrt(variance + 1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def embed(ids: list[int], weights) -> np.ndarray:
    names = ("word", "position", "token_type")
    words, positions, kinds = (weights[f"embeddings.{name}_embeddings.weight"] for name in names)
    rows = [words[token] + positions[place] + kinds[0] for place, token in enumerate(ids)]
    return np.array([layer_norm(row, weights, "embeddings.LayerNorm") for row in rows])


def attention(x: np.ndarray, weights, layer: int) -> np.ndarray:
    """One sentence, one head and one query at a time."""
    prefix = f"encoder.layer.{layer}.attention"

    def linear(rows, name):
        return rows @ weights[f"{prefix}.{name}.weight"].T + weights[f"{prefix}.{name}.bias"]

    q, k, v = (linear(x, f"self.{name}") for name in ("query", "key", "value"))
    mixed = np.zeros_like(x)
    for head in range(12):
        columns = slice(32 * head, 32 * head + 32)
        for query in range(len(x)):
            scores = [math.exp(q[query, columns] @ k[key, columns] / math.sqrt(32)) for key in range(len(x))]
            for key, score in enumerate(scores):
                mixed[query, columns] += score / sum(scores) * v[key, columns]
    out = linear(mixed, "output.dense") + x
    return np.array([layer_norm(row, weights, f"{prefix}.output.LayerNorm") for row in out])


def feed_forward(x: np.ndarray, weights, layer: int) -> np.ndarray:
    prefix = f"encoder.layer.{layer}"
    inner = x @ weights[f"{prefix}.intermediate.dense.weight"].T + weights[f"{prefix}.intermediate.dense.bias"]
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    out = inner @ weights[f"{prefix}.output.dense.weight"].T + weights[f"{prefix}.output.dense.bias"] + x
    return np.array([layer_norm(row, weights, f"{prefix}.output.LayerNorm") for row in out])


def largest_difference(ours: torch.Tensor, exact: list[np.ndarray]) -> float:
    return float(np.abs(ours.numpy() - np.concatenate(exact)).max())


def test_tokens(folder):
    tokens = tokenize(folder, SENTENCES)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [[vocabulary[token] for token in ids] for ids in tokens.ids]
    assert words[0] == ["[CLS]", "the", "dough", "rises", ".", "[SEP]"]
    assert words[1] == ["[CLS]", "we", "missed", "the", "night", "train", "to", "the", "coast", ".", "[SEP]"]
    assert tokens == Tokens(tokens.ids, truncated=0, left_out=0)
    assert (tokens.lengths, tokens.count) == ([6, 11], 17)


def test_limits(folder):
    tokens = tokenize(folder, ["word " * 126, "word " * 127, "short"], limit=259)
    assert tokens.lengths == [128, 128, 3]
    assert (tokens.truncated, tokens.left_out) == (1, 0)
    assert tokenize(folder, ["word " * 126, "word " * 127, "short"], limit=258).left_out == 1
    many = tokenize(folder, ["word " * 200] * 100)
    assert many.count == MAX_TOKENS
    assert (many.truncated, many.left_out) == (MAX_TOKENS // 128, 100 - MAX_TOKENS // 128)
    assert tokenize(folder, read_sentences(None)).left_out == 0


def test_input_of_the_first_block(folder, model, weights):
    tokens = tokenize(folder, SENTENCES)
    embedded = [embed(ids, weights) for ids in tokens.ids]
    assert largest_difference(model.embed(tokens), embedded) < CLOSE
    x = model.feed_forward_input(tokens, 0)
    assert x.shape == (17, 384)
    assert largest_difference(x, [attention(rows, weights, 0) for rows in embedded]) < CLOSE


def test_input_of_a_later_block(folder, model, weights):
    tokens = tokenize(folder, SENTENCES)
    exact = [embed(ids, weights) for ids in tokens.ids]
    for layer in (0, 1):
        exact = [feed_forward(attention(rows, weights, layer), weights, layer) for rows in exact]
    exact = [attention(rows, weights, 2) for rows in exact]
    assert largest_difference(model.feed_forward_input(tokens, 2), exact) < CLOSE


@pytest.mark.parametrize("layer", [0, 5])
def test_sentences_close_in_meaning(folder, model, layer):
    sentences = read_sentences(None)
    tokens = tokenize(folder, sentences)
    x = model.feed_forward_input(tokens, layer)
    vectors = model.sentence_vectors(model.feed_forward(x, layer), tokens, layer)
    first, second, cosine = closest_pair(vectors)
    assert sentences[first].startswith("We had pancakes")
    assert sentences[second].startswith("This morning we ate pancakes")
    assert 0.8 < cosine < 1
    assert closest_pair(vectors[:1]) is None
