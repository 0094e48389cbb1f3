// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet on a tree: the launch's parameters, the compiled forms, the layout of shared
// memory, and small helpers of gdn_tree_verify.cuh.
#pragma once

#include "ptx.cuh"

namespace gdn {

enum class Type { FLOAT32, FLOAT16, BFLOAT16 };

// Tensors of the launch, strides in elements. `gates_raw`: g and beta are a and b, of which the
// gates are made here.
struct Params {
    const void* q;
    const void* k;
    const void* v;
    const void* g;
    const void* beta;
    const void* A_log;
    const void* dt_bias;
    const void* state;
    const int32_t* slots;
    const int32_t* num_nodes;
    const uint32_t* ancestors;
    void* out;
    void* stash_k;
    void* stash_v;
    float* stash_g;
    float* stash_beta;
    int64_t q_stride_r, q_stride_t;
    int64_t k_stride_r, k_stride_t;
    int64_t v_stride_r, v_stride_t;
    int64_t gate_stride_r, gate_stride_t;
    int64_t ancestors_stride_r, ancestors_stride_t;
    int64_t state_stride;
    float scale;
    int T, HK, HV, V, passes;
    // The high word of its product with a value head is the key head; 0: they are the same.
    uint32_t inverse_group;
    Type gate_type, A_log_type, dt_bias_type;
    bool gates_raw, stash_rows;
};

// The compiled forms. CHAINED: more than one pass.
template <Type ROWS_TYPE_, Type STATE_TYPE_, int K_, int TILES_, int PAIRS_, bool CHAINED_>
struct Config {
    static constexpr Type ROWS_TYPE = ROWS_TYPE_, STATE_TYPE = STATE_TYPE_;
    static constexpr int K = K_, TILES = TILES_, PAIRS = PAIRS_;
    static constexpr bool CHAINED = CHAINED_;
    static constexpr int ROWS = 16 * TILES, BV = 16 * PAIRS, THREADS = 64 * PAIRS;
    static constexpr int STEPS = K / 16;
    static constexpr int ROW_BYTES = K * 2, V_BYTES = BV * 2,
                         STATE_BYTES = STATE_TYPE == Type::FLOAT32 ? 4 : 2;
    static constexpr int UNITS = TILES * (TILES + 1) / 2,
                         UNITS_PER_WARP = (UNITS + PAIRS - 1) / PAIRS;
    // Blocks that a multiprocessor is to hold, as shared memory allows; it bounds the registers.
    static constexpr int BLOCKS = (PAIRS > 4              ? 8
                                   : CHAINED || TILES > 4 ? 4
                                   : TILES > 2            ? 8
                                                          : 12) /
                                  PAIRS;
    // U is handed over in two halves where ids of named barriers suffice.
    static constexpr int HALVES = TILES > 1 && PAIRS <= 6 ? 2 : 1;
};

constexpr int TILE_BYTES = 512;  // 16 x 16 halves
// Ids of named barriers: the diagonal tiles' inverses are there; U of a pair's half is there, one
// for each half of each pair.
constexpr int INVERTED = 1, FIRST_HALF = 2;
constexpr uint32_t SHARED_LIMIT = 227 * 1024;
constexpr int MAX_PASSES = 4;
constexpr float LOG2E = 1.4426950408889634f;

// Byte offsets in shared memory. `k_row`, `q_row`: c less the log of the row's norm; `k_column`: c
// and the log of it.
template <typename C>
struct Layout {
    uint32_t state, k, q, v, x, w, u, diagonal, size, c, g, beta, k_row, q_row, k_column, words,
        total;

    WEAVER_HOST_DEVICE constexpr explicit Layout(int passes)
        : state(0),
          k(state + C::BV * C::K * C::STATE_BYTES),
          q(k + passes * C::ROWS * C::ROW_BYTES),
          v(q + C::ROWS * C::ROW_BYTES),
          x(v + C::ROWS * C::V_BYTES),
          w(x + tiles(passes) * TILE_BYTES),
          u(w + tiles(passes) * TILE_BYTES),
          diagonal(u + passes * C::TILES * C::PAIRS * TILE_BYTES),
          size(diagonal + C::TILES * 2 * TILE_BYTES),
          c(size + passes * C::BV * 4),
          g(c + C::ROWS * 4),
          beta(g + passes * C::ROWS * 4),
          k_row(beta + passes * C::ROWS * 4),
          q_row(k_row + C::ROWS * 4),
          k_column(q_row + C::ROWS * 4),
          words(k_column + passes * C::ROWS * 4),
          total(words + C::ROWS * words_per_row(passes) * 4) {}

