// How it works: device memory is a range of addresses that nobody may touch (what tensors point to) beside a mapping at other
// addresses (what the queues' threads use). A graph is copied when it is submitted, with every address moved from the one to the
// other; so, as on a real device, the caller may change its graph at once, but not the memory the graph works on.

#include "ggml-sim.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>

using sim_clock = std::chrono::steady_clock;
using sim_time  = sim_clock::time_point;

static constexpr size_t SIM_ALIGNMENT = 128;
static constexpr int    SIM_SCRAMBLE  = 0xff; // NaN as F32, F16, BF16, and as the scale of a quantised block

static sim_time::duration sim_us(double us) {
    return std::chrono::duration_cast<sim_time::duration>(std::chrono::duration<double, std::micro>(us));
}

static uint64_t sim_us_since(sim_time t0) {
    return std::chrono::duration_cast<std::chrono::microseconds>(sim_clock::now() - t0).count();
}

//
// devices
//

struct sim_queue;

struct sim_link {
    std::mutex mutex;
    sim_time   free_at; // when the last copy ends, or ended
};

struct sim_device {
    int         index = 0;
    std::string name;
    std::string buft_name;

    ggml_backend_device      dev;
    ggml_backend_buffer_type buft;

    std::mutex           mutex; // of what follows
    size_t               used = 0;
    std::vector<sim_queue *> queues;
    ggml_sim_stats       stats = {};

    sim_link   up, down;
    std::mutex compute;
};

struct sim_global {
    ggml_sim_params          params;
    ggml_backend_reg         reg;
    ggml_backend_buffer_type host_buft;
    std::vector<std::unique_ptr<sim_device>> devices;

    std::mutex   mutex; // of what follows, and of the link's numbers in params
    int          n_alloc = 0;
    std::mt19937 random;
};

static sim_global * g_sim = nullptr;

static ggml_sim_params sim_params_now() {
    std::lock_guard<std::mutex> lock(g_sim->mutex);
    return g_sim->params;
}

static void sim_delay() {
    double us;
    {
        std::lock_guard<std::mutex> lock(g_sim->mutex);
        us = g_sim->params.delay_us;
        if (us <= 0.0) {
            return;
        }
        us *= g_sim->random() / (double) std::mt19937::max();
    }
    std::this_thread::sleep_for(sim_us(us));
}

// copies over the link; the bytes are read and written at the end. ready: from when on it could have begun, so that the link is
// not idle only because a thread slept too long. Returns the microseconds for which the link was taken
static uint64_t sim_transfer(sim_link & link, void * dst, const void * src, size_t size, sim_time ready) {
    const ggml_sim_params params = sim_params_now();
    const double us = params.latency_us + (params.bandwidth > 0.0 ? 1e6*size/params.bandwidth : 0.0);
    if (us > 0.0) {
        sim_time end;
        {
            std::lock_guard<std::mutex> lock(link.mutex);
            end = std::max(ready, link.free_at) + sim_us(us);
            link.free_at = end;
        }
        std::this_thread::sleep_until(end);
    }
    memcpy(dst, src, size);
    return (uint64_t) us;
}

//
// queues
//

struct sim_event {
    std::mutex              mutex;
    std::condition_variable cv;
    uint64_t                recorded = 0;
    uint64_t                done     = 0;

    void set_done(uint64_t n) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            done = std::max(done, n);
        }
        cv.notify_all();
    }
    // returns whether that took time
    bool wait(uint64_t target) {
        std::unique_lock<std::mutex> lock(mutex);
        const bool blocks = done < target;
        cv.wait(lock, [&] { return done >= target; });
        return blocks;
    }
};

// ready: when it could begin. Returns whether what comes after it could not have begun before now
using sim_run = std::function<bool(sim_time ready)>;

struct sim_command {
    sim_run  run;
    sim_time at; // submitted
};

struct sim_queue {
    sim_device *   device;
    std::string    name;
    ggml_backend_t cpu;

    std::mutex              mutex;
    std::condition_variable cv_work;
    std::condition_variable cv_idle;
    std::deque<sim_command> commands;
    bool                    busy = false;
    bool                    held = false;
    bool                    stop = false;
    std::thread             thread;

