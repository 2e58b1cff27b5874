"""The host executor on CUDA C that is wrong: every simulated rule broken once, compilers that refuse, and its cache."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_kit import VECTOR_ADD, body, int64, pointer

from kgen.runtime import host_executor
from kgen.runtime.host_executor import HostCompileError, HostLaunchError, available, compile_host

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

# ---- what is undefined on a device is a sentence here ----------------------------------------------------------------

BROKEN = {
    "barrier that some threads skip": (
        "if (threadIdx.x < 40) __syncthreads();",
        r"__syncthreads .*reached by \d+ of 64 threads|cannot be reached by all threads: thread \(\d+,0,0\) has left",
    ),
    "two different barriers": (
        "if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();",
        r"waits at __syncthreads, but other threads of the block wait at __syncthreads \(broken\.cu:\d\)",
    ),
    "shuffle that a lane never reaches": (
        "if (threadIdx.x != 3) y[0] = __shfl_xor_sync(0xffffffffu, y[0], 1);",
        r"names lane 3, and thread \(3,0,0\) (has left|left) the kernel",
    ),
    "shuffle from a lane outside the mask": (
        "if (threadIdx.x < 16) y[threadIdx.x] = __shfl_down_sync(0xffffu, y[0], 1);",
        r"thread \(15,0,0\) reads lane 16 in __shfl_down_sync, which is not one of the lanes 0x0000ffff",
    ),
    "mask without the caller": (
        "y[0] = __ballot_sync(0xffff0000u, 1);",
        r"mask 0xffff0000 of __ballot_sync does not name the calling lane",
    ),
    "lanes in different collectives": (
        "if (threadIdx.x & 1) y[0] = __ballot_sync(0xffffffffu, 1);\nelse __syncwarp();",
        r"of the same warp waits at",
    ),
    "barrier in some lanes, shuffle in others": (
        "if (threadIdx.x & 1) __syncthreads(); else __syncwarp();",
        r"no thread can go on: 32 of 64 threads wait at __syncthreads .*broken\.cu:2.* waits at __syncwarp",
    ),
    "trap": ("if (threadIdx.x == 33) __trap();", r"thread \(33,0,0\), at broken\.cu:2: __trap\(\) was called"),
    "null pointer": ("y[threadIdx.x] = *(float*)(unsigned long long)(4 * (y[0] == 0.0f));", r"illegal memory access"),
    "index outside an array": (
        "__shared__ float s[8];\ns[threadIdx.x] = 1.0f;",
        r"broken\.cu:3: index \d+ is outside an array of type 'float ?\[8\]'",
    ),
    "misaligned vector": (
        "y[0] = reinterpret_cast<float4*>(y + 1)->x;",
        r"broken\.cu:2: misaligned address 0x[0-9a-f]+ for type .*float4.*multiple of 16 bytes",
    ),
    "integer division by zero": ("y[0] = (float)(7 / (int)y[0]);", r"broken\.cu:2: integer division by zero"),
    "stack overflow": (
        "volatile float big[100000];\nfor (int i = 0; i < 100000; i += 64) big[i] = y[0];\ny[0] = big[64];",
        r"need more than its stack of 128 KiB",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("seed", [None, 7])
def test_broken_kernel_is_an_error(cache_dir: Path, case: str, seed: int | None) -> None:
    text, message = BROKEN[case]
    kernel = compile_host(body("broken", "float* y", text), "broken", cache_dir=cache_dir)
    y = np.zeros(64, np.float32)
    with pytest.raises(HostLaunchError, match=message) as error:
        kernel.launch((2, 1, 1), (64, 1, 1), 0, [pointer(y)], order_seed=seed)
    assert str(error.value).startswith("kernel 'broken', block (")


def test_error_is_the_same_with_any_number_of_workers(cache_dir: Path) -> None:
    text = "if (blockIdx.x >= 5 && threadIdx.x == blockIdx.x) __trap();"
    kernel = compile_host(body("broken", "int unused", text), "broken", cache_dir=cache_dir)
    for workers in (1, 2, 4):
        with pytest.raises(HostLaunchError, match=r"block \(5,0,0\), thread \(5,0,0\)"):
            kernel.launch((400, 1, 1), (256, 1, 1), 0, [ctypes.c_int(0)], threads=workers)


def test_line_directive_names_the_program(cache_dir: Path) -> None:
    source = body("broken", "float* y", '#line 41 "norm.kdsl"\n__trap();')
    kernel = compile_host(source, "broken", cache_dir=cache_dir)
    with pytest.raises(HostLaunchError, match=r"at norm\.kdsl:41"):
        kernel.launch((1, 1, 1), (1, 1, 1), 0, [pointer(np.zeros(1, np.float32))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": []}, "takes 2 arguments; 0 were given"),
        ({"args": [int64(0), int64(0)]}, "argument 0 .* a pointer of 8 bytes"),
        ({"args": [ctypes.c_void_p(), ctypes.c_int(0)]}, "argument 1 .* a signed integer of 8 bytes"),
        ({"args": [ctypes.c_void_p(), 3]}, "argument 1 is 3"),
        ({"grid": (0, 1, 1)}, r"the grid is \(0, 1, 1\)"),
        ({"grid": (1, 65536, 1)}, "the grid is"),
        ({"block": (1, 1, 65)}, "the block is"),
        ({"block": (64, 32, 1)}, "the block has 2048 threads"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory"),
    ],
)
def test_launch_refuses_what_no_device_takes(cache_dir: Path, change: dict[str, Any], message: str) -> None:
    kernel = compile_host(body("nothing", "float* y, long long n", ""), "nothing", cache_dir=cache_dir)
    call = {"grid": (1, 1, 1), "block": (1, 1, 1), "shared_bytes": 0, "args": [ctypes.c_void_p(), int64(0)]}
    kernel.launch(**call)
    with pytest.raises(HostLaunchError, match=message):
        kernel.launch(**{**call, **change})


# ---- compilation and cache -------------------------------------------------------------------------------------------


def test_compiler_messages_reach_the_caller(cache_dir: Path) -> None:
    with pytest.raises(HostCompileError, match=r"g\+\+ rejected 'wrong':\n(.*\n)*wrong\.cu:2.*undeclared_name"):
        compile_host(body("wrong", "float* y", "y[0] = undeclared_name;"), "wrong", cache_dir=cache_dir)


def test_kernel_may_be_called_like_a_c_function(cache_dir: Path) -> None:
    y = np.zeros(1, np.float32)
    compile_host(body("getpid", "float* y", "y[0] = 7.0f;"), "getpid", cache_dir=cache_dir).launch(
        (1, 1, 1), (1, 1, 1), 0, [pointer(y)]
    )
    assert y[0] == 7


RUN_IN_PROCESS = """
import ctypes, sys
from pathlib import Path
from kgen.runtime.host_executor import compile_host
y = ctypes.c_float()
source = 'extern "C" __global__ void f(float* y) { *y = 5.0f; }'
kernel = compile_host(source, "f", cache_dir=Path(sys.argv[1]))
kernel.launch((1, 1, 1), (1, 1, 1), 0, [ctypes.c_void_p(ctypes.addressof(y))])
assert y.value == 5
"""


def run_in_process(folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN_IN_PROCESS, str(folder)]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 0, messages
    return messages


def test_cache_serves_many_processes_and_survives_damage(tmp_path: Path) -> None:
    for process in [run_in_process(tmp_path) for _ in range(4)]:
        finish(process)
    libraries = sorted(tmp_path.glob("*.so"))
    assert sorted(path.name.split("-")[0] for path in libraries) == ["f", "kgen_host"]
    assert sorted(tmp_path.iterdir()) == libraries  # nothing is left of the builds
    stamps = [path.stat().st_mtime_ns for path in libraries]

    finish(run_in_process(tmp_path))
    assert [path.stat().st_mtime_ns for path in libraries] == stamps

    for path in libraries:
        os.truncate(path, path.stat().st_size // 2)
    finish(run_in_process(tmp_path))
    assert all(host_executor._intact(path) for path in libraries)


def test_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert finish(run_in_process(blocked)).count("compiled kernels are not kept") == 1


def test_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = available()
    assert reason is not None and "install g++" in reason
    with pytest.raises(HostCompileError, match="install g"):
        compile_host(VECTOR_ADD, "vector_add", cache_dir=tmp_path)
