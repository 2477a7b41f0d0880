#include "store.h"

#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

std::string hobbit_format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list copy;
    va_copy(copy, args);
    const int n = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);
    std::string text(std::max(n, 0), '\0');
    vsnprintf(text.data(), text.size() + 1, fmt, args);
    va_end(args);
    return text;
}

const char * hobbit_gguf_str(const gguf_context * meta, const char * key) {
    const int64_t id = gguf_find_key(meta, key);
    return id >= 0 && gguf_get_kv_type(meta, id) == GGUF_TYPE_STRING ? gguf_get_val_str(meta, id) : nullptr;
}

//
// files
//

hobbit_file::~hobbit_file() {
    for (int f : { fd, fd_direct }) {
        if (f >= 0) {
            close(f);
        }
    }
}

bool hobbit_file::open_direct() {
#if defined(__linux__) && defined(O_DIRECT)
    if (fd_direct < 0) {
        fd_direct = open(hobbit_format("/proc/self/fd/%d", fd).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    }
#endif
    return fd_direct >= 0;
}

static int64_t mtime_of(const struct stat & st) {
#ifdef __APPLE__
    return (int64_t) st.st_mtimespec.tv_sec * 1000000000 + st.st_mtimespec.tv_nsec;
#else
    return (int64_t) st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
#endif
}

std::string hobbit_file::changed() const {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return hobbit_format("%s: cannot be examined any more: %s", path.c_str(), strerror(errno));
    }
    if ((uint64_t) st.st_size != size) {
        return hobbit_format("%s: changed while in use: %" PRIu64 " bytes at load, %" PRIu64 " now",
                path.c_str(), size, (uint64_t) st.st_size);
    }
    if (mtime_of(st) != mtime_ns) {
        return hobbit_format("%s: written to while in use; load the model again", path.c_str());
    }
    return "";
}

// takes over fd
static std::unique_ptr<hobbit_file> file_from_fd(int fd, const std::string & path) {
    auto file = std::make_unique<hobbit_file>();
    file->fd   = fd;
    file->path = path;
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        return nullptr;
    }
    file->size     = st.st_size;
    file->mtime_ns = mtime_of(st);
    return file;
}

// the name behind a descriptor, for messages
static std::string path_of_fd(int fd) {
#ifdef __linux__
    char    path[4096];
    ssize_t n = readlink(hobbit_format("/proc/self/fd/%d", fd).c_str(), path, sizeof(path));
    if (n > 0) {
        return std::string(path, n);
    }
#endif
    return hobbit_format("file descriptor %d", fd);
}

// a descriptor of our own: the loader closes its one, and may have opened it for direct reads
static int reopen(int fd) {
#ifdef __linux__
    const int ours = open(hobbit_format("/proc/self/fd/%d", fd).c_str(), O_RDONLY | O_CLOEXEC);
    if (ours >= 0) {
        return ours;
    }
#endif
    return dup(fd);
}

bool hobbit_file_read(const hobbit_file & file, uint64_t offset, void * dst, size_t size, std::string & err) {
    size_t done = 0;
    while (done < size) {
        const ssize_t n = pread(file.fd, (char *) dst + done, size - done, offset + done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            err = hobbit_format("%s: read of %zu bytes at offset %" PRIu64 " failed: %s",
                    file.path.c_str(), size - done, offset + done, strerror(errno));
            return false;
        }
        if (n == 0) {
            err = hobbit_format("%s: ends at byte %" PRIu64 ", but %zu bytes are needed at offset %" PRIu64 ": the file is truncated",
                    file.path.c_str(), offset + done, size, offset);
            return false;
        }
        done += n;
    }
    return true;
}

bool hobbit_source_read(const hobbit_source & source, uint64_t offset, char * dst, uint64_t size, std::string & err) {
    const hobbit_file & file = *source.file;
    if (file.fd_direct < 0) {
        const bool ok = hobbit_file_read(file, offset, dst, size, err);
#ifdef POSIX_FADV_DONTNEED
        if (ok && file.drop_cached) {
            posix_fadvise(file.fd, offset, size, POSIX_FADV_DONTNEED);
        }
#endif
        return ok;
    }
    const uint64_t skew  = offset % HOBBIT_DIRECT_ALIGN;
    const uint64_t whole = (skew + size + HOBBIT_DIRECT_ALIGN - 1) / HOBBIT_DIRECT_ALIGN * HOBBIT_DIRECT_ALIGN;
    uint64_t done = 0;
    while (done < skew + size) {
        const ssize_t n = pread(file.fd_direct, dst - skew + done, whole - done, offset - skew + done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0 || (n % HOBBIT_DIRECT_ALIGN != 0 && done + n < skew + size)) {
            // the end of the file, or a file system that wants more alignment: the other way knows, or says why not
            return hobbit_file_read(file, offset, dst, size, err);
        }
        done += n;
    }
    return true;
}

