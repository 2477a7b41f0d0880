// hobbit-exact: is a model with cached experts the same model, bit for bit?
//
// Loads a GGUF twice in one process, stock and managed, feeds both the same token ids (pseudo-random, through the API,
// so that no tokenizer is needed) as a prompt with all logits requested (or the last token's, as in generation, when the
// last layer sees that row only, and no row in the ubatches before), then greedy steps over the reference's logits, and
// compares every logit. Prints one line of JSON with what was compared and the cache's statistics, so that a test
// can see that the cache did evict and stream.
//
// Exit code: 0 equal, 1 different (or logits that mean nothing), 2 the comparison could not be made, 3 the managed load
// was refused; "refused" in the JSON says why.
//
// With --sim N the managed model runs on N simulated accelerators (ggml-sim; HOBBIT_SIM_* say how they behave), all layers
// there, the reference on the CPU as ever.
//
// Without hobbit.h in the include path it compiles against unpatched llama.cpp and knows only --stock-only-dump and
// --swap-experts.

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

#if __has_include("hobbit.h")
#    include "hobbit.h"
#    define HAVE_HOBBIT 1
#endif

#if __has_include("ggml-sim.h")
#    include "ggml-sim.h"
#    define HAVE_SIM 1
#endif

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static constexpr int EXIT_EQUAL     = 0;
static constexpr int EXIT_DIFFERENT = 1;
static constexpr int EXIT_BROKEN    = 2;
static constexpr int EXIT_REFUSED   = 3;

static void usage(FILE * out) {
    fputs(
        "hobbit-exact --model FILE [options]\n"
        "  --managed FILE        load this one managed: the same weights in other files, such as the base of a pair\n"
        "  --prompt N            tokens of the prompt (default 64)\n"
        "  --generate N          greedy steps after it (default 16)\n"
        "  --sequences N         that many at once, each with its own prompt (default 1)\n"
        "  --contexts N          that many of one model, which take turns (default 1)\n"
        "  --outputs WHICH       logits of all tokens of the prompt, or of the last one (default all)\n"
        "  --ubatch N[,N...]     one comparison for each (default 512)\n"
        "  --threads N           (default 2)\n"
        "  --flash-attn MODE     on, off or auto (default auto)\n"
        "  --kv-type TYPE        of the KV cache, for both models (default f16)\n"
        "  --no-kv-offload       the managed model keeps its KV cache in host memory\n"
        "  --seed N              of the token ids (default 1)\n"
        "  --cache SIZE          as --hobbit-cache, or P% of all expert bytes, or min: the smallest that the engine accepts\n"
        "  --hobbit NAME=VALUE   any other option of the engine; may be repeated\n"
        "  --sim N               run the managed model on N simulated accelerators\n"
        "  --ngl N               both models have N layers on the GPUs there are (default 0)\n"
        "  --device-cache SIZE   as --hobbit-device-cache, or P% of all expert bytes (default 100%)\n"
        "  --tensor-split N,N..  shares of the managed model's layers on the accelerators\n"
        "  --experts-on-cpu RE   the managed model has the tensors that RE names there, as -ot RE=CPU\n"
        "  --resize SIZE         give the host's cache this size half-way through the greedy steps\n"
        "  --versus SIZE         compare with the same managed model under this cache (on the CPU), not with stock\n"
        "  --swap-experts FILE   instead: stock against a copy (FILE, deleted afterwards) with experts 0 and 1 exchanged;\n"
        "                        0 if that changes the logits, 1 if not\n"
        "  --stock-only-dump FILE  instead: write the logits of the stock model, F32, row after row\n"
        "  --repack              load with the CPU's interleaved layouts, as llama.cpp does by default\n"
        "  --verbose             show the log\n", out);
}

struct options {
    std::string      model;
    std::string      managed; // the same weights in other files, such as the base of a pair
    int              prompt     = 64;
    int              generate   = 16;
    int              sequences  = 1;
    int              contexts   = 1;
    bool             last_only  = false;
    std::vector<int> ubatches   = { 512 };
    int              threads    = 2;
    std::string      flash_attn = "auto";
    ggml_type        kv_type    = GGML_TYPE_F16;
    bool             kv_offload = true;
    std::vector<int> tensor_split;
    std::string      experts_on_cpu; // regular expression, "": none
    std::string      resize;
    unsigned         seed       = 1;
    std::string      cache      = "min";
    int              sim        = 0;
    int              ngl        = 0;
    std::string      device_cache = "100%";
    std::string      versus;
    std::string      swap_copy;
    std::string      dump;
    bool             repack     = false;
    bool             verbose    = false;

