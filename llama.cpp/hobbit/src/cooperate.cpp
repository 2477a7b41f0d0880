#include "cooperate.h"

#include "moe_graph.h"

#include <algorithm>
#include <cstring>

// a layer's FFN has at most so many tensors between its input and the down weights' output
static constexpr size_t N_TENSORS_MAX = 48;

static constexpr size_t ALIGNMENT = 64;

// of a sample's weight, what is left of it at the next one
static constexpr double DECAY = 0.95;

// of the time that choices of `auto` take, what trials of the other choice may add
static constexpr double TRIAL_SHARE = 0.01;

// a part for the CPU costs each layer a little even where it has nothing to do: of the choices of `auto`, each weighing so much, it takes
// this share to keep it in the graph, or that one to have it back
static constexpr double WANTED_STEP  = 0.03;
static constexpr double WANTED_LEAST = 0.03;
static constexpr double WANTED_AGAIN = 0.15;

//
// what it costs
//

void hobbit_line::add(double x, double y) {
    for (double * sum : { &n, &x1, &y1, &xx, &xy }) {
        *sum *= DECAY;
    }
    n  += 1;
    x1 += x;
    y1 += y;
    xx += x*x;
    xy += x*y;
}

double hobbit_line::at(double x) const {
    if (n == 0) {
        return 0.0;
    }
    // where all samples are at about one x, a line through the origin
    const double spread = xx*n - x1*x1;
    const double slope  = spread > 1e-3*x1*x1 ? (xy*n - x1*y1)/spread : -1.0;
    const double first  = (y1 - slope*x1)/n;
    return slope < 0.0 || first < 0.0 ? x*y1/x1 : first + slope*x;
}

double hobbit_miss_case::time(int k) const {
    const double on_cpu  = k > 0 ? cpu.at((double) expert_bytes*k) : 0.0;
    const double on_link = k < n ? busy + link.at((double) expert_bytes*(n - k)) : 0.0;
    return std::max(on_cpu, on_link + device);
}

int hobbit_miss_case::best() const {
    int best = 0;
    for (int k = 1; k <= n; ++k) {
        best = time(k) < time(best) ? k : best;
    }
    return best;
}

hobbit_miss_costs::rows & hobbit_miss_costs::of(int64_t n_rows) {
    int i = 0;
    while (n_rows > 1 << i && i < 5) {
        i++;
    }
    return by_rows[i];
}

//
// the thread
//

hobbit_cpu_worker::hobbit_cpu_worker(ggml_backend_dev_t cpu) {
    backend.reset(ggml_backend_dev_init(cpu, nullptr));
    set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads");
    thread = std::thread([this] { run(); });
}

hobbit_cpu_worker::~hobbit_cpu_worker() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    changed.notify_all();
    thread.join();
}

void hobbit_cpu_worker::prepare(hobbit_cpu_ffn & ffn) {
    if (arena.size() < ffn.bytes + ALIGNMENT) {
        arena.resize(ffn.bytes + ALIGNMENT);
    }
    char * next = (char *) GGML_PAD((uintptr_t) arena.data(), ALIGNMENT);
    for (ggml_tensor * t = ggml_get_first_tensor(ffn.ctx.get()); t; t = ggml_get_next_tensor(ffn.ctx.get(), t)) {
        if (t->flags & GGML_TENSOR_FLAG_PARAM) {
            continue; // a weight: has its address
        }
        if (t->view_src) {
            t->data = (char *) t->view_src->data + t->view_offs; // made after its source
        } else {
            t->data = next;
            next   += GGML_PAD(ggml_nbytes(t), ALIGNMENT);
        }
    }
}

void hobbit_cpu_worker::start(hobbit_cpu_ffn & ffn, int n_threads) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        this->n_threads = n_threads;
        job = &ffn;
    }
    changed.notify_all();
}

void hobbit_cpu_worker::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return !job; });
}

void hobbit_cpu_worker::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return job || stop; });
        if (stop) {
            return;
        }
        ggml_cgraph * graph = job->graph;
        const int     n     = n_threads;
        lock.unlock();

        const int64_t t0 = ggml_time_us();
        if (set_n_threads) {
            set_n_threads(backend.get(), n);
        }
        const enum ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);

        lock.lock();
        took = 1e-6*(ggml_time_us() - t0);
        job  = nullptr;
        changed.notify_all();
    }
}

ggml_tensor * hobbit_cpu_worker::host_copy(ggml_context * ctx, const ggml_tensor * weight) {
    ggml_tensor * t = ggml_dup_tensor(ctx, weight);
    t->flags = GGML_TENSOR_FLAG_PARAM;
    if (ggml_backend_buffer_is_host(weight->buffer)) {
        t->data = weight->data;
        return t;
    }
    std::vector<char> & copy = copies[weight];
    if (copy.empty()) {
        copy.resize(ggml_nbytes(weight));
        ggml_backend_tensor_get(weight, copy.data(), 0, copy.size());
    }
    t->data = copy.data();
    return t;
}

//
// the layer's second graph
//

