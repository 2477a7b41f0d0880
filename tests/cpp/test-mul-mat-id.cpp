// MUL_MAT_ID with negative ids (patch 0008): the other rows have the bits they would have had, rows of negative ids are
// zero, or untouched in ggml_mul_mat_id_into. The result's memory is filled with NaN first, so that a row that nobody
// writes shows.
//
//     test-mul-mat-id            the CPU: plain, repacked, and with an address per expert (patch 0001)
//     test-mul-mat-id DEVICE     a device by its ggml name, such as CUDA0
//
// On the CPU the reference is one MUL_MAT a row and, since a tiled kernel takes over at eight rows of an expert, one
// MUL_MAT_ID without negative ids over all rows of an expert. On a device it is the operation before ids were made
// negative: the same bits for batches that go through matrix-vector kernels, nearly the same above.

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

static const int64_t N_EMBD = 256;
static const int64_t N_ROWS = 48;

static std::mt19937 rng(1);

static std::vector<float> random_floats(size_t n) {
    std::vector<float> values(n);
    for (float & v : values) {
        v = (float) ((int) (rng() % 2001) - 1000) / 1000.0f;
    }
    return values;
}

struct weight {
    ggml_type            type;
    int                  n_expert;
    std::vector<uint8_t> data; // [n_expert][N_ROWS] rows of N_EMBD

    weight(ggml_type type, int n_expert) : type(type), n_expert(n_expert), data(ggml_row_size(type, N_EMBD)*N_ROWS*n_expert) {
        const std::vector<float> values = random_floats(N_EMBD*N_ROWS*n_expert);
        ggml_quantize_chunk(type, values.data(), data.data(), 0, N_ROWS*n_expert, N_EMBD, nullptr);
    }
    size_t expert_size() const { return data.size()/n_expert; }
};

// tensors of one graph; weights in a buffer of their own, everything else in one that is NaN before the inputs are set
struct graph {
    ggml_context_ptr        ctx;
    ggml_context_ptr        ctx_weights;
    ggml_backend_buffer_ptr buffer;
    ggml_backend_buffer_ptr buffer_weights;

    std::vector<std::pair<ggml_tensor *, const weight *>> weights;

    graph() {
        ggml_init_params params = { ggml_tensor_overhead()*64 + 3*ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
        ctx_weights.reset(ggml_init(params));
    }

    ggml_tensor * add_weight(const weight & w) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx_weights.get(), w.type, N_EMBD, N_ROWS, w.n_expert);
        weights.emplace_back(t, &w);
        return t;
    }

    void alloc(ggml_backend_t backend, ggml_backend_buffer_type_t buft_weights) {
        buffer_weights.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_weights.get(), buft_weights));
        ggml_backend_buffer_set_usage(buffer_weights.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (const auto & w : weights) {
            ggml_backend_tensor_set(w.first, w.second->data.data(), 0, w.second->data.size());
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        ggml_backend_buffer_clear(buffer.get(), 0xff);
    }

    std::vector<float> compute(ggml_backend_t backend, ggml_tensor * out) {
        ggml_cgraph * gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, out);
        return compute(backend, out, gf);
    }

    static std::vector<float> compute(ggml_backend_t backend, ggml_tensor * out, ggml_cgraph * gf) {
        CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);
        std::vector<float> result(ggml_nelements(out));
        ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
        return result;
    }
};

struct shape {
    int  n_expert;
    int  n_used;
    int  n_tokens;
    bool broadcast; // one input row for all experts of a token

    int n_ids()   const { return n_used*n_tokens; }
    int n_input() const { return broadcast ? n_tokens : n_ids(); }
    int input_of(int i) const { return broadcast ? i/n_used : i; } // of the i-th id
};

// distinct experts for each token
static std::vector<int32_t> random_ids(const shape & s) {
    std::vector<int32_t> ids;
    for (int i = 0; i < s.n_tokens; ++i) {
        std::vector<int32_t> experts(s.n_expert);
        for (int e = 0; e < s.n_expert; ++e) {
            experts[e] = e;
        }
        std::shuffle(experts.begin(), experts.end(), rng);
        ids.insert(ids.end(), experts.begin(), experts.begin() + s.n_used);
    }
    return ids;
}

