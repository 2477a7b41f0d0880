// stats: what the cache did, per layer and in total.
//
// moe_graph counts under the context's lock, once per layer and step; readers copy under the same lock. A lookup is one expert
// in one layer of one ubatch, a selection one (token, expert) pair; in decode with one sequence the two are the same.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct hobbit_counters {
    uint64_t lookups     = 0; // = hits + misses_high + misses_low + skips
    uint64_t hits        = 0;
    uint64_t misses_high = 0;
    uint64_t misses_low  = 0;
    uint64_t skips       = 0;

    uint64_t selected_high = 0; // selections by the precision they were computed in
    uint64_t selected_low  = 0;
    uint64_t selected_skip = 0;

    // gate weight in millionths of what one token's selected experts have together, by the precision that it was computed in
    uint64_t routed    = 0; // tokens; 1e6 * routed = mass high + mass_low + mass_skip
    uint64_t mass_low  = 0;
    uint64_t mass_skip = 0;

    uint64_t evictions        = 0;
    uint64_t read_bytes_high  = 0;
    uint64_t read_bytes_low   = 0;
    uint64_t streamed         = 0; // of the misses, those that went past the cache
    uint64_t predicted        = 0; // experts that the layer before named for this layer
    uint64_t predicted_right  = 0; // of them, those that the router chose
    uint64_t prefetch_issued  = 0; // experts read ahead for this layer
    uint64_t prefetch_used    = 0; // of them, those that the router then chose: they count as hits
    uint64_t prefetch_wasted  = 0;
    uint64_t prefetch_bytes   = 0; // read ahead, used or not; not in read_bytes
    uint64_t device_hits      = 0; // of the hits, those in the memory of the device that computes the layer
    uint64_t device_evictions = 0;
    uint64_t upload_bytes     = 0; // to that memory, ahead or not
    uint64_t cpu_computed     = 0; // experts that it missed and the CPU computed instead
    uint64_t ahead_issued     = 0; // experts copied there ahead
    uint64_t ahead_used       = 0; // of them, those that the router then chose
    uint64_t stall_us         = 0; // the first compute thread waited for bytes

    void add(const hobbit_counters & other);
};

// what one sequence did since it began. An expert that tokens of several sequences want in one step is one lookup, of the first
// sequence that asks for the highest precision, so that the sums over sequences are those of the model
struct hobbit_sequence_stats {
    hobbit_counters count;      // lookups, hits, misses, skips and bytes; the others are not counted by sequence
    uint64_t        shared = 0; // of the lookups, those that other sequences wanted too

    void add(const hobbit_sequence_stats & other);
};

struct hobbit_stats {
    std::vector<hobbit_counters> layers;

    uint64_t prompt_tokens = 0; // in ubatches with more tokens than sequences
    uint64_t prompt_us     = 0;
    uint64_t decode_tokens = 0;
    uint64_t decode_us     = 0;
    uint64_t prompt_stall_us = 0; // of that time, the first compute thread waited for bytes
    uint64_t decode_stall_us = 0;
    uint64_t expected_wasted_bytes = 0; // begun for large batches in vain; in no counter of a layer
    uint64_t prompt_disk_us  = 0; // and a read was under way: in the rest the disk was idle
    uint64_t decode_disk_us  = 0;
    uint64_t steps         = 0;
    uint64_t failed_steps  = 0;

    hobbit_counters total() const;
};

// what the texts say beside the counters
struct hobbit_stats_labels {
    std::string          rule;
    std::string          policy;
    uint64_t             cache_bytes = 0;
    std::string          warm;       // of a warm start: what came of it, "" if none was asked for
    std::string          prefetch;   // depth in effect and why
    int                  n_slots[2] = {}; // low, high
    int                  n_used [2] = {};
    std::vector<int32_t> blocks;     // layer -> N in blk.N
    std::vector<std::string> resident; // layer -> a digit per expert: 0 absent, 1 low, 2 high
};

std::string hobbit_counters_to_json(const hobbit_counters & counters); // the fields, without braces
std::string hobbit_stats_to_json (const hobbit_stats & stats, const hobbit_stats_labels & labels);
std::string hobbit_stats_to_table(const hobbit_stats & stats, const hobbit_stats_labels & labels);
// text in the exposition format of Prometheus: totals only, every name starts with hobbit_
std::string hobbit_stats_to_metrics(const hobbit_stats & stats, const hobbit_stats_labels & labels);
std::string hobbit_sequence_to_json(const hobbit_sequence_stats & stats);

// the counters by number, in the order of the JSON
const char * hobbit_counter_at(int i); // the name, NULL beyond the last
uint64_t *   hobbit_counters_copy(const hobbit_counters & counters, uint64_t * out); // returns the end

// a JSON string with what must be escaped escaped
std::string hobbit_quoted(const std::string & text);