hobbit_run::hobbit_run(const hobbit_source & source, uint64_t offset_bytes, uint64_t size, const std::vector<char *> & dst) {
    const bool     direct = source.file->fd_direct >= 0;
    const uint64_t align  = direct ? HOBBIT_DIRECT_ALIGN : 1;
    const uint64_t skew   = offset_bytes % align;

    fd     = direct ? source.file->fd_direct : source.file->fd;
    offset = offset_bytes - skew;
    bytes  = 0;
    least  = skew + size * dst.size();
    for (size_t i = 0; i < dst.size(); ++i) {
        // whole blocks up to the end of this part; the first of them belongs to the part before
        const uint64_t end = (skew + size * (i + 1) + align - 1) / align * align;
        iov.push_back({ dst[i] - skew + (bytes - size * i), end - bytes });
        bytes = end;
    }
}

bool hobbit_run::done(const hobbit_source & source, const std::vector<char *> & dst, int64_t n_read) const {
    if (n_read < (int64_t) least) {
        return false;
    }
    const uint64_t size = source.expert_bytes;
    for (size_t i = 1; i < dst.size(); ++i) {
        const uint64_t here = (char *) iov[i].iov_base - dst[i]; // what the part before got of this one
        memcpy(dst[i], dst[i - 1] + size, here);
    }
#ifdef POSIX_FADV_DONTNEED
    if (source.file->drop_cached) {
        posix_fadvise(source.file->fd, offset, bytes, POSIX_FADV_DONTNEED);
    }
#endif
    return true;
}

//
// tensors
//

// blk.N.ffn_{gate,up,down,gate_up}_exps.weight, nothing before or after
static bool parse_expert_name(const char * name, int & block, hobbit_role & role) {
    static const struct { const char * suffix; hobbit_role role; } roles[] = {
        { ".ffn_gate_exps.weight",    HOBBIT_ROLE_GATE    },
        { ".ffn_up_exps.weight",      HOBBIT_ROLE_UP      },
        { ".ffn_down_exps.weight",    HOBBIT_ROLE_DOWN    },
        { ".ffn_gate_up_exps.weight", HOBBIT_ROLE_GATE_UP },
    };
    int n = 0;
    if (sscanf(name, "blk.%d%n", &block, &n) != 1 || n == 0) {
        return false;
    }
    for (const auto & r : roles) {
        if (strcmp(name + n, r.suffix) == 0) {
            role = r.role;
            return true;
        }
    }
    return false;
}

