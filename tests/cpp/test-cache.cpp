// cache: eviction order per policy, pins, and agreement with a naive table over random sequences

#include "check.h"

#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <thread>
#include <vector>

static hobbit_policy_params with(hobbit_policy policy) {
    hobbit_policy_params params;
    params.policy = policy;
    return params;
}

static int place(hobbit_pool & pool, int layer, int expert, const hobbit_records * records = nullptr, bool evict = true) {
    int64_t evicted;
    const int slot = pool.place(layer, expert, &records, records ? 1 : 0, evict, &evicted);
    if (slot >= 0) {
        pool.unpin(slot);
    }
    return slot;
}

static void lru_evicts_what_was_touched_longest_ago() {
    hobbit_pool pool(1, 8, 3, with(HOBBIT_POLICY_LRU));
    for (int e = 0; e < 3; ++e) {
        place(pool, 0, e);
    }
    pool.touch(pool.find(0, 0));
    place(pool, 0, 3);
    CHECK(pool.find(0, 0) >= 0);
    CHECK(pool.find(0, 1) <  0);
    CHECK(pool.find(0, 2) >= 0);
    CHECK(pool.find(0, 3) >= 0);
}

static void lfu_evicts_what_the_sequence_used_least() {
    hobbit_pool    pool(1, 8, 3, with(HOBBIT_POLICY_LFU));
    hobbit_records records;
    records.reset(8);
    const int uses[] = { 3, 1, 2 };
    for (int e = 0; e < 3; ++e) {
        place(pool, 0, e, &records);
        for (int i = 0; i < uses[e]; ++i) {
            records.n_tokens++;
            records.use(e, false);
        }
    }
    place(pool, 0, 3, &records);
    CHECK(pool.find(0, 1) < 0);
}

static void score_is_equation_3() {
    hobbit_policy_params params;
    params.w_lru = 0.1f;
    params.w_lfu = 0.2f;
    params.w_lhu = 0.3f;
    params.w_fld = 0.4f;
    const int n_layer = 4;
    hobbit_pool    pool(n_layer, 2, 2, params);
    hobbit_records records;
    records.reset(n_layer * 2);

    place(pool, 3, 1, &records);
    records.n_tokens = 5;
    records.use(3*2 + 1, true);  // R 5, F 1, H 1
    records.n_tokens = 7;
    records.use(3*2 + 1, false); // R 7, F 2, H 1
    records.n_tokens = 10;       // T 10

    const hobbit_records * r = &records;
    // from layer 1: distance (3 - 1 + 4) mod 4 = 2
    const float expected = 0.1f * 7/10 + 0.2f * 2/10 + 0.3f * 1/10 + 0.4f * (1.0f - 2.0f/4);
    CHECK(std::fabs(pool.priority(pool.find(3, 1), 1, &r, 1) - expected) < 1e-6f);
    // the layer itself is nearest, the one just computed farthest
    CHECK(pool.priority(pool.find(3, 1), 3, &r, 1) > pool.priority(pool.find(3, 1), 0, &r, 1));
}

static void low_precision_use_does_not_touch_h() {
    hobbit_records records;
    records.reset(1);
    records.n_tokens = 1;
    records.use(0, false);
    CHECK(records.entries[0].used == 1);
    CHECK(records.entries[0].high == 0);
}

static void new_sequence_resets_records_not_contents() {
    hobbit_pool    pool(1, 4, 2, with(HOBBIT_POLICY_HOBBIT));
    hobbit_records records;
    records.reset(4);
    records.n_tokens = 1;
    place(pool, 0, 2, &records);
    records.use(2, true);
    records.reset(4);
    CHECK(records.n_tokens == 0);
    CHECK(records.entries[2].used == 0);
    CHECK(pool.find(0, 2) >= 0);
}

static void pinned_slots_stay_and_a_full_pool_says_no() {
    hobbit_pool pool(1, 8, 2, with(HOBBIT_POLICY_LRU));
    int64_t evicted;
    const int a = pool.place(0, 0, nullptr, 0, true, &evicted);
    const int b = pool.place(0, 1, nullptr, 0, true, &evicted);
    CHECK(a >= 0 && b >= 0 && a != b);
    CHECK(pool.place(0, 2, nullptr, 0, true, &evicted) == -1);
    pool.unpin(b);
    CHECK(pool.place(0, 2, nullptr, 0, false, &evicted) == -1); // not allowed to evict
    CHECK(pool.place(0, 2, nullptr, 0, true,  &evicted) == b);
    CHECK(evicted == 1);
    CHECK(pool.find(0, 0) == a);
}

