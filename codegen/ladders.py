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

# Row kernels: threads a row by what is loaded of it, in bytes; the short ones have two vectors of 16 bytes a thread or
# more, the long ones leave room for two programs. Of 2**26 elements LayerNorm takes 67 us of 768 columns with 32
# threads and 81 with 128, of 1024, 1280 and 1600 columns 67 to 68 with 64 and 71, 79 and 75 with 128, of 2048 68 and
# 67, of 20480 69 with 512 and 105 with 1024, of 24576 73 and 91; RMSNorm of 20480 to 32000 columns 69 to 70 with 512
# and 72 to 83 with 1024; with a residual, of 12288 columns 134 with 512 (137 if it asks ahead). RMSNorm of 4096 to
# 16384 columns takes the same with these, with half and with twice as many.
ROW_THREADS = Ladder((((2 << 10) - 1, 32), ((4 << 10) - 1, 64), (8 << 10, 128), (16 << 10, 256), (64 << 10, 512),
                      (INF, 1024)))  # fmt: skip
# Rows of 32 bits whose exponentials are held in their place: softmax of 25152 columns takes 254 us either way, of 30720
# 255, but of 16388 to 18432 columns NVRTC spills 12 bytes of 1024 threads, to have two programs.
ROW_EXPONENTIAL_THREADS = 512
# Rows of more bytes than this, of kernels for which passes over chunks are better than such a row on 1024 threads, are
# not held on 512 either: softmax of 32000 columns takes 280 us so and 247 in passes.
ROW_WHOLE_BEFORE_PASSES = 32 << 10
# A program of short rows has several: so many threads of them at least, and so many bytes, if it has no more than
# SHORT_ROW_MOST threads. RMSNorm of 128 columns takes 68 us with 2 KB and 84 with 1 KB; of 1600, 73 with two rows on
# 128 threads, which have 64 registers, and 66 with one on 64.
SHORT_ROW_THREADS = 64
SHORT_ROW_MOST = 128
SHORT_ROW_BYTES = 2 << 10
SUM_SHORT_ROW_THREADS = 128
# Registers a thread may fill with tiles, by threads a program. At 1024 threads eight 16-byte vectors (32 registers)
# live together and 16 spill; the largest rung keeps two programs of 256 threads on a multiprocessor.
ROW_REGISTERS = Ladder(((256, 128), (512, 96), (INF, 36)))

# Rows that begin at any address are peeled from so many vectors on, so that each lane of a warp has one: in shorter
# ones the elements around the vectors, which have a thread each, are more than a few.
PEELED_VECTORS = 32

# 32-bit registers a thread may fill with raw tiles before weights wait to be loaded where they are used.
PREFETCH_WORDS = 32
# 32-bit registers of what is loaded ahead of its use of weights that wait: two 16-byte vectors, or all slots where the
# registers hold them. RMSNorm 2048x65536 takes 1.12 where each slot loads its weights, 1.06 one slot ahead and 1.05 two
# slots ahead (1.04 where L1 gives them up last), the first two right behind the reduction; 1.06 in front of its
# barrier, where 8 bytes spill, and 1.6 with all eight slots, most of which spill. Its backward takes 1.36 without, 1.30
# with all four slots in front of the barrier, where other kernels of that shape spill with more than two.
WAITING_WORDS = 8

# Across how many reductions a program of Triton holds weights (`kgen.codegen.late`). LayerNorm, which has two, takes
# 1.64 of 4096x16384 with its weights loaded first and 1.08 with them behind both, 1.37 and 1.10 of 8192x8192, 1.10 and
# 1.03 of 16384x4096; RMSNorm, which has one, 1.032 and 1.034 of 8192x8192, 1.03 and 1.04 of 16384x4096.
HELD_ACROSS = 1

# Beyond this a thread is refused rather than compiled: it has 255 registers, and unrolled code grows with the tile.
REGISTERS_LARGEST = 1024

