// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet on a tree: choice of the compiled form, launch, and the op of PyTorch's stable
// ABI.
//
// The op checks what the kernel's memory accesses rely on; vllm_weaver/ops/gdn/cuda.py, which calls
// it, checks the rest. With -DWEAVER_EMULATE it is the CPU op
// `vllm_weaver_emulator::gdn_tree_verify`, on emulated threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "gdn_tree_verify.cuh"

#ifndef WEAVER_EMULATE
#include <cuda_runtime.h>
// Weak, so that the library loads beside a CPU build of PyTorch, which has no streams.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace {

using gdn::Params;
using gdn::Type;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Type type_of(const Tensor& tensor) {
    const ScalarType type = tensor.scalar_type();
    if (type == ScalarType::Float) return Type::FLOAT32;
    if (type == ScalarType::Half) return Type::FLOAT16;
    STD_TORCH_CHECK(type == ScalarType::BFloat16,
                    "gdn_tree_verify: expected float32, float16 or bfloat16");
    return Type::BFLOAT16;
}

void expect_dense(const Tensor& tensor, ScalarType type, const char* name) {
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == type,
                    "gdn_tree_verify: ", name, " must be dense and of the expected type");
}

// Rows that start at 16 bytes, with dense heads.
void expect_rows(const Tensor& tensor, const char* name) {
    const int64_t heads = tensor.sizes()[2], dim = tensor.sizes()[3];
    STD_TORCH_CHECK(tensor.stride(3) == 1 && (heads == 1 || tensor.stride(2) == dim) &&
                        tensor.stride(0) % 8 == 0 && tensor.stride(1) % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0,
                    "gdn_tree_verify: ", name,
                    " must have dense heads and rows that start at 16 bytes");
}

#ifdef WEAVER_EMULATE
struct Target {
    explicit Target(const Tensor&) {}
    template <typename C, typename Kernel>
    void prepare(Kernel, const gdn::Layout<C>& at) const {
        emulator::regions() = {{"state", at.state},
                               {"k", at.k},
                               {"q", at.q},
                               {"v", at.v},
                               {"x", at.x},
                               {"w", at.w},
                               {"u", at.u},
                               {"diagonal", at.diagonal},
                               {"size", at.size},
                               {"c", at.c},
                               {"g", at.g},
                               {"beta", at.beta},
                               {"k_row", at.k_row},
                               {"q_row", at.q_row},
                               {"k_column", at.k_column},
                               {"words", at.words}};
    }
    void check() const {}
    void* stream = nullptr;
};
#else
// The device and stream to launch on; the device that was current before comes back.
struct Target {
    explicit Target(const Tensor& tensor) : device(tensor.get_device_index()) {
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                        "gdn_tree_verify: this PyTorch has no CUDA");
        cudaGetDevice(&before);
        if (before != device) cudaSetDevice(device);
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                        "gdn_tree_verify: no current stream");
    }
    ~Target() {
        if (before != device) cudaSetDevice(before);
    }
    template <typename C, typename Kernel>
    void prepare(Kernel kernel, const gdn::Layout<C>& at) const {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(at.total));
        STD_TORCH_CHECK(error == cudaSuccess, "gdn_tree_verify: ", cudaGetErrorString(error));
    }
    void check() const {
        const cudaError_t error = cudaGetLastError();
        STD_TORCH_CHECK(error == cudaSuccess, "gdn_tree_verify: ", cudaGetErrorString(error));
    }
    int device, before = 0;
    void* stream = nullptr;
};
#endif

template <typename C>
void launch(Params params, int64_t requests, const Target& target) {
    params.passes = (params.T + C::ROWS - 1) / C::ROWS;
    const gdn::Layout<C> at(params.passes);
    target.prepare(gdn::tree_verify<C>, at);
    const int slices = params.V / C::BV, heads = params.HV;
    WEAVER_LAUNCH(gdn::tree_verify<C>, slices, heads, static_cast<int>(requests), C::THREADS,
                  at.total, target.stream, params);
    target.check();
}

// Which forms are compiled: those of 4 pairs of warps for every type, the others for the types of
// Qwen3.6-27B. A quick build has its types alone, the emulator what the tests use.
template <Type ROWS_TYPE, Type STATE_TYPE, int K>
constexpr bool is_compiled(int pairs) {
    constexpr bool FEW = ROWS_TYPE == Type::BFLOAT16 && STATE_TYPE == Type::FLOAT32 && K == 128;
#if defined(WEAVER_QUICK)
    return FEW;
#elif defined(WEAVER_EMULATE)
    return FEW ||
           (pairs == 4 && K == 64 && (STATE_TYPE == Type::FLOAT32 || ROWS_TYPE == Type::BFLOAT16));
#else
    return FEW || pairs == 4;
#endif
}