static void dropped_slot_is_free_again() {
    hobbit_pool pool(1, 8, 1, with(HOBBIT_POLICY_LRU));
    int64_t evicted;
    const int slot = pool.place(0, 5, nullptr, 0, true, &evicted);
    pool.drop(slot);
    CHECK(pool.find(0, 5) == -1);
    CHECK(pool.n_used() == 0);
    CHECK(pool.place(0, 6, nullptr, 0, false, &evicted) == slot);
    CHECK(evicted == -1);
}

static void another_thread_may_ask_while_the_pool_changes() {
    const int   n_layer = 2, n_expert = 32;
    hobbit_pool pool(n_layer, n_expert, 16, with(HOBBIT_POLICY_LRU));

    const auto n_found = [&] {
        int n = 0;
        for (int key = 0; key < n_layer * n_expert; ++key) {
            n += pool.find(key / n_expert, key % n_expert) >= 0 ? 1 : 0;
        }
        return n;
    };
    std::atomic<bool> done { false };
    std::atomic<int>  n_read { 0 };
    std::thread reader([&] {
        while (!done || n_read == 0) {
            CHECK(pool.n_used() >= 0 && pool.n_used() <= 24);
            CHECK(n_found() <= n_layer * n_expert);
            n_read++;
        }
    });
    std::mt19937 rng(1);
    for (int i = 0; i < 20000; ++i) {
        const int layer  = (int) (rng() % n_layer);
        const int expert = (int) (rng() % n_expert);
        const int slot   = pool.find(layer, expert);
        if (slot < 0) {
            place(pool, layer, expert);
        } else if (rng() % 4 == 0) {
            pool.drop(slot);
        }
        if (i % 100 == 0) {
            pool.resize(8 + (int) (rng() % 17));
        }
        CHECK(pool.n_used() == n_found());
    }
    done = true;
    reader.join();
}

static void resize_keeps_what_was_touched_last() {
    std::mt19937 rng(11);
    for (int round = 0; round < 200; ++round) {
        const int   n_before = 1 + (int) (rng() % 20);
        const int   n_after  = 1 + (int) (rng() % 20);
        hobbit_pool pool(2, 32, n_before, with(HOBBIT_POLICY_LRU));
        std::vector<int64_t> memory(std::max(n_before, n_after), -1); // what each slot's bytes are
        std::vector<int64_t> order;                                   // keys, latest first
        for (int i = 0; i < (int) (rng() % 40); ++i) {
            const int layer = (int) (rng() % 2), expert = (int) (rng() % 32);
            if (pool.find(layer, expert) < 0) {
                memory[place(pool, layer, expert)] = layer * 32 + expert;
            }
            pool.touch(pool.find(layer, expert));
            order.erase(std::remove(order.begin(), order.end(), layer * 32 + expert), order.end());
            order.insert(order.begin(), layer * 32 + expert);
        }
        order.resize(std::min<size_t>(order.size(), n_before));
        for (const auto & [from, to] : pool.resize(n_after)) {
            CHECK(to < n_after && from >= n_after);
            memory[to] = memory[from];
        }
        CHECK(pool.n_slots() == n_after);
        CHECK(pool.n_used() == (int) std::min<size_t>(order.size(), n_after));
        for (size_t i = 0; i < order.size(); ++i) {
            const int slot = pool.find((int) (order[i] / 32), (int) (order[i] % 32));
            CHECK((slot >= 0) == ((int) i < n_after));
            CHECK(slot < n_after);
            CHECK(slot < 0 || (memory[slot] == order[i] && pool.key_at(slot) == order[i]));
        }
    }
}

// a table written as plainly as can be
struct naive_pool {
    struct entry { int64_t key; int pins; uint64_t stamp; };
    size_t             n_slots;
    uint64_t           clock = 0;
    std::vector<entry> entries;

