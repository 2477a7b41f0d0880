#include "moe_graph.h"

#include "hobbit.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>

// rows of a large batch that the next layer's router is asked about
static constexpr int64_t N_ROWS_SAMPLE = 32;

// a layer of which a large batch chose this share is followed by one of which all experts are expected
static constexpr float SHARE_ALL = 0.9f;

// the order in which a layer's operations want the weights
static constexpr hobbit_role ROLES_AS_USED[] = { HOBBIT_ROLE_GATE_UP, HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN };

//
// model geometry
//

size_t hobbit_model::role_offset(int layer, int precision, int role) const {
    size_t offset = 0;
    for (int r = 0; r < role; ++r) {
        if (const hobbit_weight * w = store.layers[layer].weight[r]) {
            offset += w->source[precision].place_bytes();
        }
    }
    return offset;
}

char * hobbit_model::piece_data(int layer, int precision, int role, int slot, int expert) const {
    const hobbit_source & src = store.layers[layer].weight[role]->source[precision];
    return pools[precision].bank.slot(slot) + role_offset(layer, precision, role) + src.skew(expert);
}

hobbit_precision hobbit_model::resident(int layer, int expert) const {
    const hobbit_device_bank * bank = devices.bank_of(layer);
    for (int p = HOBBIT_HIGH; p >= HOBBIT_LOW; --p) {
        if (uses(p) && (pools[p].pool->find(layer, expert) >= 0 || (bank && bank->part[p].pool->find(layer, expert) >= 0))) {
            return (hobbit_precision) (HOBBIT_PRECISION_LOW + p);
        }
    }
    return HOBBIT_PRECISION_SKIP;
}

size_t hobbit_model::slot_bytes(int precision) const {
    size_t size = 0;
    for (int layer = 0; layer < store.n_layer(); ++layer) {
        size = std::max(size, role_offset(layer, precision, HOBBIT_N_ROLES));
    }
    return hobbit_pad(size, HOBBIT_ALIGN);
}

size_t hobbit_model::ring_bytes() const {
    size_t size = 0;
    for (const auto & weight : store.weights) {
        for (const hobbit_source & src : weight->source) {
            size = std::max<size_t>(size, src.file ? src.place_bytes() : 0);
        }
    }
    return hobbit_pad(size, HOBBIT_ALIGN);
}

size_t hobbit_model::bytes() const {
    return pools[HOBBIT_LOW].bank.bytes() + pools[HOBBIT_HIGH].bank.bytes() + ring.bytes() + (routers ? routers->bytes() : 0);
}

size_t hobbit_model::bytes_in_use() const {
    size_t size = routers ? routers->bytes() : 0;
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        size += uses(p) ? pools[p].pool->n_used() * slot_bytes(p) : 0;
    }
    return size;
}

//
// route node
//

void hobbit_unpin_all(hobbit_context & ctx) {
    for (const auto & [precision, slot] : ctx.pinned) {
        ctx.model->pools[precision].pool->unpin(slot);
    }
    ctx.pinned.clear();
    for (const auto & [precision, slot] : ctx.moved) {
        hobbit_pool & pool = *ctx.model->pools[precision].pool;
        if (pool.pins(slot) == 0) {
            pool.drop(slot);
        }
    }
    ctx.moved.clear();
    hobbit_device_unpin(ctx);
}

void hobbit_flush_stall(hobbit_context & ctx) {
    const uint64_t us = ctx.stall_us.exchange(0, std::memory_order_relaxed);
    ctx.stats.layers[ctx.stall_layer].stall_us += us;
    (ctx.decode ? ctx.stats.decode_stall_us : ctx.stats.prompt_stall_us) += us;
}

// a slot has a new owner; who had it before may still be read into it: a prefetch, a warm start, a step that was aborted
static void clear_slot(hobbit_model & model, int precision, int slot) {
    for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
        std::atomic<uint8_t> & state = model.pools[precision].piece(slot, role);
        if (state.load(std::memory_order_acquire) == HOBBIT_PIECE_LOADING) {
            model.loader->cancel(state);
            model.loader->await_idle(state);
        }
        state.store(HOBBIT_PIECE_ABSENT, std::memory_order_relaxed);
    }
    if (!model.pools[precision].warm.empty()) {
        model.pools[precision].warm[slot] = false;
    }
}

// starts the reads of whole experts into their slots, what is used first first
static void load_experts(hobbit_model & model, int layer_index, const std::vector<hobbit_step_expert> & experts, hobbit_urgency urgency) {
    const hobbit_layer & layer = model.store.layers[layer_index];
    for (const hobbit_step_expert & e : experts) {
        clear_slot(model, e.precision, e.slot);
    }
    for (hobbit_role role : ROLES_AS_USED) {
        for (const hobbit_step_expert & e : experts) {
            if (layer.weight[role]) {
                model.loader->submit({ layer.weight[role], e.precision, e.id, model.piece_data(layer_index, e.precision, role, e.slot, e.id),
                        &model.pools[e.precision].piece(e.slot, role) }, urgency);
            }
        }
    }
}

uint64_t hobbit_expert_bytes(const hobbit_layer & layer, int precision) {
    uint64_t bytes = 0;
    for (const hobbit_weight * weight : layer.weight) {
        bytes += weight ? weight->source[precision].expert_bytes : 0;
    }
    return bytes;
}

