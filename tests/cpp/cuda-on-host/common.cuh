// Stands in for ggml-cuda's common.cuh, so that a kernel's own source runs on the host, without a card or a toolkit.
//
// A block's threads are fibers that take turns. They switch where CUDA's threads meet: a shuffle, a reduction or a barrier
// goes on once every live thread of the warp (of the block, for __syncthreads) has come to it, and a block whose threads
// wait for each other at different places aborts. Blocks run one after another, in an order that the test chooses. Shared
// memory starts as garbage and must not be written past the size of the launch.
//
// Arithmetic is not what this checks: products are made of small integers, so that sums are exact in any order, and the
// quantised types have a dot product for Q8_0 alone, over activations that lose nothing.

#pragma once

#include "ggml.h"
#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <ucontext.h>

#ifndef CUDA_ON_HOST_WARP_SIZE
#define CUDA_ON_HOST_WARP_SIZE 32
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static // blocks run one at a time; CMake takes it from extern declarations

typedef void * cudaStream_t;

struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

struct uint2  { unsigned int x, y; };
struct uint3  { unsigned int x, y, z; };
struct float2 { float x, y; };

static const size_t SHARED_BYTES = 64*1024;
static const char   SHARED_FILL  = (char) 0xaa;

namespace cuda_on_host {

struct meeting {
    std::vector<uint64_t> values, seen; // what each thread brings; what all of them brought
    int n_arrived  = 0;
    int n_alive    = 0;
    int generation = 0;

    void arrive() {
        if (n_arrived == n_alive && n_alive > 0) {
            seen      = values;
            n_arrived = 0;
            generation++;
        }
    }
};

struct fiber {
    ucontext_t        context;
    std::vector<char> stack;
    bool              done = false;
};

static std::vector<fiber>    fibers;
static std::vector<meeting>  warps;
static meeting               block;
static ucontext_t            scheduler;
static int                   current;
static int                   n_steps; // meetings and exits so far
static std::function<void()> kernel;
static bool                  reverse_blocks = false;
static char *                shared_memory  = nullptr; // the kernel's extern __shared__ array, SHARED_BYTES long

static inline const std::vector<uint64_t> & meet(meeting & m, int index, uint64_t value) {
    const int generation = m.generation;
    m.values[index] = value;
    m.n_arrived++;
    m.arrive();
    n_steps += m.generation != generation;
    while (m.generation == generation) {
        swapcontext(&fibers[current].context, &scheduler);
    }
    return m.seen;
}

static inline const std::vector<uint64_t> & meet_warp(uint64_t value) {
    return meet(warps[current/CUDA_ON_HOST_WARP_SIZE], current % CUDA_ON_HOST_WARP_SIZE, value);
}

static inline void run_fiber() {
    kernel();
    fibers[current].done = true;
    meeting & warp = warps[current/CUDA_ON_HOST_WARP_SIZE];
    warp.n_alive--;
    warp.arrive();
    block.n_alive--;
    block.arrive();
    n_steps++;
}

static inline void run_block() {
    const int n = blockDim.x*blockDim.y*blockDim.z;
    fibers.resize(n);
    warps.assign((n + CUDA_ON_HOST_WARP_SIZE - 1)/CUDA_ON_HOST_WARP_SIZE, meeting());
    block = meeting();
    block.n_alive = n;
    block.values.resize(n);
    for (int i = 0; i < n; ++i) {
        warps[i/CUDA_ON_HOST_WARP_SIZE].n_alive++;
        warps[i/CUDA_ON_HOST_WARP_SIZE].values.resize(CUDA_ON_HOST_WARP_SIZE);
        fibers[i].done = false;
        fibers[i].stack.resize(64*1024);
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp   = fibers[i].stack.data();
        fibers[i].context.uc_stack.ss_size = fibers[i].stack.size();
        fibers[i].context.uc_link          = &scheduler;
        makecontext(&fibers[i].context, run_fiber, 0);
    }
    for (int n_done = 0; n_done < n; ) {
        const int before = n_steps;
        n_done = 0;
        for (current = 0; current < n; ++current) {
            if (!fibers[current].done) {
                threadIdx = dim3(current % blockDim.x, current/blockDim.x % blockDim.y, current/(blockDim.x*blockDim.y));
                swapcontext(&scheduler, &fibers[current].context);
            }
            n_done += fibers[current].done;
        }
        if (n_steps == before && n_done < n) {
            fprintf(stderr, "block %u: its threads wait for each other\n", blockIdx.x);
            abort();
        }
    }
}

static inline void launch(dim3 blocks, dim3 threads, size_t nbytes_shared, cudaStream_t, const std::function<void()> & call) {
    GGML_ASSERT(nbytes_shared <= SHARED_BYTES);
    gridDim  = blocks;
    blockDim = threads;
    kernel   = call;
    const unsigned int n_blocks = blocks.x*blocks.y*blocks.z;
    for (unsigned int n = 0; n < n_blocks; ++n) {
        const unsigned int i = reverse_blocks ? n_blocks - 1 - n : n;
        blockIdx = dim3(i % blocks.x, i/blocks.x % blocks.y, i/(blocks.x*blocks.y));
        memset(shared_memory, SHARED_FILL, SHARED_BYTES);
        run_block();
        for (size_t at = nbytes_shared; at < SHARED_BYTES; ++at) {
            GGML_ASSERT(shared_memory[at] == SHARED_FILL && "written past the shared memory of the launch");
        }
    }
}

} // namespace cuda_on_host

