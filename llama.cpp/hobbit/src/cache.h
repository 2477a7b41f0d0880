// cache: which expert is resident in which slot, and which one goes when room is needed.
//
// Pure logic: no I/O, no memory, no ggml, no locks. One thread at a time may call a pool, except find() and n_used(): they may be
// asked while another thread changes it. A pool holds slots of one precision; a slot holds one whole expert.
// moe_graph asks find(), pins what the running step needs, and calls place() for what is missing; banks and loader then put
// bytes where place() said. Pinned slots are never evicted. Records are per sequence (HOBBIT section 3.4) and belong to a
// context; the caller passes those of the sequences in the running step. simulate drives the same pools from a trace.
//
// Finding the victim. Scores change with every token and layer, so that no one order of the slots lasts. But what a score is made
// of only grows while a sequence runs, and within one group of slots (a layer; for LFRU, equal frequency) the rest of the score is
// the same for all. So each group has a heap by that growing part, whose entries may be out of date but never too high; the best
// of the tops, brought up to date, is the slot that a look at every slot would find. With several sequences at once the highest
// score counts: each group has a heap for each sequence, of the slots whose highest score was that sequence's when last looked at.

#pragma once

#include "precision.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

// docs/policy.md has the formulas and where they come from
enum hobbit_policy : int8_t {
    HOBBIT_POLICY_HOBBIT,    // Eq. 3: weighted recency, frequency, high-precision frequency, layer distance
    HOBBIT_POLICY_LRU,       // least recently used, over all sequences
    HOBBIT_POLICY_LFU,       // least frequently used in the current sequences
    HOBBIT_POLICY_LFU_MODEL, // least frequently used since the model was loaded
    HOBBIT_POLICY_LHU,       // least frequently used in high precision in the current sequences
    HOBBIT_POLICY_FLD,       // farthest layer distance
    HOBBIT_POLICY_LCU,       // least cost used, of MoE-APEX: uses weighted by bytes, plus nearness if used in the last pass
    HOBBIT_POLICY_LFRU,      // uses over age
    HOBBIT_POLICY_GATE_MASS, // gate weight, with exponential decay per token, as HybriMoE does
    HOBBIT_POLICY_LRU_LAYER, // least recently used of the layer that holds most: as many for each layer
    HOBBIT_POLICY_RANDOM,
    HOBBIT_POLICY_ACTIVATIONS, // least used by the sequence and the past one that it resembles, the last layers' first (MoE-Infinity)
    HOBBIT_POLICY_STATIC,    // none goes: the first layers' experts have a slot, the others never get one
    HOBBIT_POLICY_ORACLE,    // whatever hobbit_pool::oracle says: the simulator only
};

struct hobbit_policy_params {
    hobbit_policy policy = HOBBIT_POLICY_HOBBIT;
    float w_lru = 0.25f;
    float w_lfu = 0.25f;
    float w_lhu = 0.25f;
    float w_fld = 0.25f;
    float    low_cost = 0.25f; // B_low / B_high, of LCU
    uint32_t seed     = 1;     // of RANDOM
};

// how often a past sequence used each expert, by key (activations.h)
struct hobbit_activation {
    uint32_t              n_tokens = 0;
    std::vector<uint32_t> used;
};

// what one sequence did with every expert; key = layer * n_expert + expert
struct hobbit_records {
    struct entry {
        uint32_t last = 0; // R: token index of the last use, 1-based; 0 = never
        uint32_t used = 0; // F: uses
        uint32_t high = 0; // H: uses in high precision
    };
    uint32_t            n_tokens   = 0; // T
    uint32_t            n_before   = 0; // T when the running pass began
    uint64_t            generation = 0; // another one after each reset and for each past sequence, over all records of the process
    std::vector<entry>  entries;
    std::vector<double> mass;           // log2 of the gate weight seen, each token's worth more than the last's; empty: not kept
    std::shared_ptr<const hobbit_activation> like; // the past sequence that this one resembles; NULL: none

    void reset(size_t n_keys, bool with_mass = false);
    void resembles(std::shared_ptr<const hobbit_activation> past);
    void begin_pass(); // before the tokens of a step are added
    void use(size_t key, bool high, float weight = 0.0f);
};

// a batch that would push the decode working set out: more rows than rows_max, or this many selections per expert
constexpr int64_t HOBBIT_SELECTED_LARGE = 4;
constexpr bool hobbit_is_large(int64_t n_rows, int64_t rows_max, int64_t n_used, int64_t n_expert) {
    return n_rows > rows_max || n_rows * n_used >= HOBBIT_SELECTED_LARGE * n_expert;
}

class hobbit_pool {
  public:
    hobbit_pool(int n_layer, int n_expert, int n_slots, const hobbit_policy_params & params);

    int find(int layer, int expert) const { return slot_of[key(layer, expert)].load(std::memory_order_relaxed); } // -1: not resident

