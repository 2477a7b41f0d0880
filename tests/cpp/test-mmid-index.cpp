// ggml-cuda's MUL_MAT_ID with negative ids (patch 0008), on the host, against the CPU operation: the kernel that sorts a
// batch's rows by expert, the matrix-vector kernels of float and quantised weights with what is fused into them, the
// quantisers in front of mmq, and the order of the general path run from their own source. Every buffer ends at a page that cannot be touched, and holds
// garbage before. Not here: the tensor core kernels of mmf and mmq.

#include "common.cuh"

// CMake copies them, with launches as function calls
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include "mmid.cu"
#include "mmvf.cu"
#include "mmvq.cu"

// the activations that mmq reads, as they are in the backend
namespace quantisers {

#define CUDA_QUANTIZE_BLOCK_SIZE     256
#define CUDA_QUANTIZE_BLOCK_SIZE_MMQ 128
#define WARP_SIZE                    32
#define QK_MXFP4                     32
#define QK_NVFP4                     64

static constexpr int QK8_1_MMQ  = 128;
static constexpr int QK_FP4_MMQ = 256;

struct float4 { float  x, y, z, w; };
struct char4  { int8_t x, y, z, w; };
struct char2  { int8_t x, y; };

struct block_q8_1     { half2 ds; int8_t qs[QK8_1]; };
struct block_fp4_mmq  { uint32_t d4[4]; int8_t qs[QK_FP4_MMQ/2]; };
struct block_q8_1_mmq {
    union {
        float d4[4];
        half2 ds4[4];
        half  d2s6[8];
    };
    int8_t qs[QK8_1_MMQ];
};

enum mmq_q8_1_ds_layout { MMQ_Q8_1_DS_LAYOUT_D4, MMQ_Q8_1_DS_LAYOUT_DS4, MMQ_Q8_1_DS_LAYOUT_D2S6 };

static mmq_q8_1_ds_layout mmq_get_q8_1_ds_layout(ggml_type type) {
    return type == GGML_TYPE_Q8_0 ? MMQ_Q8_1_DS_LAYOUT_D4 : type == GGML_TYPE_Q4_0 ? MMQ_Q8_1_DS_LAYOUT_DS4 : MMQ_Q8_1_DS_LAYOUT_D2S6;
}

static float4  make_float4(float x, float y, float z, float w)     { return { x, y, z, w }; }
static int     __float2int_rn(float x)                             { return (int) rintf(x); }
static float   __frcp_rn(float x)                                  { return 1.0f/x; }
static float   ggml_cuda_e8m0_to_fp32(uint8_t e)                   { return ldexpf(1.0f, e - 127); }
static uint8_t ggml_cuda_float_to_fp4_e2m1(float x, float inverse) { return (uint8_t) ((int) (x*inverse) & 15); }
template <int width> static float warp_reduce_max(float)           { abort(); }
using std::max;
using std::min;

#include "quantize.cu"

} // namespace quantisers
#pragma GCC diagnostic pop

#include "check.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <random>

#include <sys/mman.h>
#include <unistd.h>

char data_mm_ids_helper[SHARED_BYTES];
char data_mmv[SHARED_BYTES];

static std::mt19937 rng(1);

template <typename T>
struct guarded {
    char * base;
    size_t mapped;
    T *    data;
    size_t n;

    explicit guarded(size_t n) : n(n) {
        const size_t page = sysconf(_SC_PAGESIZE);
        const size_t size = GGML_PAD(std::max<size_t>(n*sizeof(T), 1), page);
        mapped = size + 2*page;
        base   = (char *) mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        GGML_ASSERT(base != MAP_FAILED);
        mprotect(base, page, PROT_NONE);
        mprotect(base + page + size, page, PROT_NONE);
        data = (T *) (base + page + size - n*sizeof(T));
        memset((void *) data, 0xaa, n*sizeof(T));
    }
    ~guarded() { munmap(base, mapped); }
    guarded(const guarded &) = delete;
    T & operator[](size_t i) { return data[i]; }
};

struct batch {
    int n_experts, n_tokens, n_used, nchannels_y; // nchannels_y: input rows of a token
    int si1;                                      // ids from one token to the next
    std::vector<int32_t> ids;

    int32_t id(int it, int iex) const { return ids[it*si1 + iex]; }
};

