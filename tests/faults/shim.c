// A disk that misbehaves, for LD_PRELOAD: positioned reads of files whose path contains FAULT_FILE fail, come short, are
// interrupted or are slow, from the FAULT_AFTER-th such read on. Mode no-uring: a kernel without io_uring.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long n_reads;

// 0: read as usual; -1: errno is set; n > 0: read no more than n bytes
static long fault(int fd, long size) {
    const char * file = getenv("FAULT_FILE");
    const char * mode = getenv("FAULT_MODE");
    const char * from = getenv("FAULT_AFTER");
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    path[n > 0 ? n : 0] = '\0';
    if (!file || !mode || !strstr(path, file)) {
        return 0;
    }
    const long i = atomic_fetch_add(&n_reads, 1);
    if (from && i < atol(from)) {
        return 0;
    }
    if (strcmp(mode, "eio") == 0) {
        errno = EIO;
        return -1;
    }
    if (strcmp(mode, "once") == 0 && i == atol(from)) {
        errno = EIO;
        return -1;
    }
    if (strcmp(mode, "eintr") == 0 && i % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    if (strcmp(mode, "short") == 0 && size > 512) {
        return size / 2 / 512 * 512;
    }
    if (strcmp(mode, "slow") == 0) {
        usleep(1000);
    }
    return 0;
}

static ssize_t faulty_pread(const char * name, int fd, void * buf, size_t size, off64_t offset) {
    ssize_t (*real)(int, void *, size_t, off64_t) = (ssize_t (*)(int, void *, size_t, off64_t)) dlsym(RTLD_NEXT, name);
    const long f = fault(fd, (long) size);
    return f < 0 ? -1 : real(fd, buf, f > 0 ? (size_t) f : size, offset);
}

static ssize_t faulty_preadv(const char * name, int fd, const struct iovec * iov, int n, off64_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off64_t) = (ssize_t (*)(int, const struct iovec *, int, off64_t)) dlsym(RTLD_NEXT, name);
    const long f = fault(fd, (long) iov[0].iov_len);
    if (f <= 0) {
        return f < 0 ? -1 : real(fd, iov, n, offset);
    }
    const struct iovec part = { iov[0].iov_base, (size_t) f };
    return real(fd, &part, 1, offset);
}

ssize_t pread   (int fd, void * buf, size_t size, off_t   offset) { return faulty_pread("pread",   fd, buf, size, offset); }
ssize_t pread64 (int fd, void * buf, size_t size, off64_t offset) { return faulty_pread("pread64", fd, buf, size, offset); }
ssize_t preadv  (int fd, const struct iovec * iov, int n, off_t   offset) { return faulty_preadv("preadv",   fd, iov, n, offset); }
ssize_t preadv64(int fd, const struct iovec * iov, int n, off64_t offset) { return faulty_preadv("preadv64", fd, iov, n, offset); }

long syscall(long number, ...) {
    long (*real)(long, ...) = (long (*)(long, ...)) dlsym(RTLD_NEXT, "syscall");
    const char * mode = getenv("FAULT_MODE");
    if (number == SYS_io_uring_setup && mode && strcmp(mode, "no-uring") == 0) {
        errno = ENOSYS;
        return -1;
    }
    long a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; ++i) {
        a[i] = va_arg(args, long);
    }
    va_end(args);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
