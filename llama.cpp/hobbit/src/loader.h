// loader: reads expert bytes from files into memory, in the background.
//
// Two queues, demand before prefetch, and a few threads. A piece is one role (gate, up, down) of one expert, so that compute may
// start on the first while the others are on the way. It is read block by block: between two blocks a thread looks at the queues
// again, so a prefetch never holds up a demand for longer than a block, and one that turned out wrong stops there (MoE-APEX).
// moe_graph submits, promotes and cancels; compute threads wait for the state of the piece they need.

#pragma once

#include "store.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

enum hobbit_piece_state : uint8_t {
    HOBBIT_PIECE_ABSENT,
    HOBBIT_PIECE_LOADING,
    HOBBIT_PIECE_READY,
    HOBBIT_PIECE_FAILED,
};

enum hobbit_urgency { HOBBIT_DEMAND, HOBBIT_PREFETCH, HOBBIT_N_URGENCIES };

struct hobbit_read {
    const hobbit_weight *  weight;
    int                    precision; // HOBBIT_LOW or HOBBIT_HIGH
    int                    expert;
    char *                 dst;       // see hobbit_source: alignment, and bytes around that may be written
    std::atomic<uint8_t> * state;     // LOADING until the read ends, then READY or FAILED; ABSENT if it was cancelled
};

class hobbit_loader {
  public:
    // validate: look for NaN and impossible scales in what was read, as --check-tensors does
    hobbit_loader(int n_threads, bool validate);
    ~hobbit_loader(); // finishes demands, drops prefetches

    void submit(const hobbit_read & read, hobbit_urgency urgency);

    // a prefetch that is needed now becomes a demand; it keeps what it has read
    void promote(const std::atomic<uint8_t> & state);
    // stops a prefetch at the next block; returns the bytes it had read by now. Its memory is free once await_idle returns
    uint64_t cancel(const std::atomic<uint8_t> & state);

    // blocks until the piece is READY or FAILED, also if it has yet to be submitted; returns which
    uint8_t await(const std::atomic<uint8_t> & state);
    // blocks until nothing writes to the piece
    void await_idle(const std::atomic<uint8_t> & state);
    // blocks until nothing is queued or under way
    void drain();

    // the message of the first failure since the last call, "" if there was none
    std::string take_error();

    // called when a read has ended, with its bytes and its state from now on, under the loader's lock; NULL: nothing is
    using observer = std::function<void(const hobbit_read & read, uint64_t done, uint8_t state)>;
    void set_observer(observer on_end);

    // seconds since the start in which a demand was under way
    double demand_seconds();

  private:
    struct job {
        hobbit_read    read;
        hobbit_urgency urgency;
        uint64_t       done      = 0; // bytes
        bool           cancelled = false;
    };

    void run();
    void count_demand(int change); // mutex held

    observer on_end;

    std::mutex              mutex;
    std::condition_variable cv_work;
    std::condition_variable cv_done;
    std::deque<job>         queues[HOBBIT_N_URGENCIES];
    std::vector<job *>      under_way;
    bool                    stop = false;
    bool                    validate;
    std::string             error;

    int     n_demand       = 0; // under way
    int64_t demand_since   = 0; // us
    int64_t demand_us      = 0;

    std::vector<std::thread> threads;
};
