// simulate: takes the decisions of a trace again, with its own settings or others.
//
// The parts that decide are the engine's: pools and their victims (cache), the precision of a selection (precision), how far to
// look ahead (prefetch's governor). What moe_graph does between them is written here once more without tensors and threads:
// replay_route mirrors its route node, in the same order. A test holds the two together: replaying a trace with its own settings gives
// the engine's counters to the last one, and at every selection the same experts are resident.
//
// With its own settings, what depended on time (was a copy there yet? was a prefetch cancelled? how far ahead?) comes from the trace.
// With others it comes from a model of one link, on which demands go before prefetches; without a bandwidth reads take no time. The
// choices of the router stay those of the trace, so that numbers for other settings are counterfactual unless precision does not
// depend on the cache (--hobbit-deterministic).

#include "hobbit.h"

#include "activations.h"
#include "budget.h"
#include "cache.h"
#include "config.h"
#include "precision.h"
#include "prefetch.h"
#include "stats.h"
#include "store.h"
#include "trace.h"

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <tuple>

struct replay_layer {
    int      n_expert;
    uint64_t bytes[HOBBIT_N_PRECISIONS];
};

struct replay_record {
    hobbit_trace_head head;
    const uint8_t *   payload;
};

struct replay_settings {
    int                  n_expert_used = 1;
    int                  n_slots   [HOBBIT_N_PRECISIONS] = {};
    uint64_t             slot_bytes[HOBBIT_N_PRECISIONS] = {};
    hobbit_thresholds    thresholds    = { HOBBIT_RULE_HIGH, 0.6f, 0.9f };
    bool                 deterministic = false;
    hobbit_policy_params policy;
    float                low_share        = 0.2f;
    uint64_t             cache_bytes      = 0; // 0: n_slots as they are
    int                  prefetch         = 0;
    bool                 adaptive         = false;
    hobbit_prefill       prefill          = HOBBIT_PREFILL_HIGHEST;
    hobbit_unit          unit             = HOBBIT_UNIT_EXPERT;
    int64_t              rows_evict_max   = 32;
    int64_t              rows_predict_max = 8;

    bool     recorded       = true;  // no setting differs from the trace's
    bool     counterfactual = false; // another precision might have been computed, and the router's choices be others
    double   bandwidth     = 0.0;  // bytes per us; 0: reads take no time
    double   latency_us    = 0.0;
    double   compute_us    = 0.0;  // of a layer, without waiting
    bool     interruptible = true;
    uint64_t block_bytes   = 1 << 20;
};

struct hobbit_replay {
    std::vector<uint8_t>       data;
    std::vector<replay_layer>  layers;
    int                        n_expert = 0;
    replay_settings            settings;
    std::vector<replay_record> records;
};

//
// reading
//

template <typename T>
static bool read_values(std::istringstream & in, T * values, int n) {
    for (int i = 0; i < n; ++i) {
        if (!(in >> values[i])) {
            return false;
        }
    }
    return true;
}

static bool parse_rule(const std::string & name, hobbit_rule & rule) {
    for (int i = HOBBIT_RULE_HIGH; i <= HOBBIT_RULE_ARTICLE; ++i) {
        if (name == hobbit_rule_name((hobbit_rule) i)) {
            rule = (hobbit_rule) i;
            return true;
        }
    }
    return false;
}

static bool parse_policy(const std::string & name, hobbit_policy & policy) {
    if (name == "belady") {
        policy = HOBBIT_POLICY_ORACLE;
        return true;
    }
    for (int i = 0; i < HOBBIT_POLICY_ORACLE; ++i) {
        if (name == hobbit_policy_name((hobbit_policy) i)) {
            policy = (hobbit_policy) i;
            return true;
        }
    }
    return false;
}

static bool parse_prefill(const std::string & text, hobbit_prefill & prefill) {
    for (hobbit_prefill p : { HOBBIT_PREFILL_HIGHEST, HOBBIT_PREFILL_MASS, HOBBIT_PREFILL_LOW }) {
        if (text == hobbit_prefill_name(p)) {
            prefill = p;
            return true;
        }
    }
    return false;
}

static bool parse_unit(const std::string & text, hobbit_unit & unit) {
    for (hobbit_unit u : { HOBBIT_UNIT_EXPERT, HOBBIT_UNIT_LAYER }) {
        if (text == hobbit_unit_name(u)) {
            unit = u;
            return true;
        }
    }
    return false;
}

// one setting; false: the value will not do. known: set to false if there is no such setting
static bool parse_setting(replay_settings & s, const std::string & name, std::istringstream & in, bool & known) {
    std::string text;
    const auto is = [&name](const char * other) { return name == other; };
    known = true;
    if (is("n_expert_used"))    { return read_values(in, &s.n_expert_used, 1) && s.n_expert_used >= 1; }
    if (is("rule"))             { return read_values(in, &text, 1) && parse_rule(text, s.thresholds.rule); }
    if (is("t1"))               { return read_values(in, &s.thresholds.t1, 1); }
    if (is("t2"))               { return read_values(in, &s.thresholds.t2, 1); }
    if (is("deterministic"))    { return read_values(in, &s.deterministic, 1); }
    if (is("policy"))           { return read_values(in, &text, 1) && parse_policy(text, s.policy.policy); }
    if (is("low_cost"))         { return read_values(in, &s.policy.low_cost, 1); }
    if (is("seed"))             { return read_values(in, &s.policy.seed, 1); }
    if (is("low_share"))        { return read_values(in, &s.low_share, 1) && s.low_share > 0.0f && s.low_share < 1.0f; }
    if (is("cache_bytes"))      { return read_values(in, &s.cache_bytes, 1); }
    if (is("prefetch"))         { return read_values(in, &s.prefetch, 1) && s.prefetch >= 0; }
    if (is("adaptive"))         { return read_values(in, &s.adaptive, 1); }
    if (is("prefill_precision")) { return read_values(in, &text, 1) && parse_prefill(text, s.prefill); }
    if (is("unit"))             { return read_values(in, &text, 1) && parse_unit(text, s.unit); }
    if (is("rows_evict_max"))   { return read_values(in, &s.rows_evict_max, 1); }
    if (is("rows_predict_max")) { return read_values(in, &s.rows_predict_max, 1); }
    if (is("bandwidth"))        { return read_values(in, &s.bandwidth, 1) && s.bandwidth >= 0.0; }
    if (is("latency_us"))       { return read_values(in, &s.latency_us, 1) && s.latency_us >= 0.0; }
    if (is("compute_us"))       { return read_values(in, &s.compute_us, 1) && s.compute_us >= 0.0; }
    if (is("interruptible"))    { return read_values(in, &s.interruptible, 1); }
    if (is("block_bytes"))      { return read_values(in, &s.block_bytes, 1) && s.block_bytes > 0; }
    if (is("weights")) {
        float w[4];
        if (!read_values(in, w, 4) || !(w[0] >= 0 && w[1] >= 0 && w[2] >= 0 && w[3] >= 0 && w[0] + w[1] + w[2] + w[3] > 0)) {
            return false;
        }
        const float sum = w[0] + w[1] + w[2] + w[3];
        s.policy.w_lru = w[0] / sum;
        s.policy.w_lfu = w[1] / sum;
        s.policy.w_lhu = w[2] / sum;
        s.policy.w_fld = w[3] / sum;
        return true;
    }
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (is(p == HOBBIT_LOW ? "slots_low" : "slots_high")) {
            uint64_t v[2];
            if (!read_values(in, v, 1)) {
                return false;
            }
            s.n_slots[p] = (int) v[0];
            if (in >> v[1]) {
                s.slot_bytes[p] = v[1];
            }
            return true;
        }
    }
    known = false;
    return true;
}

