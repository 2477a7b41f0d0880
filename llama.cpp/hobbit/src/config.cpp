#include "config.h"

#include "hobbit.h"
#include "store.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#define HOBBIT_OPTION(name, env, hint, help) { name, "--hobbit-" name, "LLAMA_ARG_HOBBIT_" env, hint, help }

static const hobbit_option options[HOBBIT_N_OPTIONS] = {
    HOBBIT_OPTION("cache", "CACHE", "SIZE",
        "memory for routed experts, in MiB or with a unit (512MiB, 4GiB), or auto: what the memory limit of the process's\n"
        "cgroup leaves once the other weights are loaded, minus 1/8 of the limit (at least 96 MiB). Any --hobbit option\n"
        "turns expert caching on (default: auto)"),
    HOBBIT_OPTION("device-cache", "DEVICE_CACHE", "SIZE",
        "memory on the GPUs for routed experts of the layers that --n-gpu-layers puts there, all GPUs together; auto: what is\n"
        "free once the other weights are loaded, minus 1/4 of each GPU's memory (at least 512 MiB); off: the CPU computes\n"
        "experts (default: off, until this path has run on a GPU)"),
    HOBBIT_OPTION("miss", "MISS", "MODE",
        "an expert that is not on the GPU when it is wanted: load copies it there, cpu has the CPU compute it meanwhile, auto does\n"
        "what is done sooner, as measured; needs --hobbit-device-cache (default: load)"),
    HOBBIT_OPTION("low", "LOW", "FILE",
        "GGUF of the same model whose experts serve as the low-precision copies; any shard of a sharded file"),
    HOBBIT_OPTION("precision", "PRECISION", "RULE",
        "which precision a selected expert gets: hobbit (cumulative gate weight against T1 and T2), paper (the same at 0.6 and\n"
        "0.9), high (exact), low, or article (each weight on its own, for comparison) (default: hobbit with --hobbit-low, else high)"),
    HOBBIT_OPTION("prefill-precision", "PREFILL_PRECISION", "RULE",
        "which precision an expert gets in a batch of many tokens: highest (that any of them asks for), mass (by its share of the\n"
        "batch's gate weight, against T1), or low; only where two precisions are in use (default: mass)"),
    HOBBIT_OPTION("t1", "T1", "F",
        "gate weight ranked before an expert up to which it is used in high precision (default: 0.6)"),
    HOBBIT_OPTION("t2", "T2", "F",
        "the same for low precision; beyond it an expert is skipped; 1 never skips (default: 1)"),
    HOBBIT_OPTION("renormalise", "RENORMALISE", nullptr,
        "after skipping experts, scale the remaining gate weights to the same sum (default: off)"),
    HOBBIT_OPTION("deterministic", "DETERMINISTIC", nullptr,
        "precision follows from the gate weights alone, whatever the cache holds (default: off)"),
    HOBBIT_OPTION("quality-budget", "QUALITY_BUDGET", "PERCENT",
        "take the T1 and T2 that move the fewest bytes among those whose perplexity is at most this much higher, by what\n"
        "`hobbit quality --profile` measured on this pair; needs --hobbit-profile"),
    HOBBIT_OPTION("policy", "POLICY", "NAME",
        "which expert leaves the cache first: hobbit (weighted score, see --hobbit-weights), lru, lfu, lfu-model, lhu, fld, lcu,\n"
        "lfru, gate-mass, lru-layer, random, activations, static (default: hobbit)"),
    HOBBIT_OPTION("weights", "WEIGHTS", "A,B,C,D",
        "weights of recency, frequency, high-precision frequency and layer distance in the score of --hobbit-policy hobbit;\n"
        "scaled to sum to 1 (default: 0.25,0.25,0.25,0.25)"),
    HOBBIT_OPTION("low-share", "LOW_SHARE", "F",
        "share of the cache's bytes for low-precision experts when both precisions are in use (default: 0.2)"),
    HOBBIT_OPTION("prefetch", "PREFETCH", "N",
        "read experts that the next N layers are likely to choose while this one computes: 0 to 8, off, or auto, which looks up\n"
        "to 2 layers ahead for as long as it pays (default: auto)"),
    HOBBIT_OPTION("predictor", "PREDICTOR", "NAME",
        "who names the experts to read ahead: router (the next layer's, asked with this layer's input), or activations (the past\n"
        "request whose use of experts resembles this one's most; for comparison) (default: router)"),
    HOBBIT_OPTION("unit", "UNIT", "NAME",
        "what is read where an expert is missing: expert (it alone), or layer (every expert of its layer, at each step, and the\n"
        "next layer ahead; nothing is evicted; for comparison) (default: expert)"),
    HOBBIT_OPTION("io", "IO", "MODE",
        "how experts are read: direct (past the page cache), uring (the same through io_uring, if the kernel has it), buffered\n"
        "(through the page cache), or auto: direct unless memory has room for all experts beside the cache (default: auto)"),
    HOBBIT_OPTION("io-threads", "IO_THREADS", "N",
        "threads that read experts, 1 to 64 (default: 4)"),
    HOBBIT_OPTION("repack", "REPACK", "MODE",
        "bring experts into the CPU's interleaved layout as they arrive, where their type has one: on, off, or auto: unless\n"
        "--no-repack (default: auto)"),
    HOBBIT_OPTION("check", "CHECK", nullptr,
        "look for invalid numbers in every expert that is read (default: off)"),
    HOBBIT_OPTION("stats", "STATS", "FILE",
        "write the cache's statistics to FILE as JSON when the program ends"),
    HOBBIT_OPTION("profile", "PROFILE", "FILE",
        "warm start: begin with the experts that FILE names, in the background, and write those that are resident to it when\n"
        "the program ends; a FILE of another model is left alone"),
    HOBBIT_OPTION("trace", "TRACE", "FILE",
        "write every choice of the router and what the cache did about it to FILE (docs/trace.md)"),
};

