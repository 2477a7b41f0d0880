// moe_graph: how a MoE layer of a llama graph meets the engine.
//
// Each managed layer gets a route node, a custom op on the host that runs once the router's choice is known: it decides each
// chosen expert's precision, pins what is resident, makes room, starts the reads, and hands on the gate weights. The layer's
// MUL_MAT_ID nodes depend on it; the CPU kernel asks them for experts through ggml_cpu_experts (ggml-cpu.h): which are in this
// step, in which order, and where. An expert is computed from its cache slot, or, when the step needs more than the cache has
// room for, from the ring (stream.h).

#pragma once

#include "activations.h"
#include "banks.h"
#include "cache.h"
#include "config.h"
#include "cooperate.h"
#include "device.h"
#include "loader.h"
#include "prefetch.h"
#include "stats.h"
#include "store.h"
#include "stream.h"
#include "trace.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct hobbit_model;
struct hobbit_context;

// what extra of a managed tensor points to; first member so that the kernel's pointer is ours
struct hobbit_managed {
    ggml_cpu_experts experts;
    hobbit_model *   model;
    hobbit_weight *  weight;
};

// one pool: a precision's table, memory and the state of every piece in it
struct hobbit_pool_memory {
    std::unique_ptr<hobbit_pool>      pool;
    hobbit_bank                       bank;
    std::vector<std::atomic<uint8_t>> state; // [n_slots * HOBBIT_N_ROLES], hobbit_piece_state
    std::vector<bool>                 warm;  // slot -> holds what a profile brought; empty when the trial is over

    std::atomic<uint8_t> & piece(int slot, int role) { return state[(size_t) slot * HOBBIT_N_ROLES + role]; }
};

// a warm start is on trial for its first tokens
struct hobbit_warm_trial {
    int      n_tokens_left = 0;
    uint64_t lookups  = 0;
    uint64_t hits     = 0;   // of the warm set
    double   resident = 0.0; // experts of the warm set that were still there, summed over lookups
};

struct hobbit_model {
    hobbit_config config;
    hobbit_store  store;
    bool          no_alloc = false;
    int           n_expert_used = 0; // by one token in one layer, at most
    std::string   io;                // how experts are read, and why
    hobbit_loader::repack_fn repack = nullptr; // NULL: not for this model
    std::string   no_prediction;     // why prediction is off, if the model is the reason
    std::string   warm;              // what the profile brought, and whether it helped
    hobbit_warm_trial warm_trial;
    std::string   quality;           // which thresholds it brought, and why
    std::vector<std::string> quality_lines; // of the profile, kept when it is written again
    std::vector<std::string> profile_settings; // its lines "set NAME VALUE", kept when it is written again
    std::string   sizing;            // where the cache's size comes from, for people
    bool          custom_policy = false; // hobbit_set_policy
    std::string   pair_high; // path of the high-precision expert file of a pair, "" if none
    std::string   pair_low;
    std::string   pair_id;   // of the base file

    std::vector<std::unique_ptr<hobbit_managed>> managed;
    hobbit_no_access                             no_access;

    hobbit_pool_memory pools[HOBBIT_N_PRECISIONS];
    hobbit_bank        ring;
    int                n_ring = 0;

    std::unique_ptr<hobbit_trace>  trace;  // NULL: none; guarded by step_mutex. Outlives the loader, which reports to it
    std::unique_ptr<hobbit_loader> loader;
    hobbit_stream                  stream; // after the loader, which it needs to its end

    std::unique_ptr<hobbit_cpu_worker> cpu; // NULL: what a device misses is loaded. Outlived by what its graphs ask: pools, loader, stream
    hobbit_miss_costs                  miss_costs;     // guarded by step_mutex
    std::string                        no_cooperation; // why some layer's misses are loaded all the same

    hobbit_device_set devices; // layers that are computed on an accelerator; pools are then the tier behind it

    std::unique_ptr<hobbit_router_bank> routers; // NULL: no prediction
    hobbit_governor                     governor;
    int                                 n_contexts = 0;
    hobbit_records                      totals;  // of all sequences since the load; guarded by step_mutex
    hobbit_activations                  activations; // of past requests, if the configuration asks for them; guarded by step_mutex

    // held for the length of a step: steps of one model never overlap, which is what makes pins and ring simple
    std::mutex step_mutex;

