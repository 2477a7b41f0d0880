#include "moe_graph.h"

#include "hobbit.h"

#include <algorithm>
#include <cstring>

// ubatches with more rows than this leave what is cached alone: they fill free slots and stream the rest
static constexpr int64_t N_ROWS_EVICT_MAX = 32;

//
// model geometry
//

size_t hobbit_model::role_offset(int layer, int precision, int role) const {
    size_t offset = 0;
    for (int r = 0; r < role; ++r) {
        if (const hobbit_weight * w = store.layers[layer].weight[r]) {
            offset += hobbit_pad(w->source[precision].expert_bytes, 64);
        }
    }
    return offset;
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
            size = std::max<size_t>(size, src.expert_bytes);
        }
    }
    return hobbit_pad(size, HOBBIT_ALIGN);
}

size_t hobbit_model::bytes() const {
    return pools[HOBBIT_LOW].bank.bytes() + pools[HOBBIT_HIGH].bank.bytes() + ring.bytes();
}

//
// route node
//

void hobbit_unpin_all(hobbit_context & ctx) {
    for (const auto & [precision, slot] : ctx.pinned) {
        ctx.model->pools[precision].pool->unpin(slot);
    }
    ctx.pinned.clear();
}

void hobbit_flush_stall(hobbit_context & ctx) {
    ctx.stats.layers[ctx.stall_layer].stall_us += ctx.stall_us.exchange(0, std::memory_order_relaxed);
}

static void load_expert(hobbit_model & model, const hobbit_layer & layer, int layer_index, int precision, int slot, int expert) {
    hobbit_pool_memory & mem = model.pools[precision];
    for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
        std::atomic<uint8_t> & state = mem.piece(slot, role);
        // a step that was aborted may have left a read under way into this slot
        if (state.load(std::memory_order_acquire) == HOBBIT_PIECE_LOADING) {
            model.loader->wait(state);
        }
        state.store(HOBBIT_PIECE_ABSENT, std::memory_order_relaxed);
    }
    for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
        if (layer.weight[role]) {
            char * dst = mem.bank.slot(slot) + model.role_offset(layer_index, precision, role);
            model.loader->submit({ layer.weight[role], precision, expert, dst, &mem.piece(slot, role) });
        }
    }
}

// sequence of a row of the layer's input: all tokens, or, in the last layer, those with output
static int32_t row_sequence(const hobbit_context & ctx, int64_t row, int64_t n_rows) {
    const auto & seq = n_rows == (int64_t) ctx.token_seq.size() ? ctx.token_seq : ctx.output_seq;
    return row < (int64_t) seq.size() ? seq[row] : ctx.token_seq.empty() ? 0 : ctx.token_seq[0];
}

// what the step wants of one expert and what it gets
struct route_choice {
    int32_t          id;
    hobbit_precision wanted;   // the highest that any of its tokens asks for
    hobbit_precision given;    // after looking at what is resident
    int              n_selected;
};

static hobbit_precision choose(const hobbit_model & model, int layer, int expert, hobbit_precision wanted) {
    const bool has_low = model.uses(HOBBIT_LOW);
    if (wanted == HOBBIT_PRECISION_LOW && !has_low) {
        wanted = HOBBIT_PRECISION_HIGH;
    }
    if (model.config.deterministic || wanted == HOBBIT_PRECISION_HIGH || !model.uses(HOBBIT_HIGH)) {
        return wanted;
    }
    // what is resident costs nothing: use the best copy there is
    if (model.pools[HOBBIT_HIGH].pool->find(layer, expert) >= 0) {
        return HOBBIT_PRECISION_HIGH;
    }
    if (has_low && model.pools[HOBBIT_LOW].pool->find(layer, expert) >= 0) {
        return HOBBIT_PRECISION_LOW;
    }
    return wanted;
}

static void route_experts(hobbit_route & route, const ggml_tensor * ids, const ggml_tensor * weights, std::vector<route_choice> & choices) {
    hobbit_context & ctx   = *route.ctx;
    hobbit_model &   model = *ctx.model;

    const int64_t n_used   = ids->ne[0];
    const int64_t n_rows   = ids->ne[1];
    const int     n_expert = model.store.layers[route.layer].n_expert;

    thread_local std::vector<float>            w;
    thread_local std::vector<hobbit_precision> asked;
    thread_local std::vector<int32_t>          index; // expert -> choice, -1: not chosen
    w.resize(n_used);
    asked.resize(n_used);
    index.assign(n_expert, -1);
    choices.clear();

    const size_t key0 = (size_t) route.layer * model.store.n_expert();

    for (int64_t row = 0; row < n_rows; ++row) {
        for (int64_t k = 0; k < n_used; ++k) {
            w[k] = *(const float *) ((const char *) weights->data + k*weights->nb[1] + row*weights->nb[2]);
        }
        hobbit_precision_score(model.config.thresholds, w.data(), (int) n_used, asked.data());

        auto records = ctx.records.find(row_sequence(ctx, row, n_rows));
        for (int64_t k = 0; k < n_used; ++k) {
            const int32_t id = *(const int32_t *) ((const char *) ids->data + k*ids->nb[0] + row*ids->nb[1]);
            GGML_ASSERT(id >= 0 && id < n_expert);
            if (index[id] < 0) {
                index[id] = (int32_t) choices.size();
                choices.push_back({ id, HOBBIT_PRECISION_SKIP, HOBBIT_PRECISION_SKIP, 0 });
            }
            route_choice & choice = choices[index[id]];
            choice.wanted = std::max(choice.wanted, asked[k]);
            choice.n_selected++;
            if (records != ctx.records.end()) {
                records->second.use(key0 + id, asked[k] == HOBBIT_PRECISION_HIGH);
            }
        }
    }
    for (route_choice & choice : choices) {
        choice.given = choose(model, route.layer, choice.id, choice.wanted);
    }
}