enum ids_kind { IDS_ALL, IDS_SOME, IDS_NONE };

// ids of a first pass and a second one, each row in one of them or in none
static void split_ids(const std::vector<int32_t> & ids, ids_kind kind, std::vector<int32_t> & first, std::vector<int32_t> & second) {
    first.assign(ids.size(), -1);
    second.assign(ids.size(), -1);
    for (size_t i = 0; i < ids.size(); ++i) {
        const int pass = kind == IDS_ALL ? 0 : kind == IDS_SOME ? (int) (rng() % 3) : 2;
        if (pass < 2) {
            (pass == 0 ? first : second)[i] = ids[i];
        }
    }
}

// rows of the result, i-th id by i-th id, from operations that see no negative id; NULL where an id is negative
static std::vector<std::vector<float>> reference_rows(
        ggml_backend_t backend, ggml_backend_buffer_type_t buft, bool plain, const weight & w, const shape & s,
        const std::vector<float> & input, const std::vector<int32_t> & ids) {
    std::vector<std::vector<float>> rows(ids.size());
    for (int e = 0; e < w.n_expert; ++e) {
        std::vector<int> mine;
        std::vector<float> x;
        for (int i = 0; i < (int) ids.size(); ++i) {
            if (ids[i] == e) {
                mine.push_back(i);
                x.insert(x.end(), input.begin() + s.input_of(i)*N_EMBD, input.begin() + (s.input_of(i) + 1)*N_EMBD);
            }
        }
        if (mine.empty()) {
            continue;
        }
        const int n = (int) mine.size();

        graph         g;
        ggml_tensor * as  = g.add_weight(w);
        ggml_tensor * cur = ggml_new_tensor_3d(g.ctx.get(), GGML_TYPE_F32, N_EMBD, 1, n);
        ggml_tensor * id  = ggml_new_tensor_2d(g.ctx.get(), GGML_TYPE_I32, 1, n);
        ggml_tensor * out = ggml_mul_mat_id(g.ctx.get(), as, cur, id);
        g.alloc(backend, buft);
        ggml_backend_tensor_set(cur, x.data(), 0, x.size()*sizeof(float));
        const std::vector<int32_t> same(n, e);
        ggml_backend_tensor_set(id, same.data(), 0, n*sizeof(int32_t));
        const std::vector<float> result = g.compute(backend, out);

        for (int j = 0; j < n; ++j) {
            rows[mine[j]].assign(result.begin() + j*N_ROWS, result.begin() + (j + 1)*N_ROWS);
        }

        // the tiled kernel sums in another order
        for (int j = 0; j < n && plain && n < 8; ++j) {
            graph         g1;
            ggml_tensor * as1  = g1.add_weight(w);
            ggml_tensor * cur1 = ggml_new_tensor_1d(g1.ctx.get(), GGML_TYPE_F32, N_EMBD);
            ggml_tensor * one  = ggml_view_2d(g1.ctx.get(), as1, N_EMBD, N_ROWS, as1->nb[1], e*as1->nb[2]);
            ggml_tensor * out1 = ggml_mul_mat(g1.ctx.get(), one, cur1);
            g1.alloc(backend, buft);
            ggml_backend_tensor_set(cur1, x.data() + j*N_EMBD, 0, N_EMBD*sizeof(float));
            CHECK(g1.compute(backend, out1) == rows[mine[j]]);
        }
    }
    return rows;
}

// two passes, the second one into the result of the first
struct two_passes {
    graph         g;
    ggml_tensor * as1;
    ggml_tensor * as2;
    ggml_tensor * cur;
    ggml_tensor * ids1;
    ggml_tensor * ids2;
    ggml_tensor * out1;
    ggml_tensor * out2;

