// SPDX-License-Identifier: Apache-2.0
// What a kernel may use of the GPU: thread indices, barriers, shared memory, matrix products and
// conversions.
//
// Two implementations with the same names: PTX for nvcc here, and emulator/device.h for g++ with
// -DWEAVER_EMULATE. Kernels use nothing else of CUDA. The header knows no kernel.
#pragma once

#include <cstdint>

#ifdef WEAVER_EMULATE
#include "emulator/device.h"
#else

#define WEAVER_DEVICE __device__ __forceinline__
#define WEAVER_HOST_DEVICE __host__ __device__ __forceinline__
#define WEAVER_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define WEAVER_PARAMETER __grid_constant__
#define WEAVER_LAUNCH(kernel, x, y, z, threads, shared_bytes, stream, params) \
    kernel<<<dim3(x, y, z), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params)

namespace ptx {

extern __shared__ __align__(128) unsigned char dynamic_shared[];

WEAVER_DEVICE unsigned thread() { return threadIdx.x; }
// Index along axis 0, 1 or 2 of the grid.
WEAVER_DEVICE unsigned block(int axis) {
    return axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z;
}
WEAVER_DEVICE uint32_t high_word(uint32_t x, uint32_t y) { return __umulhi(x, y); }

// Barriers. A named one has an id from 1 to 15 and counts threads, those that arrive and those that
// wait. Ids are constants, so that a kernel occupies no more barriers than it uses.
WEAVER_DEVICE void block_sync() { __syncthreads(); }
WEAVER_DEVICE void warp_sync() { __syncwarp(); }
template <int ID, int COUNT>
WEAVER_DEVICE void named_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
template <int ID, int COUNT>
WEAVER_DEVICE void named_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
WEAVER_DEVICE float shuffle_xor(float x, int lanes) {
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}

// Dynamic shared memory by byte offset.
template <typename T>
using Shared = T&;
template <typename T>
WEAVER_DEVICE Shared<T> shared(uint32_t offset) {
    return *reinterpret_cast<T*>(dynamic_shared + offset);
}
WEAVER_DEVICE uint32_t shared_address(uint32_t offset) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared)) + offset;
}

// 4 bytes of global memory if `wide`, else 2; without a branch, so that nothing has to wait for it.
WEAVER_DEVICE uint32_t load_bits(const void* source, bool wide) {
    uint32_t r;
    asm volatile(
        "{\n.reg .pred wide;\nsetp.ne.u32 wide, %2, 0;\n@wide ld.global.b32 %0, [%1];\n@!wide "
        "ld.global.u16 %0, [%1];\n}"
        : "=r"(r)
        : "l"(source), "r"(static_cast<uint32_t>(wide)));
    return r;
}

// 16 bytes from global to shared memory, or zeros where not `live`; they are there after
// `copy_wait` of their group.
WEAVER_DEVICE void copy_async(uint32_t offset, const void* source, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(offset)),
                 "l"(source), "r"(live ? 16 : 0)
                 : "memory");
}
WEAVER_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
WEAVER_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four matrices of 8 x 8 halves; lane l names row l % 8 of matrix l / 8. Lane l gets the elements
// (l / 4, 2 (l % 4) + {0, 1}) of each, or of each transposed.
WEAVER_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(offset))
                 : "memory");
}
WEAVER_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(offset))
                 : "memory");
}
WEAVER_DEVICE void store_matrices_transposed(uint32_t offset, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(offset)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// d += a b: 16 x 16 by 16 x 8, float32 sums.
WEAVER_DEVICE void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
WEAVER_DEVICE void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Conversions; of a pair, `low` has the lower address.
WEAVER_DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
WEAVER_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
WEAVER_DEVICE float float_of_f16(uint16_t x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
WEAVER_DEVICE float float_of_bits(uint32_t x) { return __uint_as_float(x); }
WEAVER_DEVICE uint32_t bits_of_float(float x) { return __float_as_uint(x); }
WEAVER_DEVICE uint32_t multiply_f16x2(uint32_t x, uint32_t y) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// All bits where x < y, else none; of a comparison the compiler would make branches.
WEAVER_DEVICE uint32_t ones_if_less(int x, int y) {
    int32_t r;
    asm("shr.s32 %0, %1, 31;" : "=r"(r) : "r"(x - y));
    return r;
}

WEAVER_DEVICE float exp2_flushed(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
WEAVER_DEVICE float exp2_approximate(float x) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
WEAVER_DEVICE float log2_approximate(float x) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
WEAVER_DEVICE float divide_approximate(float x, float y) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}
WEAVER_DEVICE float logarithm(float x) { return logf(x); }

}  // namespace ptx

#endif