// fills route.experts: pins hits, places misses, leaves what does not fit to the ring
static void route_place(hobbit_route & route, const std::vector<route_choice> & choices, int64_t n_rows) {
    hobbit_context &     ctx   = *route.ctx;
    hobbit_model &       model = *ctx.model;
    const hobbit_layer & layer = model.store.layers[route.layer];

    hobbit_counters count;
    std::vector<const route_choice *>  missing;
    std::vector<hobbit_step_expert>    loading;
    std::vector<hobbit_step_expert>    streamed;

    route.experts.clear();
    for (const route_choice & choice : choices) {
        count.lookups++;
        if (choice.given == HOBBIT_PRECISION_SKIP) {
            count.skips++;
            count.selected_skip += choice.n_selected;
            continue;
        }
        const int precision = choice.given - HOBBIT_PRECISION_LOW;
        route.uses[precision] = true;
        (precision == HOBBIT_HIGH ? count.selected_high : count.selected_low) += choice.n_selected;

        hobbit_pool & pool = *model.pools[precision].pool;
        const int     slot = pool.find(route.layer, choice.id);
        if (slot < 0) {
            missing.push_back(&choice);
            continue;
        }
        count.hits++;
        pool.pin(slot);
        pool.touch(slot);
        ctx.pinned.emplace_back(precision, slot);
        route.experts.push_back({ choice.id, (int8_t) precision, slot });
    }
    // only now that every hit is pinned may something be evicted
    for (const route_choice * choice : missing) {
        const int precision = choice->given - HOBBIT_PRECISION_LOW;

        uint64_t bytes = 0;
        for (const hobbit_weight * weight : layer.weight) {
            bytes += weight ? weight->source[precision].expert_bytes : 0;
        }
        (precision == HOBBIT_HIGH ? count.misses_high     : count.misses_low)     += 1;
        (precision == HOBBIT_HIGH ? count.read_bytes_high : count.read_bytes_low) += bytes;

        int64_t   evicted;
        const int slot = model.pools[precision].pool->place(route.layer, choice->id,
                ctx.step_records.data(), (int) ctx.step_records.size(), n_rows <= N_ROWS_EVICT_MAX, &evicted);
        count.evictions += evicted >= 0 ? 1 : 0;

        if (slot >= 0) {
            ctx.pinned.emplace_back(precision, slot);
            load_expert(model, layer, route.layer, precision, slot, choice->id);
            loading.push_back({ choice->id, (int8_t) precision, slot });
        } else {
            count.streamed++;
            streamed.push_back({ choice->id, (int8_t) precision, -1 });
        }
    }
    route.experts.insert(route.experts.end(), loading.begin(), loading.end());
    route.n_cached = (int) route.experts.size();
    route.experts.insert(route.experts.end(), streamed.begin(), streamed.end());

    if (!streamed.empty()) {
        route.stream_state.reset(new std::atomic<uint8_t>[streamed.size()]);
        route.stream_released.reset(new std::atomic<int>[streamed.size()]);
    }

    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    hobbit_flush_stall(ctx);
    ctx.stall_layer = route.layer;
    ctx.stats.layers[route.layer].add(count);
}

