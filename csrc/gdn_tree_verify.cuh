// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet on a tree, one layer in one launch: the kernel (spec section 5).
//
//     (I + X) U = R,   X_ij = [j < i] beta_i e^(c_i - c_j) k_i . k_j,   R_i = beta_i (v_i - e^c_i S
//     k_i) o_i = e^c_i S q_i + sum over j <= i of e^(c_i - c_j) (q_i . k_j) u_j
//
// A block of threads owns BV = 16 PAIRS columns of V of one value head of one request, and takes
// the tree's rows in passes of ROWS = 16 TILES, chained by forward substitution; within a pass,
// rows go in tiles of 16. Two warps share 16 columns: one for keys, which solves for U, and one for
// queries, which makes the outputs. Both first do the same thing, one with the rows of k and one
// with those of q:
//
//  1. Gram tiles of the rows with the keys, 16 x 16 each, spread over the role's warps; L2 norms
//  from the same registers.
//     bfloat16 or float16 rows as they are, float32 sums.
//  2. Masked, decayed and scaled in float32, rounded to float16: -X by the keys' warps, the weights
//  of u by the queries' warps.
//     Path sums c in float32.
//  3. The rows' products with the state, [16 columns, ROWS], as S K^T: columns of V are rows of the
//  accumulators. The state is read
//     once, and split into two numbers of the rows' type.
//
// Between 2 and 3 the queries' warps invert the unit lower-triangular 16 x 16 tiles I + X_aa by
// substitution in float32, a thread per column, and keep N = (I + X_aa)^-1 - I in float16. Then the
// keys' warp solves its columns alone, without a barrier: since accumulators are transposed, a
// result is the left operand of the next product as it stands.
//
//     U_a = R_a + N_aa R_a,   R_b -= X_ba U_a for b > a
//
// R and U are scaled by a power of two per column of V, so that float16 holds them; R itself stays
// float32. U goes to the queries' warp through shared memory in two halves. The state is never
// written.
//
// Rows past the nodes may be NaN: they meet live ones only in columns that a select then drops.
#pragma once

#include "gdn_tree_layout.cuh"

namespace gdn {

template <typename C>
class Verify {
 public:
    WEAVER_DEVICE explicit Verify(const Params& p)
        : p_(p),
          at_(C::CHAINED ? p.passes : 1),
          passes_(C::CHAINED ? p.passes : 1),
          thread_(ptx::thread()),
          lane_(thread_ & 31),
          pair_((thread_ >> 5) % C::PAIRS),
          keys_((thread_ >> 5) < C::PAIRS) {
        first_column_ = ptx::block(0) * C::BV;
        hv_ = ptx::block(1);
        r_ = ptx::block(2);
        hk_ = key_head(hv_);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            left_[step] = swizzled<C::ROW_BYTES>(left_row(lane_), step * 2 + left_chunk(lane_));
            right_[step] = swizzled<C::ROW_BYTES>(right_row(lane_), step * 2 + right_chunk(lane_));
        }
        tile_right_ = swizzled<32>(right_row(lane_), right_chunk(lane_));
        v_right_ = at_.v + swizzled<C::V_BYTES>(right_row(lane_), pair_ * 2 + right_chunk(lane_));
    }

    WEAVER_DEVICE void run() {
        // All that depends on nothing but the indices is asked for first, so that it arrives
        // together; then the state.
        const int slot = p_.slots[r_];
        nodes_ = p_.num_nodes[r_];
        for (int row = 0; row < passes_ * C::ROWS; row += C::ROWS)
            copy_rows<C::K>(at_.k + row * C::ROW_BYTES, p_.k, p_.k_stride_r, p_.k_stride_t,
                            hk_ * C::K, row);
        copy_queries();
        copy_values();
        ptx::copy_commit();
        const Gates gates = load_gates();
        uint32_t words[WORDS_PER_THREAD];
        load_words(words);
        nodes_ = nodes_ < p_.T ? nodes_ : p_.T;
        if (slot < 0 || nodes_ <= 0) {
            write_zeros(0);
            ptx::copy_wait<0>();
            return;
        }
        copy_state(slot);
        ptx::copy_commit();
        store_gates(gates);
        store_words(words);
        run_pass(0);
        for (int pass = 1; pass < passes_; ++pass) {
            first_row_ = pass * C::ROWS;
            if (first_row_ >= nodes_) break;
            ptx::block_sync();
            copy_queries();
            copy_values();
            ptx::copy_commit();
            load_words(words);
            store_words(words);
            // The state's group, which is empty here.
            ptx::copy_commit();
            run_pass(pass);
        }
        if (C::CHAINED) write_zeros((nodes_ + C::ROWS - 1) / C::ROWS * C::ROWS);
    }

