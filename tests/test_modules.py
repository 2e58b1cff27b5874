"""Files and imports: where they are looked for, what they bring, and what is refused."""

import pytest

from kgen.dsl.codes import EXAMPLE_FILES, IMPORT_CODES
from kgen.dsl.diagnostics import DslError
from kgen.dsl.errors import KgenError
from kgen.dsl.format import format_function
from kgen.dsl.modules import load, load_source
from kgen.dsl.source import SourceFile


def write(folder, **files):
    """Write `name.kdsl` files (`__` in a name is a folder)."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".kdsl")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / "main.kdsl"


def functions(loaded):
    """Each function of a loaded module, as text."""
    return [format_function(f).strip() for f in loaded.module.functions]


@pytest.mark.parametrize("code", IMPORT_CODES, ids=lambda c: c.code)
def test_example_of_each_code(code, tmp_path):
    for name, text in EXAMPLE_FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    path = write(tmp_path, main=code.wrong)
    with pytest.raises(DslError) as caught:
        load(path)
    assert [d.code for d in caught.value.diagnostics] == [code.code]
    load(write(tmp_path, main=code.right))


def test_imports_bring_what_they_call_without_taking_names(tmp_path):
    path = write(
        tmp_path,
        main="from a import f, g\nfrom sub.b import s\nfn helper(x) = 7 * x\n"
        "kernel k(x: inout T[N]):\n    x[0] = f(1)\n",
        a="from sub.b import s\nfn unused(x) = x\nfn helper(x) = 2 * x\nfn g(x) = helper(x)\n"
        "fn f(x) = g(helper(x)) + s(x)\n",
        sub__b="fn helper(x) = 3 * x\nfn s(x) = helper(x) + exp(x)\n",
    )
    loaded = load(path)
    assert functions(loaded) == [
        "fn a.helper(x) = 2 * x",
        "fn g(x) = a.helper(x)",
        "fn sub.b.helper(x) = 3 * x",
        "fn s(x) = sub.b.helper(x) + exp(x)",
        "fn f(x) = g(a.helper(x)) + s(x)",
        "fn helper(x) = 7 * x",
    ]
    assert [k.name for k in loaded.module.kernels] == ["k"]
    # A mistake in an imported function is shown in its own file.
    assert loaded.module.functions[0].span.source.path == str(tmp_path / "a.kdsl")
    assert [s.path for s in loaded.sources] == [str(path), str(tmp_path / "a.kdsl"), str(tmp_path / "sub" / "b.kdsl")]


def test_recursive_functions_are_left_to_the_checker(tmp_path):
    path = write(tmp_path, main="from a import f\nfn r(x) = r(x)\n", a="fn f(x) = g(x)\nfn g(x) = f(x)\n")
    assert functions(load(path)) == ["fn a.g(x) = f(x)", "fn f(x) = a.g(x)", "fn r(x) = r(x)"]


def test_files_beside_come_before_the_search_folders(tmp_path):
    (tmp_path / "ops").mkdir()
    write(tmp_path / "ops", a="fn f(x) = 2 * x\n", b="fn g(x) = 3 * x\n")
    path = write(tmp_path, main="from a import f\nfrom b import g\n", a="fn f(x) = x\n")
    assert functions(load(path, search=[tmp_path / "ops"])) == ["fn f(x) = x", "fn g(x) = 3 * x"]
    text = SourceFile(str(tmp_path / "not_written.kdsl"), "from a import f\n")
    assert functions(load_source(text)) == ["fn f(x) = x"]


def test_the_same_name_in_two_folders(tmp_path):
    path = write(
        tmp_path,
        main="from a import f\nfrom sub.b import g\n",
        a="fn h(x) = x\nfn f(x) = h(x)\n",
        sub__b="from a import f\nfn g(x) = f(x)\n",
        sub__a="fn h(x) = 2 * x\nfn f(x) = h(x)\n",
    )
    assert functions(load(path)) == [
        "fn a.h(x) = x",
        "fn f(x) = a.h(x)",
        "fn a_2.h(x) = 2 * x",
        "fn a_2.f(x) = a_2.h(x)",
        "fn g(x) = a_2.f(x)",
    ]


def test_longer_cycles_and_several_mistakes_at_once(tmp_path):
    path = write(
        tmp_path,
        main="from a import f\nfrom none import x\nfn g(a) = = 2\n",
        a="from main import g\nfn f(x) = x y\n",
    )
    with pytest.raises(DslError) as caught:
        load(path)
    found = [(d.code, d.span.source.path.rsplit("/")[-1], d.span.line) for d in caught.value.diagnostics]
    assert found == [
        ("K0153", "a.kdsl", 1),
        ("K0110", "a.kdsl", 2),
        ("K0151", "main.kdsl", 2),
        ("K0110", "main.kdsl", 3),
    ]
    assert "main.kdsl -> a.kdsl -> main.kdsl" in str(caught.value)


def test_an_imported_kernel_keeps_to_the_names_of_its_file(tmp_path):
    kernel = "fn f(a) = 2 * a\nkernel k(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = f(x[n])\n"
    path = write(tmp_path, main="from a import k\nfn f(a) = a\n", a=kernel)
    module = load(path).module
    (imported,) = module.imported
    assert imported.name == "k" and not module.kernels
    (function,) = imported.module.functions
    assert function.name == "f" and function.span.source.path.endswith("a.kdsl")
    for text in ("from a import k\nfrom a import k\n", "from a import k\n" + kernel.replace("fn f(a) = 2 * a\n", "")):
        with pytest.raises(DslError, match=r"\[K0154\]"):
            load(write(tmp_path, main=text.replace("f(x[n])", "x[n]")))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(KgenError, match="cannot read"):
        load(tmp_path / "missing.kdsl")
    with pytest.raises(KgenError, match="cannot read"):
        load(tmp_path)
    with pytest.raises(KgenError, match="cannot read"):
        load("nul\0byte.kdsl")
    for data in ("fn f(a) = a".encode("utf-16"), b"fn f(a) = a\r\n# caf\xe9\n"):
        with pytest.raises(DslError, match="not UTF-8") as caught:
            load(write(tmp_path, main=data))
    assert (caught.value.diagnostics[0].span.line, caught.value.diagnostics[0].span.column) == (2, 6)


def test_content_hash_follows_the_text_and_not_the_place(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
    files = {"main": "from x import f\n\nfn g(a) = f(a)\n", "x": "fn f(a) = h(a)\nfn h(a) = a\n"}
    first = load(write(a, **files)).content_hash
    assert load(write(b, **{k: v.replace("\n", "\r\n") for k, v in files.items()})).content_hash == first
    changed = files["x"].replace("fn h(a) = a", "fn h(a) = 2 * a")
    assert load(write(b, main=files["main"], x=changed)).content_hash != first
