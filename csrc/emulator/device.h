// SPDX-License-Identifier: Apache-2.0
// ptx.cuh for g++: the same names, on emulated threads.
//
// Sums of a matrix product are taken in float64 and rounded once per instruction, which differs
// from a GPU in the last bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibres.h"

#define WEAVER_DEVICE inline
#define WEAVER_HOST_DEVICE inline
#define WEAVER_KERNEL(threads, blocks) void
#define WEAVER_PARAMETER
#define WEAVER_LAUNCH(kernel, x, y, z, threads, shared_bytes, stream, params) \
    emulator::launch(x, y, z, threads, shared_bytes, [&] { kernel(params); })

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

namespace ptx {

using emulator::Block;
using emulator::Place;
using emulator::WARP;

inline unsigned thread() { return Block::current()->thread().index; }
inline unsigned block(int axis) { return Block::current()->index(axis); }
inline uint32_t high_word(uint32_t x, uint32_t y) { return static_cast<uint64_t>(x) * y >> 32; }

inline void block_sync() { Block::current()->barrier(0, Block::current()->threads(), true); }
template <int ID, int COUNT>
inline void named_sync() {
    Block::current()->barrier(ID, COUNT, true);
}
template <int ID, int COUNT>
inline void named_arrive() {
    Block::current()->barrier(ID, COUNT, false);
}

// What stands for a reference: reads and writes of it are told apart.
template <typename T>
class Shared {
 public:
    Shared(uint32_t offset, Place place) : offset_(offset), place_(place) {}
    operator T() const {
        Block& block = *Block::current();
        const T value = *reinterpret_cast<const T*>(block.shared(offset_, sizeof(T)));
        if (block.races()) block.races()->read(thread(), offset_, sizeof(T), place_);
        return value;
    }
    void operator=(const T& value) const {
        Block& block = *Block::current();
        *reinterpret_cast<T*>(block.shared(offset_, sizeof(T))) = value;
        if (block.races()) block.races()->write(thread(), offset_, sizeof(T), place_);
    }