    explicit sim_queue(sim_device * device) : device(device), name(device->name), cpu(ggml_backend_cpu_init()) {
        thread = std::thread([this] { run(); });
        std::lock_guard<std::mutex> lock(device->mutex);
        device->queues.push_back(this);
    }
    ~sim_queue() {
        {
            std::lock_guard<std::mutex> lock(device->mutex);
            device->queues.erase(std::find(device->queues.begin(), device->queues.end(), this));
        }
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        cv_work.notify_all();
        thread.join();
        ggml_backend_free(cpu);
    }

    void submit(sim_run command) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            commands.push_back({ std::move(command), sim_clock::now() });
        }
        cv_work.notify_one();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex);
        cv_idle.wait(lock, [&] { return commands.empty() && !busy; });
    }

    void run() {
        sim_time last; // when the last wait or graph ended
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            cv_work.wait(lock, [&] { return stop || (!commands.empty() && !held); });
            if (commands.empty()) {
                return;
            }
            sim_command command = std::move(commands.front());
            commands.pop_front();
            busy = true;
            lock.unlock();

            sim_delay();
            if (command.run(std::max(command.at, last))) {
                last = sim_clock::now();
            }
            command.run = nullptr; // what it holds goes before anybody hears that it is over

            lock.lock();
            busy = false;
            if (commands.empty()) {
                cv_idle.notify_all();
            }
        }
    }
};

//
// memory
//

struct sim_buffer {
    sim_device * device;
    char *       address; // what tensors point to: faults
    char *       memory;
    size_t       size;

    char * translate(const void * p) const { return memory + ((const char *) p - address); }
};

static void sim_buffer_free(ggml_backend_buffer_t buffer) {
    sim_buffer * b = (sim_buffer *) buffer->context;
    // as with real devices, freeing waits for what was submitted
    std::vector<sim_queue *> queues;
    {
        std::lock_guard<std::mutex> lock(b->device->mutex);
        queues = b->device->queues;
        b->device->used -= b->size;
    }
    for (sim_queue * queue : queues) {
        queue->synchronize();
    }
    munmap(b->memory,  std::max<size_t>(b->size, 1));
    munmap(b->address, std::max<size_t>(b->size, 1));
    delete b;
}

static void * sim_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((sim_buffer *) buffer->context)->address;
}

static sim_buffer * sim_buffer_of(const ggml_tensor * tensor);

static void sim_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset(((sim_buffer *) buffer->context)->translate(tensor->data) + offset, value, size);
}

static void sim_count(sim_device * device, bool up, size_t size, uint64_t link_us) {
    std::lock_guard<std::mutex> lock(device->mutex);
    (up ? device->stats.n_up     : device->stats.n_down)     += 1;
    (up ? device->stats.bytes_up : device->stats.bytes_down) += size;
    device->stats.link_us += up ? link_us : 0;
}

static void sim_up(sim_device * device, void * dst, const void * src, size_t size, sim_time ready) {
    const uint64_t link_us = sim_transfer(device->up, dst, src, size, ready);
    sim_count(device, true, size, link_us);
}

static void sim_down(sim_device * device, void * dst, const void * src, size_t size, sim_time ready) {
    sim_transfer(device->down, dst, src, size, ready);
    sim_count(device, false, size, 0);
}

static void sim_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    sim_buffer * b = (sim_buffer *) buffer->context;
    sim_up(b->device, b->translate(tensor->data) + offset, data, size, sim_clock::now());
}

static void sim_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    sim_buffer * b = (sim_buffer *) buffer->context;
    sim_down(b->device, data, b->translate(tensor->data) + offset, size, sim_clock::now());
}

static bool sim_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const sim_buffer * from = sim_buffer_of(src);
    const sim_buffer * to   = (sim_buffer *) buffer->context;
    if (!from) {
        return false;
    }
    memcpy(to->translate(dst->data), from->translate(src->data), ggml_nbytes(src));
    return true;
}

static void sim_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    sim_buffer * b = (sim_buffer *) buffer->context;
    memset(b->memory, value, b->size);
}