    int in_layer(int64_t layer, int n_expert) const {
        int n = 0;
        for (const entry & e : entries) {
            n += e.key / n_expert == layer ? 1 : 0;
        }
        return n;
    }
    entry * find(int64_t key) {
        for (entry & e : entries) {
            if (e.key == key) {
                return &e;
            }
        }
        return nullptr;
    }
};

// scores as docs/policy.md writes them, for weights of 1/4 and a low copy of a quarter of the bytes
static double naive_score(hobbit_policy policy, const hobbit_records & r, int64_t key, int layer, int n_layer, int n_expert) {
    const hobbit_records::entry & e = r.entries[key];
    const int    d = (int) ((key / n_expert - layer + n_layer) % n_layer);
    const double t = r.n_tokens;
    switch (policy) {
        case HOBBIT_POLICY_HOBBIT:    return n_layer * ((double) e.last + e.used + e.high) + t * (n_layer - d); // times 4 T n_layer
        case HOBBIT_POLICY_LFU:
        case HOBBIT_POLICY_LFU_MODEL: return e.used;
        case HOBBIT_POLICY_LHU:       return e.high;
        case HOBBIT_POLICY_FLD:       return -d;
        case HOBBIT_POLICY_LCU:       return (e.high + 0.25 * (e.used - e.high)) / std::max(t, 1.0) + (e.last >= std::max(r.n_before, 1u) ? 1.0 / (d + 0.1) : 0.0);
        case HOBBIT_POLICY_LFRU:      return e.used / (t - e.last + 1.0);
        case HOBBIT_POLICY_GATE_MASS: return r.mass[key];
        case HOBBIT_POLICY_ACTIVATIONS: return (e.used + (r.like ? r.like->used[key] : 0) + 1.0 / 256) * (n_layer - (int) (key / n_expert)); // times (T + T') n_layer
        default:                      return 0.0;
    }
}

