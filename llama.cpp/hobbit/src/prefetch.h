// prefetch: which experts the next layers will want, guessed from the input of this layer's router.
//
// Consecutive layers see much the same hidden state, so that layer l's router input, put to layer l+1's router, names most of its
// experts (HOBBIT section 3.3). The routers of all layers lie in one bank, 8 bits per weight with a scale per row, with the norm weights
// that precede each router folded in; the input is divided by its own layer's norm weights first. The governor watches what
// prefetching brings and sets how far ahead to look.

#pragma once

#include "store.h"

#include <cstdint>
#include <string>
#include <vector>

class hobbit_router_bank {
  public:
    // reads the routers and norms of all managed layers; false: prediction is off, why says so
    bool load(const hobbit_store & store, std::string & why);

    // x[n_embd]: the router input of layer from. out[n_expert]: raw logits of layer to's router on it
    void logits(int from, int to, const float * x, float * out) const;
    // the experts that layer to would choose, best first, and their gate weights (sum 1). ids and weights have n_used entries
    void predict(int from, int to, const float * x, int n_used, int32_t * ids, float * weights) const;

    int    n_embd() const { return n_cols; }
    size_t bytes()  const;

  private:
    struct layer {
        int                 n_expert = 0;
        std::vector<int8_t> rows;     // [n_expert * n_cols], norm weights folded in
        std::vector<float>  scale;    // [n_expert]
        std::vector<float>  constant; // [n_expert]: from norm and router biases
        std::vector<float>  unnorm;   // [n_cols]: 1 / norm weight
        std::vector<float>  norm_b;   // [n_cols], may be empty
        std::vector<float>  select_b; // [n_expert], may be empty: added to the sigmoid for the choice (DeepSeek-V3)
    };
    int                n_cols = 0;
    std::vector<layer> layers;
};

// what one step says about prefetching
struct hobbit_prefetch_step {
    int   used;         // prefetched experts that were then chosen
    int   wasted;       // and that were not
    float demand_share; // of the step's time in which demands kept the disk busy
    float waste_share;  // of the bytes read, those of wasted prefetches
    float us           = 0.0f; // that the step took; 0: not known
    float needed_bytes = 0.0f; // read, and not in vain
};

// How far to look ahead: 0 (off) .. max, and into which layers. Pure bookkeeping, fed once per step.
//
// All that prefetching can win is the time for which the disk idles without it; all that it can lose is what it reads in vain. So it
// begins switched off, to learn the first, and steps aside for a few steps now and then to learn it anew. A disk that saves up what
// it did not read while idle (a throttled one) has nothing to win: so the time that steps take with and without is compared, too.
class hobbit_governor {
  public:
    void init(int depth_max, bool adaptive);

    int depth() const { return depth_now; }
    const std::string & reason() const { return why; }

    // false: predictions for this layer were mostly wrong of late
    bool allows(int layer);
    // what became of an expert that was prefetched for a layer
    void settled(int layer, bool used);

    void step(const hobbit_prefetch_step & s);

  private:
    void pause(int steps, const std::string & reason);
    void turn_off(const std::string & reason);
    void look();
    void step_without(const hobbit_prefetch_step & s);
    float slowdown() const;

    // what steps of late took
    struct pace {
        double us    = 0.0;
        double bytes = 0.0; // needed
        int    n     = 0;
        void add(const hobbit_prefetch_step & s);
    };

    struct layer_score {
        float used = 1.0f; // running mean
        int   wait = 0;    // calls until the next trial
    };

    int         depth_max  = 0;
    int         depth_now  = 0;
    int         depth_next = 0;    // after a pause
    bool        adaptive   = false;
    int         used       = 0;
    int         wasted     = 0;
    float       idle       = 0.0f; // share of time in which the disk idles without prefetching, a running mean
    float       waste      = 0.0f; // running mean of waste_share
    pace        without, with;     // prefetching; the latter since it was last turned off
    int         n_steps    = 0;    // since prefetching was last switched on or off
    int         wait       = 0;    // steps of a pause that are left
    int         look_after = 0;    // steps with prefetching until the next look without it
    int         n_off      = 0;    // times in a row that a trial ended so
    std::string why = "off";
    std::vector<layer_score> layers;
};
