#include "device.h"

#include "budget.h"
#include "moe_graph.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <cstring>
#include <map>

// pinned memory is scarce: places are large enough for the link's full speed, and few
static constexpr size_t PLACE_BYTES = 1 << 20;
static constexpr int    N_PLACES    = 32;

// one in so many fetches is waited for, to know how fast the link is
static constexpr int MEASURE_EVERY = 16;

// a wait of less may be the call's own time
static constexpr int64_t WAIT_LEAST_US = 50;

// copying ahead: how fast its means follow, and one in so many that do not seem to pay is issued all the same
static constexpr double AHEAD_STEP  = 0.05;
static constexpr int    AHEAD_TRIAL = 128;

// alignment and padding of a bank's tensors
static constexpr uint64_t BANK_SLACK = HOBBIT_N_PRECISIONS * HOBBIT_N_ROLES * 8192;

// kernels index elements with 32 bits
static constexpr int64_t N_ELEMENTS_MAX = INT32_MAX;

// the order in which a layer's operations want the weights
static constexpr hobbit_role ROLES_AS_USED[] = { HOBBIT_ROLE_GATE_UP, HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN };

static double mib(uint64_t bytes) {
    return bytes / (1024.0 * 1024.0);
}

hobbit_device::~hobbit_device() {
    if (copy) {
        ggml_backend_synchronize(copy.get());
    }
}

//
// which layers, and how many slots
//

void hobbit_device_set::note(const std::string & text) {
    if (std::find(notes.begin(), notes.end(), text) == notes.end()) {
        notes.push_back(text);
    }
}

void hobbit_device_set::assign(const hobbit_weight * weight, ggml_backend_buffer_type_t buft) {
    placed.emplace_back(weight, buft);
}

// the accelerator that a buffer type belongs to; NULL: the host
static ggml_backend_dev_t accelerator_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = buft ? ggml_backend_buft_get_device(buft) : nullptr;
    if (!dev || ggml_backend_buft_is_host(buft)) {
        return nullptr;
    }
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU ? dev : nullptr;
}

// bytes of one slot: an expert's rows in one precision, as a bank holds them
static uint64_t slot_bytes(const hobbit_layer & layer, int precision) {
    uint64_t bytes = 0;
    for (const hobbit_weight * w : layer.weight) {
        bytes += w ? w->source[precision].expert_bytes : 0;
    }
    return bytes;
}

// what layers of one bank have in common
static std::string shape_of(const hobbit_layer & layer, const bool * in_use) {
    std::string shape = hobbit_format("%d", layer.n_expert);
    for (const hobbit_weight * w : layer.weight) {
        if (!w) {
            shape += " -";
            continue;
        }
        shape += hobbit_format(" %lldx%lld", (long long) w->ne[0], (long long) w->ne[1]);
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            shape += in_use[p] ? hobbit_format(":%s", ggml_type_name(w->source[p].type)) : "";
        }
    }
    return shape;
}