    two_passes(const weight & w1, const weight & w2, const shape & s) {
        ggml_context * ctx = g.ctx.get();
        as1  = g.add_weight(w1);
        as2  = g.add_weight(w2);
        cur  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_EMBD, s.broadcast ? 1 : s.n_used, s.n_tokens);
        // as top-k leaves them: a row of ids is a part of a longer one
        ids1 = ggml_view_2d(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.n_expert, s.n_tokens), s.n_used, s.n_tokens, s.n_expert*sizeof(int32_t), 0);
        ids2 = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.n_used, s.n_tokens);
        out1 = ggml_mul_mat_id(ctx, as1, cur, ids1);
        out2 = ggml_mul_mat_id_into(ctx, as2, cur, ids2, out1);
    }

    void set(const shape & s, const std::vector<float> & input, const std::vector<int32_t> & first, const std::vector<int32_t> & second) {
        ggml_backend_tensor_set(cur, input.data(), 0, input.size()*sizeof(float));
        for (int i = 0; i < s.n_tokens; ++i) {
            ggml_backend_tensor_set(ids1, first.data() + i*s.n_used, i*ids1->nb[1], s.n_used*sizeof(int32_t));
        }
        ggml_backend_tensor_set(ids2, second.data(), 0, second.size()*sizeof(int32_t));
    }
};

static bool row_is(const std::vector<float> & result, int i, const std::vector<float> & row) {
    return memcmp(result.data() + i*N_ROWS, row.data(), N_ROWS*sizeof(float)) == 0;
}

static const std::vector<float> ZEROS(N_ROWS, 0.0f);

static bool check_cpu(ggml_backend_t backend, ggml_backend_buffer_type_t buft, const weight & w1, const weight & w2, const shape & s, ids_kind kind) {
    std::vector<int32_t> first, second;
    split_ids(random_ids(s), kind, first, second);
    const std::vector<float> input = random_floats(N_EMBD*s.n_input());

    two_passes p(w1, w2, s);
    if (buft != ggml_backend_cpu_buffer_type()) {
        // a repacked weight is known by its buffer
        p.as1->buffer = p.as2->buffer = ggml_backend_buft_alloc_buffer(buft, 0);
        const bool supported = ggml_backend_supports_op(backend, p.out1) && ggml_backend_supports_op(backend, p.out2);
        ggml_backend_buffer_free(p.as1->buffer);
        p.as1->buffer = p.as2->buffer = nullptr;
        if (!supported) {
            return false;
        }
    }
    p.g.alloc(backend, buft);
    p.set(s, input, first, second);

    const bool plain = buft == ggml_backend_cpu_buffer_type();
    const auto rows1 = reference_rows(backend, buft, plain, w1, s, input, first);
    const auto rows2 = reference_rows(backend, buft, plain, w2, s, input, second);

    const std::vector<float> only_first = p.g.compute(backend, p.out1);
    const std::vector<float> both       = p.g.compute(backend, p.out2);
    for (int i = 0; i < s.n_ids(); ++i) {
        CHECK(row_is(only_first, i, first[i]  < 0 ? ZEROS : rows1[i]));
        CHECK(row_is(both,       i, second[i] >= 0 ? rows2[i] : first[i] >= 0 ? rows1[i] : ZEROS));
    }
    return true;
}

// experts with an address and a type each: w[0] for even experts, w[1] for odd ones
struct split_experts {
    ggml_cpu_experts experts = {}; // first: what a callback is given
    const weight *   w[2];
    int              n_listed;

    split_experts(const weight & even, const weight & odd) : w{ &even, &odd } {
        experts.magic    = GGML_CPU_EXPERTS_MAGIC;
        experts.types[0] = even.type;
        experts.types[1] = odd.type;
        experts.uses     = [](const ggml_cpu_experts *, const ggml_tensor *, int) { return true; };
        experts.begin    = [](const ggml_cpu_experts * self, const ggml_tensor *, int, ggml_cpu_expert * list) {
            const int n = of(self).w[0]->n_expert;
            for (int i = 0; i < n; ++i) {
                list[i] = { n - 1 - i, (n - 1 - i) % 2 };
            }
            return n;
        };
        experts.acquire  = [](const ggml_cpu_experts * self, const ggml_tensor *, int i, int) {
            const int e = of(self).w[0]->n_expert - 1 - i;
            return (const void *) (of(self).w[e % 2]->data.data() + e*of(self).w[e % 2]->expert_size());
        };
        experts.release  = [](const ggml_cpu_experts *, const ggml_tensor *, int) {};
    }
    static const split_experts & of(const ggml_cpu_experts * self) { return *(const split_experts *) self; }
};