    std::vector<std::pair<std::string, std::string>> hobbit;
};

static std::runtime_error error(const std::string & text) {
    return std::runtime_error(text);
}

static int parse_int(const std::string & text, int least) {
    char *     end = nullptr;
    const long v   = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || v < least || v > 1 << 24) {
        throw error("'" + text + "' is not a whole number from " + std::to_string(least));
    }
    return (int) v;
}

static std::vector<int> parse_list(const std::string & text) {
    std::vector<int>   values;
    std::istringstream list(text);
    for (std::string n; std::getline(list, n, ',');) {
        values.push_back(parse_int(n, 1));
    }
    return values;
}

static options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            usage(stdout);
            exit(0);
        }
        if (name == "--repack") {
            o.repack = true;
            continue;
        }
        if (name == "--no-kv-offload") {
            o.kv_offload = false;
            continue;
        }
        if (name == "--verbose") {
            o.verbose = true;
            continue;
        }
        if (i + 1 == argc) {
            throw error(name + ": no such option, or its value is missing");
        }
        const std::string value = argv[++i];
        if      (name == "--model")           { o.model      = value; }
        else if (name == "--managed")         { o.managed    = value; }
        else if (name == "--prompt")          { o.prompt     = parse_int(value, 1); }
        else if (name == "--generate")        { o.generate   = parse_int(value, 0); }
        else if (name == "--sequences")       { o.sequences  = parse_int(value, 1); }
        else if (name == "--contexts")        { o.contexts   = parse_int(value, 1); }
        else if (name == "--tensor-split")    { o.tensor_split   = parse_list(value); }
        else if (name == "--experts-on-cpu")  { o.experts_on_cpu = value; }
        else if (name == "--resize")          { o.resize     = value; }
        else if (name == "--kv-type") {
            int type = 0;
            while (type < GGML_TYPE_COUNT && value != ggml_type_name((ggml_type) type)) {
                type++;
            }
            if (type == GGML_TYPE_COUNT) {
                throw error("--kv-type: there is no type " + value);
            }
            o.kv_type = (ggml_type) type;
        }
        else if (name == "--outputs") {
            if (value != "all" && value != "last") {
                throw error("--outputs takes all or last, not '" + value + "'");
            }
            o.last_only = value == "last";
        }
        else if (name == "--threads")         { o.threads    = parse_int(value, 1); }
        else if (name == "--seed")            { o.seed       = parse_int(value, 0); }
        else if (name == "--flash-attn")      { o.flash_attn = value; }
        else if (name == "--cache")           { o.cache      = value; }
        else if (name == "--versus")          { o.versus     = value; }
        else if (name == "--sim")             { o.sim        = parse_int(value, 1); }
        else if (name == "--ngl")             { o.ngl        = parse_int(value, 0); }
        else if (name == "--device-cache")    { o.device_cache = value; }
        else if (name == "--swap-experts")    { o.swap_copy  = value; }
        else if (name == "--stock-only-dump") { o.dump       = value; }
        else if (name == "--ubatch")          { o.ubatches   = parse_list(value); }
        else if (name == "--hobbit") {
            const size_t eq = value.find('=');
            if (eq == std::string::npos) {
                throw error("--hobbit takes NAME=VALUE, not '" + value + "'");
            }
            o.hobbit.emplace_back(value.substr(0, eq), value.substr(eq + 1));
        } else {
            throw error("unknown option " + name);
        }
    }
    if (o.model.empty() || o.ubatches.empty()) {
        throw error("--model and at least one --ubatch are needed");
    }
    return o;
}

//
// log: kept, so that the reason of a failed load can be told
//

static bool        log_verbose = false;
static std::string log_errors;

static void on_log(ggml_log_level level, const char * text, void *) {
    static ggml_log_level last = GGML_LOG_LEVEL_NONE;
    last = level == GGML_LOG_LEVEL_CONT ? last : level;
    if (last == GGML_LOG_LEVEL_ERROR) {
        log_errors += text;
    }
    if (log_verbose) {
        fputs(text, stderr);
    }
}