// whether a device computes a weight's type; asked with a tensor like those of the bank
static bool device_multiplies(ggml_backend_dev_t dev, ggml_type type, const hobbit_weight & w) {
    ggml_context_ptr ctx(ggml_init({ 8*ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * as  = ggml_new_tensor_3d(ctx.get(), type,          w.ne[0], w.ne[1], w.ne[2]);
    ggml_tensor * b   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w.ne[0], 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    ggml_tensor * r   = ggml_mul_mat_id(ctx.get(), as, b, ids);
    return ggml_backend_dev_supports_op(dev, r) &&
           ggml_backend_dev_supports_op(dev, ggml_mul_mat_id_into(ctx.get(), as, b, ids, r));
}

void hobbit_device_set::finish(hobbit_model & model, const bool * in_use, bool no_alloc) {
    bank_of_layer.assign(model.store.n_layer(), nullptr);
    miss = model.config.miss;

    std::map<int, ggml_backend_buffer_type_t> buft_of; // layer -> where its weights would be, all of them
    for (const auto & [weight, buft] : placed) {
        const auto [it, is_new] = buft_of.try_emplace(weight->layer, buft);
        if (!is_new && it->second != buft) {
            it->second = nullptr;
        }
    }
    std::vector<std::pair<ggml_backend_buffer_type_t, std::vector<int>>> by_device;
    for (const auto & [layer, buft] : buft_of) {
        ggml_backend_dev_t dev = accelerator_of(buft);
        if (!dev) {
            continue;
        }
        if (model.config.device_cache_off) {
            note("experts are computed on the CPU: --hobbit-device-cache off");
            continue;
        }
        const char * name = ggml_backend_dev_name(dev);
        if (!ggml_backend_dev_mul_mat_id_skip(dev)) {
            note(hobbit_format("experts of layers on %s are computed on the CPU: the backend does not know MUL_MAT_ID with negative ids", name));
            continue;
        }
        if (model.store.arch == "mistral4") {
            note(hobbit_format("experts are computed on the CPU, not on %s: mistral4 wants F32 activations in MUL_MAT_ID", name));
            continue;
        }
        bool multiplies = true;
        for (const hobbit_weight * w : model.store.layers[layer].weight) {
            for (int p = 0; w && p < HOBBIT_N_PRECISIONS; ++p) {
                if (in_use[p] && !device_multiplies(dev, w->source[p].type, *w)) {
                    note(hobbit_format("experts of type %s are computed on the CPU: %s does not multiply them", ggml_type_name(w->source[p].type), name));
                    multiplies = false;
                }
            }
        }
        if (!multiplies) {
            continue;
        }
        const auto it = std::find_if(by_device.begin(), by_device.end(), [&, b = buft](const auto & d) { return d.first == b; });
        if (it == by_device.end()) {
            by_device.push_back({ buft, { layer } });
        } else {
            it->second.push_back(layer);
        }
    }

    uint64_t all = 0; // bytes of every expert of these layers
    const auto bytes_of = [&](const std::vector<int> & layers) {
        uint64_t bytes = 0;
        for (int layer : layers) {
            for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
                bytes += in_use[p] ? slot_bytes(model.store.layers[layer], p) * model.store.layers[layer].n_expert : 0;
            }
        }
        return bytes;
    };
    for (const auto & [buft, layers] : by_device) {
        all += bytes_of(layers);
    }
    for (const auto & [buft, layers] : by_device) {
        auto device = std::make_unique<hobbit_device>();
        device->dev  = ggml_backend_buft_get_device(buft);
        device->buft = buft;
        device->unified = ggml_backend_dev_type(device->dev) == GGML_BACKEND_DEVICE_TYPE_IGPU;
        if (model.config.device_cache_auto && no_alloc) {
            // what is free is not known before the other weights are loaded: a trial load counts what is needed
            for (int layer : layers) {
                for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
                    device->budget += in_use[p] ? slot_bytes(model.store.layers[layer], p) * (model.n_expert_used + 1) : 0;
                }
            }
            device->budget += layers.size() * BANK_SLACK;
            device->sizing = "auto: the least that works";
        } else if (model.config.device_cache_auto) {
            size_t free, total;
            ggml_backend_dev_memory(device->dev, &free, &total);
            // the context's KV cache and compute buffers are still to come
            const uint64_t margin = std::max<uint64_t>(total / 4, 512ull << 20);
            device->budget = free - std::min<uint64_t>(free, margin);
            device->sizing = hobbit_format("auto: %.0f MiB free, less %.0f MiB for the context", mib(free), mib(margin));
        } else {
            device->budget = (uint64_t) (model.config.device_cache_bytes * (double) bytes_of(layers) / all);
            device->sizing = hobbit_format("of %.1f MiB allowed", mib(device->budget));
        }
        const int index = (int) devices.size();
        devices.push_back(std::move(device));
        plan_device(model, *devices.back(), index, layers, in_use, no_alloc);
        if (devices.back()->bytes == 0) {
            devices.pop_back();
        } else if (!no_alloc) {
            start(*devices.back());
        }
    }
}

void hobbit_device_set::plan_device(hobbit_model & model, hobbit_device & device, int index, const std::vector<int> & layers, const bool * in_use, bool no_alloc) {
    const char * name = ggml_backend_dev_name(device.dev);
    const size_t max_bytes = ggml_backend_buft_get_max_size(device.buft);

    std::map<std::string, std::vector<int>> groups;
    uint64_t all        = 0;
    uint64_t most_layer = 0; // bytes of the largest layer's experts
    for (int layer : layers) {
        const hobbit_layer & l = model.store.layers[layer];
        groups[shape_of(l, in_use)].push_back(layer);
        uint64_t bytes = 0;
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            bytes += in_use[p] ? slot_bytes(l, p) * l.n_expert : 0;
        }
        most_layer = std::max(most_layer, bytes);
        all       += bytes;
    }
    // slots come first: a stage may take a third
    const uint64_t stage_bytes = most_layer + (1 << 16);
    const bool     staged      = stage_bytes <= device.budget / 3 && stage_bytes <= max_bytes;
    const uint64_t for_slots   = device.budget - (staged ? stage_bytes : 0);
    if (staged) {
        if (!no_alloc) {
            device.stage.reset(ggml_backend_buft_alloc_buffer(device.buft, stage_bytes));
        }
        if (device.stage) {
            ggml_backend_buffer_set_usage(device.stage.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            ggml_backend_buffer_clear(device.stage.get(), 0);
        }
    }

    for (const auto & [shape, members] : groups) {
        const hobbit_layer & l = model.store.layers[members[0]];
        hobbit_plan_params params = {};
        params.n_expert_used = std::min(model.n_expert_used, l.n_expert);
        params.n_experts     = l.n_expert * (int) members.size();
        params.low_share     = model.config.low_share;
        uint64_t group_bytes = 0;
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            params.slot_bytes[p] = in_use[p] ? slot_bytes(l, p) : 0;
            group_bytes += params.slot_bytes[p] * params.n_experts;
        }
        params.budget = (uint64_t) ((double) for_slots * group_bytes / all);
        params.budget -= std::min(params.budget, BANK_SLACK);

        hobbit_plan plan;
        if (!hobbit_plan_pools(params, plan)) {
            note(hobbit_format("experts of %d layers are computed on the CPU: %.2f MiB on %s (%s) are their share, one token needs %.2f MiB",
                    (int) members.size(), mib(params.budget), name, device.sizing.c_str(), mib(hobbit_plan_min_bytes(params))));
            continue;
        }
        // as many slots as the backend can address, in one bank or several
        int most = INT32_MAX;
        for (const hobbit_weight * w : l.weight) {
            for (int p = 0; w && p < HOBBIT_N_PRECISIONS; ++p) {
                if (in_use[p]) {
                    const int64_t n = std::min<int64_t>(N_ELEMENTS_MAX / (w->ne[0] * w->ne[1]), max_bytes / w->source[p].expert_bytes);
                    most = (int) std::min<int64_t>(most, n);
                }
            }
        }
        const int n_slots_max = std::max(plan.n_slots[HOBBIT_LOW], plan.n_slots[HOBBIT_HIGH]);
        if (most < params.n_expert_used) {
            note(hobbit_format("experts of %d layers are computed on the CPU: %s addresses %d of them, one token needs %d",
                    (int) members.size(), name, most, params.n_expert_used));
            continue;
        }
        const int n_banks = std::min<int>((int) members.size(), (n_slots_max + most - 1) / most);
        for (int i = 0; i < n_banks; ++i) {
            auto bank = std::make_unique<hobbit_device_bank>();
            bank->device = index;
            bank->layers.assign(members.begin() + members.size()*i/n_banks, members.begin() + members.size()*(i + 1)/n_banks);
            bank->staged = staged && (no_alloc || device.stage);

            int n_slots[HOBBIT_N_PRECISIONS];
            int least = INT32_MAX;
            for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
                n_slots[p] = std::min({ most, (int) (plan.n_slots[p] * (double) bank->layers.size() / members.size()), l.n_expert * (int) bank->layers.size() });
                n_slots[p] = in_use[p] ? std::max(n_slots[p], params.n_expert_used) : 0;
                least = in_use[p] ? std::min(least, n_slots[p]) : least;
            }
            bank->n_rows_max = std::min<int64_t>(HOBBIT_DEVICE_ROWS_MAX, least >= l.n_expert ? HOBBIT_DEVICE_ROWS_MAX : least / params.n_expert_used);
            if (!alloc_bank(model, *bank, n_slots, no_alloc)) {
                note(hobbit_format("experts of %d layers are computed on the CPU: %s has no memory for their slots (%s)",
                        (int) bank->layers.size(), name, device.sizing.c_str()));
                continue;
            }
            for (int layer : bank->layers) {
                bank_of_layer[layer] = bank.get();
            }
            banks.push_back(std::move(bank));
        }
    }
    for (const auto & bank : banks) {
        device.bytes += bank->device == index ? bank->bytes : 0;
    }
    if (device.bytes == 0) {
        device.stage.reset();
    } else {
        device.bytes += staged && (no_alloc || device.stage) ? stage_bytes : 0;
    }
}

