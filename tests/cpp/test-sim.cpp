// ggml-sim: a device whose memory is its own, whose queues run by themselves, and on which a missing synchronisation shows

#include "check.h"

#include "ggml-sim.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

static constexpr int64_t N = 64;

static ggml_backend_dev_t dev0;
static ggml_backend_dev_t dev1;

// x [N, N] and y = x * x in memory of a device
struct square {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           graph;
    ggml_tensor *           x;
    ggml_tensor *           y;

    explicit square(ggml_backend_buffer_type_t buft) {
        ctx.reset(ggml_init({ ggml_tensor_overhead()*8 + ggml_graph_overhead(), nullptr, true }));
        x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N, N);
        y = ggml_mul_mat(ctx.get(), x, x);
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, y);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    }
    std::vector<float> get(const ggml_tensor * t) const {
        std::vector<float> out(N*N);
        ggml_backend_tensor_get(t, out.data(), 0, ggml_nbytes(t));
        return out;
    }
};

static std::vector<float> values() {
    std::vector<float> v(N*N);
    for (size_t i = 0; i < v.size(); ++i) {
        v[i] = sinf(0.1f*i);
    }
    return v;
}

static std::vector<float> reference() {
    square s(ggml_backend_cpu_buffer_type());
    const std::vector<float> v = values();
    ggml_backend_tensor_set(s.x, v.data(), 0, ggml_nbytes(s.x));
    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(cpu.get(), 2);
    ggml_backend_graph_compute(cpu.get(), s.graph);
    return s.get(s.y);
}

static bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

static ggml_backend_ptr queue_on(ggml_backend_dev_t dev) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
    set_n_threads(backend.get(), 2);
    return backend;
}