static constexpr int ggml_cuda_get_physical_warp_size() { return CUDA_ON_HOST_WARP_SIZE; }

static inline void ggml_cuda_syncwarp() { cuda_on_host::meet_warp(0); }

static inline void __syncthreads() { cuda_on_host::meet(cuda_on_host::block, cuda_on_host::current, 0); }

static inline int group_of(int width) { return cuda_on_host::current % CUDA_ON_HOST_WARP_SIZE/width*width; }

// every lane's value, of 8 bytes at most
template <typename T>
static T of_lane(const std::vector<uint64_t> & all, int lane) {
    T value;
    memcpy((void *) &value, &all[lane], sizeof(value));
    return value;
}

template <typename T>
static const std::vector<uint64_t> & meet_with(T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    return cuda_on_host::meet_warp(bits);
}

template <int width>
static int warp_reduce_any(int value) {
    const std::vector<uint64_t> & all = cuda_on_host::meet_warp(value != 0);
    int any = 0;
    for (int i = 0; i < width; ++i) {
        any |= all[group_of(width) + i] != 0;
    }
    return any;
}

template <int width>
static int warp_reduce_sum(int value) {
    const std::vector<uint64_t> & all = cuda_on_host::meet_warp((uint64_t) (int64_t) value);
    int64_t sum = 0;
    for (int i = 0; i < width; ++i) {
        sum += (int64_t) all[group_of(width) + i];
    }
    return (int) sum;
}

template <int width>
static float warp_reduce_sum(float value) {
    const std::vector<uint64_t> & all = meet_with(value);
    float sum = 0.0f;
    for (int i = 0; i < width; ++i) {
        sum += of_lane<float>(all, group_of(width) + i);
    }
    return sum;
}

template <typename T>
static T __shfl_sync(unsigned, T value, int lane, int width) {
    return of_lane<T>(meet_with(value), group_of(width) + lane % width);
}

template <typename T>
static T __shfl_up_sync(unsigned, T value, unsigned delta, int width) {
    const int lane = cuda_on_host::current % CUDA_ON_HOST_WARP_SIZE;
    return of_lane<T>(meet_with(value), lane - group_of(width) >= (int) delta ? lane - delta : lane);
}

template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask, int width) {
    GGML_ASSERT(mask < width);
    return of_lane<T>(meet_with(value), cuda_on_host::current % CUDA_ON_HOST_WARP_SIZE ^ mask);
}