bool hobbit_device_set::alloc_bank(hobbit_model & model, hobbit_device_bank & bank, const int * n_slots, bool no_alloc) {
    hobbit_device &      device = *devices[bank.device];
    const hobbit_layer & layer  = model.store.layers[bank.layers[0]];

    bank.ctx.reset(ggml_init({ 4 * HOBBIT_N_ROLES * HOBBIT_N_PRECISIONS * ggml_tensor_overhead(), nullptr, true }));
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (n_slots[p] == 0) {
            continue;
        }
        for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
            if (const hobbit_weight * w = layer.weight[role]) {
                bank.part[p].slots[role] = ggml_new_tensor_3d(bank.ctx.get(), w->source[p].type, w->ne[0], w->ne[1], n_slots[p]);
                ggml_format_name(bank.part[p].slots[role], "hobbit-%s-%d-%d", p == HOBBIT_HIGH ? "high" : "low", layer.block, role);
            }
        }
        bank.part[p].pool = std::make_unique<hobbit_pool>(model.store.n_layer(), model.store.n_expert(), n_slots[p], model.config.policy);
        bank.part[p].copied.assign(n_slots[p], 0);
    }
    bank.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(bank.ctx.get(), device.buft);
    bank.buffer.reset(no_alloc ? ggml_backend_buft_alloc_buffer(device.buft, 0) : ggml_backend_alloc_ctx_tensors_from_buft(bank.ctx.get(), device.buft));
    if (!bank.buffer) {
        return false;
    }
    ggml_backend_buffer_set_usage(bank.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (no_alloc) {
        for (ggml_tensor * t = ggml_get_first_tensor(bank.ctx.get()); t; t = ggml_get_next_tensor(bank.ctx.get(), t)) {
            t->buffer = bank.buffer.get(); // as llama.cpp does in a trial load
        }
    } else {
        ggml_backend_buffer_clear(bank.buffer.get(), 0);
    }

    // the stage's tensors of all banks begin at the same address: one layer at a time
    if (bank.staged) {
        ggml_tallocr alloc = {};
        if (device.stage) {
            alloc = ggml_tallocr_new(device.stage.get());
        }
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
                if (ggml_tensor * slots = bank.part[p].slots[role]) {
                    ggml_tensor * stage = ggml_new_tensor_3d(bank.ctx.get(), slots->type, slots->ne[0], slots->ne[1], layer.n_expert);
                    ggml_format_name(stage, "%s-stage", slots->name);
                    if (!device.stage) {
                        stage->buffer = bank.buffer.get();
                    } else if (ggml_tallocr_alloc(&alloc, stage) != GGML_STATUS_SUCCESS) {
                        bank.staged = false;
                    }
                    bank.part[p].stage[role] = stage;
                }
            }
        }
    }
    return true;
}

// the copy queue and its staging memory, as far as the device has such
void hobbit_device_set::start(hobbit_device & device) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device.dev, &props);
    if (!props.caps.async || !props.caps.events) {
        note(hobbit_format("copies to %s block: the backend has no asynchronous copies and events", ggml_backend_dev_name(device.dev)));
        return;
    }
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(device.dev);
    device.pinned.reset(ggml_backend_buft_alloc_buffer(host ? host : ggml_backend_cpu_buffer_type(), N_PLACES * PLACE_BYTES));
    device.copy.reset(ggml_backend_dev_init(device.dev, nullptr));
    device.done.reset(ggml_backend_event_new(device.dev));
    device.idle.reset(ggml_backend_event_new(device.dev));
    bool ok = device.pinned && device.copy && device.done && device.idle;
    for (int i = 0; i < N_PLACES; ++i) {
        device.place_free.emplace_back(ggml_backend_event_new(device.dev));
        ok = ok && device.place_free.back();
    }
    if (!ok) {
        device.copy.reset();
        note(hobbit_format("copies to %s block: no second queue or no pinned memory", ggml_backend_dev_name(device.dev)));
        return;
    }
    device.places   = (char *) ggml_backend_buffer_get_base(device.pinned.get());
    device.n_places = N_PLACES;
}