// n_sequences > 1: the records of sequences that take turns, and run together now and then
static void equals_a_naive_table(hobbit_policy policy, int n_sequences) {
    const int n_layer = 5, n_expert = 7, n_slots = 11;
    const size_t   n_keys = n_layer * n_expert;
    std::mt19937   rng(7 + policy);
    hobbit_pool    pool(n_layer, n_expert, n_slots, with(policy));
    naive_pool     naive = { (size_t) n_slots, 0, {} };
    hobbit_records sequences[4];
    for (hobbit_records & records : sequences) {
        records.reset(n_keys, policy == HOBBIT_POLICY_GATE_MASS);
    }
    std::vector<const hobbit_records *> now = { &sequences[0] };
    std::vector<int64_t> pinned;
    const int n_failed_before = n_failed;

    for (int step = 0; step < 100000; ++step) {
        const int     layer  = (int) (rng() % n_layer);
        const int     expert = (int) std::min(rng() % n_expert, rng() % n_expert);
        const int64_t key    = layer * n_expert + expert;
        if (n_sequences > 1 && rng() % 50 == 0) {
            const int first = (int) (rng() % n_sequences);
            const int last  = rng() % 3 == 0 ? n_sequences - 1 : first;
            now.clear();
            for (int i = first; i <= last; ++i) {
                now.push_back(&sequences[i]);
            }
        }
        const bool next_pass = rng() % 3 == 0;
        for (hobbit_records & records : sequences) {
            if (std::find(now.begin(), now.end(), &records) == now.end()) {
                continue;
            }
            if (rng() % 1000 == 0) {
                records.reset(n_keys, policy == HOBBIT_POLICY_GATE_MASS);
            }
            if (rng() % 500 == 0) {
                auto past = std::make_shared<hobbit_activation>();
                past->n_tokens = 1 + rng() % 50;
                for (size_t k = 0; k < n_keys; ++k) {
                    past->used.push_back(rng() % 20);
                }
                records.resembles(past);
            }
            if (next_pass) {
                records.begin_pass();
                records.n_tokens += 1 + rng() % 2;
            }
            records.use(key, rng() % 2 == 0, 0.01f * (1 + rng() % 99));
        }

        naive_pool::entry * e = naive.find(key);
        CHECK((e != nullptr) == (pool.find(layer, expert) >= 0));
        if (e) {
            e->stamp = ++naive.clock;
            pool.touch(pool.find(layer, expert));
            if (pinned.size() < 6 && rng() % 4 == 0) {
                e->pins++;
                pool.pin(pool.find(layer, expert));
                pinned.push_back(key);
            } else if (pinned.empty() && rng() % 100 == 0) {
                naive.entries.erase(naive.entries.begin() + (e - naive.entries.data()));
                pool.drop(pool.find(layer, expert));
            }
        } else {
            int64_t expected = -1;
            if (naive.entries.size() == naive.n_slots && policy != HOBBIT_POLICY_RANDOM) {
                double best = 0.0;
                const naive_pool::entry * out = nullptr;
                for (const naive_pool::entry & c : naive.entries) {
                    if (c.pins > 0) {
                        continue;
                    }
                    const double p = policy == HOBBIT_POLICY_LRU_LAYER ? -naive.in_layer(c.key / n_expert, n_expert) - (c.key / n_expert == layer) :
                            now.size() == 1 ? naive_score(policy, *now[0], c.key, layer, n_layer, n_expert) :
                            pool.priority(pool.find((int) (c.key / n_expert), (int) (c.key % n_expert)), layer, now.data(), (int) now.size());
                    if (!out || p < best || (p == best && c.stamp < out->stamp)) {
                        out  = &c;
                        best = p;
                    }
                }
                expected = out->key;
                naive.entries.erase(naive.entries.begin() + (out - naive.entries.data()));
            }
            int64_t evicted;
            const int slot = pool.place(layer, expert, now.data(), (int) now.size(), true, &evicted);
            CHECK(slot >= 0);
            if (policy == HOBBIT_POLICY_RANDOM && evicted >= 0) {
                // any will do, but a pinned one
                const naive_pool::entry * out = naive.find(evicted);
                CHECK(out && out->pins == 0 && naive.entries.size() == naive.n_slots);
                naive.entries.erase(naive.entries.begin() + (out - naive.entries.data()));
            } else {
                CHECK(evicted == expected);
            }
            naive.entries.push_back({ key, 0, ++naive.clock });
            pool.unpin(slot);
        }
        if (!pinned.empty() && rng() % 5 == 0) {
            const int64_t k = pinned.back();
            pinned.pop_back();
            naive.find(k)->pins--;
            pool.unpin(pool.find((int) (k / n_expert), (int) (k % n_expert)));
        }
        CHECK(pool.n_used() == (int) naive.entries.size());
        CHECK(pool.n_used() <= n_slots);
        for (int64_t k : pinned) {
            CHECK(pool.find((int) (k / n_expert), (int) (k % n_expert)) >= 0);
        }
        if (n_failed > n_failed_before) {
            fprintf(stderr, "policy %d, %d sequences, step %d\n", policy, n_sequences, step);
            return;
        }
    }
}

static void gate_mass_is_a_decaying_sum() {
    std::mt19937   rng(3);
    hobbit_records records;
    records.reset(4, true);
    double plain[4] = {};
    for (int token = 0; token < 5000; ++token) {
        records.n_tokens++;
        for (double & p : plain) {
            p *= 0.9;
        }
        const int   key    = (int) (rng() % 4);
        const float weight = 0.01f * (1 + rng() % 99);
        records.use(key, true, weight);
        plain[key] += weight;
    }
    for (int key = 0; key < 4; ++key) {
        const double mass = std::exp2(records.mass[key] + records.n_tokens * std::log2(0.9));
        CHECK(std::fabs(mass - plain[key]) < 1e-6);
    }
}