static batch random_batch(int n_experts, int n_tokens, int n_used, bool broadcast, int negative_percent) {
    batch b = { n_experts, n_tokens, n_used, broadcast ? 1 : n_used, n_used + 3, {} };
    b.ids.assign((n_tokens - 1)*b.si1 + n_used, 1 << 30); // what lies between the rows is no id
    for (int it = 0; it < n_tokens; ++it) {
        std::vector<int32_t> experts(n_experts);
        for (int e = 0; e < n_experts; ++e) {
            experts[e] = e;
        }
        std::shuffle(experts.begin(), experts.end(), rng);
        for (int iex = 0; iex < n_used; ++iex) {
            const bool negative = (int) (rng() % 100) < negative_percent;
            b.ids[it*b.si1 + iex] = negative ? (rng() % 2 ? -1 : INT_MIN) : experts[iex];
        }
    }
    return b;
}

static const int N_EMBD = 4;
static const int N_ROWS = 37;

struct matrix_shape { int64_t k, rows; };
static const matrix_shape SMALL = { N_EMBD, N_ROWS };

// small integers, so that sums are exact in any order
static std::vector<float> random_floats(size_t n) {
    std::vector<float> values(n);
    for (float & v : values) {
        v = (float) ((int) (rng() % 15) - 7);
    }
    return values;
}

static std::vector<float> cpu_result(ggml_backend_t backend, const batch & b, const matrix_shape & shape, const std::vector<float> & weights,
        const std::vector<float> & input, const std::vector<float> * before) {
    ggml_init_params params = { ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * as  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape.k, shape.rows, b.n_experts);
    ggml_tensor * cur = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape.k, b.nchannels_y, b.n_tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, b.n_used, b.n_tokens);
    ggml_tensor * dst = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape.rows, b.n_used, b.n_tokens);
    ggml_tensor * out = before ? ggml_mul_mat_id_into(ctx.get(), as, cur, ids, dst) : ggml_mul_mat_id(ctx.get(), as, cur, ids);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    ggml_backend_tensor_set(as,  weights.data(), 0, ggml_nbytes(as));
    ggml_backend_tensor_set(cur, input.data(),   0, ggml_nbytes(cur));
    for (int it = 0; it < b.n_tokens; ++it) {
        ggml_backend_tensor_set(ids, b.ids.data() + it*b.si1, it*ids->nb[1], b.n_used*sizeof(int32_t));
    }
    if (before) {
        ggml_backend_tensor_set(dst, before->data(), 0, ggml_nbytes(dst));
    }
    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, out);
    CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);
    std::vector<float> result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    return result;
}

static float dot(const float * a, const float * b) {
    float sum = 0.0f;
    for (int i = 0; i < N_EMBD; ++i) {
        sum += a[i]*b[i];
    }
    return sum;
}

