#include "cache.h"

#include <algorithm>

void hobbit_records::reset(size_t n_keys) {
    n_tokens = 0;
    entries.assign(n_keys, entry());
}

void hobbit_records::use(size_t key, bool high) {
    entry & e = entries[key];
    e.last  = n_tokens;
    e.used += 1;
    e.high += high ? 1 : 0;
}

hobbit_pool::hobbit_pool(int n_layer, int n_expert, int n_slots, const hobbit_policy_params & params) :
    n_layer(n_layer), n_expert(n_expert), params(params), slots(n_slots), slot_of((size_t) n_layer * n_expert, -1) {
    free_slots.reserve(n_slots);
    for (int i = n_slots - 1; i >= 0; --i) {
        free_slots.push_back(i);
    }
}

float hobbit_pool::priority(int slot, int layer, const hobbit_records * const * records, int n_records) const {
    const int64_t k   = slots[slot].key;
    const int     l_t = (int) (k / n_expert);

    float best = 0.0f;
    for (int i = 0; i < n_records; ++i) {
        const hobbit_records &        rec = *records[i];
        const hobbit_records::entry & e   = rec.entries[k];
        const float inv_t = rec.n_tokens > 0 ? 1.0f / rec.n_tokens : 0.0f;

        const float p = params.policy == HOBBIT_POLICY_LFU ?
            e.used * inv_t :
            (params.w_lru * e.last + params.w_lfu * e.used + params.w_lhu * e.high) * inv_t;
        best = std::max(best, p);
    }
    if (params.policy == HOBBIT_POLICY_LFU) {
        return best;
    }
    const int distance = (l_t - layer + n_layer) % n_layer;
    return best + params.w_fld * (1.0f - (float) distance / n_layer);
}

int hobbit_pool::place(int layer, int expert, const hobbit_records * const * records, int n_records, bool evict, int64_t * evicted) {
    *evicted = -1;

    int slot = -1;
    if (!free_slots.empty()) {
        slot = free_slots.back();
        free_slots.pop_back();
    } else if (evict) {
        float p_min = 0.0f;
        for (int i = 0; i < (int) slots.size(); ++i) {
            if (slots[i].pins > 0) {
                continue;
            }
            const float p = params.policy == HOBBIT_POLICY_LRU ? 0.0f : priority(i, layer, records, n_records);
            // the older use goes first among equals; under LRU all are equal
            if (slot < 0 || p < p_min || (p == p_min && slots[i].stamp < slots[slot].stamp)) {
                slot  = i;
                p_min = p;
            }
        }
        if (slot < 0) {
            return -1;
        }
        *evicted = slots[slot].key;
        slot_of[slots[slot].key] = -1;
    } else {
        return -1;
    }

    slots[slot].key  = (int64_t) key(layer, expert);
    slots[slot].pins = 1;
    slot_of[slots[slot].key] = slot;
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
        slot_of[slots[stay.back()].key] = -1;
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
        slot_of[slots[to].key] = to;
        moves.emplace_back(from, to);
    }
    slots.resize(n_slots);
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
        slot_of[slots[slot].key] = -1;
        slots[slot] = slot_info();
        free_slots.push_back(slot);
    }
}