static const ggml_backend_buffer_i sim_buffer_i = {
    /* .free_buffer   = */ sim_buffer_free,
    /* .get_base      = */ sim_buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ sim_buffer_memset_tensor,
    /* .set_tensor    = */ sim_buffer_set_tensor,
    /* .get_tensor    = */ sim_buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ sim_buffer_cpy_tensor,
    /* .clear         = */ sim_buffer_clear,
    /* .reset         = */ nullptr,
};

// NULL: not in a device's memory
static sim_buffer * sim_buffer_of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer && buffer->iface.get_base == sim_buffer_get_base ? (sim_buffer *) buffer->context : nullptr;
}

static const char * sim_buft_get_name(ggml_backend_buffer_type_t buft) {
    return ((sim_device *) buft->context)->buft_name.c_str();
}

static ggml_backend_buffer_t sim_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    sim_device * device = (sim_device *) buft->context;
    bool scramble;
    bool fail;
    {
        std::lock_guard<std::mutex> lock(g_sim->mutex);
        fail     = ++g_sim->n_alloc == g_sim->params.fail_alloc;
        scramble = g_sim->params.scramble;
    }
    {
        std::lock_guard<std::mutex> lock(device->mutex);
        if (fail || size > g_sim->params.memory_bytes - device->used) {
            GGML_LOG_ERROR("%s: %zu bytes refused, %zu of %zu in use\n", device->name.c_str(), size, device->used, g_sim->params.memory_bytes);
            return nullptr;
        }
        device->used += size;
    }
    const size_t n = std::max<size_t>(size, 1);
    void * address = mmap(nullptr, n, PROT_NONE,              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void * memory  = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    GGML_ASSERT(address != MAP_FAILED && memory != MAP_FAILED);
    if (scramble) {
        memset(memory, SIM_SCRAMBLE, size);
    }
    return ggml_backend_buffer_init(buft, sim_buffer_i, new sim_buffer { device, (char *) address, (char *) memory, size }, size);
}

static size_t sim_buft_get_alignment(ggml_backend_buffer_type_t) {
    return SIM_ALIGNMENT;
}

static size_t sim_buft_get_max_size(ggml_backend_buffer_type_t) {
    return g_sim->params.max_buffer_bytes > 0 ? g_sim->params.max_buffer_bytes : SIZE_MAX;
}

static const ggml_backend_buffer_type_i sim_buft_i = {
    /* .get_name       = */ sim_buft_get_name,
    /* .alloc_buffer   = */ sim_buft_alloc_buffer,
    /* .get_alignment  = */ sim_buft_get_alignment,
    /* .get_max_size   = */ sim_buft_get_max_size,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ nullptr,
};

// pinned memory: the host's own, but known by its type

static const char * sim_host_buft_get_name(ggml_backend_buffer_type_t) {
    return "SIM_Host";
}

static void sim_host_buffer_free(ggml_backend_buffer_t buffer) {
    if (g_sim->params.scramble) {
        memset(buffer->context, SIM_SCRAMBLE, buffer->size);
    }
    free(buffer->context);
}