//
// the file
//

static bool is_expert_weight(const char * name) {
    static const char * suffixes[] = {
        ".ffn_gate_exps.weight", ".ffn_up_exps.weight", ".ffn_down_exps.weight", ".ffn_gate_up_exps.weight",
    };
    for (const char * suffix : suffixes) {
        const size_t n = strlen(name);
        const size_t m = strlen(suffix);
        if (n > m && strcmp(name + n - m, suffix) == 0) {
            return true;
        }
    }
    return false;
}

struct expert_tensor {
    uint64_t offset; // of expert 0 in the file
    uint64_t expert_bytes;
    int64_t  n_expert;
};

struct gguf_file {
    gguf_context * gguf = nullptr;
    ggml_context * ctx  = nullptr;

    explicit gguf_file(const std::string & path) {
        gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ &ctx };
        gguf = gguf_init_from_file(path.c_str(), params);
        if (!gguf) {
            throw error(path + ": cannot be read");
        }
    }
    gguf_file(const gguf_file &) = delete;
    ~gguf_file() {
        gguf_free(gguf);
        ggml_free(ctx);
    }

    std::vector<expert_tensor> experts() const {
        std::vector<expert_tensor> list;
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
            const char * name = gguf_get_tensor_name(gguf, i);
            if (is_expert_weight(name)) {
                const ggml_tensor * t = ggml_get_tensor(ctx, name);
                list.push_back({ gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i), t->nb[2], t->ne[2] });
            }
        }
        return list;
    }

    std::string arch() const {
        const int64_t id = gguf_find_key(gguf, "general.architecture");
        return id < 0 ? "" : gguf_get_val_str(gguf, id);
    }

    int n_split() const {
        const int64_t id = gguf_find_key(gguf, "split.count");
        return id < 0 ? 1 : gguf_get_val_u16(gguf, id);
    }
};

static uint64_t expert_bytes_of(const std::string & path) {
    const int n_split = gguf_file(path).n_split();
    uint64_t  sum     = 0;
    for (int i = 0; i < n_split; ++i) {
        std::string shard = path;
        if (n_split > 1) {
            char prefix[4096];
            char name  [4096];
            if (llama_split_prefix(prefix, sizeof(prefix), path.c_str(), 0, n_split) <= 0) {
                throw error(path + ": not named like the first shard of " + std::to_string(n_split));
            }
            llama_split_path(name, sizeof(name), prefix, i, n_split);
            shard = name;
        }
        for (const expert_tensor & t : gguf_file(shard).experts()) {
            sum += t.expert_bytes*t.n_expert;
        }
    }
    return sum;
}

// a copy with the weights of experts 0 and 1 exchanged in every layer, their routers as they were
static void write_swapped(const std::string & from, const std::string & to) {
    const gguf_file file(from);
    if (file.experts().empty()) {
        throw error(from + ": has no routed experts to exchange");
    }
    {
        std::ifstream in (from, std::ios::binary);
        std::ofstream out(to,   std::ios::binary);
        out << in.rdbuf();
        if (!in || !out) {
            throw error(to + ": cannot be written");
        }
    }
    std::fstream copy(to, std::ios::binary | std::ios::in | std::ios::out);
    for (const expert_tensor & t : file.experts()) {
        std::vector<char> both(2*t.expert_bytes);
        copy.seekg(t.offset);
        copy.read(both.data(), both.size());
        std::rotate(both.begin(), both.begin() + t.expert_bytes, both.end());
        copy.seekp(t.offset);
        copy.write(both.data(), both.size());
    }
    copy.flush();
    if (!copy) {
        throw error(to + ": exchanging experts failed");
    }
}

//
// models
//

struct refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using model_ptr   = std::unique_ptr<llama_model,   decltype(&llama_model_free)>;
using context_ptr = std::unique_ptr<llama_context, decltype(&llama_free)>;

static bool use_repack   = false;
static int  n_gpu_layers = 0;

// accelerators of this process; a model that is not told of them does not use them
static std::vector<ggml_backend_dev_t> sim_devices;

#ifdef HAVE_SIM
static void start_sim(int n) {
    ggml_sim_params params = ggml_sim_params_default();
    params.n_devices = n;
    ggml_backend_reg_t reg = ggml_sim_init(&params);
    ggml_backend_register(reg);
    for (int i = 0; i < n; ++i) {
        sim_devices.push_back(ggml_backend_reg_dev_get(reg, i));
    }
    sim_devices.push_back(nullptr);
}
#endif