# Looped kernels: threads by bytes of the row. Passes after the first are to find the row in the 50 MB of L2, beside the
# rows of all other programs that run, two a multiprocessor with 512 threads, one with 1024. Softmax of 2**28 elements
# takes 265 us of 36864 columns with 512 and 366 with 1024, of 40960 260 and 355, of 50304 268 and 331, of 57344 282 and
# 303, of 61440 288 and 289, of 65536 311 and 282, of 128256 357 and 321.
LOOP_THREADS = Ladder(((120 << 10, 512), (INF, 1024)))
LOOP_SMALL = 32 << 10  # bytes of rows that 512 threads take however much a pass computes
LOOP_TWO_REGISTERS = 36  # that a thread fills with tiles, for two programs: 62 in all for softmax, which fills 35
# Where a row is overwritten in place, what is read again and what is stored are the same lines. Cross entropy with its
# gradient in place: 8192x32000 1.08 with 512 threads (1.35 with the whole row on 1024), 8192x50304 1.15 with 512 and
# 1.40 with 1024, 4096x128256 1.40 with 512 and 1.29 with 1024.
LOOP_THREADS_IN_PLACE = Ladder(((128 << 10, 512), (INF, 1024)))
# Vectors a thread takes of each chunk, by threads, fewer where they would not fit the registers. Cross entropy in place
# 8192x50304 takes 1.15 with 8 on 512 threads and 1.29 with 4. On 1024 threads, with 8, a program has its multiprocessor
# to itself: in place, where it has so with 4 too, cross entropy 4096x128256 takes 1.114, with 4 1.188.
LOOP_SLOTS = Ladder(((512, 8), (INF, 4)))
LOOP_SLOTS_IN_PLACE = 8
# ... and the registers that a thread may fill there: eight vectors, and what is reduced beside them. Of cross entropy
# with weights and smoothing nothing spills for sm_90 at 37, at 38 some does. What else they take (`pass_registers`):
# the log-softmax of s * x spills at 35, x / sum(x) in peeled rows at 34.
LOOP_REGISTERS_IN_PLACE = Ladder(((256, 128), (512, 96), (INF, 37)))
PASS_REGISTERS = 4

# Rows that each pass has all of at once, and loads anew: registers that a thread of 1024 may fill with tiles, so that
# two programs fit on a multiprocessor. Softmax 8192x32000, four vectors a thread, takes 1.008 so, 1.019 in chunks of
# half a row; without loads that the caches give up last 1.215 and 1.10, and 1.30 with the row held. Not of peeled rows,
# nor of those that fill all slots of all threads, of which no condition keeps the slots apart: NVRTC takes up to 48
# registers there, where two programs have 32 a thread.
AT_ONCE_REGISTERS = 20
AT_ONCE_THREADS = 1024

# Clusters of CTAs, in which a row that one cannot hold is whole. Rows of more bytes than this: RMSNorm 4096x131072
# takes 1.15 in two CTAs of 1024 threads. Between several reductions nothing of a row is in flight, so that a
# multiprocessor is to have two CTAs, of CLUSTER_THREADS with so many words of the row and registers for tiles each:
# log-softmax of 2**28 elements takes 259 us of 100352 columns in 2 (297 in chunks), 266 of 128256 in 4 (320; 302 in
# 2, which have 125 words), 270 of 151936 in 4 (330); LayerNorm 512x131072 takes 94 in 4 and 117 in chunks, but with
# as many registers, 129, other widths spill, so that it has 8 (113). Where exponentials are stored chunks are better,
# or as good: softmax 128256 takes 307 in 8 and 321 in chunks, 151936 333 in chunks (in f32, where they are as wide as
# the row, 5211x50304 takes 258 in 2 CTAs and 298); and so they are in place: cross entropy 4096x128256 takes 1.28,
# and 1.39 in four CTAs.
CLUSTER_BYTES = 128 << 10
CLUSTER_THREADS = 256
CLUSTER_ROW_WORDS = 99
CLUSTER_REGISTERS = 101
CLUSTER_BLOCKS = 2