 private:
    WEAVER_DEVICE unsigned key_head(unsigned head) const {
        return p_.inverse_group == 0 ? head : ptx::high_word(head, p_.inverse_group);
    }

    // ---- Loads.

    // ROWS rows of WIDTH elements, from row `first` on, zeros past T. A thread's chunks lie one
    // below the other, 8 rows or a multiple of them apart, so that all have the same swizzle.
    template <int WIDTH>
    WEAVER_DEVICE void copy_rows(uint32_t target, const void* source, int64_t stride_r,
                                 int64_t stride_t, int column, int first) const {
        constexpr int CHUNKS = WIDTH * 2 / 16, APART = C::THREADS / CHUNKS;
        static_assert(APART % 8 == 0, "chunks of a thread must share their swizzle");
        const unsigned row = thread_ / CHUNKS, chunk = thread_ % CHUNKS;
        const auto* from = static_cast<const uint16_t*>(source) + r_ * stride_r +
                           (first + row) * stride_t + column + chunk * 8;
        target += swizzled<WIDTH * 2>(row, chunk);
#pragma unroll
        for (int more = 0; more < C::ROWS; more += APART) {
            if (APART > C::ROWS && row >= static_cast<unsigned>(C::ROWS)) break;
            ptx::copy_async(target + more * WIDTH * 2, from + more * stride_t,
                            static_cast<int>(first + row + more) < p_.T);
        }
    }

    WEAVER_DEVICE void copy_queries() const {
        copy_rows<C::K>(at_.q, p_.q, p_.q_stride_r, p_.q_stride_t, hk_ * C::K, first_row_);
    }
    WEAVER_DEVICE void copy_values() const {
        copy_rows<C::BV>(at_.v, p_.v, p_.v_stride_r, p_.v_stride_t, hv_ * p_.V + first_column_,
                         first_row_);
    }

    // Chunks are permuted so that the pairs of 8 (float32: 4) rows that a warp reads at once lie in
    // different banks.
    WEAVER_DEVICE static uint32_t state_offset(unsigned row, unsigned chunk) {
        const unsigned turn = C::STATE_BYTES == 4 ? (row & 3) << 1 : row & 7;
        return row * C::K * C::STATE_BYTES + ((chunk ^ turn) << 4);
    }

    WEAVER_DEVICE void copy_state(int slot) const {
        constexpr int CHUNKS = C::K * C::STATE_BYTES / 16, APART = C::THREADS / CHUNKS;
        static_assert(APART % (C::STATE_BYTES == 4 ? 4 : 8) == 0,
                      "chunks of a thread must share their swizzle");
        const auto* from =
            static_cast<const unsigned char*>(p_.state) + thread_ * 16 +
            (slot * p_.state_stride + static_cast<int64_t>(hv_ * p_.V + first_column_) * C::K) *
                C::STATE_BYTES;
        const uint32_t target = at_.state + state_offset(thread_ / CHUNKS, thread_ % CHUNKS);
#pragma unroll
        for (int more = 0; more < C::BV; more += APART)
            ptx::copy_async(target + more * C::K * C::STATE_BYTES,
                            from + more * C::K * C::STATE_BYTES, true);
    }

    // Bits of a row's gates, a row a thread; of the last row past the end.
    struct Gates {
        uint32_t g, beta, A_log, dt_bias;
    };
    WEAVER_DEVICE Gates load_gates() const {
        static_assert(C::ROWS * (C::CHAINED ? MAX_PASSES : 1) <= C::THREADS,
                      "a thread makes one row's gates");
        const int row = static_cast<int>(thread_) < p_.T ? thread_ : p_.T - 1;
        const int64_t index = r_ * p_.gate_stride_r + row * p_.gate_stride_t + hv_;
        Gates bits = {load_bits(p_.g, p_.gate_type, index), load_bits(p_.beta, p_.gate_type, index),
                      0, 0};
        if (p_.gates_raw) {
            bits.A_log = load_bits(p_.A_log, p_.A_log_type, hv_);
            bits.dt_bias = load_bits(p_.dt_bias, p_.dt_bias_type, hv_);
        }
        return bits;
    }
    WEAVER_DEVICE void store_gates(const Gates& bits) const {
        const int row = thread_;
        if (row >= passes_ * C::ROWS) return;
        float2 made = {float_of(bits.g, p_.gate_type), float_of(bits.beta, p_.gate_type)};
        if (p_.gates_raw)
            made = gates(made.x, made.y, float_of(bits.A_log, p_.A_log_type),
                         float_of(bits.dt_bias, p_.dt_bias_type));
        const bool live = row < nodes_;
        if (live && first_column_ == 0) {
            const int64_t stash = (static_cast<int64_t>(r_) * p_.T + row) * p_.HV + hv_;
            p_.stash_g[stash] = made.x;
            p_.stash_beta[stash] = made.y;
        }
        ptx::shared<float>(at_.g + row * 4) = live ? made.x : 0.0f;
        ptx::shared<float>(at_.beta + row * 4) = live ? made.y : 0.0f;
    }