bool hobbit_warm(hobbit_model & model, int layer, int precision, int expert) {
    hobbit_pool & pool = *model.pools[precision].pool;
    int64_t evicted;
    const int slot = pool.find(layer, expert) >= 0 ? -1 : pool.place(layer, expert, nullptr, 0, false, &evicted);
    if (slot < 0) {
        return false;
    }
    pool.unpin(slot);
    model.trace_event(HOBBIT_TRACE_WARM, 0, layer, expert, precision, hobbit_expert_bytes(model.store.layers[layer], precision));
    load_experts(model, layer, { { expert, (int8_t) precision, slot } }, HOBBIT_PREFETCH);
    model.pools[precision].warm.resize(pool.n_slots(), false);
    model.pools[precision].warm[slot] = true;
    return true;
}

bool hobbit_is_ready(hobbit_model & model, int layer, int precision, int slot) {
    for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
        if (model.store.layers[layer].weight[role] && model.pools[precision].piece(slot, role).load(std::memory_order_acquire) != HOBBIT_PIECE_READY) {
            return false;
        }
    }
    return true;
}

static bool has_failed(hobbit_model & model, int precision, int slot) {
    for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
        if (model.pools[precision].piece(slot, role).load(std::memory_order_acquire) == HOBBIT_PIECE_FAILED) {
            return true;
        }
    }
    return false;
}

void hobbit_settle_predicted(hobbit_context & ctx, int layer, const hobbit_precision * chosen) {
    hobbit_model & model = *ctx.model;
    hobbit_device_settle(ctx, layer, chosen);

    std::vector<hobbit_predicted> later;
    for (const hobbit_predicted & p : ctx.predicted) {
        if (p.layer > layer) {
            later.push_back(p);
            continue;
        }
        const hobbit_layer & l    = model.store.layers[p.layer];
        hobbit_pool &        pool = *model.pools[p.precision].pool;
        pool.unpin(p.slot);

        const bool used = chosen && p.layer == layer && chosen[p.expert] == HOBBIT_PRECISION_LOW + p.precision;
        uint64_t bytes = p.issued ? hobbit_expert_bytes(l, p.precision) : 0;
        if (!used && !hobbit_is_ready(model, p.layer, p.precision, p.slot) && pool.pins(p.slot) == 0) {
            uint64_t done = 0;
            for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
                std::atomic<uint8_t> & state = model.pools[p.precision].piece(p.slot, role);
                if (!l.weight[role]) {
                    continue;
                }
                if (state.load(std::memory_order_acquire) == HOBBIT_PIECE_READY) {
                    done += l.weight[role]->source[p.precision].expert_bytes;
                } else {
                    done += model.loader->cancel(state);
                }
            }
            bytes = p.issued ? done : 0;
            model.trace_event(HOBBIT_TRACE_CANCEL, ctx.trace_id, p.layer, p.expert, p.precision, bytes);
            pool.drop(p.slot);
        }
        std::lock_guard<std::mutex> lock(ctx.stats_mutex);
        hobbit_counters & count = ctx.stats.layers[p.layer];
        if (chosen && p.layer == layer) {
            count.predicted++;
            count.predicted_right += chosen[p.expert] != HOBBIT_PRECISION_SKIP ? 1 : 0;
        }
        if (p.issued) {
            count.prefetch_bytes += bytes;
            ctx.sequence_stats[ctx.step_seqs[p.seq]].count.prefetch_bytes += bytes;
            (used ? count.prefetch_used : count.prefetch_wasted) += 1;
            (used ? ctx.n_prefetch_used : ctx.n_prefetch_wasted) += 1;
            ctx.read_bytes   += bytes;
            ctx.wasted_bytes += used ? 0 : bytes;
            model.governor.settled(p.layer, used);
        }
    }
    ctx.predicted.swap(later);
}

// sequence of a row of the layer's input: all tokens, or, in the last layer, those with output
static int32_t row_sequence(const hobbit_context & ctx, int64_t row, int64_t n_rows) {
    const auto & seq = n_rows == (int64_t) ctx.token_seq.size() ? ctx.token_seq : ctx.output_seq;
    return row < (int64_t) seq.size() ? seq[row] : ctx.token_seq.empty() ? 0 : ctx.token_seq[0];
}

// its index in step_seqs
static int step_sequence(const hobbit_context & ctx, int32_t seq) {
    const auto it = std::find(ctx.step_seqs.begin(), ctx.step_seqs.end(), seq);
    return it == ctx.step_seqs.end() ? 0 : (int) (it - ctx.step_seqs.begin());
}

// where the copies of an expert are: on the device that computes it, else in the host's slots
struct whereabouts {
    int8_t in[HOBBIT_N_PRECISIONS]; // HOBBIT_TRACE_ABSENT, LOADING, READY
};

static bool is_large(const hobbit_model & model, int layer, int64_t n_rows) {
    return model.config.unit == HOBBIT_UNIT_LAYER || hobbit_is_large(n_rows, HOBBIT_ROWS_EVICT_MAX, model.n_expert_used, model.store.layers[layer].n_expert);
}

static whereabouts find_copies(hobbit_model & model, int layer, int expert, bool on_device) {
    whereabouts copies = { { HOBBIT_TRACE_ABSENT, HOBBIT_TRACE_ABSENT } };
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (on_device) {
            const auto & pool = model.devices.bank_of(layer)->part[p].pool;
            copies.in[p] = pool && pool->find(layer, expert) >= 0 ? HOBBIT_TRACE_READY : HOBBIT_TRACE_ABSENT;
            continue;
        }
        const int slot = model.uses(p) ? model.pools[p].pool->find(layer, expert) : -1;
        if (slot >= 0) {
            copies.in[p] = hobbit_is_ready(model, layer, p, slot) ? HOBBIT_TRACE_READY : HOBBIT_TRACE_LOADING;
        }
    }
    return copies;
}