static void check_cpu_experts(ggml_backend_t backend, const weight & w1, const weight & w2, const shape & s, ids_kind kind) {
    std::vector<int32_t> first, second;
    split_ids(random_ids(s), kind, first, second);
    const std::vector<float> input = random_floats(N_EMBD*s.n_input());

    split_experts x(w1, w2);
    two_passes    p(w1, w1, s);
    p.g.alloc(backend, ggml_backend_cpu_buffer_type());
    p.set(s, input, first, second);
    p.as1->extra = p.as2->extra = &x.experts;

    std::vector<float> results[2] = { p.g.compute(backend, p.out1), p.g.compute(backend, p.out2) };
    for (int pass = 0; pass < 2; ++pass) {
        const std::vector<int32_t> & ids = pass == 0 ? first : second;
        for (int i = 0; i < s.n_ids(); ++i) {
            if (first[i] < 0 && second[i] < 0) {
                CHECK(row_is(results[pass], i, ZEROS));
            }
        }
        for (int t = 0; t < 2; ++t) {
            std::vector<int32_t> of_type = ids;
            for (int32_t & id : of_type) {
                id = id % 2 == t ? id : -1;
            }
            const auto rows = reference_rows(backend, ggml_backend_cpu_buffer_type(), true, t == 0 ? w1 : w2, s, input, of_type);
            for (int i = 0; i < s.n_ids(); ++i) {
                if (of_type[i] >= 0) {
                    CHECK(row_is(results[1], i, rows[i]));
                    CHECK(pass == 1 || row_is(results[0], i, rows[i]));
                }
            }
        }
    }
}

static const ggml_type TYPES[][2] = {
    { GGML_TYPE_F16,  GGML_TYPE_Q4_0  }, { GGML_TYPE_Q8_0, GGML_TYPE_Q2_K  }, { GGML_TYPE_Q4_K, GGML_TYPE_Q4_K },
    { GGML_TYPE_BF16, GGML_TYPE_MXFP4 }, { GGML_TYPE_F32,  GGML_TYPE_Q8_0  }, { GGML_TYPE_Q6_K, GGML_TYPE_F16  },
};

static void test_cpu() {
    ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_dev_t device = ggml_backend_get_device(backend.get());
    CHECK(ggml_backend_dev_mul_mat_id_skip(device));

    std::vector<ggml_backend_buffer_type_t> bufts = { ggml_backend_cpu_buffer_type() };
    auto get_extra = (ggml_backend_dev_get_extra_bufts_t)
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * extra = get_extra ? get_extra(device) : nullptr; extra && *extra; ++extra) {
        bufts.push_back(*extra);
    }

    for (const auto & types : TYPES) {
        const weight w1(types[0], 8);
        const weight w2(types[1], 8);
        for (int n_threads : { 1, 3 }) {
            ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
            for (int n_tokens : { 1, 2, 7, 16, 33, 64 }) {
                for (int n_used : { 2, 5, 8 }) {
                    for (ids_kind kind : { IDS_ALL, IDS_SOME, IDS_NONE }) {
                        const shape s = { 8, n_used, n_tokens, (n_tokens + n_used) % 2 == 0 };
                        for (ggml_backend_buffer_type_t buft : bufts) {
                            const bool done = check_cpu(backend.get(), buft, w1, w2, s, kind);
                            CHECK(done || buft != ggml_backend_cpu_buffer_type());
                        }
                        check_cpu_experts(backend.get(), w1, w2, s, kind);
                    }
                }
            }
        }
    }

    int n_repacked = 0;
    for (ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_Q2_K, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4, GGML_TYPE_IQ4_NL }) {
        const weight w1(type, 8);
        const weight w2(type, 8);
        for (size_t i = 1; i < bufts.size(); ++i) {
            for (int n_tokens : { 1, 9 }) {
                for (ids_kind kind : { IDS_ALL, IDS_SOME, IDS_NONE }) {
                    n_repacked += check_cpu(backend.get(), bufts[i], w1, w2, { 8, 5, n_tokens, n_tokens == 1 }, kind);
                }
            }
        }
    }
    printf("repacked weights: %d checks\n", n_repacked);
}