    // Ancestor bits of the pass's rows; those of and past dead rows are cleared as they are stored.
    static constexpr unsigned MAX_WORDS =
        C::ROWS * Layout<C>::words_per_row(C::CHAINED ? MAX_PASSES : 1);
    static constexpr unsigned WORDS_PER_THREAD = (MAX_WORDS + C::THREADS - 1) / C::THREADS;
    WEAVER_DEVICE void load_words(uint32_t (&bits)[WORDS_PER_THREAD]) const {
        const unsigned words = Layout<C>::words_per_row(passes_);
        const uint32_t* ancestors = p_.ancestors + r_ * p_.ancestors_stride_r;
#pragma unroll
        for (unsigned n = 0; n < WORDS_PER_THREAD; ++n) {
            const unsigned index = n * C::THREADS + thread_, within = index % words;
            const int row = first_row_ + index / words;
            bits[n] = row < p_.T && within * 32 < static_cast<unsigned>(p_.T)
                          ? ancestors[row * p_.ancestors_stride_t + within]
                          : 0;
        }
    }
    WEAVER_DEVICE void store_words(const uint32_t (&bits)[WORDS_PER_THREAD]) const {
        const unsigned words = Layout<C>::words_per_row(passes_);
#pragma unroll
        for (unsigned n = 0; n < WORDS_PER_THREAD; ++n) {
            const unsigned index = n * C::THREADS + thread_;
            const int row = first_row_ + index / words,
                      left = nodes_ - static_cast<int>(index % words * 32);
            const uint32_t kept = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
            if (index < C::ROWS * words)
                ptx::shared<uint32_t>(at_.words + index * 4) = row < nodes_ ? bits[n] & kept : 0;
        }
    }

    WEAVER_DEVICE uint32_t word(unsigned row, unsigned column) const {
        return ptx::shared<uint32_t>(at_.words +
                                     (row * Layout<C>::words_per_row(passes_) + column / 32) * 4);
    }

    // c of the pass's rows, in units of log 2: a group of threads sums each row's g.
    WEAVER_DEVICE void sum_paths() const {
        constexpr unsigned ROWS = C::ROWS,
                           SHARE = C::THREADS / ROWS < ROWS / 4 ? C::THREADS / ROWS : ROWS / 4;
        static_assert(SHARE <= 32 && ROWS % (SHARE * 4) == 0, "a warp's lanes share a row");
        const unsigned row = thread_ / SHARE, part = thread_ % SHARE * 4;
        float sum = 0.0f;
        if (row < ROWS)
            for (unsigned first = 0; first < first_row_ + ROWS; first += ROWS) {
#pragma unroll
                for (unsigned more = 0; more < ROWS; more += SHARE * 4) {
                    const unsigned column = first + more + part;
                    const uint32_t bits = word(row, column) >> (column & 31);
                    const float4 g = ptx::shared<float4>(at_.g + column * 4);
                    sum += bits & 1 ? g.x : 0.0f;
                    sum += bits & 2 ? g.y : 0.0f;
                    sum += bits & 4 ? g.z : 0.0f;
                    sum += bits & 8 ? g.w : 0.0f;
                }
            }
#pragma unroll
        for (unsigned lanes = SHARE / 2; lanes > 0; lanes /= 2) sum += ptx::shuffle_xor(sum, lanes);
        if (row < ROWS && part == 0) ptx::shared<float>(at_.c + row * 4) = sum * LOG2E;
    }

    // ---- Gram tiles.

    // Index of tile (a, b), rows of the pass by rows from the first on.
    WEAVER_DEVICE int tile_index(int a, int b) const {
        const int earlier = C::CHAINED ? first_row_ / 16 : 0;
        return a * earlier + a * (a + 1) / 2 + b;
    }

    // Chunks of step `step` of 16 rows, as left operand and as two right operands, less the offset
    // of the first row.
    WEAVER_DEVICE uint32_t left(int step) const { return left_[step % 4] + step / 4 * 128; }
    WEAVER_DEVICE uint32_t right(int step) const { return right_[step % 4] + step / 4 * 128; }