hobbit_device_set::summary hobbit_device_set::summary_of(int device) const {
    summary s;
    for (const auto & bank : banks) {
        if (bank->device != device) {
            continue;
        }
        s.n_layers += (int) bank->layers.size();
        s.staged    = s.staged || bank->staged;
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            s.n_slots[p] += bank->part[p].pool ? bank->part[p].pool->n_slots() : 0;
        }
    }
    return s;
}

std::string hobbit_device_set::describe() const {
    std::string text;
    for (size_t i = 0; i < devices.size(); ++i) {
        const hobbit_device & device = *devices[i];
        const summary         s      = summary_of((int) i);
        text += hobbit_format("  %-10s %s: %.1f MiB %s; %d layers, %d slots high, %d low; copies %s; large batches %s; misses: %s%s\n", "device",
                ggml_backend_dev_name(device.dev), mib(device.bytes), device.sizing.c_str(), s.n_layers, s.n_slots[HOBBIT_HIGH], s.n_slots[HOBBIT_LOW],
                device.copy ? "on a queue of their own" : "block", s.staged ? "through a stage" : "on the CPU", hobbit_miss_name(miss),
                device.unified ? "; memory is the host's: what has a slot here leaves the cache there" : "");
    }
    for (const std::string & line : notes) {
        text += hobbit_format("  %-10s %s\n", "device", line.c_str());
    }
    return text;
}

std::string hobbit_device_set::json() const {
    std::string text;
    for (size_t i = 0; i < devices.size(); ++i) {
        const hobbit_device & device = *devices[i];
        const summary         s      = summary_of((int) i);
        text += hobbit_format("%s{\"name\": %s, \"bytes\": %llu, \"sizing\": %s, \"layers\": %d, \"slots_high\": %d, \"slots_low\": %d, \"queue\": %s, \"stage\": %s}",
                i > 0 ? ", " : "", hobbit_quoted(ggml_backend_dev_name(device.dev)).c_str(), (unsigned long long) device.bytes, hobbit_quoted(device.sizing).c_str(),
                s.n_layers, s.n_slots[HOBBIT_HIGH], s.n_slots[HOBBIT_LOW], device.copy ? "true" : "false", s.staged ? "true" : "false");
    }
    return "[" + text + "]";
}

//
// graph
//

bool hobbit_device_uses_stage(const hobbit_model & model, int layer, int64_t n_rows) {
    return n_rows > model.devices.bank_of(layer)->n_rows_max;
}

bool hobbit_device_takes(const hobbit_model & model, int layer, int64_t n_rows) {
    const hobbit_device_bank * bank = model.devices.bank_of(layer);
    return bank && (bank->staged || n_rows <= bank->n_rows_max);
}

ggml_tensor * hobbit_device_pack(ggml_context * ctx0, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * cur) {
    weights = ggml_is_contiguous(weights) ? weights : ggml_cont(ctx0, weights);
    weights = ggml_reshape_2d(ctx0, weights, ids->ne[0], ids->ne[1]);
    ggml_tensor * packed = ggml_concat(ctx0, ggml_cast(ctx0, ids, GGML_TYPE_F32), weights, 0);
    return cur ? ggml_concat(ctx0, packed, cur, 0) : packed;
}

hobbit_device_packed::hobbit_device_packed(const ggml_tensor * packed, int64_t n_used) {
    const int64_t n_rows = packed->ne[1];
    const auto part = [&](ggml_tensor & t, ggml_type type, int64_t first) {
        t.type  = type;
        t.data  = (float *) packed->data + first;
        t.nb[0] = sizeof(float);
    };
    part(weights, GGML_TYPE_F32, n_used);
    weights.ne[0] = 1;
    weights.ne[1] = n_used;
    weights.ne[2] = n_rows;
    weights.ne[3] = 1;
    weights.nb[1] = sizeof(float);
    weights.nb[2] = weights.nb[3] = packed->nb[1];

    part(cur, GGML_TYPE_F32, 2*n_used);
    cur.ne[0] = packed->ne[0] - 2*n_used;
    cur.ne[1] = n_rows;
    cur.ne[2] = cur.ne[3] = 1;
    cur.nb[1] = cur.nb[2] = cur.nb[3] = packed->nb[1];

    id_data.resize(n_used * n_rows);
    for (int64_t row = 0; row < n_rows; ++row) {
        for (int64_t k = 0; k < n_used; ++k) {
            id_data[row*n_used + k] = (int32_t) ((const float *) ((const char *) packed->data + row*packed->nb[1]))[k];
        }
    }
    part(ids, GGML_TYPE_I32, 0);
    ids.data  = id_data.data();
    ids.ne[0] = n_used;
    ids.ne[1] = n_rows;
    ids.ne[2] = ids.ne[3] = 1;
    ids.nb[1] = ids.nb[2] = ids.nb[3] = n_used*sizeof(int32_t);
}

ggml_tensor * hobbit_device_unpack(hobbit_route & route, ggml_context * ctx0, ggml_tensor * packed) {
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        ggml_tensor * ids = ggml_view_2d(ctx0, packed, packed->ne[0], packed->ne[1], packed->nb[1], (1 + p) * packed->nb[2]);
        ids->type = GGML_TYPE_I32; // of the same size; the plane holds their bits
        route.device_ids_node[p] = ids;
    }
    return ggml_view_3d(ctx0, packed, 1, packed->ne[0], packed->ne[1], packed->nb[0], packed->nb[1], 0);
}

