#include "stats.h"

#include "store.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

// every counter by name, for the sums, for JSON and for metrics
static const struct { const char * name; uint64_t hobbit_counters::* member; const char * help; } fields[] = {
    { "lookups",         &hobbit_counters::lookups,         "Experts that steps asked for, one per layer, expert and step" },
    { "hits",            &hobbit_counters::hits,            "Lookups that found the expert in memory, or on its way there ahead of time" },
    { "misses_high",     &hobbit_counters::misses_high,     "Lookups that had to read a high-precision expert" },
    { "misses_low",      &hobbit_counters::misses_low,      "Lookups that had to read a low-precision expert" },
    { "skips",           &hobbit_counters::skips,           "Lookups whose expert was skipped for its small gate weight" },
    { "selected_high",   &hobbit_counters::selected_high,   "Pairs of token and expert computed in high precision" },
    { "selected_low",    &hobbit_counters::selected_low,    "Pairs of token and expert computed in low precision" },
    { "selected_skip",   &hobbit_counters::selected_skip,   "Pairs of token and expert that were skipped" },
    { "routed",          &hobbit_counters::routed,          "Tokens that a layer's router sent to experts" },
    { "mass_low",        &hobbit_counters::mass_low,        "Gate weight computed in low precision, 1000000 for all of a token's" },
    { "mass_skip",       &hobbit_counters::mass_skip,       "Gate weight whose expert was skipped, 1000000 for all of a token's" },
    { "evictions",       &hobbit_counters::evictions,       "Experts that left the cache for another one" },
    { "read_bytes_high", &hobbit_counters::read_bytes_high, "Bytes of high-precision experts read on demand" },
    { "read_bytes_low",  &hobbit_counters::read_bytes_low,  "Bytes of low-precision experts read on demand" },
    { "streamed",        &hobbit_counters::streamed,        "Misses that passed through the ring without taking a slot" },
    { "predicted",       &hobbit_counters::predicted,       "Experts that the layer before named for a layer" },
    { "predicted_right", &hobbit_counters::predicted_right, "Predicted experts that the router then chose" },
    { "prefetch_issued", &hobbit_counters::prefetch_issued, "Experts read ahead" },
    { "prefetch_used",   &hobbit_counters::prefetch_used,   "Experts read ahead that the router then chose" },
    { "prefetch_wasted", &hobbit_counters::prefetch_wasted, "Experts read ahead that the router did not choose" },
    { "prefetch_bytes",  &hobbit_counters::prefetch_bytes,  "Bytes read ahead, used or not" },
    { "device_hits",      &hobbit_counters::device_hits,      "Hits in the memory of the device that computes the layer" },
    { "device_evictions", &hobbit_counters::device_evictions, "Experts that left a device's memory for another one" },
    { "upload_bytes",     &hobbit_counters::upload_bytes,     "Bytes of experts copied to devices" },
    { "cpu_computed",     &hobbit_counters::cpu_computed,     "Experts that a device missed and the CPU computed instead" },
    { "ahead_issued",     &hobbit_counters::ahead_issued,     "Experts copied to devices ahead" },
    { "ahead_used",       &hobbit_counters::ahead_used,       "Experts copied to devices ahead that the router then chose" },
    { "stall_us",        &hobbit_counters::stall_us,        "Time in which the computation waited for expert bytes" },
};

void hobbit_counters::add(const hobbit_counters & other) {
    for (const auto & f : fields) {
        this->*f.member += other.*f.member;
    }
}

void hobbit_sequence_stats::add(const hobbit_sequence_stats & other) {
    count.add(other.count);
    shared += other.shared;
}

const char * hobbit_counter_at(int i) {
    return i >= 0 && i < (int) (sizeof(fields) / sizeof(fields[0])) ? fields[i].name : nullptr;
}

uint64_t * hobbit_counters_copy(const hobbit_counters & counters, uint64_t * out) {
    for (const auto & f : fields) {
        *out++ = counters.*f.member;
    }
    return out;
}