    // The role's rows of a tile as left operands.
    WEAVER_DEVICE void load_left(uint32_t (&a)[C::STEPS][4], int tile) const {
        const uint32_t rows = own_rows() + tile * 16 * C::ROW_BYTES;
#pragma unroll
        for (int step = 0; step < C::STEPS; ++step) ptx::load_matrices(a[step], rows + left(step));
    }
    WEAVER_DEVICE uint32_t own_rows() const {
        return keys_ ? at_.k + first_row_ * C::ROW_BYTES : at_.q;
    }

    // Products of the left rows with keys `column` to `column` + 15. Even and odd steps add up
    // apart, since a product waits for the one before it.
    WEAVER_DEVICE void gram(float (&product)[2][4], const uint32_t (&a)[C::STEPS][4],
                            int column) const {
        float odd[2][4];
        clear(product);
        clear(odd);
#pragma unroll
        for (int step = 0; step < C::STEPS; ++step) {
            uint32_t b[4];
            ptx::load_matrices(b, at_.k + column * C::ROW_BYTES + right(step));
            float(&into)[2][4] = step % 2 ? odd : product;
            multiply<C::ROWS_TYPE>(into[0], a[step], b[0], b[1]);
            multiply<C::ROWS_TYPE>(into[1], a[step], b[2], b[3]);
        }
        add(product, odd);
    }

    // Products of rows with themselves: the left operand of 16 rows holds the two right operands of
    // the same rows, too.
    WEAVER_DEVICE void gram_with_itself(float (&product)[2][4],
                                        const uint32_t (&a)[C::STEPS][4]) const {
        float odd[2][4];
        clear(product);
        clear(odd);
#pragma unroll
        for (int step = 0; step < C::STEPS; ++step) {
            float(&into)[2][4] = step % 2 ? odd : product;
            multiply<C::ROWS_TYPE>(into[0], a[step], a[step][0], a[step][2]);
            multiply<C::ROWS_TYPE>(into[1], a[step], a[step][1], a[step][3]);
        }
        add(product, odd);
    }

