// quality: a budget takes the fewest bytes among the thresholds that were measured to keep it, and never guesses

#include "check.h"

#include "config.h"
#include "hobbit.h"
#include "quality.h"

#include <cstring>

static std::vector<hobbit_quality_point> points(const std::vector<const char *> & lines) {
    std::vector<hobbit_quality_point> out;
    for (const char * line : lines) {
        hobbit_quality_point point;
        CHECK(hobbit_quality_parse(line, point));
        out.push_back(point);
    }
    return out;
}

static void lines_are_read_whole_or_not_at_all() {
    hobbit_quality_point p;
    CHECK(hobbit_quality_parse("quality 0.6 0.9 0.75 0.1 0.0089 0.3 0.05 5000000", p));
    CHECK(p.t1 == 0.6f && p.t2 == 0.9f && p.percent == 0.75 && p.percent_se == 0.1 && p.kl == 0.0089 && p.mass_skip == 0.05 && p.bytes == 5e6);
    for (const char * bad : { "", "high 0 3", "quality", "quality 0.6 0.9 0.75 0.1 0.0089 0.3 0.05", "quality 0.9 0.6 0 0 0 0 0 1",
                              "quality 0.6 1.5 0 0 0 0 0 1", "quality 0.6 0.9 nan 0 0 0 0 1", "quality 0.6 0.9 0 0 0 0 0 1 2" }) {
        CHECK(!hobbit_quality_parse(bad, p));
    }
}

static void the_fewest_bytes_within_the_budget_win() {
    const auto measured = points({
        "quality 0.6 0.9  0.75 0.10 0.0089 0.30 0.05 5000",
        "quality 0.6 1    0.02 0.05 0.0002 0.40 0.00 6000",
        "quality 0.8 1   -0.01 0.02 0.0001 0.20 0.00 7000",
    });
    const struct { double budget; float t1; float t2; } cases[] = {
        { 1.0, 0.6f, 0.9f }, { 0.86, 0.6f, 0.9f }, { 0.84, 0.6f, 1.0f }, { 0.08, 0.6f, 1.0f }, { 0.02, 0.8f, 1.0f },
    };
    for (const auto & c : cases) {
        std::string why;
        const hobbit_quality_point * chosen = hobbit_quality_choose(measured, c.budget, why);
        CHECK(chosen && chosen->t1 == c.t1 && chosen->t2 == c.t2);
    }
}

static void a_budget_that_nothing_keeps_is_refused_with_the_one_that_works() {
    std::string why;
    const auto measured = points({ "quality 0.6 1 0.2 0.05 0.0002 0.4 0 6000", "quality 0.6 0.9 0.75 0.1 0.0089 0.3 0.05 5000" });
    CHECK(!hobbit_quality_choose(measured, 0.2, why));
    CHECK(why.find("--hobbit-quality-budget 0.25") != std::string::npos);
    CHECK(hobbit_quality_choose(measured, 0.25001, why));

    CHECK(!hobbit_quality_choose({}, 100.0, why));
    CHECK(why.find("hobbit quality") != std::string::npos);
}

static void a_budget_needs_a_profile_and_no_thresholds() {
    char err[512] = "";
    const auto config = [&](std::vector<std::pair<const char *, const char *>> options) {
        const int32_t h = hobbit_config_new();
        for (const auto & [name, value] : options) {
            CHECK(hobbit_config_set(h, name, value, err, sizeof(err)));
        }
        return hobbit_config_check(h, err, sizeof(err));
    };
    CHECK(!config({ { "quality-budget", "0.5" } }));
    CHECK(strstr(err, "--hobbit-profile") && strstr(err, "hobbit quality"));
    CHECK( config({ { "quality-budget", "0.5" }, { "profile", "x" } }));
    CHECK( config({ { "quality-budget", "0.5" }, { "profile", "x" }, { "precision", "hobbit" } }));
    CHECK(!config({ { "quality-budget", "0.5" }, { "profile", "x" }, { "t2", "1" } }));
    CHECK(strstr(err, "--hobbit-t2"));
    CHECK(!config({ { "quality-budget", "0.5" }, { "profile", "x" }, { "precision", "low" } }));
    CHECK(!config({ { "quality-budget", "0.5" }, { "profile", "x" }, { "renormalise", "on" } }));
}

int main() {
    lines_are_read_whole_or_not_at_all();
    the_fewest_bytes_within_the_budget_win();
    a_budget_that_nothing_keeps_is_refused_with_the_one_that_works();
    a_budget_needs_a_profile_and_no_thresholds();
    return check_result("quality");
}
