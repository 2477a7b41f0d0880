#include "prefetch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

//
// router bank
//

// in F32 whatever its type; empty if there is no such tensor or it cannot be read
static std::vector<float> read_aux(const hobbit_store & store, const std::string & name) {
    const hobbit_aux * aux = store.find_aux(name);
    std::string err;
    return aux ? hobbit_aux_read(*aux, err) : std::vector<float>();
}

bool hobbit_router_bank::load(const hobbit_store & store, std::string & why) {
    for (const hobbit_layer & managed : store.layers) {
        const std::string blk = hobbit_format("blk.%d.", managed.block);

        const std::vector<float> router = read_aux(store, blk + "ffn_gate_inp.weight");
        std::vector<float>       norm   = read_aux(store, blk + "ffn_norm.weight");
        std::vector<float>       norm_b = read_aux(store, blk + "ffn_norm.bias");
        if (norm.empty()) {
            norm   = read_aux(store, blk + "post_attention_norm.weight");
            norm_b = read_aux(store, blk + "post_attention_norm.bias");
        }
        if (store.find_aux(blk + "ffn_norm_exps.weight") || norm.empty() || router.size() != norm.size() * managed.n_expert) {
            why = hobbit_format("the input of block %d's router is not the normalised FFN input", managed.block);
            return false;
        }
        if (n_cols != 0 && n_cols != (int) norm.size()) {
            why = hobbit_format("block %d's router has %zu inputs, others %d", managed.block, norm.size(), n_cols);
            return false;
        }
        n_cols = (int) norm.size();

        layer l;
        l.n_expert = managed.n_expert;
        l.norm_b   = norm_b;
        l.select_b = read_aux(store, blk + "exp_probs_b.bias");
        l.constant = read_aux(store, blk + "ffn_gate_inp.bias");
        l.constant.resize(l.n_expert, 0.0f);
        l.unnorm.resize(n_cols);
        for (int i = 0; i < n_cols; ++i) {
            l.unnorm[i] = std::fabs(norm[i]) > 1e-6f ? 1.0f / norm[i] : 0.0f;
        }
        l.rows.resize((size_t) l.n_expert * n_cols);
        l.scale.resize(l.n_expert);
        std::vector<float> row(n_cols);
        for (int e = 0; e < l.n_expert; ++e) {
            float most = 0.0f;
            for (int i = 0; i < n_cols; ++i) {
                row[i] = router[(size_t) e * n_cols + i] * norm[i];
                most   = std::max(most, std::fabs(row[i]));
                if (!norm_b.empty()) {
                    l.constant[e] += router[(size_t) e * n_cols + i] * norm_b[i];
                }
            }
            l.scale[e] = most / 127.0f;
            for (int i = 0; i < n_cols; ++i) {
                l.rows[(size_t) e * n_cols + i] = (int8_t) std::lround(most > 0.0f ? row[i] / l.scale[e] : 0.0f);
            }
        }
        layers.push_back(std::move(l));
    }
    return true;
}

size_t hobbit_router_bank::bytes() const {
    size_t size = 0;
    for (const layer & l : layers) {
        size += l.rows.size() + sizeof(float) * (l.scale.size() + l.constant.size() + l.unnorm.size() + l.norm_b.size() + l.select_b.size());
    }
    return size;
}

void hobbit_router_bank::logits(int from, int to, const float * x, float * out) const {
    const layer & f = layers[from];
    const layer & t = layers[to];

    thread_local std::vector<float> bare;
    bare.resize(n_cols);
    for (int i = 0; i < n_cols; ++i) {
        bare[i] = (f.norm_b.empty() ? x[i] : x[i] - f.norm_b[i]) * f.unnorm[i];
    }
    for (int e = 0; e < t.n_expert; ++e) {
        const int8_t * row = t.rows.data() + (size_t) e * n_cols;
        // independent sums, so that the compiler may use vectors
        float sum[8] = {};
        int   i = 0;
        for (; i + 8 <= n_cols; i += 8) {
            for (int k = 0; k < 8; ++k) {
                sum[k] += bare[i + k] * row[i + k];
            }
        }
        for (; i < n_cols; ++i) {
            sum[0] += bare[i] * row[i];
        }
        out[e] = t.scale[e] * std::accumulate(sum, sum + 8, 0.0f) + t.constant[e];
    }
}