    // for readers on other threads, who must not wait for a step; written while step_mutex is held
    std::mutex          labels_mutex;
    hobbit_stats_labels labels; // without n_used, blocks and resident, which a reader adds

    size_t n_keys() const { return (size_t) store.n_layer() * store.n_expert(); }
    bool   uses(int precision) const { return pools[precision].pool != nullptr; }
    bool   predicts() const { return routers || (config.predictor == HOBBIT_PREDICTOR_ACTIVATIONS && config.prefetch_depth > 0); }
    // the best copy of an expert that has a slot; any thread may ask
    hobbit_precision resident(int layer, int expert) const;
    // where the place for role's weights in a slot begins
    size_t role_offset(int layer, int precision, int role) const;
    // where one weight of an expert in a slot begins
    char * piece_data(int layer, int precision, int role, int slot, int expert) const;
    // bytes of a slot that holds any expert of any layer
    size_t slot_bytes(int precision) const;
    size_t ring_bytes() const; // of one place
    size_t bytes() const;      // of all memory reserved
    size_t bytes_in_use() const; // of what has been written to, about

    void trace_event(hobbit_trace_type type, int context = 0, int layer = 0, int expert = 0, int precision = 0, uint64_t bytes = 0) const {
        if (trace) {
            trace->event(type, context, layer, expert, precision, bytes);
        }
    }
};

// one expert in the running step
struct hobbit_step_expert {
    int32_t id;
    int8_t  precision; // HOBBIT_LOW or HOBBIT_HIGH
    int32_t slot;      // -1: streamed
};

// an expert that was predicted: pinned until its layer's route node has run
struct hobbit_predicted {
    int  layer;
    int  expert;
    int  precision;
    int  slot;
    bool issued; // read ahead; else it was resident
    int  seq;    // index in step_seqs: whose token it was predicted for
};

// what the step wants of one expert and what it gets
struct route_choice {
    int32_t          id;
    hobbit_precision wanted;   // the highest that any of its tokens asks for
    hobbit_precision given;    // after looking at what is resident
    int              n_selected;
    uint8_t          state;    // for the trace
    int              seq;      // index in step_seqs: whose lookup it is, the first sequence that asked for what is wanted
    bool             shared;   // others wanted the expert too
    double           mass;     // gate weight of its selections, 1: all of one token's
};

struct hobbit_device_pin {
    hobbit_device_bank * bank;
    int                  precision;
    int                  slot;
};

// as hobbit_predicted, in a slot of a device
struct hobbit_device_predicted {
    hobbit_device_pin pin;
    int               layer;
    int               expert;
    bool              issued; // copied ahead; else it was there
};

// the route node's userdata: one per managed layer and context, at a stable address
struct hobbit_route {
    hobbit_context * ctx   = nullptr;
    int              layer = 0;

    // valid from the route node to the layer's last MUL_MAT_ID
    std::vector<hobbit_step_expert> experts; // resident first, then those that are loading, then streamed
    int  n_cached = 0;                       // experts[n_cached ..] are streamed
    bool uses[HOBBIT_N_PRECISIONS] = {};

    std::vector<hobbit_stream_expert> streamed; // the pieces of experts[n_cached ..]
    int n_threads = 1;
    std::vector<int> on_cpu; // indices into experts of those that MUL_MAT_ID on the CPU computes

    bool  predicts     = false; // its input says what the next layers' routers would choose
    float share_chosen = 1.0f; // of the layer's experts, by the last large batch

    // if the layer is computed on a device: what its operations call each expert [n_expert], -1: not in this precision
    std::vector<int32_t> device_ids[HOBBIT_N_PRECISIONS];
    ggml_tensor *        device_ids_node[HOBBIT_N_PRECISIONS] = {}; // while the layer's graph is built
    uint64_t             device_copies = 0; // to the device that its experts need, see hobbit_device::n_copies

    // cooperate.h: the layer's second graphs by number of rows, and the one that is being built, then the one that runs
    std::map<int64_t, std::unique_ptr<hobbit_cpu_ffn>> ffns;
    hobbit_cpu_ffn * ffn       = nullptr;
    ggml_tensor *    node      = nullptr; // the route node, while the layer's graph is built
    uint64_t         cpu_bytes = 0;       // of what runs
    bool             cpu_ready = false;   // whether all of it was in memory
    int64_t          t_routed_us = 0;     // when the route node was done with copies
    bool             no_copies = false;   // that the device waits for
};

