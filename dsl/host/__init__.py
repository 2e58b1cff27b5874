"""Host programs: `op` items, which call kernels and the library's matrix product on whole tensors.

`ast` is what was written, `check` finds every mistake and gives it meaning, `ir` is that meaning.
"""