static hobbit_precision choose(const hobbit_model & model, const whereabouts & copies, hobbit_precision wanted) {
    return hobbit_precision_given(wanted, model.config.deterministic, model.uses(HOBBIT_LOW), model.uses(HOBBIT_HIGH),
            copies.in[HOBBIT_LOW] == HOBBIT_TRACE_READY, copies.in[HOBBIT_HIGH] == HOBBIT_TRACE_READY);
}

static void route_experts(hobbit_route & route, const ggml_tensor * ids, const ggml_tensor * weights, bool on_device, std::vector<route_choice> & choices) {
    hobbit_context & ctx   = *route.ctx;
    hobbit_model &   model = *ctx.model;

    const int64_t n_used   = ids->ne[0];
    const int64_t n_rows   = ids->ne[1];
    const int     n_expert = model.store.layers[route.layer].n_expert;

    thread_local std::vector<float>            w;
    thread_local std::vector<float>            share;
    thread_local std::vector<hobbit_precision> asked;
    thread_local std::vector<int32_t>          index; // expert -> choice, -1: not chosen
    w.resize(n_used);
    share.resize(n_used);
    asked.resize(n_used);
    index.assign(n_expert, -1);
    choices.clear();
    ctx.selections.clear();

    const size_t key0 = (size_t) route.layer * model.store.n_expert();

    for (int64_t row = 0; row < n_rows; ++row) {
        for (int64_t k = 0; k < n_used; ++k) {
            w[k] = *(const float *) ((const char *) weights->data + k*weights->nb[1] + row*weights->nb[2]);
        }
        hobbit_precision_score(model.config.thresholds, w.data(), (int) n_used, asked.data());
        hobbit_precision_shares(w.data(), (int) n_used, share.data());

        const int32_t row_seq = row_sequence(ctx, row, n_rows);
        const int     seq     = step_sequence(ctx, row_seq);
        auto          records = ctx.records.find(row_seq);
        for (int64_t k = 0; k < n_used; ++k) {
            const int32_t id = *(const int32_t *) ((const char *) ids->data + k*ids->nb[0] + row*ids->nb[1]);
            GGML_ASSERT(id >= 0 && id < n_expert);
            if (index[id] < 0) {
                index[id] = (int32_t) choices.size();
                choices.push_back({ id, HOBBIT_PRECISION_SKIP, HOBBIT_PRECISION_SKIP, 0, 0, seq, false, 0.0 });
            }
            route_choice & choice = choices[index[id]];
            choice.shared = choice.shared || choice.seq != seq;
            if (asked[k] > choice.wanted) {
                choice.wanted = asked[k];
                choice.seq    = seq;
            }
            choice.n_selected++;
            choice.mass += share[k];
            if (model.trace) {
                ctx.selections.add(id, w[k], asked[k]);
            }
            if (records != ctx.records.end()) {
                records->second.use(key0 + id, asked[k] == HOBBIT_PRECISION_HIGH, w[k]);
            }
            model.totals.use(key0 + id, asked[k] == HOBBIT_PRECISION_HIGH);
        }
    }
    if (is_large(model, route.layer, n_rows)) {
        std::vector<hobbit_precision> wanted;
        std::vector<double>           mass;
        for (const route_choice & choice : choices) {
            wanted.push_back(choice.wanted);
            mass  .push_back(choice.mass);
        }
        hobbit_precision_prefill(model.config.thresholds, model.config.prefill, mass.data(), (int) wanted.size(), wanted.data());
        for (size_t i = 0; i < wanted.size(); ++i) {
            choices[i].wanted = wanted[i];
        }
    }
    for (route_choice & choice : choices) {
        const whereabouts copies = find_copies(model, route.layer, choice.id, on_device);
        choice.given = choose(model, copies, choice.wanted);
        choice.state = hobbit_trace_state(0, choice.given, copies.in[HOBBIT_LOW], copies.in[HOBBIT_HIGH]);
    }
    for (int id = 0; model.config.unit == HOBBIT_UNIT_LAYER && id < n_expert; ++id) {
        if (index[id] < 0) {
            const hobbit_precision given = model.uses(HOBBIT_HIGH) ? HOBBIT_PRECISION_HIGH : HOBBIT_PRECISION_LOW;
            choices.push_back({ id, given, given, 0, 0, 0, false, 0.0 });
        }
    }
    if (model.trace) {
        for (size_t i = 0; i < ctx.selections.ids.size(); ++i) {
            ctx.selections.state[i] |= choices[index[ctx.selections.ids[i]]].state;
        }
        model.trace->selections(HOBBIT_TRACE_ROUTE, ctx.trace_id, route.layer, 0, false, (int) n_used, ctx.selections);
    }
}

static void trace_read(hobbit_context & ctx, hobbit_trace_type type, int layer, int expert, int precision, int64_t evicted) {
    const hobbit_model & model = *ctx.model;
    if (model.trace) {
        if (evicted >= 0) {
            const int n_expert = model.store.n_expert();
            model.trace->event(HOBBIT_TRACE_EVICT, ctx.trace_id, (int) (evicted / n_expert), (int) (evicted % n_expert), precision);
        }
        model.trace->event(type, ctx.trace_id, layer, expert, precision, hobbit_expert_bytes(model.store.layers[layer], precision));
    }
}

