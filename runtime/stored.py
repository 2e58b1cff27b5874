"""Calls that an earlier process made ready: one that finds them on disk runs neither checker nor generator for them.

An entry is found by what `Kernel._key` says of a call, and all else that it depends on: the texts of the kernel's file
and of what that imports, the sources of kgen itself, torch, Triton and NVRTC, the device and its driver, the results of
`kgen tune`. It says in plain data what the driver is told, and names the cubins, which lie in the cache by themselves.
A new size makes an entry of its own, of some thousand bytes; a process writes no more than `MAX_KEPT` of them.

Kept are calls that end in launches by the driver. On a CPU there is nothing to keep: the executors there do more for a
call than to find it. KGEN_STORED_CALLS=0 switches all of this off, and so does `suspended`, for whoever changes the
generator while it runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from kgen.codegen.torch_dtypes import FROM_TORCH, TORCH
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.locks import lock
from kgen.runtime import events, generator, installation, tuned_paths
from kgen.runtime.backends import driver
from kgen.runtime.backends.launch import Slots
from kgen.runtime.cache import CACHE, cache_key
from kgen.runtime.errors import BackendError
from kgen.runtime.plan import Argument, ReadyCall, scalar_slot
from kgen.runtime.stages import StagedLaunch, Workspace

if TYPE_CHECKING:
    from kgen.runtime.kernel import Kernel

# What one process adds to the cache at most: calls of ever new sizes are not worth a file each.
MAX_KEPT = 256

_kept = 0
_suspended = 0
_lock = lock()


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, no call is taken from disk or put there, in any thread: what is generated is not what the sources say."""
    global _suspended
    with _lock:
        _suspended += 1
    try:
        yield
    finally:
        with _lock:
            _suspended -= 1


def prepares(kernel: Kernel) -> None:
    """To be called before something is generated for `kernel`: what a changed generator has made of it stays in the
    kernel's plans, so that no later call of it is kept either."""
    if _suspended:
        kernel.content = None


def find(kernel: Kernel, key: tuple[Any, ...]) -> ReadyCall | None:
    """The ready call for `key`, which `Kernel._key` gave; None where there is none, or it cannot be used here."""
    where = _entry(kernel, key)
    payload = CACHE.get(where) if where is not None else None
    if payload is None:
        return None
    # What is none of ours, or what the driver does not take: whoever prepares the call says so.
    with suppress(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, BackendError):
        ready = _read(kernel, json.loads(payload))
        kernel.restored |= ready is not None
        return ready
    return None


def keep(kernel: Kernel, key: tuple[Any, ...], ready: ReadyCall) -> None:
    """Put a ready call on disk, if it can be told in plain data."""
    global _kept
    # What was imported since may be of other sources than those that name the entry.
    if _kept >= MAX_KEPT or generator.changed():
        return
    where = _entry(kernel, key)
    data = None if where is None else _data(ready)
    if where is not None and data is not None:
        with _lock:
            _kept += 1
        CACHE.put(where, json.dumps(data, separators=(",", ":")).encode())


def _entry(kernel: Kernel, key: tuple[Any, ...]) -> str | None:
    if kernel.content is None or _suspended or os.environ.get("KGEN_STORED_CALLS") == "0":
        return None
    device = next((part for part in key if isinstance(part, torch.device)), None)
    if device is None:
        return None
    return cache_key("call", kernel.content, kernel.name, repr(key), _environment(device))


@functools.cache
def _environment(device: torch.device) -> str:
    """All that a ready call on `device` depends on beside its key. Asked once, as this process loads each part once."""
    parts = [
        generator.version(*generator.PARTS),
        torch.__version__,
        str(torch.version.cuda),
        installation.triton_version() if installation.triton_is_installed() else "",
        *installation.nvrtc_installation(),
        installation.chosen_ptxas(),
        os.environ.get("TRITON_INTERPRET", ""),
        os.environ.get("KGEN_TUNED", ""),
        hashlib.sha256(tuned_paths.read(tuned_paths.user_path(installation.device_name(device))) or b"").hexdigest(),
    ]
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        parts += [p.name, f"{p.major}.{p.minor}", str(p.multi_processor_count), installation.driver_version()]
    return cache_key(*parts)


def forget() -> None:
    """Ask anew what calls depend on, when the next one is looked for: results of `kgen tune` have changed."""
    _environment.cache_clear()
    tuned_paths.read.cache_clear()


