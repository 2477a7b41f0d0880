// loader: what was asked for arrives where it should, and a read that fails says which file, tensor and expert

#include "check.h"
#include "moe-file.h"

#include "loader.h"

#include <fcntl.h>

static temp_dir dir;

static void every_piece_arrives() {
    moe_file model;
    model.n_layer  = 4;
    model.n_expert = 16;
    model.write(dir / "m.gguf");
    const int fd = open((dir / "m.gguf").c_str(), O_RDONLY);
    hobbit_store store;
    show_all_tensors(store, dir / "m.gguf", fd);
    close(fd); // the store has a descriptor of its own

    const size_t n = store.weights.size() * 16;
    std::vector<std::vector<float>>   data(n);
    std::vector<std::atomic<uint8_t>> state(n);

    hobbit_loader loader(3, true);
    size_t i = 0;
    for (const auto & w : store.weights) {
        for (int e = 0; e < 16; ++e, ++i) {
            data[i].resize(w->source[HOBBIT_HIGH].expert_bytes / sizeof(float));
            loader.submit({ w.get(), HOBBIT_HIGH, e, (char *) data[i].data(), &state[i] }, HOBBIT_DEMAND);
        }
    }
    i = 0;
    for (const auto & w : store.weights) {
        for (int e = 0; e < 16; ++e, ++i) {
            CHECK(loader.await(state[i]) == HOBBIT_PIECE_READY);
            CHECK(data[i].front() == moe_file::value(w->block, w->role, e) && data[i].back() == data[i].front());
        }
    }
    loader.drain();
    CHECK(loader.take_error() == "");
}

// a store over a file that is large enough for several blocks per piece, read directly if asked for
struct big_store {
    hobbit_store store;
    bool         direct = false;

    explicit big_store(bool want_direct) {
        moe_file model;
        model.n_layer  = 1;
        model.n_expert = 6;
        model.n_embd   = 768;
        model.n_ff     = 1100; // 3.2 MiB per weight, and no expert starts where a block does
        model.write(dir / "big.gguf");
        const int fd = open((dir / "big.gguf").c_str(), O_RDONLY);
        show_all_tensors(store, dir / "big.gguf", fd);
        close(fd);
        if (want_direct) {
            direct = store.files[0]->open_direct();
        }
    }
};

// memory for one piece, aligned as a direct read wants it
struct place {
    std::vector<char>    memory;
    std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
    const hobbit_weight * weight;
    int                  expert;

    place(const hobbit_weight * weight, int expert) :
        memory(weight->source[HOBBIT_HIGH].place_bytes() + HOBBIT_DIRECT_ALIGN), weight(weight), expert(expert) {}

    char * data() {
        const uintptr_t aligned = ((uintptr_t) memory.data() + HOBBIT_DIRECT_ALIGN - 1) / HOBBIT_DIRECT_ALIGN * HOBBIT_DIRECT_ALIGN;
        return (char *) aligned + weight->source[HOBBIT_HIGH].skew(expert);
    }
    hobbit_read read() { return { weight, HOBBIT_HIGH, expert, data(), &state }; }
    bool right() {
        const float * values = (const float *) data();
        for (size_t i = 0; i < weight->source[HOBBIT_HIGH].expert_bytes / sizeof(float); ++i) {
            if (values[i] != moe_file::value(weight->block, weight->role, expert)) {
                return false;
            }
        }
        return true;
    }
};

static void every_way_of_reading_brings_the_same_bytes() {
    for (bool direct : { false, true }) {
        for (bool uring : { false, true }) {
            big_store s(direct);
            hobbit_loader loader(3, false, uring);
            printf("  direct reads %s, io_uring %s\n", !direct ? "off" : s.direct ? "tried" : "not possible here", !uring ? "off" : loader.is_uring() ? "tried" : "not possible here");
            std::deque<place> places;
            for (const auto & w : s.store.weights) {
                for (int e = 0; e < 6; ++e) {
                    places.emplace_back(w.get(), e);
                    loader.submit(places.back().read(), e % 2 ? HOBBIT_DEMAND : HOBBIT_PREFETCH);
                }
            }
            for (place & p : places) {
                CHECK(loader.await(p.state) == HOBBIT_PIECE_READY);
                CHECK(p.right());
            }
        }
    }
}

