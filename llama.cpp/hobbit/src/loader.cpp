#include "loader.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include <sys/mman.h>

// large enough for the disk's best speed with a few in flight, small enough to stop a wrong prefetch soon
static constexpr uint64_t BLOCK_BYTES = 1 << 20;

// pieces that are read at once, and how far down the queue they may be
static constexpr size_t MERGE_MOST = 32;
static constexpr size_t MERGE_LOOK = 64;

hobbit_loader::hobbit_loader(int n_threads, bool validate, bool io_uring) : validate(validate) {
    if (io_uring) {
        uring = hobbit_uring::open(n_threads);
    }
    if (uring) {
        threads.emplace_back([this, n_threads] { run_uring(n_threads); });
        return;
    }
    for (int i = 0; i < n_threads; ++i) {
        threads.emplace_back([this] { run(); });
    }
}

hobbit_loader::~hobbit_loader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (const job_ptr & j : under_way) {
            j->cancelled = j->cancelled || j->urgency == HOBBIT_PREFETCH;
        }
        for (const job_ptr & j : queues[HOBBIT_PREFETCH]) {
            if (j->n_reads == 0) {
                unstage(*j);
                j->read.state->store(HOBBIT_PIECE_ABSENT, std::memory_order_release);
            }
        }
        queues[HOBBIT_PREFETCH].clear();
    }
    drain();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
        if (uring_waits) {
            uring->wake();
        }
    }
    cv_work.notify_all();
    for (auto & thread : threads) {
        thread.join();
    }
    for (char * memory : slabs) {
        free(memory);
    }
}

void hobbit_loader::stage(job & j) {
    const hobbit_source & src = j.read.weight->source[j.read.precision];
    if (!src.repacked || j.staging) {
        return;
    }
    const size_t size = (src.place_bytes() + HOBBIT_DIRECT_ALIGN - 1) / HOBBIT_DIRECT_ALIGN * HOBBIT_DIRECT_ALIGN;
    auto fits = [&] { return std::find_if(spare.begin(), spare.end(), [size](const auto & s) { return s.second >= size; }); };
    auto found = fits();
    if (found == spare.end()) {
        add_staging(size);
        found = fits();
    }
    j.staging       = found->first;
    j.staging_bytes = found->second;
    spare.erase(found);
}

// huge pages, as the cache's slots are: direct reads into small ones take twice as long
void hobbit_loader::add_staging(size_t size) {
    constexpr size_t HUGE_PAGE = 2 << 20;
    const size_t whole = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char *       p     = (char *) aligned_alloc(HUGE_PAGE, whole);
    GGML_ASSERT(p && "out of memory");
#ifdef MADV_HUGEPAGE
    madvise(p, whole, MADV_HUGEPAGE);
#endif
    slabs.push_back(p);
    for (size_t at = 0; at + size <= whole; at += size) {
        spare.emplace_back(p + at, size);
    }
}

void hobbit_loader::unstage(job & j) {
    if (j.staging) {
        spare.emplace_back(j.staging, j.staging_bytes);
        j.staging = nullptr;
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
        queues[urgency].push_back(std::make_shared<job>());
        queues[urgency].back()->read    = read;
        queues[urgency].back()->urgency = urgency;
        if (uring_waits) {
            uring_waits = false;
            uring->wake();
        }
    }
    cv_work.notify_one();
}

void hobbit_loader::clock::count(int change) {
    const int64_t now = ggml_time_us();
    if (n > 0) {
        us += now - since;
    }
    since = now;
    n    += change;
}

double hobbit_loader::demand_seconds() {
    std::lock_guard<std::mutex> lock(mutex);
    demands.count(0);
    return demands.us / 1e6;
}

double hobbit_loader::busy_seconds() {
    std::lock_guard<std::mutex> lock(mutex);
    busy.count(0);
    return busy.us / 1e6;
}

hobbit_loader::job_ptr hobbit_loader::find_queued(const std::atomic<uint8_t> & state, int urgency) const {
    const auto & queue = queues[urgency];
    const auto it = std::find_if(queue.begin(), queue.end(), [&](const job_ptr & j) { return j->read.state == &state; });
    return it == queue.end() ? nullptr : *it;
}