static bool has_suffix(const std::string & name, const std::string & suffix) {
    return name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

static bool is_router_name(const std::string & name) {
    return has_suffix(name, ".ffn_gate_inp.weight");
}

// a factor per expert that belongs to the weights of its own file (NVFP4)
static bool is_scale_name(const std::string & name) {
    return has_suffix(name, "_exps.scale");
}

static bool is_aux_name(const std::string & name) {
    for (const char * suffix : { ".ffn_gate_inp.bias", ".exp_probs_b.bias", ".ffn_norm.weight", ".ffn_norm.bias", ".ffn_norm_exps.weight",
                                 ".post_attention_norm.weight", ".post_attention_norm.bias" }) {
        if (has_suffix(name, suffix)) {
            return true;
        }
    }
    return is_router_name(name) || is_scale_name(name);
}

const hobbit_file * hobbit_store::file_of_fd(int fd) {
    for (const auto & [theirs, ours] : fds) {
        if (theirs == fd) {
            return ours;
        }
    }
    auto file = file_from_fd(reopen(fd), path_of_fd(fd));
    if (!file) {
        return nullptr;
    }
    files.push_back(std::move(file));
    fds.emplace_back(fd, files.back().get());
    return files.back().get();
}

bool hobbit_store::add_tensor(const ggml_tensor * meta, int fd, uint64_t offset) {
    if (is_aux_name(meta->name)) {
        aux.push_back({ meta->name, meta->type, ggml_nelements(meta), file_of_fd(fd), offset });
        return false;
    }

    auto weight = std::make_unique<hobbit_weight>();
    if (!parse_expert_name(meta->name, weight->block, weight->role) || meta->ne[3] != 1) {
        return false;
    }
    weight->name = meta->name;
    std::copy(meta->ne, meta->ne + 3, weight->ne);

    hobbit_source & src = weight->source[HOBBIT_HIGH];
    src.file         = file_of_fd(fd);
    src.type         = meta->type;
    src.offset       = offset;
    src.expert_bytes = meta->nb[2];

    weights.push_back(std::move(weight));
    return true;
}

ggml_tensor hobbit_weight::expert_tensor(int precision) const {
    ggml_tensor t = {};
    t.type  = source[precision].type;
    t.ne[0] = ne[0];
    t.ne[1] = ne[1];
    t.ne[2] = t.ne[3] = 1;
    t.nb[0] = ggml_type_size(t.type);
    t.nb[1] = ggml_row_size(t.type, ne[0]);
    t.nb[2] = t.nb[3] = t.nb[1] * ne[1];
    snprintf(t.name, sizeof(t.name), "%s", name.c_str());
    return t;
}

hobbit_weight * hobbit_store::find(const std::string & name) {
    for (auto & weight : weights) {
        if (weight->name == name) {
            return weight.get();
        }
    }
    return nullptr;
}

const hobbit_aux * hobbit_store::find_aux(const std::string & name) const {
    for (const hobbit_aux & a : aux) {
        if (a.name == name) {
            return &a;
        }
    }
    return nullptr;
}

bool hobbit_store::finish(std::string & err) {
    if (weights.empty()) {
        err = hobbit_format("this is a dense model (architecture %s): it has no routed experts (blk.N.ffn_*_exps.weight) to cache; "
                            "run it without --hobbit options", arch.c_str());
        return false;
    }
    std::map<int, hobbit_layer> by_block;
    for (auto & weight : weights) {
        hobbit_layer & layer = by_block[weight->block];
        layer.block = weight->block;
        if (layer.n_expert != 0 && layer.n_expert != weight->ne[2]) {
            err = hobbit_format("tensor %s has %" PRId64 " experts, the others of its layer %d", weight->name.c_str(), weight->ne[2], layer.n_expert);
            return false;
        }
        if (!weight->source[HOBBIT_HIGH].file) {
            err = hobbit_format("tensor %s: its file cannot be kept open: %s", weight->name.c_str(), strerror(errno));
            return false;
        }
        layer.n_expert = (int) weight->ne[2];
        layer.weight[weight->role] = weight.get();
    }
    for (auto & [block, layer] : by_block) {
        n_expert_max = std::max(n_expert_max, layer.n_expert);
        for (auto & weight : weights) {
            if (weight->block == block) {
                weight->layer = (int) layers.size();
            }
        }
        layers.push_back(layer);
    }
    return true;
}

std::vector<float> hobbit_aux_read(const hobbit_aux & aux, std::string & err) {
    std::vector<uint8_t> raw(ggml_row_size(aux.type, aux.n_elements));
    if (!aux.file || !hobbit_file_read(*aux.file, aux.offset, raw.data(), raw.size(), err)) {
        return {};
    }
    std::vector<float> values(aux.n_elements);
    if (aux.type == GGML_TYPE_F32) {
        memcpy(values.data(), raw.data(), raw.size());
    } else {
        ggml_get_type_traits(aux.type)->to_float(raw.data(), values.data(), aux.n_elements);
    }
    return values;
}

//
// the low-precision file
//

// model-00002-of-00005.gguf -> the names of all five; a plain name -> itself. n_split is the header's split.count
static std::vector<std::string> shard_paths(const std::string & path, int n_split) {
    if (n_split <= 1) {
        return { path };
    }
    // the shard number is in the last 20 characters: -00001-of-00005.gguf
    const std::string tail = hobbit_format("-of-%05d.gguf", n_split);
    if (path.size() < tail.size() + 6 || path.compare(path.size() - tail.size(), tail.size(), tail) != 0) {
        return {};
    }
    const std::string prefix = path.substr(0, path.size() - tail.size() - 6);
    std::vector<std::string> paths;
    for (int i = 1; i <= n_split; ++i) {
        paths.push_back(hobbit_format("%s-%05d%s", prefix.c_str(), i, tail.c_str()));
    }
    return paths;
}

struct gguf_header {
    gguf_context * gguf = nullptr;
    ggml_context * ctx  = nullptr;

    gguf_header() = default;
    gguf_header(const gguf_header &) = delete;
    ~gguf_header() {
        gguf_free(gguf);
        ggml_free(ctx);
    }

    bool open(const std::string & path) {
        gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ &ctx };
        gguf = gguf_init_from_file(path.c_str(), params);
        return gguf != nullptr;
    }
};

