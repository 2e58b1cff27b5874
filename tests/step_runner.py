"""Runs the steps of a scheduled kernel, chunk by chunk, in float64: what a schedule must not change the meaning of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kgen.codegen.execute import ScalarValue
from kgen.codegen.interpret import Interpreter, reduce_tensor
from kgen.codegen.schedule import Choice, Element, Finish, Leave, Loop, Partial, Scheduled, Step
from kgen.codegen.space import blocks
from kgen.dsl import ir


class StepRunner(Interpreter):
    """All programs at once, or one by one where they choose. An `inout` tensor is one piece of memory: a load after a
    store sees what was stored."""

    def __init__(
        self, scheduled: Scheduled, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, ScalarValue]
    ) -> None:
        # A choice is made for each row.
        chooses = any(isinstance(step, Choice | Element) for step in scheduled.steps)
        super().__init__(scheduled.kernel, tensors, scalars, exact=True, max_elements=1 if chooses else 1 << 40)
        self.steps = scheduled.steps
        for t in self.outputs:
            if t.role == "inout":
                self.flat[t.name] = self.stored[t.name]

    def run(self) -> None:
        for block in blocks(self.kernel, self.dims, self.device, self.max_elements):
            self.block, self.env = block, {}
            self._steps(self.steps)

    def _steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Leave):
                if bool(self.eval(step.condition).all()):
                    break
            elif isinstance(step, Choice):
                outside = dict(self.env)
                self._steps(step.yes if self.eval(step.condition).item() else step.no)
                self.env = outside
            elif isinstance(step, Element):
                self._element(step)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                for s in step.body:
                    self._statement(s)

    def _element(self, step: Element) -> None:
        label, whole = int(self.eval(step.label).item()), self.block
        if label >= 0:
            at = whole.position(step.axis)
            self.block = replace(whole, ranges=(*whole.ranges[:at], (label, label + 1), *whole.ranges[at + 1 :]))
            for s in step.body:
                self._statement(s)
            self.block = whole

    def loaded(self, e: ir.Load, v: torch.Tensor, subscripts: list[torch.Tensor]) -> torch.Tensor:
        return v.clone()

    def _statement(self, s: ir.Stmt) -> None:
        if isinstance(s, ir.Let):
            assert s.name not in self.env, f"{s.name} is computed twice"
            # All threads are one here: their partial results are the whole.
            self.env[s.name] = self.eval(s.value.arg if isinstance(s.value, Finish) else s.value)
        elif isinstance(s, ir.Store):
            self.store(s, self.eval(s.value))
        else:
            self.accumulate(s, self.eval(s.value))

    def _loop(self, step: Loop) -> None:
        whole, outside = self.block, dict(self.env)
        at = whole.position(step.axis)
        parts: dict[str, list[torch.Tensor]] = {}
        running: dict[str, torch.Tensor] = {}
        lets = {s.name: s.value for s in step.body if isinstance(s, ir.Let)}
        for start in range(0, whole.extent(step.axis), step.chunk):
            stop = min(start + step.chunk, whole.extent(step.axis))
            self.block = replace(whole, ranges=(*whole.ranges[:at], (start, stop), *whole.ranges[at + 1 :]))
            self.env = dict(outside)
            for s in step.body:
                if isinstance(s, ir.Let) and isinstance(s.value, Partial):
                    self._go_on(s.name, s.value, running)
                    self.env[s.name] = running[s.name]
                elif isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce) and step.axis in s.value.over:
                    # The partial result has no name: nothing in the pass may use it.
                    parts.setdefault(s.name, []).append(self._partial(s.value, start))
                else:
                    self._statement(s)
        self.block, self.env = whole, {**outside, **{n: v for n, v in running.items() if n in lets}}
        # Behind the loop a shift is that of the last chunk.
        shifts = {n: e.shift for n, e in lets.items() if isinstance(e, Partial) and e.shift is not None}
        self.env |= {shift: running[f"{n} against"] for n, shift in shifts.items()}
        for name, chunks in parts.items():
            e = lets[name]
            assert isinstance(e, ir.Reduce) and name not in self.env
            self.env[name] = self._combine(e, torch.stack(chunks, -1))

    def _go_on(self, name: str, e: Partial, running: dict[str, torch.Tensor]) -> None:
        """A partial result takes in a chunk."""
        value = self.eval(e)
        before = running.get(name)
        if e.shift is None:
            running[name] = value if before is None else torch.maximum(before, value)
            return
        shift = self.env[e.shift]
        if before is not None:
            value = value + before * torch.exp(running[f"{name} against"] - shift)
        running[name], running[f"{name} against"] = value, shift

    def _partial(self, e: ir.Reduce, start: int) -> torch.Tensor:
        if e.kind not in ("argmax", "argmin"):
            return self.eval(e)
        # Position and value together, the position counted from the start of the axis.
        d = self.block.position(e.over[0])
        v = self.block.spread(self.eval(e.arg), [d])
        position = reduce_tensor(e.kind, v, [d], torch.int64)
        return torch.stack([v.gather(d, position).double(), (position + start).double()], -1)

    def _combine(self, e: ir.Reduce, parts: torch.Tensor) -> torch.Tensor:
        last = parts.dim() - 1
        if e.kind in ("argmax", "argmin"):
            best = reduce_tensor(e.kind, parts[..., 0, :], [last - 1], torch.int64)
            return parts[..., 1, :].gather(last - 1, best)[..., 0].to(torch.int64)
        return reduce_tensor(e.kind, parts, [last], parts.dtype)[..., 0]


def run_steps(
    scheduled: Scheduled, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, ScalarValue]
) -> dict[str, torch.Tensor]:
    """The outputs of `scheduled`; no argument is modified."""
    runner = StepRunner(scheduled, tensors, scalars)
    runner.run()
    return runner.results()
