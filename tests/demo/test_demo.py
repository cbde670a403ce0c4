"""The demo as it is run."""

import json
import re
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("folder")
TEXT = "The dough rises.\nWe missed the night train to the coast.\nLet the dough rise.\n"
VERDICT = re.compile(
    r"all_gather_matmul on (\d+) ranks? matches float64: (yes|no) \(largest error (\S+), allowed (\S+)\)"
)


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    return path


def verdict(result) -> tuple[str, ...]:
    match = VERDICT.fullmatch(result.stdout.splitlines()[-1])
    assert match, result.stdout + result.stderr
    return match.groups()


def test_two_ranks(python, sentences, tmp_path):
    path = tmp_path / "numbers.json"
    words = ("--sentences", sentences, "--json", path, "--layer", 1)
    result = python("-m", "_iris_command", "demo", "-n", 2, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    ranks, answer, error, allowed = verdict(result)
    assert (ranks, answer) == ("2", "yes")
    assert 0 < float(error) <= float(allowed) < 1e-2
    assert "3 sentences, 24 tokens" in result.stdout
    assert "closest in meaning" in result.stdout

    numbers = json.loads(path.read_text())
    assert numbers["matches"] is True
    assert (numbers["ranks"], numbers["layer"], numbers["sentences"], numbers["tokens"]) == (2, 1, 3, 24)
    assert numbers["closest_sentences"]["second"] == "Let the dough rise."
    intermediate, output = numbers["matmuls"]
    for matmul, a, b, out in (
        (intermediate, [24, 192], [384, 1536], [24, 1536]),
        (output, [24, 768], [1536, 384], [24, 384]),
    ):
        assert [share["rank"] for share in matmul["ranks"]] == [0, 1]
        for share in matmul["ranks"]:
            assert (share["a"], share["b"], share["out"]) == (a, b, out)
            assert share["matches"] is True
            assert share["first_ms"] > 0
            assert share["warm_ms"] > 0
            # The table shows every rank.
            assert f"{share['error']:.1e}" in result.stdout


def test_one_process_without_a_launcher(python, sentences):
    words = ("--sentences", sentences, "--dtype", "bfloat16", "--algorithm", "torch")
    result = python("-m", "iris.demo", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdict(result)[:2] == ("1", "yes")
    assert "torch (user): the caller named it" in result.stdout


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_columns(python, sentences):
    words = ("--sentences", sentences, "--dtype", "float16", "--algorithm", "pull")
    result = python("-m", "_iris_command", "run", "-n", 5, "-m", "iris.demo", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdict(result)[:2] == ("5", "yes")
    assert "5 ranks do not divide K=384: A got 1 column and B 1 row of zeros" in result.stdout
    assert "5 ranks do not divide K=1536: A got 4 columns and B 4 rows of zeros" in result.stdout


def test_a_wrong_result_of_another_rank(python, sentences, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""\
            import os, sys
            from iris.demo import __main__ as demo, split

            right = split.compare
            if os.environ["RANK"] == "1":
                split.compare = lambda out, shards, *rest: right(out, shards[::-1], *rest)
            sys.exit(demo.main(sys.argv[1:]))
        """)
    )
    path = tmp_path / "numbers.json"
    result = python("-m", "_iris_command", "run", "-n", 2, program, "--sentences", sentences, "--json", path)
    assert result.returncode == 1
    ranks, answer, error, allowed = verdict(result)
    assert (ranks, answer) == ("2", "no")
    assert float(error) > float(allowed)
    assert json.loads(path.read_text())["matches"] is False