static int gguf_int(const gguf_context * gguf, const char * key, int fallback) {
    const int64_t id = gguf_find_key(gguf, key);
    if (id < 0) {
        return fallback;
    }
    switch (gguf_get_kv_type(gguf, id)) {
        case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf, id);
        case GGUF_TYPE_UINT32: return (int) gguf_get_val_u32(gguf, id);
        case GGUF_TYPE_INT32:  return gguf_get_val_i32(gguf, id);
        default:               return fallback;
    }
}

// the graph multiplies by the model's scales whatever copy an expert comes from, so another file must have the very same ones
bool hobbit_store::same_scales(const std::vector<hobbit_aux> & low, const std::string & path, std::string & err) const {
    const auto find_in = [](const std::vector<hobbit_aux> & list, const std::string & name) -> const hobbit_aux * {
        const auto it = std::find_if(list.begin(), list.end(), [&](const hobbit_aux & a) { return a.name == name; });
        return it == list.end() ? nullptr : &*it;
    };
    for (const auto * list : { &aux, &low }) {
        for (const hobbit_aux & scale : *list) {
            if (!is_scale_name(scale.name)) {
                continue;
            }
            const hobbit_aux * ours   = find_in(aux, scale.name);
            const hobbit_aux * theirs = find_in(low, scale.name);
            if (!ours || !theirs || hobbit_aux_read(*ours, err) != hobbit_aux_read(*theirs, err)) {
                err = hobbit_format("%s: tensor %s is %s: experts of the two files need different factors; make the low copy with gguf-tools",
                        path.c_str(), scale.name.c_str(), !theirs ? "missing" : !ours ? "not in the model" : "not the model's");
                return false;
            }
        }
    }
    return true;
}

bool hobbit_store::same_routers(const std::vector<hobbit_aux> & low, const std::string & path, std::string & err) const {
    size_t n_compared = 0;
    for (const hobbit_aux & ours : aux) {
        if (!is_router_name(ours.name)) {
            continue;
        }
        auto it = std::find_if(low.begin(), low.end(), [&](const hobbit_aux & r) { return r.name == ours.name; });
        if (it == low.end()) {
            continue;
        }
        if (it->n_elements != ours.n_elements) {
            err = hobbit_format("%s: tensor %s has %" PRId64 " values, the model's has %" PRId64 ": another model",
                    path.c_str(), ours.name.c_str(), it->n_elements, ours.n_elements);
            return false;
        }
        const std::vector<float> a = hobbit_aux_read(ours, err);
        const std::vector<float> b = hobbit_aux_read(*it, err);
        if (a.empty() || b.empty()) {
            return false;
        }
        // routers are seldom quantised; where one file has them in fewer bits, they still agree to a few percent in the mean
        double diff = 0.0;
        double norm = 0.0;
        for (size_t i = 0; i < a.size(); ++i) {
            diff += std::fabs((double) a[i] - b[i]);
            norm += std::fabs((double) a[i]);
        }
        const double limit = ours.type == it->type ? 0.0 : 0.05;
        if (!(diff <= limit * norm)) {
            err = hobbit_format("%s: tensor %s differs from the model's by %.1f %% in the mean: the experts of another model would be used",
                    path.c_str(), ours.name.c_str(), norm > 0.0 ? 100.0 * diff / norm : 100.0);
            return false;
        }
        n_compared++;
    }
    if (n_compared == 0) {
        err = hobbit_format("%s: has no router (blk.N.ffn_gate_inp.weight) and no hobbit.pair.id of this model, "
                            "so that nothing shows that its experts belong to it", path.c_str());
        return false;
    }
    return true;
}

