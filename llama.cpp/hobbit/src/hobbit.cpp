// The C API over the engine's parts: lives and deaths of models and contexts, steps, and what is reported of them.

#include "hobbit.h"

#include "budget.h"
#include "config.h"
#include "moe_graph.h"
#include "quality.h"

#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <set>
#include <thread>

#include <unistd.h>

static void (*log_callback)(int level, const char * text) = nullptr;

void hobbit_set_log(void (*log)(int level, const char * text)) {
    log_callback = log;
}

void hobbit_log(const hobbit_config & config, int level, const std::string & text) {
    if (config.verbose || !log_callback) {
        fputs(text.c_str(), stderr);
    } else {
        log_callback(level, text.c_str());
    }
}

//
// model
//

// a name that a pair's base file gives must stay in the base file's folder
static bool pair_path(const std::string & base, const char * name, std::string & path, std::string & err) {
    if (name[0] == '\0' || strchr(name, '/') || strchr(name, '\\') || strcmp(name, "..") == 0) {
        err = hobbit_format("%s: names '%s' as an expert file; only files beside the base file may be named", base.c_str(), name);
        return false;
    }
    const size_t slash = base.rfind('/');
    path = (slash == std::string::npos ? "" : base.substr(0, slash + 1)) + name;
    return true;
}

hobbit_model * hobbit_model_new(int32_t config, const gguf_context * meta, const char * path, bool no_alloc, char * err, size_t err_size) {
    auto model = std::make_unique<hobbit_model>();
    if (!hobbit_config_get(config, model->config)) {
        hobbit_fail(err, err_size, hobbit_format("no hobbit configuration has the handle %d", config));
        return nullptr;
    }
    model->no_alloc = no_alloc;
    if (const char * arch = hobbit_gguf_str(meta, "general.architecture")) {
        model->store.arch = arch;
    }

    if (const char * id = hobbit_gguf_str(meta, "hobbit.pair.id")) {
        model->pair_id = id;
    }
    std::string why;
    if (const char * high = hobbit_gguf_str(meta, "hobbit.pair.high")) {
        if (!pair_path(path, high, model->pair_high, why)) {
            hobbit_fail(err, err_size, why);
            return nullptr;
        }
    }
    const int64_t low = gguf_find_key(meta, "hobbit.pair.low");
    if (low >= 0 && gguf_get_kv_type(meta, low) == GGUF_TYPE_ARRAY && gguf_get_arr_type(meta, low) == GGUF_TYPE_STRING && gguf_get_arr_n(meta, low) > 0) {
        if (!pair_path(path, gguf_get_arr_str(meta, low, 0), model->pair_low, why)) {
            hobbit_fail(err, err_size, why);
            return nullptr;
        }
    }
    return model.release();
}

void hobbit_model_free(hobbit_model * model) {
    delete model;
}

const char * hobbit_model_pair_high(const hobbit_model * model) {
    return model->pair_high.empty() ? nullptr : model->pair_high.c_str();
}

bool hobbit_model_check_high(const hobbit_model * model, const gguf_context * meta, char * err, size_t err_size) {
    const char * id = hobbit_gguf_str(meta, "hobbit.pair.id");
    if (!id || model->pair_id != id) {
        return hobbit_fail(err, err_size, hobbit_format("%s: belongs to pair %s, the base file to pair %s",
                model->pair_high.c_str(), id ? id : "(none)", model->pair_id.empty() ? "(none)" : model->pair_id.c_str()));
    }
    return true;
}

bool hobbit_model_add_tensor(hobbit_model * model, const ggml_tensor * meta, int fd, uint64_t offset, ggml_backend_buffer_type * buft) {
    const bool managed = model->store.add_tensor(meta, fd, offset);
    if (managed) {
        model->devices.assign(model->store.find(meta->name), buft);
    }
    return managed;
}

void hobbit_model_adopt(hobbit_model * model, ggml_tensor * tensor) {
    auto managed = std::make_unique<hobbit_managed>();
    hobbit_managed_init(*managed, model, model->store.find(tensor->name));
    tensor->extra = managed.get();
    if (!model->no_alloc) {
        tensor->data = model->no_access.reserve(ggml_nbytes(tensor));
    }
    model->managed.push_back(std::move(managed));
}

bool hobbit_is_managed(const ggml_tensor * tensor) {
    return tensor && ggml_cpu_experts_of(tensor) != nullptr;
}

void hobbit_model_set_repack(hobbit_model * model, void * repack) {
    model->repack = (hobbit_loader::repack_fn) repack;
}

size_t hobbit_model_bytes(const hobbit_model * model) {
    return model->bytes();
}

size_t hobbit_model_device_bytes(const hobbit_model * model, int i, ggml_backend_buffer_type ** buft) {
    if (i >= (int) model->devices.devices.size()) {
        return 0;
    }
    *buft = model->devices.devices[i]->buft;
    return model->devices.devices[i]->bytes;
}

static double mib(uint64_t bytes) {
    return bytes / (1024.0 * 1024.0);
}

// one block: what will happen
static std::string describe(const hobbit_model & model) {
    const hobbit_config &     config = model.config;
    const hobbit_thresholds & th     = config.thresholds;

    uint64_t total[HOBBIT_N_PRECISIONS] = { 0, 0 };
    std::set<std::string> types[HOBBIT_N_PRECISIONS];
    for (const auto & weight : model.store.weights) {
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            if (weight->source[p].file) {
                total[p] += weight->source[p].expert_bytes * weight->ne[2];
                types[p].insert(ggml_type_name(weight->source[p].type));
            }
        }
    }
    const auto pool = [&](const char * name, int p, const std::string & file) {
        std::string type;
        for (const std::string & t : types[p]) {
            type += (type.empty() ? "" : "+") + t;
        }
        for (const auto & weight : model.store.weights) {
            if (weight->source[p].repacked) {
                type += " repacked";
                break;
            }
        }
        return hobbit_format("  %-10s %s, %s: %d slots of %.2f MiB; all experts take %.1f MiB\n", name, file.c_str(), type.c_str(),
                model.pools[p].pool->n_slots(), mib(model.slot_bytes(p)), mib(total[p]));
    };

    std::string text = "hobbit: expert cache on\n";
    text += hobbit_format("  %-10s %d layers with experts, up to %d experts each (%s)\n", "model",
            model.store.n_layer(), model.store.n_expert(), model.store.arch.c_str());
    text += hobbit_format("  %-10s %.1f MiB: %s\n", "cache", mib(model.bytes()), model.sizing.c_str());
    if (model.uses(HOBBIT_HIGH)) {
        text += pool("high", HOBBIT_HIGH, model.store.weights[0]->source[HOBBIT_HIGH].file->path);
    }
    if (model.uses(HOBBIT_LOW)) {
        text += pool("low", HOBBIT_LOW, config.low_path);
    }
    text += hobbit_format("  %-10s %d places of %.2f MiB for experts that find no slot\n", "ring", model.n_ring, mib(model.ring_bytes()));
    text += hobbit_format("  %-10s %s", "precision", hobbit_rule_name(th.rule));
    if (th.rule == HOBBIT_RULE_HOBBIT || th.rule == HOBBIT_RULE_ARTICLE) {
        text += hobbit_format(", T1 %g, T2 %g%s%s", th.t1, th.t2, config.renormalise ? ", renormalised after skips" : "",
                model.uses(HOBBIT_LOW) ? "" : "; no low-precision file: high instead of low");
    }
    text += config.deterministic ? ", deterministic\n" : "\n";
    if (!model.quality.empty()) {
        text += hobbit_format("  %-10s %s\n", "quality", model.quality.c_str());
    }
    text += hobbit_format("  %-10s %s", "policy", hobbit_policy_name(config.policy.policy));
    if (config.policy.policy == HOBBIT_POLICY_HOBBIT) {
        text += hobbit_format(" (recency %.2f, frequency %.2f, high-precision frequency %.2f, layer distance %.2f)",
                config.policy.w_lru, config.policy.w_lfu, config.policy.w_lhu, config.policy.w_fld);
    }
    text += hobbit_format("\n  %-10s %d %s, reads %s\n", "loader", config.io_threads, model.loader->is_uring() ? "reads under way by io_uring" : "threads", model.io.c_str());
    text += model.devices.describe();
    if (!model.warm.empty()) {
        text += hobbit_format("  %-10s %s\n", "warm start", model.warm.c_str());
    }
    return text + hobbit_format("  %-10s %s\n", "prefetch",
            !model.no_prediction.empty() ? ("off: " + model.no_prediction).c_str() :
            config.prefetch_depth == 0   ? "off" :
            hobbit_format("%s %d layers ahead, %s", config.prefetch_adaptive ? "up to" : "always", config.prefetch_depth,
                    model.routers ? hobbit_format("router bank %.1f MiB", mib(model.routers->bytes())).c_str() : "by past requests").c_str());
}