static bool read_head(hobbit_replay & r, size_t & at, std::string & err) {
    const std::string mark = "\n\n";
    const auto end = std::search(r.data.begin(), r.data.end(), mark.begin(), mark.end());
    std::istringstream text(std::string(r.data.begin(), end));
    std::string line;
    int version = 0;
    if (end == r.data.end() || !std::getline(text, line) || sscanf(line.c_str(), "hobbit-trace %d", &version) != 1) {
        err = "is not a trace of --hobbit-trace";
        return false;
    }
    if (version != HOBBIT_TRACE_VERSION) {
        err = hobbit_format("is a trace of version %d; this library reads version %d", version, HOBBIT_TRACE_VERSION);
        return false;
    }
    at = end - r.data.begin() + mark.size();
    while (std::getline(text, line)) {
        std::istringstream in(line);
        std::string name;
        in >> name;
        uint64_t v[5];
        bool     ok = true, known = true;
        if (name == "layer") {
            ok = read_values(in, v, 5) && v[0] == r.layers.size();
            r.layers.push_back({ (int) v[2], { v[3], v[4] } });
        } else if (name == "n_expert") {
            ok = read_values(in, &r.n_expert, 1) && r.n_expert > 0;
        } else {
            ok = parse_setting(r.settings, name, in, known);
        }
        if (!ok) {
            err = "has a line that means nothing: " + line;
            return false;
        }
    }
    if (r.layers.empty() || r.n_expert == 0) {
        err = "names no layers";
        return false;
    }
    for (const replay_layer & layer : r.layers) {
        if (layer.n_expert > r.n_expert) {
            err = hobbit_format("has a layer with %d experts where the model has %d", layer.n_expert, r.n_expert);
            return false;
        }
    }
    return true;
}

// view of a ROUTE or PREDICT payload
struct replay_selections {
    uint32_t        n_rows;
    uint32_t        n_used;
    const uint8_t * weights;
    const uint8_t * ids;
    const uint8_t * state;

    float weight(size_t i) const { float    v; memcpy(&v, weights + i * sizeof(v), sizeof(v)); return v; }
    int   id    (size_t i) const { uint16_t v; memcpy(&v, ids     + i * sizeof(v), sizeof(v)); return v; }
};

static bool view_selections(const replay_record & record, replay_selections & s) {
    if (record.head.size < 8) {
        return false;
    }
    memcpy(&s.n_rows, record.payload,     4);
    memcpy(&s.n_used, record.payload + 4, 4);
    const uint64_t n = (uint64_t) s.n_rows * s.n_used;
    s.weights = record.payload + 8;
    s.ids     = s.weights + 4 * n;
    s.state   = s.ids     + 2 * n;
    return record.head.size == 8 + 7 * n;
}

// what a record claims must lie within the model and within its payload, so that the replay need not look again
static bool check_record(const hobbit_replay & r, const replay_record & record) {
    const hobbit_trace_head & h = record.head;
    const int n_layer = (int) r.layers.size();
    switch (h.type) {
        case HOBBIT_TRACE_STEP: {
            int32_t n[2];
            if (h.size < 8) {
                return false;
            }
            memcpy(n, record.payload, 8);
            return n[0] >= 1 && n[1] >= 0 && h.size == 8 + 4 * ((uint64_t) n[0] + n[1]);
        }
        case HOBBIT_TRACE_ROUTE:
        case HOBBIT_TRACE_PREDICT: {
            replay_selections s = {};
            if (h.layer >= n_layer || (h.type == HOBBIT_TRACE_PREDICT && h.expert >= n_layer) || !view_selections(record, s)) {
                return false;
            }
            const int n_expert = r.layers[h.type == HOBBIT_TRACE_PREDICT ? h.expert : h.layer].n_expert;
            for (size_t i = 0; i < (size_t) s.n_rows * s.n_used; ++i) {
                if (s.id(i) >= n_expert) {
                    return false;
                }
            }
            return true;
        }
        case HOBBIT_TRACE_SEQUENCE: return h.size == 4;
        case HOBBIT_TRACE_RESIZE:   return h.size == 8;
        case HOBBIT_TRACE_WARM:
        case HOBBIT_TRACE_CANCEL:
        case HOBBIT_TRACE_FAIL:
        case HOBBIT_TRACE_RESIDENT: return h.layer < n_layer && h.expert < r.layers[h.layer].n_expert && h.precision < HOBBIT_N_PRECISIONS;
        default:                    return true;
    }
}

