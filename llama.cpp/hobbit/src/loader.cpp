#include "loader.h"

#include "ggml.h"

hobbit_loader::hobbit_loader(int n_threads, bool validate) : validate(validate) {
    for (int i = 0; i < n_threads; ++i) {
        threads.emplace_back([this] { run(); });
    }
}

hobbit_loader::~hobbit_loader() {
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

void hobbit_loader::submit(const hobbit_read & read) {
    read.state->store(HOBBIT_PIECE_LOADING, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(read);
    }
    cv_work.notify_one();
}

uint8_t hobbit_loader::wait(std::atomic<uint8_t> & state) {
    std::unique_lock<std::mutex> lock(mutex);
    cv_done.wait(lock, [&] { return state.load(std::memory_order_acquire) >= HOBBIT_PIECE_READY; });
    return state.load(std::memory_order_acquire);
}

void hobbit_loader::drain() {
    std::unique_lock<std::mutex> lock(mutex);
    cv_done.wait(lock, [&] { return queue.empty() && n_busy == 0; });
}

std::string hobbit_loader::take_error() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string taken;
    taken.swap(error);
    return taken;
}

static bool read_piece(const hobbit_read & read, bool validate, std::string & err) {
    const hobbit_source & src = read.weight->source[read.precision];

    err = src.file->changed();
    const bool ok = err.empty() &&
        hobbit_file_read(*src.file, src.offset + read.expert * src.expert_bytes, read.dst, src.expert_bytes, err);
    if (ok && validate && !ggml_validate_row_data(src.type, read.dst, src.expert_bytes)) {
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
        cv_work.wait(lock, [&] { return stop || !queue.empty(); });
        if (queue.empty()) {
            return;
        }
        const hobbit_read read = queue.front();
        queue.pop_front();
        n_busy++;
        lock.unlock();

        std::string err;
        const bool  ok = read_piece(read, validate, err);

        lock.lock();
        if (!ok && error.empty()) {
            error = err;
        }
        read.state->store(ok ? HOBBIT_PIECE_READY : HOBBIT_PIECE_FAILED, std::memory_order_release);
        n_busy--;
        cv_done.notify_all();
    }
}