// direct or buffered reads; before slots are sized, since direct reads want room for alignment
static void choose_io(hobbit_model & model, const bool * in_use) {
    const hobbit_config & config = model.config;

    uint64_t all = 0; // bytes of every expert in the precisions in use
    std::set<const hobbit_file *> in_files;
    for (const auto & weight : model.store.weights) {
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            if (in_use[p]) {
                all += weight->source[p].expert_bytes * weight->ne[2];
                in_files.insert(weight->source[p].file);
            }
        }
    }
    const hobbit_memory mem  = hobbit_memory_now();
    const uint64_t      free = mem.limit - std::min(mem.limit, mem.used + hobbit_memory_margin(mem.limit));
    const bool fits   = !config.cache_auto && config.cache_bytes + all <= free;
    const bool direct = config.io == HOBBIT_IO_DIRECT || config.io == HOBBIT_IO_URING || (config.io == HOBBIT_IO_AUTO && !fits);

    model.io = direct ? "direct" : "buffered";
    for (const auto & file : model.store.files) {
        if (!direct || in_files.count(file.get()) == 0) {
            continue;
        }
        if (!file->open_direct()) {
            file->drop_cached = true;
            model.io = "buffered, since direct reads are not possible on this file system";
        }
    }
}

static void start_prediction(hobbit_model & model) {
    if (model.config.unit == HOBBIT_UNIT_LAYER) {
        model.config.prefetch_depth = 0; // the next layer is read ahead whole
    }
    if (model.config.prefetch_depth == 0) {
        model.governor.init(0, false);
        return;
    }
    if (model.config.predictor == HOBBIT_PREDICTOR_ACTIVATIONS) {
        model.governor.init(model.config.prefetch_depth, model.config.prefetch_adaptive);
        return;
    }
    auto routers = std::make_unique<hobbit_router_bank>();
    std::string why;
    if (routers->load(model.store, why)) {
        model.routers = std::move(routers);
        model.governor.init(model.config.prefetch_depth, model.config.prefetch_adaptive);
    } else {
        model.governor.init(0, false);
        model.no_prediction = why;
    }
}

// how many slots the configuration's cache gives to each precision; says in model.sizing where the number comes from
static bool plan_cache(hobbit_model & model, const bool * in_use, hobbit_plan & plan, std::string & err) {
    const hobbit_config & config = model.config;

    hobbit_plan_params params = {};
    params.n_expert_used = model.n_expert_used;
    params.low_share     = config.low_share;
    params.ring_bytes    = model.ring_bytes();
    params.router_bytes  = model.routers ? model.routers->bytes() : 0;
    for (const hobbit_layer & layer : model.store.layers) {
        params.n_experts += layer.n_expert;
    }
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        params.slot_bytes[p] = in_use[p] ? model.slot_bytes(p) : 0;
    }

    hobbit_memory mem = hobbit_memory_now();
    mem.used -= std::min(mem.used, model.bytes_in_use()); // when resizing: what the cache itself takes is not in its way
    if (config.cache_auto) {
        const uint64_t margin = hobbit_memory_margin(mem.limit);
        params.budget = mem.limit - std::min(mem.limit, mem.used + margin);
        model.sizing = hobbit_format("auto: %s, %.0f MiB, less %.0f MiB in use and %.0f MiB margin", mem.source.c_str(), mib(mem.limit), mib(mem.used), mib(margin));
    } else {
        params.budget = config.cache_bytes;
        model.sizing = hobbit_format("of %.1f MiB allowed", mib(config.cache_bytes));
    }
    // what the experts can fill at most, with slack for the ring, must fit beside what is in memory already
    uint64_t most = params.router_bytes + HOBBIT_RING_MOST * params.ring_bytes;
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        most += params.slot_bytes[p] * params.n_experts;
    }
    const uint64_t wanted = std::min(params.budget, most);
    const uint64_t free   = mem.limit - std::min(mem.limit, mem.used);
    if (wanted > free) {
        err = hobbit_format("a cache of %.0f MiB does not fit: %s is %.0f MiB, of which %.0f MiB are in use; at most --hobbit-cache %.0fMiB, "
                "less what the context will need", mib(wanted), mem.source.c_str(), mib(mem.limit), mib(mem.used), std::floor(mib(free)));
        return false;
    }

    if (!hobbit_plan_pools(params, plan)) {
        const unsigned long long least_kib = (hobbit_plan_min_bytes(params) + 1023) / 1024;
        err = hobbit_format("a cache of %.2f MiB is too small (%s): one token uses %d experts of a layer, which with the ring for streaming "
                "take %.2f MiB; the smallest setting that works is --hobbit-cache %lluKiB",
                mib(params.budget), model.sizing.c_str(), model.n_expert_used, mib(least_kib * 1024), least_kib);
        return false;
    }
    return true;
}

//
// profile: which experts were resident, for the next start. Text: a line that names the model, then settings as lines
// "set NAME VALUE" (`hobbit calibrate` writes them), then precision, layer and expert, what was used last first
//

static std::string profile_head(const hobbit_model & model, const bool * in_use) {
    std::string head = hobbit_format("hobbit-profile 1 %s %d %d", model.store.arch.c_str(), model.store.n_layer(), model.store.n_expert());
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        const hobbit_source & src = model.store.weights[0]->source[p];
        head += hobbit_format(" %llu", (unsigned long long) (in_use[p] ? src.file->size : 0));
    }
    return head;
}

static std::string profile_head(const hobbit_model & model) {
    const bool in_use[HOBBIT_N_PRECISIONS] = { model.uses(HOBBIT_LOW), model.uses(HOBBIT_HIGH) };
    return profile_head(model, in_use);
}

// takes T1 and T2 from what was measured on this pair, if a budget asks for it
static bool read_quality(hobbit_model & model, const bool * in_use, std::string & err) {
    hobbit_config & config = model.config;
    std::vector<hobbit_quality_point> points;
    hobbit_quality_point              point;

    std::ifstream in(config.profile_path);
    std::string   line;
    bool          ours = std::getline(in, line) && line == profile_head(model, in_use);
    while (ours && std::getline(in, line)) {
        if (hobbit_quality_parse(line, point)) {
            points.push_back(point);
            model.quality_lines.push_back(line);
        }
    }
    if (config.quality_budget < 0.0f) {
        return true;
    }
    if (config.thresholds.rule != HOBBIT_RULE_HOBBIT) {
        err = "--hobbit-quality-budget needs --hobbit-low FILE: without low-precision copies there is nothing to choose";
        return false;
    }
    std::string why = "it is not there, or of another model or other files";
    const hobbit_quality_point * chosen = ours ? hobbit_quality_choose(points, config.quality_budget, why) : nullptr;
    if (!chosen) {
        err = hobbit_format("--hobbit-quality-budget %g: %s: %s", config.quality_budget, config.profile_path.c_str(), why.c_str());
        return false;
    }
    config.thresholds.t1 = chosen->t1;
    config.thresholds.t2 = chosen->t2;
    model.quality = hobbit_format("a budget of %g %%: measured %+.2f %% perplexity (standard error %.2f), KL %.2g, %.1f MiB per token without a cache",
            config.quality_budget, chosen->percent, chosen->percent_se, chosen->kl, mib((uint64_t) chosen->bytes));
    return true;
}