// experts smaller than a block, of sizes that are and are not multiples of what direct reads want
static void small_pieces_side_by_side_are_read_at_once() {
    for (int64_t n_ff : { 1, 25, 32, 64, 1000 }) {
        for (bool direct : { false, true }) {
            moe_file model;
            model.n_layer  = 1;
            model.n_expert = 40;
            model.n_ff     = n_ff;
            model.write(dir / "small.gguf");
            const int fd = open((dir / "small.gguf").c_str(), O_RDONLY);
            hobbit_store store;
            show_all_tensors(store, dir / "small.gguf", fd);
            close(fd);
            if (direct) {
                store.files[0]->open_direct();
            }
            hobbit_loader loader(2, false);
            for (int step : { 1, 3, 7 }) { // in the file's order, and not
                std::deque<place> places;
                for (int i = 0; i < 40; ++i) {
                    places.emplace_back(store.weights[i % 3].get(), i * step % 40);
                    loader.submit(places.back().read(), HOBBIT_DEMAND);
                }
                for (place & p : places) {
                    CHECK(loader.await(p.state) == HOBBIT_PIECE_READY);
                    CHECK(p.right());
                }
            }
        }
    }
}

static void demands_overtake_prefetches_and_cancelled_ones_stop() {
    big_store s(false);
    const hobbit_weight * w = s.store.weights[0].get();

    // far more than one thread can read before this one looks again; they share their memory, so that it stays small
    place scratch(w, 1);
    std::vector<std::atomic<uint8_t>> ahead(2000);
    {
        hobbit_loader loader(1, false);
        for (auto & state : ahead) {
            hobbit_read read = scratch.read();
            read.state = &state;
            loader.submit(read, HOBBIT_PREFETCH);
        }
        place demand(w, 3);
        loader.submit(demand.read(), HOBBIT_DEMAND);
        loader.promote(ahead.back());
        CHECK(loader.await(demand.state) == HOBBIT_PIECE_READY);
        CHECK(loader.await(ahead.back()) == HOBBIT_PIECE_READY);
        CHECK(demand.right());

        uint64_t read = 0;
        for (auto & state : ahead) {
            read += loader.cancel(state);
        }
        int n_ready = 0;
        for (auto & state : ahead) {
            loader.await_idle(state);
            CHECK(state == HOBBIT_PIECE_READY || state == HOBBIT_PIECE_ABSENT);
            n_ready += state == HOBBIT_PIECE_READY ? 1 : 0;
        }
        CHECK(n_ready < (int) ahead.size());
        CHECK(read < ahead.size() * w->source[HOBBIT_HIGH].expert_bytes / 10); // of what was under way, not of what was queued
        loader.drain();
        CHECK(loader.take_error() == "");

        // a cancelled place can be read into again
        loader.submit(scratch.read(), HOBBIT_DEMAND);
        CHECK(loader.await(scratch.state) == HOBBIT_PIECE_READY);
        CHECK(scratch.right());
    }
}

static void promote_and_cancel_race_with_the_threads() {
    big_store s(true);
    hobbit_loader loader(4, false);
    for (int round = 0; round < 30; ++round) {
        std::deque<place> places;
        for (int e = 0; e < 6; ++e) {
            for (const auto & w : s.store.weights) {
                places.emplace_back(w.get(), e);
                loader.submit(places.back().read(), HOBBIT_PREFETCH);
            }
        }
        for (size_t i = 0; i < places.size(); ++i) {
            if (i % 3 == (size_t) round % 3) {
                loader.cancel(places[i].state);
            } else if (i % 3 == (size_t) (round + 1) % 3) {
                loader.promote(places[i].state);
            }
        }
        for (size_t i = 0; i < places.size(); ++i) {
            loader.await_idle(places[i].state);
            CHECK(places[i].state == HOBBIT_PIECE_READY || i % 3 == (size_t) round % 3);
            CHECK(places[i].state != HOBBIT_PIECE_READY || places[i].right());
        }
    }
}

