"""Every kernel compiles for every architecture without a GPU, fits its shared memory, and orders memory across devices.

The kernels are compiled in child processes, because this process may interpret them. Triton reports shared memory; the
stack, where registers are spilled to, is read from the machine code.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from iris import _target

WORKER = Path(__file__).with_name("_compile_worker.py")
# By default one of each vendor: every kernel takes seconds.
QUICK = ("sm_90", "gfx942")
ARCHS = (*QUICK, *(arch for arch in _target.compiled_archs() if arch not in QUICK))
CHILDREN = 2


class Compiled:
    """The workers' answers, one for each architecture; those of a selection of tests start together.

    ``folder`` is one for all processes of pytest: what one has compiled, or is compiling, no other compiles.
    """

    def __init__(self, selection, folder):
        self._selection = selection
        self._folder = folder
        self._answers = {}
        self._pool = None

    def __call__(self, arch):
        if self._pool is None:
            self._pool = ThreadPoolExecutor(CHILDREN)
        for one in QUICK if arch in QUICK else ARCHS:
            if one not in self._answers:
                self._answers[one] = self._pool.submit(self._compile, one)
        return self._answers[arch].result()

    def close(self):
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _compile(self, arch):
        answer = self._folder / f"{self._selection}-{arch}.json"
        with FileLock(f"{answer}.lock"):
            if not answer.exists():
                answer.write_text(self._printed(arch))
        answer = json.loads(answer.read_text())
        assert answer["records"]
        return answer

    def _printed(self, arch):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_"))}
        environment |= {"IRIS_RUNTIME": "gpu", "TRITON_CACHE_DIR": str(self._folder / arch)}
        command = [sys.executable, str(WORKER), arch, self._selection]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def folder(tmp_path_factory, request):
    """A folder of this run that its processes share."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if hasattr(request.config, "workerinput") else base) / "compiled"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="session")
def cover(folder):
    compiled = Compiled("cover", folder)
    yield compiled
    compiled.close()


@pytest.fixture(scope="session")
def product(folder):
    compiled = Compiled("product", folder)
    yield compiled
    compiled.close()


arch_parameter = pytest.mark.parametrize(
    "arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS]
)


def known_limits(answer):
    """Names of kernels that the installed Triton does not compile for the architecture: compare-and-swaps of blocks."""
    old = tuple(map(int, answer["triton"].split(".")[:2])) < (3, 9)
    return (
        {f"block cas {kind}" for kind in ("i32", "i64", "fp32")} if old and answer["arch"].startswith("gfx") else set()
    )


def check_compiled(answer):
    limits = known_limits(answer)
    wrong = {name: r["error"] for name, r in answer["records"].items() if r["error"] and name not in limits}
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def check_shared_memory(answer):
    limit = _target.by_arch(answer["arch"]).shared_memory_bytes
    wrong = {name: r["shared"] for name, r in answer["records"].items() if not r["error"] and r["shared"] > limit}
    assert not wrong, f"more than the {limit} bytes of {answer['arch']}: {wrong}"


@arch_parameter
@pytest.mark.timeout(300)
def test_every_kernel_compiles(cover, arch):
    check_compiled(cover(arch))


@arch_parameter
@pytest.mark.timeout(300)
def test_aligned_blocks_go_to_peers_in_sixteen_bytes_at_a_time(cover, arch):
    """A peer's address is as aligned as the own one for the compiler, too, whatever the size of an element."""
    records = {name: r["accesses"] for name, r in cover(arch)["records"].items() if name.startswith("whole ")}
    assert len(records) == 4
    for name, found in records.items():
        kinds = {"load" if re.match("ld|.*load", one) else "store" for one in found["wide"]}
        assert kinds == {"load", "store"}, (name, found)
        assert not found["bytes"], (name, found)


@arch_parameter
@pytest.mark.timeout(300)
def test_shared_memory_fits(cover, arch):
    check_shared_memory(cover(arch))