hobbit_replay * hobbit_replay_open(const char * path, char * err, size_t err_size) {
    auto r = std::make_unique<hobbit_replay>();
    std::ifstream in(path, std::ios::binary);
    r->data.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    std::string why;
    size_t      at = 0;
    if (!in) {
        why = "cannot be read";
    } else if (read_head(*r, at, why)) {
        replay_record record;
        while (at + sizeof(record.head) <= r->data.size()) {
            memcpy(&record.head, r->data.data() + at, sizeof(record.head));
            record.payload = r->data.data() + at + sizeof(record.head);
            if (at + sizeof(record.head) + record.head.size > r->data.size()) {
                break; // the run was killed in the middle of a write
            }
            if (!check_record(*r, record)) {
                why = hobbit_format("the record at byte %zu, of type %d, does not fit the model", at, record.head.type);
                break;
            }
            r->records.push_back(record);
            at += sizeof(record.head) + record.head.size;
        }
    }
    if (!why.empty()) {
        hobbit_fail(err, err_size, hobbit_format("%s: %s", path, why.c_str()));
        return nullptr;
    }
    return r.release();
}

void hobbit_replay_free(hobbit_replay * replay) {
    delete replay;
}

//
// the link
//

// one at a time; demands first, then prefetches in the order of their issue. Times in us
struct replay_link {
    struct transfer {
        int64_t key; // precision, layer and expert in one
        double  bytes;
        double  issued;
    };

    double bandwidth     = 0.0;
    double latency_us    = 0.0;
    double block_bytes   = 0.0;
    bool   interruptible = true;

    double                    busy_until = 0.0;
    transfer                  running    = { -1, 0.0, 0.0 }; // the prefetch under way until busy_until, if key >= 0
    std::vector<transfer>     queue;                         // prefetches that wait, the next first
    std::map<int64_t, double> left;                          // key -> bytes left, of what is not here yet
    double                    demand_us = 0.0;               // spent on demands

    bool instant() const { return bandwidth <= 0.0; }
    bool is_here(int64_t key) const { return left.count(key) == 0; }

    // what was done by a time
    void advance(double now) {
        while (true) {
            if (running.key >= 0 && busy_until <= now) {
                left.erase(running.key);
                running.key = -1;
            }
            if (running.key >= 0 || queue.empty() || std::max(busy_until, queue.front().issued) >= now) {
                return;
            }
            running = queue.front();
            queue.erase(queue.begin());
            busy_until = std::max(busy_until, running.issued) + latency_us + running.bytes / bandwidth;
        }
    }
    // when the link is free for something else; what is interrupted goes to the front of the queue
    double make_room(double now) {
        if (running.key >= 0 && interruptible) {
            const double stop = std::min(busy_until, now + block_bytes / bandwidth);
            const double rest = (busy_until - stop) * bandwidth;
            if (rest > 0.0) {
                left[running.key] = rest;
                queue.insert(queue.begin(), { running.key, rest, now });
                running.key = -1;
                busy_until  = stop;
            }
        }
        return std::max(now, busy_until);
    }
    double demand(int64_t key, double bytes, double now) {
        if (instant()) {
            return now;
        }
        advance(now);
        if (running.key == key) {
            return busy_until;
        }
        const auto it = std::find_if(queue.begin(), queue.end(), [key](const transfer & t) { return t.key == key; });
        if (it != queue.end()) {
            bytes = it->bytes; // promoted: keeps what was read
            queue.erase(it);
        }
        const double start = make_room(now);
        if (running.key >= 0) { // not interruptible: it ends before this begins
            left.erase(running.key);
            running.key = -1;
        }
        busy_until = start + latency_us + bytes / bandwidth;
        demand_us += busy_until - start;
        left.erase(key);
        return busy_until;
    }
    void prefetch(int64_t key, double bytes, double now) {
        if (!instant()) {
            queue.push_back({ key, bytes, now });
            left[key] = bytes;
        }
    }
    // bytes that were read of it, all in all
    double cancel(int64_t key, double bytes, double now) {
        advance(now);
        double done = bytes - left[key];
        const auto it = std::find_if(queue.begin(), queue.end(), [key](const transfer & t) { return t.key == key; });
        if (it != queue.end()) {
            queue.erase(it);
        } else if (running.key == key) {
            if (interruptible) {
                const double stop = std::min(busy_until, now + block_bytes / bandwidth);
                done       = bytes - (busy_until - stop) * bandwidth;
                busy_until = stop;
            } else {
                done = bytes;
            }
            running.key = -1;
        }
        left.erase(key);
        return done;
    }
};

//
// replay
//

struct replay_prediction {
    int  layer;
    int  expert;
    int  precision;
    int  slot;
    bool issued;
};

struct replay_context {
    std::map<int32_t, hobbit_records>       records;
    std::vector<int32_t>                    token_seq;
    std::vector<int32_t>                    output_seq;
    std::vector<const hobbit_records *>     step_records;
    std::vector<std::pair<int, int>>        pinned;
    std::vector<replay_prediction>          predicted;
    std::vector<hobbit_counters>            counters; // per layer
    int n_prefetch_used   = 0;
    int n_prefetch_wasted = 0;
    double read_bytes     = 0.0; // by this step, read ahead or not
    double wasted_bytes   = 0.0; // of them, read ahead in vain
};

// when an expert is wanted, for Belady: (number of the route event, precision)
using replay_wants = std::vector<std::pair<int64_t, hobbit_precision>>;

class replay_run {
  public:
    replay_run(const hobbit_replay & trace, const replay_settings & settings);
    void        run();
    std::string to_json() const;

  private:
    bool uses(int precision) const { return pools[precision] != nullptr; }
    int64_t key_of(int layer, int expert) const { return (int64_t) layer * trace.n_expert + expert; }
    bool is_large(int layer, int64_t n_rows) const {
        return s.unit == HOBBIT_UNIT_LAYER || hobbit_is_large(n_rows, s.rows_evict_max, s.n_expert_used, trace.layers[layer].n_expert);
    }
    int64_t link_key(int layer, int expert, int precision) const { return key_of(layer, expert) * HOBBIT_N_PRECISIONS + precision; }