hobbit_counters hobbit_stats::total() const {
    hobbit_counters sum;
    for (const auto & layer : layers) {
        sum.add(layer);
    }
    return sum;
}

std::string hobbit_quoted(const std::string & text) {
    std::string out = "\"";
    for (unsigned char c : text) {
        if (c == '"' || c == '\\' || c < 0x20) {
            out += hobbit_format("\\u%04x", c);
        } else {
            out += (char) c;
        }
    }
    return out + "\"";
}

std::string hobbit_counters_to_json(const hobbit_counters & c) {
    std::string text;
    for (const auto & f : fields) {
        text += (text.empty() ? "\"" : ", \"") + std::string(f.name) + "\": " + std::to_string(c.*f.member);
    }
    return text;
}

std::string hobbit_stats_to_json(const hobbit_stats & s, const hobbit_stats_labels & l) {
    std::string text = "{\n  \"version\": 1,\n";
    text += hobbit_format("  \"precision\": \"%s\",\n  \"policy\": \"%s\",\n  \"cache_bytes\": %" PRIu64 ",\n", l.rule.c_str(), l.policy.c_str(), l.cache_bytes);
    text += hobbit_format("  \"prefetch\": %s,\n  \"warm_start\": %s,\n", hobbit_quoted(l.prefetch).c_str(), hobbit_quoted(l.warm).c_str());
    text += hobbit_format("  \"slots_high\": %d,\n  \"slots_low\": %d,\n  \"resident_high\": %d,\n  \"resident_low\": %d,\n",
            l.n_slots[HOBBIT_HIGH], l.n_slots[HOBBIT_LOW], l.n_used[HOBBIT_HIGH], l.n_used[HOBBIT_LOW]);
    text += hobbit_format("  \"prompt_tokens\": %" PRIu64 ",\n  \"prompt_us\": %" PRIu64 ",\n  \"decode_tokens\": %" PRIu64 ",\n  \"decode_us\": %" PRIu64 ",\n",
            s.prompt_tokens, s.prompt_us, s.decode_tokens, s.decode_us);
    text += hobbit_format("  \"prompt_stall_us\": %" PRIu64 ",\n  \"decode_stall_us\": %" PRIu64 ",\n  \"prompt_disk_us\": %" PRIu64 ",\n  \"decode_disk_us\": %" PRIu64 ",\n  \"expected_wasted_bytes\": %" PRIu64 ",\n",
            s.prompt_stall_us, s.decode_stall_us, s.prompt_disk_us, s.decode_disk_us, s.expected_wasted_bytes);
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
    t += hobbit_format("  %-18s %10.2f %% in low precision, %.2f %% skipped\n", "gate weight",
            percent(c.mass_low, 1000000*c.routed), percent(c.mass_skip, 1000000*c.routed));
    t += hobbit_format("  %-18s %10.1f MiB    (%.1f MiB high, %.1f MiB low, %.1f MiB ahead)\n", "bytes read",
            read_bytes / mib, c.read_bytes_high / mib, c.read_bytes_low / mib, c.prefetch_bytes / mib);
    t += hobbit_format("  %-18s %10" PRIu64 "  experts, %" PRIu64 " used, %" PRIu64 " wasted (%s)\n", "prefetched",
            c.prefetch_issued, c.prefetch_used, c.prefetch_wasted, l.prefetch.c_str());
    t += hobbit_format("  %-18s %10.1f ms     (%.1f %% of the time)\n", "stall time", c.stall_us / 1e3, percent(c.stall_us, s.prompt_us + s.decode_us));
    t += hobbit_format("  %-18s %10.1f %% waiting for bytes, disk idle %.1f %%; decode %.1f %% waiting, disk idle %.1f %%\n", "prompt time",
            percent(s.prompt_stall_us, s.prompt_us), percent(s.prompt_us - std::min(s.prompt_us, s.prompt_disk_us), s.prompt_us),
            percent(s.decode_stall_us, s.decode_us), percent(s.decode_us - std::min(s.decode_us, s.decode_disk_us), s.decode_us));
    t += hobbit_format("  %-18s %10" PRIu64 "\n", "evictions", c.evictions);
    t += hobbit_format("  %-18s %10d  high of %d slots, %d low of %d slots; %.1f MiB in all\n", "resident",
            l.n_used[HOBBIT_HIGH], l.n_slots[HOBBIT_HIGH], l.n_used[HOBBIT_LOW], l.n_slots[HOBBIT_LOW], l.cache_bytes / mib);
    if (!l.warm.empty()) {
        t += hobbit_format("  %-18s %s\n", "warm start", l.warm.c_str());
    }
    if (s.failed_steps > 0) {
        t += hobbit_format("  %-18s %10" PRIu64 "\n", "failed steps", s.failed_steps);
    }
    return t;
}

