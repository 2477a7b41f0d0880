#include "uring.h"

#include "store.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static constexpr uint64_t WAKE = UINT64_MAX; // user_data of the read that wake() ends

// the two rings that are shared with the kernel
struct hobbit_uring::state {
    int fd     = -1;
    int fd_wake = -1;

    char *         rings      = (char *) MAP_FAILED; // both, in one mapping
    size_t         rings_size = 0;
    io_uring_sqe * sqes       = (io_uring_sqe *) MAP_FAILED;
    size_t         sqes_size  = 0;

    io_uring_params p = {};
    unsigned n_pushed = 0;     // not yet submitted
    bool     wake_armed = false;
    uint64_t wake_value = 0;
    iovec    wake_iov   = {};

    std::atomic<unsigned> & at(unsigned offset) { return *(std::atomic<unsigned> *) (rings + offset); }

    void push(int fd_read, const iovec * iov, unsigned n, uint64_t offset, uint64_t user_data) {
        const unsigned tail  = at(p.sq_off.tail).load(std::memory_order_relaxed);
        const unsigned index = tail & at(p.sq_off.ring_mask).load(std::memory_order_relaxed);
        io_uring_sqe & sqe = sqes[index];
        memset(&sqe, 0, sizeof(sqe));
        sqe.opcode    = IORING_OP_READV;
        sqe.fd        = fd_read;
        sqe.addr      = (uint64_t) (uintptr_t) iov;
        sqe.len       = n;
        sqe.off       = offset;
        sqe.user_data = user_data;
        ((unsigned *) (rings + p.sq_off.array))[index] = index;
        at(p.sq_off.tail).store(tail + 1, std::memory_order_release);
        n_pushed++;
    }

    ~state() {
        if (sqes != MAP_FAILED) {
            munmap(sqes, sqes_size);
        }
        if (rings != MAP_FAILED) {
            munmap(rings, rings_size);
        }
        for (int f : { fd, fd_wake }) {
            if (f >= 0) {
                close(f);
            }
        }
    }
};

std::unique_ptr<hobbit_uring> hobbit_uring::open(int n_reads) {
    auto s = std::make_unique<state>();
    s->fd      = (int) syscall(__NR_io_uring_setup, n_reads + 1, &s->p);
    s->fd_wake = eventfd(0, EFD_CLOEXEC);
    if (s->fd < 0 || s->fd_wake < 0 || !(s->p.features & IORING_FEAT_SINGLE_MMAP)) {
        return nullptr;
    }
    const size_t sq = s->p.sq_off.array + s->p.sq_entries * sizeof(unsigned);
    const size_t cq = s->p.cq_off.cqes  + s->p.cq_entries * sizeof(io_uring_cqe);
    s->rings_size = sq > cq ? sq : cq;
    s->sqes_size  = s->p.sq_entries * sizeof(io_uring_sqe);
    s->rings = (char *)         mmap(nullptr, s->rings_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, s->fd, IORING_OFF_SQ_RING);
    s->sqes  = (io_uring_sqe *) mmap(nullptr, s->sqes_size,  PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, s->fd, IORING_OFF_SQES);
    if (s->rings == MAP_FAILED || s->sqes == MAP_FAILED) {
        return nullptr;
    }
    s->wake_iov = { &s->wake_value, sizeof(s->wake_value) };
    std::unique_ptr<hobbit_uring> uring(new hobbit_uring);
    uring->s = std::move(s);
    return uring;
}

hobbit_uring::~hobbit_uring() = default;

void hobbit_uring::push(const hobbit_run & run, int number) {
    s->push(run.fd, run.iov.data(), (unsigned) run.iov.size(), run.offset, (uint64_t) number);
}

void hobbit_uring::submit_and_wait() {
    if (!s->wake_armed) {
        s->wake_armed = true;
        s->push(s->fd_wake, &s->wake_iov, 1, 0, WAKE);
    }
    while (true) {
        const long n = syscall(__NR_io_uring_enter, s->fd, s->n_pushed, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (n >= 0) {
            s->n_pushed -= (unsigned) n;
            if (s->n_pushed == 0) {
                return;
            }
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            return; // nothing was submitted; what waits for it fails with the next wait
        }
    }
}

void hobbit_uring::wake() {
    const uint64_t one = 1;
    (void) !write(s->fd_wake, &one, sizeof(one));
}

bool hobbit_uring::pop(int & number, int & n_read) {
    while (true) {
        const unsigned head = s->at(s->p.cq_off.head).load(std::memory_order_relaxed);
        if (head == s->at(s->p.cq_off.tail).load(std::memory_order_acquire)) {
            return false;
        }
        const io_uring_cqe cqe = ((io_uring_cqe *) (s->rings + s->p.cq_off.cqes))[head & s->at(s->p.cq_off.ring_mask).load(std::memory_order_relaxed)];
        s->at(s->p.cq_off.head).store(head + 1, std::memory_order_release);
        if (cqe.user_data == WAKE) {
            s->wake_armed = false;
            continue;
        }
        number = (int) cqe.user_data;
        n_read = cqe.res;
        return true;
    }
}

#else

struct hobbit_uring::state {};

std::unique_ptr<hobbit_uring> hobbit_uring::open(int) { return nullptr; }
hobbit_uring::~hobbit_uring() = default;
void hobbit_uring::push(const hobbit_run &, int) {}
void hobbit_uring::submit_and_wait() {}
void hobbit_uring::wake() {}
bool hobbit_uring::pop(int &, int &) { return false; }

#endif
