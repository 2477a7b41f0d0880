// The page that llama-server serves at /hobbit: dashboard.html, embedded by embed.cmake.

#pragma once

#include <cstddef>

extern const char   hobbit_dashboard_html[];
extern const size_t hobbit_dashboard_html_size;