# Stores of passes over chunks are streamed past the caches; in place, where a row has more bytes than this. Of cross
# entropy in place, 8192x32000 takes 1.19 streamed and 1.09 not, 8192x50304 1.11 and 1.16, 4096x128256 1.27 and 1.28;
# softmax 8192x32000 1.07 and 1.08.
STREAMED_IN_PLACE = 64 << 10

# The compute capability from which on a load may say what L2 gives up last.
POLICIES_SINCE = 80
# Rows in chunks that a later pass reads again, marked as what L1 and L2 give up last (`kgen.codegen.cuda.caching`).
# Softmax 8192x32000 takes 1.026 (1.085 without marks; 1.046 and 1.07 with L1 or L2 alone; 1.033 with the last pass
# marked too), cross entropy in place 8192x32000 1.030 (1.080), 8192x50304 1.080 (1.093). It does harm where the rows of
# all programs on a multiprocessor are more than L1 has room for: cross entropy 4096x128256 takes 1.140 (1.114). Shared
# memory takes its part of L1, for the slots of reductions the smallest that there is.
L1_SHARED = 8 << 10
# Registers that marked loads take more at least, where a thread has few left: in f32, cross entropy in place 8192x50304
# with a softcap has 57 without and spills with them.
STAYING_REGISTERS = 4

# Loads that L2 is to give up last, as programs far on read them again (`kgen.codegen.kept`). RoPE in bf16 of 4 x 4096
# tokens with 40 heads of 128 reads its 2 MB of cosines and sines from memory for every one of the 4, and takes 1.066
# without, 1.049 with them kept; its loads marked as those to give up first, 1.095. What harm is done to a table that L2
# cannot hold has not been measured, so what is kept must be small beside what streams by: half of it, of which every
# element passes again; of a table that is looked up in, which may be of any size, an eighth a row.
KEPT_SHARE = 2
KEPT_GATHERED_SHARE = 8
# Bytes, where sizes are known: a sweep up to this stays in an L2 of 50 MB anyway, and a table beyond it will not.
KEPT_BEYOND = 8 << 20
KEPT_LARGEST = 24 << 20

# The most threads and vectors of a looped kernel with sums, which go through memory a chunk at a time: more spill.
LOOP_SUM_THREADS = 512
LOOP_SUM_SLOTS = 2

