// How the runtime calls a kernel: KGEN_HOST_KERNEL, written once behind the kernel's text.
//
// The parameter types are deduced from the kernel itself, and arguments arrive as cuLaunchKernel takes them: an array of pointers,
// one to the value of each parameter.
#pragma once

#include "kgen_host_abi.hpp"

namespace kgen_host {

template <class T> struct ParameterKind { static constexpr int value = 's'; };
template <class T> struct ParameterKind<T*> { static constexpr int value = 'p'; };
template <class T> struct ParameterKind<T* __restrict__> { static constexpr int value = 'p'; };
#define KGEN_HOST_KIND(T, kind) template <> struct ParameterKind<T> { static constexpr int value = kind; };
KGEN_HOST_KIND(bool, 'b')
KGEN_HOST_KIND(char, 'i')
KGEN_HOST_KIND(signed char, 'i')
KGEN_HOST_KIND(short, 'i')
KGEN_HOST_KIND(int, 'i')
KGEN_HOST_KIND(long, 'i')
KGEN_HOST_KIND(long long, 'i')
KGEN_HOST_KIND(unsigned char, 'u')
KGEN_HOST_KIND(unsigned short, 'u')
KGEN_HOST_KIND(unsigned, 'u')
KGEN_HOST_KIND(unsigned long, 'u')
KGEN_HOST_KIND(unsigned long long, 'u')
KGEN_HOST_KIND(float, 'f')
KGEN_HOST_KIND(double, 'f')
#undef KGEN_HOST_KIND

template <class Function> struct Signature;
template <class... Parameters>
struct Signature<void (*)(Parameters...)> {
    static constexpr int count = sizeof...(Parameters);
    // One more than the parameters, since an array has at least one element.
    static constexpr Parameter parameters[count + 1] = {{ParameterKind<Parameters>::value, sizeof(Parameters)}..., {0, 0}};

    template <void (*kernel)(Parameters...)>
    static void invoke(void** arguments) {
        // A braced list is evaluated from left to right, so the counter gives each parameter its own place.
        int next = 0;
        Call{kernel, *static_cast<Parameters*>(arguments[next++])...};
    }

private:
    struct Call {
        Call(void (*kernel)(Parameters...), Parameters... values) { kernel(values...); }
    };
};

}  // namespace kgen_host

#define KGEN_HOST_KERNEL(entry, dynamic_shared_memory, cluster)                                                           \
    static thread_local char kgen_host_anchor;                                                                            \
    extern "C" __attribute__((visibility("default"))) const kgen_host::Kernel kgen_host_kernel;                           \
    const kgen_host::Kernel kgen_host_kernel = {                                                                          \
        #entry,                                                                                                           \
        kgen_host::Signature<decltype(&entry)>::invoke<&entry>,                                                           \
        []() -> void* { return &kgen_host_anchor; },                                                                      \
        []() -> void* { return dynamic_shared_memory; },                                                                  \
        cluster,                                                                                                          \
        kgen_host::Signature<decltype(&entry)>::count,                                                                    \
        kgen_host::Signature<decltype(&entry)>::parameters,                                                               \
    };
