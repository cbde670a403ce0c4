"""Starting kernels: options of the vendor, names behind numbers, grids of nothing, errors after a launch."""

from types import SimpleNamespace

import pytest

from iris import _target
from iris.errors import ArgumentError, UnsupportedError, WaitTimeout
from iris.runtime import launch

OPTIONS = {
    "num_warps": 4, "num_stages": 2,
    "waves_per_eu": 2, "matrix_instr_nonkdim": 16, "kpack": 2,
    "maxnreg": 128, "num_ctas": 1,
    "BLOCK": 64,
}  # fmt: skip


def test_each_vendor_gets_its_options():
    common = {"num_warps", "num_stages", "BLOCK"}
    assert set(launch.options_for("nvidia", OPTIONS)) == common | {"maxnreg", "num_ctas"}
    assert set(launch.options_for("amd", OPTIONS)) == common | {"waves_per_eu", "matrix_instr_nonkdim", "kpack"}
    assert set(launch.options_for("cpu", OPTIONS)) == {"BLOCK"}


def test_options_that_are_none_are_left_to_the_compiler():
    assert launch.options_for("amd", {"num_warps": None, "waves_per_eu": 0, "BLOCK": None}) == {"waves_per_eu": 0}


def test_every_known_target_has_options():
    for target in (*_target.KNOWN.values(), _target.INTERPRETER):
        assert launch.options_for(target.vendor, {"BLOCK": 1}) == {"BLOCK": 1}


def test_numbers_stand_for_names():
    first, second = launch.kernel_id("test_launch/first"), launch.kernel_id("test_launch/second")
    assert first != second
    assert launch.kernel_id("test_launch/first") == first
    assert (launch.kernel_name(first), launch.kernel_name(second)) == ("test_launch/first", "test_launch/second")
    unnamed = launch.kernel_name(0)
    assert first > 0, "0 is for kernels without a name"
    # A record may hold anything when memory was overwritten.
    for number in (-1, 10**9):
        assert launch.kernel_name(number) == unnamed


class Kernel:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **meta: self.launches.append((grid, args, meta))


def context(target, raises=None, pending=False):
    calls = []
    stream = SimpleNamespace(pending=lambda: pending)

    def raise_for_failed_waits():
        calls.append(1)
        if raises is not None:
            raise raises

    return SimpleNamespace(
        target=target, raise_for_failed_waits=raise_for_failed_waits, calls=calls, current_stream=lambda: stream
    )


def test_arguments_and_options_reach_the_kernel():
    kernel = Kernel()
    launch.start(context(_target.KNOWN["mi300x"]), kernel, (3, 2), "a", "b", BLOCK=64, num_warps=8, maxnreg=99)
    assert kernel.launches == [((3, 2), ("a", "b"), {"BLOCK": 64, "num_warps": 8})]


@pytest.mark.parametrize("grid", [(0,), (4, 0), (0, 1, 1)])
def test_nothing_is_started_for_a_grid_of_nothing(grid):
    kernel, ctx = Kernel(), context(_target.INTERPRETER)
    launch.start(ctx, kernel, grid)
    assert not kernel.launches
    assert not ctx.calls


def test_failed_waits_are_raised_where_the_launch_has_ended():
    """Interpreted kernels have; asking about compiled ones would wait for the device."""
    kernel, failed = Kernel(), WaitTimeout("rank 1 did not come")
    with pytest.raises(WaitTimeout, match="rank 1"):
        launch.start(context(_target.INTERPRETER, failed), kernel, (1,))
    launch.start(context(_target.KNOWN["h200"], failed), kernel, (1,))
    # On a further stream the kernel may still run.
    launch.start(context(_target.INTERPRETER, failed, pending=True), kernel, (1,))
    assert len(kernel.launches) == 3


class Compiled:
    """What a launch returns: runs bare, or by grid with the hooks of profilers."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.bare, self.watched = [], []

    def run(self, *args):
        self.bare.append(args)

    def __getitem__(self, grid):
        return lambda *args, stream: self.watched.append((grid, stream, args))


def test_a_launch_is_repeated_with_constants_in_their_places(monkeypatch):
    from triton import knobs

    kernel = SimpleNamespace(arg_names=["data", "n", "BLOCK", "KIND"])
    compiled = Compiled()
    again = launch.again(compiled, kernel, (6,), KIND=2, BLOCK=64, num_warps=8)
    again(77, 1024, 5)
    assert compiled.bare == [(6, 1, 1, 77, "function", "metadata", None, None, None, 1024, 5, 64, 2)]
    assert not compiled.watched
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    again(78, 2048, 5)
    assert compiled.watched == [((6, 1, 1), 78, (2048, 5, 64, 2))]
    assert len(compiled.bare) == 1


class TooBig:
    """A kernel that the loader refuses, as Triton does when it needs more shared memory than there is."""

    __name__ = "big_kernel"

    def __getitem__(self, grid):
        from triton.runtime.errors import OutOfResources

        def start(*args, **meta):
            raise OutOfResources(167856, 163840, "shared memory")

        return start


def test_a_kernel_that_does_not_fit_is_an_argument_error_with_the_knobs():
    ctx = SimpleNamespace(target=_target.KNOWN["mi350x"])
    with pytest.raises(ArgumentError) as caught:
        launch.start(ctx, TooBig(), (1,), num_stages=2)
    for part in ("big_kernel", "gfx950", "167856", "163840", "num_stages=2", "block_size_k"):
        assert part in str(caught.value)


class Uncompilable:
    """A kernel on which one of the compiler's passes fails."""

    __name__ = "odd_kernel"

    def __init__(self, message):
        self._message = message

    def __getitem__(self, grid):
        def start(*args, **meta):
            raise RuntimeError(self._message)

        return start


def test_a_fault_of_the_compiler_is_named_and_others_pass():
    ctx = SimpleNamespace(target=_target.KNOWN["h200"])
    with pytest.raises(UnsupportedError) as caught:
        launch.start(ctx, Uncompilable("PassManager::run failed"), (1,), num_warps=4, num_stages=3)
    for part in ("odd_kernel", "sm_90", "Triton", "num_warps=4", "num_stages=3"):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="something else"):
        launch.start(ctx, Uncompilable("something else"), (1,))
