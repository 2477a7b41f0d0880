// precision: the paper's rule, the article's rule, and what degenerate gate weights do

#include "check.h"

#include "precision.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

constexpr auto SKIP = HOBBIT_PRECISION_SKIP;
constexpr auto LOW  = HOBBIT_PRECISION_LOW;
constexpr auto HIGH = HOBBIT_PRECISION_HIGH;

static std::vector<hobbit_precision> score(hobbit_rule rule, float t1, float t2, std::vector<float> weights) {
    std::vector<hobbit_precision> out(weights.size());
    hobbit_precision_score({ rule, t1, t2 }, weights.data(), (int) weights.size(), out.data());
    return out;
}

using precisions = std::vector<hobbit_precision>;

static void top2_thresholds_fall_where_the_paper_says() {
    // second expert: high if g1 >= 0.4, low if 0.1 <= g1 < 0.4, skipped below 0.1
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 0.59f, 0.41f }) == precisions { HIGH, HIGH }));
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 0.62f, 0.38f }) == precisions { HIGH, LOW  }));
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 0.12f, 0.88f }) == precisions { LOW,  HIGH }));
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 0.05f, 0.95f }) == precisions { SKIP, HIGH }));
}

static void flat_top8_is_five_high_three_low() {
    const precisions got = score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, std::vector<float>(8, 0.125f));
    CHECK((got == precisions { HIGH, HIGH, HIGH, HIGH, HIGH, LOW, LOW, LOW }));
}

static void weights_are_normalised_before_scoring() {
    CHECK(score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 1.24f, 0.76f }) == score(HOBBIT_RULE_HOBBIT, 0.6f, 0.9f, { 0.62f, 0.38f }));
}

static void article_rule_skips_mixtrals_second_expert() {
    CHECK((score(HOBBIT_RULE_ARTICLE, 0.6f, 0.9f, { 0.55f, 0.45f }) == precisions { HIGH, SKIP }));
    CHECK((score(HOBBIT_RULE_ARTICLE, 0.3f, 0.9f, { 0.55f, 0.45f }) == precisions { HIGH, LOW  }));
}

static void thresholds_of_one_never_lower_anything() {
    CHECK((score(HOBBIT_RULE_HOBBIT, 1.0f, 1.0f, { 0.7f, 0.2f, 0.1f }) == precisions { HIGH, HIGH, HIGH }));
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.0f, 1.0f, { 0.7f, 0.2f, 0.1f }) == precisions { HIGH, LOW, LOW }));
    CHECK((score(HOBBIT_RULE_HOBBIT, 0.0f, 0.0f, { 0.7f, 0.2f, 0.1f }) == precisions { HIGH, SKIP, SKIP }));
}

static void t2_of_one_never_skips_whatever_the_rounding() {
    std::mt19937 rng(2);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    for (int round = 0; round < 20000; ++round) {
        std::vector<float> w(2 + rng() % 31);
        for (float & x : w) {
            x = rng() % 4 ? uniform(rng) : 0.0f;
        }
        for (hobbit_precision p : score(HOBBIT_RULE_HOBBIT, 0.6f, 1.0f, w)) {
            CHECK(p != SKIP);
        }
        for (hobbit_precision p : score(HOBBIT_RULE_HOBBIT, 1.0f, 1.0f, w)) {
            CHECK(p == HIGH);
        }
        if (n_failed > 0) {
            return;
        }
    }
}

static void useless_weights_still_give_one_high() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const std::vector<float> & weights : { std::vector<float> { 0.0f, 0.0f, 0.0f }, { nan, nan, nan }, { nan, 0.5f, -1.0f } }) {
        int n_high = 0;
        for (hobbit_precision p : score(HOBBIT_RULE_HOBBIT, 0.0f, 0.0f, weights)) {
            n_high += p == HIGH ? 1 : 0;
        }
        CHECK(n_high == 1);
    }
}

static void unimportance_is_the_weight_ranked_before() {
    std::mt19937 rng(1);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    for (int round = 0; round < 1000; ++round) {
        const int n = 1 + (int) (rng() % 16);
        std::vector<float> w(n);
        std::vector<float> s(n);
        float sum = 0.0f;
        for (float & x : w) {
            x = uniform(rng);
            sum += x;
        }
        hobbit_precision_unimportance(w.data(), n, s.data());
        for (int i = 0; i < n; ++i) {
            float before = 0.0f;
            for (int j = 0; j < n; ++j) {
                before += w[j] > w[i] ? w[j] : 0.0f;
            }
            CHECK(std::fabs(s[i] - before / sum) < 1e-5f);
        }
    }
}

static void shares_sum_to_one() {
    const float cases[][4] = { { 1, 2, 3, 4 }, { 0.1f, 0, 0, 0.1f }, { 0, 0, 0, 0 }, { NAN, 1, -1, INFINITY } };
    for (const auto & w : cases) {
        float share[4];
        hobbit_precision_shares(w, 4, share);
        float sum = 0.0f;
        for (float s : share) {
            CHECK(s >= 0.0f);
            sum += s;
        }
        CHECK(std::fabs(sum - 1.0f) < 1e-6f);
    }
    float share[4];
    hobbit_precision_shares(cases[0], 4, share);
    CHECK(std::fabs(share[3] - 0.4f) < 1e-6f);
    hobbit_precision_shares(cases[3], 4, share);
    CHECK(share[1] == 1.0f);
}

int main() {
    shares_sum_to_one();
    top2_thresholds_fall_where_the_paper_says();
    flat_top8_is_five_high_three_low();
    weights_are_normalised_before_scoring();
    article_rule_skips_mixtrals_second_expert();
    thresholds_of_one_never_lower_anything();
    t2_of_one_never_skips_whatever_the_rounding();
    useless_weights_still_give_one_high();
    unimportance_is_the_weight_ranked_before();
    return check_result("precision");
}