void hobbit_router_bank::predict(int from, int to, const float * x, int n_used, int32_t * ids, float * weights) const {
    const layer & t = layers[to];

    thread_local std::vector<float>   score;
    thread_local std::vector<float>   select;
    thread_local std::vector<int32_t> order;
    score.resize(t.n_expert);
    order.resize(t.n_expert);
    logits(from, to, x, score.data());

    // a router with a selection bias uses a sigmoid, the others a softmax, which is the exponential up to a factor
    const float most = *std::max_element(score.begin(), score.end());
    for (float & s : score) {
        s = t.select_b.empty() ? std::exp(s - most) : 1.0f / (1.0f + std::exp(-s));
    }
    select = score;
    for (size_t e = 0; e < t.select_b.size() && e < select.size(); ++e) {
        select[e] += t.select_b[e];
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + n_used, order.end(), [](int a, int b) { return select[a] > select[b]; });

    float sum = 0.0f;
    for (int k = 0; k < n_used; ++k) {
        sum += score[order[k]];
    }
    for (int k = 0; k < n_used; ++k) {
        ids[k]     = order[k];
        weights[k] = sum > 0.0f ? score[order[k]] / sum : 1.0f / n_used;
    }
}

//
// governor
//

static constexpr int   WINDOW      = 128;   // prefetched experts between two decisions
static constexpr int   WINDOW_LOSS = 32;    // the same where they seem to cost more than they bring
static constexpr int   RETRY       = 64;    // steps until prefetching that was turned off is tried again
static constexpr int   LOOK        = 6;     // steps without prefetching that tell how long the disk idles, the first time
static constexpr int   LOOK_MORE   = 4;     // and later
static constexpr int   LOOK_FIRST  = 12;    // steps of a trial until the next look; twice as many until the one after it,
static constexpr int   LOOK_AGAIN  = 256;   // and at most this many between two looks
static constexpr float USED_LEAST  = 0.5f;  // share of used prefetches below which to look less far
static constexpr float USED_MORE   = 0.75f; // and above which to look further
static constexpr float IDLE_LEAST  = 0.05f; // where the disk idles for less, prefetching is not tried
static constexpr float SLOWER      = 0.02f; // a slowdown that ends it, once it is certain;
static constexpr float SLOWER_1    = 0.2f;  // after n steps on both sides this / sqrt(n) more
static constexpr int   PACE_STEPS  = 64;    // steps that a pace remembers

void hobbit_governor::init(int most, bool adapt) {
    *this      = {};
    depth_max  = most;
    depth_now  = adapt ? 0 : most;
    adaptive   = adapt && most > 0;
    depth_next = most;
    wait       = LOOK;
    look_after = LOOK_FIRST;
    why        = most == 0 ? "off" : adapt ? "off: looking how long the disk idles" : "fixed";
}

bool hobbit_governor::allows(int layer) {
    if (!adaptive || layer >= (int) layers.size() || layers[layer].used >= USED_LEAST) {
        return true;
    }
    if (--layers[layer].wait <= 0) {
        layers[layer] = { USED_LEAST, 0 }; // a trial: the next few decide
    }
    return false;
}

void hobbit_governor::settled(int layer, bool was_used) {
    if (layer >= (int) layers.size()) {
        layers.resize(layer + 1);
    }
    layer_score & l = layers[layer];
    l.used = 0.95f * l.used + (was_used ? 0.05f : 0.0f);
    l.wait = l.used < USED_LEAST ? RETRY : 0;
}

void hobbit_governor::pause(int steps, const std::string & reason) {
    depth_next = depth_now;
    depth_now  = 0;
    n_steps    = 0;
    look_after = std::min(2 * look_after, LOOK_AGAIN);
    wait       = steps;
    why        = "off: " + reason;
}