    // Terms of the exponents of a tile's rows, of which `squares` has the squared norms on its
    // diagonal.
    WEAVER_DEVICE void make_terms(const float (&squares)[2][4], int tile) const {
        if (lane_ / 8 != lane_ % 4) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned row = tile * 16 + half * 8 + lane_ / 4;
            const float square =
                lane_ / 4 % 2 ? squares[half][half * 2 + 1] : squares[half][half * 2];
            const float log_norm = 0.5f * ptx::log2_approximate(square + 1e-6f);
            const float c = ptx::shared<float>(at_.c + row * 4);
            ptx::shared<float>((keys_ ? at_.k_row : at_.q_row) + row * 4) = c - log_norm;
            if (keys_) ptx::shared<float>(at_.k_column + (first_row_ + row) * 4) = c + log_norm;
        }
    }

    // -X (keys) or the weights of u (queries): tile `a` of the pass's rows by the keys from
    // `column` on, `own` on the diagonal.
    WEAVER_DEVICE void decay_tile(const float (&product)[2][4], int a, int column, bool own) const {
        const uint32_t tile =
            (keys_ ? at_.x : at_.w) + tile_index(a, column / 16) * TILE_BYTES + lane_ % 4 * 4;
        const unsigned j = lane_ % 4 * 2;
        float2 columns[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            columns[n] = ptx::shared<float2>(at_.k_column + (column + n * 8 + j) * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned in_tile = half * 8 + lane_ / 4, row = a * 16 + in_tile;
            uint32_t bits = word(row, column) >> (column & 31);
            // A node is no strict ancestor of itself.
            if (keys_ && own) bits &= ~(1u << in_tile);
            bits >>= j;
            const float factor =
                keys_ ? -ptx::shared<float>(at_.beta + (first_row_ + row) * 4) : 1.0f;
            const float term = ptx::shared<float>((keys_ ? at_.k_row : at_.q_row) + row * 4);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float2 x = {
                    factor * product[n][half * 2] * ptx::exp2_flushed(term - columns[n].x),
                    factor * product[n][half * 2 + 1] * ptx::exp2_flushed(term - columns[n].y)};
                // Selected last: where j is no ancestor of i, the exponential may have overflowed.
                x.x = bits & (1u << n * 8) ? x.x : 0.0f;
                x.y = bits & (2u << n * 8) ? x.y : 0.0f;
                if (keys_ && own)
                    ptx::shared<float2>(at_.diagonal + (row * 16 + n * 8 + j) * 4) = x;
                else
                    ptx::shared<uint32_t>(tile + swizzled<32>(in_tile, n)) =
                        ptx::pack_f16(x.x, x.y);
            }
        }
    }

    // Tiles of the pass's own rows: products first, since the norms come from all warps.
    WEAVER_DEVICE void make_tiles() const {
        constexpr unsigned UNITS = C::UNITS, PAIRS = C::PAIRS;
        const int first = pair_ * UNITS / PAIRS, last = (pair_ + 1) * UNITS / PAIRS;
        int a = 0, b = first;
        while (b > a) {
            ++a;
            b -= a;
        }
        const int first_a = a, first_b = b;
        float products[C::UNITS_PER_WARP][2][4];
        {
            uint32_t rows[C::STEPS][4];
#pragma unroll
            for (int n = 0; n < C::UNITS_PER_WARP; ++n) {
                if (first + n >= last) break;
                if (n == 0 || b == 0) load_left(rows, a);
                gram(products[n], rows, first_row_ + b * 16);
                if (a == b) {
                    if (keys_) {
                        make_terms(products[n], a);
                    } else {
                        float squares[2][4];
                        gram_with_itself(squares, rows);
                        make_terms(squares, a);
                    }
                }
                if (++b > a) {
                    ++a;
                    b = 0;
                }
            }
        }
        ptx::copy_wait<0>();
        ptx::block_sync();
        a = first_a;
        b = first_b;
#pragma unroll
        for (int n = 0; n < C::UNITS_PER_WARP; ++n) {
            if (first + n >= last) break;
            decay_tile(products[n], a, first_row_ + b * 16, a == b);
            if (++b > a) {
                ++a;
                b = 0;
            }
        }
        if (C::CHAINED && first_row_ > 0)
            for (a = pair_; a < C::TILES; a += C::PAIRS) {
                uint32_t rows[C::STEPS][4];
                load_left(rows, a);
                for (int column = 0; column < first_row_; column += 16) {
                    float product[2][4];
                    gram(product, rows, column);
                    decay_tile(product, a, column, false);
                }
            }
    }

    // N_aa of the diagonal tiles: a thread substitutes for one column, -X in, N out.
    WEAVER_DEVICE void invert_tiles() const {
        const unsigned column = lane_ % 16;
#pragma unroll
        for (int first = 0; first < C::TILES; first += 2 * C::PAIRS) {
            const int a = first + pair_ + C::PAIRS * (lane_ / 16);
            if (a >= C::TILES) continue;
            const uint32_t tile =
                at_.x + tile_index(a, (C::CHAINED ? first_row_ / 16 : 0) + a) * TILE_BYTES;
            float m[16];
#pragma unroll
            for (int row = 0; row < 16; ++row) {
                float sum = column == static_cast<unsigned>(row) ? 1.0f : 0.0f;
#pragma unroll
                for (int j = 0; j < row; j += 4) {
                    const float4 x =
                        ptx::shared<float4>(at_.diagonal + ((a * 16 + row) * 16 + j) * 4);
                    sum += x.x * m[j];
                    if (j + 1 < row) sum += x.y * m[j + 1];
                    if (j + 2 < row) sum += x.z * m[j + 2];
                    if (j + 3 < row) sum += x.w * m[j + 3];
                }
                m[row] = sum;
                ptx::shared<uint16_t>(tile + swizzled<32>(row, column / 8) + column % 8 * 2) =
                    static_cast<uint16_t>(
                        ptx::pack_f16(column == static_cast<unsigned>(row) ? 0.0f : sum, 0.0f));
            }
        }
    }

    // ---- Products with the state.

    // Columns 2 (l % 4) + {0, 1} of 8 from `column` on, of row `half` * 8 + l / 4 of the pair.
    WEAVER_DEVICE float2 state_pair(int half, int column) const {
        const unsigned row = pair_ * 16 + lane_ / 4;
        const uint32_t below = at_.state + half * 8 * C::K * C::STATE_BYTES;
        // Chunks that differ by 8 lie 128 bytes apart, whatever the row's permutation.
        if (C::STATE_BYTES == 4) {
            const uint32_t within =
                state_offset(row, column / 4 % 8 + lane_ % 4 / 2) + lane_ % 2 * 8;
            return ptx::shared<float2>(below + within + column / 32 * 128);
        }
        const uint32_t within = state_offset(row, column / 8 % 8) + lane_ % 4 * 4;
        return unpack<Type::BFLOAT16>(ptx::shared<uint32_t>(below + within + column / 64 * 128));
    }

    WEAVER_DEVICE void multiply_state(float (&sums)[C::TILES][2][4]) const {
        constexpr int TOGETHER = C::TILES > 1 ? 2 : 1;
        const uint32_t rows = own_rows();
        // With a single tile, products with the low parts add up apart, so that fewer wait for each
        // other.
        float lows[2][4];
        clear(lows);
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile) clear(sums[tile]);
#pragma unroll
        for (int step = 0; step < C::STEPS; ++step) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int part = 0; part < 4; ++part)
                split<C::ROWS_TYPE>(state_pair(part % 2, step * 16 + part / 2 * 8), high[part],
                                    low[part]);
