"""Names that a user's name must not take in a generated Triton module."""

from __future__ import annotations

import builtins
import keyword

# The helpers of `templates/triton/helpers.py.j2`, in the order in which a file has them: behind those that they call.
HELPERS = ("_maximum", "_minimum", "_prod", "_argmax", "_argmin", "_floordiv", "_mod", "_sign", "_exp2", "_exp", "_erf",
           "_packed")  # fmt: skip

# Python keywords and builtins too: Triton resolves a call to `range`, `float`, ... by name.
RESERVED: frozenset[str] = frozenset(
    (*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *HELPERS, "triton", "tl", "libdevice")
)