// what mmq and mmf do with the helper's maps, expert by expert
static void check_helper(ggml_backend_t backend, const batch & b, bool keep_rows, bool write_inverse) {
    const int n_rows = b.n_tokens*b.n_used;
    const int sis1   = b.nchannels_y;

    const std::vector<float> weights = random_floats((size_t) N_EMBD*N_ROWS*b.n_experts);
    const std::vector<float> input   = random_floats((size_t) N_EMBD*b.nchannels_y*b.n_tokens);
    const std::vector<float> before  = random_floats((size_t) N_ROWS*n_rows);

    guarded<int32_t> ids(b.ids.size());
    guarded<int32_t> ids_src1(n_rows);
    guarded<int32_t> ids_dst(n_rows);
    guarded<int32_t> bounds(b.n_experts + 1);
    guarded<float>   dst((size_t) N_ROWS*n_rows);
    std::copy(b.ids.begin(), b.ids.end(), ids.data);
    std::copy(before.begin(), before.end(), dst.data);

    ggml_cuda_launch_mm_ids_helper(ids.data, ids_src1.data, ids_dst.data, bounds.data,
        keep_rows ? nullptr : dst.data, N_ROWS, N_ROWS, (int64_t) N_ROWS*b.n_used,
        b.n_experts, b.n_tokens, b.n_used, b.nchannels_y, b.si1, sis1, write_inverse, nullptr);

    CHECK(bounds[0] == 0);
    CHECK(bounds[b.n_experts] <= n_rows);
    for (int e = 0; e < b.n_experts; ++e) {
        CHECK(bounds[e] <= bounds[e + 1]);
    }
    for (int i = 0; i < n_rows; ++i) {
        CHECK(ids_dst[i] >= 0 && ids_dst[i] < n_rows);
    }

    // src1 in compact order, as the quantisers make it: from every place of the forward map, or to every place of the inverse one
    std::vector<const float *> compact(n_rows, nullptr);
    for (int it = 0; it < b.n_tokens; ++it) {
        for (int iex = 0; iex < b.n_used; ++iex) {
            const int i = it*b.n_used + iex;
            if (!write_inverse) {
                CHECK(ids_src1[i] >= 0 && ids_src1[i] < b.n_tokens*b.nchannels_y);
                compact[i] = input.data() + ids_src1[i]*N_EMBD;
            } else if (b.id(it, iex) < 0) {
                CHECK(ids_src1[i] == -1);
            } else {
                CHECK(ids_src1[i] >= 0 && ids_src1[i] < bounds[b.n_experts]);
                CHECK(compact[ids_src1[i]] == nullptr);
                compact[ids_src1[i]] = input.data() + (it*sis1 + iex % b.nchannels_y)*N_EMBD;
            }
        }
    }

    std::vector<bool> written(n_rows, false);
    for (int e = 0; e < b.n_experts; ++e) {
        for (int i = bounds[e]; i < bounds[e + 1]; ++i) {
            CHECK(compact[i] != nullptr && !written[ids_dst[i]]);
            written[ids_dst[i]] = true;
            for (int row = 0; row < N_ROWS && compact[i]; ++row) {
                dst[(size_t) ids_dst[i]*N_ROWS + row] = dot(weights.data() + ((size_t) e*N_ROWS + row)*N_EMBD, compact[i]);
            }
        }
    }
    const std::vector<float> want = cpu_result(backend, b, SMALL, weights, input, keep_rows ? &before : nullptr);
    CHECK(std::equal(want.begin(), want.end(), dst.data));
}

// what the quantisers write through the helper's maps, against the same rows quantised one after another
static void check_quantised(const batch & b, ggml_type type) {
    const bool    fp4    = type == GGML_TYPE_MXFP4;
    const int     n_rows = b.n_tokens*b.n_used;
    const int64_t ne00   = 96;
    const int64_t ne0    = MATRIX_ROW_PADDING;
    const int64_t n_cols = ne0/(fp4 ? quantisers::QK_FP4_MMQ : quantisers::QK8_1_MMQ);
    const bool    inverse = b.nchannels_y == 1 && b.n_used > 1;

    typedef quantisers::block_q8_1_mmq block; // both kinds have this size
    static_assert(sizeof(block) == sizeof(quantisers::block_fp4_mmq), "blocks differ");

    guarded<float>   input(ne00*b.nchannels_y*b.n_tokens);
    guarded<int32_t> ids_src1(n_rows);
    guarded<int32_t> ids_dst(n_rows);
    guarded<int32_t> bounds(b.n_experts + 1);
    guarded<block>   plain(n_cols*b.nchannels_y*b.n_tokens);
    guarded<block>   compact(n_cols*n_rows);
    const std::vector<float> values = random_floats(input.n);
    std::copy(values.begin(), values.end(), input.data);

    cuda_on_host::shared_memory = data_mm_ids_helper;
    ggml_cuda_launch_mm_ids_helper(b.ids.data(), ids_src1.data, ids_dst.data, bounds.data, nullptr, 0, 0, 0,
        b.n_experts, b.n_tokens, b.n_used, b.nchannels_y, b.si1, b.nchannels_y, inverse, nullptr);

    if (fp4) {
        quantisers::quantize_mmq_fp4_cuda(input.data, nullptr, plain.data, nullptr, type, false, ne00, ne00, 0, 0, ne0, b.nchannels_y*b.n_tokens, 1, 1, nullptr);
    } else {
        quantisers::quantize_mmq_q8_1_cuda(input.data, nullptr, plain.data, type, ne00, ne00, 0, 0, ne0, b.nchannels_y*b.n_tokens, 1, 1, nullptr);
    }
    if (inverse && fp4) {
        quantisers::quantize_scatter_mmq_fp4_cuda(input.data, ids_src1.data, compact.data, nullptr, type, false, ne00, ne00, ne0, b.n_tokens, n_rows, b.n_used, nullptr);
    } else if (inverse) {
        quantisers::quantize_scatter_mmq_q8_1_cuda(input.data, ids_src1.data, compact.data, type, ne00, ne00, ne0, b.n_tokens, n_rows, b.n_used, nullptr);
    } else if (fp4) {
        quantisers::quantize_mmq_fp4_cuda(input.data, ids_src1.data, compact.data, nullptr, type, false, ne00, ne00, 0, 0, ne0, n_rows, 1, 1, nullptr);
    } else {
        quantisers::quantize_mmq_q8_1_cuda(input.data, ids_src1.data, compact.data, type, ne00, ne00, 0, 0, ne0, n_rows, 1, 1, nullptr);
    }

    guarded<block> untouched(1);
    for (int i = 0; i < n_rows; ++i) {
        const int it  = ids_dst[i]/b.n_used;
        const int row = it*b.nchannels_y + ids_dst[i] % b.n_used % b.nchannels_y;
        for (int64_t col = 0; col < n_cols; ++col) {
            const block & got = compact[col*n_rows + i];
            if (i < bounds[b.n_experts]) {
                CHECK(memcmp(&got, &plain[col*b.nchannels_y*b.n_tokens + row], sizeof(block)) == 0);
            } else if (inverse) {
                CHECK(memcmp(&got, untouched.data, sizeof(block)) == 0);
            }
        }
    }
}