const hobbit_option * hobbit_option_get(int i) {
    return i >= 0 && i < HOBBIT_N_OPTIONS ? &options[i] : nullptr;
}

static std::mutex                configs_mutex;
static std::deque<hobbit_config> configs; // handle - 1 -> config

static hobbit_config * config_of(int32_t handle) {
    return handle >= 1 && handle <= (int32_t) configs.size() ? &configs[handle - 1] : nullptr;
}

bool hobbit_fail(char * err, size_t err_size, const std::string & msg) {
    if (err && err_size > 0) {
        snprintf(err, err_size, "%s", msg.c_str());
    }
    return false;
}

bool hobbit_config_get(int32_t handle, hobbit_config & config) {
    std::lock_guard<std::mutex> lock(configs_mutex);
    const hobbit_config * c = config_of(handle);
    if (c) {
        config = *c;
    }
    return c != nullptr;
}

int32_t hobbit_config_new(void) {
    std::lock_guard<std::mutex> lock(configs_mutex);
    configs.emplace_back();
    return (int32_t) configs.size();
}

void hobbit_config_set_verbose(int32_t handle, bool verbose) {
    std::lock_guard<std::mutex> lock(configs_mutex);
    if (hobbit_config * c = config_of(handle)) {
        c->verbose = verbose;
    }
}

//
// values
//

static bool parse_float(const char * text, float lo, float hi, float & out) {
    char * end = nullptr;
    const float v = strtof(text, &end);
    if (end == text || *end != '\0' || !(v >= lo && v <= hi)) {
        return false;
    }
    out = v;
    return true;
}

static bool parse_size(const char * text, uint64_t & bytes) {
    char * end = nullptr;
    const double v = strtod(text, &end);
    static const struct { const char * unit; double bytes; } units[] = {
        { "", 1 << 20 },  { "M", 1 << 20 },  { "MiB", 1 << 20 }, { "MB", 1e6 },
        { "G", 1 << 30 }, { "GiB", 1 << 30 }, { "GB", 1e9 },
        { "K", 1 << 10 }, { "KiB", 1 << 10 }, { "KB", 1e3 }, { "B", 1 },
    };
    if (end == text || !std::isfinite(v) || v <= 0.0) {
        return false;
    }
    while (*end == ' ') {
        end++;
    }
    for (const auto & u : units) {
        if (strcasecmp(end, u.unit) == 0) {
            const double b = v * u.bytes;
            bytes = (uint64_t) b;
            return b >= 1.0 && b < 1e18;
        }
    }
    return false;
}