// for a device: as before ids were made negative, several runs of one graph (backends record and replay graphs)
static void check_device(ggml_backend_t backend, const weight & w1, const weight & w2, const shape & s, ids_kind kind) {
    ggml_backend_buffer_type_t buft = ggml_backend_get_default_buffer_type(backend);

    two_passes    p(w1, w2, s);
    ggml_tensor * as_up = p.g.add_weight(w1);
    ggml_tensor * up    = ggml_mul_mat_id(p.g.ctx.get(), as_up, p.cur, p.ids1);
    ggml_tensor * gate  = ggml_mul_mat_id(p.g.ctx.get(), p.as1, p.cur, p.ids1);
    ggml_tensor * glu   = ggml_swiglu_split(p.g.ctx.get(), gate, up);
    CHECK(ggml_backend_supports_op(backend, p.out1) && ggml_backend_supports_op(backend, p.out2));
    p.g.alloc(backend, buft);

    ggml_cgraph * gf_passes = ggml_new_graph(p.g.ctx.get());
    ggml_build_forward_expand(gf_passes, p.out2);
    ggml_init_params params = { ggml_graph_overhead(), nullptr, true };
    ggml_context_ptr ctx_glu(ggml_init(params));
    ggml_cgraph * gf_glu = ggml_new_graph(ctx_glu.get());
    ggml_build_forward_expand(gf_glu, glu);

    for (int run = 0; run < 4; ++run) {
        const std::vector<int32_t> ids = random_ids(s);
        const std::vector<int32_t> off(ids.size(), -1);
        const std::vector<float>   input = random_floats(N_EMBD*s.n_input());

        p.set(s, input, ids, off);
        const std::vector<float> ref1    = graph::compute(backend, p.out2, gf_passes);
        const std::vector<float> ref_glu = graph::compute(backend, glu, gf_glu);
        p.set(s, input, off, ids);
        const std::vector<float> ref2 = graph::compute(backend, p.out2, gf_passes);

        std::vector<int32_t> first, second;
        split_ids(ids, kind, first, second);
        p.set(s, input, first, second);
        const std::vector<float> result     = graph::compute(backend, p.out2, gf_passes);
        const std::vector<float> result_glu = graph::compute(backend, glu, gf_glu);

        auto near_row = [&](const std::vector<float> & got, int i, const std::vector<float> & want) {
            if (s.n_tokens <= 4) {
                return memcmp(got.data() + i*N_ROWS, want.data() + i*N_ROWS, N_ROWS*sizeof(float)) == 0;
            }
            double err = 0.0, sum = 0.0;
            for (int64_t j = i*N_ROWS; j < (i + 1)*N_ROWS; ++j) {
                err += (got[j] - want[j])*(got[j] - want[j]);
                sum += want[j]*want[j];
            }
            return err <= 1e-7*sum; // not for NaN
        };
        for (int i = 0; i < s.n_ids(); ++i) {
            CHECK(first[i] >= 0 ? near_row(result, i, ref1) : second[i] >= 0 ? near_row(result, i, ref2) : row_is(result, i, ZEROS));
            CHECK(first[i] >= 0 ? near_row(result_glu, i, ref_glu) : row_is(result_glu, i, ZEROS));
        }
    }
}

static void test_device(const char * name) {
    ggml_backend_ptr backend(ggml_backend_init_by_name(name, nullptr));
    if (!backend) {
        fprintf(stderr, "no device %s\n", name);
        exit(EXIT_FAILURE);
    }
    CHECK(ggml_backend_dev_mul_mat_id_skip(ggml_backend_get_device(backend.get())));
    for (const auto & types : TYPES) {
        const weight w1(types[0], 16);
        const weight w2(types[1], 16);
        for (int n_tokens : { 1, 2, 4, 8, 16, 17, 33, 64, 128 }) {
            for (int n_used : { 2, 5, 8, 12 }) {
                for (bool broadcast : { false, true }) {
                    for (ids_kind kind : { IDS_ALL, IDS_SOME, IDS_NONE }) {
                        check_device(backend.get(), w1, w2, { 16, n_used, n_tokens, broadcast }, kind);
                    }
                }
            }
        }
    }
}

int main(int argc, char ** argv) {
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);
    ggml_backend_load_all();
    if (argc > 1) {
        test_device(argv[1]);
        return check_result(argv[1]);
    }
    test_cpu();
    return check_result("mul-mat-id");
}
