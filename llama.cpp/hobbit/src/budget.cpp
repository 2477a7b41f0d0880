#include "budget.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include <unistd.h>

static bool read_u64(const std::string & path, uint64_t & value) {
    std::ifstream in(path);
    return (bool) (in >> value); // "max" fails: no limit
}

// the value of "key value" or "key: value kB" lines, in the file's unit
static bool read_field(const std::string & path, const std::string & key, uint64_t & value) {
    std::ifstream in(path);
    std::string   line;
    while (std::getline(in, line)) {
        if (line.compare(0, key.size(), key) == 0 && line.size() > key.size() && strchr(" :\t", line[key.size()])) {
            std::istringstream rest(line.substr(key.size() + 1));
            return (bool) (rest >> value);
        }
    }
    return false;
}

// the path of this process in a cgroup hierarchy: v1 "N:memory:/a/b", v2 "0::/a/b"
static std::string cgroup_path(const char * controller) {
    std::ifstream in("/proc/self/cgroup");
    std::string   line;
    const std::string mark = std::string(":") + controller + ":";
    while (std::getline(in, line)) {
        const size_t at = line.find(mark);
        if (at != std::string::npos) {
            return line.substr(at + mark.size());
        }
    }
    return "";
}

hobbit_memory hobbit_memory_now() {
    hobbit_memory mem = { 0, 0, "the machine's memory" };

    uint64_t kib = 0;
    if (read_field("/proc/meminfo", "MemTotal", kib)) {
        mem.limit = kib * 1024;
        if (read_field("/proc/meminfo", "MemAvailable", kib)) {
            mem.used = mem.limit - std::min(mem.limit, kib * 1024);
        }
    } else {
        mem.limit = (uint64_t) sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    }

    // a limit of the process's own group, or of the root that a container sees as its own
    const std::string v1 = cgroup_path("memory");
    const std::string v2 = cgroup_path("");
    const struct { std::string root; std::string path; const char * limit; const char * used; } hierarchies[] = {
        { "/sys/fs/cgroup/memory", v1, "/memory.limit_in_bytes", "rss"  },
        { "/sys/fs/cgroup",        v2, "/memory.max",            "anon" },
    };
    for (const auto & h : hierarchies) {
        // the group itself, then every group that it is in
        std::string path = h.path;
        while (true) {
            uint64_t limit = 0;
            if (read_u64(h.root + path + h.limit, limit) && limit < mem.limit) {
                mem.limit  = limit;
                mem.source = "the cgroup's memory limit";
                read_field(h.root + path + "/memory.stat", h.used, mem.used);
            }
            const size_t slash = path.rfind('/');
            if (slash == std::string::npos) {
                break;
            }
            path.resize(slash);
        }
    }
    return mem;
}

uint64_t hobbit_memory_margin(uint64_t limit) {
    return std::max<uint64_t>(limit / 8, 96ull << 20);
}

static constexpr int      N_RING_MIN = 2; // one place computes while the other fills
static constexpr uint64_t N_RING_FEW = 4;

uint64_t hobbit_plan_min_bytes(const hobbit_plan_params & p) {
    const int n = std::min(p.n_expert_used, p.n_experts);
    return p.router_bytes + N_RING_MIN * p.ring_bytes + n * (p.slot_bytes[HOBBIT_LOW] + p.slot_bytes[HOBBIT_HIGH]);
}

bool hobbit_plan_pools(const hobbit_plan_params & p, hobbit_plan & plan) {
    if (p.budget < hobbit_plan_min_bytes(p)) {
        return false;
    }
    const uint64_t n_min = std::min(p.n_expert_used, p.n_experts);

    // beyond its minimum the ring takes 1/16, or 1/8 if that is what a few places take
    const uint64_t ring_bytes = std::max(p.budget / 16, std::min(p.budget / 8, N_RING_FEW * p.ring_bytes));
    plan.n_ring = (int) std::clamp<uint64_t>(ring_bytes / std::max<uint64_t>(p.ring_bytes, 1), N_RING_MIN, HOBBIT_RING_MOST);
    uint64_t left = p.budget - p.router_bytes - N_RING_MIN * p.ring_bytes - n_min * (p.slot_bytes[HOBBIT_LOW] + p.slot_bytes[HOBBIT_HIGH]);
    while (plan.n_ring > N_RING_MIN && (plan.n_ring - N_RING_MIN) * p.ring_bytes > left) {
        plan.n_ring--;
    }
    left = p.budget - p.router_bytes - plan.n_ring * p.ring_bytes;

    // every pool gets its minimum, low its share, high the rest; what one cannot use goes to the other
    uint64_t n[HOBBIT_N_PRECISIONS] = { 0, 0 };
    const uint64_t n_max = p.n_experts;
    const uint64_t size_low  = p.slot_bytes[HOBBIT_LOW];
    const uint64_t size_high = p.slot_bytes[HOBBIT_HIGH];
    if (size_low == 0) {
        n[HOBBIT_HIGH] = std::min(n_max, left / size_high);
    } else if (size_high == 0) {
        n[HOBBIT_LOW] = std::min(n_max, left / size_low);
    } else {
        const uint64_t low_most = (left - n_min * size_high) / size_low;
        n[HOBBIT_LOW]  = std::clamp<uint64_t>((uint64_t) (left * (double) p.low_share) / size_low, n_min, std::min(n_max, low_most));
        n[HOBBIT_HIGH] = std::min(n_max, (left - n[HOBBIT_LOW] * size_low) / size_high);
        n[HOBBIT_LOW]  = std::min(n_max, (left - n[HOBBIT_HIGH] * size_high) / size_low);
    }
    plan.n_slots[HOBBIT_LOW]  = (int) n[HOBBIT_LOW];
    plan.n_slots[HOBBIT_HIGH] = (int) n[HOBBIT_HIGH];
    return true;
}
