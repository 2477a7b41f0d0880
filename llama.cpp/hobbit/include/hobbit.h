// hobbit.h - the engine's C API: the only header of the engine that the llama.cpp patches and the Python package see.
//
// The engine keeps the routed experts of a mixture-of-experts model in files and brings in those that the router chose.
// Four objects, one owner each:
//
//   config   options as text, validated one by one and together; an integer handle that travels as a model KV override
//   model    files, expert table, cache, memory and I/O threads: one per llama_model, shared by its contexts
//   context  route state, sequence records, counters, the error of the running step: one per llama_context
//   step     one ubatch of one context: begin .. end. Steps of one model never overlap (begin blocks until it is free)
//
// Functions that can fail return false (or NULL) and write a one-line message into err[err_size]; nothing aborts.
// Unless a comment says otherwise a function may be called from any thread, but not twice at once on one object.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define HOBBIT_API
#else
#    define HOBBIT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend;
struct ggml_backend_buffer_type;
struct ggml_context;
struct ggml_tensor;
struct gguf_context;
struct llama_context;

struct hobbit_model;
struct hobbit_context;

//
// config
//

// one command line option: "--hobbit-<name> <hint>"; a flag has no hint and takes the value "on"
struct hobbit_option {
    const char * name;  // "cache"
    const char * flag;  // "--hobbit-cache"
    const char * env;   // "LLAMA_ARG_HOBBIT_CACHE"
    const char * hint;  // "SIZE", or NULL for a flag
    const char * help;
};

enum { HOBBIT_N_OPTIONS = 24 };

// the key of the integer KV override that carries a config handle into a model (and into --fit's trial loads)
#define HOBBIT_CONFIG_KEY "hobbit.config"

HOBBIT_API const struct hobbit_option * hobbit_option_get(int i); // 0 <= i < HOBBIT_N_OPTIONS

// a handle > 0; lives until the process ends, so that a model may be loaded from it again
HOBBIT_API int32_t hobbit_config_new  (void);
// name as in hobbit_option.name; an unknown name or a value out of range is refused with the values that would work
HOBBIT_API bool    hobbit_config_set  (int32_t config, const char * name, const char * value, char * err, size_t err_size);
// checks that options fit together; call it once after the last set
HOBBIT_API bool    hobbit_config_check(int32_t config, char * err, size_t err_size);
// print the load block, and the closing table when a context is freed, to stderr (the command line tools do; default: off)
HOBBIT_API void    hobbit_config_set_verbose(int32_t config, bool verbose);

// where messages of the load go (level 0: information, 1: warning) unless the configuration is verbose
HOBBIT_API void hobbit_set_log(void (*log)(int level, const char * text));

//
// model (called by llama.cpp's loader)
//

// meta: header of the model's (first) file, path: its name, both only for this call; no_alloc: register only, for a trial
// load that measures memory
HOBBIT_API struct hobbit_model * hobbit_model_new (int32_t config, const struct gguf_context * meta, const char * path,
                                                   bool no_alloc, char * err, size_t err_size);
HOBBIT_API void                  hobbit_model_free(struct hobbit_model * model);

// shows every tensor of the model to the engine, with where its bytes are. fd is duplicated when needed.
// buft: where llama.cpp would put it.
// true: the engine manages it; give it a buffer, but do not allocate or load it (see hobbit_model_adopt)
HOBBIT_API bool hobbit_model_add_tensor(struct hobbit_model * model, const struct ggml_tensor * meta, int fd, uint64_t offset,
                                        struct ggml_backend_buffer_type * buft);
// binds the tensor that the graph will use: sets data (to memory that must never be read) and extra
HOBBIT_API void hobbit_model_adopt(struct hobbit_model * model, struct ggml_tensor * tensor);
// true if this tensor was adopted by any model
HOBBIT_API bool hobbit_is_managed(const struct ggml_tensor * tensor);

// ggml_cpu_experts_repack, for a model whose other weights may be repacked too; before finish
HOBBIT_API void   hobbit_model_set_repack(struct hobbit_model * model, void * repack);
// after the other weights are loaded: checks the low-precision file against the model, sizes and allocates the cache.
// n_expert_used: the largest number of experts that one token uses in one layer
HOBBIT_API bool   hobbit_model_finish(struct hobbit_model * model, const struct gguf_context * meta, int32_t n_expert_used,
                                      char * err, size_t err_size);
// bytes of host memory that the cache may take
HOBBIT_API size_t hobbit_model_bytes(const struct hobbit_model * model);