// what the lookups of a layer say about a warm start; before anything is placed
static void watch_warm(hobbit_model & model, int layer, const std::vector<route_choice> & choices) {
    hobbit_warm_trial & trial = model.warm_trial;
    int n_warm = 0;
    for (const hobbit_pool_memory & mem : model.pools) {
        n_warm += (int) std::count(mem.warm.begin(), mem.warm.end(), true);
    }
    for (const route_choice & choice : choices) {
        if (choice.given == HOBBIT_PRECISION_SKIP) {
            continue;
        }
        const hobbit_pool_memory & mem = model.pools[choice.given - HOBBIT_PRECISION_LOW];
        const int slot = mem.pool->find(layer, choice.id);
        trial.lookups++;
        trial.hits     += slot >= 0 && !mem.warm.empty() && mem.warm[slot] ? 1 : 0;
        trial.resident += n_warm;
    }
}

// fills route.experts: pins hits, places misses, leaves what does not fit to the ring
static void route_place(hobbit_route & route, const std::vector<route_choice> & choices, int64_t n_rows) {
    hobbit_context &     ctx   = *route.ctx;
    hobbit_model &       model = *ctx.model;
    const hobbit_layer & layer = model.store.layers[route.layer];
    const bool           large = is_large(model, route.layer, n_rows);

    thread_local std::vector<hobbit_sequence_stats> counts; // by sequence of the step
    counts.assign(std::max<size_t>(1, ctx.step_seqs.size()), {});
    for (int64_t row = 0; row < n_rows; ++row) {
        counts[step_sequence(ctx, row_sequence(ctx, row, n_rows))].count.routed++;
    }
    std::vector<const route_choice *> missing;
    std::vector<hobbit_step_expert>   coming;   // read ahead, and not all there yet
    std::vector<hobbit_step_expert>   loading;

    if (model.warm_trial.n_tokens_left > 0) {
        watch_warm(model, route.layer, choices);
    }
    for (const route_choice & choice : choices) {
        hobbit_counters & count = counts[choice.seq].count;
        counts[choice.seq].shared += choice.shared ? 1 : 0;
        count.lookups++;
        if (choice.given == HOBBIT_PRECISION_SKIP) {
            count.skips++;
            count.selected_skip += choice.n_selected;
            count.mass_skip     += llround(1e6 * choice.mass);
            continue;
        }
        const int precision = choice.given - HOBBIT_PRECISION_LOW;
        route.uses[precision] = true;
        (precision == HOBBIT_HIGH ? count.selected_high : count.selected_low) += choice.n_selected;
        count.mass_low += precision == HOBBIT_LOW ? llround(1e6 * choice.mass) : 0;

        hobbit_pool & pool = *model.pools[precision].pool;
        int           slot = pool.find(route.layer, choice.id);
        if (slot >= 0 && has_failed(model, precision, slot) && pool.pins(slot) == 0) {
            // a read that nobody waited for; another try brings the bytes, or the reason
            model.trace_event(HOBBIT_TRACE_FAIL, ctx.trace_id, route.layer, choice.id, precision);
            pool.drop(slot);
            slot = -1;
        }
        if (slot < 0) {
            missing.push_back(&choice);
            continue;
        }
        count.hits++;
        pool.pin(slot);
        pool.touch(slot);
        ctx.pinned.emplace_back(precision, slot);
        if (hobbit_is_ready(model, route.layer, precision, slot)) {
            route.experts.push_back({ choice.id, (int8_t) precision, slot });
            continue;
        }
        coming.push_back({ choice.id, (int8_t) precision, slot });
        for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
            model.loader->promote(model.pools[precision].piece(slot, role));
        }
    }

    // a large batch evicts nothing. Free slots are for the layer's most wanted experts, with as many left for the layers to come
    int n_admit[HOBBIT_N_PRECISIONS] = { INT_MAX, INT_MAX };
    if (large) {
        std::stable_sort(missing.begin(), missing.end(), [](const route_choice * a, const route_choice * b) { return a->n_selected > b->n_selected; });
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            n_admit[p] = model.uses(p) ? model.pools[p].pool->n_free_share(route.layer) : 0;
        }
    }
    struct kept { int32_t id; int precision; int slot; };
    std::vector<kept> keep; // streamed experts that get a slot

    // only now that every hit is pinned may something be evicted
    for (const route_choice * choice : missing) {
        const int         precision = choice->given - HOBBIT_PRECISION_LOW;
        hobbit_counters & count     = counts[choice->seq].count;

        (precision == HOBBIT_HIGH ? count.misses_high     : count.misses_low)     += 1;
        (precision == HOBBIT_HIGH ? count.read_bytes_high : count.read_bytes_low) += hobbit_expert_bytes(layer, precision);

        const auto place = [&](int64_t & evicted) {
            return model.pools[precision].pool->place(route.layer, choice->id,
                    ctx.step_records.data(), (int) ctx.step_records.size(), !large, &evicted);
        };
        int64_t evicted = -1;
        int     slot    = n_admit[precision]-- > 0 ? place(evicted) : -1;
        if (slot < 0 && !large && !ctx.predicted.empty()) {
            // what is needed now goes before what may be needed soon
            hobbit_settle_predicted(ctx, model.store.n_layer(), nullptr);
            slot = place(evicted);
        }
        count.evictions += evicted >= 0 ? 1 : 0;
        const bool whole = slot >= 0 && !model.stream.is_begun(route.layer, choice->id, precision);
        trace_read(ctx, whole ? HOBBIT_TRACE_DEMAND : HOBBIT_TRACE_STREAM, route.layer, choice->id, precision, evicted);

        if (slot >= 0) {
            ctx.pinned.emplace_back(precision, slot);
        }
        if (whole) {
            loading.push_back({ choice->id, (int8_t) precision, slot });
            continue;
        }
        if (slot >= 0) {
            clear_slot(model, precision, slot);
            keep.push_back({ choice->id, precision, slot });
        }
        count.streamed++;
        route.streamed.push_back({ choice->id, (int8_t) precision });
    }
    load_experts(model, route.layer, loading, HOBBIT_DEMAND);

    uint64_t wasted_bytes;
    model.stream.plan(layer, route.layer, route.streamed, wasted_bytes);

    route.experts.insert(route.experts.end(), coming.begin(), coming.end());
    route.experts.insert(route.experts.end(), loading.begin(), loading.end());
    route.n_cached = (int) route.experts.size();
    for (const hobbit_stream_expert & e : route.streamed) {
        route.experts.push_back({ e.id, e.precision, -1 });
        const auto k = std::find_if(keep.begin(), keep.end(), [&](const kept & k) { return k.id == e.id && k.precision == e.precision; });
        for (int role = 0; k != keep.end() && role < HOBBIT_N_ROLES; ++role) {
            if (e.piece[role]) {
                e.piece[role]->keep_dst   = model.piece_data(route.layer, e.precision, role, k->slot, e.id);
                e.piece[role]->keep_state = &model.pools[e.precision].piece(k->slot, role);
            }
        }
    }

    for (const hobbit_sequence_stats & c : counts) {
        ctx.read_bytes += c.count.read_bytes_high + c.count.read_bytes_low;
    }

    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    hobbit_flush_stall(ctx);
    ctx.stall_layer = route.layer;
    ctx.stats.expected_wasted_bytes += wasted_bytes;
    for (size_t i = 0; i < ctx.step_seqs.size(); ++i) {
        ctx.stats.layers[route.layer].add(counts[i].count);
        ctx.sequence_stats[ctx.step_seqs[i]].add(counts[i]);
    }
}

