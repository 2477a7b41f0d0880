// stream: experts that pass through the ring, because the cache has no slot for them.
//
// A large batch touches nearly every expert of every layer, far more than the cache holds. Their weights are read one after the
// other into the ring's places, in the order in which the layer's operations will want them, and on into the next layer as far
// as there are places: so the disk works while a layer computes, and each byte is read once per ubatch. What a layer will want is
// expected before its router has spoken; plan() then keeps what was right, drops what was not, and adds what is missing.
//
// moe_graph plans on one thread, between operations; acquire and release come from every compute thread.

#pragma once

#include "banks.h"
#include "loader.h"
#include "store.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

// one weight of one expert on its way through the ring
struct hobbit_stream_piece {
    hobbit_read              read;                    // dst and state are set once it has a place
    int                      layer;
    int                      place = -1;              // -1: waits for one
    std::atomic<uint8_t>     state    { HOBBIT_PIECE_ABSENT };
    std::atomic<int>         released { 0 };          // threads that are done with it
    char *                   keep_dst   = nullptr;    // a cache slot that takes a copy before the place goes
    std::atomic<uint8_t> *   keep_state = nullptr;
    bool                     kept       = false;      // by plan()
};

struct hobbit_stream_expert {
    int32_t                  id;
    int8_t                   precision;
    hobbit_stream_piece *    piece[HOBBIT_N_ROLES] = {};
};

class hobbit_stream {
  public:
    ~hobbit_stream() { reset(); }

    // the ring's memory; nothing may be streaming
    void init(hobbit_loader * loader, const hobbit_bank * ring, int n_places);

    // reads ahead what a layer will probably want, after all that was asked for before; at leisure, after demands
    void expect(const hobbit_layer & layer, int layer_index, const std::vector<hobbit_stream_expert> & experts);

    // what the layer wants in fact. Brings experts into the order in which they come, those that were expected first.
    // wasted_bytes: read of what was expected in vain
    void plan(const hobbit_layer & layer, int layer_index, std::vector<hobbit_stream_expert> & experts, uint64_t & wasted_bytes);

    // whether reading the expert ahead has begun, so that it comes through the ring even if it gets a slot
    bool is_begun(int layer_index, int32_t id, int precision) const;

    // the layer's operation over this role begins: its pieces get places even if others were expected to come first
    void begin(int layer_index, int role);

    // a thread is done with a piece; the last of n_threads frees its place for the next
    void release(hobbit_stream_piece & piece, int n_threads);

    // drops everything; when it returns nothing writes to the ring
    void reset();

  private:
    using piece_ptr = std::unique_ptr<hobbit_stream_piece>;

    hobbit_stream_piece * add(const hobbit_weight * weight, int layer_index, int32_t id, int precision);
    uint64_t drop(hobbit_stream_piece & piece); // takes its place away; returns the bytes that had been read
    void pump(hobbit_urgency urgency);
    const hobbit_stream_expert * find_expected(int layer_index, int32_t id, int precision) const;

    mutable std::mutex                 mutex; // guards all below, but not what the pieces' atomics say
    hobbit_loader *                    loader = nullptr;
    const hobbit_bank *                ring   = nullptr;
    std::vector<int>                   free_places;
    std::vector<piece_ptr>             pieces;  // alive: of the running layer and the one that is expected
    std::deque<hobbit_stream_piece *>  pending; // without a place, in the order of use
    int                                expected_layer = -1;
    std::vector<hobbit_stream_expert>  expected;
};