static std::string profile_text(const hobbit_model & model) {
    std::string text = profile_head(model) + "\n";
    for (const std::string & line : model.quality_lines) {
        text += line + "\n";
    }
    for (const std::string & line : model.profile_settings) {
        text += line + "\n";
    }
    for (const auto & past : model.activations.all()) {
        text += hobbit_format("past %u", past->n_tokens);
        for (size_t key = 0; key < past->used.size(); ++key) {
            text += past->used[key] > 0 ? hobbit_format(" %zu:%u", key, past->used[key]) : "";
        }
        text += "\n";
    }
    for (int p = HOBBIT_HIGH; p >= HOBBIT_LOW; --p) {
        if (!model.uses(p)) {
            continue;
        }
        // what is on a device is wanted most
        std::vector<const hobbit_pool *> pools;
        for (const auto & bank : model.devices.banks) {
            pools.push_back(bank->part[p].pool.get());
        }
        pools.push_back(model.pools[p].pool.get());

        std::set<int64_t> written;
        for (const hobbit_pool * pool : pools) {
            for (int slot : pool->by_last_touch()) {
                const int64_t key = pool->key_at(slot);
                if (written.insert(key).second) {
                    text += hobbit_format("%s %d %d\n", p == HOBBIT_HIGH ? "high" : "low", (int) (key / model.store.n_expert()), (int) (key % model.store.n_expert()));
                }
            }
        }
    }
    return text;
}

static constexpr int    WARM_TRIAL_TOKENS = 32;
static constexpr double WARM_GAIN_LEAST   = 1.2; // times the hits by chance

// takes the profile's settings where no option says otherwise; before anything is sized
static bool apply_profile(hobbit_model & model, const bool * in_use, std::string & err) {
    hobbit_config & config = model.config;
    std::ifstream in(config.profile_path);
    std::string   line;
    if (!std::getline(in, line) || line != profile_head(model, in_use)) {
        return true; // load_profile says it
    }
    static const std::set<std::string> known = { "t1", "t2", "policy", "weights", "low-share", "prefetch" };
    while (std::getline(in, line)) {
        std::istringstream words(line);
        std::string set, name, value;
        if (!(words >> set >> name >> value) || set != "set") {
            continue;
        }
        model.profile_settings.push_back(line);
        std::string why = "a profile may set t1, t2, policy, weights, low-share and prefetch";
        const bool  other = config.given.count(name) > 0 || (config.quality_budget >= 0.0f && name[0] == 't'); // or read_quality's
        const bool  ok    = known.count(name) > 0 && (other || hobbit_config_apply(config, name, value, why));
        if (!ok) {
            err = hobbit_format("%s: '%s': %s", config.profile_path.c_str(), line.c_str(), why.c_str());
            return false;
        }
    }
    if (!hobbit_config_fits(config, err)) {
        err = config.profile_path + ": " + err;
        return false;
    }
    return true;
}

static void trace_past(const hobbit_model & model, const hobbit_activation & past) {
    if (!model.trace) {
        return;
    }
    hobbit_records records;
    records.reset(past.used.size());
    records.n_tokens = past.n_tokens;
    for (size_t key = 0; key < past.used.size(); ++key) {
        records.entries[key] = { past.used[key] > 0 ? 1u : 0u, past.used[key], 0 };
    }
    const std::vector<uint8_t> payload = hobbit_trace_records(-1, records);
    model.trace->event(HOBBIT_TRACE_RECORDS, HOBBIT_TRACE_PAST, 0, 0, 0, 0, payload.data(), payload.size());
}

// a profile's line "past TOKENS KEY:USES ..."; one that means nothing is passed over
static void load_past(hobbit_model & model, const std::string & line) {
    auto past = std::make_shared<hobbit_activation>();
    past->used.resize(model.n_keys());
    std::istringstream in(line.substr(strlen("past ")));
    bool     ok = (bool) (in >> past->n_tokens);
    size_t   key;
    uint32_t used;
    char     colon;
    while (ok && in >> key >> colon >> used) {
        ok = key < past->used.size() && colon == ':';
        if (ok) {
            past->used[key] = used;
        }
    }
    if (ok && in.eof()) {
        model.activations.add(past);
        trace_past(model, *past);
    }
}

// starts the reads of what the profile names, as far as there are slots; says in model.warm what came of it
static void load_profile(hobbit_model & model) {
    const std::string & path = model.config.profile_path;
    std::ifstream in(path);
    std::string   line;
    if (!std::getline(in, line)) {
        model.warm = path + " will be written";
        return;
    }
    if (line != profile_head(model)) {
        model.warm = path + " is of another model or other files, and is left alone";
        model.config.profile_path.clear();
        hobbit_log(model.config, 1, "hobbit: " + model.warm + "\n");
        return;
    }
    int n = 0;
    while (std::getline(in, line)) {
        char name[8];
        int  layer, expert;
        if (line.rfind("past ", 0) == 0) {
            if (model.config.keeps_activations()) {
                load_past(model, line);
            }
            continue;
        }
        if (sscanf(line.c_str(), "%7s %d %d", name, &layer, &expert) != 3 || layer < 0 || layer >= model.store.n_layer() ||
            expert < 0 || expert >= model.store.layers[layer].n_expert) {
            continue;
        }
        const int p = strcmp(name, "high") == 0 ? HOBBIT_HIGH : HOBBIT_LOW;
        n += model.uses(p) && hobbit_warm(model, layer, p, expert) ? 1 : 0;
    }
    model.warm = hobbit_format("%d experts from %s, in the background", n, path.c_str());
    if (!model.profile_settings.empty()) {
        model.warm += hobbit_format("; %zu settings from it, where no option says otherwise", model.profile_settings.size());
    }
    model.warm_trial.n_tokens_left = n > 0 ? WARM_TRIAL_TOKENS : 0;
}

// after the first tokens: is the warm set hit more often than as many experts picked at random would be?
static void judge_warm(hobbit_model & model, int n_tokens) {
    hobbit_warm_trial & trial = model.warm_trial;
    if (trial.n_tokens_left <= 0 || (trial.n_tokens_left -= n_tokens) > 0 || trial.lookups == 0) {
        return;
    }
    size_t n_experts = 0;
    for (const hobbit_layer & layer : model.store.layers) {
        n_experts += layer.n_expert;
    }
    // the share of lookups of which any expert of the warm set would be chosen by chance, as the set was at each of them
    const double hits   = (double) trial.hits / trial.lookups;
    const double chance = trial.resident / trial.lookups / n_experts;
    const bool   helps  = hits > WARM_GAIN_LEAST * chance || chance > 0.9;
    model.warm += hobbit_format("; %s after the first tokens: it was hit by %.0f %% of the lookups, by chance it would be by %.0f %%",
            helps ? "kept" : "dropped", 100.0 * hits, 100.0 * chance);
    if (!helps) {
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            for (int slot = 0; model.uses(p) && slot < (int) model.pools[p].warm.size(); ++slot) {
                if (model.pools[p].warm[slot] && model.pools[p].pool->pins(slot) == 0) {
                    const int64_t key = model.pools[p].pool->key_at(slot);
                    model.trace_event(HOBBIT_TRACE_DROP, 0, (int) (key / model.store.n_expert()), (int) (key % model.store.n_expert()), p);
                    model.pools[p].pool->drop(slot);
                }
            }
        }
    }
    for (hobbit_pool_memory & mem : model.pools) {
        mem.warm.clear();
    }
}

//
// trace
//

