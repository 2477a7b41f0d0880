// precision: which precision each selected expert deserves, from its gate weight alone.
//
// Pure functions, no state. The caller (moe_graph) combines the answers of all tokens of a ubatch per expert: the highest wins.

#pragma once

#include <cstdint>

enum hobbit_precision : int8_t {
    HOBBIT_PRECISION_SKIP = 0,
    HOBBIT_PRECISION_LOW  = 1,
    HOBBIT_PRECISION_HIGH = 2,
};

enum hobbit_rule : int8_t {
    HOBBIT_RULE_HIGH,    // everything high: exact mode
    HOBBIT_RULE_LOW,     // everything low
    HOBBIT_RULE_HOBBIT,  // cumulative gate weight against T1 and T2 (HOBBIT section 3.2)
    HOBBIT_RULE_ARTICLE, // each weight on its own, as the source article has it; for comparison only
};

// which precision an expert gets in a large batch, whose tokens ask for different ones
enum hobbit_prefill : int8_t {
    HOBBIT_PREFILL_HIGHEST, // the highest that any token asks for
    HOBBIT_PREFILL_MASS,    // by its rank and share of the gate weight of the whole batch; at most the highest asked for
    HOBBIT_PREFILL_LOW,     // low
};

struct hobbit_thresholds {
    hobbit_rule rule;
    float       t1; // [0, 1]
    float       t2; // [t1, 1]
};

// weights[n]: gate weights of one token's selected experts, in any order and of any scale (>= 0)
// out[n]: their precision. The largest weight is always high under HOBBIT and ARTICLE.
void hobbit_precision_score(const hobbit_thresholds & th, const float * weights, int n, hobbit_precision * out);

// what an expert gets that is wanted in one precision: another if that does not exist, and, unless the answer must not depend on
// the cache, the best copy that is here, which costs nothing
hobbit_precision hobbit_precision_given(hobbit_precision wanted, bool deterministic, bool has_low, bool has_high, bool here_low, bool here_high);

// the weights scaled to sum 1; equal ones if there is nothing to scale
void hobbit_precision_shares(const float * weights, int n, float * share);

// wanted[n]: the highest precision that any token of a large batch asks of each expert, made less where prefill says that less will do.
// mass[n]: gate weight of each over the batch. MASS: high while the mass ranked before is at most T1 of all
void hobbit_precision_prefill(const hobbit_thresholds & th, hobbit_prefill prefill, const double * mass, int n, hobbit_precision * wanted);

// the unimportance score of each expert: the normalised weight of all that rank before it, s_0 = 0
void hobbit_precision_unimportance(const float * weights, int n, float * score);