// with 10^5 slots a victim costs a few layers' heaps, not a look at every slot; sequences are of different ages
static void a_victim_is_found_without_looking_at_every_slot(hobbit_policy policy, int n_sequences) {
    const int n_layer = 100, n_expert = 2000, n_slots = 100000;
    std::mt19937   rng(5);
    hobbit_pool    pool(n_layer, n_expert, n_slots, with(policy));
    std::vector<hobbit_records>         sequences(n_sequences);
    std::vector<const hobbit_records *> now;
    for (hobbit_records & records : sequences) {
        records.reset((size_t) n_layer * n_expert, policy == HOBBIT_POLICY_GATE_MASS);
        records.n_tokens = 100 * (uint32_t) now.size();
        now.push_back(&records);
    }

    const auto token = [&] {
        int n_victims = 0;
        for (hobbit_records & records : sequences) {
            records.begin_pass();
            records.n_tokens++;
        }
        for (int layer = 0; layer < n_layer; ++layer) {
            std::vector<int> slots;
            for (int k = 0; k < 8; ++k) {
                const int expert = (int) std::min(rng() % n_expert, rng() % n_expert);
                sequences[rng() % n_sequences].use((size_t) layer * n_expert + expert, k < 4, 0.125f);
                int64_t   evicted = -1;
                int       slot    = pool.find(layer, expert);
                if (slot >= 0) {
                    pool.pin(slot);
                    pool.touch(slot);
                } else {
                    slot = pool.place(layer, expert, now.data(), n_sequences, true, &evicted);
                }
                n_victims += evicted >= 0 ? 1 : 0;
                slots.push_back(slot);
            }
            for (int slot : slots) {
                pool.unpin(slot);
            }
        }
        return n_victims;
    };
    while (pool.n_used() < n_slots) {
        token();
    }
    token(); // builds the heaps
    const uint64_t before = pool.n_looked_at();
    uint64_t n_victims = 0;
    for (int i = 0; i < 20; ++i) {
        n_victims += token();
    }
    const double per_victim = (double) (pool.n_looked_at() - before) / n_victims;
    CHECK(n_victims > 1000);
    CHECK(per_victim < 12.0 * n_layer * n_sequences);
    printf("policy %d, %d sequences: %.1f of %d slots looked at per victim\n", policy, n_sequences, per_victim, n_slots);
}

static void static_keeps_the_first_experts() {
    hobbit_pool pool(4, 8, 19, with(HOBBIT_POLICY_STATIC));
    for (int round = 0; round < 2; ++round) {
        for (int layer = 3; layer >= 0; --layer) {
            for (int expert = 0; expert < 8; ++expert) {
                int64_t evicted;
                if (pool.find(layer, expert) < 0) {
                    const int slot = pool.place(layer, expert, nullptr, 0, true, &evicted);
                    CHECK((slot >= 0) == (layer * 8 + expert < 19));
                    CHECK(evicted == -1);
                    if (slot >= 0) {
                        pool.unpin(slot);
                    }
                }
            }
        }
        CHECK(pool.n_used() == 19);
    }
    // in a smaller pool experts may stay that are none of its first; they make room
    pool.resize(10);
    for (int key = 0; key < 10; ++key) {
        int64_t evicted = 99;
        if (pool.find(key / 8, key % 8) < 0) {
            pool.unpin(pool.place(key / 8, key % 8, nullptr, 0, true, &evicted));
            CHECK(evicted == -1 || evicted >= 10);
        }
    }
    for (int key = 0; key < 19; ++key) {
        CHECK((pool.find(key / 8, key % 8) >= 0) == (key < 10));
    }
}

int main() {
    lru_evicts_what_was_touched_longest_ago();
    lfu_evicts_what_the_sequence_used_least();
    score_is_equation_3();
    low_precision_use_does_not_touch_h();
    new_sequence_resets_records_not_contents();
    pinned_slots_stay_and_a_full_pool_says_no();
    dropped_slot_is_free_again();
    another_thread_may_ask_while_the_pool_changes();
    resize_keeps_what_was_touched_last();
    gate_mass_is_a_decaying_sum();
    for (int policy = HOBBIT_POLICY_HOBBIT; policy < HOBBIT_POLICY_ORACLE; ++policy) {
        if (policy == HOBBIT_POLICY_STATIC) {
            continue;
        }
        for (int n_sequences : { 1, 2, 4 }) {
            equals_a_naive_table((hobbit_policy) policy, n_sequences);
        }
        if (policy != HOBBIT_POLICY_RANDOM) {
            a_victim_is_found_without_looking_at_every_slot((hobbit_policy) policy, 1);
            a_victim_is_found_without_looking_at_every_slot((hobbit_policy) policy, 4);
        }
    }
    static_keeps_the_first_experts();
    return check_result("cache");
}