// the settings that a replay needs (docs/trace.md)
static std::string trace_head(const hobbit_model & model) {
    const hobbit_config &        config = model.config;
    const hobbit_policy_params & policy = config.policy;

    std::string text = hobbit_format("hobbit-trace %d\n", HOBBIT_TRACE_VERSION);
    text += hobbit_format("arch %s\nn_layer %d\nn_expert %d\nn_expert_used %d\n", model.store.arch.c_str(),
            model.store.n_layer(), model.store.n_expert(), model.n_expert_used);
    for (int i = 0; i < model.store.n_layer(); ++i) {
        const hobbit_layer & layer = model.store.layers[i];
        text += hobbit_format("layer %d %d %d %llu %llu\n", i, layer.block, layer.n_expert,
                (unsigned long long) hobbit_expert_bytes(layer, HOBBIT_LOW), (unsigned long long) hobbit_expert_bytes(layer, HOBBIT_HIGH));
    }
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        text += hobbit_format("%s %d %zu\n", p == HOBBIT_LOW ? "slots_low" : "slots_high",
                model.uses(p) ? model.pools[p].pool->n_slots() : 0, model.uses(p) ? model.slot_bytes(p) : 0);
    }
    text += hobbit_format("rule %s\nt1 %.9g\nt2 %.9g\nrenormalise %d\ndeterministic %d\n", hobbit_rule_name(config.thresholds.rule),
            config.thresholds.t1, config.thresholds.t2, config.renormalise, config.deterministic);
    text += hobbit_format("policy %s\nweights %.9g %.9g %.9g %.9g\nlow_cost %.9g\nseed %u\nlow_share %.9g\n", hobbit_policy_name(policy.policy),
            policy.w_lru, policy.w_lfu, policy.w_lhu, policy.w_fld, policy.low_cost, policy.seed, config.low_share);
    text += hobbit_format("prefetch %d\nadaptive %d\n", model.predicts() ? config.prefetch_depth : 0, config.prefetch_adaptive);
    text += hobbit_format("prefill_precision %s\nunit %s\n", hobbit_prefill_name(config.prefill), hobbit_unit_name(config.unit));
    return text + hobbit_format("rows_evict_max %lld\nrows_predict_max %lld\n\n", (long long) HOBBIT_ROWS_EVICT_MAX, (long long) HOBBIT_ROWS_PREDICT_MAX);
}

static bool open_trace(hobbit_model & model, const std::string & path, std::string & err) {
    auto trace = std::make_unique<hobbit_trace>();
    if (!trace->open(path, trace_head(model), err)) {
        return false;
    }
    // what is here already, in the order in which it was touched
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        std::vector<int> slots = model.uses(p) ? model.pools[p].pool->by_last_touch() : std::vector<int>();
        for (size_t i = slots.size(); i-- > 0;) {
            const int64_t key = model.pools[p].pool->key_at(slots[i]);
            trace->event(HOBBIT_TRACE_RESIDENT, 0, (int) (key / model.store.n_expert()), (int) (key % model.store.n_expert()), p);
        }
    }
    model.loader->set_observer([to = trace.get()](const hobbit_read & read, uint64_t done, uint8_t state) {
        to->event(HOBBIT_TRACE_DONE, read.weight->role | state << 8, read.weight->layer, read.expert, read.precision, done);
    });
    model.trace = std::move(trace);
    return true;
}

static bool finish(hobbit_model & model, const gguf_context * meta, int32_t n_expert_used, std::string & err) {
    hobbit_config & config = model.config;
    if (!model.store.finish(err)) {
        return false;
    }

    if (config.low_path.empty()) {
        config.low_path = model.pair_low;
    }
    const std::string & low_path = config.low_path;
    if (!config.rule_set) {
        config.thresholds.rule = low_path.empty() ? HOBBIT_RULE_HIGH : HOBBIT_RULE_HOBBIT;
    }
    const hobbit_rule rule = config.thresholds.rule;
    if (rule == HOBBIT_RULE_LOW && low_path.empty()) {
        err = "--hobbit-precision low needs --hobbit-low FILE";
        return false;
    }
    if (!low_path.empty() && !model.store.open_low(low_path, meta, err)) {
        return false;
    }
    const bool in_use[HOBBIT_N_PRECISIONS] = { !low_path.empty() && rule != HOBBIT_RULE_HIGH, rule != HOBBIT_RULE_LOW };
    model.n_expert_used = n_expert_used;

    model.devices.finish(model, in_use, model.no_alloc);
    if (model.no_alloc) {
        return true;
    }

    if (config.repack == HOBBIT_REPACK_ON && !model.repack) {
        err = "--hobbit-repack on does not go with --no-repack, or this CPU backend cannot do it";
        return false;
    }
    if (!config.profile_path.empty() && !(apply_profile(model, in_use, err) && read_quality(model, in_use, err))) {
        return false;
    }

    model.activations.init(model.store.n_layer(), model.store.n_expert());
    choose_io(model, in_use);
    start_prediction(model);

    hobbit_plan plan;
    if (!plan_cache(model, in_use, plan, err)) {
        return false;
    }
    if (in_use[HOBBIT_LOW] && in_use[HOBBIT_HIGH]) {
        config.policy.low_cost = (float) model.slot_bytes(HOBBIT_LOW) / model.slot_bytes(HOBBIT_HIGH);
    }
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (!in_use[p]) {
            continue;
        }
        hobbit_pool_memory & mem = model.pools[p];
        if (!mem.bank.alloc(model.slot_bytes(p), plan.n_slots[p], err)) {
            return false;
        }
        mem.pool  = std::make_unique<hobbit_pool>(model.store.n_layer(), model.store.n_expert(), plan.n_slots[p], config.policy);
        mem.state = std::vector<std::atomic<uint8_t>>((size_t) plan.n_slots[p] * HOBBIT_N_ROLES);
    }
    model.totals.reset(model.n_keys());
    model.n_ring = plan.n_ring;
    if (!model.ring.alloc(model.ring_bytes(), plan.n_ring, err)) {
        return false;
    }
    for (auto & managed : model.managed) {
        const hobbit_source & low = managed->weight->source[HOBBIT_LOW];
        if (in_use[HOBBIT_LOW]) {
            managed->experts.types[HOBBIT_LOW] = low.type;
        }
        for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
            hobbit_source &   src = managed->weight->source[p];
            // what goes on to a device keeps the file's layout
            if (in_use[p] && model.repack && config.repack != HOBBIT_REPACK_OFF && !model.devices.bank_of(managed->weight->layer)) {
                const ggml_tensor t = managed->weight->expert_tensor(p);
                src.repacked = model.repack(&t, nullptr, nullptr);
            }
            managed->experts.repacked[p] = src.repacked;
        }
    }
    model.loader = std::make_unique<hobbit_loader>(config.io_threads, config.check, config.io == HOBBIT_IO_URING);
    if (config.io == HOBBIT_IO_URING && !model.loader->is_uring()) {
        model.io += "; this kernel has no io_uring";
    }
    model.loader->set_repack(model.repack);
    model.stream.init(model.loader.get(), &model.ring, model.n_ring);

    if (!config.trace_path.empty() && !open_trace(model, config.trace_path, err)) {
        return false;
    }
    if (!config.profile_path.empty()) {
        load_profile(model);
    }
    hobbit_log(config, 0, describe(model));
    return true;
}

bool hobbit_model_finish(hobbit_model * model, const gguf_context * meta, int32_t n_expert_used, char * err, size_t err_size) {
    std::string why;
    return finish(*model, meta, n_expert_used, why) || hobbit_fail(err, err_size, why);
}

//
// reports
//

static std::mutex                 contexts_mutex; // guards the list, not the contexts
static std::set<hobbit_context *> contexts;

// brings model.labels up to date; step_mutex must be held
static void refresh_labels(hobbit_model & model) {
    std::lock_guard<std::mutex> lock(model.labels_mutex);
    hobbit_stats_labels & labels = model.labels;
    labels.rule        = hobbit_rule_name(model.config.thresholds.rule);
    labels.policy      = model.custom_policy ? "custom" : hobbit_policy_name(model.config.policy.policy);
    labels.cache_bytes = model.bytes();
    labels.warm        = model.warm;
    labels.prefetch    = hobbit_format("depth %d, %s", model.governor.depth(),
            model.no_prediction.empty() ? model.governor.reason().c_str() : model.no_prediction.c_str());
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        labels.n_slots[p] = model.uses(p) ? model.pools[p].pool->n_slots() : 0;
    }
}

// digits[n_expert]: what is resident of a layer, as hobbit_model::resident says of one expert; a step may be running
static void resident_digits(const hobbit_model & model, int layer, char * digits) {
    const int n_expert = model.store.layers[layer].n_expert;
    const hobbit_device_bank * bank = model.devices.bank_of(layer);
    memset(digits, '0', n_expert);
    for (int p = HOBBIT_LOW; p <= HOBBIT_HIGH; ++p) {
        if (!model.uses(p)) {
            continue;
        }
        for (const hobbit_pool * pool : { model.pools[p].pool.get(), bank ? bank->part[p].pool.get() : nullptr }) {
            for (int expert = 0; pool && expert < n_expert; ++expert) {
                digits[expert] = pool->find(layer, expert) >= 0 ? (char) ('0' + HOBBIT_PRECISION_LOW + p) : digits[expert];
            }
        }
    }
}