@arch_parameter
@pytest.mark.timeout(300)
def test_the_selection_covers(cover, arch):
    """Every dtype that the target multiplies, every transpose, both gather dimensions, bias, scales, activations."""
    names = [name for name, record in cover(arch)["records"].items() if record["pull"]]
    target = _target.by_arch(arch)
    for wanted in (
        *(f"pull {kind}x{kind}->" for kind in ("fp32", "fp16", "bf16", "i8")),
        "dim=0",
        "dim=1",
        " bias",
        " ragged",
        " relu",
        " silu",
        " scaled gelu",
    ):
        assert any(wanted in name for name in names), wanted
    for transpose in ("NN", "NT", "TN", "TT"):
        assert any(f" {transpose} " in name for name in names), transpose
    assert sum("fp8" in name and "scaled" not in name for name in names) == 1 + len(target.fp8)
    assert {re.search(r"rows=(\d+)", name)[1] for name in names} >= {"1", "16", "64", "128", "4096"}


@arch_parameter
@pytest.mark.timeout(300)
def test_half_precision_kernels_keep_to_registers(cover, arch):
    """Where spilling would cost the most. A few bytes of stack are addresses that are kept over the loop over K."""
    records = {n: r for n, r in cover(arch)["records"].items() if re.match(r"pull (fp16xfp16|bf16xbf16)", n)}
    assert len(records) >= 4
    spilled = {n: r["stack"] for n, r in records.items() if r["stack"] > 64 and "ragged" not in n}
    assert not spilled, spilled


def ccl_records(answer):
    return {name: record for name, record in answer["records"].items() if name.startswith("ccl ")}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.timeout(300)