struct hobbit_context {
    hobbit_model *                         model;
    std::vector<hobbit_route>              routes; // [n_layer]
    std::map<int32_t, hobbit_records>      records;
    int                                    trace_id = 0; // of this context in the trace
    hobbit_selections                      selections;   // of the running layer, for the trace
    bool                                   cooperates = false; // graphs that are built from now on have a part for the CPU
    uint64_t                               graph_epoch = 0;
    double                                 cpu_wanted  = 1.0;  // share of the last choices of `auto` that gave the CPU something to do
    int32_t                                n_threads   = 1;    // of the CPU, for the running step
    std::vector<ggml_backend_t>            backends; // that compute the context's graphs
    std::vector<uint64_t>                  awaited;  // per device: copies that its computing has been made to wait for

    // host memory that computing takes, and how much of it has been touched
    uint64_t                               compute_bytes    = 0; // for n_tokens_reserved tokens
    int32_t                                n_tokens_reserved = 0;
    int32_t                                n_tokens_seen     = 0; // at once, at most

    // the running step
    std::vector<int32_t>                   token_seq;  // [n_tokens]
    std::vector<int32_t>                   output_seq; // [n_outputs]
    std::vector<const hobbit_records *>    step_records;
    std::vector<int32_t>                   step_seqs;  // whose they are
    std::vector<std::pair<int, int>>       pinned;     // (precision, slot)
    std::vector<std::pair<int, int>>       moved;      // of them, those whose experts went to a device in the host's own memory
    std::vector<hobbit_device_pin>         device_pinned;
    std::vector<hobbit_device_predicted>   device_predicted;
    std::vector<hobbit_predicted>          predicted;
    int                                    n_prefetch_used   = 0;
    int                                    n_prefetch_wasted = 0;
    uint64_t                               read_bytes        = 0; // by this step, read ahead or not
    uint64_t                               wasted_bytes      = 0; // of them, read ahead in vain
    double                                 demand_seconds    = 0.0; // the loader's, at the begin of the step
    double                                 busy_seconds      = 0.0;
    std::atomic<bool>                      failed { false };
    std::atomic<uint64_t>                  stall_us { 0 }; // since the last route node
    int                                    stall_layer = 0;
    int64_t                                t_begin_us  = 0;
    bool                                   decode      = false;

    // for readers on other threads, who must not wait for a step
    std::mutex          stats_mutex;
    hobbit_stats        stats;
    std::atomic<bool>   stats_were_reset { false }; // since the last step; for the trace
    std::map<int32_t, hobbit_sequence_stats> sequence_stats;
};

// ubatches with more rows than this leave what is cached alone: they fill free slots and stream the rest
constexpr int64_t HOBBIT_ROWS_EVICT_MAX = 32;

// and with more rows than this most experts are chosen anyway: nothing to predict
constexpr int64_t HOBBIT_ROWS_PREDICT_MAX = 8;

// bytes of one expert in the file
uint64_t hobbit_expert_bytes(const hobbit_layer & layer, int precision);

// a message of the load or of the first step; level 0: information, 1: warning
void hobbit_log(const hobbit_config & config, int level, const std::string & text);

// whether every weight of the expert in a slot of the host is there
bool hobbit_is_ready(hobbit_model & model, int layer, int precision, int slot);

void hobbit_managed_init(hobbit_managed & managed, hobbit_model * model, hobbit_weight * weight);

// reads an expert into a free slot, in the background; false if there is none or it has one already
bool hobbit_warm(hobbit_model & model, int layer, int precision, int expert);

// a step begins with a batch of n_rows: reads ahead for the first layer what such a batch probably wants of it
void hobbit_expect_first(hobbit_context & ctx, int64_t n_rows);

void hobbit_unpin_all(hobbit_context & ctx);
// lets go of what was predicted for layers up to this one: what was not chosen is cancelled, or, if it is there, may stay.
// chosen[n_expert]: precision given, SKIP if not chosen; NULL: nothing was
void hobbit_settle_predicted(hobbit_context & ctx, int layer, const hobbit_precision * chosen);
// adds the waiting time since the last call to the layer it belongs to; stats_mutex must be held
void hobbit_flush_stall(hobbit_context & ctx);
