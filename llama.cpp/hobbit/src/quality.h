// quality: what thresholds cost on this pair of files, as measured by `hobbit quality --profile`, and which to take for a budget.
//
// Pure functions on lines of a profile:
//     quality T1 T2 PERCENT SE KL MASS_LOW MASS_SKIP BYTES
// perplexity increase in percent with its standard error, mean KL divergence in nats, shares of the gate weight, expert bytes per
// token if every selection missed.

#pragma once

#include <string>
#include <vector>

struct hobbit_quality_point {
    float  t1;
    float  t2;
    double percent;
    double percent_se;
    double kl;
    double mass_low;
    double mass_skip;
    double bytes;
};

// false: not such a line
bool hobbit_quality_parse(const std::string & line, hobbit_quality_point & point);

// the point with the fewest bytes whose increase, a standard error added, is within the budget; NULL with a reason if there is none
const hobbit_quality_point * hobbit_quality_choose(const std::vector<hobbit_quality_point> & points, double budget_percent, std::string & why);
