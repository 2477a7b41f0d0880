#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>

// share of the old gate mass that is left after a token (HybriMoE's 1 - alpha is not published; docs/policy.md has what was tried)
static constexpr double MASS_KEPT = 0.9;

static constexpr double WEIGHT_UNIT = 1 << 24;
static constexpr double COST_UNIT   = 1 << 10;

// what an expert without any use counts in ACTIVATIONS, so that of those the last layer's goes first
static constexpr double UNUSED = 1.0 / 256;

static constexpr double UNKNOWN = -std::numeric_limits<double>::infinity(); // lower than every value

//
// records
//

static std::atomic<uint64_t> last_generation { 0 };

void hobbit_records::reset(size_t n_keys, bool with_mass) {
    n_tokens   = 0;
    n_before   = 0;
    generation = ++last_generation;
    entries.assign(n_keys, entry());
    mass.assign(with_mass ? n_keys : 0, UNKNOWN);
    like.reset();
}

void hobbit_records::resembles(std::shared_ptr<const hobbit_activation> past) {
    if (past != like) {
        like       = std::move(past);
        generation = ++last_generation;
    }
}

void hobbit_records::begin_pass() {
    n_before = n_tokens;
}

void hobbit_records::use(size_t key, bool high, float weight) {
    entry & e = entries[key];
    e.last  = n_tokens;
    e.used += 1;
    e.high += high ? 1 : 0;
    if (!mass.empty() && weight > 0.0f) {
        // that a token counts 1 / MASS_KEPT times the one before is the same as decay, and leaves what is not used alone
        const double more = std::log2(weight) - n_tokens * std::log2(MASS_KEPT);
        const double most = std::max(mass[key], more);
        mass[key] = most + std::log2(std::exp2(mass[key] - most) + std::exp2(more - most));
    }
}

//
// scores
//

hobbit_pool::hobbit_pool(int n_layer, int n_expert, int n_slots, const hobbit_policy_params & params) :
    n_layer(n_layer), n_expert(n_expert), params(params), slots(n_slots), slot_of((size_t) n_layer * n_expert), in_layer(n_layer),
    random(params.seed) {
    for (auto & slot : slot_of) {
        slot.store(-1, std::memory_order_relaxed);
    }
    const float w[] = { params.w_lru, params.w_lfu, params.w_lhu, params.w_fld };
    for (int i = 0; i < 4; ++i) {
        weight[i] = std::llround(w[i] * WEIGHT_UNIT);
    }
    low_cost = std::llround(params.low_cost * COST_UNIT);
    free_slots.reserve(n_slots);
    for (int i = n_slots - 1; i >= 0; --i) {
        free_slots.push_back(i);
    }
}

double hobbit_pool::value_of(int64_t key, const hobbit_records * records) const {
    if (params.policy == HOBBIT_POLICY_STATIC) {
        return (double) -key;
    }
    if (!records) {
        return 0.0;
    }
    const hobbit_records::entry & e = records->entries[key];
    switch (params.policy) {
        case HOBBIT_POLICY_HOBBIT:    return (double) (weight[0] * e.last + weight[1] * e.used + weight[2] * e.high);
        case HOBBIT_POLICY_LFU:
        case HOBBIT_POLICY_LFU_MODEL: return e.used;
        case HOBBIT_POLICY_LHU:       return e.high;
        case HOBBIT_POLICY_LCU:       return (double) ((int64_t) COST_UNIT * e.high + low_cost * (e.used - e.high));
        case HOBBIT_POLICY_LFRU:      return e.last;
        case HOBBIT_POLICY_GATE_MASS: return records->mass.empty() ? 0.0 : records->mass[key];
        case HOBBIT_POLICY_ACTIVATIONS: return e.used + (records->like ? records->like->used[key] : 0);
        default:                      return 0.0;
    }
}

uint32_t hobbit_pool::group_of(int64_t key, const hobbit_records * records) const {
    switch (params.policy) {
        case HOBBIT_POLICY_HOBBIT:
        case HOBBIT_POLICY_FLD:
        case HOBBIT_POLICY_LRU_LAYER:
        case HOBBIT_POLICY_ACTIVATIONS:
        case HOBBIT_POLICY_LCU:       return (uint32_t) (key / n_expert);
        case HOBBIT_POLICY_LFRU:      return records ? records->entries[key].used : 0;
        default:                      return 0;
    }
}