static llama_model * load_with(const options & o, const std::string & path, const llama_model_kv_override * overrides, bool on_sim) {
    llama_model_params params = llama_model_default_params();
    params.load_mode       = LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts = use_repack; // repacked weights give other bits
    params.n_gpu_layers    = n_gpu_layers;
    params.kv_overrides    = overrides;
    static ggml_backend_dev_t no_devices[] = { nullptr };
    params.devices = n_gpu_layers > 0 ? nullptr : no_devices;
    if (on_sim && !sim_devices.empty()) {
        params.devices      = sim_devices.data();
        params.n_gpu_layers = -1; // all
    }
    std::vector<float> split(llama_max_devices(), 0.0f);
    const llama_model_tensor_buft_override on_cpu[] = { { o.experts_on_cpu.c_str(), ggml_backend_cpu_buffer_type() }, { nullptr, nullptr } };
    if (on_sim && !o.tensor_split.empty()) {
        std::copy_n(o.tensor_split.begin(), std::min(o.tensor_split.size(), split.size()), split.begin());
        params.tensor_split = split.data();
    }
    if (on_sim && !o.experts_on_cpu.empty()) {
        params.tensor_buft_overrides = on_cpu;
    }
    log_errors.clear();
    return llama_model_load_from_file(path.c_str(), params);
}

static model_ptr load_stock(const options & o, const std::string & path) {
    model_ptr model(load_with(o, path, nullptr, false), llama_model_free);
    if (!model) {
        throw error(path + ": stock does not load it: " + log_errors);
    }
    return model;
}

#ifdef HAVE_HOBBIT

// P% of all expert bytes, as a size
static std::string resolve(const options & o, const std::string & size) {
    if (size.empty() || size.back() != '%') {
        return size;
    }
    const double bytes = std::ceil(expert_bytes_of(o.model)*parse_int(size.substr(0, size.size() - 1), 1)/100.0);
    return std::to_string((uint64_t) bytes) + "B";
}

static llama_model * try_managed(const options & o, const std::string & cache, bool on_sim) {
    char          err[1024];
    const int32_t config = hobbit_config_new();
    bool ok = hobbit_config_set(config, "cache", cache.c_str(), err, sizeof(err));
    if (o.sim > 0 || o.ngl > 0) {
        ok = ok && hobbit_config_set(config, "device-cache", resolve(o, o.device_cache).c_str(), err, sizeof(err));
    }
    for (const auto & [name, value] : o.hobbit) {
        ok = ok && hobbit_config_set(config, name.c_str(), value.c_str(), err, sizeof(err));
    }
    if (!ok || !hobbit_config_check(config, err, sizeof(err))) {
        throw error(err);
    }
    llama_model_kv_override overrides[2] = {};
    snprintf(overrides[0].key, sizeof(overrides[0].key), "%s", HOBBIT_CONFIG_KEY);
    overrides[0].tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    overrides[0].val_i64 = config;
    return load_with(o, o.managed.empty() ? o.model : o.managed, overrides, on_sim);
}

// `resolved` gets the size that was asked for in the end
static model_ptr load_managed(const options & o, const std::string & cache, bool on_sim, std::string & resolved) {
    resolved = resolve(o, cache);
    if (cache == "min") {
        if (try_managed(o, "1B", on_sim) != nullptr) {
            throw error("a cache of one byte was accepted");
        }
        static const std::string mark = "--hobbit-cache ";
        const size_t at = log_errors.rfind(mark);
        if (at == std::string::npos) {
            throw refused(log_errors);
        }
        const size_t begin = at + mark.size();
        resolved = log_errors.substr(begin, log_errors.find_first_not_of("0123456789.KMGiB", begin) - begin);
    }
    model_ptr model(try_managed(o, resolved, on_sim), llama_model_free);
    if (!model) {
        throw refused(log_errors);
    }
    return model;
}

#endif

//
// runs
//

struct run_result {
    std::vector<llama_token> tokens; // what was fed
    std::vector<float>       logits; // a row for each that had to give one
    int                      n_sequences = 1;
    int                      n_contexts  = 1;
    int                      n_prompt    = 0; // tokens of each
    int                      n_vocab     = 0;
    std::string              stats;  // JSON, if managed
    std::string              sim;    // JSON, if on simulated accelerators
    std::string              placement; // JSON, if managed
};

