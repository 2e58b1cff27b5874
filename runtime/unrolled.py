"""The path of a warm call, written out for one signature.

Loops over parameters, tuples that are packed to be unpacked and calls of small functions cost more than the driver's
launch. So the steps of a call are written as a Python function with a line for each tensor and scalar, and compiled;
calls of the same form (number and place of tensors, scalars and outputs) share the compiled text and differ in the
objects that it is given. What a step does is said where it is defined: `kgen.runtime.plan` for a ready call,
`kgen.runtime.recent` for guards, `kgen.runtime.backends.driver` for a launch.

For RMSNorm (x, w, eps, offset, round_first) with both tensors given on a GPU the text is

    def call(values, others):
        (v0, v1, v2, v3, v4) = values
        if modes() or not admits(v0, v1) or v4 is not f4: return UNLIKE
        (p0, p1) = (v0.data_ptr(), v1.data_ptr())
        if (p0 | p1) & 15 or not (p0 and p1): return UNLIKE
        s0 = n0 if v2 is g0 else convert0(v2)
        s1 = n1 if v3 is g1 else convert1(v3)
        if current_device() != index: return elsewhere([v0, v1], [s0, s1], [p0, p1])
        y0 = empty(y0_shape, y0_strides, y0_dtype)
        y0_p = y0.data_ptr()
        try: frame = free.pop()
        except IndexError: frame = new()
        memory, config, pointers = frame
        pack(memory, stream_at, current_stream(index), p0, p1, y0_p, s0, s1)
        if code := start(config, function, pointers, None): failed(frame, code)
        free.append(frame)
        draw()
        if events.listeners: events.tell(event)
        return y0

Where they ask for gradients, the lines behind the scalars are `return apply(run, (s0, s1, p0, p1), v0, v1)`, and
torch's autograd runs the function below. Its plan is that of the training form, written out as above, whose second
output is a residual.

    def call(ctx, told, v0, v1):
        (s0, s1, p0, p1) = told
        (y0, y1) = plan(v0, v1, s0, s1, p0, p1)
        ctx.task = task
        ctx.scalars = {3: s1}
        ctx.save_for_backward(v0, v1, y1)
        ctx.set_materialize_grads(False)
        return y0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kgen.runtime import events
from kgen.runtime.backends import driver
from kgen.runtime.backends.launch import Launch, bf16_bits
from kgen.runtime.stages import StagedLaunch

if TYPE_CHECKING:
    from kgen.runtime.plan import Argument

modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes of torch's dispatcher are active."""

UNLIKE: Any = object()
"""What a function with guards returns for a call that they do not admit."""


class Guards(NamedTuple):
    """Of a call with `arity` values: `admits` are torch's guards of the tensors at `tensors`, `fixed` what other values
    must be, `same` pairs (k, i): the tensor k of `others` is value i. `filled` says of each guarded tensor whether it
    has elements, and so must have an address. `scalars` are the scalars' positions, what was given for each and what
    that was converted to, and the function that converts another."""

    arity: int
    admits: Callable[..., bool]
    tensors: Sequence[int]
    fixed: Mapping[int, Any]
    same: Sequence[tuple[int, int]]
    filled: Sequence[bool]
    scalars: Sequence[tuple[int, Any, Any, Callable[[Any], Any]]]


class Work(NamedTuple):
    """What a ready call does: allocate `outputs`, `launch`, count. `elsewhere` is the same for any current device, from
    tensors, scalars and addresses."""

    device: torch.device
    outputs: Sequence[Argument]
    launch: Launch
    event: events.Launch
    draw: Callable[[], int]
    elsewhere: Callable[[list[Any], list[Any], list[int]], Any]


class Recorded(NamedTuple):
    """What a call that records gradients does: `apply` is given a function of the context of torch's autograd and of
    what `plan` takes, and all guarded tensors.

    `plan` is that of the training form: it takes the tensors at the positions `takes` among the guarded ones, and all
    scalars. The first `outputs` of its `results` are those of the call, of which those at `silent` carry no gradient.
    On the context go `task`, the numbers of the parameters `numbers`, as `scalars`, and for the backward pass the
    parameters `saved` and the results `kept`.
    """

    apply: Callable[..., Any]
    plan: Callable[..., Any]
    takes: Sequence[int]
    results: int
    outputs: int
    silent: Sequence[int]
    task: Any
    numbers: Sequence[int]
    saved: Sequence[int]
    kept: Sequence[int]