#pragma unroll
            for (int first = 0; first < C::TILES; first += TOGETHER) {
                uint32_t b[TOGETHER][4];
#pragma unroll
                for (int n = 0; n < TOGETHER; ++n)
                    ptx::load_matrices(b[n], rows + (first + n) * 16 * C::ROW_BYTES + right(step));
#pragma unroll
                for (int n = 0; n < TOGETHER; ++n) {
                    float(&into)[2][4] = C::TILES > 1 ? sums[first + n] : lows;
                    multiply<C::ROWS_TYPE>(into[0], low, b[n][0], b[n][1]);
                    multiply<C::ROWS_TYPE>(into[1], low, b[n][2], b[n][3]);
                }
#pragma unroll
                for (int n = 0; n < TOGETHER; ++n) {
                    multiply<C::ROWS_TYPE>(sums[first + n][0], high, b[n][0], b[n][1]);
                    multiply<C::ROWS_TYPE>(sums[first + n][1], high, b[n][2], b[n][3]);
                }
            }
        }
        if (C::TILES == 1) add(sums[0], lows);
    }

    // ---- The solve, by the keys' warps; columns of V are rows of the accumulators.

    WEAVER_DEVICE uint32_t u_offset(int tile) const {
        return at_.u + ((pair_ * passes_ * C::TILES + tile) * 32 + lane_) * 16;
    }
    WEAVER_DEVICE ptx::Shared<float> size(int pass, int half) const {
        return ptx::shared<float>(at_.size +
                                  (pass * C::BV + pair_ * 16 + half * 8 + lane_ / 4) * 4);
    }
    WEAVER_DEVICE void load_tile(uint32_t (&b)[4], uint32_t tiles, int a, int column_tile) const {
        ptx::load_matrices(b, tiles + tile_index(a, column_tile) * TILE_BYTES + tile_right_);
    }
    // U of a half of the tiles, from the pair's keys to its queries; each has a barrier of its own.
    template <int HALF, int PAIR = 0>
    WEAVER_DEVICE void hand_over() const {
        if (pair_ == PAIR)
            ptx::named_arrive<FIRST_HALF + PAIR * C::HALVES + HALF, 64>();
        else if constexpr (PAIR + 1 < C::PAIRS)
            hand_over<HALF, PAIR + 1>();
    }
    template <int HALF, int PAIR = 0>
    WEAVER_DEVICE void await() const {
        if (pair_ == PAIR)
            ptx::named_sync<FIRST_HALF + PAIR * C::HALVES + HALF, 64>();
        else if constexpr (PAIR + 1 < C::PAIRS)
            await<HALF, PAIR + 1>();
    }

    // U of an earlier pass, in units of this one.
    WEAVER_DEVICE void load_earlier(uint32_t (&u)[4], int tile, int pass) const {
        const uint4 kept = ptx::shared<uint4>(u_offset(tile));
        const int from = tile / C::TILES;
        const float ratio[2] = {size(from, 0) / size(pass, 0), size(from, 1) / size(pass, 1)};
        const uint32_t ratios[2] = {ptx::pack_f16(ratio[0], ratio[0]),
                                    ptx::pack_f16(ratio[1], ratio[1])};
        u[0] = ptx::multiply_f16x2(kept.x, ratios[0]);
        u[1] = ptx::multiply_f16x2(kept.y, ratios[1]);
        u[2] = ptx::multiply_f16x2(kept.z, ratios[0]);
        u[3] = ptx::multiply_f16x2(kept.w, ratios[1]);
    }

    WEAVER_DEVICE void solve(float (&rest)[C::TILES][2][4], int pass) const {
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile) {
            uint32_t v[4];
            ptx::load_matrices_transposed(v, v_right_ + tile * 16 * C::V_BYTES);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int in_pass = tile * 16 + n * 8 + lane_ % 4 * 2, row = first_row_ + in_pass;
                const float2 term = ptx::shared<float2>(at_.k_row + in_pass * 4);
                const float2 beta = ptx::shared<float2>(at_.beta + row * 4);
                const uint32_t live[2] = {ptx::ones_if_less(row, nodes_),
                                          ptx::ones_if_less(row + 1, nodes_)};
                const float2 carried = {ptx::exp2_flushed(term.x), ptx::exp2_flushed(term.y)};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 value = unpack<C::ROWS_TYPE>(v[n * 2 + half]);
                    float* x = &rest[tile][n][half * 2];
                    x[0] = kept(live[0], beta.x * (value.x - carried.x * x[0]));
                    x[1] = kept(live[1], beta.y * (value.y - carried.y * x[1]));
                    largest[half] = fmaxf(largest[half], fmaxf(fabsf(x[0]), fabsf(x[1])));
                }
            }
        }
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = fmaxf(largest[half], ptx::shuffle_xor(largest[half], 1));
            largest[half] = fmaxf(largest[half], ptx::shuffle_xor(largest[half], 2));
            // The power of two at or below; bounded, so that what is divided by it does not
            // overflow. It never shrinks from pass to pass: U of earlier ones fits then.
            float power = ptx::float_of_bits(ptx::bits_of_float(fmaxf(largest[half], 0x1p-100f)) &
                                             0x7f800000u);
            if (C::CHAINED && pass > 0) power = fmaxf(power, size(pass - 1, half));
            inverse[half] = ptx::float_of_bits(0x7f000000u - ptx::bits_of_float(power));
            if (lane_ % 4 == 0) size(pass, half) = power;
        }
        ptx::warp_sync();
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) rest[tile][n][i] *= inverse[i / 2];
        stash_values();

        // The diagonal tiles' inverses are awaited here.
        ptx::named_sync<INVERTED, C::THREADS>();
        const int earlier = C::CHAINED ? first_row_ / 16 : 0;
        for (int j = 0; j < earlier; ++j) {
            uint32_t u[4];
            load_earlier(u, j, pass);
            add_tiles(rest, u, at_.x, 0, j);
        }
