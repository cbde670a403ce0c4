"""The few instructions that Triton has no portable function for, each with a form for every vendor and the interpreter.

Every function here is a leaf: nothing else in the package asks which vendor a kernel is compiled for.
"""

import time

import numpy as np
import triton
import triton.language as tl
from triton.language import target_info
from triton.language.extra import cuda as _cuda
from triton.language.extra import hip as _hip

from iris.device._compat import INTERPRETED, RELEASE_WAITS

# Where the clock, and the compute unit and die of a program, come from when interpreted; the simulator has its own.
clock_ns = time.perf_counter_ns


def place():
    return 0, 0


if INTERPRETED.value:
    from triton.runtime.interpreter import TensorHandle

    def _scalar(value, dtype):
        return tl.core.tensor(TensorHandle(np.array([value], dtype=np.dtype(dtype.name)), dtype), dtype)

    def ticks():
        """Reads the clock: nanoseconds on NVIDIA and under the interpreter, 10 ns units on AMD (int64 scalar)."""
        return _scalar(clock_ns(), tl.int64)

    def ticks_per_microsecond():
        """Ticks of :func:`ticks` in a microsecond."""
        return _scalar(1000, tl.int64)

    def compute_unit():
        """Index of the compute unit that runs the program; 0 under the interpreter (int32 scalar)."""
        return _scalar(place()[0], tl.int32)

    def die():
        """Index of the die that runs the program; 0 under the interpreter and where a device has one (int32 scalar)."""
        return _scalar(place()[1], tl.int32)

    def awaits_flags():
        """Whether there is ``await_flag``: on NVIDIA."""
        return False

    @triton.jit
    def complete_stores():
        """Returns when the calling thread's stores are where every device sees them; call it before a barrier."""

    @triton.jit
    def order_descriptor_loads():
        """Puts loads by tensor descriptors that follow after what the program has acquired."""

    @triton.jit
    def poll(flag_ptr, value):
        """Reads a flag some times, cheaply, until it reached ``value``. Orders nothing; threads may leave apart."""
        tl.load(flag_ptr, volatile=True)

    @triton.jit
    def arrived(flag_ptrs, values):
        """Whether each of a block of flags has reached its value, acquired at system scope: 1 or 0 for all threads."""
        tl.load(flag_ptrs, volatile=True)
        seen = tl.atomic_add(flag_ptrs, tl.zeros_like(values), sem="acquire", scope="sys")
        return tl.where(tl.min(seen - values) >= 0, 1, 0)