static ggml_backend_buffer_t sim_host_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * data = nullptr;
    if (posix_memalign(&data, 4096, std::max<size_t>(size, 1)) != 0) {
        return nullptr;
    }
    if (g_sim->params.scramble) {
        memset(data, SIM_SCRAMBLE, size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(data, size);
    buffer->buft              = buft;
    buffer->iface.free_buffer = sim_host_buffer_free;
    return buffer;
}

static bool sim_host_buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

static const ggml_backend_buffer_type_i sim_host_buft_i = {
    /* .get_name       = */ sim_host_buft_get_name,
    /* .alloc_buffer   = */ sim_host_buft_alloc_buffer,
    /* .get_alignment  = */ sim_buft_get_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ sim_host_buft_is_host,
};

//
// graphs
//

// a copy of a graph whose tensors lie in device memory
struct sim_graph {
    using copies_map = std::unordered_map<const ggml_tensor *, ggml_tensor *>;

    std::deque<ggml_tensor> tensors;
    ggml_context *          ctx   = nullptr;
    ggml_cgraph *           graph = nullptr;

    sim_graph(const sim_device * device, const ggml_cgraph * from) {
        const ggml_init_params params = { ggml_graph_overhead_custom(from->n_nodes + 1, false), nullptr, true };
        ctx   = ggml_init(params);
        graph = ggml_new_graph_custom(ctx, from->n_nodes + 1, false);

        copies_map copies;
        for (int i = 0; i < from->n_nodes; ++i) {
            // the scheduler leaves views of the host's tensors where they stand: nothing to compute
            if (ggml_op_is_empty(from->nodes[i]->op) && !is_on(device, from->nodes[i])) {
                continue;
            }
            check(device, from->nodes[i]);
            ggml_tensor * node = copy(device, from->nodes[i], copies, true);
            graph->nodes[graph->n_nodes++] = node;
            if (from->use_counts) {
                // fusion asks for them
                const size_t slot = ggml_hash_insert(&graph->visited_hash_set, node);
                GGML_ASSERT(slot != GGML_HASHSET_ALREADY_EXISTS);
                graph->use_counts[slot] = ggml_node_get_use_count(from, i);
            }
        }
    }
    sim_graph(const sim_graph &) = delete;
    ~sim_graph() { ggml_free(ctx); }

    static bool is_on(const sim_device * device, const ggml_tensor * tensor) {
        const sim_buffer * buffer = sim_buffer_of(tensor);
        return ggml_nelements(tensor) == 0 || (buffer && buffer->device == device);
    }

    static void check(const sim_device * device, const ggml_tensor * node) {
        bool ok = is_on(device, node);
        for (const ggml_tensor * src : node->src) {
            ok = ok && (!src || is_on(device, src));
        }
        if (!ok && ggml_nelements(node) > 0) {
            GGML_ABORT("%s: %s (%s) or one of its sources is not in the memory of this device", device->name.c_str(), node->name, ggml_op_name(node->op));
        }
    }

    // with_src: a node; of a source only the place counts, not where it came from
    ggml_tensor * copy(const sim_device * device, const ggml_tensor * from, copies_map & copies, bool with_src) {
        const auto it = copies.find(from);
        if (it != copies.end()) {
            return it->second;
        }
        const sim_buffer * buffer = is_on(device, from) ? sim_buffer_of(from) : nullptr;
        tensors.push_back(*from);
        ggml_tensor * to = &tensors.back();
        copies[from] = to;
        to->data     = buffer ? buffer->translate(from->data) : nullptr;
        to->buffer   = nullptr;
        to->extra    = nullptr;
        to->view_src = from->view_src ? copy(device, from->view_src, copies, false) : nullptr;
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            to->src[i] = with_src && from->src[i] ? copy(device, from->src[i], copies, false) : nullptr;
        }
        return to;
    }
};

//
// backend
//

static const char * sim_get_name(ggml_backend_t backend) {
    return ((sim_queue *) backend->context)->name.c_str();
}

static void sim_free(ggml_backend_t backend) {
    delete (sim_queue *) backend->context;
    delete backend;
}

static void sim_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    sim_queue *  queue = (sim_queue *) backend->context;
    sim_buffer * b     = sim_buffer_of(tensor);
    GGML_ASSERT(b && b->device == queue->device);
    char * dst = b->translate(tensor->data) + offset;
    queue->submit([=](sim_time ready) { sim_up(b->device, dst, data, size, ready); return false; });
}

static void sim_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    sim_queue *  queue = (sim_queue *) backend->context;
    sim_buffer * b     = sim_buffer_of(tensor);
    GGML_ASSERT(b && b->device == queue->device);
    const char * src = b->translate(tensor->data) + offset;
    queue->submit([=](sim_time ready) { sim_down(b->device, data, src, size, ready); return false; });
}

static ggml_guid_t sim_guid() {
    static ggml_guid guid = { 0x68, 0x6f, 0x62, 0x62, 0x69, 0x74, 0x2d, 0x73, 0x69, 0x6d, 0x31, 0x9b, 0x4e, 0x07, 0xd2, 0x55 };
    return &guid;
}

static bool sim_is_sim(ggml_backend_t backend) {
    return ggml_guid_matches(ggml_backend_guid(backend), sim_guid());
}

static void sim_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    sim_event * e = (sim_event *) event->context;
    uint64_t    n;
    {
        std::lock_guard<std::mutex> lock(e->mutex);
        n = ++e->recorded;
    }
    ((sim_queue *) backend->context)->submit([=](sim_time) { e->set_done(n); return false; });
}