double hobbit_pool::score(double value, uint32_t group, int layer, const hobbit_records * records) const {
    const double n_tokens = records ? records->n_tokens : 0;
    switch (params.policy) {
        case HOBBIT_POLICY_HOBBIT:    return n_layer * value + n_tokens * (double) (weight[3] * (n_layer - distance(layer, (int) group)));
        case HOBBIT_POLICY_FLD:       return n_layer - distance(layer, (int) group);
        case HOBBIT_POLICY_LCU:       return value / (COST_UNIT * std::max(n_tokens, 1.0));
        case HOBBIT_POLICY_LRU_LAYER: return -(in_layer[group] + ((int) group == layer ? 1 : 0)); // with what it is about to hold
        case HOBBIT_POLICY_LFRU:      return group / (n_tokens - value + 1.0);
        case HOBBIT_POLICY_ACTIVATIONS: return (value + UNUSED) * (n_layer - (int) group);
        default:                      return value;
    }
}

double hobbit_pool::bonus(int64_t key, int layer, const hobbit_records * records) const {
    if (params.policy != HOBBIT_POLICY_LCU || !records || records->entries[key].last < std::max(records->n_before, 1u)) {
        return 0.0;
    }
    return 1.0 / (distance(layer, (int) (key / n_expert)) + 0.1);
}

double hobbit_pool::to_common_units(double score, const hobbit_records * records) const {
    const double n_tokens = records ? std::max(records->n_tokens, 1u) : 1;
    switch (params.policy) {
        case HOBBIT_POLICY_HOBBIT:    return score / (n_tokens * n_layer * WEIGHT_UNIT);
        case HOBBIT_POLICY_LFU:
        case HOBBIT_POLICY_LFU_MODEL:
        case HOBBIT_POLICY_LHU:       return score / n_tokens;
        case HOBBIT_POLICY_GATE_MASS: return score + n_tokens * std::log2(MASS_KEPT);
        case HOBBIT_POLICY_ACTIVATIONS: return score / (n_layer * (n_tokens + (records && records->like ? records->like->n_tokens : 0)));
        default:                      return score;
    }
}

double hobbit_pool::priority(int slot, int layer, const hobbit_records * const * records, int n_records) const {
    const int64_t k = slots[slot].key;
    if (params.policy == HOBBIT_POLICY_ORACLE) {
        return oracle(k, layer);
    }
    double best = UNKNOWN;
    for (int i = 0; i < std::max(n_records, 1); ++i) {
        const hobbit_records * r = n_records > 0 ? records[i] : nullptr;
        best = std::max(best, to_common_units(score(value_of(k, r), group_of(k, r), layer, r) + bonus(k, layer, r), r));
    }
    return best;
}

//
// victims
//

// later entries of a heap are better to keep: a heap's front is the lowest
struct keep_longer {
    template <typename T>
    bool operator()(const T & a, const T & b) const {
        return a.value != b.value ? a.value > b.value : a.stamp > b.stamp;
    }
};

void hobbit_pool::push(uint64_t place, const item & it) {
    heap & h = heaps[place];
    h.push_back(it);
    std::push_heap(h.begin(), h.end(), keep_longer());
    n_items++;
}

// the next look tells where it belongs
void hobbit_pool::push_unknown(int slot) {
    const slot_info & s = slots[slot];
    push(group_of(s.key, nullptr) * std::max<uint64_t>(heaps_of.size(), 1), { UNKNOWN, 0, slot, s.serial });
}

void hobbit_pool::unpin(int slot) {
    slot_info & s = slots[slot];
    s.pins--;
    if (s.pins == 0 && s.key >= 0 && !s.queued && heaps_valid) {
        push_unknown(slot);
        s.queued = true;
    }
}

void hobbit_pool::rebuild() {
    heaps.clear();
    n_items = 0;
    for (int i = 0; i < (int) slots.size(); ++i) {
        slots[i].queued = slots[i].key >= 0 && slots[i].pins == 0;
        if (slots[i].queued) {
            push_unknown(i);
        }
    }
    heaps_valid = true;
}

