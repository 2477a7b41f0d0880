#include "loader.h"

#include "ggml.h"

#include <algorithm>

// large enough for the disk's best speed with a few in flight, small enough to stop a wrong prefetch soon
static constexpr uint64_t BLOCK_BYTES = 1 << 20;

hobbit_loader::hobbit_loader(int n_threads, bool validate) : validate(validate) {
    for (int i = 0; i < n_threads; ++i) {
        threads.emplace_back([this] { run(); });
    }
}

hobbit_loader::~hobbit_loader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (const job & j : queues[HOBBIT_PREFETCH]) {
            j.read.state->store(HOBBIT_PIECE_ABSENT, std::memory_order_release);
        }
        queues[HOBBIT_PREFETCH].clear();
        for (job * j : under_way) {
            j->cancelled = j->cancelled || j->urgency == HOBBIT_PREFETCH;
        }
    }
    drain();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    cv_work.notify_all();
    for (auto & thread : threads) {
        thread.join();
    }
}

void hobbit_loader::set_observer(observer f) {
    std::lock_guard<std::mutex> lock(mutex);
    on_end = std::move(f);
}

void hobbit_loader::submit(const hobbit_read & read, hobbit_urgency urgency) {
    read.state->store(HOBBIT_PIECE_LOADING, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex);
        queues[urgency].push_back({ read, urgency });
    }
    cv_work.notify_one();
}

void hobbit_loader::count_demand(int change) {
    const int64_t now = ggml_time_us();
    if (n_demand > 0) {
        demand_us += now - demand_since;
    }
    demand_since = now;
    n_demand    += change;
}

double hobbit_loader::demand_seconds() {
    std::lock_guard<std::mutex> lock(mutex);
    count_demand(0);
    return demand_us / 1e6;
}

void hobbit_loader::promote(const std::atomic<uint8_t> & state) {
    std::lock_guard<std::mutex> lock(mutex);
    auto & queue = queues[HOBBIT_PREFETCH];
    const auto it = std::find_if(queue.begin(), queue.end(), [&](const job & j) { return j.read.state == &state; });
    if (it != queue.end()) {
        it->urgency = HOBBIT_DEMAND;
        queues[HOBBIT_DEMAND].push_back(*it);
        queue.erase(it);
        return;
    }
    for (job * j : under_way) {
        if (j->read.state == &state && j->urgency == HOBBIT_PREFETCH) {
            j->urgency = HOBBIT_DEMAND; // goes to the other queue after its block
            count_demand(+1);
        }
    }
}

uint64_t hobbit_loader::cancel(const std::atomic<uint8_t> & state) {
    std::lock_guard<std::mutex> lock(mutex);
    auto & queue = queues[HOBBIT_PREFETCH];
    const auto it = std::find_if(queue.begin(), queue.end(), [&](const job & j) { return j.read.state == &state; });
    if (it != queue.end()) {
        const uint64_t done = it->done;
        it->read.state->store(HOBBIT_PIECE_ABSENT, std::memory_order_release);
        queue.erase(it);
        cv_done.notify_all();
        return done;
    }
    for (job * j : under_way) {
        if (j->read.state == &state) {
            j->cancelled = true;
            return j->done + std::min(BLOCK_BYTES, j->read.weight->source[j->read.precision].expert_bytes - j->done);
        }
    }
    return 0;
}

uint8_t hobbit_loader::await(const std::atomic<uint8_t> & state) {
    std::unique_lock<std::mutex> lock(mutex);
    cv_done.wait(lock, [&] { return state.load(std::memory_order_acquire) >= HOBBIT_PIECE_READY; });
    return state.load(std::memory_order_acquire);
}

void hobbit_loader::await_idle(const std::atomic<uint8_t> & state) {
    std::unique_lock<std::mutex> lock(mutex);
    cv_done.wait(lock, [&] { return state.load(std::memory_order_acquire) != HOBBIT_PIECE_LOADING; });
}

void hobbit_loader::drain() {
    std::unique_lock<std::mutex> lock(mutex);
    cv_done.wait(lock, [&] { return queues[HOBBIT_DEMAND].empty() && queues[HOBBIT_PREFETCH].empty() && under_way.empty(); });
}

std::string hobbit_loader::take_error() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string taken;
    taken.swap(error);
    return taken;
}

// the next size bytes of a piece, from byte done on
static bool read_block(const hobbit_read & read, uint64_t done, uint64_t size, bool validate, std::string & err) {
    const hobbit_source & src = read.weight->source[read.precision];

    hobbit_source_read(src, src.offset + read.expert * src.expert_bytes + done, read.dst + done, size, err);
    // at the end: no block of the piece can have been read from a file that was written to in between. Also the better message
    if (done + size == src.expert_bytes || !err.empty()) {
        const std::string changed = src.file->changed();
        err = changed.empty() ? err : changed;
    }
    if (err.empty() && validate && done + size == src.expert_bytes && !ggml_validate_row_data(src.type, read.dst, src.expert_bytes)) {
        err = src.file->path + ": holds invalid numbers";
    }
    if (!err.empty()) {
        err += hobbit_format(" (tensor %s, expert %d)", read.weight->name.c_str(), read.expert);
    }
    return err.empty();
}

void hobbit_loader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        cv_work.wait(lock, [&] { return stop || !queues[HOBBIT_DEMAND].empty() || !queues[HOBBIT_PREFETCH].empty(); });
        auto & queue = queues[queues[HOBBIT_DEMAND].empty() ? HOBBIT_PREFETCH : HOBBIT_DEMAND];
        if (queue.empty()) {
            return;
        }
        job j = queue.front();
        queue.pop_front();
        under_way.push_back(&j);
        if (j.urgency == HOBBIT_DEMAND) {
            count_demand(+1);
        }
        lock.unlock();

        const uint64_t total = j.read.weight->source[j.read.precision].expert_bytes;
        // whole blocks of the file, so that a direct read that starts in the middle of one is the first only
        const uint64_t start = j.read.weight->source[j.read.precision].offset + j.read.expert * total + j.done;
        const uint64_t size  = std::min(total - j.done, BLOCK_BYTES - start % HOBBIT_DIRECT_ALIGN);
        std::string    err;
        const bool     ok = read_block(j.read, j.done, size, validate, err);

        lock.lock();
        under_way.erase(std::find(under_way.begin(), under_way.end(), &j));
        if (j.urgency == HOBBIT_DEMAND) {
            count_demand(-1);
        }
        if (!ok && error.empty() && !j.cancelled) {
            error = err;
        }
        j.done += size;
        if (ok && !j.cancelled && j.done < total) {
            // front: what is begun is finished first
            queues[j.urgency].push_front(j);
            continue;
        }
        const uint8_t state = j.cancelled ? HOBBIT_PIECE_ABSENT : ok ? HOBBIT_PIECE_READY : HOBBIT_PIECE_FAILED;
        if (on_end) {
            on_end(j.read, j.done, state);
        }
        j.read.state->store(state, std::memory_order_release);
        cv_done.notify_all();
    }
}
