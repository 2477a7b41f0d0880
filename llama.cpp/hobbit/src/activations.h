// activations: what past requests did with the experts, and which of them a running one resembles (after MoE-Infinity).
//
// A request's activation matrix counts, for each layer and expert, the tokens that chose it: the uses in its hobbit_records. When a
// request ends its matrix joins a bounded collection. Before each pass a running request is compared with the collection; the past
// one that it resembles most stands in its records (`like`), where --hobbit-policy activations finds it, and tells
// --hobbit-predictor activations what the next layers will want. Pure logic; the caller holds the model's step lock.

#pragma once

#include "cache.h"

#include <cstdint>
#include <memory>
#include <vector>

constexpr size_t HOBBIT_ACTIVATIONS_MOST = 64; // matrices kept

class hobbit_activations {
  public:
    void init(int n_layer, int n_expert) { this->n_layer = n_layer; this->n_expert = n_expert; }

    // a request is over; what used nothing leaves no trace. A full collection gives up the matrix that the new one resembles most
    void add(const hobbit_records & records);
    void add(std::shared_ptr<const hobbit_activation> past);

    // the past request nearest to this one so far: the highest mean over layers of the matrices' cosine; the older among equals
    std::shared_ptr<const hobbit_activation> nearest(const std::vector<uint32_t> & used) const;
    std::shared_ptr<const hobbit_activation> nearest(const hobbit_records & records) const;

    const std::vector<std::shared_ptr<const hobbit_activation>> & all() const { return past; }

  private:
    size_t index_of_nearest(const std::vector<uint32_t> & used) const;

    int n_layer  = 0;
    int n_expert = 0;
    std::vector<std::shared_ptr<const hobbit_activation>> past;
};

// the experts of a layer that a past request used most, best first, and their shares of its uses there (0: not used).
// ids and weights have n_used entries
void hobbit_activations_predict(const hobbit_activation & past, size_t key0, int n_expert, int n_used, int32_t * ids, float * weights);