// Expects of a layer the experts that are not here and have any mass (gate weight in a sample of the rows, may be empty), and all
// the others if a large batch leaves few out
static void expect_layer(hobbit_context & ctx, int to, const std::vector<float> & mass, bool all) {
    hobbit_model &       model  = *ctx.model;
    const hobbit_layer & layer  = model.store.layers[to];
    const bool           mixed  = model.uses(HOBBIT_LOW) && model.uses(HOBBIT_HIGH);
    const hobbit_prefill prefill = mixed ? model.config.prefill : HOBBIT_PREFILL_HIGHEST;
    if (mass.empty() && prefill == HOBBIT_PREFILL_MASS) {
        return;
    }

    std::vector<int32_t> ranked(layer.n_expert);
    std::iota(ranked.begin(), ranked.end(), 0);
    if (!mass.empty()) {
        std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) { return mass[a] > mass[b]; });
    }
    const float total  = std::accumulate(mass.begin(), mass.end(), 0.0f);
    float       before = 0.0f;

    const hobbit_device_bank * bank = model.devices.bank_of(to); // if large batches are computed there
    bank = bank && bank->staged ? bank : nullptr;

    std::vector<hobbit_stream_expert> experts;
    for (int32_t id : ranked) {
        const float m = mass.empty() ? 0.0f : mass[id];
        if (m == 0.0f && !all) {
            break;
        }
        const bool high = model.uses(HOBBIT_HIGH) && prefill != HOBBIT_PREFILL_LOW && (prefill == HOBBIT_PREFILL_HIGHEST || before <= model.config.thresholds.t1 * total);
        const int  precision = choose(model, find_copies(model, to, id, bank != nullptr), high ? HOBBIT_PRECISION_HIGH : HOBBIT_PRECISION_LOW) - HOBBIT_PRECISION_LOW;
        if (model.pools[precision].pool->find(to, id) < 0 && (!bank || bank->part[precision].pool->find(to, id) < 0)) {
            experts.push_back({ id, (int8_t) precision });
        }
        before += m;
    }
    if (!experts.empty()) {
        // side by side in the file is worth more than an order by mass
        std::sort(experts.begin(), experts.end(), [](const hobbit_stream_expert & a, const hobbit_stream_expert & b) { return a.id < b.id; });
        model.stream.expect(layer, to, experts);
    }
}

static bool touches_all(const hobbit_context & ctx, int layer) {
    return ctx.routes[layer].share_chosen >= SHARE_ALL;
}

void hobbit_expect_first(hobbit_context & ctx, int64_t n_rows) {
    const hobbit_model & model = *ctx.model;
    const bool many = model.config.unit == HOBBIT_UNIT_LAYER || n_rows * model.n_expert_used >= HOBBIT_SELECTED_LARGE * model.store.layers[0].n_expert;
    if (many && touches_all(ctx, 0) && model.store.n_layer() > 1) {
        expect_layer(ctx, 0, {}, true);
    }
}