    replay_context &      context(const replay_record & record);
    void                  step_begin(replay_context & ctx, const replay_record & record);
    void                  step_end  (replay_context & ctx, size_t i);
    void                  route     (replay_context & ctx, size_t i);
    void                  place     (replay_context & ctx, int layer, int64_t n_rows, std::vector<std::tuple<int, hobbit_precision, int, double>> & choices);
    void                  look_ahead(replay_context & ctx, size_t i, int64_t n_rows);
    void                  settle    (replay_context & ctx, int layer, const hobbit_precision * chosen);
    void                  unpin_all (replay_context & ctx);
    bool                  is_ready  (int layer, int expert, int precision, uint8_t state) const;
    hobbit_precision      choose    (int layer, int expert, hobbit_precision wanted, uint8_t state);
    int32_t               row_sequence(const replay_context & ctx, int64_t row, int64_t n_rows) const;
    void                  collect   (size_t i);
    void                  foresee();
    double                foresight(int precision, int64_t key) const;
    hobbit_counters       total() const;
    double                penalty(const hobbit_counters & c) const;

    const hobbit_replay &   trace;
    replay_settings         s;
    std::unique_ptr<hobbit_pool> pools[HOBBIT_N_PRECISIONS];
    std::map<int, replay_context> contexts;
    hobbit_records          totals;
    hobbit_activations      activations; // of past requests, for their policy
    hobbit_governor         governor;
    replay_link             link;
    double                  now      = 0.0; // us
    double                  stall_us = 0.0;
    double                  step_begin_us = 0.0, step_demand_us = 0.0;
    uint64_t                divergences   = 0;
    std::set<int64_t>       leave; // link_key of what the trace says was cancelled or failed after the running record
    std::map<int64_t, uint64_t> left_bytes;
    std::set<int64_t>       passed; // the same of what was streamed: also a slot is filled by a stream that has begun
    std::vector<std::pair<hobbit_counters, std::pair<double, double>>> segments; // totals, time and stall when each sequence began
    std::vector<replay_wants> wants; // by key
    int64_t                 event = 0; // route events so far
};

replay_run::replay_run(const hobbit_replay & trace, const replay_settings & settings) : trace(trace), s(settings) {
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (s.n_slots[p] > 0) {
            pools[p] = std::make_unique<hobbit_pool>((int) trace.layers.size(), trace.n_expert, s.n_slots[p], s.policy);
            pools[p]->oracle = [this, p](int64_t key, int) { return foresight(p, key); };
        }
    }
    totals.reset(trace.layers.size() * (size_t) trace.n_expert);
    activations.init((int) trace.layers.size(), trace.n_expert);
    governor.init(s.prefetch, s.adaptive);
    link.bandwidth     = s.bandwidth;
    link.latency_us    = s.latency_us;
    link.block_bytes   = (double) s.block_bytes;
    link.interruptible = s.interruptible;
    if (s.policy.policy == HOBBIT_POLICY_ORACLE) {
        foresee();
    }
}

replay_context & replay_run::context(const replay_record & record) {
    replay_context & ctx = contexts[record.head.context];
    ctx.counters.resize(trace.layers.size());
    return ctx;
}

// what the route events will ask for, under the thresholds of this run
void replay_run::foresee() {
    wants.resize(trace.layers.size() * (size_t) trace.n_expert);
    int64_t n = 0;
    std::vector<float>            w;
    std::vector<hobbit_precision> asked;
    for (const replay_record & record : trace.records) {
        replay_selections sel = {};
        if (record.head.type != HOBBIT_TRACE_ROUTE || !view_selections(record, sel)) {
            continue;
        }
        std::map<int, hobbit_precision> most;
        w.resize(sel.n_used);
        asked.resize(sel.n_used);
        for (uint32_t row = 0; row < sel.n_rows; ++row) {
            for (uint32_t k = 0; k < sel.n_used; ++k) {
                w[k] = sel.weight((size_t) row * sel.n_used + k);
            }
            hobbit_precision_score(s.thresholds, w.data(), (int) sel.n_used, asked.data());
            for (uint32_t k = 0; k < sel.n_used; ++k) {
                hobbit_precision & p = most[sel.id((size_t) row * sel.n_used + k)];
                p = std::max(p, asked[k]);
            }
        }
        for (const auto & [id, p] : most) {
            if (p != HOBBIT_PRECISION_SKIP) {
                wants[key_of(record.head.layer, id)].push_back({ n, uses(HOBBIT_LOW) ? p : HOBBIT_PRECISION_HIGH });
            }
        }
        n++;
    }
}

// what keeping the copy saves, over how long it takes until then
double replay_run::foresight(int precision, int64_t key) const {
    const replay_wants & w = wants[key];
    auto it = std::upper_bound(w.begin(), w.end(), std::make_pair(event, HOBBIT_PRECISION_HIGH));
    const double low_cost = s.policy.low_cost;
    double best = 0.0;
    for (int i = 0; it != w.end() && i < 16; ++it, ++i) {
        const double cost =
            it->second == HOBBIT_PRECISION_HIGH ? (precision == HOBBIT_HIGH ? 1.0 : 0.0) :
            precision == HOBBIT_LOW             ? low_cost :
            s.deterministic                     ? 0.0 : low_cost;
        best = std::max(best, cost / (it->first - event));
        if (it->second == HOBBIT_PRECISION_HIGH && precision == HOBBIT_HIGH) {
            break;
        }
    }
    return best;
}

bool replay_run::is_ready(int layer, int expert, int precision, uint8_t state) const {
    if (s.recorded) {
        return (precision == HOBBIT_HIGH ? state >> 6 : state >> 4 & 3) == HOBBIT_TRACE_READY;
    }
    return link.is_here(link_key(layer, expert, precision));
}

hobbit_precision replay_run::choose(int layer, int expert, hobbit_precision wanted, uint8_t state) {
    bool here[HOBBIT_N_PRECISIONS] = {};
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        const bool resident = uses(p) && pools[p]->find(layer, expert) >= 0;
        here[p] = resident && is_ready(layer, expert, p, state);
        if (s.recorded && resident != ((p == HOBBIT_HIGH ? state >> 6 : state >> 4 & 3) != HOBBIT_TRACE_ABSENT)) {
            divergences++;
        }
    }
    const hobbit_precision given = hobbit_precision_given(wanted, s.deterministic, uses(HOBBIT_LOW), uses(HOBBIT_HIGH), here[HOBBIT_LOW], here[HOBBIT_HIGH]);
    if (s.recorded && given != (hobbit_precision) (state >> 2 & 3)) {
        divergences++;
    }
    return given;
}