// one batch: next, of every sequence, from pos on; appends tokens and logits, and leaves in next what comes after
static void decode(const options & o, llama_context * ctx, llama_pos pos, std::vector<llama_token> & next, const run_result * follow, run_result & r) {
    if (follow) {
        const auto from = follow->tokens.begin() + r.tokens.size();
        next.assign(from, from + next.size());
    }
    const int   n_each = (int) next.size()/o.sequences;
    llama_batch batch  = llama_batch_init((int32_t) next.size(), 0, 1);
    batch.n_tokens = (int32_t) next.size();
    for (int i = 0; i < batch.n_tokens; ++i) {
        batch.token   [i]    = next[i];
        batch.pos     [i]    = pos + i % n_each;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = i/n_each;
        batch.logits  [i]    = !o.last_only || i % n_each == n_each - 1;
        r.tokens.push_back(next[i]);
    }
    const int status = llama_decode(ctx, batch);
    if (status != 0) {
        throw error("llama_decode: " + std::to_string(status) + " " + log_errors);
    }
    next.clear();
    for (int i = 0; i < batch.n_tokens; ++i) {
        if (!batch.logits[i]) {
            continue;
        }
        const float * row = llama_get_logits_ith(ctx, i);
        if (!row) {
            throw error("no logits at token " + std::to_string(r.tokens.size()));
        }
        r.logits.insert(r.logits.end(), row, row + r.n_vocab);
        if (i % n_each == n_each - 1) {
            next.push_back((llama_token) (std::max_element(row, row + r.n_vocab) - row));
        }
    }
    llama_batch_free(batch);
}

// follow: the run whose tokens to feed; NULL: choose them
static run_result run(const options & o, llama_model * model, int ubatch, const run_result * follow, bool managed) {
    const int n_seq = o.sequences;
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = n_seq*GGML_PAD(o.prompt + o.generate, 256);
    params.n_seq_max       = n_seq;
    params.n_batch         = std::max(n_seq*o.prompt, ubatch);
    params.n_ubatch        = ubatch;
    params.n_threads       = o.threads;
    params.n_threads_batch = o.threads;
    params.flash_attn_type = o.flash_attn == "on"  ? LLAMA_FLASH_ATTN_TYPE_ENABLED  :
                             o.flash_attn == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.type_k      = o.kv_type;
    params.type_v      = o.kv_type;
    params.offload_kqv = !managed || o.kv_offload;
    std::vector<context_ptr> contexts;
    for (int i = 0; i < o.contexts; ++i) {
        contexts.emplace_back(llama_init_from_model(model, params), llama_free);
        if (!contexts.back()) {
            throw error("no context: " + log_errors);
        }
    }

    run_result r;
    r.n_sequences = n_seq;
    r.n_contexts  = o.contexts;
    r.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    // a model without memory sees one batch, whole, and nothing after it
    const bool has_memory = llama_get_memory(contexts[0].get()) != nullptr;
    const int  n_generate = has_memory ? o.generate : 0;
    r.n_prompt            = has_memory ? o.prompt   : std::min(o.prompt, ubatch);

    // by context, what it is fed next, sequence after sequence
    std::vector<std::vector<llama_token>> nexts(o.contexts, std::vector<llama_token>(n_seq*r.n_prompt));
    std::mt19937 random(o.seed);
    for (auto & next : nexts) {
        for (llama_token & token : next) {
            token = (llama_token) (random() % r.n_vocab);
        }
    }
#ifdef HAVE_SIM
    const int n_sim = managed ? (int) sim_devices.size() - 1 : 0;
    for (int i = 0; i < n_sim; ++i) {
        ggml_sim_reset_stats(i);
    }
#endif
    llama_pos pos = 0;
    for (int step = 0; step <= n_generate; ++step) {
        const int n_each = (int) nexts[0].size()/n_seq;
        for (int i = 0; i < o.contexts; ++i) {
            decode(o, contexts[i].get(), pos, nexts[i], follow, r);
        }
        pos += n_each;
#ifdef HAVE_HOBBIT
        char err[1024];
        hobbit_context * hobbit = hobbit_from_llama(contexts[0].get());
        if (hobbit && step == n_generate/2 && !o.resize.empty() && !hobbit_resize(hobbit, resolve(o, o.resize).c_str(), err, sizeof(err))) {
            throw error(err);
        }
#endif
    }
#ifdef HAVE_SIM
    for (int i = 0; i < n_sim; ++i) {
        ggml_sim_stats stats;
        ggml_sim_get_stats(i, &stats);
        std::ostringstream out;
        out << (i > 0 ? ", " : "") << "{\"copies_up\": " << stats.n_up << ", \"bytes_up\": " << stats.bytes_up
            << ", \"copies_down\": " << stats.n_down << ", \"bytes_down\": " << stats.bytes_down << ", \"link_us\": " << stats.link_us
            << ", \"graphs\": " << stats.n_graphs << ", \"compute_us\": " << stats.compute_us << "}";
        r.sim += out.str();
    }
#endif
#ifdef HAVE_HOBBIT
    hobbit_context * hobbit = hobbit_from_llama(contexts[0].get());
    if (managed != (hobbit != nullptr)) {
        throw error(managed ? "the managed model runs as stock" : "the stock model is managed");
    }
    if (hobbit) {
        std::string text(hobbit_stats_json(hobbit, nullptr, 0) + 1, '\0');
        text.resize(hobbit_stats_json(hobbit, &text[0], text.size()));
        text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
        r.stats = text;
        r.placement.resize(hobbit_placement_json(hobbit, nullptr, 0) + 1);
        r.placement.resize(hobbit_placement_json(hobbit, &r.placement[0], r.placement.size()));
    }
#else
    (void) managed;
#endif
    return r;
}

