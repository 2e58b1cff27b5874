"""A kernel as a Python function on tensors.

A call that came before and is like one of the last few is recognised by its guards (`kgen.runtime.recent`) and
launched. Any other is looked up by a key of all that a ready call depends on. Everything else happens once for each key
(`kgen.runtime.preparing`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from kgen.dsl.signature import Specialization, TensorParam
from kgen.runtime import differentiable, recent, registry, stored
from kgen.runtime.binding import Binder, has_memory, is_fake, is_traced, python_signature
from kgen.runtime.checked_modules import Checked
from kgen.runtime.flight import SingleFlight
from kgen.runtime.plan import Plans, ReadyCall, converted
from kgen.runtime.unrolled import UNLIKE

if TYPE_CHECKING:
    from kgen.codegen.knobs import Knobs
    from kgen.dsl import ast, ir
    from kgen.runtime import autograd
    from kgen.runtime.backends.base import Executor

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled

_serials = itertools.count()
_by_serial: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()

# Exact signatures remembered by a kernel; beyond it all are forgotten, which costs each of them some 100 us once.
MAX_READY = 4096

# Calls of one group that are recognised without a look into the dictionary. Each of them that is not the one that is
# looked for costs a tenth of that look.
MAX_RECENT = 4

# What the recent calls of a kernel are told apart by before any tensor is looked at, beside the grad mode: the backend
# that is asked for; and where tensors are given as outputs or for their layout, which of the two, and how many.
Group = str | tuple[str, bool, int]
Recent = dict[Group, tuple[recent.Known, ...]]


class Kernel:
    """One kernel of a `.kdsl` file, callable with torch tensors.

    Arguments are those of the signature, by position or by name: inputs and scalars in order, `const` parameters among
    them. An optional tensor that is not given is absent. The result is the output tensor, or the tuple of outputs; of
    a kernel that has none, the tensors that it modifies.

    Where an input requires grad, the outputs carry its gradient (`kgen.runtime.autograd`), which a derived kernel
    computes on the same backend.

    A copy, deep or not, is the kernel itself, as of a function. Pickled it is its checked source: the kernel that comes
    back is another, which compiles anew what is not in the cache.
    """

    noun = "a kernel"

    def __init__(self, source: Checked | ast.Module, name: str) -> None:
        """The kernel `name` of a file or a module that was checked."""
        found = source if isinstance(source, Checked) else Checked.of(source)
        self._source = found
        doc, self.signature = found.kernels[name]
        # What its calls are stored by; see `kgen.runtime.stored`.
        self.content = found.key
        # Whether a call of it came from there: its kernels may be loaded, though there is no plan of theirs yet.
        self.restored = False
        self.path = found.path
        # What torch.compile knows this object by, as a trace takes text for a constant and guards it, but no object.
        self.serial = f"{name} {next(_serials)}"
        self.name = self.__name__ = name
        doc = doc or f"The kernel `{name}` of {self.path}."
        shown = python_signature(self.signature)
        if shown is not None:
            self.__signature__ = shown
        # The first line is that of help() on functions without source, which it shows nothing else of.
        self.__doc__ = doc if shown is None else f"{name}{shown}\n\n{doc}"
        self.binder = Binder(self.signature)
        # Whether its calls are those of a training form, inside which torch has the grad mode off.
        self.recorded = False
        self.has_float_output = differentiable.float_output(self.signature)
        params = self.signature.params
        self.tensor_at = tuple(i for i, p in enumerate(params) if isinstance(p, TensorParam))
        self.const_at = tuple(i for i, p in enumerate(params) if not isinstance(p, TensorParam) and p.const)
        self.scalar_at = tuple(i for i, p in enumerate(params) if not isinstance(p, TensorParam) and not p.const)
        self.inout_at = tuple(i for i in self.tensor_at if _role(params[i]) == "inout")
        self._count = len(params)
        self._ready: dict[tuple[Any, ...], ReadyCall] = {}
        self._recent: tuple[Recent, Recent] = ({}, {})  # with the grad mode off, and on
        self.plans: Plans = SingleFlight()
        self.choices: dict[tuple[Any, ...], tuple[Executor, Knobs | None]] = {}
        self.kernels: SingleFlight[tuple[Any, ...], ir.Kernel] = SingleFlight()
        self.trainings: SingleFlight[tuple[Any, ...], autograd.Training] = SingleFlight()
        _by_serial[self.serial] = self

    @property
    def module(self) -> ast.Module:
        """The checked module that it is part of."""
        return self._source.module

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, _: Any) -> Kernel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Kernel, (self.module, self.name)

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {self.path}>"

    # -- calling -------------------------------------------------------------------------------------------------
    def __call__(
        self,
        /,
        *args: Any,
        backend: str | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        like: Sequence[torch.Tensor] | None = None,
        check: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the kernel and return its output, or a tuple of them.

        backend: `cuda`, `triton`, `reference` or `auto`; None takes what `kgen.backend` and its like say. On CPU
            tensors `cuda` is the host executor and `triton` the Triton interpreter.
        out: tensors to write instead of new ones, in order of the outputs: any strides, no memory shared with others.
        like: tensors of the shapes of the outputs, in their order; new ones are laid out in memory as
            `torch.empty_like` of them. Under torch.compile results are contiguous.
        check: first run the reference on the same arguments and raise CheckError at the first gather out of range.
            Not under torch.compile.

        Raises ArgumentError for an argument that does not fit the signature, BackendError where the backend cannot run,
        DeriveError where a gradient is needed that cannot be derived (not under `torch.no_grad()`).
        """
        if like is not None:
            like = self.binder.models(like)
        bound = not kwargs and len(args) == self._count
        return self.ordered(args if bound else self.binder.bind(args, kwargs), backend, out, like, check)

    def ordered(
        self,
        values: Sequence[Any],
        backend: str | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        like: Sequence[torch.Tensor] | None = None,
        check: bool = False,
    ) -> Any:
        """A call with one value for each parameter, in order of the signature: None for an optional tensor that is not
        given. The rest is as for any call."""
        outs = self.binder.outputs(out) if out is not None else None
        if is_dynamo_compiling():
            # It imports torch.compile's machinery. A trace guards less where it is told the module itself.
            from kgen.runtime.library import call

            return call(self, [*values], outs, backend)
        choice = registry.requested(backend)
        group: Group = choice
        others: Sequence[torch.Tensor] = ()
        if outs is not None or like is not None:
            others = outs if outs is not None else like or ()
            group = (choice, outs is None, len(others))
        if not check and forward_ad._current_level < 0:
            for known in self._recent[is_grad_enabled()].get(group, ()):
                if (result := known(values, others)) is not UNLIKE:
                    return result
        return self._looked_up([*values], outs, like, choice, group, check)

    def _looked_up(
        self,
        values: list[Any],
        outs: tuple[torch.Tensor, ...] | None,
        like: Sequence[torch.Tensor] | None,
        choice: str,
        group: Group,
        check: bool,
    ) -> Any:
        """A call unlike the recent ones."""
        if is_traced(self.name):
            from kgen.runtime import library  # imports torch.compile's machinery

            return library.call(self, values, outs, choice)
        if torch.is_grad_enabled():
            if wanted := differentiable.requiring(self, values):
                from kgen.runtime import autograd  # which only those load that need gradients

                if outs is not None or self.inout_at:
                    autograd.refuse(self, values, wanted, outs)
                else:
                    if check:
                        self._check(values, None)
                    results = autograd.record(self, values, wanted, choice, like)
                    self._remember_recorded(group, choice, values, wanted, like)
                    return results
        elif forward_ad._current_level >= 0 and self.has_float_output:  # torch.no_grad() stops no tangent
            differentiable.refuse_tangents(self, values)
        ready, addresses, is_known = self._find(values, outs, like, choice)
        if ready is None:
            from kgen.runtime import library  # as above

            return library.call(self, values, outs, choice)
        if is_known:  # guards are made for what comes again: they take longer than the other steps of a first call
            self._remember(group, recent.remember(self, ready, values, outs or like or (), outs is not None))
        tensors = [t for i in self.tensor_at if (t := values[i]) is not None]
        scalars = converted(ready.scalars, values)
        if check:
            self._check(values, outs)
        results = ready.run(tensors, scalars, addresses, outs)
        if not results:
            results = [values[i] for i in self.inout_at]
        return results[0] if len(results) == 1 else tuple(results)

    def _find(
        self,
        values: list[Any],
        outs: Sequence[Any] | None,
        like: Sequence[torch.Tensor] | None,
        choice: str,
    ) -> tuple[ReadyCall | None, list[int], bool]:
        """The ready call for these arguments, the addresses of the tensors among `values`, and whether it was known
        from an earlier call. No ready call for fake tensors; none is kept where a tensor is given for a number, which
        may have another value at the next call."""
        addresses: list[int] = []
        try:
            key = self._key(values, outs, like, choice, addresses)
            ready = self._ready.get(key)
        except (AttributeError, TypeError, RuntimeError, NotImplementedError):
            # Something among the arguments is no plain tensor. _prepare finds out what and says it.
            if any(is_fake(values[i]) for i in self.tensor_at):
                return None, [], False
            ready = self._prepare(values, outs, choice, like)
            return ready, [t.data_ptr() for i in self.tensor_at if (t := values[i]) is not None], False
        if ready is not None:
            return ready, addresses, True
        ready = stored.find(self, key)
        if ready is None:
            ready = self._prepare(values, outs, choice, like)
            stored.keep(self, key, ready)
        if len(self._ready) >= MAX_READY:
            self._ready.clear()
        self._ready[key] = ready
        return ready, addresses, False

    def _remember(self, group: Group, known: recent.Known | None) -> None:
        """Keep what recognises a call among the recent ones, in front."""
        if known is not None:
            # One assignment: what another thread adds in the meantime is found again in the dictionary.
            found = self._recent[is_grad_enabled()]
            found[group] = (known, *found.get(group, ())[: MAX_RECENT - 1])

    def _remember_recorded(
        self,
        group: Group,
        choice: str,
        values: list[Any],
        wanted: tuple[int, ...],
        like: Sequence[torch.Tensor] | None,
    ) -> None:
        if not recent.guardable([t for i in self.tensor_at if (t := values[i]) is not None]):
            return
        from kgen.runtime import autograd  # as above

        t = autograd.training(self, values, wanted)
        ready, _, is_known = t.forward._find([values[i] for i in t.inputs], None, like, choice)
        if ready is not None and is_known:
            self._remember(group, recent.remember_recorded(self, t, ready, choice, values, like or ()))

    def prepare(
        self,
        *args: Any,
        backend: str | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> ReadyCall:
        """What a call with these arguments would run, compiled but not run; its `.program` has the generated source."""
        outs = self.binder.outputs(out) if out is not None else None
        return self._prepare(self.binder.bind(args, kwargs), outs, registry.requested(backend))

    def _key(
        self,
        values: list[Any],
        outs: Sequence[Any] | None,
        like: Sequence[torch.Tensor] | None,
        choice: str,
        addresses: list[int],
    ) -> tuple[Any, ...]:
        """All that a ready call depends on; the addresses of the inputs go to `addresses`.

        Raises AttributeError, TypeError or RuntimeError for what is no plain tensor.
        """
        key: list[Any] = [choice]
        for i in self.tensor_at:
            t = values[i]
            if t is None:
                key.append(None)
                continue
            if type(t) not in _PLAIN:
                _admit(type(t))
            if t.is_neg():  # a lazy sign, which the memory does not have
                t = values[i] = self._resolved(i, t)
            address = t.data_ptr()
            if not address and t.numel():
                raise RuntimeError("no memory")
            addresses.append(address)
            key += (t.dtype, t.device, t.shape, t.stride(), address & 15)
        for i in self.const_at:
            v = values[i]
            if isinstance(v, torch.Tensor):
                raise TypeError("the value of a tensor is no key: it may change")
            # The type, as True == 1 == 1.0; the text of floats, as 0.0 == -0.0.
            key += (type(v), repr(v) if isinstance(v, float) else v)
        if outs is not None:
            for t in outs:
                if type(t) not in _PLAIN:
                    _admit(type(t))
                if not (address := t.data_ptr()) and t.numel():
                    raise RuntimeError("no memory")
                key += (t.dtype, t.device, t.shape, t.stride(), address & 15, t.is_neg())
        elif like is not None:
            for t in like:
                key += (t.shape, t.stride())
        return tuple(key)

    def _resolved(self, i: int, t: torch.Tensor) -> torch.Tensor:
        p = self.signature.params[i]
        if _role(p) == "inout":
            self.binder.fail(f"argument '{p.name}' is a lazily negated view, which cannot be written in place")
        return t.resolve_neg()

    # -- once for each signature ---------------------------------------------------------------------------------
    def specialize(self, spec: Specialization) -> ir.Kernel:
        """The tile IR of this kernel for given dtypes, constants and optional tensors; made once for each."""
        from kgen.runtime import preparing  # and with it the compiler, which a call that is known does not need

        return preparing.specialized(self, spec)

    def _prepare(
        self,
        values: Sequence[Any],
        outs: Sequence[Any] | None,
        choice: str,
        like: Sequence[torch.Tensor] | None = None,
    ) -> ReadyCall:
        from kgen.runtime import preparing  # as above

        return preparing.prepare(self, values, outs, choice, like)

    def _check(self, values: Sequence[Any], outs: Sequence[Any] | None) -> None:
        from kgen.runtime import preparing  # as above

        preparing.check(self, values, outs)


def by_serial(serial: str) -> Kernel:
    """The kernel whose `serial` this is. Raises KeyError where it is gone."""
    return _by_serial[serial]


# Types of tensors that have memory of their own; others are never asked for its address.
_PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}


def _admit(kind: type) -> None:
    """Add a subclass that only adds names to torch.Tensor to `_PLAIN`. Raises TypeError for any other type."""
    if not has_memory(kind):
        raise TypeError(f"{kind.__name__} is no plain tensor")
    _PLAIN.add(kind)


def _role(p: object) -> str:
    return p.role if isinstance(p, TensorParam) else "scalar"
