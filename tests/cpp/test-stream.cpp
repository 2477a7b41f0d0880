// stream: experts pass through a ring smaller than a layer, each once and intact, whatever was expected and in which order

#include "check.h"
#include "moe-file.h"

#include "stream.h"

#include <thread>

#include <fcntl.h>

static temp_dir dir;

struct fixture {
    hobbit_store  store;
    hobbit_loader loader;
    hobbit_bank   ring;
    hobbit_stream stream; // goes first

    explicit fixture(int n_places) : loader(2, false) {
        moe_file model;
        model.n_expert = 8;
        model.write(dir / "m.gguf");
        const int fd = open((dir / "m.gguf").c_str(), O_RDONLY);
        show_all_tensors(store, dir / "m.gguf", fd);
        close(fd);
        std::string err;
        CHECK(store.finish(err));
        CHECK(ring.alloc(store.weights[0]->source[HOBBIT_HIGH].place_bytes(), n_places, err));
        stream.init(&loader, &ring, n_places);
    }

    std::vector<hobbit_stream_expert> experts(std::initializer_list<int> ids) const {
        std::vector<hobbit_stream_expert> list;
        for (int id : ids) {
            list.push_back({ id, HOBBIT_HIGH });
        }
        return list;
    }

    std::vector<hobbit_stream_expert> plan(int layer, std::initializer_list<int> ids, uint64_t * wasted_bytes = nullptr) {
        std::vector<hobbit_stream_expert> list = experts(ids);
        uint64_t bytes;
        stream.plan(store.layers[layer], layer, list, bytes);
        if (wasted_bytes) {
            *wasted_bytes = bytes;
        }
        return list;
    }

    // what an operation does with one piece on one thread
    void use(hobbit_stream_piece & piece, int n_threads) {
        CHECK(loader.await(piece.state) == HOBBIT_PIECE_READY);
        const hobbit_weight * w = piece.read.weight;
        const float * data = (const float *) piece.read.dst;
        const float   want = moe_file::value(w->block, w->role, piece.read.expert);
        CHECK(data[0] == want && data[w->source[HOBBIT_HIGH].expert_bytes / sizeof(float) - 1] == want);
        stream.release(piece, n_threads);
    }

    void compute(int layer, int role, const std::vector<hobbit_stream_expert> & list, int n_threads = 2) {
        stream.begin(layer, role);
        std::vector<std::thread> threads;
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([&] {
                for (const hobbit_stream_expert & e : list) {
                    use(*e.piece[role], n_threads);
                }
            });
        }
        for (auto & t : threads) {
            t.join();
        }
    }
};

static void a_layer_larger_than_the_ring_passes_through_it() {
    for (int n_places : { 2, 3, 7, 64 }) {
        fixture f(n_places);
        for (int layer : { 0, 1 }) {
            const auto list = f.plan(layer, { 0, 1, 2, 3, 4, 5, 6, 7 });
            CHECK(list.size() == 8);
            f.compute(layer, HOBBIT_ROLE_GATE, list);
            f.compute(layer, HOBBIT_ROLE_UP,   list);
            f.compute(layer, HOBBIT_ROLE_DOWN, list);
        }
    }
}

static void what_was_expected_comes_first_and_what_was_wrong_goes() {
    for (int n_places : { 2, 5, 64 }) {
        fixture f(n_places);
        const auto first = f.plan(0, { 5, 6 });
        f.stream.expect(f.store.layers[1], 1, f.experts({ 3, 1, 2, 0 }));
        for (int role : { HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN }) {
            f.compute(0, role, first);
        }
        CHECK(f.stream.is_begun(1, 3, HOBBIT_HIGH));
        CHECK(!f.stream.is_begun(1, 3, HOBBIT_LOW));
        CHECK(!f.stream.is_begun(0, 3, HOBBIT_HIGH));
        f.loader.drain(); // a read that has not begun is dropped without waste

        uint64_t wasted_bytes;
        const auto second = f.plan(1, { 0, 1, 2, 7 }, &wasted_bytes);
        CHECK(wasted_bytes > 0); // 3 was first in the ring
        CHECK(second.size() == 4 && second[0].id == 1 && second[1].id == 2 && second[2].id == 0 && second[3].id == 7);
        for (int role : { HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN }) {
            f.compute(1, role, second);
        }
    }
}

static void another_order_of_operations_does_not_wait_for_ever() {
    for (int n_places : { 2, 4, 9 }) {
        fixture f(n_places);
        const auto list = f.plan(0, { 0, 1, 2, 3, 4, 5 });
        for (int role : { HOBBIT_ROLE_DOWN, HOBBIT_ROLE_UP, HOBBIT_ROLE_GATE }) {
            f.compute(0, role, list);
        }
    }
}

static void a_copy_stays_in_the_slot_it_was_given() {
    fixture f(2);
    auto list = f.plan(0, { 2, 4 });
    std::vector<float>   slot(32 * 64, -1.0f);
    std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
    list[1].piece[HOBBIT_ROLE_UP]->keep_dst   = (char *) slot.data();
    list[1].piece[HOBBIT_ROLE_UP]->keep_state = &state;
    for (int role : { HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN }) {
        f.compute(0, role, list);
    }
    CHECK(state == HOBBIT_PIECE_READY);
    CHECK(slot.front() == moe_file::value(0, HOBBIT_ROLE_UP, 4) && slot.back() == slot.front());
}

static void a_step_that_stops_leaves_nothing_behind() {
    fixture f(3);
    auto list = f.plan(0, { 0, 1, 2, 3 });
    std::vector<float>   slot(32 * 64);
    std::atomic<uint8_t> state { HOBBIT_PIECE_ABSENT };
    list[3].piece[HOBBIT_ROLE_DOWN]->keep_dst   = (char *) slot.data();
    list[3].piece[HOBBIT_ROLE_DOWN]->keep_state = &state;
    f.compute(0, HOBBIT_ROLE_GATE, list);
    f.stream.expect(f.store.layers[1], 1, f.experts({ 0, 1 }));
    f.stream.reset();
    CHECK(state == HOBBIT_PIECE_FAILED); // a copy that never came must not look as if it would
    f.loader.drain();

    // and the same if the next layer is planned without the first one's operations
    f.plan(0, { 0, 1, 2, 3 });
    const auto next = f.plan(1, { 4, 5, 6 });
    for (int role : { HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN }) {
        f.compute(1, role, next);
    }
}

int main() {
    a_layer_larger_than_the_ring_passes_through_it();
    what_was_expected_comes_first_and_what_was_wrong_goes();
    another_order_of_operations_does_not_wait_for_ever();
    a_copy_stays_in_the_slot_it_was_given();
    a_step_that_stops_leaves_nothing_behind();
    return check_result("stream");
}