// what launchers ask the device

struct ggml_cuda_device_info {
    struct { int warp_size; size_t smpbo; int cc; } devices[1];
};

static inline int ggml_cuda_get_device() { return 0; }

// macros: the preprocessor asks for them too, about an architecture that is not there
#define GGML_CUDA_CC_PASCAL       600
#define GGML_CUDA_CC_VOLTA        700
#define GGML_CUDA_CC_TURING       750
#define GGML_CUDA_CC_AMPERE       800
#define GGML_CUDA_CC_ORIN         870
#define GGML_CUDA_CC_ADA_LOVELACE 890
#define GGML_CUDA_CC_BLACKWELL    1200
#define GGML_CUDA_CC_DGX_SPARK    1210
#define GGML_CUDA_CC_OFFSET_AMD   0x1000000
#define GGML_CUDA_CC_RDNA1        (GGML_CUDA_CC_OFFSET_AMD + 0x1010)

static inline const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info info = { { { CUDA_ON_HOST_WARP_SIZE, SHARED_BYTES, GGML_CUDA_CC_ADA_LOVELACE } } };
    return info;
}

#define CUDA_SET_SHARED_MEMORY_LIMIT(kernel, nbytes) GGML_UNUSED(nbytes)

#define GGML_CUDA_CC_IS_NVIDIA(cc)  ((cc) < GGML_CUDA_CC_OFFSET_AMD)
#define GGML_CUDA_CC_IS_AMD(cc)     ((cc) >= GGML_CUDA_CC_OFFSET_AMD)
#define GGML_CUDA_CC_IS_RDNA(cc)    GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA1(cc)   GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA2(cc)   GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA3(cc)   GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA3_0(cc) GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA3_5(cc) GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_RDNA4(cc)   GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_CDNA(cc)    GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_CDNA1(cc)   GGML_CUDA_CC_IS_AMD(cc)
#define GGML_CUDA_CC_IS_GCN(cc)     GGML_CUDA_CC_IS_AMD(cc)

static inline int  ggml_cuda_highest_compiled_arch(int cc) { return cc; }
static inline bool fast_fp16_available        (int) { return false; }
static inline bool fp16_mma_hardware_available(int) { return true; }
static inline bool fp32_mma_hardware_available(int) { return true; }
static inline bool bf16_mma_hardware_available(int) { return true; }
static inline bool ampere_mma_available       (int) { return true; }

#define CUDA_CHECK(call) (void) (call)
static inline int cudaMemsetAsync(void * data, int value, size_t size, cudaStream_t) { memset(data, value, size); return 0; }

struct ggml_cuda_pool {};

struct ggml_backend_cuda_context {
    int device = 0;
    cudaStream_t     stream() { return nullptr; }
    ggml_cuda_pool & pool()   { return pool_; }
    ggml_cuda_pool   pool_;
};

template <typename T>
struct ggml_cuda_pool_alloc {
    std::vector<T> data;
    ggml_cuda_pool_alloc(ggml_cuda_pool &, size_t n) : data(n) {}
    T * get() { return data.data(); }
};

// what kernels over rows use

#define GGML_CUDA_RESTRICT
#define NO_DEVICE_CODE abort()

static inline void ggml_cuda_pdl_sync() {}
static inline void ggml_cuda_pdl_lc()   {}

static inline uint3    make_uint3(unsigned int x, unsigned int y, unsigned int z) { return { x, y, z }; }
static inline float2   make_float2(float x, float y)                              { return { x, y }; }
static inline uint3    init_fastdiv_values(uint64_t d)                            { return { 0, 0, (unsigned int) d }; }
static inline uint32_t fastdiv(uint32_t n, uint3 d)                               { return n/d.z; }
static inline uint32_t fastmodulo(uint32_t n, uint3 d)                            { return n%d.z; }

