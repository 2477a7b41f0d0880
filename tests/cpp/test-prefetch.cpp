// prefetch: the bank's logits are the next router's on the re-normed input, and the governor follows what pays

#include "check.h"
#include "moe-file.h"

#include "prefetch.h"

#include <algorithm>
#include <cmath>
#include <random>

#include <fcntl.h>

static temp_dir dir;

static void open_model(const moe_file & model, hobbit_store & store) {
    const std::string path = dir / "m.gguf";
    model.write(path);
    const int fd = open(path.c_str(), O_RDONLY);
    show_all_tensors(store, path, fd);
    close(fd);
    std::string err;
    CHECK(store.finish(err));
}

static void logits_are_the_other_layers_router_on_its_own_norm() {
    moe_file model;
    model.n_layer  = 3;
    model.n_expert = 8;
    model.n_embd   = 40;
    model.n_ff     = 32;
    model.norms    = true;
    hobbit_store store;
    open_model(model, store);

    hobbit_router_bank bank;
    std::string why;
    CHECK(bank.load(store, why));
    CHECK(bank.n_embd() == 40);

    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
            std::vector<float> bare(40), x(40), out(8);
            for (int i = 0; i < 40; ++i) {
                bare[i] = normal(rng);
                x[i]    = bare[i] * moe_file::norm(from, i); // what the graph hands over
            }
            bank.logits(from, to, x.data(), out.data());
            std::vector<float> want(8);
            for (int e = 0; e < 8; ++e) {
                float size = 0.0f;
                for (int i = 0; i < 40; ++i) {
                    const float term = model.router_value(to, e * 40 + i) * moe_file::norm(to, i) * bare[i];
                    want[e] += term;
                    size    += std::fabs(term);
                }
                CHECK(std::fabs(out[e] - want[e]) < 0.01f * size); // 8 bits per weight
            }
            int32_t ids[3];
            float   weights[3];
            bank.predict(from, to, x.data(), 3, ids, weights);
            CHECK(out[ids[0]] >= out[ids[1]] && out[ids[1]] >= out[ids[2]]);
            CHECK(out[ids[0]] == *std::max_element(out.begin(), out.end()));
            CHECK(std::fabs(weights[0] + weights[1] + weights[2] - 1.0f) < 1e-5f);
            CHECK(weights[0] >= weights[1] && weights[1] >= weights[2]);
        }
    }
}

static void a_model_without_norms_is_not_predicted() {
    hobbit_store store;
    open_model({}, store);
    hobbit_router_bank bank;
    std::string why;
    CHECK(!bank.load(store, why));
    CHECK(why.find("block 0") != std::string::npos);
}

// steps until the governor looks ahead, or n
static int steps_until_on(hobbit_governor & g, float demand_share, int n) {
    int steps = 0;
    while (g.depth() == 0 && steps < n) {
        g.step({ 0, 0, demand_share, 0.0f });
        steps++;
    }
    return steps;
}

static void governor_goes_where_it_pays() {
    hobbit_governor g;
    g.init(3, true);
    CHECK(g.depth() == 0); // it looks first how long the disk idles without it
    const int first = steps_until_on(g, 0.5f, 1000);
    CHECK(g.depth() == 3 && first > 2 && first < 20);
    for (int i = 0; i < 100 && g.depth() != 1; ++i) {
        g.step({ 4, 6, 0.5f, 0.1f });
    }
    CHECK(g.depth() == 1);
    for (int i = 0; i < 100 && g.depth() < 3; ++i) {
        g.step({ 9, 1, 0.5f, 0.1f });
    }
    CHECK(g.depth() == 3);
    // now and then it looks what the disk does without; that is not why it ends
    for (int i = 0; i < 1000 && g.reason().find("off: 30 %") == std::string::npos; ++i) {
        g.step({ 3, 7, 0.5f, 0.1f });
    }
    CHECK(g.depth() == 0);
    CHECK(g.reason().find("off: 30 %") != std::string::npos);
    // off is not for ever
    CHECK(steps_until_on(g, 0.5f, 1000) > 10);
    CHECK(g.depth() == 3);
}

static void governor_does_not_begin_while_the_disk_is_busy_anyway() {
    hobbit_governor g;
    g.init(2, true);
    CHECK(steps_until_on(g, 0.99f, 500) == 500);
    CHECK(g.reason().find("the disk idles for 1 %") != std::string::npos);
    CHECK(steps_until_on(g, 0.5f, 100) < 10); // and sees soon that it no longer is
}

