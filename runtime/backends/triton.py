"""The Triton backend on a GPU: Triton compiles; the driver loads and launches."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache as memoised
from typing import Any

import torch

from kgen.codegen.program import Program
from kgen.codegen.variant import Variant
from kgen.runtime import events
from kgen.runtime.backends.base import Generated, capability_of, missing_gpu
from kgen.runtime.backends.driver import Binary, Loaded
from kgen.runtime.backends.launch import Built
from kgen.runtime.cache import Cache, cache_key, temporary_folder
from kgen.runtime.errors import BackendError
from kgen.runtime.installation import chosen_ptxas, triton_is_installed, triton_version
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages


class Triton(Generated):
    """One compiled kernel for each variant, launched on torch's current stream."""

    name = "triton"
    backend = "triton"

    def why_unavailable(self, device: torch.device) -> str | None:
        if why := missing_gpu(device):
            return why
        if not triton_is_installed():
            return missing_triton()
        if _interprets():
            return "Triton runs as an interpreter here because TRITON_INTERPRET is set; unset it"
        return None

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        capability = self.capability(device)

        def build(p: Program) -> Built:
            variant = p.stage.variant if p.stage is not None else layout.variant
            return Loaded(p, compiled(p, variant, capability, cache), device)

        return build_stages(program, build, device)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def capability(self, device: torch.device) -> int:
        return capability_of(device)


@memoised
def missing_triton() -> str | None:
    """One sentence where Triton cannot be imported."""
    try:
        import triton  # noqa: F401  # only whether it is there
    except ImportError as error:
        return f"Triton is not installed ({error}); install it with: pip install triton"
    return None


def _interprets() -> bool:
    if "triton" in sys.modules:
        from triton import knobs

        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def compiled(program: Program, variant: Variant, capability: int, cache: Cache) -> Binary:
    """The binary of `program` for compute capability `capability`, from the cache or from Triton.

    An entry is one line of JSON and the cubin, so that a process that finds it need not import Triton. Triton's own
    cache would still have to be asked through its compiler.
    """
    from kgen.runtime.triton_compile import compile_triton, told

    built = False

    def build() -> bytes:
        nonlocal built
        built = True
        folder = cache.folder("triton") or temporary_folder("triton")
        handle = compile_triton(program, variant, capability, folder).handle
        events.count("compile:triton")
        head = {"threads": 32 * handle.metadata.num_warps, "shared": handle.metadata.shared,
                "nulls": added_pointers(program, handle.metadata, handle.asm["ptx"])}  # fmt: skip
        return json.dumps(head).encode() + b"\n" + handle.asm["cubin"]

    given, arch = told(program, variant), f"sm_{capability}"
    key = cache_key("triton", program.source, program.entry, triton_version(), chosen_ptxas(), given, arch)
    head, _, cubin = cache.get_or_build(key, build).partition(b"\n")
    if not built:
        events.count("load:triton")
    return Binary(cubin=cubin, key=key, **json.loads(head))


def added_pointers(program: Program, metadata: Any, ptx: str) -> int:
    """How many pointers Triton's compiler added to the parameters of the program: to scratch memory, as many as this
    version has kinds of it. One that a kernel does not need is null.

    Raises BackendError for a kernel that needs such memory, or attributes of a launch (clusters, a cooperative grid,
    programmatic dependent launch): no schedule asks for any of these.
    """
    wants = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    found = [name for name in wants if getattr(metadata, name, 0)] + ["num_ctas"] * (metadata.num_ctas != 1)
    if found:
        raise BackendError(
            f"{program.entry}: Triton compiled it for a launch with {', '.join(found)}, which kgen has not"
        )
    parameters = _parameters(ptx, program.entry)
    added = parameters[len(program.args) :]
    if len(parameters) < len(program.args) or any(kind != "u64" for kind in added):
        raise BackendError(
            f"{program.entry}: Triton {triton_version()} compiled {len(program.args)} arguments to the parameters "
            f"{', '.join(parameters) or 'of none'}; kgen does not know this version"
        )
    return len(added)


def _parameters(ptx: str, entry: str) -> list[str]:
    """The types of a kernel's parameters: `u64`, `f32`, ..."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.S)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", found.group(1)) if found else []