static void sim_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    sim_event * e = (sim_event *) event->context;
    uint64_t    n;
    {
        std::lock_guard<std::mutex> lock(e->mutex);
        n = e->recorded;
    }
    ((sim_queue *) backend->context)->submit([=](sim_time) { return e->wait(n); });
}

static bool sim_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst, const ggml_tensor * src, ggml_tensor * dst) {
    const sim_buffer * from = sim_buffer_of(src);
    const sim_buffer * to   = sim_buffer_of(dst);
    if (!sim_is_sim(backend_src) || !sim_is_sim(backend_dst) || !from || !to) {
        return false;
    }
    sim_queue *  queue = (sim_queue *) backend_src->context;
    char *       d     = to  ->translate(dst->data);
    const char * s     = from->translate(src->data);
    const size_t size  = ggml_nbytes(src);
    sim_device * peer  = from->device == to->device ? nullptr : to->device;
    queue->submit([=](sim_time ready) {
        if (peer) {
            sim_up(peer, d, s, size, ready);
        } else {
            memcpy(d, s, size);
        }
        return false;
    });
    if (backend_src != backend_dst) {
        auto done = std::make_shared<sim_event>();
        done->recorded = 1;
        queue->submit([=](sim_time) { done->set_done(1); return false; });
        ((sim_queue *) backend_dst->context)->submit([=](sim_time) { return done->wait(1); });
    }
    return true;
}

static void sim_synchronize(ggml_backend_t backend) {
    ((sim_queue *) backend->context)->synchronize();
}

static ggml_status sim_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    sim_queue * queue = (sim_queue *) backend->context;
    auto graph = std::make_shared<sim_graph>(queue->device, cgraph);
    queue->submit([=](sim_time) {
        std::lock_guard<std::mutex> compute(queue->device->compute);
        const sim_time    t0     = sim_clock::now();
        const ggml_status status = ggml_backend_graph_compute(queue->cpu, graph->graph);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
        std::lock_guard<std::mutex> lock(queue->device->mutex);
        queue->device->stats.compute_us += sim_us_since(t0);
        queue->device->stats.n_graphs++;
        return true;
    });
    return GGML_STATUS_SUCCESS;
}

static const ggml_backend_i sim_backend_i = {
    /* .get_name            = */ sim_get_name,
    /* .free                = */ sim_free,
    /* .set_tensor_async    = */ sim_set_tensor_async,
    /* .get_tensor_async    = */ sim_get_tensor_async,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ sim_cpy_tensor_async,
    /* .synchronize         = */ sim_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ sim_graph_compute,
    /* .event_record        = */ sim_event_record,
    /* .event_wait          = */ sim_event_wait,
    /* .graph_optimize      = */ nullptr,
};

//
// device interface
//

static const char * sim_dev_get_name(ggml_backend_dev_t dev) {
    return ((sim_device *) dev->context)->name.c_str();
}

static const char * sim_dev_get_description(ggml_backend_dev_t) {
    return "simulated accelerator";
}

static void sim_dev_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    sim_device * device = (sim_device *) dev->context;
    std::lock_guard<std::mutex> lock(device->mutex);
    *total = g_sim->params.memory_bytes;
    *free  = g_sim->params.memory_bytes - device->used;
}

static enum ggml_backend_dev_type sim_dev_get_type(ggml_backend_dev_t) {
    return g_sim->params.unified ? GGML_BACKEND_DEVICE_TYPE_IGPU : GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void sim_dev_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props = {};
    props->name        = sim_dev_get_name(dev);
    props->description = sim_dev_get_description(dev);
    props->type        = sim_dev_get_type(dev);
    sim_dev_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.async       = g_sim->params.async;
    props->caps.events      = g_sim->params.async;
    props->caps.host_buffer = true;
}

static ggml_backend_t sim_dev_init_backend(ggml_backend_dev_t dev, const char *) {
    return new ggml_backend { sim_guid(), sim_backend_i, dev, new sim_queue((sim_device *) dev->context) };
}

static ggml_backend_buffer_type_t sim_dev_get_buffer_type(ggml_backend_dev_t dev) {
    return &((sim_device *) dev->context)->buft;
}