static ggml_tensor * twin_of(hobbit_model & model, hobbit_cpu_ffn & ffn, ggml_tensor * t) {
    const auto it = ffn.twins.find(t);
    if (it != ffn.twins.end()) {
        return it->second;
    }
    if (ffn.twins.size() >= N_TENSORS_MAX) {
        ffn.why_not = "their input is not the layer's";
        return nullptr;
    }
    ggml_context * ctx  = ffn.ctx.get();
    ggml_tensor *  twin = nullptr;
    if (t->op == GGML_OP_NONE && !t->view_src) {
        if (!t->buffer || ggml_backend_buffer_get_usage(t->buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS || !ggml_is_contiguous(t)) {
            ffn.why_not = hobbit_format("they depend on %s, which is not of the layer", t->name);
            return nullptr;
        }
        twin = model.cpu->host_copy(ctx, t);
    } else {
        ggml_tensor * src[GGML_MAX_SRC] = {};
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            if (t->src[i] && !(src[i] = twin_of(model, ffn, t->src[i]))) {
                return nullptr;
            }
        }
        if (t->view_src) {
            ggml_tensor * base = twin_of(model, ffn, t->view_src);
            if (!base) {
                return nullptr;
            }
            twin = ggml_view_4d(ctx, base, t->ne[0], t->ne[1], t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3], t->view_offs);
        } else {
            twin = ggml_dup_tensor(ctx, t);
        }
        twin->op = t->op;
        memcpy(twin->op_params, t->op_params, sizeof(t->op_params));
        memcpy(twin->src, src, sizeof(src));
    }
    ffn.twins[t] = twin;
    return twin;
}

void hobbit_cooperate_begin(hobbit_route & route, ggml_tensor * node, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * cur) {
    auto ffn = std::make_unique<hobbit_cpu_ffn>();
    ffn->ctx.reset(ggml_init({ 2*N_TENSORS_MAX*ggml_tensor_overhead() + ggml_graph_overhead_custom(2*N_TENSORS_MAX, false), nullptr, true }));
    ffn->cur     = ggml_new_tensor_2d(ffn->ctx.get(), GGML_TYPE_F32, cur->ne[0], cur->ne[1]);
    ffn->ids     = ggml_new_tensor_2d(ffn->ctx.get(), GGML_TYPE_I32, ids->ne[0], ids->ne[1]);
    ffn->weights = ggml_new_tensor_3d(ffn->ctx.get(), GGML_TYPE_F32, 1, ids->ne[0], ids->ne[1]);
    ffn->twins   = { { cur, ffn->cur }, { ids, ffn->ids }, { weights, ffn->weights } };

    route.node = node;
    route.ffn  = ffn.get();
    route.ffns[ids->ne[1]] = std::move(ffn);
}

static void join_compute(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    hobbit_route & route = *(hobbit_route *) userdata;
    hobbit_model & model = *route.ctx->model;
    if (route.on_cpu.empty()) {
        memset(dst->data, 0, ggml_nbytes(dst));
        return;
    }
    hobbit_miss_costs::rows & costs = model.miss_costs.of(dst->ne[2]);
    if (route.no_copies) { // llama.cpp's scheduler has waited for the device
        costs.device.add(1.0, 1e-6*(ggml_time_us() - route.t_routed_us));
    }
    model.cpu->wait();
    memcpy(dst->data, route.ffn->out->data, ggml_nbytes(dst));
    if (route.cpu_ready) {
        costs.cpu.add((double) route.cpu_bytes, model.cpu->seconds());
    }
}

ggml_tensor * hobbit_cooperate_attach(hobbit_route & route, ggml_context * ctx0, ggml_tensor * mul_mat_id, ggml_tensor * on_device) {
    const hobbit_managed & managed = *(const hobbit_managed *) mul_mat_id->src[0]->extra;
    hobbit_model &         model   = *managed.model;
    hobbit_cpu_ffn &       ffn     = *route.ffn;

    ggml_tensor * input = ffn.why_not.empty() ? twin_of(model, ffn, mul_mat_id->src[1]) : nullptr;
    if (!input) {
        if (model.no_cooperation.empty()) {
            model.no_cooperation = ffn.why_not;
            hobbit_log(model.config, 1, hobbit_format("hobbit: --hobbit-miss load is in effect for block %d and those like it: their experts cannot be computed apart, %s\n",
                    model.store.layers[route.layer].block, ffn.why_not.c_str()));
        }
        return on_device;
    }
    ggml_tensor * marker = ggml_new_tensor_1d(ffn.ctx.get(), GGML_TYPE_F32, 1); // as the route node for the kernel
    ggml_tensor * own    = ggml_mul_mat_id(ffn.ctx.get(), mul_mat_id->src[0], input, ffn.ids);
    memcpy(own->op_params, mul_mat_id->op_params, sizeof(own->op_params));
    marker->extra = &route;
    own->src[3]   = marker;
    ffn.twins[on_device] = own;
    if (managed.weight->role != HOBBIT_ROLE_DOWN) {
        return on_device;
    }

    ffn.graph = ggml_new_graph_custom(ffn.ctx.get(), 2*N_TENSORS_MAX, false);
    ggml_build_forward_expand(ffn.graph, own);
    for (ggml_tensor * t = ggml_get_first_tensor(ffn.ctx.get()); t; t = ggml_get_next_tensor(ffn.ctx.get(), t)) {
        ffn.bytes += t->view_src ? 0 : GGML_PAD(ggml_nbytes(t), ALIGNMENT);
    }
    ffn.out = own;
    ffn.twins.clear();
    ggml_tensor * join = ggml_custom_4d(ctx0, GGML_TYPE_F32, own->ne[0], own->ne[1], own->ne[2], 1, &route.node, 1, join_compute, 1, &route);
    return ggml_add(ctx0, on_device, join);
}