std::string hobbit_stats_to_metrics(const hobbit_stats & s, const hobbit_stats_labels & l) {
    std::string t;
    const auto head = [&](const std::string & name, const char * type, const char * help) {
        t += "# HELP hobbit_" + name + " " + help + "\n# TYPE hobbit_" + name + " " + type + "\n";
    };
    const auto add = [&](const std::string & name, const char * label, double value) {
        t += "hobbit_" + name + label + hobbit_format(" %.17g\n", value);
    };
    const auto seconds = [](uint64_t us) { return us / 1e6; };

    const hobbit_counters total = s.total();
    for (const auto & f : fields) {
        const std::string name  = f.name;
        const bool        is_us = name.size() > 3 && name.compare(name.size() - 3, 3, "_us") == 0; // metrics are in base units
        const std::string base  = is_us ? name.substr(0, name.size() - 3) + "_seconds_total" : name + "_total";
        head(base, "counter", f.help);
        add(base, "", is_us ? seconds(total.*f.member) : (double) (total.*f.member));
    }
    head("tokens_total", "counter", "Tokens computed; decode: in steps with one token per sequence");
    add("tokens_total", "{phase=\"prompt\"}", s.prompt_tokens);
    add("tokens_total", "{phase=\"decode\"}", s.decode_tokens);
    head("compute_seconds_total", "counter", "Time of the steps, waiting included");
    add("compute_seconds_total", "{phase=\"prompt\"}", seconds(s.prompt_us));
    add("compute_seconds_total", "{phase=\"decode\"}", seconds(s.decode_us));
    head("steps_total", "counter", "Steps: one micro-batch through the model");
    add("steps_total", "", s.steps);
    head("failed_steps_total", "counter", "Steps whose experts could not be read");
    add("failed_steps_total", "", s.failed_steps);
    head("cache_bytes", "gauge", "Memory of the expert cache");
    add("cache_bytes", "", l.cache_bytes);
    head("slots", "gauge", "Experts that the cache has room for");
    add("slots", "{precision=\"high\"}", l.n_slots[HOBBIT_HIGH]);
    add("slots", "{precision=\"low\"}",  l.n_slots[HOBBIT_LOW]);
    head("resident_experts", "gauge", "Experts in the cache");
    add("resident_experts", "{precision=\"high\"}", l.n_used[HOBBIT_HIGH]);
    add("resident_experts", "{precision=\"low\"}",  l.n_used[HOBBIT_LOW]);
    return t;
}

std::string hobbit_sequence_to_json(const hobbit_sequence_stats & s) {
    static const char * names[] = { "lookups", "hits", "misses_high", "misses_low", "skips", "read_bytes_high", "read_bytes_low", "prefetch_bytes" };

    std::string text = "{";
    for (const char * name : names) {
        for (const auto & f : fields) {
            if (strcmp(f.name, name) == 0) {
                text += "\"" + std::string(name) + "\": " + std::to_string(s.count.*f.member) + ", ";
            }
        }
    }
    return text + "\"shared\": " + std::to_string(s.shared) + "}";
}