template <Type ROWS_TYPE, Type STATE_TYPE, int K, int TILES, int PAIRS, bool CHAINED>
bool launch_if(int tiles, int pairs, bool chained, const Params& params, int64_t requests,
               const Target& target) {
    if constexpr (is_compiled<ROWS_TYPE, STATE_TYPE, K>(PAIRS)) {
        if (tiles == TILES && pairs == PAIRS && chained == CHAINED) {
            launch<gdn::Config<ROWS_TYPE, STATE_TYPE, K, TILES, PAIRS, CHAINED>>(params, requests,
                                                                                 target);
            return true;
        }
    }
    return false;
}

template <Type ROWS_TYPE, Type STATE_TYPE, int K, typename... Rest>
bool launch_form(const Rest&... rest) {
    return launch_if<ROWS_TYPE, STATE_TYPE, K, 1, 4, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 2, 4, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 4, 4, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 8, 4, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 4, 4, true>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 1, 2, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 2, 2, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 4, 2, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 8, 2, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 2, 8, false>(rest...) ||
           launch_if<ROWS_TYPE, STATE_TYPE, K, 4, 8, false>(rest...);
}

template <typename... Rest>
bool launch_any(Type rows, Type state, int64_t K, const Rest&... rest) {
    constexpr auto FLOAT32 = Type::FLOAT32, FLOAT16 = Type::FLOAT16, BFLOAT16 = Type::BFLOAT16;
    if (K == 128 && state == FLOAT32)
        return rows == BFLOAT16 ? launch_form<BFLOAT16, FLOAT32, 128>(rest...)
                                : launch_form<FLOAT16, FLOAT32, 128>(rest...);
    if (K == 128 && state == BFLOAT16)
        return rows == BFLOAT16 ? launch_form<BFLOAT16, BFLOAT16, 128>(rest...)
                                : launch_form<FLOAT16, BFLOAT16, 128>(rest...);
    if (K == 64 && state == FLOAT32)
        return rows == BFLOAT16 ? launch_form<BFLOAT16, FLOAT32, 64>(rest...)
                                : launch_form<FLOAT16, FLOAT32, 64>(rest...);
    if (K == 64 && state == BFLOAT16)
        return rows == BFLOAT16 ? launch_form<BFLOAT16, BFLOAT16, 64>(rest...)
                                : launch_form<FLOAT16, BFLOAT16, 64>(rest...);
    return false;
}

