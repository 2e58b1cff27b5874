"""Loading and launching by the CUDA driver, the same for both backends: a launch is one call of `cuLaunchKernelEx`.

Everything that the driver is told of a launch lies in one piece of memory, a `Frame`: its configuration, the arguments
and the pointers to them. A launch writes the stream, the addresses and the scalars, which lie together, and hands the
driver three addresses. That is why it goes through ctypes: no extension of ours has to be compiled, and of four plain
arguments ctypes makes less than any binding that takes the parts of a launch one by one.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kgen.dsl.dtypes import BF16
from kgen.runtime.backends.launch import Built, Launch, ScalarValue, Slots, bf16_bits
from kgen.runtime.errors import BackendError

if TYPE_CHECKING:
    from kgen.codegen.program import Program
    from kgen.runtime.layouts import Layout

_SUCCESS = 0
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 * 1024  # what a block may have without asking

# CUlaunchConfig: grid and block (three each) and bytes of dynamic shared memory, 32 bits each; then the stream, the
# attributes (none) and their number. The stream is where `STREAM` says.
_CONFIG = struct.Struct("@7IPPI4x")
STREAM = 32
_HEAD = "@P16x"  # from the stream on: it, and attributes that are zero
_SLOT = 8  # bytes of an argument in a frame, which is any argument's alignment

_FORMATS = {"i8": "b", "u8": "B", "i16": "h", "i32": "i", "i64": "q", "f16": "e", "bf16": "H", "f32": "f", "f64": "d",
            "bool": "?"}  # fmt: skip


class Driver:
    """The functions of libcuda that are needed to load and launch. Raises AttributeError where one is missing."""

    def __init__(self, library: Any) -> None:
        pointer = ctypes.c_void_p
        # Not PyDLL, which would hold the interpreter's lock: a launch waits where the stream's queue is full, and what
        # it waits for may be a host function that needs the lock.
        self.launch: Callable[[int, int, int, None], int] = library.cuLaunchKernelEx
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
        library.cuCtxGetCurrent.argtypes = [pointer]
        library.cuCtxSetCurrent.argtypes = [pointer]
        library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
        library.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
        library.cuModuleLoadData.argtypes = [pointer] * 2
        library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        self._library = library
        self._contexts: dict[int, int | None] = {}

    def has_context(self) -> bool:
        """Whether some context is current in this thread."""
        context = ctypes.c_void_p()
        return self._library.cuCtxGetCurrent(ctypes.byref(context)) == _SUCCESS and bool(context.value)

    def make_current(self, index: int) -> None:
        """Make the primary context of device `index` current in this thread."""
        if index not in self._contexts:
            # Retained once a process: it lasts as long as the kernels that are loaded into it.
            context = ctypes.c_void_p()
            self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
            self._contexts[index] = context.value
        self._check(self._library.cuCtxSetCurrent(self._contexts[index]))

    def load(self, cubin: bytes, entry: str, shared: int) -> int:
        """The CUfunction `entry` of `cubin`, loaded into the current context for as long as that lasts, with so many
        bytes of dynamic shared memory allowed. Raises BackendError in the driver's words."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), cubin))
        self._check(self._library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        if shared > _STATIC_SHARED:
            self._check(self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
        assert function.value is not None  # where the driver reports success
        return function.value

    def resident_clusters(self, function: int, cluster: int, threads: int, shared: int) -> int:
        """How many clusters, of `cluster` blocks with `threads` threads and so much dynamic shared memory each, the
        current device runs at a time."""
        count = ctypes.c_int()
        config = ctypes.create_string_buffer(_CONFIG.pack(cluster, 1, 1, threads, 1, 1, shared, 0, 0, 0))
        ask = self._library.cuOccupancyMaxActiveClusters
        ask.argtypes = [ctypes.c_void_p] * 3
        self._check(ask(ctypes.byref(count), function, config))
        return count.value

    def _check(self, code: int) -> None:
        if code:
            raise BackendError(self.what(code))

    def what(self, code: int) -> str:
        """The driver's words for an error code."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({code})"


@cache
def driver() -> Driver:
    """That of this machine."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise BackendError(
            f"the CUDA driver is missing or too old ({error}); install one for CUDA 12 or later"
        ) from None


# What torch.cuda.current_device and current_stream come down to, without the checks around them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


class current:
    """`with current(index):` makes device `index` and its primary context current, and restores what was.

    torch alone would not do: it does nothing where the device number is the same already, though a new thread has no
    context.
    """

    def __init__(self, index: int) -> None:
        self._index, self._driver = index, driver()
        self._guard = torch.cuda.device(index)

    def __enter__(self) -> None:
        self._guard.__enter__()
        self._driver.make_current(self._index)

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)