#pragma unroll
        for (int a = 0; a < C::TILES; ++a) {
            uint32_t u[4], inverted[4];
            pack_left(u, rest[a]);
            load_tile(inverted, at_.x, a, earlier + a);
            ptx::multiply_f16(rest[a][0], u, inverted[0], inverted[1]);
            ptx::multiply_f16(rest[a][1], u, inverted[2], inverted[3]);
            pack_left(u, rest[a]);
            ptx::shared<uint4>(u_offset(earlier + a)) = {u[0], u[1], u[2], u[3]};
            add_tiles(rest, u, at_.x, a + 1, earlier + a);
            if (a + 1 == C::TILES)
                hand_over<C::HALVES - 1>();
            else if (C::HALVES == 2 && a + 1 == C::TILES / 2)
                hand_over<0>();
        }
    }

    // Adds U of one tile of rows, times its coefficients, to the sums of the pass's tiles from
    // `first` on.
    WEAVER_DEVICE void add_tiles(float (&sums)[C::TILES][2][4], const uint32_t (&u)[4],
                                 uint32_t tiles, int first, int column_tile) const {
#pragma unroll
        for (int b = 0; b < C::TILES; ++b) {
            if (b < first) continue;
            uint32_t x[4];
            load_tile(x, tiles, b, column_tile);
            ptx::multiply_f16(sums[b][0], u, x[0], x[1]);
            ptx::multiply_f16(sums[b][1], u, x[2], x[3]);
        }
    }

    // ---- Outputs, by the queries' warps.

    WEAVER_DEVICE void add_outputs(float (&sums)[C::TILES][2][4], int pass) const {
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = tile * 16 + n * 8 + lane_ % 4 * 2;
                const float2 term = ptx::shared<float2>(at_.q_row + row * 4);
                const float2 carried = {ptx::exp2_flushed(term.x), ptx::exp2_flushed(term.y)};
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][n][i] *= i % 2 ? carried.y : carried.x;
            }
        await<0>();
        const float sizes[2] = {size(pass, 0), size(pass, 1)};
        const float inverse[2] = {ptx::float_of_bits(0x7f000000u - ptx::bits_of_float(sizes[0])),
                                  ptx::float_of_bits(0x7f000000u - ptx::bits_of_float(sizes[1]))};
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][n][i] *= inverse[i / 2];
        const int earlier = C::CHAINED ? first_row_ / 16 : 0;
        for (int j = 0; j < earlier; ++j) {
            uint32_t u[4];
            load_earlier(u, j, pass);
            add_tiles(sums, u, at_.w, 0, j);
        }
