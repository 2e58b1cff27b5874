// The CUDA language on a CPU: the header that takes the place of kgen's device primitives.
//
// A generated kernel is one text. On a GPU, NVRTC compiles `device primitives + helpers + kernel`; on a CPU, g++ compiles
// `this header + helpers + kernel`, so what runs is the same helpers and the same kernel, letter for letter.
//
// CONTRACT with the device primitives. Whatever they define, this header defines with the same name and meaning:
//
//   float          cvt_f32_f16(unsigned short bits)         binary16 to binary32, exact
//   unsigned short cvt_f16_f32(float x)                     binary32 to binary16, round to nearest even, NaN is 0x7fff
//   unsigned short cvt_bf16_f32(float x)                    binary32 to bfloat16, round to nearest even, NaN is 0x7fff
//   unsigned short cvt_f16_f64(double x)                    binary64 to binary16, rounded once, NaN is 0x7fff
//   unsigned short cvt_bf16_f64(double x)                   binary64 to bfloat16, rounded once, NaN is 0x7fff
//   unsigned       cvt_f16x2_f32(float hi, float lo)        two binary16, `hi` in the upper 16 bits
//   unsigned       cvt_bf16x2_f32(float hi, float lo)       two bfloat16, `hi` in the upper 16 bits
//   float          exp2_approx(float x)                     2**x; 0 below 2**-126; ex2.approx.ftz, here exp2f
//   unsigned       max_f16x2(unsigned a, unsigned b)        of two pairs of binary16; NaN if either is; min_f16x2 likewise
//   unsigned       max_bf16x2(unsigned a, unsigned b)       of two pairs of bfloat16; min_bf16x2 likewise
//   void           prefetch_l2(const void* p)              a hint that *p is read soon; here nothing
//   unsigned long long kept_policy()                         with it L2 gives up last what is loaded; here nothing
//   T              load_kept(const T* p, policy)             *p, loaded with a policy of L2
//   T              load_resident(const T* p, policy)         *p, which L1 gives up last, and L2 as the policy says
//   T              load_staying(const T* p)                  *p, which L1 gives up last
//   void           store_streaming<bytes>(void* p, const unsigned (&word)[n])   st.global.cs, bytes at a time
//   void           cluster_arrive()                        the block has started: the first half of a barrier of its cluster
//   void           cluster_wait()                          its second half: all blocks of the cluster have arrived
//   void           cluster_barrier()                       both halves; what was stored before is seen behind it
//   void           store_to_block(T* place, int rank, T x) x to where block `rank` of the cluster has what this one has at place
//
// Beside them it defines what CUDA C++ has without an include, as far as generated code uses it:
//   language      kgen_host_language.hpp   qualifiers, vector types, threadIdx and its like, bit casts, bit counts
//   arithmetic    kgen_host_math.hpp       float and double functions, rounding intrinsics, min/max/abs, conversions
//   co-operation  kgen_host_threads.hpp    barriers, shuffles, votes, atomics, fences, cached loads, __trap
//   primitives    kgen_host_convert.hpp    the contract above
//   launching     kgen_host_kernel.hpp     KGEN_HOST_KERNEL: how the runtime calls a kernel without parsing its text
//
// No standard header is included: the compile time of a kernel is the time of its own text. What needs one (threads, memory
// mapping, signals) is in kgen_host_runtime.cpp, which is compiled once.
//
// Not simulated: the device's weak memory order (a missing __threadfence is not found), races between two barriers other
// than by running the threads in another order, asynchronous copies, tensor cores, textures, and spinning on
// another thread's store (blocks and threads run one after another: a spin lock or a grid barrier never returns).
#pragma once

#include "kgen_host_language.hpp"
#include "kgen_host_abi.hpp"
#include "kgen_host_math.hpp"
#include "kgen_host_threads.hpp"
#include "kgen_host_convert.hpp"
#include "kgen_host_kernel.hpp"
