// loader: reads expert bytes from files into memory, in the background.
//
// One queue, a few threads, positioned reads. moe_graph submits; compute threads wait for the state of the piece they need.
// A piece is one role (gate, up, down) of one expert, so that compute may start on the first while the others are on the way.

#pragma once

#include "store.h"

#include <atomic>
#include <condition_variable>
#include <deque>
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

struct hobbit_read {
    const hobbit_weight * weight;
    int                   precision; // HOBBIT_LOW or HOBBIT_HIGH
    int                   expert;
    char *                dst;       // source[precision].expert_bytes bytes
    std::atomic<uint8_t> * state;    // LOADING until the read ends, then READY or FAILED
};

class hobbit_loader {
  public:
    // validate: look for NaN and impossible scales in what was read, as --check-tensors does
    hobbit_loader(int n_threads, bool validate);
    ~hobbit_loader(); // finishes what is queued

    void submit(const hobbit_read & read);

    // blocks until the state is READY or FAILED, also if the read has yet to be submitted; returns it
    uint8_t wait(std::atomic<uint8_t> & state);
    // blocks until nothing is queued or under way
    void drain();

    // the message of the first failure since the last call, "" if there was none
    std::string take_error();

  private:
    void run();

    std::mutex               mutex;
    std::condition_variable  cv_work;
    std::condition_variable  cv_done;
    std::deque<hobbit_read>  queue;
    int                      n_busy = 0;
    bool                     stop   = false;
    bool                     validate;
    std::string              error;
    std::vector<std::thread> threads;
};
