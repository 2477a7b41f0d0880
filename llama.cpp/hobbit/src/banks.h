// banks: the memory that experts live in.
//
// On the host one bank per precision, n_slots places of equal size, plus a ring of places for single expert weights that are
// streamed past the cache. Reserved at once, committed by the system when first written.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

class hobbit_bank {
  public:
    hobbit_bank() = default;
    hobbit_bank(const hobbit_bank &) = delete;
    ~hobbit_bank();

    // false: the system refused; err says how much was asked for
    bool alloc(size_t slot_bytes, int n_slots, std::string & err);
    // keeps the contents of the slots that remain; may move the memory. false: as alloc, and nothing has changed
    bool resize(int n_slots, std::string & err);

    char * slot(int i) const { return base + (size_t) i * slot_size; }
    size_t bytes() const { return size; }

  private:
    char * base      = nullptr;
    size_t slot_size = 0;
    size_t size      = 0;
};

// address space of the given size that faults on every access: managed tensors point there, so that a use which the engine
// did not foresee stops the program instead of computing with wrong numbers
class hobbit_no_access {
  public:
    hobbit_no_access() = default;
    hobbit_no_access(const hobbit_no_access &) = delete;
    ~hobbit_no_access();

    void * reserve(size_t size); // grows: returns the base of a range of at least size bytes, NULL if there is none

  private:
    struct range { void * base; size_t size; };
    std::vector<range> ranges;
};

// places start at such addresses: cache lines, and what direct reads want
constexpr size_t HOBBIT_ALIGN = 4096;

constexpr size_t hobbit_pad(size_t n, size_t align) {
    return (n + align - 1) / align * align;
}
