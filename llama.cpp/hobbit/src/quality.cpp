#include "quality.h"

#include "store.h"

#include <cmath>
#include <cstdio>

bool hobbit_quality_parse(const std::string & line, hobbit_quality_point & point) {
    int n = 0;
    if (sscanf(line.c_str(), "quality %f %f %lf %lf %lf %lf %lf %lf%n", &point.t1, &point.t2, &point.percent, &point.percent_se,
            &point.kl, &point.mass_low, &point.mass_skip, &point.bytes, &n) != 8 || (size_t) n != line.size()) {
        return false;
    }
    for (double value : { point.percent, point.percent_se, point.kl, point.mass_low, point.mass_skip, point.bytes }) {
        if (!std::isfinite(value)) {
            return false;
        }
    }
    return point.t1 >= 0.0f && point.t1 <= point.t2 && point.t2 <= 1.0f;
}

const hobbit_quality_point * hobbit_quality_choose(const std::vector<hobbit_quality_point> & points, double budget_percent, std::string & why) {
    const hobbit_quality_point * best  = nullptr;
    const hobbit_quality_point * least = nullptr;
    for (const hobbit_quality_point & p : points) {
        const double cost = p.percent + p.percent_se;
        if (!least || cost < least->percent + least->percent_se) {
            least = &p;
        }
        if (cost <= budget_percent && (!best || p.bytes < best->bytes)) {
            best = &p;
        }
    }
    if (!least) {
        why = "it has no measurements of this pair; `hobbit quality MODEL --low FILE --profile FILE` makes them";
    } else if (!best) {
        why = hobbit_format("the least that was measured is T1 %g, T2 %g: %+.2f %% with a standard error of %.2f; "
                "--hobbit-quality-budget %.2f takes it", least->t1, least->t2, least->percent, least->percent_se,
                std::ceil(100.0 * (least->percent + least->percent_se) - 1e-6) / 100.0);
    }
    return best;
}
