#include "banks.h"

#include "store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#ifndef MAP_NORESERVE
#    define MAP_NORESERVE 0
#endif

hobbit_bank::~hobbit_bank() {
    if (base) {
        munmap(base, size);
    }
}

bool hobbit_bank::alloc(size_t slot_bytes, int n_slots, std::string & err) {
    slot_size = hobbit_pad(slot_bytes, HOBBIT_ALIGN);
    size      = slot_size * n_slots;
    if (size == 0) {
        return true;
    }
    void * p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        err = hobbit_format("cannot reserve %zu MiB of memory for %d experts: %s", size >> 20, n_slots, strerror(errno));
        size = 0;
        return false;
    }
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE);
#endif
    base = (char *) p;
    return true;
}

bool hobbit_bank::resize(int n_slots, std::string & err) {
    hobbit_bank other;
    const size_t keep = std::min(size, slot_size * n_slots);
#ifdef __linux__
    if (base && n_slots > 0) {
        void * p = mremap(base, size, slot_size * n_slots, MREMAP_MAYMOVE);
        if (p == MAP_FAILED) {
            err = hobbit_format("cannot change the cache's memory from %zu to %zu MiB: %s", size >> 20, (slot_size * n_slots) >> 20, strerror(errno));
            return false;
        }
        base = (char *) p;
        size = slot_size * n_slots;
        return true;
    }
#endif
    if (!other.alloc(slot_size, n_slots, err)) {
        return false;
    }
    if (keep > 0) {
        memcpy(other.base, base, keep);
    }
    std::swap(base, other.base);
    std::swap(size, other.size);
    return true;
}

hobbit_no_access::~hobbit_no_access() {
    for (const range & r : ranges) {
        munmap(r.base, r.size);
    }
}

void * hobbit_no_access::reserve(size_t size) {
    for (const range & r : ranges) {
        if (r.size >= size) {
            return r.base;
        }
    }
    void * p = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        return nullptr;
    }
    ranges.push_back({ p, size });
    return p;
}