int32_t replay_run::row_sequence(const replay_context & ctx, int64_t row, int64_t n_rows) const {
    const auto & seq = n_rows == (int64_t) ctx.token_seq.size() ? ctx.token_seq : ctx.output_seq;
    return row < (int64_t) seq.size() ? seq[row] : ctx.token_seq.empty() ? 0 : ctx.token_seq[0];
}

void replay_run::unpin_all(replay_context & ctx) {
    for (const auto & [precision, slot] : ctx.pinned) {
        pools[precision]->unpin(slot);
    }
    ctx.pinned.clear();
}

// what the trace says left between record i and the next event of the same context
void replay_run::collect(size_t i) {
    leave.clear();
    left_bytes.clear();
    passed.clear();
    for (size_t k = i + 1; k < trace.records.size(); ++k) {
        const hobbit_trace_head & h = trace.records[k].head;
        if (h.context != trace.records[i].head.context && h.type != HOBBIT_TRACE_DONE) {
            continue;
        }
        if (h.type == HOBBIT_TRACE_ROUTE || h.type == HOBBIT_TRACE_END || h.type == HOBBIT_TRACE_STEP) {
            break;
        }
        if (h.type == HOBBIT_TRACE_STREAM) {
            passed.insert(link_key(h.layer, h.expert, h.precision));
        }
        if (h.type == HOBBIT_TRACE_CANCEL || h.type == HOBBIT_TRACE_FAIL) {
            leave.insert(link_key(h.layer, h.expert, h.precision));
            left_bytes[link_key(h.layer, h.expert, h.precision)] = h.bytes;
        }
    }
}

void replay_run::settle(replay_context & ctx, int layer, const hobbit_precision * chosen) {
    std::vector<replay_prediction> later;
    for (const replay_prediction & p : ctx.predicted) {
        if (p.layer > layer) {
            later.push_back(p);
            continue;
        }
        hobbit_pool & pool = *pools[p.precision];
        pool.unpin(p.slot);

        const int64_t key   = link_key(p.layer, p.expert, p.precision);
        const bool    used  = chosen && p.layer == layer && chosen[p.expert] == HOBBIT_PRECISION_LOW + p.precision;
        const bool    ready = s.recorded ? leave.count(key) == 0 : link.is_here(key);
        const uint64_t whole = trace.layers[p.layer].bytes[p.precision];
        uint64_t bytes = p.issued ? whole : 0;
        if (!used && !ready && pool.pins(p.slot) == 0) {
            const uint64_t done = s.recorded ? left_bytes[key] : (uint64_t) link.cancel(key, (double) whole, now);
            bytes = p.issued ? done : 0;
            pool.drop(p.slot);
        }
        hobbit_counters & count = ctx.counters[p.layer];
        if (chosen && p.layer == layer) {
            count.predicted++;
            count.predicted_right += chosen[p.expert] != HOBBIT_PRECISION_SKIP ? 1 : 0;
        }
        if (p.issued) {
            count.prefetch_bytes += bytes;
            (used ? count.prefetch_used : count.prefetch_wasted) += 1;
            (used ? ctx.n_prefetch_used : ctx.n_prefetch_wasted) += 1;
            ctx.read_bytes   += bytes;
            ctx.wasted_bytes += used ? 0 : bytes;
        }
    }
    ctx.predicted.swap(later);
}

void replay_run::place(replay_context & ctx, int layer, int64_t n_rows, std::vector<std::tuple<int, hobbit_precision, int, double>> & choices) {
    hobbit_counters & count = ctx.counters[layer];
    std::vector<std::tuple<int, int, int>> missing; // expert, precision, selections
    double ready_at = now;

    count.routed += n_rows;
    for (const auto & [id, given, n_selected, mass] : choices) {
        count.lookups++;
        if (given == HOBBIT_PRECISION_SKIP) {
            count.skips++;
            count.selected_skip += n_selected;
            count.mass_skip     += llround(1e6 * mass);
            continue;
        }
        const int precision = given - HOBBIT_PRECISION_LOW;
        (precision == HOBBIT_HIGH ? count.selected_high : count.selected_low) += n_selected;
        count.mass_low += precision == HOBBIT_LOW ? llround(1e6 * mass) : 0;

        hobbit_pool & pool = *pools[precision];
        int           slot = pool.find(layer, id);
        if (slot >= 0 && s.recorded && leave.count(link_key(layer, id, precision)) && pool.pins(slot) == 0) {
            pool.drop(slot); // FAIL: its read had failed
            slot = -1;
        }
        if (slot < 0) {
            missing.emplace_back(id, precision, n_selected);
            continue;
        }
        count.hits++;
        pool.pin(slot);
        pool.touch(slot);
        ctx.pinned.emplace_back(precision, slot);
        const int64_t key = link_key(layer, id, precision);
        if (!link.instant() && !link.is_here(key)) {
            ready_at = std::max(ready_at, link.demand(key, link.left[key], now));
        }
    }
    const bool large = is_large(layer, n_rows);
    int n_admit[HOBBIT_N_PRECISIONS] = { INT_MAX, INT_MAX };
    if (large) {
        std::stable_sort(missing.begin(), missing.end(), [](const auto & a, const auto & b) { return std::get<2>(a) > std::get<2>(b); });
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            n_admit[p] = uses(p) ? pools[p]->n_free_share(layer) : 0;
        }
    }
    for (const auto & [id, precision, n_selected] : missing) {
        const uint64_t bytes = trace.layers[layer].bytes[precision];
        (precision == HOBBIT_HIGH ? count.misses_high     : count.misses_low)     += 1;
        (precision == HOBBIT_HIGH ? count.read_bytes_high : count.read_bytes_low) += bytes;
        ctx.read_bytes += bytes;

        int64_t evicted = -1;
        const auto try_place = [&, id = id, precision = precision] {
            return pools[precision]->place(layer, id, ctx.step_records.data(), (int) ctx.step_records.size(), !large, &evicted);
        };
        int slot = n_admit[precision]-- > 0 ? try_place() : -1;
        if (slot < 0 && !large && !ctx.predicted.empty()) {
            settle(ctx, (int) trace.layers.size(), nullptr);
            slot = try_place();
        }
        count.evictions += evicted >= 0 ? 1 : 0;
        ready_at = std::max(ready_at, link.demand(link_key(layer, id, precision), (double) bytes, now));
        if (slot >= 0) {
            ctx.pinned.emplace_back(precision, slot);
        }
        const bool streamed = s.recorded ? passed.count(link_key(layer, id, precision)) > 0 : slot < 0;
        count.streamed += streamed ? 1 : 0;
    }
    stall_us += ready_at - now;
    now       = ready_at;
}

