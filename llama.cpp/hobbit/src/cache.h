// cache: which expert is resident in which slot, and which one goes when room is needed.
//
// Pure logic: no I/O, no memory, no ggml, no locks. A pool holds slots of one precision; a slot holds one whole expert.
// moe_graph asks find(), pins what the running step needs, and calls place() for what is missing; banks and loader then put
// bytes where place() said. Pinned slots are never evicted. Records are per sequence (HOBBIT section 3.4) and belong to a
// context; the caller passes those of the sequences in the running step.

#pragma once

#include "precision.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

enum hobbit_policy : int8_t {
    HOBBIT_POLICY_HOBBIT, // Eq. 3: weighted recency, frequency, high-precision frequency, layer distance
    HOBBIT_POLICY_LRU,    // least recently used, over all sequences
    HOBBIT_POLICY_LFU,    // least frequently used in the current sequences
};

struct hobbit_policy_params {
    hobbit_policy policy = HOBBIT_POLICY_HOBBIT;
    float w_lru = 0.25f;
    float w_lfu = 0.25f;
    float w_lhu = 0.25f;
    float w_fld = 0.25f;
};

// what one sequence did with every expert; key = layer * n_expert + expert
struct hobbit_records {
    struct entry {
        uint32_t last = 0; // R: token index of the last use, 1-based; 0 = never
        uint32_t used = 0; // F: uses
        uint32_t high = 0; // H: uses in high precision
    };
    uint32_t           n_tokens = 0; // T
    std::vector<entry> entries;

    void reset(size_t n_keys);
    void use(size_t key, bool high);
};

class hobbit_pool {
  public:
    hobbit_pool(int n_layer, int n_expert, int n_slots, const hobbit_policy_params & params);

    int find(int layer, int expert) const { return slot_of[key(layer, expert)]; } // -1: not resident

    // a slot for (layer, expert), which must not be resident: a free one, else the unpinned slot with the lowest priority if
    // evict is true, else -1. The slot comes back pinned once. evicted: the key that had to go, or -1.
    int place(int layer, int expert, const hobbit_records * const * records, int n_records, bool evict, int64_t * evicted);

    std::vector<int> by_last_touch() const; // the slots in use, latest first

    // changes the number of slots; nothing may be pinned. What was touched last stays. Returns the slots (from, to) whose
    // bytes have to move before memory beyond the last slot goes; a target is never a source
    std::vector<std::pair<int, int>> resize(int n_slots);

    void drop (int slot);           // empties a slot whatever its pins: its load failed
    void pin  (int slot) { slots[slot].pins++; }
    void unpin(int slot) { slots[slot].pins--; }
    void touch(int slot) { slots[slot].stamp = ++clock; }

    // Eq. 3 for the expert in a slot, seen from layer l_i; with several sequences the highest counts
    float priority(int slot, int layer, const hobbit_records * const * records, int n_records) const;

    int     n_slots()        const { return (int) slots.size(); }
    int     n_used()         const { return (int) slots.size() - (int) free_slots.size(); }
    int64_t key_at(int slot) const { return slots[slot].key; } // -1: empty
    int     pins  (int slot) const { return slots[slot].pins; }

  private:
    struct slot_info {
        int64_t  key   = -1;
        int32_t  pins  = 0;
        uint64_t stamp = 0;
    };

    size_t key(int layer, int expert) const { return (size_t) layer * n_expert + expert; }

    int n_layer;
    int n_expert;

    hobbit_policy_params   params;
    std::vector<slot_info> slots;
    std::vector<int>       slot_of;    // key -> slot
    std::vector<int>       free_slots; // a stack, lowest index on top
    uint64_t               clock = 0;
};