void hobbit_loader::promote(const std::atomic<uint8_t> & state) {
    std::lock_guard<std::mutex> lock(mutex);
    if (const job_ptr j = find_queued(state, HOBBIT_PREFETCH)) {
        auto & queue = queues[HOBBIT_PREFETCH];
        queue.erase(std::find(queue.begin(), queue.end(), j));
        j->urgency = HOBBIT_DEMAND;
        queues[HOBBIT_DEMAND].push_back(j);
    }
    for (const job_ptr & j : under_way) {
        if (j->read.state == &state) {
            j->urgency = HOBBIT_DEMAND;
            demands.count(j->is_demand ? 0 : +1);
            j->is_demand = true;
        }
    }
}

uint64_t hobbit_loader::cancel(const std::atomic<uint8_t> & state) {
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t bytes = 0;
    for (int urgency = 0; urgency < HOBBIT_N_URGENCIES; ++urgency) {
        if (const job_ptr j = find_queued(state, urgency)) {
            auto & queue = queues[urgency];
            queue.erase(std::find(queue.begin(), queue.end(), j));
            bytes = j->issued;
            if (j->n_reads == 0) {
                unstage(*j);
                j->read.state->store(HOBBIT_PIECE_ABSENT, std::memory_order_release);
                cv_done.notify_all();
                return bytes;
            }
        }
    }
    for (const job_ptr & j : under_way) {
        if (j->read.state == &state) {
            j->cancelled = true;
            bytes = j->issued;
        }
    }
    return bytes;
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

void hobbit_loader::take(work & w) {
    auto & queue = queues[queues[HOBBIT_DEMAND].empty() ? HOBBIT_PREFETCH : HOBBIT_DEMAND];
    const job_ptr         first = queue.front();
    const hobbit_read &   read  = first->read;
    const hobbit_source & src   = read.weight->source[read.precision];
    const uint64_t        start = src.offset + read.expert * src.expert_bytes + first->issued;
    stage(*first);

    // whole blocks of the file, so that a direct read that starts in the middle of one is the first only
    w.done = first->issued;
    w.size = std::min(first->total() - w.done, BLOCK_BYTES - start % HOBBIT_DIRECT_ALIGN);
    w.jobs.push_back(first);
    w.dst.push_back(first->dst() + w.done);
    first->issued += w.size;
    if (first->issued == first->total()) {
        queue.pop_front();
    }

    while (w.size == first->total() && w.size * (w.jobs.size() + 1) <= BLOCK_BYTES && w.jobs.size() < MERGE_MOST) {
        const hobbit_read & last = w.jobs.back()->read;
        const auto look = queue.begin() + std::min(queue.size(), MERGE_LOOK);
        const auto next = std::find_if(queue.begin(), look, [&](const job_ptr & j) {
            return j->read.weight == last.weight && j->read.precision == last.precision && j->read.expert == last.expert + 1;
        });
        if (next == look) {
            break;
        }
        (*next)->issued = w.size;
        stage(**next);
        w.jobs.push_back(*next);
        w.dst.push_back((*next)->dst());
        queue.erase(next);
    }
    for (const job_ptr & j : w.jobs) {
        if (j->n_reads++ == 0) {
            under_way.push_back(j);
            busy.count(+1);
            j->is_demand = j->urgency == HOBBIT_DEMAND;
            demands.count(j->is_demand ? +1 : 0);
        }
    }
    if (!is_idle()) {
        cv_work.notify_one(); // the next block is for another thread
    }
    w.run = std::make_unique<hobbit_run>(src, start, w.size, w.dst);
}

void hobbit_loader::arrive(work & w, int64_t n_read) const {
    const hobbit_read &   first = w.jobs.front()->read;
    const hobbit_source & src   = first.weight->source[first.precision];

    w.errors.resize(w.jobs.size());
    if (w.run->done(src, w.dst, n_read)) {
        return;
    }
    for (size_t i = 0; i < w.jobs.size(); ++i) {
        // a short read, or a file system that wants more alignment: the plain way knows, or says why not
        const hobbit_read & read = w.jobs[i]->read;
        hobbit_source_read(src, src.offset + read.expert * src.expert_bytes + w.done, w.dst[i], w.size, w.errors[i]);
    }
}

// no block of a piece can have been read from a file that was written to before the last one arrived. Also the better message
void hobbit_loader::verify(const job & j, std::string & err) const {
    const hobbit_source & src = j.read.weight->source[j.read.precision];
    const std::string changed = src.file->changed();
    err = changed.empty() ? err : changed;
    if (err.empty() && validate && !ggml_validate_row_data(src.type, j.dst(), src.expert_bytes)) {
        err = src.file->path + ": holds invalid numbers";
    }
    if (!err.empty()) {
        err += hobbit_format(" (tensor %s, expert %d)", j.read.weight->name.c_str(), j.read.expert);
    }
}

void hobbit_loader::settle(const job_ptr & j) {
    under_way.erase(std::find(under_way.begin(), under_way.end(), j));
    busy.count(-1);
    demands.count(j->is_demand ? -1 : 0);
    const bool ready = !j->failed && j->done == j->total();
    if (ready || j->cancelled || j->failed) {
        unstage(*j);
        const uint8_t state = j->cancelled ? HOBBIT_PIECE_ABSENT : j->failed ? HOBBIT_PIECE_FAILED : HOBBIT_PIECE_READY;
        if (on_end) {
            on_end(j->read, j->done, state);
        }
        j->read.state->store(state, std::memory_order_release);
        cv_done.notify_all();
    }
    // else it is in its queue, and a thread will come back to it
}

void hobbit_loader::finish(work & w, std::unique_lock<std::mutex> & lock) {
    for (size_t i = 0; i < w.jobs.size(); ++i) {
        const job_ptr & j = w.jobs[i];
        j->done += w.size;
        if (!w.errors[i].empty() || (j->done == j->total() && !j->failed && !j->cancelled)) {
            lock.unlock();
            verify(*j, w.errors[i]);
            if (j->staging && w.errors[i].empty()) {
                const ggml_tensor t = j->read.weight->expert_tensor(j->read.precision);
                repack(&t, j->dst(), j->read.dst);
            }
            lock.lock();
        }
        if (!w.errors[i].empty()) {
            if (error.empty() && !j->cancelled) {
                error = w.errors[i];
            }
            j->failed = true;
            auto & queue = queues[j->urgency];
            queue.erase(std::remove(queue.begin(), queue.end(), j), queue.end());
        }
        if (--j->n_reads == 0) {
            settle(j);
        }
    }
    cv_done.notify_all(); // for drain()
}

void hobbit_loader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        cv_work.wait(lock, [&] { return stop || !is_idle(); });
        if (is_idle()) {
            return;
        }
        work w;
        take(w);
        lock.unlock();

        ssize_t n;
        do {
            n = preadv(w.run->fd, w.run->iov.data(), (int) w.run->iov.size(), w.run->offset);
        } while (n < 0 && errno == EINTR);
        arrive(w, n);

        lock.lock();
        finish(w, lock);
    }
}

void hobbit_loader::run_uring(int depth) {
    std::vector<std::unique_ptr<work>> in_flight(depth);
    int n_in_flight = 0;

    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        if (n_in_flight == 0) {
            cv_work.wait(lock, [&] { return stop || !is_idle(); });
            if (is_idle()) {
                return;
            }
        }
        for (int i = 0; i < depth && !is_idle(); ++i) {
            if (!in_flight[i]) {
                in_flight[i] = std::make_unique<work>();
                take(*in_flight[i]);
                uring->push(*in_flight[i]->run, i);
                n_in_flight++;
            }
        }
        uring_waits = n_in_flight < depth;
        lock.unlock();

        uring->submit_and_wait();
        std::vector<std::unique_ptr<work>> ended;
        for (int i, n_read; uring->pop(i, n_read);) {
            arrive(*in_flight[i], n_read);
            ended.push_back(std::move(in_flight[i]));
            n_in_flight--;
        }

        lock.lock();
        uring_waits = false;
        for (auto & w : ended) {
            finish(*w, lock);
        }
    }
}
