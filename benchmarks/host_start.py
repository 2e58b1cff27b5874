"""How soon a process that compiles nothing has the first result of an op, and how long all ops take to be read and
emitted: the parts of `host_time.py` that need processes of their own.

The first process fills the cache, and leaves the bytecode of the modules as an installation does; the median of the
others counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]

# The most milliseconds on the host of an H200.
BARS = {"import and first op": 50.0, "all ops": 1000.0}
PROCESSES = 5
HERE = Path(__file__).parent


def first_op(device: str, backend: str) -> Record:
    """Milliseconds from torch at work on `device` to the first result of RMSNorm, in this process, and what was
    compiled for it."""
    from time import perf_counter

    x, w = torch.ones(64, 256, device=device), torch.ones(256, device=device)
    _ = x * w  # starts CUDA
    _wait(device)
    began = perf_counter()
    from kgen import ops

    imported = perf_counter()
    with torch.no_grad():
        ops.rms_norm(x, w, backend=backend)
    _wait(device)
    done = perf_counter()
    from kgen.runtime import events

    return {
        "import kgen.ops": (imported - began) * 1e3,
        "first op": (done - imported) * 1e3,
        "import and first op": (done - began) * 1e3,
        "compiled": sum(n for event, n in events.counts().items() if event.startswith("compile")),
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def all_ops() -> Record:
    """Milliseconds to parse and check every packaged file and emit each of its kernels on both backends, in bf16 at
    its example sizes with every `const` at its default."""
    from time import perf_counter

    import kgen.ops

    began = perf_counter()
    from kgen.dsl.garbage import collected_later
    from kgen.dsl.modules import load
    from kgen.runtime.ahead import BACKENDS, Choices, target
    from kgen.runtime.checked_modules import check

    programs = 0
    with collected_later():  # as in `kgen check` and `kgen build`
        for path in sorted(Path(kgen.ops.__file__).parent.glob("*.kdsl")):
            module = load(path).module  # anew, whatever the cache has
            check(module)
            for kernel in module.kernels:
                one = target(module, kernel, Choices(dtype="bf16"))
                for backend in BACKENDS:
                    one.program(backend)
                    programs += 1
        took = perf_counter() - began
    return {"all ops": took * 1e3, "programs": programs}


def measure(device: torch.device, backends: tuple[str, ...]) -> Record:
    """The figures of each part: medians over processes, or an error."""
    parts = {f"{b}: first op": ("first_op", str(device), b) for b in backends} | {"emit": ("all_ops",)}
    out: Record = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for name, command in parts.items():
            try:
                out[name] = _median([_process(command, bytecode) for _ in range(PROCESSES + 1)][1:])
            except (subprocess.SubprocessError, ValueError) as error:
                told = getattr(error, "stderr", "") or ""
                out[name] = {"error": f"{error} {told[-300:]}"}
    return out


def _process(command: tuple[str, ...], bytecode: str) -> Record:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    # Where nothing may write bytecode, each process would compile every module.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    done = subprocess.run(
        [sys.executable, str(HERE / "host_start.py"), *command],
        capture_output=True, text=True, check=True, timeout=300, env=environment,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _median(found: list[Record]) -> Record:
    return {name: statistics.median(r[name] for r in found) for name in found[0]}


def failed(found: Record) -> list[str]:
    """What went wrong: a part that did not run, or compiled in a process that should have found everything."""
    out = [f"start, {name}: {r['error']}" for name, r in found.items() if "error" in r]
    return out + [f"start, {name}: compiled {r['compiled']}" for name, r in found.items() if r.get("compiled")]


def told(found: Record) -> list[str]:
    """Lines for the report."""
    if not found:
        return []
    lines = ["Milliseconds in a process of its own, with the cache filled and torch at work:", ""]
    for name, r in found.items():
        parts = [
            f"{part} {r[part]:.0f}" + (f" (bar {BARS[part]:.0f})" if part in BARS else "")
            for part in ("import kgen.ops", "first op", "import and first op", "all ops")
            if part in r
        ]
        lines.append(f"- {name}: {', '.join(parts) or '-'}")
    return lines


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(json.dumps({"first_op": first_op, "all_ops": all_ops}[what](*rest)))