ggml_tensor * hobbit_device_mul_mat_id(hobbit_route & route, ggml_context * ctx0, const hobbit_weight & weight, ggml_tensor * mul_mat_id) {
    const hobbit_device_bank & bank   = *route.ctx->model->devices.bank_of(weight.layer);
    const bool                 staged = hobbit_device_uses_stage(*route.ctx->model, weight.layer, mul_mat_id->src[2]->ne[1]);

    ggml_tensor * res = nullptr;
    for (int p = HOBBIT_HIGH; p >= HOBBIT_LOW; --p) {
        ggml_tensor * w = staged ? bank.part[p].stage[weight.role] : bank.part[p].slots[weight.role];
        if (!w) {
            continue;
        }
        ggml_tensor * ids = route.device_ids_node[p];
        ggml_tensor * b   = mul_mat_id->src[1];
        // what the first pass leaves out the second writes into its result
        const int32_t keeps = res ? 1 : 0;
        res = res ? ggml_mul_mat_id_into(ctx0, w, b, ids, res) : ggml_mul_mat_id(ctx0, w, b, ids);
        memcpy(res->op_params, mul_mat_id->op_params, sizeof(res->op_params));
        res->op_params[1] = keeps;
    }
    return res;
}

//
// route node
//

void hobbit_device_unpin(hobbit_context & ctx) {
    for (const auto & [bank, precision, slot] : ctx.device_pinned) {
        bank->part[precision].pool->unpin(slot);
    }
    ctx.device_pinned.clear();
}

static ggml_backend_t backend_of(const hobbit_context & ctx, ggml_backend_dev_t dev) {
    for (ggml_backend_t backend : ctx.backends) {
        if (ggml_backend_get_device(backend) == dev) {
            return backend;
        }
    }
    return nullptr;
}

void hobbit_device_step_end(hobbit_context & ctx) {
    for (const auto & device : ctx.model->devices.devices) {
        ggml_backend_t backend = backend_of(ctx, device->dev);
        if (backend && device->copy) {
            // of every step: the last one of another context may end later than this one
            ggml_backend_event_record(device->idle.get(), backend);
            ggml_backend_event_wait(device->copy.get(), device->idle.get());
        } else if (backend) {
            ggml_backend_synchronize(backend);
        }
    }
}

// a slice of a bank or stage: one expert's weight
static ggml_tensor slice_of(const ggml_tensor * bank, int64_t slot) {
    ggml_tensor t = *bank;
    t.ne[2] = 1;
    t.nb[3] = t.nb[2];
    t.data  = (char *) bank->data + slot * bank->nb[2];
    return t;
}

// from may be reused when this returns
static void copy_up(hobbit_device & device, ggml_tensor * to, int64_t slot, const char * from) {
    const size_t size = to->nb[2];
    if (!device.copy) {
        ggml_backend_tensor_set(to, from, slot * size, size);
        return;
    }
    for (size_t done = 0; done < size; done += PLACE_BYTES) {
        const size_t n     = std::min(PLACE_BYTES, size - done);
        const int    i     = device.n_copies % device.n_places;
        char *       place = device.places + i * PLACE_BYTES;
        ggml_backend_event_t free = device.place_free[i].get();
        ggml_backend_event_synchronize(free);
        memcpy(place, from + done, n);
        ggml_backend_tensor_set_async(device.copy.get(), to, place, slot * size + done, n);
        ggml_backend_event_record(free, device.copy.get());
        device.n_copies++;
    }
}

static void copy_within(hobbit_device & device, const ggml_tensor * to, int64_t to_slot, const ggml_tensor * from, int64_t from_slot) {
    ggml_tensor a = slice_of(from, from_slot);
    ggml_tensor b = slice_of(to,   to_slot);
    if (!device.copy) {
        ggml_backend_tensor_copy(&a, &b);
        return;
    }
    ggml_backend_tensor_copy_async(device.copy.get(), device.copy.get(), &a, &b);
}

// this context's computing on the device goes on when the first n copies are there; all: and what was copied within the device
static void copies_await(hobbit_context & ctx, int index, uint64_t n, bool all) {
    hobbit_device & device = *ctx.model->devices.devices[index];
    ctx.awaited.resize(ctx.model->devices.devices.size());
    if (!device.copy || (n <= ctx.awaited[index] && !all)) {
        return;
    }
    ggml_backend_t backend = backend_of(ctx, device.dev);
    if (!backend) {
        ggml_backend_synchronize(device.copy.get());
    } else if (all) {
        ggml_backend_event_record(device.done.get(), device.copy.get());
        ggml_backend_event_wait(backend, device.done.get());
    } else if (n + device.n_places > device.n_copies) { // else its place was used again, once it had ended
        ggml_backend_event_wait(backend, device.place_free[(n - 1) % device.n_places].get());
    }
    n = all || !backend ? device.n_copies : n;
    ctx.awaited[index] = n;
    device.n_awaited   = std::max(device.n_awaited, n);
}

// The host waits for all copies. If it had to wait, or they took less time than expected, that says how fast the link is
static void copies_end(hobbit_device & device) {
    const int64_t t0 = ggml_time_us();
    ggml_backend_event_synchronize(device.place_free[(device.n_copies - 1) % device.n_places].get());
    device.n_ended = device.n_copies;

    const int64_t now  = ggml_time_us();
    const double  took = 1e-6*(now - device.t_begin_us);
    if (device.timed && (now - t0 > WAIT_LEAST_US || took < device.link.at((double) device.bytes_begun))) {
        device.link.add((double) device.bytes_begun, took);
    }
    device.t_dry_us = std::min(device.t_dry_us, now);
}