class _Text:
    """Lines of a function, and the objects behind the names in them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}

    def add(self, line: str, **objects: Any) -> None:
        self.lines.append(line)
        self.objects |= objects

    def function(self, parameters: str) -> Callable[..., Any]:
        body = "".join(f"        {line}\n" for line in self.lines)
        text = f"def make({', '.join(self.objects)}):\n    def call({parameters}):\n{body}    return call\n"
        return _compiled(text)(**self.objects)


@cache
def _compiled(text: str) -> Callable[..., Callable[..., Any]]:
    space: dict[str, Any] = {}
    exec(compile(text, "<kgen call>", "exec"), space)  # of names that are made here
    return space["make"]


def guarded(guards: Guards, work: Work | Recorded) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]:
    """A function of the values of a call and of the tensors that outputs are laid out like: the result, or `UNLIKE`.

    torch's guards pass over those modes of its dispatcher that its own tools put there (fake tensors, `make_fx`,
    selective checkpointing), so that modes are asked for here.
    """
    text = _Text()
    tensors = [f"v{i}" for i in guards.tensors]
    text.add(f"{_listed(f'v{i}' for i in range(guards.arity))} = values")
    unlike = ["modes()", f"not admits({', '.join(tensors)})"]
    unlike += [f"v{i} is not f{i}" for i in guards.fixed] + [f"others[{k}] is not v{i}" for k, i in guards.same]
    text.add(
        f"if {' or '.join(unlike)}: return UNLIKE",
        modes=modes, admits=guards.admits, UNLIKE=UNLIKE, **{f"f{i}": v for i, v in guards.fixed.items()},
    )  # fmt: skip
    addresses = [f"p{i}" for i in range(len(tensors))]
    text.add(f"{_listed(addresses)} = {_listed(f'{t}.data_ptr()' for t in tensors)}")
    filled = [p for p, is_filled in zip(addresses, guards.filled, strict=True) if is_filled]
    freed = f" or not ({' and '.join(filled)})" if filled else ""
    text.add(f"if ({' | '.join(addresses)}) & 15{freed}: return UNLIKE")
    for k, (i, given, number, convert) in enumerate(guards.scalars):
        line = f"s{k} = n{k} if v{i} is g{k} else convert{k}(v{i})"
        text.add(line, **{f"n{k}": number, f"g{k}": given, f"convert{k}": convert})
    scalars = [f"s{k}" for k in range(len(guards.scalars))]
    if isinstance(work, Recorded):
        numbers = {i: f"v{i}" for i in work.numbers}  # of constants, which are the same objects
        numbers |= {i: s for (i, *_), s in zip(guards.scalars, scalars, strict=True) if i in numbers}
        constants = [v for v in numbers.values() if v not in scalars]
        told = _listed([*scalars, *(addresses[k] for k in work.takes), *constants])
        run = _recording(work, guards, tensors, scalars, addresses, told, numbers)
        text.add(f"return apply(run, {told}, {', '.join(tensors)})", apply=work.apply, run=run)
    else:
        _work(text, work, tensors, scalars, addresses)
    return text.function("values, others")


def _recording(
    work: Recorded,
    guards: Guards,
    tensors: list[str],
    scalars: list[str],
    addresses: list[str],
    told: str,
    numbers: Mapping[int, str],
) -> Callable[..., Any]:
    """What torch's autograd runs: a function of its context, of `told` and of the guarded tensors."""
    text = _Text()
    text.add(f"{told} = told")
    results = [f"y{k}" for k in range(work.results)]
    given = [*(tensors[k] for k in work.takes), *scalars, *(addresses[k] for k in work.takes)]
    made = _listed(results) if work.results > 1 else results[0]
    text.add(f"{made} = plan({', '.join(given)})", plan=work.plan)
    text.add("ctx.task = task", task=work.task)
    if numbers:
        text.add(f"ctx.scalars = {{{', '.join(f'{i}: {number}' for i, number in numbers.items())}}}")
    # A parameter that no guard has is absent.
    saved = [f"v{i}" if i in guards.tensors else "None" for i in work.saved]
    text.add(f"ctx.save_for_backward({', '.join([*saved, *(results[k] for k in work.kept)])})")
    text.add("ctx.set_materialize_grads(False)")
    if work.silent:
        text.add(f"ctx.mark_non_differentiable({', '.join(results[k] for k in work.silent)})")
    text.add(f"return {results[0] if work.outputs == 1 else _listed(results[: work.outputs])}")
    return text.function(", ".join(["ctx", "told", *tensors]))


