// Tiny MoE files for the engine's tests: routers and experts with known contents, written with ggml's own GGUF functions.

#pragma once

#include "ggml.h"
#include "gguf.h"
#include "store.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <unistd.h>

struct moe_file {
    std::string arch     = "qwen3moe";
    int         n_layer  = 2;
    int         n_expert = 4;
    int64_t     n_embd   = 32;
    int64_t     n_ff     = 64;
    ggml_type   type     = GGML_TYPE_F32; // of the experts
    float       router   = 1.0f;          // scales the routers: another value, another model
    int         skip     = -1;            // leave out this layer's down weight
    std::string pair_id;
    bool        routers  = true;
    bool        norms    = false;
    float       scale    = 0.0f;          // != 0: a factor per expert beside the up weights
    int         split_no = -1;            // >= 0: only the layers i with i % split_count == split_no, with split keys
    int         split_count = 0;

    // the value that every weight of an expert holds
    static float value(int layer, int role, int expert) { return (float) (layer * 100 + role * 10 + expert); }

    static float norm(int layer, int i) { return 0.5f + 0.1f * (float) ((layer * 5 + i * 3) % 11); }
    float router_value(int layer, int64_t i) const { return router * (float) ((i * 31 + layer * 17) % 23 - 11); }

    void write(const std::string & path) const {
        ggml_init_params params = { 64u << 20, nullptr, false };
        ggml_context *   ctx    = ggml_init(params);
        gguf_context *   gguf   = gguf_init_empty();
        gguf_set_val_str(gguf, "general.architecture", arch.c_str());
        if (!pair_id.empty()) {
            gguf_set_val_str(gguf, "hobbit.pair.id", pair_id.c_str());
        }
        if (split_no >= 0) {
            gguf_set_val_u16(gguf, "split.no", (uint16_t) split_no);
            gguf_set_val_u16(gguf, "split.count", (uint16_t) split_count);
        }
        static const char * names[] = { "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps" };
        for (int layer = 0; layer < n_layer; ++layer) {
            if (split_no >= 0 && layer % split_count != split_no) {
                continue;
            }
            if (routers) {
                ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_expert);
                ggml_format_name(t, "blk.%d.ffn_gate_inp.weight", layer);
                for (int64_t i = 0; i < n_embd * n_expert; ++i) {
                    ((float *) t->data)[i] = router_value(layer, i);
                }
                gguf_add_tensor(gguf, t);
            }
            if (norms) {
                ggml_tensor * t = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_embd);
                ggml_format_name(t, "blk.%d.ffn_norm.weight", layer);
                for (int64_t i = 0; i < n_embd; ++i) {
                    ((float *) t->data)[i] = norm(layer, (int) i);
                }
                gguf_add_tensor(gguf, t);
            }
            if (scale != 0.0f) {
                ggml_tensor * t = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_expert);
                ggml_format_name(t, "blk.%d.ffn_up_exps.scale", layer);
                for (int e = 0; e < n_expert; ++e) {
                    ((float *) t->data)[e] = scale * (float) (e + 1);
                }
                gguf_add_tensor(gguf, t);
            }
            for (int role = 0; role < 3; ++role) {
                if (role == HOBBIT_ROLE_DOWN && layer == skip) {
                    continue;
                }
                const int64_t ne0 = role == HOBBIT_ROLE_DOWN ? n_ff : n_embd;
                const int64_t ne1 = role == HOBBIT_ROLE_DOWN ? n_embd : n_ff;
                ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, n_expert);
                ggml_format_name(t, "blk.%d.%s.weight", layer, names[role]);
                for (int e = 0; e < n_expert; ++e) {
                    std::vector<float> rows(ne0 * ne1, value(layer, role, e));
                    ggml_quantize_chunk(type, rows.data(), (char *) t->data + e * t->nb[2], 0, ne1, ne0, nullptr);
                }
                gguf_add_tensor(gguf, t);
            }
        }
        if (!gguf_write_to_file(gguf, path.c_str(), false)) {
            abort();
        }
        gguf_free(gguf);
        ggml_free(ctx);
    }
};

// registers every tensor of a file with the store, as llama.cpp's loader does
static inline void show_all_tensors(hobbit_store & store, const std::string & path, int fd) {
    ggml_context *   ctx    = nullptr;
    gguf_init_params params = { true, &ctx };
    gguf_context *   gguf   = gguf_init_from_file(path.c_str(), params);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        store.add_tensor(ggml_get_tensor(ctx, gguf_get_tensor_name(gguf, i)), fd, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i));
    }
    store.arch = hobbit_gguf_str(gguf, "general.architecture");
    gguf_free(gguf);
    ggml_free(ctx);
}

// a folder of our own, removed at the end
struct temp_dir {
    std::string path;

    temp_dir() {
        char name[] = "/tmp/hobbit-test-XXXXXX";
        path = mkdtemp(name);
    }
    ~temp_dir() { (void) !system(("rm -rf '" + path + "'").c_str()); }
    std::string operator/(const char * name) const { return path + "/" + name; }
};