// the general path: rows gathered in sorted order, multiplied expert by expert, gathered back
static void check_sorted(ggml_backend_t backend, const batch & b, bool keep_rows) {
    const int n_rows = b.n_tokens*b.n_used;

    const std::vector<float> weights = random_floats((size_t) N_EMBD*N_ROWS*b.n_experts);
    const std::vector<float> input   = random_floats((size_t) N_EMBD*b.nchannels_y*b.n_tokens);
    const std::vector<float> before  = random_floats((size_t) N_ROWS*n_rows);

    const ggml_cuda_mmid_sorted sorted = ggml_cuda_mmid_sort(b.ids.data(), 1, b.si1, b.n_experts, b.n_tokens, b.n_used, b.nchannels_y);
    CHECK((int) sorted.to_sorted.size() == n_rows && (int) sorted.from_sorted.size() == n_rows);

    std::vector<float> rows((size_t) N_ROWS*n_rows);
    int i = 0;
    for (int e = 0; e < b.n_experts; ++e) {
        for (int j = 0; j < sorted.tokens_per_expert[e]; ++j, ++i) {
            for (int row = 0; row < N_ROWS; ++row) {
                rows[i*N_ROWS + row] = dot(weights.data() + ((size_t) e*N_ROWS + row)*N_EMBD, input.data() + sorted.to_sorted[i]*N_EMBD);
            }
        }
    }
    CHECK(i == sorted.n_computed);
    for (; i < n_rows; ++i) {
        for (int row = 0; row < N_ROWS; ++row) {
            rows[i*N_ROWS + row] = keep_rows ? before[sorted.to_sorted[i]*N_ROWS + row] : 0.0f;
        }
    }
    std::vector<float> result;
    for (int32_t from : sorted.from_sorted) {
        result.insert(result.end(), rows.begin() + from*N_ROWS, rows.begin() + (from + 1)*N_ROWS);
    }
    CHECK(result == cpu_result(backend, b, SMALL, weights, input, keep_rows ? &before : nullptr));
}

// kernels over rows of dst: blocks of n_block rows, the last one not full
static void check_skip_row(int nrows, int n_block, int nlanes, bool keep_rows) {
    guarded<float> row(nrows);
    std::fill(row.data, row.data + nrows, 1.0f);
    for (int row0 = 0; row0 < nrows; row0 += n_block) {
        for (int lane = 0; lane < nlanes; ++lane) {
            ggml_cuda_mmid_skip_row(row.data, row0, n_block, nrows, keep_rows, lane, nlanes);
        }
        // and nothing of the next block
        for (int i = 0; i < nrows; ++i) {
            CHECK(row[i] == (keep_rows || i >= row0 + n_block ? 1.0f : 0.0f));
        }
    }
}

// the matrix-vector kernels, through the functions that the backend calls

