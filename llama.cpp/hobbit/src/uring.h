// uring: reads through Linux' io_uring, by system calls alone. The loader's one thread uses it; wake() may come from any.

#pragma once

#include <memory>

struct hobbit_run;

class hobbit_uring {
  public:
    // NULL: not this system, or the kernel refuses
    static std::unique_ptr<hobbit_uring> open(int n_reads);
    ~hobbit_uring();

    // adds a read under a number below n_reads; run stays alive until pop() returns the number
    void push(const hobbit_run & run, int number);
    // starts what was pushed and blocks until a read has ended or wake() is called
    void submit_and_wait();
    void wake();
    // the next read that has ended, and what pread would have returned; false: none
    bool pop(int & number, int & n_read);

  private:
    hobbit_uring() = default;
    struct state;
    std::unique_ptr<state> s;
};
