// cooperate: experts that a device misses are computed by the CPU from host memory, while the device computes its hits (--hobbit-miss).
//
// While llama.cpp builds a layer, its FFN is built a second time, from the hidden state to the output of MUL_MAT_ID over the down
// weights, in a small graph of the engine's own over the managed weights. The kernel computes there what route.on_cpu lists
// and leaves zeros elsewhere. The route node starts that graph on a thread and a CPU backend of the engine's: a CPU split of llama.cpp's
// graph would wait for the device first. A join node behind the device's MUL_MAT_ID waits for the thread, and the two outputs
// are added, each zero where the other is not. So weighting and summing stay llama.cpp's, in its order.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct hobbit_context;
struct hobbit_route;
struct route_choice;

// a straight line through what was measured, older samples counting less
class hobbit_line {
  public:
    void   add(double x, double y);
    double at (double x) const; // 0 before the first sample
    bool   known() const { return n >= 3; }

  private:
    double n = 0, x1 = 0, y1 = 0, xx = 0, xy = 0; // decayed sums
};

// what a layer's misses take, in seconds
struct hobbit_miss_case {
    int                 n;            // experts, of some bytes each
    uint64_t            expert_bytes;
    const hobbit_line & cpu;          // by bytes
    const hobbit_line & link;
    double              busy;         // until the link has done other copies
    double              device;       // that the device computes for, once the copies are there

    double time(int k) const; // if the CPU computes k of them and the others are copied
    int    best()      const; // the k that ends soonest
};

// seconds that the CPU and a device's link take, learnt; and when `auto` tries the one that it would not choose
struct hobbit_miss_costs {
    struct rows {
        hobbit_line cpu;    // of the engine's graph, by bytes of its experts
        hobbit_line device; // of the device, from the route node to the join where no copies came between; at 1
    } by_rows[6];           // up to 1, 2, 4, .. 32

    double spent = 0; // by choices of `auto` since the last trial
    rows & of(int64_t n_rows);
};

// a layer's second graph, for one number of rows
struct hobbit_cpu_ffn {
    ggml_context_ptr ctx;
    ggml_cgraph *    graph   = nullptr;
    ggml_tensor *    cur     = nullptr; // F32 [n_embd, n_rows]
    ggml_tensor *    ids     = nullptr; // I32 [n_used, n_rows], experts
    ggml_tensor *    weights = nullptr; // F32 [1, n_used, n_rows]
    ggml_tensor *    out     = nullptr; // F32 [n_embd, n_used, n_rows]; NULL: cannot be computed apart
    size_t           bytes   = 0;       // of all its tensors

    std::map<const ggml_tensor *, ggml_tensor *> twins; // of the tensors of llama.cpp's graph, while that is built
    std::string                                  why_not;
};

// the thread that computes them, one graph at a time; of the model, since steps of one model do not overlap
class hobbit_cpu_worker {
  public:
    explicit hobbit_cpu_worker(ggml_backend_dev_t cpu);
    ~hobbit_cpu_worker();

    // gives the graph's tensors addresses, so that its inputs can be filled; nothing may be running
    void prepare(hobbit_cpu_ffn & ffn);
    void start  (hobbit_cpu_ffn & ffn, int n_threads);
    void wait(); // for what was started, if anything
    double seconds() const { return took; } // of what was waited for

    // a weight in host memory: the tensor itself, or a copy
    ggml_tensor * host_copy(ggml_context * ctx, const ggml_tensor * weight);

  private:
    void run();

    ggml_backend_ptr     backend;
    ggml_backend_set_n_threads_t set_n_threads = nullptr;
    std::vector<char>    arena;
    std::map<const ggml_tensor *, std::vector<char>> copies;

    std::thread             thread;
    std::mutex              mutex;
    std::condition_variable changed;
    hobbit_cpu_ffn *        job       = nullptr; // guarded by mutex, as what follows
    int                     n_threads = 1;
    bool                    stop      = false;
    double                  took      = 0.0;
};

// while the layer's graph is built, in this order: what the FFN may use; each MUL_MAT_ID over managed weights and what the device
// computes in its place. For the last, the down weights, returns the sum of both; else, and where the FFN cannot be computed apart, on_device
void          hobbit_cooperate_begin (hobbit_route & route, ggml_tensor * node, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * cur);
ggml_tensor * hobbit_cooperate_attach(hobbit_route & route, ggml_context * ctx0, ggml_tensor * mul_mat_id, ggml_tensor * on_device);

// in the route node, once the host tier holds what the device misses: fills route.on_cpu and starts the CPU. weights: [n_used, n_rows]
void hobbit_cooperate_start(hobbit_route & route, const ggml_tensor * ids, const ggml_tensor * cur, const ggml_tensor * weights);

// when a step is over: whether graphs go on having a part for the CPU, if `auto` never chooses it
void hobbit_cooperate_judge(hobbit_context & ctx);
