// device: experts in the memory of an accelerator, over ggml's backend interface alone.
//
// A layer whose expert weights llama.cpp would put on a device is computed there, if that device knows MUL_MAT_ID with negative
// ids (ggml_backend_dev_mul_mat_id_skip). Its experts have slots in banks: per role and precision one tensor [ne0, ne1, n_slots];
// layers of equal shapes share a bank. The route node stays on the host. It finds what is in a slot, takes the rest from the
// host's tier (moe_graph's pools, or the ring) through pinned staging memory to slots, on a queue of its own where the device
// has such, and hands on slot ids, -1 where an expert is not in that precision. One tensor carries weights and ids up.
// Batches with more experts than slots use, where it fits, a stage: one layer's experts under their own ids; else the CPU computes
// them as if there were no device.
//
// When a route node runs, the device has computed everything before it in this step (it gave the router's choice), so any slot
// that this layer does not use may be overwritten. For what earlier steps, of any context, left running the copies' queue waits: `idle`.

#pragma once

#include "cache.h"
#include "config.h"
#include "cooperate.h"
#include "precision.h"
#include "store.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <vector>

struct hobbit_model;
struct hobbit_context;
struct hobbit_route;
struct route_choice;

// a batch of at most this many rows is computed from slots, if its experts find some
constexpr int64_t HOBBIT_DEVICE_ROWS_MAX = 32;

// the slots of some layers: same device, same shapes and types
struct hobbit_device_bank {
    int              device;
    std::vector<int> layers;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    uint64_t                bytes = 0; // of slots

    struct precision_part {
        std::unique_ptr<hobbit_pool> pool; // NULL: precision not in use
        ggml_tensor * slots[HOBBIT_N_ROLES] = {}; // [ne0, ne1, n_slots], NULL: no such role
        ggml_tensor * stage[HOBBIT_N_ROLES] = {}; // [ne0, ne1, n_expert], NULL: no stage
        std::vector<uint64_t> copied;             // [n_slots], the device's n_copies when the last copy to the slot was queued
    } part[HOBBIT_N_PRECISIONS];

    int64_t n_rows_max = 0; // rows whose experts find slots in any case
    bool    staged     = false;
};

struct hobbit_device {
    ggml_backend_dev_t         dev;
    ggml_backend_buffer_type_t buft;
    uint64_t                   budget = 0; // bytes
    uint64_t                   bytes  = 0; // of them in use
    std::string                sizing;     // where the budget comes from, for people
    bool                       unified = false; // its memory is the host's: an expert that gets a slot leaves the host's cache
    ggml_backend_buffer_ptr    stage;      // shared by the banks: a layer at a time

    // NULL where the device has no queues or events: copies block then
    ggml_backend_ptr       copy;
    ggml_backend_event_ptr done; // of what a route node copied
    ggml_backend_event_ptr idle; // of what a step computed

    // staging memory: places that go around
    ggml_backend_buffer_ptr             pinned;
    char *                              places   = nullptr;
    int                                 n_places = 0;

    uint64_t n_copies  = 0; // from the host, queued so far; copy n is the n-th, through place (n - 1) % n_places
    uint64_t n_awaited = 0; // of them, those that some step waited for last
    uint64_t n_ended   = 0; // of them, those that have ended for sure
    std::vector<ggml_backend_event_ptr> place_free; // [n_places], of the place's last copy

    hobbit_line link;           // seconds that copies of some bytes take
    int64_t     t_begin_us   = 0; // when the link last went from idle to busy
    uint64_t    bytes_begun  = 0; // queued since then
    bool        timed        = false; // whether the two say what the link does
    int64_t     t_dry_us     = 0; // when what is queued will be there, about
    int64_t     t_fetched_us = 0; // when the last route node had queued what it needs
    int         n_unmeasured = 0; // fetches since one was waited for

    double idle_us    = 0.0; // from there to the next route node, less the time that the link is busy; a mean
    double ahead_used = 0.5; // share of the copies ahead that were chosen then; a mean
    int    n_refused  = 0;   // copies ahead that did not seem to pay

    ~hobbit_device(); // waits for copies under way
};

class hobbit_device_set {
  public:
    // where llama.cpp would put a managed weight; before finish
    void assign(const hobbit_weight * weight, ggml_backend_buffer_type_t buft);

