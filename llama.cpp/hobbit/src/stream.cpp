#include "stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

// the order in which a layer's operations want the weights
static constexpr hobbit_role ROLES_AS_USED[] = { HOBBIT_ROLE_GATE_UP, HOBBIT_ROLE_GATE, HOBBIT_ROLE_UP, HOBBIT_ROLE_DOWN };

void hobbit_stream::init(hobbit_loader * loader_new, const hobbit_bank * ring_new, int n_places) {
    reset();
    loader = loader_new;
    ring   = ring_new;
    free_places.clear();
    for (int i = n_places - 1; i >= 0; --i) {
        free_places.push_back(i);
    }
}

hobbit_stream_piece * hobbit_stream::add(const hobbit_weight * weight, int layer_index, int32_t id, int precision) {
    pieces.push_back(std::make_unique<hobbit_stream_piece>());
    hobbit_stream_piece & piece = *pieces.back();
    piece.layer = layer_index;
    piece.read  = { weight, precision, id, nullptr, &piece.state };
    return &piece;
}

void hobbit_stream::pump(hobbit_urgency urgency) {
    while (!free_places.empty() && !pending.empty()) {
        hobbit_stream_piece & piece = *pending.front();
        pending.pop_front();
        piece.place = free_places.back();
        free_places.pop_back();
        piece.read.dst = ring->slot(piece.place) + piece.read.weight->source[piece.read.precision].skew(piece.read.expert);
        // what is of a layer that has yet to be planned may wait
        loader->submit(piece.read, piece.layer == expected_layer ? HOBBIT_PREFETCH : urgency);
    }
}

uint64_t hobbit_stream::drop(hobbit_stream_piece & piece) {
    const uint64_t total = piece.read.weight->source[piece.read.precision].expert_bytes;
    uint64_t bytes = 0;
    if (piece.place >= 0) {
        bytes = piece.state.load(std::memory_order_acquire) == HOBBIT_PIECE_LOADING ? loader->cancel(piece.state) : total;
        loader->await_idle(piece.state);
        free_places.push_back(piece.place);
        piece.place = -1;
    } else {
        pending.erase(std::remove(pending.begin(), pending.end(), &piece), pending.end());
    }
    if (piece.keep_dst) {
        piece.keep_state->store(HOBBIT_PIECE_FAILED, std::memory_order_release); // so that the slot is read into anew
        piece.keep_dst = nullptr;
    }
    return bytes;
}

void hobbit_stream::expect(const hobbit_layer & layer, int layer_index, const std::vector<hobbit_stream_expert> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    expected_layer = layer_index;
    expected       = experts;
    for (hobbit_role role : ROLES_AS_USED) {
        for (hobbit_stream_expert & e : expected) {
            if (layer.weight[role]) {
                e.piece[role] = add(layer.weight[role], layer_index, e.id, e.precision);
                pending.push_back(e.piece[role]);
            }
        }
    }
    pump(HOBBIT_PREFETCH);
}

const hobbit_stream_expert * hobbit_stream::find_expected(int layer_index, int32_t id, int precision) const {
    if (layer_index != expected_layer) {
        return nullptr;
    }
    const auto it = std::find_if(expected.begin(), expected.end(), [&](const hobbit_stream_expert & e) { return e.id == id && e.precision == precision; });
    return it == expected.end() ? nullptr : &*it;
}

bool hobbit_stream::is_begun(int layer_index, int32_t id, int precision) const {
    std::lock_guard<std::mutex> lock(mutex);
    const hobbit_stream_expert * e = find_expected(layer_index, id, precision);
    return e && std::any_of(e->piece, e->piece + HOBBIT_N_ROLES, [](const hobbit_stream_piece * p) { return p && p->place >= 0; });
}

