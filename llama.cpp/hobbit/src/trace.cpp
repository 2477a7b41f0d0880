#include "trace.h"

#include "store.h"

#include "ggml.h"

#include <cerrno>
#include <cstring>

static constexpr size_t BUFFER_BYTES = 1 << 18;

hobbit_trace::~hobbit_trace() {
    std::string err;
    if (file && !close(err)) {
        fprintf(stderr, "hobbit: %s\n", err.c_str());
    }
}

bool hobbit_trace::close(std::string & err) {
    std::lock_guard<std::mutex> lock(mutex);
    write_buffer();
    if (file && fclose(file) != 0 && reason == 0) {
        reason = errno;
    }
    file = nullptr;
    if (reason != 0) {
        err = hobbit_format("%s: the trace is incomplete: %s", path.c_str(), strerror(reason));
    }
    return reason == 0;
}

bool hobbit_trace::open(const std::string & name, const std::string & head, std::string & err) {
    path = name;
    file = fopen(path.c_str(), "wb");
    if (!file) {
        err = hobbit_format("%s: the trace cannot be written: %s", path.c_str(), strerror(errno));
        return false;
    }
    t_begin_us = ggml_time_us();
    buffer.reserve(2 * BUFFER_BYTES);
    append(head.data(), head.size());
    return true;
}

void hobbit_trace::append(const void * data, size_t size) {
    const uint8_t * bytes = (const uint8_t *) data;
    buffer.insert(buffer.end(), bytes, bytes + size);
}

void hobbit_trace::write_buffer() {
    // a full disk must not stop a run: the rest of the trace is given up, and close() says so
    if (file && reason == 0 && fwrite(buffer.data(), 1, buffer.size(), file) != buffer.size()) {
        reason = errno;
    }
    buffer.clear();
}

void hobbit_trace::flush() {
    std::lock_guard<std::mutex> lock(mutex);
    write_buffer();
    if (file) {
        fflush(file);
    }
}

void hobbit_trace::try_flush() {
    if (mutex.try_lock()) {
        write_buffer();
        if (file) {
            fflush(file);
        }
        mutex.unlock();
    }
}

void hobbit_trace::event(hobbit_trace_type type, int context, int layer, int expert, int precision, uint64_t bytes, const void * payload, size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    const hobbit_trace_head head = { (uint64_t) (ggml_time_us() - t_begin_us), (uint32_t) size, (uint32_t) bytes, (uint16_t) context,
                                     (uint16_t) layer, (uint16_t) expert, (uint8_t) type, (uint8_t) precision };
    append(&head, sizeof(head));
    append(payload, size);
    if (buffer.size() >= BUFFER_BYTES) {
        write_buffer();
    }
}

void hobbit_trace::selections(hobbit_trace_type type, int context, int layer, int to, bool acted_on, int n_used, const hobbit_selections & s) {
    const size_t   n    = s.ids.size();
    const uint32_t ne[] = { (uint32_t) n / n_used, (uint32_t) n_used };

    thread_local std::vector<uint8_t> payload;
    payload.resize(sizeof(ne) + n * (sizeof(float) + sizeof(uint16_t) + 1));
    uint8_t * p = payload.data();
    memcpy(p, ne, sizeof(ne));
    memcpy(p += sizeof(ne),           s.weights.data(), n * sizeof(float));
    memcpy(p += n * sizeof(float),    s.ids.data(),     n * sizeof(uint16_t));
    memcpy(p += n * sizeof(uint16_t), s.state.data(),   n);
    event(type, context, layer, to, acted_on, 0, payload.data(), payload.size());
}

struct record_head {
    int32_t  seq_id;
    uint32_t n_tokens;
    uint32_t n_before;
    uint32_t n_entries;
};

struct record_entry {
    uint32_t key;
    uint32_t last;
    uint32_t used;
    uint32_t high;
    double   mass;
};

std::vector<uint8_t> hobbit_trace_records(int32_t seq_id, const hobbit_records & records) {
    record_head head = { seq_id, records.n_tokens, records.n_before, 0 };
    std::vector<uint8_t> payload(sizeof(head));
    for (size_t key = 0; key < records.entries.size(); ++key) {
        const hobbit_records::entry & e = records.entries[key];
        if (e.last > 0) {
            const record_entry entry = { (uint32_t) key, e.last, e.used, e.high, records.mass.empty() ? 0.0 : records.mass[key] };
            payload.resize(payload.size() + sizeof(entry));
            memcpy(payload.data() + payload.size() - sizeof(entry), &entry, sizeof(entry));
            head.n_entries++;
        }
    }
    memcpy(payload.data(), &head, sizeof(head));
    return payload;
}

bool hobbit_trace_parse_records(const uint8_t * payload, size_t size, size_t n_keys, bool with_mass, int32_t & seq_id, hobbit_records & records) {
    record_head head;
    if (size < sizeof(head)) {
        return false;
    }
    memcpy(&head, payload, sizeof(head));
    if (size != sizeof(head) + (size_t) head.n_entries * sizeof(record_entry)) {
        return false;
    }
    seq_id = head.seq_id;
    records.reset(n_keys, with_mass);
    records.n_tokens = head.n_tokens;
    records.n_before = head.n_before;
    for (uint32_t i = 0; i < head.n_entries; ++i) {
        record_entry entry;
        memcpy(&entry, payload + sizeof(head) + i * sizeof(entry), sizeof(entry));
        if (entry.key >= n_keys) {
            return false;
        }
        records.entries[entry.key] = { entry.last, entry.used, entry.high };
        if (with_mass) {
            records.mass[entry.key] = entry.mass;
        }
    }
    return true;
}
