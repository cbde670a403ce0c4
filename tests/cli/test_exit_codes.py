"""The exit code of a run is that of the rank that failed first, also when that rank is slow to end."""

import pytest

from iris.cli.run import launch

PROGRAM = "import atexit, sys, time; atexit.register(time.sleep, {seconds}); sys.exit({code})"


@pytest.mark.parametrize("seconds", [0, 2.5])
@pytest.mark.parametrize(("code", "wanted"), [(2, 2), (77, 77), ("'a message'", 1)])
def test_the_code_of_sys_exit_is_kept(tmp_path, seconds, code, wanted):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(seconds=seconds, code=code))
    assert launch([str(script)], 2) == wanted
