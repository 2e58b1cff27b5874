"""`kgen bench`: the shipped ops timed beside a copy of the same bytes, torch and other libraries.

`catalog` lists what is timed, with the bars; `norms`, `gated`, `rotary`, `losses` make the operands, calls and float64
checks of one op each; `peers` has what runs beside ours. `measure` runs one case, `run` all of them; `result` is the
file that is left, `report`, `compare` and `pictures` read it. `timing` times calls of any kind.
"""