static void governor_looks_again_what_there_is_to_win() {
    hobbit_governor g;
    g.init(2, true);
    steps_until_on(g, 0.5f, 100);
    int n_on = 0, n_busy = 0;
    for (int i = 0; i < 2000; ++i) { // from step 1000 on, demands keep the disk busy
        n_on   += i < 1000 && g.depth() > 0 ? 1 : 0;
        n_busy += i > 1500 && g.depth() > 0 ? 1 : 0;
        g.step({ 9, 1, i < 1000 ? 0.5f : 0.99f, 0.05f });
    }
    CHECK(n_on > 950);
    CHECK(n_busy == 0);
}

static void a_fixed_depth_stays() {
    hobbit_governor g;
    g.init(2, false);
    for (int i = 0; i < 1000; ++i) {
        g.step({ 0, 10, 1.0f, 0.9f });
    }
    CHECK(g.depth() == 2);
}

static void governor_stops_when_waste_costs_more_than_there_is_to_win() {
    hobbit_governor g;
    g.init(2, true);
    int n_on = 0;
    for (int i = 0; i < 2000; ++i) {
        n_on += g.depth() > 0 ? 1 : 0;
        g.step({ 8, 2, 0.92f, g.depth() > 0 ? 0.16f : 0.0f }); // the disk idles for 8 % of the time, 16 % of the bytes are wasted
    }
    CHECK(n_on > 0 && n_on < 2000 / 10); // trials become rare
    CHECK(g.reason().find("wasted") != std::string::npos || g.reason().find("trial") != std::string::npos);
}

// a throttled disk gives later what it did not give while idle: 400 bytes per us on average, whatever the idle share says
static void governor_stops_when_steps_take_longer() {
    for (bool slow_start : { false, true }) { // a prompt has used up what the disk had saved
        hobbit_governor g;
        g.init(2, true);
        int n_on = 0;
        for (int i = 0; i < 2000; ++i) {
            const float wasted = g.depth() > 0 ? 6e6f : 0.0f;
            const float rate   = slow_start && i < 6 ? 300.0f : 400.0f;
            n_on += g.depth() > 0 ? 1 : 0;
            g.step({ 13, 6, 0.8f, wasted / (38e6f + wasted), (38e6f + wasted) / rate, 38e6f });
        }
        CHECK(n_on > 0 && n_on < 2000 / 10);
        CHECK(g.reason().find("longer") != std::string::npos || g.reason().find("trial") != std::string::npos);
    }

    // and does not where they take less
    hobbit_governor g;
    g.init(2, true);
    int n_on = 0;
    for (int i = 0; i < 1000; ++i) {
        n_on += g.depth() > 0 ? 1 : 0;
        g.step({ 9, 1, 0.8f, 0.05f, g.depth() > 0 ? 80000.0f : 95000.0f, 38e6f });
    }
    CHECK(n_on > 950);
}

static void governor_leaves_out_layers_that_are_predicted_badly() {
    hobbit_governor g;
    g.init(1, true);
    for (int i = 0; i < 100; ++i) {
        g.settled(1, i % 4 == 0);
        g.settled(2, i % 4 != 0);
    }
    int n_allowed = 0;
    for (int i = 0; i < 60; ++i) {
        CHECK(g.allows(2) && g.allows(7));
        n_allowed += g.allows(1) ? 1 : 0;
    }
    CHECK(n_allowed == 0);
    for (int i = 0; i < 10; ++i) {
        n_allowed += g.allows(1) ? 1 : 0;
    }
    CHECK(n_allowed > 0); // tried again
    g.init(1, false);
    CHECK(g.allows(1)); // a fixed depth is a fixed depth
}

int main() {
    logits_are_the_other_layers_router_on_its_own_norm();
    a_model_without_norms_is_not_predicted();
    governor_goes_where_it_pays();
    governor_does_not_begin_while_the_disk_is_busy_anyway();
    governor_looks_again_what_there_is_to_win();
    governor_stops_when_waste_costs_more_than_there_is_to_win();
    governor_stops_when_steps_take_longer();
    governor_leaves_out_layers_that_are_predicted_badly();
    a_fixed_depth_stays();
    return check_result("prefetch");
}
