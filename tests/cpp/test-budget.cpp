// budget: pools never exceed what is allowed, hold at least one token's experts, and waste nothing that an expert fits in

#include "check.h"

#include "budget.h"

#include <algorithm>
#include <random>

static uint64_t total(const hobbit_plan_params & p, const hobbit_plan & plan) {
    return p.router_bytes + plan.n_ring * p.ring_bytes + plan.n_slots[HOBBIT_LOW] * p.slot_bytes[HOBBIT_LOW] + plan.n_slots[HOBBIT_HIGH] * p.slot_bytes[HOBBIT_HIGH];
}

static void plans_hold_for_random_models() {
    std::mt19937 rng(3);
    for (int round = 0; round < 20000; ++round) {
        hobbit_plan_params p = {};
        p.n_expert_used = 1 + rng() % 16;
        p.n_experts     = p.n_expert_used + rng() % 2000;
        p.router_bytes  = rng() % 100000;
        p.ring_bytes    = 4096 * (1 + rng() % 1000);
        p.slot_bytes[HOBBIT_HIGH] = rng() % 4 ? 3 * p.ring_bytes : 0;
        p.slot_bytes[HOBBIT_LOW]  = rng() % 2 || p.slot_bytes[HOBBIT_HIGH] == 0 ? p.ring_bytes : 0;
        p.low_share     = 0.01f + 0.98f * (rng() % 100) / 100;

        const uint64_t least = hobbit_plan_min_bytes(p);
        hobbit_plan plan;
        p.budget = least - 1;
        CHECK(!hobbit_plan_pools(p, plan));

        for (uint64_t extra : { (uint64_t) 0, (uint64_t) rng(), (uint64_t) 1 << 50 }) {
            p.budget = least + extra;
            CHECK(hobbit_plan_pools(p, plan));
            CHECK(total(p, plan) <= p.budget);
            CHECK(plan.n_ring >= 2);
            bool all_resident = true;
            for (int i = 0; i < HOBBIT_N_PRECISIONS; ++i) {
                if (p.slot_bytes[i] > 0) {
                    CHECK(plan.n_slots[i] >= p.n_expert_used);
                    CHECK(plan.n_slots[i] <= p.n_experts);
                    all_resident = all_resident && plan.n_slots[i] == p.n_experts;
                } else {
                    CHECK(plan.n_slots[i] == 0);
                }
            }
            // either everything is resident, or not one more expert of the smallest unfinished pool fits
            uint64_t smallest = UINT64_MAX;
            for (int i = 0; i < HOBBIT_N_PRECISIONS; ++i) {
                if (p.slot_bytes[i] > 0 && plan.n_slots[i] < p.n_experts) {
                    smallest = std::min(smallest, p.slot_bytes[i]);
                }
            }
            CHECK(all_resident || p.budget - total(p, plan) < smallest);
        }
        if (n_failed > 0) {
            return;
        }
    }
}

static void memory_of_this_machine_makes_sense() {
    const hobbit_memory mem = hobbit_memory_now();
    CHECK(mem.limit > (64u << 20));
    CHECK(mem.used < mem.limit);
    CHECK(hobbit_memory_margin(8ull << 30) == 1ull << 30);
    CHECK(hobbit_memory_margin(1ull << 29) == 96ull << 20);
}

int main() {
    plans_hold_for_random_models();
    memory_of_this_machine_makes_sense();
    return check_result("budget");
}