class Binary(NamedTuple):
    """A compiled kernel.

    threads: of a program. shared: bytes of dynamic shared memory that a launch asks for. nulls: parameters behind those
    of the program that take a null pointer. key: what the cache has the cubin under, behind a line about it; "" for one
    that is not there.
    """

    cubin: bytes
    threads: int
    shared: int
    nulls: int
    key: str = ""


class Form(NamedTuple):
    """What the driver is told of each launch alike, and where the rest goes: the stream, addresses and scalars.

    entry: the kernel, for messages. grid: the number of programs, each of `cluster` blocks. dtypes: of the program's
    arguments, by name; `slots` says what they are. resident: of a sum over programs that are clusters, how many run at
    a time, which the number of shares depends on; 0 where it does not.
    """

    entry: str
    grid: int
    cluster: int
    threads: int
    shared: int
    nulls: int
    dtypes: tuple[str, ...]
    slots: Slots
    resident: int = 0


# What is loaded, by `Binary.key`, name and device: calls of one variant share it, however each was found.
loaded: dict[tuple[str, str, int], int] = {}


def load(binary: Binary, entry: str, index: int) -> int:
    """The function `entry` of `binary`, in the primary context of device `index`. Raises BackendError, also where the
    current stream is being captured: to load is no part of a CUDA graph."""
    found = loaded.get((binary.key, entry, index)) if binary.key else None
    if found is not None:
        return found
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BackendError(
            f"{entry}: it is not loaded yet, which a CUDA graph capture cannot record; call it once before the capture "
            f"to warm up"
        )
    with current(index):
        try:
            function = driver().load(binary.cubin, entry, binary.shared)
        except BackendError as error:
            raise BackendError(f"{entry}: the driver cannot load the kernel on cuda:{index}: {error}") from None
    if binary.key:
        loaded[binary.key, entry, index] = function
    return function


class Loaded(Built):
    """A compiled kernel, loaded into the primary context of one device."""

    def __init__(self, program: Program, binary: Binary, device: torch.device) -> None:
        self.program = program
        self.binary = binary
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.function = load(binary, program.entry, self.index)
        self._clusters: int | None = None

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        from kgen.runtime.backends.base import programs  # and with it the compiler, which a stored launch does not need

        assert self.program is not None
        b, args = self.binary, self.program.args
        grid = programs(self.program, layout)
        dtypes = tuple(a.dtype.name for a in args)
        form = Form(
            self.program.entry, grid, self.program.schedule.cluster, b.threads, b.shared, b.nulls, dtypes,
            Slots.of(args, layout), (self.resident() or 0) if self.program.schedule.programs else 0,
        )  # fmt: skip
        return DeviceLaunch(self.function, self.index, form, b.key), grid

    def resident(self) -> int | None:
        assert self.program is not None
        schedule = self.program.schedule
        if schedule.cluster == 1:
            return None
        if self._clusters is None:
            self._clusters = resident_clusters(
                self.function, self.index, schedule.cluster, self.binary.threads, self.binary.shared
            )
        return self._clusters


def resident_clusters(function: int, index: int, cluster: int, threads: int, shared: int) -> int:
    """How many clusters of `function` device `index` runs at a time (see `Driver.resident_clusters`). Devices of one
    name may differ: clusters need multiprocessors of one part of the chip, of which some are switched off."""
    with current(index):
        return driver().resident_clusters(function, cluster, threads, shared)