    // decides which layers run on a device and allocates; never fails: what cannot be stays on the CPU, and notes() says why.
    // in_use as in hobbit_model; no_alloc: only as much as a trial load needs
    void finish(hobbit_model & model, const bool * in_use, bool no_alloc);

    // NULL: on the CPU
    hobbit_device_bank * bank_of(int layer) const { return layer < (int) bank_of_layer.size() ? bank_of_layer[layer] : nullptr; }

    std::string describe() const; // lines of the load block
    std::string json() const;     // a list of the devices, for hobbit_placement_json

    std::vector<std::unique_ptr<hobbit_device>>      devices;
    std::vector<std::unique_ptr<hobbit_device_bank>> banks;

  private:
    void plan_device(hobbit_model & model, hobbit_device & device, int index, const std::vector<int> & layers, const bool * in_use, bool no_alloc);
    bool alloc_bank (hobbit_model & model, hobbit_device_bank & bank, const int * n_slots, bool no_alloc);
    void start      (hobbit_device & device);
    void note       (const std::string & text);

    struct summary { // of a device's banks
        int  n_layers = 0;
        int  n_slots[HOBBIT_N_PRECISIONS] = {};
        bool staged = false;
    };
    summary summary_of(int device) const;

    hobbit_miss miss = HOBBIT_MISS_LOAD;
    std::vector<std::pair<const hobbit_weight *, ggml_backend_buffer_type_t>> placed;
    std::vector<hobbit_device_bank *> bank_of_layer;
    std::vector<std::string>          notes;
};

// whether this batch of a layer is computed on its device
bool hobbit_device_takes(const hobbit_model & model, int layer, int64_t n_rows);

// whether it is too large for the slots
bool hobbit_device_uses_stage(const hobbit_model & model, int layer, int64_t n_rows);

// seconds until the link has copied what is queued, about
double hobbit_device_busy(const hobbit_device & device);

// what the route node reads: F32 [2*n_used + n_embd, n_rows], a row's ids as numbers, its weights, and cur's row if there is one
ggml_tensor * hobbit_device_pack(ggml_context * ctx0, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * cur);

// the same, taken apart: as if the route node had the three as sources. Valid while the packed tensor is
struct hobbit_device_packed {
    ggml_tensor ids     = {}; // I32 [n_used, n_rows]
    ggml_tensor weights = {}; // F32 [1, n_used, n_rows]
    ggml_tensor cur     = {}; // F32 [n_embd, n_rows]
    std::vector<int32_t> id_data;

    hobbit_device_packed(const ggml_tensor * packed, int64_t n_used);
    bool has_cur() const { return cur.ne[0] > 0; }
};

// rest of the graph: the route node's tensor of weights and ids, as the device sees it. F32 [n_used, n_rows, 1 + HOBBIT_N_PRECISIONS]:
// plane 0 the weights, plane 1 + precision the ids, I32 bits
// returns the weights; the ids are route.device_ids_node, the same tensors for every operation of the layer (fusion asks for that)
ggml_tensor * hobbit_device_unpack    (hobbit_route & route, ggml_context * ctx0, ggml_tensor * packed);
ggml_tensor * hobbit_device_mul_mat_id(hobbit_route & route, ggml_context * ctx0, const hobbit_weight & weight, ggml_tensor * mul_mat_id);

// in the route node, in this order: pins and counts what is in slots, removing it from choices; brings what the host tier then
// holds for the route, but not what the CPU computes; writes the planes of ids. fetch may fail: ctx.failed is set
void hobbit_device_find (hobbit_route & route, std::vector<route_choice> & choices, int64_t n_rows);
void hobbit_device_fetch(hobbit_route & route, int64_t n_rows);
void hobbit_device_ids  (const hobbit_route & route, const ggml_tensor * ids, ggml_tensor * packed);

// an expert that a later layer is likely to choose: keeps its slot, or copies it to one if the host has it and no copy has to be
// waited for. Its layer waits for the copy if it chooses the expert, this one does not. false: neither
bool hobbit_device_ahead (hobbit_context & ctx, int layer, int expert, int precision, int64_t n_rows);
// as hobbit_settle_predicted, which calls it
void hobbit_device_settle(hobbit_context & ctx, int layer, const hobbit_precision * chosen);

void hobbit_device_unpin   (hobbit_context & ctx);
void hobbit_device_step_end(hobbit_context & ctx);