def plain(work: Work, tensors: int, scalars: int) -> Callable[..., Any]:
    """A function of the call's tensors, one after another, then its converted scalars, then the tensors' addresses. It
    is for calls under guards."""
    text = _Text()
    t, s, p = ([f"{c}{i}" for i in range(n)] for c, n in (("t", tensors), ("s", scalars), ("p", tensors)))
    _work(text, work, t, s, p)
    return text.function(", ".join([*t, *s, *p]))


def _work(text: _Text, work: Work, tensors: list[str], scalars: list[str], addresses: list[str]) -> None:
    """The lines behind the guards."""
    launch = work.launch
    staged = launch if isinstance(launch, StagedLaunch) else None
    parts = [p for p in (staged.launches if staged else (launch,)) if isinstance(p, driver.DeviceLaunch)]
    on_device = len(parts) == (len(staged.launches) if staged else 1)
    torch_c: Any = torch._C  # without stubs of this part
    direct = getattr(torch_c._dynamo.guards, f"_empty_strided_{work.device.type}", None)
    # As compiled graphs of torch allocate: past the dispatcher, in half the time, on the current device.
    if on_device:
        elsewhere = f"elsewhere([{', '.join(tensors)}], [{', '.join(scalars)}], [{', '.join(addresses)}])"
        text.add(
            f"if current_device() != index: return {elsewhere}",
            elsewhere=work.elsewhere, current_device=driver.current_device, index=parts[0].index,
        )  # fmt: skip
    outputs = [f"y{k}" for k in range(len(work.outputs))]
    places = list(addresses)

    def allocate(name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        objects = {f"{name}_shape": shape, f"{name}_strides": strides, f"{name}_dtype": dtype}
        text.add(f"{name} = empty({', '.join(objects)})", empty=direct or _allocator(work.device), **objects)
        text.add(f"{name}_p = {name}.data_ptr()")
        places.append(f"{name}_p")

    for y, a in zip(outputs, work.outputs, strict=True):
        allocate(y, a.shape, a.strides, a.dtype)
    if on_device:
        for k, w in enumerate(staged.workspaces if staged else ()):
            allocate(f"w{k}", w.shape, tuple(prod(w.shape[i + 1 :]) for i in range(len(w.shape))), w.dtype)
            if w.zeroed:
                text.add(f"w{k}.zero_()")
        for k, part in enumerate(parts):
            _launch(text, part, scalars, places, str(k) if staged else "")
    else:
        text.add(f"launch({_listed([*tensors, *outputs])}, {_listed(scalars)}, {_listed(places)})", launch=launch)
    text.add("draw()", draw=work.draw)
    text.add("if events.listeners: events.tell(event)", events=events, event=work.event)
    text.add(f"return {outputs[0] if len(outputs) == 1 else _listed(outputs)}")


def _launch(text: _Text, launch: driver.DeviceLaunch, scalars: list[str], places: list[str], n: str) -> None:
    """The lines of `DeviceLaunch.__call__`; `n` tells the launches of one call apart."""
    numbers = [
        f"bits({scalars[k]})" if bf16 else scalars[k] for k, bf16 in zip(launch.scalars, launch.is_bf16, strict=True)
    ]
    told = ", ".join(["current_stream(index)", *(places[k] for k in launch.tensors), *numbers])
    text.add(f"try: frame = free{n}.pop()", **{f"free{n}": launch.free})
    text.add(f"except IndexError: frame = new{n}()", **{f"new{n}": launch.template.frame})
    text.add("memory, config, pointers = frame")
    text.add(
        f"pack{n}(memory, stream_at, {told})",
        stream_at=driver.STREAM, current_stream=driver.current_stream, bits=bf16_bits, **{f"pack{n}": launch.pack},
    )  # fmt: skip
    text.add(
        f"if code := start(config, function{n}, pointers, None): failed{n}(frame, code)",
        start=launch.start, **{f"function{n}": launch.function, f"failed{n}": launch.failed},
    )  # fmt: skip
    text.add(f"free{n}.append(frame)")


def _listed(names: Any) -> str:
    names = list(names)
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