 private:
    uint32_t offset_;
    Place place_;
};
template <typename T>
inline Shared<T> shared(uint32_t offset, Place place = Place::here()) {
    return {offset, place};
}

inline uint32_t load_bits(const void* source, bool wide) {
    return wide ? *static_cast<const uint32_t*>(source) : *static_cast<const uint16_t*>(source);
}

inline void copy_async(uint32_t offset, const void* source, bool live,
                       Place place = Place::here()) {
    Block& block = *Block::current();
    auto& copies = block.thread().copies;
    if (copies.empty()) copies.emplace_back();
    copies.back().push_back({offset, source, live});
    block.shared(offset, 16);
    if (block.races()) block.races()->begin_copy(thread(), offset, 16, place);
}
inline void copy_commit() {
    auto& copies = Block::current()->thread().copies;
    if (copies.empty()) copies.emplace_back();
    copies.emplace_back();
}
// Copies are made as late as allowed, so that a missing wait shows.
template <int PENDING>
inline void copy_wait() {
    Block& block = *Block::current();
    auto& copies = block.thread().copies;
    for (int group = 0; group + 1 + PENDING < static_cast<int>(copies.size()); ++group) {
        for (const auto& copy : copies[group]) {
            unsigned char* target = block.shared(copy.offset, 16);
            if (copy.live)
                std::memcpy(target, copy.source, 16);
            else
                std::memset(target, 0, 16);
            if (block.races()) block.races()->end_copy(thread(), copy.offset, 16);
        }
        copies[group].clear();
    }
}

inline float float_of_bits(uint32_t x) {
    float r;
    std::memcpy(&r, &x, 4);
    return r;
}
inline uint32_t bits_of_float(float x) {
    uint32_t r;
    std::memcpy(&r, &x, 4);
    return r;
}
inline float float_of_f16(uint16_t x) {
    const uint32_t sign = (x & 0x8000u) << 16, exponent = (x >> 10) & 31, fraction = x & 0x3ff;
    if (exponent == 0)
        return float_of_bits(sign | bits_of_float(std::ldexp(static_cast<float>(fraction), -24)));
    if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}
// To nearest, ties to even, as cvt.rn does.
inline uint16_t f16_of_float(float x) {
    const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u)
        return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(std::fabs(x), 24)));
    return sign | static_cast<uint16_t>(
                      (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13);
}
inline uint16_t bf16_of_float(float x) {
    const uint32_t bits = bits_of_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline uint32_t pack_f16(float low, float high) {
    return f16_of_float(low) | static_cast<uint32_t>(f16_of_float(high)) << 16;
}
inline uint32_t pack_bf16(float low, float high) {
    return bf16_of_float(low) | static_cast<uint32_t>(bf16_of_float(high)) << 16;
}
inline uint32_t multiply_f16x2(uint32_t x, uint32_t y) {
    return pack_f16(float_of_f16(x & 0xffff) * float_of_f16(y & 0xffff),
                    float_of_f16(x >> 16) * float_of_f16(y >> 16));
}

inline uint32_t ones_if_less(int x, int y) { return x < y ? ~0u : 0u; }

inline float exp2_approximate(float x) { return std::exp2(x); }
inline float exp2_flushed(float x) {
    const float y = std::exp2(x);
    return y < 1.1754944e-38f ? 0.0f : y;
}
inline float divide_approximate(float x, float y) { return x / y; }
inline float logarithm(float x) { return std::log(x); }
inline float log2_approximate(float x) { return std::log2(x); }

inline void warp_sync() { Block::current()->warp_sync(); }

inline float shuffle_xor(float x, int lanes) {
    struct Call {
        float value, result;
        int lanes;
    } call{x, 0.0f, lanes};
    Block::current()->collective(
        [](void* const* all) {
            for (int lane = 0; lane < WARP; ++lane) {
                Call& own = *static_cast<Call*>(all[lane]);
                own.result = static_cast<Call*>(all[lane ^ own.lanes])->value;
            }
        },
        &call);
    return call.result;
}

struct Matrices {
    uint32_t* registers;
    uint32_t offset;
    Place place;
};

// Element (row, column) of matrix `m`, as halves in shared memory and in a lane's registers.
template <bool STORE, bool TRANSPOSED>
inline void move_matrices(void* const* all) {
    auto call = [all](int lane) -> Matrices& { return *static_cast<Matrices*>(all[lane]); };
    Block& block = *Block::current();
    const int first = block.thread().index / WARP * WARP;
    for (int m = 0; m < 4; ++m)
        for (int row = 0; row < 8; ++row) {
            // A row is of the lane that names it.
            const Matrices& named = call(m * 8 + row);
            auto* line = reinterpret_cast<uint16_t*>(block.shared(named.offset, 16));
            if (block.races() && STORE)
                block.races()->write(first + m * 8 + row, named.offset, 16, named.place);
            else if (block.races())
                block.races()->read(first + m * 8 + row, named.offset, 16, named.place);
            for (int column = 0; column < 8; ++column) {
                const int i = TRANSPOSED ? column : row, j = TRANSPOSED ? row : column;
                auto* half = reinterpret_cast<uint16_t*>(&call(i * 4 + j / 2).registers[m]) + j % 2;
                if (STORE)
                    line[column] = *half;
                else
                    *half = line[column];
            }
        }
}
inline void load_matrices(uint32_t (&r)[4], uint32_t offset, Place place = Place::here()) {
    Matrices call{r, offset, place};
    Block::current()->collective(move_matrices<false, false>, &call);
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t offset,
                                     Place place = Place::here()) {
    Matrices call{r, offset, place};
    Block::current()->collective(move_matrices<false, true>, &call);
}
inline void store_matrices_transposed(uint32_t offset, const uint32_t (&r)[4],
                                      Place place = Place::here()) {
    uint32_t copy[4] = {r[0], r[1], r[2], r[3]};
    Matrices call{copy, offset, place};
    Block::current()->collective(move_matrices<true, true>, &call);
}

struct Product {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};

template <bool BF16>
inline float half_of(uint32_t pair, int index) {
    const uint32_t bits = index ? pair >> 16 : pair & 0xffff;
    return BF16 ? float_of_bits(bits << 16) : float_of_f16(static_cast<uint16_t>(bits));
}

template <bool BF16>
inline void multiply_matrices(void* const* all) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const Product& call = *static_cast<Product*>(all[lane]);
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int e = 0; e < 2; ++e) {
            for (int part = 0; part < 4; ++part)
                a[group + part % 2 * 8][pair + e + part / 2 * 8] = half_of<BF16>(call.a[part], e);
            for (int part = 0; part < 2; ++part)
                b[pair + e + part * 8][group] = half_of<BF16>(call.b[part], e);
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        Product& call = *static_cast<Product*>(all[lane]);
        for (int part = 0; part < 4; ++part) {
            const int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
            double sum = call.d[part];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            call.d[part] = static_cast<float>(sum);
        }
    }
}
inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Product call{d, a, {b0, b1}};
    Block::current()->collective(multiply_matrices<false>, &call);
}
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Product call{d, a, {b0, b1}};
    Block::current()->collective(multiply_matrices<true>, &call);
}

}  // namespace ptx