struct comparison {
    size_t  n_different  = 0;
    size_t  first        = 0;
    double  max_abs_diff = 0.0;
    std::string meaningless; // why equality would prove nothing

    bool equal() const {
        return n_different == 0 && meaningless.empty();
    }
};

static comparison compare(const run_result & a, const run_result & b) {
    comparison c;
    if (a.tokens != b.tokens || a.logits.size() != b.logits.size()) {
        throw error("the two sides were not fed the same tokens");
    }
    size_t          n_finite = 0;
    std::set<float> values;
    for (size_t i = 0; i < a.logits.size(); ++i) {
        if (memcmp(&a.logits[i], &b.logits[i], sizeof(float)) != 0) {
            c.first = c.n_different == 0 ? i : c.first;
            c.n_different++;
            const double diff = std::fabs((double) a.logits[i] - b.logits[i]);
            c.max_abs_diff = std::isfinite(diff) ? std::max(c.max_abs_diff, diff) : c.max_abs_diff;
        }
        n_finite += std::isfinite(a.logits[i]);
        if (values.size() < 100) {
            values.insert(a.logits[i]);
        }
    }
    if (n_finite < a.logits.size()) {
        c.meaningless = std::to_string(a.logits.size() - n_finite) + " reference logits are not finite";
    } else if (values.size() < std::min<size_t>(100, a.logits.size()/2)) {
        c.meaningless = "the reference logits hold only " + std::to_string(values.size()) + " values";
    }
    return c;
}

//
// report
//

static std::string quote(const std::string & text) {
    std::string out = "\"";
    for (const char ch : text) {
        if (ch == '"' || ch == '\\') {
            out += '\\';
        }
        out += (unsigned char) ch < 0x20 ? ' ' : ch;
    }
    return out + "\"";
}

static std::string to_json(const comparison & c, const run_result & a, const run_result & b, int ubatch) {
    std::ostringstream out;
    out << "{\"ubatch\": " << ubatch << ", \"equal\": " << (c.equal() ? "true" : "false")
        << ", \"prompt\": " << a.n_prompt << ", \"generated\": " << (a.tokens.size()/a.n_contexts - a.n_prompt*a.n_sequences)/a.n_sequences
        << ", \"logits\": " << a.logits.size() << ", \"different\": " << c.n_different
        << ", \"max_abs_diff\": " << c.max_abs_diff;
    if (c.n_different > 0) {
        out << ", \"first\": {\"row\": " << c.first/a.n_vocab << ", \"token\": " << c.first % a.n_vocab
            << ", \"reference\": " << a.logits[c.first] << ", \"other\": " << b.logits[c.first] << "}";
    }
    if (!c.meaningless.empty()) {
        out << ", \"meaningless\": " << quote(c.meaningless);
    }
    if (!b.sim.empty()) {
        out << ", \"sim\": [" << b.sim << "]";
    }
    if (!b.stats.empty()) {
        out << ", \"stats\": " << b.stats << ", \"placement\": " << b.placement;
    }
    out << "}";
    return out.str();
}