static int n_resident(const hobbit_model & model, int precision) {
    return model.uses(precision) ? model.pools[precision].pool->n_used() : 0;
}

// what the caller's copy of model.labels lacks: it changes all the time, and is only looked up when somebody asks
static void add_residency(const hobbit_model & model, hobbit_stats_labels & labels) {
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        labels.n_used[p] = n_resident(model, p);
    }
    for (int layer = 0; layer < model.store.n_layer(); ++layer) {
        std::string digits(model.store.layers[layer].n_expert, '0');
        resident_digits(model, layer, &digits[0]);
        labels.blocks.push_back(model.store.layers[layer].block);
        labels.resident.push_back(digits);
    }
}

// a copy of both; waits for no step
static std::pair<hobbit_stats, hobbit_stats_labels> snapshot(hobbit_context & ctx) {
    std::pair<hobbit_stats, hobbit_stats_labels> now;
    {
        std::lock_guard<std::mutex> lock(ctx.stats_mutex);
        now.first = ctx.stats;
    }
    {
        std::lock_guard<std::mutex> lock(ctx.model->labels_mutex);
        now.second = ctx.model->labels;
    }
    add_residency(*ctx.model, now.second);
    return now;
}

// written beside and renamed, so that a reader never sees half a file
static void write_text(const std::string & path, const char * what, const std::string & text) {
    const std::string tmp = path + ".tmp";

    FILE * file = fopen(tmp.c_str(), "w");
    bool   ok   = file && fwrite(text.data(), 1, text.size(), file) == text.size();
    ok = file && fclose(file) == 0 && ok;
    if (!ok || rename(tmp.c_str(), path.c_str()) != 0) {
        fprintf(stderr, "hobbit: %s: %s cannot be written: %s\n", path.c_str(), what, strerror(errno));
        remove(tmp.c_str());
    }
}

static void trace_stats(const hobbit_context & ctx, const hobbit_stats & stats, const hobbit_stats_labels & labels) {
    const std::string text = hobbit_stats_to_json(stats, labels);
    ctx.model->trace->event(HOBBIT_TRACE_STATS, ctx.trace_id, 0, 0, 0, 0, text.data(), text.size());
}

// idle: the model's step_mutex is held, so that the pools may be read
static void report(const hobbit_context & ctx, const hobbit_stats & stats, const hobbit_stats_labels & labels, bool idle) {
    if (ctx.model->trace && idle) {
        trace_stats(ctx, stats, labels);
        ctx.model->trace->flush();
    } else if (ctx.model->trace) {
        ctx.model->trace->try_flush();
    }
    if (stats.steps == 0) {
        return;
    }
    if (ctx.model->config.verbose) {
        fputs(hobbit_stats_to_table(stats, labels).c_str(), stderr);
    }
    const hobbit_config & config = ctx.model->config;
    if (!config.stats_path.empty()) {
        write_text(config.stats_path, "statistics", hobbit_stats_to_json(stats, labels));
    }
    if (!config.profile_path.empty() && idle) {
        write_text(config.profile_path, "the profile", profile_text(*ctx.model));
    }
}

// runs when the program ends, while its threads may hold any of these locks for good: what is busy is left out
void hobbit_report_all(void) {
    if (!contexts_mutex.try_lock()) {
        return;
    }
    for (hobbit_context * ctx : contexts) {
        // a running step holds its lock to the end; the numbers of the steps before it do
        const bool idle = ctx->model->step_mutex.try_lock();
        if (ctx->model->labels_mutex.try_lock()) {
            hobbit_stats_labels labels = ctx->model->labels;
            ctx->model->labels_mutex.unlock();
            add_residency(*ctx->model, labels);
            if (ctx->stats_mutex.try_lock()) {
                report(*ctx, ctx->stats, labels, idle);
                ctx->stats_mutex.unlock();
            }
        }
        if (idle) {
            ctx->model->step_mutex.unlock();
        }
    }
    contexts.clear();
    contexts_mutex.unlock();
}

// A signal handler may neither format nor lock, so that it only passes the number on to a thread that may, and ends the process then
static int signal_pipe[2] = { -1, -1 };

static void pass_signal_on(int signal_number) {
    const char number = (char) signal_number;
    if (write(signal_pipe[1], &number, 1) != 1) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    }
}

static void wait_for_signal() {
    char number;
    while (read(signal_pipe[0], &number, 1) != 1) {
        if (errno != EINTR) {
            return;
        }
    }
    hobbit_report_all();
    signal(number, SIG_DFL);
    kill(getpid(), number);
}

// a program that ends by exit() or by a signal it does not handle itself still gets its table
static void report_at_end() {
    static std::once_flag once;
    std::call_once(once, [] {
        atexit(hobbit_report_all);
        if (pipe(signal_pipe) != 0) {
            return;
        }
        std::thread(wait_for_signal).detach();
        for (int signal_number : { SIGINT, SIGTERM }) {
            struct sigaction old;
            if (sigaction(signal_number, nullptr, &old) == 0 && old.sa_handler == SIG_DFL) {
                signal(signal_number, pass_signal_on);
            }
        }
    });
}

//
// context
//

hobbit_context * hobbit_context_new(hobbit_model * model) {
    auto * ctx = new hobbit_context;
    ctx->model = model;
    ctx->routes = std::vector<hobbit_route>(model->store.n_layer());
    for (int i = 0; i < model->store.n_layer(); ++i) {
        ctx->routes[i].ctx   = ctx;
        ctx->routes[i].layer = i;
    }
    ctx->stats.layers.resize(model->store.n_layer());
    {
        std::lock_guard<std::mutex> lock(model->step_mutex);
        refresh_labels(*model);
        ctx->trace_id = model->n_contexts++;
    }

    if (!model->no_alloc && (model->config.verbose || !model->config.stats_path.empty() || !model->config.profile_path.empty() ||
                             !model->config.trace_path.empty())) {
        std::lock_guard<std::mutex> lock(contexts_mutex);
        contexts.insert(ctx);
        if (model->config.verbose) {
            report_at_end();
        }
    }
    return ctx;
}

void hobbit_context_free(hobbit_context * ctx) {
    if (!ctx) {
        return;
    }
    bool listed;
    {
        std::lock_guard<std::mutex> lock(contexts_mutex);
        listed = contexts.erase(ctx) > 0;
    }
    if (listed) {
        const auto [stats, labels] = snapshot(*ctx);
        std::lock_guard<std::mutex> lock(ctx->model->step_mutex);
        for (const auto & [seq_id, records] : ctx->records) {
            if (ctx->model->config.keeps_activations()) {
                ctx->model->activations.add(records); // for the profile
            }
        }
        report(*ctx, stats, labels, true);
    }
    delete ctx;
}

static void reset_records(hobbit_context & ctx, hobbit_records & records, int32_t seq_id) {
    if (ctx.model->config.keeps_activations()) {
        ctx.model->activations.add(records);
    }
    records.reset(ctx.model->n_keys(), ctx.model->config.policy.policy == HOBBIT_POLICY_GATE_MASS);
    if (ctx.model->trace) {
        ctx.model->trace->event(HOBBIT_TRACE_SEQUENCE, ctx.trace_id, 0, 0, 0, 0, &seq_id, sizeof(seq_id));
    }
}

void hobbit_context_add_backend(hobbit_context * ctx, ggml_backend * backend) {
    ctx->backends.push_back(backend);

    hobbit_model &     model = *ctx->model;
    ggml_backend_dev_t dev   = ggml_backend_get_device(backend);
    if (model.config.miss != HOBBIT_MISS_LOAD && !model.no_alloc && !model.devices.banks.empty() && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        std::lock_guard<std::mutex> lock(model.step_mutex);
        model.cpu = model.cpu ? std::move(model.cpu) : std::make_unique<hobbit_cpu_worker>(dev);
        ctx->cooperates = true;
    }
}