#pragma unroll
        for (int a = 0; a < C::TILES; ++a) {
            if (C::HALVES == 2 && a == C::TILES / 2) await<C::HALVES - 1>();
            const uint4 kept = ptx::shared<uint4>(u_offset(earlier + a));
            const uint32_t u[4] = {kept.x, kept.y, kept.z, kept.w};
            add_tiles(sums, u, at_.w, a, earlier + a);
        }
        // Turned around in this warp's columns of v, which nobody reads any more.
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile) {
            uint32_t rounded[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = first_row_ + tile * 16 + n * 8 + lane_ % 4 * 2;
                const uint32_t live = (ptx::ones_if_less(row, nodes_) & 0x0000ffffu) |
                                      (ptx::ones_if_less(row + 1, nodes_) & 0xffff0000u);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* x = &sums[tile][n][half * 2];
                    const float factor = sizes[half] * p_.scale;
                    rounded[n * 2 + half] = live & pack<C::ROWS_TYPE>(x[0] * factor, x[1] * factor);
                }
            }
            ptx::store_matrices_transposed(v_right_ + tile * 16 * C::V_BYTES, rounded);
        }
        ptx::warp_sync();
        copy_columns(p_.out, p_.T);
    }

    // This pair's columns of the tile of v, as far as row `end`, to a tensor [R, T, HV, V].
    WEAVER_DEVICE void copy_columns(void* target, int end) const {
        const unsigned chunk = lane_ % 2;
        const int64_t apart = static_cast<int64_t>(p_.HV) * p_.V;
        int row = first_row_ + lane_ / 2;
        auto* to = static_cast<uint16_t*>(target) +
                   (static_cast<int64_t>(r_) * p_.T + row) * apart + hv_ * p_.V + first_column_ +
                   pair_ * 16 + chunk * 8;
        const uint32_t from = at_.v + swizzled<C::V_BYTES>(lane_ / 2, pair_ * 2 + chunk);
#pragma unroll
        for (int tile = 0; tile < C::TILES; ++tile) {
            if (row < end)
                *reinterpret_cast<uint4*>(to) = ptx::shared<uint4>(from + tile * 16 * C::V_BYTES);
            row += 16;
            to += 16 * apart;
        }
    }

    WEAVER_DEVICE void stash_values() const {
        if (p_.stash_rows) copy_columns(p_.stash_v, nodes_);
    }

    WEAVER_DEVICE void stash_keys() const {
        // The first of the value heads that share the key head.
        if (!p_.stash_rows || first_column_ != 0 || (hv_ > 0 && hk_ == key_head(hv_ - 1))) return;
        constexpr int CHUNKS = C::ROW_BYTES / 16;
        auto* base = static_cast<uint16_t*>(p_.stash_k) +
                     (static_cast<int64_t>(r_) * p_.T * p_.HK + hk_) * C::K;
        for (unsigned index = thread_; index < static_cast<unsigned>(C::ROWS * CHUNKS);
             index += C::THREADS / 2) {
            const unsigned row = first_row_ + index / CHUNKS, chunk = index % CHUNKS;
            if (row < static_cast<unsigned>(nodes_))
                *reinterpret_cast<uint4*>(base + static_cast<int64_t>(row) * p_.HK * C::K +
                                          chunk * 8) =
                    ptx::shared<uint4>(at_.k + swizzled<C::ROW_BYTES>(row, chunk));
        }
    }

    WEAVER_DEVICE void write_zeros(int first) const {
        constexpr int CHUNKS = C::V_BYTES / 16;
        auto* base = static_cast<uint16_t*>(p_.out) +
                     (static_cast<int64_t>(r_) * p_.T * p_.HV + hv_) * p_.V + first_column_;
        for (unsigned index = first * CHUNKS + thread_;
             index < static_cast<unsigned>(p_.T) * CHUNKS; index += C::THREADS)
            *reinterpret_cast<uint4*>(base + static_cast<int64_t>(index / CHUNKS) * p_.HV * p_.V +
                                      index % CHUNKS * 8) = {0, 0, 0, 0};
    }

    WEAVER_DEVICE void run_pass(int pass) {
        ptx::block_sync();
        sum_paths();
        // Of the pass's copies, rows are awaited here; the state in make_tiles.
        ptx::copy_wait<1>();
        ptx::block_sync();
        make_tiles();
        ptx::block_sync();
        float sums[C::TILES][2][4];
        if (!keys_) {
            invert_tiles();
            ptx::named_arrive<INVERTED, C::THREADS>();
        }
        multiply_state(sums);
        if (keys_) {
            solve(sums, pass);
            stash_keys();
        } else {
            add_outputs(sums, pass);
        }
    }

    const Params& p_;
    const Layout<C> at_;
    const int passes_;
    const unsigned thread_, lane_, pair_;
    const bool keys_;
    uint32_t left_[4], right_[4], tile_right_, v_right_;
    unsigned r_, hv_, hk_, first_column_;
    int nodes_, first_row_ = 0;
};

template <typename C>
WEAVER_KERNEL(C::THREADS, C::BLOCKS)
tree_verify(WEAVER_PARAMETER const Params p) {
    static_assert(Layout<C>(C::CHAINED ? MAX_PASSES : 1).total <= SHARED_LIMIT,
                  "a block's shared memory");
    Verify<C>(p).run();
}

}  // namespace gdn