# Sums over programs: threads a row, and threads a multiprocessor. Of the backward of a normalisation, 16384x4096 takes
# 0.126 ms with 512 threads and two programs a multiprocessor, 8192x8192 0.128 ms with 1024 threads and one, 16384x1024
# 0.047 ms with 128 threads and eight: a 16-byte vector a thread, as the sums of its elements are held unpacked.
SUM_ROW_THREADS = Ladder(((1 << 10, 64), (2 << 10, 128), (4 << 10, 256), (8 << 10, 512), (INF, 1024)))
SUM_THREADS = 1024
# The least part of a row's slots that are to have elements. Of threads by powers of two, a row of 5120 bf16 values
# leaves 1024 with a vector of 8 each idle for three parts of eight, 512 with three of 4 for one of six: the backward of
# RMSNorm takes 0.147 ms with the former and 0.114 with the latter, that of LayerNorm 3072 0.160 and 0.122.
SUM_BUSY = 0.8
# Rows too wide for a CTA, in clusters: the threads of each CTA, in order of preference, and the registers that one of
# them may fill with tiles and sums. Four 16-byte vectors a thread of each tensor, and two CTAs of 256 threads on a
# multiprocessor, of which one works while the other waits for its cluster: the backward of RMSNorm 2048x65536 takes
# 1.36 in 8 CTAs of 256 threads, 1.40 in 4 of 512, 1.44 in 8 of 512 (with two vectors), 1.57 in 4 of 1024 (likewise).
SUM_CLUSTER_THREADS = (256, 512, 1024)
SUM_CLUSTER_REGISTERS = Ladder(((512, 72), (INF, 36)))
SUM_CLUSTER_BLOCKS = 2
# How many programs a multiprocessor further on is the row that a program asks for, by bytes of its own. With 1, RMSNorm
# takes 1.01 at 16384x4096 (1.04 without), 1.02 at 8192x8192 (1.04) and 1.03 at 4096x16384 (1.05), LayerNorm 16384x4096
# 1.02 (1.04), RoPE of 4x4096 tokens with 40 heads of 128 1.030 (1.051; 1.046 if only keys are asked for). With 2, that
# takes 1.030 too, with 4 1.053, with 8 1.223. Larger rows push each other out of L2: 2048x65536 takes 1.63 (1.13),
# softmax 8192x32000 1.31 (1.09). As what is given up last, RMSNorm takes 1.00 of 16384x4096 (1.016 if it is not) and
# 1.006 of 4096x16384 (1.023), LayerNorm 1.005 of 16384x4096 (1.023).
ROW_AHEAD = Ladder(((32 << 10, 1), (INF, 0)))
# How many rows ahead a persistent program asks for what it will read. Of the backward of RMSNorm, 16384x4096 takes 1.24
# without, 1.10 with one row and 1.17 with two; 8192x8192 1.35, 1.18 and 1.21; 16384x1024 1.47, 1.39 and 1.48.
SUM_AHEAD = 1
# About how many 32-bit registers a thread needs beside its tiles.
OTHER_REGISTERS = 28
# Rows of sums have more, the more their tiles fill: the backward of LayerNorm has 124 registers of 5120 columns on 256
# threads, of which 86 are for tiles. It reduces a row twice, and takes 1.43 times as long on 512 threads, of which a
# multiprocessor has the registers for one program, as on 256, of which it has two.
SUM_MORE_REGISTERS = 1.15
# About how many it has beside the elements of a row at least: a normalisation of the sum of two rows in f32, of 16384
# columns, holds 16 in 32 registers.
FEWEST_REGISTERS = 16
# Adding up the shares: small programs, so that the few thousand elements of a target reach many multiprocessors.
FINISH_THREADS = 64
# Where blocks of 32 columns are proved, 16 threads share out the rows of a column: latency, not bandwidth, counts.
FINISH_BLOCK_THREADS = 512
# Triton: rows a thread. No more rows together than there are: 16 shares of 65536 columns take 12 us in blocks of 64.
TRITON_FINISH_ROWS = 4

# ---- Triton --------------------------------------------------------------------------------------------------------