uint64_t hobbit_graph_epoch(const hobbit_context * ctx) {
    return ctx ? ctx->graph_epoch : 0;
}

void hobbit_sequence_begin(hobbit_context * ctx, int32_t seq_id) {
    std::lock_guard<std::mutex> lock(ctx->model->step_mutex);
    reset_records(*ctx, ctx->records[seq_id], seq_id);
    std::lock_guard<std::mutex> stats_lock(ctx->stats_mutex);
    ctx->sequence_stats[seq_id] = {};
}

// between steps: what is resident stays as far as it fits, what was used last first
static bool resize(hobbit_model & model, const hobbit_config & config, std::string & err) {
    for (hobbit_pool_memory & mem : model.pools) {
        mem.warm.clear(); // slots move
    }
    const hobbit_config before        = model.config;
    const std::string   sizing_before = model.sizing;
    model.config.cache_auto  = config.cache_auto;
    model.config.cache_bytes = config.cache_bytes;

    const bool  in_use[HOBBIT_N_PRECISIONS] = { model.uses(HOBBIT_LOW), model.uses(HOBBIT_HIGH) };
    hobbit_plan plan;
    if (!plan_cache(model, in_use, plan, err)) {
        model.config = before;
        model.sizing = sizing_before;
        return false;
    }
    model.loader->drain();
    if (model.trace) {
        const int32_t payload[] = { plan.n_slots[HOBBIT_LOW], plan.n_slots[HOBBIT_HIGH] };
        model.trace->event(HOBBIT_TRACE_RESIZE, 0, 0, 0, 0, 0, payload, sizeof(payload));
    }

    // memory that grows comes first, so that a refusal can be undone
    hobbit_bank * banks [] = { &model.pools[HOBBIT_LOW].bank, &model.pools[HOBBIT_HIGH].bank, &model.ring };
    const int     before_n[] = { in_use[HOBBIT_LOW]  ? model.pools[HOBBIT_LOW] .pool->n_slots() : 0,
                                 in_use[HOBBIT_HIGH] ? model.pools[HOBBIT_HIGH].pool->n_slots() : 0, model.n_ring };
    const int     after_n [] = { plan.n_slots[HOBBIT_LOW], plan.n_slots[HOBBIT_HIGH], plan.n_ring };
    for (int i = 0; i < 3; ++i) {
        if (after_n[i] <= before_n[i] || banks[i]->resize(after_n[i], err)) {
            continue;
        }
        std::string ignored; // giving back what was just taken does not fail
        for (int k = 0; k < i; ++k) {
            if (after_n[k] > before_n[k]) {
                banks[k]->resize(before_n[k], ignored);
            }
        }
        model.config = before;
        model.sizing = sizing_before;
        return false;
    }

    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (!in_use[p]) {
            continue;
        }
        hobbit_pool_memory & mem = model.pools[p];
        for (const auto & [from, to] : mem.pool->resize(after_n[p])) {
            memcpy(mem.bank.slot(to), mem.bank.slot(from), model.slot_bytes(p));
            for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
                mem.piece(to, role).store(mem.piece(from, role).load());
            }
        }
        std::vector<std::atomic<uint8_t>> state((size_t) after_n[p] * HOBBIT_N_ROLES);
        for (size_t i = 0; i < std::min(state.size(), mem.state.size()); ++i) {
            state[i].store(mem.state[i].load());
        }
        mem.state.swap(state);
    }
    model.n_ring = plan.n_ring;
    model.loader->set_repack(model.repack);
    model.stream.init(model.loader.get(), &model.ring, model.n_ring);
    for (int i = 0; i < 3; ++i) {
        if (after_n[i] < before_n[i] && !banks[i]->resize(after_n[i], err)) {
            return false; // the memory stays larger than it need be; nothing else is wrong
        }
    }
    return true;
}

void hobbit_context_reserved(hobbit_context * ctx, size_t bytes, int32_t n_tokens) {
    std::lock_guard<std::mutex> lock(ctx->model->step_mutex);
    ctx->compute_bytes     = bytes;
    ctx->n_tokens_reserved = n_tokens;
}

// A batch larger than any before touches compute memory that was only reserved so far. A cache of automatic size gives way to it:
// a process that outgrows its cgroup is killed
static void make_room(hobbit_context & ctx, int32_t n_tokens) {
    hobbit_model & model = *ctx.model;
    const int32_t  more  = n_tokens - ctx.n_tokens_seen;
    if (more <= 0) {
        return;
    }
    ctx.n_tokens_seen = n_tokens;
    if (!model.config.cache_auto || ctx.n_tokens_reserved == 0) {
        return;
    }
    // beside the graph's buffers MUL_MAT_ID converts its input, to 2 bytes a value at most
    uint64_t convert = 0;
    for (const auto & weight : model.store.weights) {
        convert = std::max<uint64_t>(convert, 2 * weight->ne[0] * (weight->role == HOBBIT_ROLE_DOWN ? model.n_expert_used : 1));
    }
    const uint64_t need = more * (ctx.compute_bytes / ctx.n_tokens_reserved + convert);

    const hobbit_memory mem  = hobbit_memory_now();
    const uint64_t      keep = hobbit_memory_margin(mem.limit) / 2;
    const uint64_t      soon = mem.used + model.bytes() - std::min(model.bytes(), model.bytes_in_use()) + need + keep;
    if (soon <= mem.limit) {
        return;
    }
    const std::string sizing = model.sizing;
    hobbit_config config = model.config;
    config.cache_auto  = false;
    config.cache_bytes = model.bytes() - std::min<uint64_t>(model.bytes(), soon - mem.limit);

    std::string err;
    const bool  ok = resize(model, config, err);
    model.config.cache_auto = true;
    model.sizing = ok ? hobbit_format("%s, %.0f MiB given up for %d tokens at once", sizing.c_str(), mib(soon - mem.limit), n_tokens) : sizing;
    hobbit_log(model.config, ok ? 0 : 1, ok ?
        hobbit_format("hobbit: the cache goes down to %.1f MiB: computing %d tokens at once takes %.0f MiB\n", mib(model.bytes()), n_tokens, mib(need)) :
        hobbit_format("hobbit: computing %d tokens at once takes %.0f MiB, for which the cache cannot make room (%s); a smaller --ubatch-size takes less\n",
            n_tokens, mib(need), err.c_str()));
}

void hobbit_step_begin(hobbit_context * ctx, const hobbit_ubatch * ubatch) {
    ctx->model->step_mutex.lock();
    make_room(*ctx, ubatch->n_tokens);
    if (ctx->stats_were_reset.exchange(false, std::memory_order_relaxed)) {
        ctx->model->trace_event(HOBBIT_TRACE_STATS_RESET, ctx->trace_id);
    }

    ctx->token_seq.assign(ubatch->seq_id, ubatch->seq_id + ubatch->n_tokens);
    ctx->output_seq.clear();
    ctx->step_records.clear();
    ctx->step_seqs.clear();
    for (int32_t i = 0; i < ubatch->n_tokens; ++i) {
        auto [it, is_new] = ctx->records.try_emplace(ubatch->seq_id[i]);
        hobbit_records & records = it->second;
        if (is_new || (ubatch->pos && ubatch->pos[i] == 0)) {
            reset_records(*ctx, records, ubatch->seq_id[i]);
        }
        if (std::find(ctx->step_records.begin(), ctx->step_records.end(), &records) == ctx->step_records.end()) {
            ctx->step_records.push_back(&records);
            records.begin_pass();
            if (ctx->model->config.keeps_activations()) {
                records.resembles(ctx->model->activations.nearest(records));
            }
            ctx->step_seqs.push_back(ubatch->seq_id[i]);
        }
        records.n_tokens++;
        if (!ubatch->output || ubatch->output[i]) {
            ctx->output_seq.push_back(ubatch->seq_id[i]);
        }
    }
    ctx->decode     = (size_t) ubatch->n_tokens <= ctx->step_records.size();
    ctx->model->totals.begin_pass();
    ctx->model->totals.n_tokens += ubatch->n_tokens;
    if (ctx->model->config.policy.policy == HOBBIT_POLICY_LFU_MODEL) {
        ctx->step_records = { &ctx->model->totals };
    }
    if (ctx->model->trace) {
        // n_tokens, n_outputs, then the sequence of each token and of each row that the last layer sees
        std::vector<int32_t> payload = { ubatch->n_tokens, (int32_t) ctx->output_seq.size() };
        payload.insert(payload.end(), ctx->token_seq.begin(),  ctx->token_seq.end());
        payload.insert(payload.end(), ctx->output_seq.begin(), ctx->output_seq.end());
        ctx->model->trace->event(HOBBIT_TRACE_STEP, ctx->trace_id, 0, 0, 0, 0, payload.data(), payload.size() * sizeof(int32_t));
    }
    ctx->n_threads  = ubatch->n_threads;
    ctx->t_begin_us = ggml_time_us();
    ctx->demand_seconds = ctx->model->loader->demand_seconds();
    ctx->busy_seconds   = ctx->model->loader->busy_seconds();
    ctx->model->loader->take_error(); // of a prefetch that nobody needed
    ctx->n_prefetch_used = ctx->n_prefetch_wasted = 0;
    ctx->read_bytes = ctx->wasted_bytes = 0;
    ctx->failed.store(false, std::memory_order_relaxed);
    hobbit_expect_first(*ctx, ubatch->n_tokens);
}

