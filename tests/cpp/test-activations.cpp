// activations: a running request finds the past one that it resembles; the collection stays bounded and diverse.

#include "check.h"

#include "activations.h"

#include <numeric>
#include <random>

static constexpr int N_LAYER  = 3;
static constexpr int N_EXPERT = 8;
static constexpr int N_KEYS   = N_LAYER * N_EXPERT;

// a request that used, in each layer, mostly experts first and first + 1
static hobbit_records request(int first, uint32_t n_tokens, uint32_t seed) {
    std::mt19937   rng(seed);
    hobbit_records records;
    records.reset(N_KEYS);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        records.n_tokens++;
        for (int layer = 0; layer < N_LAYER; ++layer) {
            records.use((size_t) layer * N_EXPERT + (first + (rng() % 5 == 0 ? rng() % N_EXPERT : rng() % 2)) % N_EXPERT, true);
        }
    }
    return records;
}

static hobbit_activations empty() {
    hobbit_activations past;
    past.init(N_LAYER, N_EXPERT);
    return past;
}

static void nothing_past_nothing_found() {
    hobbit_activations past = empty();
    CHECK(past.nearest(request(0, 10, 1)) == nullptr);
    hobbit_records unused;
    unused.reset(N_KEYS);
    past.add(unused);
    past.add(hobbit_records());
    CHECK(past.all().empty());
}

static void a_request_finds_its_kind_whatever_its_length() {
    hobbit_activations past = empty();
    for (int first = 0; first < N_EXPERT; first += 2) {
        past.add(request(first, 40, first));
    }
    for (int first = 0; first < N_EXPERT; first += 2) {
        for (uint32_t n_tokens : { 8u, 400u }) {
            CHECK(past.nearest(request(first, n_tokens, 77)) == past.all()[first / 2]);
        }
    }
}

static void the_collection_is_bounded_and_keeps_what_is_rare() {
    hobbit_activations past = empty();
    past.add(request(4, 40, 1));
    for (uint32_t i = 0; i < 3 * HOBBIT_ACTIVATIONS_MOST; ++i) {
        past.add(request(0, 40, i));
    }
    CHECK(past.all().size() == HOBBIT_ACTIVATIONS_MOST);
    CHECK(past.nearest(request(4, 10, 5)) == past.all()[0]);
}

static void what_was_used_most_is_predicted_first() {
    hobbit_activation past;
    past.n_tokens = 10;
    past.used.resize(N_KEYS);
    past.used[N_EXPERT + 6] = 5;
    past.used[N_EXPERT + 2] = 3;
    past.used[N_EXPERT + 7] = 2;
    int32_t ids[4];
    float   weights[4];
    hobbit_activations_predict(past, N_EXPERT, N_EXPERT, 4, ids, weights);
    CHECK(ids[0] == 6 && ids[1] == 2 && ids[2] == 7 && ids[3] == 0);
    CHECK(weights[0] == 0.5f && weights[1] == 0.3f && weights[2] == 0.2f && weights[3] == 0.0f);
    hobbit_activations_predict(past, 0, N_EXPERT, 4, ids, weights); // a layer without uses
    CHECK(std::accumulate(weights, weights + 4, 0.0f) == 0.0f);
}

static void another_past_request_makes_the_records_others() {
    hobbit_activations past = empty();
    past.add(request(0, 40, 1));
    hobbit_records records = request(0, 10, 2);
    const uint64_t before = records.generation;
    records.resembles(past.nearest(records));
    const uint64_t with = records.generation;
    CHECK(with != before);
    records.resembles(past.nearest(records));
    CHECK(records.generation == with);
    records.reset(N_KEYS);
    CHECK(records.like == nullptr);
}

int main() {
    nothing_past_nothing_found();
    a_request_finds_its_kind_whatever_its_length();
    the_collection_is_bounded_and_keeps_what_is_rare();
    what_was_used_most_is_predicted_first();
    another_past_request_makes_the_records_others();
    return check_result("activations");
}