    // a slot for (layer, expert), which must not be resident: a free one, else the unpinned slot with the lowest priority if
    // evict is true, else -1 (so for STATIC, if the expert is none of the first). The slot comes back pinned once. evicted: the
    // key that had to go, or -1.
    int place(int layer, int expert, const hobbit_records * const * records, int n_records, bool evict, int64_t * evicted);

    std::vector<int> by_last_touch() const; // the slots in use, latest first

    // changes the number of slots; nothing may be pinned. What was touched last stays. Returns the slots (from, to) whose
    // bytes have to move before memory beyond the last slot goes; a target is never a source
    std::vector<std::pair<int, int>> resize(int n_slots);

    void drop (int slot);           // empties a slot whatever its pins: its load failed
    void pin  (int slot) { slots[slot].pins++; }
    void unpin(int slot);
    void touch(int slot) { slots[slot].stamp = ++clock; }

    // the policy's score for the expert in a slot, seen from a layer; with several sequences the highest counts. Eq. 3 is in its
    // own units, [0, 1]. Not for RANDOM
    double priority(int slot, int layer, const hobbit_records * const * records, int n_records) const;

    // free slots for one layer, so that the layers from it to the last get the same share
    int n_free_share(int layer) const { return (n_slots() - n_used() + n_layer - layer - 1) / (n_layer - layer); }

    int     n_slots()        const { return (int) slots.size(); }
    int     n_used()         const { return n_taken.load(std::memory_order_relaxed); }
    int64_t key_at(int slot) const { return slots[slot].key; } // -1: empty
    int     pins  (int slot) const { return slots[slot].pins; }
    uint64_t stamp(int slot) const { return slots[slot].stamp; }

    uint64_t n_looked_at() const { return looked_at; } // slots considered in search of victims, so far

    std::function<double(int64_t key, int layer)> oracle; // of HOBBIT_POLICY_ORACLE: the lowest goes
    // of hobbit_set_policy: the unpinned slot that goes; -1 leaves it to the configured policy
    std::function<int(int layer, const hobbit_records * const * records, int n_records)> chooser;

  private:
    struct slot_info {
        int64_t  key    = -1;
        int32_t  pins   = 0;
        uint32_t serial = 0;     // of this stay; 0: empty
        bool     queued = false; // has an entry in a heap
        uint64_t stamp  = 0;
    };
    // an entry of a heap: what was known of a slot at some time. The truth is never lower
    struct item {
        double   value;
        uint64_t stamp;
        int32_t  slot;
        uint32_t serial;
    };
    using heap = std::vector<item>;

    size_t key(int layer, int expert) const { return (size_t) layer * n_expert + expert; }
    void   set_slot(int64_t key, int slot); // -1: none any more

    // a score in three steps: the part that grows, what is the same for a group, what the slot alone has. Units of one sequence
    double   value_of(int64_t key, const hobbit_records * records) const;
    uint32_t group_of(int64_t key, const hobbit_records * records) const;
    double   score   (double value, uint32_t group, int layer, const hobbit_records * records) const;
    double   bonus   (int64_t key, int layer, const hobbit_records * records) const;
    double   to_common_units(double score, const hobbit_records * records) const;
    // where an entry of the slot belongs, and what it says: of the sequence whose score without bonus is the highest
    uint64_t place_of(int slot, int layer, const hobbit_records * const * records, int n_records, item & it) const;
    int      distance(int from, int to) const { return (to - from + n_layer) % n_layer; }

    void push(uint64_t place, const item & it);
    void push_unknown(int slot);
    void rebuild();
    int  victim       (int layer, const hobbit_records * const * records, int n_records);
    int  victim_random();
    int  victim_scan  (int layer, const hobbit_records * const * records, int n_records) const;
    int  victim_heaps (int layer, const hobbit_records * const * records, int n_records);

    int n_layer;
    int n_expert;

    hobbit_policy_params   params;
    int64_t                weight[4];  // of Eq. 3, whole numbers: sums are exact, and equal scores are equal
    int64_t                low_cost;   // the same for LCU
    std::vector<slot_info> slots;
    std::vector<std::atomic<int>> slot_of; // key -> slot
    std::atomic<int>       n_taken { 0 };  // keys with a slot
    std::vector<int>       free_slots; // a stack, lowest index on top
    std::vector<int>       in_layer;   // slots in use, by layer of what they hold
    uint64_t               clock   = 0;
    uint32_t               serials = 0;
    uint64_t               random;     // state of the generator
    mutable uint64_t       looked_at = 0;

    std::map<uint64_t, heap> heaps;         // by group * sequences + sequence
    size_t                   n_items     = 0;
    bool                     heaps_valid = false;
    std::vector<uint64_t>    heaps_of;      // generations of the records that values were taken from
};