int hobbit_pool::victim(int layer, const hobbit_records * const * records, int n_records) {
    if (chooser) {
        heaps_valid = false; // nobody would clear them up
        const int slot = chooser(layer, records, n_records);
        if (slot >= 0 && slots[slot].key >= 0 && slots[slot].pins == 0) {
            return slot;
        }
    }
    if (params.policy == HOBBIT_POLICY_RANDOM) {
        return victim_random();
    }
    if (params.policy == HOBBIT_POLICY_ORACLE) {
        return victim_scan(layer, records, n_records);
    }
    static constexpr hobbit_policy WITHOUT_RECORDS[] = { HOBBIT_POLICY_LRU, HOBBIT_POLICY_FLD, HOBBIT_POLICY_LRU_LAYER, HOBBIT_POLICY_STATIC };
    if (std::find(std::begin(WITHOUT_RECORDS), std::end(WITHOUT_RECORDS), params.policy) != std::end(WITHOUT_RECORDS)) {
        n_records = 0;
    }
    const bool same = std::equal(heaps_of.begin(), heaps_of.end(), records, records + n_records,
            [](uint64_t generation, const hobbit_records * r) { return r->generation == generation; });
    if (!heaps_valid || !same || n_items > 2 * slots.size() + 64) {
        heaps_of.clear();
        for (int i = 0; i < n_records; ++i) {
            heaps_of.push_back(records[i]->generation);
        }
        rebuild();
    }
    return victim_heaps(layer, records, n_records);
}

int hobbit_pool::victim_random() {
    const auto next = [this] { // splitmix64
        uint64_t z = random += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    };
    for (int i = 0; i < 64; ++i) {
        const int slot = (int) (next() % slots.size());
        if (slots[slot].pins == 0) {
            return slot;
        }
    }
    std::vector<int> unpinned; // nearly everything is pinned
    for (int i = 0; i < (int) slots.size(); ++i) {
        if (slots[i].pins == 0) {
            unpinned.push_back(i);
        }
    }
    return unpinned.empty() ? -1 : unpinned[next() % unpinned.size()];
}

int hobbit_pool::victim_scan(int layer, const hobbit_records * const * records, int n_records) const {
    int    slot  = -1;
    double p_min = 0.0;
    for (int i = 0; i < (int) slots.size(); ++i) {
        if (slots[i].pins > 0) {
            continue;
        }
        looked_at++;
        const double p = priority(i, layer, records, n_records);
        // the older use goes first among equals
        if (slot < 0 || p < p_min || (p == p_min && slots[i].stamp < slots[slot].stamp)) {
            slot  = i;
            p_min = p;
        }
    }
    return slot;
}

uint64_t hobbit_pool::place_of(int slot, int layer, const hobbit_records * const * records, int n_records, item & it) const {
    const slot_info & s = slots[slot];
    uint64_t place = 0;
    double   most  = 0.0;
    for (int i = 0; i < std::max(n_records, 1); ++i) {
        const hobbit_records * r     = n_records > 0 ? records[i] : nullptr;
        const uint32_t         group = group_of(s.key, r);
        const double           value = value_of(s.key, r);
        const double           p     = n_records > 1 ? to_common_units(score(value, group, layer, r), r) : 0.0;
        if (i == 0 || p > most) {
            most  = p;
            place = group * (uint64_t) std::max(n_records, 1) + i;
            it    = { value, s.stamp, slot, s.serial };
        }
    }
    return place;
}