def test_kernels_of_collectives_keep_to_registers(cover, arch):
    """With the programs that are chosen for eight ranks."""
    records = ccl_records(cover(arch))
    operations = {name.split()[1] for name in records}
    assert operations >= {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather"}
    assert operations >= {"scatter", "send"}
    spilled = {name: record["stack"] for name, record in records.items() if record["stack"] > 0}
    assert not spilled, spilled


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.timeout(300)
def test_kernels_of_collectives_meet_at_system_scope(cover, arch):
    for name, record in ccl_records(cover(arch)).items():
        text = letters(arch, record)
        # On AMD the adds of parts, which the next meeting puts in order, look like reads of flags.
        assert " atomic " in name or not faults_of_wait(arch, record), name
        assert re.search("[AR]WI" if _target.by_arch(arch).vendor == "amd" else "R", text), (name, text)
        assert re.search("LW?[XA]" if _target.by_arch(arch).vendor == "amd" else "X", text), (name, text)


@arch_parameter
@pytest.mark.timeout(300)
def test_tile_kernels_keep_to_registers(cover, arch):
    records = {n: r for n, r in cover(arch)["records"].items() if n.startswith("tile ")}
    assert len(records) >= 9
    spilled = {n: r["stack"] for n, r in records.items() if r["stack"] > 64}
    assert not spilled, spilled


# Each line that matters becomes a letter, so that orders are regular expressions: S a store, B a barrier of the
# threads, X a flag set at system scope (AMD: the order comes from what stands around it), A a system-scope add or
# compare-and-swap (AMD), R a system-scope acquiring read, W AMD's wait for all outstanding accesses, L its write-back
# and I its invalidation of the cache, both at system scope.
LETTERS = {
    "nvidia": (
        ("S", r"st\.global"),
        ("B", r"bar\.sync"),
        ("X", r"(atom|red)\.global\.sys\.release\.(exch\.b32|add\.u32)"),
        ("R", r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)"),
    ),
    "amd": (
        ("S", r"(global|flat)_store"),
        ("B", r"s_barrier"),
        ("W", r"s_waitcnt.*vmcnt\(0\)"),
        ("L", r"buffer_wbl2 sc0 sc1$"),
        ("I", r"buffer_inv sc0 sc1$"),
        ("X", r"global_atomic_swap\b.* sc1$"),
        ("A", r"global_atomic_(add|cmpswap)\b.* sc1$"),
        ("R", r"global_load_dword\b.* sc0 sc1$"),
    ),
}


def letters(arch, record):
    rules = LETTERS[_target.by_arch(arch).vendor]
    found = (next((letter for letter, rule in rules if re.match(rule, line)), "") for line in record["ordering"])
    return "".join(found)


def faults_of_notify(arch, record):
    """What is missing between the last store of all threads and the flag that announces it."""
    text = letters(arch, record)
    flag = re.search("[XA]", text)
    if flag is None:
        return ["no flag is set at system scope"]
    stores, _, between = text[: flag.start()].rpartition("S")
    assert stores, f"no store before the flag: {text}"
    if _target.by_arch(arch).vendor == "nvidia":
        return [] if "B" in between else ["no barrier between the stores and the flag"]
    needed = {
        "a wave passes the barrier before its own stores are done": "[^B]*W[^B]*B",
        "the cache is not written back at system scope": ".*L",
        "the flag is set before the write-back is done": ".*L.*W",
    }
    return [fault for fault, order in needed.items() if not re.match(order, between)]


def faults_of_wait(arch, record):
    """What is missing where flags are read."""
    text = letters(arch, record)
    if _target.by_arch(arch).vendor == "nvidia":
        return [] if "R" in text else ["no acquiring read at system scope"]
    reads = re.findall("(?<!L)(?<!LW)[ARX](.{0,2})", text)
    if not reads:
        return ["no read at system scope"]
    return [f"a read is followed by {after!r}, not by wait and invalidation" for after in reads if after != "WI"]


def ends_after_its_stores(arch, record):
    """Whether all threads' stores are done, and released, when a program says that it has ended."""
    lines = "\n".join(record["ordering"])
    if _target.by_arch(arch).vendor == "nvidia":
        return re.search(r"bar\.sync[^\n]*\natom\.global\.gpu\.acq_rel\.add\.", lines)
    # Each wave waits for its stores, the waves meet, the cache is written back, and then the program is counted. Where
    # the compiler does not wait for its write-back, each wave has written back at system scope before they meet.
    waited, met = r"s_waitcnt[^\n]*vmcnt\(0\)\n(s_waitcnt[^\n]*\n)*", r"(s_barrier\n(s_waitcnt[^\n]*\n)*)+"
    return re.search(waited + met + r"buffer_wbl2 sc1\n(s_waitcnt[^\n]*\n)+global_atomic_add ", lines) or re.search(
        r"buffer_wbl2 sc0 sc1\n" + waited + met + r"buffer_wbl2 sc1\nglobal_atomic_add ", lines
    )


@arch_parameter
@pytest.mark.timeout(300)
def test_notify_publishes_the_stores_of_all_threads(cover, arch):
    records = cover(arch)["records"]
    for name in ("notify", "notify_add"):
        assert not faults_of_notify(arch, records[name]), "\n".join(records[name]["ordering"])


@arch_parameter
@pytest.mark.timeout(300)
def test_wait_acquires_at_system_scope(cover, arch):
    records = cover(arch)["records"]
    assert not faults_of_wait(arch, records["wait"]), "\n".join(records["wait"]["ordering"])


@arch_parameter
@pytest.mark.timeout(300)
def test_planted_faults_are_found(cover, arch):
    records = cover(arch)["records"]
    amd = _target.by_arch(arch).vendor == "amd"
    assert faults_of_notify(arch, records["planted notify barrier=True release gpu"])
    # Weak order on AMD also lets the flag overtake the write-back.
    relaxed = faults_of_notify(arch, records["planted notify barrier=True relaxed sys"])
    assert relaxed
    assert len(relaxed) == (3 if amd else 1)
    if amd:  # on NVIDIA, Triton 3.9 puts a barrier before the release by itself
        unmet = faults_of_notify(arch, records["planted notify barrier=False release sys"])
        assert "a wave passes the barrier before its own stores are done" in unmet
    # A barrier and a release at system scope are enough on NVIDIA only.
    bare = faults_of_notify(arch, records["planted notify barrier=True release sys"])
    assert ("a wave passes the barrier before its own stores are done" in bare) == amd
    assert amd or not bare
    for name in ("planted wait acquire gpu", "planted wait relaxed sys"):
        assert faults_of_wait(arch, records[name]), name


@arch_parameter
@pytest.mark.timeout(300)
def test_kernels_that_signal_peers_do_it_at_system_scope(cover, arch):
    for name, record in cover(arch)["records"].items():
        signals = name == "device_barrier" or (name.startswith("tile ") and " flags " in name)
        if signals or (record["pull"] and "world=1 " not in name):
            text = letters(arch, record)
            assert not faults_of_wait(arch, record), name
            assert re.search("LW?[XA]" if _target.by_arch(arch).vendor == "amd" else "X", text), (name, text)
        elif record["pull"]:
            assert not set(letters(arch, record)) & set("XRLI"), f"{name}: a world of one needs no flags"


def staged_records(answer):
    return {name: record for name, record in answer["records"].items() if name.startswith("staged ")}


def is_kernel(name):
    return " dim=" in name


def check_stack_of_staged(answer):
    """Half precision with the largest tile that is chosen; the odd sizes have narrow loads, which need more."""
    limit = STAGED_STACK.get(answer["arch"], 128)
    records = {n: r for n, r in staged_records(answer).items() if re.search(r" (bf|fp)16x.* 8192x", n)}
    assert records
    wrong = {n: r["stack"] for n, r in records.items() if r["stack"] > limit and "tracing" not in n}
    assert not wrong, wrong


# Where more addresses are kept over the loop over K than there are registers for them.
STAGED_STACK = {"sm_100": 256, "gfx950": 256}


@arch_parameter
@pytest.mark.timeout(300)
def test_kernels_with_a_staging_buffer(cover, arch):
    answer = cover(arch)
    names = list(staged_records(answer))
    assert {name.split()[1] for name in names if not is_kernel(name)} == {"inputs", "arrived", "bring", "carried"}
    how = "descriptors" if _target.by_arch(arch).descriptors else "pointers"
    assert any(name.startswith("staged bf16x") and f" {how} bias" in name for name in names), names
    if arch in ("sm_90", "gfx942"):
        for wanted in (" copied", " tracing", " pointers", "dim=0", "staged i8x"):
            assert any(wanted in name for name in names), wanted
    check_stack_of_staged(answer)


@arch_parameter
@pytest.mark.timeout(300)
def test_kernels_with_a_staging_buffer_wait_at_system_scope(cover, arch):
    """Data comes from peers, so whoever waits acquires at system scope; peers are told at system scope."""
    for name, record in staged_records(cover(arch)).items():
        text = letters(arch, record)
        if is_kernel(name) or "inputs" in name:
            assert not faults_of_wait(arch, record), name
            assert re.search("LW?[XA]" if _target.by_arch(arch).vendor == "amd" else "X", text), (name, text)
        else:
            assert not set(text) & set("XR"), f"{name}: what stays on the device needs no order beyond it"


@arch_parameter
@pytest.mark.timeout(300)
def test_a_copy_is_announced_after_the_stores_of_all_threads(cover, arch):
    swap = re.compile(r"atom\.global\.gpu\.release\.exch|global_atomic_swap")
    for name, record in staged_records(cover(arch)).items():
        if not name.startswith("staged bring"):
            continue
        lines = record["ordering"]
        (flag,) = (i for i, line in enumerate(lines) if swap.match(line))
        last = max(i for i, line in enumerate(lines) if re.match(r"st\.global|(global|flat)_store", line))
        between = lines[last + 1 : flag]
        assert any(re.match(r"bar\.sync|s_barrier", line) for line in between), lines[last:]
        if _target.by_arch(arch).vendor == "amd":
            barrier = next(i for i, line in enumerate(between) if line.startswith("s_barrier"))
            assert any("vmcnt(0)" in line for line in between[:barrier]), lines[last:]
            assert re.search(r"buffer_wbl2 sc1.*vmcnt\(0\)", " ".join(between[barrier:])), lines[last:]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.timeout(300)
def test_tracing_that_is_off_is_not_in_the_kernel_with_a_staging_buffer(cover, arch):
    """Its assembly is the same where the functions of tracing do not compile; with tracing on it does not compile."""
    found = cover(arch)["without tracing"]
    assert found["same"]
    assert any("tracing is compiled in" in error for error in found["errors"]), found["errors"]


def reduce_records(answer):
    return {name: record for name, record in answer["records"].items() if name.startswith("reduce ")}


def check_stack_of_reducing(answer):
    """Half precision with the largest tile that is chosen; the odd sizes have narrow loads, which need more."""
    records = {n: r for n, r in reduce_records(answer).items() if re.search(r" (bf|fp)16x.* 8192x", n)}
    assert records
    limit = STAGED_STACK.get(answer["arch"], 128)
    wrong = {n: r["stack"] for n, r in records.items() if r["stack"] > limit and "tracing" not in n}
    assert not wrong, wrong


@arch_parameter
@pytest.mark.timeout(300)
def test_kernels_that_add_products(cover, arch):
    """Data comes from peers, so whoever waits acquires at system scope; peers are told at system scope."""
    answer = cover(arch)
    records = reduce_records(answer)
    how = "descriptors" if _target.by_arch(arch).descriptors else "pointers"
    wanted = {"fused"}
    wanted |= {"two_shot", "one_shot", "ring", "atomic"} if arch in ("sm_90", "gfx942") else set()
    assert {name.split()[1] for name in records} == wanted
    assert any(f" {how} bias" in name for name in records)
    check_stack_of_reducing(answer)
    for name, record in records.items():
        text = letters(arch, record)
        amd = _target.by_arch(arch).vendor == "amd"
        if name.split()[1] in ("atomic", "spinlock"):
            # They have atomics that order nothing, too.
            assert re.search("[AX]WI" if amd else "R", text), (name, text)
        else:
            assert not faults_of_wait(arch, record), name
        assert re.search("LW?[XA]" if amd else "X", text), (name, text)
        assert ends_after_its_stores(arch, record), (name, record["ordering"])


def gather_records(answer):
    return {name: record for name, record in answer["records"].items() if name.startswith("gather ")}


def check_stack_of_gathering(answer):
    """Half precision with the largest tile that is chosen."""
    records = {n: r for n, r in gather_records(answer).items() if re.search(r" (bf|fp)16x.* 8192x", n)}
    assert records
    limit = STAGED_STACK.get(answer["arch"], 128)
    wrong = {n: r["stack"] for n, r in records.items() if r["stack"] > limit and "tracing" not in n}
    assert not wrong, wrong


@arch_parameter
@pytest.mark.timeout(300)
def test_kernels_that_gather_products(cover, arch):
    """Tiles go to peers: each program's stores have left the device before the last one tells the peers."""
    answer = cover(arch)
    records = gather_records(answer)
    how = "descriptors" if _target.by_arch(arch).descriptors else "pointers"
    assert any(f" {how} bias" in name for name in records)
    assert len(records) == (2 if arch in ("sm_90", "gfx942") else 1)
    check_stack_of_gathering(answer)
    amd = _target.by_arch(arch).vendor == "amd"
    for name, record in records.items():
        text = letters(arch, record)
        assert not faults_of_wait(arch, record), name
        world = int(re.search(r" world=(\d+) ", name)[1])
        # Two flags for each peer.
        assert text.count("X") == 2 * (world - 1), (name, text)
        assert amd or all(before == "B" for before in re.findall("(.)X", text)), (name, text)
        assert ends_after_its_stores(arch, record), (name, record["ordering"])


@arch_parameter
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_shipped_configuration(product, arch):
    """All dtypes with all configurations and gather dimensions: compiles and fits."""
    answer = product(arch)
    check_compiled(answer)
    check_shared_memory(answer)
    assert len(answer["records"]) >= 50
    # A few bytes are left to the types and layouts that are rare.
    spilled = {name: record["stack"] for name, record in ccl_records(answer).items() if record["stack"] > 128}
    assert not spilled, spilled
    assert len(ccl_records(answer)) >= 80
    names = [name for name in staged_records(answer) if is_kernel(name)]
    assert len(names) >= 20
    for world in (1, 2, 8):
        for dim in (0, 1):
            assert any(f"dim={dim} world={world} " in name for name in names), (dim, world)
    ways = ("descriptors", "pointers") if _target.by_arch(arch).descriptors else ("pointers",)
    for wanted in (*ways, "copied", "bias", "scaled", "relu", "gelu", "silu", "tracing"):
        assert any(f" {wanted}" in name for name in names), wanted
    check_stack_of_staged(answer)
    names = list(reduce_records(answer))
    assert len(names) >= 40
    for variant in ("fused", "two_shot", "one_shot", "ring", "atomic", "spinlock"):
        for world in (1, 2, 8):
            assert any(name.startswith(f"reduce {variant} ") and f" world={world} " in name for name in names)
    for wanted in (*ways, "bias", "scaled", "relu", "gelu", "silu", "tracing"):
        assert any(f" {wanted}" in name for name in names), wanted
    check_stack_of_reducing(answer)
    assert len(gather_records(answer)) >= 20
    check_stack_of_gathering(answer)
