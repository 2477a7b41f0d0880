// config: every option accepts what its help says and refuses the rest with a message that names the option

#include "check.h"

#include "config.h"
#include "hobbit.h"

#include <cstring>
#include <string>

static std::string set(int32_t handle, const char * name, const char * value) {
    char err[1024] = "";
    return hobbit_config_set(handle, name, value, err, sizeof(err)) ? "" : err;
}

static hobbit_config get(int32_t handle) {
    hobbit_config config;
    CHECK(hobbit_config_get(handle, config));
    return config;
}

static void sizes_have_units() {
    const int32_t h = hobbit_config_new();
    const struct { const char * text; uint64_t bytes; } good[] = {
        { "512", 512ull << 20 }, { "512MiB", 512ull << 20 }, { "4GiB", 4ull << 30 }, { "1.5G", 3ull << 29 },
        { "4 GiB", 4ull << 30 }, { "4GB", 4000000000ull }, { "96KiB", 96ull << 10 },
    };
    for (const auto & g : good) {
        CHECK(set(h, "cache", g.text).empty());
        CHECK(get(h).cache_bytes == g.bytes);
        CHECK(!get(h).cache_auto);
    }
    CHECK(set(h, "cache", "auto").empty());
    CHECK(get(h).cache_auto);
    for (const char * bad : { "", "-1", "0", "four", "4TiBs", "nan", "inf", "1e30GiB", "4GiB4" }) {
        const std::string err = set(h, "cache", bad);
        CHECK(err.find("--hobbit-cache") != std::string::npos);
        CHECK(err.find("4GiB") != std::string::npos);
    }
}

static void numbers_outside_their_range_are_refused() {
    const int32_t h = hobbit_config_new();
    for (const char * name : { "t1", "t2" }) {
        CHECK(set(h, name, "0.5").empty());
        for (const char * bad : { "-0.1", "1.1", "nan", "x", "" }) {
            CHECK(!set(h, name, bad).empty());
        }
    }
    for (const char * bad : { "0", "65", "2.5", "-3", "many" }) {
        CHECK(!set(h, "io-threads", bad).empty());
    }
    CHECK(set(h, "weights", "2,1,1,0").empty());
    CHECK(get(h).policy.w_lru == 0.5f && get(h).policy.w_fld == 0.0f);
    for (const char * bad : { "1,1,1", "1,1,1,1,1", "0,0,0,0", "-1,1,1,1", "a,b,c,d" }) {
        CHECK(!set(h, "weights", bad).empty());
    }
}

static void names_are_known_or_listed() {
    const int32_t h = hobbit_config_new();
    for (const char * rule : { "hobbit", "high", "low", "article" }) {
        CHECK(set(h, "precision", rule).empty());
        CHECK(strcmp(hobbit_rule_name(get(h).thresholds.rule), rule) == 0);
    }
    for (const char * policy : { "hobbit", "lru", "lfu", "activations", "static" }) {
        CHECK(set(h, "policy", policy).empty());
        CHECK(strcmp(hobbit_policy_name(get(h).policy.policy), policy) == 0);
    }
    CHECK(!set(h, "precision", "medium").empty());
    CHECK(set(h, "predictor", "activations").empty() && get(h).predictor == HOBBIT_PREDICTOR_ACTIVATIONS);
    CHECK(set(h, "predictor", "oracle").find("router or activations") != std::string::npos);
    CHECK(set(h, "unit", "block").find("expert or layer") != std::string::npos);
    CHECK(!get(h).device_cache_auto && get(h).device_cache_off);
    CHECK(set(h, "device-cache", "3GiB").empty());
    CHECK(!get(h).device_cache_auto && !get(h).device_cache_off && get(h).device_cache_bytes == 3ull << 30);
    CHECK(set(h, "device-cache", "off").empty() && get(h).device_cache_off);
    CHECK(set(h, "device-cache", "auto").empty() && get(h).device_cache_auto && !get(h).device_cache_off);
    CHECK(set(h, "device-cache", "some").find("--hobbit-device-cache") != std::string::npos);

    CHECK(set(h, "cahce", "1GiB").find("cache") != std::string::npos);
    CHECK(!set(0, "cache", "1GiB").empty());
    CHECK(!set(1 << 20, "cache", "1GiB").empty());
}

static void thresholds_must_be_in_order() {
    const int32_t h = hobbit_config_new();
    char err[256];
    CHECK(hobbit_config_check(h, err, sizeof(err)));
    set(h, "t1", "0.8");
    set(h, "t2", "0.7");
    CHECK(!hobbit_config_check(h, err, sizeof(err)));
    CHECK(strstr(err, "0.8") && strstr(err, "0.7"));
}

static void nothing_is_skipped_unless_asked() {
    const auto t2 = [](std::initializer_list<std::pair<const char *, const char *>> options) {
        const int32_t h = hobbit_config_new();
        for (const auto & [name, value] : options) {
            CHECK(set(h, name, value).empty());
        }
        return get(h).thresholds.t2;
    };
    CHECK(t2({}) == 1.0f && t2({ { "precision", "hobbit" } }) == 1.0f);
    CHECK(t2({ { "precision", "paper" } }) == 0.9f && t2({ { "precision", "article" } }) == 0.9f);
    CHECK(t2({ { "precision", "paper" }, { "t2", "0.8" } }) == 0.8f && t2({ { "t2", "0.8" }, { "precision", "paper" } }) == 0.8f);
}

static void whole_layers_are_not_for_devices() {
    const int32_t h = hobbit_config_new();
    char err[256];
    CHECK(set(h, "unit", "layer").empty() && hobbit_config_check(h, err, sizeof(err)));
    set(h, "device-cache", "1GiB");
    CHECK(!hobbit_config_check(h, err, sizeof(err)));
    CHECK(strstr(err, "--hobbit-unit") && strstr(err, "--hobbit-device-cache"));
}

static void every_listed_option_can_be_set() {
    const int32_t h = hobbit_config_new();
    for (int i = 0; i < HOBBIT_N_OPTIONS; ++i) {
        const hobbit_option * option = hobbit_option_get(i);
        CHECK(option && strncmp(option->flag, "--hobbit-", 9) == 0 && strcmp(option->flag + 9, option->name) == 0);
        // either the value fits, or the message is about the value: never "unknown option"
        CHECK(set(h, option->name, "on").find("unknown") == std::string::npos);
    }
    CHECK(hobbit_option_get(HOBBIT_N_OPTIONS) == nullptr);
}

int main() {
    sizes_have_units();
    numbers_outside_their_range_are_refused();
    names_are_known_or_listed();
    thresholds_must_be_in_order();
    nothing_is_skipped_unless_asked();
    whole_layers_are_not_for_devices();
    every_listed_option_can_be_set();
    return check_result("config");
}