int hobbit_pool::victim_heaps(int layer, const hobbit_records * const * records, int n_records) {
    int    slot  = -1;
    double p_min = 0.0;
    const auto consider = [&](int candidate, double p) {
        if (slot < 0 || p < p_min || (p == p_min && slots[candidate].stamp < slots[slot].stamp)) {
            slot  = candidate;
            p_min = p;
        }
    };
    const hobbit_records * longest = nullptr;
    for (int i = 0; i < n_records; ++i) {
        longest = longest && longest->n_tokens >= records[i]->n_tokens ? longest : records[i];
    }

    std::vector<item> kept;
    for (auto it = heaps.begin(); it != heaps.end();) {
        const uint64_t         place = it->first;
        const uint32_t         group = (uint32_t) (place / std::max(n_records, 1));
        const hobbit_records * r     = n_records > 0 ? records[place % n_records] : nullptr;
        heap &                 h     = it->second;
        // frequencies rise from group to group: when even the oldest use would score higher, all that follow do
        if (slot >= 0 && params.policy == HOBBIT_POLICY_LFRU && score(0.0, group, layer, longest) > p_min) {
            break;
        }
        kept.clear();
        while (!h.empty()) {
            const item  top = h.front();
            slot_info & s   = slots[top.slot];

            looked_at++;
            const bool     gone  = s.serial != top.serial;
            const bool     ready = !gone && s.pins == 0;
            item           now   = top;
            const uint64_t to    = ready ? place_of(top.slot, layer, records, n_records, now) : place;
            const bool     moves = to != place || now.value != top.value || now.stamp != top.stamp;

            double p_least = 0.0; // of all that is left in this heap
            if (ready && !moves) {
                p_least = to_common_units(score(now.value, group, layer, r), r);
                if (slot >= 0 && (p_least > p_min || (p_least == p_min && now.stamp > slots[slot].stamp))) {
                    break;
                }
            }
            std::pop_heap(h.begin(), h.end(), keep_longer());
            h.pop_back();
            n_items--;
            if (moves) {
                push(to, now);
                if (to < place) { // that heap has had its turn
                    consider(top.slot, priority(top.slot, layer, records, n_records));
                }
            } else if (ready) {
                const double p = priority(top.slot, layer, records, n_records);
                kept.push_back(now);
                consider(top.slot, p);
                if (p == p_least) {
                    break;
                }
            } else {
                s.queued = gone ? s.queued : false; // unpin() brings it back
            }
        }
        for (const item & i : kept) {
            push(place, i);
        }
        it = h.empty() ? heaps.erase(it) : std::next(it);
    }
    return slot;
}

void hobbit_pool::set_slot(int64_t key, int slot) {
    const int before = slot_of[key].load(std::memory_order_relaxed);
    slot_of[key].store(slot, std::memory_order_relaxed);
    n_taken.store(n_used() + (slot >= 0) - (before >= 0), std::memory_order_relaxed);
}

int hobbit_pool::place(int layer, int expert, const hobbit_records * const * records, int n_records, bool evict, int64_t * evicted) {
    *evicted = -1;
    if (params.policy == HOBBIT_POLICY_STATIC && key(layer, expert) >= slots.size()) {
        return -1;
    }

    int slot = -1;
    if (!free_slots.empty()) {
        slot = free_slots.back();
        free_slots.pop_back();
    } else if (evict) {
        slot = victim(layer, records, n_records);
        if (slot < 0) {
            return -1;
        }
        *evicted = slots[slot].key;
        set_slot(slots[slot].key, -1);
        in_layer[slots[slot].key / n_expert]--;
    } else {
        return -1;
    }

    slots[slot] = slot_info();
    slots[slot].key    = (int64_t) key(layer, expert);
    slots[slot].pins   = 1;
    slots[slot].serial = ++serials;
    set_slot(slots[slot].key, slot);
    in_layer[layer]++;
    touch(slot);
    return slot;
}

std::vector<int> hobbit_pool::by_last_touch() const {
    std::vector<int> used;
    for (int i = 0; i < (int) slots.size(); ++i) {
        if (slots[i].key >= 0) {
            used.push_back(i);
        }
    }
    std::sort(used.begin(), used.end(), [this](int a, int b) { return slots[a].stamp > slots[b].stamp; });
    return used;
}

std::vector<std::pair<int, int>> hobbit_pool::resize(int n_slots) {
    std::vector<int> stay = by_last_touch();
    while ((int) stay.size() > n_slots) {
        set_slot(slots[stay.back()].key, -1);
        in_layer[slots[stay.back()].key / n_expert]--;
        slots[stay.back()] = slot_info();
        stay.pop_back();
    }
    std::vector<std::pair<int, int>> moves;
    int to = 0;
    for (int from : stay) {
        if (from < n_slots) {
            continue;
        }
        while (slots[to].key >= 0) {
            to++;
        }
        std::swap(slots[to], slots[from]);
        set_slot(slots[to].key, to);
        moves.emplace_back(from, to);
    }
    slots.resize(n_slots);
    heaps_valid = false;
    free_slots.clear();
    for (int i = n_slots - 1; i >= 0; --i) {
        if (slots[i].key < 0) {
            free_slots.push_back(i);
        }
    }
    return moves;
}

void hobbit_pool::drop(int slot) {
    if (slots[slot].key >= 0) {
        set_slot(slots[slot].key, -1);
        in_layer[slots[slot].key / n_expert]--;
        slots[slot] = slot_info();
        free_slots.push_back(slot);
    }
}