# Elements of one program's block: warps to hold them, the largest block that is held whole, and the chunk of rows that
# are not, with its warps. 8192x32000 in two chunks of 16K on 16 warps against one block: softmax 1.14 and 1.27,
# RMSNorm 1.04 and 1.08, cross entropy in place 1.34 and 1.58. Smaller chunks let more programs run, whose rows then do
# not stay in L2 between the passes: softmax 8192x50304 1.39 with 16K, 1.51 with 8K on 8 warps, 1.55 with 4K. Wide rows
# have larger chunks, or the same, on 32 warps: softmax of 2**28 elements takes 319 us of 128256 columns in chunks of
# 32K (342 with 16K on 16), 352 of 202048 (372), 333 of 100352 (332), log-softmax 308 of 128256 (341); LayerNorm
# 512x131072 108 in 16K on 32 (132).
TRITON_WARPS = Ladder(((2 << 10, 4), (16 << 10, 8), (INF, 16)))
# Blocks of rows that fill less than this part of them have half the warps, if a thread then has no more places than
# this: idle threads wait for the others. RMSNorm of 2**26 elements takes 67 us of 2560 columns on 4 warps and 75 on 8,
# of 2880 67 and 72, of 3584 67 and 68; LayerNorm of 1280 columns 69 on 2 and 81 on 4, of 1600 69 and 74, of 768, two
# rows a program, 68 and 74. RMSNorm of 5120 columns is no faster on 4 than on 8.
TRITON_FILLED = 0.9
TRITON_PADDED_PLACES = 32
TRITON_PADDED_BEYOND = 1 << 10  # elements of the block of a row
TRITON_WHOLE = 16 << 10
TRITON_WIDE = 192 << 10  # bytes of a row
TRITON_CHUNK = Ladder(((TRITON_WIDE, 16 << 10), (INF, 32 << 10)))
# Rows of which nothing is stored and that one pass is enough for, so that there is nothing to find again: the largest
# that are held whole, and the chunk of others with its warps. What is reduced along rows in the backward of RMSNorm,
# 2048x65536, takes 132 us in chunks of 2K on 8 warps, one vector a thread, 143 us in 4K, 137 us in 8K, 159 us in 16K on
# 16 warps.
TRITON_ONCE = 8 << 10
TRITON_ONCE_CHUNK = 2 << 10
TRITON_ONCE_WARPS = 8
TRITON_LOOP_WARPS = Ladder(((2 << 10, 4), (4 << 10, 8), (INF, 16)))
# In place: warps by bytes of the row, so that the rows of all programs stay in L2, and elements a thread of a chunk.
# Cross entropy in place, in bf16: 8192x32000 takes 1.09 with 8 warps, 8192x50304 311 us with 16 and 314 with 8,
# 4096x128256 1.17 with 32 and 1.28 with 16. In f32: 8000x16384 262 us with 8 (334 with the row whole), 8192x32000 508
# with 16 and 642 with 8, 5211x50304 607 and 700; 1306x100352 325 with 32 and 335 with 16, 2043x128256 646 and 707.
TRITON_WARPS_IN_PLACE = Ladder(((64 << 10, 8), (200 << 10, 16), (INF, 32)))
TRITON_IN_PLACE_EACH = 32
# Elements a thread of a chunk whose elements, of 16 bits, are loaded one by one, and warps where a row is not
# overwritten. Softmax of 33001 columns takes 428 us with 8 on 32 warps, of 50257 419 (457 with 16 on 8 warps), cross
# entropy in place of 50257 440 with 8 on 16 warps and 489 with 32 on 8.
TRITON_ONE_BY_ONE_EACH = 8
TRITON_ONE_BY_ONE_WARPS = 32
TRITON_WHOLE_IN_PLACE = 32 << 10  # bytes of the row
# Of a block of TRITON_LARGE elements on 16 warps, what a thread can hold: tiles an element, a value of 32 bits
# counting 1, a load of 16 bits 1/2 (it stays packed) and one of 32 bits 3/2 (it is there twice while it is masked). At
# 2.5 (three loads in bf16 and a value) nothing spills for sm_90; at 3 (two loads in f32) the norms do.
TRITON_TILES = 2.5
TRITON_LARGE = 32 << 10
TRITON_LARGE_WARPS = 16
# Registers for the address and the mask of an element that is not part of a vector. With 3 no kernel of one or three
# inputs spills at widths like 28001 and 50257, with 2 one of three inputs does.
TRITON_ADDRESS = 3.0
# Registers for the exact quotient of an element, where a thread of 32 warps has 64. So counted, no kernel of one input
# and 2.5 spills for sm_90; of two inputs a sum of them does, and without this a softmax that is compared with a label.
TRITON_QUOTIENT = 0.5
# Rows that are held in chunks, as memory has them (`codegen/hold.py`). Of bf16, as multiples of a copy and in brackets
# without: RMSNorm takes 0.99 of 8192x8192 (1.00), 1.00 of 4096x16384 (1.03), 0.98 of 8192x20480 (1.00), 1.01 of
# 2048x32768 (1.08), 0.99 of 4096x40000 (1.08), 1.04 of 2048x65536 (1.43); LayerNorm 1.00 of 16384x4096 (1.04), 1.01 of
# 8192x8192 (1.09), 1.04 of 4096x16384 (1.09), 1.01 of 8192x32000 (1.13), 1.25 of 2048x65536 (1.42); softmax 0.99 of
# 4096x16384 (1.09), 1.00 of 8192x32000 (1.03), 1.02 of 4096x33000 (1.31), 1.00 of 4096x40960 (1.16). In place a row is
# overwritten where it is read again: cross entropy of 8192x32000, 8192x50304 and 4096x128256 is better off with more
# programs than with its row held.
# Rows of more bytes than this, by reductions. RMSNorm of 16384x4096 takes 0.97 whole and 0.98 held, 0.95 and 0.96 at
# 5120 and 6144 columns; LayerNorm of 32768x2048 0.99 and 1.00, of 3072 columns 1.16 and 1.00.
TRITON_HELD_BEYOND = Ladder(((1, 12 << 10), (INF, 4 << 10)))
# About how many words of its row a thread has at most, where it can be, and where programs that wait at more than one
# reduction are better small: RMSNorm of 4096x16384 takes 1.00 on 512 threads and 1.02 on 256, LayerNorm 1.06 and 1.04,
# softmax 1.11 and 0.99.
TRITON_HELD_ROW = 24
TRITON_HELD_ROW_MOST = 32
# Elements a thread of a chunk, in order of preference, and how many chunks there are at least: their loads are under
# way together. RMSNorm 2048x32768 takes 1.01 with 16 and 1.03 with 8; 8192x8192 0.99 in four chunks of 8 a thread, 1.01
# in two of 16.
TRITON_HELD_EACH = (16, 8, 4)
TRITON_HELD_CHUNKS = 3
# Threads of a program that has a multiprocessor to itself. Rows of up to so many words are then better off where
# several programs run at a time and find them in the caches.
TRITON_HELD_ALONE = 1024
TRITON_HELD_ALONE_BEYOND = 16 << 10
# Registers a thread, of 64, by threads: for the row at most (RMSNorm of 2048x49152 takes 1.05 with 48 of them and 1.02
# on twice the threads), and with what a chunk needs beside it; for each reduction behind the first, for a function of a
# row's values (a logarithm), and for the mask of an element that is computed. So counted, norms and softmaxes of
# bf16, f16 and f32 of 16 to 56 words a thread spill nothing for sm_90.
TRITON_HELD_MOST = 44
TRITON_HELD_WORDS = Ladder(((512, 56), (INF, 53)))
TRITON_HELD_REDUCTION = 12
TRITON_HELD_FUNCTION = 5
TRITON_HELD_MASK = 1.25
# Rows that are loaded element by element: registers for them and what is beside, and for an address.
TRITON_HELD_ELEMENTS = 60
TRITON_HELD_ADDRESS = 1.0
# With sums, which are held beside the row from the first row to the last: the backward of RMSNorm takes 1.39 at
# 8192x8192 with the row whole and 2.29 in chunks, beside each of which the sums are loaded.
TRITON_SUM_WHOLE = 32 << 10
# Larger rows, on warps that have a multiprocessor to themselves, if the sums and the row as it lies in memory take so
# many words of an element of a block of TRITON_SUM_LARGE, and all else is made again (`codegen/again.py`). The backward
# of RMSNorm in bf16 (2 words) takes 1.18 at 4096x16384 so, 1.48 with everything held, 1.27 with the loads of two rows
# in flight, 1.18 on 32 warps; by elements 1.70. For sm_90 nothing spills at 2 words; at 3, in f32 or with two sums, it
# does, and where loads are no vectors. 4096x32768 takes 2.6 to 6.5 in all ways to hold it, 2048x65536 1.74 by elements
# (8 warps and 2048 columns a program, 16 shares of the rows; twice as many are no better) and 2.29 in chunks.
TRITON_SUM_WARPS = 16
TRITON_SUM_TILES = 2.5
TRITON_SUM_LARGE = 16 << 10
TRITON_SUM_CHUNK = 4 << 10  # with sums, which are loaded beside each chunk: 8K spills at 16 warps
# Short rows of sums: a program has about this many elements of them, 8 a thread of 4 warps, since the sums of several
# rows are held for each of them: the backward of RMSNorm takes 1.11 times as long at 1024 columns in programs of 2K.
TRITON_SUM_SHORT_ROWS = 1 << 10
# Warps of rows with sums, by elements of the block. Those that hold rows whole with 32 elements a thread or more have
# no registers left for a second program.
TRITON_SUM_ROW_WARPS = Ladder(((1 << 10, 4), (4 << 10, 8), (INF, 16)))
# Registers of a thread beside what it has of its row and its sums, and those more where rows are staged. For sm_90 the
# backwards of norms take, with 8 elements a thread, 56 and 57 (RMSNorm bf16; estimated 56), 64 and 72 staged
# (LayerNorm; 64, 72), 64 (after a residual; 64); with 16, 93 and 88 staged (RMSNorm 4096; 88, 96), 111 and 108
# (LayerNorm; 104, 112), 97 and 92 (after a residual; 96, 104).
TRITON_OTHER_REGISTERS = 24
TRITON_STAGE_REGISTERS = 8
# Those for the exact quotient of an element, as all that a thread has are computed side by side: of 16 elements of two
# tensors in bf16 a thread takes 53 with `d * (1 + x * x)` reduced, 76 with `d / (1 + x * x)`, and with one more 108.
TRITON_SUM_QUOTIENT = 1.0
# Bytes of rows that a multiprocessor is to have in flight, where one copies with 29 KB: programs meet at each row, and
# the loads of none of them are under way all the time. As a share of the speed of a copy, backwards of norms that
# started as many programs as fit, or twice as many, ran at 0.69 with 24 KB (RMSNorm 3072), 0.75 with 40, 0.81 with 48,
# 0.86 with 56 (RMSNorm 5120 to 7168, and after a residual), 0.91 with 64 (RMSNorm 8192), 0.98 with 64 (2048 and 4096
# after a residual), and no faster with 80 to 112. Started twice as often as they fit, 8192 columns take 1.05 times as
# long. Where a program has its multiprocessor to itself it needs stages whatever it holds: RMSNorm 8192 takes 1.40
# without. With all of this the backward of RMSNorm takes, of 2**26 elements, 1.20 at 1024 columns (1.26 with twice as
# many programs and no stages up to 4096 columns, three beyond), 1.14 at 2048 (1.22), 1.08 at 3072 (1.42), 1.10 at 4096
# (1.31), 1.18 at 5120 (1.29), 1.10 at 6144 (1.24), 1.09 at 7168 (1.16) and 1.10 at 8192 (1.15).
TRITON_SUM_FLIGHT = 64 << 10
TRITON_SUM_MOST_STAGES = 5
TRITON_STAGES_SINCE = 80  # the compute capability that copies to shared memory without registers
# Shared memory of a program beside its stages, what reductions pass on: less than 100 bytes for sm_90.
TRITON_SCRATCH = 1 << 10
# Loops over chunks of a row do not gain by stages: softmax 8192x32000 takes 1.16 with 1, 1.29 with 3, 1.48 with 2.
TRITON_STAGES = 1
TRITON_STAGED_BYTES = 96 << 10  # of shared memory, so that two programs fit on a multiprocessor
TRITON_LARGEST = 1 << 20  # the most elements that Triton allows in a block
# Short rows are packed until a program has about this many elements; a flat kernel takes 8 a thread of 4 warps.
TRITON_SHORT_ROWS = 2 << 10
# ... or about this many words of values of a row: 96 a thread. Cross entropy of one class has 40 a row, its backward 15
# in each of the 32 threads that share a row of 33 classes, and spills with 32 rows.
TRITON_ROW_WORDS = 128 * 96
TRITON_FLAT_ROWS = 1 << 10
TRITON_FLAT_WARPS = 4