bool hobbit_step_end(hobbit_context * ctx, char * err, size_t err_size) {
    hobbit_model & model = *ctx->model;
    if (model.cpu) {
        model.cpu->wait(); // runs still only if the step was stopped half-way
    }
    const uint64_t us    = ggml_time_us() - ctx->t_begin_us;
    const bool     ok    = !ctx->failed.load(std::memory_order_relaxed);

    model.trace_event(HOBBIT_TRACE_END, ctx->trace_id, 0, 0, ok);
    model.stream.reset(); // empty, unless the step was stopped half-way
    if (!ok) {
        // what failed to load must not be found by the next step
        model.loader->drain();
        for (const auto & [precision, slot] : ctx->pinned) {
            for (int role = 0; role < HOBBIT_N_ROLES; ++role) {
                if (model.pools[precision].piece(slot, role).load() == HOBBIT_PIECE_FAILED) {
                    const int64_t key = model.pools[precision].pool->key_at(slot);
                    model.trace_event(HOBBIT_TRACE_FAIL, ctx->trace_id, (int) (key / model.store.n_expert()), (int) (key % model.store.n_expert()), precision);
                    model.pools[precision].pool->drop(slot);
                    break;
                }
            }
        }
        const auto dropped = [&](const std::pair<int, int> & pin) { return model.pools[pin.first].pool->key_at(pin.second) < 0; };
        ctx->pinned.erase(std::remove_if(ctx->pinned.begin(), ctx->pinned.end(), dropped), ctx->pinned.end());
        hobbit_fail(err, err_size, model.loader->take_error());
    }
    hobbit_unpin_all(*ctx);
    hobbit_device_step_end(*ctx);
    hobbit_settle_predicted(*ctx, model.store.n_layer(), nullptr);
    judge_warm(model, (int) ctx->token_seq.size());
    hobbit_cooperate_judge(*ctx);
    if (ctx->decode && us > 0) {
        const double demand_us = 1e6 * (model.loader->demand_seconds() - ctx->demand_seconds);
        model.governor.step({ ctx->n_prefetch_used, ctx->n_prefetch_wasted, (float) std::min(1.0, demand_us / us),
                ctx->read_bytes > 0 ? (float) ctx->wasted_bytes / ctx->read_bytes : 0.0f, (float) us, (float) (ctx->read_bytes - ctx->wasted_bytes) });
    }

    {
        std::lock_guard<std::mutex> lock(ctx->stats_mutex);
        hobbit_flush_stall(*ctx);
        ctx->stats.steps++;
        ctx->stats.failed_steps += ok ? 0 : 1;
        (ctx->decode ? ctx->stats.decode_tokens : ctx->stats.prompt_tokens) += ctx->token_seq.size();
        (ctx->decode ? ctx->stats.decode_us     : ctx->stats.prompt_us)     += us;
        (ctx->decode ? ctx->stats.decode_disk_us : ctx->stats.prompt_disk_us) += (uint64_t) (1e6 * (model.loader->busy_seconds() - ctx->busy_seconds));
    }
    refresh_labels(model);
    model.step_mutex.unlock();
    return ok;
}

bool hobbit_resize(hobbit_context * ctx, const char * cache, char * err, size_t err_size) {
    static std::mutex    mutex;
    static const int32_t handle = hobbit_config_new(); // one for all, since handles are never freed
    hobbit_config config;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!hobbit_config_set(handle, "cache", cache, err, err_size) || !hobbit_config_get(handle, config)) {
            return false;
        }
    }
    std::lock_guard<std::mutex> lock(ctx->model->step_mutex);
    std::string why;
    const bool  ok = resize(*ctx->model, config, why);
    refresh_labels(*ctx->model);
    return ok || hobbit_fail(err, err_size, why);
}

static int choose_victim(const hobbit_model & model, int precision, hobbit_choose choose, void * user,
        int layer, const hobbit_records * const * records, int n_records) {
    const hobbit_pool & pool = *model.pools[precision].pool;

    thread_local std::vector<int>      slots;
    thread_local std::vector<int32_t>  layers, experts;
    thread_local std::vector<uint64_t> stamps;
    thread_local std::vector<uint32_t> last, used, high;
    slots.clear();
    layers.clear();
    experts.clear();
    stamps.clear();
    last.clear();
    used.clear();
    high.clear();

    const int n_expert = model.store.n_expert();
    for (int slot = 0; slot < pool.n_slots(); ++slot) {
        const int64_t key = pool.key_at(slot);
        if (key < 0 || pool.pins(slot) > 0) {
            continue;
        }
        hobbit_records::entry entry;
        for (int i = 0; i < n_records; ++i) {
            const hobbit_records::entry & e = records[i]->entries[key];
            entry.last = std::max(entry.last, e.last);
            entry.used = std::max(entry.used, e.used);
            entry.high = std::max(entry.high, e.high);
        }
        slots  .push_back(slot);
        layers .push_back((int32_t) (key / n_expert));
        experts.push_back((int32_t) (key % n_expert));
        stamps .push_back(pool.stamp(slot));
        last   .push_back(entry.last);
        used   .push_back(entry.used);
        high   .push_back(entry.high);
    }
    if (slots.empty()) {
        return -1;
    }
    hobbit_candidates candidates = {};
    candidates.n         = (int32_t) slots.size();
    candidates.layer     = layer;
    candidates.precision = HOBBIT_PRECISION_LOW + precision;
    for (int i = 0; i < n_records; ++i) {
        candidates.n_tokens = std::max(candidates.n_tokens, records[i]->n_tokens);
    }
    candidates.layers  = layers .data();
    candidates.experts = experts.data();
    candidates.stamps  = stamps .data();
    candidates.last    = last   .data();
    candidates.used    = used   .data();
    candidates.high    = high   .data();

    const int32_t i = choose(user, &candidates);
    return i >= 0 && i < candidates.n ? slots[i] : -1;
}

void hobbit_set_policy(hobbit_context * ctx, hobbit_choose choose, void * user) {
    hobbit_model & model = *ctx->model;
    std::lock_guard<std::mutex> lock(model.step_mutex);

    model.custom_policy = choose != nullptr;
    for (int p = 0; p < HOBBIT_N_PRECISIONS; ++p) {
        if (!model.uses(p)) {
            continue;
        }
        model.pools[p].pool->chooser = nullptr;
        if (choose) {
            model.pools[p].pool->chooser = [&model, p, choose, user](int layer, const hobbit_records * const * records, int n_records) {
                return choose_victim(model, p, choose, user, layer, records, n_records);
            };
        }
    }
    refresh_labels(model);
}

size_t hobbit_resident(hobbit_context * ctx, int8_t * out, size_t n) {
    hobbit_model & model = *ctx->model;
    std::lock_guard<std::mutex> lock(model.step_mutex);

    for (size_t key = 0; key < std::min(n, model.n_keys()); ++key) {
        out[key] = (int8_t) model.resident((int) (key / model.store.n_expert()), (int) (key % model.store.n_expert()));
    }
    return model.n_keys();
}