static void the_end_does_not_wait_for_prefetches() {
    big_store s(false);
    const hobbit_weight * w = s.store.weights[0].get();
    place scratch(w, 1);
    std::vector<std::atomic<uint8_t>> ahead(2000);
    {
        hobbit_loader loader(1, false);
        for (auto & state : ahead) {
            hobbit_read read = scratch.read();
            read.state = &state;
            loader.submit(read, HOBBIT_PREFETCH);
        }
    }
    int n_ready = 0;
    for (auto & state : ahead) {
        CHECK(state == HOBBIT_PIECE_READY || state == HOBBIT_PIECE_ABSENT);
        n_ready += state == HOBBIT_PIECE_READY ? 1 : 0;
    }
    CHECK(n_ready < (int) ahead.size());
}

static void a_wait_may_come_before_the_read() {
    moe_file().write(dir / "m.gguf");
    const int fd = open((dir / "m.gguf").c_str(), O_RDONLY);
    hobbit_store store;
    show_all_tensors(store, dir / "m.gguf", fd);
    close(fd);

    const hobbit_weight * w = store.weights[0].get();
    std::vector<char>    data(w->source[HOBBIT_HIGH].expert_bytes);
    std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
    hobbit_loader loader(1, false);
    std::thread waiter([&] { CHECK(loader.await(state) == HOBBIT_PIECE_READY); });
    loader.submit({ w, HOBBIT_HIGH, 0, data.data(), &state }, HOBBIT_DEMAND);
    waiter.join();
}

static void failures_name_file_tensor_and_expert() {
    moe_file().write(dir / "m.gguf");
    const int fd = open((dir / "m.gguf").c_str(), O_RDONLY);
    hobbit_store store;
    show_all_tensors(store, dir / "m.gguf", fd);
    close(fd);
    const hobbit_weight * w = store.weights.back().get();
    CHECK(truncate((dir / "m.gguf").c_str(), w->source[HOBBIT_HIGH].offset + 10) == 0);

    std::vector<char>    data(w->source[HOBBIT_HIGH].expert_bytes);
    std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
    hobbit_loader loader(2, false);
    loader.submit({ w, HOBBIT_HIGH, 2, data.data(), &state }, HOBBIT_DEMAND);
    CHECK(loader.await(state) == HOBBIT_PIECE_FAILED);
    const std::string err = loader.take_error();
    CHECK(err.find("m.gguf") != std::string::npos);
    CHECK(err.find(w->name) != std::string::npos);
    CHECK(err.find("expert 2") != std::string::npos);
    CHECK(loader.take_error() == "");
}

static void invalid_numbers_fail_only_when_checked() {
    moe_file().write(dir / "m.gguf");
    const int fd = open((dir / "m.gguf").c_str(), O_RDWR);
    hobbit_store store;
    {
        // before the store opens the file: a later write would count as a change
        hobbit_store probe;
        show_all_tensors(probe, dir / "m.gguf", fd);
        const uint32_t nan = 0x7fc00000u;
        CHECK(pwrite(fd, &nan, sizeof(nan), probe.weights[0]->source[HOBBIT_HIGH].offset) == (ssize_t) sizeof(nan));
    }
    show_all_tensors(store, dir / "m.gguf", fd);
    close(fd);

    const hobbit_weight * w = store.weights[0].get();
    std::vector<char> data(w->source[HOBBIT_HIGH].expert_bytes);
    for (bool check : { false, true }) {
        std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
        hobbit_loader loader(1, check);
        loader.submit({ w, HOBBIT_HIGH, 0, data.data(), &state }, HOBBIT_DEMAND);
        CHECK(loader.await(state) == (check ? HOBBIT_PIECE_FAILED : HOBBIT_PIECE_READY));
        CHECK((loader.take_error().find("invalid") != std::string::npos) == check);
    }
}

int main() {
    every_piece_arrives();
    every_way_of_reading_brings_the_same_bytes();
    small_pieces_side_by_side_are_read_at_once();
    demands_overtake_prefetches_and_cancelled_ones_stop();
    promote_and_cancel_race_with_the_threads();
    the_end_does_not_wait_for_prefetches();
    a_wait_may_come_before_the_read();
    failures_name_file_tensor_and_expert();
    invalid_numbers_fail_only_when_checked();
    return check_result("loader");
}
