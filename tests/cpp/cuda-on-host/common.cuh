// Stands in for ggml-cuda's common.cuh, so that a kernel's own source runs on the host, without a card or a toolkit.
//
// A block's threads are fibers that take turns. They switch where CUDA's threads meet: a shuffle or a reduction goes on once
// every live thread of the warp has come to it, and a block whose threads wait for each other at different places aborts.
// Blocks run one after another, in an order that the test chooses. Shared memory starts as garbage and must not be written
// past the size of the launch.

#pragma once

#include "ggml.h"

#include <climits>
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
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__

typedef void * cudaStream_t;

struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

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
    n_steps++;
}

static inline void run_block() {
    const int n = blockDim.x*blockDim.y*blockDim.z;
    fibers.resize(n);
    warps.assign((n + CUDA_ON_HOST_WARP_SIZE - 1)/CUDA_ON_HOST_WARP_SIZE, meeting());
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
    GGML_ASSERT(blocks.y == 1 && blocks.z == 1 && nbytes_shared <= SHARED_BYTES);
    gridDim  = blocks;
    blockDim = threads;
    kernel   = call;
    for (unsigned int i = 0; i < blocks.x; ++i) {
        blockIdx = dim3(reverse_blocks ? blocks.x - 1 - i : i, 0, 0);
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

static inline int group_of(int width) { return cuda_on_host::current % CUDA_ON_HOST_WARP_SIZE/width*width; }

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

static inline int __shfl_sync(unsigned, int value, int lane, int width) {
    const std::vector<uint64_t> & all = cuda_on_host::meet_warp((uint64_t) (int64_t) value);
    return (int) (int64_t) all[group_of(width) + lane % width];
}

static inline int __shfl_up_sync(unsigned, int value, unsigned delta, int width) {
    const int lane = cuda_on_host::current % CUDA_ON_HOST_WARP_SIZE;
    const std::vector<uint64_t> & all = cuda_on_host::meet_warp((uint64_t) (int64_t) value);
    return (int) (int64_t) all[lane - group_of(width) >= (int) delta ? lane - delta : lane];
}

// what launchers ask the device

struct ggml_cuda_device_info {
    struct { int warp_size; size_t smpbo; } devices[1];
};

static inline int ggml_cuda_get_device() { return 0; }

static inline const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info info = { { { CUDA_ON_HOST_WARP_SIZE, SHARED_BYTES } } };
    return info;
}

#define CUDA_SET_SHARED_MEMORY_LIMIT(kernel, nbytes) GGML_UNUSED(nbytes)
