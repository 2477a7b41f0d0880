#include "activations.h"

#include <algorithm>
#include <cmath>
#include <numeric>

static std::vector<uint32_t> uses_of(const hobbit_records & records) {
    std::vector<uint32_t> used;
    used.reserve(records.entries.size());
    for (const hobbit_records::entry & e : records.entries) {
        used.push_back(e.used);
    }
    return used;
}

void hobbit_activations::add(const hobbit_records & records) {
    auto now = std::make_shared<hobbit_activation>();
    now->n_tokens = records.n_tokens;
    now->used     = uses_of(records);
    if (std::any_of(now->used.begin(), now->used.end(), [](uint32_t n) { return n > 0; })) {
        add(std::move(now));
    }
}

void hobbit_activations::add(std::shared_ptr<const hobbit_activation> one) {
    if (past.size() < HOBBIT_ACTIVATIONS_MOST) {
        past.push_back(std::move(one));
    } else {
        past[index_of_nearest(one->used)] = std::move(one);
    }
}

size_t hobbit_activations::index_of_nearest(const std::vector<uint32_t> & used) const {
    size_t best = 0;
    double most = -1.0;
    for (size_t i = 0; i < past.size(); ++i) {
        double sum = 0.0; // of the layers' cosines
        for (int layer = 0; layer < n_layer; ++layer) {
            const uint32_t * a = used.data()          + (size_t) layer * n_expert;
            const uint32_t * b = past[i]->used.data() + (size_t) layer * n_expert;
            double ab = 0.0, aa = 0.0, bb = 0.0;
            for (int e = 0; e < n_expert; ++e) {
                ab += (double) a[e] * b[e];
                aa += (double) a[e] * a[e];
                bb += (double) b[e] * b[e];
            }
            sum += ab > 0.0 ? ab / std::sqrt(aa * bb) : 0.0;
        }
        if (sum > most) {
            most = sum;
            best = i;
        }
    }
    return best;
}

std::shared_ptr<const hobbit_activation> hobbit_activations::nearest(const std::vector<uint32_t> & used) const {
    return past.empty() ? nullptr : past[index_of_nearest(used)];
}

std::shared_ptr<const hobbit_activation> hobbit_activations::nearest(const hobbit_records & records) const {
    return past.empty() ? nullptr : nearest(uses_of(records));
}

void hobbit_activations_predict(const hobbit_activation & past, size_t key0, int n_expert, int n_used, int32_t * ids, float * weights) {
    const uint32_t * used = past.used.data() + key0;

    std::vector<int32_t> order(n_expert);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + n_used, order.end(), [used](int a, int b) { return used[a] != used[b] ? used[a] > used[b] : a < b; });

    const double total = std::accumulate(used, used + n_expert, 0.0);
    for (int k = 0; k < n_used; ++k) {
        ids[k]     = order[k];
        weights[k] = total > 0.0 ? (float) (used[order[k]] / total) : 0.0f;
    }
}
