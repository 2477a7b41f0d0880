// ggml-sim: a ggml backend that behaves like an accelerator, for tests on machines without one.
//
// Device memory is not the host's: its addresses fault when the host touches them. Each backend instance is a queue with a thread
// of its own, in which copies, graphs and events run in order; two instances of one device run side by side, as streams do, and
// share the device's link and its compute. Graphs are computed by ggml's CPU kernels, so results are the CPU's, bit for bit,
// at the same number of threads. Nothing waits unless it is told to: a copy reads its source when its turn comes, and
// ggml_backend_tensor_set/get do not wait for any queue. So a missing synchronisation is a wrong result, the surer the longer
// the delays.
//
// Programs that want it register it; nothing else ever sees it.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_SIM_MAX_DEVICES 4

struct ggml_sim_params {
    int      n_devices;         // 1 .. GGML_SIM_MAX_DEVICES
    size_t   memory_bytes;      // of each device
    size_t   max_buffer_bytes;  // the largest buffer; 0: no limit
    double   bandwidth;         // bytes per second of the link, each way; 0: as fast as the host copies
    double   latency_us;        // of each copy over the link
    double   delay_us;          // before each command of a queue a random wait of up to this
    unsigned seed;              // of the waits
    bool     scramble;          // fill new and freed memory with bytes that are NaN in every float type
    int      fail_alloc;        // the n-th allocation of device memory fails, counted from 1; 0: none
    bool     async;             // whether the devices say that they copy asynchronously and know events
    bool     unified;           // whether they say that they are integrated GPUs
    bool     skip;              // whether they say that MUL_MAT_ID knows negative ids
};

struct ggml_sim_stats {
    uint64_t n_up,   bytes_up;   // copies to the device
    uint64_t n_down, bytes_down; // copies to the host
    uint64_t link_us;            // in which the way up was taken
    uint64_t compute_us;
    uint64_t n_graphs;
};

// 1 device of 1 GiB, no limits, no delays, scramble, async; then what these say:
// HOBBIT_SIM_DEVICES, _MEMORY_MIB, _MAX_BUFFER_MIB, _BANDWIDTH_MBPS, _LATENCY_US, _DELAY_US, _SEED, _SCRAMBLE, _FAIL_ALLOC, _ASYNC, _UNIFIED, _SKIP
struct ggml_sim_params ggml_sim_params_default(void);

// once in a process: creates the devices SIM0, SIM1, ..; does not tell ggml of them (ggml_backend_register does)
ggml_backend_reg_t ggml_sim_init(const struct ggml_sim_params * params);

// changes what may change while devices live: bandwidth, latency, delay, seed
void ggml_sim_set_link(double bandwidth, double latency_us, double delay_us, unsigned seed);

// the queue of this backend instance stops after its running command until it is released
void ggml_sim_hold   (ggml_backend_t backend);
void ggml_sim_release(ggml_backend_t backend);

void   ggml_sim_get_stats  (int device, struct ggml_sim_stats * stats);
void   ggml_sim_reset_stats(int device);
size_t ggml_sim_memory_used(int device);

#ifdef __cplusplus
}
#endif
