// How misses are divided between CPU and link.

#include "check.h"
#include "cooperate.h"

#include <cmath>

static constexpr uint64_t MIB = 1 << 20;

// a line through what takes `first` seconds and `per_mib` more for each MiB
static hobbit_line line(double first, double per_mib) {
    hobbit_line l;
    for (int i = 0; i < 20; ++i) {
        const double n = 1 + i % 4;
        l.add(n*MIB, first + per_mib*n);
    }
    return l;
}

static bool about(double a, double b) {
    return std::fabs(a - b) < 1e-9 + 1e-6*std::fabs(b);
}

static void a_line_is_what_was_measured() {
    hobbit_line none;
    CHECK(none.at(5*MIB) == 0.0 && !none.known());

    const hobbit_line l = line(0.002, 0.010);
    CHECK(l.known());
    CHECK(about(l.at(1*MIB), 0.012));
    CHECK(about(l.at(8*MIB), 0.082));

    hobbit_line one; // of a single size only the ratio is known
    for (int i = 0; i < 5; ++i) {
        one.add(2*MIB, 0.004);
    }
    CHECK(about(one.at(2*MIB), 0.004) && about(one.at(4*MIB), 0.008));

    hobbit_line falling; // more bytes in less time: noise
    falling.add(1*MIB, 0.009);
    falling.add(4*MIB, 0.001);
    CHECK(falling.at(8*MIB) > 0.0);
}

static void a_line_follows_what_changes() {
    hobbit_line l = line(0.0, 0.010);
    for (int i = 0; i < 200; ++i) {
        l.add((1 + i % 3)*MIB, 0.001*(1 + i % 3));
    }
    CHECK(std::fabs(l.at(2*MIB) - 0.002) < 0.0002);
}

static void the_faster_side_takes_more() {
    const hobbit_line fast = line(0.0, 0.001);
    const hobbit_line slow = line(0.0, 0.010);
    const hobbit_line same = line(0.0, 0.001);

    CHECK((hobbit_miss_case { 4, MIB, fast, slow, 0.0, 0.0 }.best() == 4));
    CHECK((hobbit_miss_case { 4, MIB, slow, fast, 0.0, 0.0 }.best() == 0));
    CHECK((hobbit_miss_case { 4, MIB, fast, same, 0.0, 0.0 }.best() == 2));
    CHECK((hobbit_miss_case { 4, MIB, fast, same, 0.1, 0.0 }.best() == 4)); // the link is busy
    CHECK((hobbit_miss_case { 4, MIB, fast, same, 0.0, 0.1 }.best() == 4)); // copies would delay what takes longest
    CHECK((hobbit_miss_case { 0, MIB, fast, same, 0.0, 0.0 }.best() == 0));
}

static void the_choice_is_never_worse_than_either() {
    for (double cpu_first : { 0.0, 0.003 }) {
        for (double link_each : { 0.0005, 0.001, 0.004 }) {
            for (double device : { 0.0, 0.002 }) {
                const hobbit_line cpu  = line(cpu_first, 0.001);
                const hobbit_line link = line(0.0, link_each);
                for (int n = 1; n <= 8; ++n) {
                    const hobbit_miss_case misses = { n, MIB, cpu, link, 0.0, device };
                    const double           time   = misses.time(misses.best());
                    CHECK(time <= std::fmax(cpu.at(n*MIB), device) && time <= link.at(n*MIB) + device);
                }
            }
        }
    }
}

int main() {
    a_line_is_what_was_measured();
    a_line_follows_what_changes();
    the_faster_side_takes_more();
    the_choice_is_never_worse_than_either();
    return check_result("cooperate");
}
