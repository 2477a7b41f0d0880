#include "stats.h"

#include "store.h"

#include <cinttypes>

// every counter by name, for the sums and for JSON
static const struct { const char * name; uint64_t hobbit_counters::* member; } fields[] = {
    { "lookups",         &hobbit_counters::lookups         },
    { "hits",            &hobbit_counters::hits            },
    { "misses_high",     &hobbit_counters::misses_high     },
    { "misses_low",      &hobbit_counters::misses_low      },
    { "skips",           &hobbit_counters::skips           },
    { "selected_high",   &hobbit_counters::selected_high   },
    { "selected_low",    &hobbit_counters::selected_low    },
    { "selected_skip",   &hobbit_counters::selected_skip   },
    { "evictions",       &hobbit_counters::evictions       },
    { "read_bytes_high", &hobbit_counters::read_bytes_high },
    { "read_bytes_low",  &hobbit_counters::read_bytes_low  },
    { "streamed",        &hobbit_counters::streamed        },
    { "predicted",       &hobbit_counters::predicted       },
    { "predicted_right", &hobbit_counters::predicted_right },
    { "prefetch_issued", &hobbit_counters::prefetch_issued },
    { "prefetch_used",   &hobbit_counters::prefetch_used   },
    { "prefetch_wasted", &hobbit_counters::prefetch_wasted },
    { "prefetch_bytes",  &hobbit_counters::prefetch_bytes  },
    { "stall_us",        &hobbit_counters::stall_us        },
};

void hobbit_counters::add(const hobbit_counters & other) {
    for (const auto & f : fields) {
        this->*f.member += other.*f.member;
    }
}

hobbit_counters hobbit_stats::total() const {
    hobbit_counters sum;
    for (const auto & layer : layers) {
        sum.add(layer);
    }
    return sum;
}

std::string hobbit_counters_to_json(const hobbit_counters & c) {
    std::string text;
    for (const auto & f : fields) {
        text += hobbit_format("%s\"%s\": %" PRIu64, text.empty() ? "" : ", ", f.name, c.*f.member);
    }
    return text;
}

std::string hobbit_stats_to_json(const hobbit_stats & s, const hobbit_stats_labels & l) {
    std::string text = "{\n  \"version\": 1,\n";
    text += hobbit_format("  \"precision\": \"%s\",\n  \"policy\": \"%s\",\n  \"cache_bytes\": %" PRIu64 ",\n", l.rule.c_str(), l.policy.c_str(), l.cache_bytes);
    text += hobbit_format("  \"prefetch\": \"%s\",\n", l.prefetch.c_str());
    text += hobbit_format("  \"slots_high\": %d,\n  \"slots_low\": %d,\n  \"resident_high\": %d,\n  \"resident_low\": %d,\n",
            l.n_slots[HOBBIT_HIGH], l.n_slots[HOBBIT_LOW], l.n_used[HOBBIT_HIGH], l.n_used[HOBBIT_LOW]);
    text += hobbit_format("  \"prompt_tokens\": %" PRIu64 ",\n  \"prompt_us\": %" PRIu64 ",\n  \"decode_tokens\": %" PRIu64 ",\n  \"decode_us\": %" PRIu64 ",\n",
            s.prompt_tokens, s.prompt_us, s.decode_tokens, s.decode_us);
    text += hobbit_format("  \"steps\": %" PRIu64 ",\n  \"failed_steps\": %" PRIu64 ",\n", s.steps, s.failed_steps);
    text += "  \"resident\": [";
    for (size_t i = 0; i < l.resident.size(); ++i) {
        text += (i > 0 ? ", \"" : "\"") + l.resident[i] + "\"";
    }
    text += "],\n";
    text += "  \"total\": {" + hobbit_counters_to_json(s.total()) + "},\n  \"layers\": [\n";
    for (size_t i = 0; i < s.layers.size(); ++i) {
        text += hobbit_format("    {\"block\": %d, ", l.blocks[i]) + hobbit_counters_to_json(s.layers[i]) + (i + 1 < s.layers.size() ? "},\n" : "}\n");
    }
    return text + "  ]\n}\n";
}

static double percent(uint64_t part, uint64_t whole) {
    return whole > 0 ? 100.0 * part / whole : 0.0;
}

static double per_second(uint64_t n, uint64_t us) {
    return us > 0 ? 1e6 * n / us : 0.0;
}

std::string hobbit_stats_to_table(const hobbit_stats & s, const hobbit_stats_labels & l) {
    const hobbit_counters c = s.total();
    const uint64_t selected   = c.selected_high + c.selected_low + c.selected_skip;
    const uint64_t read_bytes = c.read_bytes_high + c.read_bytes_low + c.prefetch_bytes;
    const double   mib        = 1024.0 * 1024.0;

    std::string t = "\nhobbit: expert cache\n";
    t += hobbit_format("  %-18s %10.2f tok/s  (%" PRIu64 " tokens)\n", "prompt", per_second(s.prompt_tokens, s.prompt_us), s.prompt_tokens);
    t += hobbit_format("  %-18s %10.2f tok/s  (%" PRIu64 " tokens)\n", "decode", per_second(s.decode_tokens, s.decode_us), s.decode_tokens);
    t += hobbit_format("  %-18s %10.2f %%      (%" PRIu64 " of %" PRIu64 " lookups)\n", "hit rate", percent(c.hits, c.lookups), c.hits, c.lookups);
    t += hobbit_format("  %-18s %10" PRIu64 "  high, %" PRIu64 " low; %" PRIu64 " of them streamed past the cache\n", "misses", c.misses_high, c.misses_low, c.streamed);
    t += hobbit_format("  %-18s %10" PRIu64 "  lookups\n", "skips", c.skips);
    t += hobbit_format("  %-18s %10.2f %% high, %.2f %% low, %.2f %% skipped\n", "selections",
            percent(c.selected_high, selected), percent(c.selected_low, selected), percent(c.selected_skip, selected));
    t += hobbit_format("  %-18s %10.1f MiB    (%.1f MiB high, %.1f MiB low, %.1f MiB ahead)\n", "bytes read",
            read_bytes / mib, c.read_bytes_high / mib, c.read_bytes_low / mib, c.prefetch_bytes / mib);
    t += hobbit_format("  %-18s %10" PRIu64 "  experts, %" PRIu64 " used, %" PRIu64 " wasted (%s)\n", "prefetched",
            c.prefetch_issued, c.prefetch_used, c.prefetch_wasted, l.prefetch.c_str());
    t += hobbit_format("  %-18s %10.1f ms     (%.1f %% of the time)\n", "stall time", c.stall_us / 1e3, percent(c.stall_us, s.prompt_us + s.decode_us));
    t += hobbit_format("  %-18s %10" PRIu64 "\n", "evictions", c.evictions);
    t += hobbit_format("  %-18s %10d  high of %d slots, %d low of %d slots; %.1f MiB in all\n", "resident",
            l.n_used[HOBBIT_HIGH], l.n_slots[HOBBIT_HIGH], l.n_used[HOBBIT_LOW], l.n_slots[HOBBIT_LOW], l.cache_bytes / mib);
    if (s.failed_steps > 0) {
        t += hobbit_format("  %-18s %10" PRIu64 "\n", "failed steps", s.failed_steps);
    }
    return t;
}