// bytes were queued since t0; alone: nothing else was on the link then
static void copies_queued(hobbit_device & device, uint64_t bytes, int64_t t0, bool alone) {
    if (!device.copy) {
        device.link.add((double) bytes, 1e-6*(ggml_time_us() - t0));
        return;
    }
    device.timed       = alone || device.timed;
    device.t_begin_us  = alone ? t0    : device.t_begin_us;
    device.bytes_begun = alone ? bytes : device.bytes_begun + bytes;
    device.t_dry_us    = std::max(device.t_begin_us + (int64_t) (1e6*device.link.at((double) device.bytes_begun)), t0);
}

double hobbit_device_busy(const hobbit_device & device) {
    return device.copy && device.n_ended < device.n_copies ? 1e-6*std::max<int64_t>(0, device.t_dry_us - ggml_time_us()) : 0.0;
}

// whether an expert that is on its way to a slot is computed by the CPU sooner than it arrives
static bool is_late(const hobbit_route & route, const hobbit_device & device, int precision, int64_t n_rows) {
    hobbit_model & model = *route.ctx->model;
    const auto     ffn   = route.ffns.find(n_rows);
    if (ffn == route.ffns.end() || !ffn->second->out || device.unified || model.config.miss == HOBBIT_MISS_LOAD) {
        return false;
    }
    const hobbit_line & cpu = model.miss_costs.of(n_rows).cpu;
    return model.config.miss == HOBBIT_MISS_CPU ||
           (cpu.known() && hobbit_device_busy(device) > cpu.at((double) hobbit_expert_bytes(model.store.layers[route.layer], precision)));
}

void hobbit_device_find(hobbit_route & route, std::vector<route_choice> & choices, int64_t n_rows) {
    hobbit_context &     ctx  = *route.ctx;
    hobbit_device_bank & bank = *ctx.model->devices.bank_of(route.layer);

    // what computing waited for is over: it has come this far
    hobbit_device & device = *ctx.model->devices.devices[bank.device];
    device.n_ended = std::max(device.n_ended, device.n_awaited);

    const int64_t now = ggml_time_us();
    const int64_t dry = std::max(device.n_ended < device.n_copies ? device.t_dry_us : 0, device.t_fetched_us);
    device.idle_us += AHEAD_STEP*(std::max<int64_t>(0, now - dry) - device.idle_us);
    if (device.copy && device.n_ended < device.n_copies && now > device.t_dry_us) {
        copies_end(device);
    }

    route.device_copies = 0;
    std::vector<hobbit_sequence_stats> counts(std::max<size_t>(1, ctx.step_seqs.size())); // by sequence of the step
    std::vector<route_choice> missing;
    for (const route_choice & choice : choices) {
        const int precision = choice.given - HOBBIT_PRECISION_LOW;
        const int slot      = choice.given == HOBBIT_PRECISION_SKIP ? -1 : bank.part[precision].pool->find(route.layer, choice.id);
        if (slot < 0 || (bank.part[precision].copied[slot] > device.n_ended && is_late(route, device, precision, n_rows))) {
            missing.push_back(choice);
            continue;
        }
        bank.part[precision].pool->pin(slot);
        bank.part[precision].pool->touch(slot);
        ctx.device_pinned.push_back({ &bank, precision, slot });
        route.device_ids[precision][choice.id] = slot;
        route.device_copies = std::max(route.device_copies, bank.part[precision].copied[slot]);

        hobbit_counters & count = counts[choice.seq].count;
        counts[choice.seq].shared += choice.shared ? 1 : 0;
        count.lookups++;
        count.hits++;
        count.device_hits++;
        (precision == HOBBIT_HIGH ? count.selected_high : count.selected_low) += choice.n_selected;
    }
    choices.swap(missing);

    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    for (size_t i = 0; i < ctx.step_seqs.size(); ++i) {
        ctx.stats.layers[route.layer].add(counts[i].count);
        ctx.sequence_stats[ctx.step_seqs[i]].add(counts[i]);
    }
}

// experts[i] of the route in the host's memory; NULL: could not be read
static const char * await_host(hobbit_route & route, hobbit_role role, int i) {
    hobbit_model &             model = *route.ctx->model;
    const hobbit_step_expert & e     = route.experts[i];

    hobbit_stream_piece *  piece = i < route.n_cached ? nullptr : route.streamed[i - route.n_cached].piece[role];
    std::atomic<uint8_t> & state = piece ? piece->state : model.pools[e.precision].piece(e.slot, role);

    uint8_t s = state.load(std::memory_order_acquire);
    if (s < HOBBIT_PIECE_READY) {
        const int64_t t0 = ggml_time_us();
        s = model.loader->await(state);
        route.ctx->stall_us.fetch_add(ggml_time_us() - t0, std::memory_order_relaxed);
    }
    return s != HOBBIT_PIECE_READY ? nullptr :
           piece                   ? piece->read.dst : model.piece_data(route.layer, e.precision, role, e.slot, e.id);
}