static ggml_backend_buffer_type_t sim_dev_get_host_buffer_type(ggml_backend_dev_t) {
    return &g_sim->host_buft;
}

// what CUDA takes of a MoE layer: all but the host's custom operations, F32 accumulation of MUL_MAT_ID's second operand, and
// tensors of another device. Where CUDA is narrower than the CPU in other operations this is not.
static bool sim_dev_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const sim_device * device = (const sim_device *) dev->context;
    for (const ggml_tensor * src : op->src) {
        const sim_buffer * b = src ? sim_buffer_of(src) : nullptr;
        if (b && b->device != device) {
            return false;
        }
    }
    switch (op->op) {
        case GGML_OP_CUSTOM:
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
            return false;
        case GGML_OP_MUL_MAT_ID:
            if (ggml_get_op_params_i32(op, 3) == GGML_PREC_F32 || ggml_cpu_experts_of(op->src[0])) {
                return false;
            }
            break;
        default:
            break;
    }
    static ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    return ggml_backend_dev_supports_op(cpu, op);
}

static bool sim_dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &((sim_device *) dev->context)->buft;
}

static bool sim_dev_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    const int64_t n = op->op == GGML_OP_GET_ROWS   ? 0 :
                      op->op == GGML_OP_MUL_MAT    ? op->ne[1] :
                      op->op == GGML_OP_MUL_MAT_ID ? op->ne[2] : ggml_nrows(op);
    return n >= 32;
}

static ggml_backend_event_t sim_dev_event_new(ggml_backend_dev_t dev) {
    return g_sim->params.async ? new ggml_backend_event { dev, new sim_event } : nullptr;
}

static void sim_dev_event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete (sim_event *) event->context;
    delete event;
}

static void sim_dev_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) {
    sim_event * e = (sim_event *) event->context;
    uint64_t    n;
    {
        std::lock_guard<std::mutex> lock(e->mutex);
        n = e->recorded;
    }
    e->wait(n);
}

static const ggml_backend_device_i sim_device_i = {
    /* .get_name             = */ sim_dev_get_name,
    /* .get_description      = */ sim_dev_get_description,
    /* .get_memory           = */ sim_dev_get_memory,
    /* .get_type             = */ sim_dev_get_type,
    /* .get_props            = */ sim_dev_get_props,
    /* .init_backend         = */ sim_dev_init_backend,
    /* .get_buffer_type      = */ sim_dev_get_buffer_type,
    /* .get_host_buffer_type = */ sim_dev_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ sim_dev_supports_op,
    /* .supports_buft        = */ sim_dev_supports_buft,
    /* .offload_op           = */ sim_dev_offload_op,
    /* .event_new            = */ sim_dev_event_new,
    /* .event_free           = */ sim_dev_event_free,
    /* .event_synchronize    = */ sim_dev_event_synchronize,
};

static const char * sim_reg_get_name(ggml_backend_reg_t) {
    return "SIM";
}

static size_t sim_reg_get_device_count(ggml_backend_reg_t) {
    return g_sim->devices.size();
}

static ggml_backend_dev_t sim_reg_get_device(ggml_backend_reg_t, size_t index) {
    return &g_sim->devices[index]->dev;
}

static void sim_set_n_threads(ggml_backend_t backend, int n_threads) {
    sim_queue * queue = (sim_queue *) backend->context;
    // in its turn: a graph under way was submitted with the number before
    queue->submit([=](sim_time) { ggml_backend_cpu_set_n_threads(queue->cpu, n_threads); return false; });
}

static bool sim_mul_mat_id_skip(ggml_backend_dev_t) {
    return g_sim->params.skip; // the CPU's kernels do
}

static void * sim_reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    return strcmp(name, "ggml_backend_set_n_threads")   == 0 ? (void *) sim_set_n_threads   :
           strcmp(name, "ggml_backend_mul_mat_id_skip") == 0 ? (void *) sim_mul_mat_id_skip : nullptr;
}

static const ggml_backend_reg_i sim_reg_i = {
    /* .get_name         = */ sim_reg_get_name,
    /* .get_device_count = */ sim_reg_get_device_count,
    /* .get_device       = */ sim_reg_get_device,
    /* .get_proc_address = */ sim_reg_get_proc_address,
};