struct half {
    ggml_fp16_t x;
    half() = default;
    half(float value) : x(ggml_fp32_to_fp16(value)) {}
};
struct half2         { half x, y; };
struct nv_bfloat16   { ggml_bf16_t x; };
struct nv_bfloat162  { nv_bfloat16 x, y; };

static inline half2  make_half2(float x, float y)   { return { x, y }; }
static inline float2 __half22float2(half2 h) { return { ggml_fp16_to_fp32(h.x.x), ggml_fp16_to_fp32(h.y.x) }; }
static inline void   ggml_cuda_mad(float & acc, float a, float b)       { acc += a*b; }
static inline void   ggml_cuda_mad(float & acc, nv_bfloat16 a, float b) { acc += ggml_bf16_to_fp32(a.x)*b; }

struct ggml_cuda_mm_fusion_args_host {
    const ggml_tensor * x_bias     = nullptr;
    const ggml_tensor * gate       = nullptr;
    const ggml_tensor * gate_bias  = nullptr;
    const ggml_tensor * x_scale    = nullptr;
    const ggml_tensor * gate_scale = nullptr;
    ggml_glu_op         glu_op     = GGML_GLU_OP_SWIGLU;
    float               glu_limit  = 0.0f;
};

struct ggml_cuda_mm_fusion_args_device {
    const void * x_bias     = nullptr;
    const void * gate       = nullptr;
    const void * gate_bias  = nullptr;
    const void * x_scale    = nullptr;
    const void * gate_scale = nullptr;
    ggml_glu_op  glu_op     = GGML_GLU_OP_SWIGLU;
    float        glu_limit  = 0.0f;
    bool         keep_rows  = false;
};

struct ggml_cuda_kernel_launch_params {
    dim3         blocks, threads;
    size_t       nbytes_shared;
    cudaStream_t stream;
    ggml_cuda_kernel_launch_params(dim3 blocks, dim3 threads, size_t nbytes_shared, cudaStream_t stream)
        : blocks(blocks), threads(threads), nbytes_shared(nbytes_shared), stream(stream) {}
    ggml_cuda_kernel_launch_params(dim3 blocks, dim3 threads, int nbytes_shared, cudaStream_t stream)
        : ggml_cuda_kernel_launch_params(blocks, threads, (size_t) nbytes_shared, stream) {}
};

template <typename... P, typename... A>
static void ggml_cuda_kernel_launch(void (*kernel)(P...), const ggml_cuda_kernel_launch_params & params, A... args) {
    cuda_on_host::launch(params.blocks, params.threads, params.nbytes_shared, params.stream, [=] { kernel(args...); });
}

// quantised types: the blocks of ggml for weights, and activations that keep small integers as they are

#define QK8_0              32
#define QK8_1              32
#define MATRIX_ROW_PADDING 512

struct block_q8_0 { ggml_fp16_t d; int8_t qs[QK8_0]; };
struct block_q8_1 { int8_t qs[QK8_1]; };

template <ggml_type type>
struct ggml_cuda_type_traits {
    static constexpr int qk = QK8_0;
    static constexpr int qi = QK8_0/4;
    static constexpr int bs = sizeof(block_q8_0);
};

static inline void quantize_row_q8_1_cuda(
        const float * x, const int32_t *, void * vy, ggml_type, int64_t ne00, int64_t s01, int64_t s02, int64_t,
        int64_t ne0, int64_t ne1, int64_t ne2, int64_t, cudaStream_t) {
    for (int64_t i2 = 0; i2 < ne2; ++i2) {
        for (int64_t i1 = 0; i1 < ne1; ++i1) {
            for (int64_t i0 = 0; i0 < ne0; ++i0) {
                block_q8_1 & block = ((block_q8_1 *) vy)[((i2*ne1 + i1)*ne0 + i0)/QK8_1];
                block.qs[i0 % QK8_1] = i0 < ne00 ? (int8_t) x[i2*s02 + i1*s01 + i0] : 0;
            }
        }
    }
}

