// The whole test framework: a claim that prints itself when it fails, and a main that counts failures.

#pragma once

#include <cstdio>
#include <cstdlib>

static int n_failed = 0;

#define CHECK(claim)                                                                \
    do {                                                                            \
        if (!(claim)) {                                                             \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #claim);   \
            n_failed++;                                                             \
        }                                                                           \
    } while (0)

static inline int check_result(const char * name) {
    printf("%s: %s\n", name, n_failed == 0 ? "all claims hold" : "claims failed");
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