void hobbit_stream::plan(const hobbit_layer & layer, int layer_index, std::vector<hobbit_stream_expert> & experts, uint64_t & wasted_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    wasted_bytes = 0;

    // the layer before has been computed: of what is left only this layer's expectation counts
    std::vector<hobbit_stream_expert> order;
    std::vector<bool>                 taken(experts.size(), false);
    if (expected_layer == layer_index) {
        for (const hobbit_stream_expert & e : expected) {
            const auto it = std::find_if(experts.begin(), experts.end(), [&](const hobbit_stream_expert & x) { return x.id == e.id && x.precision == e.precision; });
            if (it == experts.end()) {
                for (hobbit_stream_piece * piece : e.piece) {
                    wasted_bytes += piece ? drop(*piece) : 0;
                }
                continue;
            }
            taken[it - experts.begin()] = true;
            order.push_back(e);
            for (hobbit_stream_piece * piece : e.piece) {
                if (piece) {
                    piece->kept = true;
                }
            }
        }
    }
    pending.clear();
    for (const piece_ptr & piece : pieces) {
        if (!piece->kept) {
            drop(*piece); // has a place only if its operation never came
        }
    }
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const piece_ptr & p) { return !p->kept; }), pieces.end());
    for (const piece_ptr & piece : pieces) {
        piece->kept = false;
    }
    expected_layer = -1;
    expected.clear();

    for (size_t i = 0; i < experts.size(); ++i) {
        if (!taken[i]) {
            order.push_back(experts[i]);
        }
    }
    for (hobbit_role role : ROLES_AS_USED) {
        for (hobbit_stream_expert & e : order) {
            if (!layer.weight[role]) {
                continue;
            }
            if (!e.piece[role]) {
                e.piece[role] = add(layer.weight[role], layer_index, e.id, e.precision);
            }
            if (e.piece[role]->place < 0) {
                pending.push_back(e.piece[role]);
            } else {
                loader->promote(e.piece[role]->state);
            }
        }
    }
    experts = order;
    pump(HOBBIT_DEMAND);
}

void hobbit_stream::begin(int layer_index, int role) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto is_ours = [&](const hobbit_stream_piece * p) { return p->layer == layer_index && p->read.weight->role == role; };
    const auto first   = std::find_if(pending.begin(), pending.end(), is_ours);
    if (first == pending.end()) {
        return;
    }
    std::stable_partition(pending.begin(), pending.end(), is_ours);

    const auto holds_place = [](const piece_ptr & p) { return p->place >= 0; };
    if (free_places.empty() && std::none_of(pieces.begin(), pieces.end(), [&](const piece_ptr & p) { return holds_place(p) && is_ours(p.get()); })) {
        // an architecture that computes its weights in another order: without a place it would wait for ever
        const auto last = std::find_if(pieces.rbegin(), pieces.rend(), holds_place);
        hobbit_stream_piece & piece = **last;
        char * const keep_dst = std::exchange(piece.keep_dst, nullptr); // comes later all the same
        drop(piece);
        piece.keep_dst = keep_dst;
        piece.state.store(HOBBIT_PIECE_ABSENT, std::memory_order_relaxed);
        const auto later = std::find_if(pending.begin(), pending.end(), [&](const hobbit_stream_piece * p) { return !is_ours(p); });
        pending.insert(later, &piece);
    }
    pump(HOBBIT_DEMAND);
}

void hobbit_stream::release(hobbit_stream_piece & piece, int n_threads) {
    if (piece.released.fetch_add(1, std::memory_order_acq_rel) + 1 != n_threads) {
        return;
    }
    if (piece.keep_dst) {
        const bool ok = piece.state.load(std::memory_order_acquire) == HOBBIT_PIECE_READY;
        if (ok) {
            memcpy(piece.keep_dst, piece.read.dst, piece.read.weight->source[piece.read.precision].expert_bytes);
        }
        piece.keep_state->store(ok ? HOBBIT_PIECE_READY : HOBBIT_PIECE_FAILED, std::memory_order_release);
        piece.keep_dst = nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex);
    free_places.push_back(piece.place);
    piece.place = -1;
    pump(HOBBIT_DEMAND);
}

void hobbit_stream::reset() {
    std::lock_guard<std::mutex> lock(mutex);
    pending.clear();
    for (const piece_ptr & piece : pieces) {
        drop(*piece);
    }
    pieces.clear();
    expected.clear();
    expected_layer = -1;
}