// Copies an expert that the host has to a slot, if that delays nothing: no place is waited for, and where copies block the slot
// is a free one. Returns the slot, pinned; -1: not now
static int copy_aside(hobbit_context & ctx, hobbit_device_bank & bank, int layer, int expert, int precision) {
    hobbit_model &       model  = *ctx.model;
    hobbit_device &      device = *model.devices.devices[bank.device];
    const hobbit_layer & l      = model.store.layers[layer];
    auto &               part   = bank.part[precision];

    const int host_slot = part.pool->find(layer, expert) < 0 ? model.pools[precision].pool->find(layer, expert) : -1;
    uint64_t  n_copies  = 0;
    for (const hobbit_weight * w : l.weight) {
        n_copies += w ? (w->source[precision].expert_bytes + PLACE_BYTES - 1) / PLACE_BYTES : 0;
    }
    if (host_slot < 0 || !hobbit_is_ready(model, layer, precision, host_slot) ||
        (device.copy ? device.n_copies + n_copies > device.n_ended + device.n_places : part.pool->n_used() == part.pool->n_slots())) {
        return -1;
    }
    int64_t   evicted;
    const int slot = part.pool->place(layer, expert, ctx.step_records.data(), (int) ctx.step_records.size(), true, &evicted);
    if (slot < 0) {
        return -1;
    }
    const int64_t t0    = ggml_time_us();
    const bool    alone = device.n_ended == device.n_copies;
    for (hobbit_role role : ROLES_AS_USED) {
        if (l.weight[role]) {
            copy_up(device, part.slots[role], slot, model.piece_data(layer, precision, role, host_slot, expert));
        }
    }
    copies_queued(device, hobbit_expert_bytes(l, precision), t0, alone);
    part.copied[slot] = device.n_copies;
    if (device.unified && model.pools[precision].pool->pins(host_slot) == 0) {
        model.pools[precision].pool->drop(host_slot);
    }

    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    hobbit_counters & count = ctx.stats.layers[layer];
    count.device_evictions += evicted >= 0 ? 1 : 0;
    count.upload_bytes     += hobbit_expert_bytes(l, precision);
    return slot;
}

void hobbit_device_fetch(hobbit_route & route, int64_t n_rows) {
    hobbit_context &     ctx    = *route.ctx;
    hobbit_model &       model  = *ctx.model;
    hobbit_device_bank & bank   = *model.devices.bank_of(route.layer);
    hobbit_device &      device = *model.devices.devices[bank.device];
    const hobbit_layer & layer  = model.store.layers[route.layer];
    const bool           staged = hobbit_device_uses_stage(model, route.layer, n_rows);

    std::vector<bool> on_cpu(route.experts.size(), false);
    for (int i : route.on_cpu) {
        on_cpu[i] = true;
    }
    std::vector<bool> no_copy = on_cpu; // or on their way
    const int64_t  t0    = ggml_time_us();
    const bool     alone = device.n_ended == device.n_copies; // on the link
    const uint64_t stall = ctx.stall_us.load(std::memory_order_relaxed);

    hobbit_counters count;

    if (staged) {
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            for (int id = 0; id < layer.n_expert; ++id) {
                const int slot = route.device_ids[p][id];
                for (int role = 0; slot >= 0 && role < HOBBIT_N_ROLES; ++role) {
                    if (layer.weight[role]) {
                        copy_within(device, bank.part[p].stage[role], id, bank.part[p].slots[role], slot);
                    }
                }
                route.device_ids[p][id] = slot >= 0 ? id : -1;
            }
        }
    }

    // slots for what comes; a large batch takes only those that are free. placed is void if the step fails
    std::vector<std::pair<int, int>> placed; // (precision, slot)
    std::vector<int>                 slots;  // per expert of the route, -1: none
    for (size_t i = 0; i < route.experts.size(); ++i) {
        const hobbit_step_expert & e = route.experts[i];
        const int there = bank.part[e.precision].pool->find(route.layer, e.id); // on its way, but late
        if (on_cpu[i] || there >= 0) {
            slots.push_back(-1);
            if (!on_cpu[i]) {
                bank.part[e.precision].pool->pin(there);
                ctx.device_pinned.push_back({ &bank, e.precision, there });
                route.device_ids[e.precision][e.id] = there;
                route.device_copies = std::max(route.device_copies, bank.part[e.precision].copied[there]);
                no_copy[i] = true;
            }
            continue;
        }
        const auto place = [&](int64_t & evicted) {
            return bank.part[e.precision].pool->place(route.layer, e.id, ctx.step_records.data(), (int) ctx.step_records.size(), !staged, &evicted);
        };
        int64_t evicted;
        int     slot = place(evicted);
        if (slot < 0 && !staged) {
            // what is needed now goes before what may be needed soon
            hobbit_device_settle(ctx, model.store.n_layer(), nullptr);
            slot = place(evicted);
        }
        GGML_ASSERT((slot >= 0 || staged) && "a bank has fewer slots than a small batch has experts");
        count.device_evictions += evicted >= 0 ? 1 : 0;
        if (slot >= 0) {
            ctx.device_pinned.push_back({ &bank, e.precision, slot });
            placed.emplace_back(e.precision, slot);
        }
        slots.push_back(slot);
        route.device_ids[e.precision][e.id] = staged ? e.id : slot;
    }
    bool failed = false;
    for (hobbit_role role : ROLES_AS_USED) {
        const hobbit_weight * weight = layer.weight[role];
        if (!weight || failed) {
            continue;
        }
        if (!route.streamed.empty() && !on_cpu.back()) {
            model.stream.begin(route.layer, role); // what is streamed goes one way
        }
        for (size_t i = 0; i < route.experts.size() && !failed; ++i) {
            if (no_copy[i]) {
                continue;
            }
            const hobbit_step_expert & e    = route.experts[i];
            const auto &               part = bank.part[e.precision];
            const char *               data = await_host(route, role, (int) i);
            failed = data == nullptr;
            if (!failed) {
                copy_up(device, slots[i] >= 0 ? part.slots[role] : part.stage[role], slots[i] >= 0 ? slots[i] : e.id, data);
                if (staged && slots[i] >= 0) {
                    copy_within(device, part.stage[role], e.id, part.slots[role], slots[i]);
                }
                count.upload_bytes += weight->source[e.precision].expert_bytes;
            }
            if ((int) i >= route.n_cached) {
                model.stream.release(*route.streamed[i - route.n_cached].piece[role], 1);
            }
        }
    }
    for (const auto & [precision, slot] : placed) {
        bank.part[precision].copied[slot] = device.n_copies;
    }
    for (int i = 0; device.unified && !failed && i < route.n_cached; ++i) {
        if (slots[i] >= 0) {
            ctx.moved.emplace_back(route.experts[i].precision, route.experts[i].slot);
        }
    }
    copies_await(ctx, bank.device, count.upload_bytes > 0 ? device.n_copies : route.device_copies, staged);
    // where the host waited for bytes, or copies within the device were between, the link's time says nothing
    if (staged || ctx.stall_us.load(std::memory_order_relaxed) != stall) {
        device.timed = false;
    } else if (count.upload_bytes > 0) {
        copies_queued(device, count.upload_bytes, t0, alone);
        if (device.copy && (!device.link.known() || ++device.n_unmeasured >= MEASURE_EVERY)) {
            copies_end(device);
            device.n_unmeasured = 0;
        }
    }
    device.t_fetched_us = route.t_routed_us = ggml_time_us();
    route.no_copies     = count.upload_bytes == 0 && route.device_copies <= device.n_ended;

    if (failed) {
        ctx.failed.store(true, std::memory_order_relaxed);
        hobbit_device_unpin(ctx);
        for (const auto & [precision, slot] : placed) {
            bank.part[precision].pool->drop(slot);
        }
        for (auto & ids : route.device_ids) {
            std::fill(ids.begin(), ids.end(), -1);
        }
    }
    // for the next time, while the link has nothing else to do
    for (int i : route.on_cpu) {
        const hobbit_step_expert & e = route.experts[i];
        const int slot = failed || device.n_ended < device.n_copies ? -1 : copy_aside(ctx, bank, route.layer, e.id, e.precision);
        if (slot >= 0) {
            ctx.device_pinned.push_back({ &bank, e.precision, slot });
        }
    }
    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    ctx.stats.layers[route.layer].add(count);
}