// a large batch: reads ahead for the next layer what its router would choose for some of the rows
static void route_expect(hobbit_route & route, const ggml_tensor * cur, int n_used, int64_t n_rows) {
    hobbit_context & ctx   = *route.ctx;
    hobbit_model &   model = *ctx.model;
    const int        to    = route.layer + 1;

    if (to >= model.store.n_layer() || (to == model.store.n_layer() - 1 && !is_large(model, to, (int64_t) ctx.output_seq.size()))) {
        return; // the last layer computes the rows with output only
    }
    std::vector<float> mass;
    if (cur) {
        std::vector<int32_t> ids(n_used);
        std::vector<float>   weights(n_used);
        mass.resize(model.store.layers[to].n_expert, 0.0f);
        for (int64_t i = 0; i < N_ROWS_SAMPLE; ++i) {
            const int64_t row = i * n_rows / N_ROWS_SAMPLE;
            model.routers->predict(route.layer, to, (const float *) ((const char *) cur->data + row*cur->nb[1]), n_used, ids.data(), weights.data());
            for (int k = 0; k < n_used; ++k) {
                mass[ids[k]] += weights[k];
            }
        }
    }
    expect_layer(ctx, to, mass, touches_all(ctx, route.layer));
}

// what a row will want of a layer ahead, by the configured predictor; cur: the router's input, if that needs it
static void predict(const hobbit_route & route, int to, const ggml_tensor * cur, int64_t row, int64_t n_rows, int n_used, int32_t * ids, float * weights) {
    const hobbit_context & ctx   = *route.ctx;
    const hobbit_model &   model = *ctx.model;
    if (model.config.predictor == HOBBIT_PREDICTOR_ROUTER) {
        model.routers->predict(route.layer, to, (const float *) ((const char *) cur->data + row*cur->nb[1]), n_used, ids, weights);
        return;
    }
    const auto records = ctx.records.find(row_sequence(ctx, row, n_rows));
    if (records != ctx.records.end() && records->second.like) {
        hobbit_activations_predict(*records->second.like, (size_t) to * model.store.n_expert(), model.store.layers[to].n_expert, n_used, ids, weights);
    } else {
        std::iota(ids, ids + n_used, 0);
        std::fill(weights, weights + n_used, 0.0f);
    }
}

// reads ahead for the next layers, as far as the governor looks and while what they want is resident
static void route_prefetch(hobbit_route & route, const ggml_tensor * cur, int n_used, int64_t n_rows) {
    hobbit_context & ctx   = *route.ctx;
    hobbit_model &   model = *ctx.model;

    std::vector<int32_t>          ids(n_used);
    std::vector<float>            weights(n_used);
    std::vector<hobbit_precision> asked(n_used);

    bool go_on = true; // else what follows is only written to the trace
    for (int to = route.layer + 1; to <= route.layer + model.governor.depth() && to < model.store.n_layer(); ++to) {
        if (!model.governor.allows(to)) {
            continue;
        }
        std::vector<hobbit_step_expert> loading;
        ctx.selections.clear();
        for (int64_t row = 0; row < n_rows; ++row) {
            const int seq = step_sequence(ctx, row_sequence(ctx, row, n_rows));
            predict(route, to, cur, row, n_rows, n_used, ids.data(), weights.data());
            hobbit_precision_score(model.config.thresholds, weights.data(), n_used, asked.data());
            for (int k = 0; k < n_used; ++k) {
                if (weights[k] == 0.0f && model.config.predictor == HOBBIT_PREDICTOR_ACTIVATIONS) {
                    asked[k] = HOBBIT_PRECISION_SKIP; // the past request did not use it
                }
                const whereabouts      copies = find_copies(model, to, ids[k], hobbit_device_takes(model, to, n_rows));
                const hobbit_precision given  = choose(model, copies, asked[k]);
                if (model.trace) {
                    ctx.selections.add(ids[k], weights[k], hobbit_trace_state(asked[k], given, copies.in[HOBBIT_LOW], copies.in[HOBBIT_HIGH]));
                }
                if (!go_on || given == HOBBIT_PRECISION_SKIP) {
                    continue;
                }
                const int     precision = given - HOBBIT_PRECISION_LOW;
                // another row has asked for it: it has a slot, with the bytes of who had that before
                const bool comes = std::any_of(loading.begin(), loading.end(),
                        [&](const hobbit_step_expert & e) { return e.id == ids[k] && e.precision == precision; });
                if (!comes && hobbit_device_ahead(ctx, to, ids[k], precision, n_rows)) {
                    continue;
                }
                hobbit_pool & pool      = *model.pools[precision].pool;
                int           slot      = pool.find(to, ids[k]);
                if (slot >= 0) {
                    pool.pin(slot);
                    ctx.predicted.push_back({ to, ids[k], precision, slot, false, seq });
                    continue;
                }
                int64_t evicted;
                slot = pool.place(to, ids[k], ctx.step_records.data(), (int) ctx.step_records.size(), true, &evicted);
                if (slot < 0) {
                    continue;
                }
                trace_read(ctx, HOBBIT_TRACE_PREFETCH, to, ids[k], precision, evicted);
                ctx.predicted.push_back({ to, ids[k], precision, slot, true, seq });
                loading.push_back({ ids[k], (int8_t) precision, slot });
                std::lock_guard<std::mutex> lock(ctx.stats_mutex);
                ctx.stats.layers[to].prefetch_issued++;
                ctx.stats.layers[to].evictions += evicted >= 0 ? 1 : 0;
            }
        }
        load_experts(model, to, loading, HOBBIT_PREFETCH);
        if (model.trace) {
            model.trace->selections(HOBBIT_TRACE_PREDICT, ctx.trace_id, route.layer, to, go_on, n_used, ctx.selections);
        }
        go_on = go_on && loading.empty();
        if (!go_on && !(model.trace && !model.config.prefetch_adaptive)) {
            break;
        }
    }
}

