"""Names: how is a user's name spelled in a backend's language, such that no two names meet?

A name stays as it is unless the backend reserves it, or it starts or ends with an underscore: C keeps names with a
leading one for itself (`_Bool`, `__thread`), and a trailing one is the mark of a changed name (`int` becomes `int_`).
The generator's own temporaries come from `fresh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from kgen.dsl import ir


def fresh(hint: str, taken: set[str]) -> str:
    """`hint`, or `hint_2`, `hint_3`, ... where that is taken; the name is taken then."""
    name, n = hint, 1
    while name in taken:
        n += 1
        name = f"{hint}_{n}"
    taken.add(name)
    return name


def taken_names(kernel: ir.Kernel) -> set[str]:
    """Every name of `kernel`, for `fresh`."""
    return {
        *(t.name for t in kernel.tensors), *(p.name for p in kernel.scalars), *kernel.dims,
        *(a.name for a in kernel.axes), *(n for n, _ in kernel.consts),
        *(s.name for s in kernel.body if isinstance(s, ir.Let)),
    }  # fmt: skip


class Names:
    """An injective map from the names of one kernel to identifiers of a backend; the same for the same set of names."""

    def __init__(self, user: Iterable[str], reserved: frozenset[str]) -> None:
        """`user`: every name of the kernel. `reserved`: keywords, macros, intrinsics and helpers of the backend."""
        names = frozenset(user)
        self._reserved = reserved
        self._spelling = {n: n for n in names if self._plain(n)}
        self._taken = set(self._spelling)
        for name in sorted(names - self._taken):
            self._spelling[name] = self._take(f"{name.strip('_') or 'v'}_", numbered="{}{}_")
        # A temporary must not look like a user's name that was changed.
        self._taken |= names

    def __getitem__(self, name: str) -> str:
        """The identifier of `name`. Raises KeyError for a name that was not among the user's."""
        return self._spelling[name]

    def fresh(self, hint: str) -> str:
        """A new identifier for a temporary: `hint`, or `hint_2`, `hint_3`, ... where that is taken."""
        return self._take(hint.lstrip("_") or "v", numbered="{}_{}")

    @contextmanager
    def spelled(self, other: Mapping[str, str]) -> Iterator[None]:
        """Inside the block, the user's names in `other` are the identifiers given there."""
        before = dict(self._spelling)
        self._spelling |= other
        try:
            yield
        finally:
            self._spelling = before

    def _plain(self, name: str) -> bool:
        return name not in self._reserved and not name.startswith("_") and not name.endswith("_")

    def _take(self, wish: str, numbered: str) -> str:
        if wish[0].isdigit():
            wish = f"v{wish}"
        candidate, n = wish, 1
        while candidate in self._taken or candidate in self._reserved:
            n += 1
            candidate = numbered.format(wish, n)
        self._taken.add(candidate)
        return candidate
