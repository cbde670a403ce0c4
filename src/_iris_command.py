"""Entry point of the ``iris`` command, outside of the package on purpose.

``import iris`` settles the runtime: it loads torch and Triton and may set ``TRITON_INTERPRET``. The command must do
none of this. ``iris --help`` would take seconds, ``iris doctor`` could not tell of a broken torch, and the ranks of
``iris run`` would inherit a decision that is theirs to make. So the package is entered here without running its
``__init__.py``; its submodules are then imported as always.
"""

import importlib.util
import sys


def enter_bare_package() -> None:
    """Make the submodules of ``iris`` importable without running its ``__init__.py``, unless that has been done."""
    if "iris" not in sys.modules:
        spec = importlib.util.find_spec("iris")
        assert spec is not None
        sys.modules["iris"] = importlib.util.module_from_spec(spec)


def main() -> None:
    """Run the command line."""
    enter_bare_package()
    from iris.cli import main as command

    command()


if __name__ == "__main__":
    main()