// weights out: as they came, 0 where the expert is skipped, rescaled to the same sum if asked for
static void route_weights(const hobbit_route & route, const std::vector<route_choice> & choices,
        const ggml_tensor * ids, const ggml_tensor * weights, ggml_tensor * dst) {
    const hobbit_model & model  = *route.ctx->model;
    const int64_t        n_used = ids->ne[0];
    const int64_t        n_rows = ids->ne[1];

    bool any_skip = false;
    for (const route_choice & choice : choices) {
        any_skip = any_skip || choice.given == HOBBIT_PRECISION_SKIP;
    }
    for (int64_t row = 0; row < n_rows; ++row) {
        float * out  = (float *) ((char *) dst->data + row*dst->nb[2]);
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

static void route_compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_UNUSED(nth);
    if (ith != 0) {
        return;
    }
    hobbit_route &   route = *(hobbit_route *) userdata;
    hobbit_context & ctx   = *route.ctx;

    const ggml_tensor * ids     = dst->src[0];
    const ggml_tensor * weights = dst->src[1];

    thread_local std::vector<route_choice> choices;
    choices.clear();

    // the layer before has been computed: its experts may go
    hobbit_unpin_all(ctx);
    route.experts.clear();
    route.n_cached = 0;
    route.uses[HOBBIT_LOW] = route.uses[HOBBIT_HIGH] = false;

    // after a failure the rest of the step is void: no reads, every expert skipped, so that the numbers stay finite
    if (!ctx.failed.load(std::memory_order_relaxed)) {
        route_experts(route, ids, weights, choices);
        route_place(route, choices, ids->ne[1]);
    }
    route_weights(route, choices, ids, weights, dst);
}

ggml_tensor * hobbit_build_route(hobbit_context * ctx, ggml_context * ctx0, ggml_tensor * w, ggml_tensor * ids, ggml_tensor * weights) {
    const hobbit_managed * managed = (const hobbit_managed *) w->extra;
    hobbit_route * route = &ctx->routes[managed->weight->layer];

    ggml_tensor * args[] = { ids, weights };
    ggml_tensor * node = ggml_custom_4d(ctx0, GGML_TYPE_F32, 1, ids->ne[0], ids->ne[1], 1, args, 2, route_compute, 1, route);
    node->extra = route;
    return node;
}

void hobbit_attach_route(ggml_tensor * mul_mat_id, ggml_tensor * route) {
    mul_mat_id->src[3] = route;
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

// the ring place of streamed expert j takes its bytes
static void stream_submit(hobbit_route & route, const hobbit_managed & managed, int j) {
    hobbit_model & model = *managed.model;
    const hobbit_step_expert & e = route.experts[route.n_cached + j];
    model.loader->submit({ managed.weight, e.precision, e.id, model.ring.slot(j % model.n_ring), &route.stream_state[j] });
}

static int experts_begin(const ggml_cpu_experts * self, const ggml_tensor * op, int n_threads, ggml_cpu_expert * experts) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_route & route = route_of(op);

    for (size_t i = 0; i < route.experts.size(); ++i) {
        experts[i] = { route.experts[i].id, route.experts[i].precision };
    }

    const int n_stream = (int) route.experts.size() - route.n_cached;
    route.n_threads = n_threads;
    for (int j = 0; j < n_stream; ++j) {
        route.stream_state   [j].store(HOBBIT_PIECE_ABSENT, std::memory_order_relaxed);
        route.stream_released[j].store(0,                   std::memory_order_relaxed);
    }
    for (int j = 0; j < std::min(n_stream, managed.model->n_ring); ++j) {
        stream_submit(route, managed, j);
    }
    return (int) route.experts.size();
}

static const void * experts_acquire(const ggml_cpu_experts * self, const ggml_tensor * op, int i, int ith) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_model & model = *managed.model;
    hobbit_route & route = route_of(op);

    const hobbit_step_expert & e = route.experts[i];

    std::atomic<uint8_t> * state;
    const char *           data;
    if (i < route.n_cached) {
        hobbit_pool_memory & mem = model.pools[e.precision];
        state = &mem.piece(e.slot, managed.weight->role);
        data  = mem.bank.slot(e.slot) + model.role_offset(managed.weight->layer, e.precision, managed.weight->role);
    } else {
        const int j = i - route.n_cached;
        state = &route.stream_state[j];
        data  = model.ring.slot(j % model.n_ring);
    }

    uint8_t s = state->load(std::memory_order_acquire);
    if (s < HOBBIT_PIECE_READY) {
        const int64_t t0 = ggml_time_us();
        s = model.loader->wait(*state);
        if (ith == 0) {
            route.ctx->stall_us.fetch_add(ggml_time_us() - t0, std::memory_order_relaxed);
        }
    }
    if (s == HOBBIT_PIECE_FAILED) {
        route.ctx->failed.store(true, std::memory_order_relaxed);
        return nullptr;
    }
    return data;
}

static void experts_release(const ggml_cpu_experts * self, const ggml_tensor * op, int i) {
    const hobbit_managed & managed = *(const hobbit_managed *) self;
    hobbit_route & route = route_of(op);
    if (i < route.n_cached) {
        return; // pinned until the next route node
    }
    const int j      = i - route.n_cached;
    const int n_ring = managed.model->n_ring;
    // the last thread to let go of a place reuses it
    if (route.stream_released[j].fetch_add(1, std::memory_order_acq_rel) + 1 == route.n_threads &&
        route.n_cached + j + n_ring < (int) route.experts.size()) {
        stream_submit(route, managed, j + n_ring);
    }
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