void replay_run::look_ahead(replay_context & ctx, size_t i, int64_t n_rows) {
    const int from = trace.records[i].head.layer;
    if (n_rows > s.rows_predict_max) {
        return;
    }
    for (size_t k = i + 1; k < trace.records.size(); ++k) {
        const replay_record & record = trace.records[k];
        if (record.head.type == HOBBIT_TRACE_DONE || record.head.context != trace.records[i].head.context) {
            continue;
        }
        if (record.head.type == HOBBIT_TRACE_ROUTE || record.head.type == HOBBIT_TRACE_END || record.head.type == HOBBIT_TRACE_STEP) {
            return;
        }
        replay_selections sel = {};
        if (record.head.type != HOBBIT_TRACE_PREDICT || record.head.layer != from || !view_selections(record, sel)) {
            continue;
        }
        const int to = record.head.expert;
        if (s.recorded ? !record.head.precision : to > from + governor.depth()) {
            return;
        }
        std::vector<float>            w(sel.n_used);
        std::vector<hobbit_precision> asked(sel.n_used);
        bool any = false;
        for (uint32_t row = 0; row < sel.n_rows; ++row) {
            for (uint32_t j = 0; j < sel.n_used; ++j) {
                w[j] = sel.weight((size_t) row * sel.n_used + j);
            }
            hobbit_precision_score(s.thresholds, w.data(), (int) sel.n_used, asked.data());
            for (uint32_t j = 0; j < sel.n_used; ++j) {
                const size_t at = (size_t) row * sel.n_used + j;
                const int    id = sel.id(at);
                if (w[j] == 0.0f && (sel.state[at] & 3) == HOBBIT_PRECISION_SKIP) {
                    asked[j] = HOBBIT_PRECISION_SKIP; // the predictor knew nothing of it
                }
                const hobbit_precision given = choose(to, id, asked[j], sel.state[at]);
                if (given == HOBBIT_PRECISION_SKIP) {
                    continue;
                }
                const int     precision = given - HOBBIT_PRECISION_LOW;
                hobbit_pool & pool      = *pools[precision];
                int           slot      = pool.find(to, id);
                if (slot >= 0) {
                    pool.pin(slot);
                    ctx.predicted.push_back({ to, id, precision, slot, false });
                    continue;
                }
                int64_t evicted;
                slot = pool.place(to, id, ctx.step_records.data(), (int) ctx.step_records.size(), true, &evicted);
                if (slot < 0) {
                    continue;
                }
                ctx.predicted.push_back({ to, id, precision, slot, true });
                link.prefetch(link_key(to, id, precision), (double) trace.layers[to].bytes[precision], now);
                any = true;
                ctx.counters[to].prefetch_issued++;
                ctx.counters[to].evictions += evicted >= 0 ? 1 : 0;
            }
        }
        if (any && !s.recorded) {
            return;
        }
    }
}

void replay_run::route(replay_context & ctx, size_t i) {
    const replay_record & record = trace.records[i];
    const int layer = record.head.layer;
    replay_selections sel = {};
    view_selections(record, sel);

    collect(i);
    unpin_all(ctx);

    std::vector<float>            w(sel.n_used);
    std::vector<float>            share(sel.n_used);
    std::vector<hobbit_precision> asked(sel.n_used);
    std::vector<int>              index(trace.layers[layer].n_expert, -1);
    std::vector<std::tuple<int, hobbit_precision, int, double>> choices; // expert, precision, selections, gate weight
    std::vector<uint8_t>          state;

    for (uint32_t row = 0; row < sel.n_rows; ++row) {
        for (uint32_t k = 0; k < sel.n_used; ++k) {
            w[k] = sel.weight((size_t) row * sel.n_used + k);
        }
        hobbit_precision_score(s.thresholds, w.data(), (int) sel.n_used, asked.data());
        hobbit_precision_shares(w.data(), (int) sel.n_used, share.data());
        auto records = ctx.records.find(row_sequence(ctx, row, sel.n_rows));
        for (uint32_t k = 0; k < sel.n_used; ++k) {
            const size_t at = (size_t) row * sel.n_used + k;
            const int    id = sel.id(at);
            if (index[id] < 0) {
                index[id] = (int) choices.size();
                choices.emplace_back(id, HOBBIT_PRECISION_SKIP, 0, 0.0);
                state.push_back(sel.state[at]);
            }
            auto & choice = choices[index[id]];
            std::get<1>(choice) = std::max(std::get<1>(choice), asked[k]);
            std::get<2>(choice)++;
            std::get<3>(choice) += share[k];
            if (records != ctx.records.end()) {
                records->second.use(key_of(layer, id), asked[k] == HOBBIT_PRECISION_HIGH, w[k]);
            }
            totals.use(key_of(layer, id), asked[k] == HOBBIT_PRECISION_HIGH);
        }
    }
    if (is_large(layer, sel.n_rows)) {
        std::vector<hobbit_precision> wanted;
        std::vector<double>           mass;
        for (const auto & choice : choices) {
            wanted.push_back(std::get<1>(choice));
            mass  .push_back(std::get<3>(choice));
        }
        hobbit_precision_prefill(s.thresholds, s.prefill, mass.data(), (int) wanted.size(), wanted.data());
        for (size_t c = 0; c < choices.size(); ++c) {
            std::get<1>(choices[c]) = wanted[c];
        }
    }
    std::vector<hobbit_precision> chosen(trace.layers[layer].n_expert, HOBBIT_PRECISION_SKIP);
    for (size_t c = 0; c < choices.size(); ++c) {
        auto & choice = choices[c];
        std::get<1>(choice) = choose(layer, std::get<0>(choice), std::get<1>(choice), state[c]);
        chosen[std::get<0>(choice)] = std::get<1>(choice);
    }
    for (int id = 0; s.unit == HOBBIT_UNIT_LAYER && id < (int) index.size(); ++id) {
        if (index[id] < 0) {
            choices.emplace_back(id, uses(HOBBIT_HIGH) ? HOBBIT_PRECISION_HIGH : HOBBIT_PRECISION_LOW, 0, 0.0);
        }
    }
    link.advance(now);
    settle(ctx, layer, chosen.data());
    place(ctx, layer, sel.n_rows, choices);
    if (s.recorded || governor.depth() > 0) {
        look_ahead(ctx, i, sel.n_rows);
    }
    now += s.compute_us;
    event++;
}