//
// route node
//

// how many of the route's experts the CPU computes: the last so many
static int choose_n_cpu(hobbit_route & route, int64_t n_rows) {
    hobbit_model &       model = *route.ctx->model;
    const int            n     = (int) route.experts.size();
    hobbit_miss_costs &       costs   = model.miss_costs;
    hobbit_miss_costs::rows & by_rows = costs.of(n_rows);
    if (model.config.miss == HOBBIT_MISS_CPU) {
        return n;
    }
    const hobbit_device & device = *model.devices.devices[model.devices.bank_of(route.layer)->device];
    const hobbit_line &   link   = device.link;
    if (!link.known()) {
        return 0;
    }
    if (!by_rows.cpu.known()) {
        return n;
    }
    uint64_t bytes = 0;
    for (const hobbit_step_expert & e : route.experts) {
        bytes += hobbit_expert_bytes(model.store.layers[route.layer], e.precision);
    }
    const hobbit_miss_case misses = { n, bytes/n, by_rows.cpu, link, hobbit_device_busy(device), by_rows.device.at(1.0) };
    // experts that pass through the ring go one way
    int n_cpu = route.n_cached == n ? misses.best() : misses.time(n) < misses.time(0) ? n : 0;

    hobbit_context & ctx = *route.ctx;
    ctx.cpu_wanted += WANTED_STEP*((n_cpu > 0) - ctx.cpu_wanted);

    // what is never chosen is never measured again
    const double best  = misses.time(n_cpu);
    const int    other = route.n_cached < n ? n_cpu : n_cpu == 0 ? 1 : n_cpu == n ? n - 1 : n_cpu;
    costs.spent += best;
    if (other != n_cpu && TRIAL_SHARE*costs.spent > misses.time(other) - best) {
        costs.spent = 0;
        n_cpu = other;
    }
    return n_cpu;
}

void hobbit_cooperate_judge(hobbit_context & ctx) {
    const bool wanted = ctx.cpu_wanted > (ctx.cooperates ? WANTED_LEAST : WANTED_AGAIN);
    if (ctx.model->cpu && ctx.model->config.miss == HOBBIT_MISS_AUTO && wanted != ctx.cooperates) {
        ctx.cooperates = wanted;
        ctx.graph_epoch++;
    }
}

void hobbit_cooperate_start(hobbit_route & route, const ggml_tensor * ids, const ggml_tensor * cur, const ggml_tensor * weights) {
    hobbit_model & model = *route.ctx->model;
    const auto     it    = route.ffns.find(ids->ne[1]);
    const int      n     = (int) route.experts.size();
    if (n == 0 || !model.cpu || hobbit_device_uses_stage(model, route.layer, ids->ne[1])) {
        return;
    }
    const int n_cpu = choose_n_cpu(route, ids->ne[1]);
    if (it == route.ffns.end() || !it->second->out) {
        return;
    }
    for (int i = n - n_cpu; i < n; ++i) {
        route.on_cpu.push_back(i);
    }
    if (route.on_cpu.empty()) {
        return;
    }
    route.ffn       = it->second.get();
    route.cpu_bytes = 0;
    route.cpu_ready = true;
    for (int i : route.on_cpu) {
        const hobbit_step_expert & e = route.experts[i];
        route.cpu_bytes += hobbit_expert_bytes(model.store.layers[route.layer], e.precision);
        route.cpu_ready  = route.cpu_ready && i < route.n_cached && hobbit_is_ready(model, route.layer, e.precision, e.slot);
    }

    hobbit_cpu_ffn & ffn = *route.ffn;
    model.cpu->prepare(ffn);
    for (int64_t row = 0; row < ids->ne[1]; ++row) {
        memcpy((char *) ffn.cur    ->data + row*ffn.cur    ->nb[1], (const char *) cur    ->data + row*cur    ->nb[1], ffn.cur    ->nb[1]);
        memcpy((char *) ffn.ids    ->data + row*ffn.ids    ->nb[1], (const char *) ids    ->data + row*ids    ->nb[1], ffn.ids    ->nb[1]);
        memcpy((char *) ffn.weights->data + row*ffn.weights->nb[2], (const char *) weights->data + row*weights->nb[1], ffn.weights->nb[2]);
    }
    model.cpu->start(ffn, route.ctx->n_threads);

    std::lock_guard<std::mutex> lock(route.ctx->stats_mutex);
    route.ctx->stats.layers[route.layer].cpu_computed += route.on_cpu.size();
}