class DeviceLaunch:
    """Launches a loaded kernel on tensors of one layout, on torch's current stream: a `Launch`.

    What `__call__` does is written out for a whole call by `kgen.runtime.unrolled`, from the parts that are public
    here. `tensors` and `scalars` say which of the call's are arguments, in their order in a frame.
    """

    def __init__(self, function: int, index: int, form: Form, binary: str = "") -> None:
        """`function` as the driver knows it, in the primary context of device `index`; `binary` is `Binary.key`."""
        slots = form.slots
        self.form, self.binary = form, binary
        self._driver = driver()
        self.start, self.function, self.index = self._driver.launch, function, index
        self.template = Template(form)
        self.tensors, self.scalars = (tuple(k for _, k in some) for some in (slots.tensors, slots.scalars))
        dtypes = [form.dtypes[i] for i, _ in slots.scalars]
        self.is_bf16 = tuple(d == BF16.name for d in dtypes)
        parts = [_HEAD, f"{len(self.tensors)}P", *(_slot_format(d) for d in dtypes)]
        self.pack = struct.Struct("".join(parts)).pack_into
        # Frames that no call is using. A call takes one out and puts it back, and either is one uninterruptible step,
        # so that no two calls share one: not those of two threads, though the lock of the interpreter is free during
        # the driver's call, nor one that a finaliser makes within another. The driver copies all it is told, so that a
        # frame is free once it returns. There are as many as calls were ever made at a time.
        self.free: list[Frame] = []

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]
    ) -> None:
        numbers = [
            bf16_bits(scalars[k]) if bf16 else scalars[k] for k, bf16 in zip(self.scalars, self.is_bf16, strict=True)
        ]
        try:
            frame = self.free.pop()
        except IndexError:
            frame = self.template.frame()
        memory, config, pointers = frame
        self.pack(memory, STREAM, current_stream(self.index), *[addresses[k] for k in self.tensors], *numbers)
        if current_device() == self.index:
            code = self.start(config, self.function, pointers, None)
        else:
            with current(self.index):
                code = self.start(config, self.function, pointers, None)
        if code:
            self.failed(frame, code)
        self.free.append(frame)

    def failed(self, frame: Frame, code: int) -> None:
        """Once more where the thread has not used the GPU yet and has no context. Raises BackendError in the driver's
        words for any other failure."""
        if not self._driver.has_context():
            _, config, pointers = frame
            with current(self.index):
                code = self.start(config, self.function, pointers, None)
        if code:
            what = self._driver.what(code)
            raise BackendError(f"{self.form.entry}: the launch of {self.form.grid} programs failed: {what}")


def _slot_format(dtype: str) -> str:
    code = _FORMATS[dtype]
    return f"{code}{_SLOT - struct.calcsize('@' + code)}x"


# The memory of one launch and, as addresses, its configuration and the pointers to its arguments.
Frame = tuple[bytearray, int, int]


class Template:
    """What is the same in all frames of a launcher.

    Behind the configuration come, in slots of 8 bytes, the tensors' addresses, the scalars, sizes and strides, and a
    slot of zeros; then a pointer to each of them in the order of the kernel's parameters.
    """

    def __init__(self, form: Form) -> None:
        slots, args = form.slots, form.dtypes
        varying = [i for i, _ in (*slots.tensors, *slots.scalars)]
        fixed = [i for i in range(len(args)) if i not in set(varying)]
        place = {i: _CONFIG.size + _SLOT * n for n, i in enumerate((*varying, *fixed))}
        zeros = _CONFIG.size + _SLOT * len(args)
        self._offsets = [place[i] for i in range(len(args))] + [zeros] * form.nulls
        self._table = zeros + _SLOT
        self._blank = bytearray(self._table + _SLOT * len(self._offsets))
        _CONFIG.pack_into(self._blank, 0, form.grid * form.cluster, 1, 1, form.threads, 1, 1, form.shared, 0, 0, 0)
        for i in fixed:
            struct.pack_into("@" + _slot_format(args[i]), self._blank, place[i], slots.values[i])

    def frame(self) -> Frame:
        """A new frame, full but for the stream, addresses and scalars."""
        memory = bytearray(self._blank)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # which stays, as nothing changes its length
        pointers = [base + o for o in self._offsets]
        struct.pack_into(f"@{len(pointers)}P", memory, self._table, *pointers)
        return memory, base, base + self._table
