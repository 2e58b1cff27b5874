"""An op as a Python file that stands alone: its plan as two plain functions, which launch ejected Triton kernels.

`kgen.runtime.eject_steps` writes the steps; here are the signatures, what is checked and what is handed from one
function to the other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from kgen.codegen.about import literal_text
from kgen.codegen.host import plan, sizing
from kgen.codegen.origins import file_name
from kgen.codegen.templating import render
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir as tiles
from kgen.dsl.check import TensorParam
from kgen.runtime.eject import tensor_text
from kgen.runtime.eject_sizes import Sizes, literal, tuple_text
from kgen.runtime.eject_steps import Body, KernelFile, Steps, flat_steps, listed, words_of
from kgen.runtime.eject_triton import HostFunction
from kgen.runtime.op_target import Called, OpTarget


def kernel_files(op: OpTarget) -> list[tuple[Called, KernelFile]]:
    """The kernel of each launch. What is compiled alike is one file; others of one kernel are numbered."""
    files: dict[tuple[str, str], KernelFile] = {}
    taken: set[str] = set()
    out: list[tuple[Called, KernelFile]] = []
    for called in op.calls:
        launches = called.target.launches("triton")
        host = HostFunction(called.target, launches)
        key = (called.target.name, host.source())
        if key not in files:
            stem, n = called.target.name, 1
            while stem in taken:
                n += 1
                stem = f"{called.target.name}_{n}"
            taken.add(stem)
            function = host.name if n == 1 else f"{host.name}_{n}"
            files[key] = KernelFile(stem, called.target, launches, host, function)
        out.append((called, files[key]))
    return out


def op_source(op: OpTarget, files: Sequence[tuple[Called, KernelFile]]) -> str:
    """The text of `<op>.py`."""
    return _File(op, files).source()


class _File(Steps):
    # -- the file ------------------------------------------------------------------------------------------------
    def source(self) -> str:
        """The whole file."""
        forward = self.body(self.plan.forward)
        backward = self.body(self.plan.backward) if self.plan.gradients else None
        saved = self._saved(backward) if backward is not None else []
        functions = [self._forward(forward, saved)]
        if backward is not None:
            functions.append(self._backward(backward, saved))
        imports = sorted({(f.module, f.host.name, f.function) for _, f in self.files.values()})
        return render(
            "triton/eject_op.py.j2",
            signature=self._signature(),
            file=file_name(self.op.op.span),
            doc=self.op.op.doc.strip().splitlines(),
            assumptions=self._assumptions(),
            imports=imports,
            functions=functions,
            helpers=self.helpers,
            capped=self.op.capped,
            granules=sizing.GRANULES,
            curved=self.curved,
        )

    def _signature(self) -> str:
        present = {t.name for t in self.header.tensors}
        inputs = [tensor_text(t, self.op.compiled) for t in self.header.tensors if t.role != "out"]
        for p in self.op.signature.params:
            if not isinstance(p, TensorParam) and not p.const:
                inputs.append(f"{p.name}: {p.dtype}")
        outputs = [tensor_text(t, self.op.compiled) for t in self.header.tensors if t.role == "out"]
        assert present  # an op has tensors
        return f"{self.op.name}({', '.join(inputs)}) -> ({', '.join(outputs)})"

    def _gradient_signature(self) -> str:
        def text(buffer: str, of: str) -> str:
            return tensor_text(replace(self.header.tensor(of), name=buffer, role="in"), self.op.compiled)

        given = ", ".join(text(b, n) for n, b in self.plan.upstream)
        return f"({given}) -> ({', '.join(text(f'd_{n}', n) for n, _ in self.plan.gradients)})"

    def _assumptions(self) -> list[str]:
        op = self.op
        used = {p.dtype for p in op.signature.tensors if not p.optional or p.name in op.spec.present}
        facts = [f"{n} = {d}" for n, d in op.spec.dtypes.items() if n in used]
        facts += [f"{n} = {literal_text(v)}" for n, v in op.spec.consts.items()]
        facts += [f"{d} = {n}" for d, n in op.compiled.items()]
        out = [", ".join(facts)] if facts else []
        absent = [t.name for t in op.signature.tensors if t.optional and t.name not in op.spec.present]
        if absent:
            out.append(f"without {', '.join(absent)}")
        loose = [d for d in self.sizes.dims if d not in op.rows]
        if op.rows - self.known.keys():
            out.append(f"any number of {', '.join(sorted(op.rows - self.known.keys()))}")
        if loose:
            sizes = ", ".join(f"{d} = {op.dims[d]}" for d in loose)
            out.append(f"sizes like {sizes}: what the kernels' files say of multiples is checked at their launch")
        out.append("contiguous tensors whose addresses are multiples of 16 bytes, as torch allocates them")
        if op.plan.sums or op.accumulate == "f32":
            held = "in f32, rounded once" if op.accumulate == "f32" else "in the dtype of the tensor"
            more = f", and at most {sizing.ROUNDINGS} chunks are added up in 16 bits" if op.capped else ""
            out.append(f"sums over chunks are held {held}{more}")
        return out

    # -- functions -----------------------------------------------------------------------------------------------
    def _options(self, steps: Sequence[plan.Step]) -> list[str]:
        """Keywords that a direction takes, with defaults."""
        out: list[str] = []
        if any(isinstance(s, plan.Loop) for s in steps):
            out += [f"{self.keywords['workspace_mb']}={sizing.DEFAULT_MB}", f"{self.keywords['chunk']}=None"]
        if any(isinstance(s, plan.AllReduce) for s in flat_steps(steps)):
            out.append(f"{self.keywords['group']}=None")
        return out

    def _option_texts(self, steps: Sequence[plan.Step]) -> list[str]:
        out: list[str] = []
        if any(isinstance(s, plan.Loop) for s in steps):
            budget, chunk = self.keywords["workspace_mb"], self.keywords["chunk"]
            out.append(f"{budget}: MiB for what grows with a chunk; {chunk}: the rows of a chunk instead.")
        if any(isinstance(s, plan.AllReduce) for s in flat_steps(steps)):
            out.append(f"{self.keywords['group']}: the process group of the collectives; None: torch's default one.")
        return out

    def _forward(self, body: Body, saved: Sequence[tuple[str, str]]) -> dict[str, object]:
        op, names = self.op, self.names
        inputs = [t for t in self.header.tensors if t.role != "out"]
        scalars = [p for p in op.signature.params if not isinstance(p, TensorParam) and not p.const]
        keywords = [
            names[p.name] + ("" if p.default is None else f"={literal(self.typed(p.default, p.dtype))}")
            for p in scalars
        ]
        keywords += self._options(self.plan.forward)
        star = ["*"] if keywords else []
        head = self._head(inputs)
        results = [self._shaped(n, b) for n, b in self.plan.outputs]
        if self.plan.gradients:
            kept = self.keywords["saved"]
            results.append(kept)
            tail = [*listed(f"{kept} = [", [n for n, _ in saved], "]"), f"return {', '.join(results)}"]
        else:
            tail = [f"return {', '.join(results)}"]
        what = ", ".join(n for n, _ in self.plan.outputs)
        about = [*textwrap.wrap(self._signature(), 112, subsequent_indent="    "), ""]
        if self.plan.gradients:
            what += f", and what {op.name}_backward needs"
        about += self._option_texts(self.plan.forward)
        about.append("Raises ValueError for tensors that this file was not compiled for.")
        return {
            "head": "\n".join(
                listed(f"def {op.name}_forward(", [*(names[t.name] for t in inputs), *star, *keywords], "):")
            ),
            "summary": f"Return {what}.",
            "about": about,
            "body": [
                *head,
                *self.before(self.plan.forward),
                "",
                *body.lines,
                *tail,
            ],
        }

    def _backward(self, body: Body, saved: Sequence[tuple[str, str]]) -> dict[str, object]:
        names, keep, kept = self.names, self.keywords["keep_saved"], self.keywords["saved"]
        upstream = [b for _, b in self.plan.upstream]
        gradients = [self._shaped(n, b) for n, b in self.plan.gradients]
        head = [
            f"if not {kept}:",
            f'    raise ValueError("{kept} was used up by an earlier call; pass {keep}=True to that one")',
            *listed("(", [n for n, _ in saved], f") = {kept}"),
            f"if not {keep}:",
            f"    {kept}.clear()  # what is not used any more is given back",
        ]
        for output, b in self.plan.upstream:
            t = self.header.tensor(output)
            dtype = str(TORCH[t.dtype])
            own, flat = self._shapes(t)
            if len(self.plan.outputs) > 1:
                head += [
                    f"if {names[b]} is None:",
                    f"    {names[b]} = torch.zeros({own}, dtype={dtype}, device={self.device})",
                ]
            head.append(f'{names[b]} = _given("{b}", {names[b]}, {dtype}, {own}, {flat}).contiguous()')
        wanted = ", ".join(n for n, _ in self.plan.gradients)
        about = [
            *textwrap.wrap(self._gradient_signature(), 112, subsequent_indent="    "),
            "",
            f"{kept} is what {self.op.name}_forward gave."
            + (" A gradient may be None where none comes." if len(self.plan.outputs) > 1 else ""),
            f"{keep}: leave it as it is for another call; else its memory is changed, handed out and given back.",
            *self._option_texts(self.plan.backward),
        ]
        return {
            "head": "\n".join(
                listed(
                    f"def {self.op.name}_backward(",
                    [kept, *(names[b] for b in upstream), "*", f"{keep}=False", *self._options(self.plan.backward)],
                    "):",
                )
            ),
            "summary": f"Return the gradients of {wanted}.",
            "about": about,
            "body": [
                *head, *self.before(self.plan.backward), "", *body.lines,
                f"return {', '.join(gradients)}",
            ],
        }  # fmt: skip

    def _head(self, inputs: Sequence[tiles.Tensor]) -> list[str]:
        """Sizes from shapes, and the checks of the inputs."""
        names = self.names
        sizes = Sizes(replace(self.header, tensors=tuple(inputs)), self.known, self.sizes.dims, names)
        out = sizes.bindings()
        for d, name in self.leading.items():
            t = next(t for t in inputs if t.star and str(t.shape[0]) == d)
            if d in self.known:
                out.append(f'_rank("{t.name}", {names[t.name]}, {len(t.shape)}, star=True)')
            out.append(f"{name} = {names[t.name]}.shape" + (f"[:{1 - len(t.shape)}]" if len(t.shape) > 1 else ""))
            if d in self.known:
                sentence = f"{d}, the leading dimensions of {t.name} together, must be {self.known[d]}"
                out += [f"if {name}.numel() != {self.known[d]}:", f'    raise ValueError("{sentence}")']
        for t in inputs:
            own, flat = self._shapes(t)
            out.append(f'{names[t.name]} = _given("{t.name}", {names[t.name]}, {TORCH[t.dtype]}, {own}, {flat})')
        for condition, sentence in (*sizes.requirements(), *sizes.one_device()):
            out += [f"if {condition}:", f'    raise ValueError("{sentence}")']
        out.append(f"{self.device} = {names[inputs[0].name]}.device")
        return out

    def _shapes(self, t: tiles.Tensor) -> tuple[str, str]:
        """The shape of a tensor as the caller has it, and with its leading dimensions as one."""
        flat = [self.sizes.text(p) for p in t.shape]
        own = list(flat)
        if t.star and str(t.shape[0]) in self.leading:
            own[0] = f"*{self.leading[str(t.shape[0])]}"
        return tuple_text(own), tuple_text(flat)

    def _shaped(self, name: str, buffer: str) -> str:
        """A result as the caller has it."""
        t = self.header.tensor(name)
        own, flat = self._shapes(t)
        text = self.names[buffer]
        return text if own == flat else f"{text}.view({own})"

    def _saved(self, backward: Body) -> list[tuple[str, str]]:
        """What the backward function is handed: (name in the file, name in the plan)."""
        words = set(words_of("\n".join(backward.lines)))
        shapes = [self._shaped(n, b) for n, b in self.plan.gradients]
        shapes += [t for n, _ in self.plan.upstream for t in self._shapes(self.header.tensor(n))]
        words |= set(words_of("\n".join([*shapes, *self.chunk_lines(self.plan.backward)])))
        out = [(self.names[n], n) for n in (*self.plan.saved_inputs, *self.plan.saved)]
        out += [(self.names[n], n) for n in self.scalars if self.names[n] in words]
        out += [(self.names[d], d) for d in self.sizes.dims if self.names[d] in words]
        out += [(name, d) for d, name in self.leading.items() if name in words]
        return [*out, (self.device, "device")]