void hobbit_device_settle(hobbit_context & ctx, int layer, const hobbit_precision * chosen) {
    std::vector<hobbit_device_predicted> later;
    for (const hobbit_device_predicted & p : ctx.device_predicted) {
        if (p.layer > layer) {
            later.push_back(p);
            continue;
        }
        p.pin.bank->part[p.pin.precision].pool->unpin(p.pin.slot);
        if (p.issued) {
            hobbit_device & device = *ctx.model->devices.devices[p.pin.bank->device];
            const bool used = chosen && p.layer == layer && chosen[p.expert] == HOBBIT_PRECISION_LOW + p.pin.precision;
            (used ? ctx.n_prefetch_used : ctx.n_prefetch_wasted) += 1;
            device.ahead_used += AHEAD_STEP*(used - device.ahead_used);
            std::lock_guard<std::mutex> lock(ctx.stats_mutex);
            ctx.stats.layers[p.layer].ahead_used += used ? 1 : 0;
        }
    }
    ctx.device_predicted.swap(later);
}

// Whether to copy ahead. One that is used takes from the next layer's copies what falls into the time in which the link would be idle;
// one that is not delays them by the rest of it, and what had to leave for it may have to come back
static bool ahead_pays(hobbit_device & device, uint64_t bytes) {
    const double busy = 1e6*hobbit_device_busy(device);
    const double took = 1e6*device.link.at((double) bytes);
    const double idle = std::min(took, std::max(0.0, device.idle_us - busy));
    if (!device.link.known() || device.ahead_used*idle >= (1.0 - device.ahead_used)*(2.0*took - idle)) {
        return true;
    }
    return ++device.n_refused % AHEAD_TRIAL == 0;
}

bool hobbit_device_ahead(hobbit_context & ctx, int layer, int expert, int precision, int64_t n_rows) {
    hobbit_model &       model = *ctx.model;
    hobbit_device_bank * bank  = model.devices.bank_of(layer);
    if (!bank || n_rows > bank->n_rows_max) {
        return false;
    }
    hobbit_device_bank::precision_part & part = bank->part[precision];
    int slot = part.pool->find(layer, expert);
    if (slot >= 0) {
        part.pool->pin(slot);
        ctx.device_predicted.push_back({ { bank, precision, slot }, layer, expert, false });
        return true;
    }
    hobbit_device & device = *model.devices.devices[bank->device];
    slot = device.copy && ahead_pays(device, hobbit_expert_bytes(model.store.layers[layer], precision)) ? copy_aside(ctx, *bank, layer, expert, precision) : -1;
    if (slot < 0) {
        return false;
    }
    ctx.device_predicted.push_back({ { bank, precision, slot }, layer, expert, true });

    std::lock_guard<std::mutex> lock(ctx.stats_mutex);
    ctx.stats.layers[layer].ahead_issued++;
    return true;
}

void hobbit_device_ids(const hobbit_route & route, const ggml_tensor * ids, ggml_tensor * packed) {
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        for (int64_t row = 0; row < ids->ne[1]; ++row) {
            int32_t * out = (int32_t *) ((char *) packed->data + (1 + p)*packed->nb[2] + row*packed->nb[1]);
            for (int64_t k = 0; k < ids->ne[0]; ++k) {
                const int32_t id = *(const int32_t *) ((const char *) ids->data + k*ids->nb[0] + row*ids->nb[1]);
                out[k] = route.device_ids[p][id];
            }
        }
    }
}