bool hobbit_store::open_low(const std::string & path, const gguf_context * high_meta, std::string & err) {
    gguf_header first;
    if (!first.open(path)) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            err = hobbit_format("%s: cannot be opened: %s", path.c_str(), strerror(errno));
        } else {
            close(fd);
            err = hobbit_format("%s: not a GGUF file, or its header is damaged", path.c_str());
        }
        return false;
    }

    const int n_split = gguf_int(first.gguf, "split.count", 1);
    const std::vector<std::string> paths = shard_paths(path, n_split);
    if (paths.empty()) {
        err = hobbit_format("%s: is one of %d shards, but its name does not end in -0000N-of-%05d.gguf", path.c_str(), n_split, n_split);
        return false;
    }

    std::vector<hobbit_aux> low_aux; // routers and scales
    std::string low_arch;
    std::string low_pair_id;

    for (size_t i = 0; i < paths.size(); ++i) {
        gguf_header shard;
        const int fd = open(paths[i].c_str(), O_RDONLY | O_CLOEXEC);
        auto file = file_from_fd(fd, paths[i]);
        if (!file) {
            err = hobbit_format("%s: shard %zu of %zu cannot be opened: %s", paths[i].c_str(), i + 1, paths.size(), strerror(errno));
            return false;
        }
        if (!shard.open(paths[i])) {
            err = hobbit_format("%s: not a GGUF file, or its header is damaged", paths[i].c_str());
            return false;
        }
        if (paths.size() > 1 && gguf_int(shard.gguf, "split.no", -1) != (int) i) {
            err = hobbit_format("%s: says it is shard %d, but its name says %zu", paths[i].c_str(), gguf_int(shard.gguf, "split.no", -1) + 1, i + 1);
            return false;
        }
        if (const char * a = hobbit_gguf_str(shard.gguf, "general.architecture")) {
            low_arch = a;
        }
        if (const char * id = hobbit_gguf_str(shard.gguf, "hobbit.pair.id")) {
            low_pair_id = id;
        }

        const uint64_t data = gguf_get_data_offset(shard.gguf);
        for (int64_t t = 0; t < gguf_get_n_tensors(shard.gguf); ++t) {
            const char *        name   = gguf_get_tensor_name(shard.gguf, t);
            const ggml_tensor * meta   = ggml_get_tensor(shard.ctx, name);
            const uint64_t      offset = data + gguf_get_tensor_offset(shard.gguf, t);
            const bool          is_aux = is_router_name(name) || is_scale_name(name);
            hobbit_weight *     weight = find(name);
            if (!is_aux && !weight) {
                continue;
            }
            if (offset + ggml_nbytes(meta) < offset || offset + ggml_nbytes(meta) > file->size) {
                err = hobbit_format("%s: tensor %s needs bytes up to %" PRIu64 ", but the file has %" PRIu64 ": it is truncated",
                        paths[i].c_str(), name, offset + (uint64_t) ggml_nbytes(meta), file->size);
                return false;
            }
            if (is_aux) {
                low_aux.push_back({ name, meta->type, ggml_nelements(meta), file.get(), offset });
                continue;
            }
            if (!std::equal(weight->ne, weight->ne + 3, meta->ne) || meta->ne[3] != 1) {
                err = hobbit_format("%s: tensor %s is [%" PRId64 ", %" PRId64 ", %" PRId64 "], the model's [%" PRId64 ", %" PRId64 ", %" PRId64 "]: another model",
                        paths[i].c_str(), name, meta->ne[0], meta->ne[1], meta->ne[2], weight->ne[0], weight->ne[1], weight->ne[2]);
                return false;
            }
            hobbit_source & src = weight->source[HOBBIT_LOW];
            src.file         = file.get();
            src.type         = meta->type;
            src.offset       = offset;
            src.expert_bytes = meta->nb[2];
        }
        files.push_back(std::move(file));
    }

    if (low_arch != arch) {
        err = hobbit_format("%s: architecture is %s, the model's is %s", path.c_str(), low_arch.empty() ? "(none)" : low_arch.c_str(), arch.c_str());
        return false;
    }
    for (const auto & weight : weights) {
        if (!weight->source[HOBBIT_LOW].file) {
            err = hobbit_format("%s: tensor %s is missing", path.c_str(), weight->name.c_str());
            return false;
        }
    }
    // a pair written together says so; two files downloaded one by one must have the same routers
    const char * high_pair_id = high_meta ? hobbit_gguf_str(high_meta, "hobbit.pair.id") : nullptr;
    if (high_pair_id && !low_pair_id.empty()) {
        if (low_pair_id != high_pair_id) {
            err = hobbit_format("%s: belongs to pair %s, the model to pair %s", path.c_str(), low_pair_id.c_str(), high_pair_id);
            return false;
        }
        return true;
    }
    return same_routers(low_aux, path, err) && same_scales(low_aux, path, err);
}
