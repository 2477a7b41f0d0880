// loader: reads expert bytes from files into memory, in the background.
//
// Two queues, demand before prefetch, and a few threads, or one that keeps as many reads under way through io_uring. A piece is one role (gate, up, down) of one expert, so that compute may
// start on the first while the others are on the way. It is read in blocks, several at once, so that the first piece in the queue gets
// the whole disk. Before each block a thread looks at the queues again, so a prefetch never holds up a demand for longer than a block, and one that turned out wrong stops there (MoE-APEX).
// Pieces smaller than a block that are queued close together and lie side by side in the file are read at once.
// moe_graph submits, promotes and cancels; compute threads wait for the state of the piece they need.

#pragma once

#include "store.h"
#include "uring.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
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
    // validate: look for NaN and impossible scales in what was read, as --check-tensors does.
    // io_uring: instead of threads, if the kernel has it; n_threads reads are under way then
    hobbit_loader(int n_threads, bool validate, bool io_uring = false);
    ~hobbit_loader(); // finishes demands, drops prefetches

    // how experts of sources that are repacked get into their layout (ggml_cpu_experts_repack); before the first of them is submitted
    using repack_fn = bool (*)(const ggml_tensor * weight, const void * src, void * dst);
    void set_repack(repack_fn f) { repack = f; }

    void submit(const hobbit_read & read, hobbit_urgency urgency);

    // a prefetch that is needed now becomes a demand; it keeps what it has read
    void promote(const std::atomic<uint8_t> & state);
    // stops a read at the next block; returns the bytes it had read by now. Its memory is free once await_idle returns
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
    // seconds since the start in which anything was under way
    double busy_seconds();

    bool is_uring() const { return uring != nullptr; }

  private:
    struct job {
        hobbit_read    read;
        hobbit_urgency urgency;
        uint64_t       issued    = 0; // bytes that a read was begun for
        uint64_t       done      = 0; // bytes
        int            n_reads   = 0; // under way
        bool           is_demand = false; // counted as one
        bool           cancelled = false;
        bool           failed    = false;

        char *         staging   = nullptr; // where it is read to if it is repacked afterwards
        size_t         staging_bytes = 0;

        char *   dst  () const { return staging ? staging + read.weight->source[read.precision].skew(read.expert) : read.dst; }
        uint64_t total() const { return read.weight->source[read.precision].expert_bytes; }
    };
    using job_ptr = std::shared_ptr<job>;

    // what one read is for: a block of one piece, or whole pieces that lie side by side
    struct work {
        std::vector<job_ptr>        jobs;
        std::vector<char *>         dst;
        uint64_t                    done;   // where in the piece the block begins
        uint64_t                    size;   // bytes of each
        std::unique_ptr<hobbit_run> run;
        std::vector<std::string>    errors; // of each, "" if it arrived
    };

    struct clock {
        int     n     = 0; // under way
        int64_t since = 0; // us
        int64_t us    = 0;

        void count(int change);
    };

    void run();
    void run_uring(int depth);
    bool is_idle() const { return queues[HOBBIT_DEMAND].empty() && queues[HOBBIT_PREFETCH].empty(); }
    job_ptr find_queued(const std::atomic<uint8_t> & state, int urgency) const;
    void take   (work & w);                                         // mutex held, and not idle
    void arrive (work & w, int64_t n_read) const;                   // not held: what the read brought
    void verify (const job & j, std::string & err) const;           // not held: all of it is here
    void finish (work & w, std::unique_lock<std::mutex> & lock);    // held, but for a while
    void stage  (job & j);                                          // held
    void add_staging(size_t size);                                  // held: at least one more spare part of this size
    void unstage(job & j);                                          // held
    void settle (const job_ptr & j);                                // held: nothing of it is under way any more

    observer on_end;

    std::mutex              mutex;
    std::condition_variable cv_work;
    std::condition_variable cv_done;
    std::deque<job_ptr>     queues[HOBBIT_N_URGENCIES]; // with bytes that no read was begun for
    std::vector<job_ptr>    under_way;
    bool                    stop = false;
    bool                    validate;
    repack_fn               repack = nullptr;
    std::vector<char *>                    slabs; // memory for staging, in huge pages
    std::vector<std::pair<char *, size_t>> spare; // parts of it that are not in use, with their bytes
    std::string             error;

    clock demands;
    clock busy;

    std::unique_ptr<hobbit_uring> uring;
    bool                          uring_waits = false; // for completions, with room for more

    std::vector<std::thread> threads;
};