//
// statistics
//

static size_t copy_text(const std::string & text, char * buf, size_t buf_size) {
    if (buf && buf_size > 0) {
        snprintf(buf, buf_size, "%s", text.c_str());
    }
    return text.size();
}

void hobbit_stats_reset(hobbit_context * ctx) {
    ctx->stats_were_reset.store(true, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(ctx->stats_mutex);
    const size_t n_layer = ctx->stats.layers.size();
    ctx->stats = hobbit_stats();
    ctx->stats.layers.resize(n_layer);
}

size_t hobbit_stats_json(hobbit_context * ctx, char * buf, size_t buf_size) {
    const auto [stats, labels] = snapshot(*ctx);
    return copy_text(hobbit_stats_to_json(stats, labels), buf, buf_size);
}

size_t hobbit_placement_json(hobbit_context * ctx, char * buf, size_t buf_size) {
    const hobbit_model &  model  = *ctx->model;
    const hobbit_config & config = model.config;
    std::lock_guard<std::mutex> lock(ctx->model->step_mutex);

    std::string text = "{";
    text += hobbit_format("\"arch\": %s, \"n_layer\": %d, \"n_expert\": %d, \"n_expert_used\": %d, ",
            hobbit_quoted(model.store.arch).c_str(), model.store.n_layer(), model.store.n_expert(), model.n_expert_used);
    text += hobbit_format("\"precision\": \"%s\", \"t1\": %g, \"t2\": %g, \"renormalise\": %s, \"deterministic\": %s, \"policy\": \"%s\", ",
            hobbit_rule_name(config.thresholds.rule), config.thresholds.t1, config.thresholds.t2, config.renormalise ? "true" : "false",
            config.deterministic ? "true" : "false", model.custom_policy ? "custom" : hobbit_policy_name(config.policy.policy));
    text += hobbit_format("\"cache_bytes\": %zu, \"sizing\": %s, \"ring_places\": %d, \"ring_place_bytes\": %zu, \"io_threads\": %d, \"io\": %s, ",
            model.bytes(), hobbit_quoted(model.sizing).c_str(), model.n_ring, model.ring_bytes(), config.io_threads, hobbit_quoted(model.io).c_str());
    text += hobbit_format("\"prefetch\": %s, \"miss\": \"%s\", \"devices\": %s, \"pools\": [", hobbit_quoted(model.labels.prefetch).c_str(),
            hobbit_miss_name(config.miss), model.devices.json().c_str());
    const char * sep = "";
    for (int p = HOBBIT_HIGH; p >= HOBBIT_LOW; --p) {
        if (model.uses(p)) {
            const hobbit_source & src = model.store.weights[0]->source[p];
            text += hobbit_format("%s{\"precision\": \"%s\", \"file\": %s, \"type\": \"%s\", \"slots\": %d, \"slot_bytes\": %zu}", sep,
                    p == HOBBIT_HIGH ? "high" : "low", hobbit_quoted(src.file->path).c_str(), ggml_type_name(src.type), model.pools[p].pool->n_slots(), model.slot_bytes(p));
            sep = ", ";
        }
    }
    return copy_text(text + "]}", buf, buf_size);
}

size_t hobbit_stats_table(hobbit_context * ctx, char * buf, size_t buf_size) {
    const auto [stats, labels] = snapshot(*ctx);
    return copy_text(hobbit_stats_to_table(stats, labels), buf, buf_size);
}

size_t hobbit_stats_metrics(hobbit_context * ctx, char * buf, size_t buf_size) {
    const auto [stats, labels] = snapshot(*ctx);
    return copy_text(hobbit_stats_to_metrics(stats, labels), buf, buf_size);
}

size_t hobbit_sequence_json(hobbit_context * ctx, int32_t seq_id, char * buf, size_t buf_size) {
    std::lock_guard<std::mutex> lock(ctx->stats_mutex);
    return copy_text(hobbit_sequence_to_json(ctx->sequence_stats[seq_id]), buf, buf_size);
}

const char * hobbit_counter_name(int i) {
    return hobbit_counter_at(i);
}

void hobbit_stats_read(hobbit_context * ctx, hobbit_stats_head * head, uint64_t * counters, char * resident) {
    const hobbit_model & model = *ctx->model;
    {
        std::lock_guard<std::mutex> lock(ctx->stats_mutex);
        const hobbit_stats & s = ctx->stats;
        head->prompt_tokens = s.prompt_tokens;
        head->prompt_us     = s.prompt_us;
        head->decode_tokens = s.decode_tokens;
        head->decode_us     = s.decode_us;
        head->steps         = s.steps;
        head->failed_steps  = s.failed_steps;
        head->prompt_stall_us = s.prompt_stall_us;
        head->decode_stall_us = s.decode_stall_us;
        head->prompt_disk_us  = s.prompt_disk_us;
        head->decode_disk_us  = s.decode_disk_us;
        head->expected_wasted_bytes = s.expected_wasted_bytes;
        const hobbit_counters total = s.total();
        head->lookups    = total.lookups;
        head->hits       = total.hits;
        head->read_bytes = total.read_bytes_high + total.read_bytes_low + total.prefetch_bytes;
        head->stall_us   = total.stall_us;
        if (counters) {
            for (const hobbit_counters & layer : s.layers) {
                counters = hobbit_counters_copy(layer, counters);
            }
            hobbit_counters_copy(total, counters);
        }
    }
    {
        std::lock_guard<std::mutex> lock(ctx->model->labels_mutex);
        const hobbit_stats_labels & l = model.labels;
        head->cache_bytes = l.cache_bytes;
        head->slots_high  = l.n_slots[HOBBIT_HIGH];
        head->slots_low   = l.n_slots[HOBBIT_LOW];
        snprintf(head->prefetch,   sizeof(head->prefetch),   "%s", l.prefetch.c_str());
        snprintf(head->warm_start, sizeof(head->warm_start), "%s", l.warm.c_str());
    }
    head->resident_high = n_resident(model, HOBBIT_HIGH);
    head->resident_low  = n_resident(model, HOBBIT_LOW);
    if (resident) {
        // layers may have fewer experts than the largest
        memset(resident, '0', model.n_keys());
        for (int layer = 0; layer < model.store.n_layer(); ++layer) {
            resident_digits(model, layer, resident + (size_t) layer * model.store.n_expert());
        }
    }
}

//
// trace
//

bool hobbit_trace_start(hobbit_context * ctx, const char * path, char * err, size_t err_size) {
    hobbit_model & model = *ctx->model;
    const auto [stats, labels] = snapshot(*ctx);
    std::lock_guard<std::mutex> lock(model.step_mutex);
    if (model.trace) {
        return hobbit_fail(err, err_size, hobbit_format("%s: a trace of this model is being written already", path));
    }
    std::string why;
    if (!open_trace(model, path, why)) {
        return hobbit_fail(err, err_size, why);
    }
    const auto write_records = [&](int context, int32_t seq_id, const hobbit_records & records) {
        const std::vector<uint8_t> payload = hobbit_trace_records(seq_id, records);
        model.trace->event(HOBBIT_TRACE_RECORDS, context, 0, 0, 0, 0, payload.data(), payload.size());
    };
    write_records(HOBBIT_TRACE_MODEL, -1, model.totals);
    for (const auto & past : model.activations.all()) {
        trace_past(model, *past);
    }
    for (const auto & [seq_id, records] : ctx->records) {
        write_records(ctx->trace_id, seq_id, records);
    }
    trace_stats(*ctx, stats, labels);
    return true;
}

bool hobbit_trace_stop(hobbit_context * ctx, char * err, size_t err_size) {
    hobbit_model & model = *ctx->model;
    const auto [stats, labels] = snapshot(*ctx);
    std::lock_guard<std::mutex> lock(model.step_mutex);
    if (!model.trace) {
        return hobbit_fail(err, err_size, "no trace of this model is being written");
    }
    trace_stats(*ctx, stats, labels);
    model.loader->set_observer(nullptr);
    std::string why;
    const bool  ok = model.trace->close(why);
    model.trace.reset();
    return ok || hobbit_fail(err, err_size, why);
}