//
// C API
//

static double sim_env(const char * name, double value) {
    const char * text = getenv(name);
    return text && text[0] ? atof(text) : value;
}

ggml_sim_params ggml_sim_params_default(void) {
    ggml_sim_params params = {};
    params.n_devices        = (int)      sim_env("HOBBIT_SIM_DEVICES",           1);
    params.memory_bytes     = (size_t)  (sim_env("HOBBIT_SIM_MEMORY_MIB",     1024)*1024*1024);
    params.max_buffer_bytes = (size_t)  (sim_env("HOBBIT_SIM_MAX_BUFFER_MIB",    0)*1024*1024);
    params.bandwidth        =            sim_env("HOBBIT_SIM_BANDWIDTH_MBPS",    0)*1e6;
    params.latency_us       =            sim_env("HOBBIT_SIM_LATENCY_US",        0);
    params.delay_us         =            sim_env("HOBBIT_SIM_DELAY_US",          0);
    params.seed             = (unsigned) sim_env("HOBBIT_SIM_SEED",              1);
    params.scramble         =            sim_env("HOBBIT_SIM_SCRAMBLE",          1) != 0;
    params.fail_alloc       = (int)      sim_env("HOBBIT_SIM_FAIL_ALLOC",        0);
    params.async            =            sim_env("HOBBIT_SIM_ASYNC",             1) != 0;
    params.unified          =            sim_env("HOBBIT_SIM_UNIFIED",           0) != 0;
    params.skip             =            sim_env("HOBBIT_SIM_SKIP",              1) != 0;
    return params;
}

ggml_backend_reg_t ggml_sim_init(const ggml_sim_params * params) {
    GGML_ASSERT(!g_sim && params->n_devices >= 1 && params->n_devices <= GGML_SIM_MAX_DEVICES);
    // lives as long as the process, as other backends' devices do
    g_sim = new sim_global;
    g_sim->params    = *params;
    g_sim->random.seed(params->seed);
    g_sim->reg       = { GGML_BACKEND_API_VERSION, sim_reg_i, nullptr };
    for (int i = 0; i < params->n_devices; ++i) {
        auto device = std::make_unique<sim_device>();
        device->index     = i;
        device->name      = "SIM" + std::to_string(i);
        device->buft_name = device->name;
        device->dev       = { sim_device_i, &g_sim->reg, device.get() };
        device->buft      = { sim_buft_i, &device->dev, device.get() };
        g_sim->devices.push_back(std::move(device));
    }
    g_sim->host_buft = { sim_host_buft_i, &g_sim->devices[0]->dev, nullptr };
    return &g_sim->reg;
}

void ggml_sim_set_link(double bandwidth, double latency_us, double delay_us, unsigned seed) {
    std::lock_guard<std::mutex> lock(g_sim->mutex);
    g_sim->params.bandwidth  = bandwidth;
    g_sim->params.latency_us = latency_us;
    g_sim->params.delay_us   = delay_us;
    g_sim->params.seed       = seed;
    g_sim->random.seed(seed);
}

static void sim_set_held(ggml_backend_t backend, bool held) {
    GGML_ASSERT(sim_is_sim(backend));
    sim_queue * queue = (sim_queue *) backend->context;
    {
        std::lock_guard<std::mutex> lock(queue->mutex);
        queue->held = held;
    }
    queue->cv_work.notify_all();
}

void ggml_sim_hold(ggml_backend_t backend) {
    sim_set_held(backend, true);
}

void ggml_sim_release(ggml_backend_t backend) {
    sim_set_held(backend, false);
}

void ggml_sim_get_stats(int device, ggml_sim_stats * stats) {
    std::lock_guard<std::mutex> lock(g_sim->devices[device]->mutex);
    *stats = g_sim->devices[device]->stats;
}

void ggml_sim_reset_stats(int device) {
    std::lock_guard<std::mutex> lock(g_sim->devices[device]->mutex);
    g_sim->devices[device]->stats = {};
}

size_t ggml_sim_memory_used(int device) {
    std::lock_guard<std::mutex> lock(g_sim->devices[device]->mutex);
    return g_sim->devices[device]->used;
}