static void print_json(const options & o, const std::string & fields) {
    printf("{\"model\": %s, \"arch\": %s, %s}\n", quote(o.model).c_str(), quote(gguf_file(o.model).arch()).c_str(), fields.c_str());
}

static int dump_stock(const options & o) {
    const model_ptr  model = load_stock(o, o.model);
    const run_result r     = run(o, model.get(), o.ubatches[0], nullptr, false);
    std::ofstream    out(o.dump, std::ios::binary);
    out.write((const char *) r.logits.data(), r.logits.size()*sizeof(float));
    out.flush();
    if (!out) {
        throw error(o.dump + ": cannot be written");
    }
    print_json(o, "\"logits\": " + std::to_string(r.logits.size()));
    return EXIT_EQUAL;
}

static int compare_swapped(const options & o) {
    write_swapped(o.model, o.swap_copy);
    struct remover {
        const std::string & path;
        ~remover() { std::remove(path.c_str()); }
    } remove_copy { o.swap_copy };

    const int        ubatch  = o.ubatches[0];
    const run_result as_is   = run(o, load_stock(o, o.model    ).get(), ubatch, nullptr, false);
    const run_result swapped = run(o, load_stock(o, o.swap_copy).get(), ubatch, &as_is,  false);
    const comparison c       = compare(as_is, swapped);
    print_json(o, "\"swapped\": " + to_json(c, as_is, swapped, ubatch));
    return c.n_different > 0 && c.meaningless.empty() ? EXIT_EQUAL : EXIT_DIFFERENT;
}

#ifdef HAVE_HOBBIT
static int compare_managed(const options & o) {
    std::string     cache;
    std::string     versus;
    const model_ptr reference = o.versus.empty() ? load_stock(o, o.model) : load_managed(o, o.versus, false, versus);
    const model_ptr managed   = load_managed(o, o.cache, true, cache);

    bool        equal = true;
    std::string runs;
    for (const int ubatch : o.ubatches) {
        const run_result a = run(o, reference.get(), ubatch, nullptr, !o.versus.empty());
        const run_result b = run(o, managed  .get(), ubatch, &a,      true);
        const comparison c = compare(a, b);
        equal = equal && c.equal();
        runs += (runs.empty() ? "" : ", ") + to_json(c, a, b, ubatch);
    }
    print_json(o, std::string("\"equal\": ") + (equal ? "true" : "false") + ", \"cache\": " + quote(cache) +
            ", \"versus\": " + quote(o.versus.empty() ? "stock" : versus) + ", \"runs\": [" + runs + "]");
    return equal ? EXIT_EQUAL : EXIT_DIFFERENT;
}
#endif

int main(int argc, char ** argv) {
    options o;
    try {
        o = parse(argc, argv);
    } catch (const std::exception & e) {
        fprintf(stderr, "hobbit-exact: error: %s\n\n", e.what());
        usage(stderr);
        return EXIT_BROKEN;
    }
    log_verbose  = o.verbose;
    use_repack   = o.repack;
    n_gpu_layers = o.ngl;
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    if (o.sim > 0) {
#ifdef HAVE_SIM
        start_sim(o.sim);
#else
        fprintf(stderr, "hobbit-exact: error: built without ggml-sim\n");
        return EXIT_BROKEN;
#endif
    }
    try {
        if (!o.dump.empty()) {
            return dump_stock(o);
        }
        if (!o.swap_copy.empty()) {
            return compare_swapped(o);
        }
#ifdef HAVE_HOBBIT
        return compare_managed(o);
#else
        throw error("this is unpatched llama.cpp: only --stock-only-dump and --swap-experts work");
#endif
    } catch (const refused & e) {
        print_json(o, "\"refused\": " + quote(e.what()));
        return EXIT_REFUSED;
    } catch (const std::exception & e) {
        fprintf(stderr, "hobbit-exact: error: %s\n", e.what());
        return EXIT_BROKEN;
    }
}