static void the_host_cannot_touch_device_memory() {
    square s(ggml_backend_dev_buffer_type(dev0));
    CHECK(!ggml_backend_buffer_is_host(s.buffer.get()));
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        fclose(stderr); // a sanitizer would report what is meant to happen
        _exit(*(volatile char *) s.x->data == 0 ? 0 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
}

static void a_graph_gives_the_bits_of_the_cpu() {
    square s(ggml_backend_dev_buffer_type(dev0));
    const auto queue = queue_on(dev0);
    const std::vector<float> v = values();
    ggml_backend_tensor_set_async(queue.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
    ggml_backend_graph_compute_async(queue.get(), s.graph);
    std::vector<float> out(N*N);
    ggml_backend_tensor_get_async(queue.get(), s.y, out.data(), 0, ggml_nbytes(s.y));
    ggml_backend_synchronize(queue.get());
    CHECK(same(out, reference()));
}

// one queue copies, the other computes; the copy comes late because it waits for what the event stands for
static std::vector<float> copy_here_compute_there(bool wait) {
    square s(ggml_backend_dev_buffer_type(dev0));
    const auto copies   = queue_on(dev0);
    const auto computes = queue_on(dev0);
    const std::vector<float> v = values();
    ggml_backend_event_ptr late(ggml_backend_event_new(dev0));
    ggml_backend_event_ptr done(ggml_backend_event_new(dev0));

    if (wait) {
        ggml_backend_event_record(late.get(), computes.get());
        ggml_backend_event_wait(copies.get(), late.get());
        ggml_backend_tensor_set_async(copies.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
        ggml_backend_event_record(done.get(), copies.get());
        ggml_backend_event_wait(computes.get(), done.get());
        ggml_backend_graph_compute_async(computes.get(), s.graph);
    } else {
        ggml_backend_graph_compute_async(computes.get(), s.graph);
        ggml_backend_event_record(late.get(), computes.get());
        ggml_backend_event_wait(copies.get(), late.get());
        ggml_backend_tensor_set_async(copies.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
    }
    ggml_backend_synchronize(copies.get());
    ggml_backend_synchronize(computes.get());
    return s.get(s.y);
}

static void a_missing_wait_for_another_queue_shows() {
    CHECK(same(copy_here_compute_there(true), reference()));
    const std::vector<float> wrong = copy_here_compute_there(false);
    for (float f : wrong) {
        CHECK(std::isnan(f));
    }
}

static void blocking_copies_do_not_wait_for_a_queue() {
    square s(ggml_backend_dev_buffer_type(dev0));
    const auto queue = queue_on(dev0);
    const auto other = queue_on(dev0);
    const std::vector<float> v = values();

    // the queue is held by an event that another queue records only after the host has read
    ggml_backend_event_ptr held(ggml_backend_event_new(dev0));
    ggml_sim_hold(other.get());
    ggml_backend_event_record(held.get(), other.get());
    ggml_backend_event_wait(queue.get(), held.get());
    ggml_backend_tensor_set_async(queue.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
    CHECK(std::isnan(s.get(s.x)[0]));
    ggml_sim_release(other.get());
    ggml_backend_synchronize(queue.get());
    CHECK(same(s.get(s.x), v));
}

static void a_source_that_changes_too_early_shows() {
    square s(ggml_backend_dev_buffer_type(dev0));
    const auto queue = queue_on(dev0);
    std::vector<float> v = values();
    ggml_sim_hold(queue.get());
    ggml_backend_tensor_set_async(queue.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
    std::fill(v.begin(), v.end(), 7.0f);
    ggml_sim_release(queue.get());
    ggml_backend_synchronize(queue.get());
    CHECK(s.get(s.x)[1] == 7.0f);
}

static void devices_hand_over_what_is_finished() {
    square a(ggml_backend_dev_buffer_type(dev0));
    square b(ggml_backend_dev_buffer_type(dev1));
    const auto q0 = queue_on(dev0);
    const auto q1 = queue_on(dev1);
    const std::vector<float> v = values();
    ggml_backend_tensor_set_async(q0.get(), a.x, v.data(), 0, ggml_nbytes(a.x));
    ggml_backend_tensor_copy_async(q0.get(), q1.get(), a.x, b.x);
    ggml_backend_graph_compute_async(q1.get(), b.graph);
    ggml_backend_synchronize(q1.get());
    CHECK(same(b.get(b.y), reference()));
    CHECK(!ggml_backend_dev_supports_op(dev0, b.y) && ggml_backend_dev_supports_op(dev1, b.y));
}

static void memory_has_an_end_and_comes_back_scrambled() {
    const size_t before = ggml_sim_memory_used(0);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev0);
    ggml_backend_buffer_ptr most(ggml_backend_buft_alloc_buffer(buft, (16 << 20) - before));
    CHECK(most && !ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(buft, 1)));
    size_t free, total;
    ggml_backend_dev_memory(dev0, &free, &total);
    CHECK(free == 0 && total == 16 << 20);
    most.reset();
    CHECK(ggml_sim_memory_used(0) == before);

    square s(buft);
    CHECK(std::isnan(s.get(s.x)[0]) && std::isnan(s.get(s.y)[N*N - 1]));
}

static void the_link_is_counted() {
    square s(ggml_backend_dev_buffer_type(dev0));
    const auto queue = queue_on(dev0);
    const std::vector<float> v = values();
    ggml_sim_set_link(1e9, 100.0, 0.0, 1);
    ggml_sim_reset_stats(0);
    for (int i = 0; i < 3; ++i) {
        ggml_backend_tensor_set_async(queue.get(), s.x, v.data(), 0, ggml_nbytes(s.x));
    }
    ggml_backend_synchronize(queue.get());
    s.get(s.x);
    ggml_sim_stats stats;
    ggml_sim_get_stats(0, &stats);
    CHECK(stats.n_up == 3 && stats.bytes_up == 3*sizeof(float)*N*N);
    CHECK(stats.n_down == 1 && stats.bytes_down == sizeof(float)*N*N);
    CHECK(stats.link_us == 3*(100 + 16));
    ggml_sim_set_link(0.0, 0.0, 0.0, 1);
}

static void custom_operations_stay_on_the_host() {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead()*8, nullptr, true }));
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N, N);
    CHECK( ggml_backend_dev_supports_op(dev0, ggml_scale(ctx.get(), x, 2.0f)));
    CHECK(!ggml_backend_dev_supports_op(dev0, ggml_custom_4d(ctx.get(), GGML_TYPE_F32, 1, 1, 1, 1, &x, 1, [](ggml_tensor *, int, int, void *) {}, 1, nullptr)));
}

int main() {
    ggml_sim_params params = ggml_sim_params_default();
    params.n_devices    = 2;
    params.memory_bytes = 16 << 20;
    params.scramble     = true;
    params.fail_alloc   = 1;
    params.async        = true;
    ggml_backend_reg_t reg = ggml_sim_init(&params);
    dev0 = ggml_backend_reg_dev_get(reg, 0);
    dev1 = ggml_backend_reg_dev_get(reg, 1);
    CHECK(!ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev0), 64)));

    the_host_cannot_touch_device_memory();
    a_graph_gives_the_bits_of_the_cpu();
    a_missing_wait_for_another_queue_shows();
    blocking_copies_do_not_wait_for_a_queue();
    a_source_that_changes_too_early_shows();
    devices_hand_over_what_is_finished();
    memory_has_an_end_and_comes_back_scrambled();
    the_link_is_counted();
    custom_operations_stay_on_the_host();
    return check_result("sim");
}