void replay_run::step_begin(replay_context & ctx, const replay_record & record) {
    int32_t n[2];
    memcpy(n, record.payload, sizeof(n));
    std::vector<int32_t> seq(n[0] + n[1]);
    memcpy(seq.data(), record.payload + 8, seq.size() * sizeof(int32_t));
    ctx.token_seq .assign(seq.begin(), seq.begin() + n[0]);
    ctx.output_seq.assign(seq.begin() + n[0], seq.end());
    ctx.step_records.clear();
    for (int32_t id : ctx.token_seq) {
        hobbit_records & records = ctx.records[id];
        if (records.entries.empty()) {
            records.reset(totals.entries.size(), s.policy.policy == HOBBIT_POLICY_GATE_MASS);
        }
        if (std::find(ctx.step_records.begin(), ctx.step_records.end(), &records) == ctx.step_records.end()) {
            ctx.step_records.push_back(&records);
            records.begin_pass();
            if (s.policy.policy == HOBBIT_POLICY_ACTIVATIONS) {
                records.resembles(activations.nearest(records));
            }
        }
        records.n_tokens++;
    }
    totals.begin_pass();
    totals.n_tokens += n[0];
    if (s.policy.policy == HOBBIT_POLICY_LFU_MODEL) {
        ctx.step_records = { &totals };
    }
    ctx.n_prefetch_used = ctx.n_prefetch_wasted = 0;
    ctx.read_bytes = ctx.wasted_bytes = 0.0;
    step_begin_us  = now;
    step_demand_us = link.demand_us;
}

void replay_run::step_end(replay_context & ctx, size_t i) {
    collect(i);
    if (s.recorded && !trace.records[i].head.precision) {
        // a failed step: what failed to load is dropped, pinned or not
        for (const auto & pin : ctx.pinned) {
            const int64_t key = pools[pin.first]->key_at(pin.second);
            if (key >= 0 && leave.count(key * HOBBIT_N_PRECISIONS + pin.first)) {
                pools[pin.first]->drop(pin.second);
            }
        }
        const auto dropped = [&](const std::pair<int, int> & pin) { return pools[pin.first]->key_at(pin.second) < 0; };
        ctx.pinned.erase(std::remove_if(ctx.pinned.begin(), ctx.pinned.end(), dropped), ctx.pinned.end());
    }
    unpin_all(ctx);
    link.advance(now);
    settle(ctx, (int) trace.layers.size(), nullptr);
    if (!s.recorded && s.adaptive && ctx.token_seq.size() == 1) {
        const double us = now - step_begin_us;
        governor.step({ ctx.n_prefetch_used, ctx.n_prefetch_wasted, us > 0.0 ? (float) ((link.demand_us - step_demand_us) / us) : 0.0f,
                ctx.read_bytes > 0.0 ? (float) (ctx.wasted_bytes / ctx.read_bytes) : 0.0f, (float) us, (float) (ctx.read_bytes - ctx.wasted_bytes) });
    }
}

void replay_run::run() {
    for (size_t i = 0; i < trace.records.size(); ++i) {
        const replay_record & record = trace.records[i];
        switch (record.head.type) {
            case HOBBIT_TRACE_STEP:  step_begin(context(record), record); break;
            case HOBBIT_TRACE_ROUTE: route(context(record), i);           break;
            case HOBBIT_TRACE_END:   step_end(context(record), i);        break;
            case HOBBIT_TRACE_SEQUENCE: {
                int32_t seq_id;
                memcpy(&seq_id, record.payload, sizeof(seq_id));
                if (s.policy.policy == HOBBIT_POLICY_ACTIVATIONS) {
                    activations.add(context(record).records[seq_id]);
                }
                context(record).records[seq_id].reset(totals.entries.size(), s.policy.policy == HOBBIT_POLICY_GATE_MASS);
                segments.push_back({ total(), { now, stall_us } });
                break;
            }
            case HOBBIT_TRACE_RECORDS: {
                hobbit_records records;
                int32_t        seq_id;
                if (hobbit_trace_parse_records(record.payload, record.head.size, totals.entries.size(), s.policy.policy == HOBBIT_POLICY_GATE_MASS, seq_id, records)) {
                    if (record.head.context == HOBBIT_TRACE_PAST) {
                        activations.add(records);
                        break;
                    }
                    (record.head.context == HOBBIT_TRACE_MODEL ? totals : context(record).records[seq_id]) = records;
                }
                break;
            }
            case HOBBIT_TRACE_RESIDENT:
            case HOBBIT_TRACE_WARM: {
                hobbit_pool * pool = pools[record.head.precision].get();
                if (pool && pool->find(record.head.layer, record.head.expert) < 0) {
                    int64_t   evicted;
                    const int slot = pool->place(record.head.layer, record.head.expert, nullptr, 0, false, &evicted);
                    if (slot >= 0) {
                        pool->unpin(slot);
                    }
                }
                break;
            }
            case HOBBIT_TRACE_DROP:
                if (s.recorded && uses(record.head.precision)) {
                    const int slot = pools[record.head.precision]->find(record.head.layer, record.head.expert);
                    if (slot >= 0) {
                        pools[record.head.precision]->drop(slot);
                    }
                }
                break;
            case HOBBIT_TRACE_RESIZE:
                if (s.recorded) {
                    int32_t n[HOBBIT_N_PRECISIONS];
                    memcpy(n, record.payload, sizeof(n));
                    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
                        if (uses(p) && n[p] > 0) {
                            pools[p]->resize(n[p]);
                        }
                    }
                }
                break;
            case HOBBIT_TRACE_STATS_RESET:
                context(record).counters.assign(trace.layers.size(), hobbit_counters());
                break;
            default:
                break;
        }
    }
    segments.push_back({ total(), { now, stall_us } });
}

