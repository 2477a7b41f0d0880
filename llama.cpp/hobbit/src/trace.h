// trace: what the router chose and what the cache did about it, event by event, in a file (format: docs/trace.md).
//
// moe_graph and hobbit.cpp report under the model's step lock, the loader's threads when a read ends; records of one step are in the
// order of its decisions, so that simulate can take them again. Writing appends to a buffer under a lock of its own, and goes
// to the file when the buffer is full, at the end of a context and of the model.

#pragma once

#include "cache.h"

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

constexpr int HOBBIT_TRACE_VERSION = 1;
constexpr int HOBBIT_TRACE_MODEL   = 0xffff; // the context of records that are the model's
constexpr int HOBBIT_TRACE_PAST    = 0xfffe; // and of those of a past request

enum hobbit_trace_type : uint8_t {
    HOBBIT_TRACE_STEP        = 1,  // a ubatch begins
    HOBBIT_TRACE_ROUTE       = 2,  // one layer of it: what was chosen
    HOBBIT_TRACE_PREDICT     = 3,  // what a later layer is expected to choose
    HOBBIT_TRACE_DEMAND      = 4,  // a read into a slot begins, since the running layer needs it
    HOBBIT_TRACE_STREAM      = 5,  // the same, past the cache
    HOBBIT_TRACE_PREFETCH    = 6,  // a read ahead is issued
    HOBBIT_TRACE_WARM        = 7,  // a read of a warm start is issued
    HOBBIT_TRACE_EVICT       = 8,
    HOBBIT_TRACE_CANCEL      = 9,  // a prefetched expert that was not chosen leaves before it is all there
    HOBBIT_TRACE_FAIL        = 10, // an expert leaves since its read failed
    HOBBIT_TRACE_DONE        = 11, // a read of one weight of an expert ended
    HOBBIT_TRACE_END         = 12, // the ubatch ends
    HOBBIT_TRACE_SEQUENCE    = 13, // the records of a sequence start anew
    HOBBIT_TRACE_RESIZE      = 14,
    HOBBIT_TRACE_STATS_RESET = 15,
    HOBBIT_TRACE_STATS       = 16, // the counters of a context, when the trace begins in the middle of a run and when it ends
    HOBBIT_TRACE_RESIDENT    = 17, // is in the cache when the trace begins, least recently used first
    HOBBIT_TRACE_RECORDS     = 18, // what a sequence did before the trace began
    HOBBIT_TRACE_DROP        = 19, // leaves because the warm start that brought it did not help
};

// what every record begins with, little endian; size bytes of payload follow
struct hobbit_trace_head {
    uint64_t t_us;
    uint32_t size;
    uint32_t bytes;     // that were or will be read
    uint16_t context;
    uint16_t layer;
    uint16_t expert;
    uint8_t  type;
    uint8_t  precision; // HOBBIT_LOW or HOBBIT_HIGH
};
static_assert(sizeof(hobbit_trace_head) == 24, "the format has no padding");

// one selection's state in ROUTE and PREDICT: asked, given, and where its copies are before the layer does anything
enum { HOBBIT_TRACE_ABSENT, HOBBIT_TRACE_LOADING, HOBBIT_TRACE_READY };
inline uint8_t hobbit_trace_state(int asked, int given, int here_low, int here_high) {
    return (uint8_t) (asked | given << 2 | here_low << 4 | here_high << 6);
}

// the selections of one layer, row after row
struct hobbit_selections {
    std::vector<uint16_t> ids;
    std::vector<float>    weights;
    std::vector<uint8_t>  state;

    void clear() {
        ids.clear();
        weights.clear();
        state.clear();
    }
    void add(int id, float weight, uint8_t s) {
        ids.push_back((uint16_t) id);
        weights.push_back(weight);
        state.push_back(s);
    }
};

// the payload of RECORDS, and back; false if it is not one for n_keys
std::vector<uint8_t> hobbit_trace_records(int32_t seq_id, const hobbit_records & records);
bool hobbit_trace_parse_records(const uint8_t * payload, size_t size, size_t n_keys, bool with_mass, int32_t & seq_id, hobbit_records & records);

class hobbit_trace {
  public:
    hobbit_trace() = default;
    hobbit_trace(const hobbit_trace &) = delete;
    ~hobbit_trace();

    // head: lines "name value", see docs/trace.md
    bool open(const std::string & path, const std::string & head, std::string & err);

    void event(hobbit_trace_type type, int context, int layer = 0, int expert = 0, int precision = 0, uint64_t bytes = 0,
               const void * payload = nullptr, size_t size = 0);
    // ROUTE (to 0, acted_on false) and PREDICT (to: the layer predicted)
    void selections(hobbit_trace_type type, int context, int layer, int to, bool acted_on, int n_used, const hobbit_selections & s);

    // false: some of it could not be written, and err says why
    bool close(std::string & err);
    void flush();
    // for a signal's last words: leaves out what is busy
    void try_flush();

  private:
    void append(const void * data, size_t size);
    void write_buffer();

    std::mutex           mutex;
    std::string          path;
    FILE *               file = nullptr;
    std::vector<uint8_t> buffer;
    int64_t              t_begin_us = 0;
    int                  reason     = 0; // errno of the first write that failed
};