else:

    @triton.jit
    def ticks():
        """Reads the clock: nanoseconds on NVIDIA and under the interpreter, 10 ns units on AMD (int64 scalar)."""
        if target_info.is_cuda():
            return _cuda.globaltimer().to(tl.int64)
        elif target_info.is_hip_cdna3() or target_info.is_hip_cdna4():
            # Triton's own function waits for another counter than the one that says that the clock has come.
            return tl.inline_asm_elementwise(
                "s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=s,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
            )
        else:
            return _hip.memrealtime().to(tl.int64)

    @triton.jit
    def ticks_per_microsecond():
        """Ticks of :func:`ticks` in a microsecond."""
        if target_info.is_cuda():
            return tl.full((), 1000, tl.int64)
        else:
            return tl.full((), 100, tl.int64)

    @triton.jit
    def compute_unit():
        """Index of the compute unit that runs the program; 0 under the interpreter (int32 scalar)."""
        if target_info.is_cuda():
            return _cuda.smid().to(tl.int32)
        else:
            # HW_ID register: bits 8-11 compute unit, 12 shader array, 13-15 shader engine.
            hw_id = tl.inline_asm_elementwise(
                "s_getreg_b32 $0, hwreg(HW_REG_HW_ID, 8, 8)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
            )
            return hw_id

    @triton.jit
    def die():
        """Index of the die that runs the program; 0 under the interpreter and where a device has one (int32 scalar)."""
        if target_info.is_cuda():
            return tl.full((), 0, tl.int32)
        else:
            return tl.inline_asm_elementwise(
                "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 16)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
            )

    @triton.jit
    def complete_stores():
        """Returns when the calling thread's stores are where every device sees them; call it before a barrier.

        NVIDIA: nothing, a release covers the stores of all threads that met the releasing one in a barrier. AMD: the
        barrier does not wait for stores, and a release waits only for those of its own wave, so each wave waits for its
        own. Where the release does not wait for the write-back that it starts either, each wave starts one and waits.
        """
        if target_info.is_hip():
            tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0"
                if RELEASE_WAITS
                else "buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0",
                "=v,~{memory}",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def order_descriptor_loads():
        """Puts loads by tensor descriptors that follow after what the program has acquired.

        NVIDIA: the unit that copies tiles is another proxy to memory, which an acquire alone does not order.
        """
        if target_info.is_cuda():
            tl.inline_asm_elementwise(
                "fence.proxy.async; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
            )

    @triton.jit
    def _pause():
        # A fraction of a microsecond, in which others have the memory's attention.
        if target_info.is_cuda():
            tl.inline_asm_elementwise(
                "nanosleep.u32 200; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise("s_sleep 1\n v_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def poll(flag_ptr, value):
        """Reads a flag some times, cheaply, until it reached ``value``. Orders nothing; threads may leave apart.

        NVIDIA: volatile loads, which take no ownership of the line, and a pause when in vain. AMD: nothing but
        a pause, because the compiler may move a volatile load out of the loop there; the caller's read-modify-write is
        the poll.
        """
        if target_info.is_cuda():
            turn = 0
            seen = tl.load(flag_ptr, volatile=True)
            while (seen - value < 0) & (turn < 64):
                seen = tl.load(flag_ptr, volatile=True)
                turn += 1
            if seen - value < 0:
                _pause()
        else:
            _pause()

    @triton.jit
    def arrived(flag_ptrs, values):
        """Whether each of a block of flags has reached its value, acquired at system scope: 1 or 0 for all threads.

        Waits a little. NVIDIA: every warp polls by acquiring loads of its own and may leave the loop at a time of its
        own, so a barrier that combines what the threads have seen settles it; it also hands the acquired on to all
        threads. AMD: a read-modify-write, because the compiler may move a load out of the caller's loop.
        """
        if target_info.is_cuda():
            turn = 0
            behind = tl.min(_acquiring_load(flag_ptrs) - values)
            while (behind < 0) & (turn < 256):
                behind = tl.min(_acquiring_load(flag_ptrs) - values)
                turn += 1
            if behind < 0:
                _pause()
            return _by_all_threads(tl.where(behind >= 0, 1, 0))
        else:
            seen = tl.atomic_add(flag_ptrs, tl.zeros_like(values), sem="acquire", scope="sys")
            behind = tl.min(seen - values)
            if behind < 0:
                _pause()
            tl.debug_barrier()
            return tl.where(behind >= 0, 1, 0)

    @triton.jit
    def _acquiring_load(pointers):
        # NVIDIA only.
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l,~{memory}",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    # Whether there is await_flag: on NVIDIA.
    awaits_flags = target_info.is_cuda

    @triton.jit
    def await_flag(flag_ptr, value, slot, ticks, peer, kernel, program):
        """Waits until a flag reached ``value``, another wait of the context had failed, or so many ticks are over; that
        it reports to the error slot as :func:`iris.device.signal.wait` does.

        NVIDIA only: 1 or 0 for each thread, which has acquired what came before the flag, also for its loads by tensor
        descriptors. One instruction to the compiler.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .pred there, over;
            .reg .b32 seen, behind;
            .reg .b64 start, now, word;
            ld.acquire.sys.global.b32 seen, [$1];
            sub.s32 behind, seen, $2;
            setp.ge.s32 there, behind, 0;
            @there bra ENDED;
            mov.u64 start, %globaltimer;
            AGAIN:
            nanosleep.u32 200;
            ld.acquire.sys.global.b32 seen, [$1];
            sub.s32 behind, seen, $2;
            setp.ge.s32 there, behind, 0;
            @there bra ENDED;
            ld.relaxed.gpu.global.b64 word, [$3];
            setp.ne.s64 over, word, 0;
            @over bra ENDED;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.gt.u64 over, now, $4;
            @!over bra AGAIN;
            atom.relaxed.gpu.global.cas.b64 word, [$3], 0, 1;
            setp.ne.s64 over, word, 0;
            @over bra ENDED;
            cvt.s64.s32 word, $6;
            st.global.b64 [$3 + 8], word;
            cvt.s64.s32 word, $7;
            st.global.b64 [$3 + 16], word;
            st.global.b64 [$3 + 24], $1;
            cvt.s64.s32 word, $2;
            st.global.b64 [$3 + 32], word;
            cvt.s64.s32 word, seen;
            st.global.b64 [$3 + 40], word;
            cvt.s64.s32 word, $5;
            st.global.b64 [$3 + 48], word;
            st.release.sys.global.b64 [$3], 2;
            ENDED:
            fence.proxy.async;
            selp.b32 $0, 1, 0, there;
            }""",
            "=r,l,r,l,l,r,r,r,~{memory}",
            [flag_ptr.to(tl.int64), value, slot.to(tl.int64), ticks, peer, kernel, program],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def _by_all_threads(value):
        # NVIDIA only. A barrier of the program that gives 1 when all threads bring 1, else 0.
        return tl.inline_asm_elementwise(
            "{ .reg .pred mine, all; setp.ne.s32 mine, $1, 0; bar.red.and.pred all, 0, mine; selp.s32 $0, 1, 0, all; }",
            "=r,r,~{memory}",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