enum fused { FUSED_NOTHING, FUSED_BIAS, FUSED_GLU };

struct weights_on_host {
    std::vector<float> values;
    guarded<uint8_t>   data;

    weights_on_host(ggml_type type, const matrix_shape & shape, int n_experts)
        : values(random_floats(shape.k*shape.rows*n_experts)), data(ggml_row_size(type, shape.k)*shape.rows*n_experts) {
        for (size_t i = 0; i < values.size(); ++i) {
            switch (type) {
                case GGML_TYPE_F32:  ((float       *) data.data)[i] = values[i];                    break;
                case GGML_TYPE_F16:  ((ggml_fp16_t *) data.data)[i] = ggml_fp32_to_fp16(values[i]); break;
                case GGML_TYPE_BF16: ((ggml_bf16_t *) data.data)[i] = ggml_fp32_to_bf16(values[i]); break;
                case GGML_TYPE_Q8_0: {
                    block_q8_0 & block = ((block_q8_0 *) data.data)[i/QK8_0];
                    block.d = ggml_fp32_to_fp16(1.0f);
                    block.qs[i % QK8_0] = (int8_t) values[i];
                } break;
                default: abort();
            }
        }
    }
};

static void check_vector_kernel(ggml_backend_t backend, ggml_type type, const matrix_shape & shape, const batch & b, bool keep_rows, fused with) {
    ggml_init_params params = { ggml_tensor_overhead()*32, nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));

    weights_on_host w(type, shape, b.n_experts);
    weights_on_host w_gate(type, shape, b.n_experts);
    const std::vector<float> input  = random_floats(shape.k*b.nchannels_y*b.n_tokens);
    const std::vector<float> bias   = random_floats(shape.rows*b.n_experts);
    const std::vector<float> before = random_floats(shape.rows*b.n_used*b.n_tokens);

    guarded<float>   input_data(input.size());
    guarded<float>   bias_data(bias.size());
    guarded<float>   dst_data(before.size());
    guarded<int32_t> ids_data(b.ids.size());
    std::copy(input.begin(),  input.end(),  input_data.data);
    std::copy(bias.begin(),   bias.end(),   bias_data.data);
    std::copy(before.begin(), before.end(), dst_data.data);
    std::copy(b.ids.begin(),  b.ids.end(),  ids_data.data);

    alignas(64) static char of_weights[64];
    ggml_backend_buffer_ptr buffer(ggml_backend_cpu_buffer_from_ptr(of_weights, sizeof(of_weights)));
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    auto new_tensor = [&](ggml_type t, int64_t ne0, int64_t ne1, int64_t ne2, void * data) {
        ggml_tensor * tensor = ggml_new_tensor_3d(ctx.get(), t, ne0, ne1, ne2);
        tensor->data   = data;
        tensor->buffer = buffer.get();
        return tensor;
    };
    ggml_tensor * as   = new_tensor(type, shape.k, shape.rows, b.n_experts, w.data.data);
    ggml_tensor * gate = new_tensor(type, shape.k, shape.rows, b.n_experts, w_gate.data.data);
    ggml_tensor * cur  = new_tensor(GGML_TYPE_F32, shape.k, b.nchannels_y, b.n_tokens, input_data.data);
    ggml_tensor * add  = new_tensor(GGML_TYPE_F32, shape.rows, b.n_experts, 1, bias_data.data);
    ggml_tensor * ids  = new_tensor(GGML_TYPE_I32, b.n_used, b.n_tokens, 1, ids_data.data);
    ids->nb[1] = b.si1*sizeof(int32_t);
    ggml_tensor * dst0 = new_tensor(GGML_TYPE_F32, shape.rows, b.n_used, b.n_tokens, dst_data.data);

    ggml_tensor * dst = keep_rows ? ggml_mul_mat_id_into(ctx.get(), as, cur, ids, dst0) : ggml_mul_mat_id(ctx.get(), as, cur, ids);
    ggml_cuda_mm_fusion_args_host fusion;
    if (with == FUSED_BIAS) {
        dst = ggml_add_id(ctx.get(), dst, add, ids);
        fusion.x_bias = add;
    } else if (with == FUSED_GLU) {
        dst = ggml_swiglu_split(ctx.get(), ggml_mul_mat_id(ctx.get(), gate, cur, ids), dst);
        fusion.gate = gate;
    }
    dst->data = dst_data.data;

    ggml_backend_cuda_context cuda;
    if (ggml_is_quantized(type)) {
        ggml_cuda_mul_mat_vec_q(cuda, as, cur, ids, dst, with == FUSED_NOTHING ? nullptr : &fusion);
    } else {
        ggml_cuda_mul_mat_vec_f(cuda, as, cur, ids, dst, with == FUSED_NOTHING ? nullptr : &fusion);
    }

    std::vector<float> want = cpu_result(backend, b, shape, w.values, input, keep_rows ? &before : nullptr);
    const std::vector<float> of_gate = with == FUSED_GLU ? cpu_result(backend, b, shape, w_gate.values, input, nullptr) : want;
    for (size_t i = 0; i < want.size(); ++i) {
        const int     r  = (int) (i/shape.rows);
        const int32_t id = b.id(r/b.n_used, r % b.n_used);
        if (with == FUSED_BIAS && id >= 0) {
            want[i] += bias[id*shape.rows + i % shape.rows];
        } else if (with == FUSED_GLU) {
            want[i] *= ggml_cuda_op_silu_single(of_gate[i]);
        }
    }
    CHECK(std::equal(want.begin(), want.end(), dst_data.data));
}