// bytes of the i-th device's memory that the cache takes, and of which type; 0: there are not so many devices
HOBBIT_API size_t hobbit_model_device_bytes(const struct hobbit_model * model, int i, struct ggml_backend_buffer_type ** buft);

// the file with the high-precision experts that a pair's base file names, or NULL if the model is one ordinary file
HOBBIT_API const char * hobbit_model_pair_high(const struct hobbit_model * model);
// whether that file, whose header is meta, was written for this base file
HOBBIT_API bool         hobbit_model_check_high(const struct hobbit_model * model, const struct gguf_context * meta, char * err, size_t err_size);

//
// context (called by llama.cpp's context and graph)
//

HOBBIT_API struct hobbit_context * hobbit_context_new (struct hobbit_model * model);
HOBBIT_API void                    hobbit_context_free(struct hobbit_context * ctx);
// host memory that computing n_tokens at once will touch when it first happens: a cache of automatic size makes room for it then
HOBBIT_API void                    hobbit_context_reserved(struct hobbit_context * ctx, size_t bytes, int32_t n_tokens);
// tells the context of a backend that computes its graphs; each one, before the first step
HOBBIT_API void                    hobbit_context_add_backend(struct hobbit_context * ctx, struct ggml_backend * backend);

// what the step knows of its ubatch; arrays have n_tokens entries, pos and output may be NULL
struct hobbit_ubatch {
    int32_t          n_tokens;
    const int32_t *  seq_id;   // first sequence of each token
    const int32_t *  pos;      // a token at position 0 starts a new sequence
    const int8_t  *  output;   // tokens whose rows reach the last layer
    int32_t          n_threads; // with which the CPU computes it
};

HOBBIT_API void hobbit_step_begin(struct hobbit_context * ctx, const struct hobbit_ubatch * ubatch);
// same thread as begin. false: a read failed, the results are void; err names file, tensor and expert
HOBBIT_API bool hobbit_step_end  (struct hobbit_context * ctx, char * err, size_t err_size);

// starts the records of a sequence anew (prefix reuse never returns to position 0, so a server says it)
HOBBIT_API void hobbit_sequence_begin(struct hobbit_context * ctx, int32_t seq_id);

// graph: the route node of the MoE layer that weight w belongs to.
//   ids      I32 [n_expert_used, n_tokens], any strides
//   weights  F32 [1, n_expert_used, n_tokens], final gate weights
//   cur      F32 [n_embd, n_tokens], the FFN's normalised input
//   routed   whether that is the router's input and the router chooses by itself; else no prediction
// returns F32 [1, n_expert_used, n_tokens]: the weights, 0 where an expert is skipped. Where the layer is computed on a device it
// is a view of a tensor that holds the ids too
HOBBIT_API struct ggml_tensor * hobbit_build_route(struct hobbit_context * ctx, struct ggml_context * ctx0,
        struct ggml_tensor * w, struct ggml_tensor * ids, struct ggml_tensor * weights, struct ggml_tensor * cur, bool routed);
// makes a MUL_MAT_ID node over a managed weight depend on what hobbit_build_route returned for its layer. Returns the node to use
// in its place: itself, or, where the layer is computed on a device, one over the experts there, perhaps with what the CPU adds
HOBBIT_API struct ggml_tensor * hobbit_attach_route(struct hobbit_context * ctx, struct ggml_context * ctx0,
        struct ggml_tensor * mul_mat_id, struct ggml_tensor * route);
// changes when the graphs that were built for a context must be built anew
HOBBIT_API uint64_t hobbit_graph_epoch(const struct hobbit_context * ctx);

//
// control and statistics
//

// gives the host's cache another size (as --hobbit-cache), between steps; what is resident stays as far as it fits. Slots on
// devices stay as they are: their memory is taken at the load
HOBBIT_API bool   hobbit_resize  (struct hobbit_context * ctx, const char * cache, char * err, size_t err_size);
// out[layer * n_expert + expert]: 0 absent, 1 low, 2 high, for the first n; returns n_layer * n_expert
HOBBIT_API size_t hobbit_resident(struct hobbit_context * ctx, int8_t * out, size_t n);

// of the context that llama.cpp created with hobbit on, else NULL
HOBBIT_API struct hobbit_context * hobbit_from_llama(const struct llama_context * ctx);

