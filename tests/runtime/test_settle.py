"""What importing iris does and does not do. Each case is a Python process of its own."""

import os
import subprocess
import sys

import pytest


def python(code, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_INTERPRET"))}
    env.update(environment)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=110)


def succeeds(code, **environment):
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_gpu_the_cpu_runtime_is_settled():
    code = (
        "import iris, os, torch\n"
        "from iris.runtime.settle import settled\n"
        "print(*settled(), os.environ.get('TRITON_INTERPRET'))"
    )
    assert succeeds(code, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="") == "cpu no GPU is visible 1\n"


@pytest.mark.parametrize("runtime", ["cpu", "gpu"])
def test_the_variable_decides(runtime):
    code = "import iris; from iris.runtime.settle import settled; print(*settled())"
    assert succeeds(code, IRIS_RUNTIME=runtime) == f"{runtime} IRIS_RUNTIME={runtime}\n"


LIBRARY = """
import torch, triton, triton.language as tl
import iris
@triton.jit
def kernel(x, out, B: tl.constexpr):
    offs = tl.arange(0, B)
    v = tl.load(x + offs)
    tl.store(out, tl.sum(v) + tl.max(v, 0) + tl.cdiv(7, 2))
    tl.store(out + 1, v.sum() + tl.sum(tl.zeros((B,), tl.float32) + 1.0))
out = torch.zeros(2)
kernel[(1,)](torch.arange(8.0), out, B=8)
print(out.tolist())
"""


def test_triton_may_be_imported_first():
    assert succeeds(LIBRARY, IRIS_RUNTIME="cpu") == "[39.0, 36.0]\n"


def test_kernels_decorated_too_early_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "early.py").write_text("import triton\n@triton.jit\ndef my_kernel(x):\n    pass\n")
    done = python("import early, iris", IRIS_RUNTIME="cpu", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode != 0
    assert "RuntimeConflict" in done.stderr
    assert "early.my_kernel" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr
    done = python("import iris", IRIS_RUNTIME="gpu", TRITON_INTERPRET="1")
    assert "Unset TRITON_INTERPRET" in done.stderr


def test_triton_in_the_same_mode_may_come_first():
    succeeds("import triton; import iris", IRIS_RUNTIME="cpu", TRITON_INTERPRET="1")
    succeeds("import triton; import iris", IRIS_RUNTIME="gpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [("IRIS_RUNTIME", "tpu"), ("IRIS_CHECK", "sometimes"), ("IRIS_TIMEOUT", "-3"), ("IRIS_LOG_LEVEL", "loud")],
)
def test_unknown_values_are_refused_at_import(name, value):
    done = python("import iris", **{name: value})
    assert done.returncode != 0
    assert f"{name}={value!r} is not known; possible:" in done.stderr


def test_import_touches_no_device_and_no_process_group():
    code = (
        "import iris, torch, torch.distributed as dist, os\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not dist.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if torch.zeros(1).item() == 0 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    succeeds(code)


def test_one_rank_needs_no_launcher_and_no_process_group():
    code = (
        "import iris, torch, torch.distributed as dist\n"
        "ctx = iris.iris(1 << 20)\n"
        "assert (ctx.get_rank(), ctx.get_num_ranks()) == (0, 1)\n"
        "ctx.barrier(); ctx.device_barrier()\n"
        "a, b = ctx.ones(4, 8), torch.ones(8, 2, device=ctx.get_device())\n"
        "out = torch.empty(4, 2, device=ctx.get_device())\n"
        "ctx.ops.all_gather_matmul(out, a, b)\n"
        "assert (out == 8).all()\n"
        "assert not dist.is_initialized()\n"
    )
    succeeds(code)


def test_gpu_runtime_without_a_gpu_says_so():
    done = python("import iris; iris.iris()", IRIS_RUNTIME="gpu", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert "PyTorch sees no GPU" in done.stderr
    assert "iris doctor" in done.stderr


def test_the_home_directory_is_not_needed(tmp_path):
    code = "import iris, torch; c = iris.iris(1 << 20); print(int(c.ones(3).sum()))"
    assert succeeds(code, HOME="/nonexistent", XDG_CACHE_HOME="/nonexistent/cache") == "3\n"