hobbit_counters replay_run::total() const {
    hobbit_counters sum;
    for (const auto & [id, ctx] : contexts) {
        for (const hobbit_counters & c : ctx.counters) {
            sum.add(c);
        }
    }
    return sum;
}

// in high misses: a low one costs its share of the bytes
double replay_run::penalty(const hobbit_counters & c) const {
    return c.misses_high + s.policy.low_cost * c.misses_low;
}

std::string replay_run::to_json() const {
    const hobbit_counters sum = total();
    std::string text = hobbit_format("{\"recorded\": %s, \"counterfactual\": %s, \"divergences\": %" PRIu64 ", \"slots_low\": %d, \"slots_high\": %d, \"penalty\": %.6f, \"time_us\": %.1f, \"stall_us\": %.1f,\n",
            s.recorded ? "true" : "false", s.counterfactual ? "true" : "false", divergences, s.n_slots[HOBBIT_LOW], s.n_slots[HOBBIT_HIGH], penalty(sum), now, stall_us);
    text += hobbit_format(" \"depth\": %d, \"total\": {%s},\n \"contexts\": [", governor.depth(), hobbit_counters_to_json(sum).c_str());
    const char * sep = "";
    for (const auto & [id, ctx] : contexts) {
        text += hobbit_format("%s{\"context\": %d, \"layers\": [", sep, id);
        for (size_t l = 0; l < ctx.counters.size(); ++l) {
            text += (l > 0 ? ",\n  {" : "\n  {") + hobbit_counters_to_json(ctx.counters[l]) + "}";
        }
        text += "]}";
        sep = ", ";
    }
    text += "],\n \"sequences\": [";
    for (size_t i = 1; i < segments.size(); ++i) {
        const hobbit_counters & a = segments[i - 1].first;
        const hobbit_counters & b = segments[i].first;
        if (b.lookups <= a.lookups) {
            continue; // nothing happened, or the counters were reset
        }
        text += hobbit_format("%s\n  {\"lookups\": %" PRIu64 ", \"hits\": %" PRIu64 ", \"misses_high\": %" PRIu64 ", \"misses_low\": %" PRIu64 ", \"skips\": %" PRIu64 ", "
                "\"bytes\": %" PRIu64 ", \"penalty\": %.6f, \"time_us\": %.1f, \"stall_us\": %.1f}", text.back() == '[' ? "" : ",",
                b.lookups - a.lookups, b.hits - a.hits, b.misses_high - a.misses_high, b.misses_low - a.misses_low, b.skips - a.skips,
                b.read_bytes_high + b.read_bytes_low + b.prefetch_bytes - a.read_bytes_high - a.read_bytes_low - a.prefetch_bytes,
                penalty(b) - penalty(a), segments[i].second.first - segments[i - 1].second.first, segments[i].second.second - segments[i - 1].second.second);
    }
    return text + "]}\n";
}

// sizes given in bytes become slots by the engine's own plan, without ring and routers
static bool plan_slots(const hobbit_replay & r, replay_settings & s, std::string & err) {
    hobbit_plan_params params = {};
    params.budget        = s.cache_bytes;
    params.n_expert_used = s.n_expert_used;
    params.low_share     = s.low_share;
    for (const replay_layer & layer : r.layers) {
        params.n_experts += layer.n_expert;
    }
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        params.slot_bytes[p] = s.slot_bytes[p];
    }
    hobbit_plan plan;
    if (!hobbit_plan_pools(params, plan)) {
        err = hobbit_format("cache_bytes %" PRIu64 ": too small; the smallest that works is %" PRIu64, s.cache_bytes, hobbit_plan_min_bytes(params));
        return false;
    }
    s.n_slots[HOBBIT_LOW]  = plan.n_slots[HOBBIT_LOW];
    s.n_slots[HOBBIT_HIGH] = plan.n_slots[HOBBIT_HIGH];
    return true;
}

// whether every expert gets the precision that it got when the trace was written, whatever the cache holds
static bool keeps_precision(const replay_settings & before, const replay_settings & now) {
    const hobbit_thresholds & a = before.thresholds;
    const hobbit_thresholds & b = now.thresholds;
    if (a.rule != b.rule || a.rule == HOBBIT_RULE_HIGH || a.rule == HOBBIT_RULE_LOW) {
        return a.rule == b.rule;
    }
    return before.deterministic && now.deterministic && a.t1 == b.t1 && a.t2 == b.t2 && before.prefill == now.prefill &&
            before.rows_evict_max == now.rows_evict_max;
}

size_t hobbit_replay_run(const hobbit_replay * replay, const char * settings, char * buf, size_t buf_size, char * err, size_t err_size) {
    replay_settings s = replay->settings;
    std::istringstream lines(settings ? settings : "");
    std::string line;
    while (std::getline(lines, line, ';')) {
        const size_t equals = line.find('=');
        if (line.find_first_not_of(" \n") == std::string::npos) {
            continue;
        }
        std::string name = line.substr(0, equals);
        std::istringstream in(equals == std::string::npos ? "" : line.substr(equals + 1));
        bool known;
        if (!parse_setting(s, name, in, known) || !known) {
            hobbit_fail(err, err_size, hobbit_format("'%s': %s", line.c_str(), known ? "this value will not do" : "there is no such setting"));
            return 0;
        }
        s.recorded = false;
    }
    std::string why;
    if (s.cache_bytes > 0 && !plan_slots(*replay, s, why)) {
        hobbit_fail(err, err_size, why);
        return 0;
    }
    const bool needs[HOBBIT_N_PRECISIONS] = { s.thresholds.rule == HOBBIT_RULE_LOW, s.thresholds.rule != HOBBIT_RULE_LOW };
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (needs[p] && s.n_slots[p] < 1) {
            hobbit_fail(err, err_size, hobbit_format("rule %s needs slots_%s above 0", hobbit_rule_name(s.thresholds.rule), p == HOBBIT_LOW ? "low" : "high"));
            return 0;
        }
    }
    s.counterfactual = !s.recorded && !keeps_precision(replay->settings, s);
    replay_run run(*replay, s);
    run.run();
    const std::string text = run.to_json();
    if (buf && buf_size > 0) {
        snprintf(buf, buf_size, "%s", text.c_str());
    }
    return text.size();
}