void tree_verify(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
                 Tensor state, Tensor slots, Tensor num_nodes, Tensor ancestors, Tensor out,
                 Tensor stash_k, Tensor stash_v, Tensor stash_g, Tensor stash_beta, double scale,
                 bool gates_raw, bool stash_rows, int64_t tiles, int64_t pairs) {
    const int64_t R = k.sizes()[0], T = k.sizes()[1], HK = k.sizes()[2], K = k.sizes()[3];
    const int64_t HV = v.sizes()[2], V = v.sizes()[3];
    const ScalarType rows = q.scalar_type();
    for (const auto& [tensor, name] :
         {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")}) {
        STD_TORCH_CHECK(tensor->scalar_type() == rows,
                        "gdn_tree_verify: q, k and v must be of one type");
        expect_rows(*tensor, name);
    }
    expect_dense(slots, ScalarType::Int, "state_indices");
    expect_dense(num_nodes, ScalarType::Int, "num_nodes");
    expect_dense(out, rows, "out");
    expect_dense(stash_g, ScalarType::Float, "the stash's g");
    expect_dense(stash_beta, ScalarType::Float, "the stash's beta");
    if (stash_rows) {
        expect_dense(stash_k, rows, "the stash's k");
        expect_dense(stash_v, rows, "the stash's v");
    }
    STD_TORCH_CHECK(ancestors.scalar_type() == ScalarType::Int && ancestors.stride(2) == 1,
                    "gdn_tree_verify: ancestors must be int32 words");
    STD_TORCH_CHECK(g.scalar_type() == beta.scalar_type() && g.stride(2) == 1 &&
                        beta.stride(2) == 1 && g.stride(0) == beta.stride(0) &&
                        g.stride(1) == beta.stride(1),
                    "gdn_tree_verify: g and beta must be of one type and layout");
    STD_TORCH_CHECK(state.stride(3) == 1 && state.stride(2) == K && state.stride(1) == V * K,
                    "gdn_tree_verify: states must be dense within a slot");
    STD_TORCH_CHECK(HV < 65536 && R < 65536, "gdn_tree_verify: at most 65,535 requests and heads");
    STD_TORCH_CHECK(pairs > 0 && V % (16 * pairs) == 0, "gdn_tree_verify: ", V,
                    " columns of V do not divide by ", 16 * pairs);

    Params p;
    p.q = q.data_ptr();
    p.k = k.data_ptr();
    p.v = v.data_ptr();
    p.g = g.data_ptr();
    p.beta = beta.data_ptr();
    p.A_log = A_log.data_ptr();
    p.dt_bias = dt_bias.data_ptr();
    p.state = state.data_ptr();
    p.slots = static_cast<const int32_t*>(slots.data_ptr());
    p.num_nodes = static_cast<const int32_t*>(num_nodes.data_ptr());
    p.ancestors = static_cast<const uint32_t*>(ancestors.data_ptr());
    p.out = out.data_ptr();
    p.stash_k = stash_k.data_ptr();
    p.stash_v = stash_v.data_ptr();
    p.stash_g = static_cast<float*>(stash_g.data_ptr());
    p.stash_beta = static_cast<float*>(stash_beta.data_ptr());
    p.q_stride_r = q.stride(0), p.q_stride_t = q.stride(1);
    p.k_stride_r = k.stride(0), p.k_stride_t = k.stride(1);
    p.v_stride_r = v.stride(0), p.v_stride_t = v.stride(1);
    p.gate_stride_r = g.stride(0), p.gate_stride_t = g.stride(1);
    p.ancestors_stride_r = ancestors.stride(0), p.ancestors_stride_t = ancestors.stride(1);
    p.state_stride = state.stride(0);
    p.scale = static_cast<float>(scale);
    p.T = static_cast<int>(T), p.HK = static_cast<int>(HK), p.HV = static_cast<int>(HV),
    p.V = static_cast<int>(V);
    // Exact for head counts below 2^16.
    p.inverse_group =
        HV == HK ? 0 : static_cast<uint32_t>(((1ull << 32) + HV / HK - 1) / (HV / HK));
    p.gate_type = type_of(g);
    p.A_log_type = type_of(A_log), p.dt_bias_type = type_of(dt_bias);
    p.gates_raw = gates_raw, p.stash_rows = stash_rows;

    const Target target(v);
    const bool chained = T > 16 * tiles;
    STD_TORCH_CHECK(T <= 16 * tiles * gdn::MAX_PASSES, "gdn_tree_verify: ", T,
                    " rows are more than ", gdn::MAX_PASSES, " passes");
    STD_TORCH_CHECK(launch_any(type_of(q), type_of(state), K, static_cast<int>(tiles),
                               static_cast<int>(pairs), chained, p, R, target),
                    "gdn_tree_verify: these types are not compiled for K = ", K, ", ", tiles,
                    " tiles and ", pairs, " pairs of warps", chained ? " in several passes" : "");
}

constexpr const char* SCHEMA =
    "gdn_tree_verify(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor "
    "dt_bias, Tensor state, "
    "Tensor slots, Tensor num_nodes, Tensor ancestors, Tensor(a!) out, Tensor(b!) stash_k, "
    "Tensor(c!) stash_v, "
    "Tensor(d!) stash_g, Tensor(e!) stash_beta, float scale, bool gates_raw, bool stash_rows, int "
    "tiles, int pairs) -> ()";

}  // namespace

#ifdef WEAVER_EMULATE
STABLE_TORCH_LIBRARY_FRAGMENT(vllm_weaver_emulator, m) {
    m.def(SCHEMA);
    m.def("set_order(int order) -> ()");
    m.def("find_races(bool on) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(vllm_weaver_emulator, CPU, m) {
    m.impl("gdn_tree_verify", TORCH_BOX(&tree_verify));
}

void set_order(int64_t order) { emulator::launch_order() = static_cast<unsigned>(order); }
void find_races(bool on) { emulator::launch_races() = on; }
STABLE_TORCH_LIBRARY_IMPL(vllm_weaver_emulator, CompositeExplicitAutograd, m) {
    m.impl("set_order", TORCH_BOX(&set_order));
    m.impl("find_races", TORCH_BOX(&find_races));
}
#else
STABLE_TORCH_LIBRARY_FRAGMENT(vllm_weaver, m) { m.def(SCHEMA); }
STABLE_TORCH_LIBRARY_IMPL(vllm_weaver, CUDA, m) {
    m.impl("gdn_tree_verify", TORCH_BOX(&tree_verify));
}
#endif