static void check_vector_kernels(ggml_backend_t backend) {
    cuda_on_host::shared_memory = data_mmv;
    for (int negative_percent : { 0, 50, 100 }) {
        for (int n_tokens : { 1, 2, 5 }) {
            for (bool broadcast : { false, true }) {
                for (int flags = 0; flags < 4; ++flags) {
                    const bool  keep_rows = flags == 1;
                    const fused with      = flags == 2 ? FUSED_BIAS : flags == 3 ? FUSED_GLU : FUSED_NOTHING;
                    const batch b         = random_batch(6, n_tokens, 3, broadcast, negative_percent);
                    cuda_on_host::reverse_blocks = rng() % 2;
                    if (n_tokens == 1 || with == FUSED_NOTHING) {
                        for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 }) {
                            check_vector_kernel(backend, type, { 160, 11 }, b, keep_rows, with);
                        }
                    }
                    // a block takes several rows of short ones
                    check_vector_kernel(backend, GGML_TYPE_Q8_0, {   64, 16 }, b, keep_rows, with);
                    check_vector_kernel(backend, GGML_TYPE_Q8_0, { 4096,  6 }, b, keep_rows, with);
                }
            }
        }
    }
}

int main() {
    cuda_on_host::shared_memory = data_mm_ids_helper;

    ggml_backend_ptr backend(ggml_backend_cpu_init());
    for (int n_used : { 1, 2, 4, 5, 6, 8, 10, 16, 32, 40 }) {
        for (int n_tokens : { 1, 7, 37 }) {
            for (int negative_percent : { 0, 40, 100 }) {
                for (int flags = rng() % 4; flags < 8; flags += 4) {
                    const bool  broadcast     = flags & 1;
                    const bool  keep_rows     = flags & 2;
                    const bool  write_inverse = broadcast && n_used > 1; // as mmq decides
                    const batch b             = random_batch(n_used + (flags & 4 ? 0 : 3), n_tokens, n_used, broadcast, negative_percent);
                    cuda_on_host::reverse_blocks = rng() % 2;
                    check_helper(backend.get(), b, keep_rows, write_inverse);
                    if (write_inverse) {
                        check_helper(backend.get(), b, keep_rows, false); // as mmf asks
                    }
                    check_sorted(backend.get(), b, keep_rows);
                }
            }
        }
    }
    for (int nrows : { 1, 31, 32, 33, 100 }) {
        for (int n_block : { 1, 2, 4, 32 }) {
            for (int nlanes : { 1, 32, 64 }) {
                check_skip_row(nrows, n_block, nlanes, false);
                check_skip_row(nrows, n_block, nlanes, true);
            }
        }
    }
    for (ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q2_K, GGML_TYPE_MXFP4 }) {
        for (int negative_percent : { 0, 40, 100 }) {
            for (bool broadcast : { false, true }) {
                check_quantised(random_batch(9, 7, 5, broadcast, negative_percent), type);
            }
        }
    }
    check_vector_kernels(backend.get());
    return check_result("mmid-index");
}
