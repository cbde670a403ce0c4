"""``python -m iris`` is the ``iris`` command."""

from iris.cli import main

if __name__ == "__main__":
    main()