void hobbit_governor::turn_off(const std::string & reason) {
    pause(RETRY << std::min(n_off, 4), reason);
    n_off++;
    depth_next = depth_max; // looking further takes hardly more bytes, and begins earlier to read them
    used = wasted = 0;
    with       = {};
    look_after = LOOK_FIRST;
}

void hobbit_governor::look() {
    n_off = 0; // it got as far as this
    if (without.n < LOOK) {
        without = {}; // the first steps after a prompt are like no others
    }
    pause(LOOK_MORE, "looking how long the disk idles");
}

// the running means take the first steps of a phase in full
static float weight_of_step(int n) {
    return std::max(0.1f, 1.0f / (float) n);
}

void hobbit_governor::pace::add(const hobbit_prefetch_step & s) {
    if (n == PACE_STEPS) {
        us    /= 2.0;
        bytes /= 2.0;
        n     /= 2;
    }
    us    += s.us;
    bytes += s.needed_bytes;
    n++;
}

// by how much a step takes longer with prefetching than without: for the bytes that it needs where the disk is what it waits for
float hobbit_governor::slowdown() const {
    const bool   by_bytes = idle < 0.5f;
    const double before   = by_bytes ? without.bytes : without.n;
    const double now      = by_bytes ? with.bytes    : with.n;
    return without.us > 0.0 && before > 0.0 && now > 0.0 ? (float) (with.us / now / (without.us / before) - 1.0) : 0.0f;
}

void hobbit_governor::step_without(const hobbit_prefetch_step & s) {
    if (++n_steps > 1) { // the first waits for what was read ahead by the one before it
        without.add(s);
    }
    idle += weight_of_step(n_steps) * (1.0f - s.demand_share - idle);
    if (--wait > 0) {
        return;
    }
    if (idle < IDLE_LEAST) {
        why = hobbit_format("off: the disk idles for %.0f %% of the time without it", 100.0f * idle);
        return; // the next step asks again
    }
    depth_now = depth_next;
    n_steps   = 0;
    waste     = 0.0f;
    why       = "on trial";
}

void hobbit_governor::step(const hobbit_prefetch_step & s) {
    if (!adaptive) {
        return;
    }
    if (depth_now == 0) {
        step_without(s);
        return;
    }
    waste  += weight_of_step(++n_steps) * (s.waste_share - waste);
    used   += s.used;
    wasted += s.wasted;
    if (n_steps > 1) {
        with.add(s);
    }
    if (with.n >= LOOK && slowdown() > SLOWER + SLOWER_1 / std::sqrt((float) std::min(with.n, without.n))) {
        turn_off(hobbit_format("steps took %.0f %% longer with it", 100.0f * slowdown()));
        return;
    }
    const bool loses = waste > idle; // the dearer mistake, so that it is looked for more often
    if (used + wasted < (loses ? WINDOW_LOSS : WINDOW)) {
        if (n_steps >= look_after) {
            look();
        }
        return;
    }
    const float share = (float) used / (used + wasted);
    used = wasted = 0;
    if (loses) {
        turn_off(hobbit_format("%.0f %% of the bytes read are wasted, and the disk idles for %.0f %% of the time without it", 100.0f * waste, 100.0f * idle));
    } else if (share < USED_LEAST && depth_now == 1) {
        turn_off(hobbit_format("%.0f %% of what was prefetched was used", 100.0f * share));
    } else if (share < USED_LEAST) {
        depth_now--;
        why = hobbit_format("less far: %.0f %% of what was prefetched was used", 100.0f * share);
    } else if (share > USED_MORE && depth_now < depth_max) {
        depth_now++;
        why = hobbit_format("further: %.0f %% of what was prefetched was used", 100.0f * share);
    } else {
        why = hobbit_format("on: %.0f %% of what was prefetched was used", 100.0f * share);
    }
    if (n_steps >= look_after && depth_now > 0) {
        look();
    }
}
