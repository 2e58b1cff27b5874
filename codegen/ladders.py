"""Default schedules as data: `(limit, value)` ladders, each with the measurement that set it.

A ladder gives the value of the first rung whose limit is not exceeded. Figures are medians on one H200 in bf16, as a
share of the time of a copy of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

INF = 1 << 62


@dataclass(frozen=True)
class Ladder:
    """Rungs in rising order of limit; the last limit is `INF`."""

    rungs: tuple[tuple[int, int], ...]

    def __getitem__(self, key: int) -> int:
        """The value of the first rung with `key <= limit`."""
        return next(value for limit, value in self.rungs if key <= limit)


# ---- CUDA ----------------------------------------------------------------------------------------------------------

# Flat kernels: threads a program. 8192 x 14336 with two inputs runs at the speed of a copy with 256.
FLAT_THREADS = 256
# Vectors a thread takes by bytes that it loads in one: 16 bytes in flight a thread do not cover the latency of memory
# (29 KB a multiprocessor are needed, 2048 threads of 16 bytes are 32 KB), so a single narrow input takes two.
FLAT_SLOTS = Ladder(((16, 2), (INF, 1)))

# Flat kernels that are left at once where there is nothing to do: programs are then all that costs, so they are larger.
LEAVING_SLOTS = 8

# Row kernels: threads a row by bytes of the widest row. 16384x1024 to 4096x16384 run at 97-99 % with these; one warp a
# row at 8 KB did not pay.
ROW_THREADS = Ladder(((2 << 10, 32), (8 << 10, 128), (16 << 10, 256), (32 << 10, 512), (INF, 1024)))
# Threads a program where rows are so short that several share one: 4 warps, a row each or less.
SHORT_ROW_THREADS = 128
# Registers a thread may fill with tiles, by threads a program. At 1024 threads eight 16-byte vectors (32 registers)
# live together and 16 spill; the largest rung keeps two programs of 256 threads on a multiprocessor.
ROW_REGISTERS = Ladder(((256, 128), (512, 96), (INF, 36)))

# Beyond this a thread is refused rather than compiled: it has 255 registers, and unrolled code grows with the tile.
REGISTERS_LARGEST = 1024

# Looped kernels: threads by bytes of the row. Passes after the first are to find the row in the 50 MB of L2, beside the
# rows of all other programs that run, so fewer and larger programs are better where much is stored beside it: softmax
# 8192x50304 takes 1.27 with 1024 threads and 1.48 with 512, 4096x128256 1.49 and 1.52.
LOOP_THREADS = Ladder(((64 << 10, 512), (INF, 1024)))
# Where a row is overwritten in place, what is read again and what is stored are the same lines. Cross entropy with its
# gradient in place: 8192x32000 1.08 with 512 threads (1.35 with the whole row on 1024), 8192x50304 1.35 with 512 and
# 1.42 with 1024, 4096x128256 1.53 with 512 and 1.32 with 1024.
LOOP_THREADS_IN_PLACE = Ladder(((128 << 10, 512), (INF, 1024)))
# Vectors a thread takes of each chunk, fewer where they would not fit the registers.
LOOP_SLOTS = 4

# The most threads and vectors of a looped kernel with sums, which go through memory a chunk at a time: more spill.
LOOP_SUM_THREADS = 512
LOOP_SUM_SLOTS = 2

# Sums over programs: threads a row, and threads a multiprocessor. Of the backward of a normalisation, 16384x4096 takes
# 0.126 ms with 512 threads and two programs a multiprocessor, 8192x8192 0.128 ms with 1024 threads and one, 16384x1024
# 0.047 ms with 128 threads and eight: a 16-byte vector a thread, as the sums of its elements are held unpacked.
SUM_ROW_THREADS = Ladder(((1 << 10, 64), (2 << 10, 128), (4 << 10, 256), (8 << 10, 512), (INF, 1024)))
SUM_THREADS = 1024
# 32-bit registers of a multiprocessor, and about how many a thread needs beside its tiles.
REGISTER_FILE = 64 << 10
OTHER_REGISTERS = 28
# Adding up the shares: small programs, so that the few thousand elements of a target reach many multiprocessors.
FINISH_THREADS = 64
# Where blocks of 32 columns are proved, 16 threads share out the rows of a column: latency, not bandwidth, counts.
FINISH_BLOCK_THREADS = 512
TRITON_FINISH_ROWS = 4

# ---- Triton --------------------------------------------------------------------------------------------------------

# Elements of one program's block: warps to hold them, the largest block that is held whole, and the chunk of rows that
# are not, with its warps. 8192x32000 in two chunks of 16K on 16 warps against one block: softmax 1.14 and 1.27,
# RMSNorm 1.04 and 1.08, cross entropy in place 1.34 and 1.58. Smaller chunks let more programs run, whose rows then do
# not stay in L2 between the passes: softmax 8192x50304 1.39 with 16K, 1.51 with 8K on 8 warps, 1.55 with 4K.
TRITON_WARPS = Ladder(((2 << 10, 4), (16 << 10, 8), (INF, 16)))
TRITON_WHOLE = 16 << 10
TRITON_CHUNK = 16 << 10
TRITON_LOOP_WARPS = Ladder(((2 << 10, 4), (4 << 10, 8), (INF, 16)))
# Of a block of TRITON_LARGE elements on 16 warps, what a thread can hold: tiles an element, a value of 32 bits
# counting 1, a load of 16 bits 1/2 (it stays packed) and one of 32 bits 3/2 (it is there twice while it is masked). At
# 2.5 (three loads in bf16 and a value) nothing spills for sm_90; at 3 (two loads in f32) the norms do.
TRITON_TILES = 2.5
TRITON_LARGE = 32 << 10
# Registers for the address and the mask of an element that is not part of a vector. With 3 no kernel of one or three
# inputs spills at widths like 28001 and 50257, with 2 one of three inputs does.
TRITON_ADDRESS = 3.0
# With sums, which are held beside the row from the first row to the last: the backward of RMSNorm takes 1.39 at
# 8192x8192 with the row whole and 2.29 in chunks, beside each of which the sums are loaded.
TRITON_SUM_WHOLE = 32 << 10
TRITON_SUM_CHUNK = 4 << 10  # with sums, which are loaded beside each chunk: 8K spills at 16 warps
TRITON_LARGEST = 1 << 20  # the most elements that Triton allows in a block
# Short rows are packed until a program has about this many elements; a flat kernel takes 8 a thread of 4 warps.
TRITON_SHORT_ROWS = 2 << 10
# ... or about this many words of values of a row: 96 a thread. Cross entropy of one class has 40 a row.
TRITON_ROW_WORDS = 128 * 96
TRITON_FLAT_ROWS = 1 << 10
TRITON_FLAT_WARPS = 4
