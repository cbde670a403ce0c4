"""The public names, their documentation, what an import loads, and rules that hold for every file of the package."""

import ast
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import iris
from iris import _env

PACKAGE = Path(iris.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(file.relative_to(PACKAGE)) for file in FILES]


def test_all_is_what_dir_says():
    """Modules are reached as ``iris.device``; the only ones among the public names are those listed."""
    shown = {name for name in dir(iris) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(iris, name), types.ModuleType)}
    assert shown - (modules - set(iris.__all__)) == set(iris.__all__)
    named = {"bench", "ccl", "concurrent", "device_utils", "errors", "hip", "logging", "ops", "signal", "sim"}
    assert modules & set(iris.__all__) == {*named, "tracing"}
    assert len(set(iris.__all__)) == len(iris.__all__)


def test_a_star_import_gives_the_public_names():
    names = {}
    exec("from iris import *", names)
    assert set(names) - {"__builtins__"} == set(iris.__all__)


def documented(owner, name, thing):
    """Whether a function, also one for kernels, or a class says what it does."""
    function = getattr(thing, "fn", thing)
    return bool((inspect.getdoc(function) or "").strip())


def public_functions(owner):
    for name, member in vars(owner).items():
        thing = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and (callable(thing) or hasattr(thing, "fn")):
            yield name, thing


def test_every_public_function_has_a_docstring():
    missing = []
    for name in iris.__all__:
        thing = getattr(iris, name)
        if isinstance(thing, int):
            continue  # log levels
        if isinstance(thing, types.ModuleType):
            members = [(n, m) for n, m in public_functions(thing) if getattr(m, "__module__", "") == thing.__name__]
        elif inspect.isclass(thing):
            members = [(None, thing), *(pair for base in thing.__mro__[:-1] for pair in public_functions(base))]
            members = [(n, m) for n, m in members if (getattr(m, "__module__", "") or "").startswith("iris")]
        elif type(thing).__module__ == "logging":
            continue
        else:
            members = [(None, thing)]
        missing += [f"{name}.{n}" if n else name for n, m in members if not documented(thing, n, m)]
    assert not missing


def test_the_operations_have_docstrings():
    from iris import concurrent, ops

    for module in (ops, concurrent):
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), name
            assert inspect.getdoc(getattr(module, name)) != inspect.getdoc(object)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_file_says_what_it_is_for(file):
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree) or not tree.body


def texts_of(tree):
    """String constants of a module that are not documentation."""
    documentation = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node


def reads_environment(tree):
    """(line, name) of every variable that a module reads from the environment by a name that it spells out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.search(r"(^|\.)(getenv|environ\.(get|pop|setdefault))$", called) and node.args:
                yield node.lineno, ast.unparse(node.args[0])
        elif isinstance(node, ast.Subscript) and re.search(r"(^|\.)environ$", ast.unparse(node.value)):
            if isinstance(node.ctx, ast.Load):
                yield node.lineno, ast.unparse(node.slice)
        elif isinstance(node, ast.Compare) and re.search(r"(^|\.)environ$", ast.unparse(node.comparators[-1])):
            yield node.lineno, ast.unparse(node.left)


def test_the_check_of_the_environment_finds_reads():
    code = """
import os
a = os.environ["IRIS_A"]
b = os.environ.get("IRIS_B", "")
c = os.getenv("IRIS_C")
d = "IRIS_D" in os.environ
os.environ["IRIS_E"] = "written"
"""
    assert sorted(name for _, name in reads_environment(ast.parse(code))) == [
        "'IRIS_A'",
        "'IRIS_B'",
        "'IRIS_C'",
        "'IRIS_D'",
    ]


def test_variables_are_read_in_one_file():
    found = [
        f"{name}:{line} reads {variable}"
        for file, name in zip(FILES, NAMES, strict=True)
        if name != "_env.py"
        for line, variable in reads_environment(ast.parse(file.read_text()))
        if "IRIS_" in variable
    ]
    assert not found


def test_every_variable_that_is_named_exists():
    """In code, messages and documentation: a name that `_env` does not know is a mistake."""
    known = set(_env.VARIABLES)
    found = [
        f"{name}: {variable}"
        for file, name in zip(FILES, NAMES, strict=True)
        for variable in set(re.findall(r"\bIRIS_[A-Z_]*[A-Z]\b", file.read_text())) - known
    ]
    assert not found


def asks_for_vendor(tree):
    """Lines of a module that tell vendors apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_hip", "vendor", "hip"):
            owner = ast.unparse(node.value)
            # A tensor is on "cuda" whatever the vendor.
            if node.attr == "is_cuda" and not owner.endswith("target_info"):
                continue
            yield node.lineno, ast.unparse(node)
    for node in texts_of(tree):
        if node.value in ("nvidia", "amd", "hip"):
            yield node.lineno, repr(node.value)


def test_the_check_of_vendors_finds_questions():
    code = """
'''amd in documentation'''
if target.vendor == "amd": pass
if target_info.is_hip(): pass
if torch.version.hip: pass
if tensor.is_cuda: pass
"""
    assert sorted({line for line, _ in asks_for_vendor(ast.parse(code))}) == [3, 4, 5]


# Where the difference is what the file is about: facts, leaf instructions, processes and memory, installation, and the
# plan and the tiles, which take other numbers of stages and precisions.
# The package and hip.py hold the name of a module of the original API.
ASKS = {"__init__.py", "hip.py", "_target.py", "device/_asm.py", "ops/choice.py", "tuning/tiles.py"}
ASKS_FOLDERS = ("runtime/", "cli/", "testing/")


def test_vendors_are_told_apart_in_few_files():
    found = {
        name: list(asks_for_vendor(ast.parse(file.read_text())))
        for file, name in zip(FILES, NAMES, strict=True)
        if name not in ASKS and not name.startswith(ASKS_FOLDERS)
    }
    assert not {name: lines for name, lines in found.items() if lines}


LOADED = """
import sys
import iris
unwanted = ("matplotlib", "transformers", "rich", "typer", "pytest", "hypothesis", "tokenizers", "safetensors")
print([name for name in unwanted if name in sys.modules])
print(sorted(name for name in sys.modules if name.startswith(("iris.cli", "iris.demo", "iris.testing", "iris.bench"))))
"""


@pytest.mark.parametrize("runtime", ["cpu", "gpu"])
def test_an_import_loads_nothing_that_kernels_do_not_need(runtime):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_"))}
    environment["IRIS_RUNTIME"] = runtime
    done = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n[]\n", done.stdout + done.stderr