static inline float vec_dot_q8_0_q8_1(const void * vbq, const block_q8_1 * bq8_1, const int & kbx, const int & iqs) {
    const block_q8_0 & b = ((const block_q8_0 *) vbq)[kbx];
    int sum = 0;
    for (int i = 4*iqs; i < 4*(iqs + 2); ++i) {
        sum += b.qs[i]*bq8_1->qs[i];
    }
    return ggml_fp16_to_fp32(b.d)*sum;
}

#define CUDA_ON_HOST_OTHER_TYPE(type) \
    static inline float vec_dot_##type##_q8_1(const void *, const block_q8_1 *, const int &, const int &) { abort(); }
CUDA_ON_HOST_OTHER_TYPE(q1_0)    CUDA_ON_HOST_OTHER_TYPE(q2_0)   CUDA_ON_HOST_OTHER_TYPE(q4_0)    CUDA_ON_HOST_OTHER_TYPE(q4_1)
CUDA_ON_HOST_OTHER_TYPE(q5_0)    CUDA_ON_HOST_OTHER_TYPE(q5_1)   CUDA_ON_HOST_OTHER_TYPE(mxfp4)   CUDA_ON_HOST_OTHER_TYPE(nvfp4)
CUDA_ON_HOST_OTHER_TYPE(q2_K)    CUDA_ON_HOST_OTHER_TYPE(q3_K)   CUDA_ON_HOST_OTHER_TYPE(q4_K)    CUDA_ON_HOST_OTHER_TYPE(q5_K)
CUDA_ON_HOST_OTHER_TYPE(q6_K)    CUDA_ON_HOST_OTHER_TYPE(iq1_s)  CUDA_ON_HOST_OTHER_TYPE(iq1_m)   CUDA_ON_HOST_OTHER_TYPE(iq2_xxs)
CUDA_ON_HOST_OTHER_TYPE(iq2_xs)  CUDA_ON_HOST_OTHER_TYPE(iq2_s)  CUDA_ON_HOST_OTHER_TYPE(iq3_xxs) CUDA_ON_HOST_OTHER_TYPE(iq3_s)
CUDA_ON_HOST_OTHER_TYPE(iq4_nl)  CUDA_ON_HOST_OTHER_TYPE(iq4_xs)

enum {
    VDR_Q1_0_Q8_1_MMVQ = 2, VDR_Q2_0_Q8_1_MMVQ   = 2, VDR_Q4_0_Q8_1_MMVQ  = 2, VDR_Q4_1_Q8_1_MMVQ  = 2, VDR_Q5_0_Q8_1_MMVQ    = 2,
    VDR_Q5_1_Q8_1_MMVQ = 2, VDR_Q8_0_Q8_1_MMVQ   = 2, VDR_MXFP4_Q8_1_MMVQ = 2, VDR_NVFP4_Q8_1_MMVQ = 2, VDR_Q2_K_Q8_1_MMVQ    = 2,
    VDR_Q3_K_Q8_1_MMVQ = 2, VDR_Q4_K_Q8_1_MMVQ   = 2, VDR_Q5_K_Q8_1_MMVQ  = 2, VDR_Q6_K_Q8_1_MMVQ  = 2, VDR_IQ2_XXS_Q8_1_MMVQ = 2,
    VDR_IQ2_XS_Q8_1_MMVQ = 2, VDR_IQ2_S_Q8_1_MMVQ = 2, VDR_IQ3_XXS_Q8_1_MMVQ = 2, VDR_IQ3_S_Q8_1_MMVQ = 2, VDR_IQ4_NL_Q8_1_MMVQ = 2,
    VDR_IQ4_XS_Q8_1_MMVQ = 2,
};

static inline float ggml_cuda_op_silu_single(float x)                          { return x/(1.0f + expf(-x)); }
static inline float ggml_cuda_op_gelu_single(float x)                          { return x; }
static inline float ggml_cuda_op_swiglu_oai_single(float, float)               { abort(); }
static inline float ggml_cuda_op_swiglu_clamp_single(float, float, float)      { abort(); }
