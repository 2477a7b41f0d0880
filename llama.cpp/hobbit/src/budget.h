// budget: how much memory the cache may take, and how it is divided.

#pragma once

#include "store.h"

#include <cstdint>
#include <string>

struct hobbit_memory {
    uint64_t    limit;     // bytes: the cgroup's limit, else the machine's memory
    uint64_t    used;      // bytes that are not page cache
    std::string source;    // where the limit comes from, for the load block
};

hobbit_memory hobbit_memory_now();

// what auto leaves free for everything that is allocated after the cache (KV, compute buffers, page cache)
uint64_t hobbit_memory_margin(uint64_t limit);

struct hobbit_plan_params {
    uint64_t budget;                           // bytes
    uint64_t slot_bytes[HOBBIT_N_PRECISIONS];  // 0: precision not in use
    uint64_t ring_bytes;                       // of one place
    uint64_t router_bytes;                     // of the router bank
    int      n_experts;                        // in all layers
    int      n_expert_used;                    // by one token in one layer
    float    low_share;
};

constexpr int HOBBIT_RING_MOST = 128; // places; more would read further ahead than it pays

struct hobbit_plan {
    int n_slots[HOBBIT_N_PRECISIONS];
    int n_ring;
};

// the fewest bytes that hold one token's experts of one layer in each precision in use, and two places of the ring
uint64_t hobbit_plan_min_bytes(const hobbit_plan_params & params);

// false if the budget is below that minimum
bool hobbit_plan_pools(const hobbit_plan_params & params, hobbit_plan & plan);