    // Tiles of X that a pass needs: those of its own rows, and those of all earlier ones.
    WEAVER_HOST_DEVICE static constexpr int tiles(int passes) {
        return C::UNITS + C::TILES * C::TILES * (passes - 1);
    }
    WEAVER_HOST_DEVICE static constexpr int words_per_row(int passes) {
        return (passes * C::ROWS + 31) / 32;
    }
};

// Offset of a 16-byte chunk of a row; permuted so that 8 rows of one chunk lie in different banks.
template <int ROW_BYTES>
WEAVER_DEVICE uint32_t swizzled(unsigned row, unsigned chunk) {
    constexpr int CHUNKS = ROW_BYTES / 16;
    const unsigned turn = CHUNKS >= 8 ? row & 7 : CHUNKS == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * ROW_BYTES + ((chunk ^ turn) << 4);
}

// Loaded and converted apart, so that several loads can be under way.
WEAVER_DEVICE uint32_t load_bits(const void* source, Type type, int64_t index) {
    const bool wide = type == Type::FLOAT32;
    return ptx::load_bits(static_cast<const unsigned char*>(source) + index * (wide ? 4 : 2), wide);
}
WEAVER_DEVICE float float_of(uint32_t bits, Type type) {
    if (type == Type::FLOAT16) return ptx::float_of_f16(static_cast<uint16_t>(bits));
    return ptx::float_of_bits(type == Type::FLOAT32 ? bits : bits << 16);
}

template <Type TYPE>
WEAVER_DEVICE float2 unpack(uint32_t pair) {
    if (TYPE == Type::FLOAT16)
        return {ptx::float_of_f16(pair & 0xffff), ptx::float_of_f16(pair >> 16)};
    return {ptx::float_of_bits(pair << 16), ptx::float_of_bits(pair & 0xffff0000u)};
}
template <Type TYPE>
WEAVER_DEVICE uint32_t pack(float low, float high) {
    return TYPE == Type::FLOAT16 ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
}
template <Type TYPE>
WEAVER_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (TYPE == Type::FLOAT16)
        ptx::multiply_f16(d, a, b0, b1);
    else
        ptx::multiply_bf16(d, a, b0, b1);
}

// A pair of float32 as two pairs of a narrower type: the leading bits that it holds, and the rest.
template <Type TYPE>
WEAVER_DEVICE void split(float2 x, uint32_t& high, uint32_t& low) {
    constexpr uint32_t KEPT = TYPE == Type::FLOAT16 ? 0xffffe000u : 0xffff0000u;
    const float x0 = ptx::float_of_bits(ptx::bits_of_float(x.x) & KEPT);
    const float x1 = ptx::float_of_bits(ptx::bits_of_float(x.y) & KEPT);
    high = pack<TYPE>(x0, x1);
    low = pack<TYPE>(x.x - x0, x.y - x1);
}

// Where a lane finds its row of four 8 x 8 matrices that make up a 16 x 16 tile, as a left operand,
// or as two right operands of 8 columns each (rows of the tile are columns of the operand).
WEAVER_DEVICE unsigned left_row(unsigned lane) { return lane & 15; }
WEAVER_DEVICE unsigned left_chunk(unsigned lane) { return lane >> 4; }
WEAVER_DEVICE unsigned right_row(unsigned lane) { return (lane & 7) + ((lane >> 4) << 3); }
WEAVER_DEVICE unsigned right_chunk(unsigned lane) { return (lane >> 3) & 1; }

// Log decay and write strength, with the operations of vLLM's packed decode kernel.
WEAVER_DEVICE float2 gates(float a, float b, float A_log, float dt_bias) {
    const float x = a + dt_bias;
    const float softplus = x <= 20.0f ? ptx::logarithm(1.0f + ptx::exp2_approximate(x * LOG2E)) : x;
    return {-ptx::exp2_approximate(A_log * LOG2E) * softplus,
            ptx::divide_approximate(1.0f, 1.0f + ptx::exp2_approximate(b * -LOG2E))};
}

// `x` where `bits` are ones, zero where they are zeros.
WEAVER_DEVICE float kept(uint32_t bits, float x) {
    return ptx::float_of_bits(ptx::bits_of_float(x) & bits);
}

// Accumulators of a 16 x 16 tile.
WEAVER_DEVICE void clear(float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[0][i] = x[1][i] = 0.0f;
}
WEAVER_DEVICE void add(float (&x)[2][4], const float (&y)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[0][i] += y[0][i];
        x[1][i] += y[1][i];
    }
}
// As left operand of the next product: columns become what is summed over.
WEAVER_DEVICE void pack_left(uint32_t (&a)[4], const float (&x)[2][4]) {
    a[0] = ptx::pack_f16(x[0][0], x[0][1]);
    a[1] = ptx::pack_f16(x[0][2], x[0][3]);
    a[2] = ptx::pack_f16(x[1][0], x[1][1]);
    a[3] = ptx::pack_f16(x[1][2], x[1][3]);
}

}  // namespace gdn