# ---- plain data ----------------------------------------------------------------------------------------------------


def _data(ready: ReadyCall) -> dict[str, Any] | None:
    """`ready` for `_read`; None where something else than the driver launches it."""
    launch = ready.launch
    staged = launch if isinstance(launch, StagedLaunch) else None
    parts = staged.launches if staged is not None else (launch,)
    launches = [_launch_data(p) for p in parts if isinstance(p, driver.DeviceLaunch) and p.binary]
    if not launches or len(launches) < len(parts):
        return None
    e = ready.event
    return {
        "device": str(ready.device),
        "arguments": [
            [a.name, a.shape, a.strides, FROM_TORCH[a.dtype].name, a.written, a.is_input] for a in ready.arguments
        ],
        "outputs": len(ready.outputs),
        "scalars": [[i, dtype] for (i, *_), dtype in zip(ready.scalars, ready.dtypes, strict=True)],
        "launches": launches,
        "workspaces": None
        if staged is None
        else [[w.name, w.shape, FROM_TORCH[w.dtype].name, w.zeroed] for w in staged.workspaces],
        "event": [e.kernel, e.executor, e.device, e.programs],
        "given": ready.given,
    }


def _launch_data(launch: driver.DeviceLaunch) -> dict[str, Any]:
    f = launch.form
    return {
        "binary": launch.binary, "index": launch.index, "entry": f.entry, "grid": f.grid, "cluster": f.cluster,
        "threads": f.threads, "shared": f.shared, "nulls": f.nulls, "dtypes": f.dtypes, "values": f.slots.values,
        "tensors": f.slots.tensors, "scalars": f.slots.scalars, "resident": f.resident,
    }  # fmt: skip


def _read(kernel: Kernel, d: dict[str, Any]) -> ReadyCall | None:
    """The call that `_data` told; None where the cache has lost one of its cubins, or a sum would have other shares on
    this device than on the one of its name that the call was made ready on."""
    device = torch.device(d["device"])
    arguments = [
        Argument(name, tuple(shape), tuple(strides), TORCH[DTYPES[dtype]], written, is_input)
        for name, shape, strides, dtype, written, is_input in d["arguments"]
    ]
    scalars = [_scalar(kernel, i, dtype) for i, dtype in d["scalars"]]
    event = events.Launch(*d["event"])
    launches: list[driver.DeviceLaunch] = []
    for one in d["launches"]:
        launch = _launch(one, event)
        if launch is None:
            return None
        launches.append(launch)
    run = launches[0]
    if d["workspaces"] is not None:
        spaces = [Workspace(n, tuple(shape), TORCH[DTYPES[dtype]], z) for n, shape, dtype, z in d["workspaces"]]
        run = StagedLaunch(launches, spaces, device)
    outputs = arguments[len(arguments) - d["outputs"] :]
    return ReadyCall(kernel.name, device, arguments, outputs, scalars, run, None, event, (), bool(d["given"]),
                     [dtype for _, dtype in d["scalars"]])  # fmt: skip


def _scalar(kernel: Kernel, i: int, dtype: str) -> Any:
    p: Any = kernel.signature.params[i]
    return scalar_slot(kernel.name, i, p.name, DTYPES[dtype], p.default, kernel.recorded)


def _launch(d: dict[str, Any], event: events.Launch) -> driver.DeviceLaunch | None:
    pairs = [tuple((i, k) for i, k in d[name]) for name in ("tensors", "scalars")]
    slots = Slots(tuple(d["values"]), pairs[0], pairs[1])
    form = driver.Form(
        d["entry"], d["grid"], d["cluster"], d["threads"], d["shared"], d["nulls"], tuple(d["dtypes"]), slots,
        d["resident"],
    )  # fmt: skip
    function = driver.loaded.get((d["binary"], form.entry, d["index"]))
    if function is None:
        payload = CACHE.get(d["binary"])
        if payload is None:
            return None
        _, _, cubin = payload.partition(b"\n")
        binary = driver.Binary(cubin, form.threads, form.shared, form.nulls, d["binary"])
        function = driver.load(binary, form.entry, d["index"])
        events.count(f"load:{event.executor}")
    if form.resident:
        here = driver.resident_clusters(function, d["index"], form.cluster, form.threads, form.shared)
        if here != form.resident:
            return None
    return driver.DeviceLaunch(function, d["index"], form, d["binary"])
