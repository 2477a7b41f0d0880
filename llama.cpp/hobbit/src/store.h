// store: where the bytes of each expert are.
//
// The loader shows every tensor of the model (add_tensor); routed expert weights are kept, routers are remembered for the
// check of the low-precision file, the rest is ignored. open_low() then finds the same weights in a second GGUF of the same
// model, sharded or not. After that the store is read-only and may be used from any thread. It reads headers and routers, never
// experts: that is the loader's work.

#pragma once

#include "precision.h"

#include "ggml.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

struct gguf_context;

enum hobbit_role : int8_t {
    HOBBIT_ROLE_GATE,
    HOBBIT_ROLE_UP,
    HOBBIT_ROLE_DOWN,
    HOBBIT_ROLE_GATE_UP,
    HOBBIT_N_ROLES,
};

// index into the per-precision arrays below
enum { HOBBIT_LOW, HOBBIT_HIGH, HOBBIT_N_PRECISIONS };

// direct reads start and end at multiples of this, in the file and in memory
constexpr uint64_t HOBBIT_DIRECT_ALIGN = 4096;

struct hobbit_file {
    int         fd        = -1;
    int         fd_direct = -1; // opened for reads past the page cache; -1: read through it
    std::string path;
    uint64_t    size     = 0; // bytes, at load
    int64_t     mtime_ns = 0;
    bool        drop_cached = false; // advise the page cache to forget what was read

    hobbit_file() = default;
    hobbit_file(const hobbit_file &) = delete;
    ~hobbit_file();

    // false if the file system cannot do it; reads then go through the page cache
    bool open_direct();

    // empty if size and modification time are those of the load, else what changed
    std::string changed() const;
};

// one copy of an expert weight: expert e is the expert_bytes bytes at offset + e * expert_bytes.
// A direct read brings whole aligned blocks of the file. So an expert needs place_bytes() of memory at an aligned address, and its
// first byte lands skew(e) bytes into it: no byte is copied, whatever the file's alignment.
struct hobbit_source {
    const hobbit_file * file = nullptr; // NULL: this precision does not exist
    ggml_type           type = GGML_TYPE_COUNT;
    uint64_t            offset       = 0;
    uint64_t            expert_bytes = 0;
    bool                repacked     = false; // as it arrives, see ggml-cpu.h

    uint64_t skew(int expert) const {
        return file->fd_direct >= 0 ? (offset + expert * expert_bytes) % HOBBIT_DIRECT_ALIGN : 0;
    }
    bool aligned() const { return offset % HOBBIT_DIRECT_ALIGN == 0 && expert_bytes % HOBBIT_DIRECT_ALIGN == 0; }
    uint64_t place_bytes() const {
        const uint64_t align = HOBBIT_DIRECT_ALIGN;
        return file->fd_direct < 0 ? (expert_bytes + 63) / 64 * 64 : (expert_bytes + align - 1) / align * align + (aligned() ? 0 : align);
    }
};

// one expert weight tensor, all experts of one role in one layer
struct hobbit_weight {
    std::string   name;
    int           block = -1; // N in blk.N
    int           layer = -1; // index among the managed layers, set by finish()
    hobbit_role   role  = HOBBIT_N_ROLES;
    int64_t       ne[3] = { 0, 0, 0 }; // columns, rows, experts
    hobbit_source source[HOBBIT_N_PRECISIONS];

    // one expert of it as a tensor without data
    ggml_tensor expert_tensor(int precision) const;
};

struct hobbit_layer {
    int                   block    = -1;
    int                   n_expert = 0;
    const hobbit_weight * weight[HOBBIT_N_ROLES] = {};
};

// a small tensor that the engine reads itself: routers, and the norms and biases around them
struct hobbit_aux {
    std::string         name;
    ggml_type           type;
    int64_t             n_elements;
    const hobbit_file * file;
    uint64_t            offset;
};

// its values in F32; empty on failure, and err says why
std::vector<float> hobbit_aux_read(const hobbit_aux & aux, std::string & err);

class hobbit_store {
  public:
    // true if the tensor is a routed expert weight. fd is duplicated; offset counts from the start of its file
    bool add_tensor(const ggml_tensor * meta, int fd, uint64_t offset);

    hobbit_weight *    find    (const std::string & name);
    const hobbit_aux * find_aux(const std::string & name) const;

    // numbers the layers; false if there is nothing to manage or a layer is incomplete
    bool finish(std::string & err);

    // finds every managed weight in path (any shard of it) and checks that it is the same model
    bool open_low(const std::string & path, const gguf_context * high_meta, std::string & err);

    int n_expert() const { return n_expert_max; } // of the layer with most
    int n_layer () const { return (int) layers.size(); }

    std::string arch; // general.architecture
    std::vector<hobbit_layer> layers;
    std::vector<std::unique_ptr<hobbit_weight>> weights;
    std::vector<std::unique_ptr<hobbit_file>>   files;

  private:
    const hobbit_file * file_of_fd(int fd);
    bool same_scales (const std::vector<hobbit_aux> & low, const std::string & path, std::string & err) const;
    bool same_routers(const std::vector<hobbit_aux> & low, const std::string & path, std::string & err) const;

    std::vector<hobbit_aux> aux;
    std::vector<std::pair<int, const hobbit_file *>> fds; // the loader's descriptor -> our copy of it
    int         n_expert_max = 0;
};

// formats a message; the engine's errors are one line without a full stop
std::string hobbit_format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// NULL: not there, or not a string
const char * hobbit_gguf_str(const gguf_context * meta, const char * key);

// reads size bytes at offset into dst, directly if the file is open for it: then dst is as misaligned as offset is, and memory up to
// the aligned blocks around it is written too. On failure says what is wrong with the file
bool hobbit_source_read(const hobbit_source & source, uint64_t offset, char * dst, uint64_t size, std::string & err);

// one read of consecutive bytes into several places: n experts side by side in the file, or (n = 1) a part of one.
// A direct read brings the block that two experts share to the first of them; done() gives the second its part
struct hobbit_run {
    int                fd;
    uint64_t           offset;
    uint64_t           bytes; // of the vectors
    uint64_t           least; // bytes without which the run has failed: the last block may reach beyond the file
    std::vector<iovec> iov;

    hobbit_run(const hobbit_source & source, uint64_t offset, uint64_t size, const std::vector<char *> & dst);
    // n_read: what the system call returned. false: read one by one instead
    bool done(const hobbit_source & source, const std::vector<char *> & dst, int64_t n_read) const;
};

// reads size bytes at offset through the page cache; on failure says what is wrong with the file
bool hobbit_file_read(const hobbit_file & file, uint64_t offset, void * dst, size_t size, std::string & err);