HOBBIT_API void hobbit_stats_reset(struct hobbit_context * ctx);
// these return the length that the whole text needs (without the 0), as snprintf does
HOBBIT_API size_t hobbit_stats_json (struct hobbit_context * ctx, char * buf, size_t buf_size);
HOBBIT_API size_t hobbit_stats_table(struct hobbit_context * ctx, char * buf, size_t buf_size);
// totals in the exposition format of Prometheus
HOBBIT_API size_t hobbit_stats_metrics(struct hobbit_context * ctx, char * buf, size_t buf_size);
// what one sequence did since its hobbit_sequence_begin, as a JSON object. An expert that several sequences want in one step
// is one lookup, of the first that asks for the highest precision; "shared" counts such lookups. The sums are the totals
HOBBIT_API size_t hobbit_sequence_json(struct hobbit_context * ctx, int32_t seq_id, char * buf, size_t buf_size);

// the JSON as numbers, for who reads often
struct hobbit_stats_head {
    uint64_t prompt_tokens, prompt_us, decode_tokens, decode_us, steps, failed_steps;
    uint64_t prompt_stall_us, decode_stall_us, prompt_disk_us, decode_disk_us, expected_wasted_bytes;
    uint64_t lookups, hits, read_bytes, stall_us; // over all layers; all that was read, on demand and ahead
    uint64_t cache_bytes;
    int32_t  slots_high, slots_low, resident_high, resident_low;
    char     prefetch[256], warm_start[256];
};
HOBBIT_API const char * hobbit_counter_name(int i); // NULL beyond the last
// counters[layer * number of counters + i], then a row with the sums over layers; resident[layer * n_expert + expert]: '0' absent,
// '1' low, '2' high; either may be NULL. Waits for no step, and costs a step nothing when nobody asks
HOBBIT_API void hobbit_stats_read(struct hobbit_context * ctx, struct hobbit_stats_head * head, uint64_t * counters, char * resident);

// a policy for experiments. What may be evicted to make room for an expert of a layer; arrays have n entries
struct hobbit_candidates {
    int32_t          n;
    int32_t          layer;     // that needs the room, counted as in statistics
    int32_t          precision; // of the slots: 1 low, 2 high
    uint32_t         n_tokens;  // T, of the sequence; with several in one step the most
    const int32_t *  layers;
    const int32_t *  experts;
    const uint64_t * stamps;    // greater: touched later, by any sequence
    const uint32_t * last;      // R: token index of the last use in the sequence, 0: never; with several sequences the highest
    const uint32_t * used;      // F: uses
    const uint32_t * high;      // H: uses in high precision
};
// called for each eviction on the thread that called decode, while the model is locked: it must not call back. Returns the
// index of the candidate that goes; -1 leaves it to the configured policy
typedef int32_t (*hobbit_choose)(void * user, const struct hobbit_candidates * candidates);
HOBBIT_API void hobbit_set_policy(struct hobbit_context * ctx, hobbit_choose choose, void * user); // NULL: the configured one again

// what is in effect: files, types, slots, thresholds, policy
HOBBIT_API size_t hobbit_placement_json(struct hobbit_context * ctx, char * buf, size_t buf_size);
// writes what the router chooses and what the cache does about it to a file (docs/trace.md), from the next step on; of all
// contexts of the model. stop closes it; so does freeing the model
HOBBIT_API bool hobbit_trace_start(struct hobbit_context * ctx, const char * path, char * err, size_t err_size);
HOBBIT_API bool hobbit_trace_stop (struct hobbit_context * ctx, char * err, size_t err_size);
// prints the table and writes the --hobbit-stats files of every living verbose context now; for a signal's last words
HOBBIT_API void hobbit_report_all(void);

//
// replay of traces (docs/trace.md), on the same cache; not for use by several threads at once on one object
//

struct hobbit_replay;
HOBBIT_API struct hobbit_replay * hobbit_replay_open(const char * path, char * err, size_t err_size);
HOBBIT_API void                   hobbit_replay_free(struct hobbit_replay * replay);
// takes the decisions again. settings: "" for those of the trace, or "name=value;..." with names as in the trace's head, and
// cache_bytes, bandwidth (bytes per us), latency_us, compute_us, interruptible, block_bytes; the policy may be belady.
// Writes JSON as snprintf does; returns 0 and an error if a setting will not do
HOBBIT_API size_t hobbit_replay_run(const struct hobbit_replay * replay, const char * settings, char * buf, size_t buf_size, char * err, size_t err_size);

#ifdef __cplusplus
}
#endif
