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
    a_wait_may_come_before_the_read();
    failures_name_file_tensor_and_expert();
    invalid_numbers_fail_only_when_checked();
    return check_result("loader");
}