// weights out: as they came, 0 where the expert is skipped, rescaled to the same sum if asked for
static void route_weights(const hobbit_route & route, const std::vector<route_choice> & choices,
        const ggml_tensor * ids, const ggml_tensor * weights, ggml_tensor * dst, size_t row_bytes) {
    const hobbit_model & model  = *route.ctx->model;
    const int64_t        n_used = ids->ne[0];
    const int64_t        n_rows = ids->ne[1];

    bool any_skip = false;
    for (const route_choice & choice : choices) {
        any_skip = any_skip || choice.given == HOBBIT_PRECISION_SKIP;
    }
    for (int64_t row = 0; row < n_rows; ++row) {
        float * out  = (float *) ((char *) dst->data + row*row_bytes);
        float   sum  = 0.0f;
        float   kept = 0.0f;
        for (int64_t k = 0; k < n_used; ++k) {
            out[k] = *(const float *) ((const char *) weights->data + k*weights->nb[1] + row*weights->nb[2]);
            sum += out[k];
            if (any_skip) {
                const int32_t id = *(const int32_t *) ((const char *) ids->data + k*ids->nb[0] + row*ids->nb[1]);
                const auto it = std::find_if(choices.begin(), choices.end(), [id](const route_choice & c) { return c.id == id; });
                if (it->given == HOBBIT_PRECISION_SKIP) {
                    out[k] = 0.0f;
                }
            }
            kept += out[k];
        }
        if (any_skip && model.config.renormalise && kept > 0.0f && kept != sum) {
            for (int64_t k = 0; k < n_used; ++k) {
                out[k] *= sum / kept;
            }
        }
    }
}

// cur may be NULL. on_device: dst is what hobbit_device_unpack describes, else the weights
static void route_compute_any(ggml_tensor * dst, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * cur,
        hobbit_route & route, bool on_device) {
    hobbit_context & ctx = *route.ctx;

    thread_local std::vector<route_choice> choices;
    choices.clear();

    route.experts.clear();
    route.on_cpu.clear();
    route.streamed.clear();
    route.n_cached = 0;
    route.uses[HOBBIT_LOW] = route.uses[HOBBIT_HIGH] = false;
    for (auto & device_ids : route.device_ids) {
        device_ids.assign(on_device ? ctx.model->store.layers[route.layer].n_expert : 0, -1);
    }

    // after a failure the rest of the step is void: no reads, every expert skipped, so that the numbers stay finite
    // (pins stay then, so that the end of the step finds what failed)
    if (!ctx.failed.load(std::memory_order_relaxed)) {
        // the layer before has been computed: its experts may go
        hobbit_unpin_all(ctx);
        route_experts(route, ids, weights, on_device, choices);

        thread_local std::vector<hobbit_precision> chosen;
        chosen.assign(ctx.model->store.layers[route.layer].n_expert, HOBBIT_PRECISION_SKIP);
        for (const route_choice & choice : choices) {
            chosen[choice.id] = choice.n_selected > 0 ? choice.given : HOBBIT_PRECISION_SKIP;
        }
        hobbit_settle_predicted(ctx, route.layer, chosen.data());

        if (on_device) {
            thread_local std::vector<route_choice> missing;
            missing = choices;
            hobbit_device_find(route, missing, ids->ne[1]);
            route_place(route, missing, ids->ne[1]);
            route_weights(route, choices, ids, weights, dst, dst->nb[1]);
            hobbit_cooperate_start(route, ids, cur, dst);
            hobbit_device_fetch(route, ids->ne[1]);
        } else {
            route_place(route, choices, ids->ne[1]);
            route.on_cpu.resize(route.experts.size());
            std::iota(route.on_cpu.begin(), route.on_cpu.end(), 0);
        }

        cur = route.predicts ? cur : nullptr;
        const bool predicts = cur || ctx.model->config.predictor == HOBBIT_PREDICTOR_ACTIVATIONS;
        if (predicts && ctx.model->governor.depth() > 0 && ids->ne[1] <= HOBBIT_ROWS_PREDICT_MAX) {
            route_prefetch(route, cur, (int) ids->ne[0], ids->ne[1]);
        }
        if (is_large(*ctx.model, route.layer, ids->ne[1])) {
            route.share_chosen = (float) choices.size() / ctx.model->store.layers[route.layer].n_expert;
            route_expect(route, cur, (int) ids->ne[0], ids->ne[1]);
        }
    }
    route_weights(route, choices, ids, weights, dst, on_device ? dst->nb[1] : dst->nb[2]);
    if (on_device) {
        hobbit_device_ids(route, ids, dst);
    }
}

static void route_compute(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith == 0) {
        route_compute_any(dst, dst->src[0], dst->src[1], dst->src[2], *(hobbit_route *) userdata, false);
    }
}

static void route_compute_device(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith == 0) {
        const hobbit_device_packed packed(dst->src[0], dst->ne[0]);
        route_compute_any(dst, &packed.ids, &packed.weights, packed.has_cur() ? &packed.cur : nullptr, *(hobbit_route *) userdata, true);
    }
}