static bool parse_flag(const char * text, bool & out) {
    static const char * yes[] = { "on",  "1", "true",  "yes" };
    static const char * no [] = { "off", "0", "false", "no"  };
    for (int i = 0; i < 4; ++i) {
        if (strcasecmp(text, yes[i]) == 0 || strcasecmp(text, no[i]) == 0) {
            out = strcasecmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

static bool parse_weights(const char * text, hobbit_policy_params & p) {
    float w[4];
    int   n = 0;
    if (sscanf(text, "%f,%f,%f,%f%n", &w[0], &w[1], &w[2], &w[3], &n) != 4 || text[n] != '\0') {
        return false;
    }
    float sum = 0.0f;
    for (float x : w) {
        if (!(x >= 0.0f && x <= 1e6f)) {
            return false;
        }
        sum += x;
    }
    if (sum <= 0.0f) {
        return false;
    }
    p.w_lru = w[0] / sum;
    p.w_lfu = w[1] / sum;
    p.w_lhu = w[2] / sum;
    p.w_fld = w[3] / sum;
    return true;
}

static const char * rule_names  [] = { "high", "low", "hobbit", "article" }; // in the order of hobbit_rule
static const char * io_names    [] = { "auto", "direct", "buffered", "uring" }; // in the order of hobbit_io
static const char * repack_names[] = { "auto", "on", "off" };                 // in the order of hobbit_repack
static const char * prefill_names[] = { "highest", "mass", "low" };           // in the order of hobbit_prefill
static const char * miss_names   [] = { "load", "cpu", "auto" };              // in the order of hobbit_miss
// in the order of hobbit_policy
static const char * policy_names[] = { "hobbit", "lru", "lfu", "lfu-model", "lhu", "fld", "lcu", "lfru", "gate-mass", "lru-layer", "random",
                                      "activations", "static" };
static const char * predictor_names[] = { "router", "activations" }; // in the order of hobbit_predictor
static const char * unit_names[]      = { "expert", "layer" };       // in the order of hobbit_unit

const char * hobbit_rule_name  (hobbit_rule rule)     { return rule_names[rule]; }
const char * hobbit_policy_name(hobbit_policy policy) { return policy_names[policy]; }
const char * hobbit_prefill_name(hobbit_prefill prefill) { return prefill_names[prefill]; }
const char * hobbit_miss_name(hobbit_miss miss) { return miss_names[miss]; }
const char * hobbit_unit_name   (hobbit_unit unit)       { return unit_names[unit]; }

template <typename T, size_t N>
static bool parse_name(const char * text, const char * const (&names)[N], T & out) {
    for (size_t i = 0; i < N; ++i) {
        if (strcmp(text, names[i]) == 0) {
            out = (T) i;
            return true;
        }
    }
    return false;
}

bool hobbit_config_apply(hobbit_config & config, const std::string & name, const std::string & text, std::string & err) {
    const auto is = [&name](const char * s) { return name == s; };
    const char * value = text.c_str();
    hobbit_config * c = &config;

    bool         ok   = true;
    const char * want = "";
    if (is("cache")) {
        const bool is_auto = strcasecmp(value, "auto") == 0;
        ok   = is_auto || parse_size(value, c->cache_bytes);
        c->cache_auto = ok ? is_auto : c->cache_auto;
        want = "auto, or a size such as 512MiB or 4GiB (a bare number is MiB)";
    } else if (is("device-cache")) {
        c->device_cache_auto = strcasecmp(value, "auto") == 0;
        c->device_cache_off  = strcasecmp(value, "off")  == 0;
        ok   = c->device_cache_auto || c->device_cache_off || parse_size(value, c->device_cache_bytes);
        want = "auto, off, or a size such as 512MiB or 4GiB (a bare number is MiB)";
    } else if (is("miss")) {
        ok   = parse_name(value, miss_names, c->miss);
        want = "load, cpu or auto";
    } else if (is("low")) {
        c->low_path = value;
        ok   = value[0] != '\0';
        want = "the path of a GGUF file";
    } else if (is("precision")) {
        const bool paper = strcmp(value, "paper") == 0;
        ok   = parse_name(paper ? "hobbit" : value, rule_names, c->thresholds.rule);
        want = "hobbit, paper, high, low or article";
        c->rule_set = ok;
        if (c->given.count("t2") == 0) {
            c->thresholds.t2 = paper || c->thresholds.rule == HOBBIT_RULE_ARTICLE ? 0.9f : 1.0f;
        }
        if (paper) { // names its thresholds too
            c->thresholds_set = true;
            c->given.insert({ "t1", "t2" });
        }
    } else if (is("prefill-precision")) {
        ok   = parse_name(value, prefill_names, c->prefill);
        want = "highest, mass or low";
    } else if (is("t1") || is("t2")) {
        ok   = parse_float(value, 0.0f, 1.0f, is("t1") ? c->thresholds.t1 : c->thresholds.t2);
        want = "a number from 0 to 1";
        c->thresholds_set = ok;
    } else if (is("quality-budget")) {
        ok   = parse_float(value, 0.0f, 1000.0f, c->quality_budget);
        want = "percent of perplexity, from 0 to 1000";
    } else if (is("renormalise") || is("deterministic") || is("check")) {
        ok   = parse_flag(value, is("renormalise") ? c->renormalise : is("check") ? c->check : c->deterministic);
        want = "on or off";
    } else if (is("policy")) {
        ok   = parse_name(value, policy_names, c->policy.policy);
        want = "hobbit, lru, lfu, lfu-model, lhu, fld, lcu, lfru, gate-mass, lru-layer, random, activations or static";
    } else if (is("weights")) {
        ok   = parse_weights(value, c->policy);
        want = "four numbers >= 0, not all 0, with commas: recency,frequency,high-frequency,distance";
    } else if (is("low-share")) {
        ok   = parse_float(value, 0.01f, 0.99f, c->low_share);
        want = "a number from 0.01 to 0.99";
    } else if (is("prefetch")) {
        float n = 0.0f;
        c->prefetch_adaptive = strcmp(value, "auto") == 0;
        ok   = c->prefetch_adaptive || strcmp(value, "off") == 0 || (parse_float(value, 0.0f, 8.0f, n) && n == std::floor(n));
        want = "auto, off, or a whole number from 0 to 8";
        c->prefetch_depth = c->prefetch_adaptive ? 2 : (int) n;
    } else if (is("predictor")) {
        ok   = parse_name(value, predictor_names, c->predictor);
        want = "router or activations";
    } else if (is("unit")) {
        ok   = parse_name(value, unit_names, c->unit);
        want = "expert or layer";
    } else if (is("io")) {
        ok   = parse_name(value, io_names, c->io);
        want = "auto, direct, buffered or uring";
    } else if (is("repack")) {
        ok   = parse_name(value, repack_names, c->repack);
        want = "auto, on or off";
    } else if (is("io-threads")) {
        float n = 0.0f;
        ok   = parse_float(value, 1.0f, 64.0f, n) && n == std::floor(n);
        want = "a whole number from 1 to 64";
        c->io_threads = ok ? (int) n : c->io_threads;
    } else if (is("stats") || is("profile") || is("trace")) {
        (is("stats") ? c->stats_path : is("trace") ? c->trace_path : c->profile_path) = value;
        ok   = value[0] != '\0';
        want = "the path of a file to write";
    } else {
        std::string known;
        for (const auto & option : options) {
            known += known.empty() ? "" : ", ";
            known += option.name;
        }
        err = hobbit_format("unknown hobbit option '%s'; there are: %s", name.c_str(), known.c_str());
        return false;
    }
    if (!ok) {
        err = hobbit_format("--hobbit-%s: '%s' will not do; it takes %s", name.c_str(), value, want);
    }
    return ok;
}

bool hobbit_config_fits(const hobbit_config & config, std::string & err) {
    const hobbit_thresholds & th = config.thresholds;
    if (th.t1 > th.t2) {
        err = hobbit_format("--hobbit-t1 %g is above --hobbit-t2 %g; T1 must not exceed T2", th.t1, th.t2);
        return false;
    }
    if (config.miss != HOBBIT_MISS_LOAD && config.device_cache_off) {
        err = hobbit_format("--hobbit-miss %s needs --hobbit-device-cache SIZE or auto: without it the CPU computes every expert", hobbit_miss_name(config.miss));
        return false;
    }
    if (config.unit == HOBBIT_UNIT_LAYER && !config.device_cache_off) {
        err = "--hobbit-unit layer is for experts that the CPU computes: leave out --hobbit-device-cache";
        return false;
    }
    if (config.quality_budget >= 0.0f) {
        if (config.profile_path.empty()) {
            err = "--hobbit-quality-budget needs --hobbit-profile FILE, with what `hobbit quality MODEL --low FILE --profile FILE` measured";
            return false;
        }
        if (config.thresholds_set || config.renormalise || (config.rule_set && th.rule != HOBBIT_RULE_HOBBIT)) {
            err = "--hobbit-quality-budget chooses T1 and T2 of the precision hobbit, without renormalising: leave out --hobbit-t1, "
                  "--hobbit-t2, --hobbit-precision and --hobbit-renormalise";
            return false;
        }
    }
    return true;
}

bool hobbit_config_set(int32_t handle, const char * name, const char * value, char * err, size_t err_size) {
    std::lock_guard<std::mutex> lock(configs_mutex);
    hobbit_config * c = config_of(handle);
    if (!c) {
        return hobbit_fail(err, err_size, hobbit_format("no hobbit configuration has the handle %d", handle));
    }
    std::string why;
    if (!hobbit_config_apply(*c, name, value, why)) {
        return hobbit_fail(err, err_size, why);
    }
    c->given.insert(name);
    return true;
}

bool hobbit_config_check(int32_t handle, char * err, size_t err_size) {
    std::lock_guard<std::mutex> lock(configs_mutex);
    hobbit_config * c = config_of(handle);
    if (!c) {
        return hobbit_fail(err, err_size, hobbit_format("no hobbit configuration has the handle %d", handle));
    }
    std::string why;
    return hobbit_config_fits(*c, why) || hobbit_fail(err, err_size, why);
}
