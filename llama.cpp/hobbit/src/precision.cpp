#include "precision.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

// ranks by weight, largest first; equal weights keep their order, so that the answer is a function of the input alone
static void rank_by_weight(const float * weights, int n, std::vector<int> & rank) {
    rank.resize(n);
    std::iota(rank.begin(), rank.end(), 0);
    std::stable_sort(rank.begin(), rank.end(), [weights](int a, int b) { return weights[a] > weights[b]; });
}

// a router that produced NaN or nothing must not send the sort or the sums astray
static float usable(float w) {
    return std::isfinite(w) && w > 0.0f ? w : 0.0f;
}

void hobbit_precision_shares(const float * weights, int n, float * share) {
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        share[i] = usable(weights[i]);
        sum += share[i];
    }
    for (int i = 0; i < n; ++i) {
        share[i] = sum > 0.0f ? share[i] / sum : 1.0f / n;
    }
}

hobbit_precision hobbit_precision_given(hobbit_precision wanted, bool deterministic, bool has_low, bool has_high, bool here_low, bool here_high) {
    if (wanted == HOBBIT_PRECISION_LOW && !has_low) {
        wanted = HOBBIT_PRECISION_HIGH;
    }
    if (deterministic || wanted == HOBBIT_PRECISION_HIGH || !has_high) {
        return wanted;
    }
    return here_high ? HOBBIT_PRECISION_HIGH : here_low ? HOBBIT_PRECISION_LOW : wanted;
}

void hobbit_precision_unimportance(const float * weights, int n, float * score) {
    thread_local std::vector<int>   rank;
    thread_local std::vector<float> clean;

    clean.resize(n);
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        clean[i] = usable(weights[i]);
        sum += clean[i];
    }
    rank_by_weight(clean.data(), n, rank);

    float before = 0.0f;
    for (int i = 0; i < n; ++i) {
        score[rank[i]] = std::min(before, 1.0f); // rounding must not carry the last ones past T2 = 1
        before += sum > 0.0f ? clean[rank[i]] / sum : 1.0f / n;
    }
}

void hobbit_precision_score(const hobbit_thresholds & th, const float * weights, int n, hobbit_precision * out) {
    if (th.rule == HOBBIT_RULE_HIGH || th.rule == HOBBIT_RULE_LOW) {
        std::fill(out, out + n, th.rule == HOBBIT_RULE_HIGH ? HOBBIT_PRECISION_HIGH : HOBBIT_PRECISION_LOW);
        return;
    }

    thread_local std::vector<float> score;
    score.resize(n);
    hobbit_precision_unimportance(weights, n, score.data());

    if (th.rule == HOBBIT_RULE_HOBBIT) {
        for (int i = 0; i < n; ++i) {
            out[i] = score[i] <= th.t1 ? HOBBIT_PRECISION_HIGH :
                     score[i] <= th.t2 ? HOBBIT_PRECISION_LOW  :
                                         HOBBIT_PRECISION_SKIP;
        }
        return;
    }

    // article: the normalised weight itself is compared, the first expert excepted
    float sum   = 0.0f;
    int   first = 0;
    for (int i = 0; i < n; ++i) {
        sum += usable(weights[i]);
        if (usable(weights[i]) > usable(weights[first])) {
            first = i;
        }
    }
    for (int i = 0; i < n; ++i) {
        const float g = sum > 0.0f ? usable(weights[i]) / sum : 1.0f / n;
        out[i] = i == first || g > th.t2 ? HOBBIT_PRECISION_HIGH :
                 g > th.t1               ? HOBBIT_PRECISION_LOW  :
                                           HOBBIT_PRECISION_SKIP;
    }
}

void hobbit_precision_prefill(const hobbit_thresholds & th, hobbit_prefill prefill, const double * mass, int n, hobbit_precision * wanted) {
    if (prefill == HOBBIT_PREFILL_HIGHEST || th.rule == HOBBIT_RULE_HIGH) {
        return;
    }
    std::vector<int> ranked(n);
    std::iota(ranked.begin(), ranked.end(), 0);
    std::stable_sort(ranked.begin(), ranked.end(), [mass](int a, int b) { return mass[a] > mass[b]; });
    const double total  = std::accumulate(mass, mass + n, 0.0);
    double       before = 0.0;
    for (int i : ranked) {
        if (prefill == HOBBIT_PREFILL_LOW || before > th.t1 * total) {
            wanted[i] = std::min(wanted[i], HOBBIT_PRECISION_LOW);
        }
        before += mass[i];
    }
}