ggml_tensor * hobbit_build_route(hobbit_context * ctx, ggml_context * ctx0, ggml_tensor * w, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * cur, bool routed) {
    const hobbit_managed * managed = (const hobbit_managed *) w->extra;
    hobbit_route * route = &ctx->routes[managed->weight->layer];

    const bool predict = routed && ctx->model->routers && cur->type == GGML_TYPE_F32 && cur->ne[0] == ctx->model->routers->n_embd();
    route->predicts = predict;
    route->ffn      = nullptr;
    route->ffns.erase(ids->ne[1]);

    ggml_tensor * args[] = { ids, weights, cur };
    if (hobbit_device_takes(*ctx->model, route->layer, ids->ne[1])) {
        // packing and unpacking run on the device: one copy down, one up
        const bool    cooperates = ctx->cooperates && !hobbit_device_uses_stage(*ctx->model, route->layer, ids->ne[1]) && cur->type == GGML_TYPE_F32;
        ggml_tensor * packed     = hobbit_device_pack(ctx0, ids, weights, predict || cooperates ? cur : nullptr);
        ggml_tensor * node       = ggml_custom_4d(ctx0, GGML_TYPE_F32, ids->ne[0], ids->ne[1], 1 + HOBBIT_N_PRECISIONS, 1, &packed, 1, route_compute_device, 1, route);
        ggml_tensor * out        = hobbit_device_unpack(*route, ctx0, ggml_cont(ctx0, node));
        if (cooperates) {
            hobbit_cooperate_begin(*route, node, ids, out, cur);
        }
        return out;
    }
    ggml_tensor * node = ggml_custom_4d(ctx0, GGML_TYPE_F32, 1, ids->ne[0], ids->ne[1], 1, args, predict ? 3 : 2, route_compute, 1, route);
    node->extra = route;
    return node;
}

ggml_tensor * hobbit_attach_route(hobbit_context * ctx, ggml_context * ctx0, ggml_tensor * mul_mat_id, ggml_tensor * route) {
    if (route->op == GGML_OP_VIEW) {
        const hobbit_managed * managed = (const hobbit_managed *) mul_mat_id->src[0]->extra;
        hobbit_route & r = ctx->routes[managed->weight->layer];
        ggml_tensor * on_device = hobbit_device_mul_mat_id(r, ctx0, *managed->weight, mul_mat_id);
        return r.ffn ? hobbit_cooperate_attach(r, ctx0, mul_mat_id, on_device) : on_device;
    }
    mul_mat_id->src[3] = route;
    return mul_mat_id;
}

//
// what the CPU kernel asks for (contracts: ggml-cpu.h)
//

static hobbit_route & route_of(const ggml_tensor * op) {
    GGML_ASSERT(op->src[3] && "a managed expert weight is used outside of the MoE layer that the engine knows");
    return *(hobbit_route *) op->src[3]->extra;
}

static bool experts_uses(const ggml_cpu_experts * self, const ggml_tensor * op, int i_type) {
    GGML_UNUSED(self);
    return route_of(op).uses[i_type];
}

static int experts_begin(const ggml_cpu_experts * self, const ggml_tensor * op, int n_threads, ggml_cpu_expert * experts) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_route & route = route_of(op);

    bool streamed = false;
    for (size_t i = 0; i < route.on_cpu.size(); ++i) {
        const hobbit_step_expert & e = route.experts[route.on_cpu[i]];
        experts[i] = { e.id, e.precision };
        streamed   = streamed || route.on_cpu[i] >= route.n_cached;
    }

    route.n_threads = n_threads;
    if (streamed) {
        managed.model->stream.begin(route.layer, managed.weight->role);
    }
    return (int) route.on_cpu.size();
}

static const void * experts_acquire(const ggml_cpu_experts * self, const ggml_tensor * op, int i, int ith) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_model & model = *managed.model;
    hobbit_route & route = route_of(op);

    i = route.on_cpu[i];
    const hobbit_step_expert & e = route.experts[i];

    const int role = managed.weight->role;

    hobbit_stream_piece *  piece = i < route.n_cached ? nullptr : route.streamed[i - route.n_cached].piece[role];
    std::atomic<uint8_t> * state = piece ? &piece->state : &model.pools[e.precision].piece(e.slot, role);

    uint8_t s = state->load(std::memory_order_acquire);
    if (s < HOBBIT_PIECE_READY) {
        const int64_t t0 = ggml_time_us();
        s = model.loader->await(*state);
        if (ith == 0) {
            route.ctx->stall_us.fetch_add(ggml_time_us() - t0, std::memory_order_relaxed);
        }
    }
    if (s == HOBBIT_PIECE_FAILED) {
        route.ctx->failed.store(true, std::memory_order_relaxed);
        return nullptr;
    }
    return piece ? piece->read.dst : model.piece_data(route.layer, e.precision, role, e.slot, e.id);
}

static void experts_release(const ggml_cpu_experts * self, const ggml_tensor * op, int i) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_route & route = route_of(op);
    i = route.on_cpu[i];
    if (i < route.n_cached) {
        return; // pinned until the next route node
    }
    managed.model->stream.release(*route.streamed[i - route.n_cached].piece[managed.weight->role], route.n_threads);
}

void hobbit_managed_init(hobbit_managed & managed, hobbit_model * model, hobbit_weight * weight) {
    managed.experts.magic   = GGML_CPU_EXPERTS_MAGIC;
    managed.experts.uses    = experts_uses;
    managed.experts.begin   = experts_begin;
    managed.experts.acquire = experts_acquire;
    managed.experts.release = experts_release;
    managed.model  = model;
    managed.weight = weight;
    // until a low file is open the second type is the first
    managed.experts.types[HOBBIT_HIGH] = weight->source[HOBBIT_HIGH].type;
    managed.experts.types[HOBBIT_LOW]  = weight->source[HOBBIT_HIGH].type;
}
